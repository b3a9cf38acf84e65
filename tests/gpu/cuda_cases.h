/*
 * The list of cases for the CUDA backend, and what every test does with one: a pool with rows of ragged
 * sequences on the device and in the oracle, rows compared without tolerance, outputs by relative L2 error.
 * Included by one program.
 */
#ifndef TESTS_GPU_CUDA_CASES_H
#define TESTS_GPU_CUDA_CASES_H

#include "tests/gpu/cuda_rig.h"

#define N_SEQS 9u

enum {
	K_CENTER = 1,
	CHANNEL_LISTS = 2,
	QR = 4,
	PER_LAYER = 8,
	NORM_CORRECTION = 16,
	SOFTCAP = 32,
	SINKS = 64,
	ALIBI = 128,
	SINK_TOKENS = 256,
	EXACT = 512,
};

/* k, v: a format, or the two of both layers as a JSON array. */
static const struct pool_case {
	const char *k, *v;
	uint32_t k_dim, v_dim, q_heads, kv_heads, block_size;
	double bound;
	uint32_t options;
} cases[] = {
	{ "f32", "f32", 64, 64, 4, 2, 16, 2e-5, 0 },
	{ "bf16", "bf16", 128, 128, 8, 2, 16, 2e-5, 0 },
	{ "f16", "f16", 16, 16, 1, 1, 32, 2e-5, 0 },
	{ "fp8", "fp8", 128, 128, 4, 1, 16, 2e-5, 0 },
	{ "f32", "bf16", 64, 256, 6, 2, 64, 2e-5, 0 },
	{ "tq1", "tq1", 128, 128, 4, 2, 16, 2e-5, 0 },
	{ "tq2", "tq2", 128, 128, 8, 2, 16, 5e-3, 0 },
	{ "tq2", "tq2", 128, 128, 16, 2, 32, 5e-3, 0 },
	{ "tq3", "tq3", 128, 128, 32, 8, 16, 5e-3, 0 },
	{ "tq3", "tq3", 128, 128, 10, 2, 64, 5e-3, 0 },
	{ "tq2", "tq2", 64, 64, 8, 2, 16, 5e-3, 0 },
	{ "tq3", "tq3", 64, 64, 8, 2, 16, 5e-3, 0 },
	{ "tq4", "tq4", 128, 128, 32, 8, 16, 2e-3, 0 },
	{ "tq4", "tq4", 128, 128, 8, 8, 32, 2e-3, 0 },
	{ "tq4", "tq4", 128, 128, 16, 2, 64, 2e-3, 0 },
	{ "tq4", "tq4", 128, 128, 24, 2, 16, 2e-3, 0 },
	{ "tq4", "tq4", 128, 128, 6, 2, 16, 2e-3, 0 },
	{ "tq4", "tq4", 64, 64, 4, 2, 16, 2e-3, 0 },
	{ "tq4", "tq4", 64, 64, 16, 2, 32, 2e-3, 0 },
	{ "tq4", "tq4", 64, 64, 9, 3, 64, 2e-3, 0 },
	{ "tq4", "tq2", 128, 128, 4, 2, 16, 3e-3, 0 },
	{ "tq4", "tq4", 32, 32, 2, 2, 16, 2e-5, 0 },
	{ "tq4", "tq4", 256, 256, 4, 2, 16, 2e-5, 0 },
	{ "tq4", "tq4", 80, 80, 4, 2, 16, 2e-5, 0 },
	{ "tq4", "tq4", 96, 96, 3, 1, 32, 2e-5, 0 },
	{ "tq4", "bf16", 128, 48, 1, 1, 32, 2e-5, 0 },
	{ "tq5", "tq6", 64, 64, 4, 2, 16, 2e-5, 0 },
	{ "tq7", "tq8", 112, 112, 4, 2, 16, 2e-5, 0 },
	{ "tq8", "tq8", 256, 256, 2, 1, 64, 2e-5, 0 },
	{ "tq3", "v4", 128, 128, 20, 2, 16, 2e-5, 0 },
	{ "bf16", "v2", 64, 64, 4, 2, 16, 2e-5, 0 },
	{ "bf16", "v3", 80, 80, 4, 2, 16, 2e-5, 0 },
	{ "v8", "v8", 128, 128, 4, 2, 32, 2e-5, 0 },
	{ "tqp2", "tqp3", 128, 128, 8, 2, 16, 2e-5, 0 },
	{ "tqp4", "tqp5", 96, 96, 4, 2, 16, 2e-5, 0 },
	{ "turboquant25", "turboquant25", 128, 128, 8, 2, 16, 2e-5, 0 },
	{ "turboquant35", "turboquant35", 80, 80, 4, 2, 16, 2e-5, 0 },
	{ "turboquant25", "turboquant35", 256, 256, 4, 1, 64, 2e-5, 0 },
	{ "tq3", "tq3", 16, 16, 2, 1, 16, 2e-5, 0 },
	{ "tq4", "tq4", 128, 128, 8, 2, 16, 2e-3, K_CENTER },
	{ "tq3", "tq3", 128, 128, 8, 2, 16, 5e-3, K_CENTER | PER_LAYER },
	{ "bf16", "bf16", 64, 64, 4, 2, 16, 2e-5, K_CENTER },
	{ "tq4", "tq4", 64, 64, 4, 2, 16, 2e-3, QR },
	{ "tq4", "tq4", 128, 128, 4, 1, 16, 2e-3, QR | PER_LAYER | NORM_CORRECTION },
	{ "tq2", "v2", 256, 256, 4, 2, 16, 2e-5, QR | NORM_CORRECTION | K_CENTER },
	{ "turboquant25", "turboquant25", 128, 128, 8, 2, 16, 2e-5, CHANNEL_LISTS },
	{ "turboquant25", "turboquant25", 64, 64, 6, 3, 32, 2e-5, CHANNEL_LISTS | K_CENTER },
	{ "[\"bf16\", \"tq4\"]", "[\"bf16\", \"tq4\"]", 128, 128, 8, 2, 16, 2e-3, 0 },
	{ "[\"tq2\", \"tq4\"]", "[\"tq2\", \"v4\"]", 128, 128, 8, 2, 16, 5e-3, K_CENTER },
	/* Options of attention: tiles take sinks and first tokens, the rest goes to the other kernel. */
	{ "tq4", "tq4", 128, 128, 8, 2, 16, 2e-3, SINKS | SINK_TOKENS },
	{ "tq4", "tq4", 64, 64, 16, 2, 32, 2e-3, SINK_TOKENS | K_CENTER },
	{ "tq3", "tq3", 128, 128, 4, 1, 16, 5e-3, SINKS | SINK_TOKENS | K_CENTER },
	{ "tq2", "tq2", 128, 128, 16, 2, 64, 5e-3, SINKS | SINK_TOKENS },
	{ "bf16", "bf16", 128, 128, 8, 2, 16, 2e-5, SOFTCAP | SINKS | ALIBI | SINK_TOKENS | K_CENTER },
	{ "f32", "f32", 64, 64, 4, 2, 32, 2e-5, SOFTCAP | K_CENTER },
	{ "tq4", "tq4", 128, 128, 8, 2, 16, 2e-5, SOFTCAP | SINKS },
	{ "tq3", "v4", 80, 80, 12, 2, 64, 2e-5, ALIBI | SINKS | SINK_TOKENS },
	/* The exact window beside pages of every kernel, and with every option. */
	{ "tq4", "tq4", 128, 128, 8, 2, 16, 2e-3, EXACT },
	{ "tq4", "tq4", 64, 64, 16, 2, 32, 2e-3, EXACT | SINKS | QR | NORM_CORRECTION },
	{ "tq3", "tq3", 128, 128, 4, 1, 16, 5e-3, EXACT | K_CENTER | SINKS },
	{ "tq2", "tq2", 128, 128, 24, 2, 64, 5e-3, EXACT },
	{ "tq4", "tq4", 128, 128, 4, 2, 16, 2e-5,
		EXACT | SOFTCAP | SINKS | ALIBI | SINK_TOKENS | K_CENTER | QR | PER_LAYER },
	{ "bf16", "f16", 64, 64, 4, 2, 16, 2e-5, EXACT | SOFTCAP | SINKS | ALIBI | SINK_TOKENS | K_CENTER },
	{ "f32", "bf16", 64, 256, 6, 2, 64, 2e-5, EXACT | SINK_TOKENS },
	{ "fp8", "f32", 128, 48, 1, 1, 32, 2e-5, EXACT | K_CENTER },
	{ "tq3", "v4", 80, 80, 12, 2, 64, 2e-5, EXACT | ALIBI | SINKS | SINK_TOKENS },
	{ "tqp4", "tqp5", 96, 96, 20, 2, 16, 2e-5, EXACT | SINK_TOKENS },
	{ "turboquant25", "turboquant25", 128, 128, 8, 2, 16, 2e-5, EXACT | CHANNEL_LISTS | K_CENTER },
	{ "[\"bf16\", \"tq4\"]", "[\"v8\", \"tq4\"]", 128, 128, 8, 2, 32, 2e-3, EXACT | K_CENTER },
	/* Integer tiles at 64 channels: more heads than four, not all of them there, one. */
	{ "tq2", "tq2", 64, 64, 16, 2, 32, 5e-3, K_CENTER | SINKS },
	{ "tq2", "tq2", 64, 64, 3, 3, 64, 5e-3, QR | PER_LAYER },
	{ "tq3", "tq3", 64, 64, 12, 1, 64, 5e-3, QR | NORM_CORRECTION },
	{ "tq3", "tq3", 64, 64, 5, 1, 16, 5e-3, EXACT | K_CENTER },
	/* K exactly, V in integers; tiles of several widths in one pool. */
	{ "tq4", "tq2", 128, 128, 12, 1, 32, 3e-3, K_CENTER | SINKS },
	{ "tq4", "tq2", 128, 128, 16, 2, 64, 3e-3, EXACT | QR | NORM_CORRECTION },
	{ "tq4", "tq2", 64, 64, 8, 2, 16, 3e-3, EXACT | K_CENTER },
	{ "tq4", "tq2", 64, 64, 5, 1, 32, 3e-3, PER_LAYER },
	{ "[\"tq4\", \"tq4\"]", "[\"tq2\", \"tq4\"]", 128, 128, 8, 2, 16, 3e-3, 0 },
	{ "[\"tq2\", \"tq4\"]", "[\"tq2\", \"tq2\"]", 64, 64, 8, 1, 64, 5e-3, 0 },
};

/* Of a pool without options: rows of any format are float32 sums, tiles round. */
static inline double bound_of_pair(const char *k, const char *v, uint32_t k_dim, uint32_t v_dim)
{
	const bool is_tq4 = strcmp(k, "tq4") == 0;

	if (k_dim != v_dim)
		return 2e-5;
	if (strcmp(k, v) == 0)
		return is_tq4 ? 2e-3 : 5e-3;
	return is_tq4 && strcmp(v, "tq2") == 0 ? 3e-3 : 2e-5;
}

/* The sequences of a case; on fibers everything is a thousand times slower. */
#ifdef TEST_ON_HOST
static const uint32_t lengths[N_SEQS] = { 0, 1, 15, 16, 17, 31, 49, 60, 130 };
#define EXACT_TOKENS 64u
#else
static const uint32_t lengths[N_SEQS] = { 0, 1, 15, 16, 17, 47, 100, 333, 800 };
#define EXACT_TOKENS 192u
#endif
#define LONGEST (lengths[8])
#define LONGER  (lengths[7])

struct rig_seq {
	uint32_t n_tokens;
	uint32_t table[64];
	uint32_t exact_lo; /* tokens from here on are in the ring as well */
	uint32_t ring[EXACT_TOKENS / 16];
};

static inline json_t *make_k_center(const struct pool_case *c)
{
	json_t *layers = json_array();
	uint64_t seed = 77;

	for (uint32_t l = 0; l < 2; l++) {
		json_t *heads = json_array();

		for (uint32_t h = 0; h < c->kv_heads; h++) {
			json_t *numbers = json_array();

			for (uint32_t i = 0; i < c->k_dim; i++)
				json_array_append_new(numbers,
					json_real((double)(kv_test_random(&seed) >> 40) / 8388608.0 - 1.0));
			json_array_append_new(heads, numbers);
		}
		json_array_append_new(layers, heads);
	}
	return layers;
}

/* Other channels on every layer, KV head and side: every fourth, and from another start. */
static inline json_t *make_channel_lists(const struct pool_case *c)
{
	json_t *recipe =
		json_pack("{s:i, s:s, s:i}", "version", 1, "recipe", c->k, "head_size", (int)c->k_dim);
	json_t *layers = json_object();

	for (uint32_t l = 0; l < 2; l++) {
		json_t *sides[2] = { json_array(), json_array() };

		for (uint32_t s = 0; s < 2; s++) {
			for (uint32_t h = 0; h < c->kv_heads; h++) {
				json_t *channels = json_array();

				for (uint32_t i = 0; i < c->k_dim / 4; i++)
					json_array_append_new(
						channels, json_integer(4 * i + (l + s + h) % 4));
				json_array_append_new(sides[s], channels);
			}
		}
		json_object_set_new(layers, l ? "1" : "0",
			json_pack("{s:o, s:o}", "key_high_precision_indices", sides[0],
				"value_high_precision_indices", sides[1]));
	}
	json_object_set_new(recipe, "layers", layers);
	return recipe;
}

static inline json_t *make_numbers(uint32_t n, double first, double step)
{
	json_t *numbers = json_array();

	for (uint32_t i = 0; i < n; i++)
		json_array_append_new(numbers, json_real(first + step * (i % 5)));
	return numbers;
}

static inline void add_options(const struct pool_case *c, json_t *pool)
{
	if (c->options & EXACT) {
		json_object_set_new(pool, "exact_tokens", json_integer(EXACT_TOKENS));
		json_object_set_new(
			pool, "exact_blocks", json_integer(N_SEQS * EXACT_TOKENS / c->block_size));
	}
	if (c->options & SOFTCAP)
		json_object_set_new(pool, "softcap", json_real(3.0));
	if (c->options & SINKS)
		json_object_set_new(pool, "sinks", make_numbers(c->q_heads, -1.0, 2.5));
	if (c->options & ALIBI)
		json_object_set_new(pool, "alibi", make_numbers(c->q_heads, 0.002, 0.01));
	if (c->options & SINK_TOKENS) {
		json_object_set_new(pool, "window", json_integer(LONGER));
		json_object_set_new(pool, "sink_tokens", json_integer(21));
	}
	if (c->options & K_CENTER)
		json_object_set_new(pool, "k_center", make_k_center(c));
	if (c->options & CHANNEL_LISTS)
		json_object_set_new(pool, "recipe", make_channel_lists(c));
	if (c->options & QR)
		json_object_set_new(pool, "rotation", json_string("qr"));
	if (c->options & PER_LAYER)
		json_object_set_new(pool, "per_layer", json_true());
	if (c->options & NORM_CORRECTION)
		json_object_set_new(pool, "norm_correction", json_true());
}

/* The same rows and queries in every run, others by TQKV_CASES_SEED in the environment (a number in hex). */
static inline uint64_t cases_seed(void)
{
	const char *asked = getenv("TQKV_CASES_SEED");

	return asked ? strtoull(asked, NULL, 16) : 0;
}

static inline uint64_t seed_of(const struct pool_case *c)
{
	uint64_t seed = cases_seed() * 1024 + c->options;

	for (const char *at = c->k; *at; at++)
		seed = seed * 31 + (uint8_t)*at;
	for (const char *at = c->v; *at; at++)
		seed = seed * 31 + (uint8_t)*at;
	return ((seed * 31 + c->k_dim) * 31 + c->q_heads) * 31 + c->block_size;
}

/* Some more than its tokens need. */
static inline uint32_t blocks_of(const struct pool_case *c, uint32_t seq)
{
	return lengths[seq] / c->block_size + 5;
}

/* Two layers of one group; every sequence has blocks of its own, in random order. */
static inline void begin_case(struct rig *rig, const struct pool_case *c, struct rig_seq seqs[N_SEQS])
{
	char json[512];
	uint32_t order[256], n_blocks = 0, n = 0;

	for (uint32_t s = 0; s < N_SEQS; s++)
		n_blocks += blocks_of(c, s);

	const char *quote = c->k[0] == '[' ? "" : "\"";

	snprintf(json, sizeof(json),
		"{\"name\": \"p\", \"layers\": 2, \"q_heads\": %u, \"kv_heads\": %u, \"k_head_dim\": %u, "
		"\"v_head_dim\": %u, \"k\": %s%s%s, \"v\": %s%s%s, \"block_size\": %u, \"blocks\": %u}",
		c->q_heads, c->kv_heads, c->k_dim, c->v_dim, quote, c->k, quote, quote, c->v, quote,
		c->block_size, n_blocks + 8);

	json_t *pool = json_loads(json, 0, NULL);

	ck_assert_ptr_nonnull(pool);
	add_options(c, pool);

	char *text = json_dumps(pool, 0);

	rig_init(rig, text, seed_of(c));
	free(text);
	json_decref(pool);
	rig_shuffle(rig, order, n_blocks + 8);
	for (uint32_t s = 0; s < N_SEQS; s++) {
		seqs[s].n_tokens = lengths[s];
		for (uint32_t i = 0; i < blocks_of(c, s); i++)
			seqs[s].table[i] = order[n++];
		seqs[s].exact_lo =
			c->options & EXACT && lengths[s] > EXACT_TOKENS ? lengths[s] - EXACT_TOKENS : 0;
	}
	n_blocks = N_SEQS * EXACT_TOKENS / c->block_size;
	rig_shuffle(rig, order, n_blocks);
	for (uint32_t i = 0; i < n_blocks; i++)
		seqs[i % N_SEQS].ring[i / N_SEQS] = order[i];
}

static inline int64_t slot_of(const struct rig *rig, const struct rig_seq *seq, uint32_t token)
{
	const uint32_t block_size = rig->spec->block_size;

	return (int64_t)seq->table[token / block_size] * block_size + token % block_size;
}

/* The place in the ring of a token, -1 before token `lo`. */
static inline int64_t exact_slot_of(
	const struct rig *rig, const struct rig_seq *seq, uint32_t lo, uint32_t token)
{
	const uint32_t block_size = rig->spec->block_size;

	return token < lo
		? -1
		: (int64_t)seq->ring[token / block_size % (EXACT_TOKENS / block_size)] * block_size +
			token % block_size;
}

/* Rows of tokens [first, end) in random order; those of the newest EXACT_TOKENS have places in the ring. */
static inline struct kv_update_op *add_update(struct rig *rig, const struct rig_seq *seq, uint32_t first,
	uint32_t end, enum kv_dtype k_dtype, enum kv_dtype v_dtype)
{
	const uint32_t n = end - first, exact_lo = end > EXACT_TOKENS ? end - EXACT_TOKENS : 0;
	const uint32_t n_layers = rig->spec->n_layers;
	struct kv_update_op *op = &rig->batch.updates[rig->batch.n_updates++];
	int64_t *slots = rig_take(rig, n * sizeof(*slots));
	int64_t *exact_slots = rig_take(rig, n * sizeof(*exact_slots));
	uint32_t order[1024];
	uint64_t n_bytes;

	rig_shuffle(rig, order, n);
	for (uint32_t t = 0; t < n; t++) {
		slots[t] = slot_of(rig, seq, first + order[t]);
		exact_slots[t] = exact_slot_of(rig, seq, exact_lo, first + order[t]);
	}
	*op = (struct kv_update_op){ .result_idx = rig->batch.n_results++,
		.n_layers = n_layers,
		.n_tokens = n,
		.slots = slots,
		.exact_slots = rig->spec->exact_tokens > 0 ? exact_slots : NULL };
	op->k = rig_rows(rig, false, n_layers, n, k_dtype, &n_bytes);
	op->v = rig_rows(rig, true, n_layers, n, v_dtype, &n_bytes);
	rig_draw_rows(rig, &op->k, false, n_layers * n * rig->spec->kv_heads);
	rig_draw_rows(rig, &op->v, true, n_layers * n * rig->spec->kv_heads);
	return op;
}

/*
 * All rows of all sequences, tokens of each in random order; runs it on both sides. One batch; with a ring
 * two, of which the second takes places of the first.
 */
static inline void fill(struct rig *rig, const struct rig_seq seqs[N_SEQS])
{
	static const enum kv_dtype dtypes[] = { KV_DTYPE_BF16, KV_DTYPE_F32, KV_DTYPE_F16 };
	const uint32_t n_parts = rig->spec->exact_tokens > 0 ? 2 : 1;

	for (uint32_t part = 0; part < n_parts; part++) {
		rig_begin(rig);
		for (uint32_t s = 0; s < N_SEQS; s++)
			add_update(rig, &seqs[s], seqs[s].n_tokens * part / n_parts,
				seqs[s].n_tokens * (part + 1) / n_parts, dtypes[s % 3], dtypes[(s + 1) % 3]);
		rig_run_cuda(rig);
		for (uint32_t i = 0; i < rig->batch.n_results; i++)
			ck_assert_uint_eq(rig->batch.results[i].status, KV_OK);
		rig_run_oracle(rig);
	}
}

/* Reads all rows of one sequence on both sides, the exact ones where there are any, and compares them without
 * tolerance. */
static inline void compare_rows(struct rig *rig, const struct rig_seq *seq, enum kv_dtype dtype)
{
	const uint32_t n = seq->n_tokens, n_layers = rig->spec->n_layers;
	struct kv_transfer_op *op;
	int64_t *slots, *exact_slots;
	uint64_t n_bytes[2];
	uint32_t order[1024];

	if (n == 0)
		return;
	rig_begin(rig);
	op = &rig->batch.transfers[rig->batch.n_transfers++];
	slots = rig_take(rig, n * sizeof(*slots));
	exact_slots = rig_take(rig, n * sizeof(*exact_slots));
	rig_shuffle(rig, order, n);
	for (uint32_t t = 0; t < n; t++) {
		slots[t] = slot_of(rig, seq, order[t]);
		exact_slots[t] = exact_slot_of(rig, seq, seq->exact_lo, order[t]);
	}
	*op = (struct kv_transfer_op){ .result_idx = rig->batch.n_results++,
		.n_layers = n_layers,
		.n_tokens = n,
		.slots = slots,
		.exact_slots = rig->spec->exact_tokens > 0 ? exact_slots : NULL };
	op->k = rig_rows(rig, false, n_layers, n, dtype, &n_bytes[0]);
	op->v = rig_rows(rig, true, n_layers, n, dtype, &n_bytes[1]);
	for (uint32_t side = 0; side < 2; side++)
		memset(side ? op->v.base : op->k.base, 0xAA, n_bytes[side]);
	rig_run_cuda(rig);

	uint8_t *found[2];

	for (uint32_t side = 0; side < 2; side++) {
		found[side] = malloc(n_bytes[side]);
		memcpy(found[side], side ? op->v.base : op->k.base, n_bytes[side]);
	}
	rig_run_oracle(rig);
	for (uint32_t side = 0; side < 2; side++) {
		const uint8_t *wanted = side ? op->v.base : op->k.base;
		const uint32_t row_bytes = rig_row_bytes(rig, side != 0, 0, dtype);

		for (uint64_t i = 0; i < n_bytes[side]; i++) {
			if (found[side][i] == wanted[i])
				continue;
			ck_abort_msg("%s rows (%s), sequence of %u tokens: row %llu byte %llu of %u is %02x, "
				     "expected %02x",
				side ? "V" : "K", kv_dtype_name(dtype), n,
				(unsigned long long)(i / row_bytes), (unsigned long long)(i % row_bytes),
				row_bytes, found[side][i], wanted[i]);
		}
		free(found[side]);
	}
}

struct decode_check {
	const struct kv_decode_op *op;
	uint8_t *out;
	float *lse;
};

/*
 * The ring for the op, from a token on that it has: all that it has, few, some or none of them. Blocks of
 * pages behind it are taken out of the table: nobody may read them.
 */
static inline void add_exact_table(struct rig *rig, const struct rig_seq *seq, struct kv_decode_op *op)
{
	const uint32_t block_size = rig->spec->block_size, seen = op->n_tokens_seen;
	const uint32_t n_ring = EXACT_TOKENS / block_size, kind = rig_below(rig, 8);
	const uint32_t n_held = seen > seq->exact_lo ? seen - seq->exact_lo : 0;
	uint32_t *table = rig_take(rig, (n_ring + 1) * sizeof(*table));

	if (n_held == 0 || kind == 7)
		return;
	op->exact_lo = kind < 4 ? seq->exact_lo
		: kind < 6      ? seen - 1 - rig_below(rig, n_held)
				: seen - 1 - rig_below(rig, n_held < 5 ? n_held : 5);
	op->exact_table = table;
	for (uint32_t b = op->exact_lo / block_size; b < kv_div_up_u32(seen, block_size); b++)
		table[b - op->exact_lo / block_size] = seq->ring[b % n_ring];
	for (uint32_t b = kv_div_up_u32(op->exact_lo, block_size); b < kv_div_up_u32(seen, block_size); b++)
		((uint32_t *)(uintptr_t)op->table)[b] = KV_BLOCK_NONE;
}

static inline struct kv_decode_op *add_decode(struct rig *rig, const struct rig_seq *seq, uint32_t layer,
	uint32_t q_len, uint32_t n_seen, float size)
{
	static const enum kv_dtype dtypes[] = { KV_DTYPE_F32, KV_DTYPE_BF16, KV_DTYPE_F16 };
	const struct kv_pool_spec *spec = rig->spec;
	const size_t n_queries = (size_t)q_len * spec->q_heads;
	const enum kv_dtype q_dtype = dtypes[rig_below(rig, 3)];
	struct kv_decode_op *op = &rig->batch.decodes[rig->batch.n_decodes++];
	float *q = malloc(n_queries * spec->k_head_dim * sizeof(*q));
	uint8_t *stored = rig_take(rig, n_queries * spec->k_head_dim * sizeof(float));
	uint32_t *table = rig_take(rig, sizeof(seq->table));

	memcpy(table, seq->table, sizeof(seq->table));
	for (size_t i = 0; i < n_queries * spec->k_head_dim; i++)
		q[i] = rig_number(rig) * size;
	kv_rows_store(q_dtype, q, n_queries * spec->k_head_dim, stored);
	free(q);
	*op = (struct kv_decode_op){ .result_idx = rig->batch.n_results++,
		.layer = layer,
		.q_len = q_len,
		.n_tokens_seen = n_seen,
		.scale = spec->layers[layer].scale,
		.q_dtype = (uint8_t)q_dtype,
		.out_dtype = KV_DTYPE_F32,
		.table = table,
		.q = stored,
		.out = rig_take(rig, n_queries * spec->v_head_dim * sizeof(float)),
		.lse = rig_take(rig, n_queries * sizeof(float)) };
	memset(op->out, 0xAA, n_queries * spec->v_head_dim * sizeof(float));
	memset(op->lse, 0xAA, n_queries * sizeof(float));
	if (spec->exact_tokens > 0)
		add_exact_table(rig, seq, op);
	return op;
}

/*
 * What rounding outputs to a dtype adds: half of its last place on either side, and of the smallest number it
 * has for every channel.
 */
static inline double rounding_of(enum kv_dtype dtype)
{
	return dtype == KV_DTYPE_F16 ? 0x1p-11 : dtype == KV_DTYPE_BF16 ? 0x1p-8 : 0;
}

static inline double least_step_of(enum kv_dtype dtype)
{
	return dtype == KV_DTYPE_F16 ? 0x1p-24 : 0;
}

static inline void compare_lse(
	const struct kv_decode_op *op, uint32_t query, float found, float wanted, double bound)
{
	if (isinf(wanted))
		ck_assert(isinf(found) && found < 0);
	else if (!(fabs((double)found - (double)wanted) <= bound * (1 + fabs((double)wanted))))
		ck_abort_msg("layer %u, %u tokens, query %u: log-sum-exp %g, expected %g", op->layer,
			op->n_tokens_seen, query, (double)found, (double)wanted);
}

/* Outputs of the device beside those of the oracle, query by query. */
static inline double compare_decode(const struct rig *rig, const struct decode_check *check, double bound)
{
	const struct kv_pool_spec *spec = rig->spec;
	const struct kv_decode_op *op = check->op;
	const enum kv_dtype dtype = (enum kv_dtype)op->out_dtype;
	const uint64_t row_bytes = (uint64_t)spec->v_head_dim * kv_dtype_bytes(dtype);
	const double least = least_step_of(dtype) * sqrt((double)spec->v_head_dim);
	float found[KV_HEAD_DIM_MAX], wanted[KV_HEAD_DIM_MAX];
	double worst = 0;

	for (uint32_t query = 0; query < op->q_len * spec->q_heads; query++) {
		double error = 0, norm = 0;

		kv_rows_load_f32(dtype, check->out + query * row_bytes, spec->v_head_dim, found);
		kv_rows_load_f32(dtype, op->out + query * row_bytes, spec->v_head_dim, wanted);
		for (uint32_t i = 0; i < spec->v_head_dim; i++) {
			error += ((double)found[i] - (double)wanted[i]) *
				((double)found[i] - (double)wanted[i]);
			norm += (double)wanted[i] * (double)wanted[i];
		}

		const double excess = fmax(sqrt(error) - least - rounding_of(dtype) * sqrt(norm), 0);
		const double relative = norm > 0 ? excess / sqrt(norm) : sqrt(error);

		if (!(relative <= bound) || isnan(error))
			ck_abort_msg("layer %u, %u tokens, exact from %u, window %u, q_len %u, %s, query %u: "
				     "relative error %g above %g, first numbers %g, expected %g",
				op->layer, op->n_tokens_seen,
				op->exact_table ? op->exact_lo : op->n_tokens_seen, op->window, op->q_len,
				kv_dtype_name(dtype), query, relative, bound, (double)found[0],
				(double)wanted[0]);
		worst = relative > worst ? relative : worst;
		if (op->lse)
			compare_lse(op, query, check->lse[query], op->lse[query], bound);
	}
	return worst;
}

static inline void run_and_compare_decodes(struct rig *rig, double bound, const char *name)
{
	struct decode_check checks[RIG_OPS_MAX];
	double worst = 0;

	rig_run_cuda(rig);
	for (uint32_t i = 0; i < rig->batch.n_decodes; i++) {
		const struct kv_decode_op *op = &rig->batch.decodes[i];
		const size_t n_queries = (size_t)op->q_len * rig->spec->q_heads;

		ck_assert_msg(rig->batch.results[op->result_idx].status == KV_OK, "decode %u: status %u", i,
			rig->batch.results[op->result_idx].status);
		checks[i] = (struct decode_check){ .op = op,
			.out = malloc(n_queries * rig->spec->v_head_dim * sizeof(float)),
			.lse = malloc(n_queries * sizeof(float)) };
		memcpy(checks[i].out, op->out,
			n_queries * rig->spec->v_head_dim * kv_dtype_bytes((enum kv_dtype)op->out_dtype));
		if (op->lse)
			memcpy(checks[i].lse, op->lse, n_queries * sizeof(float));
	}
	rig_run_oracle(rig);
	for (uint32_t i = 0; i < rig->batch.n_decodes; i++) {
		const double error = compare_decode(rig, &checks[i], bound);

		worst = error > worst ? error : worst;
		free(checks[i].out);
		free(checks[i].lse);
	}
	printf("%s: worst relative error %.2e of %.0e, kernels %u us\n", name, worst, bound,
		rig->batch.kernel_us);
}

#endif
