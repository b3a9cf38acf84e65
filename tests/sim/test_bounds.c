/*
 * The bounds of a turn, counted from outside in 100 000 seeded turns under more work than fits into one: at
 * most 8 control requests of 256 list rows each, 1024 blocks given back, one batch per pool sealed, two in
 * flight, 4096 table entries and blocks audited. The watched calls fail the test at once where a bound is
 * broken; here it is also asked that the work was enough to reach each of them.
 */
#include "tests/lib/kv_test.h"
#include "tests/sim/client.h"
#include "tests/sim/run.h"
#include "tests/sim/script.h"

/* What is counted is the same in every build, and sanitized ones take minutes for all of it. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define N_SEEDS 1u
#else
#define N_SEEDS 4u
#endif
#define N_TURNS    25000u
#define N_SESSIONS 280u

static struct sim_world world;

/* Sequences of thousands of blocks, hundreds of sessions, control requests in most turns. */
static struct sim_config big_config(uint64_t seed)
{
	struct sim_config config = sim_config_random(seed);

	config.n_peers = 6;
	config.pipeline_max = 4;
	config.n_pools = 2;
	config.pools[0] =
		(struct sim_pool_config){ 1, 1, 1, 16, 16, 16, 8000, 60000, "bf16", "bf16", .window = 0 };
	config.pools[1] =
		(struct sim_pool_config){ 1, 2, 1, 16, 16, 32, 4000, 60000, "tq4", "f32", .window = 0 };
	config.net.n_ahead_buffers = 16;
	config.net.delay_ns_max = 0;
	config.net.wire_bytes_max = 1 << 20;
	config.backend.lose_after = -1;
	config.backend.latency_ns_max = 500000;
	config.backend.refuse_per_mille = 20;
	config.frame_bytes_max = 1 << 20;
	config.inflight_bytes_max = 1 << 24;
	config.min_rate_bytes_per_s = 0;
	config.connections_max = 400;
	config.large_slots = 8;
	config.small_slots = 32;
	config.reply_buffers = 64;
	config.sessions_max = 400;
	config.sequences_max = 400;
	config.lease_ms = 60000;
	config.io_timeout_ms = config.send_timeout_ms = config.hello_timeout_ms = 1000;
	config.flaw_per_mille = config.stall_per_mille = config.reset_per_mille = 0;
	config.nan_per_mille = config.cancel_per_mille = config.deadline_per_mille = 0;
	config.attach_per_mille = 0;
	config.close_per_mille = 30;
	config.pool_per_mille = 0;
	config.control_per_mille = 500;
	config.tokens_per_item_max = 1;
	config.items_max = 3;
	config.audits_every_turn = false; /* every 64th */
	config.audit_interval_ms = 10;
	config.audit_step_max = 0;
	return config;
}

static void open_many(void)
{
	for (uint32_t i = 0; i < N_SESSIONS; i++) {
		struct sim_peer *peer = &world.peers[i % world.config.n_peers];

		if (!peer->conn)
			sim_script_connect(&world, i % world.config.n_peers);
		sim_script_open(peer, i % 2, NULL);
	}
}

/* One sequence grows until it has about as many blocks as one turn may give back twice over. */
static void grow(struct sim_peer *peer, uint64_t handle)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, handle);
	const struct sim_session *session = sim_model_session(&world.model, handle);
	const struct sim_sequence *sequence = sim_model_sequence(session, 1);
	const uint32_t length = sequence ? sequence->layers[0].planned : 0;

	sim_script_item(request, 1, length, 12000);
	sim_script_send(request);
}

static uint64_t big_session(const struct sim_peer *peer)
{
	return peer->n_sessions > 0 ? peer->sessions[0] : 0;
}

/* Now and then something large, beside the small things that the random clients do. */
static void act_large(uint32_t turn)
{
	struct sim_peer *peer = &world.peers[turn / 50 % world.config.n_peers];
	const uint64_t handle = big_session(peer);
	struct sim_request *request;

	if (turn % 50 != 0 || !peer->conn || peer->n_pending > 0 || handle == 0)
		return;
	if (turn / 50 % 9 < 6) {
		grow(peer, handle);
		return;
	}
	request = sim_script_new(peer, turn / 50 % 2 ? KVP_OP_FREE : KVP_OP_TRUNCATE, handle);
	sim_script_item(request, 1, 3, 0);
	sim_script_send(request);
}

static void turn_once(uint32_t turn)
{
	for (uint32_t i = 0; i < world.config.n_peers; i++)
		sim_client_act(&world.peers[i]);
	act_large(turn);
	if (sim_chance(&world.rng, world.config.control_per_mille))
		sim_controls_post(&world, SIM_CONTROLS);
	sim_world_step(&world, sim_below(&world.rng, 50000));
}

/* No turn does more than its share, however much there is to do. */
START_TEST(test_a_turn_is_bounded)
{
	struct sim_config config = big_config(100 + (uint64_t)_i);

	sim_world_init(&world, &config);
	open_many();
	for (uint32_t turn = 0; turn < N_TURNS; turn++)
		turn_once(turn);
	sim_world_run(&world, 10000 * KV_NS_PER_MS);
	const struct sim_maxima *maxima = &world.maxima;

	ck_assert_uint_eq(maxima->n_controls, SRV_CONTROL_PER_TURN);
	ck_assert_uint_eq(maxima->n_rows, SRV_CONTROL_ROWS_MAX);
	ck_assert_uint_eq(maxima->n_released, SRV_RELEASE_PER_TURN);
	ck_assert_uint_eq(maxima->n_batches_begun, 1);
	ck_assert_uint_eq(maxima->n_in_flight, SRV_PLANS_PER_LANE);
	ck_assert_uint_eq(maxima->n_audited, 4096);
	ck_assert_uint_ge(world.server->counters.audits, 10);
	for (uint32_t i = 0; i < config.n_peers; i++)
		world.peers[i].may_end = "the test is over";
	sim_world_finish(&world, false);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sim_bounds");
	TCase *tcase = tcase_create("bounds");

	tcase_set_timeout(tcase, 240);
	tcase_add_loop_test(tcase, test_a_turn_is_bounded, 0, N_SEEDS);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
