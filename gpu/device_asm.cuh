/*
 * The instructions that C++ has no words for, each in a small function: byte permutes, fast exponentials,
 * matrix products, bulk copies and their barriers, programmatic dependent launch. Tests without a GPU bring
 * the same functions in plain C++ (tests/gpu/host), with a fiber for each thread.
 */
#ifndef GPU_DEVICE_ASM_CUH
#define GPU_DEVICE_ASM_CUH

#include <stdint.h>

#ifdef __CUDACC__

/* Shared memory whose size the launch says. */
#define KVG_DYNAMIC_SHARED(name, alignment)    \
	extern __shared__ __align__(alignment) \
	uint8_t name[]

namespace tiles
{

/* ---- numbers ---- */

static __device__ __forceinline__ uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector)
{
	uint32_t out;

	asm("prmt.b32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(selector));
	return out;
}

static __device__ __forceinline__ float exp2_fast(float x)
{
	float out;

	asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
	return out;
}

static __device__ __forceinline__ float log2_fast(float x)
{
	float out;

	asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
	return out;
}

static __device__ __forceinline__ float reciprocal_fast(float x)
{
	float out;

	asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
	return out;
}

static __device__ __forceinline__ uint32_t pack_halves(float low, float high)
{
	uint32_t out;

	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
	return out;
}

/* ---- shared memory ---- */

/*
 * Where dynamic shared memory begins in a kernel that has no other, behind what the system keeps of it. As a
 * constant it becomes part of instructions; as an address that is computed it cost the tq4 kernel an addition
 * for nearly every look-up, or not, as other code changed. Kernels that rely on it look once.
 */
static constexpr uint32_t SHARED_AT = 1024;

static __device__ __forceinline__ uint32_t shared_address(const void *ptr)
{
	return (uint32_t)__cvta_generic_to_shared(ptr);
}

static __device__ __forceinline__ void check_shared_at(const void *memory)
{
	if (shared_address(memory) != SHARED_AT)
		__trap();
}

static __device__ __forceinline__ uint4 load_16(uint32_t address)
{
	uint4 v;

	asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
		     : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
		     : "r"(address));
	return v;
}

static __device__ __forceinline__ uint2 load_8(uint32_t address)
{
	uint2 v;

	asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
	return v;
}

static __device__ __forceinline__ uint32_t load_4(uint32_t address)
{
	uint32_t out;

	asm volatile("ld.shared.b32 %0, [%1];" : "=r"(out) : "r"(address));
	return out;
}

static __device__ __forceinline__ void store_16(uint32_t address, const uint4 &v)
{
	asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z),
		     "r"(v.w)
		     : "memory");
}

/* A look-up: the table never changes, so the compiler may move it as it likes. */
static __device__ __forceinline__ uint32_t look_up(uint32_t address)
{
	uint32_t out;

	asm("ld.shared.b32 %0, [%1];" : "=r"(out) : "r"(address));
	return out;
}

/* ---- barriers that count bytes, and the copies that they wait for ---- */

static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t n_arrivals)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals) : "memory");
}

/* After the last barrier_init() of a thread: copies see the barriers. */
static __device__ __forceinline__ void barrier_publish()
{
	asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
	asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t n_bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes)
		     : "memory");
}

/* Whether the phase of a parity is over, without waiting. */
static __device__ __forceinline__ bool barrier_is_over(uint32_t barrier, uint32_t parity)
{
	uint32_t out;

	asm volatile("{\n"
		     ".reg .pred p;\n"
		     "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
		     "selp.u32 %0, 1, 0, p;\n"
		     "}"
		     : "=r"(out)
		     : "r"(barrier), "r"(parity)
		     : "memory");
	return out != 0;
}

/* For loops that look again and again: leaves the multiprocessor to others for about 100 ns. */
static __device__ __forceinline__ void pause()
{
	__nanosleep(100);
}

static __device__ __forceinline__ void barrier_arrive(uint32_t barrier)
{
	asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* The first n threads of a block, of which all are here. */
static __device__ __forceinline__ void sync_threads(uint32_t n_threads)
{
	asm volatile("bar.sync 1, %0;" ::"r"(n_threads) : "memory");
}

/* Registers that a group of four warps gives back to its block, or waits for and takes; N of each thread. */
template <int N> static __device__ __forceinline__ void give_registers()
{
	asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> static __device__ __forceinline__ void take_registers()
{
	asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

static __device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity)
{
	asm volatile("{\n"
		     ".reg .pred p;\n"
		     "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
		     "@p bra done;\n"
		     "bra again;\n"
		     "done:\n"
		     "}" ::"r"(barrier),
		     "r"(parity)
		     : "memory");
}

/* Data that is read once: it is the first to leave the L2 cache. Made where it is used, not kept in
 * registers. */
static __device__ __forceinline__ uint64_t evict_first_policy()
{
	uint64_t policy;

	asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
	return policy;
}

static __device__ __forceinline__ void bulk_copy(
	uint32_t to, const uint8_t *from, uint32_t n_bytes, uint32_t barrier, uint64_t policy)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
		     "[%0], [%1], %2, [%3], %4;" ::"r"(to),
		     "l"(from), "r"(n_bytes), "r"(barrier), "l"(policy)
		     : "memory");
}

static __device__ __forceinline__ void copy_16_async(uint32_t to, const uint8_t *from)
{
	asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

static __device__ __forceinline__ void wait_for_copies()
{
	asm volatile("cp.async.wait_all;" ::: "memory");
}

/* ---- matrix products of a warp ---- */

static __device__ __forceinline__ void multiply(
	float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%0, %1, %2, %3};"
		: "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
		: "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void add_signed(
	int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%0, %1, %2, %3};"
		: "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
		: "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* B unsigned. */
static __device__ __forceinline__ void add_unsigned(
	int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%0, %1, %2, %3};"
		: "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
		: "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/* 8 x 8 numbers of 16 bits: lane 4g + c gives row g, columns 2c and 2c + 1, and gets the same of the
 * transpose. */
static __device__ __forceinline__ uint32_t transpose(uint32_t a)
{
	uint32_t out;

	asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(a));
	return out;
}

/* ---- the host ---- */

/* The device's clock. */
static __device__ __forceinline__ uint64_t now_ns()
{
	uint64_t out;

	asm volatile("mov.u64 %0, %globaltimer;" : "=l"(out)::"memory");
	return out;
}

/* What this thread has written, or seen written, reaches host memory before what it writes from here on. */
static __device__ __forceinline__ void fence_for_host()
{
	__threadfence_system();
}

/* The last word of a batch. */
static __device__ __forceinline__ void tell_host(uint32_t *at, uint32_t word)
{
	asm volatile("st.release.sys.u32 [%0], %1;" ::"l"(at), "r"(word) : "memory");
}

/* ---- programmatic dependent launch ---- */

/* What the kernel before has written may be read from here on. */
static __device__ __forceinline__ void wait_for_previous()
{
	asm volatile("griddepcontrol.wait;" ::: "memory");
}

/* The next kernel may begin as soon as every block is here; its wait_for_previous() still waits for the end.
 */
static __device__ __forceinline__ void let_next_begin()
{
	asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

} // namespace tiles

#endif

#endif
