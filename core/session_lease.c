/*
 * Lease heap: which session may have to be closed next.
 *
 * Renewing is on the data path, so it only writes lease_end_ns and the heap keeps an older key: too early,
 * never too late. A session that comes to the top too early gets its true key and sinks. kv_session_expire()
 * looks at a bounded number of sessions a call.
 */
#include "core/domain.h"
#include "core/domain_internal.h"

#define EXTRA_LOOKS_MAX 64u

static uint64_t key_at(const struct kv_domain *domain, uint32_t heap_idx)
{
	return domain->slots[domain->leases[heap_idx]].lease_key_ns;
}

static void put(struct kv_domain *domain, uint32_t heap_idx, uint32_t slot_idx)
{
	domain->leases[heap_idx] = slot_idx;
	domain->slots[slot_idx].heap_idx = heap_idx;
}

/* Moves the slot from its place to where its key belongs. */
static void sift(struct kv_domain *domain, uint32_t heap_idx)
{
	const uint32_t slot_idx = domain->leases[heap_idx];
	const uint64_t key_ns = domain->slots[slot_idx].lease_key_ns;

	while (heap_idx > 0 && key_at(domain, (heap_idx - 1) / 2) > key_ns) {
		put(domain, heap_idx, domain->leases[(heap_idx - 1) / 2]);
		heap_idx = (heap_idx - 1) / 2;
	}
	for (;;) {
		uint32_t child_idx = 2 * heap_idx + 1;

		if (child_idx >= domain->n_leases)
			break;
		if (child_idx + 1 < domain->n_leases &&
			key_at(domain, child_idx + 1) < key_at(domain, child_idx))
			child_idx++;
		if (key_at(domain, child_idx) >= key_ns)
			break;
		put(domain, heap_idx, domain->leases[child_idx]);
		heap_idx = child_idx;
	}
	put(domain, heap_idx, slot_idx);
}

void kv_lease_insert(struct kv_domain *domain, struct kv_session_slot *slot)
{
	const uint32_t heap_idx = domain->n_leases++;

	slot->lease_key_ns = slot->session.lease_end_ns;
	put(domain, heap_idx, kv_slot_idx(domain, slot));
	sift(domain, heap_idx);
}

void kv_lease_remove(struct kv_domain *domain, struct kv_session_slot *slot)
{
	const uint32_t heap_idx = slot->heap_idx;
	const uint32_t last_idx = --domain->n_leases;

	if (heap_idx == last_idx)
		return;
	put(domain, heap_idx, domain->leases[last_idx]);
	sift(domain, heap_idx);
}

void kv_session_renew(struct kv_session *session, uint64_t now_ns)
{
	const uint64_t lease_end_ns = now_ns + session->lease_ms * KV_NS_PER_MS;

	/* Never back: the heap's key must not become later than the lease. */
	if (lease_end_ns > session->lease_end_ns)
		session->lease_end_ns = lease_end_ns;
}

void kv_lease_restart(struct kv_domain *domain, struct kv_session_slot *slot, uint64_t now_ns)
{
	if (slot->session.lease_end_ns > now_ns + slot->session.lease_ms * KV_NS_PER_MS) {
		kv_lease_remove(domain, slot);
		slot->session.lease_end_ns = now_ns + slot->session.lease_ms * KV_NS_PER_MS;
		kv_lease_insert(domain, slot);
	}
	kv_session_renew(&slot->session, now_ns);
}

uint32_t kv_session_expire(struct kv_domain *domain, uint64_t now_ns, uint32_t n_max)
{
	uint32_t n_closed = 0;

	for (uint32_t n_looks = 0; n_looks < n_max + EXTRA_LOOKS_MAX; n_looks++) {
		if (n_closed == n_max || domain->n_leases == 0 || key_at(domain, 0) > now_ns)
			break;

		struct kv_session_slot *slot = &domain->slots[domain->leases[0]];

		if (slot->session.lease_end_ns > now_ns) {
			slot->lease_key_ns = slot->session.lease_end_ns;
			sift(domain, 0);
		} else if (slot->session.n_outstanding > 0) {
			slot->lease_key_ns = now_ns + KV_EXPIRY_RETRY_NS;
			sift(domain, 0);
		} else {
			kv_session_close(domain, &slot->session, true);
			n_closed++;
		}
	}
	return n_closed;
}

uint64_t kv_session_next_expiry_ns(const struct kv_domain *domain)
{
	return domain->n_leases > 0 ? key_at(domain, 0) : UINT64_MAX;
}
