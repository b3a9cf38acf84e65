/*
 * Every bound of a replay, in one place.
 *
 * The table says per format how far stored rows may be from the original ones. The bound of attention outputs
 * follows from the rows' errors (replay_check.c has the model), so it is not a number that somebody saw once.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "core/pool_spec.h"
#include "server/ctl/replay.h"

#define QJL_FACTOR  0.5707963267948966 /* pi/2 - 1 */
#define VN_ERROR(n) (4.1 * 4.1 / 12 / (((1 << (n)) - 1) * ((1 << (n)) - 1)))
/*
 * Mean squared error of a layer's rows, relative to their squared length: what is expected of well-spread
 * rows, and the factor to what is allowed.
 */
static const struct format_bound {
	const char *format;
	double error;  /* expected, squared, relative */
	double factor; /* allowed, in terms of expected */
} format_bounds[] = {
	/*
	 * A number is off by at most u of itself, u half a unit of its last place, so u^2 holds for every
	 * row. Rows that are bf16 when they are sent lose nothing as bf16.
	 */
	{ "f32", 0, 1 },
	{ "f16", 0x1p-22, 1 },
	{ "bf16", 0x1p-18, 1 },
	/* 2.6 % on Gaussian rows (FORMATS 5). Three bits of mantissa: u = 2^-4 holds for every row, 5.8
	   times. */
	{ "fp8", 0.026 * 0.026, 5.8 },
	/*
	 * D, the total Lloyd-Max error of the sphere marginal at d = 128 (FORMATS 3; a little less at smaller
	 * d). A Hadamard rotation leaves 0.1 to 2.4 D for rows that one to four channels dominate.
	 */
	{ "tq1", 0.3608886, 2.4 },
	{ "tq2", 0.1160001, 2.4 },
	{ "tq3", 0.03396593, 2.4 },
	{ "tq4", 0.009314788, 2.4 },
	{ "tq5", 0.002451460, 2.4 },
	{ "tq6", 6.299608e-4, 2.4 },
	{ "tq7", 1.597739e-4, 2.4 },
	{ "tq8", 4.024116e-5, 2.4 },
	/* (pi/2 - 1) D of one bit less: a sign per channel of the residual (FORMATS 5.2). */
	{ "tqp2", QJL_FACTOR * 0.3608886, 2.4 },
	{ "tqp3", QJL_FACTOR * 0.1160001, 2.4 },
	{ "tqp4", QJL_FACTOR * 0.03396593, 2.4 },
	{ "tqp5", QJL_FACTOR * 0.009314788, 2.4 },
	/*
	 * range^2 / 12 / (2^N - 1)^2 with the range of 32 Gaussian numbers, 4.1 sigma. In any group range^2
	 * is at most twice the sum of squares and an error half a step: 11.4 times.
	 */
	{ "v2", VN_ERROR(2), 11.4 },
	{ "v3", VN_ERROR(3), 11.4 },
	{ "v4", VN_ERROR(4), 11.4 },
	{ "v8", VN_ERROR(8), 11.4 },
	/* tqpN of the two channel groups, by their shares: 1/4 of 2 and 3/4 of 1 bit; 1/2 of 3 and 1/2 of 2.
	 */
	{ "turboquant25", QJL_FACTOR *(0.25 * 0.1160001 + 0.75 * 0.3608886), 2.4 },
	{ "turboquant35", QJL_FACTOR *(0.5 * 0.03396593 + 0.5 * 0.1160001), 2.4 },
};
/* Squared relative error of rounding a number to bf16, at most. */
#define BF16_ERROR 0x1p-18

/*
 * Outputs: the root of the summed expectation is met within about 30 % either way on rows of a real model
 * with some thousand outputs, and 60 % where the format does not rotate or only V is stored coarsely (rows of
 * neighbouring tokens err alike). OUTPUT_MARGIN is twice. Squared errors of single outputs have a heavy tail
 * (one logit on an edge), standard deviation about eight times their mean: for few outputs the margin grows
 * by two of these.
 */
#define OUTPUT_MARGIN 2.0
#define OUTPUT_TAIL   16.0
/* float64 sums of float32 rows, rounded to float32 once: 2^-24 per number, and room for cancellation. */
#define EXACT_BOUND 1e-5
/* Outputs against attention over the very rows that are stored: only arithmetic is left. Devices multiply in
 * half. */
#define STORED_BOUND_CPU    1e-5
#define STORED_BOUND_DEVICE 5e-3
#define LSE_BOUND_CPU       1e-4 /* float32 of a number up to 1000 */
#define LSE_BOUND_DEVICE    1e-2
/* A row read back decoded, against the same bytes decoded here. */
#define DECODED_BOUND 1e-5
/*
 * Where a query's logits spread by sigma 1 or more, keys matter: then the error must be below the control's,
 * and with rows of four bits or more (row error at most FINE_ERROR) at most half of it. Rows above
 * COARSE_ERROR can lose more than the keys tell: nothing is asked of them here.
 */
#define SPREAD_SIGMA        1.0
#define CONTROL_FACTOR_FINE 2.0
#define FINE_ERROR          0.02
#define COARSE_ERROR        0.12

void srv_replay_fail(struct srv_replay *replay, const char *fmt, ...)
{
	va_list args;

	if (replay->n_failures < SRV_REPLAY_FAILURES_MAX) {
		va_start(args, fmt);
		vsnprintf(replay->failures[replay->n_failures], SRV_REPLAY_FAILURE_BYTES, fmt, args);
		va_end(args);
	}
	replay->n_failures++;
}

static const struct format_bound *bound_of(const char *format)
{
	for (uint32_t i = 0; i < KV_LENGTH(format_bounds); i++)
		if (strcmp(format_bounds[i].format, format) == 0)
			return &format_bounds[i];
	return NULL;
}

/* Numbers that are known to be bf16 already. */
static bool sends_bf16(const struct srv_replay *replay)
{
	return replay->in_dtype == KV_DTYPE_BF16 || srv_capture_is_bf16(replay->capture);
}

/* Whether sending rounds numbers that were not bf16 before. */
static bool rounds_on_the_way_in(const struct srv_replay *replay)
{
	return replay->in_dtype == KV_DTYPE_BF16 && !srv_capture_is_bf16(replay->capture);
}

double srv_replay_query_error(const struct srv_replay *replay)
{
	return rounds_on_the_way_in(replay) ? BF16_ERROR : 0;
}

/* Relative error that a layer's rows may have when they are read back. */
static double row_bound(const struct srv_replay *replay, const struct format_bound *bound)
{
	double error = bound->error * bound->factor;

	if (strcmp(bound->format, "bf16") == 0 && sends_bf16(replay))
		error = 0;
	if (rounds_on_the_way_in(replay))
		error += BF16_ERROR;
	/* Errors of storing and of sending add up as lengths, at worst: at most twice the sum of the squares.
	 */
	return DECODED_BOUND + sqrt(rounds_on_the_way_in(replay) ? 2 * error : error);
}

double srv_replay_relative_error(double error_square, double square)
{
	if (error_square == 0)
		return 0;
	/* A row of zeros decodes to at most 1e-12 a number: not an error. */
	return sqrt(error_square / fmax(square, 1e-12));
}

double srv_replay_output_bound(const struct srv_replay_layer *layer)
{
	const double margin = OUTPUT_MARGIN * sqrt(1 + OUTPUT_TAIL / sqrt((double)layer->n_outputs));

	return EXACT_BOUND + margin * srv_replay_relative_error(layer->predicted_square, layer->exact_square);
}

/* The error times this must not exceed the control's; 0: nothing is asked. */
static double control_factor(const struct srv_replay_layer *layer)
{
	double error = 0;

	for (uint32_t side = 0; side < 2; side++) {
		const struct format_bound *bound = bound_of(layer->rows[side].codec->format->name);

		error = fmax(error, bound ? bound->error : 1);
	}
	return error <= FINE_ERROR ? CONTROL_FACTOR_FINE : error <= COARSE_ERROR ? 1 : 0;
}

static void judge_outputs(struct srv_replay *replay, const struct srv_replay_layer *layer)
{
	const double error = srv_replay_relative_error(layer->error_square, layer->exact_square);
	const double stored = srv_replay_relative_error(layer->stored_error_square, layer->stored_square);
	const double control = srv_replay_relative_error(layer->control_square, layer->exact_square);
	const double bound = srv_replay_output_bound(layer);
	const double stored_bound = replay->is_cpu_backend ? STORED_BOUND_CPU : STORED_BOUND_DEVICE;
	const double lse_bound = replay->is_cpu_backend ? LSE_BOUND_CPU : LSE_BOUND_DEVICE;
	const double sigma = layer->logit_sigma / (double)layer->n_outputs;
	const double factor = control_factor(layer);

	/* Conditions are written so that NaN fails. */
	if (!(error <= bound))
		srv_replay_fail(replay,
			"layer %u: relative error %.3g of the attention output, above the bound %.3g",
			layer->number, error, bound);
	if (!(stored <= stored_bound))
		srv_replay_fail(replay,
			"layer %u: outputs are off by %.3g from attention over the rows that are stored, "
			"above %.3g",
			layer->number, stored, stored_bound);
	if (!(layer->lse_error_max <= lse_bound))
		srv_replay_fail(replay, "layer %u: a log-sum-exp is off by %.3g, above %.3g", layer->number,
			layer->lse_error_max, lse_bound);
	if (sigma >= SPREAD_SIGMA && factor > 0 && !(error * factor <= control))
		srv_replay_fail(replay,
			"layer %u: relative error %.3g, not below 1/%.0f of %.3g, the error of all-zero keys "
			"(logits spread by %.2f)",
			layer->number, error, factor, control, sigma);
}

static void judge_rows(struct srv_replay *replay, const struct srv_replay_layer *layer, uint32_t side)
{
	const struct kv_row_codec *codec = layer->rows[side].codec;
	const struct format_bound *bound = bound_of(codec->format->name);
	const char letter = side == SRV_REPLAY_K ? 'K' : 'V';
	const double error =
		srv_replay_relative_error(layer->row_error_square[side], layer->row_square[side]);
	if (!bound) {
		srv_replay_fail(replay, "no bound is stated for the row format %s", codec->format->name);
		return;
	}
	if (layer->n_packed_differ[side] > 0)
		srv_replay_fail(replay,
			"layer %u: %llu of %llu %c rows were read back with other bytes than %s gives",
			layer->number, (unsigned long long)layer->n_packed_differ[side],
			(unsigned long long)layer->rows[side].n_rows, letter, codec->format->name);
	if (!(layer->decoded_difference_max[side] <= DECODED_BOUND))
		srv_replay_fail(replay,
			"layer %u: a %c row was read back off by %.3g from what its bytes say, above %.3g",
			layer->number, letter, layer->decoded_difference_max[side], DECODED_BOUND);
	if (!(error <= row_bound(replay, bound)))
		srv_replay_fail(replay,
			"layer %u: %c rows were read back with a relative error of %.3g, above the bound "
			"%.3g",
			layer->number, letter, error, row_bound(replay, bound));
}

void srv_replay_expected_account(
	const struct srv_replay *replay, uint32_t n_tokens, struct srv_replay_account *account)
{
	const uint64_t n_rows = (uint64_t)n_tokens * replay->capture->kv_heads; /* of one layer, K or V */

	*account = (struct srv_replay_account){ .n_tokens = n_tokens };
	for (uint32_t i = 0; i < replay->capture->n_layers; i++)
		for (uint32_t side = 0; side < 2; side++) {
			const struct kv_row_codec *codec = replay->layers[i].rows[side].codec;

			account->payload_bytes += n_rows * codec->account.payload_bytes;
			account->norms_bytes += n_rows * codec->account.norms_bytes;
			account->scales_bytes += n_rows * codec->account.scales_bytes;
			account->zeros_bytes += n_rows * codec->account.zeros_bytes;
			account->exact_bytes += n_rows * codec->account.exact_bytes;
			account->stored_bytes += n_rows * codec->row_bytes;
			account->dense_equivalent_bytes += n_rows * kv_row_dense_bytes(codec->head_dim);
		}
	account->n_total = replay->pool.spec->n_blocks[0];
	account->n_owned = kv_div_up_u32(n_tokens, replay->pool.spec->block_size);
	account->n_free = account->n_total - account->n_owned;
}

static void judge_account(struct srv_replay *replay, const char *when, const struct srv_replay_account *got,
	const struct srv_replay_account *expected)
{
	const struct {
		const char *what;
		uint64_t got, expected;
	} figures[] = {
		{ "tokens", got->n_tokens, expected->n_tokens },
		{ "payload bytes", got->payload_bytes, expected->payload_bytes },
		{ "norm bytes", got->norms_bytes, expected->norms_bytes },
		{ "scale bytes", got->scales_bytes, expected->scales_bytes },
		{ "zero bytes", got->zeros_bytes, expected->zeros_bytes },
		{ "exact bytes", got->exact_bytes, expected->exact_bytes },
		{ "stored bytes", got->stored_bytes, expected->stored_bytes },
		{ "dense equivalent bytes", got->dense_equivalent_bytes, expected->dense_equivalent_bytes },
		{ "blocks", got->n_total, expected->n_total },
		{ "free blocks", got->n_free, expected->n_free },
		{ "owned blocks", got->n_owned, expected->n_owned },
		{ "shared blocks", got->n_shared, expected->n_shared },
		{ "draining blocks", got->n_draining, expected->n_draining },
		{ "reserved blocks", got->n_reserved, expected->n_reserved },
	};

	for (uint32_t i = 0; i < KV_LENGTH(figures); i++)
		if (figures[i].got != figures[i].expected)
			srv_replay_fail(replay, "%s: the daemon reports %llu %s, it should be %llu", when,
				(unsigned long long)figures[i].got, figures[i].what,
				(unsigned long long)figures[i].expected);
}

void srv_replay_judge(struct srv_replay *replay)
{
	struct srv_replay_account empty, full;

	for (uint32_t i = 0; i < replay->capture->n_layers; i++) {
		if (replay->layers[i].n_outputs > 0)
			judge_outputs(replay, &replay->layers[i]);
		judge_rows(replay, &replay->layers[i], SRV_REPLAY_K);
		judge_rows(replay, &replay->layers[i], SRV_REPLAY_V);
	}
	srv_replay_expected_account(replay, 0, &empty);
	srv_replay_expected_account(replay, replay->capture->n_tokens, &full);
	judge_account(replay, "before", &replay->before, &empty);
	judge_account(replay, "with all rows", &replay->during, &full);
	judge_account(replay, "after the session", &replay->after, &empty);
}
