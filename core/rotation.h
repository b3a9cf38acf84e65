/*
 * Rotation: the orthogonal matrix that spreads a row over its channels before it is quantised (FORMATS 2).
 *
 * One rotation serves K and V of a pool, or of a layer. It is made once from a seed or a given matrix, is
 * immutable afterwards and may be shared by any number of threads; row codecs borrow it, so it outlives them.
 * Two precisions: the float32 functions follow the written order of FORMATS, since stored bytes depend on
 * them; the float64 functions apply the same matrix to queries and attention outputs, where only the error
 * counts.
 *
 * Two ways of storage stand behind all kinds: signs and butterflies in blocks of powers of two (rht, block),
 * or a dense float32 matrix (qr, file, projection). The projections of the QJL signs (FORMATS 5.2, 5.4) are
 * objects of the same type, though their rows have length sqrt(block) instead of 1: backward is S^T, not the
 * inverse.
 *
 * Creating a qr takes some 10 ms at 256 channels: call it where computing is allowed.
 */
#ifndef CORE_ROTATION_H
#define CORE_ROTATION_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

#define KV_HEAD_DIM_MIN       16u
#define KV_HEAD_DIM_MAX       256u
#define KV_HEAD_DIM_STEP      16u
#define KV_ROTATION_SEED_BASE 42u /* FORMATS 1: default for all layers */
/* Added to the rotation's seed for the projection of tqpN (FORMATS 5.2). */
#define KV_PROJECTION_SEED_OFFSET 1000u
/*
 * How far a given matrix may be from orthogonal: largest entry of P P^T - I. A matrix that was made in
 * float32 is off by some 1e-6; an error of 1e-5 is still below the error of 8 bits (relative 6e-3) by far.
 */
#define KV_ROTATION_ORTHOGONAL_TOLERANCE 1e-5

enum kv_rotation_kind {
	KV_ROTATION_NONE = 0,
	KV_ROTATION_RHT = 1,        /* signs, Hadamard, signs; powers of two */
	KV_ROTATION_QR = 2,         /* Q of a Gaussian matrix; any dim */
	KV_ROTATION_FILE = 3,       /* a given orthogonal matrix */
	KV_ROTATION_BLOCK = 4,      /* signs, Hadamard in blocks of descending powers of two; recipes */
	KV_ROTATION_PROJECTION = 5, /* a given matrix with rows of length about sqrt(head_dim); QJL */
};

struct kv_rotation {
	enum kv_rotation_kind kind;
	uint32_t head_dim;
	uint32_t seed;
	/* rht, block: blocks are the powers of two that head_dim is the sum of, the largest first. */
	bool is_normalised;               /* else every factor is 1 */
	float factors[9];                 /* of a block of 2^i channels: float32(1 / sqrt(2^i)) */
	float signs_in[KV_HEAD_DIM_MAX];  /* s1: +1 or -1 */
	float signs_out[KV_HEAD_DIM_MAX]; /* s2; block: all +1 */
	/*
	 * qr, file, projection: [head_dim, head_dim], row-major, and the same transposed, which is what
	 * forward reads in order; owned; else NULL.
	 */
	float *matrix, *transposed;
};

/* "none", "rht", "qr", "file", "block", "projection". */
const char *kv_rotation_kind_name(enum kv_rotation_kind kind);
/* What a pool may ask for: "rht", "qr", "file". BAD_ARG with these names for anything else. */
KV_MUST_CHECK enum kv_status kv_rotation_kind_parse(
	const char *name, enum kv_rotation_kind *kind, struct kv_error *err);
/* rht at powers of two, qr elsewhere. */
enum kv_rotation_kind kv_rotation_kind_default(uint32_t head_dim);
/* OK when the kind can be made at this dim, else BAD_ARG with the reason. */
KV_MUST_CHECK enum kv_status kv_rotation_check(
	enum kv_rotation_kind kind, uint32_t head_dim, struct kv_error *err);

/* Seed of one layer's own matrix; without `per_layer` rotation the base itself is used. Modulo 2^32. */
uint32_t kv_rotation_layer_seed(uint64_t seed_base, uint32_t layer_idx, uint32_t head_idx);

/*
 * rht, qr, block (normalised) from a seed. The caller owns the result until kv_rotation_destroy(), which
 * accepts NULL. Kinds that are a given matrix are BAD_ARG here.
 */
KV_MUST_CHECK enum kv_status kv_rotation_create(enum kv_rotation_kind kind, uint32_t head_dim, uint64_t seed,
	struct kv_rotation **rotation, struct kv_error *err);
/*
 * file or projection from head_dim * head_dim float32, row-major, which are copied. All must be finite; a
 * file must be orthogonal within KV_ROTATION_ORTHOGONAL_TOLERANCE, else BAD_VALUE names the first bad rows.
 * The seed of a file is what the projection of tqpN is derived from.
 */
KV_MUST_CHECK enum kv_status kv_rotation_create_from_matrix(enum kv_rotation_kind kind, uint32_t head_dim,
	uint64_t seed, const float *matrix, struct kv_rotation **rotation, struct kv_error *err);
/* Signs and unnormalised butterflies in blocks: y = H (s * x). The projection of recipes, from its own seed.
 */
KV_MUST_CHECK enum kv_status kv_rotation_create_signs(
	uint32_t head_dim, uint64_t seed, struct kv_rotation **rotation, struct kv_error *err);
/*
 * The projection of tqpN, from its own seed (that of the rotation plus KV_PROJECTION_SEED_OFFSET): signs and
 * unnormalised butterflies at powers of two, else the qr matrix, whose rows are shorter by sqrt(head_dim).
 */
KV_MUST_CHECK enum kv_status kv_rotation_create_projection(
	uint32_t head_dim, uint64_t seed, struct kv_rotation **rotation, struct kv_error *err);
void kv_rotation_destroy(struct kv_rotation *rotation);

/* y = P x and x = P^T y, head_dim numbers. Source and destination may be the same array, else not overlap. */
void kv_rotation_forward(const struct kv_rotation *rotation, const float *x, float *y);
void kv_rotation_backward(const struct kv_rotation *rotation, const float *y, float *x);
void kv_rotation_forward_f64(const struct kv_rotation *rotation, const double *x, double *y);
void kv_rotation_backward_f64(const struct kv_rotation *rotation, const double *y, double *x);

/* Rows [row_first, row_first + n_rows) of P as float32, row-major, for clients that rotate themselves. */
void kv_rotation_matrix(const struct kv_rotation *rotation, uint32_t row_first, uint32_t n_rows, float *rows);

/* What the memory report counts for it. */
uint64_t kv_rotation_memory_bytes(const struct kv_rotation *rotation);

#endif
