/*
 * Sessions whose client manages block tables itself, in the model: which row is in which slot, as the batches
 * of the session come to their ends.
 */
#include <stdlib.h>
#include <string.h>

#include "core/checked.h"
#include "tests/sim/model.h"
#include "tests/sim/payload.h"

static uint32_t *slot_at(const struct sim_session *session, uint32_t layer, int64_t slot)
{
	return session->slots + (size_t)layer * session->n_slots + (size_t)slot;
}

uint32_t sim_model_slot(const struct sim_session *session, uint32_t layer, uint32_t slot)
{
	return *slot_at(session, layer, slot);
}

void sim_model_open_tables(struct sim_session *session, uint32_t n_blocks)
{
	const struct kv_pool_spec *spec = session->pool->spec;
	const size_t n_bytes = (size_t)spec->n_layers * n_blocks * spec->block_size * sizeof(uint32_t);

	session->has_tables = true;
	session->n_slots = n_blocks * spec->block_size;
	session->slots = malloc(n_bytes);
	SIM_CHECK(session->slots, "no memory for the model");
	memset(session->slots, 0xFF, n_bytes);
	memset(session->reserve_left, 0, sizeof(session->reserve_left));
	sim_model_add_sequence(session, 0);
}

static struct kv_result refused(enum kv_status status, uint32_t row)
{
	return (struct kv_result){ (uint16_t)status, KV_LAYER_NONE, row };
}

static struct kv_result plan_slots(const struct sim_session *session, const struct sim_request *request)
{
	for (uint32_t t = 0; t < request->items[0].n_tokens; t++) {
		if (request->slots[t] >= (int64_t)session->n_slots)
			return refused(KV_SLOT_OUT_OF_RANGE, t);
	}
	return refused(KV_OK, KV_ROW_NONE);
}

struct kv_result sim_model_plan_tables(const struct sim_session *session, const struct sim_request *request)
{
	const uint32_t block_size = session->pool->spec->block_size;
	const uint32_t q_len = request->n_listed ? request->items[0].q_len / request->n_listed : 0;

	if (request->opcode == KVP_OP_UPDATE_SLOTS)
		return plan_slots(session, request);
	for (uint32_t s = 0; s < request->n_listed; s++) {
		const uint32_t seen = request->seen[s];

		if (seen > session->tokens_max)
			return refused(KV_LEN_LIMIT, s);
		if (q_len > seen && q_len > 1)
			return refused(KV_BAD_ARG, s);
		for (uint32_t t = 0; t < seen; t += block_size) {
			const uint32_t at = s * SIM_STRIDE + t / block_size;

			if (request->table[at] >= session->n_slots / block_size)
				return refused(KV_SLOT_OUT_OF_RANGE, at);
		}
	}
	return refused(KV_OK, KV_ROW_NONE);
}

void sim_model_tables_planned(struct sim_session *session, struct sim_item *item, uint64_t now_ns)
{
	struct sim_sequence *sequence = sim_model_sequence(session, 0);

	item->planned_on = sequence;
	item->epoch = sequence->epoch;
	item->exact_lo = UINT32_MAX;
	sequence->n_pending++;
	session->n_pending++;
	session->life_ns = now_ns;
}

/* What a refused one leaves in the slots that it names, nobody knows. */
static void update(struct sim_session *session, const struct sim_request *request)
{
	const struct sim_item *item = &request->items[0];

	for (uint32_t l = request->layer_first; l < request->layer_first + request->n_layers; l++) {
		for (uint32_t t = 0; t < item->n_tokens; t++) {
			if (request->slots[t] >= 0)
				*slot_at(session, l, request->slots[t]) = item->result.status == KV_OK
					? sim_row_id(
						  item->row_counter + t, request->k_dtype, request->v_dtype)
					: UINT32_MAX;
		}
	}
}

static void look(const struct sim_session *session, struct sim_request *request)
{
	const uint32_t block_size = session->pool->spec->block_size;
	struct sim_item *item = &request->items[0];
	uint32_t n = 0;

	for (uint32_t s = 0; s < request->n_listed; s++)
		item->n_row_ids += request->seen[s];
	item->row_ids = malloc(item->n_row_ids * sizeof(uint32_t) + 1);
	SIM_CHECK(item->row_ids, "no memory for the model");
	for (uint32_t s = 0; s < request->n_listed; s++) {
		for (uint32_t t = 0; t < request->seen[s]; t++) {
			const uint32_t block = request->table[s * SIM_STRIDE + t / block_size];

			item->row_ids[n++] =
				*slot_at(session, request->layer_first, block * block_size + t % block_size);
		}
	}
}

void sim_model_tables_completed(struct sim_session *session, struct sim_request *request)
{
	SIM_CHECK(request->planned_seq > session->tables_seq,
		"request %llu takes effect behind a later one of its session",
		(unsigned long long)request->id);
	session->tables_seq = request->planned_seq;
	if (request->opcode == KVP_OP_UPDATE_SLOTS)
		update(session, request);
	else if (request->items[0].result.status == KV_OK)
		look(session, request);
}
