/*
 * Presets: names for pairs of a K and a V format, for option lists. A pool may ask for one in place of `k`
 * and `v`, with its first and last layers exact (core/pool_spec.h). Static tables; any thread.
 */
#ifndef CORE_PRESET_H
#define CORE_PRESET_H

#include <stdint.h>

#include "core/error.h"

/* The format of layers that `exact_layers` keeps out of a preset: 16 bits, and what reports compare with. */
#define KV_PRESET_EXACT "bf16"

struct kv_preset {
	const char *name;
	const char *k, *v; /* names of row formats */
};

/* In the order in which they are listed to people: more bytes first. */
uint32_t kv_preset_count(void);
const struct kv_preset *kv_preset_at(uint32_t preset_idx);
/* BAD_ARG with the list of known names when there is none of this name. `*preset` is static. */
KV_MUST_CHECK enum kv_status kv_preset_parse(
	const char *name, const struct kv_preset **preset, struct kv_error *err);

#endif
