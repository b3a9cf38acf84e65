#include "core/report.h"

#include "core/domain_internal.h"
#include "core/format.h"

/* Adds n_tokens committed tokens of one layer. */
static void add_rows(struct kv_memory_report *report, const struct kv_pool_spec *spec, uint32_t layer_idx,
	uint64_t n_tokens)
{
	const struct kv_row_account *k = &spec->layers[layer_idx].k->account;
	const struct kv_row_account *v = &spec->layers[layer_idx].v->account;
	const uint64_t n_rows = n_tokens * spec->kv_heads; /* of K, and as many of V */

	report->payload_bytes += n_rows * (k->payload_bytes + v->payload_bytes);
	report->norms_bytes += n_rows * (k->norms_bytes + v->norms_bytes);
	report->scales_bytes += n_rows * (k->scales_bytes + v->scales_bytes);
	report->zeros_bytes += n_rows * (k->zeros_bytes + v->zeros_bytes);
	report->exact_bytes += n_rows * (k->exact_bytes + v->exact_bytes);
	report->dense_equivalent_bytes +=
		n_rows * (kv_row_dense_bytes(spec->k_head_dim) + kv_row_dense_bytes(spec->v_head_dim));
}

/* Adds rows of exact windows, one per layer and token. */
static void add_exact(struct kv_memory_report *report, const struct kv_pool_spec *spec, uint64_t n_rows)
{
	if (spec->exact_tokens > 0)
		report->exact_bytes +=
			n_rows * spec->kv_heads * (spec->exact_k->row_bytes + spec->exact_v->row_bytes);
}

/* What follows from the rows. */
static void sum_up(struct kv_memory_report *report)
{
	report->stored_bytes = report->payload_bytes + report->norms_bytes + report->scales_bytes +
		report->zeros_bytes + report->exact_bytes;
	if (report->stored_bytes > 0)
		report->compression = (double)report->dense_equivalent_bytes / (double)report->stored_bytes;
}

void kv_report_pool(const struct kv_pool *pool, struct kv_memory_report *out)
{
	const struct kv_pool_spec *spec = pool->spec;
	uint64_t used_bytes = 0;

	*out = (struct kv_memory_report){ .n_tokens = pool->n_tokens_committed };
	for (uint32_t l = 0; l < spec->n_layers; l++)
		add_rows(out, spec, l, pool->layer_tokens[l]);
	add_exact(out, spec, pool->n_exact_rows);
	sum_up(out);
	for (uint32_t g = 0; g < spec->n_tables; g++) {
		const struct kv_block_counts *counts = &pool->blocks[g].counts;
		const uint64_t block_bytes = kv_block_bytes(spec, g);

		used_bytes += (uint64_t)(counts->n_total - counts->n_free) * block_bytes;
		/* A prefix is no sequence: what it owns beside others saves nothing. */
		out->shared_bytes += (counts->n_extra_owners - counts->n_kept_shared) * block_bytes;
		out->cached_bytes += (uint64_t)(counts->n_kept - counts->n_kept_shared) * block_bytes;
		out->reserved_bytes += counts->n_reserved * block_bytes;
		out->free_bytes += (uint64_t)(counts->n_free - counts->n_reserved) * block_bytes;
	}
	/* Every committed row of a live sequence lies in a block of its own table. */
	KV_ASSERT(used_bytes + out->shared_bytes >= out->stored_bytes + out->cached_bytes);
	out->workspace_bytes = used_bytes + out->shared_bytes - out->cached_bytes - out->stored_bytes;
	out->tables_bytes = (uint64_t)pool->tables.n_chunks_used * sizeof(struct kv_table_chunk);
	out->codebooks_bytes = spec->codebook_bytes;
	out->rotation_bytes = spec->rotation_bytes;
}

void kv_report_session(const struct kv_session *session, struct kv_memory_report *out)
{
	const struct kv_pool_spec *spec = session->pool->spec;
	const struct kv_session_slot *slot = kv_container_of(session, const struct kv_session_slot, session);

	KV_ASSERT(session->state == KV_SESSION_OPEN);
	*out = (struct kv_memory_report){ .n_tokens = slot->n_tokens_committed };
	for (uint32_t l = 0; l < spec->n_layers; l++)
		add_rows(out, spec, l, slot->layer_tokens[l]);
	add_exact(out, spec, slot->n_exact_rows);
	sum_up(out);
	for (uint32_t g = 0; g < spec->n_groups; g++)
		out->reserved_bytes += session->n_blocks_reserved[g] * kv_block_bytes(spec, g);
	out->tables_bytes = (uint64_t)slot->n_chunks * sizeof(struct kv_table_chunk);
}

void kv_report_sequence(const struct kv_sequence *sequence, struct kv_memory_report *out)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;
	uint32_t length_min, length_max;

	kv_sequence_lengths(sequence, &length_min, &length_max);
	*out = (struct kv_memory_report){ .n_tokens = length_min };
	for (uint32_t l = 0; l < spec->n_layers; l++)
		add_rows(out, spec, l, kv_sequence_n_held(sequence, l));
	add_exact(out, spec, kv_sequence_n_exact_rows(sequence));
	sum_up(out);
	out->tables_bytes = (uint64_t)kv_sequence_n_chunks(sequence) * sizeof(struct kv_table_chunk);
}
