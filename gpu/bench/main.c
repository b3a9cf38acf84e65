/*
 * tqkv-kernel-bench [--json] [--brief]: what `tqkvctl bench kernels` runs. Every figure of one run is beside
 * the yardstick of the same run. --brief leaves out whatever takes longer than a shape's own times: sustained
 * runs, formats without tuned kernels. Exit 77 without a device.
 */
#include <stdio.h>
#include <string.h>

#include <jansson.h>

#include "gpu/bench/bench.h"
#include "gpu/bench/lengths.h"

#define READ_RATE_MIN 4.55e12 /* bytes per second: below it the run of an H200 is not valid */

struct column {
	const char *name;
	uint32_t q_heads, kv_heads, n_seqs, n_tokens;
	double wanted[3]; /* of tq4, tq3, tq2: share of the yardstick; or microseconds, below zero */
};

static const struct column columns[] = {
	{ "32/8, 64 x 8k", 32, 8, 64, 8192, { 0.86, 0.85, 0.76 } },
	{ "64/8, 16 x 32k", 64, 8, 16, 32768, { 0.87, 0.80, 0.66 } },
	{ "32/32, 16 x 4k", 32, 32, 16, 4096, { 0.80, 0.80, 0.66 } },
	{ "32/8, 1 x 128k", 32, 8, 1, 131072, { 0.68, 0.67, 0.55 } },
	{ "32/8, 1 x 4k", 32, 8, 1, 4096, { -8, -8, -8 } },
};

static const char *const formats[] = { "tq4", "tq3", "tq2" };
/* Tiles without a figure that is wanted, in the shapes of the first two columns. */
static const struct {
	const char *k, *v;
	uint32_t head_dim;
} other_tiles[] = {
	{ "tq4", "tq4", 64 },
	{ "tq3", "tq3", 64 },
	{ "tq2", "tq2", 64 },
	{ "tq4", "tq2", 128 },
	{ "tq4", "tq2", 64 },
};
static const char *const row_formats[][2] = {
	{ "bf16", "bf16" },
	{ "fp8", "fp8" },
	{ "tq4", "v4" },
	{ "turboquant35", "turboquant35" },
};

struct bench {
	bool is_json;
	double read_rate, copy_rate;
	json_t *out;
};

static void add(const struct bench *bench, const char *list, json_t *row)
{
	json_t *rows = json_object_get(bench->out, list);

	if (!rows) {
		rows = json_array();
		json_object_set_new(bench->out, list, rows);
	}
	json_array_append_new(rows, row);
}

static void say_sustained(const struct bench *bench, const struct kvg_bench_pool *pool, json_t *row)
{
	const struct kvg_bench_sustained run = kvg_bench_sustain(pool);
	const double share = (double)pool->layer_bytes / run.us * 1e6 / bench->read_rate;

	json_object_set_new(row, "sustained",
		json_pack("{s:f, s:f, s:i, s:i}", "us", run.us, "share", share, "clock_mhz",
			(int)run.clock_mhz, "power_w", (int)run.power_w));
	if (!bench->is_json)
		printf("    0.5 s back to back: %.1f us, %.1f %%, %u MHz, %u W\n", run.us, share * 100,
			run.clock_mhz, run.power_w);
}

/* One shape of one format. */
static void decode(const struct bench *bench, const struct kvg_bench_shape *shape, const char *name,
	double wanted, bool is_sustained)
{
	struct kvg_bench_pool pool;

	kvg_bench_pool_create(shape, &pool);
	kvg_bench_keep_waves(&pool);

	const double alone = kvg_bench_time(&pool, KVG_BENCH_ALONE),
		     prepare = kvg_bench_time(&pool, KVG_BENCH_PREPARE);
	const double launched = kvg_bench_time(&pool, KVG_BENCH_PAIR) - prepare,
		     all = kvg_bench_time(&pool, KVG_BENCH_ALL);
	const struct kvg_bench_batch batch = kvg_bench_batches(&pool);
	const double bytes = (double)pool.layer_bytes, share = bytes / launched * 1e6 / bench->read_rate;
	const bool is_met = wanted >= 0 ? share >= wanted : launched <= -wanted;
	json_t *row = json_pack("{s:s, s:s, s:i, s:s, s:f, s:f, s:f, s:f, s:f, s:f, s:i, s:i, s:i, s:f, s:b}",
		"k", shape->k, "v", shape->v, "head_dim", shape->head_dim != 0 ? (int)shape->head_dim : 128,
		"shape", name, "bytes", bytes, "us", launched, "share", share, "alone_us", alone,
		"prepare_us", prepare, "all_us", all, "batch_us", (int)batch.kernel_us, "submit_us",
		(int)batch.submit_us, "whole_us", (int)batch.whole_us, "wanted", wanted, "is_met", is_met);

	if (!bench->is_json) {
		printf("%s/%s, %u, %-15s %6.1f MB: %6.1f us, %4.0f GB/s, %4.1f %%", shape->k, shape->v,
			shape->head_dim != 0 ? shape->head_dim : 128, name, bytes / 1e6, launched,
			bytes / launched / 1e3, share * 100);
		if (wanted != 0)
			printf(wanted > 0 ? " (wanted %.0f %%)%s" : " (wanted %.0f us)%s",
				wanted > 0 ? wanted * 100 : -wanted, is_met ? "" : " MISSED");
		printf("; alone %.1f us, %.1f %%; queries %.1f, all %.1f us; batch %u us, submit %u, whole "
		       "%u us\n",
			alone, bytes / alone * 1e8 / bench->read_rate, prepare, all, batch.kernel_us,
			batch.submit_us, batch.whole_us);
	}
	if (is_sustained)
		say_sustained(bench, &pool, row);
	add(bench, "decode", row);
	kvg_bench_pool_destroy(&pool);
	fflush(stdout);
}

/* The same number of tokens in equal and in unequal parts. */
static void ragged(const struct bench *bench, const char *format, const uint32_t *lengths, uint32_t n_seqs)
{
	struct kvg_bench_shape shape = { format, format, 32, 8, n_seqs, lengths, 0, 0, 0 };
	uint64_t n_tokens = 0;
	double rate[2];

	for (uint32_t i = 0; i < n_seqs; i++)
		n_tokens += lengths[i];
	for (uint32_t is_equal = 0; is_equal < 2; is_equal++) {
		struct kvg_bench_pool pool;

		if (is_equal)
			shape.lengths = NULL;
		shape.n_tokens = (uint32_t)(n_tokens / n_seqs);
		kvg_bench_pool_create(&shape, &pool);
		kvg_bench_keep_waves(&pool);

		const double us =
			kvg_bench_time(&pool, KVG_BENCH_PAIR) - kvg_bench_time(&pool, KVG_BENCH_PREPARE);

		rate[is_equal] = (double)pool.layer_bytes / us * 1e6;
		kvg_bench_pool_destroy(&pool);
	}
	add(bench, "ragged",
		json_pack("{s:s, s:i, s:f, s:f, s:f, s:b}", "format", format, "sequences", (int)n_seqs,
			"ragged_rate", rate[0], "equal_rate", rate[1], "share", rate[0] / rate[1], "is_met",
			rate[0] >= 0.9 * rate[1]));
	if (!bench->is_json)
		printf("%-5s %2u ragged sequences, %llu tokens: %4.0f GB/s, equal lengths %4.0f GB/s: %.1f "
		       "%% (wanted 90 "
		       "%%)%s\n",
			format, n_seqs, (unsigned long long)n_tokens, rate[0] / 1e9, rate[1] / 1e9,
			rate[0] / rate[1] * 100, rate[0] >= 0.9 * rate[1] ? "" : " MISSED");
	fflush(stdout);
}

/* Rows lie in pinned memory, as the daemon receives them, so the bus is the bandwidth. */
static void update(const struct bench *bench, const char *format)
{
	static const uint32_t sizes[] = { 256, 8192 };
	const struct kvg_bench_shape shape = { format, format, 32, 8, 1, NULL, 8192, 0, 0 };
	struct kvg_bench_pool pool;

	kvg_bench_pool_create(&shape, &pool);
	for (uint32_t i = 0; i < 2; i++) {
		const struct kvg_rows_params params = kvg_bench_update(&pool, sizes[i]);
		const double us = kvg_bench_time_update(&params);
		const double wire = (double)sizes[i] * 8 * 2 * 256,
			     stored = (double)pool.layer_bytes / 8192 * sizes[i];
		const double floor_us = wire / bench->copy_rate * 1e6 > 4 ? wire / bench->copy_rate * 1e6 : 4;

		add(bench, "update",
			json_pack("{s:s, s:i, s:f, s:f, s:f, s:f, s:b}", "format", format, "tokens",
				(int)sizes[i], "us", us, "wire_bytes", wire, "stored_bytes", stored,
				"floor_us", floor_us, "is_met", us <= 2 * floor_us));
		if (!bench->is_json)
			printf("%-5s update of %4u tokens, 8 KV heads, bf16: %.1f us, floor %.1f us: %.2f "
			       "times (wanted 2)%s\n",
				format, sizes[i], us, floor_us, us / floor_us,
				us <= 2 * floor_us ? "" : " MISSED");
	}
	kvg_bench_pool_destroy(&pool);
	fflush(stdout);
}

static void yardsticks(struct bench *bench)
{
	const bool is_h200 = strstr(kvg_bench_cuda()->device_name, "H200") != NULL;

	bench->read_rate = kvg_bench_read_rate();
	bench->copy_rate = kvg_bench_copy_rate();

	const bool is_valid = !is_h200 || bench->read_rate >= READ_RATE_MIN;

	json_object_set_new(bench->out, "device", json_string(kvg_bench_cuda()->device_name));
	json_object_set_new(bench->out, "read_rate", json_real(bench->read_rate));
	json_object_set_new(bench->out, "copy_rate", json_real(bench->copy_rate));
	json_object_set_new(bench->out, "is_valid", json_boolean(is_valid));
	if (!bench->is_json)
		printf("%s: 16-byte loads read %.0f GB/s%s; the bus brings %.1f GB/s\n",
			kvg_bench_cuda()->device_name, bench->read_rate / 1e9,
			is_valid ? "" : " (below 4550: this run is not valid)", bench->copy_rate / 1e9);
}

static void decode_other_tiles(const struct bench *bench)
{
	for (uint32_t i = 0; i < 2 * sizeof(other_tiles) / sizeof(other_tiles[0]); i++) {
		const struct column *column = &columns[i % 2];
		const struct kvg_bench_shape shape = { .k = other_tiles[i / 2].k,
			.v = other_tiles[i / 2].v,
			.q_heads = column->q_heads,
			.kv_heads = column->kv_heads,
			.n_seqs = column->n_seqs,
			.n_tokens = column->n_tokens,
			.head_dim = other_tiles[i / 2].head_dim };

		/* Names of their own: by a name others look for a column's row. */
		decode(bench, &shape, i % 2 ? "64/8, 16 x 32k, other tiles" : "32/8, 64 x 8k, other tiles", 0,
			false);
	}
}

int main(int argc, char **argv)
{
	struct bench bench = { .out = json_object() };
	bool is_brief = false;

	for (int i = 1; i < argc; i++) {
		bench.is_json |= strcmp(argv[i], "--json") == 0;
		is_brief |= strcmp(argv[i], "--brief") == 0;
	}
	kvg_bench_start();
	yardsticks(&bench);
	for (uint32_t f = 0; f < 3; f++) {
		for (uint32_t c = 0; c < sizeof(columns) / sizeof(columns[0]); c++) {
			const struct kvg_bench_shape shape = { formats[f], formats[f], columns[c].q_heads,
				columns[c].kv_heads, columns[c].n_seqs, NULL, columns[c].n_tokens, 0, 0 };

			decode(&bench, &shape, columns[c].name, columns[c].wanted[f], !is_brief && c < 2);
		}
	}
	if (!is_brief)
		decode_other_tiles(&bench);
	/* What an exact window adds: "all" beside that of the same shape without. */
	for (uint32_t i = 0; !is_brief && i < 2; i++) {
		const struct kvg_bench_shape many = { formats[0], formats[0], 32, 8, 64, NULL, 8192,
			64u << 2 * i, 0 };
		const struct kvg_bench_shape one = { formats[0], formats[0], 32, 8, 1, NULL, 4096,
			64u << 2 * i, 0 };

		decode(&bench, &many, i ? "64 x 8k, 256 exact" : "64 x 8k, 64 exact", 0, false);
		decode(&bench, &one, i ? "1 x 4k, 256 exact" : "1 x 4k, 64 exact", 0, false);
	}
	for (uint32_t f = 0; f < 3; f++) {
		ragged(&bench, formats[f], kvg_bench_ragged_16, 16);
		ragged(&bench, formats[f], kvg_bench_ragged_64, 64);
		update(&bench, formats[f]);
	}
	for (uint32_t i = 0; !is_brief && i < sizeof(row_formats) / sizeof(row_formats[0]); i++) {
		const struct kvg_bench_shape shape = { row_formats[i][0], row_formats[i][1], 32, 8, 16, NULL,
			4096, 0, 0 };

		decode(&bench, &shape, "32/8, 16 x 4k", 0, false);
	}
	kvg_bench_stop();
	if (bench.is_json) {
		json_dumpf(bench.out, stdout, JSON_INDENT(1) | JSON_REAL_PRECISION(6));
		putchar('\n');
	}
	json_decref(bench.out);
	return 0;
}
