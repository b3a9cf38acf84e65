/*
 * What the kernels over tiles share: the walk over the work list, the ring that a warp streams its units
 * through, and the way from the warps' sums to a partial result. A unit is TOKENS tokens of one item, an item
 * is one (row, virtual head); thread blocks share the list of units evenly, whatever the lengths, and the
 * warps of a block take its units in turn. Where lengths differ an item ends with idle units, which stand for
 * what every item costs: without them a block with many short ones would work several times as long as
 * others. What differs is in struct kernel (decode_kernel.cuh).
 */
#ifndef GPU_DECODE_COMMON_CUH
#define GPU_DECODE_COMMON_CUH

#include "gpu/device_asm.cuh"
#include "gpu/kernels.h"
#include "gpu/launch.cuh"
#include "gpu/variants.h"

namespace tiles
{

/* The largest row that begins at or before the unit and has units. */
static __device__ __forceinline__ uint32_t find_row(
	const struct kvg_decode_row *rows, uint32_t n_rows, uint32_t unit)
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

/* A walk over the items, in the order of their units. */
struct cursor {
	uint32_t row_idx, virtual_head;
	uint32_t n_units; /* of this item */
};

static __device__ __forceinline__ void next_item(
	const struct kvg_decode_params &params, uint32_t n_virtual, struct cursor &at)
{
	if (++at.virtual_head < n_virtual)
		return;
	at.virtual_head = 0;
	do {
		at.row_idx++;
	} while (at.row_idx < params.n_rows && params.rows[at.row_idx].n_work == 0);
	at.n_units = at.row_idx < params.n_rows ? params.rows[at.row_idx].n_work : 0;
}

/* The units of one block, and the item that the first of them belongs to. */
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

/* Slot of the partial result of an item that a block leaves (decode_finish.cu finds it again). */
static __device__ __forceinline__ uint64_t slot_of_item(const struct kvg_decode_params &params,
	const struct share &share, const struct cursor &item, uint32_t item_unit, uint32_t item_idx)
{
	if (item_unit >= share.unit_first && item_unit + item.n_units <= share.unit_end)
		return 2 * params.n_blocks + item_idx;
	return 2 * blockIdx.x + (item_unit <= share.unit_first ? 0 : 1);
}

/*
 * Warps that only fill the rings of the others, as many as give and take registers together; those of a
 * thread, as launched (multiples of eight) and after the feeding warps have left theirs to the working ones.
 */
static constexpr int FEEDERS = 4;

template <class Kernel> struct registers {
	static constexpr int WARPS = Kernel::WARPS + FEEDERS, LAUNCHED = 65536 / (WARPS * 32) / 8 * 8;
	static constexpr int FEEDING = 40;
	static constexpr int WORKING = (LAUNCHED * WARPS - FEEDING * FEEDERS) / Kernel::WARPS / 8 * 8;
};

/*
 * One of the feeding warps. It fills the rings of N_SERVED warps, STAGES units each, by bulk copies of one
 * tile: a lane has one tile of the next unit of one of them. So working warps neither wait for block tables
 * and addresses nor keep them in registers.
 */
template <class Kernel> struct feeder {
	static constexpr uint32_t TOKENS = Kernel::TOKENS, STAGES = Kernel::STAGES, WARPS = Kernel::WARPS;
	static constexpr uint32_t TILES = TOKENS / 16, TILE_BYTES = Kernel::TILE_BYTES,
				  STAGE_BYTES = Kernel::STAGE_BYTES;
	static constexpr uint32_t N_SERVED = WARPS / FEEDERS;
	static_assert(N_SERVED * TILES <= 32, "a lane for every tile");
	static_assert(WARPS % FEEDERS == 0, "equal shares");

	const struct kvg_decode_params &params;
	uint32_t warp, tile;          /* of the lane; lanes that have none have no units either */
	uint32_t stages, full, empty; /* of that warp, in shared memory: its ring, barriers of its stages */
	uint32_t block_shift, unit_end;
	uint32_t unit, at; /* the next one to load, and its number in the item */
	struct cursor item;
	/* Of the item: its block table, the pages of its layer and KV head, its tiles. */
	const uint32_t *table;
	const uint8_t *pages;
	uint32_t tile_first, tile_low, tile_high;
	uint32_t block_bytes;
	const uint8_t *source; /* of the lane's tile of the next unit */

	__device__ __forceinline__ feeder(
		const struct kvg_decode_params &params, const struct share &share, uint32_t turn)
	    : params(params), block_shift(params.tables.block_size / 32), /* 16, 32, 64 tokens: 0, 1, 2 */
	      unit_end(share.unit_end), unit(share.unit_first), at(share.unit_first - share.item_unit),
	      item(share.item), source(NULL)
	{
		const uint32_t lane = threadIdx.x % 32;
		const bool is_idle = lane >= N_SERVED * TILES;

		warp = turn * N_SERVED + (is_idle ? 0 : lane / TILES);
		tile = lane % TILES;
		stages = SHARED_AT + Kernel::RING_AT + warp * STAGES * STAGE_BYTES;
		full = SHARED_AT + Kernel::FULL_AT + warp * STAGES * 8;
		empty = SHARED_AT + Kernel::EMPTY_AT + warp * STAGES * 8;
		if (tile == 0 && !is_idle) {
			for (uint32_t s = 0; s < STAGES; s++) {
				barrier_init(full + 8 * s, 1);
				barrier_init(empty + 8 * s, 32);
			}
			barrier_publish();
		}
		__syncwarp();
		block_bytes = params.tables.kv_heads * TILE_BYTES << block_shift;
		if (is_idle)
			unit = unit_end;
		enter_item();
		move_on(warp);
		look_ahead();
	}

	__device__ __forceinline__ void enter_item()
	{
		const struct kvg_decode_row &row = params.rows[item.row_idx];

		table = row.table;
		tile_first = row.token_lo / TOKENS * TILES + tile;
		tile_low = row.token_lo / 16;
		tile_high = (row.token_hi - 1) / 16;
		pages = row.pages +
			((uint64_t)(item.virtual_head / params.n_chunks) * TILE_BYTES << block_shift);
	}

	/*
	 * Block ids are read one unit ahead, so that nobody waits for the table. Tiles of a unit that nobody
	 * sees are not read, others stand in for them: their blocks may be gone.
	 */
	__device__ __forceinline__ void look_ahead()
	{
		if (unit >= unit_end)
			return;

		const uint32_t place = min(max(tile_first + at * TILES, tile_low), tile_high);

		source = pages + (uint64_t)table[place >> block_shift] * block_bytes +
			(place & ((1u << block_shift) - 1)) * TILE_BYTES;
	}

	/* To the warp's next unit that has tokens. */
	__device__ __forceinline__ void move_on(uint32_t n)
	{
		bool is_new = false;

		unit += n;
		at += n;
		while (unit < unit_end && at + params.idle_units >= item.n_units) {
			if (at < item.n_units) {
				unit += WARPS;
				at += WARPS;
			} else {
				at -= item.n_units;
				next_item(params, params.tables.kv_heads * params.n_chunks, item);
				is_new = true;
			}
		}
		if (is_new && unit < unit_end)
			enter_item();
	}

	/* Loads the next unit of a lane's warp, where it is told to, into a stage that nobody reads. */
	__device__ __forceinline__ void fill(uint32_t stage, bool is_filled)
	{
		if (is_filled && tile == 0)
			barrier_expect(full + 8 * stage, STAGE_BYTES);
		__syncwarp();
		if (is_filled) {
			bulk_copy(stages + stage * STAGE_BYTES + tile * TILE_BYTES, source, TILE_BYTES,
				full + 8 * stage, evict_first_policy());
			move_on(WARPS);
			look_ahead();
		}
	}

	__device__ __forceinline__ void fill_all()
	{
#pragma unroll
		for (uint32_t s = 0; s < STAGES; s++)
			fill(s, unit < unit_end);
	}

	/*
	 * Until all units are loaded: fills a stage when its warp has left it. No warp waits for another: one
	 * may have many more units, and others do not go on before it has done them.
	 */
	__device__ __forceinline__ void feed()
	{
		uint32_t stage = 0, parity = 0; /* of the lane's warp */

		while (__any_sync(0xFFFFFFFFu, unit < unit_end)) {
			const bool is_left = unit < unit_end && barrier_is_over(empty + 8 * stage, parity);
			const uint32_t left = __ballot_sync(0xFFFFFFFFu, is_left);
			/* All lanes of a warp's unit, or none. */
			const bool is_filled =
				(~left >> (threadIdx.x % 32 - tile) & ((1u << TILES) - 1)) == 0;

			if (left == 0) {
				pause();
				continue;
			}
			fill(stage, is_filled);
			if (is_filled && ++stage == STAGES) {
				stage = 0;
				parity ^= 1;
			}
		}
	}
};

/*
 * What a warp adds to, or puts beside, the sums that lie in a slot: `mine` and `theirs` scale both to the
 * larger of two maxima. Lanes that share a head call it together; afterwards maximum and sum are those of
 * both.
 */
struct rescale {
	float mine, theirs;
};

static __device__ __forceinline__ struct rescale join_sums(
	float &max, float &sum, const float *own, bool is_added)
{
	struct rescale out = { 1.0f, 0.0f };

	if (is_added) {
		const float m = fmaxf(max, own[0]);

		out.mine = exp2_fast(max - m);
		out.theirs = exp2_fast(own[0] - m);
		sum = sum * out.mine + own[1] * out.theirs;
		max = m;
	}
	return out;
}

/* Sum over the lanes of a column: those with the same lane % 4. */
static __device__ __forceinline__ float add_over_rows(float x)
{
	x += __shfl_xor_sync(0xFFFFFFFFu, x, 4);
	x += __shfl_xor_sync(0xFFFFFFFFu, x, 8);
	return x + __shfl_xor_sync(0xFFFFFFFFu, x, 16);
}

static __device__ __forceinline__ float max_over_rows(float x)
{
	x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 4));
	x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 8));
	return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 16));
}

/* The slots' sums of an item become its partial result in memory: threads take four channels of a head each.
 */
template <class Kernel>
static __device__ __forceinline__ void write_partial(
	const struct kvg_decode_params &params, const Kernel &kernel, uint64_t slot, uint32_t n_heads)
{
	for (uint32_t x = threadIdx.x; x < n_heads * Kernel::CHUNKS; x += Kernel::WARPS * 32) {
		const uint32_t head = x / Kernel::CHUNKS, chunk = x % Kernel::CHUNKS;
		float largest = -1e30f, sum = 0;
		float4 total = make_float4(0, 0, 0, 0);

#pragma unroll
		for (int k = 0; k < Kernel::SLOTS; k++)
			largest = fmaxf(largest, kernel.max_sums[(k * Kernel::HEADS + head) * 2]);
#pragma unroll
		for (int k = 0; k < Kernel::SLOTS; k++) {
			const float *own = kernel.max_sums + (k * Kernel::HEADS + head) * 2;
			const float weight = exp2_fast(own[0] - largest);
			const float4 v = *kernel.sums_at(k, head, chunk);

			sum += weight * own[1];
			total.x += weight * v.x;
			total.y += weight * v.y;
			total.z += weight * v.z;
			total.w += weight * v.w;
		}

		const uint64_t at = slot * params.n_heads + head;

		*(float4 *)(params.partials + at * params.v_dim_max + chunk * 4) = total;
		if (chunk == 0) {
			params.partials_ml[at * 2] = largest - Kernel::LOG2_OF_WEIGHT_ONE;
			params.partials_ml[at * 2 + 1] = sum;
		}
	}
}

/*
 * What a working warp does. Kernel has its state: load_query(item), begin_item(), add_unit(), leave(), and
 * where the block's sums lie. Queries of the next item are asked for before the sums of this one are merged.
 */
template <class Kernel>
static __device__ __forceinline__ void walk_items(
	const struct kvg_decode_params &params, const struct share &share, uint8_t *memory)
{
	constexpr uint32_t WARPS = Kernel::WARPS, SLOTS = Kernel::SLOTS, TOKENS = Kernel::TOKENS;
	constexpr uint32_t STAGES = Kernel::STAGES;
	const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
	const uint32_t slot = warp % SLOTS, turn = warp / SLOTS;
	const uint32_t n_virtual = params.tables.kv_heads * params.n_chunks;
	const uint32_t group = params.tables.q_heads / params.tables.kv_heads;
	const uint32_t stages = SHARED_AT + Kernel::RING_AT + warp * STAGES * Kernel::STAGE_BYTES;
	const uint32_t full = SHARED_AT + Kernel::FULL_AT + warp * STAGES * 8;
	const uint32_t empty = SHARED_AT + Kernel::EMPTY_AT + warp * STAGES * 8;
	struct cursor item = share.item;
	uint32_t item_unit = share.item_unit, stage = 0, parity = 0, unit = share.unit_first + warp;
	Kernel kernel(params, memory, lane);

	/* Pages were complete before the kernel that makes the queries began; only its queries are waited
	 * for. */
	wait_for_previous();
	let_next_begin();
	kernel.load_query(params, item.row_idx * n_virtual + item.virtual_head, lane);
	__syncthreads(); /* the feeders' barriers are ready */
	while (item_unit < share.unit_end) {
		const struct kvg_decode_row &row = params.rows[item.row_idx];
		const uint32_t token_first = row.token_lo / TOKENS * TOKENS, lo = row.token_lo,
			       hi = row.token_hi;
		const uint32_t end = min(share.unit_end, item_unit + item.n_units - params.idle_units);

		kernel.begin_item(lane);
		while (unit < item_unit)
			unit += WARPS;
		for (; unit < end; unit += WARPS) {
			barrier_wait(full + 8 * stage, parity);
			kernel.add_unit(stages + stage * Kernel::STAGE_BYTES,
				token_first + (unit - item_unit) * TOKENS, lo, hi, lane);
			barrier_arrive(empty + 8 * stage);
			if (++stage == STAGES) {
				stage = 0;
				parity ^= 1;
			}
		}

		const uint64_t out = slot_of_item(
			params, share, item, item_unit, item.row_idx * n_virtual + item.virtual_head);
		const uint32_t n_heads =
			min(group - item.virtual_head % params.n_chunks * KVG_HEADS_MAX, params.n_heads);

		item_unit += item.n_units;
		next_item(params, n_virtual, item);
		kernel.end_item();
		if (item_unit < share.unit_end)
			kernel.load_query(params, item.row_idx * n_virtual + item.virtual_head, lane);
		for (int round = WARPS / SLOTS - 1; round >= 0; round--) {
			if (turn == (uint32_t)round)
				kernel.leave(slot, round < (int)(WARPS / SLOTS) - 1, lane);
			sync_threads(WARPS * 32);
		}
		write_partial(params, kernel, out, n_heads);
		sync_threads(WARPS * 32);
	}
}

/* Launch and load functions of one Kernel. */
template <class Kernel>
static __global__ void __launch_bounds__(registers<Kernel>::WARPS * 32, 1)
	walk_kernel(const __grid_constant__ struct kvg_decode_params params)
{
	KVG_DYNAMIC_SHARED(memory, 1024);
	check_shared_at(memory);

	const struct share share = find_share(params);
	/* From one lane, so that the compiler sees that a warp does not part; it saves a fifth of the tq4
	 * kernel's instructions, as addresses that all lanes share are kept once. */
	const uint32_t warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0);

	if (warp < Kernel::WARPS) {
		take_registers<registers<Kernel>::WORKING>();
		walk_items<Kernel>(params, share, memory);
	} else {
		give_registers<registers<Kernel>::FEEDING>();

		feeder<Kernel> feeder(params, share, warp - Kernel::WARPS);

		feeder.fill_all();
		__syncthreads();
		feeder.feed();
	}
}

template <class Kernel>
static cudaError_t launch_walk(const struct kvg_decode_params *params, cudaStream_t stream)
{
	const struct kvg_grid grid = { dim3(params->n_blocks), registers<Kernel>::WARPS * 32,
		Kernel::SHARED_BYTES, stream, params->is_dependent != 0 };

	return kvg_launch(walk_kernel<Kernel>, grid, params);
}

template <class Kernel> static cudaError_t load_walk()
{
	static_assert(Kernel::SHARED_BYTES <= 227 * 1024, "shared memory of one thread block");
	return cudaFuncSetAttribute(
		walk_kernel<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)Kernel::SHARED_BYTES);
}

} // namespace tiles

/* One built variant: its launch and load functions, with C names. */
#define KVG_TILES_VARIANT(name, ...)                                           \
	extern "C" cudaError_t kvg_tiles_launch_##name(                        \
		const struct kvg_decode_params *params, cudaStream_t stream)   \
	{                                                                      \
		return tiles::launch_walk<tiles::__VA_ARGS__>(params, stream); \
	}                                                                      \
	extern "C" cudaError_t kvg_tiles_load_##name(void)                     \
	{                                                                      \
		using variant = tiles::__VA_ARGS__;                            \
		static_assert(variant::HEADS == kvg_listed_heads_##name &&     \
				variant::TOKENS == kvg_listed_tokens_##name,   \
			"as variants.h lists it");                             \
		return tiles::load_walk<variant>();                            \
	}

#endif
