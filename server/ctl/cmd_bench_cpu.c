/* bench cpu: how near the CPU backend comes to what this machine can do. No daemon is asked. */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/pool_spec.h"
#include "core/system_memory.h"
#include "server/ctl/bench_cpu.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

enum {
	ARG_FORMAT,
	ARG_SEQUENCES,
	ARG_TOKENS,
	ARG_Q_HEADS,
	ARG_KV_HEADS,
	ARG_HEAD_DIM,
	ARG_THREADS,
	ARG_ROUNDS,
	ARG_SET,
	ARG_CPU_TIME,
	ARG_SCALAR,
	N_ARGS
};

static const struct srv_arg args[N_ARGS] = {
	[ARG_FORMAT] = { .name = "format",
		.kind = SRV_ARG_TEXT,
		.placeholder = "NAME",
		.help = "one row format, for K and V; \"all\" [tq4, bf16 and one of every kind]" },
	[ARG_SEQUENCES] = { .name = "sequences",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 8,
		.min = 1,
		.max = 256,
		.help = "in one batch" },
	[ARG_TOKENS] = { .name = "tokens",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 16384,
		.min = 1,
		.max = 1u << 20,
		.help = "of a sequence" },
	[ARG_Q_HEADS] = { .name = "q-heads",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 32,
		.min = 1,
		.max = KV_HEADS_MAX,
		.help = "query heads" },
	SRV_ARG_KV_HEADS(ARG_KV_HEADS),
	SRV_ARG_HEAD_DIM(ARG_HEAD_DIM),
	[ARG_THREADS] = { .name = "threads",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.min = 1,
		.max = 256,
		.help = "workers [one per processor]" },
	[ARG_ROUNDS] = { .name = "rounds",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 5,
		.min = 1,
		.max = 1000,
		.help = "the best one counts" },
	[ARG_SET] = { .name = "set",
		.kind = SRV_ARG_TEXT,
		.placeholder = "NAME",
		.help = "one instruction set: avx2, avx512 [all]" },
	[ARG_CPU_TIME] = { .name = "cpu-time",
		.kind = SRV_ARG_FLAG,
		.help = "count processor time over the number of threads: where others use the machine, "
			"too" },
	[ARG_SCALAR] = { .name = "scalar", .kind = SRV_ARG_FLAG, .help = "measure the scalar backend, too" },
};

static const char *const some_formats[] = { "tq4", "bf16", "tq2", "tq3", "tq8", "tqp4", "v4", "v8", "fp8",
	"turboquant35" };

/* One line of the report. */
struct line {
	const char *set, *format; /* set "scalar": no ceilings */
	bool has_numbers;
	struct srv_bench_ceilings ceilings;
	struct srv_bench_row row;
};

static double bytes_s(const struct line *line)
{
	return (double)line->row.n_bytes / line->ceilings.read_bytes;
}

static double products_s(const struct line *line)
{
	const double rate = line->has_numbers ? line->ceilings.products_f32 : line->ceilings.products;

	return (double)line->row.n_products / rate;
}

static double bound_s(const struct line *line)
{
	return bytes_s(line) > products_s(line) ? bytes_s(line) : products_s(line);
}

struct report {
	struct srv_bench_cpu bench;
	json_t *lines, *sets, *encodes;
	struct srv_table table;
	double scalar_copy; /* bytes a second */
};

static const char *const set_names[] = { "avx2", "avx512" };

static void add_line(struct report *report, const struct line *line)
{
	const bool has_bound = strcmp(line->set, "scalar") != 0;

	json_array_append_new(report->lines,
		json_pack("{s:s, s:s, s:f, s:I, s:I, s:f, s:f, s:f}", "set", line->set, "format",
			line->format, "decode_s", line->row.decode_s, "bytes", (json_int_t)line->row.n_bytes,
			"products", (json_int_t)line->row.n_products, "bytes_bound_s",
			has_bound ? bytes_s(line) : 0, "products_bound_s", has_bound ? products_s(line) : 0,
			"ratio", has_bound ? line->row.decode_s / bound_s(line) : 0));
	srv_table_cell(&report->table, "%s", line->set);
	srv_table_cell(&report->table, "%s", line->format);
	srv_table_cell(&report->table, "%.2f ms", line->row.decode_s * 1e3);
	srv_table_cell(&report->table, "%.1f GB/s", (double)line->row.n_bytes / line->row.decode_s * 1e-9);
	if (has_bound) {
		srv_table_cell(&report->table, "%.2f ms", bytes_s(line) * 1e3);
		srv_table_cell(&report->table, "%.2f ms", products_s(line) * 1e3);
		srv_table_cell(&report->table, "%.2f", line->row.decode_s / bound_s(line));
	} else {
		for (int i = 0; i < 3; i++)
			srv_table_cell(&report->table, "-");
	}
}

static bool is_number_format(const char *format)
{
	static const char *const names[] = { "f32", "f16", "bf16", "fp8" };

	for (uint32_t i = 0; i < KV_LENGTH(names); i++) {
		if (strcmp(names[i], format) == 0)
			return true;
	}
	return false;
}

static enum kv_status measure_format(struct report *report, const struct kv_fast_kernels *kernels,
	const struct srv_bench_ceilings *ceilings, const char *format, struct kv_error *err)
{
	struct line line = { .set = kernels ? kernels->name : "scalar",
		.format = format,
		.has_numbers = is_number_format(format),
		.ceilings = *ceilings };
	const enum kv_status status = srv_bench_decode(&report->bench, kernels, format, &line.row, err);

	if (status == KV_OK)
		add_line(report, &line);
	return status;
}

static enum kv_status measure_formats(struct report *report, const struct kv_fast_kernels *kernels,
	const struct srv_bench_ceilings *ceilings, const char *format, struct kv_error *err)
{
	const bool is_all = format && strcmp(format, "all") == 0;
	const uint32_t n = is_all ? kv_format_count() : format ? 1 : (uint32_t)KV_LENGTH(some_formats);
	enum kv_status status = KV_OK;

	for (uint32_t i = 0; i < n && status == KV_OK && !srv_interrupt_seen(); i++) {
		const char *name = is_all ? kv_format_at(i)->name : format ? format : some_formats[i];

		status = measure_format(report, kernels, ceilings, name, err);
	}
	return srv_interrupt_seen() && status == KV_OK ? kv_fail(err, KV_CANCELLED, "interrupted") : status;
}

static enum kv_status measure_set(struct report *report, const struct kv_fast_kernels *kernels,
	const char *format, struct kv_error *err)
{
	struct srv_bench_ceilings ceilings;
	enum kv_status status = srv_bench_ceilings(&report->bench, kernels, &ceilings, err);

	if (status != KV_OK)
		return status;
	report->scalar_copy = ceilings.copy_bytes;
	json_array_append_new(report->sets,
		json_pack("{s:s, s:f, s:f, s:f, s:f}", "set", kernels->name, "read_bytes_per_s",
			ceilings.read_bytes, "products_per_s", ceilings.products, "products_f32_per_s",
			ceilings.products_f32, "memcpy_bytes_per_s", ceilings.copy_bytes));
	return measure_formats(report, kernels, &ceilings, format, err);
}

/* Encoding beside memcpy of the same bytes, on one thread. */
static enum kv_status measure_encodes(struct report *report, struct kv_error *err)
{
	static const char *const cases[][2] = { { "tq4", "rht" }, { "tq4", "qr" } };

	for (uint32_t i = 0; i < KV_LENGTH(cases); i++) {
		const double row_bytes = 2.0 * report->bench.head_dim;
		double row_s = 0;

		if (strcmp(cases[i][1], "rht") == 0 &&
			(report->bench.head_dim & (report->bench.head_dim - 1)) != 0)
			continue;

		const enum kv_status status =
			srv_bench_encode(&report->bench, cases[i][0], cases[i][1], &row_s, err);

		if (status != KV_OK)
			return status;
		json_array_append_new(report->encodes,
			json_pack("{s:s, s:s, s:f, s:f}", "format", cases[i][0], "rotation", cases[i][1],
				"row_s", row_s, "memcpy_ratio", row_s / (row_bytes / report->scalar_copy)));
	}
	return KV_OK;
}

static const json_t *measured_set(const struct report *report, const char *name)
{
	const json_t *value;
	size_t i;

	json_array_foreach (report->sets, i, value) {
		if (strcmp(srv_json_text(value, "set"), name) == 0)
			return value;
	}
	return NULL;
}

/* Of a set without a line. */
static const char *why_not_measured(const char *name)
{
	for (uint32_t i = 0; kv_fast_kernels_at(i); i++) {
		if (strcmp(kv_fast_kernels_at(i)->name, name) == 0)
			return "--set asks for another one";
	}
	return "this processor or build does not have it";
}

/* What --json says in place of a line of each set that has none. */
static json_t *list_not_measured(const struct report *report)
{
	json_t *list = json_array();

	for (uint32_t s = 0; s < KV_LENGTH(set_names); s++) {
		if (!measured_set(report, set_names[s]))
			json_array_append_new(list,
				json_pack("{s:s, s:s}", "set", set_names[s], "why",
					why_not_measured(set_names[s])));
	}
	return list;
}

static void print_text(const struct report *report)
{
	const json_t *value;
	size_t i;

	printf("%u sequences of %u tokens, %u query and %u KV heads of %u, %u threads, best of %u\n",
		report->bench.n_sequences, report->bench.n_tokens, report->bench.q_heads,
		report->bench.kv_heads, report->bench.head_dim, report->bench.n_threads,
		report->bench.n_rounds);
	for (uint32_t s = 0; s < KV_LENGTH(set_names); s++) {
		const json_t *found = measured_set(report, set_names[s]);

		if (found)
			printf("%s: reads %.1f GB/s, %.0f G products of 16 bits/s, %.0f G of float32/s; "
			       "memcpy on one thread "
			       "%.1f GB/s\n",
				set_names[s], srv_json_real(found, "read_bytes_per_s") * 1e-9,
				srv_json_real(found, "products_per_s") * 1e-9,
				srv_json_real(found, "products_f32_per_s") * 1e-9,
				srv_json_real(found, "memcpy_bytes_per_s") * 1e-9);
		else
			printf("%s: not measured, %s\n", set_names[s], why_not_measured(set_names[s]));
	}
	srv_table_print(&report->table, stdout);
	json_array_foreach (report->encodes, i, value)
		printf("encode %s, %s: %.0f ns a row of bf16 on one thread, %.1f times memcpy\n",
			srv_json_text(value, "format"), srv_json_text(value, "rotation"),
			srv_json_real(value, "row_s") * 1e9, srv_json_real(value, "memcpy_ratio"));
	if (json_array_size(report->encodes) == 2) {
		const double rht_s = srv_json_real(json_array_get(report->encodes, 0), "row_s"),
			     qr_s = srv_json_real(json_array_get(report->encodes, 1), "row_s");

		printf("qr takes %.1f times as long as rht: head_dim^2 products a row, %u here, in float64 "
		       "in "
		       "the order that all backends share; rht adds head_dim * log2(head_dim) numbers\n",
			qr_s / rht_s, report->bench.head_dim * report->bench.head_dim);
	}
}

static enum kv_status measure_all(struct report *report, const struct srv_ctl *ctl, struct kv_error *err)
{
	const char *format = ctl->values[ARG_FORMAT].text, *set = ctl->values[ARG_SET].text;
	const struct kv_fast_kernels *kernels;
	const struct srv_bench_ceilings none = { 0 };
	enum kv_status status = KV_OK;

	if (set && strcmp(set, set_names[0]) != 0 && strcmp(set, set_names[1]) != 0)
		return kv_fail(err, KV_BAD_CONFIG, "--set %.32s: expected avx2 or avx512", set);
	for (uint32_t i = 0; status == KV_OK && (kernels = kv_fast_kernels_at(i)); i++) {
		if (!set || strcmp(set, kernels->name) == 0)
			status = measure_set(report, kernels, format, err);
	}
	if (status == KV_OK && (ctl->values[ARG_SCALAR].is_given || !kv_fast_kernels_at(0)))
		status = measure_formats(report, NULL, &none, format ? format : "tq4", err);
	if (status == KV_OK && report->scalar_copy > 0 && !format)
		status = measure_encodes(report, err);
	return status;
}

static enum kv_status run_bench_cpu(struct srv_ctl *ctl, struct kv_error *err)
{
	static const char *const titles[] = { "set", "format", "decode", "rate", "bytes", "products",
		"ratio" };
	struct report report = { .bench = { .n_sequences = (uint32_t)ctl->values[ARG_SEQUENCES].number,
					 .n_tokens = (uint32_t)ctl->values[ARG_TOKENS].number,
					 .q_heads = (uint32_t)ctl->values[ARG_Q_HEADS].number,
					 .kv_heads = (uint32_t)ctl->values[ARG_KV_HEADS].number,
					 .head_dim = (uint32_t)ctl->values[ARG_HEAD_DIM].number,
					 .n_rounds = (uint32_t)ctl->values[ARG_ROUNDS].number,
					 .is_cpu_time = ctl->values[ARG_CPU_TIME].is_given },
		.lines = json_array(),
		.sets = json_array(),
		.encodes = json_array() };

	report.bench.n_threads = ctl->values[ARG_THREADS].is_given ? (uint32_t)ctl->values[ARG_THREADS].number
								   : srv_bench_n_processors();
	srv_table_init(&report.table, titles, KV_LENGTH(titles));
	srv_interrupt_catch();

	const enum kv_status status = measure_all(&report, ctl, err);

	if (status == KV_OK && ctl->is_json) {
		json_t *json = json_pack("{s:O, s:o, s:O, s:O, s:i}", "sets", report.sets, "not_measured",
			list_not_measured(&report), "decodes", report.lines, "encodes", report.encodes,
			"threads", (int)report.bench.n_threads);

		srv_ctl_print_json(json);
		json_decref(json);
	} else if (status == KV_OK) {
		print_text(&report);
	}
	srv_table_finish(&report.table);
	json_decref(report.lines);
	json_decref(report.sets);
	json_decref(report.encodes);
	return status;
}

const struct srv_command srv_cmd_bench_cpu = {
	.name = "bench cpu",
	.summary = "the CPU backend beside what this machine can do",
	.details = "Measures in this process, without a daemon: decodes of one batch for every instruction "
		   "set and row "
		   "format, beside the time that reading the rows takes at the measured bandwidth (bytes), "
		   "and the "
		   "products of queries, keys, weights and values at the measured rate of products "
		   "(products). ratio is "
		   "the decode's time over the greater of the two. Then what encoding a row costs beside "
		   "memcpy.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_bench_cpu,
};
