/*
 * Random pools with random options: a pool is refused, with the member that is at fault, or every layer of it
 * decodes on every backend. Never is something refused at a decode that the pool was made with. The reference
 * is attention in float64 over the rows that a READ gives back.
 *
 * test_random_pools [N_POOLS [SEED]]. Built with TEST_CUDA the other backend is a GPU (exit 77 where there is
 * none) or, with TEST_ON_HOST, its kernels on this processor; else they are the sets of fast kernels.
 */
#include <math.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "core/attention.h"
#include "core/backend_cpu.h"
#include "core/fast.h"
#include "tests/lib/kv_core_test.h"
#include "tests/lib/random_pool.h"
#ifdef TEST_CUDA
#include "gpu/backend_cuda.h"
#endif

#define ARENA_BYTES  (32u << 20)
#define MEMORY_BYTES (16u << 20)
#define ROWS_MAX     3u /* query rows of an item */
#define OPS          3u /* decodes of a layer */
#define N_OTHERS     2u
#ifdef TEST_ON_HOST
static uint32_t n_pools = 30;
#else
static uint32_t n_pools = 200;
#endif
static uint64_t first_seed;

struct bench {
	struct kv_backend *backend;
	uint8_t *memory;
	uint64_t used;
};
static struct bench benches[1 + N_OTHERS]; /* the scalar one first */
static uint32_t n_benches;

/*
 * How large numbers are drawn. Scores are about 1 however large keys are, because queries are as small; or,
 * `is_huge`, no float32 can hold them. Then there is an answer where a cap or a sink decides, else BAD_VALUE.
 */
struct sizes {
	double k, v, q;
	bool is_huge;
};

/* What one backend answers. */
struct answer {
	enum kv_status status; /* of the rows; the rest is there when it is OK */
	struct kv_batch batch;
	float *k, *v; /* [layers, tokens, kv_heads, dim], as they are read */
};

static void *take(struct bench *bench, uint64_t n_bytes)
{
	uint8_t *ptr = bench->memory + bench->used;

	bench->used += (n_bytes + 63) / 64 * 64;
	ck_assert_uint_le(bench->used, MEMORY_BYTES);
	return ptr;
}

/* Outside of any test, where check has no assertions. */
static void open_bench(struct kv_backend *backend)
{
	struct bench *bench = &benches[n_benches];

	bench->backend = backend;
	KV_ASSERT(backend->ops->arena_create(backend, ARENA_BYTES, NULL) == KV_OK);
	bench->memory = backend->ops->host_alloc(backend, MEMORY_BYTES);
	KV_ASSERT(bench->memory);
	n_benches++;
}

static bool open_benches(void)
{
	struct kv_backend *backend = NULL;
	struct kv_error err = { .msg = "" };

	KV_ASSERT(kv_backend_cpu_create(0, &backend, &err) == KV_OK);
	open_bench(backend);
#ifdef TEST_CUDA
	if (kvg_backend_cuda_create(0, &backend, &err) == KV_OK)
		open_bench(backend);
	else
		printf("%s\n", err.msg);
#else
	for (uint32_t i = 0; i < N_OTHERS && kv_fast_kernels_at(i); i++) {
		KV_ASSERT(kv_backend_cpu_create_with(0, kv_fast_kernels_at(i), &backend, &err) == KV_OK);
		open_bench(backend);
	}
#endif
	return n_benches > 1;
}

static void close_benches(void)
{
	for (uint32_t i = 0; i < n_benches; i++) {
		benches[i].backend->ops->host_free(benches[i].backend, benches[i].memory, MEMORY_BYTES);
		benches[i].backend->ops->destroy(benches[i].backend);
	}
}

/* Relative error of outputs of a layer; the scalar backend's is 1e-5. */
static double bound_of(uint32_t bench_idx, const struct kv_layer_spec *layer)
{
	const char *names[2] = { layer->k->format->name, layer->v->format->name };
	double bound = 1e-5;

	if (bench_idx == 0)
		return bound;
#ifdef TEST_CUDA
	/* gpu/KERNELS.md: float32 sums, and tiles where K and V are alike, or tq4 and tq2. */
	if (strcmp(names[0], "tq4") == 0 && strcmp(names[1], "tq2") == 0 &&
		layer->k->head_dim == layer->v->head_dim)
		return 3e-3;
	if (strcmp(names[0], names[1]) != 0 || layer->k->head_dim != layer->v->head_dim)
		return 2e-5;
	return strcmp(names[0], "tq4") == 0 ? 2e-3 : 5e-3;
#endif
	/* core/DESIGN.md, Fast decodes: numbers, whole numbers, tables. */
	for (int i = 0; i < 2; i++) {
		const struct kv_fast_kernels *kernels = kv_fast_kernels_at(bench_idx - 1);
		const bool is_whole =
			names[i][0] == 'v' || (kernels->has_e4m3_tables && strcmp(names[i], "fp8") == 0);
		const bool is_short = i == 1 && names[i][0] == 'v' && kernels->code_of_short_slot;

		bound = fmax(bound, names[i][0] == 't' || is_short ? 2e-3 : is_whole ? 1e-3 : 0);
	}
	return bound;
}

/* ---- refusals ---- */

/* `pool "p": ` and the member that is at fault, then what is wrong with it. */
static void check_refusal(const json_t *json, enum kv_status status, const char *msg)
{
	static const char prefix[] = "pool \"p\": ";
	char *text = json_dumps(json, JSON_COMPACT);
	char word[32];
	size_t n = 0;

	ck_assert_msg(
		status == KV_BAD_CONFIG || status == KV_UNSUPPORTED, "%s: status %d, %s", text, status, msg);
	ck_assert_msg(strncmp(msg, prefix, strlen(prefix)) == 0, "%s: %s", text, msg);
	msg += strlen(prefix);
	while (n + 1 < sizeof(word) && (msg[n] == '_' || (msg[n] >= 'a' && msg[n] <= 'z'))) {
		word[n] = msg[n];
		n++;
	}
	word[n] = '\0';
	/* A member of this pool, or one that is missing. */
	ck_assert_msg(json_object_get(json, word) || strstr(msg, "is missing"), "%s: names no member: %s",
		text, msg);
	ck_assert_msg(
		strstr(msg + n, "expected ") || strstr(msg + n, ": "), "%s: does not say why: %s", text, msg);
	free(text);
}

/* ---- what is asked of every backend ---- */

/* A sequence has blocks 0, 1, .. from the end of the pool, and ring blocks likewise. */
static uint32_t block_of(uint32_t n_blocks, uint32_t entry)
{
	return n_blocks - 1 - entry;
}

static uint32_t capacity_of(const struct kv_pool_spec *spec)
{
	uint32_t n = spec->tokens_max;

	for (uint32_t g = 0; g < spec->n_groups; g++)
		n = spec->n_blocks[g] * spec->block_size < n ? spec->n_blocks[g] * spec->block_size : n;
	return n;
}

static int64_t *make_slots(struct bench *bench, const struct kv_pool_spec *spec, uint32_t n)
{
	int64_t *slots = take(bench, (uint64_t)spec->n_groups * n * sizeof(*slots));

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		for (uint32_t t = 0; t < n; t++)
			slots[g * n + t] = (int64_t)block_of(spec->n_blocks[g], t / spec->block_size) *
					spec->block_size +
				t % spec->block_size;
	}
	return slots;
}

/* The first token that the ring has; n: none, where there are too few ring blocks for one. */
static uint32_t exact_lo_of(const struct kv_pool_spec *spec, uint32_t n)
{
	if (spec->exact_tokens == 0 || spec->n_blocks[spec->n_groups] < spec->exact_tokens / spec->block_size)
		return n;
	return n > spec->exact_tokens ? n - spec->exact_tokens : 0;
}

static uint32_t ring_block_of(const struct kv_pool_spec *spec, uint32_t entry)
{
	return block_of(spec->n_blocks[spec->n_groups], entry % (spec->exact_tokens / spec->block_size));
}

static int64_t *make_exact_slots(struct bench *bench, const struct kv_pool_spec *spec, uint32_t n)
{
	const uint32_t lo = exact_lo_of(spec, n), block_size = spec->block_size;
	int64_t *slots = take(bench, n * sizeof(*slots));

	if (spec->exact_tokens == 0)
		return NULL;
	for (uint32_t t = 0; t < n; t++)
		slots[t] = t < lo
			? -1
			: (int64_t)ring_block_of(spec, t / block_size) * block_size + t % block_size;
	return slots;
}

static struct kv_rows make_rows(struct bench *bench, const struct kv_pool_spec *spec, bool is_v, uint32_t n)
{
	const uint32_t dim = is_v ? spec->v_head_dim : spec->k_head_dim;

	return (struct kv_rows){ .base = take(bench,
					 (uint64_t)spec->n_layers * n * spec->kv_heads * dim * sizeof(float)),
		.tokens_stride = n,
		.dtype = KV_DTYPE_F32 };
}

static void draw(uint64_t *seed, void *out, uint64_t n, double size)
{
	/* About normal. */
	for (uint64_t i = 0; i < n; i++)
		((float *)out)[i] =
			(float)(size * (random_unit(seed) + random_unit(seed) + random_unit(seed)));
}

/* Half of all pools have numbers of about 1. A centre, which is about that, is not to drown or be drowned. */
static struct sizes draw_sizes(uint64_t *seed, const json_t *pool)
{
	static const double of_k[] = { 1e-6, 50, 6e4, 1e18, 1e30 }, of_v[] = { 1e-6, 1, 50, 6e4, 1e30 };
	struct sizes sizes = { 1, 1, 1, false };

	if (random_one_of(seed, 2))
		return sizes;
	sizes.v = of_v[random_below(seed, KV_LENGTH(of_v))];
	if (json_object_get(pool, "k_center"))
		return sizes;
	sizes.k = of_k[random_below(seed, KV_LENGTH(of_k))];
	sizes.is_huge = random_one_of(seed, 6);
	sizes.q = sizes.is_huge ? 1e17 : 1 / sizes.k;
	sizes.k = sizes.is_huge ? 1e30 : sizes.k;
	return sizes;
}

static void begin_batch(struct bench *bench, struct kv_backend_pool *pool, struct kv_batch *batch)
{
	*batch = (struct kv_batch){ .pool = pool, .plan = bench->memory + bench->used };
	batch->updates = take(bench, sizeof(*batch->updates));
	batch->transfers = take(bench, sizeof(*batch->transfers));
	batch->decodes = take(bench, 16 * sizeof(*batch->decodes));
	batch->results = take(bench, 32 * sizeof(*batch->results));
	for (uint32_t i = 0; i < 32; i++)
		batch->results[i] =
			(struct kv_result){ .status = KV_OK, .layer = KV_LAYER_NONE, .row = KV_ROW_NONE };
}

static void run_batch(struct bench *bench, struct kv_batch *batch)
{
	const struct kv_backend_ops *ops = bench->backend->ops;
	struct pollfd finished = { .fd = ops->event_fd(bench->backend), .events = POLLIN };
	uint64_t count;

	ck_assert_int_eq(ops->submit(bench->backend, batch, NULL), KV_OK);
	while (!ops->reap(bench->backend)) {
		if (ops->will_sleep)
			ops->will_sleep(bench->backend);
		ck_assert_int_eq(poll(&finished, 1, 20000), 1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	ck_assert_int_eq(batch->status, KV_OK);
}

static void add_decode(struct bench *bench, const struct kv_pool_spec *spec, uint64_t *seed, double size,
	uint32_t layer_idx, uint32_t n, struct kv_batch *batch)
{
	const struct kv_layer_spec *layer = &spec->layers[layer_idx];
	struct kv_decode_op *op = &batch->decodes[batch->n_decodes++];
	const uint32_t q_len = 1 + random_below(seed, n < ROWS_MAX ? n : ROWS_MAX);
	const uint32_t window = random_one_of(seed, 3) ? 1 + random_below(seed, 50) : 0;
	const uint32_t n_blocks = (n + spec->block_size - 1) / spec->block_size;
	uint32_t *table = take(bench, n_blocks * sizeof(*table)),
		 *ring = take(bench, n_blocks * sizeof(*ring));

	for (uint32_t b = 0; b < n_blocks; b++)
		table[b] = block_of(spec->n_blocks[layer->group_idx], b);
	*op = (struct kv_decode_op){ .result_idx = batch->n_results++,
		.layer = layer_idx,
		.q_len = q_len,
		.n_tokens_seen = n,
		.window = window && (!layer->window || window < layer->window) ? window : layer->window,
		.scale = random_one_of(seed, 4) ? layer->scale * 0.7f : layer->scale,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.flags = (random_one_of(seed, 3) ? KV_DECODE_NO_SINKS : 0) |
			(random_one_of(seed, 2) ? KV_DECODE_Q_ROTATED : 0) |
			(random_one_of(seed, 2) ? KV_DECODE_OUT_ROTATED : 0),
		.table = table,
		.q = take(bench, (uint64_t)q_len * spec->q_heads * spec->k_head_dim * sizeof(float)),
		.out = take(bench, (uint64_t)q_len * spec->q_heads * spec->v_head_dim * sizeof(float)),
		.lse = take(bench, (uint64_t)q_len * spec->q_heads * sizeof(float)) };
	draw(seed, (float *)(uintptr_t)op->q, (uint64_t)q_len * spec->q_heads * spec->k_head_dim, size);
	memset(op->out, 0xAA, (size_t)q_len * spec->q_heads * spec->v_head_dim * sizeof(float));
	memset(op->lse, 0xAA, (size_t)q_len * spec->q_heads * sizeof(float));
	if (exact_lo_of(spec, n) == n)
		return;
	op->exact_lo = exact_lo_of(spec, n);
	op->exact_table = ring;
	for (uint32_t b = op->exact_lo / spec->block_size; b < n_blocks; b++)
		ring[b - op->exact_lo / spec->block_size] = ring_block_of(spec, b);
}

/* Appends n tokens on all layers, reads them back and decodes on every layer; the same in every backend. */
static void ask(struct bench *bench, const struct kv_pool_spec *spec, uint64_t seed,
	const struct sizes *sizes, uint32_t n, struct answer *answer)
{
	const struct kv_backend_ops *ops = bench->backend->ops;
	struct kv_backend_pool *pool = NULL;
	struct kv_batch batch;

	bench->used = 0;
	ck_assert_int_eq(ops->pool_create(bench->backend, spec, 0, &pool, NULL), KV_OK);
	begin_batch(bench, pool, &batch);
	batch.n_results = batch.n_updates = 1;
	*batch.updates = (struct kv_update_op){ .n_layers = spec->n_layers,
		.n_tokens = n,
		.slots = make_slots(bench, spec, n),
		.exact_slots = make_exact_slots(bench, spec, n),
		.k = make_rows(bench, spec, false, n),
		.v = make_rows(bench, spec, true, n) };
	draw(&seed, batch.updates->k.base, (uint64_t)spec->n_layers * n * spec->kv_heads * spec->k_head_dim,
		sizes->k);
	draw(&seed, batch.updates->v.base, (uint64_t)spec->n_layers * n * spec->kv_heads * spec->v_head_dim,
		sizes->v);
	run_batch(bench, &batch);
	answer->status = (enum kv_status)batch.results[0].status;
	if (answer->status != KV_OK) {
		ops->pool_destroy(bench->backend, pool);
		return;
	}

	begin_batch(bench, pool, &answer->batch);
	answer->batch.n_results = answer->batch.n_transfers = 1;
	*answer->batch.transfers = (struct kv_transfer_op){ .n_layers = spec->n_layers,
		.n_tokens = n,
		.slots = batch.updates->slots,
		.exact_slots = exact_lo_of(spec, n) < n ? batch.updates->exact_slots : NULL,
		.k = make_rows(bench, spec, false, n),
		.v = make_rows(bench, spec, true, n) };
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		for (uint32_t i = 0; i < OPS; i++)
			add_decode(bench, spec, &seed, sizes->q, l, n, &answer->batch);
	}
	run_batch(bench, &answer->batch);
	answer->k = (float *)(void *)answer->batch.transfers->k.base;
	answer->v = (float *)(void *)answer->batch.transfers->v.base;
	ops->pool_destroy(bench->backend, pool);
}

/* ---- comparing ---- */

/* Relative L2 error of one output, and of its log-sum-exp. */
static void compare(const char *text, const double *wanted, double wanted_lse, const float *out, float lse,
	uint32_t n, double bound)
{
	double error = 0, norm = 0;
	bool is_right;

	for (uint32_t i = 0; i < n; i++) {
		error += ((double)out[i] - wanted[i]) * ((double)out[i] - wanted[i]);
		norm += wanted[i] * wanted[i];
	}
	is_right = sqrt(error) <= bound * sqrt(norm) &&
		fabs((double)lse - wanted_lse) <= bound * (1 + fabs(wanted_lse));
	if (!is_right)
		ck_abort_msg("%s: relative error %g above %g, log-sum-exp %g, expected %g", text,
			sqrt(error / norm), bound, (double)lse, wanted_lse);
}

/*
 * One query of a decode, over the rows that were read back. A query in the rows' basis is turned back, an
 * output turned as it is wanted.
 */
static void attend(const struct kv_pool_spec *spec, const struct answer *answer,
	const struct kv_decode_op *op, uint32_t row, uint32_t q_head, double *out, double *lse)
{
	const struct kv_layer_spec *layer = &spec->layers[op->layer];
	const uint32_t head = q_head / (spec->q_heads / spec->kv_heads), n = op->n_tokens_seen;
	const size_t first = ((size_t)op->layer * n * spec->kv_heads + head);
	const double sink = layer->sinks ? (double)layer->sinks[q_head] : 0;
	double y[KV_HEAD_DIM_MAX], x[KV_HEAD_DIM_MAX];
	float q[KV_HEAD_DIM_MAX];
	const struct kv_attention_exact_input input = {
		.q = q,
		.k = answer->k + first * spec->k_head_dim,
		.v = answer->v + first * spec->v_head_dim,
		.k_stride = (uint64_t)spec->kv_heads * spec->k_head_dim,
		.v_stride = (uint64_t)spec->kv_heads * spec->v_head_dim,
		.k_dim = spec->k_head_dim,
		.v_dim = spec->v_head_dim,
		.tokens = kv_attention_range(n, op->q_len, row, op->window, layer->sink_tokens),
		.scale = (double)op->scale,
		.softcap = (double)layer->softcap,
		.slope = layer->alibi ? (double)layer->alibi[q_head] : 0,
		.sink = layer->sinks && !(op->flags & KV_DECODE_NO_SINKS) ? &sink : NULL,
	};

	memcpy(q, op->q + ((size_t)row * spec->q_heads + q_head) * spec->k_head_dim * sizeof(*q),
		spec->k_head_dim * sizeof(*q));
	for (uint32_t i = 0; i < spec->k_head_dim; i++)
		y[i] = (double)q[i];
	if (op->flags & KV_DECODE_Q_ROTATED)
		kv_row_codec_from_basis(kv_layer_k(layer, head), y, x);
	for (uint32_t i = 0; i < spec->k_head_dim && op->flags & KV_DECODE_Q_ROTATED; i++)
		q[i] = (float)x[i];
	kv_attention_exact(&input, out, lse);
	if (!(op->flags & KV_DECODE_OUT_ROTATED))
		return;
	kv_row_codec_to_basis(kv_layer_v(layer, head), out, y);
	memcpy(out, y, spec->v_head_dim * sizeof(*out));
}

/* What a backend answered to a decode, or should not have. */
static void check_decode(const struct kv_pool_spec *spec, const struct answer *answers, uint32_t bench_idx,
	uint32_t op_idx, bool is_huge, const char *text)
{
	const struct kv_decode_op *op = &answers[bench_idx].batch.decodes[op_idx];
	const struct kv_layer_spec *layer = &spec->layers[op->layer];
	const uint16_t status = answers[bench_idx].batch.results[op->result_idx].status;
	const uint16_t scalar = answers[0].batch.results[answers[0].batch.decodes[op_idx].result_idx].status;
	double wanted[KV_HEAD_DIM_MAX], lse = 0;
	bool is_right = status == KV_OK;

	/* A GPU refuses where any intermediate result is too large; a CPU only where the answer is. */
	if (is_huge && status == KV_BAD_VALUE)
		is_right = strcmp(benches[bench_idx].backend->ops->name, "cuda") == 0 || scalar == status;
	if (!is_right)
		ck_abort_msg("%s: layer %u, status %u, scalar %u", text, op->layer, status, scalar);
	for (uint32_t q = 0; status == KV_OK && q < op->q_len * spec->q_heads; q++) {
		const size_t at = (size_t)q * spec->v_head_dim;

		attend(spec, &answers[0], op, q / spec->q_heads, q % spec->q_heads, wanted, &lse);
		/* A cap leaves nothing but the sign of a huge logit, and that of a small one is rounding. */
		if (is_huge && bench_idx > 0 && layer->softcap > 0)
			ck_assert(kv_rows_are_finite((float *)(void *)op->out + at, spec->v_head_dim) &&
				isfinite(op->lse[q]));
		else
			compare(text, wanted, lse, (float *)(void *)op->out + at, op->lse[q],
				spec->v_head_dim, bound_of(bench_idx, layer));
	}
}

/* Rows are those of the scalar backend, outputs the exact ones. */
static void check_answers(
	const struct kv_pool_spec *spec, const struct answer *answers, bool is_huge, const char *text)
{
	const struct answer *scalar = &answers[0];

	for (uint32_t b = 0; b < n_benches; b++) {
		ck_assert_msg(answers[b].status == scalar->status, "%s: rows: status %d, scalar %d", text,
			answers[b].status, scalar->status);
		if (scalar->status != KV_OK)
			continue;

		const size_t n_rows =
			(size_t)spec->n_layers * scalar->batch.transfers->n_tokens * spec->kv_heads;

		ck_assert_msg(
			memcmp(answers[b].k, scalar->k, n_rows * spec->k_head_dim * sizeof(float)) == 0 &&
				memcmp(answers[b].v, scalar->v, n_rows * spec->v_head_dim * sizeof(float)) ==
					0,
			"%s: rows differ", text);
		for (uint32_t i = 0; i < scalar->batch.n_decodes; i++)
			check_decode(spec, answers, b, i, is_huge, text);
	}
}

/* A message of check's is at most 8 KiB, so the numbers of a centre are left out. free() it. */
static char *describe(json_t *json, const struct sizes *sizes)
{
	json_t *shown = json_copy(json);
	char *text, *out = NULL;

	if (json_object_get(shown, "k_center"))
		json_object_set_new(shown, "k_center", json_string("..."));
	text = json_dumps(shown, JSON_COMPACT);
	ck_assert_int_gt(asprintf(&out, "%s, K %g, V %g, Q %g", text, sizes->k, sizes->v, sizes->q), 0);
	free(text);
	json_decref(shown);
	return out;
}

/* True: the pool was made, and every backend served it. */
static bool try_pool(uint64_t seed, uint32_t spoilt_per_mille)
{
	struct answer answers[1 + N_OTHERS];
	json_t *json = random_pool_json(&seed, spoilt_per_mille);
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };
	const enum kv_status status = kv_pool_spec_create(json, &spec, &err);
	const struct sizes sizes = draw_sizes(&seed, json);
	char *text = describe(json, &sizes);
	uint64_t n_bytes = 0;

	if (status != KV_OK) {
		ck_assert_ptr_null(spec);
		check_refusal(json, status, err.msg);
	} else {
		const uint32_t capacity = capacity_of(spec),
			       n = 1 + random_below(&seed, capacity < 90 ? capacity : 90);

		for (uint32_t b = 0; b < n_benches; b++) {
			const struct kv_backend *backend = benches[b].backend;

			ck_assert_msg(
				backend->ops->pool_check(benches[b].backend, spec, &n_bytes, &err) == KV_OK,
				"%s: %s", text, err.msg);
			ck_assert_msg(
				n_bytes <= ARENA_BYTES, "%s: %llu bytes", text, (unsigned long long)n_bytes);
			ask(&benches[b], spec, seed, &sizes, n, &answers[b]);
		}
		check_answers(spec, answers, sizes.is_huge, text);
		kv_pool_spec_destroy(spec);
	}
	free(text);
	json_decref(json);
	return status == KV_OK;
}

/* K4: what the pool's JSON is accepted with is served by every backend, and what is refused says why. */
START_TEST(test_random_pools_are_refused_or_served)
{
	uint32_t n_served = 0;

	printf("test_random_pools: seed %llx\n", (unsigned long long)first_seed);
	for (uint32_t i = 0; i < n_pools; i++) {
		uint64_t seed = first_seed + i;

		kv_test_random(&seed);
		n_served += try_pool(seed, i % 4 == 3 ? 60 : 0);
	}
	printf("test_random_pools: %u of %u served by %u backends\n", n_served, n_pools, n_benches);
	ck_assert_uint_ge(n_served, n_pools / 4);
	ck_assert_uint_ge(n_pools - n_served, n_pools / 10);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("random pools");
	TCase *tc = tcase_create("random pools");
	int rc;

	if (!open_benches())
		return 77;
	n_pools = argc > 1 ? (uint32_t)atoi(argv[1]) : n_pools;
	first_seed = argc > 2 ? strtoull(argv[2], NULL, 16) : (uint64_t)time(NULL) << 20;
	tcase_add_test(tc, test_random_pools_are_refused_or_served);
	tcase_set_timeout(tc, 0);
	suite_add_tcase(suite, tc);
	rc = kv_test_run(suite, CK_NOFORK);
	close_benches();
	return rc;
}
