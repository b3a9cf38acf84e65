/*
 * Faults for every k: the k-th allocation and host allocation while the server is made; the k-th submit,
 * receive and send of one fixed scenario. Nothing crashes, nothing leaks, and whoever is not concerned is
 * served as always.
 */
#include "core/memory.h"
#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS        KV_NS_PER_MS
#define N_PLAYERS 3u

static struct sim_world world;

/* ---- the scenario ---- */

/* One client that goes through every operation, one after the other; from the start again when it is cut off.
 */
struct player {
	struct sim_peer *peer;
	struct sim_request *request;
	uint64_t handle;
	uint32_t step, n_starts;
	bool is_done;
};

static struct sim_request *hello(struct player *player)
{
	struct sim_request *request = sim_world_request(&world, player->peer, KVP_OP_HELLO);

	request->hello = (struct kvp_hello_req){ .proto_min = 1, .proto_max = 1, .name_bytes = 4 };
	player->peer->is_hello_sent = true;
	return request;
}

static struct sim_request *open(struct player *player)
{
	struct sim_request *request = sim_script_new(player->peer, KVP_OP_OPEN, 0);

	memcpy(request->pool_name, sim_pool_name(0), 3);
	request->open.pool_name_bytes = 2;
	return request;
}

static struct sim_request *next_request(struct player *player)
{
	static const uint16_t opcodes[] = { KVP_OP_HELLO, KVP_OP_OPEN, KVP_OP_APPEND, KVP_OP_APPEND_DECODE,
		KVP_OP_DECODE, KVP_OP_READ, KVP_OP_TRUNCATE, KVP_OP_TELL, KVP_OP_PING, KVP_OP_FREE,
		KVP_OP_CLOSE };

	if (player->step == KV_LENGTH(opcodes))
		return NULL;
	const uint16_t opcode = opcodes[player->step++];

	if (opcode == KVP_OP_HELLO)
		return hello(player);
	if (opcode == KVP_OP_OPEN)
		return open(player);
	struct sim_request *request = sim_script_new(player->peer, opcode, player->handle);

	if (opcode == KVP_OP_APPEND) {
		sim_script_item(request, 1, 0, 20);
		sim_script_item(request, 2, 0, 3);
	} else if (opcode == KVP_OP_APPEND_DECODE) {
		sim_script_item(request, 1, 20, 1);
	} else if (opcode == KVP_OP_DECODE) {
		sim_script_item(request, 2, 3, 0);
		sim_script_item(request, 1, KV_LENGTH_PLANNED, 0);
	} else if (opcode == KVP_OP_READ) {
		sim_script_item(request, 1, 5, 10);
	} else if (opcode == KVP_OP_TRUNCATE) {
		sim_script_item(request, 1, 17, 0);
	} else if (opcode == KVP_OP_FREE) {
		sim_script_item(request, 2, 0, 0);
	} else if (opcode == KVP_OP_PING) {
		request->has_echo = true;
		request->echo_payload_bytes = request->echo_bytes = 5000;
	}
	return request;
}

static void check_answer(const struct player *player)
{
	const struct sim_request *request = player->request;

	ck_assert_msg(player->peer->reply.status == KV_OK, "%s answers %s", kvp_opcode_name(request->opcode),
		kv_status_name(player->peer->reply.status));
	for (uint32_t i = 0; i < request->n_items; i++)
		ck_assert_int_eq(request->items[i].outcome.status, KV_OK);
}

static void play(struct player *player)
{
	if (player->is_done)
		return;
	if (!player->peer->conn) {
		player->request = NULL;
		player->step = 0;
		player->n_starts++;
		ck_assert_uint_le(player->n_starts, 3);
		ck_assert(sim_peer_connect(player->peer));
	}
	if (player->request && !player->request->is_replied)
		return;
	if (player->request)
		check_answer(player);
	if (player->request && player->request->opcode == KVP_OP_OPEN)
		player->handle = player->request->session;
	player->request = next_request(player);
	if (player->request)
		sim_script_send(player->request);
	else
		player->is_done = true;
}

/* Until everybody is through, or the device is lost. Returns how often somebody had to start again. */
static uint32_t play_all(void)
{
	struct player players[N_PLAYERS] = { { 0 } };
	const uint64_t end_ns = world.clock.now_ns + 20000 * MS;
	uint32_t n_done = 0, n_restarts = 0;

	for (uint32_t i = 0; i < N_PLAYERS; i++)
		players[i].peer = &world.peers[i];
	while (n_done < N_PLAYERS && !world.server->is_lost) {
		ck_assert_msg(world.clock.now_ns < end_ns, "the scenario does not end");
		for (uint32_t i = 0; i < N_PLAYERS; i++)
			play(&players[i]);
		sim_world_step(&world, MS);
		n_done = 0;
		for (uint32_t i = 0; i < N_PLAYERS; i++)
			n_done += players[i].is_done;
	}
	for (uint32_t i = 0; i < N_PLAYERS; i++)
		n_restarts += players[i].n_starts - 1;
	return n_restarts;
}

static void end_lost(void)
{
	for (uint32_t i = 0; i < 10000 && !srv_server_is_done(world.server); i++)
		sim_world_step(&world, 10 * MS);
	ck_assert(srv_server_is_done(world.server));
	ck_assert_int_eq(srv_server_exit_code(world.server), 4);
	world.clock.now_ns += MS; /* what was sent arrives */
	for (uint32_t i = 0; i < N_PLAYERS; i++) {
		sim_peer_poll(&world.peers[i]);
		for (uint32_t k = 0; k < world.peers[i].n_pending; k++)
			ck_assert_msg(
				world.peers[i].pending[k]->planned_seq == 0, "planned, and never answered");
	}
	sim_world_finish(&world, false);
}

/* ---- making the server ---- */

/* Every allocation of srv_server_create() may fail: it says so, and everything is given back. */
START_TEST(test_every_allocation_may_fail_at_start)
{
	struct sim_config config = sim_config_plain(31);
	struct kv_error err = { 0 };
	int64_t k = 0;

	config.control_per_mille = 1; /* with a mailbox */
	for (;; k++) {
		const int64_t n_before = sim_record_n_allocations();

		sim_world_prepare(&world, &config);
		const uint64_t n_first = kv_alloc_count();

		kv_alloc_fail_after(k);
		const enum kv_status status = sim_world_start(&world, &err);
		const uint64_t n_used = kv_alloc_count() - n_first;

		kv_alloc_fail_after(-1);
		if (status != KV_OK) {
			ck_assert_msg(status == KV_NO_MEMORY, "allocation %lld: %s", (long long)k, err.msg);
			ck_assert_msg(
				err.msg[0] != '\0', "allocation %lld fails without a word", (long long)k);
			ck_assert_ptr_null(world.server);
		} else {
			ck_assert_msg(
				n_used <= (uint64_t)k, "allocation %lld failed unnoticed", (long long)k);
		}
		sim_world_finish(&world, status == KV_OK);
		ck_assert_msg(sim_record_n_allocations() == n_before, "allocation %lld: %lld pieces leak",
			(long long)k, (long long)(sim_record_n_allocations() - n_before));
		if (status == KV_OK)
			break;
	}
	ck_assert_int_gt(k, 50);
}
END_TEST

/* The same for memory of the backend. */
START_TEST(test_every_host_allocation_may_fail_at_start)
{
	struct sim_config config = sim_config_plain(32);
	struct kv_error err = { 0 };
	int64_t k = 0;

	for (;; k++) {
		const int64_t n_before = sim_record_n_allocations();

		sim_world_prepare(&world, &config);
		sim_backend_fail_host_alloc_after(world.backend, k);
		const enum kv_status status = sim_world_start(&world, &err);
		const bool has_failed = sim_backend_has_failed(world.backend);

		ck_assert_int_eq(status, has_failed ? KV_NO_MEMORY : KV_OK);
		/* The backend is the caller's again, and destroying it checks that it got everything back. */
		sim_world_finish(&world, status == KV_OK);
		ck_assert_int_eq(sim_record_n_allocations(), n_before);
		if (!has_failed)
			break;
	}
	ck_assert_int_ge(k, 7); /* two classes of slots, the self-test, two plans for each of two pools */
}
END_TEST

/* ---- the scenario with one fault ---- */

/* Without a fault nobody has to start again: the other tests measure against this. */
START_TEST(test_the_scenario_passes_untouched)
{
	struct sim_config config = sim_config_plain(33);

	sim_world_init(&world, &config);
	ck_assert_uint_eq(play_all(), 0);
	sim_script_end(&world);
}
END_TEST

/* A submit that is answered BUSY_RETRY is repeated; nobody notices. */
START_TEST(test_any_submit_may_be_busy)
{
	struct sim_config config = sim_config_plain(33);
	bool has_failed = true;
	int64_t k = 0;

	for (; has_failed; k++) {
		sim_world_init(&world, &config);
		sim_backend_fail_submit_after(world.backend, k, KV_BUSY_RETRY);
		ck_assert_uint_eq(play_all(), 0);
		has_failed = sim_backend_has_failed(world.backend);
		sim_script_end(&world);
	}
	ck_assert_int_gt(k, 5);
}
END_TEST

/* A submit that loses the device: everything planned is answered, and the server ends with code 4. */
START_TEST(test_any_submit_may_lose_the_device)
{
	struct sim_config config = sim_config_plain(33);
	bool has_failed = true;
	int64_t k = 0;

	for (; has_failed; k++) {
		const int64_t n_before = sim_record_n_allocations();

		sim_world_init(&world, &config);
		sim_backend_fail_submit_after(world.backend, k, KV_DEVICE_LOST);
		play_all();
		has_failed = sim_backend_has_failed(world.backend);
		ck_assert(has_failed == world.server->is_lost);
		if (has_failed)
			end_lost();
		else
			sim_script_end(&world);
		ck_assert_int_eq(sim_record_n_allocations(), n_before);
	}
	ck_assert_int_gt(k, 5);
}
END_TEST

static int64_t play_with_cut_connections(void (*fail_after)(struct sim_net *net, int64_t countdown))
{
	struct sim_config config = sim_config_plain(34);
	bool has_failed = true;
	int64_t k = 0;

	config.net.late_per_mille = 500;
	config.net.cut_per_mille = 300;
	for (; has_failed; k++) {
		config.seed = 34 + (uint64_t)k;
		sim_world_init(&world, &config);
		fail_after(world.net, k);
		const uint32_t n_restarts = play_all();

		has_failed = sim_net_has_failed(world.net);
		/* One client starts again, unless it was through already; the others go on. */
		ck_assert_uint_le(n_restarts, has_failed);
		sim_script_end(&world);
	}
	return k;
}

/* A receive that fails costs its own connection only. */
START_TEST(test_any_receive_may_fail)
{
	ck_assert_int_gt(play_with_cut_connections(sim_net_fail_recv_after), 30);
}
END_TEST

/* So does a send. */
START_TEST(test_any_send_may_fail)
{
	ck_assert_int_gt(play_with_cut_connections(sim_net_fail_send_after), 30);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sim_faults");
	TCase *tcase = tcase_create("faults");

	tcase_add_test(tcase, test_every_allocation_may_fail_at_start);
	tcase_add_test(tcase, test_every_host_allocation_may_fail_at_start);
	tcase_add_test(tcase, test_the_scenario_passes_untouched);
	tcase_add_test(tcase, test_any_submit_may_be_busy);
	tcase_add_test(tcase, test_any_submit_may_lose_the_device);
	tcase_add_test(tcase, test_any_receive_may_fail);
	tcase_add_test(tcase, test_any_send_may_fail);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
