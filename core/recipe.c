#include "core/recipe.h"

#include "core/rotation.h"

/* Published constants: one base, an offset for the signs of the projection, one number per group. */
#define SEED_BASE              20250428u
#define SEED_PROJECTION_OFFSET 10000u

uint32_t kv_recipe_n_high(const struct kv_recipe *recipe, uint32_t head_dim)
{
	/* round_half_even(head_dim * n_quarters / 4 / 16) * 16, in 64ths */
	const uint32_t n_64ths = head_dim * recipe->n_quarters;
	const uint32_t whole = n_64ths / 64, rest = n_64ths % 64;
	const bool is_up = rest > 32 || (rest == 32 && whole % 2 != 0);

	return 16 * (whole + is_up);
}

uint32_t kv_recipe_rotation_seed(bool is_high, uint32_t dim)
{
	return SEED_BASE + (is_high ? 101 : 211) + dim;
}

uint32_t kv_recipe_projection_seed(bool is_high, uint32_t dim)
{
	return SEED_BASE + SEED_PROJECTION_OFFSET + (is_high ? 307 : 401) + dim;
}

enum kv_status kv_recipe_check_channels(const struct kv_recipe *recipe, uint32_t head_dim,
	const uint16_t *channels, uint32_t n_channels, struct kv_error *err)
{
	const uint32_t n_high = kv_recipe_n_high(recipe, head_dim);

	if (n_channels != n_high)
		return kv_fail(err, KV_BAD_ARG, "%u high channels instead of %u at head_dim %u", n_channels,
			n_high, head_dim);
	for (uint32_t i = 0; i < n_channels; i++) {
		if (channels[i] >= head_dim)
			return kv_fail(err, KV_BAD_ARG, "high channel %u is not below head_dim %u",
				channels[i], head_dim);
		if (i > 0 && channels[i] <= channels[i - 1])
			return kv_fail(err, KV_BAD_ARG, "high channels do not ascend: %u is followed by %u",
				channels[i - 1], channels[i]);
	}
	return KV_OK;
}

void kv_recipe_pick_channels(const double *sums, uint32_t head_dim, uint32_t n_high, uint16_t *channels)
{
	uint32_t n_picked = 0;

	KV_ASSERT(head_dim <= KV_HEAD_DIM_MAX);
	KV_ASSERT(n_high <= head_dim);
	for (uint32_t i = 0; i < head_dim; i++) {
		uint32_t n_before = 0; /* channels that come first */

		for (uint32_t k = 0; k < head_dim; k++)
			n_before += sums[k] > sums[i] || (sums[k] == sums[i] && k < i);
		if (n_before < n_high)
			channels[n_picked++] = (uint16_t)i;
	}
	KV_ASSERT(n_picked == n_high);
}
