/*
 * Memory report (FORMATS 7): bytes of what is really stored, for a pool, a session or a sequence. Everything
 * adds up exactly at every moment: stored is the sum of its parts, the sum over sequences is the pool's, and
 * stored + cached + workspace + reserved + free is the bytes of all blocks + shared. Rows in shared blocks
 * count for every sequence that has them.
 */
#ifndef CORE_REPORT_H
#define CORE_REPORT_H

#include <stdint.h>

#include "core/domain.h"

struct kv_memory_report {
	uint64_t n_tokens; /* committed, least over the layers, summed over sequences */
	uint64_t payload_bytes, norms_bytes, scales_bytes, zeros_bytes, exact_bytes; /* rows that are held */
	uint64_t stored_bytes;                    /* the sum of the five above */
	uint64_t dense_equivalent_bytes;          /* what bf16 takes for the same rows, once */
	uint64_t tables_bytes;                    /* block-table chunks in use */
	uint64_t codebooks_bytes, rotation_bytes; /* pool only; projections and k_center count as rotation */
	uint64_t shared_bytes;    /* pool only: what sharing saves: blocks times sequences beyond the first */
	uint64_t cached_bytes;    /* pool only: blocks of published prefixes that no sequence has */
	uint64_t workspace_bytes; /* pool only: slack: block bytes in use + shared - cached - stored */
	uint64_t reserved_bytes;  /* free blocks that reservations hold */
	uint64_t free_bytes;      /* other free blocks */
	double compression;       /* dense_equivalent / stored; 0 when nothing is stored */
};
void kv_report_pool(const struct kv_pool *pool, struct kv_memory_report *out);
void kv_report_session(const struct kv_session *session, struct kv_memory_report *out);
void kv_report_sequence(const struct kv_sequence *sequence, struct kv_memory_report *out);

#endif
