#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "server/ctl/replay.h"

/* Appends that wait for their answers at a time: enough to keep the daemon busy while the next ones are made.
 */
#define WINDOW 16u
/* Tokens per append where nothing else is asked for. */
#define CHUNK_TOKENS_DEFAULT 64u
/* Op struct, one item and its padding in front of the rows; the reply's are the same. */
#define STRUCTS_BYTES   128u
#define SETTLE_PAUSE_MS 5u

static uint64_t now_ns(void)
{
	return kv_clock_now_ns(kv_clock_system());
}

static enum kv_status check_interrupt(struct kv_error *err)
{
	return srv_interrupt_seen() ? kv_fail(err, KV_CANCELLED, "interrupted") : KV_OK;
}

/* Bytes of one token in one layer, as sent. */
static uint64_t token_bytes(const struct srv_replay *replay, enum srv_capture_kind kind)
{
	return (uint64_t)srv_capture_token_values(replay->capture, kind) * kv_dtype_bytes(replay->in_dtype);
}

static uint64_t kv_token_bytes(const struct srv_replay *replay)
{
	return token_bytes(replay, SRV_CAPTURE_K) + token_bytes(replay, SRV_CAPTURE_V);
}

/* Tokens whose K and V rows of one layer fit into a frame; the segments begin at multiples of 64. */
static uint64_t chunk_tokens_max(const struct srv_replay *replay)
{
	const uint64_t frame_bytes = tqkv_server_info(replay->conn)->frame_bytes_max;
	const uint64_t overhead_bytes = STRUCTS_BYTES + 64;

	return frame_bytes > overhead_bytes ? (frame_bytes - overhead_bytes) / kv_token_bytes(replay) : 0;
}

static enum kv_status choose_chunk(struct srv_replay *replay, struct kv_error *err)
{
	const uint64_t max = chunk_tokens_max(replay);

	if (max == 0)
		return kv_fail(err, KV_TOO_LARGE,
			"one token of one layer takes %llu bytes, a frame holds %llu",
			(unsigned long long)kv_token_bytes(replay),
			(unsigned long long)tqkv_server_info(replay->conn)->frame_bytes_max);
	if (replay->n_chunk_tokens > max)
		return kv_fail(err, SRV_CTL_USAGE, "--chunk: %u tokens do not fit into a frame, %llu do",
			replay->n_chunk_tokens, (unsigned long long)max);
	if (replay->n_chunk_tokens == 0)
		replay->n_chunk_tokens = max < CHUNK_TOKENS_DEFAULT ? (uint32_t)max : CHUNK_TOKENS_DEFAULT;
	return KV_OK;
}

static enum kv_status read_backend(struct srv_replay *replay, struct kv_error *err)
{
	json_t *info;
	const enum kv_status status = srv_ctl_api(replay->ctl, "GET", "/v1/info", NULL, &info, err);

	if (status != KV_OK)
		return status;
	snprintf(replay->backend, sizeof(replay->backend), "%s", srv_json_text(info, "backend"));
	replay->is_cpu_backend = strncmp(srv_json_text(info, "device"), "CPU (scalar)", 12) == 0;
	json_decref(info);
	return KV_OK;
}

static enum kv_status read_account(
	const struct srv_replay *replay, struct srv_replay_account *account, struct kv_error *err)
{
	json_t *row;
	const enum kv_status status = srv_temp_pool_row(&replay->pool, &row, err);

	if (status != KV_OK)
		return status;
	*account = (struct srv_replay_account){
		.n_tokens = srv_json_u64(row, "memory.n_tokens"),
		.payload_bytes = srv_json_u64(row, "memory.payload_bytes"),
		.norms_bytes = srv_json_u64(row, "memory.norms_bytes"),
		.scales_bytes = srv_json_u64(row, "memory.scales_bytes"),
		.zeros_bytes = srv_json_u64(row, "memory.zeros_bytes"),
		.exact_bytes = srv_json_u64(row, "memory.exact_bytes"),
		.stored_bytes = srv_json_u64(row, "memory.stored_bytes"),
		.dense_equivalent_bytes = srv_json_u64(row, "memory.dense_equivalent_bytes"),
		.n_total = srv_json_u64(row, "blocks.total"),
		.n_free = srv_json_u64(row, "blocks.free"),
		.n_owned = srv_json_u64(row, "blocks.owned"),
		.n_shared = srv_json_u64(row, "blocks.shared"),
		.n_draining = srv_json_u64(row, "blocks.draining"),
		.n_reserved = srv_json_u64(row, "blocks.reserved"),
	};
	json_decref(row);
	return KV_OK;
}

static enum kv_status open_session(struct srv_replay *replay, struct kv_error *err)
{
	/* The session has a name so that it can be closed after a lost connection, and the pool be deleted.
	 */
	const struct tqkv_open_params params = {
		.pool = replay->pool.name,
		.session_name = replay->pool.name,
		.pool_json = replay->pool.spec->canonical_json,
		.fingerprint = replay->pool.spec->fingerprint,
	};
	struct tqkv_error failure;

	if (tqkv_open(replay->conn, &params, replay->ctl->timeout_ms, &replay->session, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "open a session on pool '%s'", replay->pool.name);
	return KV_OK;
}

/* Rows [token_first, token_first + n_tokens) of one layer into the staging memory: K, then V; Q when asked
 * for. */
static void stage_rows(struct srv_replay *replay, uint32_t layer_idx, uint32_t token_first, uint32_t n_tokens,
	const float *q, struct tqkv_rows *rows)
{
	const struct srv_replay_layer *layer = &replay->layers[layer_idx];
	const uint32_t kv_heads = replay->capture->kv_heads;
	uint8_t *next = replay->staging;

	for (uint32_t side = 0; side < 2; side++) {
		const uint64_t values = (uint64_t)kv_heads * layer->rows[side].head_dim;
		const uint64_t n_bytes = n_tokens * values * kv_dtype_bytes(replay->in_dtype);

		kv_rows_store(replay->in_dtype, layer->rows[side].original + token_first * values,
			(size_t)(n_tokens * values), next);
		if (side == SRV_REPLAY_K) {
			rows->k = next;
			rows->k_bytes = n_bytes;
		} else {
			rows->v = next;
			rows->v_bytes = n_bytes;
		}
		next += n_bytes;
	}
	rows->layer_first = layer_idx;
	rows->n_layers = 1;
	rows->k_dtype = rows->v_dtype = (uint8_t)replay->in_dtype;
	if (q) {
		rows->q = next;
		rows->q_bytes = token_bytes(replay, SRV_CAPTURE_Q);
		rows->q_dtype = (uint8_t)replay->in_dtype;
		rows->out_dtype = TQKV_F32;
		rows->flags = TQKV_LSE;
		kv_rows_store(
			replay->in_dtype, q, srv_capture_token_values(replay->capture, SRV_CAPTURE_Q), next);
	}
	replay->payload_in_bytes += rows->k_bytes + rows->v_bytes + rows->q_bytes;
}

/* The one item of a request on the replay's sequence. Only the very first rows create it. */
static struct tqkv_item make_item(uint32_t layer_idx, uint32_t position, uint32_t n_tokens, uint32_t q_len)
{
	return (struct tqkv_item){
		.sequence = SRV_REPLAY_SEQUENCE_ID,
		.position = position,
		.n_tokens = n_tokens,
		.q_len = q_len,
		.flags = layer_idx == 0 && position == 0 ? TQKV_CREATE : 0,
	};
}

static enum kv_status fail_item(const struct srv_replay *replay, const char *what, uint32_t layer_idx,
	uint32_t position, const struct tqkv_item_result *item, struct kv_error *err)
{
	return kv_fail(err, (enum kv_status)item->status,
		"%s, layer %u, position %u: %s: %s (length %u, row %u)", what,
		replay->layers[layer_idx].number, position, tqkv_status_name((unsigned)item->status),
		tqkv_status_text((unsigned)item->status), item->length, item->row);
}

struct pending {
	uint64_t request_id;
	uint32_t layer_idx, position;
};

static enum kv_status wait_append(
	struct srv_replay *replay, const struct pending *pending, struct kv_error *err)
{
	struct tqkv_reply reply;
	struct tqkv_error failure;

	if (tqkv_wait(replay->conn, pending->request_id, replay->ctl->timeout_ms, &reply, &failure) !=
		TQKV_OK)
		return srv_client_fail(err, &failure, "append, layer %u, position %u",
			replay->layers[pending->layer_idx].number, pending->position);
	if (reply.n_failed > 0)
		return fail_item(
			replay, "append", pending->layer_idx, pending->position, &reply.items[0], err);
	return KV_OK;
}

static enum kv_status submit_append(struct srv_replay *replay, uint32_t layer_idx, uint32_t position,
	uint32_t n_tokens, struct pending *pending, struct kv_error *err)
{
	const struct tqkv_item item = make_item(layer_idx, position, n_tokens, 0);
	struct tqkv_rows rows = { .items = &item, .n_items = 1 };
	struct tqkv_error failure;

	*pending = (struct pending){ .layer_idx = layer_idx, .position = position };
	stage_rows(replay, layer_idx, position, n_tokens, NULL, &rows);
	if (tqkv_submit_append(replay->session, &rows, replay->ctl->timeout_ms, &pending->request_id,
		    &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "append, layer %u, position %u",
			replay->layers[layer_idx].number, position);
	return KV_OK;
}

/* Chunk by chunk, within a chunk layer by layer, at most WINDOW requests unanswered. */
static enum kv_status prefill(struct srv_replay *replay, struct kv_error *err)
{
	const uint32_t n_layers = replay->capture->n_layers;
	struct pending ring[WINDOW];
	uint64_t n_sent = 0, n_answered = 0;
	enum kv_status status = KV_OK;

	for (uint32_t first = 0; status == KV_OK && first < replay->n_prefill_tokens;) {
		const uint32_t left = replay->n_prefill_tokens - first;
		const uint32_t n_tokens = left < replay->n_chunk_tokens ? left : replay->n_chunk_tokens;

		for (uint32_t i = 0; status == KV_OK && i < n_layers; i++) {
			status = check_interrupt(err);
			if (status == KV_OK && n_sent - n_answered == WINDOW)
				status = wait_append(replay, &ring[n_answered++ % WINDOW], err);
			if (status == KV_OK)
				status = submit_append(
					replay, i, first, n_tokens, &ring[n_sent % WINDOW], err);
			if (status == KV_OK)
				n_sent++;
		}
		first += n_tokens;
		srv_progress_set(&replay->progress, first);
	}
	while (status == KV_OK && n_answered < n_sent)
		status = wait_append(replay, &ring[n_answered++ % WINDOW], err);
	return status;
}

struct step_memory {
	float *q;   /* [q_heads][k_head_dim] */
	float *out; /* [q_heads][v_head_dim] */
	float *lse; /* [q_heads] */
};

static enum kv_status decode_layer(struct srv_replay *replay, uint32_t layer_idx, uint32_t token_idx,
	const struct step_memory *memory, struct kv_error *err)
{
	const struct srv_capture *capture = replay->capture;
	const struct tqkv_item item = make_item(layer_idx, token_idx, 1, 1);
	struct tqkv_item_result item_result;
	struct tqkv_rows rows = { .items = &item, .n_items = 1 };
	struct tqkv_rows_result result = {
		.items = &item_result,
		.out = memory->out,
		.lse = memory->lse,
		.out_bytes_max = (uint64_t)capture->q_heads * capture->v_head_dim * sizeof(float),
		.lse_bytes_max = capture->q_heads * sizeof(float),
	};
	struct tqkv_error failure;

	srv_capture_load(capture, layer_idx, SRV_CAPTURE_Q, token_idx, 1, memory->q);
	stage_rows(replay, layer_idx, token_idx, 1, memory->q, &rows);

	const uint64_t start_ns = now_ns();
	const enum tqkv_status sent =
		tqkv_append_decode(replay->session, &rows, replay->ctl->timeout_ms, &result, &failure);
	const uint64_t took_ns = now_ns() - start_ns;

	if (sent != TQKV_OK)
		return srv_client_fail(err, &failure, "append and decode, layer %u, position %u",
			replay->layers[layer_idx].number, token_idx);
	if (result.n_failed > 0)
		return fail_item(replay, "append and decode", layer_idx, token_idx, &item_result, err);
	srv_percentile_add(&replay->round_trips, took_ns);
	replay->decode_ns += took_ns;
	replay->kernel_us += result.timings.kernel_us;
	replay->server_us += result.timings.total_us;
	replay->payload_out_bytes += result.out_bytes_max + result.lse_bytes_max;
	srv_replay_check_output(replay, layer_idx, token_idx, memory->q, memory->out, memory->lse);
	return KV_OK;
}

/* Token by token, within a token layer by layer: each waits for its answer, as a model would. */
static enum kv_status decode(struct srv_replay *replay, struct kv_error *err)
{
	const struct srv_capture *capture = replay->capture;
	struct step_memory memory = {
		.q = kv_alloc(srv_capture_token_values(capture, SRV_CAPTURE_Q), sizeof(float)),
		.out = kv_alloc((size_t)capture->q_heads * capture->v_head_dim, sizeof(float)),
		.lse = kv_alloc(capture->q_heads, sizeof(float)),
	};
	enum kv_status status = memory.q && memory.out && memory.lse
		? KV_OK
		: kv_fail(err, KV_NO_MEMORY, "no memory for one token's rows");

	for (uint32_t t = replay->n_prefill_tokens; status == KV_OK && t < capture->n_tokens; t++) {
		for (uint32_t i = 0; status == KV_OK && i < capture->n_layers; i++) {
			status = check_interrupt(err);
			if (status == KV_OK)
				status = decode_layer(replay, i, t, &memory, err);
		}
		srv_progress_set(&replay->progress, t + 1 - replay->n_prefill_tokens);
	}
	kv_free(memory.q);
	kv_free(memory.out);
	kv_free(memory.lse);
	return status;
}

/* All rows of one layer, K or V, in one dtype. tqkv_read() asks in ranges. */
static enum kv_status read_rows(
	struct srv_replay *replay, uint32_t layer_idx, uint32_t side, uint8_t dtype, struct kv_error *err)
{
	const struct srv_replay_rows *known = &replay->layers[layer_idx].rows[side];
	const uint64_t row_bytes =
		dtype == TQKV_PACKED ? known->codec->row_bytes : known->head_dim * sizeof(float);
	const uint64_t n_bytes = known->n_rows * row_bytes;
	uint8_t *rows = kv_pages_alloc(n_bytes);
	struct tqkv_read read = {
		.sequence = SRV_REPLAY_SEQUENCE_ID,
		.layer_first = layer_idx,
		.n_layers = 1,
		.n_tokens = replay->capture->n_tokens,
	};
	struct tqkv_error failure;
	enum kv_status status = KV_OK;

	if (side == SRV_REPLAY_K) {
		read.k_dtype = dtype;
		read.k = rows;
		read.k_bytes_max = n_bytes;
	} else {
		read.v_dtype = dtype;
		read.v = rows;
		read.v_bytes_max = n_bytes;
	}
	const uint64_t start_ns = now_ns();

	if (!rows)
		status = kv_fail(err, KV_NO_MEMORY, "no memory for the rows of a layer");
	else if (tqkv_read(replay->session, &read, replay->ctl->timeout_ms, &failure) != TQKV_OK)
		status = srv_client_fail(err, &failure, "read %c rows of layer %u",
			side == SRV_REPLAY_K ? 'K' : 'V', replay->layers[layer_idx].number);
	else if (read.k_bytes + read.v_bytes != n_bytes)
		status = kv_fail(err, KV_CORRUPT, "read %c rows of layer %u: %llu bytes came, not %llu",
			side == SRV_REPLAY_K ? 'K' : 'V', replay->layers[layer_idx].number,
			(unsigned long long)(read.k_bytes + read.v_bytes), (unsigned long long)n_bytes);
	if (status == KV_OK) {
		replay->read_ns += now_ns() - start_ns;
		replay->read_bytes += n_bytes;
		if (dtype == TQKV_PACKED)
			srv_replay_check_packed(replay, layer_idx, side, 0, replay->capture->n_tokens, rows);
		else /* pages are aligned */
			srv_replay_check_decoded(replay, layer_idx, side, 0, replay->capture->n_tokens,
				(const float *)(const void *)rows);
	}
	kv_pages_free(rows, n_bytes);
	return status;
}

static enum kv_status read_back(struct srv_replay *replay, struct kv_error *err)
{
	enum kv_status status = KV_OK;

	for (uint32_t i = 0; status == KV_OK && i < replay->capture->n_layers; i++) {
		for (uint32_t side = 0; status == KV_OK && side < 2; side++) {
			status = check_interrupt(err);
			if (status == KV_OK)
				status = read_rows(replay, i, side, TQKV_PACKED, err);
			if (status == KV_OK)
				status = read_rows(replay, i, side, TQKV_F32, err);
		}
		srv_progress_set(&replay->progress, i + 1);
	}
	return status;
}

static enum kv_status close_session(struct srv_replay *replay, struct kv_error *err)
{
	struct tqkv_session *session = replay->session;
	struct tqkv_error failure;

	replay->session = NULL;
	if (tqkv_close(session, replay->ctl->timeout_ms, &failure) != TQKV_OK)
		return srv_client_fail(err, &failure, "close the session");
	return KV_OK;
}

/* Blocks of a closed session come back a bounded number a turn: asks until all are free or the time is over.
 */
static enum kv_status read_account_after(struct srv_replay *replay, struct kv_error *err)
{
	const uint64_t end_ns = now_ns() + replay->ctl->timeout_ms * KV_NS_PER_MS;
	const struct timespec pause = { .tv_nsec = (long)(SETTLE_PAUSE_MS * KV_NS_PER_MS) };
	enum kv_status status;

	do {
		status = read_account(replay, &replay->after, err);
		if (status != KV_OK || replay->after.n_free == replay->after.n_total)
			return status;
		nanosleep(&pause, NULL);
	} while (now_ns() < end_ns);
	return KV_OK;
}

static void start_progress(struct srv_replay *replay, const char *label, const char *unit, uint64_t n_total)
{
	srv_progress_finish(&replay->progress);
	srv_progress_init(&replay->progress, stderr, kv_clock_system(), label, unit, n_total);
}

/* The part with the daemon's pool in place. */
static enum kv_status run_in_pool(struct srv_replay *replay, struct kv_error *err)
{
	const struct srv_capture *capture = replay->capture;
	enum kv_status status = read_account(replay, &replay->before, err);

	if (status == KV_OK)
		status = open_session(replay, err);
	if (status != KV_OK)
		return status;
	start_progress(replay, "prefill", "tokens", replay->n_prefill_tokens);

	const uint64_t start_ns = now_ns();

	status = prefill(replay, err);
	replay->prefill_ns = now_ns() - start_ns;
	start_progress(replay, "decode", "tokens", capture->n_tokens - replay->n_prefill_tokens);
	if (status == KV_OK)
		status = decode(replay, err);
	start_progress(replay, "read", "layers", capture->n_layers);
	if (status == KV_OK)
		status = read_back(replay, err);
	srv_progress_finish(&replay->progress);
	if (status == KV_OK)
		status = read_account(replay, &replay->during, err);
	if (status == KV_OK)
		status = close_session(replay, err);
	if (status == KV_OK)
		status = read_account_after(replay, err);
	if (status == KV_OK)
		status = srv_temp_pool_delete(&replay->pool, err);
	return status;
}

enum kv_status srv_replay_run(struct srv_replay *replay, struct kv_error *err)
{
	const struct srv_capture *capture = replay->capture;
	const uint64_t n_round_trips =
		(uint64_t)(capture->n_tokens - replay->n_prefill_tokens) * capture->n_layers;
	enum kv_status status;

	if (n_round_trips > UINT32_MAX)
		return kv_fail(err, KV_UNSUPPORTED, "%llu decode steps are too many: raise --prefill",
			(unsigned long long)n_round_trips);
	start_progress(replay, "encode", "layers", capture->n_layers);
	status = srv_replay_prepare(replay, err);
	srv_progress_finish(&replay->progress);
	if (status == KV_OK)
		status = srv_percentile_init(&replay->round_trips, (uint32_t)n_round_trips, err);
	if (status == KV_OK)
		status = read_backend(replay, err);
	if (status == KV_OK)
		status = srv_client_connect(replay->ctl, TQKV_OPTION_TIMINGS, &replay->conn, err);
	if (status == KV_OK)
		status = choose_chunk(replay, err);
	if (status != KV_OK)
		return status;
	replay->staging_bytes =
		replay->n_chunk_tokens * kv_token_bytes(replay) + token_bytes(replay, SRV_CAPTURE_Q);
	replay->staging = kv_alloc((size_t)replay->staging_bytes, 1);
	if (!replay->staging)
		return kv_fail(
			err, KV_NO_MEMORY, "no memory for a chunk of %u tokens", replay->n_chunk_tokens);
	status = srv_temp_pool_create(&replay->pool, err);
	if (status == KV_OK)
		status = run_in_pool(replay, err);
	if (status == KV_OK)
		srv_replay_judge(replay);
	return status;
}

/* After a failure: by the connection that has the session, or, when that is lost, by another one. */
static void abandon_session(struct srv_replay *replay)
{
	const struct tqkv_open_params params = { .session_name = replay->pool.name };
	struct tqkv_session *session;
	struct tqkv_conn *conn;

	if (!replay->session || close_session(replay, NULL) == KV_OK)
		return;
	if (srv_client_connect(replay->ctl, 0, &conn, NULL) != KV_OK)
		return;
	if (tqkv_attach(conn, &params, replay->ctl->timeout_ms, &session, NULL) == TQKV_OK)
		/* A session that stays open shows when the pool cannot be deleted. */
		(void)tqkv_close(session, replay->ctl->timeout_ms, NULL);
	tqkv_disconnect(conn);
}

enum kv_status srv_replay_finish(struct srv_replay *replay, struct kv_error *err)
{
	enum kv_status status;

	srv_progress_finish(&replay->progress);
	abandon_session(replay);
	tqkv_disconnect(replay->conn);
	replay->conn = NULL;
	status = srv_temp_pool_delete(&replay->pool, err);
	srv_percentile_finish(&replay->round_trips);
	srv_replay_release(replay);
	srv_temp_pool_finish(&replay->pool);
	kv_free(replay->staging);
	replay->staging = NULL;
	return status;
}
