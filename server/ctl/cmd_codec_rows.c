/* codec encode, decode: files of rows to packed rows and back, as streams. */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/ctl/codec.h"
#include "server/ctl/progress.h"
#include "server/ctl/table.h"

/* Large enough that the calls do not count, small enough for the second-level cache. */
#define CHUNK_BYTES (256u << 10)
/* Below this a file is done before a bar could be read. */
#define BAR_FILE_BYTES_MIN (64ull << 20)

static const struct srv_arg args[] = { SRV_CODEC_ARGS };

/* One file to another. */
struct job {
	const struct kv_row_codec *codec;
	bool is_decode;
	struct srv_row_reader in;
	struct srv_out_file out;
	uint32_t out_row_bytes;
	uint32_t n_chunk_rows;
	uint8_t *in_rows, *out_rows; /* [n_chunk_rows] */
	struct kv_row_scratch scratch;
	struct srv_progress progress;
};

static enum kv_status refuse_row(
	const struct job *job, uint64_t row_idx, const uint8_t *row, struct kv_error *err)
{
	const uint64_t offset = row_idx * job->in.row_bytes;
	char fault[SRV_ROW_FAULT_BYTES];
	float values[KV_HEAD_DIM_MAX];

	if (job->is_decode) {
		srv_codec_explain_packed(job->codec, row, offset, fault);
	} else {
		memcpy(values, row, job->in.row_bytes);
		srv_codec_explain_row(job->codec, values, offset, fault);
	}
	return kv_fail(err, KV_BAD_VALUE, "%s: row %llu (offset %llu): %s", job->in.path,
		(unsigned long long)row_idx, (unsigned long long)offset, fault);
}

static enum kv_status convert_row(struct job *job, const uint8_t *in, uint8_t *out)
{
	float values[KV_HEAD_DIM_MAX];
	enum kv_status status;

	if (!job->is_decode) {
		memcpy(values, in, job->in.row_bytes);
		return kv_row_codec_encode(job->codec, values, out, &job->scratch);
	}
	status = kv_row_codec_validate_packed(job->codec, in);
	if (status == KV_OK) {
		kv_row_codec_decode(job->codec, in, values, &job->scratch);
		memcpy(out, values, job->out_row_bytes);
	}
	return status;
}

static enum kv_status convert(struct job *job, struct kv_error *err)
{
	uint32_t n_rows = 0;

	do {
		const uint64_t first = job->in.n_read;
		enum kv_status status =
			srv_row_reader_next(&job->in, job->in_rows, job->n_chunk_rows, &n_rows, err);

		if (status != KV_OK)
			return status;
		for (uint32_t i = 0; i < n_rows; i++) {
			const uint8_t *row = job->in_rows + (size_t)i * job->in.row_bytes;

			if (convert_row(job, row, job->out_rows + (size_t)i * job->out_row_bytes) != KV_OK)
				return refuse_row(job, first + i, row, err);
		}
		status = srv_out_file_write(
			&job->out, job->out_rows, (size_t)n_rows * job->out_row_bytes, err);
		if (status != KV_OK)
			return status;
		if (srv_interrupt_seen())
			return kv_fail(err, KV_CANCELLED, "interrupted after %llu rows",
				(unsigned long long)job->in.n_read);
		if (job->in.is_sized && job->in.n_rows * job->in.row_bytes >= BAR_FILE_BYTES_MIN)
			srv_progress_set(&job->progress, job->in.n_read);
	} while (n_rows > 0);
	return KV_OK;
}

static enum kv_status open_files(
	struct job *job, const struct srv_ctl *ctl, const struct srv_codec *codec, struct kv_error *err)
{
	const uint32_t float_bytes = codec->codec->head_dim * (uint32_t)sizeof(float);
	const uint32_t packed_bytes = codec->codec->row_bytes;
	const char *const inputs[] = { ctl->operands[0], codec->files[0], codec->files[1], codec->files[2],
		codec->files[3] };
	enum kv_status status = srv_row_reader_open(
		&job->in, ctl->operands[0], job->is_decode ? packed_bytes : float_bytes, err);

	if (status != KV_OK)
		return status;
	job->codec = codec->codec;
	job->out_row_bytes = job->is_decode ? float_bytes : packed_bytes;
	job->n_chunk_rows = CHUNK_BYTES / float_bytes;
	job->in_rows = kv_alloc(job->n_chunk_rows, job->in.row_bytes);
	job->out_rows = kv_alloc(job->n_chunk_rows, job->out_row_bytes);
	if (!job->in_rows || !job->out_rows)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %u rows", job->n_chunk_rows);
	return srv_out_file_open(&job->out, ctl->operands[1], inputs, KV_LENGTH(inputs), err);
}

static void print_done(const struct srv_ctl *ctl, const struct job *job)
{
	const uint64_t n_rows = job->in.n_read;

	if (ctl->is_json) {
		json_t *json = json_pack("{s:I, s:I, s:I}", "rows", (json_int_t)n_rows, "in_bytes",
			(json_int_t)(n_rows * job->in.row_bytes), "out_bytes",
			(json_int_t)(n_rows * job->out_row_bytes));

		srv_ctl_print_json(json);
		json_decref(json);
	} else {
		char in[SRV_HUMAN_BYTES], out[SRV_HUMAN_BYTES];

		printf("%llu rows, %s to %s\n", (unsigned long long)n_rows,
			srv_human_bytes(n_rows * job->in.row_bytes, in),
			srv_human_bytes(n_rows * job->out_row_bytes, out));
	}
}

static enum kv_status run(struct srv_ctl *ctl, bool is_decode, struct kv_error *err)
{
	struct srv_codec codec;
	struct job *job = kv_alloc(1, sizeof(*job));
	enum kv_status status;

	if (!job)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a codec");
	job->is_decode = is_decode;
	srv_interrupt_catch();
	status = srv_codec_init(&codec, ctl, NULL, false, err);
	if (status == KV_OK)
		status = open_files(job, ctl, &codec, err);
	/* A device may be standard output itself. */
	const bool is_told = job->out.target != NULL;

	if (status == KV_OK) {
		srv_progress_init(&job->progress, stderr, kv_clock_system(), is_decode ? "decode" : "encode",
			"rows", job->in.n_rows);
		status = convert(job, err);
		srv_progress_finish(&job->progress);
	}
	status = srv_out_file_close(&job->out, status, err);
	if (status == KV_OK && is_told)
		print_done(ctl, job);
	srv_row_reader_close(&job->in);
	srv_codec_finish(&codec);
	kv_free(job->in_rows);
	kv_free(job->out_rows);
	kv_free(job);
	return status;
}

static enum kv_status run_encode(struct srv_ctl *ctl, struct kv_error *err)
{
	return run(ctl, false, err);
}

static enum kv_status run_decode(struct srv_ctl *ctl, struct kv_error *err)
{
	return run(ctl, true, err);
}

#define DETAILS                                                                                              \
	"Rows are D little-endian float32 numbers, packed rows what 'codec info' shows; both back to back, " \
	"of "                                                                                                \
	"any number.\n"                                                                                      \
	"The first bad row ends it: the message has its number and the byte offset, and no output is left "  \
	"behind."

const struct srv_command srv_cmd_codec_encode = {
	.name = "codec encode",
	.operands = "IN.f32 OUT.rows",
	.n_operands_min = 2,
	.n_operands_max = 2,
	.summary = "pack rows of float32",
	.details = DETAILS,
	.args = args,
	.n_args = KV_LENGTH(args),
	.run = run_encode,
};

const struct srv_command srv_cmd_codec_decode = {
	.name = "codec decode",
	.operands = "IN.rows OUT.f32",
	.n_operands_min = 2,
	.n_operands_max = 2,
	.summary = "unpack rows to float32",
	.details = DETAILS,
	.args = args,
	.n_args = KV_LENGTH(args),
	.run = run_decode,
};
