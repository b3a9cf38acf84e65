/*
 * The CPU backend with every format, layers of different formats, a K centre, channels per KV head, and
 * packed rows from outside. Loop index: number of worker threads, 0 = none.
 */
#include <stdio.h>

#include "core/k_center.h"
#include "core/recipe.h"
#include "tests/lib/batch_rig.h"

#define N_THREADS_TRIED 3

#define GEOMETRY "\"name\":\"p\",\"q_heads\":4,\"kv_heads\":2,\"block_size\":16,\"blocks\":24,"

/* ---- every format ---- */

/* Decodes of every format are attention over the rows that it stores, at a power of two and beside one. */
START_TEST(test_backend_cpu_formats_decode)
{
	static const uint32_t dims[] = { 64, 80 };

	for (uint32_t i = 0; i < 2 * kv_format_count(); i++) {
		const char *name = kv_format_at(i / 2)->name;
		struct batch_rig rig;
		struct batch_seq seq;
		char json[256];

		snprintf(json, sizeof(json),
			"{" GEOMETRY "\"layers\":2,\"head_dim\":%u,\"k\":\"%s\",\"v\":\"%s\"}", dims[i % 2],
			name, name);
		rig_init(&rig, (uint32_t)_i, json);
		seq_init(&rig, &seq, 0, 1);
		seq_append(&rig, &seq, 0, 2, 40, KV_DTYPE_F32, true);
		const struct kv_decode_op *ops[2] = { seq_decode(&rig, &seq, 0, 1, 40),
			seq_decode(&rig, &seq, 1, 1, 23) };

		rig_run(&rig);
		for (int n = 0; n < 2; n++)
			seq_check(&rig, &seq, ops[n], 1e-5);
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

/* ---- rows on the wire, by the formula's meaning: layer after layer, token after token ---- */

struct frame {
	uint8_t *k, *v;
	uint64_t k_bytes, v_bytes;
};

static uint32_t row_bytes(const struct batch_rig *rig, bool is_v, uint32_t layer, enum kv_dtype dtype)
{
	const uint32_t dim = is_v ? rig->spec->v_head_dim : rig->spec->k_head_dim;

	return dtype == KV_DTYPE_PACKED ? rig_codec(rig, is_v, layer)->row_bytes
					: dim * kv_dtype_bytes(dtype);
}

/* Bytes of n_tokens on layers [first, end). */
static uint64_t side_bytes(const struct batch_rig *rig, bool is_v, uint32_t first, uint32_t end,
	uint32_t n_tokens, enum kv_dtype dtype)
{
	uint64_t n_bytes = 0;

	for (uint32_t l = first; l < end; l++)
		n_bytes += (uint64_t)rig->spec->kv_heads * n_tokens * row_bytes(rig, is_v, l, dtype);
	return n_bytes;
}

static struct frame take_frame(
	struct batch_rig *rig, uint32_t first, uint32_t end, uint32_t n_tokens, enum kv_dtype dtype)
{
	struct frame frame = { .k_bytes = side_bytes(rig, false, first, end, n_tokens, dtype),
		.v_bytes = side_bytes(rig, true, first, end, n_tokens, dtype) };

	frame.k = rig_take(rig, frame.k_bytes);
	frame.v = rig_take(rig, frame.v_bytes);
	return frame;
}

static struct kv_rows item_rows(const struct batch_rig *rig, uint8_t *tensor, bool is_v, uint32_t layer_first,
	uint32_t token_first, uint32_t n_tokens_total, enum kv_dtype dtype)
{
	return (struct kv_rows){ .base = tensor +
			(uint64_t)token_first * rig->spec->kv_heads *
				row_bytes(rig, is_v, layer_first, dtype),
		.tokens_stride = n_tokens_total,
		.token_first = token_first,
		.dtype = (uint8_t)dtype };
}

/* Tokens [token_first, + n_tokens) of the frame become tokens [seq_first, ..) of the sequence. */
static struct kv_update_op *write_item(struct batch_rig *rig, const struct batch_seq *seq,
	const struct frame *frame, uint32_t layer_first, uint32_t n_layers, uint32_t token_first,
	uint32_t n_tokens, uint32_t n_tokens_total, enum kv_dtype dtype)
{
	struct kv_update_op *op = &rig->batch.updates[rig->batch.n_updates++];

	*op = (struct kv_update_op){ .result_idx = rig->batch.n_results++,
		.layer_first = layer_first,
		.n_layers = n_layers,
		.n_tokens = n_tokens,
		.slots = seq_slots(rig, seq, 0, n_tokens),
		.k = item_rows(rig, frame->k, false, layer_first, token_first, n_tokens_total, dtype),
		.v = item_rows(rig, frame->v, true, layer_first, token_first, n_tokens_total, dtype) };
	return op;
}

static struct frame read_all(
	struct batch_rig *rig, const struct batch_seq *seq, uint32_t n_tokens, enum kv_dtype dtype)
{
	const uint32_t n_layers = rig->spec->n_layers;
	const struct frame frame = take_frame(rig, 0, n_layers, n_tokens, dtype);
	struct kv_transfer_op *op = &rig->batch.transfers[rig->batch.n_transfers++];

	*op = (struct kv_transfer_op){ .result_idx = rig->batch.n_results++,
		.n_layers = n_layers,
		.n_tokens = n_tokens,
		.slots = seq_slots(rig, seq, 0, n_tokens),
		.k = item_rows(rig, frame.k, false, 0, 0, n_tokens, dtype),
		.v = item_rows(rig, frame.v, true, 0, 0, n_tokens, dtype) };
	return frame;
}

static void draw_numbers(struct batch_rig *rig, uint8_t *out, uint64_t n_bytes, float shift)
{
	for (uint64_t i = 0; i < n_bytes; i += 4)
		kv_store_f32(rig_number(rig) + shift, out + i);
}

/* A copy that survives the next rig_begin(). */
static struct frame keep(const struct frame *frame)
{
	struct frame kept = { malloc(frame->k_bytes), malloc(frame->v_bytes), frame->k_bytes,
		frame->v_bytes };

	memcpy(kept.k, frame->k, frame->k_bytes);
	memcpy(kept.v, frame->v, frame->v_bytes);
	return kept;
}

static void drop(struct frame *frame)
{
	free(frame->k);
	free(frame->v);
}

/* ---- layers of different formats ---- */

static const char pool_mixed[] =
	"{" GEOMETRY
	"\"layers\":4,\"k_head_dim\":64,\"v_head_dim\":48,\"k\":[\"tq3\",\"f32\",\"tqp4\",\"bf16\"],"
	"\"v\":[\"v4\",\"tq2\",\"turboquant35\",\"fp8\"],\"groups\":[[0,1],[2,3]],\"group\":16}";

/*
 * Packed rows of layers with rows of different sizes lie layer after layer, whatever item of the frame they
 * belong to: two sequences in one frame get the bytes of their own rows on every layer, from any first layer.
 */
START_TEST(test_backend_cpu_formats_mixed_layers_packed)
{
	const uint32_t n_a = 7, n_b = 19, n_all = n_a + n_b, n_layers = 4;
	struct batch_rig rig;
	struct batch_seq a, b, c, d;
	struct frame all, read_a, read_b;

	rig_init(&rig, (uint32_t)_i, pool_mixed);
	seq_init(&rig, &a, 0, 1);
	seq_init(&rig, &b, 4, 1);
	seq_init(&rig, &c, 8, 1);
	seq_init(&rig, &d, 12, 1);
	all = take_frame(&rig, 0, n_layers, n_all, KV_DTYPE_F32);
	draw_numbers(&rig, all.k, all.k_bytes, 0);
	draw_numbers(&rig, all.v, all.v_bytes, 0);
	write_item(&rig, &a, &all, 0, n_layers, 0, n_a, n_all, KV_DTYPE_F32);
	write_item(&rig, &b, &all, 0, n_layers, n_a, n_b, n_all, KV_DTYPE_F32);
	read_a = read_all(&rig, &a, n_a, KV_DTYPE_PACKED);
	read_b = read_all(&rig, &b, n_b, KV_DTYPE_PACKED);
	rig_run(&rig);
	struct frame kept_a = keep(&read_a), kept_b = keep(&read_b);

	/* Layers 1 to 3 in one frame, layer 0 in another: c and d are a and b, by their packed rows. */
	rig_begin(&rig);
	for (uint32_t part = 0; part < 2; part++) {
		const uint32_t first = part == 0 ? 1 : 0, end = part == 0 ? n_layers : 1;
		struct frame packed = take_frame(&rig, first, end, n_all, KV_DTYPE_PACKED);

		for (int is_v = 0; is_v < 2; is_v++) {
			const uint8_t *from_a = is_v ? kept_a.v : kept_a.k,
				      *from_b = is_v ? kept_b.v : kept_b.k;
			uint8_t *to = is_v ? packed.v : packed.k;

			from_a += side_bytes(&rig, is_v, 0, first, n_a, KV_DTYPE_PACKED);
			from_b += side_bytes(&rig, is_v, 0, first, n_b, KV_DTYPE_PACKED);
			for (uint32_t l = first; l < end; l++) {
				const uint64_t a_bytes =
					side_bytes(&rig, is_v, l, l + 1, n_a, KV_DTYPE_PACKED);
				const uint64_t b_bytes =
					side_bytes(&rig, is_v, l, l + 1, n_b, KV_DTYPE_PACKED);

				memcpy(to, from_a, a_bytes);
				memcpy(to + a_bytes, from_b, b_bytes);
				to += a_bytes + b_bytes;
				from_a += a_bytes;
				from_b += b_bytes;
			}
		}
		write_item(&rig, &c, &packed, first, end - first, 0, n_a, n_all, KV_DTYPE_PACKED);
		write_item(&rig, &d, &packed, first, end - first, n_a, n_b, n_all, KV_DTYPE_PACKED);
	}
	read_a = read_all(&rig, &c, n_a, KV_DTYPE_PACKED);
	read_b = read_all(&rig, &d, n_b, KV_DTYPE_PACKED);
	rig_run(&rig);
	for (uint32_t r = 0; r < rig.batch.n_results; r++)
		ck_assert_int_eq(rig.batch.results[r].status, KV_OK);
	ck_assert_mem_eq(read_a.k, kept_a.k, kept_a.k_bytes);
	ck_assert_mem_eq(read_a.v, kept_a.v, kept_a.v_bytes);
	ck_assert_mem_eq(read_b.k, kept_b.k, kept_b.k_bytes);
	ck_assert_mem_eq(read_b.v, kept_b.v, kept_b.v_bytes);
	drop(&kept_a);
	drop(&kept_b);
	seq_finish(&a);
	seq_finish(&b);
	seq_finish(&c);
	seq_finish(&d);
	rig_finish(&rig);
}
END_TEST

/* ---- packed rows that nobody could have encoded ---- */

/* Token 3 of head 1 on layer `layer` is spoilt: the item is refused with that layer and row, its neighbour is
 * not. */
START_TEST(test_backend_cpu_formats_hostile_packed_rows)
{
	static const struct {
		uint32_t layer;
		bool is_v;
		uint32_t offset; /* in the row */
		uint32_t n_bytes;
		uint8_t bytes[4];
	} cases[] = {
		{ 0, false, 24, 4, { 0x00, 0x00, 0xC0, 0x7F } }, /* tq3, d = 64: norm NaN */
		{ 0, false, 24, 4, { 0x00, 0x00, 0x80, 0x7F } }, /* infinite */
		{ 0, false, 24, 4, { 0x00, 0x00, 0x80, 0xBF } }, /* -1 */
		{ 0, true, 24, 2, { 0x00, 0x7E } },              /* v4, d = 48: scale NaN */
		{ 0, true, 24, 2, { 0x00, 0xBC } },              /* -1 */
		{ 0, true, 30, 2, { 0x00, 0xFC } },              /* zero infinite */
		{ 1, false, 8, 4, { 0xFF, 0xFF, 0xFF, 0x7F } },  /* f32 NaN */
		{ 2, false, 36, 4, { 0x01, 0x00, 0x00, 0x80 } }, /* tqp4: residual norm below 0 */
		{ 3, false, 10, 2, { 0x80, 0xFF } },             /* bf16 infinite */
		{ 3, true, 5, 1, { 0x7F } },                     /* fp8: NaN code */
		{ 3, true, 48, 4, { 0x00, 0x00, 0x80, 0xBF } },  /* fp8: scale -1 */
	};
	const uint32_t n_tokens = 5;

	for (uint32_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct batch_rig rig;
		struct batch_seq a, b;
		struct frame wide, packed;
		const struct kv_update_op *bad, *good;

		rig_init(&rig, (uint32_t)_i, pool_mixed);
		seq_init(&rig, &a, 0, 1);
		seq_init(&rig, &b, 4, 1);
		wide = take_frame(&rig, 0, 4, n_tokens, KV_DTYPE_F32);
		draw_numbers(&rig, wide.k, wide.k_bytes, 0);
		draw_numbers(&rig, wide.v, wide.v_bytes, 0);
		write_item(&rig, &a, &wide, 0, 4, 0, n_tokens, n_tokens, KV_DTYPE_F32);
		packed = read_all(&rig, &a, n_tokens, KV_DTYPE_PACKED);
		rig_run(&rig);
		struct frame kept = keep(&packed);

		rig_begin(&rig);
		packed = take_frame(&rig, 0, 4, n_tokens, KV_DTYPE_PACKED);
		memcpy(packed.k, kept.k, kept.k_bytes);
		memcpy(packed.v, kept.v, kept.v_bytes);
		good = write_item(&rig, &b, &packed, 0, 4, 0, n_tokens, n_tokens, KV_DTYPE_PACKED);
		packed = take_frame(&rig, 0, 4, n_tokens, KV_DTYPE_PACKED);
		memcpy(packed.k, kept.k, kept.k_bytes);
		memcpy(packed.v, kept.v, kept.v_bytes);
		memcpy((cases[i].is_v ? packed.v : packed.k) +
				side_bytes(
					&rig, cases[i].is_v, 0, cases[i].layer, n_tokens, KV_DTYPE_PACKED) +
				(3 * 2 + 1) *
					row_bytes(&rig, cases[i].is_v, cases[i].layer, KV_DTYPE_PACKED) +
				cases[i].offset,
			cases[i].bytes, cases[i].n_bytes);
		bad = write_item(&rig, &a, &packed, 0, 4, 0, n_tokens, n_tokens, KV_DTYPE_PACKED);
		rig_run(&rig);
		ck_assert_int_eq(rig.batch.results[good->result_idx].status, KV_OK);
		ck_assert_msg(rig.batch.results[bad->result_idx].status == KV_BAD_VALUE, "case %u", i);
		ck_assert_uint_eq(rig.batch.results[bad->result_idx].layer, cases[i].layer);
		ck_assert_uint_eq(rig.batch.results[bad->result_idx].row, 3);
		drop(&kept);
		seq_finish(&a);
		seq_finish(&b);
		rig_finish(&rig);
	}
}
END_TEST

/* ---- k_center ---- */

#define CENTER_SHIFT 3.0f /* far from the rows' own spread of 1 */

/* [2 layers][2 heads][d] around CENTER_SHIFT. */
static void write_center_json(char *out, size_t size, uint32_t dim)
{
	size_t n = 0;

	for (uint32_t i = 0; i < 4 * dim; i++)
		n += (size_t)snprintf(out + n, size - n, "%s%.3f",
			i == 0                       ? "[[["
				: i % (2 * dim) == 0 ? "]],[["
				: i % dim == 0       ? "],["
						     : ",",
			(double)CENTER_SHIFT + (i * 7 % 11) / 10.0 - 0.5);
	snprintf(out + n, size - n, "]]]");
}

/* A query to the basis of the codec's rows. */
static void turn_forward(const struct kv_row_codec *codec, const float *q, float *turned)
{
	double x[KV_HEAD_DIM_MAX], y[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < codec->head_dim; i++)
		x[i] = (double)q[i];
	kv_row_codec_to_basis(codec, x, y);
	for (uint32_t i = 0; i < codec->head_dim; i++)
		turned[i] = (float)y[i];
}

/*
 * With a centre: packed rows are those of row - mu, rows that are read as numbers are near the rows that were
 * written, decodes are attention over these numbers, log-sum-exp included, also for queries that were
 * rotated.
 */
START_TEST(test_backend_cpu_formats_k_center)
{
	static const char *const formats[] = { "f32", "tq4", "tqp3", "v4", "turboquant35", "bf16" };
	static char center[8192], json[16384];
	const uint32_t n_tokens = 37, dim = 64;

	write_center_json(center, sizeof(center), dim);
	for (uint32_t i = 0; i < sizeof(formats) / sizeof(formats[0]); i++) {
		struct batch_rig rig;
		struct batch_seq seq;
		struct frame wide, read, packed;
		struct kv_decode_op *ops[2], *turned;

		snprintf(json, sizeof(json),
			"{" GEOMETRY
			"\"layers\":2,\"head_dim\":64,\"k\":\"%s\",\"v\":\"f32\",\"k_center\":%s}",
			formats[i], center);
		rig_init(&rig, (uint32_t)_i, json);
		seq_init(&rig, &seq, 0, 1);
		wide = take_frame(&rig, 0, 2, n_tokens, KV_DTYPE_F32);
		draw_numbers(&rig, wide.k, wide.k_bytes, CENTER_SHIFT);
		draw_numbers(&rig, wide.v, wide.v_bytes, 0);
		write_item(&rig, &seq, &wide, 0, 2, 0, n_tokens, n_tokens, KV_DTYPE_F32);
		read = read_all(&rig, &seq, n_tokens, KV_DTYPE_F32);
		packed = read_all(&rig, &seq, n_tokens, KV_DTYPE_PACKED);
		for (uint32_t l = 0; l < 2; l++)
			ops[l] = seq_decode(&rig, &seq, l, 1, n_tokens);
		turned = seq_decode(&rig, &seq, 1, 1, n_tokens);
		turned->flags = KV_DECODE_Q_ROTATED;
		for (uint32_t h = 0; h < 4; h++)
			turn_forward(rig_codec(&rig, false, 1),
				(const float *)(const void *)ops[1]->q + h * dim,
				(float *)(uintptr_t)turned->q + h * dim);
		rig_run(&rig);
		for (uint32_t r = 0; r < 2 * n_tokens * 2; r++) {
			const uint32_t layer = r / (2 * n_tokens), head = r % 2, token = r / 2 % n_tokens;
			const struct kv_row_codec *codec = rig_codec(&rig, false, layer);
			const float *row = (const float *)(const void *)wide.k + r * dim;
			const float *got = (const float *)(const void *)read.k + r * dim;
			const float *mu = rig.spec->layers[layer].k_center + head * dim;
			struct kv_row_scratch scratch;
			float rest[64], exact[64];
			uint8_t wanted[KV_ROW_BYTES_MAX];

			for (uint32_t c = 0; c < dim; c++)
				rest[c] = row[c] - mu[c];
			ck_assert_int_eq(kv_row_codec_encode(codec, rest, wanted, &scratch), KV_OK);
			ck_assert_mem_eq(packed.k + (uint64_t)r * codec->row_bytes, wanted, codec->row_bytes);
			kv_row_codec_decode(codec, wanted, exact, &scratch);
			for (uint32_t c = 0; c < dim; c++) {
				exact[c] += mu[c];
				ck_assert_uint_eq(kv_f32_bits(got[c]), kv_f32_bits(exact[c]));
			}
			memcpy(seq_row(&rig, &seq, false, layer, token, head), got, dim * sizeof(float));
			memcpy(seq_row(&rig, &seq, true, layer, token, head),
				(const float *)(const void *)wide.v + r * dim, dim * sizeof(float));
		}
		for (uint32_t l = 0; l < 2; l++)
			seq_check(&rig, &seq, ops[l], 1e-5);
		seq_check(&rig, &seq, turned, 1e-5);
		for (uint32_t c = 0; c < 4 * dim; c++)
			ck_assert_float_le(
				fabsf(((float *)(void *)turned->out)[c] - ((float *)(void *)ops[1]->out)[c]),
				2e-5f);
		for (uint32_t h = 0; h < 4; h++)
			ck_assert_float_le(fabsf(turned->lse[h] - ops[1]->lse[h]), 2e-5f);
		seq_finish(&seq);
		rig_finish(&rig);
	}
}
END_TEST

/* A row that is finite, but not without its centre, is refused like any other that cannot be stored. */
START_TEST(test_backend_cpu_formats_k_center_overflow)
{
	static char json[4096];
	struct batch_rig rig;
	struct batch_seq seq;
	struct frame wide;
	size_t n = (size_t)snprintf(json, sizeof(json),
		"{" GEOMETRY "\"layers\":1,\"head_dim\":16,\"k\":\"f32\",\"v\":\"f32\",\"k_center\":[[[");

	for (uint32_t i = 0; i < 32; i++)
		n += (size_t)snprintf(json + n, sizeof(json) - n, "%s%s",
			i == 16     ? "],["
				: i ? ","
				    : "",
			i == 20 ? "3e38" : "0");
	snprintf(json + n, sizeof(json) - n, "]]]}");
	rig_init(&rig, (uint32_t)_i, json);
	seq_init(&rig, &seq, 0, 1);
	wide = take_frame(&rig, 0, 1, 4, KV_DTYPE_F32);
	memset(wide.k, 0, wide.k_bytes);
	memset(wide.v, 0, wide.v_bytes);
	kv_store_f32(-3e38f, wide.k + (2 * 2 + 1) * 64 + 4 * 4); /* token 2, head 1, channel 4 */
	write_item(&rig, &seq, &wide, 0, 1, 0, 4, 4, KV_DTYPE_F32);
	rig_run(&rig);
	ck_assert_int_eq(rig.batch.results[0].status, KV_BAD_VALUE);
	ck_assert_uint_eq(rig.batch.results[0].row, 2);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

/* ---- channels of KV heads ---- */

#define HIGH "[1,3,5,7,9,11,13,15,17,19,21,23,25,27,29,31]"
#define LOW  "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"

/* KV heads whose recipes have other channels are written, read and decoded each with its own. */
START_TEST(test_backend_cpu_formats_channels_of_heads)
{
	static const char json[] =
		"{" GEOMETRY
		"\"layers\":2,\"head_dim\":64,\"k\":\"turboquant25\",\"v\":\"turboquant25\",\"recipe\":{"
		"\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":64,\"layers\":{\"1\":{"
		"\"key_high_precision_indices\":[" LOW "," HIGH "],\"value_high_precision_indices\":[" HIGH
		"," LOW "]}}}}";
	const uint32_t n_tokens = 21, dim = 64;
	struct batch_rig rig;
	struct batch_seq seq;
	struct frame wide, read, packed;
	const struct kv_decode_op *ops[2];
	uint32_t n_different = 0;

	rig_init(&rig, (uint32_t)_i, json);
	seq_init(&rig, &seq, 0, 1);
	wide = take_frame(&rig, 0, 2, n_tokens, KV_DTYPE_F32);
	draw_numbers(&rig, wide.k, wide.k_bytes, 0);
	draw_numbers(&rig, wide.v, wide.v_bytes, 0);
	write_item(&rig, &seq, &wide, 0, 2, 0, n_tokens, n_tokens, KV_DTYPE_F32);
	read = read_all(&rig, &seq, n_tokens, KV_DTYPE_F32);
	packed = read_all(&rig, &seq, n_tokens, KV_DTYPE_PACKED);
	ops[0] = seq_decode(&rig, &seq, 0, 1, n_tokens);
	ops[1] = seq_decode(&rig, &seq, 1, 1, n_tokens);
	rig_run(&rig);
	for (uint32_t r = 0; r < 2 * 2 * n_tokens * 2; r++) {
		const bool is_v = r % 2 != 0;
		const uint32_t at = r / 2, layer = at / (2 * n_tokens), head = at % 2,
			       token = at / 2 % n_tokens;
		const struct kv_layer_spec *l = &rig.spec->layers[layer];
		const struct kv_row_codec *codec = is_v ? kv_layer_v(l, head) : kv_layer_k(l, head);
		const float *row = (const float *)(const void *)(is_v ? wide.v : wide.k) + at * dim;
		const float *got = (const float *)(const void *)(is_v ? read.v : read.k) + at * dim;
		const uint8_t *bytes = (is_v ? packed.v : packed.k) + (uint64_t)at * codec->row_bytes;
		struct kv_row_scratch scratch;
		uint8_t wanted[KV_ROW_BYTES_MAX];
		float exact[64];

		ck_assert_uint_eq(codec->channels[0], layer == 1 && head != is_v ? 1 : 0);
		n_different += codec != rig.spec->layers[0].k;
		ck_assert_int_eq(kv_row_codec_encode(codec, row, wanted, &scratch), KV_OK);
		ck_assert_mem_eq(bytes, wanted, codec->row_bytes);
		kv_row_codec_decode(codec, wanted, exact, &scratch);
		ck_assert_mem_eq(got, exact, sizeof(exact));
		memcpy(seq_row(&rig, &seq, is_v, layer, token, head), exact, sizeof(exact));
	}
	ck_assert_uint_eq(n_different, 2 * n_tokens);
	for (int n = 0; n < 2; n++)
		seq_check(&rig, &seq, ops[n], 1e-5);
	seq_finish(&seq);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("backend_cpu_formats");
	TCase *tcase = tcase_create("backend_cpu_formats");

	tcase_add_loop_test(tcase, test_backend_cpu_formats_decode, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_formats_mixed_layers_packed, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_formats_hostile_packed_rows, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_formats_k_center, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_formats_k_center_overflow, 0, N_THREADS_TRIED);
	tcase_add_loop_test(tcase, test_backend_cpu_formats_channels_of_heads, 0, N_THREADS_TRIED);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
