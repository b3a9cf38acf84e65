#include "tests/sim/model.h"

#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "core/domain_internal.h"
#include "server/spill.h"

/* ---- lists ---- */

void sim_model_init(struct sim_model *model, uint32_t sessions_max, uint32_t sequences_max)
{
	memset(model, 0, sizeof(*model));
	model->controls_end = &model->controls;
	model->sessions_max = sessions_max;
	model->sequences_max = sequences_max;
}

void sim_sequence_free(struct sim_sequence *sequence)
{
	for (uint32_t l = 0; l < SIM_LAYERS_MAX; l++) {
		free(sequence->layers[l].row_ids);
		free(sequence->layers[l].ring);
	}
	free(sequence);
}

void sim_model_finish(struct sim_model *model)
{
	sim_saved_finish(&model->saved);
	while (model->sessions) {
		struct sim_session *session = model->sessions;

		model->sessions = session->next;
		while (session->sequences) {
			struct sim_sequence *sequence = session->sequences;

			session->sequences = sequence->next;
			sim_sequence_free(sequence);
		}
		free(session->slots);
		free(session);
	}
	while (model->published) {
		struct sim_published *entry = model->published;

		model->published = entry->next;
		free(entry);
	}
	while (model->controls) {
		struct sim_control *control = model->controls;

		model->controls = control->next;
		sim_control_free(control);
	}
}

struct sim_session *sim_model_session(const struct sim_model *model, uint64_t handle)
{
	struct sim_session *session = model->sessions;

	while (session && session->handle != handle)
		session = session->next;
	return session;
}

struct sim_sequence *sim_model_sequence(const struct sim_session *session, uint64_t id)
{
	struct sim_sequence *sequence = session->sequences;

	while (sequence && sequence->id != id)
		sequence = sequence->next;
	return sequence;
}

uint32_t sim_sequence_least(const struct sim_sequence *sequence, uint32_t first, uint32_t n, bool is_planned)
{
	uint32_t length = UINT32_MAX;

	for (uint32_t l = first; l < first + n; l++) {
		const struct sim_layer *layer = &sequence->layers[l];
		const uint32_t this = is_planned ? layer->planned : layer->committed;

		if (this < length)
			length = this;
	}
	return length;
}

uint32_t sim_sequence_longest(const struct sim_sequence *sequence)
{
	uint32_t length = 0;

	for (uint32_t l = 0; sequence && l < SIM_LAYERS_MAX; l++) {
		if (sequence->layers[l].planned > length)
			length = sequence->layers[l].planned;
	}
	return length;
}

static struct sim_session *open_session(const struct sim_model *model, uint64_t handle)
{
	struct sim_session *session = sim_model_session(model, handle);

	SIM_CHECK(session && session->is_open, "a session %016llx that is not open is used",
		(unsigned long long)handle);
	return session;
}

struct sim_control *sim_model_add_control(
	struct sim_model *model, uint64_t owner_id, uint16_t opcode, enum kv_status status, uint64_t handle)
{
	struct sim_control *control = calloc(1, sizeof(*control));

	SIM_CHECK(control, "no memory for the model");
	control->owner_id = owner_id;
	control->opcode = opcode;
	control->status = status;
	control->handle = handle;
	control->seq = ++model->seq;
	*model->controls_end = control;
	model->controls_end = &control->next;
	return control;
}

/* Answered from a request slot, so beside the others. */
static bool is_prefix(uint16_t opcode)
{
	return opcode == KVP_OP_PUBLISH || opcode == KVP_OP_MATCH;
}

struct sim_control *sim_model_take_control(struct sim_model *model, uint64_t owner_id, uint16_t opcode)
{
	struct sim_control **link = &model->controls;

	while (*link && ((*link)->owner_id != owner_id || is_prefix((*link)->opcode) != is_prefix(opcode)))
		link = &(*link)->next;
	struct sim_control *control = *link;

	if (!control || control->opcode != opcode)
		return NULL;
	*link = control->next;
	if (!*link && model->controls_end == &control->next)
		model->controls_end = link;
	return control;
}

void sim_control_free(struct sim_control *control)
{
	free(control->rows);
	free(control);
}

/* ---- sessions ---- */

static struct sim_session *named(const struct sim_model *model, const char *name, size_t n, uint64_t tenant)
{
	struct sim_session *session = model->sessions;

	while (session &&
		!(session->is_open && session->tenant == tenant && strlen(session->name) == n &&
			memcmp(session->name, name, n) == 0))
		session = session->next;
	return session;
}

struct sim_expected sim_model_open(const struct sim_model *model, const struct kv_open_params *params)
{
	const struct kv_pool_spec *spec = params->pool->spec;
	struct sim_expected expected = { .status = KV_OK };

	if (params->name_bytes > 0 && named(model, params->name, params->name_bytes, params->tenant))
		expected.status = KV_EXISTS;
	else if (params->reserve_blocks > spec->n_blocks[0])
		expected.status = KV_LIMIT; /* all groups have as many */
	else if (params->has_tables && params->reserve_blocks == 0)
		expected.status = KV_BAD_ARG;
	else if (params->has_tables && sim_model_n_objects(params->pool->domain) >= model->sequences_max)
		expected.status = KV_LIMIT;
	else if (model->n_open >= model->sessions_max)
		expected.status = KV_LIMIT;
	/* Closed sessions of the simulation are small, and gone at once unless they were being restored. */
	else if (model->n_open + params->pool->domain->n_staged + params->pool->domain->n_closing >=
		model->sessions_max)
		expected.status = KV_BUSY_RETRY;
	for (uint32_t g = 0; g < spec->n_groups && expected.status == KV_OK; g++) {
		const struct kv_block_counts *counts = &params->pool->blocks[g].counts;

		if (params->reserve_blocks > counts->n_free - counts->n_reserved)
			expected.status = KV_POOL_FULL;
	}
	return expected;
}

void sim_model_opened(struct sim_model *model, const struct kv_open_params *params, enum kv_status status,
	const struct kv_session *real, uint64_t now_ns)
{
	sim_model_add_control(
		model, params->owner_id, KVP_OP_OPEN, status, status == KV_OK ? real->handle : 0);
	if (status != KV_OK)
		return;
	struct sim_session *session = calloc(1, sizeof(*session));

	SIM_CHECK(session, "no memory for the model");
	SIM_CHECK(!sim_model_session(model, real->handle), "handle %016llx was given out before",
		(unsigned long long)real->handle);
	session->handle = real->handle;
	session->owner_id = params->owner_id;
	session->tenant = params->tenant;
	session->pool = params->pool;
	memcpy(session->name, params->name ? params->name : "", params->name_bytes);
	session->lease_ms = real->lease_ms;
	session->sequences_max = real->sequences_max;
	session->tokens_max = real->tokens_max;
	for (uint32_t g = 0; g < params->pool->spec->n_groups; g++)
		session->reserve_left[g] = params->reserve_blocks;
	session->is_open = true;
	session->owner_changed_ns = session->life_ns = now_ns;
	session->next = model->sessions;
	model->sessions = session;
	model->n_open++;
	if (params->has_tables)
		sim_model_open_tables(session, params->reserve_blocks);
}

void sim_model_attached(struct sim_model *model, const char *name, uint32_t name_bytes, uint64_t tenant,
	uint64_t owner_id, enum kv_status status, const struct kv_session *real, uint64_t now_ns)
{
	struct sim_session *session = named(model, name, name_bytes, tenant);

	SIM_CHECK((status == KV_OK) == (session != NULL), "ATTACH says %s", kv_status_name(status));
	sim_model_add_control(model, owner_id, KVP_OP_ATTACH, status, session ? session->handle : 0);
	if (!session)
		return;
	SIM_CHECK(real->handle == session->handle, "ATTACH found another session");
	if (session->owner_id != owner_id)
		session->owner_changed_ns = now_ns;
	session->owner_id = owner_id;
	session->life_ns = now_ns;
}

static void orphan_sequence(struct sim_session *session, struct sim_sequence **link)
{
	struct sim_sequence *sequence = *link;

	*link = sequence->next;
	session->n_sequences--;
	sequence->is_orphan = true;
	if (sequence->n_pending == 0)
		sim_sequence_free(sequence);
}

static void end_session(struct sim_model *model, struct sim_session *session, bool is_expired)
{
	session->is_open = false;
	session->is_expired = is_expired;
	memset(session->reserve_left, 0, sizeof(session->reserve_left));
	model->n_open--;
	while (session->sequences)
		orphan_sequence(session, &session->sequences);
}

void sim_model_closed(struct sim_model *model, uint64_t handle, bool is_expired, uint64_t now_ns)
{
	struct sim_session *session = open_session(model, handle);

	if (is_expired) {
		SIM_CHECK(session->n_pending == 0, "a session with %u items pending expired",
			session->n_pending);
		SIM_CHECK(now_ns >= session->life_ns + session->lease_ms * KV_NS_PER_MS,
			"session %016llx expired %llu ns after its last sign of life, its lease is %u ms",
			(unsigned long long)handle, (unsigned long long)(now_ns - session->life_ns),
			session->lease_ms);
	} else {
		sim_model_add_control(model, session->owner_id, KVP_OP_CLOSE, KV_OK, handle);
	}
	end_session(model, session, is_expired);
}

void sim_model_deleted(struct sim_model *model, uint64_t handle)
{
	struct sim_session *session = open_session(model, handle);

	SIM_CHECK(session->owner_id == 0, "a session is deleted under its owner");
	end_session(model, session, false);
}

void sim_model_fenced(struct sim_model *model, uint64_t handle, uint64_t now_ns)
{
	struct sim_session *session = sim_model_session(model, handle);

	if (!session || !session->is_open || session->owner_id == 0)
		return;
	session->owner_id = 0;
	session->owner_changed_ns = now_ns;
}

void sim_model_owner_lost(struct sim_model *model, uint64_t owner_id, uint64_t now_ns)
{
	for (struct sim_session *session = model->sessions; session; session = session->next) {
		if (!session->is_open || session->owner_id != owner_id)
			continue;
		session->owner_id = 0;
		session->owner_changed_ns = session->life_ns = now_ns;
	}
}

/* ---- sequences ---- */

void sim_model_truncated(struct sim_model *model, uint64_t handle, uint64_t sequence_id, uint32_t length,
	enum kv_status residence, enum kv_status status)
{
	struct sim_session *session = open_session(model, handle);
	struct sim_sequence *sequence = sim_model_sequence(session, sequence_id);
	struct sim_control *control =
		sim_model_add_control(model, session->owner_id, KVP_OP_TRUNCATE, status, handle);

	SIM_CHECK(session->n_pending == 0, "TRUNCATE with %u items pending", session->n_pending);
	const struct kv_pool_spec *spec = session->pool->spec;
	const enum kv_status expected = !sequence ? KV_NOT_FOUND
		: sequence->is_evicted            ? KV_EVICTED
		: residence != KV_OK              ? residence
						  : sim_model_check_cut(spec, sequence, length);

	SIM_CHECK(status == expected, "TRUNCATE says %s, expected %s", kv_status_name(status),
		kv_status_name(expected));
	control->sequence = sequence_id;
	if (!sequence)
		return;
	control->length = sim_sequence_least(sequence, 0, spec->n_layers, false);
	if (expected != KV_OK)
		return;
	sim_model_cut_windows(spec, sequence, length);
	sequence->rest_seq = ++model->seq;
	for (uint32_t l = 0; l < SIM_LAYERS_MAX; l++) {
		if (sequence->layers[l].committed > length)
			sequence->layers[l].committed = length;
		sequence->layers[l].planned = sequence->layers[l].committed;
		sim_model_cut_exact(spec, &sequence->layers[l], sequence->layers[l].planned);
	}
	control->length = sim_sequence_least(sequence, 0, session->pool->spec->n_layers, false);
}

void sim_model_freed(struct sim_model *model, uint64_t handle, uint64_t sequence_id, enum kv_status status)
{
	struct sim_session *session = open_session(model, handle);
	struct sim_sequence **link = &session->sequences;
	struct sim_control *control =
		sim_model_add_control(model, session->owner_id, KVP_OP_FREE, status, handle);

	while (*link && (*link)->id != sequence_id)
		link = &(*link)->next;
	SIM_CHECK(session->n_pending == 0, "FREE with %u items pending", session->n_pending);
	SIM_CHECK(status == (*link ? KV_OK : KV_NOT_FOUND), "FREE says %s", kv_status_name(status));
	control->sequence = sequence_id;
	if (*link)
		orphan_sequence(session, link);
}

static uint32_t count_shared(struct kv_session *real, uint64_t id)
{
	const struct kv_sequence *sequence = kv_sequence_find(real, id);
	uint32_t n = 0;

	for (uint32_t g = 0; g < real->pool->spec->n_groups; g++) {
		for (uint32_t i = 0; i < sequence->tables[g].n_blocks; i++) {
			uint32_t block;

			kv_block_table_copy(&sequence->tables[g], &real->pool->tables, i, 1, &block);
			n += block != KV_BLOCK_NONE && real->pool->blocks[g].owners[block] > 1;
		}
	}
	return n;
}

static void tell_row(const struct sim_session *session, struct kv_session *real,
	const struct sim_sequence *sequence, struct sim_tell_row *row)
{
	const struct kv_pool_spec *spec = session->pool->spec;

	uint32_t lo = 0;

	row->sequence = sequence->id;
	row->length_min = sim_sequence_least(sequence, 0, spec->n_layers, false);
	row->is_evictable = sequence->is_evictable;
	row->is_evicted = sequence->is_evicted;
	row->n_shared_blocks = count_shared(real, sequence->id);
	row->state = srv_spill_told(kv_sequence_find(real, sequence->id));
	for (uint32_t g = 0; g < spec->n_groups; g++)
		row->n_blocks += row->state == KVP_STATE_RESIDENT ? sim_model_n_blocks(spec, sequence, g) : 0;
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		row->lengths[l] = sequence->layers[l].committed;
		if (row->lengths[l] > row->length_max)
			row->length_max = row->lengths[l];
		const uint32_t first = sim_model_exact_lo(spec, &sequence->layers[l], row->lengths[l]);

		lo = first > lo ? first : lo;
	}
	row->n_exact = row->length_min > lo ? row->length_min - lo : 0;
}

static struct sim_sequence *next_sequence(const struct sim_session *session, uint64_t from)
{
	struct sim_sequence *best = NULL;

	for (struct sim_sequence *sequence = session->sequences; sequence; sequence = sequence->next) {
		if (sequence->id >= from && (!best || sequence->id < best->id))
			best = sequence;
	}
	return best;
}

void sim_model_told(
	struct sim_model *model, uint64_t handle, struct kv_session *real, uint64_t from, uint32_t n_max)
{
	struct sim_session *session = open_session(model, handle);
	struct sim_control *control =
		sim_model_add_control(model, session->owner_id, KVP_OP_TELL, KV_OK, handle);
	struct sim_sequence *sequence = next_sequence(session, from > 0 ? from : 1);

	SIM_CHECK(session->n_pending == 0, "TELL with %u items pending", session->n_pending);
	control->rows = calloc(n_max + 1, sizeof(*control->rows));
	SIM_CHECK(control->rows, "no memory for the model");
	while (sequence && control->n_rows < n_max) {
		tell_row(session, real, sequence, &control->rows[control->n_rows++]);
		sequence = next_sequence(session, sequence->id + 1);
	}
	control->next_sequence = sequence ? sequence->id : 0;
	control->n_total = session->n_sequences - session->has_tables;
}

void sim_model_compare(const struct sim_model *model, struct kv_domain *domain)
{
	SIM_CHECK(kv_domain_n_sessions(domain) == model->n_open, "%u sessions are open, the model has %u",
		kv_domain_n_sessions(domain), model->n_open);
	for (struct sim_session *session = model->sessions; session; session = session->next) {
		struct kv_session *real = NULL;

		if (!session->is_open)
			continue;
		const enum kv_status status = kv_session_find(domain, session->handle, &real);

		SIM_CHECK(status == KV_OK, "an open session answers %s", kv_status_name(status));
		SIM_CHECK(real->owner_id == session->owner_id, "the owner of a session differs");
		SIM_CHECK(real->n_sequences == session->n_sequences, "%u sequences, the model has %u",
			real->n_sequences, session->n_sequences);
		for (uint32_t g = 0; g < session->pool->spec->n_groups; g++)
			SIM_CHECK(real->n_blocks_reserved[g] == session->reserve_left[g],
				"%u blocks reserved, the model has %u", real->n_blocks_reserved[g],
				session->reserve_left[g]);
		SIM_CHECK(real->n_rows_in == session->n_rows_in && real->n_rows_out == session->n_rows_out &&
				real->n_queries == session->n_queries,
			"rows in %llu, out %llu, queries %llu; the model has %llu, %llu, %llu",
			(unsigned long long)real->n_rows_in, (unsigned long long)real->n_rows_out,
			(unsigned long long)real->n_queries, (unsigned long long)session->n_rows_in,
			(unsigned long long)session->n_rows_out, (unsigned long long)session->n_queries);
		for (const struct sim_sequence *sequence = session->sequences; sequence;
			sequence = sequence->next) {
			const struct kv_sequence *found = kv_sequence_find(real, sequence->id);

			SIM_CHECK(found, "sequence %llu is missing", (unsigned long long)sequence->id);
			for (uint32_t l = 0; l < session->pool->spec->n_layers; l++)
				SIM_CHECK(found->planned[l] == sequence->layers[l].planned &&
						found->committed[l] == sequence->layers[l].committed,
					"sequence %llu has lengths %u and %u on layer %u, the model %u and "
					"%u",
					(unsigned long long)sequence->id, found->planned[l],
					found->committed[l], l, sequence->layers[l].planned,
					sequence->layers[l].committed);
		}
	}
}
