/*
 * Merging by log-sum-exp. A part's share of a row is exp(lse - greatest lse) over the sum of these; the
 * output is the sum of the parts' outputs by their shares. float64, rounded once.
 */
#include <math.h>
#include <string.h>

#include "core/format.h"
#include "proto/client/conn.h"

#define PARTS_MAX 256u

static enum tqkv_status check(uint32_t n_parts, const void *const *outs, const float *const *lses,
	uint64_t n_rows, uint32_t dim, enum tqkv_dtype dtype, struct tqkv_error *err)
{
	if (n_parts > PARTS_MAX)
		return tqkv_fail(err, TQKV_BAD_ARG, "%u parts: expected at most %u", n_parts, PARTS_MAX);
	if (dim == 0 || dim > KV_HEAD_DIM_MAX)
		return tqkv_fail(err, TQKV_BAD_ARG, "dim %u: expected 1 to %u", dim, KV_HEAD_DIM_MAX);
	if (dtype != TQKV_F32 && dtype != TQKV_F16 && dtype != TQKV_BF16)
		return tqkv_fail(err, TQKV_BAD_ARG, "dtype %u: expected f32, f16 or bf16", (unsigned)dtype);
	for (uint32_t p = 0; n_rows > 0 && p < n_parts; p++) {
		if (!outs || !lses || !lses[p])
			return tqkv_fail_null(err, "outs, lses");
		for (uint64_t row = 0; row < n_rows; row++) {
			if (isnan(lses[p][row]) || (isinf(lses[p][row]) && lses[p][row] > 0))
				return tqkv_fail(err, TQKV_BAD_VALUE,
					"part %u, row %llu: a log-sum-exp of %g", p, (unsigned long long)row,
					(double)lses[p][row]);
			if (!outs[p] && !isinf(lses[p][row]))
				return tqkv_fail_null(err, "outs");
		}
	}
	return TQKV_OK;
}

/* Shares of a row's parts; returns the log-sum-exp of the whole. */
static double share(uint32_t n_parts, const float *const *lses, uint64_t row, double shares[PARTS_MAX])
{
	double top = -INFINITY, sum = 0;

	for (uint32_t p = 0; p < n_parts; p++)
		top = fmax(top, (double)lses[p][row]);
	for (uint32_t p = 0; p < n_parts; p++) {
		shares[p] = isinf(lses[p][row]) ? 0 : exp((double)lses[p][row] - top);
		sum += shares[p];
	}
	for (uint32_t p = 0; sum > 0 && p < n_parts; p++)
		shares[p] /= sum;
	return top + log(sum);
}

enum tqkv_status tqkv_merge(uint32_t n_parts, const void *const *outs, const float *const *lses,
	uint64_t n_rows, uint32_t dim, enum tqkv_dtype dtype, void *out, float *lse, struct tqkv_error *err)
{
	if (n_rows > 0 && !out)
		return tqkv_fail_null(err, "out");

	const enum tqkv_status status = check(n_parts, outs, lses, n_rows, dim, dtype, err);
	float values[KV_HEAD_DIM_MAX];

	if (status != TQKV_OK)
		return status;

	const size_t row_bytes = (size_t)dim * kv_dtype_bytes((enum kv_dtype)dtype);

	for (uint64_t row = 0; row < n_rows; row++) {
		double shares[PARTS_MAX], sums[KV_HEAD_DIM_MAX] = { 0 };
		const double whole = share(n_parts, lses, row, shares);

		for (uint32_t p = 0; p < n_parts; p++) {
			if (shares[p] == 0)
				continue; /* what counts for nothing may be anything */
			kv_rows_load_f32((enum kv_dtype)dtype, (const uint8_t *)outs[p] + row * row_bytes,
				dim, values);
			for (uint32_t i = 0; i < dim; i++)
				sums[i] += shares[p] * (double)values[i];
		}
		for (uint32_t i = 0; i < dim; i++)
			values[i] = (float)sums[i];
		kv_rows_store((enum kv_dtype)dtype, values, dim, (uint8_t *)out + row * row_bytes);
		if (lse)
			lse[row] = (float)whole;
	}
	return TQKV_OK;
}
