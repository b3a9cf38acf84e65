#include "tests/sim/payload.h"

#include <stdlib.h>
#include <string.h>

#include "core/attention.h"
#include "core/format.h"

/* Roughly normal: the sum of four uniforms, shifted. */
static float value_of(struct sim_rng *rng)
{
	const uint64_t bits = sim_rng_next(rng);
	int32_t sum = 0;

	for (uint32_t i = 0; i < 4; i++)
		sum += (int32_t)(bits >> (16 * i) & 0xFFFF) - 32768;
	return (float)sum / 32768.0f;
}

static void round_to(enum kv_dtype dtype, float *values, uint32_t n)
{
	uint8_t narrow[4 * KV_HEAD_DIM_MAX];

	if (dtype == KV_DTYPE_F32 || dtype == KV_DTYPE_NONE)
		return;
	kv_rows_store(dtype, values, n, narrow);
	kv_rows_load_f32(dtype, narrow, n, values);
}

void sim_row_values(uint32_t row_id, uint32_t layer, bool is_v, uint32_t head, uint32_t dim, float *out)
{
	struct sim_rng rng;

	sim_rng_init(&rng, row_id >> 4, (uint64_t)layer << 16 | head << 1 | is_v);
	for (uint32_t i = 0; i < dim; i++)
		out[i] = value_of(&rng);
	round_to((enum kv_dtype)(is_v ? row_id & 3 : row_id >> 2 & 3), out, dim);
}

void sim_query_values(const struct kv_pool_spec *spec, uint32_t query_id, enum kv_dtype dtype, float *out)
{
	struct sim_rng rng;

	sim_rng_init(&rng, query_id, 0x51);
	for (uint32_t h = 0; h < spec->q_heads; h++) {
		float *row = out + (size_t)h * spec->k_head_dim;

		for (uint32_t i = 0; i < spec->k_head_dim; i++)
			row[i] = value_of(&rng);
		round_to(dtype, row, spec->k_head_dim);
	}
}

static const struct kv_row_codec *codec_of(const struct kv_pool_spec *spec, uint32_t layer, bool is_v)
{
	return is_v ? spec->layers[layer].v : spec->layers[layer].k;
}

uint64_t sim_token_bytes(const struct kv_pool_spec *spec, uint32_t layer, bool is_v, enum kv_dtype dtype)
{
	const struct kv_row_codec *codec = codec_of(spec, layer, is_v);
	const uint64_t row_bytes =
		dtype == KV_DTYPE_PACKED ? codec->row_bytes : codec->head_dim * kv_dtype_bytes(dtype);

	return spec->kv_heads * row_bytes;
}

void sim_row_packed(const struct kv_pool_spec *spec, uint32_t row_id, uint32_t layer, bool is_v,
	uint32_t head, uint8_t *out)
{
	const struct kv_row_codec *codec = codec_of(spec, layer, is_v);
	struct kv_row_scratch scratch;
	float values[KV_HEAD_DIM_MAX];

	sim_row_values(row_id, layer, is_v, head, codec->head_dim, values);
	const enum kv_status status = kv_row_codec_encode(codec, values, out, &scratch);

	SIM_CHECK(status == KV_OK, "the model's own row cannot be stored");
}

/* The row as the exact window has it. */
static void exact_values(const struct kv_pool_spec *spec, uint32_t row_id, uint32_t layer, bool is_v,
	uint32_t head, float *out)
{
	const uint32_t dim = is_v ? spec->v_head_dim : spec->k_head_dim;

	sim_row_values(row_id, layer, is_v, head, dim, out);
	round_to(KV_DTYPE_BF16, out, dim);
}

void sim_token_read(const struct kv_pool_spec *spec, uint32_t row_id, uint32_t layer, bool is_v,
	enum kv_dtype dtype, bool is_exact, uint8_t *out)
{
	const struct kv_row_codec *codec = codec_of(spec, layer, is_v);
	const uint64_t row_bytes = sim_token_bytes(spec, layer, is_v, dtype) / spec->kv_heads;
	struct kv_row_scratch scratch;
	uint8_t packed[KV_ROW_BYTES_MAX];
	float values[KV_HEAD_DIM_MAX];

	for (uint32_t h = 0; h < spec->kv_heads; h++, out += row_bytes) {
		sim_row_packed(spec, row_id, layer, is_v, h, packed);
		if (dtype == KV_DTYPE_PACKED) {
			memcpy(out, packed, row_bytes);
			continue;
		}
		if (is_exact)
			exact_values(spec, row_id, layer, is_v, h, values);
		else
			kv_row_codec_decode(codec, packed, values, &scratch);
		kv_rows_store(dtype, values, codec->head_dim, out);
	}
}

static uint8_t *rows_of_head(const struct sim_attention *attention, bool is_v, uint32_t head)
{
	const struct kv_row_codec *codec = codec_of(attention->spec, attention->layer, is_v);
	uint8_t *rows = malloc((uint64_t)attention->n_tokens * codec->row_bytes + 1);

	SIM_CHECK(rows, "no memory for rows");
	for (uint32_t t = 0; t < attention->n_tokens; t++)
		sim_row_packed(attention->spec, attention->row_ids[t], attention->layer, is_v, head,
			rows + (uint64_t)t * codec->row_bytes);
	return rows;
}

/* All tokens as the exact window would have them. */
static uint8_t *exact_rows_of_head(const struct sim_attention *attention, bool is_v, uint32_t head)
{
	const struct kv_pool_spec *spec = attention->spec;
	const uint32_t dim = is_v ? spec->v_head_dim : spec->k_head_dim;
	uint8_t *rows = malloc((uint64_t)attention->n_tokens * 2 * dim + 1);
	float values[KV_HEAD_DIM_MAX];

	SIM_CHECK(rows, "no memory for rows");
	for (uint32_t t = 0; t < attention->n_tokens; t++) {
		exact_values(spec, attention->row_ids[t], attention->layer, is_v, head, values);
		kv_rows_store(KV_DTYPE_BF16, values, dim, rows + (uint64_t)t * 2 * dim);
	}
	return rows;
}

void sim_attention_expect(const struct sim_attention *attention, uint8_t *out, float *lse)
{
	static struct kv_attention_scratch scratch;
	const struct kv_pool_spec *spec = attention->spec;
	const struct kv_layer_spec *layer = &spec->layers[attention->layer];
	const uint32_t n_group = spec->q_heads / spec->kv_heads;
	float *q = malloc((size_t)spec->q_heads * spec->k_head_dim * sizeof(float));
	float *values = malloc((size_t)spec->q_heads * spec->v_head_dim * sizeof(float));
	const uint32_t window = attention->window > 0 ? attention->window : layer->window;
	const uint32_t lo = window > 0 && attention->n_tokens > window ? attention->n_tokens - window : 0;

	SIM_CHECK(q && values, "no memory for a query");
	sim_query_values(spec, attention->query_id, attention->q_dtype, q);
	for (uint32_t h = 0; h < spec->kv_heads; h++) {
		uint8_t *k = rows_of_head(attention, false, h), *v = rows_of_head(attention, true, h);
		const float *sinks = attention->has_no_sinks ? NULL : layer->sinks;
		const struct kv_attention_options options = {
			.scale = attention->scale > 0 ? attention->scale : layer->scale,
			.softcap = layer->softcap,
			.slopes = layer->alibi ? layer->alibi + (size_t)h * n_group : NULL,
			.sinks = sinks ? sinks + (size_t)h * n_group : NULL,
		};
		const bool has_exact = spec->exact_tokens > 0 && attention->exact_lo < attention->n_tokens;
		uint8_t *exact_k = has_exact ? exact_rows_of_head(attention, false, h) : NULL;
		uint8_t *exact_v = has_exact ? exact_rows_of_head(attention, true, h) : NULL;
		const uint64_t exact_k_bytes = 2ull * spec->k_head_dim,
			       exact_v_bytes = 2ull * spec->v_head_dim;
		const struct kv_attention_input input = {
			.exact_k_codec = has_exact ? spec->exact_k : NULL,
			.exact_v_codec = has_exact ? spec->exact_v : NULL,
			.exact_k = { exact_k, NULL, 1, exact_k_bytes, exact_k_bytes, 0, 0 },
			.exact_v = { exact_v, NULL, 1, exact_v_bytes, exact_v_bytes, 0, 0 },
			.exact_lo = attention->exact_lo,
			.k_codec = layer->k,
			.v_codec = layer->v,
			.k = { k, NULL, 1, layer->k->row_bytes, layer->k->row_bytes, 0, 0 },
			.v = { v, NULL, 1, layer->v->row_bytes, layer->v->row_bytes, 0, 0 },
			.q = q + (size_t)h * n_group * spec->k_head_dim,
			.n_queries = n_group,
			.tokens.first_hi = layer->sink_tokens < lo ? layer->sink_tokens : 0,
			.tokens.lo = layer->sink_tokens < lo ? lo : 0,
			.tokens.hi = attention->n_tokens,
			.q_is_rotated = attention->q_is_rotated,
			.out_is_rotated = attention->out_is_rotated,
		};

		kv_attention_rows(&input, &options, &scratch, values + (size_t)h * n_group * spec->v_head_dim,
			lse + (size_t)h * n_group);
		free(k);
		free(v);
		free(exact_k);
		free(exact_v);
	}
	kv_rows_store(attention->out_dtype, values, (size_t)spec->q_heads * spec->v_head_dim, out);
	free(q);
	free(values);
}
