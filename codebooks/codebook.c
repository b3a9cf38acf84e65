/* Looks up embedded codebooks and assigns values to their cells. */
#include "codebooks/codebook.h"

#include <stddef.h>

#include "codebooks/codebook_table.h"

const struct kvcb_codebook *kvcb_at(uint32_t codebook_idx)
{
	return codebook_idx < kvcb_table_length ? &kvcb_table[codebook_idx] : NULL;
}

const struct kvcb_codebook *kvcb_find(uint32_t head_dim, uint32_t bits)
{
	for (uint32_t i = 0; i < kvcb_table_length; i++) {
		if (kvcb_table[i].head_dim == head_dim && kvcb_table[i].bits == bits)
			return &kvcb_table[i];
	}
	return NULL;
}

uint32_t kvcb_index(const struct kvcb_codebook *codebook, float y)
{
	const float *boundaries = codebook->interior_boundaries;
	uint32_t idx = 0;

	/*
	 * 2^bits - 1 boundaries are a full binary tree: each step decides one bit of the index, from the top.
	 * The boundary tested is the one below cell (idx | bit).
	 */
	for (uint32_t bit = 1u << codebook->bits >> 1; bit != 0; bit >>= 1) {
		if (boundaries[(idx | bit) - 1] < y)
			idx |= bit;
	}
	return idx;
}
