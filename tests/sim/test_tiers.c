/*
 * Sequences that leave their blocks and come back: rows P4, L6, K12 and S7 of the list of failures. What they
 * decode to is compared with the model, bit by bit.
 */
#include <errno.h>
#include <string.h>

#include "server/checkpoint.h"
#include "server/spill_internal.h"
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS KV_NS_PER_MS

static struct sim_world world;

static struct sim_peer *start(uint64_t seed, uint64_t host_bytes, uint64_t file_bytes)
{
	struct sim_config config = sim_config_plain(seed);

	config.lease_ms = 3600000;
	config.host_tier_bytes = host_bytes;
	config.file_tier_bytes = file_bytes;
	config.net.files.delay_ns_max = 50000;
	config.net.files.short_per_mille = 300;
	sim_world_init(&world, &config);
	sim_script_pass(&world, 5 * MS); /* the file tier is looked at */
	return sim_script_connect(&world, 0);
}

static enum kv_status move(struct sim_peer *peer, uint16_t opcode, uint64_t handle, uint64_t sequence)
{
	struct sim_request *request = sim_script_new(peer, opcode, handle);
	struct kvp_rows_reply_item item;

	sim_script_item(request, sequence, 0, 0);
	ck_assert_int_eq(sim_script_call(request), KV_OK);
	kvp_rows_reply_item_decode(peer->reply_body + KVP_BYTES(rows_reply), KVP_ITEM_BYTES, &item);
	return (enum kv_status)item.status;
}

static uint8_t residence(uint64_t handle, uint64_t id)
{
	struct kv_session *session = NULL;

	ck_assert_int_eq(kv_session_find(world.server->domain, handle, &session), KV_OK);
	return kv_sequence_find(session, id)->residence;
}

/* As a client library does: again until it is not busy any more. */
static enum kv_status decode(struct sim_peer *peer, uint64_t handle, uint64_t sequence)
{
	enum kv_status status;
	uint32_t n = 0;

	do {
		status = sim_script_decode(peer, handle, sequence, KV_LENGTH_PLANNED);
		sim_script_pass(&world, MS);
	} while (status == KV_BUSY_RETRY && n++ < 1000);
	return status;
}

/* Out, told, back on touch and on PREFETCH; its blocks are everybody's meanwhile. Loop: host tier, file tier.
 */
START_TEST(test_out_and_back)
{
	struct sim_peer *peer = start(1, _i == 0 ? 1 << 20 : 0, _i == 0 ? 0 : 1 << 20);
	const uint64_t handle = sim_script_open(peer, 0, "a");
	const struct kv_block_counts *blocks = sim_script_blocks(&world, 0);
	const struct kv_tier *tier = &world.server->spill->tiers[_i];

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 200), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handle, 2, 0, 50), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(residence(handle, 1), KV_SPILLED);
	ck_assert_uint_gt(tier->n_used, 0);
	ck_assert_uint_eq(blocks->n_free, blocks->n_total - 4);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 9), KV_NOT_FOUND);
	ck_assert_int_eq(sim_script_call(sim_script_new(peer, KVP_OP_TELL, handle)), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_BUSY_RETRY);
	ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
	ck_assert_uint_eq(tier->n_used, 0);
	ck_assert_int_eq(sim_script_append(peer, handle, 1, 200, 7), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, handle, 1), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(residence(handle, 1), KV_RESIDENT);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_OK);
	ck_assert_uint_eq(world.server->counters.spills, 2);
	ck_assert_uint_eq(world.server->counters.fetches, 2);
	sim_script_end(&world);
}
END_TEST

static struct sim_peer *start_exact(uint32_t n_ring_blocks, uint64_t host_bytes, uint64_t file_bytes)
{
	struct sim_config config = sim_config_plain(11);

	config.lease_ms = 3600000;
	config.host_tier_bytes = host_bytes;
	config.file_tier_bytes = file_bytes;
	config.pools[0].exact_tokens = 48;
	config.pools[0].exact_blocks = n_ring_blocks;
	sim_world_init(&world, &config);
	sim_script_pass(&world, 5 * MS);
	return sim_script_connect(&world, 0);
}

static uint64_t n_exact(void)
{
	return kv_domain_pool_at(world.server->domain, 0)->n_exact_rows;
}

/* The exact window comes back with its sequence, whatever length it has: the model's decodes are exact, too.
 * Loop: host tier, file tier. */
START_TEST(test_the_exact_window_comes_back)
{
	struct sim_peer *peer = start_exact(12, _i == 0 ? 1 << 20 : 0, _i == 0 ? 0 : 1 << 20);
	const uint64_t handle = sim_script_open(peer, 0, "a");
	const struct kv_pool *pool = kv_domain_pool_at(world.server->domain, 0);
	const struct kv_block_counts *rings = &pool->blocks[pool->spec->n_groups].counts;

	for (uint32_t length = 0; length < 150; length += 7) {
		const uint64_t n_before = n_exact();

		ck_assert_int_eq(sim_script_append(peer, handle, 1, length, 7), KV_OK);
		ck_assert_uint_ge(n_exact(), n_before);
		const uint64_t n_rows = n_exact();
		const uint32_t n_ring_blocks = rings->n_owned;

		ck_assert_uint_gt(n_rows, 0);
		ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
		sim_script_pass(&world, 20 * MS);
		ck_assert_int_eq(residence(handle, 1), KV_SPILLED);
		ck_assert_uint_eq(n_exact(), 0);
		ck_assert_uint_eq(rings->n_free, rings->n_total);
		ck_assert_int_eq(sim_script_call(sim_script_new(peer, KVP_OP_TELL, handle)), KV_OK);
		ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
		ck_assert_uint_eq(n_exact(), n_rows);
		ck_assert_uint_eq(rings->n_owned, n_ring_blocks);
		ck_assert_int_eq(sim_script_call(sim_script_new(peer, KVP_OP_TELL, handle)), KV_OK);
	}
	sim_script_end(&world);
}
END_TEST

/* Without ring blocks it stays out, and comes back as soon as somebody who may be evicted gives them up, or
 * somebody leaves; never with less than it had. */
START_TEST(test_the_exact_window_waits_for_ring_blocks)
{
	struct sim_peer *peer = start_exact(3, 1 << 20, 0);
	const uint64_t handle = sim_script_open(peer, 0, "a"), other = sim_script_open(peer, 0, "b");
	const struct kv_pool *pool = kv_domain_pool_at(world.server->domain, 0);
	struct sim_request *evictable;

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 100), KV_OK);
	const uint64_t n_rows = n_exact();

	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(sim_script_append(peer, other, 1, 0, 100), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, handle, 1), KV_POOL_FULL);
	ck_assert_int_eq(decode(peer, handle, 1), KV_BUSY_RETRY);
	ck_assert_int_eq(residence(handle, 1), KV_SPILLED);
	ck_assert_int_eq(sim_script_close(peer, other), KV_OK);
	ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
	ck_assert_uint_eq(n_exact(), n_rows);

	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	sim_script_pass(&world, 20 * MS);
	evictable = sim_script_new(peer, KVP_OP_APPEND, handle);
	sim_script_item(evictable, 2, 0, 100);
	evictable->items[0].flags |= KVP_ITEM_EVICTABLE;
	ck_assert_int_eq(sim_script_call(evictable), KV_OK);
	ck_assert_uint_eq(n_exact(), n_rows);
	ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
	ck_assert_uint_eq(pool->n_evicted_sequences, 1);
	ck_assert_uint_eq(n_exact(), n_rows);
	sim_script_end(&world);
}
END_TEST

/* Whoever wants more than rows of a spilled sequence is busy, too, and brings it back by asking. Loop: FORK,
 * TRUNCATE, PUBLISH. */
START_TEST(test_every_touch_brings_it_back)
{
	static const uint16_t opcodes[] = { KVP_OP_FORK, KVP_OP_TRUNCATE, KVP_OP_PUBLISH };
	struct sim_peer *peer = start(9, 1 << 20, 0);
	const uint64_t handle = sim_script_open(peer, 0, "a");
	struct sim_request *request = sim_script_new(peer, opcodes[_i], handle);
	const bool is_publish = opcodes[_i] == KVP_OP_PUBLISH;

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 100), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(residence(handle, 1), KV_SPILLED);
	if (is_publish) {
		request->prefix.sequence = 1;
		request->prefix.n_tokens = 32;
	} else {
		sim_script_item(request, opcodes[_i] == KVP_OP_FORK ? 2 : 1, 50, 0);
		request->items[0].parent = 1;
	}
	ck_assert_int_eq(sim_script_call(request), is_publish ? KV_BUSY_RETRY : KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(residence(handle, 1), KV_RESIDENT);
	ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
	ck_assert_uint_eq(sim_script_length(&world, handle, 1, 0), 100);
	sim_script_end(&world);
}
END_TEST

/* What a client's own blocks hold is never spilled: not by policy, and not by a SPILL of all ids. */
START_TEST(test_tables_of_a_client_stay)
{
	struct sim_config config = sim_config_plain(10);
	struct kv_session *session = NULL;

	config.lease_ms = 3600000;
	config.host_tier_bytes = 1 << 20;
	config.spill_idle_ms = 20;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	struct sim_request *open = sim_script_new(peer, KVP_OP_OPEN, 0);

	strcpy(open->pool_name, sim_pool_name(0));
	open->open.pool_name_bytes = (uint16_t)strlen(open->pool_name);
	open->open.flags = KVP_OPEN_CLIENT_TABLES;
	open->open.reserve_blocks = 4;
	ck_assert_int_eq(sim_script_call(open), KV_OK);
	ck_assert_int_eq(kv_session_find(world.server->domain, open->session, &session), KV_OK);
	struct kv_sequence *tables = kv_sequence_find(session, 0);

	ck_assert_ptr_nonnull(tables);
	ck_assert_uint_eq(tables->tables[0].n_blocks, 4);
	ck_assert(!kv_sequence_may_spill(tables));
	sim_script_pass(&world, 500 * MS);
	ck_assert_int_eq(tables->residence, KV_RESIDENT);
	ck_assert_uint_eq(tables->tables[0].n_blocks, 4);
	ck_assert_uint_eq(world.server->counters.spills, 0);
	sim_script_end(&world);
}
END_TEST

/* L6, K12: rows that are still being written are spilled as written; while it goes out nobody writes. */
START_TEST(test_writing_while_it_goes_out)
{
	struct sim_peer *peer = start(2, 1 << 20, 0);
	const uint64_t handle = sim_script_open(peer, 0, "a");

	for (uint32_t round = 0, length = 0; round < 50; round++) {
		struct sim_request *append = sim_script_new(peer, KVP_OP_APPEND, handle);
		struct sim_request *spill = sim_script_new(peer, KVP_OP_SPILL, handle);
		struct sim_request *late = sim_script_new(peer, KVP_OP_APPEND, handle);

		sim_script_item(append, 1, length, 5);
		sim_script_item(spill, 1, 0, 0);
		sim_script_item(late, 1, length + 5, 1);
		sim_script_send(append);
		sim_script_send(spill);
		sim_script_send(late);
		ck_assert_int_eq(sim_script_wait(append), KV_OK);
		ck_assert_int_eq(append->items[0].outcome.status, KV_OK);
		ck_assert_int_eq(sim_script_wait(late), KV_OK);
		ck_assert_int_eq(late->items[0].outcome.status, KV_BUSY_RETRY);
		ck_assert_uint_gt(late->items[0].outcome.retry_after_ms, 0);
		length += 5;
		ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
	}
	sim_script_end(&world);
}
END_TEST

/* Used, freed or closed while it goes out: it stays, or goes, and no page is left. */
START_TEST(test_second_thoughts)
{
	struct sim_peer *peer = start(3, 1 << 20, 0);
	const uint64_t handle = sim_script_open(peer, 0, "a"), other = sim_script_open(peer, 0, "b");
	const struct kv_tier *tier = &world.server->spill->tiers[0];
	struct sim_request *free_it;

	for (uint32_t i = 1; i <= 3; i++)
		ck_assert_int_eq(sim_script_append(peer, handle, i, 0, 100), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, other, 1, 0, 100), KV_OK);
	sim_backend_hold(world.backend, true);
	for (uint32_t i = 1; i <= 3; i++)
		ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, i), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, other, 1), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, handle, 1), KV_BUSY_RETRY);
	free_it = sim_script_new(peer, KVP_OP_FREE, handle);
	sim_script_item(free_it, 2, 0, 0);
	ck_assert_int_eq(sim_script_call(free_it), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, other), KV_OK);
	struct sim_request *read = sim_script_new(peer, KVP_OP_DECODE, handle);

	sim_script_item(read, 1, KV_LENGTH_PLANNED, 0);
	sim_script_send(read);
	sim_script_pass(&world, 2 * MS);
	sim_backend_hold(world.backend, false);
	ck_assert_int_eq(sim_script_wait(read), KV_OK);
	ck_assert_int_eq(read->items[0].outcome.status, KV_OK);
	sim_script_pass(&world, 50 * MS);
	ck_assert_int_eq(residence(handle, 1), KV_RESIDENT);
	ck_assert_int_eq(residence(handle, 3), KV_SPILLED);
	ck_assert_uint_eq(world.server->counters.spills, 1);
	ck_assert_uint_eq(world.server->counters.spills_rejected_used, 3);
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	sim_script_pass(&world, 10 * MS);
	ck_assert_uint_eq(tier->n_used, 0);
	sim_script_end(&world);
}
END_TEST

/* P4: a tier that is smaller than the pool takes what it can, says no with a reason, and takes more later. */
START_TEST(test_a_small_tier_makes_progress)
{
	struct sim_peer *peer = start(4, 2 * KV_TIER_PAGE_BYTES, 0);
	const uint64_t handle = sim_script_open(peer, 0, "a");
	uint32_t n_refused = 0;

	for (uint32_t i = 1; i <= 4; i++)
		ck_assert_int_eq(sim_script_append(peer, handle, i, 0, 128), KV_OK);
	for (uint32_t round = 0; round < 8; round++) {
		for (uint32_t i = 1; i <= 4; i++) {
			const enum kv_status status = move(peer, KVP_OP_SPILL, handle, i);

			ck_assert(status == KV_OK || status == KV_POOL_FULL);
			n_refused += status == KV_POOL_FULL;
			sim_script_pass(&world, 5 * MS);
		}
		ck_assert_int_eq(decode(peer, handle, 1 + round % 4), KV_OK);
	}
	ck_assert_uint_eq(world.server->counters.spills_rejected_full, n_refused);
	ck_assert_uint_gt(n_refused, 0);
	ck_assert_uint_gt(world.server->counters.spills, 2);
	for (uint32_t i = 1; i <= 4; i++)
		ck_assert_int_eq(decode(peer, handle, i), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* A tenant takes of a tier what it may have, whatever it spills, and leaves the rest to others; what it is
 * charged with goes with the images. By policy nothing more goes out, and nobody is told that it was refused.
 * Loop: host tier, file tier. */
START_TEST(test_a_tenant_has_a_share_of_a_tier)
{
	struct sim_config config = sim_config_plain(12);
	struct kv_tenant_policy policy = kv_tenant_policy_open();
	struct kv_error err = { 0 };

	config.lease_ms = 3600000;
	config.n_tenants = 2;
	config.host_tier_bytes = _i == 0 ? 8 * KV_TIER_PAGE_BYTES : 0;
	config.file_tier_bytes = _i == 0 ? 0 : 8 * KV_TIER_PAGE_BYTES;
	sim_world_init(&world, &config);
	sim_script_pass(&world, 5 * MS);
	struct sim_peer *peer = sim_script_connect(&world, 0), *other = sim_script_connect(&world, 1);
	const uint64_t handle = sim_script_open(peer, 0, "a"), handle2 = sim_script_open(other, 0, "b");
	struct kv_tenants *tenants = kv_domain_tenants(world.server->domain);
	struct kv_session *session = NULL;

	ck_assert_int_eq(kv_session_find(world.server->domain, handle, &session), KV_OK);
	const struct kv_tenant *tenant = &tenants->entries[session->payer];

	policy.most[KV_QUOTA_TIER_BYTES] = 2 * KV_TIER_PAGE_BYTES;
	ck_assert_int_eq(kv_tenant_set(tenants, tenant->id, &policy, &err), KV_OK);
	for (uint32_t i = 1; i <= 3; i++) {
		ck_assert_int_eq(sim_script_append(peer, handle, i, 0, 60), KV_OK);
		ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, i), i <= 2 ? KV_OK : KV_QUOTA);
		sim_script_pass(&world, 20 * MS);
	}
	ck_assert_uint_eq(tenant->used[KV_QUOTA_TIER_BYTES], 2 * KV_TIER_PAGE_BYTES);
	ck_assert_uint_eq(tenant->n_refused[KV_QUOTA_TIER_BYTES], 1);
	ck_assert_uint_eq(world.server->counters.spills_rejected_quota, 1);
	ck_assert_int_eq(sim_script_append(other, handle2, 1, 0, 60), KV_OK);
	ck_assert_int_eq(move(other, KVP_OP_SPILL, handle2, 1), KV_OK);
	world.options.spill_idle_ms = 10;
	sim_script_pass(&world, 500 * MS);
	ck_assert_int_eq(residence(handle, 3), KV_RESIDENT);
	ck_assert_uint_eq(tenant->n_refused[KV_QUOTA_TIER_BYTES], 1);
	world.options.spill_idle_ms = 0;
	ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
	ck_assert_uint_eq(tenant->used[KV_QUOTA_TIER_BYTES], KV_TIER_PAGE_BYTES);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 3), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(residence(handle, 3), KV_SPILLED);
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_uint_eq(tenant->used[KV_QUOTA_TIER_BYTES], 0);
	ck_assert_uint_eq(tenant->used_max[KV_QUOTA_TIER_BYTES], 2 * KV_TIER_PAGE_BYTES);
	sim_script_end(&world);
}
END_TEST

/* What comes back damaged, or not at all, is CORRUPT until it is freed; never wrong rows. Loop: host memory,
 * a file, a file that cannot be read. */
START_TEST(test_damage_is_found)
{
	struct sim_peer *peer = start(5, _i == 0 ? 1 << 20 : 0, _i == 0 ? 0 : 1 << 20);
	const uint64_t handle = sim_script_open(peer, 0, "a");
	struct sim_files *files = sim_net_files(world.net);
	const struct kv_block_counts *blocks = sim_script_blocks(&world, 0);
	struct sim_request *free_it = sim_script_new(peer, KVP_OP_FREE, handle);

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 100), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	sim_script_pass(&world, 20 * MS);
	ck_assert_int_eq(residence(handle, 1), KV_SPILLED);
	if (_i == 0)
		world.server->spill->host[1000] ^= 1;
	else if (_i == 1)
		files->options.flip_per_mille = 1000;
	else
		files->options.fail_per_mille = 1000;
	ck_assert_int_eq(decode(peer, handle, 1), KV_CORRUPT);
	ck_assert_int_eq(residence(handle, 1), KV_BROKEN);
	ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, handle, 1), KV_CORRUPT);
	ck_assert_int_eq(sim_script_append(peer, handle, 1, 100, 1), KV_CORRUPT);
	ck_assert_int_eq(sim_script_call(sim_script_new(peer, KVP_OP_TELL, handle)), KV_OK);
	ck_assert_uint_eq(blocks->n_free, blocks->n_total);
	sim_script_item(free_it, 1, 0, 0);
	ck_assert_int_eq(sim_script_call(free_it), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 10), KV_OK);
	files->options.flip_per_mille = files->options.fail_per_mille = 0;
	sim_script_end(&world);
}
END_TEST

/* A read that takes seconds: who asks for the sequence is busy, nobody else is; one that is freed meanwhile,
 * and whose id is used again, has its new rows, and a closed session's blocks go to others when the read is
 * over. */
START_TEST(test_a_late_read)
{
	struct sim_peer *peer = start(10, 0, 1 << 20);
	const uint64_t handle = sim_script_open(peer, 0, "a"), other = sim_script_open(peer, 0, "b");
	struct sim_request *free_it = sim_script_new(peer, KVP_OP_FREE, handle);

	for (uint32_t i = 1; i <= 3; i++)
		ck_assert_int_eq(sim_script_append(peer, i < 3 ? handle : other, i, 0, 100), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, other, 3), KV_OK);
	sim_script_pass(&world, 20 * MS);
	sim_net_files(world.net)->options.delay_ns_max = 8000 * MS;
	ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, handle, 1), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, other, 3), KV_OK);
	sim_script_pass(&world, 100 * MS);
	ck_assert_int_eq(residence(handle, 1), KV_FETCHING);
	const uint64_t asked_ns = world.clock.now_ns;

	ck_assert_int_eq(sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_BUSY_RETRY);
	ck_assert_int_eq(sim_script_decode(peer, handle, 2, KV_LENGTH_PLANNED), KV_OK);
	sim_script_item(free_it, 1, 0, 0);
	ck_assert_int_eq(sim_script_call(free_it), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 30), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, other), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_OK);
	ck_assert_uint_lt(world.clock.now_ns - asked_ns, 20 * MS);
	ck_assert_uint_gt(world.server->spill->tiers[1].n_used, 0);
	sim_script_pass(&world, 60000 * MS);
	ck_assert_uint_eq(world.server->spill->tiers[1].n_used, 0);
	ck_assert_int_eq(sim_script_append(peer, handle, 4, 0, 100), KV_OK);
	for (uint32_t i = 1; i <= 4; i += i == 2 ? 2 : 1)
		ck_assert_int_eq(sim_script_decode(peer, handle, i, KV_LENGTH_PLANNED), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* S7: a directory that cannot be written, or is full: no file tier, and the host tier works. */
START_TEST(test_a_bad_directory)
{
	static const int errors[] = { EROFS, ENOSPC, EIO };

	for (uint32_t i = 0; i < KV_LENGTH(errors); i++) {
		for (int64_t step = 0; step < 4; step++) {
			struct sim_config config = sim_config_plain(6);

			config.host_tier_bytes = 1 << 20;
			config.file_tier_bytes = 1 << 20;
			sim_world_prepare(&world, &config);
			sim_net_files(world.net)->fail_countdown = step;
			sim_net_files(world.net)->fail_errno = errors[i];
			ck_assert_int_eq(sim_world_start(&world, NULL), KV_OK);
			struct sim_peer *peer = sim_script_connect(&world, 0);
			const uint64_t handle = sim_script_open(peer, 0, "a");

			sim_script_pass(&world, 5 * MS);
			/* Unlinking never fails here: the fourth operation is the last of the probe. */
			ck_assert_int_eq(world.server->spill->fd < 0, step < 3);
			ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 60), KV_OK);
			ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_OK);
			sim_script_pass(&world, 10 * MS);
			ck_assert_int_eq(residence(handle, 1), KV_SPILLED);
			ck_assert_int_eq(decode(peer, handle, 1), KV_OK);
			sim_script_end(&world);
		}
	}
}
END_TEST

/* Without a tier SPILL says so. By policy, idle sequences go by themselves. A snapshot brings them back
 * first. */
START_TEST(test_policy_and_snapshots)
{
	struct sim_config config = sim_config_plain(7);
	struct srv_checkpoint_view view;
	struct kv_error err = { 0 };

	struct sim_peer *peer = start(8, 0, 0);
	uint64_t handle = sim_script_open(peer, 0, "a");

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 60), KV_OK);
	ck_assert_int_eq(move(peer, KVP_OP_SPILL, handle, 1), KV_BAD_STATE);
	ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, handle, 1), KV_OK);
	sim_script_end(&world);

	config.lease_ms = 3600000;
	config.host_tier_bytes = 1 << 20;
	config.spill_idle_ms = 100;
	sim_world_init(&world, &config);
	peer = sim_script_connect(&world, 0);
	handle = sim_script_open(peer, 0, "a");
	for (uint32_t i = 1; i <= 3; i++)
		ck_assert_int_eq(sim_script_append(peer, handle, i, 0, 60), KV_OK);
	sim_script_pass(&world, 50 * MS);
	ck_assert_uint_eq(world.server->counters.spills, 0);
	sim_script_pass(&world, 400 * MS);
	ck_assert_uint_eq(world.server->counters.spills, 3);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, sim_script_blocks(&world, 0)->n_total);
	ck_assert_int_eq(srv_checkpoint_save(world.server->checkpoint, "s", 0, &err), KV_OK);
	for (uint32_t i = 0; i < 200 && srv_checkpoint_is_running(world.server->checkpoint); i++)
		sim_script_pass(&world, MS);
	srv_checkpoint_status(world.server->checkpoint, &view);
	ck_assert_int_eq(view.status, KV_OK);
	ck_assert_uint_eq(view.n_sequences, 3);
	ck_assert_uint_eq(view.n_sequences_skipped, 0);
	ck_assert_int_eq(decode(peer, handle, 2), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* The policy leaves who was brought back alone, until a client that pauses as long as clients do has come. */
START_TEST(test_what_came_back_stays)
{
	struct sim_config config = sim_config_plain(9);
	struct sim_peer *peer;
	uint64_t handle;

	config.lease_ms = 3600000;
	config.host_tier_bytes = 1 << 20;
	config.spill_idle_ms = 20;
	sim_world_init(&world, &config);
	peer = sim_script_connect(&world, 0);
	handle = sim_script_open(peer, 0, "a");
	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 60), KV_OK);
	for (uint32_t round = 1; round <= 2; round++) {
		sim_script_pass(&world, 3000 * MS);
		ck_assert_int_eq(residence(handle, 1), KV_SPILLED);
		if (round == 1)
			ck_assert_int_eq(move(peer, KVP_OP_PREFETCH, handle, 1), KV_OK);
		else
			ck_assert_int_eq(
				sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_BUSY_RETRY);
		sim_script_pass(&world, 1500 * MS);
		ck_assert_int_eq(sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_OK);
		ck_assert_uint_eq(world.server->counters.spills, round);
		ck_assert_uint_eq(world.server->counters.fetches, round);
	}
	sim_script_end(&world);
}
END_TEST

int main(void)
{
	TCase *tcase = tcase_create("tiers");
	Suite *suite = suite_create("sim_tiers");

	tcase_set_timeout(tcase, 120);
	tcase_add_loop_test(tcase, test_out_and_back, 0, 2);
	tcase_add_loop_test(tcase, test_the_exact_window_comes_back, 0, 2);
	tcase_add_test(tcase, test_the_exact_window_waits_for_ring_blocks);
	tcase_add_loop_test(tcase, test_every_touch_brings_it_back, 0, 3);
	tcase_add_test(tcase, test_tables_of_a_client_stay);
	tcase_add_test(tcase, test_writing_while_it_goes_out);
	tcase_add_test(tcase, test_second_thoughts);
	tcase_add_test(tcase, test_a_small_tier_makes_progress);
	tcase_add_loop_test(tcase, test_a_tenant_has_a_share_of_a_tier, 0, 2);
	tcase_add_loop_test(tcase, test_damage_is_found, 0, 3);
	tcase_add_test(tcase, test_a_late_read);
	tcase_add_test(tcase, test_a_bad_directory);
	tcase_add_test(tcase, test_policy_and_snapshots);
	tcase_add_test(tcase, test_what_came_back_stays);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
