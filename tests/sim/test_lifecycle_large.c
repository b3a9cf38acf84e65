/*
 * FAILURES rows about bounded work, word by word, in simulated time: 10^4 sessions, 10^5 blocks.
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

int main(void)
{
	Suite *suite = suite_create("sim_lifecycle_large");
	TCase *tcase = tcase_create("large");

	tcase_set_timeout(tcase, 240);
	tcase_add_test(tcase, test_reaping_many_sessions_is_bounded);
	tcase_add_test(tcase, test_evicting_many_blocks_is_bounded);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
