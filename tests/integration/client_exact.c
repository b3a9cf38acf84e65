/*
 * client_exact ADDRESS POOL BOUND [SEED [ROUNDS]]: the exact recent window through libtqkv. POOL has
 * exact_tokens 48 and ring blocks enough: chunked prompts, chunks larger than the ring, steps, cuts, refused
 * items and forks, each followed by TELL, READs of either copy and decodes, against what was sent and how
 * many of it the ring has.
 */
#include "core/number.h"
#include "tests/integration/client_program.h"

enum { N_RING = 48, CHUNK_MAX = 120, TOKENS_MAX = 400, Q_LEN_MAX = 4 };

struct world {
	struct program program;
	uint32_t length, n_exact;    /* of sequence 1 */
	float *k, *v;                /* sent: [layers, TOKENS_MAX, kv_heads, dim] */
	float *sent_k, *sent_v;      /* of a call */
	float *stored[2], *exact[2]; /* read: [layers, length, kv_heads, dim] of K and V */
	float *q, *out, *lse;
	uint32_t n_long, n_refused, n_cuts, n_steps;
	bool is_made;
};

static size_t floats(const struct world *world, bool is_v)
{
	const struct tqkv_session_info *info = world->program.info;

	return (size_t)info->kv_heads * (is_v ? info->v_head_dim : info->k_head_dim);
}

static uint32_t least(uint32_t a, uint32_t b)
{
	return a < b ? a : b;
}

/* n new tokens of layers [first, first + n_layers) in the call's order, and in the model. */
static struct tqkv_rows make_rows(
	struct world *world, const struct tqkv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	const uint32_t n = item->n_tokens;
	struct tqkv_rows rows = { .items = item,
		.n_items = 1,
		.layer_first = layer_first,
		.n_layers = n_layers,
		.k = world->sent_k,
		.v = world->sent_v,
		.k_bytes = n_layers * n * floats(world, false) * sizeof(float),
		.v_bytes = n_layers * n * floats(world, true) * sizeof(float),
		.k_dtype = TQKV_F32,
		.v_dtype = TQKV_F32 };

	program_draw(&world->program, world->sent_k, n_layers * n * floats(world, false));
	program_draw(&world->program, world->sent_v, n_layers * n * floats(world, true));
	for (uint32_t l = 0; l < n_layers; l++) {
		const size_t from = (size_t)l * n,
			     to = (size_t)(layer_first + l) * TOKENS_MAX + item->position;

		memcpy(world->k + to * floats(world, false), world->sent_k + from * floats(world, false),
			n * floats(world, false) * sizeof(float));
		memcpy(world->v + to * floats(world, true), world->sent_v + from * floats(world, true),
			n * floats(world, true) * sizeof(float));
	}
	return rows;
}

/* Tokens of a chunk take places of older ones, whatever becomes of them. */
static void count_exact(struct world *world, uint32_t n_tokens, bool is_refused)
{
	const uint32_t n = least(world->n_exact + n_tokens, N_RING);

	world->n_exact = !is_refused ? n : n > n_tokens ? n - n_tokens : 0;
	world->length += is_refused ? 0 : n_tokens;
}

static void append(struct world *world, uint32_t n_tokens, bool is_refused)
{
	struct program *program = &world->program;
	const struct tqkv_item item = { .sequence = 1,
		.position = world->length,
		.n_tokens = n_tokens,
		.flags = world->is_made ? 0 : TQKV_CREATE };
	struct tqkv_item_result done = { 0 };
	struct tqkv_rows_result result = { .items = &done };
	const struct tqkv_rows rows = make_rows(world, &item, 0, program->info->n_layers);

	if (is_refused)
		world->sent_k[(n_tokens - 1) * floats(world, false) + 3] = INFINITY;
	CHECK(program, tqkv_append(program->session, &rows, TIMEOUT_MS, &result, &program->err) == TQKV_OK);
	CHECK(program, done.status == (is_refused ? TQKV_BAD_VALUE : TQKV_OK));
	CHECK(program, !is_refused || (done.layer == 0 && done.row == n_tokens - 1));
	count_exact(world, n_tokens, is_refused);
	CHECK(program, is_refused || done.length == world->length);
	world->is_made = true; /* the first one is not refused */
	world->n_refused += is_refused;
	world->n_long += n_tokens > N_RING;
}

/* A step of a model: rows of a layer, and attention of the new tokens at once. The last layer's is checked.
 */
static void step(struct world *world, uint32_t n_tokens)
{
	struct program *program = &world->program;
	const struct tqkv_item item = {
		.sequence = 1, .position = world->length, .n_tokens = n_tokens, .q_len = n_tokens
	};
	const size_t q_floats = (size_t)program->info->q_heads * program->info->k_head_dim;

	for (uint32_t l = 0; l < program->info->n_layers; l++) {
		struct tqkv_item_result done = { 0 };
		struct tqkv_rows rows = make_rows(world, &item, l, 1);
		struct tqkv_rows_result result = { .items = &done,
			.out = world->out,
			.lse = world->lse,
			.out_bytes_max = (uint64_t)n_tokens * program->info->q_heads *
				program->info->v_head_dim * sizeof(float),
			.lse_bytes_max = (uint64_t)n_tokens * program->info->q_heads * sizeof(float) };

		program_draw(program, world->q, n_tokens * q_floats);
		rows.q = world->q;
		rows.q_bytes = n_tokens * q_floats * sizeof(float);
		rows.q_dtype = rows.out_dtype = TQKV_F32;
		rows.flags = TQKV_LSE;
		CHECK(program,
			tqkv_append_decode(program->session, &rows, TIMEOUT_MS, &result, &program->err) ==
				TQKV_OK);
		CHECK(program, done.status == TQKV_OK);
	}
	count_exact(world, n_tokens, false);
	world->n_steps++;
}

static void read_rows(struct world *world, uint64_t sequence, uint32_t length, bool is_exact, float *rows[2])
{
	struct program *program = &world->program;
	const uint32_t n_layers = program->info->n_layers;
	struct tqkv_read read = { .sequence = sequence,
		.n_layers = n_layers,
		.n_tokens = length,
		.k_dtype = TQKV_F32,
		.v_dtype = TQKV_F32,
		.flags = is_exact ? TQKV_READ_EXACT : 0,
		.k = rows[0],
		.v = rows[1],
		.k_bytes_max = (uint64_t)n_layers * TOKENS_MAX * floats(world, false) * sizeof(float),
		.v_bytes_max = (uint64_t)n_layers * TOKENS_MAX * floats(world, true) * sizeof(float) };

	CHECK(program, tqkv_read(program->session, &read, TIMEOUT_MS, &program->err) == TQKV_OK);
}

/* Exact rows are bf16 of what was sent, older ones what the pages hold. */
static void check_rows(struct world *world, uint32_t length, uint32_t n_exact)
{
	struct program *program = &world->program;

	for (uint32_t side = 0; side < 2; side++) {
		const size_t n_floats = floats(world, side == 1);
		const float *sent = side == 0 ? world->k : world->v;

		for (uint32_t l = 0; l < program->info->n_layers; l++) {
			const float *exact = world->exact[side] + l * length * n_floats,
				    *stored = world->stored[side] + l * length * n_floats;
			const size_t n_old = (length - n_exact) * n_floats;

			CHECK(program, memcmp(exact, stored, n_old * sizeof(float)) == 0);
			for (size_t i = n_old; i < length * n_floats; i++)
				CHECK(program,
					exact[i] ==
						kv_bf16_to_f32(
							kv_f32_to_bf16(sent[l * TOKENS_MAX * n_floats + i])));
		}
	}
}

/* A decode of the newest rows, against the rows that READ EXACT gave. */
static void check_decode(struct world *world, uint64_t sequence, uint32_t length)
{
	struct program *program = &world->program;
	const struct tqkv_session_info *info = program->info;
	const uint32_t q_len = 1 + program_below(program, least(Q_LEN_MAX, length));
	const uint32_t layer = program_below(program, info->n_layers);
	const uint32_t window = program_below(program, 2) ? 0 : 1 + program_below(program, 2 * N_RING);
	const size_t q_floats = (size_t)info->q_heads * info->k_head_dim,
		     out_floats = (size_t)info->q_heads * info->v_head_dim;
	const struct tqkv_item item = {
		.sequence = sequence, .position = TQKV_POSITION_PLANNED, .q_len = q_len
	};
	struct tqkv_item_result done = { 0 };
	struct tqkv_rows_result result = { .items = &done,
		.out = world->out,
		.lse = world->lse,
		.out_bytes_max = q_len * out_floats * sizeof(float),
		.lse_bytes_max = (uint64_t)q_len * info->q_heads * sizeof(float) };
	const struct tqkv_rows rows = { .items = &item,
		.n_items = 1,
		.layer_first = layer,
		.n_layers = 1,
		.q = world->q,
		.q_bytes = q_len * q_floats * sizeof(float),
		.q_dtype = TQKV_F32,
		.out_dtype = TQKV_F32,
		.flags = TQKV_LSE,
		.window = window };

	program_draw(program, world->q, q_len * q_floats);
	CHECK(program, tqkv_decode(program->session, &rows, TIMEOUT_MS, &result, &program->err) == TQKV_OK);
	CHECK(program, done.status == TQKV_OK);
	for (uint32_t r = 0; r < q_len; r++)
		program_check(program, world->q + r * q_floats,
			world->exact[0] + layer * length * floats(world, false),
			world->exact[1] + layer * length * floats(world, true), length - q_len + 1 + r,
			window, world->out + r * out_floats, world->lse + r * info->q_heads);
}

static void check_sequence(struct world *world, uint64_t sequence, uint32_t n_exact)
{
	struct program *program = &world->program;
	struct tqkv_sequence told;
	uint64_t next = 0;
	uint32_t n = 0;

	CHECK(program,
		tqkv_tell(program->session, sequence, 1, &told, NULL, &n, &next, TIMEOUT_MS, &program->err) ==
				TQKV_OK &&
			n == 1 && told.sequence == sequence);
	CHECK(program, told.length_min == world->length && told.length_max == world->length);
	CHECK(program, told.n_exact == n_exact);
	if (world->length == 0)
		return;
	read_rows(world, sequence, world->length, false, world->stored);
	read_rows(world, sequence, world->length, true, world->exact);
	check_rows(world, world->length, n_exact);
	check_decode(world, sequence, world->length);
}

/* A child has its parent's rows and none of its exact ones. */
static void fork_once(struct world *world)
{
	struct program *program = &world->program;
	uint32_t length = 0;

	CHECK(program,
		tqkv_fork_sequence(program->session, 2, 1, world->length, TIMEOUT_MS, &length,
			&program->err) == TQKV_OK);
	CHECK(program, length == world->length);
	check_sequence(world, 2, 0);
	CHECK(program, tqkv_free_sequence(program->session, 2, TIMEOUT_MS, &program->err) == TQKV_OK);
}

static void cut(struct world *world)
{
	struct program *program = &world->program;
	const uint32_t n = program_below(program, least(world->length, 2 * N_RING) + 1);
	const struct tqkv_item item = { .sequence = 1, .position = world->length - n };
	struct tqkv_item_result done = { 0 };
	struct tqkv_rows_result result = { .items = &done };

	CHECK(program,
		tqkv_truncate(program->session, &item, 1, TIMEOUT_MS, &result, &program->err) == TQKV_OK);
	CHECK(program, done.status == TQKV_OK);
	world->length -= n;
	world->n_exact = world->n_exact > n ? world->n_exact - n : 0;
	world->n_cuts++;
}

static void do_round(struct world *world, uint32_t round)
{
	struct program *program = &world->program;
	const uint32_t n = round % 4 == 1 ? N_RING + 1 + program_below(program, CHUNK_MAX - N_RING)
					  : 1 + program_below(program, N_RING);

	if (round % 7 == 6)
		cut(world);
	while (world->length + CHUNK_MAX > TOKENS_MAX)
		cut(world);
	if (round % 3 == 2 && world->length > 0)
		step(world, 1 + program_below(program, Q_LEN_MAX));
	else
		append(world, n, round % 5 == 4);
	check_sequence(world, 1, world->n_exact);
	if (round % 6 == 3 && world->length > 0)
		fork_once(world);
}

int main(int argc, char **argv)
{
	const struct tqkv_open_params params = { 0 };
	struct world world = { 0 };
	struct program *program = &world.program;

	program_begin(program, argc, argv, &params);

	const size_t n_rows = (size_t)program->info->n_layers * TOKENS_MAX;
	const size_t n_queries = (size_t)Q_LEN_MAX * program->info->q_heads;

	world.k = program_alloc(program, n_rows * floats(&world, false), sizeof(float));
	world.v = program_alloc(program, n_rows * floats(&world, true), sizeof(float));
	world.sent_k = program_alloc(program, n_rows * floats(&world, false), sizeof(float));
	world.sent_v = program_alloc(program, n_rows * floats(&world, true), sizeof(float));
	for (uint32_t side = 0; side < 2; side++) {
		world.stored[side] =
			program_alloc(program, n_rows * floats(&world, side == 1), sizeof(float));
		world.exact[side] = program_alloc(program, n_rows * floats(&world, side == 1), sizeof(float));
	}
	world.q = program_alloc(program, n_queries * program->info->k_head_dim, sizeof(float));
	world.out = program_alloc(program, n_queries * program->info->v_head_dim, sizeof(float));
	world.lse = program_alloc(program, n_queries, sizeof(float));
	append(&world, 5, false);
	for (uint32_t round = 0; round < program->n_rounds; round++)
		do_round(&world, round);
	/* Of 10 rounds at least one of each. */
	CHECK(program,
		world.n_long >= program->n_rounds / 10 && world.n_refused >= program->n_rounds / 10 &&
			world.n_cuts >= program->n_rounds / 10 && world.n_steps >= program->n_rounds / 10);
	for (uint32_t side = 0; side < 2; side++) {
		free(world.stored[side]);
		free(world.exact[side]);
	}
	free(world.k);
	free(world.v);
	free(world.sent_k);
	free(world.sent_v);
	free(world.q);
	free(world.out);
	free(world.lse);
	program_end(program);
	return EXIT_SUCCESS;
}
