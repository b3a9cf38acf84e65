/*
 * The snapshot file, byte by byte (DESIGN.md has the tables): a stream of records, each a header of 64 bytes
 * and a payload that is padded with zeros to a multiple of 64. Pure: no heap, no file, any thread.
 */
#ifndef SERVER_CHECKPOINT_FORMAT_H
#define SERVER_CHECKPOINT_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/domain.h"
#include "core/error.h"

#define SRV_RECORD_BYTES         64u
#define SRV_CHECKPOINT_VERSION   2u
#define SRV_TABLE_ENTRIES_MAX    1024u
#define SRV_RECORD_SESSION_BYTES 128u
#define SRV_RECORD_END_BYTES     64u
#define SRV_RECORD_FILE_BYTES    64u
#define SRV_RECORD_POOL_BYTES    16u
#define SRV_RECORD_SEQ_BYTES     80u
#define SRV_RECORD_EXACT_BYTES   64u
#define SRV_RECORD_PREFIX_BYTES  64u

enum srv_record_kind {
	SRV_RECORD_FILE = 1,     /* first */
	SRV_RECORD_POOL = 2,     /* all pools, before the first session */
	SRV_RECORD_SESSION = 3,  /* then its sequences */
	SRV_RECORD_BLOCK = 4,    /* before the first table or prefix that has it */
	SRV_RECORD_SEQUENCE = 5, /* then its exact window, its blocks and its tables */
	SRV_RECORD_TABLE = 6,
	SRV_RECORD_END = 7,    /* last */
	SRV_RECORD_EXACT = 8,  /* rows of the exact window on some layers */
	SRV_RECORD_PREFIX = 9, /* a published block, behind all sessions */
	SRV_RECORD_KINDS
};

struct srv_record {
	uint16_t kind, pool, group;
	uint64_t payload_bytes; /* without padding */
	uint32_t payload_crc;   /* of the payload with its padding */
	uint32_t number, count;
	uint64_t id;
};

/* "session": for messages. */
const char *srv_record_name(uint32_t kind);
uint64_t srv_record_padded(uint64_t payload_bytes);
/* Header and padded payload. */
uint64_t srv_record_bytes(uint64_t payload_bytes);

void srv_record_encode(const struct srv_record *record, uint8_t out[SRV_RECORD_BYTES]);
/* CORRUPT: checksum, kind, or a payload above payload_bytes_max. */
KV_MUST_CHECK enum kv_status srv_record_decode(const uint8_t in[SRV_RECORD_BYTES], uint64_t payload_bytes_max,
	struct srv_record *out, struct kv_error *err);
/* Zeroes the padding behind the payload, which is complete, and writes the header in front of it. */
void srv_record_finish(struct srv_record *record, uint8_t *at);

struct srv_record_file {
	uint32_t version, n_pools;
	uint64_t boot_id; /* of the daemon that wrote it */
};
struct srv_record_pool {
	uint64_t fingerprint;
	uint32_t json_bytes;
	uint16_t name_bytes;
	const char *name, *json; /* not terminated */
};
struct srv_record_session {
	uint64_t tenant, lease_left_ms;
	uint32_t lease_ms, sequences_max, tokens_max, flags;
	uint16_t priority, name_bytes;
	uint64_t n_rows_in, n_rows_out, n_queries;
	uint32_t reserved_blocks[KV_GROUPS_MAX];
	const char *name; /* not terminated */
};
struct srv_record_sequence {
	uint64_t idle_ms;
	uint32_t flags; /* enum srv_record_flag */
	uint32_t n_pins;
	uint32_t n_entries[KV_GROUPS_MAX], n_gone[KV_GROUPS_MAX];
};
enum srv_record_flag { SRV_RECORD_EVICTABLE = 1 };
/* The number of its first layer, and of layers, is in the record; each has the newest n_tokens. */
struct srv_record_exact {
	uint32_t n_tokens;
};
/* The record has its number and its tokens. Only one without a parent says whose it is. */
#define SRV_RECORD_PREFIX_END 1u /* flag: a PUBLISH ended here */
struct srv_record_prefix {
	uint64_t tenant, ttl_left_ms; /* 0: until it is evicted */
	uint32_t parent;              /* number, or UINT32_MAX */
	uint16_t adapter_bytes, salt_bytes;
	uint32_t flags;
	uint32_t blocks[KV_GROUPS_MAX];
	const uint8_t *tokens; /* u32 each */
	const char *adapter, *salt;
};
struct srv_record_end {
	uint64_t n_records; /* before this one */
	uint64_t n_sessions, n_sequences, n_blocks;
	uint32_t chain_crc; /* of the headers of all records before this one, in order */
};

void srv_record_file_encode(const struct srv_record_file *in, uint8_t out[SRV_RECORD_FILE_BYTES]);
void srv_record_pool_encode(const struct srv_record_pool *in, uint8_t *out);
void srv_record_session_encode(const struct srv_record_session *in, uint8_t *out);
/* lengths: [n_layers] */
void srv_record_sequence_encode(
	const struct srv_record_sequence *in, const uint32_t lengths[], uint32_t n_layers, uint8_t *out);
void srv_record_exact_encode(const struct srv_record_exact *in, uint8_t out[SRV_RECORD_EXACT_BYTES]);
uint64_t srv_record_prefix_bytes(uint32_t n_tokens, uint32_t adapter_bytes, uint32_t salt_bytes);
void srv_record_prefix_encode(const struct srv_record_prefix *in, uint32_t n_tokens, uint8_t *out);
void srv_record_end_encode(const struct srv_record_end *in, uint8_t out[SRV_RECORD_END_BYTES]);

/* CORRUPT where sizes do not fit each other or a field has a value that cannot be. */
KV_MUST_CHECK enum kv_status srv_record_file_decode(const struct srv_record *record, const uint8_t *in,
	struct srv_record_file *out, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_record_pool_decode(const struct srv_record *record, const uint8_t *in,
	struct srv_record_pool *out, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_record_session_decode(const struct srv_record *record, const uint8_t *in,
	struct srv_record_session *out, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_record_sequence_decode(const struct srv_record *record, const uint8_t *in,
	uint32_t n_layers, struct srv_record_sequence *out, uint32_t lengths[], struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_record_exact_decode(const struct srv_record *record, const uint8_t *in,
	struct srv_record_exact *out, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_record_prefix_decode(const struct srv_record *record, const uint8_t *in,
	uint32_t block_size, struct srv_record_prefix *out, struct kv_error *err);
KV_MUST_CHECK enum kv_status srv_record_end_decode(
	const struct srv_record *record, const uint8_t *in, struct srv_record_end *out, struct kv_error *err);
/* numbers: [SRV_TABLE_ENTRIES_MAX]; record->count of them. */
KV_MUST_CHECK enum kv_status srv_record_table_decode(
	const struct srv_record *record, const uint8_t *in, uint32_t numbers[], struct kv_error *err);

#endif
