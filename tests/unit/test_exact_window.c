/*
 * The exact recent window against plain lists: random appends (chunks larger than the ring among them),
 * refusals, packed rows, cuts, READs of either copy and decodes. A list says for every token which row is
 * stored and whether the ring has it, one token at a time; attention is computed over it in float64. On the
 * scalar backend and on every set of fast kernels that this processor runs; built with TEST_CUDA on a GPU
 * (exit 77 where there is none) or, with TEST_ON_HOST, its kernels on this processor.
 *
 * test_exact_window [N_OPS]
 */
#include <math.h>
#include <poll.h>
#include <stdlib.h>
#include <unistd.h>

#include "core/attention.h"
#include "core/backend_cpu.h"
#include "core/domain_internal.h"
#include "core/fast.h"
#include "core/plan.h"
#include "tests/lib/kv_core_test.h"
#ifdef TEST_CUDA
#include "gpu/backend_cuda.h"
#endif

enum { N_LAYERS = 2, N_HEADS = 2, N_QUERIES = 4, DIM = 16, N_RING = 48, N_TOKENS = 700, Q_LEN_MAX = 3 };
#ifdef TEST_ON_HOST
static uint32_t n_ops_in_all = 800; /* a hundred times slower */
#else
static uint32_t n_ops_in_all = 10000;
#endif
#define AREA_ITEM_BYTES (1u << 20)
#define ARENA_BYTES     (4u << 20)

enum { PAGED, EXACT, N_KINDS };

struct token {
	float k[N_KINDS][N_HEADS][DIM], v[N_KINDS][N_HEADS][DIM]; /* as they are read */
	bool is_held;                                             /* by the ring: none behind it is not */
};

/* The tensors of one item; the backend's memory. */
struct tensors {
	float k[N_LAYERS * N_TOKENS * N_HEADS * DIM], v[N_LAYERS * N_TOKENS * N_HEADS * DIM];
	uint8_t packed[N_LAYERS * N_TOKENS * N_HEADS * KV_ROW_BYTES_MAX];
	float q[Q_LEN_MAX * N_QUERIES * DIM], out[Q_LEN_MAX * N_QUERIES * DIM], lse[Q_LEN_MAX * N_QUERIES];
	uint8_t rows[3][N_RING * N_HEADS * DIM * 2 * sizeof(uint16_t)]; /* of rings: K and V of a layer */
};

struct world {
	uint64_t seed;
	struct kv_test_domain test;
	struct kv_session *session;
	struct kv_backend *backend;
	double bound, exact_bound; /* relative error of outputs; of those over exact rows only */
	struct tensors *tensors;
	uint8_t *area;
	uint64_t area_bytes;
	struct token tokens[N_LAYERS][N_TOKENS];
	uint32_t lengths[N_LAYERS];
	uint32_t n_exact_reads, n_exact_decodes, n_all_exact, n_long_chunks, n_refused, n_cuts, n_moves;
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

/* An assertion that holds is a system call; rows are too many for that. */
static void encode(const struct kv_row_codec *codec, const float *row, uint8_t *bytes)
{
	struct kv_row_scratch scratch;

	if (kv_row_codec_encode(codec, row, bytes, &scratch) != KV_OK)
		ck_abort_msg("a row cannot be encoded");
}

/* The row as it is read: what the page decodes to, or bf16, with its centre. */
static void make_row(const struct world *world, uint32_t layer, uint32_t head, bool is_v, bool is_exact,
	const float *sent, float *out)
{
	const struct kv_pool_spec *spec = world->test.pool->spec;
	const struct kv_row_codec *page = is_v ? spec->layers[layer].v : spec->layers[layer].k;
	const struct kv_row_codec *codec = is_exact ? is_v ? spec->exact_v : spec->exact_k : page;
	const float *center = is_v ? NULL : center_of(world, layer, head);
	struct kv_row_scratch scratch;
	uint8_t bytes[KV_ROW_BYTES_MAX];
	float row[DIM];

	for (uint32_t i = 0; i < DIM; i++)
		row[i] = sent[i] - (center ? center[i] : 0);
	encode(codec, row, bytes);
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
static void put(struct world *world, uint32_t layer, uint32_t t, bool is_held, const float *k, const float *v)
{
	struct token *token = &world->tokens[layer][t];

	for (uint32_t i = 0; i < t; i++) {
		if (!is_held || i + N_RING <= t)
			world->tokens[layer][i].is_held = false;
	}
	token->is_held = is_held;
	for (uint32_t h = 0; h < N_HEADS; h++) {
		for (uint32_t kind = 0; kind < N_KINDS; kind++) {
			make_row(world, layer, h, false, kind == EXACT, k + h * DIM, token->k[kind][h]);
			make_row(world, layer, h, true, kind == EXACT, v + h * DIM, token->v[kind][h]);
		}
	}
}

/* ---- batches ---- */

static void check_output(struct world *world, uint32_t layer, uint32_t q_head, uint32_t n, uint32_t lo,
	const float *q, const float *out, float lse)
{
	static float k[N_TOKENS * DIM], v[N_TOKENS * DIM];
	const uint32_t head = q_head / (N_QUERIES / N_HEADS);
	const double bound = lo == 0 ? world->exact_bound : world->bound;
	double expected[DIM], expected_lse, difference = 0, norm = 0;

	for (uint32_t t = 0; t < n; t++) {
		memcpy(k + t * DIM, world->tokens[layer][t].k[t >= lo][head], DIM * sizeof(*k));
		memcpy(v + t * DIM, world->tokens[layer][t].v[t >= lo][head], DIM * sizeof(*v));
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
	ck_assert_msg(sqrt(difference) <= bound * (sqrt(norm) + 1e-3), "output over %u tokens, %u exact: %g",
		n, n - lo, sqrt(difference / norm));
	ck_assert_msg(fabs(expected_lse - (double)lse) <= bound * (1 + fabs(expected_lse)),
		"log-sum-exp over %u tokens, %u exact: %g, not %g", n, n - lo, (double)lse, expected_lse);
}

static void run_batch(struct world *world, struct kv_batch *batch)
{
	const struct kv_backend_ops *ops = world->backend->ops;
	struct pollfd finished = { .fd = ops->event_fd(world->backend), .events = POLLIN };
	struct kv_batch *reaped = NULL;
	uint64_t count;

	kv_assert_ok(ops->submit(world->backend, batch, NULL));
	while (!(reaped = ops->reap(world->backend))) {
		if (ops->will_sleep)
			ops->will_sleep(world->backend);
		ck_assert_int_eq(poll(&finished, 1, 20000), 1);
		(void)!read(finished.fd, &count, sizeof(count));
	}
	ck_assert_ptr_eq(reaped, batch);
	ck_assert_int_eq(batch->status, KV_OK);
}

/* Plans, runs and finishes one item of a batch of its own; returns its status. */
static enum kv_status run_item(struct world *world, struct kv_item *item, const struct kv_frame_rows *frame)
{
	struct kv_plan plan;
	uint32_t result_idx;

	kv_item_plan(world->session, item, frame->layer_first, frame->n_layers, 1);
	if (item->status != KV_OK)
		return (enum kv_status)item->status;
	kv_plan_begin(&plan, world->test.pool, world->area, world->area_bytes);
	ck_assert(kv_plan_add(&plan, frame, item, &result_idx));
	run_batch(world, &plan.batch);
	item->status = plan.batch.results[result_idx].status;
	kv_plan_end(&plan);
	kv_item_finish(item, frame->layer_first, frame->n_layers);
	return (enum kv_status)item->status;
}

/* Random rows of n tokens on some layers, and the packed rows of those of K. */
static void draw_rows(struct world *world, uint32_t first, uint32_t n_layers, uint32_t n)
{
	struct tensors *tensors = world->tensors;

	for (uint32_t i = 0; i < n_layers * n * N_HEADS * DIM; i++) {
		tensors->k[i] = number(world);
		tensors->v[i] = number(world);
	}
	for (uint32_t row = 0; row < n_layers * n * N_HEADS; row++) {
		const uint32_t layer = first + row / (n * N_HEADS);
		const struct kv_row_codec *codec = world->test.pool->spec->layers[layer].k;
		const float *center = center_of(world, layer, row % N_HEADS);
		float centred[DIM];

		for (uint32_t i = 0; i < DIM; i++)
			centred[i] = tensors->k[row * DIM + i] - (center ? center[i] : 0);
		encode(codec, centred, tensors->packed + (size_t)row * codec->row_bytes);
	}
}

static void do_append(struct world *world)
{
	struct tensors *tensors = world->tensors;
	const uint32_t first = below(world, 4) ? 0 : below(world, N_LAYERS);
	const uint32_t n_layers =
		world->lengths[0] == world->lengths[1] && first == 0 ? 1 + below(world, 2) : 1;
	const uint32_t n = 1 + below(world, below(world, 6) ? 9 : 3 * N_RING);
	const bool is_refused = below(world, 8) == 0, is_packed = below(world, 10) == 0;
	const uint32_t bad = below(world, n_layers * n * N_HEADS * DIM);
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
		.k = is_packed ? tensors->packed : (uint8_t *)tensors->k,
		.v = (uint8_t *)tensors->v };

	if (world->lengths[first] + n > N_TOKENS)
		return;
	if (world->lengths[0] == 0 && world->lengths[1] == 0)
		item.flags |= KV_ITEM_CREATE;
	draw_rows(world, first, n_layers, n);

	const float kept = tensors->v[bad];

	if (is_refused)
		tensors->v[bad] = NAN;

	const enum kv_status status = run_item(world, &item, &frame);

	if (status == KV_POOL_FULL)
		return;
	ck_assert_int_eq(status, is_refused ? KV_BAD_VALUE : KV_OK);
	tensors->v[bad] = kept;
	world->n_long_chunks += n > N_RING;
	world->n_refused += is_refused;
	/* A refused append took the places of older tokens all the same. */
	for (uint32_t row = 0; row < n_layers * n; row++)
		put(world, first + row / n, item.position + row % n, !is_packed,
			tensors->k + (size_t)row * N_HEADS * DIM, tensors->v + (size_t)row * N_HEADS * DIM);
	for (uint32_t l = first; !is_refused && l < first + n_layers; l++)
		world->lengths[l] += n;
}

static void do_read(struct world *world)
{
	struct tensors *tensors = world->tensors;
	const uint32_t layer = below(world, N_LAYERS), length = world->lengths[layer];
	const bool is_exact = below(world, 3) > 0;
	struct kv_item item = {
		.sequence_id = 7, .kind = KV_ITEM_READ, .flags = is_exact ? KV_ITEM_EXACT : 0
	};

	if (length == 0)
		return;
	item.position = length > 60 && below(world, 2) ? length - 60 : below(world, length);
	item.n_tokens = 1 + below(world, length - item.position);

	const struct kv_frame_rows frame = { .layer_first = layer,
		.n_layers = 1,
		.n_tokens_total = item.n_tokens,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.k = (uint8_t *)tensors->k,
		.v = (uint8_t *)tensors->v };

	kv_assert_ok(run_item(world, &item, &frame));
	for (uint32_t t = 0; t < item.n_tokens; t++) {
		const uint32_t position = item.position + t;
		const bool from_ring = is_exact && position >= exact_lo(world, layer);

		world->n_exact_reads += from_ring;
		if (memcmp(world->tokens[layer][position].k[from_ring],
			    tensors->k + (size_t)t * N_HEADS * DIM, sizeof(world->tokens[0][0].k[0])) != 0 ||
			memcmp(world->tokens[layer][position].v[from_ring],
				tensors->v + (size_t)t * N_HEADS * DIM,
				sizeof(world->tokens[0][0].v[0])) != 0)
			ck_abort_msg("layer %u, token %u of %u, %s: not the row that was stored", layer,
				position, length, from_ring ? "exact" : "from its page");
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
	run_batch(world, &plan.batch);
	ck_assert_int_eq(plan.batch.results[0].status, KV_OK);
	kv_plan_end(&plan);
}

/* What left comes back bit by bit, k_center or not; other numbers in between are there as they were put. */
static void do_move(struct world *world)
{
	uint8_t *rows = world->tensors->rows[0], *other = world->tensors->rows[1],
		*seen = world->tensors->rows[2];
	const uint32_t layer = below(world, N_LAYERS);
	const uint32_t n = world->lengths[layer] - exact_lo(world, layer);
	const uint64_t n_bytes = kv_plan_exact_bytes(world->test.pool->spec, 1, n);

	if (n == 0)
		return;
	ck_assert_uint_le(n_bytes, sizeof(world->tensors->rows[0]));
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
	const uint32_t q_len = 1 + below(world, Q_LEN_MAX);
	struct kv_item item = { .sequence_id = 7, .kind = KV_ITEM_DECODE, .q_len = q_len };
	struct tensors *tensors = world->tensors;
	const struct kv_frame_rows frame = { .layer_first = layer,
		.n_layers = 1,
		.n_q_total = q_len,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.q = (uint8_t *)tensors->q,
		.out = (uint8_t *)tensors->out,
		.lse = tensors->lse };

	if (length < q_len)
		return;
	item.position = below(world, 4) ? length : q_len + below(world, length - q_len + 1);
	for (uint32_t i = 0; i < q_len * N_QUERIES * DIM; i++)
		tensors->q[i] = number(world);
	kv_assert_ok(run_item(world, &item, &frame));

	const uint32_t row = below(world, q_len), h = below(world, N_QUERIES);
	const uint32_t n = item.seen - q_len + 1 + row;
	const uint32_t lo = exact_lo(world, layer) < n ? exact_lo(world, layer) : n;

	world->n_exact_decodes += lo < n;
	world->n_all_exact += lo == 0;
	check_output(world, layer, h, n, lo, tensors->q + (row * N_QUERIES + h) * DIM,
		tensors->out + (row * N_QUERIES + h) * DIM, tensors->lse[row * N_QUERIES + h]);
}

static void do_truncate(struct world *world)
{
	const uint32_t most = world->lengths[0] > world->lengths[1] ? world->lengths[0] : world->lengths[1];
	const uint32_t dice = below(world, 9);
	const uint32_t length = dice < 6 ? most - below(world, most / 8 + 1)
		: dice < 8               ? below(world, most + 1)
					 : 0;

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

static struct kv_pool_spec *make_spec(const char *format, bool has_center)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { 0 };
	json_t *json = json_pack("{s:s, s:i, s:i, s:i, s:i, s:s, s:s, s:i, s:i, s:i, s:i}", "name", "p",
		"layers", N_LAYERS, "q_heads", N_QUERIES, "kv_heads", N_HEADS, "head_dim", DIM, "k", format,
		"v", format, "block_size", 16, "blocks", 60, "exact_tokens", N_RING, "exact_blocks", 3);

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

static void open_world(
	struct world *world, struct kv_backend *backend, uint64_t seed, struct kv_pool_spec *spec)
{
	static const struct kv_domain_limits limits = {
		.sessions_max = 2, .sequences_max = 4, .lease_ms = 1000, .lease_ms_max = 1000
	};
	struct kv_backend_pool *pool = NULL;

	memset(world, 0, sizeof(*world));
	world->seed = seed;
	world->backend = backend;
	world->test.source = (struct kv_test_source){ { &kv_test_source_ops }, seed };
	kv_assert_ok(kv_domain_create(&limits, &world->test.source.base, &world->test.domain, NULL));
	kv_assert_ok(backend->ops->pool_create(backend, spec, 0, &pool, NULL));
	kv_assert_ok(kv_domain_pool_add(world->test.domain, spec, pool, 0, 0, &world->test.pool, NULL));
	world->session = kv_test_open(&world->test);
	world->area_bytes = kv_plan_area_bytes(spec, AREA_ITEM_BYTES) + kv_plan_moves_bytes(spec);
}

static void step(struct world *world, uint32_t step_idx)
{
	const uint32_t dice = below(world, 100);
	const uint32_t n = world->lengths[0] + world->lengths[1];

	if (n == 0 || dice < 50)
		do_append(world);
	else if (dice < 70)
		do_read(world);
	else if (dice < 87)
		do_decode(world);
	else if (dice < 89)
		do_move(world);
	else
		do_truncate(world);
	if (step_idx % 16 == 0)
		kv_test_audit(world->test.domain, NULL, 0);
	for (uint32_t l = 0; world->lengths[0] + world->lengths[1] > 0 && l < N_LAYERS; l++)
		ck_assert_uint_eq(kv_sequence_n_exact(kv_sequence_find(world->session, 7), l),
			world->lengths[l] - exact_lo(world, l));
}

static void run(struct world *world, uint64_t seed, struct kv_backend *backend, double bound,
	double exact_bound, struct kv_pool_spec *spec, uint32_t n_ops)
{
	const struct kv_backend_ops *ops = backend->ops;

	open_world(world, backend, seed, spec);
	world->bound = bound;
	world->exact_bound = exact_bound;
	world->area = ops->host_alloc(backend, world->area_bytes);
	world->tensors = ops->host_alloc(backend, sizeof(*world->tensors));
	ck_assert(world->area && world->tensors);
	for (uint32_t i = 0; i < n_ops; i++)
		step(world, i);
	kv_session_close(world->test.domain, world->session, false);
	kv_test_release_all(world->test.domain);
	ops->pool_destroy(backend, world->test.pool->backend_pool);
	ops->host_free(backend, world->area, world->area_bytes);
	ops->host_free(backend, world->tensors, sizeof(*world->tensors));
	kv_test_domain_finish(&world->test);
}

/* By loop index; NULL: this processor does not run it. */
#ifdef TEST_CUDA
#define N_BACKENDS 1
static enum kv_status make_backend(int idx, struct kv_backend **out, struct kv_error *err)
{
	(void)idx;
	return kvg_backend_cuda_create(0, out, err);
}
#else
#define N_BACKENDS 3
static enum kv_status make_backend(int idx, struct kv_backend **out, struct kv_error *err)
{
	const struct kv_fast_kernels *kernels = idx == 0 ? NULL : kv_fast_kernels_at((uint32_t)idx - 1);

	*out = NULL;
	return idx > 0 && !kernels ? KV_OK : kv_backend_cpu_create_with(0, kernels, out, err);
}
#endif

/* Of scalar sums (idx 0), of fast kernels over codes (core/DESIGN.md), of float32 sums. */
static double bound_of(int idx, bool is_all_exact)
{
#ifdef TEST_CUDA
	(void)idx;
	(void)is_all_exact;
	return 2e-5; /* no tile has 16 channels */
#else
	return idx == 0 || is_all_exact ? 1e-5 : 2e-3;
#endif
}

/* Every row that is read and every output is what the lists say, over 10^4 random operations per backend. */
START_TEST(test_exact_window_agrees_with_lists)
{
	static struct world world;
	static const struct {
		const char *format;
		bool has_center;
	} rows[] = { { "tq4", false }, { "tq3", true }, { "tqp3", true } };
	const uint32_t n_ops = n_ops_in_all / KV_LENGTH(rows) + 1;
	struct kv_backend *backend = NULL;
	struct kv_error err = { .msg = "" };
	uint64_t n_bytes = 0;

	ck_assert_msg(make_backend(_i, &backend, &err) == KV_OK, "%s", err.msg);
	if (!backend)
		return;
	kv_assert_ok(backend->ops->arena_create(backend, ARENA_BYTES, &err));
	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		const uint64_t seed = 0x5EED2000 + i + 16 * (uint64_t)_i;
		struct kv_pool_spec *spec = make_spec(rows[i].format, rows[i].has_center);

		kv_assert_ok(backend->ops->pool_check(backend, spec, &n_bytes, &err));
		ck_assert_uint_le(n_bytes, ARENA_BYTES);
		printf("test_exact_window: %s, seed %llx\n", backend->ops->name, (unsigned long long)seed);
		run(&world, seed, backend, bound_of(_i, false), bound_of(_i, true), spec, n_ops);
		ck_assert_uint_ge(world.n_exact_reads, n_ops / 3);
		ck_assert_uint_ge(world.n_exact_decodes, n_ops / 30);
		ck_assert_uint_ge(world.n_all_exact, n_ops / 100);
		ck_assert_uint_ge(world.n_long_chunks, n_ops / 150);
		ck_assert_uint_ge(world.n_refused, n_ops / 100);
		ck_assert_uint_ge(world.n_cuts, n_ops / 30);
		ck_assert_uint_ge(world.n_moves, n_ops / 150);
	}
	backend->ops->destroy(backend);
}
END_TEST

int main(int argc, char **argv)
{
	Suite *suite = suite_create("exact_window");
	TCase *tcase = tcase_create("exact_window");

#ifdef TEST_CUDA
	struct kv_backend *backend = NULL;
	struct kv_error err = { .msg = "" };

	if (kvg_backend_cuda_create(0, &backend, &err) != KV_OK) {
		printf("%s\n", err.msg);
		return 77;
	}
	backend->ops->destroy(backend);
#endif
	if (argc > 1)
		n_ops_in_all = (uint32_t)atoi(argv[1]);
	tcase_add_loop_test(tcase, test_exact_window_agrees_with_lists, 0, N_BACKENDS);
	tcase_set_timeout(tcase, 120);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
