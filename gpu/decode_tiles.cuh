/*
 * Exact decode of tq4 tiles: paged attention at head dims 64 and 128, sm_90a.
 *
 * The stored rows are the A operand of mma.m16n8k16 (16 tokens, or 16 channels of V^T), the query heads are its
 * columns. Two indices at a time become two float16 centroids by one look-up in a table of 256 pairs that every
 * lane has for itself (64 KiB: entry e of lane l at 256 e + 4 l, so one byte permute makes the address and no two
 * lanes meet in a bank). Every warp streams units of tokens through a ring of its own by bulk copies; nothing in
 * the loop waits for another warp. Thread blocks share the list of units evenly, whatever the lengths; what a
 * block has of a (row, virtual head) when it leaves it is a partial result for the finish kernel.
 *
 * Weights: y = score + log2(norm of v), w = 2^(y - m) as float16, so no multiplication by the norm is left; the
 * denominator adds w / norm in float32. m moves only when a score passes it by 15, so w stays below 2^15.
 * Up to four heads (PARTS): every head has two columns, q and w split into a float16 and what it leaves over.
 */
#ifndef GPU_DECODE_TILES_CUH
#define GPU_DECODE_TILES_CUH

#include "gpu/decode_common.cuh"

#define TABLE_BYTES 65536u

namespace tiles
{

/* Indices of one lane, one in each nibble: D / 32 words for a token of K, D / 64 for each of two tokens of V. */
template <int D> static __device__ __forceinline__ void load_words(uint32_t address, uint32_t lane, uint32_t (&w)[D / 32])
{
	if constexpr (D == 128) {
		const uint4 v = load_16(address + lane * 16);

		w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
	} else {
		const uint2 v = load_8(address + lane * 8);

		w[0] = v.x, w[1] = v.y;
	}
}

/* TOKENS of a unit, STAGES of the ring of each of WARPS warps; SLOTS: warps that leave their sums side by side. */
template <int D, int TOKENS, int STAGES, int WARPS, bool PARTS, int SLOTS>
static __global__ void __launch_bounds__(WARPS * 32, 1) kernel(const __grid_constant__ struct kvg_decode_params params)
{
	constexpr uint32_t TILES = TOKENS / 16, NORMS_AT = 8 * D, HALF_BYTES = NORMS_AT + 64;
	constexpr uint32_t TILE_BYTES = 2 * HALF_BYTES, STAGE_BYTES = TILES * TILE_BYTES;
	constexpr int HEADS = PARTS ? 4 : 8, LANE_HEADS = PARTS ? 1 : 2, Q_WORDS = D / 8, SUMS = D / 16;
	constexpr uint32_t CHUNKS = D / 4;
	static_assert(WARPS % SLOTS == 0 && WARPS / SLOTS <= 2, "two warps share a slot at most");
	static_assert(SLOTS * HEADS * D <= 8192, "sums lie in the unused halves of the table's entries");
	extern __shared__ __align__(1024) uint8_t memory[];
	const uint32_t tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, c = lane % 4;
	float *const max_sums = (float *)(memory + TABLE_BYTES + WARPS * STAGES * STAGE_BYTES); /* [SLOTS][HEADS][2] */
	uint64_t *const barriers = (uint64_t *)(max_sums + SLOTS * HEADS * 2);
	const uint32_t table = shared_address(memory), lane4 = lane * 4;
	const uint32_t stages = table + TABLE_BYTES + warp * STAGES * STAGE_BYTES;
	const uint32_t barrier = shared_address(barriers + warp * STAGES);
	const struct kvg_tables &tables = params.tables;
	const uint32_t n_virtual = tables.kv_heads * params.n_chunks;
	const struct share share = find_share(params);
	struct cursor item = share.item;
	uint32_t item_unit = share.item_unit;
	ring<TOKENS, STAGES, WARPS, TILE_BYTES> ring(params, share, warp, stages, barrier);

	/* ---- the table, while the first units arrive ---- */
	for (uint32_t high = warp; high < 16; high += WARPS) {
		const uint32_t high_bits = tables.words[params.tile_table + high] << 16;
#pragma unroll
		for (uint32_t low = 0; low < 16; low++)
			*(uint32_t *)(memory + (high * 16 + low) * 256 + lane4) =
				high_bits | tables.words[params.tile_table + low];
	}
	__syncthreads();

	/* Float i of the buffer in the other half of every entry; chunk = channel / 4, spread over the banks by head. */
	auto sums_at = [&](uint32_t slot, uint32_t head, uint32_t chunk) -> float4 * {
		const uint32_t i = (slot * HEADS + head) * D + ((chunk ^ (PARTS ? head : head >> 1)) << 2);

		return (float4 *)(memory + (i >> 5) * 256 + 128 + 4 * (i & 31));
	};

	uint32_t stage = 0, parity = 0, unit = share.unit_first + warp;

	while (item_unit < share.unit_end) {
		const struct kvg_decode_row &row = params.rows[item.row_idx];
		const uint32_t token_first = row.token_lo / TOKENS * TOKENS, token_lo = row.token_lo, token_hi = row.token_hi;
		const uint32_t end = min(share.unit_end, item_unit + item.n_units);
		const uint32_t item_idx = item.row_idx * n_virtual + item.virtual_head;
		const uint4 *fragments = (const uint4 *)(params.q_prepared + ((uint64_t)item_idx * 32 + lane) * Q_WORDS);
		const float q_scale = params.q_scales[item_idx];
		uint32_t q[Q_WORDS];
		float o[SUMS][4], m[LANE_HEADS], l[LANE_HEADS];

#pragma unroll
		for (int i = 0; i < Q_WORDS / 4; i++) {
			const uint4 v = fragments[i];

			q[4 * i] = v.x, q[4 * i + 1] = v.y, q[4 * i + 2] = v.z, q[4 * i + 3] = v.w;
		}
#pragma unroll
		for (int h = 0; h < LANE_HEADS; h++)
			m[h] = -1e30f, l[h] = 0;
#pragma unroll
		for (int i = 0; i < SUMS; i++)
			o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;

		for (; unit < end; unit += WARPS) {
			const uint32_t base = stages + stage * STAGE_BYTES;
			float y[TILES][2 * LANE_HEADS]; /* log2(weight * norm of v): rows g and g + 8, their heads */
			float inverse[TILES][2];

			barrier_wait(barrier + 8 * stage, parity);
#pragma unroll
			for (uint32_t t = 0; t < TILES; t++) {
				const uint32_t at = base + t * TILE_BYTES;
				uint32_t a[D / 32], b[D / 32];
				float s[4] = { 0, 0, 0, 0 };

				load_words<D>(at, lane, a);
				load_words<D>(at + 4 * D, lane, b);

				const uint2 k_norms = load_8(at + NORMS_AT + g * 8);
				const uint2 v_norms = load_8(at + HALF_BYTES + NORMS_AT + g * 8);
#pragma unroll
				for (int i = 0; i < D / 32; i++) {
#pragma unroll
					for (int j = 0; j < 2; j++) {
						const uint32_t first = j ? 0x5524 : 0x5504, second = j ? 0x5534 : 0x5514;
						const int k = (i * 2 + j) * 2;

						multiply(s, look_up(table + byte_permute(a[i], lane4, first)),
							look_up(table + byte_permute(b[i], lane4, first)),
							look_up(table + byte_permute(a[i], lane4, second)),
							look_up(table + byte_permute(b[i], lane4, second)), q[k], q[k + 1]);
					}
				}

				/* A norm of 0 has no logarithm; its rows are 0 whatever their weight. */
				const float n0 = fmaxf(__uint_as_float(v_norms.x), 1e-30f), n1 = fmaxf(__uint_as_float(v_norms.y), 1e-30f);
				const float k0 = __uint_as_float(k_norms.x) * q_scale, k1 = __uint_as_float(k_norms.y) * q_scale;

				inverse[t][0] = reciprocal_fast(n0);
				inverse[t][1] = reciprocal_fast(n1);
				if constexpr (PARTS) {
					y[t][0] = fmaf(s[0] + s[1], k0, log2_fast(n0));
					y[t][1] = fmaf(s[2] + s[3], k1, log2_fast(n1));
				} else {
					y[t][0] = fmaf(s[0], k0, log2_fast(n0));
					y[t][1] = fmaf(s[1], k0, log2_fast(n0));
					y[t][2] = fmaf(s[2], k1, log2_fast(n1));
					y[t][3] = fmaf(s[3], k1, log2_fast(n1));
				}
			}

			const uint32_t token = token_first + (unit - item_unit) * TOKENS;

			if (token < token_lo || token + TOKENS > token_hi) {
#pragma unroll
				for (uint32_t t = 0; t < TILES; t++) {
#pragma unroll
					for (int r = 0; r < 2; r++) {
						const uint32_t at = token + t * 16 + g + 8 * r;

						if (at >= token_lo && at < token_hi)
							continue;
						inverse[t][r] = 0;
#pragma unroll
						for (int h = 0; h < LANE_HEADS; h++)
							y[t][r * LANE_HEADS + h] = -1e30f;
					}
				}
			}

			float largest[LANE_HEADS];
			bool is_above = false;

#pragma unroll
			for (int h = 0; h < LANE_HEADS; h++) {
				largest[h] = fmaxf(y[0][h], y[0][LANE_HEADS + h]);
#pragma unroll
				for (uint32_t t = 1; t < TILES; t++)
					largest[h] = fmaxf(largest[h], fmaxf(y[t][h], y[t][LANE_HEADS + h]));
				is_above |= largest[h] > m[h] + 15.0f;
			}
			if (__any_sync(0xFFFFFFFFu, is_above)) {
#pragma unroll
				for (int h = 0; h < LANE_HEADS; h++) {
					float x = largest[h];

					x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 4));
					x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 8));
					x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, 16));

					const float m_new = fmaxf(m[h], x - 8.0f), shrink = exp2_fast(m[h] - m_new);

					m[h] = m_new;
					l[h] *= shrink;
#pragma unroll
					for (int i = 0; i < SUMS; i++) {
						o[i][h] *= shrink;
						o[i][2 + h] *= shrink;
						if constexpr (PARTS) {
							o[i][1] *= shrink;
							o[i][3] *= shrink;
						}
					}
				}
			}

			uint32_t weights[TILES][2]; /* B fragments: tokens 0 to 7 and 8 to 15 of a tile */

#pragma unroll
			for (uint32_t t = 0; t < TILES; t++) {
#pragma unroll
				for (int r = 0; r < 2; r++) {
					if constexpr (PARTS) {
						const float x = exp2_fast(y[t][r] - m[0]);
						const float high = __uint_as_float(__float_as_uint(x) & 0xFFFFE000u);

						l[0] = fmaf(x, inverse[t][r], l[0]);
						weights[t][r] = transpose(pack_halves(high, x - high));
					} else {
						const float x0 = exp2_fast(y[t][2 * r] - m[0]), x1 = exp2_fast(y[t][2 * r + 1] - m[1]);

						l[0] = fmaf(x0, inverse[t][r], l[0]);
						l[1] = fmaf(x1, inverse[t][r], l[1]);
						weights[t][r] = transpose(pack_halves(x0, x1));
					}
				}
			}
#pragma unroll
			for (uint32_t t = 0; t < TILES; t++) {
				const uint32_t at = base + t * TILE_BYTES + HALF_BYTES;
				uint32_t a[D / 32], b[D / 32];

				load_words<D>(at, lane, a);
				load_words<D>(at + 4 * D, lane, b);
#pragma unroll
				for (int i = 0; i < D / 64; i++) {
					/* Bytes that hold one channel of two tokens: even channels, then odd ones. */
					const uint32_t a0 = a[i], a1 = a[D / 64 + i], b0 = b[i], b1 = b[D / 64 + i];
					const uint32_t even0 = (a0 & 0x0F0F0F0Fu) | ((a1 << 4) & 0xF0F0F0F0u);
					const uint32_t odd0 = ((a0 >> 4) & 0x0F0F0F0Fu) | (a1 & 0xF0F0F0F0u);
					const uint32_t even1 = (b0 & 0x0F0F0F0Fu) | ((b1 << 4) & 0xF0F0F0F0u);
					const uint32_t odd1 = ((b0 >> 4) & 0x0F0F0F0Fu) | (b1 & 0xF0F0F0F0u);
#pragma unroll
					for (int j = 0; j < 4; j++) {
						const uint32_t selector = 0x5504 | (j << 4);

						multiply(o[i * 4 + j], look_up(table + byte_permute(even0, lane4, selector)),
							look_up(table + byte_permute(odd0, lane4, selector)),
							look_up(table + byte_permute(even1, lane4, selector)),
							look_up(table + byte_permute(odd1, lane4, selector)), weights[t][0], weights[t][1]);
					}
				}
			}
			__syncwarp();
			ring.refill(stage);
			if (++stage == STAGES) {
				stage = 0;
				parity ^= 1;
			}
		}

		/* ---- the warps' sums become the block's ---- */
#pragma unroll
		for (int h = 0; h < LANE_HEADS; h++) {
			l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 4);
			l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 8);
			l[h] += __shfl_xor_sync(0xFFFFFFFFu, l[h], 16);
		}

		const uint32_t slot = warp % SLOTS, turn = warp / SLOTS;
		auto leave = [&](bool is_added) {
#pragma unroll
			for (int h = 0; h < LANE_HEADS; h++) {
				const uint32_t head = PARTS ? c : 2 * c + h;
				float *own = max_sums + (slot * HEADS + head) * 2;
				float mine = 1, theirs = 0;

				if (is_added) {
					const float m_new = fmaxf(m[h], own[0]);

					mine = exp2_fast(m[h] - m_new);
					theirs = exp2_fast(own[0] - m_new);
					l[h] = l[h] * mine + own[1] * theirs;
					m[h] = m_new;
				}
#pragma unroll
				for (int k = 0; k < SUMS / 2; k++) {
					float4 *at = sums_at(slot, head, SUMS / 2 * g + k);
					float4 v;

					if constexpr (PARTS)
						v = make_float4(o[2 * k][0] + o[2 * k][1], o[2 * k][2] + o[2 * k][3],
							o[2 * k + 1][0] + o[2 * k + 1][1], o[2 * k + 1][2] + o[2 * k + 1][3]);
					else
						v = make_float4(o[2 * k][h], o[2 * k][2 + h], o[2 * k + 1][h], o[2 * k + 1][2 + h]);
					if (is_added) {
						const float4 z = *at;

						v.x = v.x * mine + z.x * theirs;
						v.y = v.y * mine + z.y * theirs;
						v.z = v.z * mine + z.z * theirs;
						v.w = v.w * mine + z.w * theirs;
					}
					*at = v;
				}
				__syncwarp();
				if (g == 0) {
					own[0] = m[h];
					own[1] = l[h];
				}
			}
		};
		if (turn == WARPS / SLOTS - 1)
			leave(false);
		__syncthreads();
		if constexpr (WARPS > SLOTS) {
			if (turn == 0)
				leave(true);
			__syncthreads();
		}

		const uint64_t out_slot = slot_of_item(params, share, item, item_unit, item_idx);
		const uint32_t group = tables.q_heads / tables.kv_heads;
		const uint32_t n_heads = min(group - item.virtual_head % params.n_chunks * KVG_HEADS_MAX, params.n_heads);

		for (uint32_t x = tid; x < n_heads * CHUNKS; x += WARPS * 32) {
			const uint32_t head = x / CHUNKS, chunk = x % CHUNKS;
			float largest = -1e30f, sum = 0;
			float4 total_sum = make_float4(0, 0, 0, 0);

#pragma unroll
			for (int k = 0; k < SLOTS; k++)
				largest = fmaxf(largest, max_sums[(k * HEADS + head) * 2]);
#pragma unroll
			for (int k = 0; k < SLOTS; k++) {
				const float weight = exp2_fast(max_sums[(k * HEADS + head) * 2] - largest);
				const float4 v = *sums_at(k, head, chunk);

				sum += weight * max_sums[(k * HEADS + head) * 2 + 1];
				total_sum.x += weight * v.x;
				total_sum.y += weight * v.y;
				total_sum.z += weight * v.z;
				total_sum.w += weight * v.w;
			}

			const uint64_t at = out_slot * params.n_heads + head;

			*(float4 *)(params.partials + at * params.v_dim_max + chunk * 4) = total_sum;
			if (chunk == 0) {
				params.partials_ml[at * 2] = largest;
				params.partials_ml[at * 2 + 1] = sum;
			}
		}
		__syncthreads();
		item_unit += item.n_units;
		next_head(params, n_virtual, item);
	}
}

template <int D, int TOKENS, int STAGES, int WARPS, bool PARTS, int SLOTS> struct variant {
	static constexpr size_t shared_bytes = TABLE_BYTES +
		(size_t)WARPS * STAGES * (TOKENS / 16) * (2 * (8 * D + 64)) +
		SLOTS * (PARTS ? 4 : 8) * 2 * sizeof(float) + WARPS * STAGES * sizeof(uint64_t);
	static_assert(shared_bytes <= 227 * 1024, "shared memory of one SM");

	static cudaError_t launch(const struct kvg_decode_params *params, cudaStream_t stream)
	{
		kernel<D, TOKENS, STAGES, WARPS, PARTS, SLOTS>
			<<<params->n_blocks, WARPS * 32, shared_bytes, stream>>>(*params);
		return cudaGetLastError();
	}

	static cudaError_t load()
	{
		return cudaFuncSetAttribute(kernel<D, TOKENS, STAGES, WARPS, PARTS, SLOTS>,
			cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
	}
};

} // namespace tiles

/* One built variant: its launch and load functions, with C names. */
#define KVG_TILES_VARIANT(name, ...)                                                                           \
	extern "C" cudaError_t kvg_tiles_launch_##name(const struct kvg_decode_params *params, cudaStream_t stream) \
	{                                                                                                    \
		return tiles::variant<__VA_ARGS__>::launch(params, stream);                                    \
	}                                                                                                    \
	extern "C" cudaError_t kvg_tiles_load_##name(void)                                                     \
	{                                                                                                    \
		return tiles::variant<__VA_ARGS__>::load();                                                    \
	}

#endif
