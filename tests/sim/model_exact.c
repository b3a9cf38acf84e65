/*
 * The model's exact windows: a ring per layer that says which token is in which place.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/model.h"

static void forget_all(const struct kv_pool_spec *spec, struct sim_layer *layer)
{
	memset(layer->ring, 0xFF, spec->exact_tokens * sizeof(layer->ring[0]));
}

void sim_model_put_exact(const struct kv_pool_spec *spec, struct sim_layer *layer, uint32_t first,
	uint32_t end, uint32_t n_places, bool is_packed)
{
	if (spec->exact_tokens == 0)
		return;
	if (!layer->ring) {
		layer->ring = malloc(spec->exact_tokens * sizeof(layer->ring[0]));
		SIM_CHECK(layer->ring, "no memory for the model");
		forget_all(spec, layer);
	}
	for (uint32_t t = first; t < end; t++) {
		const uint32_t place = t % spec->exact_tokens;

		/* One that is not exact makes all before it useless. */
		if (is_packed || place >= n_places)
			forget_all(spec, layer);
		else
			layer->ring[place] = t;
	}
}

void sim_model_cut_exact(const struct kv_pool_spec *spec, struct sim_layer *layer, uint32_t length)
{
	for (uint32_t i = 0; layer->ring && i < spec->exact_tokens; i++) {
		if (layer->ring[i] != UINT32_MAX && layer->ring[i] >= length)
			layer->ring[i] = UINT32_MAX;
	}
}

uint32_t sim_model_exact_lo(const struct kv_pool_spec *spec, const struct sim_layer *layer, uint32_t end)
{
	uint32_t lo = layer->planned;

	while (layer->ring && lo > 0 && layer->ring[(lo - 1) % spec->exact_tokens] == lo - 1)
		lo--;
	return lo < end ? lo : end;
}
