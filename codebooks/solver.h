/*
 * Solver: the exact Lloyd-Max quantiser for one coordinate of a random unit vector (FORMATS 3), for any
 * dimension. The committed codebook files are its output; a dimension without a file is solved when it is
 * needed, which takes a few milliseconds at 8 bits.
 *
 * In float64. Rounded to float32, centroids and boundaries equal those of 40-digit arithmetic bit for bit at
 * every dimension that was compared (14 from 8 to 576). Promised in float64: numbers within 1e-9, the error
 * per coordinate within 1e-12 of itself; measured are 3e-14 and 2e-14. Pure functions, any thread, no heap.
 */
#ifndef CODEBOOKS_SOLVER_H
#define CODEBOOKS_SOLVER_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "codebooks/codebook.h"

#define KVCB_DIM_MIN 3u /* below, the density is not finite at the ends */
#define KVCB_DIM_MAX 1024u

struct kvcb_solution {
	uint32_t head_dim;
	uint32_t bits;
	double centroids[256];  /* 2^bits, ascending */
	double boundaries[257]; /* 2^bits + 1: from -1 to 1, midway between neighbours */
	double mse_per_coord;
};

/* False, and nothing is written, when head_dim is outside KVCB_DIM_MIN to _MAX or bits outside 1 to 8. */
bool kvcb_solve(uint32_t head_dim, uint32_t bits, struct kvcb_solution *solution);

/* Every number rounded once to float32. */
void kvcb_solution_round(const struct kvcb_solution *solution, struct kvcb_codebook *codebook);

/*
 * The embedded codebook, or one that is solved into `room`, of which the caller is the owner. NULL when the
 * parameters are out of range.
 */
const struct kvcb_codebook *kvcb_get(uint32_t head_dim, uint32_t bits, struct kvcb_codebook *room);

/* JSON in the schema of the codebook files, 17 digits a number. False when writing failed. */
bool kvcb_solution_print(const struct kvcb_solution *solution, FILE *file);

#endif
