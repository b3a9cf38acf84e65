/*
 * Peers that read slowly. Time counts while a peer takes nothing of a reply; a slow and steady reader is
 * served, within bounds.
 */
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS         KV_NS_PER_MS
#define ECHO_BYTES 130000u
#define TIMEOUT_MS 200u
/* Looked at 16 times in send_timeout_ms, every 20 ms at most. */
#define LATE_MS (TIMEOUT_MS / 16 + 20 + 5)

static struct sim_world world;
static struct sim_peer *reader;
static struct sim_request *echo;
static const struct srv_counters *counters;

/* A peer that takes sip_bytes every sip_ms of a reply as large as a frame, over a network that holds 8 KiB.
 */
static void begin(uint64_t seed, uint32_t min_rate_bytes_per_s, uint64_t sip_bytes, uint32_t sip_ms)
{
	struct sim_config config = sim_config_plain(seed);

	config.net.wire_bytes_max = 8192;
	config.net.delay_ns_max = 0;
	config.send_timeout_ms = TIMEOUT_MS;
	config.min_rate_bytes_per_s = min_rate_bytes_per_s;
	sim_world_init(&world, &config);
	counters = srv_server_counters(world.server);
	reader = sim_script_connect(&world, 0);
	echo = sim_script_new(reader, KVP_OP_PING, 0);
	echo->has_echo = true;
	echo->echo_bytes = ECHO_BYTES;
	reader->sip_bytes = sip_bytes;
	reader->sip_ns = sip_ms * MS;
	sim_script_send(echo);
}

/* Milliseconds until the server closes somebody for being slow. */
static uint64_t closed_after_ms(void)
{
	const uint64_t begun_ns = world.clock.now_ns;

	reader->may_end = "reads too slowly";
	while (counters->connections_closed_slow == 0) {
		sim_script_pass(&world, MS);
		ck_assert_uint_lt(world.clock.now_ns - begun_ns, 20000 * MS);
	}
	ck_assert_uint_eq(counters->rejected[SRV_REJECTED_SLOW_CONSUMER], 1);
	ck_assert(!echo->is_replied);
	sim_script_pass(&world, 5 * MS); /* the io gives the slot's memory back */
	ck_assert_uint_eq(world.server->slots[0].n_used + world.server->slots[1].n_used, 0);
	return (world.clock.now_ns - begun_ns) / MS - 5;
}

/* Somebody is closed that long from now, and the world ends. */
static void expect_closed_after(uint64_t expected_ms)
{
	const uint64_t after_ms = closed_after_ms();

	ck_assert_uint_ge(after_ms, expected_ms - 2);
	ck_assert_uint_le(after_ms, expected_ms + LATE_MS);
	sim_script_end(&world);
}

/* 2048 bytes every 30 ms are 68 KB/s: the reply takes ten times send_timeout_ms, and arrives whole. */
START_TEST(test_a_steady_slow_reader_is_served)
{
	begin(60, _i == 0 ? 55000 : 0, 2048, 30);
	const uint64_t begun_ns = world.clock.now_ns;

	while (!echo->is_replied) {
		sim_script_pass(&world, MS);
		ck_assert_uint_eq(counters->connections_closed_slow, 0);
	}
	ck_assert_uint_gt(world.clock.now_ns - begun_ns, 8 * TIMEOUT_MS * MS);
	ck_assert_int_eq(reader->reply.status, KV_OK);
	reader->sip_bytes = 0;
	ck_assert_int_eq(sim_script_call(sim_script_new(reader, KVP_OP_PING, 0)), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* Who takes something shortly before the time is over has all of it again, and no more. */
START_TEST(test_time_counts_from_the_last_byte_taken)
{
	begin(61, 0, 2048, TIMEOUT_MS - 20);
	while (reader->in.n < 5 * 2048)
		sim_script_pass(&world, MS);
	ck_assert_uint_eq(counters->connections_closed_slow, 0);
	reader->is_deaf = true;
	sim_net_set_deaf(reader->conn, UINT64_MAX);
	expect_closed_after(TIMEOUT_MS);
}
END_TEST

/* A trickle below min_rate_bytes_per_s ends with the first send_timeout_ms, although it never stands still.
 */
START_TEST(test_a_trickle_is_closed)
{
	begin(62, 60000, 100, 5);
	expect_closed_after(TIMEOUT_MS);
}
END_TEST

/* Where any rate will do a send still ends: after 16 times send_timeout_ms. */
START_TEST(test_a_trickle_without_a_rate_ends)
{
	begin(63, 0, 100, 5);
	expect_closed_after(16 * TIMEOUT_MS);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sim_readers");
	TCase *tcase = tcase_create("readers");

	tcase_set_timeout(tcase, 60);
	tcase_add_loop_test(tcase, test_a_steady_slow_reader_is_served, 0, 2);
	tcase_add_test(tcase, test_time_counts_from_the_last_byte_taken);
	tcase_add_test(tcase, test_a_trickle_is_closed);
	tcase_add_test(tcase, test_a_trickle_without_a_rate_ends);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
