/*
 * Fast decodes against float64 attention over the decoded rows, on every set of kernels that this processor
 * runs: formats of K and V, dims, head ratios, block sizes, options and exact windows, every two of them in
 * some cell; long sequences; many waves. Loop index: the set.
 *
 * test_fast product [PART N_PARTS]: the whole product of formats, head_dims, ratios, block sizes and options
 * in place of the pairs, or one of N_PARTS parts of it. A million cells a set: an hour.
 */
#include <stdio.h>
#include <stdlib.h>

#include "core/backend_cpu_internal.h"
#include "core/checked.h"
#include "core/fast.h"
#include "core/fast_decode.h"
#include "tests/lib/batch_rig.h"
#include "tests/lib/pairs.h"

#define N_SETS 2
#define N_SEEN 93u
#define HEADS  2u /* KV */
/* core/DESIGN.md, Fast decodes: numbers, tables of whole numbers, codebooks. */
#define BOUND_NUMBERS 1e-5
#define BOUND_WHOLE   1e-3
#define BOUND_TABLES  2e-3

/* What a pool may have beside its formats; OF_HEADS ones take a number for every query head. */
static const struct cell_options {
	const char *json;
	bool has_sinks, has_alibi;
} options[] = {
	{ "", false, false },
	{ ",\"window\":37", false, false },
	{ ",\"window\":50,\"sink_tokens\":9", false, false },
	{ ",\"softcap\":2", false, false },
	{ ",\"scale\":0.2", false, false },
	{ "", true, false },
	{ "", false, true },
	{ ",\"window\":60,\"sink_tokens\":21,\"softcap\":3,\"scale\":0.15", true, true },
};
static const uint32_t dims[] = { 64, 16, 48, 80, 96, 112, 128, 192, 256 };
static const uint32_t ratios[] = { 4, 1, 2, 3, 5, 6, 7, 8, 12, 16 };
static const uint32_t rings[] = { 64, 0, 128 }; /* exact_tokens: some of N_SEEN, none, all */

/* Factors of a cell; values are indices of the arrays above, and of the formats. */
enum { K_FORMAT, V_FORMAT, K_DIM, V_DIM, RATIO, BLOCK, OPTIONS, RING, N_FACTORS };

/* As rows are in the formats' own words: a name's family tells what is rounded. */
static double bound_of(const char *k, const char *v)
{
	const char *names[2] = { k, v };
	double bound = BOUND_NUMBERS;

	for (int i = 0; i < 2; i++) {
		const bool is_table = strncmp(names[i], "t", 1) == 0,
			   is_whole = strncmp(names[i], "v", 1) == 0;

		bound = is_table ? BOUND_TABLES : is_whole && bound < BOUND_WHOLE ? BOUND_WHOLE : bound;
	}
	return bound;
}

static bool is_served(const char *name, uint32_t dim)
{
	const struct kv_format *format = NULL;

	ck_assert_int_eq(kv_format_parse(name, &format, NULL), KV_OK);
	return kv_format_check(format, dim, NULL) == KV_OK;
}

/* Appends ,"name":[..] with a number for each of n heads. */
static void add_numbers(char *json, size_t size, const char *name, uint32_t n, double step)
{
	size_t at = strlen(json);

	at += (size_t)snprintf(json + at, size - at, ",\"%s\":[", name);
	for (uint32_t i = 0; i < n; i++)
		at += (size_t)snprintf(
			json + at, size - at, "%s%g", i ? "," : "", step * (double)(1 + i % 5));
	snprintf(json + at, size - at, "]");
}

static void make_json(const uint32_t *cell, char *json, size_t size)
{
	const struct cell_options *own = &options[cell[OPTIONS]];
	const uint32_t q_heads = HEADS * ratios[cell[RATIO]], block_size = 16u << cell[BLOCK];

	snprintf(json, size,
		"{\"name\":\"p\",\"layers\":1,\"q_heads\":%u,\"kv_heads\":%u,\"block_size\":%u,\"blocks\":%u,"
		"\"k_head_dim\":%u,\"v_head_dim\":%u,\"k\":\"%s\",\"v\":\"%s\"%s",
		q_heads, HEADS, block_size, 2 * 64 / block_size, dims[cell[K_DIM]], dims[cell[V_DIM]],
		kv_format_at(cell[K_FORMAT])->name, kv_format_at(cell[V_FORMAT])->name, own->json);
	if (own->has_sinks)
		add_numbers(json, size, "sinks", q_heads, 0.7);
	if (own->has_alibi)
		add_numbers(json, size, "alibi", q_heads, 0.02);
	if (rings[cell[RING]] > 0)
		snprintf(json + strlen(json), size - strlen(json), ",\"exact_tokens\":%u,\"exact_blocks\":%u",
			rings[cell[RING]], rings[cell[RING]] / block_size);
	snprintf(json + strlen(json), size - strlen(json), "}");
}

static void spoil_pages(const struct batch_rig *rig)
{
	const struct kv_cpu_backend *cpu = kv_container_of(rig->backend, struct kv_cpu_backend, base);
	uint64_t n_bytes = 0;

	ck_assert_int_eq(rig->backend->ops->pool_check(rig->backend, rig->spec, &n_bytes, NULL), KV_OK);
	memset(cpu->arena + BATCH_RIG_ARENA_BYTES - n_bytes, 0xFF, n_bytes);
}

static void check_cell(const struct kv_fast_kernels *kernels, uint32_t cell_idx, const uint32_t *cell)
{
	const double bound = bound_of(kv_format_at(cell[K_FORMAT])->name, kv_format_at(cell[V_FORMAT])->name);
	const uint32_t n_ring = rings[cell[RING]], lo = n_ring < N_SEEN ? N_SEEN - n_ring : 0;
	struct kv_decode_op *ops[4];
	struct batch_rig rig;
	struct batch_seq seq;
	char json[2048];

	make_json(cell, json, sizeof(json));
	rig_init_with(&rig, cell_idx % 2, kernels, json);
	/* Nobody uses what nobody wrote: as numbers these are none. */
	spoil_pages(&rig);
	seq_init(&rig, &seq, 1 + cell_idx % 3, 1);
	seq_append(&rig, &seq, 0, 1, N_SEEN, KV_DTYPE_F32, true);
	ops[0] = seq_decode(&rig, &seq, 0, 1, N_SEEN);
	ops[1] = seq_decode(&rig, &seq, 0, 1, 1 + cell_idx % 33);
	ops[2] = seq_decode(&rig, &seq, 0, 1, 0);
	ops[3] = seq_decode(&rig, &seq, 0, 2, N_SEEN - cell_idx % 40);
	if (n_ring > 0) {
		seq_use_ring(&rig, &seq, ops[0], lo);
		seq_use_ring(&rig, &seq, ops[3], lo + cell_idx % 7 * 3);
	}
	rig_run(&rig);
	/* Only exact rows: nothing is rounded but float32 sums. */
	seq_check(&rig, &seq, ops[0], n_ring > 0 && lo == 0 ? BOUND_NUMBERS : bound);
	for (size_t i = 1; i < KV_LENGTH(ops); i++)
		seq_check(&rig, &seq, ops[i], bound);
	seq_finish(&seq);
	rig_finish(&rig);
}

/* A format is not served at every dim. */
static bool is_allowed(uint32_t factor, uint32_t value, uint32_t other, uint32_t other_value)
{
	if ((factor == K_FORMAT && other == K_DIM) || (factor == V_FORMAT && other == V_DIM))
		return is_served(kv_format_at(value)->name, dims[other_value]);
	return true;
}

static const uint32_t *n_values(void)
{
	static uint32_t n[N_FACTORS];

	n[K_FORMAT] = n[V_FORMAT] = kv_format_count();
	n[K_DIM] = n[V_DIM] = KV_LENGTH(dims);
	n[RATIO] = KV_LENGTH(ratios);
	n[BLOCK] = 3;
	n[OPTIONS] = KV_LENGTH(options);
	n[RING] = KV_LENGTH(rings);
	return n;
}

/*
 * K4: every two of a format of K, one of V, their dims, a ratio, a block size, an option and an exact window
 * meet in a cell, within the bound of what is rounded.
 */
START_TEST(test_fast_every_pair)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	struct pairs pairs;
	uint32_t cell[N_FACTORS], n_pairs;

	pairs_init(&pairs, N_FACTORS, n_values(), is_allowed);
	n_pairs = pairs.n_left;
	while (kernels && pairs_next(&pairs, cell))
		check_cell(kernels, pairs.n_rows, cell);
	printf("test_fast: %u cells for %u pairs\n", pairs.n_rows, n_pairs);
	ck_assert(!kernels || pairs.n_left == 0);
}
END_TEST

/* The whole product, with one dim for K and V; the exact windows in turn. */
static uint32_t part_idx, n_parts;

START_TEST(test_fast_product)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	const uint32_t *n = n_values();
	const uint64_t n_cells =
		(uint64_t)n[K_FORMAT] * n[V_FORMAT] * n[K_DIM] * n[RATIO] * n[BLOCK] * n[OPTIONS];
	uint64_t n_done = 0;

	for (uint64_t i = part_idx; kernels && i < n_cells; i += n_parts) {
		uint32_t cell[N_FACTORS] = { 0 };
		uint64_t rest = i;

		for (uint32_t f = 0; f < RING; f++) {
			if (f == V_DIM)
				continue;
			cell[f] = (uint32_t)(rest % n[f]);
			rest /= n[f];
		}
		cell[V_DIM] = cell[K_DIM];
		cell[RING] = (uint32_t)(i % n[RING]);
		if (!is_allowed(K_FORMAT, cell[K_FORMAT], K_DIM, cell[K_DIM]) ||
			!is_allowed(V_FORMAT, cell[V_FORMAT], V_DIM, cell[V_DIM]))
			continue;
		check_cell(kernels, (uint32_t)i, cell);
		if (++n_done % 10000 == 0)
			printf("%s: %llu cells, at %llu of %llu\n", kernels->name, (unsigned long long)n_done,
				(unsigned long long)i, (unsigned long long)n_cells);
	}
}
END_TEST

/* Groups of vN that the kernels do not take go through the scalar routine, and are exact. */
START_TEST(test_fast_other_groups_are_scalar)
{
	static const uint32_t groups[] = { 16, 20, 40, 64, 80 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);

	for (size_t g = 0; kernels && g < KV_LENGTH(groups); g++) {
		struct batch_rig rig;
		struct batch_seq seq;
		char json[512];

		snprintf(json, sizeof(json),
			"{\"name\":\"p\",\"layers\":1,\"q_heads\":4,\"kv_heads\":2,\"block_size\":16,"
			"\"blocks\":40,"
			"\"head_dim\":80,\"k\":\"v4\",\"v\":\"v8\",\"group\":%u}",
			groups[g]);
		rig_init_with(&rig, 0, kernels, json);
		seq_init(&rig, &seq, 0, 1);
		seq_append(&rig, &seq, 0, 1, N_SEEN, KV_DTYPE_F32, true);
		const struct kv_decode_op *op = seq_decode(&rig, &seq, 0, 2, N_SEEN);

		rig_run(&rig);
		seq_check(
			&rig, &seq, op, groups[g] % 32 == 0 || groups[g] == 80 ? BOUND_WHOLE : BOUND_NUMBERS);
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

#define LONG_POOL                                                                                           \
	"{\"name\":\"p\",\"layers\":1,\"q_heads\":6,\"kv_heads\":2,\"block_size\":16,\"blocks\":16,\"head_" \
	"dim\":32,"                                                                                         \
	"\"k\":\"tq4\",\"v\":\"tq3\",\"window\":%u,\"sink_tokens\":%u,\"exact_tokens\":256,\"exact_"        \
	"blocks\":16}"
#define LONG_SEEN 40000u /* more pieces than there are spans */

/* The newest n_exact tokens of the op come from ring blocks, the same ones again and again. */
static void use_long_ring(
	struct batch_rig *rig, const struct batch_seq *seq, struct kv_decode_op *op, uint32_t n_exact)
{
	uint32_t *table = rig_take(rig, (n_exact / 16 + 2) * sizeof(*table));

	op->exact_lo = op->n_tokens_seen - n_exact;
	for (uint32_t b = op->exact_lo / 16; b * 16 < op->n_tokens_seen; b++)
		table[b - op->exact_lo / 16] = seq->ring[(b * 7 + b / 11) % 16];
	op->exact_table = table;
}

/* A table that names the same blocks again and again. */
static struct kv_decode_op *long_decode(struct batch_rig *rig, const struct batch_seq *seq, uint32_t q_len)
{
	uint32_t *table = rig_take(rig, LONG_SEEN / 16 * sizeof(*table));
	struct kv_decode_op *op = seq_decode(rig, seq, 0, q_len, LONG_SEEN);

	for (uint32_t b = 0; b < LONG_SEEN / 16; b++)
		table[b] = seq->table[0][(b * 5 + b / 13) % 16];
	op->table = table;
	return op;
}

static void start_long(struct batch_rig *rig, struct batch_seq *seq, const struct kv_fast_kernels *kernels,
	uint32_t window, uint32_t sink_tokens)
{
	char json[512];

	snprintf(json, sizeof(json), LONG_POOL, window, sink_tokens);
	rig_init_with(rig, 0, kernels, json);
	seq_init(rig, seq, 0, 1);
	seq_append(rig, seq, 0, 1, 256, KV_DTYPE_F32, true);
	rig_run(rig);
	rig_begin(rig);
}

/* Relative L2 error of each of n heads of 32 channels, and their log-sum-exps, against the scalar backend's.
 */
static void compare_heads(
	const float *out, const float *wanted, const float *lse, const float *wanted_lse, uint32_t n)
{
	for (uint32_t h = 0; h < n; h++) {
		double error = 0, norm = 0;

		for (uint32_t i = 32 * h; i < 32 * (h + 1); i++) {
			error += (double)(out[i] - wanted[i]) * (double)(out[i] - wanted[i]);
			norm += (double)wanted[i] * (double)wanted[i];
		}
		ck_assert_double_le(sqrt(error), BOUND_TABLES * sqrt(norm));
		ck_assert_double_le(fabs((double)(lse[h] - wanted_lse[h])), BOUND_TABLES);
	}
}

/*
 * Many pieces in many spans, windows that begin anywhere, first tokens beside them, exact windows that begin
 * in the middle of a piece, in rotated bases and not: what the scalar backend gives.
 */
START_TEST(test_fast_long_sequences)
{
	static const struct {
		uint32_t window, sink_tokens, n_exact;
		uint8_t flags;
	} rows[] = {
		{ 0, 0, 0, 0 }, { 35000, 600, 0, 0 }, { 513, 1030, 0, KV_DECODE_Q_ROTATED },
		{ 0, 0, 5001, 0 }, { 35000, 600, 700, KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED },
		{ 513, 1030, 1100, KV_DECODE_OUT_ROTATED },
		{ 513, 1030, LONG_SEEN - 37, 0 }, /* first tokens, too, are exact but for the first 37 */
	};
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);

	for (size_t w = 0; kernels && w < KV_LENGTH(rows); w++) {
		const struct kv_fast_kernels *both[2] = { NULL, kernels };
		float out[2][6 * 32], lse[2][6];

		for (int b = 0; b < 2; b++) {
			struct batch_rig rig;
			struct batch_seq seq;

			start_long(&rig, &seq, both[b], rows[w].window, rows[w].sink_tokens);
			struct kv_decode_op *op = long_decode(&rig, &seq, 1);

			op->flags = rows[w].flags;
			if (rows[w].n_exact > 0)
				use_long_ring(&rig, &seq, op, rows[w].n_exact);
			rig_run(&rig);
			memcpy(out[b], op->out, sizeof(out[b]));
			memcpy(lse[b], op->lse, sizeof(lse[b]));
			seq_finish(&seq);
			rig_finish(&rig);
		}
		compare_heads(out[1], out[0], lse[1], lse[0], 6);
	}
}
END_TEST

/* The same bits alone, in the company of others, in several waves, and with any number of threads. */
START_TEST(test_fast_same_bits_in_any_company)
{
	enum { OPS = 24 };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	static float out[4][OPS][3 * 6 * 32];

	for (int run = 0; kernels && run < 4; run++) {
		struct batch_rig rig;
		struct batch_seq seq;
		struct kv_decode_op *ops[OPS];
		char json[512];

		snprintf(json, sizeof(json), LONG_POOL, 0u, 0u);
		rig_init_with(&rig, run == 0 ? 0 : 2 * (uint32_t)run - 1, kernels, json);
		seq_init(&rig, &seq, 0, 1);
		seq_append(&rig, &seq, 0, 1, 256, KV_DTYPE_F32, true);
		rig_run(&rig);
		rig.seed = 99; /* the same queries in every run */
		for (int n = 0; n < OPS; n++) {
			if (run == 0 || n == 0)
				rig_begin(&rig);
			ops[n] = n % 6 == 0 ? long_decode(&rig, &seq, 3)
					    : seq_decode(&rig, &seq, 0, 3, 3 + 10 * (uint32_t)n);
			if (n % 4 >= 2)
				use_long_ring(
					&rig, &seq, ops[n], ops[n]->n_tokens_seen / (1 + (uint32_t)n % 3));
			if (run == 0) {
				rig_run(&rig);
				memcpy(out[0][n], ops[n]->out, sizeof(out[0][n]));
			}
		}
		if (run > 0)
			rig_run(&rig);
		for (int n = 0; run > 0 && n < OPS; n++) {
			memcpy(out[run][n], ops[n]->out, sizeof(out[run][n]));
			ck_assert_mem_eq(out[run][n], out[0][n], sizeof(out[0][n]));
		}
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

/* Items that are larger than the workspace come in parts, in waves one after the other. */
START_TEST(test_fast_many_waves)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	const size_t n_numbers = (size_t)128 * 16, row_bytes = n_numbers * sizeof(float);
	struct kv_decode_op whole, *op;
	struct batch_rig rig;
	struct batch_seq seq;
	uint8_t *out;

	if (!kernels)
		return;
	rig_init_with(&rig, 0, kernels,
		"{\"name\":\"p\",\"layers\":1,\"q_heads\":128,\"kv_heads\":1,\"block_size\":16,\"blocks\":16,"
		"\"head_dim\":16,"
		"\"k\":\"bf16\",\"v\":\"bf16\"}");
	seq_init(&rig, &seq, 0, 1);
	seq_append(&rig, &seq, 0, 1, 256, KV_DTYPE_F32, true);
	rig_run(&rig);
	rig_begin(&rig);
	op = long_decode(&rig, &seq, 16); /* 16 rows of 128 queries of 64 spans of 128 bytes: 16 MiB */
	whole = *op;
	rig_run(&rig);
	out = malloc(16 * row_bytes);
	ck_assert_ptr_nonnull(out);
	memcpy(out, op->out, 16 * row_bytes);
	for (uint32_t r = 0; r < 16; r += 5) {
		*op = whole;
		op->q_len = 1;
		op->n_tokens_seen = LONG_SEEN - 15 + r;
		op->q = whole.q + r * row_bytes;
		rig_run(&rig);
		/* Not the same bits: where pieces are fewer, spans may be cut elsewhere. */
		for (size_t i = 0; i < n_numbers; i++)
			ck_assert_float_le(fabsf(((float *)(void *)op->out)[i] -
						   ((float *)(void *)out)[r * n_numbers + i]),
				1e-5f);
	}
	free(out);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* Maximum and exponentials of the kernels against the C library's. */
START_TEST(test_fast_softmax)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	float values[512], logits[512];
	double sum = 0;

	if (!kernels)
		return;
	for (uint32_t i = 0; i < 512; i++)
		logits[i] = i % 9 == 0 ? -INFINITY : 7.0f - 0.19f * (float)i;
	memcpy(values, logits, sizeof(values));
	ck_assert_float_eq(kernels->max(values, 512), logits[1]);

	const float got = kernels->exp_sum(values, 512, logits[1]);

	for (uint32_t i = 0; i < 512; i++) {
		const double exact = exp((double)(logits[i] - logits[1]));

		ck_assert_double_le(fabs((double)values[i] - exact), exact * 0x1p-21 + 1.2e-38);
		sum += exact;
	}
	ck_assert_double_le(fabs((double)got - sum), sum * 1e-6);
}
END_TEST

/*
 * A cap costs a logit a relative error of 2^-20, whatever the cap: one that is huge leaves all as they are.
 * The slope is one multiplication and one addition.
 */
START_TEST(test_fast_softcap_and_slopes)
{
	static const float caps[] = { 1e-3f, 0.5f, 30, 50, 1e3f, 1e5f, 4294967295.0f, 1e20f, 1e35f, 3e38f };
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	float values[512], logits[512];

	for (size_t c = 0; kernels && c < KV_LENGTH(caps); c++) {
		for (uint32_t i = 0; i < 512; i++)
			values[i] = logits[i] = i % 2 ? 60.0f - 0.3f * (float)i
						      : ldexpf(i % 4 ? 1.3f : -1.7f, 6 - (int)i / 8);
		kernels->bend(values, 512, 0, caps[c], -0.25f, -511);
		for (uint32_t i = 0; i < 512; i++) {
			const double capped = (double)caps[c] * tanh((double)logits[i] / (double)caps[c]);
			const double sloped = -0.25 * ((double)i - 511);

			ck_assert_double_le(fabs((double)values[i] - (capped + sloped)),
				0x1p-20 * fabs(capped) + 0x1p-23 * (fabs(capped) + fabs(sloped)));
		}
	}
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("fast");
	TCase *tc = tcase_create("decodes");

	if (!kv_fast_kernels_at(0))
		return 77; /* no set of kernels on this processor */
	if (argc > 1 && strcmp(argv[1], "product") == 0) {
		part_idx = argc > 3 ? (uint32_t)atoi(argv[2]) : 0;
		n_parts = argc > 3 && atoi(argv[3]) > 0 ? (uint32_t)atoi(argv[3]) : 1;
		setvbuf(stdout, NULL, _IOLBF, 0);
		tcase_set_timeout(tc, 0);
		tcase_add_loop_test(tc, test_fast_product, 0, N_SETS);
		suite_add_tcase(suite, tc);
		return kv_test_run(suite, CK_NOFORK);
	}
	tcase_set_timeout(tc, 120);
	tcase_add_loop_test(tc, test_fast_every_pair, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_other_groups_are_scalar, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_long_sequences, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_same_bits_in_any_company, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_many_waves, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_softmax, 0, N_SETS);
	tcase_add_loop_test(tc, test_fast_softcap_and_slopes, 0, N_SETS);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
