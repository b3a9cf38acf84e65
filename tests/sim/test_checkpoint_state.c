/*
 * What a snapshot has to bring back beside rows: windows, exact windows, published prefixes, pins. Row S5 of
 * the list of failures.
 */
#include <stdlib.h>
#include <string.h>

#include "core/prefix.h"
#include "tests/sim/checkpoint_words.h"

/* S5: what windows left behind stays gone, what they reach comes back, and they move on. */
START_TEST(test_windows_come_back)
{
	struct sim_config config = sim_config_plain(13);
	struct srv_checkpoint_view view;

	config.lease_ms = 3600000;
	config.pools[0].window = 30;
	config.pools[0].sink_tokens = 5;
	config.pools[0].alternates = true;
	sim_world_init(&world, &config);
	world.server->checkpoint->chunk_bytes_min = 1;
	struct sim_peer *peer = sim_script_connect(&world, 0);
	uint64_t handle = sim_script_open(peer, 0, "w");

	for (uint32_t length = 0; length < 200; length += 20)
		ck_assert_int_eq(sim_script_append(peer, handle, 1, length, 20), KV_OK);
	append_layers(peer, handle, 1, 200, 9, 0, 1);
	ck_assert_int_eq(fork_sequence(peer, handle, 2, 1, 200), KV_OK);
	sim_script_pass(&world, MS);
	const uint32_t n_free = sim_script_blocks(&world, 0)->n_free;

	ck_assert_int_eq(save("s", &view), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	sim_script_pass(&world, MS);
	ck_assert_int_eq(load("s", &view), KV_OK);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, n_free);
	handle = attach(peer, "w");
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 2, KV_LENGTH_PLANNED), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handle, 2, 200, 40), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 2, 240), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handle, 1, KV_LENGTH_PLANNED), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* What an operator sees of the pool's prefixes, in an order of its own; returns how many. */
static uint32_t list_prefixes(uint32_t pool_idx, uint32_t n_tokens[8])
{
	const struct kv_pool *pool = kv_domain_pool_at(world.server->domain, pool_idx);
	struct kv_prefix_row row;
	uint32_t n = 0, node_idx = 0, n_looks = 1000;

	while (kv_prefix_next(pool, &node_idx, &n_looks, &row)) {
		uint32_t at = n++;

		ck_assert_uint_le(n, 8);
		for (; at > 0 && n_tokens[at - 1] > row.n_tokens; at--)
			n_tokens[at] = n_tokens[at - 1];
		n_tokens[at] = row.n_tokens;
	}
	return n;
}

/* The same prefixes are listed after a restore, those that others go on behind included. */
START_TEST(test_the_list_of_prefixes_comes_back)
{
	struct srv_checkpoint_view view;
	uint32_t before[8], after[8];
	uint64_t handles[2];

	start(17);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill_published(peer, handles);
	ck_assert_uint_eq(list_prefixes(0, before), 3);
	ck_assert_uint_eq(before[1], 64); /* 80 goes on behind it */
	ck_assert_int_eq(save("s", &view), KV_OK);
	close_all(peer, handles);
	for (uint32_t i = 0; i < 2; i++) {
		const struct kv_pool *pool = kv_domain_pool_at(world.server->domain, i);
		struct kv_prefix_row row;

		for (;;) {
			uint32_t node_idx = 0, n_looks = 1000;

			if (!kv_prefix_next(pool, &node_idx, &n_looks, &row))
				break;
			ck_assert_int_eq(kv_prefix_remove(world.server->domain, &row.id, 1000), KV_OK);
		}
	}
	ck_assert_uint_eq(list_prefixes(0, after), 0);
	ck_assert_int_eq(load("s", &view), KV_OK);
	ck_assert_uint_eq(list_prefixes(0, after), 3);
	ck_assert_int_eq(memcmp(before, after, 3 * sizeof(before[0])), 0);
	ck_assert_uint_eq(list_prefixes(1, after), 1);
	ck_assert_uint_eq(after[0], 32);
	sim_script_end(&world);
}
END_TEST

/* S5: what was published is found again, by its own key only, shares its blocks with the sequences that have
 * them, and expires when it would have; pins hold. */
START_TEST(test_published_prefixes_come_back)
{
	struct srv_checkpoint_view view;
	struct sim_saved saved;
	uint64_t handles[2];

	start(14);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill_published(peer, handles);
	const uint32_t n_free = sim_script_blocks(&world, 0)->n_free;
	const uint32_t n_shared = sim_script_blocks(&world, 0)->n_shared;

	sim_script_pass(&world, 1000 * MS);
	ck_assert_int_eq(save("s", &view), KV_OK);
	ck_assert_uint_eq(view.n_prefixes, 10);
	const struct sim_file *file = sim_files_find(sim_net_files(world.net), PATH);
	const uint64_t n_bytes = file->n_bytes;
	uint8_t *bytes = malloc(n_bytes);

	memcpy(bytes, file->bytes, n_bytes);
	saved = world.model.saved;
	memset(&world.model.saved, 0, sizeof(world.model.saved));
	sim_world_finish(&world, false);

	start(15);
	world.model.saved = saved;
	sim_files_put(sim_net_files(world.net), PATH, bytes, n_bytes);
	free(bytes);
	ck_assert_int_eq(load("s", &view), KV_OK);
	ck_assert_uint_eq(view.n_prefixes, 10);
	ck_assert_uint_eq(n_published(0), 8);
	ck_assert_uint_eq(n_published(1), 2);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, n_free);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_shared, n_shared);
	peer = sim_script_connect(&world, 0);
	handles[0] = attach(peer, "one");
	handles[1] = attach(peer, "two");
	decode_all(peer, handles);
	ck_assert_int_eq(match(peer, handles[0], 20, "ax", 0, 190), KV_OK);
	ck_assert_uint_eq(sim_script_length(&world, handles[0], 20, 0), 80);
	ck_assert_int_eq(match(peer, handles[0], 21, "ay", 1000, 48), KV_OK);
	ck_assert_int_eq(match(peer, handles[0], 22, "ay", 0, 48), KV_NOT_FOUND);
	ck_assert_int_eq(match(peer, handles[0], 22, "bx", 0, 48), KV_NOT_FOUND);
	ck_assert_int_eq(match(peer, handles[1], 23, "ax", 0, 32), KV_OK);
	for (uint64_t i = 20; i <= 21; i++)
		ck_assert_int_eq(sim_script_decode(peer, handles[0], i, KV_LENGTH_PLANNED), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handles[1], 23, KV_LENGTH_PLANNED), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handles[0], 20, 80, 20), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handles[0], 20, 100), KV_OK);
	/* One pin, and no more. */
	for (uint32_t i = 0; i < 2; i++) {
		struct sim_request *unpin = sim_script_new(peer, KVP_OP_UNPIN, handles[0]);

		sim_script_item(unpin, 3, 0, 0);
		ck_assert_int_eq(sim_script_call(unpin), KV_OK);
		ck_assert_int_eq(unpin->items[0].outcome.status, KV_OK);
	}
	sim_script_pass(&world, 57000 * MS);
	ck_assert_uint_eq(n_published(0), 8);
	sim_script_pass(&world, 3000 * MS);
	ck_assert_uint_eq(n_published(0), 5);
	sim_script_end(&world);
}
END_TEST

/* Restored beside what is published already under the same keys: one of each, and all blocks are accounted
 * for. A restore that fails at its end leaves nothing published. */
START_TEST(test_published_prefixes_meet_their_like)
{
	struct srv_checkpoint_view view;
	uint64_t handles[2];

	start(16);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill_published(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	close_all(peer, handles);
	ck_assert_uint_eq(n_published(0), 8);
	ck_assert_int_eq(load("s", &view), KV_OK);
	ck_assert_uint_eq(n_published(0), 8);
	handles[0] = attach(peer, "one");
	ck_assert_int_eq(match(peer, handles[0], 20, "ax", 0, 190), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handles[0], 20, 80), KV_OK);
	ck_assert_int_eq(sim_script_decode(peer, handles[0], 1, 90), KV_OK);
	const uint32_t hash = state_hash();

	ck_assert_int_eq(load("s", &view), KV_EXISTS);
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(state_hash(), hash);
	ck_assert_uint_eq(n_published(0), 8);
	sim_script_end(&world);
}
END_TEST

/* S5: the newest tokens come back exact, so what is decoded next is the same to the bit; a sequence whose
 * layers differ, a ring that has come round, one that is appended to later. */
START_TEST(test_exact_windows_come_back)
{
	struct sim_config config = sim_config_plain(17);
	struct srv_checkpoint_view view;
	struct kv_session *session = NULL;

	config.lease_ms = 3600000;
	config.pools[0].exact_tokens = 32;
	config.pools[0].exact_blocks = 12;
	sim_world_init(&world, &config);
	world.server->checkpoint->chunk_bytes_min = 1;
	struct sim_peer *peer = sim_script_connect(&world, 0);
	uint64_t handle = sim_script_open(peer, 0, "one");

	for (uint32_t length = 0; length < 100; length += 20)
		ck_assert_int_eq(sim_script_append(peer, handle, 1, length, 20), KV_OK);
	append_layers(peer, handle, 1, 100, 9, 0, 1);
	ck_assert_int_eq(sim_script_append(peer, handle, 2, 0, 7), KV_OK);
	ck_assert_int_eq(fork_sequence(peer, handle, 3, 1, 100), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, handle, 3, 100, 20), KV_OK);
	ck_assert_int_eq(save("s", &view), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	sim_script_pass(&world, 5 * MS);
	ck_assert_int_eq(load("s", &view), KV_OK);
	handle = attach(peer, "one");
	ck_assert_int_eq(kv_session_find(world.server->domain, handle, &session), KV_OK);
	ck_assert_uint_eq(kv_sequence_find(session, 1)->exact[0], 32);
	ck_assert_uint_eq(kv_sequence_find(session, 1)->exact[1], 32);
	ck_assert_uint_eq(kv_sequence_find(session, 2)->exact[0], 7);
	ck_assert_uint_eq(kv_sequence_find(session, 3)->exact[0], 20);
	ck_assert_int_eq(sim_script_call(sim_script_new(peer, KVP_OP_TELL, handle)), KV_OK);
	for (uint32_t round = 0, length = 7; round < 12; round++, length += 7) {
		for (uint64_t i = 1; i <= 3; i++) {
			for (uint32_t l = 0; l < 2; l++) {
				struct sim_request *request = sim_script_new(peer, KVP_OP_DECODE, handle);

				sim_script_layers(request, l, 1);
				sim_script_item(request, i, KV_LENGTH_PLANNED, 0);
				ck_assert_int_eq(sim_script_call(request), KV_OK);
			}
		}
		ck_assert_int_eq(sim_script_append(peer, handle, 2, length, 7), KV_OK);
	}
	/* Without its ring blocks it would not decode to the same bits: it is refused. */
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	handle = sim_script_open(peer, 0, "hog");
	for (uint64_t i = 1; i <= 5; i++)
		ck_assert_int_eq(sim_script_append(peer, handle, i, 0, 32), KV_OK);
	const uint32_t hash = state_hash();

	ck_assert_int_eq(load("s", &view), KV_POOL_FULL);
	ck_assert_ptr_nonnull(strstr(view.detail, "ring blocks"));
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(state_hash(), hash);
	sim_script_end(&world);
}
END_TEST

/* S5: two pinned sequences that share their blocks come back pinned, and still share them. */
START_TEST(test_pinned_sequences_that_share_come_back)
{
	struct srv_checkpoint_view view;

	start(16);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	uint64_t handle = sim_script_open(peer, 0, "one");

	ck_assert_int_eq(sim_script_append(peer, handle, 1, 0, 48), KV_OK);
	struct sim_request *fork = sim_script_new(peer, KVP_OP_FORK, handle);

	sim_script_item(fork, 2, 48, 0);
	fork->items[0].parent = 1;
	ck_assert_int_eq(sim_script_call(fork), KV_OK);
	ck_assert_int_eq(fork->items[0].outcome.status, KV_OK);
	for (uint64_t i = 1; i <= 2; i++) {
		struct sim_request *pin = sim_script_new(peer, KVP_OP_PIN, handle);

		sim_script_item(pin, i, 0, 0);
		ck_assert_int_eq(sim_script_call(pin), KV_OK);
	}
	const struct kv_block_counts counts = *sim_script_blocks(&world, 0);

	ck_assert_int_eq(save("s", &view), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, handle), KV_OK);
	sim_script_pass(&world, 5 * MS);
	ck_assert_int_eq(load("s", &view), KV_OK);
	ck_assert_mem_eq(sim_script_blocks(&world, 0), &counts, sizeof(counts));
	handle = attach(peer, "one");
	for (uint64_t i = 1; i <= 2; i++)
		ck_assert_int_eq(sim_script_decode(peer, handle, i, 48), KV_OK);
	sim_script_end(&world);
}
END_TEST

int main(void)
{
	TCase *tcase = tcase_create("checkpoint_state");
	Suite *suite = suite_create("sim_checkpoint_state");

	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_windows_come_back);
	tcase_add_test(tcase, test_the_list_of_prefixes_comes_back);
	tcase_add_test(tcase, test_published_prefixes_come_back);
	tcase_add_test(tcase, test_pinned_sequences_that_share_come_back);
	tcase_add_test(tcase, test_published_prefixes_meet_their_like);
	tcase_add_test(tcase, test_exact_windows_come_back);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
