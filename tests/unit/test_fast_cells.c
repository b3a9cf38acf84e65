/*
 * Cells of (K format, V format, K dim, V dim, head ratio, block size, options, exact window, rotated) on
 * every set of fast kernels that this processor runs, against float64 attention over the decoded rows: every
 * two values in some cell, every set of options, and a slice of the product that is another one in every run.
 * Loop index: the set.
 *
 * test_fast_cells [slice SEED]: that slice. test_fast_cells product [PART N_PARTS]: the whole product of
 * formats, head_dims, ratios, block sizes and options, or one of N_PARTS parts of it. A million cells a set:
 * an hour.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "core/backend_cpu_internal.h"
#include "core/checked.h"
#include "core/fast_decode.h"
#include "tests/lib/batch_rig.h"
#include "tests/lib/pairs.h"

#define N_SETS 2
#define N_SEEN 93u
#define HEADS  2u /* KV */
#define SLICE  40u
/* core/FAST.md: numbers, tables of whole numbers, codebooks. */
#define BOUND_NUMBERS 1e-5
#define BOUND_WHOLE   1e-3
#define BOUND_TABLES  2e-3

/* What a pool may have beside its formats. */
enum {
	WINDOW = 1,
	SINK_TOKENS = 2,
	SOFTCAP = 4,
	SCALE = 8,
	SINKS = 16,
	ALIBI = 32,
	CENTER = 64,
	OPTION_SETS = 128
};
static const uint32_t option_sets[] = { 0, WINDOW, WINDOW | SINK_TOKENS, SOFTCAP, SCALE, SINKS, ALIBI, CENTER,
	OPTION_SETS - 1 };
static const uint32_t dims[] = { 64, 16, 48, 80, 96, 112, 128, 192, 256 };
static const uint32_t ratios[] = { 4, 1, 2, 3, 5, 6, 7, 8, 12, 16 };
static const uint32_t rings[] = { 64, 0, 128 }; /* exact_tokens: some of N_SEEN, none, all */

/* Queries and outputs in the rows' basis: neither, either, both. */
static const uint8_t rotated[] = { 0, KV_DECODE_Q_ROTATED, KV_DECODE_OUT_ROTATED,
	KV_DECODE_Q_ROTATED | KV_DECODE_OUT_ROTATED };

/* Factors of a cell; values are indices of the arrays above, and of the formats. */
enum { K_FORMAT, V_FORMAT, K_DIM, V_DIM, RATIO, BLOCK, OPTIONS, RING, ROTATED, N_FACTORS };

/* As rows are in the formats' own words: a name's family tells what is rounded. */
static double bound_of(const struct kv_fast_kernels *kernels, const char *k, const char *v)
{
	const char *names[2] = { k, v };
	double bound = BOUND_NUMBERS;

	for (int i = 0; i < 2; i++) {
		/* As K, E4M3 in a table costs a query a part that grows with the spread of logits. */
		const bool is_e4m3 = strcmp(names[i], "fp8") == 0;
		const bool is_table = strncmp(names[i], "t", 1) == 0 || (is_e4m3 && i == 0),
			   is_whole = strncmp(names[i], "v", 1) == 0 || is_e4m3;

		/* V of whole numbers whose sums are 16 bits wide is as good as codebooks are. */
		const bool is_short = i == 1 && names[i][0] == 'v' && kernels->code_of_short_slot;

		bound = is_table || is_short              ? BOUND_TABLES
			: is_whole && bound < BOUND_WHOLE ? BOUND_WHOLE
							  : bound;
	}
	return bound;
}

static bool is_served(const char *name, uint32_t dim)
{
	const struct kv_format *format = NULL;

	ck_assert_int_eq(kv_format_parse(name, &format, NULL), KV_OK);
	return kv_format_check(format, dim, NULL) == KV_OK;
}

/* Appends ,"name":[..] with a number for each of n heads, some of them negative. */
static void add_numbers(char *json, size_t size, const char *name, uint32_t n, double step)
{
	size_t at = strlen(json);

	at += (size_t)snprintf(json + at, size - at, ",\"%s\":[", name);
	for (uint32_t i = 0; i < n; i++)
		at += (size_t)snprintf(
			json + at, size - at, "%s%g", i ? "," : "", step * ((double)(i % 5) - 1.5));
	snprintf(json + at, size - at, "]");
}

/* Appends ,"k_center":[[[..],[..]]]: numbers of about 1, other ones for each head and channel. */
static void add_center(char *json, size_t size, uint32_t dim)
{
	size_t at = strlen(json);

	at += (size_t)snprintf(json + at, size - at, ",\"k_center\":[[");
	for (uint32_t i = 0; i < HEADS * dim; i++)
		at += (size_t)snprintf(json + at, size - at, "%s%g%s",
			i % dim > 0      ? ","
				: i == 0 ? "["
					 : ",[",
			0.3 * (double)(i % 7) - 0.9 + 0.1 * (double)(i / dim), i % dim + 1 < dim ? "" : "]");
	snprintf(json + at, size - at, "]]");
}

static void make_json(const uint32_t *cell, uint32_t options, char *json, size_t size)
{
	const uint32_t q_heads = HEADS * ratios[cell[RATIO]], block_size = 16u << cell[BLOCK];

	snprintf(json, size,
		"{\"name\":\"p\",\"layers\":1,\"q_heads\":%u,\"kv_heads\":%u,\"block_size\":%u,\"blocks\":%u,"
		"\"k_head_dim\":%u,\"v_head_dim\":%u,\"k\":\"%s\",\"v\":\"%s\"%s%s%s",
		q_heads, HEADS, block_size, 2 * 64 / block_size, dims[cell[K_DIM]], dims[cell[V_DIM]],
		kv_format_at(cell[K_FORMAT])->name, kv_format_at(cell[V_FORMAT])->name,
		options & WINDOW ? ",\"window\":50" : "", options & SINK_TOKENS ? ",\"sink_tokens\":21" : "",
		options & SOFTCAP ? ",\"softcap\":2.5" : "");
	/* Logits spread by 1.5 whatever the dim: half as far again as without. */
	if (options & SCALE)
		snprintf(json + strlen(json), size - strlen(json), ",\"scale\":%g",
			1.5 / sqrt((double)dims[cell[K_DIM]]));
	if (options & SINKS)
		add_numbers(json, size, "sinks", q_heads, 0.7);
	if (options & ALIBI)
		add_numbers(json, size, "alibi", q_heads, 0.02);
	if (options & CENTER)
		add_center(json, size, dims[cell[K_DIM]]);
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

static void check_cell(
	const struct kv_fast_kernels *kernels, uint32_t cell_idx, const uint32_t *cell, uint32_t options)
{
	const double bound =
		bound_of(kernels, kv_format_at(cell[K_FORMAT])->name, kv_format_at(cell[V_FORMAT])->name);
	const uint32_t n_ring = rings[cell[RING]], lo = n_ring < N_SEEN ? N_SEEN - n_ring : 0;
	struct kv_decode_op *ops[5];
	struct batch_rig rig;
	struct batch_seq seq;
	char json[8192];

	make_json(cell, options, json, sizeof(json));
	rig_init_with(&rig, cell_idx % 2, kernels, json);
	/* Nobody uses what nobody wrote: as numbers these are none. */
	spoil_pages(&rig);
	seq_init(&rig, &seq, 1 + cell_idx % 3, 1);
	seq_append(&rig, &seq, 0, 1, N_SEEN, KV_DTYPE_F32, true);
	ops[0] = seq_decode(&rig, &seq, 0, 1, N_SEEN);
	ops[1] = seq_decode(&rig, &seq, 0, 1, 1 + cell_idx % 33);
	ops[2] = seq_decode(&rig, &seq, 0, 1, 0);
	ops[3] = seq_decode(&rig, &seq, 0, 2, N_SEEN - cell_idx % 40);
	/* Narrowed by the request. */
	ops[4] = seq_decode(&rig, &seq, 0, cell_idx % 9 == 0 ? KV_Q_LEN_MAX : 1, N_SEEN);
	ops[4]->window = 30;
	ops[4]->scale *= 0.8f;
	ops[4]->flags = KV_DECODE_NO_SINKS;
	for (size_t i = 0; i < KV_LENGTH(ops); i += 2)
		ops[i]->flags |= rotated[cell[ROTATED]];
	if (n_ring > 0) {
		seq_use_ring(&rig, &seq, ops[0], lo);
		seq_use_ring(&rig, &seq, ops[3], lo + cell_idx % 7 * 3);
		seq_use_ring(&rig, &seq, ops[4], lo + cell_idx % 5 * 7);
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
	n[OPTIONS] = KV_LENGTH(option_sets);
	n[RING] = KV_LENGTH(rings);
	n[ROTATED] = KV_LENGTH(rotated);
	return n;
}

/*
 * K4: every two of a format of K, one of V, their dims, a ratio, a block size, an option, an exact window
 * and rotated queries or outputs meet in a cell, within the bound of what is rounded.
 */
START_TEST(test_fast_every_pair)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	struct pairs pairs;
	uint32_t cell[N_FACTORS], n_pairs;

	pairs_init(&pairs, N_FACTORS, n_values(), is_allowed);
	n_pairs = pairs.n_left;
	while (kernels && pairs_next(&pairs, cell))
		check_cell(kernels, pairs.n_rows, cell, option_sets[cell[OPTIONS]]);
	printf("test_fast_cells: %u cells for %u pairs\n", pairs.n_rows, n_pairs);
	ck_assert(!kernels || pairs.n_left == 0);
}
END_TEST

static bool is_cell(const uint32_t *cell)
{
	return is_allowed(K_FORMAT, cell[K_FORMAT], K_DIM, cell[K_DIM]) &&
		is_allowed(V_FORMAT, cell[V_FORMAT], V_DIM, cell[V_DIM]);
}

static bool is_power_of_two(uint32_t n)
{
	return (n & (n - 1)) == 0;
}

/* Every set of options, so every two and three of them too, without, with some and with only exact tokens. */
START_TEST(test_fast_every_set_of_options)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	const uint32_t *n = n_values();
	uint32_t cell[N_FACTORS], at = 0;

	for (uint32_t options = 0; kernels && options < OPTION_SETS; options++) {
		if ((options & (WINDOW | SINK_TOKENS)) == SINK_TOKENS)
			continue; /* refused when the pool is made */
		for (uint32_t ring = 0; ring < n[RING]; ring++) {
			/* Everything else in turn, without matrices, which take longer than all the rest. */
			do {
				at++;
				for (uint32_t f = 0, step = at; f < N_FACTORS; f++, step = step * 7 + 3)
					cell[f] = step % n[f];
			} while (!is_cell(cell) || !is_power_of_two(dims[cell[K_DIM]]) ||
				!is_power_of_two(dims[cell[V_DIM]]));
			cell[RING] = ring;
			check_cell(kernels, at, cell, options);
		}
	}
}
END_TEST

/* Cells of the product at random, other ones in every run; any set of options, K and V dims apart. */
static uint64_t slice_seed;

START_TEST(test_fast_slice)
{
	const struct kv_fast_kernels *kernels = kv_fast_kernels_at((uint32_t)_i);
	const uint32_t *n = n_values();
	uint64_t seed = slice_seed;

	printf("test_fast_cells: slice %llx\n", (unsigned long long)seed);
	for (uint32_t i = 0; kernels && i < SLICE; i++) {
		uint32_t cell[N_FACTORS], options;

		do {
			for (uint32_t f = 0; f < N_FACTORS; f++)
				cell[f] = (uint32_t)(kv_test_random(&seed) >> 32) % n[f];
		} while (!is_cell(cell));
		options = (uint32_t)(kv_test_random(&seed) >> 32) % OPTION_SETS;
		options |= options & SINK_TOKENS ? WINDOW : 0;
		check_cell(kernels, i, cell, options);
	}
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
		cell[ROTATED] = (uint32_t)(i / 7 % n[ROTATED]);
		if (!is_cell(cell))
			continue;
		check_cell(kernels, (uint32_t)i, cell, option_sets[cell[OPTIONS]]);
		if (++n_done % 10000 == 0)
			printf("%s: %llu cells, at %llu of %llu\n", kernels->name, (unsigned long long)n_done,
				(unsigned long long)i, (unsigned long long)n_cells);
	}
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("fast cells");
	TCase *tc = tcase_create("cells");

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
	slice_seed = argc > 2 ? strtoull(argv[2], NULL, 16) : (uint64_t)time(NULL);
	tcase_set_timeout(tc, 120);
	if (argc <= 2) {
		tcase_add_loop_test(tc, test_fast_every_pair, 0, N_SETS);
		tcase_add_loop_test(tc, test_fast_every_set_of_options, 0, N_SETS);
	}
	tcase_add_loop_test(tc, test_fast_slice, 0, N_SETS);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
