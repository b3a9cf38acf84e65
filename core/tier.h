/*
 * Tier: pages outside of the pools, in host memory or in a file, that sequences are spilled to. Only which
 * pages are whose, and what must be found in them; moving bytes is the server's business.
 *
 * An image is a chain of pages in order, charged to one tenant while it is there. All pages exist from init
 * to finish, nothing allocates in between. Loop thread only.
 */
#ifndef CORE_TIER_H
#define CORE_TIER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/error.h"
#include "core/tenant.h"

#define KV_TIER_PAGE_BYTES 65536u
#define KV_PAGE_NONE       UINT32_MAX

struct kv_tier {
	uint32_t n_pages, n_used, n_touched;
	uint32_t free_first;
	uint32_t *next;             /* [n_pages]: in an image, or among the free ones */
	uint32_t *crc;              /* [n_pages]: CRC-32C of what was put there */
	struct kv_tenants *tenants; /* NULL: nobody pays */
};

KV_MUST_CHECK enum kv_status kv_tier_init(
	struct kv_tier *tier, uint64_t n_bytes, struct kv_tenants *tenants, struct kv_error *err);
void kv_tier_finish(struct kv_tier *tier); /* zeroed allowed */

struct kv_tier_image {
	struct kv_tier *tier; /* NULL: there is none */
	uint32_t first, last, n_pages;
	uint32_t payer; /* the tenant's entry */
};
/*
 * All or nothing: false when there are not n_pages (at least 1) free. Charged to the payer, whose quota the
 * caller has asked for.
 */
bool kv_tier_take(struct kv_tier *tier, uint32_t n_pages, uint32_t payer, struct kv_tier_image *image);
/* Constant work. The image is none afterwards. */
void kv_tier_give(struct kv_tier_image *image);

#endif
