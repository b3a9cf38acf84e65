/*
 * Codebooks: Lloyd-Max quantisers for one coordinate of a random unit vector (FORMATS 3).
 *
 * The tables are embedded at build time from codebook_d{d}_b{b}.json and are constant: no owner, any thread.
 */
#ifndef CODEBOOKS_CODEBOOK_H
#define CODEBOOKS_CODEBOOK_H

#include <stdint.h>

#define KVCB_BITS_MAX 8u

struct kvcb_codebook {
	uint32_t head_dim;
	uint32_t bits;
	float centroids[256];           /* 2^bits, ascending */
	float interior_boundaries[255]; /* 2^bits - 1, ascending */
	double mse_per_coord;
};

/* NULL when no codebook of these parameters is embedded. */
const struct kvcb_codebook *kvcb_find(uint32_t head_dim, uint32_t bits);

/* All embedded codebooks, for listings: NULL from the first index that has none. */
const struct kvcb_codebook *kvcb_at(uint32_t codebook_idx);

/*
 * Cell of y: the number of interior boundaries strictly below it, so a value on a boundary belongs to the
 * lower cell. y is not NaN.
 */
uint32_t kvcb_index(const struct kvcb_codebook *codebook, float y);

#endif
