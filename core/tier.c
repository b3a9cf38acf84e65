#include "core/tier.h"

#include "core/memory.h"

enum kv_status kv_tier_init(
	struct kv_tier *tier, uint64_t n_bytes, struct kv_tenants *tenants, struct kv_error *err)
{
	const uint64_t n_pages = n_bytes / KV_TIER_PAGE_BYTES;

	*tier = (struct kv_tier){ .free_first = KV_PAGE_NONE, .tenants = tenants };
	if (n_pages >= KV_PAGE_NONE)
		return kv_fail(
			err, KV_BAD_CONFIG, "a tier of %llu bytes is too large", (unsigned long long)n_bytes);
	if (n_pages == 0)
		return KV_OK;
	tier->n_pages = (uint32_t)n_pages;
	tier->next = kv_pages_alloc(n_pages * sizeof(*tier->next));
	tier->crc = kv_pages_alloc(n_pages * sizeof(*tier->crc));
	if (tier->next && tier->crc)
		return KV_OK;
	kv_tier_finish(tier);
	return kv_fail(err, KV_NO_MEMORY, "tier of %llu pages", (unsigned long long)n_pages);
}

void kv_tier_finish(struct kv_tier *tier)
{
	kv_pages_free(tier->next, (uint64_t)tier->n_pages * sizeof(*tier->next));
	kv_pages_free(tier->crc, (uint64_t)tier->n_pages * sizeof(*tier->crc));
	*tier = (struct kv_tier){ .free_first = KV_PAGE_NONE };
}

static uint32_t take_page(struct kv_tier *tier)
{
	const uint32_t idx = tier->free_first;

	if (idx == KV_PAGE_NONE)
		return tier->n_touched++;
	tier->free_first = tier->next[idx];
	return idx;
}

static uint64_t image_bytes(const struct kv_tier_image *image)
{
	return (uint64_t)image->n_pages * KV_TIER_PAGE_BYTES;
}

bool kv_tier_take(struct kv_tier *tier, uint32_t n_pages, uint32_t payer, struct kv_tier_image *image)
{
	KV_ASSERT(n_pages > 0);
	if (n_pages > tier->n_pages - tier->n_used)
		return false;
	tier->n_used += n_pages;
	*image = (struct kv_tier_image){ .tier = tier, .n_pages = n_pages, .payer = payer };
	image->first = image->last = take_page(tier);
	for (uint32_t i = 1; i < n_pages; i++) {
		const uint32_t idx = take_page(tier);

		tier->next[image->last] = idx;
		image->last = idx;
	}
	tier->next[image->last] = KV_PAGE_NONE;
	if (tier->tenants)
		kv_tenant_charge(tier->tenants, payer, KV_QUOTA_TIER_BYTES, image_bytes(image));
	return true;
}

void kv_tier_give(struct kv_tier_image *image)
{
	struct kv_tier *tier = image->tier;

	if (!tier)
		return;
	tier->next[image->last] = tier->free_first;
	tier->free_first = image->first;
	tier->n_used -= image->n_pages;
	if (tier->tenants)
		kv_tenant_refund(tier->tenants, image->payer, KV_QUOTA_TIER_BYTES, image_bytes(image));
	*image = (struct kv_tier_image){ 0 };
}
