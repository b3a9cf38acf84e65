/*
 * The model's shared rows. Nothing is shared here: FORK copies lists of rows. Blocks are counted by the
 * domain, and those counts by the audit.
 */
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "tests/sim/model.h"

struct sim_sequence *sim_model_add_sequence(struct sim_session *session, uint64_t id)
{
	struct sim_sequence *sequence = calloc(1, sizeof(*sequence));

	SIM_CHECK(sequence, "no memory for the model");
	sequence->id = id;
	sequence->next = session->sequences;
	session->sequences = sequence;
	session->n_sequences++;
	return sequence;
}

void sim_model_forget(struct sim_session *session, struct sim_sequence *sequence)
{
	struct sim_sequence **link = &session->sequences;

	while (*link != sequence)
		link = &(*link)->next;
	*link = sequence->next;
	session->n_sequences--;
	sim_sequence_free(sequence);
}

static uint32_t n_zombies_of(struct kv_domain *domain)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < kv_domain_n_pools(domain); i++)
		n += kv_domain_pool_at(domain, i)->n_zombies;
	return n;
}

uint32_t sim_model_n_objects(struct kv_domain *domain)
{
	uint32_t n = n_zombies_of(domain);

	for (uint32_t i = 0; i < kv_domain_n_pools(domain); i++)
		n += kv_domain_pool_at(domain, i)->n_sequences;
	return n;
}

enum kv_status sim_model_check_new(
	const struct sim_model *model, const struct sim_session *session, const struct kv_pool *pool)
{
	if (session->n_sequences >= session->sequences_max)
		return KV_LIMIT;
	if (sim_model_n_objects(pool->domain) < model->sequences_max)
		return KV_OK;
	return n_zombies_of(pool->domain) > 0 ? KV_BUSY_RETRY : KV_LIMIT;
}

struct sim_expected sim_model_fork(const struct sim_model *model, const struct sim_session *session,
	const struct kv_pool *pool, uint64_t child_id, uint64_t parent_id, uint32_t length,
	enum kv_status residence)
{
	const struct sim_sequence *parent = sim_model_sequence(session, parent_id);
	const struct sim_sequence *child = sim_model_sequence(session, child_id);
	struct sim_expected expected = { KV_OK, KV_LAYER_NONE, 0, { 0 } };

	if (child)
		expected.length = sim_sequence_least(child, 0, pool->spec->n_layers, false);
	if (!parent)
		expected.status = KV_NOT_FOUND;
	else if (parent->is_evicted)
		expected.status = KV_EVICTED;
	else if (residence != KV_OK)
		expected.status = residence;
	else if (child)
		expected.status = KV_EXISTS;
	if (expected.status != KV_OK)
		return expected;

	const uint32_t parent_length = sim_sequence_least(parent, 0, pool->spec->n_layers, false);
	const uint32_t child_length = length == KV_LENGTH_PLANNED ? parent_length : length;
	const uint32_t n_chunks =
		kv_div_up_u32(kv_div_up_u32(child_length, pool->spec->block_size), KV_CHUNK_ENTRIES);

	if (child_length > parent_length)
		return (struct sim_expected){ KV_POSITION, KV_LAYER_NONE, parent_length, { 0 } };
	expected.status = sim_model_check_cut(pool->spec, parent, child_length);
	if (expected.status == KV_OK)
		expected.status = sim_model_check_new(model, session, pool);
	if (expected.status == KV_OK && n_chunks > pool->tables.n_chunks_max - pool->tables.n_chunks_used)
		expected.status = KV_LIMIT;
	if (expected.status == KV_OK)
		expected.length = child_length;
	return expected;
}

void sim_model_forked(struct sim_model *model, uint64_t handle, uint64_t child_id, uint64_t parent_id,
	const struct sim_expected *expected, uint64_t now_ns)
{
	struct sim_session *session = sim_model_session(model, handle);
	struct sim_sequence *parent = sim_model_sequence(session, parent_id);
	struct sim_control *control =
		sim_model_add_control(model, session->owner_id, KVP_OP_FORK, expected->status, handle);

	SIM_CHECK(session->n_pending == 0, "FORK with %u items pending", session->n_pending);
	control->sequence = child_id;
	control->length = expected->length;
	session->life_ns = now_ns;
	if (expected->status != KV_OK)
		return;

	struct sim_sequence *child = sim_model_add_sequence(session, child_id);

	child->is_evictable = parent->is_evictable;
	child->rest_seq = ++model->seq;
	parent->rest_seq = ++model->seq;
	for (uint32_t l = 0; l < session->pool->spec->n_layers; l++) {
		struct sim_layer *layer = &child->layers[l];

		layer->n_max = expected->length + 16;
		layer->planned = layer->committed = expected->length;
		layer->gone_end = parent->layers[l].gone_end;
		layer->row_ids = malloc(layer->n_max * sizeof(layer->row_ids[0]));
		SIM_CHECK(layer->row_ids, "no memory for the model");
		if (expected->length > 0)
			memcpy(layer->row_ids, parent->layers[l].row_ids,
				expected->length * sizeof(layer->row_ids[0]));
	}
	sim_model_cut_windows(session->pool->spec, child, expected->length);
}

/* ---- eviction ---- */

/* What is in a tier, or on its way, has no blocks to give: where it is, only the real one knows. */
static bool is_away(const struct sim_session *session, uint64_t sequence_id)
{
	struct kv_session *real;

	if (kv_session_find(session->pool->domain, session->handle, &real) != KV_OK)
		return true;
	const struct kv_sequence *sequence = kv_sequence_find(real, sequence_id);

	return !sequence || sequence->residence != KV_RESIDENT;
}

static bool may_be_evicted(const struct sim_sequence *sequence)
{
	return sequence->is_evictable && !sequence->is_evicted && sequence->n_pending == 0 &&
		sequence->n_pins == 0;
}

void sim_model_evicted(struct sim_model *model, const struct kv_sequence *real,
	const struct sim_sequence *planned, uint32_t group_idx)
{
	const struct sim_session *own = sim_model_session(model, real->session->handle);
	struct sim_sequence *sequence = sim_model_sequence(own, real->id);

	SIM_CHECK(sequence && sequence != planned && may_be_evicted(sequence),
		"sequence %llu is evicted, and must not be", (unsigned long long)real->id);
	const bool is_for_quota = group_idx == UINT32_MAX;

	SIM_CHECK(is_for_quota || real->pool->blocks[group_idx].counts.n_idle == 0,
		"a sequence is evicted before a prefix");
	for (const struct sim_session *session = model->sessions; session; session = session->next) {
		for (const struct sim_sequence *other = session->sequences;
			other && session->pool == own->pool; other = other->next)
			SIM_CHECK(other == sequence || other == planned || !may_be_evicted(other) ||
					sim_sequence_longest(other) == 0 || is_away(session, other->id) ||
					other->rest_seq > sequence->rest_seq ||
					(is_for_quota && session->tenant != own->tenant),
				"sequence %llu is evicted, %llu was used before it",
				(unsigned long long)sequence->id, (unsigned long long)other->id);
	}
	sequence->is_evicted = true;
	for (uint32_t l = 0; l < SIM_LAYERS_MAX; l++) {
		sequence->layers[l].planned = sequence->layers[l].committed = sequence->layers[l].gone_end =
			0;
		sim_model_cut_exact(own->pool->spec, &sequence->layers[l], 0);
	}
}

void sim_model_pinned(
	struct sim_model *model, uint64_t handle, uint64_t sequence_id, bool is_pin, enum kv_status status)
{
	struct sim_session *session = sim_model_session(model, handle);
	struct sim_sequence *sequence = sim_model_sequence(session, sequence_id);
	struct sim_control *control = sim_model_add_control(
		model, session->owner_id, is_pin ? KVP_OP_PIN : KVP_OP_UNPIN, status, handle);
	const enum kv_status expected = !sequence  ? KV_NOT_FOUND
		: is_pin && sequence->is_evicted   ? KV_EVICTED
		: !is_pin && sequence->n_pins == 0 ? KV_BAD_STATE
						   : KV_OK;

	SIM_CHECK(status == expected, "PIN or UNPIN says %s, expected %s", kv_status_name(status),
		kv_status_name(expected));
	control->sequence = sequence_id;
	if (sequence)
		control->length = sim_sequence_least(sequence, 0, session->pool->spec->n_layers, false);
	if (status != KV_OK)
		return;
	if (is_pin)
		sequence->n_pins++;
	else if (--sequence->n_pins == 0)
		sequence->rest_seq = ++model->seq;
}

uint32_t sim_model_n_pinned(const struct sim_model *model, const struct kv_pool *pool, bool has_rows)
{
	uint32_t n = 0;

	for (const struct sim_session *session = model->sessions; session; session = session->next) {
		for (const struct sim_sequence *sequence = session->sequences;
			sequence && session->is_open && session->pool == pool; sequence = sequence->next)
			n += sequence->n_pins > 0 && !sequence->is_orphan &&
				(!has_rows ||
					(sim_sequence_longest(sequence) > 0 &&
						!is_away(session, sequence->id)));
	}
	return n;
}
