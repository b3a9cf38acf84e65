#include <stdlib.h>

#include "core/report.h"
#include "tests/lib/kv_prefix_rig.h"

static struct kv_session *open_as(struct rig *rig, uint64_t tenant)
{
	const struct kv_open_params params = { .pool = rig->pool, .tenant = tenant };
	struct kv_session *session = NULL;

	kv_assert_ok(kv_session_open(rig->test.domain, &params, 1, &session, NULL));
	return session;
}

/* Whole blocks only; the longest prefix that agrees; they outlive sequence and session. */
START_TEST(test_prefix_longest_first)
{
	struct rig rig;
	struct kv_prefix_key key = key_of(70, 160, 0);

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 72);
	const struct kv_prefix_result result = publish(&rig, 1, &key, 0, 1);

	ck_assert_uint_eq(result.n_tokens, 64);
	ck_assert_uint_eq(result.n_blocks, 4);
	ck_assert_uint_eq(result.n_blocks_new, 4);
	ck_assert_uint_eq(publish(&rig, 1, &key, 0, 1).n_blocks_new, 0);
	kv_session_close(rig.test.domain, rig.session, false);
	kv_test_release_all(rig.test.domain);
	ck_assert_uint_eq(rig.pool->blocks[0].counts.n_idle, 4);
	ck_assert_uint_eq(n_free(&rig, 1), 6);

	rig.session = open_as(&rig, 0);
	ck_assert_uint_eq(match(&rig, 5, &key, 1), 64);
	ck_assert_uint_eq(rig.pool->blocks[0].counts.n_idle, 0);
	key = key_of(160, 40, 1);
	ck_assert_uint_eq(match(&rig, 6, &key, 1), 32);
	key = key_of(33, 160, 0);
	ck_assert_uint_eq(match(&rig, 7, &key, 1), 32);
	key = key_of(15, 160, 0);
	ck_assert_uint_eq(match(&rig, 8, &key, 1), 0);
	key = key_of(160, 15, 1);
	ck_assert_uint_eq(match(&rig, 8, &key, 1), 0);
	/* Only told: no sequence. */
	key = key_of(160, 160, 0);
	ck_assert_uint_eq(match(&rig, 0, &key, 1), 64);
	ck_assert_uint_eq(rig.session->n_sequences, 3);
	append_now(&rig, 5, 64, 3);
	rig_finish(&rig);
}
END_TEST

/* FAILURES H1: with one bit of hash left everything collides, and still only the same token ids are shared.
 */
START_TEST(test_prefix_collisions_cost_nothing)
{
	struct rig rig;

	rig_init(&rig, "name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=40",
		RIG_GROUPS);
	kv_prefix_truncate_hashes(rig.pool, 1);
	for (uint32_t way = 1; way <= 4; way++) {
		const struct kv_prefix_key key = key_of(64, 16 * (way - 1), way);

		append_now(&rig, way, 0, 64);
		publish(&rig, way, &key, 0, 1);
	}
	for (uint32_t way = 1; way <= 4; way++) {
		const struct kv_prefix_key key = key_of(64, 16 * (way - 1), way);
		struct kv_sequence *sequence, *publisher = kv_sequence_find(rig.session, way);
		uint32_t own, shared;

		ck_assert_uint_eq(match(&rig, 5, &key, 1), 64);
		sequence = kv_sequence_find(rig.session, 5);
		kv_block_table_copy(&sequence->tables[0], &rig.pool->tables, 3, 1, &shared);
		kv_block_table_copy(&publisher->tables[0], &rig.pool->tables, 3, 1, &own);
		ck_assert_uint_eq(shared, own);
		kv_assert_ok(kv_sequence_free(rig.session, 5));
		kv_test_release_all(rig.test.domain);
	}
	const struct kv_prefix_key other = key_of(64, 0, 9);

	ck_assert_uint_eq(match(&rig, 5, &other, 1), 0);
	rig_finish(&rig);
}
END_TEST

/* Publishes one block of these tokens by a sequence that then goes; returns the block. */
static uint32_t publish_one(struct rig *rig, const struct kv_prefix_key *key)
{
	struct kv_prefix_result result;
	uint32_t block;

	append_now(rig, 1, 0, 16);
	kv_assert_ok(kv_prefix_publish(rig->session, 1, key, 0, KV_NS_PER_MS, &result));
	ck_assert_uint_eq(result.n_blocks_new, 1);
	kv_block_table_copy(&kv_sequence_find(rig->session, 1)->tables[0], &rig->pool->tables, 0, 1, &block);
	kv_assert_ok(kv_sequence_free(rig->session, 1));
	while (kv_domain_has_zombies(rig->test.domain))
		kv_domain_release(rig->test.domain, 1024);
	return block;
}

/* The block that is found; KV_BLOCK_NONE: none is. */
static uint32_t match_one(struct rig *rig, const struct kv_prefix_key *key)
{
	struct kv_prefix_result result;
	uint32_t block;

	if (kv_prefix_match(rig->session, 2, key, false, KV_NS_PER_MS, &result) != KV_OK)
		return KV_BLOCK_NONE;
	kv_block_table_copy(&kv_sequence_find(rig->session, 2)->tables[0], &rig->pool->tables, 0, 1, &block);
	kv_assert_ok(kv_sequence_free(rig->session, 2));
	while (kv_domain_has_zombies(rig->test.domain))
		kv_domain_release(rig->test.domain, 1024);
	return block;
}

static struct kv_prefix_key adapter_key(uint32_t *adapter)
{
	struct kv_prefix_key key = key_of(16, 16, 0);

	key.adapter = (const char *)adapter;
	key.adapter_bytes = sizeof(*adapter);
	return key;
}

/*
 * FAILURES H1: 300 token lists and 300 adapters under hashes of 8 bits, so some of each must collide. Each
 * finds its own block; what was never published, what another tenant published, fewer tokens than a block,
 * and a second block at the start find nothing.
 */
START_TEST(test_prefix_short_hashes_are_verified)
{
	enum { N = 300 };
	static uint32_t by_tokens[N], by_adapter[N];
	struct rig rig;

	rig_init(&rig,
		"name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=640",
		RIG_GROUPS);
	kv_prefix_truncate_hashes(rig.pool, 8);
	for (uint32_t i = 0; i < N; i++) {
		const struct kv_prefix_key tokens_key = key_of(16, 0, 1 + i);

		by_tokens[i] = publish_one(&rig, &tokens_key);
		const struct kv_prefix_key key = adapter_key(&i);

		by_adapter[i] = publish_one(&rig, &key);
	}
	kv_test_audit(rig.test.domain, NULL, 0);
	for (uint32_t i = 0; i < 2 * N; i++) {
		const struct kv_prefix_key tokens_key = key_of(16, 0, 1 + i);

		ck_assert_uint_eq(match_one(&rig, &tokens_key), i < N ? by_tokens[i] : KV_BLOCK_NONE);
		const struct kv_prefix_key shorter = key_of(15, 0, 1 + i);

		ck_assert_uint_eq(match_one(&rig, &shorter), KV_BLOCK_NONE);
		const struct kv_prefix_key key = adapter_key(&i);

		ck_assert_uint_eq(match_one(&rig, &key), i < N ? by_adapter[i] : KV_BLOCK_NONE);
	}
	struct kv_prefix_key two = key_of(32, 0, 500);
	struct kv_session *own = rig.session;

	append_now(&rig, 1, 0, 32);
	ck_assert_uint_eq(publish(&rig, 1, &two, 0, 1).n_blocks_new, 2);
	ck_assert_uint_eq(match(&rig, 0, &two, 1), 32);
	two.tokens += 16 * 4;
	two.n_tokens = 16;
	ck_assert_uint_eq(match(&rig, 0, &two, 1), 0);
	rig.session = open_as(&rig, own->tenant + 1);
	for (uint32_t i = 0; i < N; i++) {
		const struct kv_prefix_key key = key_of(16, 0, 1 + i);

		ck_assert_uint_eq(match_one(&rig, &key), KV_BLOCK_NONE);
	}
	kv_test_audit(rig.test.domain, NULL, 0);
	rig_finish(&rig);
}
END_TEST

/* FAILURES H3, H4: another tenant, adapter or salt is another world, however the texts are cut. */
START_TEST(test_prefix_identities)
{
	struct rig rig;
	struct kv_prefix_key key = key_of(32, 160, 0);
	struct kv_session *mine;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	mine = rig.session;
	append_now(&rig, 1, 0, 32);
	key.adapter = "ab";
	key.adapter_bytes = 2;
	key.salt = "c";
	key.salt_bytes = 1;
	publish(&rig, 1, &key, 0, 1);
	ck_assert_uint_eq(match(&rig, 2, &key, 1), 32);
	rig.session = open_as(&rig, 7);
	ck_assert_uint_eq(match(&rig, 2, &key, 1), 0);
	rig.session = mine;
	key.salt_bytes = 0;
	ck_assert_uint_eq(match(&rig, 3, &key, 1), 0);
	key.adapter = "a";
	key.adapter_bytes = 1;
	key.salt = "bc";
	key.salt_bytes = 2;
	ck_assert_uint_eq(match(&rig, 3, &key, 1), 0);
	/* The blocks are taken: under another key they are not published a second time. */
	ck_assert_uint_eq(publish(&rig, 1, &key, 0, 1).n_tokens, 0);
	ck_assert_uint_eq(kv_prefix_counts(rig.pool).n_nodes, 2);
	rig_finish(&rig);
}
END_TEST

/* After its time a prefix is not found, a new PUBLISH gives it more; a parent never goes before its child. */
START_TEST(test_prefix_ttl)
{
	struct rig rig;
	struct kv_prefix_key key = key_of(48, 160, 0);

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 48);
	publish(&rig, 1, &key, 100, 1000);
	ck_assert_uint_eq(match(&rig, 0, &key, 1099), 48);
	ck_assert_uint_eq(match(&rig, 0, &key, 1100), 0);
	key.n_tokens = 32;
	publish(&rig, 1, &key, 300, 1100);
	key.n_tokens = 48;
	ck_assert_uint_eq(match(&rig, 0, &key, 1200), 32);
	for (uint32_t i = 0; i < 4; i++)
		kv_prefix_expire(rig.test.domain, 1200 * KV_NS_PER_MS, 64);
	ck_assert_uint_eq(kv_prefix_counts(rig.pool).n_nodes, 2);
	key.n_tokens = 16;
	publish(&rig, 1, &key, 0, 1200);
	for (uint32_t i = 0; i < 4; i++)
		kv_prefix_expire(rig.test.domain, 9999 * KV_NS_PER_MS, 64);
	ck_assert_uint_eq(kv_prefix_counts(rig.pool).n_nodes, 1);
	ck_assert_uint_eq(kv_prefix_counts(rig.pool).n_expired, 2);
	rig_finish(&rig);
}
END_TEST

/* What cannot be published: rows that are not there, not on all layers, or gone. */
START_TEST(test_prefix_publish_refusals)
{
	struct rig rig;
	struct kv_prefix_key key = key_of(32, 160, 0);
	struct kv_prefix_result result;
	struct kv_item item;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	kv_assert_status(kv_prefix_publish(rig.session, 9, &key, 0, 1, &result), KV_NOT_FOUND);
	append_now(&rig, 1, 0, 20);
	item = plan(&rig, KV_ITEM_APPEND, 1, 20, 20, 0, 2, 0);
	item.status = KV_OK;
	kv_item_finish(&item, 0, 2);
	kv_assert_status(kv_prefix_publish(rig.session, 1, &key, 0, 1, &result), KV_POSITION);
	ck_assert_uint_eq(result.n_tokens, 20);
	key.n_tokens = 20;
	ck_assert_uint_eq(publish(&rig, 1, &key, 0, 1).n_tokens, 16);
	kv_assert_status(kv_prefix_match(rig.session, 1, &key, false, 1, &result), KV_EXISTS);
	rig_finish(&rig);
}
END_TEST

/* Blocks of prefixes that no sequence has are told apart from slack. */
START_TEST(test_prefix_report)
{
	struct rig rig;
	struct kv_prefix_key key = key_of(32, 160, 0);
	struct kv_memory_report report;
	const uint64_t block_bytes = 16 * 2 * 2 * 16 * 4;

	rig_init(&rig, RIG_POOL, RIG_GROUPS);
	append_now(&rig, 1, 0, 32);
	publish(&rig, 1, &key, 0, 1);
	kv_report_pool(rig.pool, &report);
	ck_assert_uint_eq(report.cached_bytes, 0);
	ck_assert_uint_eq(report.shared_bytes, 0);
	ck_assert_uint_eq(report.workspace_bytes, 0);
	kv_assert_ok(kv_sequence_free(rig.session, 1));
	kv_test_release_all(rig.test.domain);
	kv_report_pool(rig.pool, &report);
	ck_assert_uint_eq(report.cached_bytes, 4 * block_bytes);
	ck_assert_uint_eq(report.stored_bytes + report.workspace_bytes + report.shared_bytes, 0);
	ck_assert_uint_eq(match(&rig, 2, &key, 1), 32);
	ck_assert_uint_eq(match(&rig, 3, &key, 1), 32);
	kv_report_pool(rig.pool, &report);
	ck_assert_uint_eq(report.cached_bytes, 0);
	ck_assert_uint_eq(report.shared_bytes, 4 * block_bytes);
	kv_assert_status(kv_domain_pool_check_remove(rig.pool, NULL), KV_BAD_STATE);
	rig_finish(&rig);
}
END_TEST

/* Every prefix that a page finds, over all pages, with n_looks nodes at a time. */
static uint32_t list(struct rig *rig, struct kv_prefix_row rows[8], uint32_t n_looks_each)
{
	uint32_t node_idx = 0, n = 0, n_pages = 0;

	for (uint32_t n_looks = n_looks_each; n_pages < 100; n_looks = n_looks_each, n_pages++) {
		while (n < 8 && kv_prefix_next(rig->pool, &node_idx, &n_looks, &rows[n]))
			n++;
		if (n_looks > 0)
			break;
	}
	return n;
}

static uint32_t n_removed_by(struct rig *rig, uint64_t id, uint32_t n_each)
{
	const uint64_t before = kv_prefix_counts(rig->pool).n_removed;
	enum kv_status status = KV_BUSY_RETRY;

	for (uint32_t i = 0; i < 100 && status == KV_BUSY_RETRY; i++) {
		status = kv_prefix_remove(rig->test.domain, &id, n_each);
		kv_test_audit(rig->test.domain, NULL, 0);
	}
	kv_assert_ok(status);
	return (uint32_t)(kv_prefix_counts(rig->pool).n_removed - before);
}

/* Hits and whole hits of the listed prefix of so many tokens whose id is not `but`. */
static uint64_t hits_of(struct rig *rig, uint32_t n_tokens, uint64_t but, uint64_t *id)
{
	struct kv_prefix_row rows[8];
	const uint32_t n = list(rig, rows, 100);

	for (uint32_t i = 0; i < n; i++) {
		if (rows[i].n_tokens == n_tokens && rows[i].id != but) {
			*id = rows[i].id;
			return rows[i].n_hits * 100 + rows[i].n_whole_hits;
		}
	}
	ck_abort_msg("no prefix of %u tokens", n_tokens);
	return 0;
}

/*
 * A match of half a prefix counts for it, though not as one of the whole. What another one shares with it
 * counts for the one that was there first, what goes on in the other for both, and a prefix inside of one
 * that was there shares its count. A new prefix begins at 0 whatever it shares.
 */
START_TEST(test_prefix_hits_of_parts)
{
	struct rig rig;
	uint64_t id = 0, other_id = 0, inner_id = 0;

	rig_init(&rig, "name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=40",
		RIG_GROUPS);
	append_now(&rig, 1, 0, 64);
	append_now(&rig, 2, 0, 64);
	struct kv_prefix_key key = key_of(64, 160, 0);

	publish(&rig, 1, &key, 0, 7);
	key.n_tokens = 32;
	ck_assert_uint_eq(match(&rig, 0, &key, 10), 32);
	ck_assert_uint_eq(match(&rig, 0, &key, 10), 32);
	ck_assert_uint_eq(hits_of(&rig, 64, 0, &id), 200);
	key.n_tokens = 64;
	ck_assert_uint_eq(match(&rig, 0, &key, 10), 64);
	ck_assert_uint_eq(hits_of(&rig, 64, 0, &id), 301);

	key = key_of(64, 48, 1);
	publish(&rig, 2, &key, 0, 8);
	ck_assert_uint_eq(hits_of(&rig, 64, id, &other_id), 0);
	key.n_tokens = 48;
	ck_assert_uint_eq(match(&rig, 0, &key, 10), 48);
	ck_assert_uint_eq(hits_of(&rig, 64, other_id, &id), 401);
	ck_assert_uint_eq(hits_of(&rig, 64, id, &other_id), 0);
	key.n_tokens = 64;
	ck_assert_uint_eq(match(&rig, 0, &key, 10), 64);
	ck_assert_uint_eq(hits_of(&rig, 64, other_id, &id), 501);
	ck_assert_uint_eq(hits_of(&rig, 64, id, &other_id), 101);

	/* Inside of the first: nothing of it is new. */
	key.n_tokens = 32;
	publish(&rig, 2, &key, 0, 9);
	ck_assert_uint_eq(hits_of(&rig, 32, 0, &inner_id), 505);
	ck_assert_uint_eq(kv_prefix_counts(rig.pool).n_hits, 5);
	kv_test_audit(rig.test.domain, NULL, 0);
	rig_finish(&rig);
}
END_TEST

/* Listed is where a PUBLISH ended or nothing goes on; hits count for all that was found on the way. */
START_TEST(test_prefix_list)
{
	struct kv_prefix_row rows[8];
	struct rig rig;
	struct kv_prefix_key key = key_of(64, 160, 0);
	struct kv_pool *pool;

	rig_init(&rig, "name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,blocks=40",
		RIG_GROUPS);
	ck_assert_uint_eq(list(&rig, rows, 100), 0);
	append_now(&rig, 1, 0, 64);
	publish(&rig, 1, &key, 500, 7);
	key.n_tokens = 32;
	publish(&rig, 1, &key, 0, 8);
	key = key_of(64, 48, 1);
	append_now(&rig, 2, 0, 64);
	key.adapter = "lora", key.adapter_bytes = 4;
	key.salt = "s", key.salt_bytes = 1;
	publish(&rig, 2, &key, 0, 9);
	key = key_of(64, 160, 0);
	ck_assert_uint_eq(match(&rig, 3, &key, 10), 64);
	key.n_tokens = 40;
	ck_assert_uint_eq(match(&rig, 0, &key, 10), 32);
	for (uint32_t n_looks = 1; n_looks < 20; n_looks += 6)
		ck_assert_uint_eq(list(&rig, rows, n_looks), 3);
	ck_assert_uint_eq(rows[0].n_tokens, 32);
	ck_assert_uint_eq(rows[0].n_hits, 2);
	ck_assert_uint_eq(rows[0].n_whole_hits, 2);
	ck_assert_uint_eq(rows[0].expires_ns, 0);
	ck_assert_uint_eq(rows[0].n_holders, 2);
	ck_assert_uint_eq(rows[0].published_ns, 7 * KV_NS_PER_MS);
	ck_assert_uint_eq(rows[1].n_tokens, 64);
	ck_assert_uint_eq(rows[1].n_blocks, 4 * rig.pool->spec->n_groups);
	ck_assert_uint_eq(rows[1].n_hits, 2);
	ck_assert_uint_eq(rows[1].n_whole_hits, 1);
	ck_assert_uint_eq(rows[1].expires_ns, 507 * KV_NS_PER_MS);
	ck_assert_uint_eq(rows[2].n_holders, 1);
	ck_assert_uint_eq(rows[2].adapter_bytes, 4);
	ck_assert_mem_eq(rows[2].adapter, "lora", 4);
	ck_assert(rows[2].has_salt && !rows[1].has_salt);
	kv_assert_ok(kv_prefix_find(rig.test.domain, rows[1].id, &pool, &rows[7]));
	ck_assert_uint_eq(rows[7].n_tokens, 64);
	rig_finish(&rig);
}
END_TEST

/* With what goes on behind it, and what nobody else has before it; sequences keep their rows; an id that was
 * used is nobody's. */
START_TEST(test_prefix_remove)
{
	for (uint32_t n_each = 1; n_each <= 9; n_each += 4) {
		struct kv_prefix_row rows[8], fresh[8], row;
		struct rig rig;
		struct kv_prefix_key key = key_of(64, 160, 0);
		struct kv_pool *pool;

		rig_init(&rig,
			"name=p,layers=4,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,block_size=16,"
			"blocks=40",
			RIG_GROUPS);
		/* 4 blocks; 2 of them and 2 others; nothing of them and 3. */
		append_now(&rig, 1, 0, 64);
		publish(&rig, 1, &key, 0, 1);
		ck_assert_uint_eq(
			match(&rig, 2, &(struct kv_prefix_key){ .tokens = tokens, .n_tokens = 32 }, 1), 32);
		append_now(&rig, 2, 32, 32);
		key = key_of(64, 32, 1);
		publish(&rig, 2, &key, 0, 2);
		append_now(&rig, 3, 0, 48);
		key = key_of(48, 0, 2);
		publish(&rig, 3, &key, 0, 3);
		ck_assert_uint_eq(list(&rig, rows, 100), 3);
		ck_assert_uint_eq(n_removed_by(&rig, rows[2].id, n_each), 3);
		ck_assert_uint_eq(n_removed_by(&rig, rows[0].id, n_each), 2);
		ck_assert_uint_eq(match(&rig, 0, &key, 4), 0);
		key = key_of(64, 160, 0);
		ck_assert_uint_eq(match(&rig, 0, &key, 4), 32);
		for (uint32_t i = 0; i < 3; i += 2) {
			uint64_t id = rows[i].id;

			kv_assert_status(kv_prefix_remove(rig.test.domain, &id, 9), KV_NOT_FOUND);
			kv_assert_status(kv_prefix_find(rig.test.domain, id, &pool, &row), KV_NOT_FOUND);
		}
		/* Where nothing is published any more, all of it can be again, under another id. */
		ck_assert_uint_eq(n_removed_by(&rig, rows[1].id, n_each), 4);
		ck_assert_uint_eq(kv_prefix_counts(rig.pool).n_nodes, 0);
		ck_assert_uint_eq(publish(&rig, 1, &key, 0, 5).n_blocks_new, 4);
		ck_assert_uint_eq(list(&rig, fresh, 100), 1);
		for (uint32_t i = 0; i < 3; i++)
			ck_assert_uint_ne(fresh[0].id, rows[i].id);
		append_now(&rig, 1, 64, 3);
		append_now(&rig, 2, 64, 3);
		rig_finish(&rig);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("prefix");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_prefix_longest_first);
	tcase_add_test(tcase, test_prefix_collisions_cost_nothing);
	tcase_add_test(tcase, test_prefix_short_hashes_are_verified);
	tcase_add_test(tcase, test_prefix_identities);
	tcase_add_test(tcase, test_prefix_ttl);
	tcase_add_test(tcase, test_prefix_publish_refusals);
	tcase_add_test(tcase, test_prefix_report);
	tcase_add_test(tcase, test_prefix_hits_of_parts);
	tcase_add_test(tcase, test_prefix_list);
	tcase_add_test(tcase, test_prefix_remove);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
