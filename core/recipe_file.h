/*
 * Recipe files: which channels of every layer, KV head and side get more bits, in the published schema of
 * `turboquant_kv.json` (FORMATS 5.4, version 1). The text comes from outside and is checked; reading and
 * writing the file itself is the caller's. Immutable once parsed; any thread.
 */
#ifndef CORE_RECIPE_FILE_H
#define CORE_RECIPE_FILE_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "core/error.h"
#include "core/format.h"

#define KV_RECIPE_FILE_BYTES_MAX (64u << 20)
#define KV_RECIPE_LAYERS_MAX     1024u
#define KV_RECIPE_HEADS_MAX      1024u

struct kv_recipe_file {
	const struct kv_format *format; /* a recipe */
	uint32_t head_dim;
	uint32_t n_high; /* channels of a list */
	uint32_t kv_heads;
	uint32_t n_layers;    /* that are listed */
	uint32_t *layer_idxs; /* [n_layers], ascending */
	uint16_t *channels;   /* [n_layers, 2 (K, V), kv_heads, n_high], each list ascending */
};

/* A file of layers 0 to n_layers - 1 whose lists are the first n_high channels, to be filled by its maker. */
KV_MUST_CHECK enum kv_status kv_recipe_file_create(const struct kv_format *format, uint32_t head_dim,
	uint32_t kv_heads, uint32_t n_layers, struct kv_recipe_file **file, struct kv_error *err);
/*
 * BAD_CONFIG with the line, or the member and what is wrong with it. A layer's key is its number, or a name
 * whose first decimal number is the layer. Members that this version does not know are ignored. The caller
 * owns the result until kv_recipe_file_destroy(), which accepts NULL.
 */
KV_MUST_CHECK enum kv_status kv_recipe_file_parse(
	const char *text, size_t text_bytes, struct kv_recipe_file **file, struct kv_error *err);
void kv_recipe_file_destroy(struct kv_recipe_file *file);

/* The list of one KV head, n_high channels; NULL when the file has no such layer (then the default holds). */
uint16_t *kv_recipe_file_channels(
	const struct kv_recipe_file *file, uint32_t layer_idx, bool is_v, uint32_t head_idx);

/* One line of JSON in the schema. False when writing failed. */
bool kv_recipe_file_print(const struct kv_recipe_file *file, FILE *out);

#endif
