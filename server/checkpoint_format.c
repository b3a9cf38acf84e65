#include "server/checkpoint_format.h"

#include <string.h>

#include "core/checked.h"
#include "proto/bytes.h"
#include "proto/crc32c.h"

#define MAGIC 0x31534B54u /* "TKS1" */

const char *srv_record_name(uint32_t kind)
{
	static const char *const names[SRV_RECORD_KINDS] = {
		[0] = "record",
		[SRV_RECORD_FILE] = "header",
		[SRV_RECORD_POOL] = "pool",
		[SRV_RECORD_SESSION] = "session",
		[SRV_RECORD_BLOCK] = "block",
		[SRV_RECORD_SEQUENCE] = "sequence",
		[SRV_RECORD_TABLE] = "table",
		[SRV_RECORD_END] = "trailer",
		[SRV_RECORD_EXACT] = "exact window",
		[SRV_RECORD_PREFIX] = "prefix",
	};

	return names[kind < SRV_RECORD_KINDS ? kind : 0];
}

uint64_t srv_record_padded(uint64_t payload_bytes)
{
	return kv_round_up_u64(payload_bytes, SRV_RECORD_BYTES);
}

uint64_t srv_record_bytes(uint64_t payload_bytes)
{
	return SRV_RECORD_BYTES + srv_record_padded(payload_bytes);
}

/* ---- headers ---- */

void srv_record_encode(const struct srv_record *record, uint8_t out[SRV_RECORD_BYTES])
{
	memset(out, 0, SRV_RECORD_BYTES);
	kvp_put_u32(out, MAGIC);
	kvp_put_u16(out + 4, record->kind);
	kvp_put_u16(out + 6, record->pool);
	kvp_put_u64(out + 8, record->payload_bytes);
	kvp_put_u32(out + 16, record->payload_crc);
	kvp_put_u32(out + 20, record->number);
	kvp_put_u32(out + 24, record->count);
	kvp_put_u16(out + 28, record->group);
	kvp_put_u64(out + 32, record->id);
	kvp_put_u32(out + 60, kvp_crc32c(0, out, 60));
}

enum kv_status srv_record_decode(const uint8_t in[SRV_RECORD_BYTES], uint64_t payload_bytes_max,
	struct srv_record *out, struct kv_error *err)
{
	const struct srv_record record = {
		.kind = kvp_get_u16(in + 4),
		.pool = kvp_get_u16(in + 6),
		.group = kvp_get_u16(in + 28),
		.payload_bytes = kvp_get_u64(in + 8),
		.payload_crc = kvp_get_u32(in + 16),
		.number = kvp_get_u32(in + 20),
		.count = kvp_get_u32(in + 24),
		.id = kvp_get_u64(in + 32),
	};

	if (kvp_get_u32(in) != MAGIC)
		return kv_fail(err, KV_CORRUPT, "no record begins here");
	if (kvp_get_u32(in + 60) != kvp_crc32c(0, in, 60))
		return kv_fail(err, KV_CORRUPT, "the header's checksum differs");
	if (record.kind == 0 || record.kind >= SRV_RECORD_KINDS)
		return kv_fail(err, KV_CORRUPT, "kind %u is not known", record.kind);
	if (record.payload_bytes > payload_bytes_max)
		return kv_fail(err, KV_CORRUPT, "%llu bytes, at most %llu are possible here",
			(unsigned long long)record.payload_bytes, (unsigned long long)payload_bytes_max);
	*out = record;
	return KV_OK;
}

void srv_record_finish(struct srv_record *record, uint8_t *at)
{
	uint8_t *payload = at + SRV_RECORD_BYTES;
	const uint64_t n_padded = srv_record_padded(record->payload_bytes);

	memset(payload + record->payload_bytes, 0, (size_t)(n_padded - record->payload_bytes));
	record->payload_crc = kvp_crc32c(0, payload, (size_t)n_padded);
	srv_record_encode(record, at);
}

/* ---- payloads ---- */

void srv_record_file_encode(const struct srv_record_file *in, uint8_t out[SRV_RECORD_FILE_BYTES])
{
	memset(out, 0, SRV_RECORD_FILE_BYTES);
	kvp_put_u32(out, in->version);
	kvp_put_u32(out + 4, in->n_pools);
	kvp_put_u64(out + 8, in->boot_id);
}

void srv_record_pool_encode(const struct srv_record_pool *in, uint8_t *out)
{
	kvp_put_u64(out, in->fingerprint);
	kvp_put_u32(out + 8, in->json_bytes);
	kvp_put_u16(out + 12, in->name_bytes);
	kvp_put_u16(out + 14, 0);
	memcpy(out + SRV_RECORD_POOL_BYTES, in->name, in->name_bytes);
	memcpy(out + SRV_RECORD_POOL_BYTES + in->name_bytes, in->json, in->json_bytes);
}

void srv_record_session_encode(const struct srv_record_session *in, uint8_t *out)
{
	memset(out, 0, SRV_RECORD_SESSION_BYTES);
	kvp_put_u64(out, in->tenant);
	kvp_put_u64(out + 8, in->lease_left_ms);
	kvp_put_u32(out + 16, in->lease_ms);
	kvp_put_u32(out + 20, in->sequences_max);
	kvp_put_u32(out + 24, in->tokens_max);
	kvp_put_u16(out + 28, in->priority);
	kvp_put_u16(out + 30, in->name_bytes);
	kvp_put_u32(out + 32, in->flags);
	kvp_put_u64(out + 40, in->n_rows_in);
	kvp_put_u64(out + 48, in->n_rows_out);
	kvp_put_u64(out + 56, in->n_queries);
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
		kvp_put_u32(out + 64 + 4 * g, in->reserved_blocks[g]);
	memcpy(out + SRV_RECORD_SESSION_BYTES, in->name, in->name_bytes);
}

void srv_record_sequence_encode(
	const struct srv_record_sequence *in, const uint32_t lengths[], uint32_t n_layers, uint8_t *out)
{
	kvp_put_u64(out, in->idle_ms);
	kvp_put_u32(out + 8, in->flags);
	kvp_put_u32(out + 12, in->n_pins);
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++) {
		kvp_put_u32(out + 16 + 4 * g, in->n_entries[g]);
		kvp_put_u32(out + 48 + 4 * g, in->n_gone[g]);
	}
	for (uint32_t l = 0; l < n_layers; l++)
		kvp_put_u32(out + SRV_RECORD_SEQ_BYTES + 4 * l, lengths[l]);
}

void srv_record_exact_encode(const struct srv_record_exact *in, uint8_t out[SRV_RECORD_EXACT_BYTES])
{
	memset(out, 0, SRV_RECORD_EXACT_BYTES);
	kvp_put_u32(out, in->n_tokens);
}

uint64_t srv_record_prefix_bytes(uint32_t n_tokens, uint32_t adapter_bytes, uint32_t salt_bytes)
{
	return SRV_RECORD_PREFIX_BYTES + 4 * (uint64_t)n_tokens + adapter_bytes + salt_bytes;
}

void srv_record_prefix_encode(const struct srv_record_prefix *in, uint32_t n_tokens, uint8_t *out)
{
	uint8_t *texts = out + SRV_RECORD_PREFIX_BYTES + 4 * (size_t)n_tokens;

	memset(out, 0, SRV_RECORD_PREFIX_BYTES);
	kvp_put_u64(out, in->tenant);
	kvp_put_u64(out + 8, in->ttl_left_ms);
	kvp_put_u32(out + 16, in->parent);
	kvp_put_u16(out + 20, in->adapter_bytes);
	kvp_put_u16(out + 22, in->salt_bytes);
	kvp_put_u32(out + 24, in->flags);
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
		kvp_put_u32(out + 32 + 4 * g, in->blocks[g]);
	memcpy(out + SRV_RECORD_PREFIX_BYTES, in->tokens, 4 * (size_t)n_tokens);
	if (in->adapter_bytes > 0)
		memcpy(texts, in->adapter, in->adapter_bytes);
	if (in->salt_bytes > 0)
		memcpy(texts + in->adapter_bytes, in->salt, in->salt_bytes);
}

void srv_record_end_encode(const struct srv_record_end *in, uint8_t out[SRV_RECORD_END_BYTES])
{
	memset(out, 0, SRV_RECORD_END_BYTES);
	kvp_put_u64(out, in->n_records);
	kvp_put_u64(out + 8, in->n_sessions);
	kvp_put_u64(out + 16, in->n_sequences);
	kvp_put_u64(out + 24, in->n_blocks);
	kvp_put_u32(out + 32, in->chain_crc);
}

static enum kv_status fail_size(const struct srv_record *record, uint64_t expected, struct kv_error *err)
{
	return kv_fail(err, KV_CORRUPT, "%llu bytes, expected %llu",
		(unsigned long long)record->payload_bytes, (unsigned long long)expected);
}

enum kv_status srv_record_file_decode(
	const struct srv_record *record, const uint8_t *in, struct srv_record_file *out, struct kv_error *err)
{
	if (record->payload_bytes != SRV_RECORD_FILE_BYTES)
		return fail_size(record, SRV_RECORD_FILE_BYTES, err);
	if (kvp_get_u32(in) != SRV_CHECKPOINT_VERSION)
		return kv_fail(err, KV_VERSION_UNSUPPORTED, "format version %u, this daemon reads %u",
			kvp_get_u32(in), SRV_CHECKPOINT_VERSION);
	if (kvp_get_u32(in + 4) > KV_POOLS_MAX)
		return kv_fail(err, KV_CORRUPT, "%u pools", kvp_get_u32(in + 4));
	*out = (struct srv_record_file){
		.version = kvp_get_u32(in),
		.n_pools = kvp_get_u32(in + 4),
		.boot_id = kvp_get_u64(in + 8),
	};
	return KV_OK;
}

enum kv_status srv_record_pool_decode(
	const struct srv_record *record, const uint8_t *in, struct srv_record_pool *out, struct kv_error *err)
{
	if (record->payload_bytes < SRV_RECORD_POOL_BYTES)
		return fail_size(record, SRV_RECORD_POOL_BYTES, err);

	const uint32_t json_bytes = kvp_get_u32(in + 8);
	const uint16_t name_bytes = kvp_get_u16(in + 12);
	const uint64_t expected = SRV_RECORD_POOL_BYTES + (uint64_t)name_bytes + json_bytes;

	if (record->payload_bytes != expected)
		return fail_size(record, expected, err);
	if (name_bytes == 0 || name_bytes > KV_POOL_NAME_BYTES_MAX)
		return kv_fail(err, KV_CORRUPT, "a pool name of %u bytes", name_bytes);
	*out = (struct srv_record_pool){
		.fingerprint = kvp_get_u64(in),
		.json_bytes = json_bytes,
		.name_bytes = name_bytes,
		.name = (const char *)in + SRV_RECORD_POOL_BYTES,
		.json = (const char *)in + SRV_RECORD_POOL_BYTES + name_bytes,
	};
	return KV_OK;
}

static bool is_name(const char *name, uint32_t n_bytes)
{
	for (uint32_t i = 0; i < n_bytes; i++) {
		const char c = name[i];

		if (!((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
			    c == '.' || c == '_' || c == ':' || c == '-'))
			return false;
	}
	return n_bytes > 0 && n_bytes <= KV_SESSION_NAME_BYTES_MAX;
}

enum kv_status srv_record_session_decode(const struct srv_record *record, const uint8_t *in,
	struct srv_record_session *out, struct kv_error *err)
{
	if (record->payload_bytes < SRV_RECORD_SESSION_BYTES)
		return fail_size(record, SRV_RECORD_SESSION_BYTES, err);

	struct srv_record_session session = {
		.tenant = kvp_get_u64(in),
		.lease_left_ms = kvp_get_u64(in + 8),
		.lease_ms = kvp_get_u32(in + 16),
		.sequences_max = kvp_get_u32(in + 20),
		.tokens_max = kvp_get_u32(in + 24),
		.priority = kvp_get_u16(in + 28),
		.name_bytes = kvp_get_u16(in + 30),
		.flags = kvp_get_u32(in + 32),
		.n_rows_in = kvp_get_u64(in + 40),
		.n_rows_out = kvp_get_u64(in + 48),
		.n_queries = kvp_get_u64(in + 56),
		.name = (const char *)in + SRV_RECORD_SESSION_BYTES,
	};

	if (record->payload_bytes != SRV_RECORD_SESSION_BYTES + (uint64_t)session.name_bytes)
		return fail_size(record, SRV_RECORD_SESSION_BYTES + (uint64_t)session.name_bytes, err);
	if (!is_name(session.name, session.name_bytes))
		return kv_fail(err, KV_CORRUPT, "a name that no session can have");
	if (session.lease_ms == 0 || session.sequences_max == 0 || session.tokens_max == 0 ||
		session.lease_left_ms > session.lease_ms)
		return kv_fail(err, KV_CORRUPT, "lease %llu of %u ms, %u sequences of %u tokens",
			(unsigned long long)session.lease_left_ms, session.lease_ms, session.sequences_max,
			session.tokens_max);
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
		session.reserved_blocks[g] = kvp_get_u32(in + 64 + 4 * g);
	*out = session;
	return KV_OK;
}

enum kv_status srv_record_sequence_decode(const struct srv_record *record, const uint8_t *in,
	uint32_t n_layers, struct srv_record_sequence *out, uint32_t lengths[], struct kv_error *err)
{
	const uint64_t expected = SRV_RECORD_SEQ_BYTES + 4 * (uint64_t)n_layers;

	if (record->payload_bytes != expected)
		return fail_size(record, expected, err);
	*out = (struct srv_record_sequence){
		.idle_ms = kvp_get_u64(in), .flags = kvp_get_u32(in + 8), .n_pins = kvp_get_u32(in + 12)
	};
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++) {
		out->n_entries[g] = kvp_get_u32(in + 16 + 4 * g);
		out->n_gone[g] = kvp_get_u32(in + 48 + 4 * g);
	}
	for (uint32_t l = 0; l < n_layers; l++)
		lengths[l] = kvp_get_u32(in + SRV_RECORD_SEQ_BYTES + 4 * l);
	return KV_OK;
}

enum kv_status srv_record_exact_decode(const struct srv_record *record, const uint8_t *in,
	struct srv_record_exact *out, struct kv_error *err)
{
	if (record->payload_bytes < SRV_RECORD_EXACT_BYTES)
		return fail_size(record, SRV_RECORD_EXACT_BYTES, err);
	out->n_tokens = kvp_get_u32(in);
	return KV_OK;
}

enum kv_status srv_record_prefix_decode(const struct srv_record *record, const uint8_t *in,
	uint32_t block_size, struct srv_record_prefix *out, struct kv_error *err)
{
	if (record->payload_bytes < SRV_RECORD_PREFIX_BYTES)
		return fail_size(record, SRV_RECORD_PREFIX_BYTES, err);

	const uint16_t adapter_bytes = kvp_get_u16(in + 20), salt_bytes = kvp_get_u16(in + 22);
	const uint64_t expected = srv_record_prefix_bytes(block_size, adapter_bytes, salt_bytes);

	if (record->payload_bytes != expected)
		return fail_size(record, expected, err);
	if (record->count != block_size || kvp_get_u64(in + 8) > UINT32_MAX)
		return kv_fail(err, KV_CORRUPT, "%u tokens that live for %llu ms", record->count,
			(unsigned long long)kvp_get_u64(in + 8));
	if (kvp_get_u32(in + 24) & ~SRV_RECORD_PREFIX_END)
		return kv_fail(err, KV_CORRUPT, "flags 0x%x", kvp_get_u32(in + 24));
	*out = (struct srv_record_prefix){
		.tenant = kvp_get_u64(in),
		.ttl_left_ms = kvp_get_u64(in + 8),
		.parent = kvp_get_u32(in + 16),
		.adapter_bytes = adapter_bytes,
		.salt_bytes = salt_bytes,
		.flags = kvp_get_u32(in + 24),
		.tokens = in + SRV_RECORD_PREFIX_BYTES,
		.adapter = (const char *)in + SRV_RECORD_PREFIX_BYTES + 4 * (size_t)block_size,
	};
	out->salt = out->adapter + adapter_bytes;
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++)
		out->blocks[g] = kvp_get_u32(in + 32 + 4 * g);
	return KV_OK;
}

enum kv_status srv_record_end_decode(
	const struct srv_record *record, const uint8_t *in, struct srv_record_end *out, struct kv_error *err)
{
	if (record->payload_bytes != SRV_RECORD_END_BYTES)
		return fail_size(record, SRV_RECORD_END_BYTES, err);
	*out = (struct srv_record_end){
		.n_records = kvp_get_u64(in),
		.n_sessions = kvp_get_u64(in + 8),
		.n_sequences = kvp_get_u64(in + 16),
		.n_blocks = kvp_get_u64(in + 24),
		.chain_crc = kvp_get_u32(in + 32),
	};
	return KV_OK;
}

enum kv_status srv_record_table_decode(
	const struct srv_record *record, const uint8_t *in, uint32_t numbers[], struct kv_error *err)
{
	if (record->count == 0 || record->count > SRV_TABLE_ENTRIES_MAX)
		return kv_fail(err, KV_CORRUPT, "%u entries", record->count);
	if (record->payload_bytes != 4 * (uint64_t)record->count)
		return fail_size(record, 4 * (uint64_t)record->count, err);
	for (uint32_t i = 0; i < record->count; i++)
		numbers[i] = kvp_get_u32(in + 4 * i);
	return KV_OK;
}
