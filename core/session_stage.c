/*
 * Sessions that are being restored: made, filled by stage.c, and then shown or taken apart.
 */
#include <string.h>

#include "core/domain_internal.h"

enum kv_status kv_session_stage(struct kv_domain *domain, const struct kv_open_params *params,
	uint64_t now_ns, struct kv_session **out, struct kv_error *err)
{
	const uint64_t hash = kv_name_hash(domain, params->name, params->name_bytes, params->tenant);
	struct kv_session_slot *namesake =
		kv_find_name(domain, hash, params->name, params->name_bytes, params->tenant);
	const enum kv_status status = kv_session_check_open(domain, params, namesake, err);

	if (status != KV_OK)
		return status;
	*out = kv_session_make(domain, params, now_ns);
	(*out)->state = KV_SESSION_STAGED;
	domain->n_staged++;
	return KV_OK;
}

enum kv_status kv_session_check_name(
	struct kv_domain *domain, const struct kv_session *session, struct kv_error *err)
{
	const struct kv_session_slot *namesake = kv_find_name(domain,
		kv_container_of(session, const struct kv_session_slot, session)->name_hash, session->name,
		(uint32_t)strlen(session->name), session->tenant);

	if (!namesake || namesake->session.state != KV_SESSION_OPEN)
		return KV_OK;
	return kv_fail(err, KV_EXISTS, "session \"%s\" is open already", session->name);
}

void kv_session_commit(struct kv_domain *domain, struct kv_session *session, uint64_t now_ns)
{
	struct kv_session_slot *slot = kv_slot_of(session);
	struct kv_pool *pool = session->pool;
	struct kv_session_slot *namesake = kv_find_name(
		domain, slot->name_hash, session->name, (uint32_t)strlen(session->name), session->tenant);

	KV_ASSERT(session->state == KV_SESSION_STAGED);
	kv_list_remove(&session->in_pool);
	if (namesake)
		kv_drop_name(domain, namesake); /* expired: this one takes the name over */
	session->state = KV_SESSION_OPEN;
	const uint64_t restored_ns = domain->limits.restored_lease_ms * KV_NS_PER_MS;

	/* So far it has what is left. Whoever owned it has to hear of the restore first. */
	if (session->lease_end_ns < restored_ns)
		session->lease_end_ns = restored_ns;
	session->lease_end_ns += now_ns;
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const enum kv_status status =
			kv_block_pool_reserve(&pool->blocks[g], session->n_blocks_reserved[g]);

		KV_ASSERT(status == KV_OK); /* the sum was asked for before */
	}
	domain->n_staged--;
	kv_session_appear(domain, slot, 0);
	pool->n_sequences += session->n_sequences;
	pool->n_zombies -= session->n_sequences;
	pool->n_tokens_committed += slot->n_tokens_committed;
	pool->n_exact_rows += slot->n_exact_rows;
	for (uint32_t l = 0; l < pool->spec->n_layers; l++)
		pool->layer_tokens[l] += slot->layer_tokens[l];
	kv_list_for_each (node, &session->sequences)
		kv_sequence_rest(kv_container_of(node, struct kv_sequence, in_session));
}

void kv_session_unstage(struct kv_domain *domain, struct kv_session *session)
{
	struct kv_session_slot *slot = kv_slot_of(session);

	KV_ASSERT(session->state == KV_SESSION_STAGED);
	kv_list_remove(&session->in_pool);
	session->state = KV_SESSION_CLOSING;
	domain->n_staged--;
	kv_session_refund(session);
	if (kv_list_is_empty(&session->sequences)) {
		kv_session_slot_free(domain, slot);
		return;
	}
	domain->n_closing++;
	kv_list_push_back(&session->pool->closing, &session->in_pool);
}
