/*
 * What the kernels over tiles share: asm in small functions, the walk over the work list, and the ring that a warp
 * streams its units through. A unit is TOKENS tokens of one (row, virtual head); thread blocks share the list of
 * units evenly, whatever the lengths, and the warps of a block take its units in turn.
 */
#ifndef GPU_DECODE_COMMON_CUH
#define GPU_DECODE_COMMON_CUH

#include "gpu/kernels.h"

namespace tiles
{

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

static __device__ __forceinline__ uint32_t shared_address(const void *ptr)
{
	return (uint32_t)__cvta_generic_to_shared(ptr);
}

static __device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t n_arrivals)
{
	asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals) : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t n_bytes)
{
	asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(n_bytes) : "memory");
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

static __device__ __forceinline__ void bulk_copy(
	uint32_t to, const uint8_t *from, uint32_t n_bytes, uint32_t barrier, uint64_t policy)
{
	asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
		     "[%0], [%1], %2, [%3], %4;" ::"r"(to),
		"l"(from), "r"(n_bytes), "r"(barrier), "l"(policy)
		: "memory");
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

/* A look-up: the table never changes, so the compiler may move it as it likes. */
static __device__ __forceinline__ uint32_t look_up(uint32_t address)
{
	uint32_t out;

	asm("ld.shared.b32 %0, [%1];" : "=r"(out) : "r"(address));
	return out;
}

static __device__ __forceinline__ void multiply(
	float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1)
{
	asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
	    "{%0, %1, %2, %3};"
	    : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
	    : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ uint32_t transpose(uint32_t a)
{
	uint32_t out;

	asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(a));
	return out;
}

static __device__ __forceinline__ uint32_t pack_halves(float low, float high)
{
	uint32_t out;

	asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
	return out;
}

static __device__ __forceinline__ uint32_t load_4(uint32_t address)
{
	uint32_t v;

	asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
	return v;
}

/* The largest row that begins at or before the unit and has units. */
static __device__ __forceinline__ uint32_t find_row(const struct kvg_decode_row *rows, uint32_t n_rows, uint32_t unit)
{
	uint32_t low = 0, high = n_rows;

	while (high - low > 1) {
		const uint32_t middle = (low + high) / 2;

		if (rows[middle].work_first <= unit)
			low = middle;
		else
			high = middle;
	}
	return low;
}

/* A walk over (row, virtual head), in the order of the units. */
struct cursor {
	uint32_t row_idx, virtual_head;
	uint32_t n_units; /* of this row and virtual head */
};

static __device__ __forceinline__ void next_head(const struct kvg_decode_params &params, uint32_t n_virtual, struct cursor &at)
{
	if (++at.virtual_head < n_virtual)
		return;
	at.virtual_head = 0;
	do {
		at.row_idx++;
	} while (at.row_idx < params.n_rows && params.rows[at.row_idx].n_work == 0);
	at.n_units = at.row_idx < params.n_rows ? params.rows[at.row_idx].n_work : 0;
}

/* The units of one block, and the item (row, virtual head) that the first of them belongs to. */
struct share {
	uint32_t unit_first, unit_end;
	struct cursor item;
	uint32_t item_unit; /* first unit of the item; may lie before the block's */
};

static __device__ __forceinline__ struct share find_share(const struct kvg_decode_params &params)
{
	const uint64_t total = params.n_work;
	struct share out;

	out.unit_first = (uint32_t)(blockIdx.x * total / params.n_blocks);
	out.unit_end = (uint32_t)((blockIdx.x + 1) * total / params.n_blocks);
	out.item.row_idx = find_row(params.rows, params.n_rows, out.unit_first);

	const struct kvg_decode_row &row = params.rows[out.item.row_idx];

	out.item.n_units = row.n_work;
	out.item.virtual_head = (out.unit_first - row.work_first) / row.n_work;
	out.item_unit = row.work_first + out.item.virtual_head * row.n_work;
	return out;
}

/* Slot of the partial result of an item that a block leaves (decode_query.cu finds it again). */
static __device__ __forceinline__ uint64_t slot_of_item(
	const struct kvg_decode_params &params, const struct share &share, const struct cursor &item, uint32_t item_unit,
	uint32_t item_idx)
{
	if (item_unit >= share.unit_first && item_unit + item.n_units <= share.unit_end)
		return 2 * params.n_blocks + item_idx;
	return 2 * blockIdx.x + (item_unit <= share.unit_first ? 0 : 1);
}

/* A warp's ring of STAGES units, filled by bulk copies of one tile each. */
template <int TOKENS, int STAGES, int WARPS, uint32_t TILE_BYTES> struct ring {
	static constexpr uint32_t TILES = TOKENS / 16, STAGE_BYTES = TILES * TILE_BYTES;

	const struct kvg_decode_params &params;
	uint32_t stages, barriers; /* shared memory */
	uint32_t lane, n_virtual, block_shift, unit_end;
	uint32_t unit, at; /* the next one to load, and its number in the item */
	struct cursor item;
	/* Of the item: its block table, the pages of its layer and KV head, its first and last tile. */
	const uint32_t *table;
	const uint8_t *pages;
	uint32_t tile_first, tile_last;
	uint64_t block_bytes;
	const uint8_t *source; /* lane < TILES: its tile of the next unit */
	uint64_t policy;

	__device__ __forceinline__ ring(
		const struct kvg_decode_params &params, const struct share &share, uint32_t warp, uint32_t stages, uint32_t barriers)
		: params(params), stages(stages), barriers(barriers), lane(threadIdx.x % 32),
		  n_virtual(params.tables.kv_heads * params.n_chunks),
		  block_shift(params.tables.block_size / 32), /* 16, 32, 64 tokens: 0, 1, 2 */
		  unit_end(share.unit_end), unit(share.unit_first), at(share.unit_first - share.item_unit), item(share.item),
		  source(NULL)
	{
		asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
		if (lane == 0) {
			for (int s = 0; s < STAGES; s++)
				barrier_init(barriers + 8 * s, 1);
			asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
			asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
		}
		__syncwarp();
		block_bytes = (uint64_t)params.tables.kv_heads * TILE_BYTES << block_shift;
		enter_item();
		move_on(warp);
		look_ahead();
#pragma unroll
		for (int s = 0; s < STAGES; s++)
			refill(s);
	}

	__device__ __forceinline__ void enter_item()
	{
		const struct kvg_decode_row &row = params.rows[item.row_idx];
		const struct kvg_decode_op &op = params.ops[row.op_idx];

		table = op.table;
		tile_first = row.token_lo / TOKENS * TILES + lane;
		tile_last = (row.token_hi - 1) / 16;
		pages = params.tables.layers[op.layer].k +
			((uint64_t)(item.virtual_head / params.n_chunks) * TILE_BYTES << block_shift);
	}

	/* Block ids are read one unit ahead, so that nobody waits for the table. */
	__device__ __forceinline__ void look_ahead()
	{
		if (unit >= unit_end || lane >= TILES)
			return;

		const uint32_t tile = min(tile_first + at * TILES, tile_last);

		source = pages + table[tile >> block_shift] * block_bytes +
			(tile & ((1u << block_shift) - 1)) * TILE_BYTES;
	}

	__device__ __forceinline__ void move_on(uint32_t n)
	{
		unit += n;
		at += n;
		if (unit >= unit_end || at < item.n_units)
			return;
		do {
			at -= item.n_units;
			next_head(params, n_virtual, item);
		} while (at >= item.n_units);
		enter_item();
	}

	/* Loads the next unit into the stage, which all lanes have read. */
	__device__ __forceinline__ void refill(uint32_t stage)
	{
		if (unit < unit_end) {
			if (lane == 0)
				barrier_expect(barriers + 8 * stage, STAGE_BYTES);
			__syncwarp();
			if (lane < TILES)
				bulk_copy(stages + stage * STAGE_BYTES + lane * TILE_BYTES, source, TILE_BYTES,
					barriers + 8 * stage, policy);
		}
		move_on(WARPS);
		look_ahead();
	}
};

} // namespace tiles

#endif
