/*
 * Sessions: opening, finding, closing.
 *
 * A slot goes FREE -> OPEN -> (CLOSING ->) FREE. Free slots are used again in the order in which they became
 * free, and untouched ones first, so that a handle of an expired session says so for as long as possible.
 */
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "core/domain.h"
#include "core/domain_internal.h"

static bool name_is(const struct kv_session *session, const char *name, uint32_t name_bytes, uint64_t tenant)
{
	return session->tenant == tenant && strlen(session->name) == name_bytes &&
		memcmp(session->name, name, name_bytes) == 0;
}

uint64_t kv_name_hash(const struct kv_domain *domain, const char *name, uint32_t name_bytes, uint64_t tenant)
{
	return kv_hash_pair(
		&domain->hash_key, XXH3_64bits_withSeed(name, name_bytes, domain->name_seed), tenant);
}

/* Open or expired: at most one slot has a name of a tenant. */
struct kv_session_slot *kv_find_name(
	struct kv_domain *domain, uint64_t hash, const char *name, uint32_t name_bytes, uint64_t tenant)
{
	for (uint32_t i = kv_hash_index_first(&domain->names, hash); i != KV_HASH_NONE;
		i = kv_hash_index_next(&domain->names, i)) {
		struct kv_session_slot *slot = &domain->slots[i];

		if (slot->name_hash == hash && name_is(&slot->session, name, name_bytes, tenant))
			return slot;
	}
	return NULL;
}

void kv_drop_name(struct kv_domain *domain, struct kv_session_slot *slot)
{
	if (slot->is_named)
		kv_hash_index_remove(&domain->names, slot->name_hash, kv_slot_idx(domain, slot));
	slot->is_named = false;
}

static void set_owner(struct kv_domain *domain, struct kv_session_slot *slot, uint64_t owner_id)
{
	const uint32_t idx = kv_slot_idx(domain, slot);

	if (slot->session.owner_id != 0) {
		kv_hash_index_remove(&domain->owners, kv_owner_hash(domain, slot->session.owner_id), idx);
		domain->n_owned--;
	}
	slot->session.owner_id = owner_id;
	if (owner_id != 0) {
		kv_hash_index_insert(&domain->owners, kv_owner_hash(domain, owner_id), idx);
		domain->n_owned++;
	}
}

static bool has_free_slot(const struct kv_domain *domain)
{
	return domain->n_slots_touched < domain->limits.sessions_max || domain->free_first != KV_SLOT_NONE;
}

static struct kv_session_slot *take_slot(struct kv_domain *domain)
{
	struct kv_session_slot *slot;

	if (domain->n_slots_touched < domain->limits.sessions_max) {
		slot = &domain->slots[domain->n_slots_touched++];
		slot->generation = (uint32_t)kv_random_next(domain->random);
		return slot;
	}
	slot = &domain->slots[domain->free_first];
	domain->free_first = slot->free_next;
	if (domain->free_first == KV_SLOT_NONE)
		domain->free_last = KV_SLOT_NONE;
	kv_drop_name(domain, slot);
	slot->generation++;
	return slot;
}

void kv_session_slot_free(struct kv_domain *domain, struct kv_session_slot *slot)
{
	const uint32_t idx = kv_slot_idx(domain, slot);

	slot->session.state = KV_SESSION_FREE;
	slot->session.pool = NULL;
	slot->free_next = KV_SLOT_NONE;
	if (domain->free_last == KV_SLOT_NONE)
		domain->free_first = idx;
	else
		domain->slots[domain->free_last].free_next = idx;
	domain->free_last = idx;
}

/* The whole reservation in every group, or nothing. */
static enum kv_status reserve(struct kv_pool *pool, uint32_t n_blocks)
{
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const enum kv_status status = kv_pool_make_room(pool, g, n_blocks)
			? kv_block_pool_reserve(&pool->blocks[g], n_blocks)
			: KV_POOL_FULL;

		if (status == KV_OK)
			continue;
		while (g-- > 0)
			kv_block_pool_unreserve(&pool->blocks[g], n_blocks);
		return status;
	}
	return KV_OK;
}

static enum kv_status check_tables(const struct kv_open_params *params, struct kv_error *err)
{
	const struct kv_pool *pool = params->pool;
	const struct kv_domain *domain = pool->domain;
	const uint64_t n_chunks =
		(uint64_t)kv_div_up_u32(params->reserve_blocks, KV_CHUNK_ENTRIES) * pool->spec->n_groups;

	if (params->reserve_blocks == 0)
		return kv_fail(
			err, KV_BAD_ARG, "client tables need reserve_blocks: the blocks that they name");
	if (params->reserve_blocks > KV_TABLES_BLOCKS_MAX)
		return kv_fail(err, KV_LIMIT, "reserve_blocks %u: client tables have at most %u blocks",
			params->reserve_blocks, KV_TABLES_BLOCKS_MAX);
	if (domain->n_sequences >= domain->limits.sequences_max)
		return kv_fail(
			err, KV_LIMIT, "%u sequences are in use, which is the limit", domain->n_sequences);
	if (n_chunks > pool->tables.n_chunks_max - pool->tables.n_chunks_used)
		return kv_fail(
			err, KV_LIMIT, "no room for block tables of %u blocks", params->reserve_blocks);
	return KV_OK;
}

/* What was reserved becomes the table of a sequence that no request can name. */
static void take_tables(struct kv_session *session, uint32_t n_blocks, uint64_t now_ns)
{
	struct kv_pool *pool = session->pool;
	struct kv_sequence *sequence = kv_sequence_add(session, 0, now_ns);

	kv_sequence_tree_remove(&kv_slot_of(session)->tree, sequence);
	sequence->is_tables = session->has_tables = true;
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		for (uint32_t n_left = n_blocks; n_left > 0;) {
			kv_block_id ids[KV_CHUNK_ENTRIES];
			const uint32_t n = n_left < KV_CHUNK_ENTRIES ? n_left : KV_CHUNK_ENTRIES;
			enum kv_status status = kv_block_pool_take(&pool->blocks[g], n, n, ids);

			KV_ASSERT(status == KV_OK);
			kv_session_refund_reserved(session, g, n);
			kv_block_pool_mark(&pool->blocks[g], ids, n, session->handle, session->payer);
			status = kv_block_table_append(
				&sequence->tables[g], &pool->tables, &pool->blocks[g], ids, n);
			KV_ASSERT(status == KV_OK);
			n_left -= n;
		}
	}
	kv_slot_of(session)->n_chunks += kv_sequence_n_chunks(sequence);
}

enum kv_status kv_session_check_open(struct kv_domain *domain, const struct kv_open_params *params,
	struct kv_session_slot *namesake, struct kv_error *err)
{
	const struct kv_pool_spec *spec = params->pool->spec;

	if (namesake && namesake->session.state == KV_SESSION_OPEN)
		return kv_fail(err, KV_EXISTS, "session \"%.*s\" is open already", (int)params->name_bytes,
			params->name);
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		if (params->reserve_blocks > spec->n_blocks[g])
			return kv_fail(err, KV_LIMIT, "reserve_blocks %u is above the pool's %u blocks",
				params->reserve_blocks, spec->n_blocks[g]);
	}
	if (params->has_tables) {
		const enum kv_status status = check_tables(params, err);

		if (status != KV_OK)
			return status;
	}
	if (has_free_slot(domain))
		return kv_payer_check_open(params->pool, params->tenant, params->reserve_blocks, err);
	if (domain->n_closing > 0)
		return kv_fail(err, KV_BUSY_RETRY, "%u closed sessions are still being taken apart",
			domain->n_closing);
	if (domain->n_staged > 0)
		return kv_fail(err, KV_BUSY_RETRY, "%u sessions are being restored", domain->n_staged);
	return kv_fail(err, KV_LIMIT, "%u sessions are open, which is the limit", domain->n_sessions);
}

static uint32_t default_or_least(uint32_t asked, uint32_t default_value, uint32_t bound)
{
	if (asked == 0)
		return default_value;
	return asked < bound ? asked : bound;
}

static void init_session(struct kv_domain *domain, struct kv_session_slot *slot,
	const struct kv_open_params *params, uint64_t now_ns)
{
	const struct kv_domain_limits *limits = &domain->limits;
	struct kv_pool *pool = params->pool;
	struct kv_session *session = &slot->session;
	const uint32_t idx = kv_slot_idx(domain, slot);

	*session = (struct kv_session){
		.handle = (uint64_t)slot->generation << 32 | (uint64_t)domain->boot_tag << 16 | idx,
		.pool = pool,
		.tenant = params->tenant,
		.payer = kv_tenant_find(&domain->tenants, params->tenant),
		.priority = params->priority,
		.lease_ms = default_or_least(params->lease_ms, limits->lease_ms, limits->lease_ms_max),
		.opened_ns = now_ns,
		.sequences_max =
			default_or_least(params->sequences_max, limits->sequences_max, limits->sequences_max),
		.tokens_max =
			default_or_least(params->tokens_max, pool->spec->tokens_max, pool->spec->tokens_max),
	};
	memcpy(session->name, params->name_bytes ? params->name : "", params->name_bytes);
	kv_list_init(&session->sequences);
	kv_session_renew(session, now_ns);

	slot->tree = NULL;
	slot->layer_tokens = pool->session_tokens + (uint64_t)idx * pool->spec->n_layers;
	memset(slot->layer_tokens, 0, pool->spec->n_layers * sizeof(slot->layer_tokens[0]));
	slot->n_tokens_committed = slot->n_exact_rows = slot->n_tokens_charged = 0;
	slot->n_chunks = 0;
}

struct kv_session *kv_session_make(
	struct kv_domain *domain, const struct kv_open_params *params, uint64_t now_ns)
{
	struct kv_session_slot *slot = take_slot(domain);

	init_session(domain, slot, params, now_ns);
	kv_tenant_charge(&domain->tenants, slot->session.payer, KV_QUOTA_SESSIONS, 1);
	if (params->name_bytes > 0)
		slot->name_hash = kv_name_hash(domain, params->name, params->name_bytes, params->tenant);
	return &slot->session;
}

void kv_session_appear(struct kv_domain *domain, struct kv_session_slot *slot, uint64_t owner_id)
{
	const uint32_t idx = kv_slot_idx(domain, slot);
	struct kv_pool *pool = slot->session.pool;

	if (slot->session.name[0] != '\0') {
		slot->is_named = true;
		kv_hash_index_insert(&domain->names, slot->name_hash, idx);
	}
	set_owner(domain, slot, owner_id);
	kv_lease_insert(domain, slot);
	domain->open_bits[idx / 64] |= 1ull << idx % 64;
	domain->n_sessions++;
	pool->n_sessions++;
	kv_list_push_back(&pool->sessions, &slot->session.in_pool);
}

enum kv_status kv_session_open(struct kv_domain *domain, const struct kv_open_params *params, uint64_t now_ns,
	struct kv_session **out, struct kv_error *err)
{
	struct kv_session_slot *namesake = NULL;
	uint64_t hash = 0;

	KV_ASSERT(params->name_bytes <= KV_SESSION_NAME_BYTES_MAX);
	if (params->name_bytes > 0) {
		hash = kv_name_hash(domain, params->name, params->name_bytes, params->tenant);
		namesake = kv_find_name(domain, hash, params->name, params->name_bytes, params->tenant);
	}

	const enum kv_status status = kv_session_check_open(domain, params, namesake, err);

	if (status != KV_OK)
		return status;
	if (reserve(params->pool, params->reserve_blocks) != KV_OK)
		return kv_fail(err, KV_POOL_FULL, "%u blocks cannot be reserved now", params->reserve_blocks);
	if (namesake)
		kv_drop_name(domain, namesake); /* expired: the new one takes the name over */

	struct kv_session *session = kv_session_make(domain, params, now_ns);

	session->state = KV_SESSION_OPEN;
	for (uint32_t g = 0; g < params->pool->spec->n_groups; g++)
		session->n_blocks_reserved[g] = params->reserve_blocks;
	kv_tenant_charge(&domain->tenants, session->payer, KV_QUOTA_BYTES,
		kv_reservation_bytes(params->pool->spec, session->n_blocks_reserved));
	kv_session_appear(domain, kv_slot_of(session), params->owner_id);
	if (params->has_tables)
		take_tables(session, params->reserve_blocks, now_ns);
	*out = session;
	return KV_OK;
}

static struct kv_session_slot *find_slot(
	struct kv_domain *domain, const char *name, uint32_t name_bytes, uint64_t tenant)
{
	if (name_bytes == 0)
		return NULL;
	return kv_find_name(domain, kv_name_hash(domain, name, name_bytes, tenant), name, name_bytes, tenant);
}

struct kv_session *kv_session_by_name(
	struct kv_domain *domain, const char *name, uint32_t name_bytes, uint64_t tenant)
{
	struct kv_session_slot *slot = find_slot(domain, name, name_bytes, tenant);

	return slot && slot->session.state == KV_SESSION_OPEN ? &slot->session : NULL;
}

enum kv_status kv_session_attach(struct kv_domain *domain, const char *name, uint32_t name_bytes,
	uint64_t tenant, uint64_t owner_id, uint64_t now_ns, struct kv_session **out)
{
	struct kv_session_slot *slot = find_slot(domain, name, name_bytes, tenant);

	if (!slot)
		return KV_NOT_FOUND;
	if (slot->session.state != KV_SESSION_OPEN)
		return KV_SESSION_EXPIRED;
	set_owner(domain, slot, owner_id);
	kv_lease_restart(domain, slot, now_ns);
	*out = &slot->session;
	return KV_OK;
}

enum kv_status kv_session_find(struct kv_domain *domain, uint64_t handle, struct kv_session **out)
{
	const uint32_t slot_idx = handle & 0xFFFF;

	if (handle == 0)
		return KV_NOT_FOUND;
	if ((handle >> 16 & 0xFFFF) != domain->boot_tag)
		return KV_STALE_EPOCH;
	if (slot_idx >= domain->n_slots_touched)
		return KV_STALE_HANDLE;

	struct kv_session_slot *slot = &domain->slots[slot_idx];

	if (slot->generation != handle >> 32)
		return KV_STALE_HANDLE;
	if (slot->session.state != KV_SESSION_OPEN)
		return slot->is_expired ? KV_SESSION_EXPIRED : KV_STALE_HANDLE;
	*out = &slot->session;
	return KV_OK;
}

void kv_session_close(struct kv_domain *domain, struct kv_session *session, bool is_expired)
{
	struct kv_session_slot *slot = kv_slot_of(session);
	struct kv_pool *pool = session->pool;
	const uint32_t idx = kv_slot_idx(domain, slot);

	KV_ASSERT(session->state == KV_SESSION_OPEN);
	KV_ASSERT(session->n_queued == 0);
	session->state = KV_SESSION_CLOSING;
	slot->is_expired = is_expired;
	if (!is_expired)
		kv_drop_name(domain, slot);
	set_owner(domain, slot, 0);
	kv_lease_remove(domain, slot);
	domain->open_bits[idx / 64] &= ~(1ull << idx % 64);
	for (uint32_t g = 0; g < pool->spec->n_groups; g++)
		kv_block_pool_unreserve(&pool->blocks[g], session->n_blocks_reserved[g]);
	kv_session_refund(session);
	/* Its rows are not counted any more, although its sequences become zombies one by one. */
	for (uint32_t l = 0; l < pool->spec->n_layers; l++)
		pool->layer_tokens[l] -= slot->layer_tokens[l];
	pool->n_tokens_committed -= slot->n_tokens_committed;
	pool->n_exact_rows -= slot->n_exact_rows;
	pool->n_sequences -= session->n_sequences;
	pool->n_zombies += session->n_sequences;
	pool->n_sessions--;
	domain->n_sessions--;
	kv_list_remove(&session->in_pool);
	for (uint32_t i = 0; i < KV_CLOSE_SEQUENCES_MAX && !kv_list_is_empty(&session->sequences); i++)
		kv_sequence_bury(
			kv_container_of(kv_list_first(&session->sequences), struct kv_sequence, in_session));
	if (kv_list_is_empty(&session->sequences)) {
		kv_session_slot_free(domain, slot);
	} else {
		domain->n_closing++;
		kv_list_push_back(&pool->closing, &session->in_pool);
	}
}

struct kv_session *kv_session_next(struct kv_domain *domain, uint32_t *slot)
{
	uint32_t idx = *slot;

	while (idx < domain->n_slots_touched) {
		const uint64_t bits = domain->open_bits[idx / 64] >> idx % 64;

		if (bits != 0) {
			idx += (uint32_t)__builtin_ctzll(bits);
			*slot = idx + 1;
			return &domain->slots[idx].session;
		}
		idx = (idx / 64 + 1) * 64;
	}
	*slot = domain->n_slots_touched > *slot ? domain->n_slots_touched : *slot;
	return NULL;
}

void kv_session_owner_lost(struct kv_domain *domain, uint64_t owner_id, uint64_t now_ns)
{
	uint32_t idx = kv_hash_index_first(&domain->owners, kv_owner_hash(domain, owner_id));

	while (idx != KV_HASH_NONE) {
		struct kv_session_slot *slot = &domain->slots[idx];

		idx = kv_hash_index_next(&domain->owners, idx);
		if (slot->session.owner_id != owner_id)
			continue;
		kv_session_renew(&slot->session, now_ns);
		set_owner(domain, slot, 0);
	}
}

void kv_session_fence(struct kv_domain *domain, struct kv_session *session)
{
	set_owner(domain, kv_container_of(session, struct kv_session_slot, session), 0);
}

void kv_session_renew_owner(struct kv_domain *domain, uint64_t owner_id, uint64_t now_ns)
{
	for (uint32_t i = kv_hash_index_first(&domain->owners, kv_owner_hash(domain, owner_id));
		i != KV_HASH_NONE; i = kv_hash_index_next(&domain->owners, i)) {
		if (domain->slots[i].session.owner_id == owner_id)
			kv_session_renew(&domain->slots[i].session, now_ns);
	}
}
