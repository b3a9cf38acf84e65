/*
 * Capacity: what fits into how much memory, and how fast it can be at best. The formulas behind POST /v1/plan
 * and `tqkvctl plan`. Pure functions but srv_capacity_memory_rate(); any thread.
 *
 * With B = block_size, T = context_tokens, S = sessions, M = memory_bytes:
 *
 *	token_bytes        stored bytes of one token: K and V rows of all KV heads and layers
 *	block_bytes        B * token_bytes
 *	context_blocks     ceil(T / B): a context takes whole blocks
 *	ring_bytes         min(context_blocks, exact_tokens / B) * B * bf16 bytes of one token
 *	context_bytes      context_blocks * block_bytes + ring_bytes
 *	fits.n_blocks      floor((M - S * ring_bytes) / block_bytes), 0 where rings alone are more than M
 *	fits.n_tokens      fits.n_blocks * B
 *	fits.n_sessions    floor(M / context_bytes)
 *	asked.bytes        S * context_bytes
 *	decode.read_bytes  S * T * token_bytes: a decode step of one token reads every stored row once
 *	decode.floor_us    ceil(10^6 * decode.read_bytes / device_bytes_per_s)
 *	decode.tokens_per_s  S / (decode.read_bytes / device_bytes_per_s)
 *	ingest.token_bytes   bytes of one token on the wire: rows of row_dtype
 *	ingest.context_us    ceil(10^6 * T * ingest.token_bytes / link_bytes_per_s)
 *	ingest.all_us        S times as much, since all come over one link
 *
 * A floor is a bound from below: no arithmetic, no launch and no round trip is in it. Layers with a window
 * hold and read less than this says. Rows of an exact window are read as they are stored here.
 */
#ifndef SERVER_CAPACITY_H
#define SERVER_CAPACITY_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

#define SRV_CAPACITY_LINK_BYTES_PER_S 1250000000ull /* 10 Gbit/s */

struct srv_capacity_ask {
	uint64_t token_bytes, token_dense_bytes, token_wire_bytes; /* stored; as bf16; as row_dtype */
	uint64_t ring_token_bytes; /* of a token in the exact window, beside token_bytes; 0 without one */
	uint32_t block_size, n_layers, exact_tokens;
	uint32_t context_tokens, n_sessions;
	uint64_t memory_bytes;       /* 0: the daemon's arena */
	uint64_t link_bytes_per_s;   /* never 0 */
	uint64_t device_bytes_per_s; /* 0: what is known of the daemon's device */
	char k_format[32], v_format[32];
};

struct srv_capacity {
	uint64_t block_bytes, context_blocks, ring_bytes, context_bytes, memory_bytes;
	uint64_t n_blocks, n_tokens, n_sessions;
	uint64_t asked_bytes;
	bool does_fit;
	uint64_t read_bytes, device_bytes_per_s; /* rate 0: unknown, floor_us and tokens_per_s are 0 */
	uint64_t floor_us;
	double tokens_per_s;
	uint64_t context_us, all_us;
};

/*
 * {"model" (optional: the geometry by a name of server/models.h), "pool": members of a pool without name and
 * blocks (block_size 16 where it is left out), "context_tokens", "sessions" (default 1), "memory_bytes",
 * "link_bytes_per_s", "device_bytes_per_s", "row_dtype": "bf16", "f16" or "f32"}. BAD_CONFIG names the
 * member.
 */
KV_MUST_CHECK enum kv_status srv_capacity_read(
	const json_t *json, struct srv_capacity_ask *ask, struct kv_error *err);
/* BAD_ARG: the numbers are beyond 64 bits. */
KV_MUST_CHECK enum kv_status srv_capacity_work_out(const struct srv_capacity_ask *ask, uint64_t arena_bytes,
	uint64_t device_bytes_per_s, struct srv_capacity *out, struct kv_error *err);
/* How fast one device reads its memory: from its name, or 0 where nothing is known. */
uint64_t srv_capacity_device_rate(const char *backend, const char *device);
/* How fast this machine reads its own memory with one thread: measured by the first caller (some 20 ms). */
uint64_t srv_capacity_memory_rate(void);

#endif
