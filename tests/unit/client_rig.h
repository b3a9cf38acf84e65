/*
 * What the client's tests share: a fake server, a connection, a session, and rows whose every number is
 * different.
 */
#ifndef TESTS_UNIT_CLIENT_RIG_H
#define TESTS_UNIT_CLIENT_RIG_H

#include <check.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/tqkv.h"
#include "tests/unit/fake_server.h"

struct rig {
	struct fake_server fake;
	struct tqkv_conn *conn;
	struct tqkv_session *session;
	struct tqkv_error err;
};

static inline void rig_open(struct rig *rig, const struct tqkv_options *options, const char *name)
{
	const struct tqkv_open_params params = { .pool = "demo", .session_name = name };

	ck_assert_msg(tqkv_connect(rig->fake.address, options, &rig->conn, &rig->err) == TQKV_OK, "%s",
		rig->err.message);
	ck_assert_msg(tqkv_open(rig->conn, &params, 0, &rig->session, &rig->err) == TQKV_OK, "%s",
		rig->err.message);
}

static inline void rig_start(struct rig *rig, const struct tqkv_options *options, const char *name)
{
	memset(rig, 0, sizeof(*rig));
	fake_start(&rig->fake);
	rig_open(rig, options, name);
}

static inline void rig_stop(struct rig *rig)
{
	tqkv_disconnect(rig->conn);
	fake_stop(&rig->fake);
}

/* The number at `dim` of a token's row on a layer; small integers, so float sums are exact. */
static inline float rig_k(uint64_t sequence, uint32_t layer, uint32_t token, uint32_t dim)
{
	return (float)(sequence * 1000003 + layer * 7919 + token * 131 + dim);
}

static inline float rig_v(uint64_t sequence, uint32_t layer, uint32_t token, uint32_t dim)
{
	return (float)((sequence * 13 + layer * 7 + token * 3 + dim) % 251);
}

/* K and V rows for the items, [n_layers][tokens][...]; the caller frees rows->k and rows->v. */
static inline void rig_fill(struct tqkv_rows *rows)
{
	uint64_t n_tokens = 0;
	size_t k_at = 0, v_at = 0;

	for (uint32_t i = 0; i < rows->n_items; i++)
		n_tokens += rows->items[i].n_tokens;
	rows->k_bytes = rows->n_layers * n_tokens * FAKE_K_TOKEN * sizeof(float);
	rows->v_bytes = rows->n_layers * n_tokens * FAKE_V_TOKEN * sizeof(float);
	rows->k_dtype = rows->v_dtype = TQKV_F32;

	float *k = malloc(rows->k_bytes + 1);
	float *v = malloc(rows->v_bytes + 1);

	for (uint32_t layer = 0; layer < rows->n_layers; layer++)
		for (uint32_t i = 0; i < rows->n_items; i++)
			for (uint32_t token = 0; token < rows->items[i].n_tokens; token++) {
				const struct tqkv_item *item = &rows->items[i];

				for (uint32_t dim = 0; dim < FAKE_K_TOKEN; dim++)
					k[k_at++] = rig_k(item->sequence, rows->layer_first + layer,
						item->position + token, dim);
				for (uint32_t dim = 0; dim < FAKE_V_TOKEN; dim++)
					v[v_at++] = rig_v(item->sequence, rows->layer_first + layer,
						item->position + token, dim);
			}
	rows->k = k;
	rows->v = v;
}

static inline void rig_free(struct tqkv_rows *rows)
{
	free((void *)(uintptr_t)rows->k);
	free((void *)(uintptr_t)rows->v);
	rows->k = rows->v = NULL;
}

/* Queries whose first number tells the query. */
static inline float *rig_queries(struct tqkv_rows *rows, uint32_t n_q)
{
	float *q = calloc((size_t)n_q * FAKE_Q, sizeof(float));

	for (uint32_t i = 0; i < n_q; i++)
		for (uint32_t head = 0; head < FAKE_Q_HEADS; head++)
			q[((size_t)i * FAKE_Q_HEADS + head) * FAKE_K_DIM] = (float)(i + 1);
	rows->q = q;
	rows->q_bytes = (uint64_t)n_q * FAKE_Q * sizeof(float);
	rows->q_dtype = rows->out_dtype = TQKV_F32;
	return q;
}

/* What the fake answers to query q_idx of a sequence of which `seen` tokens are seen. */
static inline float rig_out(
	uint64_t sequence, uint32_t layer, uint32_t seen, uint32_t q_idx, uint32_t out_idx)
{
	const uint32_t head = out_idx / FAKE_V_DIM;
	const uint32_t dim = head / (FAKE_Q_HEADS / FAKE_KV_HEADS) * FAKE_V_DIM + out_idx % FAKE_V_DIM;
	float sum = (float)(q_idx + 1);

	for (uint32_t token = 0; token < seen; token++)
		sum += rig_v(sequence, layer, token, dim);
	return sum;
}

/* Rows of one sequence at a position on all layers, appended; returns the call's status. */
static inline enum tqkv_status rig_append(struct rig *rig, uint64_t sequence, uint32_t position,
	uint32_t n_tokens, struct tqkv_item_result *got)
{
	const struct tqkv_item item = { sequence, position, n_tokens, 0, position == 0 ? TQKV_CREATE : 0 };
	struct tqkv_rows rows = { .items = &item, .n_items = 1, .n_layers = FAKE_LAYERS };
	struct tqkv_rows_result result = { .items = got };
	enum tqkv_status status;

	rig_fill(&rows);
	status = tqkv_append(rig->session, &rows, 2000, &result, &rig->err);
	rig_free(&rows);
	return status;
}

#define RIG_OK(rig, call) ck_assert_msg((call) == TQKV_OK, "%s: %s", #call, (rig)->err.message)

#endif
