/*
 * Control operations on pools, sessions and sequences. Each secures the room for its reply before it does
 * anything, so that nothing takes effect without an answer; a connection that is parked for room comes back
 * here from the start.
 */
#include "server/internal.h"

#include <string.h>

#include "core/format.h"
#include "core/rotation.h"
#include "server/spill.h"

/* ---- pools and sessions ---- */

/* What POOL_INFO tells beside the JSON: n_rows rows of `n` float32 each, of one layer. */
struct info_rows {
	const struct kv_layer_spec *layer;
	const struct kv_rotation *rotation; /* of what asks for one */
	uint16_t what;
	uint32_t n_rows, n;
};

/* False: the layer has nothing of this kind. */
static bool find_info_rows(
	const struct kv_pool_spec *spec, uint16_t what, uint32_t layer_idx, struct info_rows *rows)
{
	const struct kv_layer_spec *layer = &spec->layers[layer_idx];
	const bool is_v = what == KVP_POOL_INFO_V_ROTATION || what == KVP_POOL_INFO_V_BASIS;
	const uint32_t dim = is_v ? spec->v_head_dim : spec->k_head_dim;

	*rows = (struct info_rows){ .layer = layer,
		.rotation = is_v ? layer->v->rotation : layer->k->rotation,
		.what = what,
		.n_rows = spec->kv_heads,
		.n = dim };
	switch (what) {
	case KVP_POOL_INFO_K_CENTER:
		return layer->k_center != NULL;
	case KVP_POOL_INFO_K_BASIS:
	case KVP_POOL_INFO_V_BASIS:
		rows->n_rows = spec->kv_heads * dim;
		return true;
	default:
		rows->n_rows = dim;
		return rows->rotation != NULL;
	}
}

static void write_info_row(const struct info_rows *rows, uint32_t row, float *out)
{
	const uint32_t head = row / rows->n;

	switch (rows->what) {
	case KVP_POOL_INFO_K_CENTER:
		memcpy(out, rows->layer->k_center + (size_t)row * rows->n, rows->n * sizeof(*out));
		return;
	case KVP_POOL_INFO_K_BASIS:
		kv_row_codec_basis_row(kv_layer_k(rows->layer, head), row % rows->n, out);
		return;
	case KVP_POOL_INFO_V_BASIS:
		kv_row_codec_basis_row(kv_layer_v(rows->layer, head), row % rows->n, out);
		return;
	default:
		kv_rotation_matrix(rows->rotation, row, 1, out);
	}
}

/* Writes as many rows from row_first on as n_bytes_max (of the reply's body) holds; returns their bytes. */
static uint32_t write_info_rows(
	const struct info_rows *rows, uint32_t row_first, uint64_t body_bytes_max, uint8_t *out)
{
	const uint32_t first = row_first < rows->n_rows ? row_first : rows->n_rows;
	const uint32_t row_bytes = rows->n * (uint32_t)sizeof(float);
	const uint32_t n_rows = kvp_pool_info_rows_fit(row_bytes, rows->n_rows - first, body_bytes_max);

	for (uint32_t r = 0; r < n_rows; r++)
		write_info_row(rows, first + r, (float *)(void *)out + (size_t)r * rows->n);
	return n_rows * row_bytes;
}

/* The pool that is asked about; NULL: refused. */
static const struct kv_pool_spec *find_info_spec(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	const struct kvp_pool_info_req *info = &request->pool_info;
	const struct kv_pool *pool = request->pool_name.n_bytes
		? kv_domain_pool_by_name(server->domain, request->pool_name.data, request->pool_name.n_bytes)
		: kv_domain_pool_at(server->domain, info->index);

	if (!pool) {
		struct kv_error err = { 0 };

		if (request->pool_name.n_bytes)
			(void)!kv_fail(&err, KV_NOT_FOUND, "no pool \"%.*s\"",
				(int)request->pool_name.n_bytes, (const char *)request->pool_name.data);
		srv_refuse_status(conn, KV_NOT_FOUND,
			KVP_HEADER_BYTES +
				(request->pool_name.n_bytes ? 0u : (uint32_t)KVP_AT(pool_info_req, index)),
			request->pool_name.n_bytes ? err.msg : "no such pool");
		return NULL;
	}
	if (info->what != KVP_POOL_INFO_JSON && info->layer >= pool->spec->n_layers) {
		struct kvp_fault fault = { 0 };

		(void)kvp_fault_set(&fault, KV_BAD_ARG, KVP_HEADER_BYTES + KVP_AT(pool_info_req, layer),
			pool->spec->n_layers, info->layer, "layer is not below the pool's n_layers");
		srv_refuse(conn, &fault, NULL, 0);
		return NULL;
	}
	return pool->spec;
}

void srv_op_pool_info(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	const struct kvp_pool_info_req *info = &server->scratch.pool_info;
	const uint32_t payload_at =
		KVP_HEADER_BYTES + (uint32_t)kvp_payload_start(KVP_BYTES(pool_info_reply), 0, 0);
	const struct kv_pool_spec *spec = find_info_spec(conn);
	struct info_rows rows = { .n = 0 };
	uint32_t n_bytes = 0;

	_Static_assert(KV_POOL_JSON_BYTES_MAX <= SRV_REPLY_BYTES - 512, "a reply holds a pool's JSON");
	if (!spec)
		return;
	if (info->what != KVP_POOL_INFO_JSON && !find_info_rows(spec, info->what, info->layer, &rows)) {
		srv_refuse_status(conn, KV_NOT_FOUND, KVP_HEADER_BYTES + KVP_AT(pool_info_req, what),
			"the layer has nothing of this kind");
		return;
	}
	uint8_t *room = srv_conn_reply_room(conn, SRV_REPLY_BYTES);

	if (!room)
		return;
	memset(room + KVP_HEADER_BYTES, 0, payload_at - KVP_HEADER_BYTES);
	if (info->what == KVP_POOL_INFO_JSON) {
		n_bytes = spec->canonical_json_bytes;
		memcpy(room + payload_at, spec->canonical_json, n_bytes);
	} else {
		n_bytes = write_info_rows(
			&rows, info->row_first, SRV_REPLY_BYTES - KVP_HEADER_BYTES, room + payload_at);
	}
	const struct kvp_pool_info_reply reply = {
		.fingerprint = spec->fingerprint,
		.json_bytes = n_bytes,
		.n_pools = kv_domain_n_pools(server->domain),
	};

	kvp_pool_info_reply_encode(&reply, room + KVP_HEADER_BYTES);
	srv_reply_send(conn, srv_reply_header(conn, room, KV_OK, KVP_BYTES(pool_info_reply), 0, n_bytes));
}

static struct kvp_open_reply open_reply(const struct srv_server *server, struct kv_session *session)
{
	const struct kv_pool_spec *spec = session->pool->spec;

	return (struct kvp_open_reply){
		.session = session->handle,
		.boot_id = kv_domain_boot_id(server->domain),
		.fingerprint = spec->fingerprint,
		.lease_ms = session->lease_ms,
		.reserved_blocks = session->has_tables ? kv_sequence_find(session, 0)->tables[0].n_blocks
						       : session->n_blocks_reserved[0],
		.n_layers = spec->n_layers,
		.block_size = spec->block_size,
		.q_heads = (uint16_t)spec->q_heads,
		.kv_heads = (uint16_t)spec->kv_heads,
		.k_head_dim = (uint16_t)spec->k_head_dim,
		.v_head_dim = (uint16_t)spec->v_head_dim,
		.sequences_max = session->sequences_max,
		.tokens_max = session->tokens_max,
	};
}

static uint64_t tenant_of(const struct srv_conn *conn)
{
	return conn->tenant;
}

static enum kv_status open_session(struct srv_conn *conn, struct kv_session **session, struct kv_error *err)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	const struct kvp_open_req *open = &request->open;
	struct kv_pool *pool =
		kv_domain_pool_by_name(server->domain, request->pool_name.data, request->pool_name.n_bytes);

	if (server->is_draining)
		return kv_fail(err, KV_DRAINING, "the daemon is draining");
	if (!pool)
		return kv_fail(err, KV_NOT_FOUND, "no pool \"%.*s\"", (int)request->pool_name.n_bytes,
			request->pool_name.data);
	if (open->fingerprint != 0 && open->fingerprint != pool->spec->fingerprint)
		return kv_fail(err, KV_FORMAT_MISMATCH, "pool \"%s\" has fingerprint %016llx",
			pool->spec->name, (unsigned long long)pool->spec->fingerprint);
	const struct kv_open_params params = {
		.pool = pool,
		.name = request->session_name.data,
		.name_bytes = request->session_name.n_bytes,
		.tenant = tenant_of(conn),
		.owner_id = conn->id,
		.priority = open->priority,
		.lease_ms = open->lease_ms,
		.has_tables = (open->flags & KVP_OPEN_CLIENT_TABLES) != 0,
		.reserve_blocks = open->reserve_blocks,
		.sequences_max = open->sequences_max,
		.tokens_max = open->tokens_max,
	};
	const enum kv_status status = kv_session_open(server->domain, &params, server->now_ns, session, err);

	if (status == KV_OK)
		server->counters.sessions_opened++;
	return status;
}

static enum kv_status attach_session(struct srv_conn *conn, struct kv_session **session, struct kv_error *err)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	const uint64_t expected = request->open.fingerprint;
	const struct kv_session *found = kv_session_by_name(
		server->domain, request->session_name.data, request->session_name.n_bytes, tenant_of(conn));

	/* The fingerprint is compared before the old owner is fenced: a refused ATTACH changes nothing. */
	if (expected != 0 && found && found->pool->spec->fingerprint != expected)
		return kv_fail(err, KV_FORMAT_MISMATCH, "the session's pool \"%s\" has fingerprint %016llx",
			found->pool->spec->name, (unsigned long long)found->pool->spec->fingerprint);
	const enum kv_status status = kv_session_attach(server->domain, request->session_name.data,
		request->session_name.n_bytes, tenant_of(conn), conn->id, server->now_ns, session);

	if (status == KV_NOT_FOUND)
		return kv_fail(err, status, "no session \"%.*s\"", (int)request->session_name.n_bytes,
			(const char *)request->session_name.data);
	return status == KV_OK ? KV_OK : kv_fail(err, status, "%s", kv_status_row(status)->text);
}

/* OPEN with a reservation may wait for blocks, once for alloc_timeout_ms. */
static bool waits_for_blocks(struct srv_conn *conn)
{
	struct srv_server *server = conn->server;
	const uint64_t timeout_ns = server->options->alloc_timeout_ms * KV_NS_PER_MS;

	if (conn->alloc_end_ns == 0)
		conn->alloc_end_ns = server->now_ns + timeout_ns;
	if (timeout_ns == 0 || server->now_ns >= conn->alloc_end_ns)
		return false;
	srv_conn_wait(conn, WAIT_BLOCKS, &server->waiting_blocks);
	return true;
}

void srv_op_open(struct srv_conn *conn)
{
	uint8_t *room = srv_conn_reply_room(conn, KVP_ERROR_FRAME_BYTES_MAX);
	struct kv_session *session = NULL;
	struct kv_error err = { 0 };

	if (!room)
		return;
	const enum kv_status status = conn->header.opcode == KVP_OP_OPEN
		? open_session(conn, &session, &err)
		: attach_session(conn, &session, &err);

	if (status == KV_POOL_FULL && waits_for_blocks(conn))
		return;
	conn->alloc_end_ns = 0;
	if (status != KV_OK) {
		srv_refuse_status(conn, status, KVP_HEADER_BYTES, err.msg[0] ? err.msg : NULL);
		return;
	}
	const struct kvp_open_reply reply = open_reply(conn->server, session);

	kvp_open_reply_encode(&reply, room + KVP_HEADER_BYTES);
	srv_reply_send(conn, srv_reply_header(conn, room, KV_OK, KVP_BYTES(open_reply), 0, 0));
}

/* Requests that are in batches finish without their session. */
static void forget_session(struct srv_server *server, const struct kv_session *session)
{
	for (uint32_t c = 0; c < 2; c++) {
		for (uint32_t i = 0; i < server->slots[c].n; i++) {
			struct srv_request *request = &server->slots[c].requests[i];

			if (request->sm.state != REQ_FREE && request->session == session)
				request->session = NULL;
		}
	}
}

void srv_session_close(struct srv_server *server, struct kv_session *session)
{
	forget_session(server, session);
	kv_session_close(server->domain, session, false);
}

void srv_op_close(struct srv_conn *conn, struct kv_session *session)
{
	struct srv_server *server = conn->server;

	if (session->n_queued > 0) {
		srv_conn_wait(conn, WAIT_SESSION, &server->waiting_session);
		return;
	}
	uint8_t *room = srv_conn_reply_room(conn, KVP_HEADER_BYTES);

	if (!room)
		return;
	srv_session_close(server, session);
	srv_reply_send(conn, srv_reply_header(conn, room, KV_OK, 0, 0, 0));
}

/* ---- sequences ---- */

uint32_t srv_count_shared_blocks(const struct kv_sequence *sequence, uint32_t g)
{
	const struct kv_pool *pool = sequence->pool;
	const struct kv_block_table *table = &sequence->tables[g];
	uint32_t blocks[KV_CHUNK_ENTRIES], n_shared = 0;

	for (uint32_t first = 0; first < table->n_blocks; first += KV_CHUNK_ENTRIES) {
		const uint32_t n = table->n_blocks - first < KV_CHUNK_ENTRIES ? table->n_blocks - first
									      : KV_CHUNK_ENTRIES;

		kv_block_table_copy(table, &pool->tables, first, n, blocks);
		for (uint32_t i = 0; i < n; i++)
			n_shared += blocks[i] != KV_BLOCK_NONE && pool->blocks[g].owners[blocks[i]] > 1;
	}
	return n_shared;
}

/* Over all groups; blocks that no window reaches do not count, although some may not be given back yet. */
static void count_blocks(const struct kv_sequence *sequence, struct kvp_tell_item *item)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;

	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const uint32_t n_gone = sequence->n_gone[g];

		item->n_blocks +=
			sequence->tables[g].n_blocks - (n_gone > 0 ? n_gone - spec->group_sink_blocks[g] : 0);
		item->n_shared_blocks += srv_count_shared_blocks(sequence, g);
	}
}

void srv_op_tell(struct srv_conn *conn, struct kv_session *session)
{
	struct srv_server *server = conn->server;
	const struct kvp_tell_req *tell = &server->scratch.tell;
	const uint32_t n_layers = session->pool->spec->n_layers;
	struct kvp_caps caps = server->caps;
	struct kvp_tell_reply_layout layout;
	struct kv_sequence *found[KVP_ITEMS_MAX];
	struct kvp_tell_reply reply = { .n_layers = n_layers,
		.n_sequences_total = session->n_sequences - session->has_tables };

	uint8_t *room = srv_conn_reply_room(conn, SRV_REPLY_BYTES);

	if (!room)
		return;
	caps.frame_bytes_max = SRV_REPLY_BYTES - KVP_HEADER_BYTES;
	kvp_tell_reply_layout(tell, KVP_ITEMS_MAX, n_layers, &caps, &layout);
	const uint32_t n = kv_sequence_list(
		session, tell->sequence_from, found, layout.n_sequences_max, &reply.next_sequence);

	kvp_tell_reply_layout(tell, n, n_layers, &caps, &layout);
	reply.lengths_off = layout.lengths.off;
	reply.flags = tell->flags;
	memset(room + KVP_HEADER_BYTES, 0, (size_t)layout.body_bytes);
	kvp_tell_reply_encode(&reply, room + KVP_HEADER_BYTES);
	uint8_t *item_at = room + KVP_HEADER_BYTES + KVP_BYTES(tell_reply);
	uint8_t *lengths_at = layout.lengths.n_bytes > 0
		? room + KVP_HEADER_BYTES + layout.payload_start + layout.lengths.off
		: NULL;

	for (uint32_t i = 0; i < n; i++, item_at += KVP_ITEM_BYTES) {
		struct kvp_tell_item item = {
			.sequence = found[i]->id,
			.state = srv_spill_told(found[i]),
			.flags = found[i]->is_evictable ? KVP_ITEM_EVICTABLE : 0,
		};

		count_blocks(found[i], &item);
		item.n_exact = kv_sequence_n_exact_least(found[i]);
		kv_sequence_lengths(found[i], &item.length_min, &item.length_max);
		kvp_tell_item_encode(&item, item_at);
		for (uint32_t l = 0; layout.lengths.n_bytes > 0 && l < n_layers; l++, lengths_at += 4)
			kvp_put_u32(lengths_at, found[i]->committed[l]);
	}
	srv_reply_send(
		conn, srv_reply_header(conn, room, KV_OK, KVP_BYTES(tell_reply), n, layout.lengths.n_bytes));
}

/* One item of TRUNCATE, FREE, FORK, PIN or UNPIN; `length` is told unless the sequence says otherwise. */
static enum kv_status do_item(struct srv_conn *conn, struct kv_session *session, uint32_t i,
	uint64_t *sequence_id, uint32_t *length)
{
	struct srv_server *server = conn->server;
	const struct kvp_request *request = &server->scratch;
	const struct kvp_fork_item *fork = &request->fork_items[i];
	const struct kvp_rows_item *item = &request->rows_items[i];

	if (conn->header.opcode == KVP_OP_FORK) {
		*sequence_id = fork->sequence;
		return kv_sequence_fork(
			session, fork->sequence, fork->parent, fork->position, server->now_ns, length);
	}
	*sequence_id = item->sequence;
	if (conn->header.opcode == KVP_OP_SPILL || conn->header.opcode == KVP_OP_PREFETCH)
		return srv_spill_item(
			server->spill, session, item->sequence, conn->header.opcode == KVP_OP_SPILL);
	if (conn->header.opcode == KVP_OP_FREE)
		return kv_sequence_free(session, item->sequence);
	if (conn->header.opcode == KVP_OP_PIN)
		return kv_sequence_pin(session, item->sequence);
	if (conn->header.opcode == KVP_OP_UNPIN)
		return kv_sequence_unpin(session, item->sequence);
	return kv_sequence_truncate(session, item->sequence, item->position);
}

/* What FORK and TRUNCATE wait for. After the answer: room for it may cost another sequence its rows. */
static void bring_back(struct srv_conn *conn, struct kv_session *session, uint32_t i)
{
	struct srv_server *server = conn->server;

	if (conn->header.opcode == KVP_OP_FORK)
		srv_spill_touch(server->spill, session, server->scratch.fork_items[i].parent);
	else if (conn->header.opcode == KVP_OP_TRUNCATE)
		srv_spill_touch(server->spill, session, server->scratch.rows_items[i].sequence);
}

/* TRUNCATE, FREE, FORK, PIN and UNPIN: an answer per item, in a reply of the row operations' shape. */
void srv_op_items(struct srv_conn *conn, struct kv_session *session)
{
	struct srv_server *server = conn->server;
	struct kvp_rows_reply reply = { .out_off = KVP_ABSENT, .lse_off = KVP_ABSENT };
	const uint32_t n = server->scratch.n_items;
	uint8_t *room =
		srv_conn_reply_room(conn, KVP_HEADER_BYTES + KVP_BYTES(rows_reply) + n * KVP_ITEM_BYTES);

	if (!room)
		return;
	uint8_t *item_at = room + KVP_HEADER_BYTES + KVP_BYTES(rows_reply);

	for (uint32_t i = 0; i < n; i++, item_at += KVP_ITEM_BYTES) {
		struct kvp_rows_reply_item out = { .layer = KVP_NO_LAYER, .row = KVP_NO_ROW };
		const enum kv_status status = do_item(conn, session, i, &out.sequence, &out.length);
		const struct kv_sequence *sequence = kv_sequence_find(session, out.sequence);
		uint32_t length_max;

		out.status = (uint16_t)status;
		out.retry_after_ms = kv_status_row(status)->is_retryable ? SRV_RETRY_AFTER_MS : 0;
		if (sequence)
			kv_sequence_lengths(sequence, &out.length, &length_max);
		if (out.status == KV_OK) {
			reply.n_ok++;
			server->counters.items_ok++;
		} else {
			reply.n_failed++;
			srv_reject(server, out.status);
		}
		kvp_rows_reply_item_encode(&out, item_at);
		if (status == KV_BUSY_RETRY)
			bring_back(conn, session, i);
	}
	kvp_rows_reply_encode(&reply, room + KVP_HEADER_BYTES);
	srv_reply_send(conn, srv_reply_header(conn, room, KV_OK, KVP_BYTES(rows_reply), n, 0));
}
