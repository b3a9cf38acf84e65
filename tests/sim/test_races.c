/*
 * Row K12 of the list of failures: an append, and behind it, before it is done, whatever reads the same rows:
 * DECODE, FORK, SPILL, PUBLISH, a snapshot. The backend answers late and another client keeps it busy. Every
 * answer and everything that comes back is compared with the model, bit by bit, so an old row is found.
 *
 * TQKV_RACE_ROUNDS: how many; more than a test has time for.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "server/spill_internal.h"
#include "tests/sim/checkpoint_words.h"

#define ROUNDS 1500u

enum reader { READ_DECODE, READ_FORK, READ_SPILL, READ_PUBLISH, READ_SNAPSHOT, N_READERS };

struct race {
	struct sim_peer *peer, *other;
	uint64_t handle, load_handle;
	uint32_t length, load_length;
	uint32_t generation; /* of sequence 1: its tokens */
	uint32_t n_done[N_READERS], n_restored;
};

static uint32_t rounds(void)
{
	const char *text = getenv("TQKV_RACE_ROUNDS");

	return text ? (uint32_t)strtoul(text, NULL, 10) : ROUNDS;
}

static struct sim_request *item_request(
	struct sim_peer *peer, uint16_t opcode, uint64_t handle, uint64_t sequence, uint32_t position)
{
	struct sim_request *request = sim_script_new(peer, opcode, handle);

	sim_script_item(request, sequence, position, 0);
	request->items[0].parent = 1;
	return request;
}

/* As a client library does: again until nothing is busy. */
static void decode_now(struct sim_peer *peer, uint64_t handle, uint64_t sequence)
{
	enum kv_status status;
	uint32_t n = 0;

	do {
		status = sim_script_decode(peer, handle, sequence, KV_LENGTH_PLANNED);
		if (status == KV_BUSY_RETRY)
			sim_script_pass(&world, MS);
	} while (status == KV_BUSY_RETRY && n++ < 1000);
	ck_assert_int_eq(status, KV_OK);
}

/* Keeps the backend busy; nobody waits for it. */
static struct sim_request *send_load(struct race *race)
{
	struct sim_request *request = sim_script_new(race->other, KVP_OP_APPEND, race->load_handle);

	if (race->load_length > 150)
		race->load_length = 0;
	if (race->load_length == 0 && sim_script_length(&world, race->load_handle, 1, 0) > 0) {
		struct sim_request *free_it = item_request(race->other, KVP_OP_FREE, race->load_handle, 1, 0);

		ck_assert_int_eq(sim_script_call(free_it), KV_OK);
	}
	sim_script_item(request, 1, race->load_length, 17);
	race->load_length += 17;
	sim_script_send(request);
	return request;
}

/* What reads the sequence; sent behind the append without waiting for it. NULL: nothing to wait for. */
static struct sim_request *send_reader(struct race *race, enum reader reader)
{
	struct sim_request *request = NULL;
	struct kv_error err;

	switch (reader) {
	case READ_DECODE:
		request = item_request(race->peer, KVP_OP_DECODE, race->handle, 1, KV_LENGTH_PLANNED);
		break;
	case READ_FORK:
		request = item_request(race->peer, KVP_OP_FORK, race->handle, 2, race->length);
		break;
	case READ_SPILL:
		request = item_request(race->peer, KVP_OP_SPILL, race->handle, 1, 0);
		break;
	case READ_PUBLISH:
		request = prefix_request(race->peer, KVP_OP_PUBLISH, race->handle, 1, "ab",
			race->generation * 1000, race->length);
		request->prefix.ttl_ms = 50; /* else the pool is full of them */
		break;
	case READ_SNAPSHOT:
	case N_READERS:
		if (!srv_checkpoint_is_running(world.server->checkpoint))
			ck_assert_int_eq(srv_checkpoint_save(world.server->checkpoint, "s", 0, &err), KV_OK);
		return NULL;
	}
	sim_script_send(request);
	return request;
}

static void free_sequence(struct race *race, uint64_t sequence)
{
	ck_assert_int_eq(
		sim_script_call(item_request(race->peer, KVP_OP_FREE, race->handle, sequence, 0)), KV_OK);
}

/* What the reader made is there, with the new rows. */
static void check_reader(struct race *race, enum reader reader, const struct sim_request *request)
{
	struct srv_checkpoint_view view;

	switch (reader) {
	case READ_DECODE:
		ck_assert_int_eq(request->items[0].outcome.status, KV_OK);
		break;
	case READ_FORK:
		decode_now(race->peer, race->handle, 2);
		free_sequence(race, 2);
		break;
	case READ_PUBLISH:
		if (race->length < 16)
			break;
		ck_assert_int_eq(
			match(race->peer, race->handle, 3, "ab", race->generation * 1000, race->length),
			KV_OK);
		decode_now(race->peer, race->handle, 3);
		free_sequence(race, 3);
		break;
	case READ_SNAPSHOT:
		ck_assert_int_eq(finish(&view), KV_OK);
		break;
	case READ_SPILL:
		/* Used at once it stays; else it goes, and comes back. */
		if (race->length % 2 == 0)
			sim_script_pass(&world, 20 * MS);
		break;
	case N_READERS:
		break;
	}
	race->n_done[reader]++;
}

/* What the last snapshot holds, in place of what is there. */
static void restore(struct race *race)
{
	struct srv_checkpoint_view view;

	ck_assert_int_eq(save("s", &view), KV_OK);
	ck_assert_int_eq(sim_script_close(race->peer, race->handle), KV_OK);
	sim_script_pass(&world, 5 * MS);
	ck_assert_int_eq(sim_script_close(race->other, race->load_handle), KV_OK);
	sim_script_pass(&world, 5 * MS);
	ck_assert_msg(load("s", &view) == KV_OK, "%s", view.detail);
	race->handle = attach(race->peer, "race");
	race->load_handle = attach(race->other, "load");
	decode_now(race->peer, race->handle, 1);
	race->n_restored++;
}

static void one_round(struct race *race, struct sim_rng *rng)
{
	const enum reader reader = (enum reader)sim_below(rng, N_READERS);
	const uint32_t n_tokens = sim_between(rng, 1, 20);
	struct sim_request *load_request = send_load(race), *request;
	struct sim_request *append = sim_script_new(race->peer, KVP_OP_APPEND, race->handle);

	sim_script_item(append, 1, race->length, n_tokens);
	race->length += n_tokens;
	sim_script_send(append);
	request = send_reader(race, reader);
	ck_assert_int_eq(sim_script_wait(append), KV_OK);
	ck_assert_int_eq(append->items[0].outcome.status, KV_OK);
	if (request)
		ck_assert_int_eq(sim_script_wait(request), KV_OK);
	check_reader(race, reader, request);
	decode_now(race->peer, race->handle, 1);
	ck_assert_int_eq(sim_script_wait(load_request), KV_OK);
	if (race->length > 170) {
		free_sequence(race, 1);
		race->length = 0;
		race->generation++;
	}
}

/* Loop: without and with an exact window. */
START_TEST(test_readers_see_what_is_being_written)
{
	struct sim_config config = sim_config_plain(70 + (uint64_t)_i);
	struct sim_rng rng;
	struct race race = { 0 };

	config.lease_ms = 3600000;
	config.host_tier_bytes = 1 << 20;
	config.backend.latency_ns_max = 2000000;
	config.backend.busy_per_mille = 100;
	config.net.files.delay_ns_max = 200000;
	config.audits_every_turn = false;
	config.pools[0].n_blocks = 200;
	config.pools[0].exact_tokens = _i == 0 ? 0 : 32;
	config.pools[0].exact_blocks = _i == 0 ? 0 : 16;
	sim_world_init(&world, &config);
	sim_rng_init(&rng, config.seed, 30);
	race.peer = sim_script_connect(&world, 0);
	race.other = sim_script_connect(&world, 1);
	race.handle = sim_script_open(race.peer, 0, "race");
	race.load_handle = sim_script_open(race.other, 0, "load");
	for (uint32_t i = 0; i < rounds() / 2; i++) {
		one_round(&race, &rng);
		if (i % 100 == 99 && race.length > 0)
			restore(&race);
	}
	sim_world_check(&world);
	for (uint32_t r = 0; r < N_READERS; r++)
		ck_assert_uint_gt(race.n_done[r], 0);
	ck_assert_uint_gt(race.n_restored, 0);
	ck_assert_uint_gt(world.server->counters.spills, 0);
	ck_assert_uint_gt(world.server->counters.fetches, 0);
	sim_script_end(&world);
}
END_TEST

int main(void)
{
	TCase *tcase = tcase_create("races");
	Suite *suite = suite_create("sim_races");

	tcase_set_timeout(tcase, 3600);
	tcase_add_loop_test(tcase, test_readers_see_what_is_being_written, 0, 2);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
