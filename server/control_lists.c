/*
 * Lists for control requests: sessions, one session's sequences, one sequence's blocks, connections. A page
 * is at most SRV_CONTROL_ROWS_MAX rows. A list of sessions looks at SCAN_PER_TURN sessions a turn, fewer
 * where a look adds up many layers, and goes on next turn, so neither a filter that nothing passes nor an
 * order can hold the loop.
 */
#include <stdio.h>
#include <string.h>

#include "server/internal.h"
#include "server/spill.h"

#define SCAN_PER_TURN   320u   /* about 50 us */
#define LAYERS_PER_LOOK 8u     /* a report of a session adds up its layers */
#define BLOCKS_PER_TURN 32768u /* whose owners are looked at, and those of one sequence more */

static void fill_session(
	const struct srv_server *server, const struct kv_session *session, struct srv_session_row *row)
{
	memset(row, 0, sizeof(*row));
	row->handle = session->handle;
	row->tenant = session->tenant;
	row->owner_id = session->owner_id;
	memcpy(row->name, session->name, sizeof(row->name));
	memcpy(row->pool, session->pool->spec->name, sizeof(row->pool));
	row->n_sequences = session->n_sequences;
	row->n_outstanding = session->n_outstanding;
	row->lease_ms = session->lease_ms;
	row->lease_left_ms =
		((int64_t)session->lease_end_ns - (int64_t)server->now_ns) / (int64_t)KV_NS_PER_MS;
	row->age_ms = (server->now_ns - session->opened_ns) / KV_NS_PER_MS;
	row->n_rows_in = session->n_rows_in;
	row->n_rows_out = session->n_rows_out;
	row->n_queries = session->n_queries;
	kv_report_session(session, &row->memory);
}

/* Does not depend on the time of asking, so that pages of one list fit together. */
static uint64_t sort_key(const struct kv_session *session, enum srv_session_sort sort)
{
	struct kv_memory_report memory;

	switch (sort) {
	case SRV_SORT_AGE:
		return UINT64_MAX - session->opened_ns;
	case SRV_SORT_SEQUENCES:
		return session->n_sequences;
	case SRV_SORT_TOKENS:
		kv_report_session(session, &memory);
		return memory.n_tokens;
	case SRV_SORT_BYTES:
		kv_report_session(session, &memory);
		return memory.stored_bytes;
	case SRV_SORT_ROWS_IN:
		return session->n_rows_in;
	case SRV_SORT_QUERIES:
		return session->n_queries;
	case SRV_SORT_NONE:
	case SRV_SORT_HITS:
	case SRV_N_SORTS:
		break;
	}
	return 0;
}

static uint32_t looks_of(const struct kv_session *session, enum srv_session_sort sort)
{
	const bool is_reported = sort == SRV_SORT_TOKENS || sort == SRV_SORT_BYTES;

	return is_reported ? 1 + session->pool->spec->n_layers / LAYERS_PER_LOOK : 1;
}

static bool is_behind(const struct srv_sort_key *a, const struct srv_sort_key *b)
{
	return a->key != b->key ? a->key < b->key : a->slot_idx > b->slot_idx;
}

void srv_control_keep_key(struct srv_control *control, const struct srv_sort_key *key)
{
	uint32_t low = 0, high = control->n_keys;

	if (control->has_cursor_key && !is_behind(key, &control->cursor_key))
		return; /* on an earlier page */
	while (low < high) {
		const uint32_t middle = (low + high) / 2;

		if (is_behind(key, &control->keys[middle]))
			low = middle + 1;
		else
			high = middle;
	}
	if (control->n_keys == control->n_rows_max) {
		control->has_cursor_key_next = true;
		if (low == control->n_rows_max)
			return;
		control->n_keys--;
	}
	memmove(&control->keys[low + 1], &control->keys[low],
		(control->n_keys - low) * sizeof(control->keys[0]));
	control->keys[low] = *key;
	control->n_keys++;
}

static void fill_sorted(struct srv_server *server, struct srv_control *control)
{
	for (uint32_t i = 0; i < control->n_keys; i++) {
		uint32_t slot = (uint32_t)control->keys[i].slot_idx;
		const struct kv_session *session = kv_session_next(server->domain, &slot);

		/* It may have been closed since its slot was looked at. */
		if (session && slot == control->keys[i].slot_idx + 1)
			fill_session(server, session, &control->rows.sessions[control->n_rows++]);
	}
	if (control->n_keys > 0)
		control->cursor_key_next = control->keys[control->n_keys - 1];
}

bool srv_control_sessions(struct srv_server *server, struct srv_control *control)
{
	const bool is_sorted = control->sort != SRV_SORT_NONE;
	uint32_t slot = (uint32_t)control->scan_slot;
	struct kv_session *session;

	if (slot == 0 && !is_sorted)
		slot = control->cursor < UINT32_MAX ? (uint32_t)control->cursor : UINT32_MAX;
	for (uint32_t n = 0; n < SCAN_PER_TURN; n += looks_of(session, control->sort)) {
		if (!is_sorted && control->n_rows == control->n_rows_max) {
			uint32_t peek = slot;

			control->cursor_next = kv_session_next(server->domain, &peek) ? slot : 0;
			return true;
		}
		session = kv_session_next(server->domain, &slot);
		if (!session) {
			if (is_sorted)
				fill_sorted(server, control);
			return true;
		}
		if (control->has_tenant && session->tenant != control->tenant)
			continue;
		if (!is_sorted) {
			fill_session(server, session, &control->rows.sessions[control->n_rows++]);
			continue;
		}
		const struct srv_sort_key key = {
			.key = sort_key(session, control->sort),
			.slot_idx = slot - 1,
		};

		srv_control_keep_key(control, &key);
	}
	control->scan_slot = slot;
	return false;
}

static void refuse(struct srv_control *control, enum kv_status status)
{
	control->status = kv_fail(&control->error, status, "%s", kv_status_row(status)->text);
}

static void fill_sequence(
	const struct srv_server *server, const struct kv_sequence *sequence, struct srv_sequence_row *row)
{
	memset(row, 0, sizeof(*row));
	row->id = sequence->id;
	kv_sequence_lengths(sequence, &row->length_min, &row->length_max);
	for (uint32_t g = 0; g < sequence->pool->spec->n_groups; g++) {
		row->n_blocks += kv_block_table_n_owned(&sequence->tables[g]);
		row->n_shared_blocks += srv_count_shared_blocks(sequence, g);
	}
	row->idle_ms = (server->now_ns - sequence->used_ns) / KV_NS_PER_MS;
	row->is_evictable = sequence->is_evictable;
	row->n_pins = sequence->n_pins;
	row->state = srv_spill_state_name(sequence);
	row->tier = srv_spill_tier_name(server->spill, sequence);
	row->tier_bytes = (uint64_t)sequence->image.n_pages * KV_TIER_PAGE_BYTES;
	kv_report_sequence(sequence, &row->memory);
}

void srv_control_session(struct srv_server *server, struct srv_control *control)
{
	struct kv_session *session = NULL;
	struct kv_sequence *found[SRV_CONTROL_ROWS_MAX];
	const enum kv_status status = kv_session_find(server->domain, control->id, &session);

	if (status != KV_OK) {
		refuse(control, status);
		return;
	}
	fill_session(server, session, &control->session);
	control->n_rows =
		kv_sequence_list(session, control->cursor, found, control->n_rows_max, &control->cursor_next);
	/* A page ends early where its sequences are long. */
	for (uint32_t i = 0, n_blocks = 0; i < control->n_rows; i++) {
		if (n_blocks > BLOCKS_PER_TURN) {
			control->cursor_next = found[i]->id;
			control->n_rows = i;
			break;
		}
		fill_sequence(server, found[i], &control->rows.sequences[i]);
		n_blocks += control->rows.sequences[i].n_blocks;
	}
}

void srv_control_sequence(struct srv_server *server, struct srv_control *control)
{
	struct kv_session *session = NULL;
	const enum kv_status status = kv_session_find(server->domain, control->id, &session);
	uint32_t blocks[SRV_CONTROL_ROWS_MAX];

	if (status != KV_OK) {
		refuse(control, status);
		return;
	}
	const struct kv_sequence *sequence = kv_sequence_find(session, control->sequence_id);

	/* The one behind the last group is the exact window's. */
	if (!sequence || control->group_idx >= session->pool->spec->n_tables) {
		control->status = sequence
			? kv_fail(&control->error, KV_NOT_FOUND, "the pool has %u kinds of blocks",
				  session->pool->spec->n_tables)
			: kv_fail(&control->error, KV_NOT_FOUND, "no such sequence");
		return;
	}
	const struct kv_pool *pool = session->pool;
	const struct kv_block_table *table = &sequence->tables[control->group_idx];
	const uint32_t first =
		control->cursor < table->n_blocks ? (uint32_t)control->cursor : table->n_blocks;
	const uint32_t n_left = table->n_blocks - first;

	fill_sequence(server, sequence, &control->sequence);
	control->n_rows = n_left < control->n_rows_max ? n_left : control->n_rows_max;
	control->cursor_next = n_left > control->n_rows ? first + control->n_rows : 0;
	kv_block_table_copy(table, &pool->tables, first, control->n_rows, blocks);
	for (uint32_t i = 0; i < control->n_rows; i++) {
		const bool is_gone = blocks[i] == KV_BLOCK_NONE;

		control->rows.blocks[i] = (struct srv_block_row){
			.block_idx = blocks[i],
			.n_owners = is_gone ? 0 : pool->blocks[control->group_idx].owners[blocks[i]],
		};
	}
}

bool srv_control_session_delete(struct srv_server *server, struct srv_control *control)
{
	struct kv_session *session = NULL;
	const enum kv_status status = kv_session_find(server->domain, control->id, &session);

	if (status != KV_OK) {
		/* Its client closed it between two looks: what was asked for holds. */
		if (!control->is_passed)
			refuse(control, status);
		return true;
	}
	/* From now on nobody sends for it; what waits is sealed within a few turns. */
	kv_session_fence(server->domain, session);
	control->is_passed = true;
	if (session->n_queued > 0)
		return false;
	srv_log(SRV_LOG_INFO, "session %016llx closed over HTTP", (unsigned long long)session->handle);
	srv_session_close(server, session);
	server->has_finished = true; /* frames that waited for its answers find it gone */
	return true;
}

#define OWNER_BUCKETS 512u /* twice SRV_CONTROL_ROWS_MAX, a power of two */

/* Counts the sessions of each listed connection in one pass over the sessions. */
static void count_sessions(struct srv_server *server, struct srv_control *control)
{
	uint16_t buckets[OWNER_BUCKETS] = { 0 }; /* 1 + row, 0 = empty */
	struct srv_connection_row *rows = control->rows.connections;
	uint32_t slot = 0;

	for (uint32_t i = 0; i < control->n_rows; i++) {
		uint32_t at = (uint32_t)rows[i].id % OWNER_BUCKETS;

		while (buckets[at])
			at = (at + 1) % OWNER_BUCKETS;
		buckets[at] = (uint16_t)(i + 1);
	}
	for (struct kv_session *session; (session = kv_session_next(server->domain, &slot));) {
		for (uint32_t at = (uint32_t)session->owner_id % OWNER_BUCKETS; buckets[at];
			at = (at + 1) % OWNER_BUCKETS)
			rows[buckets[at] - 1].n_sessions += rows[buckets[at] - 1].id == session->owner_id;
	}
}

/* The cursor is an index into the table of connections: stable while connections come and go. */
void srv_control_connections(struct srv_server *server, struct srv_control *control)
{
	const uint32_t n_max = server->options->connections_max;
	uint32_t n_left = server->n_conns;
	uint64_t i = control->cursor;

	for (uint64_t k = 0; k < control->cursor && k < n_max && n_left > 0; k++)
		n_left -= server->conns[k].sm.states && server->conns[k].sm.state != CONN_FREE;
	for (; i < n_max && n_left > 0 && control->n_rows < control->n_rows_max; i++) {
		const struct srv_conn *conn = &server->conns[i];
		struct srv_connection_row *row = &control->rows.connections[control->n_rows];

		if (!conn->sm.states || conn->sm.state == CONN_FREE)
			continue;
		n_left--;
		control->n_rows++;
		memset(row, 0, sizeof(*row));
		row->id = conn->id;
		row->peer = conn->peer;
		memcpy(row->client_name, conn->client_name, sizeof(row->client_name));
		row->age_ms = (server->now_ns - conn->accepted_ns) / KV_NS_PER_MS;
		row->bytes_in = conn->bytes_in;
		row->bytes_out = conn->bytes_out;
		row->frames_in = conn->n_frames_in;
		row->n_inflight = conn->n_inflight;
		row->state = kv_sm_name(&conn->sm);
	}
	control->cursor_next = n_left > 0 ? i : 0;
	count_sessions(server, control);
}
