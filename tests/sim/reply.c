/*
 * Replies held against the model: frame errors and control operations here, rows in reply_rows.c.
 */
#include <stdlib.h>
#include <string.h>

#include "proto/check.h"
#include "tests/sim/peer.h"
#include "tests/sim/reply.h"

_Noreturn void sim_reply_no(const struct sim_request *request, const char *what)
{
	sim_fail("request %llu (%s): %s", (unsigned long long)request->id, kvp_opcode_name(request->opcode),
		what);
}

#define CHECK(cond, what) ((cond) ? (void)0 : sim_reply_no(request, what))

/* ---- frame errors ---- */

bool sim_reply_session_error(struct sim_peer *peer, const struct sim_request *request, enum kv_status status)
{
	const struct sim_session *session = sim_model_session(&peer->world->model, request->session);

	switch (status) {
	case KV_NOT_FOUND:
		return request->session == 0;
	case KV_STALE_EPOCH:
	case KV_STALE_HANDLE:
		return !session || !session->is_open;
	case KV_SESSION_EXPIRED:
		return session && session->is_expired;
	case KV_NOT_OWNER:
		return session &&
			(session->owner_id != sim_peer_conn_id(peer) ||
				session->owner_changed_ns >= request->sent_ns);
	default:
		return false;
	}
}

static void check_error_frame(
	const struct sim_request *request, const struct kvp_header *header, const uint8_t *body)
{
	const struct kv_status_row *row = kv_status_row(header->status);
	struct kvp_frame_error error;

	CHECK(header->op_bytes == KVP_BYTES(frame_error) && header->n_items == 0, "not an error frame");
	kvp_frame_error_decode(body, header->op_bytes, &error);
	CHECK(error.status == header->status, "two statuses in one error frame");
	CHECK(error.retryable == row->is_retryable, "retryable is not the table's");
	CHECK(!row->is_retryable || header->retry_after_ms > 0, "a retryable error without retry_after_ms");
	CHECK(error.detail_bytes > 0 && kvp_payload_bytes(header) == error.detail_bytes,
		"an error frame without detail");
}

/* True: the reply is an error that its flaw or its session explains, and it is checked. */
static bool is_explained(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header)
{
	const enum kv_status status = (enum kv_status)header->status;
	const bool needs_session = kvp_opcode_row(request->opcode)->session_rule != KVP_SESSION_NONE;
	const struct sim_session *session = sim_model_session(&peer->world->model, request->session);

	/* A session has either sequences or client tables, and that is seen before most flaws. */
	if (status == KV_BAD_STATE && session && session->has_tables != sim_request_is_tables(request)) {
		CHECK(request->planned_seq == 0, "BAD_STATE although it was planned");
		return true;
	}
	if (request->flaw != SIM_FLAW_NONE) {
		/* What is checked behind the handle may not be reached. */
		CHECK(status == sim_flaw_status(request->flaw) ||
				(request->flaw >= SIM_FLAW_HANDLE_0 && needs_session &&
					sim_reply_session_error(peer, request, status)) ||
				(request->flaw > SIM_FLAW_HANDLE_GENERATION && status == KV_DRAINING) ||
				(request->flaw == SIM_FLAW_BODY_CRC && needs_session &&
					sim_reply_session_error(peer, request, status)) ||
				(request->flaw == SIM_FLAW_BODY_CRC && status == KV_DRAINING),
			kv_status_name(status));
		return true;
	}
	if (status != KV_OK && needs_session && request->planned_seq == 0 &&
		sim_reply_session_error(peer, request, status))
		return true;
	if (status == KV_QUOTA && needs_session && request->opcode != KVP_OP_MATCH) {
		CHECK(peer->world->config.quota_per_mille > 0, "QUOTA, and nobody has one");
		CHECK(request->planned_seq == 0, "QUOTA although it was planned");
		return true;
	}
	if (status == KV_DRAINING) {
		CHECK(peer->world->server->is_draining, "DRAINING while nobody drains");
		CHECK(peer->world->server->stopped_ns != 0 ||
				!(sim_request_is_rows(request) || sim_request_is_tables(request)),
			"DRAINING although sessions go on");
		CHECK(request->planned_seq == 0, "DRAINING although it was planned");
		return true;
	}
	return false;
}

/* ---- what a control operation did, and when ---- */

/* Row requests sent before it were planned before it took effect, later ones after it. */
static void check_order(const struct sim_peer *peer, const struct sim_request *request, uint64_t seq)
{
	const uint64_t first = request->id > 100 ? request->id - 100 : 1;

	for (uint64_t id = first; id <= request->id + 100; id++) {
		const struct sim_request *other = sim_world_find(peer->world, id);

		if (!other || other->peer != peer || other->conn_serial != request->conn_serial ||
			other->planned_seq == 0)
			continue;
		SIM_CHECK((other->order < request->order) == (other->planned_seq < seq),
			"request %llu took effect on the wrong side of request %llu",
			(unsigned long long)request->id, (unsigned long long)id);
	}
}

static struct sim_control *take_control(struct sim_peer *peer, const struct sim_request *request)
{
	struct sim_control *control =
		sim_model_take_control(&peer->world->model, sim_peer_conn_id(peer), request->opcode);

	CHECK(control, "answered as if it was done, and it was not");
	check_order(peer, request, control->seq);
	return control;
}

static void check_hello(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header,
	const uint8_t *body)
{
	const struct sim_config *config = &peer->world->config;
	const uint64_t boot_id = kv_domain_boot_id(peer->world->server->domain);
	const uint64_t seen = request->hello.boot_id_seen;
	struct kvp_hello_reply reply;

	CHECK(header->op_bytes == KVP_BYTES(hello_reply), "HELLO answers with its own struct");
	kvp_hello_reply_decode(body, header->op_bytes, &reply);
	if (request->hello.proto_min > KVP_PROTO_MAX || request->flaw == SIM_FLAW_VERSION) {
		CHECK(header->status == KV_VERSION_UNSUPPORTED, "a version that nobody speaks");
		CHECK(reply.proto_min == KVP_PROTO_MIN && reply.proto_max == KVP_PROTO_MAX, "the range");
		return;
	}
	CHECK(header->status == (seen != 0 && seen != boot_id ? KV_STALE_EPOCH : KV_OK), "HELLO's status");
	CHECK(reply.boot_id == boot_id && reply.proto == 1, "boot id or version");
	CHECK(reply.frame_bytes_max == config->frame_bytes_max && reply.items_max == KVP_ITEMS_MAX &&
			reply.inflight_requests_max == config->inflight_requests_max &&
			reply.inflight_bytes_max == config->inflight_bytes_max &&
			reply.sessions_max == config->sessions_max &&
			reply.sequences_max == config->sequences_max && reply.q_len_max == SRV_Q_LEN_MAX &&
			reply.lease_ms == config->lease_ms,
		"HELLO tells limits that are not those of the options");
	CHECK(reply.features == (request->hello.features & SRV_FEATURES), "the common features");
	peer->is_hello_done = true;
	peer->boot_id = boot_id;
}

static void check_ping(struct sim_peer *peer, const struct sim_request *request,
	const struct kvp_header *header, const uint8_t *body)
{
	const uint8_t *payload = body + kvp_payload_start(header->op_bytes, 0, 0);
	struct kvp_ping_reply reply;

	CHECK(header->status == KV_OK, kv_status_name(header->status));
	kvp_ping_reply_decode(body, header->op_bytes, &reply);
	CHECK(reply.boot_id == kv_domain_boot_id(peer->world->server->domain), "boot id");
	CHECK(kvp_payload_bytes(header) == (request->has_echo ? request->echo_bytes : 0), "bytes echoed");
	for (uint64_t i = 0; i < kvp_payload_bytes(header); i++)
		CHECK(payload[i] == (i < request->echo_payload_bytes ? (uint8_t)(request->id + i * 7) : 0),
			"an echo with other bytes");
}

static void check_opened(struct sim_peer *peer, struct sim_request *request, const uint8_t *body,
	const struct sim_control *control)
{
	const struct sim_session *session = sim_model_session(&peer->world->model, control->handle);
	struct kvp_open_reply reply;

	kvp_open_reply_decode(body, KVP_BYTES(open_reply), &reply);
	CHECK(reply.session == control->handle && session, "another handle");
	CHECK(reply.boot_id == kv_domain_boot_id(peer->world->server->domain), "boot id");
	CHECK(reply.lease_ms == session->lease_ms && reply.sequences_max == session->sequences_max &&
			reply.tokens_max == session->tokens_max,
		"limits of the session");
	request->session = reply.session;
	if (peer->n_sessions < SIM_OWNED_MAX)
		peer->sessions[peer->n_sessions++] = reply.session;
	if (!session->is_open)
		return; /* its pool may be gone as well */
	const struct kv_pool_spec *spec = session->pool->spec;

	CHECK(reply.fingerprint == spec->fingerprint && reply.n_layers == spec->n_layers &&
			reply.block_size == spec->block_size && reply.q_heads == spec->q_heads &&
			reply.kv_heads == spec->kv_heads && reply.k_head_dim == spec->k_head_dim &&
			reply.v_head_dim == spec->v_head_dim,
		"geometry of the pool");
}

static void check_open(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header,
	const uint8_t *body)
{
	const enum kv_status status = (enum kv_status)header->status;

	if (status == KV_FORMAT_MISMATCH) {
		CHECK(request->open.fingerprint != 0, "FORMAT_MISMATCH without a fingerprint");
		return;
	}
	if (status == KV_NOT_FOUND && request->opcode == KVP_OP_OPEN) {
		CHECK(strcmp(request->pool_name, sim_pool_name(0)) != 0, "the first pool is always there");
		return;
	}
	struct sim_control *control = take_control(peer, request);

	CHECK(control->status == status, kv_status_name(status));
	if (status == KV_OK)
		check_opened(peer, request, body, control);
	sim_control_free(control);
}

static void forget_handle(struct sim_peer *peer, uint64_t handle)
{
	for (uint32_t i = 0; i < peer->n_sessions; i++) {
		if (peer->sessions[i] == handle)
			peer->sessions[i--] = peer->sessions[--peer->n_sessions];
	}
}

static void check_tell(struct sim_peer *peer, const struct sim_request *request,
	const struct kvp_header *header, const uint8_t *body)
{
	struct sim_control *control = take_control(peer, request);
	const bool has_lengths = request->tell.flags & KVP_TELL_PER_LAYER && control->n_rows > 0;
	const uint8_t *lengths = body + kvp_payload_start(header->op_bytes, header->n_items, KVP_ITEM_BYTES);
	struct kvp_tell_reply reply;

	CHECK(header->status == KV_OK, kv_status_name(header->status));
	kvp_tell_reply_decode(body, header->op_bytes, &reply);
	CHECK(header->n_items == control->n_rows && reply.next_sequence == control->next_sequence &&
			reply.n_sequences_total == control->n_total,
		"TELL lists other sequences");
	CHECK(reply.lengths_off == (has_lengths ? 0 : KVP_ABSENT), "TELL's lengths");
	for (uint32_t i = 0; i < control->n_rows; i++) {
		const struct sim_tell_row *row = &control->rows[i];
		struct kvp_tell_item item;

		kvp_tell_item_decode(body + header->op_bytes + i * KVP_ITEM_BYTES, header->item_bytes, &item);
		CHECK(item.sequence == row->sequence && item.length_min == row->length_min &&
				item.length_max == row->length_max && item.n_blocks >= row->n_blocks &&
				item.n_shared_blocks == row->n_shared_blocks && item.state == row->state &&
				item.n_exact == row->n_exact &&
				(item.flags == KVP_ITEM_EVICTABLE) == row->is_evictable,
			"TELL says something else about a sequence");
		for (uint32_t l = 0; has_lengths && l < reply.n_layers; l++, lengths += 4)
			CHECK(kvp_get_u32(lengths) == row->lengths[l], "TELL says another length");
	}
	sim_control_free(control);
}

static void check_items(struct sim_peer *peer, const struct sim_request *request,
	const struct kvp_header *header, const uint8_t *body)
{
	struct kvp_rows_reply reply;
	uint32_t n_ok = 0;

	CHECK(header->status == KV_OK, kv_status_name(header->status));
	CHECK(header->n_items == request->n_items, "number of items");
	kvp_rows_reply_decode(body, header->op_bytes, &reply);
	for (uint32_t i = 0; i < request->n_items; i++) {
		struct sim_control *control = take_control(peer, request);
		struct kvp_rows_reply_item item;

		kvp_rows_reply_item_decode(
			body + header->op_bytes + i * KVP_ITEM_BYTES, header->item_bytes, &item);
		CHECK(control->sequence == request->items[i].sequence && item.sequence == control->sequence &&
				item.status == control->status && item.length == control->length &&
				item.layer == KVP_NO_LAYER && item.row == KVP_NO_ROW &&
				(item.retry_after_ms > 0) == (kv_status_row(item.status)->is_retryable != 0),
			"an item's answer");
		n_ok += item.status == KV_OK;
		sim_control_free(control);
	}
	CHECK(reply.n_ok == n_ok && reply.n_failed == request->n_items - n_ok, "n_ok, n_failed");
}

static void check_prefix(struct sim_peer *peer, const struct sim_request *request,
	const struct kvp_header *header, const uint8_t *body)
{
	struct sim_control *control = take_control(peer, request);
	struct kvp_prefix_reply reply;

	CHECK(control->status == header->status && control->sequence == request->prefix.sequence,
		"PUBLISH or MATCH answers something else than it did");
	if (header->status == KV_OK) {
		kvp_prefix_reply_decode(body, header->op_bytes, &reply);
		CHECK(header->op_bytes == KVP_BYTES(prefix_reply) && reply.sequence == control->sequence &&
				reply.n_tokens == control->length && reply.n_blocks == control->n_total &&
				reply.n_blocks_new == control->n_new,
			"numbers of PUBLISH or MATCH");
	}
	sim_control_free(control);
}

static void check_cancel(struct sim_peer *peer, const struct sim_request *request,
	const struct kvp_header *header, const uint8_t *body)
{
	struct sim_request *target = sim_world_find(peer->world, request->cancel_id);
	struct kvp_cancel_reply reply;

	CHECK(header->status == KV_OK, kv_status_name(header->status));
	kvp_cancel_reply_decode(body, header->op_bytes, &reply);
	CHECK(reply.outcome <= KVP_CANCEL_UNKNOWN, "an outcome that there is not");
	if (!target) {
		CHECK(reply.outcome == KVP_CANCEL_UNKNOWN, "a request that was never sent is known");
		return;
	}
	if (reply.outcome == KVP_CANCEL_DROPPED) {
		CHECK(!target->is_replied || target->is_dropped, "DROPPED, and it was answered otherwise");
		target->is_dropped = true;
	} else if (target->n_cancels == 1) {
		CHECK(!target->is_replied || !target->is_dropped, "not dropped, and answered CANCELLED");
	}
}

static void check_pool_info(struct sim_peer *peer, const struct sim_request *request,
	const struct kvp_header *header, const uint8_t *body)
{
	struct kv_pool *pool = kv_domain_pool_by_name(
		peer->world->server->domain, request->pool_name, (uint32_t)strlen(request->pool_name));
	struct kvp_pool_info_reply reply;

	if (header->status == KV_NOT_FOUND) {
		CHECK(strcmp(request->pool_name, sim_pool_name(0)) != 0 ||
				request->pool_info.what != KVP_POOL_INFO_JSON,
			"the first pool is always there");
		return;
	}
	CHECK(header->status == KV_OK, kv_status_name(header->status));
	kvp_pool_info_reply_decode(body, header->op_bytes, &reply);
	CHECK(kvp_payload_bytes(header) == reply.json_bytes, "json_bytes");
	if (!pool || request->pool_info.what != KVP_POOL_INFO_JSON)
		return;
	CHECK(reply.fingerprint == pool->spec->fingerprint, "fingerprint");
	CHECK(reply.json_bytes == pool->spec->canonical_json_bytes &&
			memcmp(body + kvp_payload_start(header->op_bytes, 0, 0), pool->spec->canonical_json,
				reply.json_bytes) == 0,
		"the pool's JSON");
}

static void check_control(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header,
	const uint8_t *body)
{
	switch (request->opcode) {
	case KVP_OP_PING:
		check_ping(peer, request, header, body);
		break;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		check_open(peer, request, header, body);
		break;
	case KVP_OP_CLOSE: {
		CHECK(header->status == KV_OK && header->body_bytes == 0, kv_status_name(header->status));
		struct sim_control *control = take_control(peer, request);

		CHECK(control->handle == request->session, "another session was closed");
		forget_handle(peer, request->session);
		sim_control_free(control);
		break;
	}
	case KVP_OP_TELL:
		check_tell(peer, request, header, body);
		break;
	case KVP_OP_TRUNCATE:
	case KVP_OP_FREE:
	case KVP_OP_FORK:
	case KVP_OP_PIN:
	case KVP_OP_UNPIN:
	case KVP_OP_SPILL:
	case KVP_OP_PREFETCH:
		check_items(peer, request, header, body);
		break;
	case KVP_OP_PUBLISH:
	case KVP_OP_MATCH:
		check_prefix(peer, request, header, body);
		break;
	case KVP_OP_CANCEL:
		check_cancel(peer, request, header, body);
		break;
	case KVP_OP_POOL_INFO:
		check_pool_info(peer, request, header, body);
		break;
	default:
		sim_reply_no(request, "nobody knows how to check this");
	}
}

void sim_reply_check(struct sim_peer *peer, struct sim_request *request, const struct kvp_header *header,
	const uint8_t *body)
{
	const bool is_error = header->status >= 100;

	if (request->flaw == SIM_FLAW_VERSION) {
		/* Whatever it was: HELLO's reply tells the range. */
		CHECK(header->opcode == KVP_OP_HELLO, "another opcode in the answer");
		check_hello(peer, request, header, body);
		return;
	}
	if (request->flaw == SIM_FLAW_NONE || request->flaw > SIM_FLAW_KEEPS) {
		CHECK(request->flaw == SIM_FLAW_OPCODE || header->opcode == request->opcode,
			"another opcode in the answer");
		CHECK(header->session == request->session || request->flaw != SIM_FLAW_NONE,
			"another session in the answer");
	}
	CHECK(!(request->flags & KVP_FLAG_BODY_CRC) || (header->flags & KVP_FLAG_BODY_CRC) ||
			request->flaw != SIM_FLAW_NONE,
		"no CRC in the answer to a frame with one");
	if (is_error && !(request->opcode == KVP_OP_HELLO && request->flaw == SIM_FLAW_NONE))
		check_error_frame(request, header, body);
	CHECK(is_error || request->flaw == SIM_FLAW_NONE, "a bad frame was answered as if it was good");
	if (is_explained(peer, request, header)) {
		if (header->status == KV_STALE_HANDLE || header->status == KV_SESSION_EXPIRED ||
			header->status == KV_NOT_OWNER)
			forget_handle(peer, request->session);
		return;
	}
	if (request->opcode == KVP_OP_HELLO)
		check_hello(peer, request, header, body);
	else if (sim_request_is_rows(request) || sim_request_is_tables(request) ||
		request->opcode == KVP_OP_READ)
		sim_reply_check_rows(peer, request, header, body);
	else
		check_control(peer, request, header, body);
}
