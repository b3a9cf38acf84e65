/*
 * FAILURES rows about leases and bounded work, word by word, in simulated time.
 */
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS KV_NS_PER_MS

static struct sim_world world;

/* One layer of small rows, so that many blocks are little memory. */
static struct sim_config big_pool(uint64_t seed, uint32_t n_blocks)
{
	struct sim_config config = sim_config_plain(seed);

	config.n_pools = 1;
	config.pools[0] =
		(struct sim_pool_config){ 1, 1, 1, 16, 16, 16, n_blocks, 100000, "tq4", "tq4", .window = 0 };
	config.net.delay_ns_max = 0;
	config.backend.latency_ns_max = 0;
	config.frame_bytes_max = 4 << 20;
	config.inflight_bytes_max = 1 << 24;
	config.audits_every_turn = false;
	config.audit_interval_ms = 0;
	return config;
}

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

/* Appends a token to each of the first 8 peers' sequences; returns the turns that took. */
static void append_all(const uint64_t handles[8], uint32_t position)
{
	struct sim_request *requests[8];

	for (uint32_t i = 0; i < 8; i++) {
		requests[i] = sim_script_new(&world.peers[i], KVP_OP_APPEND, handles[i]);
		sim_script_item(requests[i], 1, position, 1);
		sim_script_send(requests[i]);
	}
	for (uint32_t i = 0; i < 8; i++)
		ck_assert_int_eq(sim_script_wait(requests[i]), KV_OK);
}

static void open_eight(uint64_t handles[8])
{
	for (uint32_t i = 0; i < 8; i++)
		handles[i] = sim_script_open(sim_script_connect(&world, i), 0, NULL);
}

/*
 * FAILURES L14: the reaper takes 10^4 sessions whose leases end together while 8 clients append. At most 1024
 * blocks are given back in a turn (the watched calls fail the test otherwise), and no append waits for it.
 */
START_TEST(test_reaping_many_sessions_is_bounded)
{
	enum { N_SESSIONS = 10000 };
	struct sim_config config = big_pool(41, N_SESSIONS + 200);
	uint64_t handles[8], longest_ns = 0;

	config.n_peers = 9;
	config.sessions_max = config.sequences_max = N_SESSIONS + 8;
	config.lease_ms = 20000;
	sim_world_init(&world, &config);
	open_eight(handles);
	struct sim_peer *many = sim_script_connect(&world, 8);

	for (uint32_t i = 0; i < N_SESSIONS; i++)
		ck_assert_int_eq(sim_script_append(many, sim_script_open(many, 0, NULL), 1, 0, 1), KV_OK);
	ck_assert_uint_eq(kv_domain_n_sessions(world.server->domain), N_SESSIONS + 8);
	sim_peer_reset(many);

	uint32_t position = 0;

	while (kv_domain_n_sessions(world.server->domain) > 8 ||
		kv_domain_has_zombies(world.server->domain)) {
		const uint64_t begun_ns = world.clock.now_ns;

		append_all(handles, position++);
		if (world.clock.now_ns - begun_ns > longest_ns)
			longest_ns = world.clock.now_ns - begun_ns;
		/* In large steps up to the end of the leases, in small ones behind it. */
		sim_script_pass(&world, world.server->counters.sessions_expired == 0 ? 100 * MS : MS / 100);
	}
	ck_assert_uint_eq(world.server->counters.sessions_expired, N_SESSIONS);
	ck_assert_uint_ge(world.maxima.n_released, 1);
	ck_assert_uint_le(world.maxima.n_released, 1024);
	ck_assert_uint_lt(longest_ns, 2 * MS);
	printf("%u sessions reaped: at most %u blocks in a turn\n", N_SESSIONS, world.maxima.n_released);
	sim_world_finish(&world, false);
}
END_TEST

/*
 * FAILURES P6: 10^5 blocks of idle sequences are evicted for one reservation while another client appends. At
 * most 1024 blocks are given back in a turn, and no append waits for it.
 */
START_TEST(test_evicting_many_blocks_is_bounded)
{
	enum { N_SEQUENCES = 25, N_TOKENS = 64000, N_BLOCKS = N_SEQUENCES * N_TOKENS / 16 };
	struct sim_config config = big_pool(42, N_BLOCKS + 200);
	uint64_t handles[8];

	config.n_peers = 10;
	config.alloc_timeout_ms = 5000;
	config.lease_ms = 60000;
	sim_world_init(&world, &config);
	open_eight(handles);
	struct sim_peer *idle = sim_script_connect(&world, 8), *wants = sim_script_connect(&world, 9);
	const uint64_t handle = sim_script_open(idle, 0, NULL);

	for (uint32_t i = 0; i < N_SEQUENCES; i++) {
		for (uint32_t at = 0; at < N_TOKENS; at += N_TOKENS / 2) {
			struct sim_request *request = sim_script_new(idle, KVP_OP_APPEND, handle);

			sim_script_item(request, 1 + i, at, N_TOKENS / 2);
			request->items[0].flags |= KVP_ITEM_EVICTABLE;
			ck_assert_int_eq(sim_script_call(request), KV_OK);
		}
	}
	ck_assert_uint_ge(sim_script_blocks(&world, 0)->n_owned, N_BLOCKS);

	struct sim_request *open = sim_world_request(&world, wants, KVP_OP_OPEN);
	const uint64_t turn = sim_where.turn;

	snprintf(open->pool_name, sizeof(open->pool_name), "%s", sim_pool_name(0));
	open->open.pool_name_bytes = (uint16_t)strlen(open->pool_name);
	open->open.reserve_blocks = N_BLOCKS;
	sim_script_send(open);
	for (uint32_t position = 0; !open->is_replied; position++)
		append_all(handles, position);
	ck_assert_int_eq(wants->reply.status, KV_OK);
	ck_assert_uint_ge(sim_where.turn - turn, N_BLOCKS / 1024);
	ck_assert_uint_eq(sim_world_pool(&world, 0)->n_evicted_sequences, N_SEQUENCES);
	ck_assert_uint_ge(world.maxima.n_released, 900);
	ck_assert_uint_le(world.maxima.n_released, 1024);
	printf("%u blocks evicted in %u turns: at most %u in one\n", (unsigned)N_BLOCKS,
		(unsigned)(sim_where.turn - turn), world.maxima.n_released);
	sim_world_finish(&world, false);
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

int main(void)
{
	Suite *suite = suite_create("sim_lifecycle");
	TCase *tcase = tcase_create("lifecycle");

	tcase_set_timeout(tcase, 240);
	tcase_add_test(tcase, test_pings_keep_a_session_and_silence_does_not);
	tcase_add_test(tcase, test_reaping_many_sessions_is_bounded);
	tcase_add_test(tcase, test_evicting_many_blocks_is_bounded);
	tcase_add_test(tcase, test_all_blocks_or_none);
	tcase_add_test(tcase, test_a_promised_length_is_kept_or_evicted);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
