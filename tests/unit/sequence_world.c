/* A run: which operation comes next, and the comparison after it. */
#include "tests/unit/sequence_world.h"

/* Lengths, listing and sums as the model has them. */
static void compare(struct world *world)
{
	struct kv_pool *pool = world->test.pool;
	uint64_t layer_tokens[N_LAYERS] = { 0 }, n_tokens = 0, next;

	for (uint32_t s = 0; s < N_SESSIONS; s++) {
		struct model_session *owner = &world->sessions[s];
		struct kv_sequence *list[N_IDS + 1];
		uint32_t n = 0, n_listed;

		if (!owner->session)
			continue;
		n_listed = kv_sequence_list(owner->session, 0, list, N_IDS + 1, &next);
		ck_assert_uint_eq(next, 0);
		for (uint32_t id = 1; id <= N_IDS; id++) {
			const struct model_sequence *model = owner->sequences[id];

			if (!model)
				continue;
			/* An assertion that holds is a system call. */
			if (n >= n_listed || list[n]->id != id || list[n]->epoch != model->epoch ||
				memcmp(list[n]->planned, model->planned, sizeof(model->planned)) != 0 ||
				memcmp(list[n]->committed, model->committed, sizeof(model->committed)) != 0)
				ck_abort_msg("seed %llx: session %u, sequence %u differs",
					(unsigned long long)world->seed, s, id);
			n_tokens += least(model->committed, 0, N_LAYERS);
			for (uint32_t l = 0; l < N_LAYERS; l++)
				layer_tokens[l] += world_n_held(world, model, l);
			n++;
		}
		ck_assert_uint_eq(n, n_listed);
	}
	ck_assert_uint_eq(pool->n_tokens_committed, n_tokens);
	ck_assert_mem_eq(pool->layer_tokens, layer_tokens, sizeof(layer_tokens));
}

static void audit(struct world *world)
{
	struct kv_plan *plans[N_FLIGHTS];

	for (uint32_t i = 0; i < world->n_flights; i++)
		plans[i] = &world->flights[(world->flight_first + i) % N_FLIGHTS].plan;
	kv_test_audit(world->test.domain, plans, world->n_flights);
}

/* The audit of a running domain, a few entries between operations: it never sees anything wrong. */
static void tally(struct world *world)
{
	struct kv_error err = { 0 };
	bool is_done = false;

	if (!world->tally)
		kv_assert_ok(kv_tally_create(world->test.domain, &world->tally, NULL));

	const enum kv_status status = kv_tally_step(
		world->tally, 1 + below(world, 12), world->n_flights == 0, &is_done, &world->finding, &err);

	ck_assert_msg(status == (world->finding.pool[0] ? KV_INTERNAL : KV_OK), "%s", err.msg);
	ck_assert_msg(world->is_leaky || status == KV_OK, "%s", err.msg);
	if (!is_done && status == KV_OK)
		return;
	world->n_tallies++;
	kv_tally_destroy(world->tally);
	world->tally = NULL;
}

void world_step(struct world *world)
{
	const uint32_t kind = below(world, 100);
	const uint32_t n_max = 1 + below(world, 12);

	/* As if others had cut much already: what this step cuts has to wait. */
	if (below(world, 8) == 0)
		world->test.domain->n_cut = KV_CUT_BLOCKS_MAX;

	if (kind < 50)
		world_step_plan(world);
	else if (kind < 62)
		world_step_seal(world);
	else if (kind < 75)
		world_step_reap(world);
	else if (kind < 82)
		world_step_change(world);
	else if (kind < 88)
		world_step_session(world);
	else
		ck_assert_uint_le(kv_domain_release(world->test.domain, n_max), n_max);
	tally(world);
	if (world->is_leaky)
		return;
	audit(world);
	compare(world);
}

/* Everything comes to its end, and nothing is left behind. */
void world_wind_up(struct world *world)
{
	struct kv_pool *pool = world->test.pool;

	while (world->n_entries > 0) {
		world_step_seal(world);
		world_step_reap(world);
		audit(world);
	}
	for (uint32_t s = 0; s < N_SESSIONS; s++) {
		if (world->sessions[s].session)
			kv_session_close(world->test.domain, world->sessions[s].session, true);
	}
	kv_test_release_all(world->test.domain);
	kv_assert_ok(kv_domain_pool_check_remove(pool, NULL));
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		ck_assert_uint_eq(pool->blocks[g].counts.n_free, pool->spec->n_blocks[g]);
		ck_assert_uint_eq(pool->blocks[g].counts.n_reserved, 0);
	}
	ck_assert_uint_eq(pool->tables.n_chunks_used, 0);
	ck_assert_uint_eq(world->test.domain->n_sequences, 0);
}

void world_begin(struct world *world, uint64_t seed, const char *options, const char *groups)
{
	char pool[256];

	static const struct kv_domain_limits limits = {
		.sessions_max = N_SESSIONS,
		.sequences_max = N_SEQUENCES,
		.lease_ms = 1000,
		.lease_ms_max = 1000,
	};
	const uint32_t n_by_status_size = sizeof(world->n_by_status);
	uint32_t n_by_status[KV_LENGTH(world->n_by_status)];

	memcpy(n_by_status, world->n_by_status, n_by_status_size);
	memset(world, 0, sizeof(*world));
	memcpy(world->n_by_status, n_by_status, n_by_status_size);
	world->seed = seed;
	world->is_long = strchr(options, ',') != NULL;
	snprintf(pool, sizeof(pool),
		"name=p,layers=3,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=%s",
		options);
	kv_test_domain_init(&world->test, &limits, pool, groups, seed);
	world->area_bytes = kv_plan_area_bytes(world->test.pool->spec, 65536);
	for (uint32_t i = 0; i < N_FLIGHTS; i++)
		ck_assert_int_eq(
			posix_memalign((void **)&world->flights[i].area, 4096, world->area_bytes), 0);
}

void world_end(struct world *world)
{
	for (uint32_t i = 0; i < N_FLIGHTS; i++)
		free(world->flights[i].area);
	kv_tally_destroy(world->tally);
	kv_test_domain_finish(&world->test);
}
