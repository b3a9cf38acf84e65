/*
 * The rows lie in three of the pool's four blocks, out of order, so that a backend that ignores the block
 * table fails too. The inputs are drawn from a generator instead of being stored: 64-bit LCG, its top 24 bits
 * are one number.
 */
#include "core/selftest.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

#include "core/checked.h"
#include "core/number.h"
#include "core/selftest_golden.h"

#define HEAD_DIM   64u
#define Q_HEADS    2u
#define BLOCK_SIZE 16u
#define N_BLOCKS   4u
#define N_TOKENS   40u
#define N_TABLE    3u
#define SEED       7870u
#define RESULTS    2u /* the update's and the decode's */

/*
 * Absolute, of outputs around 0.3: tensor cores and float16 tables err by about 0.001, one centroid that is
 * off by half a step moves some output by 0.056 or more. The log-sum-exp is around 5 and moves by 0.063 or
 * more.
 */
#define OUT_TOLERANCE 0.005f
#define LSE_TOLERANCE 0.02f

static const char pool_json[] =
	"{\"name\": \"selftest\", \"layers\": 1, \"q_heads\": 2, \"kv_heads\": 1, "
	"\"head_dim\": 64, \"k\": \"tq4\", \"v\": \"tq4\", \"block_size\": 16, \"blocks\": 4}";

/* Everything that the batch points to. */
struct area {
	struct kv_update_op update;
	struct kv_decode_op decode;
	struct kv_result results[RESULTS];
	int64_t slots[N_TOKENS];
	uint32_t table[N_TABLE];
	float k[N_TOKENS][HEAD_DIM];
	float v[N_TOKENS][HEAD_DIM];
	float q[Q_HEADS][HEAD_DIM];
	float out[Q_HEADS][HEAD_DIM];
	float lse[Q_HEADS];
};

static const uint32_t block_table[N_TABLE] = { 2, 0, 3 };

enum kv_status kv_selftest_spec_create(struct kv_pool_spec **out, struct kv_error *err)
{
	json_t *json = json_loads(pool_json, JSON_REJECT_DUPLICATES, NULL);

	if (!json)
		return kv_fail(err, KV_NO_MEMORY, "self-test pool");

	const enum kv_status status = kv_pool_spec_create(json, out, err);

	json_decref(json);
	return status;
}

uint64_t kv_selftest_area_bytes(void)
{
	return sizeof(struct area);
}

/* Numbers in [-1, 1), times `size`; both factors and the product are exact. */
static void draw(uint64_t *state, float size, float row[HEAD_DIM])
{
	for (uint32_t i = 0; i < HEAD_DIM; i++) {
		*state = *state * 6364136223846793005u + 1442695040888963407u;
		row[i] = ((float)(*state >> 40) / 8388608.0f - 1.0f) * size;
	}
}

static void draw_inputs(struct area *area)
{
	uint64_t state = SEED;

	for (uint32_t t = 0; t < N_TOKENS; t++)
		draw(&state, t % 3 == 0 ? 0.5f : (t % 3 == 1 ? 1.0f : 2.0f), area->k[t]);
	for (uint32_t t = 0; t < N_TOKENS; t++)
		draw(&state, t % 2 == 0 ? 1.0f : 2.0f, area->v[t]);
	for (uint32_t h = 0; h < Q_HEADS; h++)
		draw(&state, 8.0f, area->q[h]);
}

void kv_selftest_fill(const struct kv_pool_spec *spec, struct kv_backend_pool *pool, uint8_t *memory,
	struct kv_batch *batch)
{
	struct area *area = (struct area *)(void *)memory;

	KV_ASSERT((uintptr_t)memory % _Alignof(struct area) == 0);
	KV_ASSERT(spec->block_size == BLOCK_SIZE);
	KV_ASSERT(spec->n_blocks[0] == N_BLOCKS);
	memset(area, 0, sizeof(*area));
	draw_inputs(area);
	memcpy(area->table, block_table, sizeof(block_table));
	for (uint32_t t = 0; t < N_TOKENS; t++)
		area->slots[t] = block_table[t / BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE;
	for (uint32_t r = 0; r < RESULTS; r++)
		area->results[r] =
			(struct kv_result){ .status = KV_OK, .layer = KV_LAYER_NONE, .row = KV_ROW_NONE };
	for (uint32_t h = 0; h < Q_HEADS; h++) {
		area->lse[h] = NAN;
		for (uint32_t i = 0; i < HEAD_DIM; i++)
			area->out[h][i] = NAN;
	}
	area->update = (struct kv_update_op){ .result_idx = 0,
		.n_layers = 1,
		.n_tokens = N_TOKENS,
		.slots = area->slots,
		.k = { .base = (uint8_t *)area->k, .tokens_stride = N_TOKENS, .dtype = KV_DTYPE_F32 },
		.v = { .base = (uint8_t *)area->v, .tokens_stride = N_TOKENS, .dtype = KV_DTYPE_F32 } };
	area->decode = (struct kv_decode_op){ .result_idx = 1,
		.q_len = 1,
		.n_tokens_seen = N_TOKENS,
		.scale = 0.125f, /* 1 / sqrt(HEAD_DIM) */
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.table = area->table,
		.q = (const uint8_t *)area->q,
		.out = (uint8_t *)area->out,
		.lse = area->lse };
	*batch = (struct kv_batch){ .pool = pool,
		.updates = &area->update,
		.decodes = &area->decode,
		.results = area->results,
		.n_updates = 1,
		.n_decodes = 1,
		.n_results = RESULTS,
		.plan = memory,
		.plan_bytes_used = sizeof(*area) };
}

enum kv_status kv_selftest_check(const struct kv_batch *batch, struct kv_error *err)
{
	const struct area *area = (const struct area *)(const void *)batch->plan;

	for (uint32_t r = 0; r < RESULTS; r++) {
		if (area->results[r].status != KV_OK)
			return kv_fail(err, KV_INTERNAL,
				"known answer: the backend refused the %s with status %u",
				r == 0 ? "rows" : "query", area->results[r].status);
	}
	for (uint32_t h = 0; h < Q_HEADS; h++) {
		for (uint32_t i = 0; i < HEAD_DIM; i++) {
			const float found = area->out[h][i], wanted = selftest_out[h][i];

			/* Written so that NaN fails. */
			if (!(fabsf(found - wanted) <= OUT_TOLERANCE))
				return kv_fail(err, KV_INTERNAL,
					"known answer: query head %u channel %u is %g, expected %g within %g",
					h, i, (double)found, (double)wanted, (double)OUT_TOLERANCE);
		}
		if (!(fabsf(area->lse[h] - selftest_lse[h]) <= LSE_TOLERANCE))
			return kv_fail(err, KV_INTERNAL,
				"known answer: log-sum-exp of query head %u is %g, expected %g within %g", h,
				(double)area->lse[h], (double)selftest_lse[h], (double)LSE_TOLERANCE);
	}
	return KV_OK;
}
