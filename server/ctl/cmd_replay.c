#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "server/ctl/replay.h"

/* Enough decode steps for steady percentiles and errors; the exact attention beside them costs tokens *
 * tokens. */
#define DECODE_TOKENS_DEFAULT_MAX 128u

enum { ARG_K, ARG_V, ARG_BLOCK_SIZE, ARG_PREFILL, ARG_CHUNK, ARG_IN_DTYPE, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	SRV_ARG_FORMAT(ARG_K, "k", "K"),
	SRV_ARG_FORMAT(ARG_V, "v", "V"),
	[ARG_BLOCK_SIZE] = { .name = "block-size",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "TOKENS",
		.number = 16,
		.min = 1,
		.max = 65536,
		.help = "tokens per block" },
	[ARG_PREFILL] = { .name = "prefill",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "TOKENS",
		.max = UINT32_MAX,
		.help = "append so many tokens before decoding [half, and at most 128 are decoded]" },
	[ARG_CHUNK] = { .name = "chunk",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "TOKENS",
		.min = 1,
		.max = 65536,
		.help = "tokens per append [64, or what fits into a frame]" },
	[ARG_IN_DTYPE] = { .name = "in-dtype",
		.kind = SRV_ARG_TEXT,
		.placeholder = "DTYPE",
		.help = "send rows as bf16 or f32 [bf16 when the capture is, else f32]" },
};

/* The pool's JSON without its name: the capture's geometry, room for exactly its tokens. */
static json_t *describe_pool(const struct srv_ctl *ctl, const struct srv_capture *capture)
{
	const uint32_t block_size = (uint32_t)ctl->values[ARG_BLOCK_SIZE].number;

	return json_pack("{s:I, s:I, s:I, s:I, s:I, s:s, s:s, s:I, s:I}", "layers",
		(json_int_t)capture->n_layers, "q_heads", (json_int_t)capture->q_heads, "kv_heads",
		(json_int_t)capture->kv_heads, "k_head_dim", (json_int_t)capture->k_head_dim, "v_head_dim",
		(json_int_t)capture->v_head_dim, "k", ctl->values[ARG_K].text, "v", ctl->values[ARG_V].text,
		"block_size", (json_int_t)block_size, "blocks",
		(json_int_t)kv_div_up_u32(capture->n_tokens, block_size));
}

static enum kv_status choose_dtype(const struct srv_ctl *ctl, const struct srv_capture *capture,
	enum kv_dtype *dtype, struct kv_error *err)
{
	const char *text = ctl->values[ARG_IN_DTYPE].text;

	if (!text)
		*dtype = srv_capture_is_bf16(capture) ? KV_DTYPE_BF16 : KV_DTYPE_F32;
	else if (strcmp(text, "bf16") == 0)
		*dtype = KV_DTYPE_BF16;
	else if (strcmp(text, "f32") == 0)
		*dtype = KV_DTYPE_F32;
	else
		return kv_fail(err, SRV_CTL_USAGE, "--in-dtype: '%.40s' is not bf16 or f32", text);
	return KV_OK;
}

static enum kv_status choose_prefill(const struct srv_ctl *ctl, const struct srv_capture *capture,
	uint32_t *n_tokens, struct kv_error *err)
{
	const uint32_t n_decode = capture->n_tokens - capture->n_tokens / 2;

	if (!ctl->values[ARG_PREFILL].is_given) {
		*n_tokens = capture->n_tokens -
			(n_decode < DECODE_TOKENS_DEFAULT_MAX ? n_decode : DECODE_TOKENS_DEFAULT_MAX);
		return KV_OK;
	}
	if (ctl->values[ARG_PREFILL].number > capture->n_tokens)
		return kv_fail(err, SRV_CTL_USAGE, "--prefill: %llu tokens, the capture has %u",
			(unsigned long long)ctl->values[ARG_PREFILL].number, capture->n_tokens);
	*n_tokens = (uint32_t)ctl->values[ARG_PREFILL].number;
	return KV_OK;
}

static enum kv_status check_formats(const struct srv_ctl *ctl, struct kv_error *err)
{
	const struct kv_format *format;

	for (uint32_t i = ARG_K; i <= ARG_V; i++)
		if (kv_format_parse(ctl->values[i].text, &format, err) != KV_OK) {
			kv_error_wrap(err, "--%s", args[i].name);
			return SRV_CTL_USAGE;
		}
	return KV_OK;
}

static enum kv_status prepare(struct srv_replay *replay, struct kv_error *err)
{
	const struct srv_ctl *ctl = replay->ctl;
	enum kv_status status = choose_dtype(ctl, replay->capture, &replay->in_dtype, err);
	json_t *json;

	if (status == KV_OK)
		status = choose_prefill(ctl, replay->capture, &replay->n_prefill_tokens, err);
	if (status == KV_OK)
		status = srv_capture_check_finite(replay->capture, err);
	if (status != KV_OK)
		return status;
	replay->n_chunk_tokens = (uint32_t)ctl->values[ARG_CHUNK].number;
	json = describe_pool(ctl, replay->capture);
	if (!json)
		return kv_fail(err, KV_NO_MEMORY, "no memory for a pool's description");
	status = srv_temp_pool_init(&replay->pool, ctl, json, "replay", err);
	json_decref(json);
	return status;
}

/* The operation's failure is told; that of cleaning up only when there is no other. */
static enum kv_status finish(struct srv_replay *replay, enum kv_status status, struct kv_error *err)
{
	struct kv_error cleanup_err = { .status = KV_OK };
	const enum kv_status cleanup = srv_replay_finish(replay, &cleanup_err);

	if (cleanup == KV_OK)
		return status;
	if (status == KV_OK) {
		*err = cleanup_err;
		return cleanup;
	}
	fprintf(stderr, "tqkvctl replay: %s\n", cleanup_err.msg);
	return status;
}

static enum kv_status run_replay(struct srv_ctl *ctl, struct kv_error *err)
{
	struct srv_replay *replay;
	struct srv_capture *capture;
	enum kv_status status = check_formats(ctl, err);

	if (status == KV_OK)
		status = srv_capture_open(ctl->operands[0], &capture, err);
	if (status != KV_OK)
		return status;
	replay = kv_alloc(1, sizeof(*replay));
	if (!replay) {
		srv_capture_destroy(capture);
		return kv_fail(err, KV_NO_MEMORY, "no memory for a replay");
	}
	replay->ctl = ctl;
	replay->capture = capture;
	srv_interrupt_catch();
	status = prepare(replay, err);
	if (status == KV_OK)
		status = srv_replay_run(replay, err);
	if (status == KV_OK && ctl->is_json)
		srv_replay_print_json(replay);
	else if (status == KV_OK)
		srv_replay_print(replay);
	if (status == KV_OK && replay->n_failures > 0)
		status = kv_fail(err, KV_CORRUPT, "%u checks failed, the first: %s", replay->n_failures,
			replay->failures[0]);
	status = finish(replay, status, err);
	kv_free(replay);
	srv_capture_destroy(capture);
	return status;
}

const struct srv_command srv_cmd_replay = {
	.name = "replay",
	.operands = "FILE",
	.n_operands_min = 1,
	.n_operands_max = 1,
	.summary = "stream a capture's rows through the daemon and compare everything that comes back",
	.details = "Makes a pool of the capture's geometry, appends the prompt's rows layer by layer, "
		   "decodes the rest token by\n"
		   "token, compares each output with exact attention over the capture's rows, reads every "
		   "row back, and\n"
		   "deletes the pool. Fails when a bound is exceeded or an account does not add up.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_replay,
};
