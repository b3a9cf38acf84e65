/*
 * Tenants beside each other: whatever one of them sends, another's share of the batches is what their weights
 * say. Everything waits while the device is held; then each batch is looked at in the turn that seals it.
 */
#include <stdio.h>

#include "tests/lib/kv_test.h"
#include "tests/sim/script.h"

#define MS        KV_NS_PER_MS
#define N_ITEMS   SIM_ITEMS_MAX /* of every request */
#define N_TENANTS 3u

static struct sim_world world;

struct share {
	uint32_t weight, n_requests; /* as the test wants it */
	uint64_t tenant, handle;
	uint32_t n_left;  /* items that are in no batch yet */
	uint32_t n_first; /* items in the first batch after the device went on */
};

static struct sim_config config_of(uint64_t seed)
{
	struct sim_config config = sim_config_plain(seed);

	config.n_peers = config.n_tenants = N_TENANTS;
	config.small_slots = 320 * N_TENANTS; /* every connection may have its part of them */
	config.large_slots = 1;
	config.inflight_requests_max = 500;
	config.inflight_bytes_max = 1 << 26;
	config.net.delay_ns_max = 0;
	config.net.wire_bytes_max = 1 << 24;
	config.lease_ms = 60000;
	return config;
}

static void send_decode(struct share *share, struct sim_peer *peer)
{
	struct sim_request *request = sim_script_new(peer, KVP_OP_DECODE, share->handle);

	for (uint32_t i = 0; i < N_ITEMS; i++)
		sim_script_item(request, 1 + i, 1, 0);
	sim_script_send(request);
}

static void begin(struct share shares[N_TENANTS])
{
	struct kv_tenants *tenants = kv_domain_tenants(world.server->domain);
	struct kv_tenant_policy policy = kv_tenant_policy_open();
	struct kv_error err;

	for (uint32_t t = 0; t < N_TENANTS; t++) {
		struct share *share = &shares[t];
		struct sim_peer *peer = sim_script_connect(&world, t);

		share->tenant = 1000 + t;
		policy.weight = share->weight;
		ck_assert_int_eq(kv_tenant_set(tenants, share->tenant, &policy, &err), KV_OK);
		share->handle = sim_script_open(peer, 0, NULL);

		struct sim_request *request = sim_script_new(peer, KVP_OP_APPEND, share->handle);

		for (uint32_t i = 0; i < N_ITEMS; i++)
			sim_script_item(request, 1 + i, 0, 1);
		ck_assert_int_eq(sim_script_call(request), KV_OK);
	}
	/* Two batches that the device keeps: what comes after them waits. */
	sim_backend_hold(world.backend, true);
	for (uint32_t i = 0; i < SRV_PLANS_PER_LANE; i++) {
		send_decode(&shares[0], &world.peers[0]);
		sim_script_pass(&world, MS);
	}
	ck_assert_uint_eq(world.server->lanes[0].n_flights, SRV_PLANS_PER_LANE);
	for (uint32_t t = 0; t < N_TENANTS; t++) {
		for (uint32_t i = 0; i < shares[t].n_requests; i++)
			send_decode(&shares[t], &world.peers[t]);
		shares[t].n_left = shares[t].n_requests * N_ITEMS;
	}
	sim_script_pass(&world, 50 * MS);
}

/* Items of each tenant in the batch. */
static void count(
	const struct srv_flight *flight, const struct share shares[N_TENANTS], uint32_t n[N_TENANTS])
{
	for (uint32_t t = 0; t < N_TENANTS; t++)
		n[t] = 0;
	for (uint32_t i = 0; i < flight->n_entries; i++) {
		for (uint32_t t = 0; t < N_TENANTS; t++)
			n[t] += flight->entries[i].request->session->tenant == shares[t].tenant;
	}
}

/*
 * Of two tenants that both have more than the batch took, each has its weight's part of it. Off by a request
 * that was the last to begin, and by one that the batch before had begun.
 */
static void check_batch(const struct share shares[N_TENANTS], const uint32_t n[N_TENANTS])
{
	for (uint32_t a = 0; a < N_TENANTS; a++) {
		for (uint32_t b = 0; b < N_TENANTS; b++) {
			if (shares[a].n_left == 0 || shares[b].n_left == 0)
				continue;
			ck_assert_msg(n[a] * shares[b].weight <= (n[b] * shares[a].weight) +
						(2 * N_ITEMS * (shares[a].weight + shares[b].weight)),
				"weights %u and %u: %u and %u items of a batch", shares[a].weight,
				shares[b].weight, n[a], n[b]);
		}
	}
}

/* Lets the device go on until nothing waits; returns how many batches that took. */
static uint32_t go_on(struct share shares[N_TENANTS])
{
	const struct srv_lane *lane = &world.server->lanes[0];
	uint64_t seen = world.server->counters.batches;
	uint32_t n_batches = 0, n[N_TENANTS];

	ck_assert_uint_eq(lane->n_queued, shares[0].n_requests + shares[1].n_requests + shares[2].n_requests);
	sim_backend_hold(world.backend, false);
	while (lane->n_queued > 0) {
		sim_world_step(&world, MS);
		for (uint32_t i = 0; i < lane->n_flights; i++) {
			const struct srv_flight *flight =
				&lane->flights[(lane->flight_first + i) % SRV_PLANS_PER_LANE];

			if (flight->batch_number <= seen)
				continue;
			ck_assert_uint_eq(flight->batch_number, ++seen); /* none was missed */
			count(flight, shares, n);
			for (uint32_t t = 0; t < N_TENANTS; t++) {
				shares[t].n_left -= n[t];
				if (n_batches == 0)
					shares[t].n_first = n[t];
			}
			check_batch(shares, n);
			n_batches++;
		}
		for (uint32_t i = 0; i < world.config.n_peers; i++)
			sim_peer_poll(&world.peers[i]);
	}
	for (uint32_t t = 0; t < N_TENANTS; t++)
		ck_assert_uint_eq(shares[t].n_left, 0);
	return n_batches;
}

static uint32_t run(struct share shares[N_TENANTS], uint64_t seed)
{
	const struct sim_config config = config_of(seed);

	sim_world_init(&world, &config);
	begin(shares);

	const uint32_t n_batches = go_on(shares);

	sim_script_pass(&world, 50 * MS);
	sim_script_end(&world);
	return n_batches;
}

/* Batches are shared as the weights say, whatever the weights are and however much each tenant has waiting.
 */
START_TEST(test_batches_are_shared_by_weight)
{
	struct sim_rng rng;

	sim_rng_init(&rng, 0x5EED0071, 0);
	printf("test_sim_shares: seed %x\n", 0x5EED0071);
	for (uint32_t round = 0; round < 4; round++) {
		struct share shares[N_TENANTS] = { 0 };

		for (uint32_t t = 0; t < N_TENANTS; t++) {
			shares[t].weight = round == 0 ? 1 : sim_between(&rng, 1, 9);
			shares[t].n_requests = sim_between(&rng, 90, 150);
		}
		ck_assert_uint_ge(run(shares, 70 + round), 3);
	}
}
END_TEST

/*
 * The same two tenants beside one that sends little, that sends a flood, and a flood with a greater weight:
 * only the weight moves what the others get, and no further than it says.
 */
START_TEST(test_a_flood_moves_nobody_beyond_its_weight)
{
	const uint32_t whole = KV_PLAN_ITEMS_MAX;
	struct share calm[N_TENANTS] = { { .weight = 1, .n_requests = 90 }, { .weight = 1, .n_requests = 90 },
		{ .weight = 2, .n_requests = 90 } };
	struct share flood[N_TENANTS] = { { .weight = 1, .n_requests = 220 },
		{ .weight = 1, .n_requests = 90 }, { .weight = 2, .n_requests = 90 } };
	struct share heavy[N_TENANTS] = { { .weight = 5, .n_requests = 220 },
		{ .weight = 1, .n_requests = 90 }, { .weight = 2, .n_requests = 90 } };

	run(calm, 80);
	run(flood, 81);
	run(heavy, 82);
	for (uint32_t t = 0; t < N_TENANTS; t++) {
		ck_assert_uint_le(calm[t].n_first, flood[t].n_first + N_ITEMS);
		ck_assert_uint_le(flood[t].n_first, calm[t].n_first + N_ITEMS);
	}
	/* A part of 1 in 8, of 2 in 8. */
	ck_assert_uint_ge(heavy[1].n_first + N_ITEMS, whole / 8);
	ck_assert_uint_ge(heavy[2].n_first + N_ITEMS, whole * 2 / 8);
	ck_assert_uint_ge(heavy[0].n_first + N_ITEMS, whole * 5 / 8);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("sim_shares");
	TCase *tcase = tcase_create("shares");

	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_batches_are_shared_by_weight);
	tcase_add_test(tcase, test_a_flood_moves_nobody_beyond_its_weight);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
