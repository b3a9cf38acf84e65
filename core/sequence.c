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
	struct kv_sequence *sequence, struct layers layers, struct kv_need *need)
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
	return kv_sequence_check_blocks(
		session, sequence, layers.first, layers.end, item->position, item->seen, need);
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
	struct kv_sequence *sequence, struct layers layers, struct kv_need *need)
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
	struct kv_need need = { .entry_end = 0 };

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
		kv_sequence_take_blocks(session, sequence, &need);
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
