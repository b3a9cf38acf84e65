/*
 * Audit of sessions, indexes and the domain's own counts. Blocks, tables and sequences: audit_pool.c.
 */
#include "core/audit.h"

#include "core/audit_internal.h"
#include "core/domain_internal.h"

enum kv_status kv_audit_equal(struct kv_error *err, const char *what, uint64_t n_recorded, uint64_t n_counted)
{
	if (n_recorded == n_counted)
		return KV_OK;
	return kv_fail(err, KV_INTERNAL, "audit: %s: recorded %llu, counted %llu", what,
		(unsigned long long)n_recorded, (unsigned long long)n_counted);
}

enum kv_status kv_audit_open_slot(struct kv_domain *domain, uint32_t slot_idx, struct kv_error *err)
{
	struct kv_session_slot *slot = &domain->slots[slot_idx];
	struct kv_session *session = &slot->session, *found = NULL;
	const uint32_t heap_idx = slot->heap_idx;
	const char *what = NULL;
	uint32_t i;

	if (kv_session_find(domain, session->handle, &found) != KV_OK || found != session)
		what = "its handle does not find it";
	else if (!(domain->open_bits[slot_idx / 64] >> slot_idx % 64 & 1))
		what = "its bit is not set";
	else if (heap_idx >= domain->n_leases || domain->leases[heap_idx] != slot_idx)
		what = "it is not where the lease heap says";
	else if (heap_idx > 0 &&
		domain->slots[domain->leases[(heap_idx - 1) / 2]].lease_key_ns > slot->lease_key_ns)
		what = "its lease comes before that of its parent in the heap";
	else if (slot->lease_key_ns > session->lease_end_ns + KV_EXPIRY_RETRY_NS &&
		session->n_outstanding == 0)
		what = "its lease ends before the heap looks at it";
	if (!what && session->owner_id != 0) {
		i = kv_hash_index_first(&domain->owners, kv_owner_hash(domain, session->owner_id));
		while (i != KV_HASH_NONE && i != slot_idx)
			i = kv_hash_index_next(&domain->owners, i);
		if (i == KV_HASH_NONE)
			what = "its owner does not lead to it";
	}
	if (!what && slot->is_named != (session->name[0] != '\0'))
		what = "it is named without a name, or not named with one";
	if (!what && slot->is_named) {
		i = kv_hash_index_first(&domain->names, slot->name_hash);
		while (i != KV_HASH_NONE && i != slot_idx)
			i = kv_hash_index_next(&domain->names, i);
		if (i == KV_HASH_NONE)
			what = "its name does not lead to it";
	}
	if (!what)
		return KV_OK;
	return kv_fail(
		err, KV_INTERNAL, "audit: session %016llx: %s", (unsigned long long)session->handle, what);
}

static enum kv_status audit_slots(struct kv_domain *domain, struct kv_error *err)
{
	uint32_t n_open = 0, n_owned = 0, n_closing = 0, n_staged = 0, n_free = 0;
	enum kv_status status = KV_OK;

	for (uint32_t i = 0; i < domain->n_slots_touched && status == KV_OK; i++) {
		switch (domain->slots[i].session.state) {
		case KV_SESSION_OPEN:
			n_open++;
			n_owned += domain->slots[i].session.owner_id != 0;
			status = kv_audit_open_slot(domain, i, err);
			break;
		case KV_SESSION_CLOSING:
			n_closing++;
			break;
		case KV_SESSION_STAGED:
			n_staged++;
			break;
		case KV_SESSION_FREE:
			break;
		}
	}
	for (uint32_t i = domain->free_first; i != KV_SLOT_NONE && n_free <= domain->n_slots_touched;
		i = domain->slots[i].free_next)
		n_free++;
	if (status == KV_OK)
		status = kv_audit_equal(err, "open sessions", domain->n_sessions, n_open);
	if (status == KV_OK)
		status = kv_audit_equal(err, "sessions with an owner", domain->n_owned, n_owned);
	if (status == KV_OK)
		status = kv_audit_equal(err, "sessions in the lease heap", domain->n_leases, n_open);
	if (status == KV_OK)
		status = kv_audit_equal(err, "closing sessions", domain->n_closing, n_closing);
	if (status == KV_OK)
		status = kv_audit_equal(err, "sessions being restored", domain->n_staged, n_staged);
	if (status == KV_OK)
		status = kv_audit_equal(err, "free session slots", n_free,
			domain->n_slots_touched - n_open - n_closing - n_staged);
	return status;
}

enum kv_status kv_audit_domain(
	struct kv_domain *domain, struct kv_plan *const plans[], uint32_t n_plans, struct kv_error *err)
{
	uint32_t n_sessions = 0, n_sequences = 0;
	enum kv_status status = audit_slots(domain, err);

	for (uint32_t i = 0; i < domain->n_pools && status == KV_OK; i++) {
		struct kv_pool *pool = domain->pools[i];

		n_sessions += pool->n_sessions;
		n_sequences += pool->slab->n_used;
		status = kv_audit_pool(pool, plans, n_plans, err);
		if (status != KV_OK)
			kv_error_wrap(err, "pool \"%s\"", pool->spec->name);
	}
	if (status == KV_OK)
		status = kv_audit_tenants(domain, err);
	if (status == KV_OK)
		status = kv_audit_equal(err, "sessions over all pools", domain->n_sessions, n_sessions);
	if (status == KV_OK)
		status = kv_audit_equal(err, "sequences over all pools", domain->n_sequences, n_sequences);
	return status;
}
