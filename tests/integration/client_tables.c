/*
 * client_tables ADDRESS POOL BOUND [SEED [ROUNDS]]: UPDATE_SLOTS and DECODE_TABLE through libtqkv, against an
 * array of what lies in every slot. POOL stores f32 or what comes back as it was sent: rows are compared with
 * those of the array.
 */
#include "tests/integration/client_program.h"

enum { N_BLOCKS = 24, N_SEQUENCES = 3, BLOCKS_EACH = 6, TOKENS_MAX = 70, Q_LEN_MAX = 3 };

struct world {
	struct program program;
	float *k, *v; /* [layers, slots, kv_heads, dim] */
	uint32_t n_slots;
	int32_t tables[N_SEQUENCES][BLOCKS_EACH]; /* no block twice */
	float *sent_k, *sent_v, *q, *out, *lse, *seen_k, *seen_v;
};

static size_t k_floats(const struct world *world)
{
	return (size_t)world->program.info->kv_heads * world->program.info->k_head_dim;
}

static size_t v_floats(const struct world *world)
{
	return (size_t)world->program.info->kv_heads * world->program.info->v_head_dim;
}

static struct tqkv_slots make_slots(
	struct world *world, uint32_t layer_first, uint32_t n_layers, uint32_t n_tokens, const int64_t *slots)
{
	const size_t n_rows = (size_t)n_layers * n_tokens;

	program_draw(&world->program, world->sent_k, n_rows * k_floats(world));
	program_draw(&world->program, world->sent_v, n_rows * v_floats(world));
	return (struct tqkv_slots){ .layer_first = layer_first,
		.n_layers = n_layers,
		.n_tokens = n_tokens,
		.k_dtype = TQKV_F32,
		.v_dtype = TQKV_F32,
		.k = world->sent_k,
		.v = world->sent_v,
		.k_bytes = n_rows * k_floats(world) * sizeof(float),
		.v_bytes = n_rows * v_floats(world) * sizeof(float),
		.slots = slots };
}

/* Slots in any order, some twice, some to be skipped, on some layers: the later of two stays. */
static void update(struct world *world)
{
	struct program *program = &world->program;
	const uint32_t n_layers_all = program->info->n_layers, n = 1 + program_below(program, TOKENS_MAX);
	const uint32_t layer_first = program_below(program, n_layers_all);
	const uint32_t n_layers = 1 + program_below(program, n_layers_all - layer_first);
	int64_t slots[TOKENS_MAX];
	uint32_t bad_row = 0;

	for (uint32_t t = 0; t < n; t++)
		slots[t] = program_below(program, 8) == 0 ? -1 - (int64_t)program_below(program, 9)
							  : program_below(program, world->n_slots);

	const struct tqkv_slots call = make_slots(world, layer_first, n_layers, n, slots);

	CHECK(program,
		tqkv_update_slots(program->session, &call, TIMEOUT_MS, &bad_row, &program->err) == TQKV_OK);
	CHECK(program, bad_row == UINT32_MAX);
	for (uint32_t l = 0; l < n_layers; l++) {
		for (uint32_t t = 0; t < n; t++) {
			const size_t from = (size_t)l * n + t,
				     to = (size_t)(layer_first + l) * world->n_slots + (size_t)slots[t];

			if (slots[t] < 0)
				continue;
			memcpy(world->k + to * k_floats(world), world->sent_k + from * k_floats(world),
				k_floats(world) * sizeof(float));
			memcpy(world->v + to * v_floats(world), world->sent_v + from * v_floats(world),
				v_floats(world) * sizeof(float));
		}
	}
}

/* The rows of a sequence on a layer, one behind the other. */
static void gather(struct world *world, uint32_t layer, const int32_t *table, uint32_t n)
{
	const uint32_t block_size = world->program.info->block_size;

	for (uint32_t t = 0; t < n; t++) {
		const size_t slot = (size_t)layer * world->n_slots +
			(size_t)table[t / block_size] * block_size + t % block_size;

		memcpy(world->seen_k + t * k_floats(world), world->k + slot * k_floats(world),
			k_floats(world) * sizeof(float));
		memcpy(world->seen_v + t * v_floats(world), world->v + slot * v_floats(world),
			v_floats(world) * sizeof(float));
	}
}

/* Sequences of different lengths, an empty one among them, of one to three query rows. */
static void decode(struct world *world)
{
	struct program *program = &world->program;
	const struct tqkv_session_info *info = program->info;
	const uint32_t q_len = 1 + program_below(program, Q_LEN_MAX),
		       layer = program_below(program, info->n_layers);
	const uint32_t window = program_below(program, 2) ? 0 : 1 + program_below(program, 40);
	const size_t q_floats = (size_t)info->q_heads * info->k_head_dim,
		     out_floats = (size_t)info->q_heads * info->v_head_dim;
	uint32_t seen[N_SEQUENCES], bad_row = 0;

	for (uint32_t s = 0; s < N_SEQUENCES; s++)
		seen[s] = q_len == 1 && program_below(program, 3) == 0
			? 0
			: q_len + program_below(program, BLOCKS_EACH * info->block_size - q_len + 1);
	program_draw(program, world->q, N_SEQUENCES * q_len * q_floats);

	const struct tqkv_table call = { .layer = layer,
		.n_sequences = N_SEQUENCES,
		.q_len = q_len,
		.table_stride = BLOCKS_EACH,
		.q_dtype = TQKV_F32,
		.out_dtype = TQKV_F32,
		.flags = TQKV_LSE,
		.q = world->q,
		.table = world->tables[0],
		.seen = seen,
		.window = window,
		.out = world->out,
		.lse = world->lse };

	CHECK(program,
		tqkv_decode_table(program->session, &call, TIMEOUT_MS, &bad_row, &program->err) == TQKV_OK);
	CHECK(program, bad_row == UINT32_MAX);
	for (uint32_t s = 0; s < N_SEQUENCES; s++) {
		gather(world, layer, world->tables[s], seen[s]);
		for (uint32_t r = 0; r < q_len; r++) {
			const size_t row = (size_t)s * q_len + r;

			program_check(program, world->q + row * q_floats, world->seen_k, world->seen_v,
				seen[s] == 0 ? 0 : seen[s] - q_len + 1 + r, window,
				world->out + row * out_floats, world->lse + row * info->q_heads);
		}
	}
}

/* What is refused, with what it names, and changes nothing: the decodes of later rounds see to that. */
static void refuse(struct world *world)
{
	struct program *program = &world->program;
	const uint32_t n_layers = program->info->n_layers;
	int64_t slots[5] = { 1, 2, world->n_slots, 3, 4 };
	struct tqkv_slots call = make_slots(world, 0, n_layers, 5, slots);
	int32_t table[2 * 3] = { 0, 1, -1, 0, N_BLOCKS, -1 };
	uint32_t seen[2] = { 2 * program->info->block_size, program->info->block_size + 1 }, bad_row = 0;
	struct tqkv_table decode_call = { .n_sequences = 2,
		.q_len = 1,
		.table_stride = 3,
		.q_dtype = TQKV_F32,
		.out_dtype = TQKV_F32,
		.q = world->q,
		.table = table,
		.seen = seen,
		.out = world->out };
	const struct tqkv_item item = { .sequence = 1 };
	struct tqkv_rows_result result = { 0 };

	CHECK(program,
		tqkv_update_slots(program->session, &call, TIMEOUT_MS, &bad_row, &program->err) ==
				TQKV_SLOT_OUT_OF_RANGE &&
			bad_row == 2 && !program->err.is_local);
	slots[2] = INT64_MAX;
	CHECK(program,
		tqkv_update_slots(program->session, &call, TIMEOUT_MS, &bad_row, &program->err) ==
				TQKV_SLOT_OUT_OF_RANGE &&
			bad_row == 2);
	CHECK(program,
		tqkv_decode_table(program->session, &decode_call, TIMEOUT_MS, &bad_row, &program->err) ==
				TQKV_SLOT_OUT_OF_RANGE &&
			bad_row == 4);
	/* Found by the library. */
	call.n_tokens = 0;
	CHECK(program,
		tqkv_update_slots(program->session, &call, TIMEOUT_MS, NULL, &program->err) == TQKV_BAD_ARG &&
			program->err.is_local);
	decode_call.table = NULL;
	CHECK(program,
		tqkv_decode_table(program->session, &decode_call, TIMEOUT_MS, NULL, &program->err) ==
			TQKV_BAD_ARG);
	/* The session has client tables, so it has no sequences of the daemon's. */
	CHECK(program,
		tqkv_truncate(program->session, &item, 1, TIMEOUT_MS, &result, &program->err) ==
			TQKV_BAD_STATE);
}

/* Not a number: refused with its row. What else came with it is undefined, so it goes where nobody looks. */
static void refuse_rows(struct world *world)
{
	struct program *program = &world->program;
	const int64_t first = (int64_t)(N_BLOCKS - 1) * program->info->block_size;
	const int64_t slots[3] = { first, first + 1, first + 2 };
	const struct tqkv_slots call = make_slots(world, 0, 1, 3, slots);
	uint32_t bad_row = 0;

	world->sent_v[v_floats(world) + 1] = NAN;
	CHECK(program,
		tqkv_update_slots(program->session, &call, TIMEOUT_MS, &bad_row, &program->err) ==
				TQKV_BAD_VALUE &&
			bad_row == 1);
}

static void begin(struct world *world, int argc, char **argv)
{
	const struct tqkv_open_params params = { .reserve_blocks = N_BLOCKS,
		.flags = TQKV_OPEN_CLIENT_TABLES };
	struct program *program = &world->program;

	memset(world, 0, sizeof(*world));
	program_begin(program, argc, argv, &params);

	const struct tqkv_session_info *info = program->info;
	const size_t n_queries = (size_t)N_SEQUENCES * Q_LEN_MAX * info->q_heads;

	CHECK(program, info->reserved_blocks == N_BLOCKS);
	world->n_slots = N_BLOCKS * info->block_size;
	world->k = program_alloc(program, info->n_layers * world->n_slots * k_floats(world), sizeof(float));
	world->v = program_alloc(program, info->n_layers * world->n_slots * v_floats(world), sizeof(float));
	world->sent_k = program_alloc(program, info->n_layers * TOKENS_MAX * k_floats(world), sizeof(float));
	world->sent_v = program_alloc(program, info->n_layers * TOKENS_MAX * v_floats(world), sizeof(float));
	world->q = program_alloc(program, n_queries * info->k_head_dim, sizeof(float));
	world->out = program_alloc(program, n_queries * info->v_head_dim, sizeof(float));
	world->lse = program_alloc(program, n_queries, sizeof(float));
	world->seen_k = program_alloc(program, world->n_slots * k_floats(world), sizeof(float));
	world->seen_v = program_alloc(program, world->n_slots * v_floats(world), sizeof(float));
	/* Every fifth block of a sequence; the last blocks are nobody's. */
	for (int32_t i = 0; i < N_SEQUENCES * BLOCKS_EACH; i++)
		world->tables[i % N_SEQUENCES][i / N_SEQUENCES] = i * 5 % (N_SEQUENCES * BLOCKS_EACH);
}

/* Every slot once, so that nothing that is seen was not written. */
static void fill(struct world *world)
{
	struct program *program = &world->program;
	const uint32_t n_layers = program->info->n_layers;
	int64_t slots[TOKENS_MAX];

	for (uint32_t first = 0; first < world->n_slots; first += TOKENS_MAX) {
		const uint32_t left = world->n_slots - first, n = left < TOKENS_MAX ? left : TOKENS_MAX;

		for (uint32_t t = 0; t < n; t++)
			slots[t] = first + t;

		const struct tqkv_slots call = make_slots(world, 0, n_layers, n, slots);

		CHECK(program,
			tqkv_update_slots(program->session, &call, TIMEOUT_MS, NULL, &program->err) ==
				TQKV_OK);
		for (uint32_t l = 0; l < n_layers; l++) {
			const size_t to = (size_t)l * world->n_slots + first, from = (size_t)l * n;

			memcpy(world->k + to * k_floats(world), world->sent_k + from * k_floats(world),
				n * k_floats(world) * sizeof(float));
			memcpy(world->v + to * v_floats(world), world->sent_v + from * v_floats(world),
				n * v_floats(world) * sizeof(float));
		}
	}
}

int main(int argc, char **argv)
{
	struct world world;

	begin(&world, argc, argv);
	fill(&world);
	for (uint32_t round = 0; round < world.program.n_rounds; round++) {
		update(&world);
		decode(&world);
		if (round % 16 == 7) {
			refuse(&world);
			refuse_rows(&world);
		}
	}
	free(world.k);
	free(world.v);
	free(world.sent_k);
	free(world.sent_v);
	free(world.q);
	free(world.out);
	free(world.lse);
	free(world.seen_k);
	free(world.seen_v);
	program_end(&world.program);
	return EXIT_SUCCESS;
}
