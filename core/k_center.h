/*
 * k_center: a mean that is taken off every K row of a KV head before it is stored (FORMATS 8). Keys with a
 * large constant part keep their precision for what differs between them. Attention adds scale * <q, mu> back
 * to every logit (core/attention.h), reading rows adds mu back.
 *
 * mu is head_dim float32 of one layer and KV head; the caller owns it. Pure functions, any thread, no heap.
 */
#ifndef CORE_K_CENTER_H
#define CORE_K_CENTER_H

#include <stdint.h>

#include "core/error.h"

/* Before encoding: out = row - mu in float32; may overflow to infinity, which encoders refuse. In place
 * allowed. */
void kv_k_center_subtract(const float *mu, const float *row, uint32_t head_dim, float *out);
/* After decoding: row += mu in float32. */
void kv_k_center_add(const float *mu, uint32_t head_dim, float *row);
/* <q, mu> in float64, in order of index. */
double kv_k_center_product(const float *mu, const float *q, uint32_t head_dim);
/* BAD_VALUE names the first of n_values numbers that is not finite. */
KV_MUST_CHECK enum kv_status kv_k_center_check(const float *mu, uint32_t n_values, struct kv_error *err);

/*
 * Measuring: begin with zeroed sums[head_dim], take every row in order of tokens, finish with the number of
 * rows. The mean is rounded to float32 once; without rows it is 0.
 */
void kv_k_center_take(double *sums, const float *row, uint32_t head_dim);
void kv_k_center_finish(const double *sums, uint64_t n_rows, uint32_t head_dim, float *mu);

#endif
