/*
 * What a replay compares with, and the sums of the comparisons.
 *
 * The expected error of an output (predicted_square) is worked out beside the exact attention, from the rows
 * themselves. With p the softmax weights, s the logits, o the exact output, e_k and e_v the errors of the
 *stored rows, and S the share by which stored rows are shorter than the original along them:
 *
 *	a logit's variance      var_t = (scale |q| |e_k,t|)^2 / k_head_dim    (an error in a random direction)
 *	the output's            sum_t p_t^2 (var_t |v_t - o|^2 + |e_v,t|^2)   (first order, tokens
 *independent) its bias                | S_v o + S_k (sum_t p_t s_t v_t - o sum_t p_t s_t) |^2
 *
 * The sum of the last two lines is the expected squared error of this output. Only the lengths of the rows'
 *errors go in; replay_bounds.c bounds these by the format.
 */
#include <math.h>
#include <string.h>

#include "core/attention.h"
#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "server/ctl/replay.h"

static void *map_array(struct srv_replay_rows *rows, uint32_t idx, uint64_t n, uint64_t size)
{
	uint64_t n_bytes;

	if (!kv_mul_u64(n, size, &n_bytes))
		return NULL;
	void *array = kv_pages_alloc(n_bytes);

	rows->map_bytes[idx] = array ? n_bytes : 0;
	return array;
}

/* Lengths of one row and of its error. */
static void measure_row(struct srv_replay_rows *rows, uint64_t row_idx)
{
	const float *original = rows->original + row_idx * rows->head_dim;
	const float *decoded = rows->decoded + row_idx * rows->head_dim;
	double square = 0, error_square = 0;

	for (uint32_t i = 0; i < rows->head_dim; i++) {
		const double error = (double)decoded[i] - (double)original[i];

		square += (double)original[i] * (double)original[i];
		error_square += error * error;
		rows->along += (double)decoded[i] * (double)original[i];
	}
	rows->square += square;
	rows->squares[row_idx] = square;
	rows->error_squares[row_idx] = error_square;
}

static enum kv_status encode_rows(const struct srv_replay *replay, struct srv_replay_rows *rows,
	uint32_t layer_idx, char letter, struct kv_error *err)
{
	const uint32_t kv_heads = replay->capture->kv_heads;
	struct kv_row_scratch scratch;
	uint8_t wire[4 * KV_HEAD_DIM_MAX];
	float sent[KV_HEAD_DIM_MAX];

	for (uint64_t i = 0; i < rows->n_rows; i++) {
		const float *original = rows->original + i * rows->head_dim;
		uint8_t *packed = rows->packed + i * rows->codec->row_bytes;

		kv_rows_store(replay->in_dtype, original, rows->head_dim, wire);
		kv_rows_load_f32(replay->in_dtype, wire, rows->head_dim, sent);
		if (kv_row_codec_encode(rows->codec, sent, packed, &scratch) != KV_OK)
			return kv_fail(err, KV_BAD_VALUE,
				"tensor '%c.%u': token %llu, head %llu holds a value that %s cannot store",
				letter, replay->capture->layers[layer_idx].number,
				(unsigned long long)(i / kv_heads), (unsigned long long)(i % kv_heads),
				rows->codec->format->name);
		kv_row_codec_decode(rows->codec, packed, rows->decoded + i * rows->head_dim, &scratch);
		measure_row(rows, i);
	}
	return KV_OK;
}

static enum kv_status prepare_rows(struct srv_replay *replay, struct srv_replay_rows *rows,
	uint32_t layer_idx, enum srv_capture_kind kind, struct kv_error *err)
{
	const struct srv_capture *capture = replay->capture;

	rows->n_rows = (uint64_t)capture->n_tokens * capture->kv_heads;
	rows->original = map_array(rows, 0, rows->n_rows, rows->head_dim * sizeof(float));
	rows->packed = map_array(rows, 1, rows->n_rows, rows->codec->row_bytes);
	rows->decoded = map_array(rows, 2, rows->n_rows, rows->head_dim * sizeof(float));
	rows->squares = map_array(rows, 3, rows->n_rows, sizeof(double));
	rows->error_squares = map_array(rows, 4, rows->n_rows, sizeof(double));
	if (!rows->original || !rows->packed || !rows->decoded || !rows->squares || !rows->error_squares)
		return kv_fail(err, KV_NO_MEMORY, "no memory for the rows of layer %u",
			capture->layers[layer_idx].number);
	srv_capture_load(capture, layer_idx, kind, 0, capture->n_tokens, rows->original);
	return encode_rows(replay, rows, layer_idx, srv_capture_kind_letter(kind), err);
}

enum kv_status srv_replay_prepare(struct srv_replay *replay, struct kv_error *err)
{
	const struct srv_capture *capture = replay->capture;
	const struct kv_pool_spec *spec = replay->pool.spec;

	replay->layers = kv_alloc(capture->n_layers, sizeof(*replay->layers));
	if (!replay->layers)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %u layers", capture->n_layers);
	for (uint32_t i = 0; i < capture->n_layers; i++) {
		struct srv_replay_layer *layer = &replay->layers[i];
		enum kv_status status;

		layer->number = capture->layers[i].number;
		layer->scale = spec->layers[i].scale;
		layer->rows[SRV_REPLAY_K].codec = spec->layers[i].k;
		layer->rows[SRV_REPLAY_K].head_dim = capture->k_head_dim;
		layer->rows[SRV_REPLAY_V].codec = spec->layers[i].v;
		layer->rows[SRV_REPLAY_V].head_dim = capture->v_head_dim;
		status = prepare_rows(replay, &layer->rows[SRV_REPLAY_K], i, SRV_CAPTURE_K, err);
		if (status == KV_OK)
			status = prepare_rows(replay, &layer->rows[SRV_REPLAY_V], i, SRV_CAPTURE_V, err);
		if (status != KV_OK)
			return status;
		srv_progress_set(&replay->progress, i + 1);
	}
	return KV_OK;
}

void srv_replay_release(struct srv_replay *replay)
{
	for (uint32_t i = 0; replay->layers && i < replay->capture->n_layers; i++)
		for (uint32_t side = 0; side < 2; side++) {
			struct srv_replay_rows *rows = &replay->layers[i].rows[side];

			kv_pages_free(rows->original, rows->map_bytes[0]);
			kv_pages_free(rows->packed, rows->map_bytes[1]);
			kv_pages_free(rows->decoded, rows->map_bytes[2]);
			kv_pages_free(rows->squares, rows->map_bytes[3]);
			kv_pages_free(rows->error_squares, rows->map_bytes[4]);
		}
	kv_free(replay->layers);
	replay->layers = NULL;
}

static double dot(const float *a, const float *b, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += (double)a[i] * (double)b[i];
	return sum;
}

static double square_of(const double *values, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += values[i] * values[i];
	return sum;
}

/* sum over i of (a_i - b_i)^2 */
static double distance_square(const double *a, const double *b, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += (a[i] - b[i]) * (a[i] - b[i]);
	return sum;
}

/* One query head of one token. */
struct output {
	const struct srv_replay *replay;
	const struct srv_replay_layer *layer;
	uint32_t kv_head, n_seen;
	const float *q; /* the capture's */
	double exact[KV_HEAD_DIM_MAX];
	double lse;
};

/* Exact attention over rows of this layer; `k` NULL: all keys are zero. */
static double attend(const struct output *output, const float *q, const float *k, const float *v, double *out)
{
	const uint32_t kv_heads = output->replay->capture->kv_heads;
	const uint32_t k_dim = output->layer->rows[SRV_REPLAY_K].head_dim;
	const uint32_t v_dim = output->layer->rows[SRV_REPLAY_V].head_dim;
	double lse;

	kv_attention_exact(
		&(struct kv_attention_exact_input){
			.q = q,
			.k = k ? k + (uint64_t)output->kv_head * k_dim : NULL,
			.v = v + (uint64_t)output->kv_head * v_dim,
			.k_stride = (uint64_t)kv_heads * k_dim,
			.v_stride = (uint64_t)kv_heads * v_dim,
			.k_dim = k_dim,
			.v_dim = v_dim,
			.tokens.lo = 0,
			.tokens.hi = output->n_seen,
			.scale = (double)output->layer->scale,
		},
		out, &lse);
	return lse;
}

/* The share by which stored rows are shorter along the original ones: about D where centroids are means of
 * cells. */
static double shrink_of(const struct srv_replay_rows *rows)
{
	return rows->square > 0 ? 1 - rows->along / rows->square : 0;
}

/* Adds the expected squared error of an output, see the top of this file, and the spread of its logits. */
static void predict(const struct output *output, struct srv_replay_layer *sums)
{
	const struct srv_replay *replay = output->replay;
	const struct srv_replay_rows *k = &output->layer->rows[SRV_REPLAY_K];
	const struct srv_replay_rows *v = &output->layer->rows[SRV_REPLAY_V];
	const double k_shrink = shrink_of(k), v_shrink = shrink_of(v);
	const double q_error = srv_replay_query_error(replay);
	const double scale = (double)output->layer->scale;
	const double q_square = dot(output->q, output->q, k->head_dim);
	const double out_square = square_of(output->exact, v->head_dim);
	double variance = 0, mean = 0, logit_sum = 0, logit_square = 0, bias[KV_HEAD_DIM_MAX] = { 0 };

	for (uint32_t t = 0; t < output->n_seen; t++) {
		const uint64_t row_idx = (uint64_t)t * replay->capture->kv_heads + output->kv_head;
		const float *v_row = v->original + row_idx * v->head_dim;
		const double logit = scale * dot(output->q, k->original + row_idx * k->head_dim, k->head_dim);
		const double p = exp(logit - output->lse);
		const double logit_variance = scale * scale * q_square *
			(k->error_squares[row_idx] + q_error * k->squares[row_idx]) / k->head_dim;
		double v_out = 0;

		for (uint32_t i = 0; i < v->head_dim; i++) {
			v_out += (double)v_row[i] * output->exact[i];
			bias[i] += p * logit * (double)v_row[i];
		}
		variance += p * p *
			(logit_variance * (v->squares[row_idx] - 2 * v_out + out_square) +
				v->error_squares[row_idx]);
		mean += p * logit;
		logit_sum += logit;
		logit_square += logit * logit;
	}
	for (uint32_t i = 0; i < v->head_dim; i++)
		bias[i] = v_shrink * output->exact[i] + k_shrink * (bias[i] - mean * output->exact[i]);
	sums->predicted_square += variance + square_of(bias, v->head_dim);

	const double logit_mean = logit_sum / output->n_seen;

	sums->logit_sigma += sqrt(fmax(0, logit_square / output->n_seen - logit_mean * logit_mean));
}

static void add_output(struct srv_replay_layer *layer, struct output *output, const float *q_sent,
	const float *out, float lse)
{
	const struct srv_replay_rows *k = &layer->rows[SRV_REPLAY_K], *v = &layer->rows[SRV_REPLAY_V];
	const uint32_t n = v->head_dim;
	double got[KV_HEAD_DIM_MAX], other[KV_HEAD_DIM_MAX];

	for (uint32_t i = 0; i < n; i++) {
		got[i] = (double)out[i];
		layer->dot += got[i] * output->exact[i];
	}
	layer->n_outputs++;
	layer->got_square += square_of(got, n);
	layer->exact_square += square_of(output->exact, n);
	layer->error_square += distance_square(got, output->exact, n);
	predict(output, layer);

	attend(output, output->q, NULL, v->original, other);
	layer->control_square += distance_square(other, output->exact, n);

	const double stored_lse = attend(output, q_sent, k->decoded, v->decoded, other);
	const double lse_error = fabs((double)lse - stored_lse);

	layer->stored_square += square_of(other, n);
	layer->stored_error_square += distance_square(got, other, n);
	/* Written so that NaN counts as the largest error. */
	if (!(lse_error <= layer->lse_error_max))
		layer->lse_error_max = lse_error;
}

void srv_replay_check_output(struct srv_replay *replay, uint32_t layer_idx, uint32_t token_idx,
	const float *q, const float *out, const float *lse)
{
	const struct srv_capture *capture = replay->capture;
	struct srv_replay_layer *layer = &replay->layers[layer_idx];
	uint8_t wire[4 * KV_HEAD_DIM_MAX];
	float q_sent[KV_HEAD_DIM_MAX];

	for (uint32_t head = 0; head < capture->q_heads; head++) {
		struct output output = {
			.replay = replay,
			.layer = layer,
			.kv_head = head / (capture->q_heads / capture->kv_heads),
			.n_seen = token_idx + 1,
			.q = q + (uint64_t)head * capture->k_head_dim,
		};

		output.lse = attend(&output, output.q, layer->rows[SRV_REPLAY_K].original,
			layer->rows[SRV_REPLAY_V].original, output.exact);
		kv_rows_store(replay->in_dtype, output.q, capture->k_head_dim, wire);
		kv_rows_load_f32(replay->in_dtype, wire, capture->k_head_dim, q_sent);
		add_output(layer, &output, q_sent, out + (uint64_t)head * capture->v_head_dim, lse[head]);
	}
}

void srv_replay_check_packed(struct srv_replay *replay, uint32_t layer_idx, uint32_t side,
	uint32_t token_first, uint32_t n_tokens, const uint8_t *rows)
{
	struct srv_replay_layer *layer = &replay->layers[layer_idx];
	const struct srv_replay_rows *known = &layer->rows[side];
	const uint64_t row_bytes = known->codec->row_bytes;
	const uint64_t first = (uint64_t)token_first * replay->capture->kv_heads;
	const uint64_t n_rows = (uint64_t)n_tokens * replay->capture->kv_heads;

	for (uint64_t i = 0; i < n_rows; i++)
		if (memcmp(rows + i * row_bytes, known->packed + (first + i) * row_bytes,
			    (size_t)row_bytes) != 0)
			layer->n_packed_differ[side]++;
}

void srv_replay_check_decoded(struct srv_replay *replay, uint32_t layer_idx, uint32_t side,
	uint32_t token_first, uint32_t n_tokens, const float *rows)
{
	struct srv_replay_layer *layer = &replay->layers[layer_idx];
	const struct srv_replay_rows *known = &layer->rows[side];
	const uint64_t first = (uint64_t)token_first * replay->capture->kv_heads;
	const uint64_t n_rows = (uint64_t)n_tokens * replay->capture->kv_heads;

	for (uint64_t i = 0; i < n_rows; i++) {
		const float *got = rows + i * known->head_dim;
		const float *original = known->original + (first + i) * known->head_dim;
		const float *decoded = known->decoded + (first + i) * known->head_dim;
		double error_square = 0, difference_square = 0;

		for (uint32_t c = 0; c < known->head_dim; c++) {
			const double error = (double)got[c] - (double)original[c];
			const double difference = (double)got[c] - (double)decoded[c];

			error_square += error * error;
			difference_square += difference * difference;
		}
		layer->row_square[side] += known->squares[first + i];
		layer->row_error_square[side] += error_square;

		const double difference =
			srv_replay_relative_error(difference_square, known->squares[first + i]);

		if (!(difference <= layer->decoded_difference_max[side]))
			layer->decoded_difference_max[side] = difference;
	}
}
