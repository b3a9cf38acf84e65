/*
 * The exact recent window against plain lists: random appends (chunks larger than the ring among them),
 * refusals, packed rows, cuts, READs of either copy and decodes. A list says for every token which row is
 * stored and whether the ring has it, one token at a time; attention is computed over it in float64.
 */
#include <math.h>
#include <stdlib.h>

#include "core/attention.h"
#include "core/batch_run.h"
#include "core/domain_internal.h"
#include "core/plan.h"
#include "tests/lib/kv_core_test.h"

enum { N_LAYERS = 2, N_HEADS = 2, N_QUERIES = 4, DIM = 16, N_RING = 48, N_TOKENS = 700, N_OPS = 10000 };
#define BOUND 1e-5

struct token {
	float k[N_HEADS][DIM], v[N_HEADS][DIM]; /* as sent */
	bool is_held;                           /* by the ring: none behind it is not */
};

struct world {
	uint64_t seed;
	struct kv_test_domain test;
	struct kv_session *session;
	struct kv_batch_pages pages;
	struct kv_batch_scratch scratch;
	uint8_t *memory, *area;
	uint64_t area_bytes;
	struct token tokens[N_LAYERS][N_TOKENS];
	uint32_t lengths[N_LAYERS];
	uint32_t n_exact_reads, n_exact_decodes, n_long_chunks, n_cuts, n_moves;
};

static uint32_t below(struct world *world, uint32_t n)
{
	return (uint32_t)(kv_test_random(&world->seed) >> 32) % n;
}

static float number(struct world *world)
{
	return (float)((int32_t)below(world, 4001) - 2000) / 1000.0f;
}

/* ---- the lists ---- */

static const float *center_of(const struct world *world, uint32_t layer, uint32_t head)
{
	const float *center = world->test.pool->spec->layers[layer].k_center;

	return center ? center + (size_t)head * DIM : NULL;
}

/* The row as it is read: what the page decodes to, or bf16, with its centre. */
static void row_of(const struct world *world, uint32_t layer, uint32_t head, uint32_t t, bool is_v,
	bool is_exact, float *out)
{
	const struct kv_pool_spec *spec = world->test.pool->spec;
	const struct token *token = &world->tokens[layer][t];
	const struct kv_row_codec *page = is_v ? spec->layers[layer].v : spec->layers[layer].k;
	const struct kv_row_codec *codec = is_exact ? is_v ? spec->exact_v : spec->exact_k : page;
	const float *center = is_v ? NULL : center_of(world, layer, head);
	struct kv_row_scratch scratch;
	uint8_t bytes[KV_ROW_BYTES_MAX];
	float row[DIM];

	for (uint32_t i = 0; i < DIM; i++)
		row[i] = (is_v ? token->v : token->k)[head][i] - (center ? center[i] : 0);
	kv_assert_ok(kv_row_codec_encode(codec, row, bytes, &scratch));
	kv_row_codec_decode(codec, bytes, out, &scratch);
	for (uint32_t i = 0; center && i < DIM; i++)
		out[i] += center[i];
}

static uint32_t exact_lo(const struct world *world, uint32_t layer)
{
	uint32_t lo = world->lengths[layer];

	while (lo > 0 && world->tokens[layer][lo - 1].is_held)
		lo--;
	return lo;
}

/* Token t is written: it is in the ring, or it is not; what was in its place is not any more. */
static void put(struct world *world, uint32_t layer, uint32_t t, bool is_held)
{
	for (uint32_t i = 0; i < t; i++) {
		if (!is_held || i + N_RING <= t)
			world->tokens[layer][i].is_held = false;
	}
	world->tokens[layer][t].is_held = is_held;
}

/* ---- batches ---- */

static void check_output(struct world *world, uint32_t layer, uint32_t q_head, uint32_t n, uint32_t lo,
	const float *q, const float *out, float lse)
{
	static float k[N_TOKENS * DIM], v[N_TOKENS * DIM];
	const uint32_t head = q_head / (N_QUERIES / N_HEADS);
	double expected[DIM], expected_lse, difference = 0, norm = 0;

	for (uint32_t t = 0; t < n; t++) {
		row_of(world, layer, head, t, false, t >= lo, k + t * DIM);
		row_of(world, layer, head, t, true, t >= lo, v + t * DIM);
	}
	const struct kv_attention_exact_input input = { .q = q,
		.k = k,
		.v = v,
		.k_stride = DIM,
		.v_stride = DIM,
		.k_dim = DIM,
		.v_dim = DIM,
		.tokens = { .hi = n },
		.scale = (double)world->test.pool->spec->layers[layer].scale };

	kv_attention_exact(&input, expected, &expected_lse);
	for (uint32_t i = 0; i < DIM; i++) {
		difference += (expected[i] - (double)out[i]) * (expected[i] - (double)out[i]);
		norm += expected[i] * expected[i];
	}
	ck_assert_msg(sqrt(difference) <= BOUND * (sqrt(norm) + 1e-3), "output over %u tokens, %u exact: %g",
		n, n - lo, sqrt(difference / norm));
	ck_assert_msg(fabs(expected_lse - (double)lse) <= 1e-5 * (1 + fabs(expected_lse)), "lse");
}

/* Plans, runs and finishes one item of a batch of its own; returns its status. */
static enum kv_status run_item(
	struct world *world, struct kv_item *item, const struct kv_frame_rows *frame, bool is_refused)
{
	struct kv_plan plan;
	uint32_t result_idx;

	kv_item_plan(world->session, item, frame->layer_first, frame->n_layers, 1);
	if (item->status != KV_OK)
		return (enum kv_status)item->status;
	kv_plan_begin(&plan, world->test.pool, world->area, world->area_bytes);
	ck_assert(kv_plan_add(&plan, frame, item, &result_idx));
	kv_batch_run(&world->pages, &plan.batch, &world->scratch);
	item->status = is_refused ? KV_BAD_VALUE : plan.batch.results[result_idx].status;
	kv_plan_end(&plan);
	kv_item_finish(item, frame->layer_first, frame->n_layers);
	return (enum kv_status)item->status;
}

static void do_append(struct world *world)
{
	static float k[N_LAYERS * N_TOKENS * N_HEADS * DIM], v[N_LAYERS * N_TOKENS * N_HEADS * DIM];
	static uint8_t packed[N_LAYERS * N_TOKENS * N_HEADS * KV_ROW_BYTES_MAX];
	const uint32_t first = below(world, 4) ? 0 : below(world, N_LAYERS);
	const uint32_t n_layers =
		world->lengths[0] == world->lengths[1] && first == 0 ? 1 + below(world, 2) : 1;
	const uint32_t n = 1 + below(world, below(world, 6) ? 9 : 3 * N_RING);
	const bool is_refused = below(world, 8) == 0, is_packed = below(world, 10) == 0;
	struct kv_item item = { .sequence_id = 7,
		.position = world->lengths[first],
		.n_tokens = n,
		.kind = KV_ITEM_APPEND,
		.flags = is_packed ? KV_ITEM_PACKED : 0 };
	const struct kv_frame_rows frame = { .layer_first = first,
		.n_layers = n_layers,
		.n_tokens_total = n,
		.k_dtype = is_packed ? KV_DTYPE_PACKED : KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.k = is_packed ? packed : (uint8_t *)k,
		.v = (uint8_t *)v };
	struct kv_row_scratch scratch;

	if (world->lengths[first] + n > N_TOKENS)
		return;
	if (world->lengths[0] == 0 && world->lengths[1] == 0)
		item.flags |= KV_ITEM_CREATE;
	for (uint32_t i = 0; i < n_layers * n * N_HEADS * DIM; i++) {
		k[i] = number(world);
		v[i] = number(world);
	}
	for (uint32_t l = 0; l < n_layers; l++) {
		const struct kv_row_codec *codec = world->test.pool->spec->layers[first + l].k;

		for (uint32_t t = 0; t < n; t++) {
			for (uint32_t h = 0; h < N_HEADS; h++) {
				const size_t row = (l * n + t) * N_HEADS + h;
				const float *center = center_of(world, first + l, h);
				float centred[DIM];

				for (uint32_t i = 0; i < DIM; i++)
					centred[i] = k[row * DIM + i] - (center ? center[i] : 0);
				kv_assert_ok(kv_row_codec_encode(
					codec, centred, packed + row * codec->row_bytes, &scratch));
			}
		}
	}

	const enum kv_status status = run_item(world, &item, &frame, is_refused);

	if (status == KV_POOL_FULL)
		return;
	ck_assert_int_eq(status, is_refused ? KV_BAD_VALUE : KV_OK);
	world->n_long_chunks += n > N_RING;
	for (uint32_t l = 0; l < n_layers; l++) {
		const uint32_t length = world->lengths[first + l];

		/* A refused append took the places of older tokens all the same. */
		for (uint32_t t = length; t < length + n; t++) {
			struct token *token = &world->tokens[first + l][t];

			put(world, first + l, t, !is_packed);
			for (uint32_t h = 0; h < N_HEADS; h++) {
				memcpy(token->k[h], k + ((l * n + t - length) * N_HEADS + h) * DIM, DIM * 4);
				memcpy(token->v[h], v + ((l * n + t - length) * N_HEADS + h) * DIM, DIM * 4);
			}
		}
		world->lengths[first + l] += is_refused ? 0 : n;
	}
}

static void do_read(struct world *world)
{
	static float k[N_TOKENS * N_HEADS * DIM], v[N_TOKENS * N_HEADS * DIM];
	const uint32_t layer = below(world, N_LAYERS), length = world->lengths[layer];
	const bool is_exact = below(world, 3) > 0;
	struct kv_item item = {
		.sequence_id = 7, .kind = KV_ITEM_READ, .flags = is_exact ? KV_ITEM_EXACT : 0
	};
	float row[DIM];

	if (length == 0)
		return;
	item.position = length > 60 && below(world, 2) ? length - 60 : below(world, length);
	item.n_tokens = 1 + below(world, length - item.position);

	const struct kv_frame_rows frame = { .layer_first = layer,
		.n_layers = 1,
		.n_tokens_total = item.n_tokens,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.k = (uint8_t *)k,
		.v = (uint8_t *)v };

	kv_assert_ok(run_item(world, &item, &frame, false));
	for (uint32_t t = 0; t < item.n_tokens; t++) {
		const uint32_t position = item.position + t;
		const bool from_ring = is_exact && position >= exact_lo(world, layer);

		world->n_exact_reads += from_ring;
		for (uint32_t h = 0; h < N_HEADS; h++) {
			row_of(world, layer, h, position, false, from_ring, row);
			ck_assert_mem_eq(row, k + (t * N_HEADS + h) * DIM, sizeof(row));
			row_of(world, layer, h, position, true, from_ring, row);
			ck_assert_mem_eq(row, v + (t * N_HEADS + h) * DIM, sizeof(row));
		}
	}
}

/* Rows of the exact window out to `rows`, or in. */
static void move_exact(struct world *world, uint32_t layer, uint32_t n, bool is_import, uint8_t *rows)
{
	const struct kv_sequence *sequence = kv_sequence_find(world->session, 7);
	struct kv_plan plan;

	kv_plan_begin(&plan, world->test.pool, world->area, world->area_bytes);
	ck_assert(kv_plan_has_room_exact(&plan, 1));
	kv_plan_add_exact_move(&plan, sequence, layer, 1, world->lengths[layer] - n, n, is_import, rows);
	kv_test_audit(world->test.domain, (struct kv_plan *const[]){ &plan }, 1);
	kv_batch_run(&world->pages, &plan.batch, &world->scratch);
	ck_assert_int_eq(plan.batch.results[0].status, KV_OK);
	kv_plan_end(&plan);
}

/* What left comes back bit by bit, k_center or not; other numbers in between are there as they were put. */
static void do_move(struct world *world)
{
	static uint8_t rows[2 * N_RING * N_HEADS * DIM * 2], other[sizeof(rows)], seen[sizeof(rows)];
	const uint32_t layer = below(world, N_LAYERS);
	const uint32_t n = world->lengths[layer] - exact_lo(world, layer);
	const uint64_t n_bytes = kv_plan_exact_bytes(world->test.pool->spec, 1, n);

	if (n == 0)
		return;
	ck_assert_uint_le(n_bytes, sizeof(rows));
	move_exact(world, layer, n, false, rows);
	for (uint64_t i = 0; i < n_bytes; i += 2) {
		other[i] = (uint8_t)below(world, 256);
		other[i + 1] = (uint8_t)(0x30 + below(world, 16));
	}
	move_exact(world, layer, n, true, other);
	move_exact(world, layer, n, false, seen);
	ck_assert_mem_eq(seen, other, n_bytes);
	move_exact(world, layer, n, true, rows);
	world->n_moves++;
}

static void do_decode(struct world *world)
{
	const uint32_t layer = below(world, N_LAYERS), length = world->lengths[layer];
	const uint32_t q_len = 1 + below(world, 3);
	struct kv_item item = { .sequence_id = 7, .kind = KV_ITEM_DECODE, .q_len = q_len };
	float q[3 * N_QUERIES * DIM], out[3 * N_QUERIES * DIM], lse[3 * N_QUERIES];
	const struct kv_frame_rows frame = { .layer_first = layer,
		.n_layers = 1,
		.n_q_total = q_len,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.q = (uint8_t *)q,
		.out = (uint8_t *)out,
		.lse = lse };

	if (length < q_len)
		return;
	item.position = below(world, 4) ? length : q_len + below(world, length - q_len + 1);
	for (uint32_t i = 0; i < q_len * N_QUERIES * DIM; i++)
		q[i] = number(world);
	kv_assert_ok(run_item(world, &item, &frame, false));

	const uint32_t row = below(world, q_len), h = below(world, N_QUERIES);
	const uint32_t n = item.seen - q_len + 1 + row;
	const uint32_t lo = exact_lo(world, layer) < n ? exact_lo(world, layer) : n;

	world->n_exact_decodes += lo < n;
	check_output(world, layer, h, n, lo, q + (row * N_QUERIES + h) * DIM,
		out + (row * N_QUERIES + h) * DIM, lse[row * N_QUERIES + h]);
}

static void do_truncate(struct world *world)
{
	const uint32_t most = world->lengths[0] > world->lengths[1] ? world->lengths[0] : world->lengths[1];
	const uint32_t length = below(world, 3) ? most - below(world, most / 8 + 1) : below(world, most + 1);

	kv_assert_ok(kv_sequence_truncate(world->session, 7, length));
	world->n_cuts++;
	for (uint32_t l = 0; l < N_LAYERS; l++) {
		if (world->lengths[l] > length)
			world->lengths[l] = length;
		for (uint32_t t = world->lengths[l]; t < N_TOKENS; t++)
			world->tokens[l][t].is_held = false;
	}
	kv_test_release_all(world->test.domain);
}

/* ---- ---- */

static struct kv_pool_spec *make_spec(const char *format, bool has_center, uint32_t n_ring_blocks)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { 0 };
	json_t *json = json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:i, s:i, s:i}", "name", "p",
		"layers", N_LAYERS, "q_heads", N_QUERIES, "kv_heads", N_HEADS, "head_dim", DIM, "k", format,
		"v", format, "block_size", 16, "blocks", 60, "exact_tokens", N_RING, "exact_blocks",
		(int)n_ring_blocks);

	if (has_center) {
		json_t *center = json_array();

		for (uint32_t l = 0; l < N_LAYERS; l++) {
			json_t *heads = json_array();

			for (uint32_t h = 0; h < N_HEADS; h++) {
				json_t *row = json_array();

				for (uint32_t i = 0; i < DIM; i++)
					json_array_append_new(
						row, json_real(0.25 * (double)(l + h) - 0.125 * i));
				json_array_append_new(heads, row);
			}
			json_array_append_new(center, heads);
		}
		json_object_set_new(json, "k_center", center);
	}
	ck_assert_msg(kv_pool_spec_create(json, &spec, &err) == KV_OK, "%s", err.msg);
	json_decref(json);
	return spec;
}

static void run(struct world *world, uint64_t seed, const char *format, bool has_center, uint32_t n_ops)
{
	static const struct kv_domain_limits limits = {
		.sessions_max = 2, .sequences_max = 4, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct kv_pool_spec *spec = make_spec(format, has_center, 3);
	uint64_t n_bytes = 0;

	memset(world, 0, sizeof(*world));
	world->seed = seed;
	world->test.source = (struct kv_test_source){ { &kv_test_source_ops }, seed };
	kv_assert_ok(kv_domain_create(&limits, &world->test.source.base, &world->test.domain, NULL));
	kv_assert_ok(kv_domain_pool_add(world->test.domain, spec, NULL, 0, 0, &world->test.pool, NULL));
	world->session = kv_test_open(&world->test);
	ck_assert(kv_batch_pages_bytes(spec, &n_bytes));
	world->memory = aligned_alloc(4096, (n_bytes + 4095) / 4096 * 4096);
	memset(world->memory, 0xA5, n_bytes);
	kv_assert_ok(kv_batch_pages_init(&world->pages, spec, world->memory, NULL));
	world->area_bytes = kv_plan_area_bytes(spec, 1 << 20) + kv_plan_moves_bytes(spec);
	world->area = aligned_alloc(4096, (world->area_bytes + 4095) / 4096 * 4096);
	for (uint32_t i = 0; i < n_ops; i++) {
		const uint32_t dice = below(world, 100);

		if (world->lengths[0] + world->lengths[1] == 0 || dice < 50)
			do_append(world);
		else if (dice < 70)
			do_read(world);
		else if (dice < 87)
			do_decode(world);
		else if (dice < 89)
			do_move(world);
		else
			do_truncate(world);
		if (i % 16 == 0)
			kv_test_audit(world->test.domain, NULL, 0);
		if (world->lengths[0] + world->lengths[1] > 0)
			for (uint32_t l = 0; l < N_LAYERS; l++)
				ck_assert_uint_eq(kv_sequence_n_exact(kv_sequence_find(world->session, 7), l),
					world->lengths[l] - exact_lo(world, l));
	}
	kv_session_close(world->test.domain, world->session, false);
	kv_test_release_all(world->test.domain);
	kv_batch_pages_finish(&world->pages);
	free(world->memory);
	free(world->area);
	kv_test_domain_finish(&world->test);
}

/* Every row that is read and every output is what the lists say, over 10^4 random operations per pool. */
START_TEST(test_exact_window_agrees_with_lists)
{
	static struct world world;
	static const struct {
		const char *format;
		bool has_center;
	} rows[] = { { "tq4", false }, { "tq3", true }, { "tqp3", true } };

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		const uint64_t seed = 0x5EED2000 + i;

		printf("test_exact_window: seed %llx\n", (unsigned long long)seed);
		run(&world, seed, rows[i].format, rows[i].has_center, N_OPS / KV_LENGTH(rows) + 1);
		ck_assert_uint_ge(world.n_exact_reads, 1000);
		ck_assert_uint_ge(world.n_exact_decodes, 100);
		ck_assert_uint_ge(world.n_long_chunks, 20);
		ck_assert_uint_ge(world.n_cuts, 100);
		ck_assert_uint_ge(world.n_moves, 20);
	}
}
END_TEST

/*
 * An append that would take the places of tokens that an earlier decode of the batch reads does not fit into
 * the batch; one that takes none of them does.
 */
START_TEST(test_exact_window_keeps_what_the_batch_reads)
{
	static struct world world;
	static float rows[N_LAYERS * N_TOKENS * N_HEADS * DIM];
	struct kv_pool_spec *spec = make_spec("tq4", false, 30);
	static const struct kv_domain_limits limits = {
		.sessions_max = 2, .sequences_max = 4, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct kv_frame_rows frame = { .n_layers = 1,
		.n_tokens_total = 40,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.k = (uint8_t *)rows,
		.v = (uint8_t *)rows,
		.q = (uint8_t *)rows,
		.out = (uint8_t *)rows };
	struct kv_item first = {
		.sequence_id = 7, .n_tokens = 40, .kind = KV_ITEM_APPEND, .flags = KV_ITEM_CREATE
	};
	struct kv_item decode = {
		.sequence_id = 7, .position = KV_LENGTH_PLANNED, .kind = KV_ITEM_DECODE, .q_len = 1
	};
	struct kv_item fits = { .sequence_id = 7, .position = 40, .n_tokens = 8, .kind = KV_ITEM_APPEND };
	struct kv_item waits = { .sequence_id = 7, .position = 48, .n_tokens = 1, .kind = KV_ITEM_APPEND };
	struct kv_plan plan;
	uint32_t result_idx;

	world.test.source = (struct kv_test_source){ { &kv_test_source_ops }, 1 };
	kv_assert_ok(kv_domain_create(&limits, &world.test.source.base, &world.test.domain, NULL));
	kv_assert_ok(kv_domain_pool_add(world.test.domain, spec, NULL, 0, 0, &world.test.pool, NULL));
	world.session = kv_test_open(&world.test);
	world.area_bytes = kv_plan_area_bytes(spec, 1 << 20);
	world.area = aligned_alloc(4096, (world.area_bytes + 4095) / 4096 * 4096);
	kv_item_plan(world.session, &first, 0, 1, 1);
	kv_item_plan(world.session, &decode, 0, 1, 1);
	kv_item_plan(world.session, &fits, 0, 1, 1);
	kv_item_plan(world.session, &waits, 0, 1, 1);
	kv_plan_begin(&plan, world.test.pool, world.area, world.area_bytes);
	ck_assert(kv_plan_add(&plan, &frame, &first, &result_idx));
	ck_assert(kv_plan_add(&plan, &frame, &decode, &result_idx));
	ck_assert(kv_plan_add(&plan, &frame, &fits, &result_idx));
	ck_assert(!kv_plan_add(&plan, &frame, &waits, &result_idx)); /* token 48 goes where token 0 is */
	kv_plan_end(&plan);
	kv_item_finish(&first, 0, 1);
	kv_item_finish(&decode, 0, 1);
	kv_item_finish(&fits, 0, 1);
	kv_plan_begin(&plan, world.test.pool, world.area, world.area_bytes);
	ck_assert(kv_plan_add(&plan, &frame, &waits, &result_idx));
	kv_plan_end(&plan);
	kv_item_finish(&waits, 0, 1);
	kv_test_domain_finish(&world.test);
	free(world.area);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("exact_window");
	TCase *tcase = tcase_create("exact_window");

	tcase_add_test(tcase, test_exact_window_agrees_with_lists);
	tcase_add_test(tcase, test_exact_window_keeps_what_the_batch_reads);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
