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

/* Up to 31 boundaries it is faster to count, four values at a time, than to search each value. */
#define COUNT_BITS_MAX 5u

void kvcb_indices(const struct kvcb_codebook *codebook, const float *y, uint32_t n_values, uint8_t *indices)
{
	const uint32_t n_boundaries = (1u << codebook->bits) - 1;
	uint32_t counts[KVCB_VALUES_MAX] = { 0 };

	if (codebook->bits > COUNT_BITS_MAX) {
		for (uint32_t i = 0; i < n_values; i++)
			indices[i] = (uint8_t)kvcb_index(codebook, y[i]);
		return;
	}
	for (uint32_t b = 0; b < n_boundaries; b++) {
		const float boundary = codebook->interior_boundaries[b];

		for (uint32_t i = 0; i < n_values; i++)
			counts[i] += boundary < y[i];
	}
	for (uint32_t i = 0; i < n_values; i++)
		indices[i] = (uint8_t)counts[i];
}
