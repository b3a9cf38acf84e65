/*
 * The rows and queries that `codec compare` takes: from files of bare numbers, or one head of a layer of a
 * capture with the queries that read it. One thread.
 */
#ifndef SERVER_CTL_COMPARE_INPUT_H
#define SERVER_CTL_COMPARE_INPUT_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

struct srv_compare_ask {
	const char *path, *queries_path; /* queries: NULL: the capture's, or none */
	bool is_v;                       /* of a capture: values */
	bool has_layer, has_head;        /* given; they mean something with a capture only */
	uint64_t layer, head;            /* the model's number of the layer; KV head */
	uint32_t head_dim;               /* 0: not given, which only a capture allows */
	uint32_t n_rows_max, n_queries_max;
};

struct srv_compare_input {
	float *rows, *queries; /* [n, head_dim], kv_free(); queries NULL: there are none */
	uint32_t head_dim, n_rows, n_queries;
	bool is_capture;
};

/* Zeroed on failure, whose text begins with the path. SRV_CTL_USAGE: an option is missing or does not fit. */
KV_MUST_CHECK enum kv_status srv_compare_input_load(
	const struct srv_compare_ask *ask, struct srv_compare_input *out, struct kv_error *err);
void srv_compare_input_finish(struct srv_compare_input *input);

#endif
