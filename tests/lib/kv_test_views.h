/* Views under test: one control request and one text, and a pool whose every member has a value of its own.
 */
#ifndef TESTS_LIB_KV_TEST_VIEWS_H
#define TESTS_LIB_KV_TEST_VIEWS_H

#include <check.h>
#include <stdio.h>
#include <string.h>

#include "core/memory.h"
#include "server/http_views.h"
#include "tests/lib/kv_test.h"

static struct srv_control *control;
static struct srv_text text;

static inline void setup(void)
{
	control = kv_alloc(1, sizeof(*control));
	ck_assert_ptr_nonnull(control);
	memset(&text, 0, sizeof(text));
}

static inline void teardown(void)
{
	srv_text_finish(&text);
	kv_free(control);
}

static const struct kv_memory_report report = {
	.n_tokens = 64,
	.payload_bytes = 1000,
	.norms_bytes = 100,
	.scales_bytes = 20,
	.zeros_bytes = 3,
	.exact_bytes = 4,
	.stored_bytes = 1127,
	.dense_equivalent_bytes = 4508,
	.tables_bytes = 256,
	.codebooks_bytes = 64,
	.rotation_bytes = 16384,
	.workspace_bytes = 9,
	.shared_bytes = 5,
	.cached_bytes = 6,
	.reserved_bytes = 512,
	.free_bytes = 2048,
	.compression = 4.0,
};

/* Two groups whose five states add up to 10 and 20 blocks. */
static inline void fill_pool(struct srv_pool_row *pool, const char *name)
{
	memset(pool, 0, sizeof(*pool));
	snprintf(pool->name, sizeof(pool->name), "%s", name);
	strcpy(pool->k_format, "tq4");
	strcpy(pool->v_format, "bf16");
	pool->n_layers = 30;
	pool->q_heads = 9;
	pool->kv_heads = 3;
	pool->k_head_dim = 64;
	pool->v_head_dim = 80;
	pool->block_size = 16;
	pool->n_groups = pool->n_tables = 2;
	pool->tokens_max = 4096;
	pool->fingerprint = 0x00ABCDEF12345678;
	pool->arena_bytes = 1048576;
	pool->n_sessions = 2;
	pool->n_sequences = 5;
	pool->blocks[0] = (struct kv_block_counts){ .n_total = 10,
		.n_free = 5,
		.n_owned = 1,
		.n_shared = 1,
		.n_pinned = 1,
		.n_draining = 2,
		.n_reserved = 3,
		.n_used_max = 7 };
	pool->blocks[1] = (struct kv_block_counts){ .n_total = 20, .n_free = 20, .n_used_max = 1 };
	pool->block_bytes[0] = 4096;
	pool->block_bytes[1] = 8192;
	pool->memory = report;
	pool->used_bytes = 2254;
	pool->n_spilled = 2;
	pool->n_spilled_tokens = 30;
	pool->tier_bytes = 131072;
	pool->formats[0] = (struct srv_format_row){ .name = "tq4",
		.n_layers = 30,
		.n_rows = 1920,
		.stored_bytes = 1000,
		.dense_equivalent_bytes = 4000 };
	pool->n_formats = 1;
}

#endif
