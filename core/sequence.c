/*
 * Sequences and items: positions, blocks, commit and falling back.
 *
 * Planning checks everything first and then does what cannot fail, so that a refused item changes nothing.
 */
#include "core/backend.h"
#include "core/domain.h"
#include "core/domain_internal.h"

/* Layers [first, end) of the frame. */
struct layers {
	uint32_t first, end;
};

/* What an append takes; filled by the check, used by the part that cannot fail. */
struct need {
	uint32_t n_blocks[KV_GROUPS_MAX];   /* new entries */
	uint32_t n_shared[KV_GROUPS_MAX];   /* entries whose block is replaced */
	uint32_t n_reserved[KV_GROUPS_MAX]; /* of both from the session's reservation */
	uint32_t entry_first, entry_end;    /* that the append writes */
	uint32_t n_copies;
	uint64_t n_chunks;
};

static bool is_append(const struct kv_item *item)
{
	return item->kind == KV_ITEM_APPEND || item->kind == KV_ITEM_APPEND_DECODE;
}

static bool is_decode(const struct kv_item *item)
{
	return item->kind == KV_ITEM_DECODE || item->kind == KV_ITEM_APPEND_DECODE;
}

uint32_t kv_least_length(const uint32_t *lengths, uint32_t first, uint32_t end)
{
	uint32_t least = lengths[first];

	for (uint32_t l = first + 1; l < end; l++) {
		if (lengths[l] < least)
			least = lengths[l];
	}
	return least;
}

static enum kv_status refuse_position(struct kv_item *item, uint32_t layer, uint32_t expected)
{
	item->layer = (uint16_t)layer;
	item->length = expected;
	return KV_POSITION;
}

/* ---- planning ---- */

/* New entries of one group's table, and blocks in place of those that others own, too. */
static void count_group(
	const struct kv_session *session, const struct kv_sequence *sequence, uint32_t g, struct need *need)
{
	static const struct kv_block_table no_table;
	const struct kv_block_table *table = sequence ? &sequence->tables[g] : &no_table;
	const uint32_t n_own = session->n_blocks_reserved[g];

	if (need->entry_end > table->n_blocks)
		need->n_blocks[g] = need->entry_end - table->n_blocks;
	if (need->entry_first < table->n_blocks) {
		const struct kv_shared_count shared =
			kv_sequence_count_shared(sequence, g, need->entry_first, need->entry_end);

		need->n_shared[g] = shared.n_shared;
		need->n_copies += shared.n_copies;
	}

	const uint32_t n_blocks = need->n_blocks[g] + need->n_shared[g];

	need->n_reserved[g] = n_blocks < n_own ? n_blocks : n_own;
	need->n_chunks += kv_block_table_chunks_needed(table, need->n_blocks[g]);
}

/* What the append takes; returns the first group that has too little, or KV_GROUPS_MAX. */
static uint32_t count_need(const struct kv_session *session, const struct kv_sequence *sequence,
	uint32_t groups, struct need *need)
{
	const struct kv_pool *pool = session->pool;
	uint32_t short_group = KV_GROUPS_MAX;

	*need = (struct need){ .entry_first = need->entry_first, .entry_end = need->entry_end };
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const struct kv_block_counts *counts = &pool->blocks[g].counts;

		if (!(groups & 1u << g))
			continue;
		count_group(session, sequence, g, need);
		if (need->n_blocks[g] + need->n_shared[g] - need->n_reserved[g] >
				counts->n_free - counts->n_reserved &&
			short_group == KV_GROUPS_MAX)
			short_group = g;
	}
	return short_group;
}

/* Bytes beyond the reservation, which is paid for. */
static uint64_t count_bytes(const struct kv_session *session, const struct kv_sequence *sequence,
	uint32_t groups, struct need *need)
{
	const struct kv_pool_spec *spec = session->pool->spec;
	uint32_t n_new[KV_GROUPS_MAX];

	(void)count_need(session, sequence, groups, need);
	for (uint32_t g = 0; g < spec->n_groups; g++)
		n_new[g] = need->n_blocks[g] + need->n_shared[g] - need->n_reserved[g];
	return kv_reservation_bytes(spec, n_new);
}

/*
 * Asked before room is made in the pool, so that nobody loses anything to a tenant that may not have it. What
 * is evicted may have shared blocks with the sequence, which makes its need smaller.
 */
static enum kv_status check_quota(
	struct kv_session *session, const struct kv_sequence *sequence, uint32_t groups, struct need *need)
{
	uint64_t n_bytes = count_bytes(session, sequence, groups, need), n_bytes_before;

	do {
		n_bytes_before = n_bytes;
		if (kv_payer_evict(session->pool, session->payer, n_bytes))
			break;
		n_bytes = count_bytes(session, sequence, groups, need);
	} while (n_bytes < n_bytes_before);
	return kv_tenant_check(
		&session->pool->domain->tenants, session->payer, KV_QUOTA_BYTES, n_bytes, NULL);
}

/* Everything that writing tokens [position, length) takes. May evict others. */
static enum kv_status check_blocks(struct kv_session *session, const struct kv_sequence *sequence,
	struct layers layers, uint32_t position, uint32_t length, struct need *need)
{
	struct kv_pool *pool = session->pool;
	const struct kv_pool_spec *spec = pool->spec;
	uint32_t groups = 0, g;

	need->entry_first = position / spec->block_size;
	need->entry_end = kv_div_up_u32(length, spec->block_size);
	for (uint32_t l = layers.first; l < layers.end; l++) {
		g = spec->layers[l].group_idx;
		groups |= 1u << g;
		/* Not even in an empty pool; what a window leaves behind comes back. */
		if (spec->group_window[g] == 0 && need->entry_end > spec->n_blocks[g])
			return KV_LIMIT;
	}
	/* What is evicted may have shared blocks with the sequence: counted again. */
	for (g = 0; sequence && g < spec->n_groups; g++) {
		/* Cut to its beginning a moment ago: blocks behind a gap are still to be given back. */
		if ((groups & 1u << g) && kv_block_table_has_gap(&sequence->tables[g]) &&
			sequence->n_gone[g] == 0)
			return KV_BUSY_RETRY;
	}
	const enum kv_status status = check_quota(session, sequence, groups, need);

	if (status != KV_OK)
		return status;
	while ((g = count_need(session, sequence, groups, need)) < KV_GROUPS_MAX) {
		if (!kv_pool_make_room(pool, g, need->n_blocks[g] + need->n_shared[g] - need->n_reserved[g]))
			return KV_POOL_FULL;
	}
	if (need->n_chunks > pool->tables.n_chunks_max - pool->tables.n_chunks_used)
		return KV_LIMIT;
	return need->n_copies <= KV_COPIES_MAX - pool->n_copies ? KV_OK : KV_BUSY_RETRY;
}

/* After check_blocks() said OK. */
static void take_blocks(struct kv_session *session, struct kv_sequence *sequence, const struct need *need)
{
	struct kv_pool *pool = session->pool;
	const uint32_t n_chunks = kv_sequence_n_chunks(sequence);

	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		uint32_t n_left = need->n_blocks[g], n_reserved = need->n_reserved[g];

		kv_session_refund_reserved(session, g, n_reserved);
		if (need->n_shared[g] > 0) {
			const uint32_t n = need->n_shared[g] < n_reserved ? need->n_shared[g] : n_reserved;

			kv_sequence_unshare(sequence, g, need->entry_first, need->entry_end, n);
			n_reserved -= n;
		}
		while (n_left > 0) {
			kv_block_id ids[KV_CHUNK_ENTRIES];
			const uint32_t n = n_left < KV_CHUNK_ENTRIES ? n_left : KV_CHUNK_ENTRIES;
			const uint32_t n_from_reservation = n < n_reserved ? n : n_reserved;
			enum kv_status status =
				kv_block_pool_take(&pool->blocks[g], n, n_from_reservation, ids);

			KV_ASSERT(status == KV_OK);
			kv_block_pool_mark(&pool->blocks[g], ids, n, session->handle, session->payer);
			status = kv_block_table_append(
				&sequence->tables[g], &pool->tables, &pool->blocks[g], ids, n);
			KV_ASSERT(status == KV_OK);
			n_left -= n;
			n_reserved -= n_from_reservation;
		}
	}
	kv_slot_of(session)->n_chunks += kv_sequence_n_chunks(sequence) - n_chunks;
}

enum kv_status kv_sequence_check_new(const struct kv_session *session)
{
	const struct kv_domain *domain = session->pool->domain;

	if (session->n_sequences >= session->sequences_max)
		return KV_LIMIT;
	if (domain->n_sequences < domain->limits.sequences_max)
		return KV_OK;
	/* Freed ones that are still being taken apart will make room. */
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		if (domain->pools[i]->n_zombies > 0)
			return KV_BUSY_RETRY;
	}
	return KV_LIMIT;
}

static bool has_rows(const struct kv_sequence *sequence)
{
	const uint32_t n_layers = sequence->pool->spec->n_layers;

	for (uint32_t l = 0; l < n_layers; l++) {
		if (sequence->planned[l] > 0)
			return true;
	}
	return false;
}

static enum kv_status check_append(struct kv_session *session, struct kv_item *item,
	struct kv_sequence *sequence, struct layers layers, struct need *need)
{
	enum kv_status status = KV_OK;

	if (item->n_tokens == 0)
		return KV_BAD_ARG;
	if (!sequence)
		status = item->flags & KV_ITEM_CREATE ? kv_sequence_check_new(session) : KV_NOT_FOUND;
	else if (sequence->is_evicted && !(item->flags & KV_ITEM_CREATE))
		status = KV_EVICTED;
	else if ((item->flags & KV_ITEM_CREATE) && has_rows(sequence))
		status = KV_EXISTS;
	if (status != KV_OK)
		return status;
	for (uint32_t l = layers.first; l < layers.end; l++) {
		const uint32_t planned = sequence ? sequence->planned[l] : 0;

		if (item->position != planned)
			return refuse_position(item, l, planned);
	}
	/* Lengths are at most tokens_max, so this cannot wrap. */
	if (item->position > session->tokens_max || item->n_tokens > session->tokens_max - item->position)
		return KV_LEN_LIMIT;
	item->seen = item->position + item->n_tokens;
	status = kv_sequence_check_tokens(session, sequence, item->seen);
	if (status != KV_OK)
		return status;
	if (sequence)
		kv_sequence_wake(sequence); /* room is not made at its own expense */
	return check_blocks(session, sequence, layers, item->position, item->seen, need);
}

/* The rows that the first query row sees are the earliest ones. */
static enum kv_status check_windows(
	const struct kv_item *item, const struct kv_sequence *sequence, uint32_t layer)
{
	const uint32_t own = sequence->pool->spec->layers[layer].window;
	const uint32_t window = item->window != 0 && (own == 0 || item->window < own) ? item->window : own;
	const uint64_t end = (uint64_t)item->seen + 1;
	const uint32_t first_end = end > item->q_len ? (uint32_t)(end - item->q_len) : 0;

	return kv_sequence_check_reach(
		sequence, layer, window != 0 && first_end > window ? first_end - window : 0, item->seen);
}

static enum kv_status check_seen(struct kv_item *item, const struct kv_sequence *sequence, uint32_t layer)
{
	if (!sequence)
		return KV_NOT_FOUND;
	if (sequence->is_evicted)
		return KV_EVICTED;

	const uint32_t planned = sequence->planned[layer];

	if (item->position != KV_LENGTH_PLANNED && item->position > planned)
		return refuse_position(item, layer, planned);
	item->seen = item->position == KV_LENGTH_PLANNED ? planned : item->position;
	return KV_OK;
}

static enum kv_status check_read(
	struct kv_item *item, const struct kv_sequence *sequence, struct layers layers)
{
	if (item->n_tokens == 0)
		return KV_BAD_ARG;
	if (!sequence)
		return KV_NOT_FOUND;
	if (sequence->is_evicted)
		return KV_EVICTED;
	for (uint32_t l = layers.first; l < layers.end; l++) {
		const uint32_t planned = sequence->planned[l];

		if (item->position > planned || item->n_tokens > planned - item->position)
			return refuse_position(item, l, planned);
	}
	item->seen = item->position + item->n_tokens;
	for (uint32_t l = layers.first; l < layers.end; l++) {
		if (kv_sequence_check_reach(sequence, l, item->position, item->seen) == KV_OK)
			continue;
		item->layer = (uint16_t)l;
		return KV_WINDOW_GONE;
	}
	return KV_OK;
}

/* Row i sees seen - q_len + 1 + i tokens. One row over nothing is allowed: its output is zero. */
static enum kv_status check_q_len(const struct kv_item *item)
{
	if (item->q_len == 0)
		return KV_BAD_ARG;
	return item->q_len <= item->seen || item->q_len == 1 ? KV_OK : KV_BAD_ARG;
}

static enum kv_status check_item(struct kv_session *session, struct kv_item *item,
	struct kv_sequence *sequence, struct layers layers, struct need *need)
{
	enum kv_status status = KV_BAD_ARG;

	if (item->sequence_id == 0)
		return KV_BAD_ARG;
	if (sequence)
		status = kv_sequence_check_residence(sequence, is_append(item));
	if (sequence && status != KV_OK)
		return status;
	switch ((enum kv_item_kind)item->kind) {
	case KV_ITEM_APPEND:
	case KV_ITEM_APPEND_DECODE:
		status = check_append(session, item, sequence, layers, need);
		break;
	case KV_ITEM_DECODE:
		status = check_seen(item, sequence, layers.first);
		break;
	case KV_ITEM_READ:
		status = check_read(item, sequence, layers);
		break;
	case KV_ITEM_UPDATE_SLOTS: /* kv_item_plan_tables() */
	case KV_ITEM_DECODE_TABLE:
		break;
	}
	if (status == KV_OK && is_decode(item))
		status = check_q_len(item);
	if (status == KV_OK && is_decode(item) && sequence)
		status = check_windows(item, sequence, layers.first);
	return status;
}

void kv_item_plan(struct kv_session *session, struct kv_item *item, uint32_t layer_first, uint32_t n_layers,
	uint64_t now_ns)
{
	const struct layers layers = { layer_first, layer_first + n_layers };
	struct kv_sequence *sequence = kv_sequence_find(session, item->sequence_id);
	struct need need = { .entry_end = 0 };

	KV_ASSERT(session->state == KV_SESSION_OPEN);
	KV_ASSERT(n_layers >= 1);
	KV_ASSERT(layer_first < session->pool->spec->n_layers);
	KV_ASSERT(n_layers <= session->pool->spec->n_layers - layer_first);
	KV_ASSERT(!is_decode(item) || n_layers == 1);
	item->sequence = NULL;
	item->epoch = item->seen = 0;
	item->exact_lo = UINT32_MAX;
	item->layer = KV_LAYER_NONE;
	item->row = KV_ROW_NONE;
	item->retry_after_ms = 0;
	item->length = sequence ? kv_least_length(sequence->committed, layers.first, layers.end) : 0;

	const enum kv_status status = check_item(session, item, sequence, layers, &need);

	item->status = (uint16_t)status;
	if (status == KV_POOL_FULL || status == KV_BUSY_RETRY || status == KV_QUOTA)
		item->retry_after_ms = KV_RETRY_AFTER_MS;
	if (status != KV_OK) {
		if (sequence && is_append(item))
			kv_sequence_rest(sequence);
		return;
	}
	if (!sequence) {
		sequence = kv_sequence_add(session, item->sequence_id, now_ns);
		sequence->is_unborn = true;
	}
	if (is_append(item)) {
		const uint64_t n_exact_rows = kv_sequence_n_exact_rows(sequence);

		kv_sequence_wake(sequence);
		sequence->is_unborn = sequence->is_unborn || sequence->is_evicted;
		sequence->is_evicted = false;
		take_blocks(session, sequence, &need);
		kv_sequence_plan_exact(sequence, item, layers.first, n_layers);
		for (uint32_t l = layers.first; l < layers.end; l++)
			sequence->planned[l] = item->seen;
		kv_sequence_charge(sequence);
		kv_sequence_count_exact(sequence, n_exact_rows);
		sequence->is_evictable = sequence->is_evictable || (item->flags & KV_ITEM_EVICTABLE);
	}
	if (!is_append(item))
		kv_sequence_see_exact(sequence, item, layers.first, n_layers);
	kv_sequence_wake(sequence);
	sequence->used_ns = now_ns;
	sequence->n_items++;
	item->sequence = sequence;
	item->epoch = sequence->epoch;
}

/* ---- finishing ---- */

bool kv_item_is_stale(const struct kv_item *item)
{
	return item->sequence && item->epoch != item->sequence->epoch;
}

/* Lengths move on; the sums of its session and pool with them. */
static void commit(const struct kv_item *item, struct layers layers)
{
	struct kv_sequence *sequence = item->sequence;
	struct kv_pool *pool = sequence->pool;
	const uint32_t n_layers = pool->spec->n_layers;
	const bool is_live = kv_sequence_is_live(sequence);
	const uint32_t least_before = kv_least_length(sequence->committed, 0, n_layers);
	const uint64_t n_exact_rows = kv_sequence_n_exact_rows(sequence);

	sequence->is_unborn = false;
	for (uint32_t l = layers.first; l < layers.end; l++) {
		KV_ASSERT(sequence->committed[l] == item->position);
		sequence->committed[l] += item->n_tokens;
	}
	if (!is_live)
		return;

	struct kv_session_slot *slot = kv_slot_of(sequence->session);
	const uint32_t n_gained = kv_least_length(sequence->committed, 0, n_layers) - least_before;

	for (uint32_t l = layers.first; l < layers.end; l++) {
		slot->layer_tokens[l] += item->n_tokens;
		pool->layer_tokens[l] += item->n_tokens;
	}
	slot->n_tokens_committed += n_gained;
	pool->n_tokens_committed += n_gained;
	kv_sequence_count_exact(sequence, n_exact_rows);
	kv_sequence_move_windows(sequence);
}

static void fall_back(struct kv_sequence *sequence)
{
	const uint64_t n_exact_rows = kv_sequence_n_exact_rows(sequence);

	for (uint32_t l = 0; l < sequence->pool->spec->n_layers; l++) {
		kv_sequence_cut_exact(sequence, l, sequence->planned[l] - sequence->committed[l]);
		sequence->planned[l] = sequence->committed[l];
	}
	sequence->epoch++;
	if (!kv_sequence_is_live(sequence))
		return;
	kv_sequence_charge(sequence);
	kv_sequence_count_exact(sequence, n_exact_rows);
	kv_sequence_fit_tables(sequence);
}

static void count_rows(const struct kv_item *item, uint32_t n_layers)
{
	if (!kv_sequence_is_live(item->sequence))
		return;

	struct kv_session *session = item->sequence->session;
	const uint64_t n_rows = (uint64_t)item->n_tokens * n_layers;

	if (is_append(item) || item->kind == KV_ITEM_UPDATE_SLOTS)
		session->n_rows_in += n_rows;
	if (item->kind == KV_ITEM_READ)
		session->n_rows_out += n_rows;
	if (is_decode(item) || item->kind == KV_ITEM_DECODE_TABLE)
		session->n_queries += item->q_len;
}

/* What the server decided about the request itself is more useful to know than that it was stale, too. */
static bool is_decided(uint16_t status)
{
	return status == KV_CANCELLED || status == KV_DEADLINE || status == KV_DEVICE_LOST;
}

/* No id finds it any more; it has no rows. It may be gone below. */
static void forget(struct kv_sequence *sequence)
{
	struct kv_session_slot *slot = kv_slot_of(sequence->session);
	struct kv_pool *pool = sequence->pool;

	kv_sequence_wake(sequence);
	slot->n_chunks -= kv_sequence_n_chunks(sequence);
	kv_sequence_tree_remove(&slot->tree, sequence);
	pool->n_sequences--;
	pool->n_zombies++;
	kv_sequence_bury(sequence);
}

void kv_item_finish(struct kv_item *item, uint32_t layer_first, uint32_t n_layers)
{
	const struct layers layers = { layer_first, layer_first + n_layers };
	struct kv_sequence *sequence = item->sequence;

	if (!sequence)
		return;
	if (kv_item_is_stale(item)) {
		if (!is_decided(item->status))
			item->status = KV_POSITION;
		item->layer = KV_LAYER_NONE;
		item->row = KV_ROW_NONE;
		item->length = kv_least_length(sequence->planned, layers.first, layers.end);
	} else {
		if (item->status == KV_OK) {
			if (is_append(item))
				commit(item, layers);
			count_rows(item, n_layers);
		} else if (is_append(item)) {
			fall_back(sequence);
		}
		item->length = kv_least_length(sequence->committed, layers.first, layers.end);
	}
	item->sequence = NULL;
	KV_ASSERT(sequence->n_items > 0);
	sequence->n_items--;
	if (sequence->is_unborn && sequence->n_items == 0 && kv_sequence_is_live(sequence) &&
		!has_rows(sequence)) {
		forget(sequence); /* PROTOCOL rule 2: no trace */
		return;
	}
	kv_sequence_rest(sequence);
	if (sequence->is_zombie && sequence->n_items == 0 && kv_sequence_n_blocks(sequence) == 0)
		kv_sequence_recycle(sequence);
}

/* ---- sequences ---- */

void kv_sequence_lengths(const struct kv_sequence *sequence, uint32_t *length_min, uint32_t *length_max)
{
	const uint32_t n_layers = sequence->pool->spec->n_layers;
	uint32_t greatest = 0;

	for (uint32_t l = 0; l < n_layers; l++) {
		if (sequence->committed[l] > greatest)
			greatest = sequence->committed[l];
	}
	*length_min = kv_least_length(sequence->committed, 0, n_layers);
	*length_max = greatest;
}

void kv_sequence_shorten(struct kv_sequence *sequence, uint32_t length)
{
	struct kv_pool *pool = sequence->pool;
	struct kv_session_slot *slot = kv_slot_of(sequence->session);
	const uint32_t n_layers = pool->spec->n_layers;
	const uint32_t least = kv_least_length(sequence->committed, 0, n_layers);
	const uint32_t n_lost = least > length ? least - length : 0;
	const uint64_t n_exact_rows = kv_sequence_n_exact_rows(sequence);

	for (uint32_t l = 0; l < n_layers; l++) {
		slot->layer_tokens[l] -= kv_sequence_n_held(sequence, l);
		pool->layer_tokens[l] -= kv_sequence_n_held(sequence, l);
		if (sequence->committed[l] <= length)
			continue;
		kv_sequence_cut_exact(sequence, l, sequence->committed[l] - length);
		sequence->committed[l] = sequence->planned[l] = length;
	}
	kv_sequence_count_exact(sequence, n_exact_rows);
	kv_sequence_cut_windows(sequence, length);
	for (uint32_t l = 0; l < n_layers; l++) {
		slot->layer_tokens[l] += kv_sequence_n_held(sequence, l);
		pool->layer_tokens[l] += kv_sequence_n_held(sequence, l);
	}
	slot->n_tokens_committed -= n_lost;
	pool->n_tokens_committed -= n_lost;
	kv_sequence_charge(sequence);
}

enum kv_status kv_sequence_truncate(struct kv_session *session, uint64_t sequence_id, uint32_t length)
{
	struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);

	if (!sequence)
		return KV_NOT_FOUND;
	enum kv_status status = kv_sequence_check_residence(sequence, true);

	if (status != KV_OK)
		return status;
	KV_ASSERT(sequence->n_items == 0);
	if (sequence->is_evicted)
		return KV_EVICTED;
	status = kv_sequence_check_cut(sequence, length);
	if (status != KV_OK)
		return status;
	kv_sequence_wake(sequence);
	kv_sequence_shorten(sequence, length);
	kv_sequence_fit_tables(sequence);
	kv_sequence_rest(sequence);
	return KV_OK;
}

enum kv_status kv_sequence_free(struct kv_session *session, uint64_t sequence_id)
{
	struct kv_sequence *sequence = kv_sequence_find(session, sequence_id);

	if (!sequence)
		return KV_NOT_FOUND;
	KV_ASSERT(sequence->n_items == sequence->is_held);
	kv_sequence_shorten(sequence, 0);
	forget(sequence);
	return KV_OK;
}

struct kv_sequence *kv_sequence_next(struct kv_session *session, uint64_t from)
{
	return kv_sequence_tree_at_least(kv_slot_of(session)->tree, from);
}

void kv_sequence_evict(struct kv_sequence *sequence)
{
	KV_ASSERT(sequence->n_items == 0);
	kv_sequence_wake(sequence);
	kv_sequence_shorten(sequence, 0);
	for (uint32_t l = 0; l < sequence->pool->spec->n_layers; l++)
		sequence->planned[l] = 0;
	sequence->is_evicted = true;
	sequence->pool->n_evicted_sequences++;
	kv_sequence_fit_tables(sequence);
}

uint32_t kv_sequence_list(
	struct kv_session *session, uint64_t from, struct kv_sequence *out[], uint32_t n_max, uint64_t *next)
{
	struct kv_sequence *root = kv_slot_of(session)->tree;
	struct kv_sequence *sequence = kv_sequence_tree_at_least(root, from);
	uint32_t n = 0;

	while (sequence && n < n_max) {
		out[n++] = sequence;
		sequence =
			sequence->id < UINT64_MAX ? kv_sequence_tree_at_least(root, sequence->id + 1) : NULL;
	}
	*next = sequence ? sequence->id : 0;
	return n;
}
