/*
 * Words for scripts about snapshots: what is saved, saving and restoring, and everything that must be the
 * same afterwards.
 */
#ifndef TESTS_SIM_CHECKPOINT_WORDS_H
#define TESTS_SIM_CHECKPOINT_WORDS_H

#include <string.h>

#include "core/prefix.h"
#include "proto/crc32c.h"
#include "server/checkpoint_internal.h"
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS   KV_NS_PER_MS
#define PATH "dir/s.tqkv"

static struct sim_world world;

static inline void start_with(uint64_t seed, uint32_t lease_ms)
{
	struct sim_config config = sim_config_plain(seed);

	config.lease_ms = lease_ms;
	config.net.files.delay_ns_max = 50000;
	config.net.files.short_per_mille = 200;
	sim_world_init(&world, &config);
	world.server->checkpoint->chunk_bytes_min = 1; /* many chunks */
}

static inline void start(uint64_t seed)
{
	start_with(seed, 3600000);
}

static inline enum kv_status finish(struct srv_checkpoint_view *view)
{
	for (uint32_t i = 0; i < 100000; i++) {
		srv_checkpoint_status(world.server->checkpoint, view);
		if (!view->is_running)
			return view->status;
		sim_world_step(&world, MS);
	}
	sim_fail("a snapshot does not end");
}

static inline enum kv_status save(const char *name, struct srv_checkpoint_view *view)
{
	struct kv_error err = { 0 };
	const enum kv_status status = srv_checkpoint_save(world.server->checkpoint, name, 0, &err);

	return status == KV_OK ? finish(view) : status;
}

static inline enum kv_status load(const char *name, struct srv_checkpoint_view *view)
{
	struct kv_error err = { 0 };
	const enum kv_status status = srv_checkpoint_load(world.server->checkpoint, name, false, &err);

	if (status != KV_OK) {
		*view = (struct srv_checkpoint_view){ .status = status };
		memcpy(view->detail, err.msg, sizeof(view->detail) - 1);
		return status;
	}
	return finish(view);
}

static inline uint64_t attach(struct sim_peer *peer, const char *name)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_ATTACH, 0);

	strcpy(request->session_name, name);
	request->open.session_name_bytes = (uint16_t)strlen(name);
	ck_assert_int_eq(sim_script_call(request), KV_OK);
	return request->session;
}

static inline enum kv_status fork_sequence(
	struct sim_peer *peer, uint64_t handle, uint64_t child, uint64_t parent, uint32_t length)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_FORK, handle);

	sim_script_item(request, child, length, 0);
	request->items[0].parent = parent;
	return sim_script_call(request);
}

static inline void append_layers(struct sim_peer *peer, uint64_t handle, uint64_t sequence, uint32_t position,
	uint32_t n_tokens, uint32_t layer_first, uint32_t n_layers)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);

	sim_script_layers(request, layer_first, n_layers);
	sim_script_item(request, sequence, position, n_tokens);
	if (layer_first > 0)
		request->items[0].flags = 0; /* it is there */
	ck_assert_int_eq(sim_script_call(request), KV_OK);
	ck_assert_int_eq(request->items[0].outcome.status, KV_OK);
}

/* Two pools, forks, layers of different lengths, an empty sequence. */
static inline void fill(struct sim_peer *peer, uint64_t handles[2])
{
	handles[0] = sim_script_open(peer, 0, "one");
	handles[1] = sim_script_open(peer, 1, "two");
	(void)sim_script_open(peer, 0, NULL);
	ck_assert_int_eq(sim_script_append(peer, handles[0], 1, 0, 90), KV_OK);
	ck_assert_int_eq(fork_sequence(peer, handles[0], 2, 1, 70), KV_OK);
	ck_assert_int_eq(fork_sequence(peer, handles[0], 3, 1, 90), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handles[0], 2, 70, 5), KV_OK);
	append_layers(peer, handles[0], 4, 0, 40, 0, 1);
	append_layers(peer, handles[0], 4, 0, 17, 1, 1);
	ck_assert_int_eq(sim_script_append(peer, handles[1], 9, 0, 33), KV_OK);
	append_layers(peer, handles[1], 9, 33, 4, 2, 1);
}

static inline void close_all(struct sim_peer *peer, const uint64_t handles[2])
{
	ck_assert_int_eq(sim_script_close(peer, handles[0]), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, handles[1]), KV_OK);
	sim_script_pass(&world, 5 * MS);
}

/* Every sequence of fill() on every layer; the model knows what must come out. */
static inline void decode_all(struct sim_peer *peer, const uint64_t handles[2])
{
	static const struct {
		uint32_t session, layers;
		uint64_t sequence;
	} all[] = { { 0, 2, 1 }, { 0, 2, 2 }, { 0, 2, 3 }, { 0, 2, 4 }, { 1, 3, 9 } };

	for (uint32_t i = 0; i < KV_LENGTH(all); i++) {
		for (uint32_t l = 0; l < all[i].layers; l++) {
			struct sim_request *request =
				sim_script_new(peer, KVP_OP_DECODE, handles[all[i].session]);

			sim_script_layers(request, l, 1);
			sim_script_item(request, all[i].sequence, KV_LENGTH_PLANNED, 0);
			ck_assert_int_eq(sim_script_call(request), KV_OK);
			ck_assert_int_eq(request->items[0].outcome.status, KV_OK);
		}
	}
}

/* Everything that a client or operator could tell from outside, and all pages of live blocks. */
static inline uint32_t state_hash(void)
{
	uint32_t hash = 0;

	for (uint32_t i = 0; i < kv_domain_n_pools(world.server->domain); i++) {
		const struct kv_pool *pool = kv_domain_pool_at(world.server->domain, i);
		struct kv_block_counts counts = pool->blocks[0].counts;
		struct kv_memory_report report;

		counts.n_used_max = 0; /* the most that ever was */
		kv_report_pool(pool, &report);
		hash = kvp_crc32c(hash, &counts, sizeof(counts));
		hash = kvp_crc32c(hash, &report, sizeof(report));
		hash = kvp_crc32c(hash, &pool->n_sessions, sizeof(pool->n_sessions));
		hash = kvp_crc32c(hash, &pool->n_sequences, sizeof(pool->n_sequences));
		hash = sim_backend_hash_blocks(pool->backend_pool, pool->blocks[0].owners, hash);
	}
	return hash;
}

/* A PUBLISH or MATCH of tokens from..., under a key of the two letters. */
static inline struct sim_request *prefix_request(struct sim_peer *peer, uint16_t opcode, uint64_t handle,
	uint64_t sequence, const char *texts, uint32_t token_first, uint32_t n_tokens)
{
	struct sim_request *request = sim_script_new(peer, opcode, handle);

	request->prefix.sequence = sequence;
	request->prefix.n_tokens = n_tokens;
	for (uint32_t i = 0; i < n_tokens; i++)
		request->tokens[i] = token_first + i;
	memcpy(request->prefix_texts, texts, 2);
	request->prefix.adapter_bytes = request->prefix.salt_bytes = 1;
	return request;
}

static inline enum kv_status publish(struct sim_peer *peer, uint64_t handle, uint64_t sequence,
	const char *texts, uint32_t token_first, uint32_t n_tokens, uint32_t ttl_ms)
{
	struct sim_request *request =
		prefix_request(peer, KVP_OP_PUBLISH, handle, sequence, texts, token_first, n_tokens);

	request->prefix.ttl_ms = ttl_ms;
	return sim_script_call(request);
}

static inline enum kv_status match(struct sim_peer *peer, uint64_t handle, uint64_t sequence,
	const char *texts, uint32_t token_first, uint32_t n_tokens)
{
	return sim_script_call(
		prefix_request(peer, KVP_OP_MATCH, handle, sequence, texts, token_first, n_tokens));
}

static inline uint32_t n_published(uint32_t pool_idx)
{
	return kv_prefix_counts(sim_world_pool(&world, pool_idx)).n_nodes;
}

/* Keys, times to live, a branch, one whose sequence is gone, one of another pool; and pins. */
static inline void fill_published(struct sim_peer *peer, uint64_t handles[2])
{
	fill(peer, handles);
	ck_assert_int_eq(publish(peer, handles[0], 1, "ax", 0, 90, 0), KV_OK);  /* 5 blocks */
	ck_assert_int_eq(sim_script_append(peer, handles[0], 2, 75, 5), KV_OK); /* 80 */
	ck_assert_int_eq(publish(peer, handles[0], 2, "ax", 0, 64, 0), KV_OK);  /* there already */
	ck_assert_int_eq(sim_script_append(peer, handles[0], 7, 0, 48), KV_OK);
	ck_assert_int_eq(publish(peer, handles[0], 7, "ay", 1000, 48, 60000), KV_OK); /* 3 */
	struct sim_request *free_it = sim_script_new(peer, KVP_OP_FREE, handles[0]);

	sim_script_item(free_it, 7, 0, 0);
	ck_assert_int_eq(sim_script_call(free_it), KV_OK);
	ck_assert_int_eq(publish(peer, handles[1], 9, "ax", 0, 32, 0), KV_OK); /* 2 */
	struct sim_request *pin = sim_script_new(peer, KVP_OP_PIN, handles[0]);

	sim_script_item(pin, 3, 0, 0);
	ck_assert_int_eq(sim_script_call(pin), KV_OK);
	ck_assert_int_eq(sim_script_call(sim_script_new(peer, KVP_OP_TELL, handles[0])), KV_OK);
	ck_assert_uint_eq(n_published(0), 8);
	ck_assert_uint_eq(n_published(1), 2);
}

#endif
