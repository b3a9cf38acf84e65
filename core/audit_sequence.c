/*
 * Audit of one sequence: its lengths, tables and places, each by itself.
 */
#include "core/audit_internal.h"
#include "core/domain_internal.h"

static enum kv_status fail_sequence(
	const struct kv_sequence *sequence, const char *what, struct kv_error *err)
{
	return kv_fail(err, KV_INTERNAL, "audit: %s %llu: %s", sequence->is_zombie ? "zombie" : "sequence",
		(unsigned long long)sequence->id, what);
}

/* What is gone, and the gap in the table that follows it; NULL: all right. */
static const char *check_windows(const struct kv_sequence *sequence, uint32_t g)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const struct kv_block_table *table = &sequence->tables[g];
	const uint32_t n_gone = sequence->n_gone[g];
	uint32_t least = UINT32_MAX;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (spec->layers[l].group_idx == g && sequence->committed[l] < least)
			least = sequence->committed[l];
	}
	if (sequence->residence == KV_SPILLED || sequence->residence == KV_BROKEN)
		return NULL; /* it has no tables, or they are being cut */
	if (n_gone < kv_pool_spec_gone(spec, g, least))
		return "less is gone than its windows leave behind";
	if (n_gone > 0 && (n_gone <= spec->group_sink_blocks[g] || n_gone >= table->n_blocks))
		return "what is gone is no gap in the middle";
	if (kv_block_table_has_gap(table) && table->gap_first != spec->group_sink_blocks[g])
		return "the gap in its table is not behind the sink blocks";
	if (n_gone > 0 && table->gap_end > n_gone)
		return "its table lacks blocks that are not gone";
	/* n_gone 0 with a gap: cut to its beginning, and the blocks behind the gap are still to go. */
	if ((n_gone > table->gap_end || (n_gone == 0 && kv_block_table_has_gap(table))) &&
		!kv_list_is_linked(&sequence->in_surplus))
		return "its table has blocks that are gone and nobody will free them";
	return NULL;
}

/* Every token of an exact window has a place in the ring's table. */
static const char *check_exact(const struct kv_sequence *sequence)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	const uint32_t n_ring = spec->exact_tokens;

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t planned = sequence->planned[l], exact = sequence->exact[l];

		if (exact > planned || exact > n_ring)
			return "more is exact than there is";
		if (sequence->residence == KV_SPILLED)
			continue; /* in its image */
		for (uint32_t t = planned - exact; t < planned; t++) {
			if (t % n_ring / spec->block_size >= sequence->tables[spec->n_groups].n_blocks)
				return "an exact token has no ring block";
		}
	}
	return NULL;
}

/* Lengths, tables and places of one that handles and ids find. */
static enum kv_status check_live(const struct kv_sequence *sequence, struct kv_error *err)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	struct kv_session *session = sequence->session;
	uint32_t n_needed[KV_TABLES_MAX];

	if (kv_sequence_find(session, sequence->id) != sequence)
		return fail_sequence(sequence, "its id does not find it", err);
	if (!sequence->is_tables &&
		kv_sequence_tree_at_least(kv_slot_of(session)->tree, sequence->id) != sequence)
		return fail_sequence(sequence, "the listing does not find it", err);
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (sequence->committed[l] > sequence->planned[l])
			return fail_sequence(sequence, "more is committed than planned", err);
		if (sequence->planned[l] > session->tokens_max)
			return fail_sequence(sequence, "longer than tokens_max", err);
		if (sequence->n_items == 0 && sequence->committed[l] != sequence->planned[l])
			return fail_sequence(sequence, "planned and committed differ without an item", err);
	}
	const bool may_rest = sequence->is_evictable && sequence->n_items == 0 && sequence->n_pins == 0 &&
		kv_sequence_n_blocks(sequence) > 0 && !sequence->is_evicted &&
		sequence->residence == KV_RESIDENT;

	if (kv_list_is_linked(&sequence->in_resting) != may_rest)
		return fail_sequence(sequence,
			may_rest ? "nobody can evict it" : "it can be evicted and must not be", err);
	kv_sequence_blocks_needed(sequence, n_needed);
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		const char *what = check_windows(sequence, g);

		if (what)
			return fail_sequence(sequence, what, err);
	}
	if (check_exact(sequence))
		return fail_sequence(sequence, check_exact(sequence), err);
	for (uint32_t g = 0; g < spec->n_tables; g++) {
		/* A ring is as long as free blocks allow. */
		if (sequence->tables[g].n_blocks < n_needed[g] && g < spec->n_groups)
			return fail_sequence(sequence, "its table is shorter than its length needs", err);
		if (sequence->tables[g].n_blocks > n_needed[g] && !kv_list_is_linked(&sequence->in_surplus))
			return fail_sequence(sequence, "its table is longer and nobody will cut it", err);
	}
	return KV_OK;
}

enum kv_status kv_audit_sequence(const struct kv_sequence *sequence, struct kv_error *err)
{
	if (!kv_list_is_linked(&sequence->in_session))
		return fail_sequence(sequence, "it is in no list", err);
	if (sequence->is_zombie != (sequence->session == NULL))
		return fail_sequence(sequence, "a zombie has no session, the others have one", err);
	for (uint32_t g = 0; g < sequence->pool->spec->n_tables; g++) {
		if (sequence->tables[g].is_pinned != (sequence->n_pins > 0))
			return fail_sequence(sequence, "its blocks are not pinned as it is", err);
	}
	return kv_sequence_is_live(sequence) ? check_live(sequence, err) : KV_OK;
}
