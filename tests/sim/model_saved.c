/*
 * What snapshots hold, in the model: copies of the sequences as they were when the server took them in.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/model.h"

static void free_list(struct sim_saved_sequence *list)
{
	while (list) {
		struct sim_saved_sequence *saved = list;

		list = saved->next;
		sim_sequence_free(saved->sequence);
		free(saved);
	}
}

static void free_snapshot(struct sim_snapshot *snapshot)
{
	free_list(snapshot->list);
	sim_saved_prefixes_free(snapshot->prefixes);
	snapshot->list = NULL;
	snapshot->prefixes = NULL;
}

void sim_saved_finish(struct sim_saved *saved)
{
	free_snapshot(&saved->begun);
	for (uint32_t i = 0; i < SIM_SAVED_MAX; i++)
		free_snapshot(&saved->snapshots[i]);
	memset(saved, 0, sizeof(*saved));
}

/* Of the exact window what is committed: what is only planned has taken the places of older tokens. */
static void copy_ring(const struct kv_pool_spec *spec, struct sim_layer *to, const struct sim_layer *from)
{
	if (!from->ring)
		return;
	to->ring = malloc(spec->exact_tokens * sizeof(to->ring[0]));
	SIM_CHECK(to->ring, "no memory for the model");
	memcpy(to->ring, from->ring, spec->exact_tokens * sizeof(to->ring[0]));
	sim_model_cut_exact(spec, to, from->committed);
}

static void copy_layers(
	struct sim_sequence *to, const struct sim_sequence *from, const struct kv_pool_spec *spec)
{
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		struct sim_layer *layer = &to->layers[l];
		const uint32_t n = from->layers[l].committed;

		layer->n_max = n + 16;
		layer->gone_end = from->layers[l].gone_end;
		layer->planned = layer->committed = n;
		layer->row_ids = malloc(layer->n_max * sizeof(layer->row_ids[0]));
		SIM_CHECK(layer->row_ids, "no memory for the model");
		if (n > 0)
			memcpy(layer->row_ids, from->layers[l].row_ids, n * sizeof(layer->row_ids[0]));
		copy_ring(spec, layer, &from->layers[l]);
	}
}

void sim_model_capture_begun(struct sim_model *model)
{
	free_snapshot(&model->saved.begun);
	model->saved.begun_seq = model->seq;
}

void sim_model_captured(struct sim_model *model, const struct kv_sequence *real)
{
	const struct sim_session *session = sim_model_session(model, real->session->handle);
	const struct sim_sequence *sequence = session ? sim_model_sequence(session, real->id) : NULL;
	struct sim_saved_sequence *saved = calloc(1, sizeof(*saved));

	SIM_CHECK(sequence && session->is_open, "a snapshot takes in a sequence that there is not");
	SIM_CHECK(saved, "no memory for the model");
	saved->sequence = calloc(1, sizeof(*saved->sequence));
	SIM_CHECK(saved->sequence, "no memory for the model");
	saved->tenant = session->tenant;
	memcpy(saved->name, session->name, sizeof(saved->name));
	saved->sequence->id = sequence->id;
	saved->sequence->is_evictable = sequence->is_evictable;
	saved->sequence->n_pins = sequence->n_pins;
	copy_layers(saved->sequence, sequence, session->pool->spec);
	saved->next = model->saved.begun.list;
	model->saved.begun.list = saved;
}

static struct sim_snapshot *find(struct sim_saved *saved, const char *name)
{
	for (uint32_t i = 0; i < SIM_SAVED_MAX; i++) {
		struct sim_snapshot *snapshot = &saved->snapshots[i];

		if (strcmp(snapshot->name, name) == 0)
			return snapshot;
	}
	return NULL;
}

struct sim_snapshot *sim_model_snapshot(struct sim_model *model, const char *name)
{
	return name[0] ? find(&model->saved, name) : NULL;
}

void sim_model_check_restored(struct sim_model *model, const char *name)
{
	const struct sim_snapshot *snapshot = find(&model->saved, name);

	SIM_CHECK(snapshot, "snapshot %s was never written", name);
	for (const struct sim_saved_sequence *saved = snapshot->list; saved; saved = saved->next) {
		const struct sim_session *session = model->sessions;

		while (session &&
			(!session->is_open || session->tenant != saved->tenant ||
				strcmp(session->name, saved->name) != 0))
			session = session->next;
		SIM_CHECK(session, "session %s of the snapshot is not restored", saved->name);
	}
}

static struct sim_snapshot *find_or_make(struct sim_saved *saved, const char *name)
{
	struct sim_snapshot *snapshot = find(saved, name);

	if (!snapshot)
		snapshot = find(saved, "");
	SIM_CHECK(snapshot, "more than %u snapshots", SIM_SAVED_MAX);
	return snapshot;
}

void sim_model_forget_snapshot(struct sim_model *model, const char *name)
{
	struct sim_snapshot *snapshot = find_or_make(&model->saved, name);

	snprintf(snapshot->name, sizeof(snapshot->name), "%s", name);
	snapshot->is_unknown = true;
}

void sim_model_saved(struct sim_model *model, struct kv_domain *domain, const char *name)
{
	struct sim_snapshot *snapshot = find_or_make(&model->saved, name);

	sim_model_check_captured(model, domain);
	free_snapshot(snapshot);
	*snapshot = model->saved.begun;
	snprintf(snapshot->name, sizeof(snapshot->name), "%s", name);
	memset(&model->saved.begun, 0, sizeof(model->saved.begun));
}

void sim_model_restored(struct sim_model *model, const char *name, const struct kv_session *real)
{
	const struct sim_snapshot *snapshot = find(&model->saved, name);
	struct sim_session *session = calloc(1, sizeof(*session));

	SIM_CHECK(session, "no memory for the model");
	SIM_CHECK(snapshot, "snapshot %s was never written", name);
	session->handle = real->handle;
	session->tenant = real->tenant;
	session->pool = real->pool;
	memcpy(session->name, real->name, sizeof(session->name));
	session->lease_ms = real->lease_ms;
	session->sequences_max = real->sequences_max;
	session->tokens_max = real->tokens_max;
	memcpy(session->reserve_left, real->n_blocks_reserved, sizeof(session->reserve_left));
	session->n_rows_in = real->n_rows_in;
	session->n_rows_out = real->n_rows_out;
	session->n_queries = real->n_queries;
	session->is_open = true;
	/* What is left of the lease runs from now, or a longer one until it is attached. */
	session->life_ns = real->lease_end_ns - real->lease_ms * KV_NS_PER_MS;
	session->owner_changed_ns = session->life_ns < real->opened_ns ? session->life_ns : real->opened_ns;
	session->next = model->sessions;
	model->sessions = session;
	model->n_open++;
	for (const struct sim_saved_sequence *saved = snapshot->list; saved; saved = saved->next) {
		if (saved->tenant != session->tenant || strcmp(saved->name, session->name) != 0)
			continue;
		struct sim_sequence *sequence = sim_model_add_sequence(session, saved->sequence->id);

		sequence->is_evictable = saved->sequence->is_evictable;
		sequence->n_pins = saved->sequence->n_pins;
		copy_layers(sequence, saved->sequence, session->pool->spec);
	}
	/* In the order in which they were saved, which is that of the list now. */
	for (struct sim_sequence *sequence = session->sequences; sequence; sequence = sequence->next)
		sequence->rest_seq = ++model->seq;
}

void sim_model_moved(struct sim_model *model, uint64_t handle, uint64_t sequence_id, uint16_t opcode,
	enum kv_status status)
{
	struct sim_session *session = sim_model_session(model, handle);
	const struct sim_sequence *sequence = sim_model_sequence(session, sequence_id);
	struct sim_control *control = sim_model_add_control(model, session->owner_id, opcode, status, handle);

	SIM_CHECK((status == KV_NOT_FOUND) == (sequence == NULL), "SPILL or PREFETCH says %s",
		kv_status_name(status));
	control->sequence = sequence_id;
	if (sequence)
		control->length = sim_sequence_least(sequence, 0, session->pool->spec->n_layers, false);
}

enum kv_status sim_model_residence(struct kv_session *real, uint64_t sequence_id, bool is_write)
{
	const struct kv_sequence *sequence = kv_sequence_find(real, sequence_id);

	if (!sequence || sequence->residence == KV_RESIDENT ||
		(sequence->residence == KV_SPILLING && !is_write))
		return KV_OK;
	return sequence->residence == KV_BROKEN ? KV_CORRUPT : KV_BUSY_RETRY;
}

void sim_model_moved_end(struct sim_model *model, uint64_t handle, uint64_t sequence_id, bool is_broken)
{
	struct sim_session *session = sim_model_session(model, handle);
	struct sim_sequence *sequence = sim_model_sequence(session, sequence_id);

	sequence->rest_seq = ++model->seq;
	for (uint32_t l = 0; is_broken && l < session->pool->spec->n_layers; l++)
		sim_model_cut_exact(session->pool->spec, &sequence->layers[l], 0);
}
