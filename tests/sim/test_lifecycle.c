/*
 * FAILURES rows about leases, reservations and the end, word by word, in simulated time.
 */
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS KV_NS_PER_MS

static struct sim_world world;

/*
 * FAILURES L11: a client that does nothing but PING keeps its session for ten times its lease; one that is
 * silent loses it, and its next operation says so at once.
 */
START_TEST(test_pings_keep_a_session_and_silence_does_not)
{
	struct sim_config config = sim_config_plain(40);

	config.lease_ms = 1000;
	sim_world_init(&world, &config);
	struct sim_peer *pings = sim_script_connect(&world, 0), *silent = sim_script_connect(&world, 1);
	const uint64_t kept = sim_script_open(pings, 0, NULL), lost = sim_script_open(silent, 0, NULL);

	ck_assert_int_eq(sim_script_append(pings, kept, 1, 0, 20), KV_OK);
	ck_assert_int_eq(sim_script_append(silent, lost, 1, 0, 20), KV_OK);
	for (uint32_t i = 0; i < 20; i++) { /* ten leases; the connection stays all the time */
		sim_script_pass(&world, 500 * MS);
		ck_assert_int_eq(sim_script_call(sim_script_new(pings, KVP_OP_PING, 0)), KV_OK);
	}
	ck_assert_int_eq(sim_script_decode(pings, kept, 1, 20), KV_OK);
	ck_assert_ptr_nonnull(silent->conn);

	const uint64_t asked_ns = world.clock.now_ns;

	ck_assert_int_eq(sim_script_decode(silent, lost, 1, 20), KV_SESSION_EXPIRED);
	ck_assert_uint_lt(world.clock.now_ns - asked_ns, 2 * MS);
	ck_assert_uint_eq(world.server->counters.sessions_expired, 1);
	sim_script_end(&world);
}
END_TEST

/*
 * FAILURES P2: 16 clients that each want 60 % of the pool at once: whoever holds it holds it alone, and is
 * told OK; the others are told POOL_FULL, hold nothing, and get it when it is given back. The same with one
 * APPEND item of 60 %.
 */
START_TEST(test_all_blocks_or_none)
{
	struct sim_config config = sim_config_plain(43);
	struct sim_request *opens[16], *appends[16];
	uint64_t handles[16];
	uint32_t n_ok = 0, n_full = 0;

	config.n_peers = 16;
	config.sessions_max = 40;
	config.pools[0].n_blocks = 10;
	config.pools[0].tokens_max = 160;
	sim_world_init(&world, &config);
	for (uint32_t i = 0; i < 16; i++) {
		struct sim_peer *peer = sim_script_connect(&world, i);

		handles[i] = sim_script_open(peer, 0, NULL);
		opens[i] = sim_world_request(&world, peer, KVP_OP_OPEN);
		snprintf(opens[i]->pool_name, sizeof(opens[i]->pool_name), "%s", sim_pool_name(0));
		opens[i]->open.pool_name_bytes = (uint16_t)strlen(opens[i]->pool_name);
		opens[i]->open.reserve_blocks = 6;
	}
	for (uint32_t i = 0; i < 16; i++)
		sim_script_send(opens[i]);
	for (uint32_t i = 0; i < 16; i++) {
		const enum kv_status status = sim_script_wait(opens[i]);

		n_ok += status == KV_OK;
		n_full += status == KV_POOL_FULL;
		if (status == KV_OK)
			ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_reserved, 6);
	}
	ck_assert_uint_eq(n_ok, 1);
	ck_assert_uint_eq(n_full, 15);
	for (uint32_t i = 0; i < 16; i++) {
		if (world.peers[i].n_sessions == 2)
			ck_assert_int_eq(
				sim_script_close(&world.peers[i], world.peers[i].sessions[1]), KV_OK);
	}
	sim_script_pass(&world, 5 * MS);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, 10);
	for (uint32_t i = 0; i < 16; i++) {
		appends[i] = sim_script_new(&world.peers[i], KVP_OP_APPEND, handles[i]);
		sim_script_item(appends[i], 1, 0, 96);
		sim_script_send(appends[i]);
	}
	n_ok = n_full = 0;
	for (uint32_t i = 0; i < 16; i++) {
		ck_assert_int_eq(sim_script_wait(appends[i]), KV_OK);
		n_ok += appends[i]->items[0].outcome.status == KV_OK;
		n_full += appends[i]->items[0].outcome.status == KV_POOL_FULL;
	}
	ck_assert_uint_eq(n_ok, 1);
	ck_assert_uint_eq(n_full, 15);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, 4);
	sim_script_end(&world);
}
END_TEST

/*
 * FAILURES L9: what TELL promised to whoever ATTACHed is there at the decode, or the decode fails as a whole
 * with EVICTED; never a shorter attention, whatever pressure there is in between.
 */
START_TEST(test_a_promised_length_is_kept_or_evicted)
{
	for (uint32_t is_pinned = 0; is_pinned < 2; is_pinned++) {
		struct sim_config config = sim_config_plain(44);

		config.pools[0].n_blocks = 12;
		config.pools[0].tokens_max = 160;
		sim_world_init(&world, &config);
		struct sim_peer *first = sim_script_connect(&world, 0);
		const uint64_t handle = sim_script_open(first, 0, "talk");
		struct sim_request *append = sim_script_new(first, KVP_OP_APPEND, handle);

		sim_script_item(append, 1, 0, 96);
		append->items[0].flags |= KVP_ITEM_EVICTABLE;
		ck_assert_int_eq(sim_script_call(append), KV_OK);
		sim_peer_reset(first);
		struct sim_peer *next = sim_script_connect(&world, 1), *other = sim_script_connect(&world, 2);
		struct sim_request *attach = sim_world_request(&world, next, KVP_OP_ATTACH);
		struct sim_request *tell, *pin;

		snprintf(attach->session_name, sizeof(attach->session_name), "talk");
		attach->open.session_name_bytes = 4;
		ck_assert_int_eq(sim_script_call(attach), KV_OK);
		tell = sim_script_new(next, KVP_OP_TELL, handle);
		ck_assert_int_eq(
			sim_script_call(tell), KV_OK); /* its lengths are checked against the model */
		ck_assert_uint_eq(sim_script_length(&world, handle, 1, 0), 96);
		pin = sim_script_new(next, KVP_OP_PIN, handle);
		sim_script_item(pin, 1, 0, 0);
		if (is_pinned)
			ck_assert_int_eq(sim_script_call(pin), KV_OK);
		const uint64_t pressure = sim_script_open(other, 0, NULL);

		ck_assert_int_eq(
			sim_script_append(other, pressure, 1, 0, 160), is_pinned ? KV_POOL_FULL : KV_OK);
		ck_assert_int_eq(sim_script_decode(next, handle, 1, 96), is_pinned ? KV_OK : KV_EVICTED);
		sim_script_end(&world);
	}
}
END_TEST

/* Turns from sending an append of new rows to its answer. */
static uint64_t turns_of_append(
	struct sim_peer *peer, uint64_t handle, uint64_t sequence, uint32_t n_tokens, enum kv_status status)
{
	const uint64_t turn = sim_where.turn;
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);

	sim_script_item(request, sequence, 0, n_tokens);
	ck_assert_int_eq(sim_script_call(request), KV_OK);
	ck_assert_int_eq(request->items[0].outcome.status, status);
	ck_assert_int_eq(request->items[0].outcome.retry_after_ms > 0, status == KV_POOL_FULL);
	return sim_where.turn - turn;
}

/*
 * FAILURES P1: a pool full of idle EVICTABLE sequences takes one APPEND in as many turns as an empty one
 * does; with everything pinned the answer is POOL_FULL with retry_after_ms, as quickly.
 */
START_TEST(test_a_full_pool_of_idle_sequences_gives_way_at_once)
{
	struct sim_config config = sim_config_plain(47);

	config.lease_ms = 60000;
	config.net.delay_ns_max = 0;
	config.net.skip_per_mille = config.net.cut_per_mille = 0;
	config.backend.latency_ns_max = 0;
	config.pools[0].n_blocks = 12;
	config.pools[0].tokens_max = 160;
	sim_world_init(&world, &config);
	struct sim_peer *idle = sim_script_connect(&world, 0), *wants = sim_script_connect(&world, 1);
	const uint64_t mine = sim_script_open(idle, 0, NULL), handle = sim_script_open(wants, 0, NULL);
	const uint64_t n_turns = turns_of_append(wants, handle, 1, 32, KV_OK);

	ck_assert_int_eq(sim_script_close(wants, handle), KV_OK);
	sim_script_pass(&world, 5 * MS);
	for (uint32_t i = 1; i <= 12; i++) {
		struct sim_request *append = sim_script_new(idle, KVP_OP_APPEND, mine);

		sim_script_item(append, i, 0, 16);
		append->items[0].flags |= KVP_ITEM_EVICTABLE;
		ck_assert_int_eq(sim_script_call(append), KV_OK);
	}
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, 0);
	const uint64_t again = sim_script_open(wants, 0, NULL);

	ck_assert_uint_le(turns_of_append(wants, again, 1, 32, KV_OK), n_turns);
	ck_assert_uint_eq(sim_world_pool(&world, 0)->n_evicted_sequences, 2);
	for (uint32_t i = 3; i <= 12; i++) {
		struct sim_request *pin = sim_script_new(idle, KVP_OP_PIN, mine);

		sim_script_item(pin, i, 0, 0);
		ck_assert_int_eq(sim_script_call(pin), KV_OK);
	}
	ck_assert_uint_le(turns_of_append(wants, again, 2, 16, KV_POOL_FULL), n_turns);
	ck_assert_uint_eq(sim_world_pool(&world, 0)->n_evicted_sequences, 2);
	sim_script_end(&world);
}
END_TEST

static struct sim_request *open_reserving(struct sim_peer *peer, uint32_t n_blocks)
{
	struct sim_request *open = sim_script_new(peer, KVP_OP_OPEN, 0);

	snprintf(open->pool_name, sizeof(open->pool_name), "%s", sim_pool_name(0));
	open->open.pool_name_bytes = (uint16_t)strlen(open->pool_name);
	open->open.reserve_blocks = n_blocks;
	return open;
}

/*
 * FAILURES L19: a reservation above the pool is LIMIT at once. One that fits and finds the pool busy waits
 * for up to alloc_timeout_ms and is then POOL_FULL, or OK as soon as there is room.
 */
START_TEST(test_reservations_wait_or_are_refused_at_once)
{
	struct sim_config config = sim_config_plain(48);

	config.alloc_timeout_ms = 300;
	config.lease_ms = 60000;
	config.pools[0].n_blocks = 10;
	config.pools[0].tokens_max = 160;
	sim_world_init(&world, &config);
	struct sim_peer *has = sim_script_connect(&world, 0), *wants = sim_script_connect(&world, 1);
	struct sim_request *first = open_reserving(has, 6);

	ck_assert_int_eq(sim_script_call(first), KV_OK);
	uint64_t asked_ns = world.clock.now_ns;

	ck_assert_int_eq(sim_script_call(open_reserving(wants, 11)), KV_LIMIT);
	ck_assert_uint_lt(world.clock.now_ns - asked_ns, 3 * MS);
	asked_ns = world.clock.now_ns;
	ck_assert_int_eq(sim_script_call(open_reserving(wants, 5)), KV_POOL_FULL);
	ck_assert_uint_gt(wants->reply.retry_after_ms, 0);
	ck_assert_uint_ge(world.clock.now_ns - asked_ns, 300 * MS);
	ck_assert_uint_lt(world.clock.now_ns - asked_ns, 310 * MS);
	struct sim_request *open = open_reserving(wants, 5);

	asked_ns = world.clock.now_ns;
	sim_script_send(open);
	sim_script_pass(&world, 100 * MS);
	ck_assert(!open->is_replied);
	ck_assert_int_eq(sim_script_close(has, first->session), KV_OK);
	ck_assert_int_eq(sim_script_wait(open), KV_OK);
	ck_assert_uint_lt(world.clock.now_ns - asked_ns, 110 * MS);
	sim_script_end(&world);
}
END_TEST

/* FAILURES H4: ATTACH with another fingerprint is FORMAT_MISMATCH, and the owner keeps its session. */
START_TEST(test_attach_with_another_fingerprint_changes_nothing)
{
	struct sim_config config = sim_config_plain(49);

	sim_world_init(&world, &config);
	struct sim_peer *owner = sim_script_connect(&world, 0), *other = sim_script_connect(&world, 1);
	const uint64_t handle = sim_script_open(owner, 0, "talk");
	const uint64_t fingerprint = sim_world_pool(&world, 0)->spec->fingerprint;

	ck_assert_int_eq(sim_script_append(owner, handle, 1, 0, 20), KV_OK);
	for (uint32_t is_right = 0; is_right < 2; is_right++) {
		struct sim_request *attach = sim_script_new(other, KVP_OP_ATTACH, 0);

		snprintf(attach->session_name, sizeof(attach->session_name), "talk");
		attach->open.session_name_bytes = 4;
		attach->open.fingerprint = is_right ? fingerprint : fingerprint ^ 1;
		ck_assert_int_eq(sim_script_call(attach), is_right ? KV_OK : KV_FORMAT_MISMATCH);
		ck_assert_int_eq(sim_script_decode(owner, handle, 1, 20), is_right ? KV_NOT_OWNER : KV_OK);
	}
	sim_script_end(&world);
}
END_TEST

/* ---- M11 ---- */

struct drained {
	struct sim_peer *peer, *other;
	uint64_t handle, begun_ns;
};

/* Somebody with a session and somebody without one are there when the daemon is told to stop. */
static struct drained begin_drain(uint64_t seed)
{
	struct sim_config config = sim_config_plain(seed);
	struct drained drained = { 0 };

	config.drain_timeout_ms = 200;
	config.lease_ms = 60000;
	sim_world_init(&world, &config);
	drained.peer = sim_script_connect(&world, 0);
	drained.other = sim_script_connect(&world, 1);
	drained.handle = sim_script_open(drained.peer, 0, "stays");
	ck_assert_int_eq(sim_script_append(drained.peer, drained.handle, 1, 0, 20), KV_OK);
	drained.begun_ns = world.clock.now_ns;
	srv_server_drain(world.server);
	sim_script_pass(&world, 2 * MS);
	ck_assert(drained.peer->has_goaway);
	ck_assert(drained.other->has_goaway);
	ck_assert(!srv_server_is_done(world.server));
	return drained;
}

static enum kv_status try_open(struct sim_peer *peer)
{
	struct sim_request *open = sim_script_new(peer, KVP_OP_OPEN, 0);

	snprintf(open->pool_name, sizeof(open->pool_name), "%s", sim_pool_name(0));
	open->open.pool_name_bytes = (uint16_t)strlen(open->pool_name);
	return sim_script_call(open);
}

/* FAILURES M11: OPEN is refused, the session that is there goes on until the deadline, and the exit code is
 * 0. */
START_TEST(test_sessions_go_on_until_the_deadline)
{
	const struct drained drained = begin_drain(45);
	struct sim_peer *peer = drained.peer;
	const uint64_t end_ns = drained.begun_ns + 200 * MS;
	uint32_t length = 20;

	ck_assert_int_eq(try_open(peer), KV_DRAINING);
	ck_assert(!sim_net_connect(world.net, &drained.other->address)); /* nobody listens */
	while (world.clock.now_ns < end_ns - 10 * MS) {
		ck_assert(!srv_server_is_done(world.server));
		ck_assert_int_eq(sim_script_append(peer, drained.handle, 1, length++, 1), KV_OK);
		ck_assert_int_eq(sim_script_decode(peer, drained.handle, 1, length), KV_OK);
		sim_script_pass(&world, 5 * MS);
	}
	/* What is in flight at the deadline is answered, what comes behind it is refused. */
	sim_backend_hold(world.backend, true);
	struct sim_request *last = sim_script_new(peer, KVP_OP_APPEND, drained.handle);

	sim_script_item(last, 1, length, 1);
	sim_script_send(last);
	sim_script_pass(&world, 20 * MS);
	ck_assert_uint_gt(world.clock.now_ns, end_ns);
	ck_assert(!srv_server_is_done(world.server));
	ck_assert_int_eq(sim_script_append(peer, drained.handle, 2, 0, 1), KV_DRAINING);
	sim_backend_hold(world.backend, false);
	ck_assert_int_eq(sim_script_wait(last), KV_OK);
	ck_assert_int_eq(last->items[0].outcome.status, KV_OK);
	sim_script_pass(&world, 2 * MS);
	ck_assert(srv_server_is_done(world.server));
	ck_assert_int_eq(srv_server_exit_code(world.server), 0);
	sim_world_finish(&world, false);
}
END_TEST

/* FAILURES M11: the deadline is not waited for when nobody that is there has a session any more. */
START_TEST(test_draining_ends_when_sessions_do)
{
	for (uint32_t is_closed = 0; is_closed < 2; is_closed++) {
		const struct drained drained = begin_drain(46);

		sim_script_pass(&world, 50 * MS);
		ck_assert(!srv_server_is_done(world.server));
		if (is_closed)
			ck_assert_int_eq(sim_script_close(drained.peer, drained.handle), KV_OK);
		else
			sim_peer_reset(drained.peer);
		sim_script_pass(&world, 5 * MS);
		ck_assert(srv_server_is_done(world.server));
		ck_assert_uint_lt(world.clock.now_ns, drained.begun_ns + 70 * MS);
		ck_assert_int_eq(srv_server_exit_code(world.server), 0);
		sim_world_finish(&world, false);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sim_lifecycle");
	TCase *tcase = tcase_create("lifecycle");

	tcase_set_timeout(tcase, 60);
	tcase_add_test(tcase, test_pings_keep_a_session_and_silence_does_not);
	tcase_add_test(tcase, test_all_blocks_or_none);
	tcase_add_test(tcase, test_a_promised_length_is_kept_or_evicted);
	tcase_add_test(tcase, test_a_full_pool_of_idle_sequences_gives_way_at_once);
	tcase_add_test(tcase, test_reservations_wait_or_are_refused_at_once);
	tcase_add_test(tcase, test_attach_with_another_fingerprint_changes_nothing);
	tcase_add_test(tcase, test_sessions_go_on_until_the_deadline);
	tcase_add_test(tcase, test_draining_ends_when_sessions_do);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
