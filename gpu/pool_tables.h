/*
 * A pool as the device sees it: where the pages of every layer lie, and the row codecs, rotations and number
 * tables as plain data. The only place that knows both core/format.h and gpu/kernels.h.
 *
 * The image is made on the host, placed at a device address, and uploaded once. The caller owns it until
 * kvg_image_destroy(), which accepts NULL. Any thread.
 */
#ifndef GPU_POOL_TABLES_H
#define GPU_POOL_TABLES_H

#include <stdbool.h>
#include <stdint.h>

#include "core/pool_spec.h"
#include "gpu/kernels.h"

#define KVG_TILE_BITS_MAX 4u
#define KVG_TILE_WIDTHS   (KVG_TILE_BITS_MAX + 1)

/* Widths of K and V of a layer in tiles; 0 and 0: rows of any format. */
struct kvg_tile_bits {
	uint8_t k, v;
};

struct kvg_image {
	uint64_t arena_bytes; /* pages and tables */
	uint64_t tables_at;   /* bytes from the start of the pool's region: the tables lie behind the pages */
	uint64_t tables_bytes;
	uint8_t *tables_bytes_host; /* [tables_bytes], what is uploaded; complete after kvg_image_place() */
	struct kvg_tables tables;   /* after kvg_image_place(): device addresses */
	struct kvg_layer *layers;   /* in tables_bytes_host */
	struct kvg_codec *codecs;   /* in tables_bytes_host */
	const uint32_t *words_host; /* in tables_bytes_host */
	/* [n_layers]: byte offsets in the region of K and V pages, then of K and V ring blocks; owned */
	uint64_t *layer_at[4];
	uint64_t block_bytes_max;
	struct kvg_tile_bits *tile_bits;                 /* [n_layers]; owned */
	bool has_bits[KVG_TILE_WIDTHS][KVG_TILE_WIDTHS]; /* layers of these widths of K and V */
	/* Per number of bits: tables of the tiles kernel. */
	uint32_t tile_tables[KVG_TILE_WIDTHS];
	float tile_scales[KVG_TILE_WIDTHS];
};

/*
 * UNSUPPORTED when there are too many codecs; NO_MEMORY. For its size alone: is_complete false, which saves
 * the search for the scales of the tiles' tables (some milliseconds).
 */
KV_MUST_CHECK enum kv_status kvg_image_create(
	const struct kv_pool_spec *spec, bool is_complete, struct kvg_image **out, struct kv_error *err);
/* Fills in device addresses for a region that begins at `device_base`, aligned to 256. */
void kvg_image_place(struct kvg_image *image, uint8_t *device_base);
void kvg_image_destroy(struct kvg_image *image);

#endif
