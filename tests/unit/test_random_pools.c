/*
 * Random pools with random options: a pool is refused, with the member that is at fault, or every layer of it
 * decodes on every backend. Never is something refused at a decode that the pool was made with. The reference
 * is attention in float64 over the rows that a READ gives back.
 *
 * test_random_pools [N_POOLS [SEED]]. Built with TEST_CUDA the other backend is a GPU (exit 77 where there is
 * none) or, with TEST_ON_HOST, its kernels on this processor; else they are the sets of fast kernels.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "tests/lib/random_bench.h"

#ifdef TEST_ON_HOST
static uint32_t n_pools = 30;
#else
static uint32_t n_pools = 200;
#endif
static uint64_t first_seed;

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
		const bool is_e4m3 = strcmp(names[i], "fp8") == 0;
		const bool is_whole = names[i][0] == 'v' || is_e4m3;
		const bool is_short = i == 1 && names[i][0] == 'v' && kernels->code_of_short_slot;

		bound = fmax(bound,
			names[i][0] == 't' || is_short || (is_e4m3 && i == 0) ? 2e-3
				: is_whole                                    ? 1e-3
									      : 0);
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

/* ---- comparing ---- */

/*
 * Relative L2 error of one output, and of its log-sum-exp. What rounding to the output's dtype adds is half
 * of a last place, and of the smallest float16 for every number.
 */
static void compare(const char *text, const double *wanted, double wanted_lse, const struct kv_decode_op *op,
	uint32_t query, uint32_t n, double bound)
{
	const enum kv_dtype dtype = (enum kv_dtype)op->out_dtype;
	const double rounding = dtype == KV_DTYPE_F16 ? 0x1p-11 : dtype == KV_DTYPE_BF16 ? 0x1p-8 : 0;
	const double least = dtype == KV_DTYPE_F16 ? 0x1p-24 * sqrt(n) : 0, lse = (double)op->lse[query];
	double error = 0, norm = 0;
	float out[KV_HEAD_DIM_MAX];
	bool is_right;

	kv_rows_load_f32(dtype, op->out + (size_t)query * n * kv_dtype_bytes(dtype), n, out);
	for (uint32_t i = 0; i < n; i++) {
		error += ((double)out[i] - wanted[i]) * ((double)out[i] - wanted[i]);
		norm += wanted[i] * wanted[i];
	}
	is_right = sqrt(error) <= (bound + rounding) * sqrt(norm) + least &&
		(isinf(wanted_lse) ? lse == wanted_lse
				   : fabs(lse - wanted_lse) <= bound * (1 + fabs(wanted_lse)));
	if (!is_right)
		ck_abort_msg(
			"%s: layer %u, %u tokens, row %u of %u: relative error %g above %g, log-sum-exp %g, "
			"expected %g",
			text, op->layer, op->n_tokens_seen, query, op->q_len, sqrt(error / norm), bound, lse,
			wanted_lse);
}

/* Rows that the op sees on its layer, [tokens, kv_heads, dim]; the caller's to free. */
static float *rows_of(const struct kv_pool_spec *spec, const struct answer *answer,
	const struct kv_decode_op *op, bool is_v)
{
	const uint32_t n = answer->batch.transfers->n_tokens, seen = op->n_tokens_seen;
	const size_t token = (size_t)spec->kv_heads * (is_v ? spec->v_head_dim : spec->k_head_dim);
	const float *paged = (is_v ? answer->v : answer->k) + op->layer * n * token;
	const float *exact = (is_v ? answer->exact_v : answer->exact_k) + op->layer * n * token;
	const uint32_t lo = op->exact_table ? op->exact_lo : seen;
	float *rows = malloc((seen + 1) * token * sizeof(*rows));

	ck_assert_ptr_nonnull(rows);
	memcpy(rows, paged, lo * token * sizeof(*rows));
	memcpy(rows + lo * token, exact + lo * token, (seen - lo) * token * sizeof(*rows));
	return rows;
}

/*
 * One query of a decode, over the rows that were read back. A query in the rows' basis is turned back, an
 * output turned as it is wanted.
 */
static void attend(const struct kv_pool_spec *spec, const float *k, const float *v,
	const struct kv_decode_op *op, uint32_t row, uint32_t q_head, double *out, double *lse)
{
	const struct kv_layer_spec *layer = &spec->layers[op->layer];
	const uint32_t head = q_head / (spec->q_heads / spec->kv_heads), n = op->n_tokens_seen;
	const double sink = layer->sinks ? (double)layer->sinks[q_head] : 0;
	double y[KV_HEAD_DIM_MAX], x[KV_HEAD_DIM_MAX];
	float q[KV_HEAD_DIM_MAX];
	const struct kv_attention_exact_input input = {
		.q = q,
		.k = k + (size_t)head * spec->k_head_dim,
		.v = v + (size_t)head * spec->v_head_dim,
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

	kv_rows_load_f32((enum kv_dtype)op->q_dtype,
		op->q +
			((size_t)row * spec->q_heads + q_head) * spec->k_head_dim *
				kv_dtype_bytes((enum kv_dtype)op->q_dtype),
		spec->k_head_dim, q);
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

static bool are_numbers(const struct kv_decode_op *op, uint32_t query, uint32_t n)
{
	const enum kv_dtype dtype = (enum kv_dtype)op->out_dtype;
	float out[KV_HEAD_DIM_MAX];

	kv_rows_load_f32(dtype, op->out + (size_t)query * n * kv_dtype_bytes(dtype), n, out);
	return kv_rows_are_finite(out, n) && !isnan(op->lse[query]);
}

/* A backend's decode was to be served; true: it was. */
static bool check_status(
	const struct answer *answers, uint32_t bench_idx, uint32_t op_idx, bool is_huge, const char *text)
{
	const struct kv_decode_op *op = &answers[bench_idx].batch.decodes[op_idx];
	const uint16_t status = answers[bench_idx].batch.results[op->result_idx].status;
	const uint16_t scalar = answers[0].batch.results[op->result_idx].status;
	bool is_right = status == KV_OK;

	/* A GPU refuses where any intermediate result is too large; a CPU only where the answer is. */
	if (is_huge && status == KV_BAD_VALUE)
		is_right = strcmp(benches[bench_idx].backend->ops->name, "cuda") == 0 || scalar == status;
	if (!is_right)
		ck_abort_msg("%s: layer %u, status %u, scalar %u", text, op->layer, status, scalar);
	return status == KV_OK;
}

/* What all backends answered to a decode. */
static void check_decode(const struct kv_pool_spec *spec, const struct answer *answers, uint32_t op_idx,
	bool is_huge, const char *text)
{
	const struct kv_decode_op *op = &answers[0].batch.decodes[op_idx];
	const struct kv_layer_spec *layer = &spec->layers[op->layer];
	float *k = rows_of(spec, &answers[0], op, false), *v = rows_of(spec, &answers[0], op, true);
	double wanted[KV_HEAD_DIM_MAX], lse = 0;
	bool is_served[1 + N_OTHERS];

	for (uint32_t b = 0; b < n_benches; b++)
		is_served[b] = check_status(answers, b, op_idx, is_huge, text);
	for (uint32_t q = 0; q < op->q_len * spec->q_heads; q++) {
		attend(spec, k, v, op, q / spec->q_heads, q % spec->q_heads, wanted, &lse);
		for (uint32_t b = 0; b < n_benches; b++) {
			const struct kv_decode_op *own = &answers[b].batch.decodes[op_idx];

			if (!is_served[b])
				continue;
			/* A cap leaves nothing but the sign of a huge logit, and that of a small one is
			 * rounding. */
			if (is_huge && b > 0 && layer->softcap > 0)
				ck_assert(are_numbers(own, q, spec->v_head_dim));
			else
				compare(text, wanted, lse, own, q, spec->v_head_dim, bound_of(b, layer));
		}
	}
	free(k);
	free(v);
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
		const size_t k_bytes = n_rows * spec->k_head_dim * sizeof(float),
			     v_bytes = n_rows * spec->v_head_dim * sizeof(float);

		ck_assert_msg(memcmp(answers[b].k, scalar->k, k_bytes) == 0 &&
				memcmp(answers[b].v, scalar->v, v_bytes) == 0 &&
				memcmp(answers[b].exact_k, scalar->exact_k, k_bytes) == 0 &&
				memcmp(answers[b].exact_v, scalar->exact_v, v_bytes) == 0,
			"%s: rows differ", text);
	}
	for (uint32_t i = 0; scalar->status == KV_OK && i < scalar->batch.n_decodes; i++)
		check_decode(spec, answers, i, is_huge, text);
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

/* Tokens that a sequence has at most: now and then some pieces of the fast kernels. */
static uint32_t make_longer(json_t *json, uint32_t spoilt_per_mille, uint64_t *seed)
{
	const json_int_t block_size = json_integer_value(json_object_get(json, "block_size"));

	if (LONG_TOKENS == 0 || spoilt_per_mille > 0 || !random_one_of(seed, 16))
		return 90;
	json_object_set_new(json, "blocks", json_integer(LONG_TOKENS / block_size));
	return LONG_TOKENS;
}

/*
 * By how much a scale of the pool spreads logits of numbers of about 1 further than 3: what rounding costs an
 * output grows with that (core/DESIGN.md), and a scale may be any number.
 */
static double spread_of(const struct kv_pool_spec *spec)
{
	double spread = 3;

	for (uint32_t l = 0; l < spec->n_layers; l++)
		spread = fmax(spread, (double)spec->layers[l].scale * sqrt(spec->k_head_dim));
	return spread / 3;
}

/* True: the pool was made, and every backend served it. */
static bool try_pool(uint64_t seed, uint32_t spoilt_per_mille)
{
	struct answer answers[1 + N_OTHERS];
	json_t *json = random_pool_json(&seed, spoilt_per_mille);
	const uint32_t n_usual = make_longer(json, spoilt_per_mille, &seed);
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };
	const enum kv_status status = kv_pool_spec_create(json, &spec, &err);
	struct sizes sizes = draw_sizes(&seed, json);
	char *text = describe(json, &sizes);
	uint64_t n_bytes = 0;

	if (status != KV_OK) {
		ck_assert_ptr_null(spec);
		check_refusal(json, status, err.msg);
	} else {
		const uint32_t capacity = capacity_of(spec),
			       n = 1 + random_below(&seed, capacity < n_usual ? capacity : n_usual);

		if (!sizes.is_huge)
			sizes.q /= spread_of(spec);
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
