/*
 * Loading: records from the chunk into the stage. Nothing in the file is believed: headers and payloads are
 * checked against their checksums before they are read, and every number against what can be.
 */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "proto/crc32c.h"
#include "server/checkpoint_internal.h"

enum kv_status srv_load_begin(struct srv_checkpoint *checkpoint, struct kv_error *err)
{
	checkpoint->parse_at = 0;
	checkpoint->n_pools = checkpoint->n_pools_announced = 0;
	checkpoint->session_pool = NULL;
	memset(checkpoint->pools, 0, sizeof(checkpoint->pools));
	memset(&checkpoint->end, 0, sizeof(checkpoint->end));
	return kv_stage_create(checkpoint->server->domain, &checkpoint->stage, err);
}

/* ---- pools ---- */

/* The first member that differs, in words; both texts are canonical. */
static void describe_difference(
	const struct srv_record_pool *told, const struct kv_pool_spec *spec, char *out, size_t n_bytes)
{
	json_t *ours = json_loadb(spec->canonical_json, spec->canonical_json_bytes, 0, NULL);
	json_t *theirs = json_loadb(told->json, told->json_bytes, JSON_REJECT_DUPLICATES, NULL);
	const char *key;
	json_t *value;

	snprintf(out, n_bytes, "its description");
	json_object_foreach (theirs, key, value) {
		if (!json_equal(value, json_object_get(ours, key))) {
			snprintf(out, n_bytes, "%.60s", key);
			break;
		}
	}
	if (!key) {
		json_object_foreach (ours, key, value) {
			if (!json_object_get(theirs, key)) {
				snprintf(out, n_bytes, "%.60s", key);
				break;
			}
		}
	}
	json_decref(ours);
	json_decref(theirs);
}

static enum kv_status take_pool(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	struct srv_record_pool told;
	char difference[64];
	const enum kv_status status = srv_record_pool_decode(record, payload, &told, err);

	if (status != KV_OK)
		return status;
	if (record->pool != checkpoint->n_pools || checkpoint->n_pools == checkpoint->n_pools_announced ||
		checkpoint->end.n_sessions > 0)
		return kv_fail(
			err, KV_CORRUPT, "pool %u comes where %u is next", record->pool, checkpoint->n_pools);
	struct kv_pool *pool = kv_domain_pool_by_name(checkpoint->server->domain, told.name, told.name_bytes);

	if (pool && pool->spec->fingerprint != told.fingerprint) {
		describe_difference(&told, pool->spec, difference, sizeof(difference));
		return kv_fail(err, KV_FORMAT_MISMATCH,
			"pool \"%s\" of this daemon differs from the snapshot's in %s", pool->spec->name,
			difference);
	}
	/* One that there is not matters only if a session is in it. */
	memcpy(checkpoint->pool_names[checkpoint->n_pools], told.name, told.name_bytes);
	checkpoint->pool_names[checkpoint->n_pools][told.name_bytes] = '\0';
	checkpoint->pools[checkpoint->n_pools++] = pool;
	return KV_OK;
}

static enum kv_status find_pool(
	const struct srv_checkpoint *checkpoint, uint32_t number, struct kv_pool **pool, struct kv_error *err)
{
	if (checkpoint->n_pools != checkpoint->n_pools_announced || number >= checkpoint->n_pools)
		return kv_fail(
			err, KV_CORRUPT, "it is in pool %u, %u were told", number, checkpoint->n_pools);
	if (!checkpoint->pools[number])
		return kv_fail(err, KV_NOT_FOUND,
			"this daemon has no pool \"%s\", which it is in; make that pool first, as the "
			"snapshot's daemon had it",
			checkpoint->pool_names[number]);
	*pool = checkpoint->pools[number];
	return KV_OK;
}

/* ---- sessions and sequences ---- */

static enum kv_status take_session(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	struct srv_record_session told;
	struct kv_pool *pool = NULL;
	enum kv_status status = srv_record_session_decode(record, payload, &told, err);

	if (status == KV_OK)
		status = find_pool(checkpoint, record->pool, &pool, err);
	if (status != KV_OK)
		return status;
	struct kv_staged_session staged = {
		.open = { .pool = pool,
			.name = told.name,
			.name_bytes = told.name_bytes,
			.tenant = told.tenant,
			.priority = told.priority,
			.lease_ms = told.lease_ms,
			.sequences_max = told.sequences_max,
			.tokens_max = told.tokens_max },
		.lease_left_ns = told.lease_left_ms * KV_NS_PER_MS,
		.n_rows_in = told.n_rows_in,
		.n_rows_out = told.n_rows_out,
		.n_queries = told.n_queries,
	};

	memcpy(staged.reserved_blocks, told.reserved_blocks, sizeof(staged.reserved_blocks));
	status = kv_stage_session(checkpoint->stage, &staged, checkpoint->server->now_ns, err);
	if (status != KV_OK)
		return status;
	checkpoint->session_pool = pool;
	checkpoint->view.n_sessions++;
	return KV_OK;
}

static enum kv_status take_sequence(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	struct srv_record_sequence told;

	if (!checkpoint->session_pool)
		return kv_fail(err, KV_CORRUPT, "it is in no session");
	enum kv_status status = srv_record_sequence_decode(
		record, payload, checkpoint->session_pool->spec->n_layers, &told, checkpoint->lengths, err);

	if (status != KV_OK)
		return status;
	struct kv_staged_sequence staged = {
		.id = record->id,
		.idle_ns =
			told.idle_ms < UINT64_MAX / KV_NS_PER_MS ? told.idle_ms * KV_NS_PER_MS : UINT64_MAX,
		.is_evictable = (told.flags & SRV_RECORD_EVICTABLE) != 0,
		.n_pins = told.n_pins,
		.lengths = checkpoint->lengths,
	};

	memcpy(staged.n_entries, told.n_entries, sizeof(staged.n_entries));
	memcpy(staged.n_gone, told.n_gone, sizeof(staged.n_gone));
	status = kv_stage_sequence(checkpoint->stage, &staged, checkpoint->server->now_ns, err);
	if (status == KV_OK)
		checkpoint->view.n_sequences++;
	return status;
}

static enum kv_status take_table(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	const enum kv_status status = srv_record_table_decode(record, payload, checkpoint->entries, err);

	if (status != KV_OK)
		return status;
	return kv_stage_table(
		checkpoint->stage, record->group, record->number, checkpoint->entries, record->count, err);
}

static enum kv_status take_prefix(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	struct srv_record_prefix told;
	struct kv_pool *pool = NULL;
	enum kv_status status = find_pool(checkpoint, record->pool, &pool, err);

	if (status == KV_OK)
		status = srv_record_prefix_decode(record, payload, pool->spec->block_size, &told, err);
	if (status != KV_OK)
		return status;
	struct kv_staged_prefix staged = {
		.number = record->number,
		.parent = told.parent,
		.ttl_left_ns = told.ttl_left_ms * KV_NS_PER_MS,
		.is_end = (told.flags & SRV_RECORD_PREFIX_END) != 0,
		.tokens = told.tokens,
		.tenant = told.tenant,
		.adapter = told.adapter,
		.salt = told.salt,
		.adapter_bytes = told.adapter_bytes,
		.salt_bytes = told.salt_bytes,
	};

	memcpy(staged.blocks, told.blocks, sizeof(staged.blocks));
	status = kv_stage_prefix(checkpoint->stage, pool, &staged, err);
	checkpoint->view.n_prefixes += status == KV_OK;
	return status;
}

static uint32_t layers_in(const struct kv_pool_spec *spec, uint32_t group_idx)
{
	uint32_t n = 0;

	for (uint32_t l = 0; l < spec->n_layers; l++)
		n += spec->layers[l].group_idx == group_idx;
	return n;
}

static enum kv_status check_block(const struct srv_record *record, const struct kv_pool_spec *spec,
	const uint8_t *payload, struct kv_error *err)
{
	const uint32_t n_layers = record->group < spec->n_groups ? layers_in(spec, record->group) : 0;
	const uint64_t counts_bytes = srv_record_padded(n_layers);

	if (n_layers == 0 || record->count != n_layers || record->payload_bytes < counts_bytes)
		return kv_fail(err, KV_CORRUPT, "group %u with %u layers", record->group, record->count);
	for (uint32_t l = 0; l < n_layers; l++) {
		if (payload[l] > spec->block_size)
			return kv_fail(err, KV_CORRUPT, "%u rows on a layer", payload[l]);
	}
	if (record->payload_bytes != counts_bytes + kv_plan_block_bytes(spec, record->group, payload))
		return kv_fail(err, KV_CORRUPT, "%llu bytes, its rows take %llu",
			(unsigned long long)record->payload_bytes,
			(unsigned long long)(counts_bytes +
				kv_plan_block_bytes(spec, record->group, payload)));
	return KV_OK;
}

/* The plan is the pool's; *is_taken false: it is full. */
static enum kv_status take_block(struct srv_checkpoint *checkpoint, struct kv_plan *plan,
	const struct srv_record *record, uint8_t *payload, bool *is_taken, struct kv_error *err)
{
	struct kv_pool *pool = plan->pool;
	const struct kv_pool_spec *spec = pool->spec;
	uint32_t block_idx = 0;
	enum kv_status status = check_block(record, spec, payload, err);

	*is_taken = false;
	if (status != KV_OK || !kv_plan_has_room(plan, record->group, payload))
		return status;
	status = kv_stage_block(
		checkpoint->stage, pool, record->group, record->number, payload, &block_idx, err);
	if (status != KV_OK) /* busy: goes on in the next turn */
		return status == KV_BUSY_RETRY ? KV_OK : status;
	*is_taken = kv_plan_add_move(
		plan, record->group, block_idx, payload, true, payload + srv_record_padded(record->count));
	KV_ASSERT(*is_taken);
	checkpoint->view.n_blocks++;
	return KV_OK;
}

/* The plan is the pool's; *is_taken false: it is full. */
static enum kv_status take_exact(struct srv_checkpoint *checkpoint, struct kv_plan *plan,
	const struct srv_record *record, uint8_t *payload, bool *is_taken, struct kv_error *err)
{
	const struct kv_pool_spec *spec = plan->pool->spec;
	const struct kv_sequence *sequence = NULL;
	struct srv_record_exact told = { 0 };
	enum kv_status status = srv_record_exact_decode(record, payload, &told, err);

	*is_taken = false;
	if (status == KV_OK &&
		(spec->exact_tokens == 0 || plan->pool != checkpoint->session_pool ||
			told.n_tokens > spec->exact_tokens || record->count > spec->n_layers ||
			record->payload_bytes !=
				SRV_RECORD_EXACT_BYTES +
					kv_plan_exact_bytes(spec, record->count, told.n_tokens)))
		status = kv_fail(err, KV_CORRUPT, "%u tokens of %u layers in %llu bytes", told.n_tokens,
			record->count, (unsigned long long)record->payload_bytes);
	if (status != KV_OK || !kv_plan_has_room_exact(plan, 1))
		return status;
	status = kv_stage_exact(
		checkpoint->stage, record->number, record->count, told.n_tokens, &sequence, err);
	if (status != KV_OK)
		return status;
	kv_plan_add_exact_move(plan, sequence, record->number, record->count,
		sequence->committed[record->number] - told.n_tokens, told.n_tokens, true,
		payload + SRV_RECORD_EXACT_BYTES);
	*is_taken = true;
	return KV_OK;
}

/* ---- the whole ---- */

static enum kv_status take_file(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	struct srv_record_file told;
	const enum kv_status status = srv_record_file_decode(record, payload, &told, err);

	if (status == KV_OK)
		checkpoint->n_pools_announced = told.n_pools;
	return status;
}

static enum kv_status take_end(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	const struct srv_record_end *counted = &checkpoint->end;
	const uint64_t end_at = checkpoint->offset - checkpoint->used_bytes + checkpoint->parse_at +
		srv_record_bytes(record->payload_bytes);
	struct srv_record_end told;
	const enum kv_status status = srv_record_end_decode(record, payload, &told, err);

	if (status != KV_OK)
		return status;
	if (told.n_records != counted->n_records || told.n_sessions != counted->n_sessions ||
		told.n_sequences != counted->n_sequences || told.n_blocks != counted->n_blocks ||
		told.chain_crc != counted->chain_crc)
		return kv_fail(err, KV_CORRUPT, "%llu records in order, %llu were written",
			(unsigned long long)counted->n_records, (unsigned long long)told.n_records);
	if (end_at != checkpoint->file_bytes)
		return kv_fail(err, KV_CORRUPT, "%llu bytes follow it",
			(unsigned long long)(checkpoint->file_bytes - end_at));
	return KV_OK;
}

static enum kv_status take_record(struct srv_checkpoint *checkpoint, const struct srv_record *record,
	const uint8_t *payload, struct kv_error *err)
{
	if ((record->kind == SRV_RECORD_FILE) != (checkpoint->end.n_records == 0))
		return kv_fail(err, KV_CORRUPT, "the file does not begin with its header");
	switch ((enum srv_record_kind)record->kind) {
	case SRV_RECORD_FILE:
		return take_file(checkpoint, record, payload, err);
	case SRV_RECORD_POOL:
		return take_pool(checkpoint, record, payload, err);
	case SRV_RECORD_SESSION:
		return take_session(checkpoint, record, payload, err);
	case SRV_RECORD_SEQUENCE:
		return take_sequence(checkpoint, record, payload, err);
	case SRV_RECORD_TABLE:
		return take_table(checkpoint, record, payload, err);
	case SRV_RECORD_END:
		return take_end(checkpoint, record, payload, err);
	case SRV_RECORD_PREFIX:
		return take_prefix(checkpoint, record, payload, err);
	case SRV_RECORD_BLOCK:
	case SRV_RECORD_EXACT:
	case SRV_RECORD_KINDS:
		break;
	}
	return kv_fail(err, KV_CORRUPT, "rows before all pools");
}

static enum srv_checkpoint_stop fail(
	struct srv_checkpoint *checkpoint, uint32_t kind, enum kv_status status, const struct kv_error *err)
{
	checkpoint->status =
		kv_fail(&checkpoint->err, status, "snapshot %s: %s, record %llu: %s", checkpoint->name,
			srv_record_name(kind), (unsigned long long)checkpoint->end.n_records, err->msg);
	return CKPT_STOP_FAILED;
}

/* The next record, if it is in the chunk as a whole. */
static bool next_record(struct srv_checkpoint *checkpoint, struct srv_record *record, enum kv_status *status,
	struct kv_error *err)
{
	const uint64_t n_there = checkpoint->used_bytes - checkpoint->parse_at;
	const uint8_t *at = checkpoint->chunk + checkpoint->parse_at;

	*status = KV_OK;
	record->kind = 0;
	if (n_there < SRV_RECORD_BYTES)
		return false;
	*status = srv_record_decode(at, checkpoint->chunk_bytes - SRV_RECORD_BYTES, record, err);
	if (*status != KV_OK)
		return true;
	if (srv_record_bytes(record->payload_bytes) > n_there)
		return false;
	if (kvp_crc32c(0, at + SRV_RECORD_BYTES, (size_t)srv_record_padded(record->payload_bytes)) !=
		record->payload_crc)
		*status = kv_fail(err, KV_CORRUPT, "its checksum differs");
	return true;
}

static void count_record(struct srv_checkpoint *checkpoint, const struct srv_record *record)
{
	struct srv_record_end *end = &checkpoint->end;

	end->chain_crc =
		kvp_crc32c(end->chain_crc, checkpoint->chunk + checkpoint->parse_at, SRV_RECORD_BYTES);
	end->n_records++;
	end->n_sessions += record->kind == SRV_RECORD_SESSION;
	end->n_sequences += record->kind == SRV_RECORD_SEQUENCE;
	end->n_blocks += record->kind == SRV_RECORD_BLOCK;
	checkpoint->parse_at += srv_record_bytes(record->payload_bytes);
}

enum srv_checkpoint_stop srv_load_parse(struct srv_checkpoint *checkpoint, struct kv_plan *plan)
{
	struct srv_record record;
	struct kv_error err = { 0 };
	enum kv_status status;

	for (uint32_t n = 0; next_record(checkpoint, &record, &status, &err); n++) {
		uint8_t *payload = checkpoint->chunk + checkpoint->parse_at + SRV_RECORD_BYTES;
		bool is_taken = true;

		if (n == SRV_RECORDS_PER_CHUNK)
			return CKPT_STOP_MOVES;
		if (status != KV_OK)
			return fail(checkpoint, record.kind, status, &err);
		if (record.kind == SRV_RECORD_END && plan && plan->n_moves > 0)
			return CKPT_STOP_MOVES; /* rows first: the backend looks at them, too */
		struct kv_pool *pool = NULL;

		if (record.kind == SRV_RECORD_BLOCK || record.kind == SRV_RECORD_EXACT)
			status = find_pool(checkpoint, record.pool, &pool, &err);
		if (status == KV_OK && pool && (!plan || plan->pool != pool)) {
			checkpoint->mover.lane = &checkpoint->server->lanes[pool->pool_idx];
			return CKPT_STOP_LANE;
		}
		if (pool && record.kind == SRV_RECORD_BLOCK)
			status = take_block(checkpoint, plan, &record, payload, &is_taken, &err);
		else if (pool)
			status = take_exact(checkpoint, plan, &record, payload, &is_taken, &err);
		else if (status == KV_OK)
			status = take_record(checkpoint, &record, payload, &err);
		if (status != KV_OK)
			return fail(checkpoint, record.kind, status, &err);
		if (!is_taken)
			return CKPT_STOP_MOVES;
		count_record(checkpoint, &record);
		if (record.kind == SRV_RECORD_END)
			return CKPT_STOP_END;
	}
	return CKPT_STOP_CHUNK;
}
