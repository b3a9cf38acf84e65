#include "server/ctl/compare.h"

#include <math.h>

#include "core/memory.h"

enum kv_status srv_compare_init(struct srv_compare *compare, uint32_t head_dim, uint32_t n_rows,
	uint32_t n_queries, struct kv_error *err)
{
	*compare = (struct srv_compare){ .head_dim = head_dim, .n_rows = n_rows, .n_queries = n_queries };
	compare->rows = kv_alloc((size_t)n_rows * head_dim, sizeof(float));
	compare->coded = kv_alloc((size_t)n_rows * head_dim, sizeof(float));
	compare->queries = kv_alloc((size_t)n_queries * head_dim, sizeof(float));
	compare->scale = kv_alloc(n_queries, sizeof(double));
	compare->scores = kv_alloc((size_t)n_queries * n_rows, sizeof(double));
	compare->coded_scores = kv_alloc(n_rows, sizeof(double));
	compare->weights = kv_alloc(n_rows, sizeof(double));
	compare->coded_weights = kv_alloc(n_rows, sizeof(double));
	if (!compare->rows || !compare->coded || !compare->queries || !compare->scale || !compare->scores ||
		!compare->coded_scores || !compare->weights || !compare->coded_weights)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %u rows and %u queries", n_rows, n_queries);
	return KV_OK;
}

void srv_compare_finish(struct srv_compare *compare)
{
	kv_free(compare->rows);
	kv_free(compare->coded);
	kv_free(compare->queries);
	kv_free(compare->scale);
	kv_free(compare->scores);
	kv_free(compare->coded_scores);
	kv_free(compare->weights);
	kv_free(compare->coded_weights);
	*compare = (struct srv_compare){ 0 };
}

void srv_compare_random(uint64_t *state, uint32_t n, float *values)
{
	for (uint32_t i = 0; i < n; i++) {
		double sum = -6;

		for (uint32_t k = 0; k < 12; k++) {
			*state = *state * 6364136223846793005u + 1442695040888963407u;
			sum += (double)(*state >> 40) * 0x1p-24;
		}
		values[i] = (float)sum;
	}
}

static double product(const float *a, const float *b, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += (double)a[i] * (double)b[i];
	return sum;
}

static void score_rows(const struct srv_compare *compare, const float *rows, uint32_t query, double *scores)
{
	for (uint32_t r = 0; r < compare->n_rows; r++)
		scores[r] = product(compare->queries + (size_t)query * compare->head_dim,
			rows + (size_t)r * compare->head_dim, compare->head_dim);
}

static double mean_of(const double *values, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += values[i];
	return sum / n;
}

static double deviation_of(const double *values, uint32_t n)
{
	const double mean = mean_of(values, n);
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += (values[i] - mean) * (values[i] - mean);
	return sqrt(sum / n);
}

static void softmax(const double *scores, uint32_t n, double scale, double *weights)
{
	double largest = -INFINITY, sum = 0;

	for (uint32_t i = 0; i < n; i++)
		largest = fmax(largest, scores[i] * scale);
	for (uint32_t i = 0; i < n; i++)
		sum += weights[i] = exp(scores[i] * scale - largest);
	for (uint32_t i = 0; i < n; i++)
		weights[i] /= sum;
}

static double distance(const double *a, const double *b, uint32_t n)
{
	double sum = 0;

	for (uint32_t i = 0; i < n; i++)
		sum += fabs(a[i] - b[i]);
	return sum / 2;
}

void srv_compare_prepare(struct srv_compare *compare, bool is_scaled)
{
	const uint32_t n = compare->n_rows;

	compare->sigma = compare->zero_weights = 0;
	for (uint32_t r = 0; r < n; r++)
		compare->coded_weights[r] = 1.0 / n; /* of keys of zeros */
	for (uint32_t q = 0; q < compare->n_queries; q++) {
		double *scores = compare->scores + (size_t)q * n;

		score_rows(compare, compare->rows, q, scores);

		const double deviation = deviation_of(scores, n);

		compare->scale[q] = is_scaled || deviation == 0 ? 1 / sqrt((double)compare->head_dim)
								: SRV_COMPARE_SIGMA / deviation;
		compare->sigma += deviation * compare->scale[q] / compare->n_queries;
		softmax(scores, n, compare->scale[q], compare->weights);
		compare->zero_weights +=
			distance(compare->weights, compare->coded_weights, n) / compare->n_queries;
	}
}

/* Sums over all rows. A ratio over nothing is 0. */
static double ratio(double a, double b)
{
	return b > 0 ? a / b : 0;
}

static void measure_rows(const struct srv_compare *compare, struct srv_compare_result *result)
{
	double lost = 0, all = 0, cosines = 0;

	for (uint32_t r = 0; r < compare->n_rows; r++) {
		const float *row = compare->rows + (size_t)r * compare->head_dim;
		const float *coded = compare->coded + (size_t)r * compare->head_dim;
		const double row_square = product(row, row, compare->head_dim);
		const double coded_square = product(coded, coded, compare->head_dim);
		const double dot = product(row, coded, compare->head_dim);

		for (uint32_t i = 0; i < compare->head_dim; i++)
			lost += ((double)row[i] - (double)coded[i]) * ((double)row[i] - (double)coded[i]);
		all += row_square;
		cosines += ratio(dot, sqrt(row_square) * sqrt(coded_square));
	}
	result->error = ratio(lost, all);
	result->cosine = cosines / compare->n_rows;
}

/* Channel by channel: the variance of the error over that of the rows. */
static void measure_parts(const struct srv_compare *compare, struct srv_compare_result *result)
{
	double lost = 0, all = 0;

	for (uint32_t i = 0; i < compare->head_dim; i++) {
		double row_mean = 0, error_mean = 0;

		for (uint32_t r = 0; r < compare->n_rows; r++) {
			const size_t at = (size_t)r * compare->head_dim + i;

			row_mean += (double)compare->rows[at] / compare->n_rows;
			error_mean +=
				((double)compare->coded[at] - (double)compare->rows[at]) / compare->n_rows;
		}
		for (uint32_t r = 0; r < compare->n_rows; r++) {
			const size_t at = (size_t)r * compare->head_dim + i;
			const double row = (double)compare->rows[at] - row_mean;
			const double error =
				(double)compare->coded[at] - (double)compare->rows[at] - error_mean;

			all += row * row;
			lost += error * error;
		}
	}
	result->part_error = ratio(lost, all);
}

void srv_compare_measure(struct srv_compare *compare, struct srv_compare_result *result)
{
	const uint32_t n = compare->n_rows;
	double cross = 0, square = 0, part_cross = 0, part_square = 0;

	*result = (struct srv_compare_result){ 0 };
	measure_rows(compare, result);
	measure_parts(compare, result);
	for (uint32_t q = 0; q < compare->n_queries; q++) {
		const double *scores = compare->scores + (size_t)q * n;
		const double mean = mean_of(scores, n);

		score_rows(compare, compare->coded, q, compare->coded_scores);
		for (uint32_t r = 0; r < n; r++) {
			cross += scores[r] * compare->coded_scores[r];
			square += scores[r] * scores[r];
			part_cross += (scores[r] - mean) * compare->coded_scores[r];
			part_square += (scores[r] - mean) * (scores[r] - mean);
		}
		softmax(scores, n, compare->scale[q], compare->weights);
		softmax(compare->coded_scores, n, compare->scale[q], compare->coded_weights);
		result->weights_error +=
			distance(compare->weights, compare->coded_weights, n) / compare->n_queries;
	}
	result->slope = ratio(cross, square);
	result->part_slope = ratio(part_cross, part_square);
	result->passes = result->weights_error <= SRV_COMPARE_SHARE_MAX * compare->zero_weights;
}
