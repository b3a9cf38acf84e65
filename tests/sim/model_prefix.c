/*
 * The model's published prefixes: a list of blocks with their token ids and rows, walked from the front. What
 * the pool no longer keeps is not there; which blocks those are is the domain's to know and the audit's to
 * check.
 */
#include <stdlib.h>
#include <string.h>

#include "tests/sim/model.h"

#define NONE UINT32_MAX

static void texts_of(const struct kv_prefix_key *key, char texts[8])
{
	memset(texts, 0, 8);
	SIM_CHECK(key->adapter_bytes < 3 && key->salt_bytes < 4, "texts that the simulation does not send");
	memcpy(texts, key->adapter, key->adapter_bytes);
	memcpy(texts + 4, key->salt, key->salt_bytes);
}

static bool is_kept(const struct kv_pool *pool, uint32_t block)
{
	return pool->blocks[0].flags[block] & KV_BLOCK_KEPT;
}

static const uint8_t *tokens_at(const struct kv_pool *pool, const struct kv_prefix_key *key, uint32_t i)
{
	return key->tokens + 4 * (uint64_t)pool->spec->block_size * i;
}

/* The next block of a walk; the newest entry of a block is the true one. */
static struct sim_published *find(const struct sim_model *model, const struct kv_session *real,
	const struct kv_prefix_key *key, uint32_t parent, uint32_t i)
{
	const struct kv_pool *pool = real->pool;
	char texts[8];

	texts_of(key, texts);
	for (struct sim_published *entry = model->published; entry; entry = entry->next) {
		if (entry->pool == pool && entry->tenant == real->tenant && entry->parent == parent &&
			is_kept(pool, entry->block) && memcmp(entry->texts, texts, sizeof(texts)) == 0 &&
			memcmp(entry->tokens, tokens_at(pool, key, i), 4 * pool->spec->block_size) == 0)
			return entry;
	}
	return NULL;
}

static void forget(struct sim_model *model, const struct kv_pool *pool, uint32_t block)
{
	struct sim_published **link = &model->published;

	while (*link) {
		struct sim_published *entry = *link;

		if (entry->pool == pool && entry->block == block) {
			*link = entry->next;
			free(entry);
		} else {
			link = &entry->next;
		}
	}
}

static struct sim_published *add(struct sim_model *model, const struct kv_session *real,
	const struct sim_sequence *sequence, const struct kv_prefix_key *key, uint32_t parent, uint32_t block,
	uint32_t i)
{
	const uint32_t block_size = real->pool->spec->block_size;
	struct sim_published *entry = calloc(1, sizeof(*entry));

	SIM_CHECK(entry, "no memory for the model");
	forget(model, real->pool, block);
	entry->pool = real->pool;
	entry->tenant = real->tenant;
	entry->block = block;
	entry->parent = parent;
	entry->expires_ns = 1;
	entry->seq = ++model->seq;
	texts_of(key, entry->texts);
	memcpy(entry->tokens, tokens_at(real->pool, key, i), 4 * block_size);
	for (uint32_t l = 0; l < real->pool->spec->n_layers; l++)
		memcpy(entry->row_ids[l], sequence->layers[l].row_ids + i * block_size,
			block_size * sizeof(uint32_t));
	entry->next = model->published;
	model->published = entry;
	return entry;
}

/* In every group there is a block, and it is not published; *block: that of group 0. */
static bool may_be_published(const struct kv_sequence *found, uint32_t i, uint32_t *block)
{
	for (uint32_t g = found->pool->spec->n_groups; g-- > 0;) {
		kv_block_table_copy(&found->tables[g], &found->pool->tables, i, 1, block);
		if (*block == KV_BLOCK_NONE || found->pool->blocks[g].flags[*block] & KV_BLOCK_KEPT)
			return false;
	}
	return true;
}

struct sim_prefix_expected sim_model_publish(struct sim_model *model, struct kv_session *real,
	uint64_t sequence_id, const struct kv_prefix_key *key, uint32_t ttl_ms, uint64_t now_ns)
{
	const struct kv_pool *pool = real->pool;
	const struct sim_session *session = sim_model_session(model, real->handle);
	const struct sim_sequence *sequence = sim_model_sequence(session, sequence_id);
	const struct kv_sequence *found = kv_sequence_find(real, sequence_id);
	const uint64_t expires_ns = ttl_ms ? now_ns + ttl_ms * KV_NS_PER_MS : 0;
	const enum kv_status residence = sim_model_residence(real, sequence_id, true);
	struct sim_prefix_expected expected = { .status = KV_OK };
	uint32_t parent = NONE;

	SIM_CHECK(session->n_pending == 0, "PUBLISH with %u items pending", session->n_pending);
	if (!sequence)
		expected.status = KV_NOT_FOUND;
	else if (sequence->is_evicted)
		expected.status = KV_EVICTED;
	else if (residence != KV_OK)
		expected.status = residence;
	else if (key->n_tokens > sim_sequence_least(sequence, 0, pool->spec->n_layers, false)) {
		expected.status = KV_POSITION;
		expected.n_tokens = sim_sequence_least(sequence, 0, pool->spec->n_layers, false);
	}
	for (uint32_t i = 0; expected.status == KV_OK && i < key->n_tokens / pool->spec->block_size; i++) {
		struct sim_published *entry = find(model, real, key, parent, i);

		if (!entry) {
			uint32_t block = 0;

			/* One that this walk adds is not kept yet, but no walk meets its own. */
			if (!may_be_published(found, i, &block))
				break;
			entry = add(model, real, sequence, key, parent, block, i);
			expected.n_blocks_new++;
		}
		if (entry->expires_ns != 0 && (expires_ns == 0 || expires_ns > entry->expires_ns))
			entry->expires_ns = expires_ns;
		parent = entry->block;
		expected.n_blocks++;
		expected.n_tokens += pool->spec->block_size;
	}
	return expected;
}

struct sim_prefix_expected sim_model_match(const struct sim_model *model, struct kv_session *real,
	uint64_t sequence_id, const struct kv_prefix_key *key, uint64_t now_ns)
{
	const struct sim_session *session = sim_model_session(model, real->handle);
	const uint32_t block_size = real->pool->spec->block_size;
	const uint32_t n_tokens = key->n_tokens < session->tokens_max ? key->n_tokens : session->tokens_max;
	struct sim_prefix_expected expected = { .status = KV_OK };
	uint32_t parent = NONE;

	if (sequence_id != 0 && sim_model_sequence(session, sequence_id)) {
		expected.status = KV_EXISTS;
		return expected;
	}
	while (expected.n_blocks < n_tokens / block_size && expected.n_blocks < SIM_PATH_MAX) {
		const struct sim_published *entry = find(model, real, key, parent, expected.n_blocks);

		if (!entry || (entry->expires_ns != 0 && entry->expires_ns <= now_ns))
			break;
		expected.path[expected.n_blocks++] = entry;
		expected.n_tokens += block_size;
		parent = entry->block;
	}
	if (expected.n_blocks == 0)
		expected.status = KV_NOT_FOUND;
	else if (sequence_id != 0)
		expected.status = sim_model_check_new(model, session, real->pool);
	if (expected.status != KV_OK)
		expected = (struct sim_prefix_expected){ .status = expected.status };
	return expected;
}

void sim_model_matched(struct sim_model *model, uint64_t handle, uint64_t sequence_id,
	const struct sim_prefix_expected *expected, bool is_evictable)
{
	struct sim_session *session = sim_model_session(model, handle);
	struct sim_sequence *sequence;

	if (expected->status != KV_OK || sequence_id == 0)
		return;
	sequence = sim_model_add_sequence(session, sequence_id);
	sequence->is_evictable = is_evictable;
	sequence->rest_seq = ++model->seq;
	for (uint32_t l = 0; l < session->pool->spec->n_layers; l++) {
		struct sim_layer *layer = &sequence->layers[l];
		const uint32_t block_size = session->pool->spec->block_size;

		layer->n_max = expected->n_tokens + 16;
		layer->planned = layer->committed = expected->n_tokens;
		layer->row_ids = malloc(layer->n_max * sizeof(layer->row_ids[0]));
		SIM_CHECK(layer->row_ids, "no memory for the model");
		for (uint32_t i = 0; i < expected->n_blocks; i++)
			memcpy(layer->row_ids + i * block_size, expected->path[i]->row_ids[l],
				block_size * sizeof(uint32_t));
	}
	sim_model_move_windows(session->pool->spec, sequence);
}

/* ---- in snapshots ---- */

void sim_saved_prefixes_free(struct sim_saved_prefix *list)
{
	while (list) {
		struct sim_saved_prefix *saved = list;

		list = saved->next;
		free(saved);
	}
}

static const struct sim_saved_prefix *saved_by_number(
	const struct sim_saved_prefix *list, const char *pool, uint32_t number)
{
	for (; list; list = list->next) {
		if (list->number == number && strcmp(list->pool, pool) == 0)
			return list;
	}
	return NULL;
}

/* What is published behind the block with these tokens, or NULL. */
static struct sim_published *find_child(const struct sim_model *model, const struct kv_pool *pool,
	uint64_t tenant, const char texts[8], uint32_t parent, const void *tokens)
{
	for (struct sim_published *entry = model->published; entry; entry = entry->next) {
		if (entry->pool == pool && entry->tenant == tenant && entry->parent == parent &&
			is_kept(pool, entry->block) && memcmp(entry->texts, texts, 8) == 0 &&
			memcmp(entry->tokens, tokens, 4 * pool->spec->block_size) == 0)
			return entry;
	}
	return NULL;
}

void sim_model_captured_prefix(struct sim_model *model, const struct kv_pool *pool,
	const struct kv_captured_prefix *prefix, uint64_t now_ns)
{
	struct sim_saved_prefix *saved = calloc(1, sizeof(*saved));
	const struct sim_saved_prefix *above =
		saved_by_number(model->saved.begun.prefixes, pool->spec->name, prefix->parent);
	const struct kv_prefix_key key = { .adapter = prefix->adapter,
		.salt = prefix->salt,
		.adapter_bytes = prefix->adapter_bytes,
		.salt_bytes = prefix->salt_bytes };
	uint64_t tenant = prefix->tenant;
	char texts[8];

	SIM_CHECK(saved, "no memory for the model");
	SIM_CHECK((prefix->parent == NONE) == (above == NULL), "a prefix comes before its parent");
	texts_of(&key, texts);
	if (above) {
		memcpy(texts, above->as.texts, sizeof(texts));
		tenant = above->as.tenant;
	}
	const struct sim_published *entry =
		find_child(model, pool, tenant, texts, above ? above->as.block : NONE, prefix->tokens);

	SIM_CHECK(entry && entry->seq <= model->saved.begun_seq, "a prefix is saved that was not published");
	strcpy(saved->pool, pool->spec->name);
	saved->number = prefix->number;
	saved->parent = prefix->parent;
	if (entry->expires_ns > 0)
		saved->ttl_left_ms = (entry->expires_ns - now_ns + KV_NS_PER_MS - 1) / KV_NS_PER_MS;
	saved->as = *entry;
	saved->next = model->saved.begun.prefixes;
	model->saved.begun.prefixes = saved;
}

static bool has_pool(struct kv_domain *domain, const struct kv_pool *pool)
{
	for (uint32_t i = 0; i < kv_domain_n_pools(domain); i++) {
		if (kv_domain_pool_at(domain, i) == pool)
			return true;
	}
	return false;
}

void sim_model_check_captured(const struct sim_model *model, struct kv_domain *domain)
{
	for (const struct sim_published *entry = model->published; entry; entry = entry->next) {
		const struct sim_saved_prefix *saved = model->saved.begun.prefixes;

		if (entry->expires_ns > 0 || entry->seq > model->saved.begun_seq ||
			!has_pool(domain, entry->pool) || !is_kept(entry->pool, entry->block))
			continue;
		while (saved && saved->as.seq != entry->seq)
			saved = saved->next;
		SIM_CHECK(saved, "a published block is not in the snapshot");
	}
}

/* Is it what the snapshot has, with everything before it? */
static bool is_saved_as(const struct sim_model *model, const struct sim_saved_prefix *list,
	const struct sim_saved_prefix *saved, const struct kv_pool *pool, const struct sim_published *told)
{
	const struct sim_published *at = told;

	while (saved && at && memcmp(saved->as.texts, at->texts, sizeof(at->texts)) == 0 &&
		saved->as.tenant == at->tenant &&
		memcmp(saved->as.tokens, at->tokens, 4 * pool->spec->block_size) == 0) {
		const uint32_t parent = at->parent;

		if (parent == NONE || saved->parent == NONE)
			return parent == saved->parent;
		saved = saved_by_number(list, pool->spec->name, saved->parent);
		for (at = model->published; at && (at->pool != pool || at->block != parent);)
			at = at->next;
	}
	return false;
}

uint32_t sim_model_put_prefix(struct sim_model *model, const char *name, const struct kv_pool *pool,
	const struct sim_published *told, uint64_t now_ns)
{
	const struct sim_saved_prefix *list = NULL, *saved = NULL;
	struct sim_published *entry =
		find_child(model, pool, told->tenant, told->texts, told->parent, told->tokens);

	for (uint32_t i = 0; i < SIM_SAVED_MAX; i++) {
		if (strcmp(model->saved.snapshots[i].name, name) == 0)
			list = model->saved.snapshots[i].prefixes;
	}
	for (saved = list; saved; saved = saved->next) {
		if (strcmp(saved->pool, pool->spec->name) == 0 && is_saved_as(model, list, saved, pool, told))
			break;
	}
	SIM_CHECK(saved, "a prefix is restored that is not in the snapshot");
	SIM_CHECK(told->expires_ns == (saved->ttl_left_ms ? now_ns + saved->ttl_left_ms * KV_NS_PER_MS : 0),
		"a restored prefix lives for another time");
	if (!entry) {
		entry = malloc(sizeof(*entry));
		SIM_CHECK(entry, "no memory for the model");
		forget(model, pool, told->block);
		*entry = *told;
		memcpy(entry->row_ids, saved->as.row_ids, sizeof(entry->row_ids));
		entry->expires_ns = 1;
		entry->seq = ++model->seq;
		entry->next = model->published;
		model->published = entry;
	}
	const uint32_t block = entry->block;

	while (entry && entry->expires_ns != 0 &&
		(told->expires_ns == 0 || told->expires_ns > entry->expires_ns)) {
		const uint32_t parent = entry->parent;

		entry->expires_ns = told->expires_ns;
		for (entry = model->published; entry && (entry->pool != pool || entry->block != parent);)
			entry = entry->next;
	}
	return block;
}
