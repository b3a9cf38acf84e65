#include "core/k_center.h"

#include "core/number.h"

void kv_k_center_subtract(const float *mu, const float *row, uint32_t head_dim, float *out)
{
	for (uint32_t i = 0; i < head_dim; i++)
		out[i] = row[i] - mu[i];
}

void kv_k_center_add(const float *mu, uint32_t head_dim, float *row)
{
	for (uint32_t i = 0; i < head_dim; i++)
		row[i] += mu[i];
}

double kv_k_center_product(const float *mu, const float *q, uint32_t head_dim)
{
	double product = 0;

	for (uint32_t i = 0; i < head_dim; i++)
		product += (double)q[i] * (double)mu[i];
	return product;
}

enum kv_status kv_k_center_check(const float *mu, uint32_t n_values, struct kv_error *err)
{
	for (uint32_t i = 0; i < n_values; i++) {
		if (!kv_f32_is_finite(mu[i]))
			return kv_fail(err, KV_BAD_VALUE, "number %u of the K centre is not finite", i);
	}
	return KV_OK;
}

void kv_k_center_take(double *sums, const float *row, uint32_t head_dim)
{
	for (uint32_t i = 0; i < head_dim; i++)
		sums[i] += (double)row[i];
}

void kv_k_center_finish(const double *sums, uint64_t n_rows, uint32_t head_dim, float *mu)
{
	for (uint32_t i = 0; i < head_dim; i++)
		mu[i] = n_rows == 0 ? 0 : (float)(sums[i] / (double)n_rows);
}
