#include "core/preset.h"

#include <stdio.h>
#include <string.h>

#include "core/checked.h"

/*
 * K at 8 bits keeps its channels apart (fp8 is not rotated), for models whose keys do not survive a rotation.
 * Values are affine in groups: the published presets of these names have them so.
 */
static const struct kv_preset presets[] = {
	{ "k8v4", "fp8", "v4" },
	{ "4bit", "tq4", "v4" },
	{ "k3v4", "tq3", "v4" },
	{ "3bit", "tq3", "v3" },
	{ "k3v2", "tq3", "v2" },
	{ "2bit", "tq2", "v2" },
};
#define N_PRESETS ((uint32_t)KV_LENGTH(presets))

uint32_t kv_preset_count(void)
{
	return N_PRESETS;
}

const struct kv_preset *kv_preset_at(uint32_t preset_idx)
{
	KV_ASSERT(preset_idx < N_PRESETS);
	return &presets[preset_idx];
}

enum kv_status kv_preset_parse(const char *name, const struct kv_preset **preset, struct kv_error *err)
{
	char known[96] = "";
	size_t n_known = 0;

	for (uint32_t i = 0; i < N_PRESETS; i++) {
		if (strcmp(name, presets[i].name) == 0) {
			*preset = &presets[i];
			return KV_OK;
		}
	}
	for (uint32_t i = 0; i < N_PRESETS; i++) {
		const int n = snprintf(
			known + n_known, sizeof(known) - n_known, "%s%s", i ? ", " : "", presets[i].name);

		n_known += (size_t)n;
		KV_ASSERT(n_known < sizeof(known));
	}
	return kv_fail(err, KV_BAD_ARG, "unknown preset \"%.32s\" (known: %s)", name, known);
}
