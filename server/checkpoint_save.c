/*
 * Saving: records into the chunk, in the order of the file.
 */
#include <string.h>

#include "proto/crc32c.h"
#include "server/checkpoint_internal.h"
#include "server/spill.h"

enum kv_status srv_save_begin(struct srv_checkpoint *checkpoint, struct kv_error *err)
{
	checkpoint->phase = SAVE_FILE;
	checkpoint->pool_idx = checkpoint->session_slot = 0;
	checkpoint->started_ns = checkpoint->server->now_ns;
	memset(&checkpoint->end, 0, sizeof(checkpoint->end));
	return kv_capture_create(checkpoint->server->domain, &checkpoint->capture, err);
}

/* ---- the chunk ---- */

/* Room for the payload of one more record, or NULL. The record counts as there. */
static uint8_t *add_record(struct srv_checkpoint *checkpoint, const struct srv_record *record)
{
	const uint64_t n_bytes = srv_record_bytes(record->payload_bytes);
	uint8_t *at = checkpoint->chunk + checkpoint->used_bytes;

	if (checkpoint->n_records == SRV_RECORDS_PER_CHUNK ||
		n_bytes > checkpoint->chunk_bytes - checkpoint->used_bytes)
		return NULL;
	checkpoint->records[checkpoint->n_records] = *record;
	checkpoint->record_at[checkpoint->n_records++] = checkpoint->used_bytes;
	checkpoint->used_bytes += n_bytes;
	return at + SRV_RECORD_BYTES;
}

void srv_save_finish_chunk(struct srv_checkpoint *checkpoint)
{
	struct srv_record_end *end = &checkpoint->end;

	for (uint32_t i = 0; i < checkpoint->n_records; i++) {
		uint8_t *at = checkpoint->chunk + checkpoint->record_at[i];
		struct srv_record *record = &checkpoint->records[i];

		if (record->kind == SRV_RECORD_END)
			srv_record_end_encode(end, at + SRV_RECORD_BYTES);
		srv_record_finish(record, at);
		end->chain_crc = kvp_crc32c(end->chain_crc, at, SRV_RECORD_BYTES);
		end->n_records++;
		end->n_sessions += record->kind == SRV_RECORD_SESSION;
		end->n_sequences += record->kind == SRV_RECORD_SEQUENCE;
		end->n_blocks += record->kind == SRV_RECORD_BLOCK;
	}
	checkpoint->n_records = 0;
}

/* ---- what comes next; false: the chunk is full ---- */

static bool put_file(struct srv_checkpoint *checkpoint)
{
	const struct srv_record record = { .kind = SRV_RECORD_FILE, .payload_bytes = SRV_RECORD_FILE_BYTES };
	uint8_t *payload = add_record(checkpoint, &record);

	if (!payload)
		return false;
	checkpoint->n_pools = kv_domain_n_pools(checkpoint->server->domain);
	srv_record_file_encode(&(struct srv_record_file){ .version = SRV_CHECKPOINT_VERSION,
				       .n_pools = checkpoint->n_pools,
				       .boot_id = kv_domain_boot_id(checkpoint->server->domain) },
		payload);
	checkpoint->phase = SAVE_POOLS;
	return true;
}

static bool put_pool(struct srv_checkpoint *checkpoint)
{
	const struct kv_pool *pool = kv_domain_pool_at(checkpoint->server->domain, checkpoint->pool_idx);

	/* One that is made meanwhile has nothing that is saved. */
	if (checkpoint->pool_idx == checkpoint->n_pools) {
		checkpoint->phase = SAVE_SESSION;
		return true;
	}
	const struct srv_record_pool told = {
		.fingerprint = pool->spec->fingerprint,
		.json_bytes = pool->spec->canonical_json_bytes,
		.name_bytes = (uint16_t)strlen(pool->spec->name),
		.name = pool->spec->name,
		.json = pool->spec->canonical_json,
	};
	const struct srv_record record = {
		.kind = SRV_RECORD_POOL,
		.pool = (uint16_t)checkpoint->pool_idx,
		.payload_bytes = SRV_RECORD_POOL_BYTES + (uint64_t)told.name_bytes + told.json_bytes,
	};
	uint8_t *payload = add_record(checkpoint, &record);

	if (!payload)
		return false;
	srv_record_pool_encode(&told, payload);
	checkpoint->file_pool[pool->pool_idx] = (uint8_t)checkpoint->pool_idx++;
	return true;
}

/* Without a name nobody could attach to it again; what a client's own tables mean, only that client knows. */
static bool can_be_saved(const struct kv_session *session)
{
	return session->name[0] != '\0' && !session->has_tables;
}

static bool is_saved(const struct srv_checkpoint *checkpoint, const struct kv_session *session)
{
	if (checkpoint->session_only != 0)
		return session->handle == checkpoint->session_only;
	return can_be_saved(session) && session->opened_ns <= checkpoint->started_ns;
}

static bool put_session(struct srv_checkpoint *checkpoint)
{
	const struct srv_server *server = checkpoint->server;
	uint32_t slot = checkpoint->session_slot;
	struct kv_session *session = kv_session_next(server->domain, &slot);

	while (session && !is_saved(checkpoint, session)) {
		checkpoint->view.n_skipped += !can_be_saved(session);
		checkpoint->session_slot = slot;
		session = kv_session_next(server->domain, &slot);
	}
	if (!session) {
		checkpoint->phase = SAVE_PATH;
		checkpoint->pool_idx = 0;
		return true;
	}
	const uint64_t left_ns =
		session->lease_end_ns > server->now_ns ? session->lease_end_ns - server->now_ns : 0;
	const uint64_t left_ms = left_ns / KV_NS_PER_MS;
	struct srv_record_session told = {
		.tenant = session->tenant,
		.lease_left_ms = left_ms < session->lease_ms ? left_ms : session->lease_ms,
		.lease_ms = session->lease_ms,
		.sequences_max = session->sequences_max,
		.tokens_max = session->tokens_max,
		.priority = session->priority,
		.name_bytes = (uint16_t)strlen(session->name),
		.n_rows_in = session->n_rows_in,
		.n_rows_out = session->n_rows_out,
		.n_queries = session->n_queries,
		.name = session->name,
	};
	const struct srv_record record = {
		.kind = SRV_RECORD_SESSION,
		.pool = checkpoint->file_pool[session->pool->pool_idx],
		.payload_bytes = SRV_RECORD_SESSION_BYTES + (uint64_t)told.name_bytes,
	};
	uint8_t *payload = add_record(checkpoint, &record);

	if (!payload)
		return false;
	memcpy(told.reserved_blocks, session->n_blocks_reserved, sizeof(told.reserved_blocks));
	srv_record_session_encode(&told, payload);
	checkpoint->session_slot = slot;
	checkpoint->session = session->handle;
	checkpoint->sequence_from = 0;
	checkpoint->phase = SAVE_SEQUENCE;
	checkpoint->view.n_sessions++;
	return true;
}

/* The next one that was there when the snapshot began. The session may have been closed meanwhile: it stays
 * with the sequences that were taken in. */
static struct kv_sequence *next_sequence(struct srv_checkpoint *checkpoint)
{
	struct kv_session *session = NULL;

	if (kv_session_find(checkpoint->server->domain, checkpoint->session, &session) != KV_OK)
		return NULL;
	for (;;) {
		struct kv_sequence *sequence = kv_sequence_next(session, checkpoint->sequence_from);

		/* Of an evicted one there is nothing to save. */
		if (!sequence || (sequence->created_ns <= checkpoint->started_ns && !sequence->is_evicted))
			return sequence;
		if (sequence->id == UINT64_MAX)
			return NULL;
		checkpoint->sequence_from = sequence->id + 1;
	}
}

static void pass(struct srv_checkpoint *checkpoint, const struct kv_sequence *sequence)
{
	/* Behind the last one, nothing is found any more. */
	checkpoint->sequence_from = sequence->id + 1;
	if (sequence->id == UINT64_MAX)
		checkpoint->session = 0;
}

/* Its rows are in blocks; or it comes back first; or it cannot be saved and is passed over. */
static enum kv_status bring_back(struct srv_checkpoint *checkpoint, struct kv_sequence *sequence)
{
	if (sequence->residence == KV_RESIDENT || sequence->residence == KV_SPILLING)
		return KV_OK;
	const enum kv_status status = srv_spill_in(checkpoint->server->spill, sequence);

	if (status == KV_OK || status == KV_BUSY_RETRY)
		return KV_BUSY_RETRY;
	checkpoint->view.n_sequences_skipped++;
	pass(checkpoint, sequence);
	return status;
}

bool srv_save_is_ready(struct srv_checkpoint *checkpoint)
{
	struct kv_sequence *sequence = next_sequence(checkpoint);

	return !sequence || bring_back(checkpoint, sequence) != KV_BUSY_RETRY;
}

/* False: no more in this chunk or batch; *has_more says whether a block is left. */
static bool put_block(struct srv_checkpoint *checkpoint, struct kv_plan *plan, bool *has_more)
{
	struct kv_capture *capture = checkpoint->capture;
	const struct kv_pool *pool = kv_capture_sequence(capture)->pool;
	const struct kv_pool_spec *spec = pool->spec;
	struct kv_captured_block block;
	uint8_t n_rows[KV_LAYERS_MAX];
	uint32_t n_layers = 0;

	*has_more = kv_capture_peek(capture, &block);
	if (!*has_more)
		return true;
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (spec->layers[l].group_idx == block.group_idx)
			n_rows[n_layers++] = (uint8_t)kv_capture_n_rows(capture, &block, l);
	}
	const uint64_t counts_bytes = srv_record_padded(n_layers);
	const struct srv_record record = {
		.kind = SRV_RECORD_BLOCK,
		.pool = checkpoint->file_pool[pool->pool_idx],
		.group = (uint16_t)block.group_idx,
		.number = block.number,
		.count = n_layers,
		.payload_bytes = counts_bytes + kv_plan_block_bytes(spec, block.group_idx, n_rows),
	};
	const uint64_t used_bytes = checkpoint->used_bytes;
	uint8_t *payload = add_record(checkpoint, &record);

	if (!payload)
		return false;
	memset(payload, 0, (size_t)counts_bytes);
	memcpy(payload, n_rows, n_layers);
	if (!kv_plan_add_move(
		    plan, block.group_idx, block.block_idx, n_rows, false, payload + counts_bytes)) {
		checkpoint->n_records--;
		checkpoint->used_bytes = used_bytes;
		return false;
	}
	kv_capture_sealed(capture);
	checkpoint->view.n_blocks++;
	return true;
}

static void put_lengths(struct srv_checkpoint *checkpoint)
{
	const struct kv_captured_sequence *sequence = kv_capture_sequence(checkpoint->capture);
	const uint32_t n_layers = sequence->pool->spec->n_layers;
	const struct srv_record record = {
		.kind = SRV_RECORD_SEQUENCE,
		.pool = checkpoint->file_pool[sequence->pool->pool_idx],
		.id = sequence->id,
		.payload_bytes = SRV_RECORD_SEQ_BYTES + 4 * (uint64_t)n_layers,
	};
	struct srv_record_sequence told = {
		.idle_ms = sequence->idle_ns / KV_NS_PER_MS,
		.flags = sequence->is_evictable ? SRV_RECORD_EVICTABLE : 0,
		.n_pins = sequence->n_pins,
	};
	uint8_t *payload = add_record(checkpoint, &record);

	KV_ASSERT(payload); /* asked for before */
	memcpy(told.n_entries, sequence->n_entries, sizeof(told.n_entries));
	memcpy(told.n_gone, sequence->n_gone, sizeof(told.n_gone));
	srv_record_sequence_encode(&told, sequence->lengths, n_layers, payload);
	checkpoint->view.n_sequences++;
}

/* Layers from `first` on that are equally long, with equally many exact tokens. */
static uint32_t exact_run(const struct kv_captured_sequence *sequence, uint32_t first)
{
	uint32_t end = first + 1;

	while (end < sequence->pool->spec->n_layers && sequence->lengths[end] == sequence->lengths[first] &&
		sequence->n_exact[end] == sequence->n_exact[first])
		end++;
	return end;
}

static uint64_t exact_bytes(const struct kv_pool_spec *spec, uint32_t n_layers, uint32_t n_tokens)
{
	return SRV_RECORD_EXACT_BYTES + kv_plan_exact_bytes(spec, n_layers, n_tokens);
}

/*
 * Ring blocks are written in place, so their rows leave with the batch in which the sequence is taken in. The
 * chunk has room for all of them.
 */
static void put_exact(
	struct srv_checkpoint *checkpoint, struct kv_plan *plan, const struct kv_sequence *sequence)
{
	const struct kv_captured_sequence *taken = kv_capture_sequence(checkpoint->capture);
	const struct kv_pool_spec *spec = taken->pool->spec;
	uint32_t end;

	for (uint32_t l = 0; l < spec->n_layers; l = end) {
		const uint32_t n_tokens = taken->n_exact[l];

		end = exact_run(taken, l);
		if (n_tokens == 0)
			continue;
		const struct srv_record record = {
			.kind = SRV_RECORD_EXACT,
			.pool = checkpoint->file_pool[taken->pool->pool_idx],
			.number = l,
			.count = end - l,
			.payload_bytes = exact_bytes(spec, end - l, n_tokens),
		};
		uint8_t *payload = add_record(checkpoint, &record);

		KV_ASSERT(payload);
		srv_record_exact_encode(&(struct srv_record_exact){ .n_tokens = n_tokens }, payload);
		kv_plan_add_exact_move(plan, sequence, l, end - l, taken->lengths[l] - n_tokens, n_tokens,
			false, payload + SRV_RECORD_EXACT_BYTES);
	}
}

/* What lengths and exact window of any sequence take at most. */
uint64_t srv_save_sequence_bytes(const struct kv_pool_spec *spec)
{
	uint64_t n_bytes = srv_record_bytes(SRV_RECORD_SEQ_BYTES + 4 * (uint64_t)spec->n_layers);

	if (spec->exact_tokens > 0)
		n_bytes += spec->n_layers * srv_record_bytes(exact_bytes(spec, 1, spec->exact_tokens));
	return n_bytes;
}

static bool has_room_for_sequence(
	const struct srv_checkpoint *checkpoint, const struct kv_plan *plan, const struct kv_pool_spec *spec)
{
	return srv_save_sequence_bytes(spec) <= checkpoint->chunk_bytes - checkpoint->used_bytes &&
		checkpoint->n_records + 1 + spec->n_layers <= SRV_RECORDS_PER_CHUNK &&
		kv_plan_has_room_exact(plan, spec->n_layers);
}

/* OK: go on; BUSY_RETRY: it has to wait for a tier; LIMIT: for another chunk or batch. */
static enum kv_status take_sequence(struct srv_checkpoint *checkpoint, struct kv_plan *plan)
{
	struct kv_sequence *sequence = next_sequence(checkpoint);

	if (!sequence) {
		checkpoint->phase = checkpoint->session_only != 0 ? SAVE_END : SAVE_SESSION;
		return KV_OK;
	}
	const enum kv_status status = bring_back(checkpoint, sequence);

	if (status != KV_OK)
		return status == KV_BUSY_RETRY ? KV_BUSY_RETRY : KV_OK;
	if (!has_room_for_sequence(checkpoint, plan, sequence->pool->spec))
		return KV_LIMIT;
	pass(checkpoint, sequence);
	kv_capture_take(checkpoint->capture, sequence, checkpoint->server->now_ns);
	put_lengths(checkpoint);
	put_exact(checkpoint, plan, sequence);
	checkpoint->group_idx = checkpoint->entry_idx = 0;
	checkpoint->phase = SAVE_BLOCKS;
	return KV_OK;
}

static bool put_table(struct srv_checkpoint *checkpoint)
{
	const struct kv_captured_sequence *sequence = kv_capture_sequence(checkpoint->capture);
	const uint32_t g = checkpoint->group_idx, first = checkpoint->entry_idx;

	if (g == sequence->pool->spec->n_groups) {
		checkpoint->phase = SAVE_SEQUENCE;
		return true;
	}
	if (first >= sequence->n_entries[g]) {
		checkpoint->group_idx++;
		checkpoint->entry_idx = 0;
		return true;
	}
	const uint32_t n_left = sequence->n_entries[g] - first;
	const uint32_t n = n_left < SRV_TABLE_ENTRIES_MAX ? n_left : SRV_TABLE_ENTRIES_MAX;
	const struct srv_record record = {
		.kind = SRV_RECORD_TABLE,
		.pool = checkpoint->file_pool[sequence->pool->pool_idx],
		.group = (uint16_t)g,
		.number = first,
		.count = n,
		.payload_bytes = 4 * (uint64_t)n,
	};
	uint8_t *payload = add_record(checkpoint, &record);

	if (!payload)
		return false;
	for (uint32_t i = 0; i < n; i++)
		kvp_put_u32(payload + 4 * i, sequence->numbers[g][first + i]);
	checkpoint->entry_idx += n;
	return true;
}

/* ---- published blocks ---- */

/* False: enough for this turn. */
static bool take_path(struct srv_checkpoint *checkpoint)
{
	uint32_t n_looks = SRV_RECORDS_PER_CHUNK;

	while (checkpoint->pool_idx < checkpoint->n_pools) {
		struct kv_pool *pool = kv_domain_pool_at(checkpoint->server->domain, checkpoint->pool_idx);

		if (kv_capture_take_prefix(checkpoint->capture, pool, checkpoint->server->now_ns, &n_looks)) {
			checkpoint->path_idx = 0;
			checkpoint->phase = SAVE_BLOCKS;
			return true;
		}
		if (n_looks == 0)
			return false;
		checkpoint->pool_idx++;
	}
	checkpoint->phase = SAVE_END;
	return true;
}

static bool put_prefix(struct srv_checkpoint *checkpoint)
{
	const struct kv_pool *pool = kv_capture_sequence(checkpoint->capture)->pool;
	const uint32_t block_size = pool->spec->block_size;
	struct kv_captured_prefix prefix;

	if (checkpoint->path_idx == kv_capture_n_prefixes(checkpoint->capture)) {
		checkpoint->phase = SAVE_PATH;
		return true;
	}
	kv_capture_prefix(checkpoint->capture, checkpoint->path_idx, &prefix);
	struct srv_record_prefix told = {
		.tenant = prefix.tenant,
		.ttl_left_ms = (prefix.ttl_left_ns + KV_NS_PER_MS - 1) / KV_NS_PER_MS,
		.parent = prefix.parent,
		.flags = prefix.is_end ? SRV_RECORD_PREFIX_END : 0,
		.adapter_bytes = (uint16_t)prefix.adapter_bytes,
		.salt_bytes = (uint16_t)prefix.salt_bytes,
		.tokens = prefix.tokens,
		.adapter = prefix.adapter,
		.salt = prefix.salt,
	};
	const struct srv_record record = {
		.kind = SRV_RECORD_PREFIX,
		.pool = checkpoint->file_pool[pool->pool_idx],
		.number = prefix.number,
		.count = block_size,
		.payload_bytes = srv_record_prefix_bytes(block_size, prefix.adapter_bytes, prefix.salt_bytes),
	};
	uint8_t *payload = add_record(checkpoint, &record);

	if (!payload)
		return false;
	memcpy(told.blocks, prefix.blocks, sizeof(told.blocks));
	srv_record_prefix_encode(&told, block_size, payload);
	checkpoint->path_idx++;
	checkpoint->view.n_prefixes++;
	return true;
}

/* ---- all of it ---- */

static struct srv_lane *lane_of(const struct srv_checkpoint *checkpoint, const struct kv_pool *pool)
{
	return &checkpoint->server->lanes[pool->pool_idx];
}

/* SAVE_SEQUENCE and SAVE_BLOCKS happen where a batch of the pool is sealed. */
static bool needs_lane(struct srv_checkpoint *checkpoint, const struct kv_plan *plan)
{
	struct kv_session *session = NULL;
	const struct kv_pool *pool = NULL;

	if (checkpoint->phase == SAVE_BLOCKS)
		pool = kv_capture_sequence(checkpoint->capture)->pool;
	else if (kv_session_find(checkpoint->server->domain, checkpoint->session, &session) == KV_OK)
		pool = session->pool;
	if (!pool || (plan && plan->pool == pool))
		return false;
	checkpoint->mover.lane = lane_of(checkpoint, pool);
	return true;
}

/* Sequences have ids. */
static bool is_path(const struct srv_checkpoint *checkpoint)
{
	return kv_capture_sequence(checkpoint->capture)->id == 0;
}

enum srv_checkpoint_stop srv_save_fill(struct srv_checkpoint *checkpoint, struct kv_plan *plan)
{
	const struct srv_record end = { .kind = SRV_RECORD_END, .payload_bytes = SRV_RECORD_END_BYTES };
	bool has_more = false, has_room = true;
	enum kv_status status;

	while (has_room) {
		switch (checkpoint->phase) {
		case SAVE_FILE:
			has_room = put_file(checkpoint);
			break;
		case SAVE_POOLS:
			has_room = put_pool(checkpoint);
			break;
		case SAVE_SESSION:
			has_room = put_session(checkpoint);
			break;
		case SAVE_SEQUENCE:
			if (needs_lane(checkpoint, plan))
				return CKPT_STOP_LANE;
			status = take_sequence(checkpoint, plan);
			if (status == KV_BUSY_RETRY)
				return CKPT_STOP_FETCH;
			has_room = status == KV_OK;
			break;
		case SAVE_BLOCKS:
			if (needs_lane(checkpoint, plan))
				return CKPT_STOP_LANE;
			has_room = put_block(checkpoint, plan, &has_more);
			if (!has_room && plan->n_moves > 0)
				return CKPT_STOP_MOVES;
			if (!has_more)
				checkpoint->phase = is_path(checkpoint) ? SAVE_PREFIXES : SAVE_TABLES;
			break;
		case SAVE_TABLES:
			has_room = put_table(checkpoint);
			break;
		case SAVE_PATH:
			if (!take_path(checkpoint))
				return CKPT_STOP_TURN;
			break;
		case SAVE_PREFIXES:
			has_room = put_prefix(checkpoint);
			break;
		case SAVE_END:
			has_room = add_record(checkpoint, &end) != NULL;
			if (has_room)
				return CKPT_STOP_END;
			break;
		}
	}
	return CKPT_STOP_CHUNK;
}
