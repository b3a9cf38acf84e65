/*
 * Replay: a capture goes through the daemon, and everything that comes back is compared.
 *
 * Steps (replay_run.c): make a pool of the capture's geometry, open a session, append the prompt's first
 * tokens layer by layer in pipelined chunks, then the rest token by token with one APPEND_DECODE per layer,
 * read every row back, close the session. Occupancy is read before, during and after. The pool is deleted
 * whatever happened.
 *
 * Comparisons (replay_check.c, replay_bounds.c): outputs with exact attention over the capture's own rows and
 * with exact attention over the rows as a codec made here from the same pool description stores them; rows
 * that were read back with that codec's bytes; the daemon's memory report with rows * row_bytes. A comparison
 * that fails is a sentence in the list of failures and does not end the replay; an operation that fails does.
 */
#ifndef SERVER_CTL_REPLAY_H
#define SERVER_CTL_REPLAY_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "core/format.h"
#include "core/number.h"
#include "server/ctl/capture.h"
#include "server/ctl/client.h"
#include "server/ctl/percentile.h"
#include "server/ctl/progress.h"

#define SRV_REPLAY_FAILURES_MAX  16u
#define SRV_REPLAY_FAILURE_BYTES 240u
#define SRV_REPLAY_SEQUENCE_ID   1u

/* Index of K and V in arrays of two. */
enum { SRV_REPLAY_K, SRV_REPLAY_V };

/* Rows of one layer, K or V, as this program knows them. [tokens][kv_heads] rows. */
struct srv_replay_rows {
	const struct kv_row_codec *codec;
	uint32_t head_dim;
	uint64_t n_rows;       /* tokens * kv_heads */
	float *original;       /* the capture's numbers */
	uint8_t *packed;       /* the codec's bytes of what is sent */
	float *decoded;        /* what these bytes say */
	double *squares;       /* squared length of each original row */
	double *error_squares; /* squared distance of each decoded row from the original one */
	double square, along;  /* sums of <original, original> and <decoded, original> over all rows */
	uint64_t map_bytes[5]; /* of the five arrays */
};

/* Sums over the outputs of one layer, and what they give. */
struct srv_replay_layer {
	uint32_t number;
	float scale; /* softmax */
	struct srv_replay_rows rows[2];
	/* sums: one term per token and query head */
	uint64_t n_outputs;
	double exact_square, error_square, control_square, predicted_square;
	double stored_square, stored_error_square; /* against attention over the stored rows */
	double dot, got_square;
	double logit_sigma;                        /* sum of standard deviations of a query's logits */
	double lse_error_max;                      /* of the log-sum-exp, against the stored rows */
	double row_square[2], row_error_square[2]; /* rows read back decoded, against the original ones */
	uint64_t n_packed_differ[2];               /* rows whose bytes differ from the codec's */
	double decoded_difference_max[2]; /* of a row read back, from the codec's, relative to its length */
};

/* What the daemon reports for the pool; and what it must be. */
struct srv_replay_account {
	uint64_t n_tokens;
	uint64_t payload_bytes, norms_bytes, scales_bytes, zeros_bytes, exact_bytes, stored_bytes;
	uint64_t dense_equivalent_bytes;
	uint64_t n_total, n_free, n_owned, n_shared, n_draining, n_reserved;
};

struct srv_replay {
	const struct srv_ctl *ctl;
	/* what is asked for */
	const struct srv_capture *capture;
	enum kv_dtype in_dtype;
	uint32_t n_prefill_tokens, n_chunk_tokens, block_size;
	/* what is used */
	struct srv_temp_pool pool;
	struct tqkv_conn *conn;
	struct tqkv_session *session;
	struct srv_progress progress;
	struct srv_replay_layer *layers; /* [capture->n_layers] */
	uint8_t *staging;                /* rows of one request, as sent */
	uint64_t staging_bytes;
	bool is_cpu_backend; /* the scalar one: its attention is the float64 oracle's; others round more */
	char backend[32];
	/* what came out */
	uint64_t payload_in_bytes, payload_out_bytes, read_bytes;
	uint64_t prefill_ns, decode_ns, read_ns;
	struct srv_percentile round_trips; /* of APPEND_DECODE, nanoseconds */
	uint64_t kernel_us, server_us;     /* sums of the daemon's own timings */
	struct srv_replay_account before, during, after;
	uint32_t n_failures;
	char failures[SRV_REPLAY_FAILURES_MAX][SRV_REPLAY_FAILURE_BYTES];
};

/* ---- replay_run.c ---- */
/*
 * Fills `replay` from capture, in_dtype, n_prefill_tokens, n_chunk_tokens (0: as many as a frame holds, at
 * most 64), block_size and pool (initialised), which the caller has set. A failure to operate is the status;
 * see n_failures for the rest. srv_replay_finish() is needed after either.
 */
KV_MUST_CHECK enum kv_status srv_replay_run(struct srv_replay *replay, struct kv_error *err);
/* Closes and deletes what still exists in the daemon, frees the rest. The status is that of deleting. */
KV_MUST_CHECK enum kv_status srv_replay_finish(struct srv_replay *replay, struct kv_error *err);

/* ---- replay_check.c ---- */
/* Loads and encodes the rows of all layers. */
KV_MUST_CHECK enum kv_status srv_replay_prepare(struct srv_replay *replay, struct kv_error *err);
void srv_replay_release(struct srv_replay *replay);
/* Compares the outputs of one token, which sees tokens [0, token_idx]. out [q_heads][v_head_dim], lse
 * [q_heads]. */
void srv_replay_check_output(struct srv_replay *replay, uint32_t layer_idx, uint32_t token_idx,
	const float *q, const float *out, const float *lse);
/* Compares rows [token_first, token_first + n_tokens) of one layer that were read back; side: SRV_REPLAY_K or
 * _V. */
void srv_replay_check_packed(struct srv_replay *replay, uint32_t layer_idx, uint32_t side,
	uint32_t token_first, uint32_t n_tokens, const uint8_t *rows);
void srv_replay_check_decoded(struct srv_replay *replay, uint32_t layer_idx, uint32_t side,
	uint32_t token_first, uint32_t n_tokens, const float *rows);

/* ---- replay_bounds.c ---- */
/* Squared error of rounding a query on the way in, relative to its squared length. */
double srv_replay_query_error(const struct srv_replay *replay);
/* Relative error that a layer's outputs may have against exact attention over the original rows. */
double srv_replay_output_bound(const struct srv_replay_layer *layer);
double srv_replay_relative_error(double error_square, double square);
/* Holds every result against its bound, and the accounts against each other. */
void srv_replay_judge(struct srv_replay *replay);
void srv_replay_fail(struct srv_replay *replay, const char *fmt, ...) KV_PRINTF(2, 3);
/* What the daemon's report must say with n_tokens tokens in the pool. */
void srv_replay_expected_account(
	const struct srv_replay *replay, uint32_t n_tokens, struct srv_replay_account *account);

/* ---- replay_report.c ---- */
void srv_replay_print(struct srv_replay *replay);
void srv_replay_print_json(struct srv_replay *replay);

#endif
