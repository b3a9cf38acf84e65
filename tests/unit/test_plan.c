#include "core/plan.h"

#include "core/format.h"
#include "tests/lib/kv_core_test.h"

/* 4 layers in two groups, packed tq4 K rows of 36 bytes, bf16 V rows of 64. */
#define POOL                                                                                           \
	"name=p,layers=4,q_heads=6,kv_heads=2,k_head_dim=64,v_head_dim=32,k=tq4,v=bf16,block_size=16," \
	"blocks=200"
#define GROUPS "[[0,2],[1,3]]"

static const struct kv_domain_limits limits = {
	.sessions_max = 4,
	.sequences_max = 100,
	.lease_ms = 1000,
	.lease_ms_max = 1000,
};

struct rig {
	struct kv_test_domain test;
	struct kv_session *session;
	struct kv_plan plan;
	uint8_t *area;
	uint64_t area_bytes;
	uint8_t tensor[4096]; /* addresses only */
};

static void rig_init(struct rig *rig, uint64_t row_bytes_max, uint64_t extra_bytes)
{
	kv_test_domain_init(&rig->test, &limits, POOL, GROUPS, 1);
	rig->session = kv_test_open(&rig->test);
	rig->area_bytes = kv_plan_area_bytes(rig->test.pool->spec, row_bytes_max) + extra_bytes;
	ck_assert_int_eq(posix_memalign((void **)&rig->area, 4096, rig->area_bytes), 0);
	kv_plan_begin(&rig->plan, rig->test.pool, rig->area, rig->area_bytes);
}

static void rig_finish(struct rig *rig)
{
	struct kv_plan *plans[] = { &rig->plan };

	kv_test_audit(rig->test.domain, plans, 1);
	kv_plan_end(&rig->plan);
	kv_test_domain_finish(&rig->test);
	free(rig->area);
}

static struct kv_item planned(struct rig *rig, uint8_t kind, uint64_t id, uint32_t position,
	uint32_t n_tokens, uint32_t layer_first, uint32_t n_layers)
{
	struct kv_item item = {
		.sequence_id = id,
		.position = position,
		.n_tokens = n_tokens,
		.q_len = kind == KV_ITEM_DECODE || kind == KV_ITEM_APPEND_DECODE,
		.kind = kind,
		.flags = position == 0 && kind != KV_ITEM_DECODE && kind != KV_ITEM_READ ? KV_ITEM_CREATE : 0,
	};

	kv_item_plan(rig->session, &item, layer_first, n_layers, 1);
	ck_assert_uint_eq(item.status, KV_OK);
	return item;
}

/* Plans and finishes an append on all layers. */
static void append(struct rig *rig, uint64_t id, uint32_t position, uint32_t n_tokens)
{
	struct kv_item item = planned(rig, KV_ITEM_APPEND, id, position, n_tokens, 0, 4);

	kv_item_finish(&item, 0, 4);
}

static void add(struct rig *rig, const struct kv_frame_rows *frame, const struct kv_item *item)
{
	uint32_t result_idx = UINT32_MAX;
	const uint32_t n_results = rig->plan.batch.n_results;

	ck_assert(kv_plan_add(&rig->plan, frame, item, &result_idx));
	ck_assert_uint_eq(result_idx, n_results);
}

static uint32_t entry(const struct kv_item *item, uint32_t group_idx, uint32_t i)
{
	uint32_t block_idx;

	kv_block_table_copy(
		&item->sequence->tables[group_idx], &item->sequence->pool->tables, i, 1, &block_idx);
	return block_idx;
}

/*
 * An append becomes one update op: slots of the sequence's blocks, and rows at the item's place in the frame.
 */
START_TEST(test_plan_append_becomes_an_update)
{
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);
	append(&rig, 8, 0, 16); /* so that blocks and positions differ */
	append(&rig, 7, 0, 30);

	struct kv_item item = planned(&rig, KV_ITEM_APPEND, 7, 30, 5, 1, 2);
	const struct kv_frame_rows frame = {
		.layer_first = 1,
		.n_layers = 2,
		.n_tokens_total = 12,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_PACKED,
		.k = rig.tensor,
		.v = rig.tensor + 1,
	};

	item.token_first = 3;
	add(&rig, &frame, &item);
	ck_assert_uint_eq(rig.plan.batch.n_updates, 1);
	ck_assert_uint_eq(rig.plan.batch.n_decodes, 0);
	ck_assert_uint_eq(rig.plan.batch.n_transfers, 0);
	ck_assert_uint_eq(rig.plan.n_items, 1);

	const struct kv_update_op *op = &rig.plan.batch.updates[0];

	ck_assert_uint_eq(op->layer_first, 1);
	ck_assert_uint_eq(op->n_layers, 2);
	ck_assert_uint_eq(op->n_tokens, 5);
	for (uint32_t g = 0; g < 2; g++) {
		for (uint32_t t = 0; t < 5; t++)
			ck_assert_int_eq(op->slots[g * 5 + t],
				(int64_t)entry(&item, g, (30 + t) / 16) * 16 + (30 + t) % 16);
	}
	/* float32 K rows of 64 numbers, packed V rows of 32 bf16, 2 heads, 3 tokens before */
	ck_assert_ptr_eq(op->k.base, rig.tensor + 3 * 2 * 64 * 4);
	ck_assert_ptr_eq(op->v.base, rig.tensor + 1 + 3 * 2 * 64);
	ck_assert_uint_eq(op->k.tokens_stride, 12);
	ck_assert_uint_eq(op->v.dtype, KV_DTYPE_PACKED);
	ck_assert_uint_eq(rig.plan.row_bytes, 2 * 5 * 2 * (256 + 64));
	ck_assert_uint_eq(rig.plan.batch.results[0].status, KV_OK);
	ck_assert_uint_eq(rig.plan.batch.results[0].layer, KV_LAYER_NONE);
	ck_assert_uint_eq(rig.plan.batch.results[0].row, KV_ROW_NONE);
	rig_finish(&rig);
}
END_TEST

/* Groups that the frame does not touch get no slots, and their blocks are not in flight. */
START_TEST(test_plan_untouched_groups_are_skipped)
{
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);

	const struct kv_item item = planned(&rig, KV_ITEM_APPEND, 7, 0, 20, 3, 1);
	const struct kv_frame_rows frame = {
		.layer_first = 3,
		.n_layers = 1,
		.n_tokens_total = 20,
		.k_dtype = KV_DTYPE_BF16,
		.v_dtype = KV_DTYPE_BF16,
		.k = rig.tensor,
		.v = rig.tensor,
	};

	add(&rig, &frame, &item);
	for (uint32_t t = 0; t < 20; t++) {
		ck_assert_int_eq(rig.plan.batch.updates[0].slots[t], -1);
		ck_assert_int_ge(rig.plan.batch.updates[0].slots[20 + t], 0);
	}
	ck_assert_uint_eq(item.sequence->tables[0].n_blocks, 0);
	ck_assert_uint_eq(rig.test.pool->blocks[1].in_flight[entry(&item, 1, 0)], 1);
	ck_assert_uint_eq(rig.test.pool->blocks[1].in_flight[entry(&item, 1, 1)], 1);
	rig_finish(&rig);
}
END_TEST

/*
 * A decode gets its layer's table for the length it sees, and the layer's options unless the frame narrows
 * them.
 */
START_TEST(test_plan_decode_gets_its_table)
{
	struct rig rig;
	float lse[64];

	rig_init(&rig, 1 << 20, 0);
	append(&rig, 7, 0, 40);

	struct kv_item item = planned(&rig, KV_ITEM_DECODE, 7, 33, 0, 2, 1);
	struct kv_frame_rows frame = {
		.layer_first = 2,
		.n_layers = 1,
		.n_q_total = 4,
		.q_dtype = KV_DTYPE_BF16,
		.out_dtype = KV_DTYPE_F32,
		.decode_flags = KV_DECODE_Q_ROTATED,
		.q = rig.tensor,
		.out = rig.tensor + 5,
		.lse = lse,
	};

	item.q_first = 3;
	add(&rig, &frame, &item);
	frame.scale = 0.75f;
	frame.window = 9;
	frame.lse = NULL;
	add(&rig, &frame, &item);
	ck_assert_uint_eq(rig.plan.batch.n_decodes, 2);
	ck_assert_uint_eq(rig.plan.batch.n_updates, 0);

	const struct kv_decode_op *op = &rig.plan.batch.decodes[0];

	ck_assert_uint_eq(op->layer, 2);
	ck_assert_uint_eq(op->n_tokens_seen, 33);
	ck_assert_uint_eq(op->q_len, 1);
	ck_assert_uint_eq(op->window, 0);
	ck_assert_uint_eq(op->flags, KV_DECODE_Q_ROTATED);
	ck_assert_float_eq(op->scale, 0.125f);
	for (uint32_t i = 0; i < 3; i++) {
		ck_assert_uint_eq(op->table[i], entry(&item, 0, i));
		/* The second one's window of 9 begins in the block of token 24. */
		ck_assert_uint_eq(rig.test.pool->blocks[0].in_flight[op->table[i]], i == 0 ? 1 : 2);
	}
	ck_assert_ptr_eq(op->q, rig.tensor + 3 * 6 * 64 * 2);
	ck_assert_ptr_eq(op->out, rig.tensor + 5 + 3 * 6 * 32 * 4);
	ck_assert_ptr_eq(op->lse, lse + 3 * 6);
	op = &rig.plan.batch.decodes[1];
	ck_assert_uint_eq(op->window, 9);
	ck_assert_uint_eq(op->table[0], KV_BLOCK_NONE);
	ck_assert_uint_eq(op->table[1], entry(&item, 0, 1));
	ck_assert_float_eq(op->scale, 0.75f);
	ck_assert_ptr_null(op->lse);
	ck_assert_uint_eq(op->result_idx, 1);
	ck_assert_uint_eq(rig.plan.row_bytes, 2 * 6 * 64 * 2);
	rig_finish(&rig);
}
END_TEST

/* The window is the narrower one of the layer's and the frame's, where 0 is none. */
START_TEST(test_plan_window_is_the_narrower_one)
{
	static const struct {
		uint32_t layer, frame, combined;
	} rows[] = { { 0, 0, 0 }, { 0, 9, 9 }, { 7, 0, 7 }, { 7, 9, 7 }, { 9, 7, 7 } };
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);
	append(&rig, 7, 0, 40);

	const struct kv_item item = planned(&rig, KV_ITEM_DECODE, 7, 33, 0, 2, 1);
	/* no pool declares windows yet, so the test does */
	struct kv_layer_spec *layer = (struct kv_layer_spec *)&rig.test.pool->spec->layers[2];

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		const struct kv_frame_rows frame = {
			.layer_first = 2,
			.n_layers = 1,
			.window = rows[i].frame,
			.q = rig.tensor,
			.out = rig.tensor,
		};

		layer->window = rows[i].layer;
		add(&rig, &frame, &item);
		ck_assert_uint_eq(rig.plan.batch.decodes[i].window, rows[i].combined);
	}
	rig_finish(&rig);
}
END_TEST

/* APPEND_DECODE is one update and one decode that share a result; the decode sees the new tokens. */
START_TEST(test_plan_append_decode_shares_its_result)
{
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);
	append(&rig, 9, 0, 1);

	const struct kv_item other = planned(&rig, KV_ITEM_DECODE, 9, 1, 0, 0, 1);
	const struct kv_item item = planned(&rig, KV_ITEM_APPEND_DECODE, 7, 0, 1, 0, 1);
	const struct kv_frame_rows frame = {
		.n_layers = 1,
		.n_tokens_total = 1,
		.n_q_total = 1,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.k = rig.tensor,
		.v = rig.tensor,
		.q = rig.tensor,
		.out = rig.tensor,
	};

	add(&rig, &frame, &other);
	add(&rig, &frame, &item);
	ck_assert_uint_eq(rig.plan.batch.n_updates, 1);
	ck_assert_uint_eq(rig.plan.batch.n_decodes, 2);
	ck_assert_uint_eq(rig.plan.batch.n_results, 2);
	ck_assert_uint_eq(rig.plan.batch.updates[0].result_idx, 1);
	ck_assert_uint_eq(rig.plan.batch.decodes[1].result_idx, 1);
	ck_assert_uint_eq(rig.plan.batch.decodes[1].n_tokens_seen, 1);
	ck_assert_uint_eq(rig.test.pool->blocks[0].in_flight[entry(&item, 0, 0)], 2);
	rig_finish(&rig);
}
END_TEST

/* Length 0 needs no table, and a READ of K alone has no V rows. */
START_TEST(test_plan_read_and_empty_decode)
{
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);
	append(&rig, 7, 0, 40);
	kv_assert_ok(kv_sequence_truncate(rig.session, 7, 20));

	const struct kv_item read = planned(&rig, KV_ITEM_READ, 7, 15, 3, 0, 2);
	const struct kv_item decode = planned(&rig, KV_ITEM_DECODE, 7, 0, 0, 0, 1);
	const struct kv_frame_rows frame = {
		.n_layers = 2,
		.n_tokens_total = 3,
		.k_dtype = KV_DTYPE_PACKED,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.k = rig.tensor,
		.q = rig.tensor,
		.out = rig.tensor,
	};

	add(&rig, &frame, &read);

	const struct kv_transfer_op *op = &rig.plan.batch.transfers[0];

	ck_assert_uint_eq(rig.plan.batch.n_transfers, 1);
	ck_assert(!op->is_import);
	ck_assert_ptr_eq(op->k.base, rig.tensor);
	ck_assert_ptr_null(op->v.base);
	ck_assert_int_eq(op->slots[0], (int64_t)entry(&read, 0, 0) * 16 + 15);
	ck_assert_int_eq(op->slots[3 + 2], (int64_t)entry(&read, 1, 1) * 16 + 1);
	ck_assert_uint_eq(rig.plan.row_bytes, 2 * 3 * 2 * 36);
	add(&rig, &frame, &decode);
	ck_assert_uint_eq(rig.plan.batch.decodes[0].n_tokens_seen, 0);
	rig_finish(&rig);
}
END_TEST

/* Slots of transfers are never negative, not even those of groups that nobody reads. */
START_TEST(test_plan_transfer_slots_are_not_negative)
{
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);
	append(&rig, 7, 0, 40);

	const struct kv_item read = planned(&rig, KV_ITEM_READ, 7, 0, 40, 1, 1);
	const struct kv_frame_rows frame = { .layer_first = 1, .n_layers = 1, .n_tokens_total = 40 };

	add(&rig, &frame, &read);
	for (uint32_t t = 0; t < 80; t++)
		ck_assert_int_ge(rig.plan.batch.transfers[0].slots[t], 0);
	ck_assert_uint_eq(rig.test.pool->blocks[0].in_flight[entry(&read, 0, 0)], 0);
	ck_assert_uint_eq(rig.test.pool->blocks[1].in_flight[entry(&read, 1, 0)], 1);
	rig_finish(&rig);
}
END_TEST

/*
 * The largest single item fits an area of the promised size; the item after it does not, and changes nothing.
 */
START_TEST(test_plan_area_holds_any_single_item)
{
	const uint64_t row_bytes_max = 65536;
	struct rig rig;

	rig_init(&rig, row_bytes_max, 0);
	append(&rig, 7, 0, 3000);

	/* A READ of K alone, packed: 36 bytes a row, 2 heads. */
	const uint32_t n_tokens = (uint32_t)(row_bytes_max / (2 * 36));
	const struct kv_item read = planned(&rig, KV_ITEM_READ, 7, 0, n_tokens, 0, 1);
	const struct kv_item decode = planned(&rig, KV_ITEM_DECODE, 7, 3000, 0, 0, 1);
	const struct kv_frame_rows frame = {
		.n_layers = 1,
		.n_tokens_total = n_tokens,
		.k_dtype = KV_DTYPE_PACKED,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.k = rig.tensor,
		.q = rig.tensor,
		.out = rig.tensor,
	};
	uint32_t result_idx = 77, n;
	uint64_t used_bytes;

	add(&rig, &frame, &read);
	add(&rig, &frame, &decode); /* tables have room of their own beside slots */
	used_bytes = rig.plan.batch.plan_bytes_used;
	ck_assert_uint_le(used_bytes, rig.area_bytes);
	/* The area holds a client's slots and tables as well, which may be more than all that an item has. */
	for (n = 2; kv_plan_add(&rig.plan, &frame, &read, &result_idx); n++) {
		ck_assert_uint_lt(n, 20);
		used_bytes = rig.plan.batch.plan_bytes_used;
		result_idx = 77;
	}
	ck_assert_uint_le(used_bytes, rig.area_bytes);
	ck_assert_uint_eq(result_idx, 77);
	ck_assert_uint_eq(rig.plan.batch.plan_bytes_used, used_bytes);
	ck_assert_uint_eq(rig.plan.batch.n_results, n);
	ck_assert_uint_eq(rig.test.pool->blocks[0].in_flight[entry(&read, 0, 0)], n);
	rig_finish(&rig);
}
END_TEST

/* A plan holds KV_PLAN_ITEMS_MAX items, and after kv_plan_end() as many again. */
START_TEST(test_plan_number_of_items_is_bounded)
{
	const struct kv_frame_rows frame = {
		.n_layers = 1,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.q = (uint8_t[4]){ 0 },
		.out = (uint8_t[4]){ 0 },
	};
	struct rig rig;
	uint32_t result_idx;

	rig_init(&rig, 1 << 20, KV_PLAN_ITEMS_MAX * 64); /* a table of one entry each */
	append(&rig, 7, 0, 1);

	const struct kv_item item = planned(&rig, KV_ITEM_DECODE, 7, 1, 0, 0, 1);

	for (uint32_t round = 0; round < 2; round++) {
		for (uint32_t i = 0; i < KV_PLAN_ITEMS_MAX; i++)
			add(&rig, &frame, &item);
		ck_assert(!kv_plan_add(&rig.plan, &frame, &item, &result_idx));
		ck_assert_uint_eq(rig.test.pool->blocks[0].in_flight[entry(&item, 0, 0)], KV_PLAN_ITEMS_MAX);
		kv_plan_end(&rig.plan);
		ck_assert_uint_eq(rig.test.pool->blocks[0].in_flight[entry(&item, 0, 0)], 0);
	}
	rig_finish(&rig);
}
END_TEST

/* Ops, slots and tables of a full plan lie inside the area and do not overlap. */
START_TEST(test_plan_parts_do_not_overlap)
{
	const struct kv_frame_rows frame = {
		.n_layers = 1,
		.n_tokens_total = 33,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.q_dtype = KV_DTYPE_F32,
		.out_dtype = KV_DTYPE_F32,
		.k = (uint8_t[4]){ 0 },
		.v = (uint8_t[4]){ 0 },
		.q = (uint8_t[4]){ 0 },
		.out = (uint8_t[4]){ 0 },
	};
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);
	for (uint64_t id = 1; id <= 20; id++) {
		const struct kv_item item = planned(&rig, KV_ITEM_APPEND_DECODE, id, 0, 33, 0, 1);

		add(&rig, &frame, &item);
	}

	const uint8_t *end = (const uint8_t *)(rig.plan.batch.results + KV_PLAN_ITEMS_MAX);

	ck_assert_ptr_eq(rig.plan.batch.plan, rig.area);
	ck_assert_ptr_eq(rig.plan.batch.updates, rig.area);
	ck_assert((const void *)(rig.plan.batch.decodes) >=
		(const void *)(rig.plan.batch.updates + KV_PLAN_ITEMS_MAX));
	ck_assert((const void *)(rig.plan.batch.transfers) >=
		(const void *)(rig.plan.batch.decodes + KV_PLAN_ITEMS_MAX));
	ck_assert((const void *)(rig.plan.batch.results) >=
		(const void *)(rig.plan.batch.transfers + KV_PLAN_ITEMS_MAX));
	for (uint32_t i = 0; i < 20; i++) {
		const struct kv_update_op *update = &rig.plan.batch.updates[i];
		const struct kv_decode_op *decode = &rig.plan.batch.decodes[i];

		ck_assert((const void *)(update->slots) >= (const void *)(end));
		ck_assert((const void *)(decode->table) >= (const void *)(update->slots + 2 * 33));
		end = (const uint8_t *)(decode->table + 3);
		ck_assert_uint_eq((uintptr_t)update->slots % 64, 0);
		ck_assert_uint_eq((uintptr_t)decode->table % 64, 0);
	}
	ck_assert(end <= rig.area + rig.plan.batch.plan_bytes_used);
	ck_assert_uint_le(rig.plan.batch.plan_bytes_used, rig.area_bytes);
	rig_finish(&rig);
}
END_TEST

/* A block whose owner goes while its batch runs is draining until the plan ends. */
START_TEST(test_plan_blocks_drain_until_the_end)
{
	struct rig rig;

	rig_init(&rig, 1 << 20, 0);

	struct kv_item item = planned(&rig, KV_ITEM_APPEND, 7, 0, 20, 0, 4);
	const struct kv_frame_rows frame = {
		.n_layers = 4,
		.n_tokens_total = 20,
		.k_dtype = KV_DTYPE_F32,
		.v_dtype = KV_DTYPE_F32,
		.k = rig.tensor,
		.v = rig.tensor,
	};
	const struct kv_block_counts *counts = &rig.test.pool->blocks[1].counts;
	struct kv_plan *plans[] = { &rig.plan };

	add(&rig, &frame, &item);
	kv_session_close(rig.test.domain, rig.session, false);
	kv_test_release_all(rig.test.domain);
	ck_assert_uint_eq(counts->n_draining, 2);
	ck_assert_uint_eq(counts->n_free, 198);
	ck_assert_uint_eq(rig.test.pool->n_zombies, 1);
	kv_test_audit(rig.test.domain, plans, 1);
	kv_item_finish(&item, 0, 4);
	ck_assert_uint_eq(item.status, KV_OK);
	ck_assert_uint_eq(item.length, 20);
	ck_assert_uint_eq(rig.test.pool->n_zombies, 0);
	kv_assert_status(kv_domain_pool_check_remove(rig.test.pool, NULL), KV_BUSY_RETRY);
	kv_plan_end(&rig.plan);
	ck_assert_uint_eq(counts->n_draining, 0);
	ck_assert_uint_eq(counts->n_free, 200);
	kv_assert_ok(kv_domain_pool_check_remove(rig.test.pool, NULL));
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("plan");
	TCase *tcase = tcase_create("plan");

	tcase_add_test(tcase, test_plan_append_becomes_an_update);
	tcase_add_test(tcase, test_plan_untouched_groups_are_skipped);
	tcase_add_test(tcase, test_plan_decode_gets_its_table);
	tcase_add_test(tcase, test_plan_window_is_the_narrower_one);
	tcase_add_test(tcase, test_plan_append_decode_shares_its_result);
	tcase_add_test(tcase, test_plan_read_and_empty_decode);
	tcase_add_test(tcase, test_plan_transfer_slots_are_not_negative);
	tcase_add_test(tcase, test_plan_area_holds_any_single_item);
	tcase_add_test(tcase, test_plan_number_of_items_is_bounded);
	tcase_add_test(tcase, test_plan_parts_do_not_overlap);
	tcase_add_test(tcase, test_plan_blocks_drain_until_the_end);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
