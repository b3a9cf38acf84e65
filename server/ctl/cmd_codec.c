/* codec info, rotation, codebook: what a format, a rotation and a codebook are. No daemon is asked. */
#include <stdio.h>
#include <string.h>

#include "codebooks/solver.h"
#include "core/checked.h"
#include "core/memory.h"
#include "server/ctl/codec.h"
#include "server/ctl/table.h"

/* ---- info ---- */

static const struct srv_arg info_args[] = { SRV_CODEC_ARGS };

/* The parts of a row in the order of their bytes: segments and fields are each in order. */
struct part {
	const char *name, *kind, *number;
	uint32_t offset, n_bytes, count, bits;
};

static struct part segment_part(const struct kv_segment *segment)
{
	const bool is_codes = segment->code == KV_CODE_TABLE;

	return (struct part){
		.name = segment->name,
		.kind = is_codes ? "codes" : "numbers",
		.number = is_codes ? "-" : kv_dtype_name(segment->number),
		.offset = segment->offset,
		.n_bytes = segment->payload_bytes,
		.count = is_codes ? segment->n_codes : segment->n_channels,
		.bits = is_codes ? segment->bits : 8 * kv_dtype_bytes(segment->number),
	};
}

static struct part field_part(const struct kv_field *field)
{
	static const char *const kinds[] = {
		[KV_FIELD_NORM] = "norm",
		[KV_FIELD_SCALE] = "scale",
		[KV_FIELD_ZERO] = "zero",
	};

	return (struct part){
		.name = field->name,
		.kind = kinds[field->kind],
		.number = kv_dtype_name(field->number),
		.offset = field->offset,
		.n_bytes = field->field_bytes,
		.count = field->count,
		.bits = 8 * kv_dtype_bytes(field->number),
	};
}

static uint32_t list_parts(
	const struct kv_row_codec *codec, struct part parts[static KV_SEGMENTS_MAX + KV_FIELDS_MAX])
{
	uint32_t n = 0;

	for (uint32_t s = 0, f = 0; s < codec->n_segments || f < codec->n_fields;) {
		const bool is_field = s == codec->n_segments ||
			(f < codec->n_fields && codec->fields[f].offset < codec->segments[s].offset);

		parts[n++] = is_field ? field_part(&codec->fields[f++]) : segment_part(&codec->segments[s++]);
	}
	return n;
}

static void print_parts(const struct kv_row_codec *codec)
{
	static const char *const titles[] = { "<part", "<is", "offset", "bytes", "count", "bits", "<number" };
	struct part parts[KV_SEGMENTS_MAX + KV_FIELDS_MAX];
	const uint32_t n_parts = list_parts(codec, parts);
	struct srv_table table;

	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint32_t i = 0; i < n_parts; i++) {
		srv_table_cell(&table, "%s", parts[i].name);
		srv_table_cell(&table, "%s", parts[i].kind);
		srv_table_cell(&table, "%u", parts[i].offset);
		srv_table_cell(&table, "%u", parts[i].n_bytes);
		srv_table_cell(&table, "%u", parts[i].count);
		srv_table_cell(&table, "%u", parts[i].bits);
		srv_table_cell(&table, "%s", parts[i].number);
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
}

static void print_info(const struct kv_row_codec *codec)
{
	const struct kv_row_account *account = &codec->account;
	const uint32_t dense_bytes = kv_row_dense_bytes(codec->head_dim);
	const double theory = srv_codec_theory(codec);
	char layout[KV_ROW_LAYOUT_MAX];

	kv_row_codec_layout(codec, layout);
	printf("%s, head_dim %u: %u bytes a row, %.3f bits a number, %.3f times smaller than bf16\n",
		codec->format->name, codec->head_dim, codec->row_bytes,
		8.0 * codec->row_bytes / codec->head_dim, (double)dense_bytes / codec->row_bytes);
	printf("%s\n\n", layout);
	print_parts(codec);
	printf("\naccount: payload %u, norms %u, scales %u, zeros %u, exact %u bytes\n",
		account->payload_bytes, account->norms_bytes, account->scales_bytes, account->zeros_bytes,
		account->exact_bytes);
	if (codec->rotation)
		printf("rotation: %s, seed %u, head_dim %u\n", kv_rotation_kind_name(codec->rotation->kind),
			codec->rotation->seed, codec->rotation->head_dim);
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvcb_codebook *codebook = codec->segments[s].codebook;

		if (codebook)
			printf("codebook of %s: d %u, %u bits, D(d,b) %.9g\n", codec->segments[s].name,
				codebook->head_dim, codebook->bits,
				codebook->head_dim * codebook->mse_per_coord);
	}
	if (theory > 0)
		printf("expected relative squared error of random rows: %.6g\n", theory);
}

static json_t *info_json(const struct kv_row_codec *codec)
{
	const struct kv_row_account *account = &codec->account;
	struct part parts[KV_SEGMENTS_MAX + KV_FIELDS_MAX];
	const uint32_t n_parts = list_parts(codec, parts);
	const double theory = srv_codec_theory(codec);
	json_t *list = json_array(), *codebooks = json_array();
	char layout[KV_ROW_LAYOUT_MAX];

	kv_row_codec_layout(codec, layout);
	for (uint32_t i = 0; i < n_parts; i++)
		json_array_append_new(list,
			json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:s}", "name", parts[i].name, "kind",
				parts[i].kind, "offset", (json_int_t)parts[i].offset, "bytes",
				(json_int_t)parts[i].n_bytes, "count", (json_int_t)parts[i].count, "bits",
				(json_int_t)parts[i].bits, "number", parts[i].number));
	for (uint32_t s = 0; s < codec->n_segments; s++) {
		const struct kvcb_codebook *codebook = codec->segments[s].codebook;

		if (codebook)
			json_array_append_new(codebooks,
				json_pack("{s:s, s:I, s:I, s:f}", "part", codec->segments[s].name, "d",
					(json_int_t)codebook->head_dim, "bits", (json_int_t)codebook->bits,
					"mse_total", codebook->head_dim * codebook->mse_per_coord));
	}

	json_t *json = json_pack("{s:s, s:I, s:I, s:s, s:o, s:o, s:{s:I, s:I, s:I, s:I, s:I}, s:I, s:f}",
		"format", codec->format->name, "head_dim", (json_int_t)codec->head_dim, "row_bytes",
		(json_int_t)codec->row_bytes, "layout", layout, "parts", list, "codebooks", codebooks,
		"account", "payload_bytes", (json_int_t)account->payload_bytes, "norms_bytes",
		(json_int_t)account->norms_bytes, "scales_bytes", (json_int_t)account->scales_bytes,
		"zeros_bytes", (json_int_t)account->zeros_bytes, "exact_bytes",
		(json_int_t)account->exact_bytes, "dense_equivalent_bytes",
		(json_int_t)kv_row_dense_bytes(codec->head_dim), "compression",
		(double)kv_row_dense_bytes(codec->head_dim) / codec->row_bytes);

	if (codec->rotation)
		json_object_set_new(json, "rotation",
			json_pack("{s:s, s:I}", "kind", kv_rotation_kind_name(codec->rotation->kind), "seed",
				(json_int_t)codec->rotation->seed));
	if (theory > 0)
		json_object_set_new(json, "expected_error", json_real(theory));
	return json;
}

static enum kv_status run_info(struct srv_ctl *ctl, struct kv_error *err)
{
	struct srv_codec codec;
	const enum kv_status status = srv_codec_init(&codec, ctl, NULL, false, err);

	if (status == KV_OK && ctl->is_json) {
		json_t *json = info_json(codec.codec);

		srv_ctl_print_json(json);
		json_decref(json);
	} else if (status == KV_OK) {
		print_info(codec.codec);
	}
	srv_codec_finish(&codec);
	return status;
}

const struct srv_command srv_cmd_codec_info = {
	.name = "codec info",
	.summary = "byte layout, account, codebook and expected error of a row format",
	.details =
		"The expected error is the squared length of what a row loses over its own, on average over "
		"random rows. It is\n"
		"shown where the theory has it: tqN, tqpN and recipes.",
	.args = info_args,
	.n_args = KV_LENGTH(info_args),
	.run = run_info,
};

/* ---- rotation ---- */

enum { ROTATION_KIND, ROTATION_HEAD_DIM, ROTATION_SEED, ROTATION_N_ARGS };

static const struct srv_arg rotation_args[ROTATION_N_ARGS] = {
	[ROTATION_KIND] = { .name = "rotation",
		.kind = SRV_ARG_TEXT,
		.placeholder = "R",
		.help = "rht, qr, block or file:MATRIX.f32 [rht at powers of two, else qr]" },
	[ROTATION_HEAD_DIM] = SRV_CODEC_HEAD_DIM_ARG,
	[ROTATION_SEED] = SRV_CODEC_SEED_ARG,
};

static enum kv_status write_matrix(
	const struct kv_rotation *rotation, const char *path, const char *input, struct kv_error *err)
{
	const char *const inputs[] = { input };
	float row[KV_HEAD_DIM_MAX];
	struct srv_out_file out;
	enum kv_status status = srv_out_file_open(&out, path, inputs, 1, err);

	for (uint32_t i = 0; status == KV_OK && i < rotation->head_dim; i++) {
		kv_rotation_matrix(rotation, i, 1, row);
		status = srv_out_file_write(&out, row, rotation->head_dim * sizeof(row[0]), err);
	}
	return srv_out_file_close(&out, status, err);
}

static enum kv_status run_rotation(struct srv_ctl *ctl, struct kv_error *err)
{
	struct kv_rotation *rotation = NULL;
	const char *input = NULL;
	uint32_t head_dim = 0;
	enum kv_status status = srv_codec_head_dim(&ctl->values[ROTATION_HEAD_DIM], &head_dim, err);

	if (status == KV_OK)
		status = srv_codec_make_rotation(ctl->values[ROTATION_KIND].text, head_dim,
			ctl->values[ROTATION_SEED].number, &rotation, &input, err);
	if (status == KV_OK)
		status = write_matrix(rotation, ctl->operands[0], input, err);
	kv_rotation_destroy(rotation);
	return status;
}

const struct srv_command srv_cmd_codec_rotation = {
	.name = "codec rotation",
	.operands = "OUT.f32",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "write a rotation's matrix as float32, row by row",
	.details = "The matrix takes a row to its rotated form: y = P x. Little-endian, D rows of D numbers.",
	.args = rotation_args,
	.n_args = ROTATION_N_ARGS,
	.run = run_rotation,
};

/* ---- codebook ---- */

enum { CODEBOOK_HEAD_DIM, CODEBOOK_BITS, CODEBOOK_N_ARGS };

static const struct srv_arg codebook_args[CODEBOOK_N_ARGS] = {
	/* A group of a recipe may have fewer channels than a row, and any number is solved. */
	[CODEBOOK_HEAD_DIM] = { .name = "head-dim",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "D",
		.min = KVCB_DIM_MIN,
		.max = KVCB_DIM_MAX,
		.help = "coordinates of the unit vectors" },
	[CODEBOOK_BITS] = { .name = "bits",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "B",
		.min = 1,
		.max = KVCB_BITS_MAX,
		.help = "of an index: 1 to 8" },
};

static enum kv_status run_codebook(struct srv_ctl *ctl, struct kv_error *err)
{
	struct kvcb_solution *solution;
	enum kv_status status = KV_OK;

	for (uint32_t i = 0; i < CODEBOOK_N_ARGS; i++)
		if (!ctl->values[i].is_given)
			return kv_fail(err, SRV_CTL_USAGE, "--%s is missing", codebook_args[i].name);
	solution = kv_alloc(1, sizeof(*solution));
	if (!solution)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a codebook");
	if (!kvcb_solve((uint32_t)ctl->values[CODEBOOK_HEAD_DIM].number,
		    (uint32_t)ctl->values[CODEBOOK_BITS].number, solution))
		status = kv_fail(err, KV_INTERNAL, "no codebook of these parameters");
	else if (!kvcb_solution_print(solution, stdout))
		status = kv_fail(err, KV_IO_ERROR, "standard output cannot be written");
	kv_free(solution);
	return status;
}

const struct srv_command srv_cmd_codec_codebook = {
	.name = "codec codebook",
	.summary = "print the exact codebook of a dimension as JSON, in the schema of codebook files",
	.args = codebook_args,
	.n_args = CODEBOOK_N_ARGS,
	.run = run_codebook,
};
