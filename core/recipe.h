/*
 * Recipes (FORMATS 5.4): rows whose channels form two groups, of which the high one gets more bits. This page
 * has what follows from the head dimension alone: sizes, seeds, channel lists; encoding is in
 * core/format_recipe.c. Pure functions, any thread, no heap.
 */
#ifndef CORE_RECIPE_H
#define CORE_RECIPE_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"

struct kv_recipe {
	uint32_t n_quarters; /* share of the high group in quarters */
	uint32_t bits_high;  /* of the indices; each channel has a sign as well */
	uint32_t bits_low;
};

/* Channels of the high group: a multiple of 16; 0 when there is no high group at this dim, which is refused.
 */
uint32_t kv_recipe_n_high(const struct kv_recipe *recipe, uint32_t head_dim);

/* Seeds of the generator of a group of `dim` channels: of its rotation, and of its QJL signs. */
uint32_t kv_recipe_rotation_seed(bool is_high, uint32_t dim);
uint32_t kv_recipe_projection_seed(bool is_high, uint32_t dim);

/* OK when there are n_high channels, ascending, each below head_dim; else BAD_ARG with what is wrong. */
KV_MUST_CHECK enum kv_status kv_recipe_check_channels(const struct kv_recipe *recipe, uint32_t head_dim,
	const uint16_t *channels, uint32_t n_channels, struct kv_error *err);

/*
 * The n_high channels with the largest sums of squares, ascending; of equal ones the lower index.
 * sums[head_dim] are finite.
 */
void kv_recipe_pick_channels(const double *sums, uint32_t head_dim, uint32_t n_high, uint16_t *channels);

#endif
