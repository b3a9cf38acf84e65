/*
 * Comparison: what a row format does to given rows, as keys of an attention over them.
 *
 * Every figure stands beside two controls, rows of zeros and rows of random directions: a figure that is good
 * for these too says nothing. Softmax does not see what is the same in all keys, so scores and rows are
 * compared twice, as they are and without their mean: keys with a large constant part keep a small relative
 * error while everything that tells them apart is lost.
 *
 * One thread. Rows, queries and scores are in memory, within the bounds below.
 */
#ifndef SERVER_CTL_COMPARE_H
#define SERVER_CTL_COMPARE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

#define SRV_COMPARE_ROWS_MAX    65536u
#define SRV_COMPARE_QUERIES_MAX 64u
/* Spread of the logits of queries that are made here: above 1, so that the weights depend on the keys. */
#define SRV_COMPARE_SIGMA 2.0
/* Weights off by this part of what keys of zeros are off by, or more: the keys are lost. */
#define SRV_COMPARE_SHARE_MAX 0.5

struct srv_compare {
	uint32_t head_dim, n_rows, n_queries;
	float *rows;    /* [n_rows, head_dim] */
	float *queries; /* [n_queries, head_dim] */
	float *coded;   /* [n_rows, head_dim]: what is compared with rows; the caller fills it */
	double *scale;  /* [n_queries]: of logits */
	double *scores; /* [n_queries, n_rows]: <q, row> */
	double *coded_scores, *weights, *coded_weights; /* [n_rows] */
	double sigma;                                   /* of a query's logits, mean */
	double zero_weights;                            /* weights_error of rows of zeros */
};

struct srv_compare_result {
	double error;         /* sum |x - x'|^2 / sum |x|^2 */
	double cosine;        /* mean; 0 where a row is zero */
	double slope;         /* of scores: sum s s' / sum s^2 */
	double part_error;    /* the first again, of rows without their mean */
	double part_slope;    /* slope of scores without each query's mean */
	double weights_error; /* half the sum of |p - p'| of the softmax weights, mean over queries */
	bool passes;          /* weights_error is below SRV_COMPARE_SHARE_MAX of that of rows of zeros */
};

/* Room for n_rows and n_queries, zeroed. srv_compare_finish() it, also on failure. */
KV_MUST_CHECK enum kv_status srv_compare_init(struct srv_compare *compare, uint32_t head_dim, uint32_t n_rows,
	uint32_t n_queries, struct kv_error *err);
void srv_compare_finish(struct srv_compare *compare);

/* Random numbers of a fixed generator of its own, near enough to normal ones (sum of twelve uniform). */
void srv_compare_random(uint64_t *state, uint32_t n, float *values);
/*
 * Rows and queries are there: scores and the control. Each query is scaled to SRV_COMPARE_SIGMA, or by
 * 1 / sqrt(head_dim) with is_scaled.
 */
void srv_compare_prepare(struct srv_compare *compare, bool is_scaled);
/* `coded` is there. */
void srv_compare_measure(struct srv_compare *compare, struct srv_compare_result *result);

#endif
