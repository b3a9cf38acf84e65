/*
 * Twins in plain C++ of gpu/device_asm.cuh: what each instruction does, for fibers. Addresses in shared
 * memory count from the beginning of the block's. A bulk copy is done when it is asked for; its barrier still
 * has to be waited for.
 */
#ifndef TESTS_GPU_HOST_DEVICE_ASM_H
#define TESTS_GPU_HOST_DEVICE_ASM_H

#include <cuda_fp16.h>

#define KVG_DYNAMIC_SHARED(name, alignment) uint8_t *const name = fiber_shared

namespace tiles
{

/* ---- numbers ---- */

/* A nibble of the selector names one of eight bytes; with its top bit, only that byte's sign. */
static inline uint32_t byte_permute(uint32_t a, uint32_t b, uint32_t selector)
{
	const uint64_t bytes = (uint64_t)b << 32 | a;
	uint32_t out = 0;

	for (int i = 0; i < 4; i++) {
		const uint32_t nibble = selector >> 4 * i & 15u,
			       byte = (uint32_t)(bytes >> 8 * (nibble & 7u)) & 255u;

		out |= (nibble & 8u ? (byte & 128u ? 255u : 0u) : byte) << 8 * i;
	}
	return out;
}

static inline float exp2_fast(float x)
{
	const float out = exp2f(x);

	return out < 1.17549435e-38f ? 0.0f : out;
}

static inline float log2_fast(float x)
{
	return log2f(x);
}

static inline float reciprocal_fast(float x)
{
	return 1.0f / x;
}

static inline uint32_t half_of(float x)
{
	const float abs = fabsf(x);
	int exponent = 0;

	if (abs >= 65520.0f)
		return (x < 0 ? 0x8000u : 0u) | 0x7C00u;
	if (abs > 0)
		frexpf(abs, &exponent);
	exponent = exponent < -13 ? -13 : exponent;

	/* In units of the last place, rounded to even; a carry moves into the exponent by itself. */
	const uint32_t units = (uint32_t)rintf(ldexpf(abs, 11 - exponent));

	return (x < 0 ? 0x8000u : 0u) | (units < 1024 ? units : units + ((uint32_t)(exponent + 13) << 10));
}

static inline uint32_t pack_halves(float low, float high)
{
	return half_of(low) | half_of(high) << 16;
}

/* ---- shared memory ---- */

static inline uint32_t shared_address(const void *ptr)
{
	return (uint32_t)((const uint8_t *)ptr - fiber_shared);
}

static constexpr uint32_t SHARED_AT = 0;

static inline void check_shared_at(const void *memory)
{
	if (shared_address(memory) != SHARED_AT)
		abort();
}

template <class T> static inline T &shared_at(uint32_t address)
{
	if (address % sizeof(T) != 0 || address + sizeof(T) > FIBERS_SHARED_MAX)
		abort();
	return *(T *)(fiber_shared + address);
}

static inline uint4 load_16(uint32_t address)
{
	return shared_at<uint4>(address);
}

static inline uint2 load_8(uint32_t address)
{
	return shared_at<uint2>(address);
}

static inline uint32_t load_4(uint32_t address)
{
	return shared_at<uint32_t>(address);
}

static inline void store_16(uint32_t address, const uint4 &v)
{
	shared_at<uint4>(address) = v;
}

static inline uint32_t look_up(uint32_t address)
{
	return shared_at<uint32_t>(address);
}

/* ---- barriers that count bytes ---- */

/* Bits 0 to 31: bytes that are still to come; 32 to 43: arrivals that are; 44 to 55: arrivals of a phase; 63:
 * parity of the phase. */
static inline void barrier_settle(uint64_t &barrier)
{
	const uint64_t n_arrivals = barrier >> 44 & 0xFFFu;

	if ((barrier & 0xFFFFFFFFFFFull) == 0) {
		barrier = (~barrier & 1ull << 63) | n_arrivals << 44 | n_arrivals << 32;
		fibers_went_on();
	}
}

static inline void barrier_init(uint32_t barrier, uint32_t n_arrivals)
{
	shared_at<uint64_t>(barrier) = (uint64_t)n_arrivals << 44 | (uint64_t)n_arrivals << 32;
}

static inline void barrier_publish()
{
}

static inline void barrier_arrive(uint32_t barrier)
{
	uint64_t &state = shared_at<uint64_t>(barrier);

	if ((state >> 32 & 0xFFFu) == 0)
		abort();
	state -= 1ull << 32;
	barrier_settle(state);
}

static inline void barrier_expect(uint32_t barrier, uint32_t n_bytes)
{
	uint64_t &state = shared_at<uint64_t>(barrier);

	state += n_bytes; /* before the arrival: bytes hold the phase open */
	barrier_arrive(barrier);
}

static inline void barrier_wait(uint32_t barrier, uint32_t parity)
{
	while (shared_at<uint64_t>(barrier) >> 63 == parity)
		fibers_yield();
}

static inline bool barrier_is_over(uint32_t barrier, uint32_t parity)
{
	return shared_at<uint64_t>(barrier) >> 63 != parity;
}

static inline void pause()
{
	fibers_yield();
}

static inline void sync_threads(uint32_t n_threads)
{
	fibers_sync_first(n_threads);
}

template <int N> static inline void give_registers()
{
}

template <int N> static inline void take_registers()
{
}

static inline uint64_t evict_first_policy()
{
	return 0;
}

static inline void bulk_copy(uint32_t to, const uint8_t *from, uint32_t n_bytes, uint32_t barrier, uint64_t)
{
	uint64_t &state = shared_at<uint64_t>(barrier);

	if (to % 16 != 0 || (uintptr_t)from % 16 != 0 || n_bytes % 16 != 0 ||
		to + n_bytes > FIBERS_SHARED_MAX || (uint32_t)state < n_bytes)
		abort();
	memcpy(fiber_shared + to, from, n_bytes);
	state -= n_bytes;
	barrier_settle(state);
}

static inline void copy_16_async(uint32_t to, const uint8_t *from)
{
	shared_at<uint4>(to) = *(const uint4 *)from;
}

static inline void wait_for_copies()
{
}

/* ---- matrix products of a warp ---- */

/* What a lane 4g + c brings: rows g and g + 8 of A, column g of B, 4c and on (or 2c) of the reduction index.
 */
struct operands {
	const uint32_t (*lanes)[FIBERS_WORDS_MAX];

	operands(uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
	{
		const uint32_t words[6] = { a0, a1, a2, a3, b0, b1 };

		lanes = fibers_show(words, 6);
	}

	/* Sum over the 16 or 32 products of a row and a column; product(a, b) is that of a register pair. */
	template <class T, class Product> T dot(unsigned row, unsigned column, T sum, Product product) const
	{
		for (unsigned half = 0; half < 2; half++) {
			for (unsigned c = 0; c < 4; c++)
				sum += product(lanes[4 * (row % 8) + c][row / 8 + 2 * half],
					lanes[4 * column + c][4 + half]);
		}
		return sum;
	}

	template <class T, class Product> void add(T (&d)[4], Product product) const
	{
		const unsigned g = fiber_thread.x % 32 / 4, c = fiber_thread.x % 4;

		for (unsigned i = 0; i < 4; i++)
			d[i] = dot(g + 8 * (i / 2), 2 * c + i % 2, d[i], product);
	}
};

static inline float number_of(uint32_t bits)
{
	static float table[65536];
	static bool is_full;

	for (uint32_t i = 0; !is_full && i < 65536; i++)
		table[i] = __half2float({ (uint16_t)i });
	is_full = true;
	return table[bits & 0xFFFFu];
}

static inline void multiply(
	float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	operands(a0, a1, a2, a3, b0, b1).add(c, [](uint32_t a, uint32_t b) {
		return number_of(a) * number_of(b) + number_of(a >> 16) * number_of(b >> 16);
	});
}

static inline void add_signed(
	int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	operands(a0, a1, a2, a3, b0, b1).add(d, [](uint32_t a, uint32_t b) {
		return (int8_t)a * (int8_t)b + (int8_t)(a >> 8) * (int8_t)(b >> 8) +
			(int8_t)(a >> 16) * (int8_t)(b >> 16) + (int8_t)(a >> 24) * (int8_t)(b >> 24);
	});
}

static inline void add_unsigned(
	int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	operands(a0, a1, a2, a3, b0, b1).add(d, [](uint32_t a, uint32_t b) {
		return (int8_t)a * (int)(b & 255u) + (int8_t)(a >> 8) * (int)(b >> 8 & 255u) +
			(int8_t)(a >> 16) * (int)(b >> 16 & 255u) + (int8_t)(a >> 24) * (int)(b >> 24);
	});
}

static inline uint32_t transpose(uint32_t a)
{
	const uint32_t(*rows)[FIBERS_WORDS_MAX] = fibers_show(&a, 1);
	const unsigned g = fiber_thread.x % 32 / 4, c = fiber_thread.x % 4, shift = 16 * (g % 2);

	return (rows[4 * (2 * c) + g / 2][0] >> shift & 0xFFFFu) |
		(rows[4 * (2 * c + 1) + g / 2][0] >> shift & 0xFFFFu) << 16;
}

/* ---- the host ---- */

static inline uint64_t now_ns()
{
	return fake_device_now_ns();
}

static inline void fence_for_host()
{
}

/* The last step of a batch: a lost device does not come to it. */
static inline void tell_host(uint32_t *at, uint32_t word)
{
	if (fake_device_ends_batch())
		__atomic_store_n(at, word, __ATOMIC_RELEASE);
}

/* ---- one kernel after the other ---- */

static inline void wait_for_previous()
{
}

static inline void let_next_begin()
{
}

} // namespace tiles

#endif
