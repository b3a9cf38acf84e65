/* codec compare: what formats do to the rows of a file, beside two controls. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/k_center.h"
#include "core/memory.h"
#include "core/preset.h"
#include "server/ctl/codec.h"
#include "server/ctl/compare.h"
#include "server/ctl/compare_input.h"
#include "server/ctl/progress.h"
#include "server/ctl/table.h"

#define NAMES_MAX       32u /* formats of one comparison */
#define NAME_BYTES_MAX  32u
#define ROWS_DEFAULT    4096u
#define QUERIES_DEFAULT 32u
/* Starts of the generators of queries and of the control: not seeds of any rotation's generator. */
#define QUERIES_STATE 0x5151u
#define CONTROL_STATE 0xC0C0u

enum {
	ARG_QUERIES = SRV_CODEC_N_ARGS,
	ARG_ROWS,
	ARG_SIDE,
	ARG_CENTER,
	ARG_LAYER,
	ARG_HEAD,
	N_ARGS,
};

static const struct srv_arg args[N_ARGS] = {
	SRV_CODEC_ARGS,
	[ARG_QUERIES] = { .name = "queries",
		.kind = SRV_ARG_TEXT,
		.placeholder = "Q.f32",
		.help = "queries, not yet scaled; the first 64 are taken [32 random ones]" },
	[ARG_ROWS] = { .name = "rows",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = ROWS_DEFAULT,
		.min = 2,
		.max = SRV_COMPARE_ROWS_MAX,
		.help = "take the first N rows" },
	[ARG_SIDE] = { .name = "side",
		.kind = SRV_ARG_TEXT,
		.placeholder = "SIDE",
		.text = "k",
		.help = "k or v: which rows of a capture, and which format of a preset" },
	[ARG_CENTER] = { .name = "center",
		.kind = SRV_ARG_FLAG,
		.help = "subtract the rows' mean before coding, as k_center does" },
	[ARG_LAYER] = { .name = "layer",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "L",
		.max = UINT32_MAX,
		.help = "of a capture: the model's layer number" },
	[ARG_HEAD] = { .name = "head",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "H",
		.max = UINT32_MAX,
		.help = "of a capture: the KV head" },
};

/* One line of the result. */
struct line {
	char name[2 * NAME_BYTES_MAX];
	uint32_t row_bytes; /* 0: a control */
	struct srv_compare_result result;
};

struct job {
	const struct srv_ctl *ctl;
	struct srv_compare compare;
	float mean[KV_HEAD_DIM_MAX]; /* zeros without --center */
	struct srv_compare_input input;
	uint32_t n_names;
	char names[NAMES_MAX][NAME_BYTES_MAX];
	uint32_t n_lines;
	struct line lines[NAMES_MAX + 2];
	struct kv_row_scratch scratch;
	struct srv_progress progress;
};

static enum kv_status split_names(struct job *job, struct kv_error *err)
{
	const char *text = job->ctl->values[SRV_CODEC_FORMAT].text;

	if (!text)
		return kv_fail(err, SRV_CTL_USAGE, "--format is missing");
	for (;;) {
		const size_t n_bytes = strcspn(text, ",");

		if (n_bytes == 0 || n_bytes >= NAME_BYTES_MAX || job->n_names == NAMES_MAX)
			return kv_fail(err, SRV_CTL_USAGE,
				"--format: '%.60s': expected at most %u names with commas between them", text,
				NAMES_MAX);
		memcpy(job->names[job->n_names++], text, n_bytes); /* zeroed before */
		if (text[n_bytes] == '\0')
			return KV_OK;
		text += n_bytes + 1;
	}
}

static enum kv_status load_inputs(struct job *job, struct kv_error *err)
{
	const struct srv_arg_value *values = job->ctl->values;
	const char *side = values[ARG_SIDE].text;
	struct srv_compare_ask ask = {
		.path = job->ctl->operands[0],
		.queries_path = values[ARG_QUERIES].text,
		.is_v = side[0] == 'v',
		.has_layer = values[ARG_LAYER].is_given,
		.has_head = values[ARG_HEAD].is_given,
		.layer = values[ARG_LAYER].number,
		.head = values[ARG_HEAD].number,
		.n_rows_max = (uint32_t)values[ARG_ROWS].number,
		.n_queries_max = SRV_COMPARE_QUERIES_MAX,
	};
	struct srv_compare_input *input = &job->input;
	uint64_t state = QUERIES_STATE;
	enum kv_status status = KV_OK;

	if (strcmp(side, "k") != 0 && strcmp(side, "v") != 0)
		return kv_fail(err, SRV_CTL_USAGE, "--side: '%.40s' is not k or v", side);
	if (values[SRV_CODEC_HEAD_DIM].is_given)
		status = srv_codec_head_dim(&values[SRV_CODEC_HEAD_DIM], &ask.head_dim, err);
	if (status == KV_OK)
		status = srv_compare_input_load(&ask, input, err);
	if (status == KV_OK && input->n_rows < 2)
		status = kv_fail(err, KV_CORRUPT, "%s: one row, a comparison needs two", ask.path);
	if (status == KV_OK)
		status = srv_compare_init(&job->compare, input->head_dim, input->n_rows,
			input->queries ? input->n_queries : QUERIES_DEFAULT, err);
	if (status != KV_OK)
		return status;

	struct srv_compare *compare = &job->compare;

	memcpy(compare->rows, input->rows, (size_t)compare->n_rows * compare->head_dim * sizeof(float));
	if (input->queries)
		memcpy(compare->queries, input->queries,
			(size_t)compare->n_queries * compare->head_dim * sizeof(float));
	else
		srv_compare_random(&state, compare->n_queries * compare->head_dim, compare->queries);
	srv_compare_prepare(compare, input->queries != NULL);
	return KV_OK;
}

static void measure_mean(struct job *job)
{
	const struct srv_compare *compare = &job->compare;
	double sums[KV_HEAD_DIM_MAX] = { 0 };

	for (uint32_t r = 0; r < compare->n_rows; r++)
		kv_k_center_take(sums, compare->rows + (size_t)r * compare->head_dim, compare->head_dim);
	kv_k_center_finish(sums, compare->n_rows, compare->head_dim, job->mean);
}

/* A preset means the format of the asked side. */
static enum kv_status choose_format(
	const struct job *job, const char *name, const char **format, struct kv_error *err)
{
	const struct kv_preset *preset;
	const struct kv_format *known;
	const char *side = job->ctl->values[ARG_SIDE].text;

	if (kv_preset_parse(name, &preset, NULL) == KV_OK) {
		*format = side[0] == 'k' ? preset->k : preset->v;
		return KV_OK;
	}
	*format = name;
	return kv_format_parse(name, &known, err) == KV_OK ? KV_OK : SRV_CTL_USAGE;
}

static enum kv_status code_rows(struct job *job, const struct kv_row_codec *codec, struct kv_error *err)
{
	struct srv_compare *compare = &job->compare;
	uint8_t packed[KV_ROW_BYTES_MAX];
	float row[KV_HEAD_DIM_MAX];

	for (uint32_t r = 0; r < compare->n_rows; r++) {
		float *coded = compare->coded + (size_t)r * compare->head_dim;

		kv_k_center_subtract(
			job->mean, compare->rows + (size_t)r * compare->head_dim, compare->head_dim, row);
		if (kv_row_codec_encode(codec, row, packed, &job->scratch) != KV_OK) {
			const uint64_t offset = (uint64_t)r * compare->head_dim * sizeof(float);
			char fault[SRV_ROW_FAULT_BYTES];

			srv_codec_explain_row(codec, row, offset, fault);
			return kv_fail(err, KV_BAD_VALUE, "%s: row %u (offset %llu): %s",
				job->ctl->operands[0], r, (unsigned long long)offset, fault);
		}
		kv_row_codec_decode(codec, packed, coded, &job->scratch);
		kv_k_center_add(job->mean, compare->head_dim, coded);
	}
	return KV_OK;
}

static enum kv_status compare_format(struct job *job, const char *name, struct kv_error *err)
{
	struct line line = { 0 };
	const char *format = NULL;
	struct srv_codec codec = { 0 };
	enum kv_status status = choose_format(job, name, &format, err);

	if (status == KV_OK)
		status = srv_codec_init(&codec, job->ctl, format, true, err);
	if (status == KV_OK)
		status = code_rows(job, codec.codec, err);
	if (status == KV_OK) {
		if (strcmp(name, format) == 0)
			snprintf(line.name, sizeof(line.name), "%s", name);
		else
			snprintf(line.name, sizeof(line.name), "%s (%s)", name, format);
		line.row_bytes = codec.codec->row_bytes;
		srv_compare_measure(&job->compare, &line.result);
		job->lines[job->n_lines++] = line;
	}
	srv_codec_finish(&codec);
	return status;
}

/* Rows of zeros, then rows of random directions and the rows' own lengths. */
static void compare_controls(struct job *job)
{
	struct srv_compare *compare = &job->compare;
	const uint32_t d = compare->head_dim;
	uint64_t state = CONTROL_STATE;

	memset(compare->coded, 0, (size_t)compare->n_rows * d * sizeof(*compare->coded));
	snprintf(job->lines[job->n_lines].name, sizeof(job->lines[0].name), "rows of zeros");
	srv_compare_measure(compare, &job->lines[job->n_lines++].result);
	srv_compare_random(&state, compare->n_rows * d, compare->coded);
	for (uint32_t r = 0; r < compare->n_rows; r++) {
		const float *row = compare->rows + (size_t)r * d;
		float *coded = compare->coded + (size_t)r * d;
		double square = 0, random_square = 0;

		for (uint32_t i = 0; i < d; i++) {
			square += (double)row[i] * (double)row[i];
			random_square += (double)coded[i] * (double)coded[i];
		}
		for (uint32_t i = 0; i < d; i++)
			coded[i] = (float)((double)coded[i] * sqrt(square / random_square));
	}
	snprintf(job->lines[job->n_lines].name, sizeof(job->lines[0].name), "random rows");
	srv_compare_measure(compare, &job->lines[job->n_lines++].result);
}

static const char *verdict_of(const struct line *line)
{
	return line->row_bytes == 0 ? "control" : line->result.passes ? "passes" : "collapses";
}

static const char *queries_word(const struct job *job)
{
	return !job->input.queries                                                 ? "random"
		: job->ctl->values[ARG_QUERIES].is_given || !job->input.is_capture ? "given"
										   : "captured";
}

static void print_lines(const struct job *job)
{
	static const char *const titles[] = { "<format", "bytes", "error", "cosine", "slope", "error*",
		"slope*", "weights", "<verdict" };
	struct srv_table table;

	if (job->input.is_capture)
		printf("%s of layer %llu, KV head %llu: ",
			job->ctl->values[ARG_SIDE].text[0] == 'v' ? "values" : "keys",
			(unsigned long long)job->ctl->values[ARG_LAYER].number,
			(unsigned long long)job->ctl->values[ARG_HEAD].number);
	printf("%u rows, %u %s queries, sigma of the logits %.3g%s\n\n", job->compare.n_rows,
		job->compare.n_queries, queries_word(job), job->compare.sigma,
		job->ctl->values[ARG_CENTER].is_given ? ", coded without their mean" : "");
	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < job->n_lines; i++) {
		const struct line *line = &job->lines[i];

		srv_table_cell(&table, "%s", line->name);
		if (line->row_bytes == 0)
			srv_table_cell(&table, "-");
		else
			srv_table_cell(&table, "%u", line->row_bytes);
		srv_table_cell(&table, "%.4g", line->result.error);
		srv_table_cell(&table, "%.4f", line->result.cosine);
		srv_table_cell(&table, "%.4f", line->result.slope);
		srv_table_cell(&table, "%.4g", line->result.part_error);
		srv_table_cell(&table, "%.4f", line->result.part_slope);
		srv_table_cell(&table, "%.4f", line->result.weights_error);
		srv_table_cell(&table, "%s", verdict_of(line));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
	printf("\nerror: squared, relative. slope: of scores. *: without what is the same in all rows, which "
	       "softmax does\nnot see. weights: half the sum of the changes of the softmax weights; a format "
	       "passes below half of that\nof rows of zeros.\n");
	if (job->compare.sigma < 1)
		printf("The logits hardly spread (sigma below 1): keys matter little here, and weights prove "
		       "nothing.\n");
}

static void print_json(const struct job *job)
{
	json_t *list = json_array();

	for (uint32_t i = 0; i < job->n_lines; i++) {
		const struct srv_compare_result *result = &job->lines[i].result;

		json_array_append_new(list,
			json_pack("{s:s, s:I, s:f, s:f, s:f, s:f, s:f, s:f, s:s}", "name", job->lines[i].name,
				"row_bytes", (json_int_t)job->lines[i].row_bytes, "error", result->error,
				"cosine", result->cosine, "slope", result->slope, "part_error",
				result->part_error, "part_slope", result->part_slope, "weights_error",
				result->weights_error, "verdict", verdict_of(&job->lines[i])));
	}

	json_t *json = json_pack("{s:I, s:I, s:I, s:b, s:b, s:f, s:o}", "rows",
		(json_int_t)job->compare.n_rows, "queries", (json_int_t)job->compare.n_queries, "head_dim",
		(json_int_t)job->compare.head_dim, "has_queries", job->input.queries != NULL, "is_centered",
		job->ctl->values[ARG_CENTER].is_given, "sigma", job->compare.sigma, "results", list);

	if (json && job->input.is_capture) {
		json_object_set_new(
			json, "layer", json_integer((json_int_t)job->ctl->values[ARG_LAYER].number));
		json_object_set_new(
			json, "head", json_integer((json_int_t)job->ctl->values[ARG_HEAD].number));
	}
	srv_ctl_print_json(json);
	json_decref(json);
}

static enum kv_status compare_all(struct job *job, struct kv_error *err)
{
	enum kv_status status = KV_OK;

	srv_progress_init(
		&job->progress, stderr, kv_clock_system(), "compare", "formats", job->n_names + 2ull);
	for (uint32_t i = 0; status == KV_OK && i < job->n_names; i++) {
		status = compare_format(job, job->names[i], err);
		if (status == KV_OK && srv_interrupt_seen())
			status = kv_fail(err, KV_CANCELLED, "interrupted after %u formats", i + 1);
		if (job->compare.n_rows > ROWS_DEFAULT)
			srv_progress_set(&job->progress, i + 1ull);
	}
	if (status == KV_OK)
		compare_controls(job);
	srv_progress_finish(&job->progress);
	return status;
}

static enum kv_status run_compare(struct srv_ctl *ctl, struct kv_error *err)
{
	struct job *job = kv_alloc(1, sizeof(*job));
	enum kv_status status;

	if (!job)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a comparison");
	job->ctl = ctl;
	srv_interrupt_catch();
	status = split_names(job, err);
	if (status == KV_OK)
		status = load_inputs(job, err);
	/* A capture says it itself. */
	if (status == KV_OK) {
		ctl->values[SRV_CODEC_HEAD_DIM].number = job->input.head_dim;
		ctl->values[SRV_CODEC_HEAD_DIM].is_given = true;
	}
	if (status == KV_OK && ctl->values[ARG_CENTER].is_given)
		measure_mean(job);
	if (status == KV_OK)
		status = compare_all(job, err);
	if (status == KV_OK && ctl->is_json)
		print_json(job);
	else if (status == KV_OK)
		print_lines(job);
	srv_compare_finish(&job->compare);
	srv_compare_input_finish(&job->input);
	kv_free(job);
	return status;
}

const struct srv_command srv_cmd_codec_compare = {
	.name = "codec compare",
	.operands = "FILE",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "error, cosine, slope and softmax weights of formats on given rows, with controls",
	.details = "FILE is a capture (safetensors; --layer, --side and --head choose, queries are those "
		   "that read "
		   "the keys of\n"
		   "that head) or bare little-endian float32 rows of --head-dim numbers. --format takes "
		   "several names with commas between them, presets too (k8v4 is its K format). "
		   "Options that a\n"
		   "format does not have are left out for it. Random queries are scaled so that their logits "
		   "spread by 2; given\n"
		   "ones are scaled by 1/sqrt(D).",
	.args = args,
	.n_args = N_ARGS,
	.run = run_compare,
};
