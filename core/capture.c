#include "core/capture.h"

#include <string.h>

#include "core/domain_internal.h"
#include "core/memory.h"
#include "core/prefix_internal.h"

#define PENDING (UINT32_MAX - 1) /* owned, not sealed yet */

/* What is known of the blocks of one group that are kept. */
struct kept {
	uint32_t *numbers; /* [n_blocks]: number + 1; 0: not kept */
	uint8_t *n_rows;   /* [n_blocks]: that the file holds of it on every layer */
	uint32_t n_blocks, n_numbers, n_kept;
	uint32_t release_idx;
};

/* Published blocks of one pool. */
struct kept_nodes {
	uint32_t *numbers; /* [n_max]: number + 1; 0: not taken in */
	uint32_t n_max, n_numbers;
	uint32_t cursor;
	uint64_t serial_max; /* those after it were published since */
};

struct path_node {
	uint32_t number, parent;
	uint64_t ttl_left_ns;
	bool is_end;
};

struct kv_capture {
	struct kv_domain *domain;
	struct kept_nodes nodes[KV_POOLS_MAX];         /* by pool_idx */
	struct kept kept[KV_POOLS_MAX][KV_GROUPS_MAX]; /* by pool_idx */
	struct kv_captured_sequence sequence;
	uint32_t *lengths, *exact;        /* [n_layers_max] */
	uint32_t *blocks[KV_GROUPS_MAX];  /* [n_entries_max] */
	uint32_t *numbers[KV_GROUPS_MAX]; /* [n_entries_max] */
	uint32_t n_layers_max, n_entries_max;
	/* the path that was taken in last */
	struct path_node *path; /* [n_entries_max] */
	uint8_t *tokens;        /* [n_entries_max, block_size_max] u32 */
	uint32_t n_path, block_size_max;
	struct kv_prefix_identity identity;
	uint32_t n_pending;
	/* where kv_capture_peek() goes on */
	bool is_full_turn; /* blocks that are not full are through */
	uint32_t group_idx, entry_idx;
};

/* ---- life ---- */

static void largest(struct kv_capture *capture, const struct kv_domain *domain)
{
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		const struct kv_pool_spec *spec = domain->pools[i]->spec;
		const uint32_t n_entries = kv_div_up_u32(spec->tokens_max, spec->block_size);

		if (spec->n_layers > capture->n_layers_max)
			capture->n_layers_max = spec->n_layers;
		if (n_entries > capture->n_entries_max)
			capture->n_entries_max = n_entries;
		if (spec->block_size > capture->block_size_max)
			capture->block_size_max = spec->block_size;
	}
}

static uint64_t path_bytes(const struct kv_capture *capture)
{
	return sizeof(struct path_node) * (uint64_t)capture->n_entries_max;
}

/* What is published now, and no more. */
static bool begin_nodes(struct kept_nodes *nodes, const struct kv_pool *pool)
{
	nodes->n_max = pool->prefixes->n_max;
	nodes->serial_max = pool->domain->prefix_serial;
	nodes->numbers = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)nodes->n_max);
	return nodes->numbers != NULL;
}

static bool take_memory(struct kv_capture *capture)
{
	const struct kv_domain *domain = capture->domain;
	const uint64_t entries_bytes = sizeof(uint32_t) * (uint64_t)capture->n_entries_max;
	bool is_whole = true;

	capture->lengths = kv_alloc(capture->n_layers_max + 1, sizeof(uint32_t));
	capture->exact = kv_alloc(capture->n_layers_max + 1, sizeof(uint32_t));
	is_whole = capture->lengths && capture->exact;
	if (capture->n_entries_max > 0) {
		capture->path = kv_pages_alloc(path_bytes(capture));
		capture->tokens = kv_pages_alloc(entries_bytes * capture->block_size_max);
		is_whole = is_whole && capture->path && capture->tokens;
	}
	for (uint32_t g = 0; g < KV_GROUPS_MAX && capture->n_entries_max > 0; g++) {
		capture->blocks[g] = kv_pages_alloc(entries_bytes);
		capture->numbers[g] = kv_pages_alloc(entries_bytes);
		is_whole = is_whole && capture->blocks[g] && capture->numbers[g];
	}
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		const struct kv_pool *pool = domain->pools[i];

		is_whole = begin_nodes(&capture->nodes[pool->pool_idx], pool) && is_whole;
		for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
			struct kept *kept = &capture->kept[pool->pool_idx][g];

			kept->n_blocks = pool->spec->n_blocks[g];
			kept->numbers = kv_pages_alloc(sizeof(uint32_t) * (uint64_t)kept->n_blocks);
			kept->n_rows = kv_pages_alloc(kept->n_blocks);
			is_whole = is_whole && kept->numbers && kept->n_rows;
		}
	}
	return is_whole;
}

enum kv_status kv_capture_create(struct kv_domain *domain, struct kv_capture **out, struct kv_error *err)
{
	struct kv_capture *capture = kv_alloc(1, sizeof(*capture));

	KV_ASSERT(domain->capture == NULL);
	if (!capture)
		return kv_fail(err, KV_NO_MEMORY, "snapshot");
	capture->domain = domain;
	largest(capture, domain);
	if (!take_memory(capture)) {
		kv_capture_destroy(capture);
		return kv_fail(
			err, KV_NO_MEMORY, "snapshot of tables with %u entries", capture->n_entries_max);
	}
	domain->capture = capture;
	*out = capture;
	return KV_OK;
}

static void disown(struct kv_pool *pool, uint32_t g, uint32_t block_idx)
{
	kv_block_pool_disown(&pool->blocks[g], (kv_block_id){ block_idx });
}

/* What was taken in and will not be sealed. */
static void drop_pending(struct kv_capture *capture, uint32_t *n_left)
{
	struct kv_captured_sequence *sequence = &capture->sequence;

	for (uint32_t g = 0; g < KV_GROUPS_MAX && capture->n_pending > 0; g++) {
		for (uint32_t i = 0; i < sequence->n_entries[g] && *n_left > 0; i++) {
			if (capture->numbers[g][i] != PENDING)
				continue;
			disown(sequence->pool, g, capture->blocks[g][i]);
			capture->numbers[g][i] = KV_CAPTURE_NO_BLOCK;
			capture->n_pending--;
			--*n_left;
		}
	}
}

static void drop_kept(struct kv_pool *pool, uint32_t g, struct kept *kept, uint32_t *n_left)
{
	for (; kept->n_kept > 0 && *n_left > 0; kept->release_idx++) {
		if (kept->numbers[kept->release_idx] == 0)
			continue;
		kept->numbers[kept->release_idx] = 0;
		kept->n_kept--;
		--*n_left;
		disown(pool, g, kept->release_idx);
	}
}

bool kv_capture_release(struct kv_capture *capture, uint32_t n_max)
{
	const struct kv_domain *domain = capture->domain;
	uint32_t n_left = n_max;
	bool is_empty;

	drop_pending(capture, &n_left);
	is_empty = capture->n_pending == 0;
	for (uint32_t i = 0; i < domain->n_pools; i++) {
		struct kv_pool *pool = domain->pools[i];

		for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
			struct kept *kept = &capture->kept[pool->pool_idx][g];

			drop_kept(pool, g, kept, &n_left);
			is_empty = is_empty && kept->n_kept == 0;
		}
	}
	return is_empty;
}

void kv_capture_destroy(struct kv_capture *capture)
{
	if (!capture)
		return;
	if (capture->domain->capture == capture) {
		(void)kv_capture_release(capture, UINT32_MAX);
		capture->domain->capture = NULL;
	}
	kv_free(capture->lengths);
	kv_free(capture->exact);
	kv_pages_free(capture->path, path_bytes(capture));
	kv_pages_free(capture->tokens,
		sizeof(uint32_t) * (uint64_t)capture->n_entries_max * capture->block_size_max);
	for (uint32_t g = 0; g < KV_GROUPS_MAX; g++) {
		kv_pages_free(capture->blocks[g], sizeof(uint32_t) * (uint64_t)capture->n_entries_max);
		kv_pages_free(capture->numbers[g], sizeof(uint32_t) * (uint64_t)capture->n_entries_max);
	}
	for (uint32_t i = 0; i < KV_POOLS_MAX; i++) {
		kv_pages_free(
			capture->nodes[i].numbers, sizeof(uint32_t) * (uint64_t)capture->nodes[i].n_max);
		for (uint32_t g = 0; g < KV_GROUPS_MAX; g++) {
			struct kept *kept = &capture->kept[i][g];

			kv_pages_free(kept->numbers, sizeof(uint32_t) * (uint64_t)kept->n_blocks);
			kv_pages_free(kept->n_rows, kept->n_blocks);
		}
	}
	kv_free(capture);
}

/* ---- one sequence ---- */

static uint32_t rows_in(uint32_t length, uint32_t token_first, uint32_t block_size)
{
	if (length <= token_first)
		return 0;
	return length - token_first < block_size ? length - token_first : block_size;
}

/* Fewest and most rows of an entry over the layers of its group. */
static void count_rows(
	const struct kv_capture *capture, uint32_t g, uint32_t entry_idx, uint32_t *fewest, uint32_t *most)
{
	const struct kv_pool_spec *spec = capture->sequence.pool->spec;

	*fewest = spec->block_size;
	*most = 0;
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		if (spec->layers[l].group_idx != g)
			continue;
		const uint32_t n =
			rows_in(capture->lengths[l], entry_idx * spec->block_size, spec->block_size);

		*fewest = n < *fewest ? n : *fewest;
		*most = n > *most ? n : *most;
	}
}

/* Owned until it is sealed, unless the file has its rows. */
static void take_entry(struct kv_capture *capture, uint32_t g, uint32_t entry_idx)
{
	struct kv_pool *pool = capture->sequence.pool;
	const struct kept *kept = &capture->kept[pool->pool_idx][g];
	const uint32_t block_idx = capture->blocks[g][entry_idx];
	uint32_t fewest, most;

	count_rows(capture, g, entry_idx, &fewest, &most);
	if (kept->numbers[block_idx] > 0 && most <= kept->n_rows[block_idx]) {
		capture->numbers[g][entry_idx] = kept->numbers[block_idx] - 1;
		return;
	}
	kv_block_pool_own(&pool->blocks[g], (kv_block_id){ block_idx });
	capture->numbers[g][entry_idx] = PENDING;
	capture->n_pending++;
}

static void take_group(struct kv_capture *capture, const struct kv_sequence *sequence, uint32_t g)
{
	struct kv_pool *pool = sequence->pool;
	const uint32_t n = capture->sequence.n_entries[g];

	kv_block_table_copy(&sequence->tables[g], &pool->tables, 0, n, capture->blocks[g]);
	for (uint32_t i = 0; i < n; i++) {
		if (i >= pool->spec->group_sink_blocks[g] && i < sequence->n_gone[g])
			capture->numbers[g][i] = KV_CAPTURE_NO_BLOCK;
		else
			take_entry(capture, g, i);
	}
}

void kv_capture_take(struct kv_capture *capture, const struct kv_sequence *sequence, uint64_t now_ns)
{
	const struct kv_pool_spec *spec = sequence->pool->spec;

	KV_ASSERT(capture->n_pending == 0);
	capture->sequence = (struct kv_captured_sequence){
		.id = sequence->id,
		.idle_ns = now_ns > sequence->used_ns ? now_ns - sequence->used_ns : 0,
		.pool = sequence->pool,
		.is_evictable = sequence->is_evictable,
		.n_pins = sequence->n_pins,
		.lengths = capture->lengths,
		.n_exact = capture->exact,
	};
	for (uint32_t l = 0; l < spec->n_layers; l++) {
		const uint32_t n_entries = kv_div_up_u32(sequence->committed[l], spec->block_size);
		uint32_t *n = &capture->sequence.n_entries[spec->layers[l].group_idx];

		capture->lengths[l] = sequence->committed[l];
		capture->exact[l] = (uint32_t)kv_sequence_n_exact(sequence, l);
		*n = n_entries > *n ? n_entries : *n;
	}
	for (uint32_t g = 0; g < spec->n_groups; g++) {
		capture->sequence.numbers[g] = capture->numbers[g];
		capture->sequence.n_gone[g] = sequence->n_gone[g];
		take_group(capture, sequence, g);
	}
	capture->is_full_turn = false;
	capture->group_idx = capture->entry_idx = 0;
}

/* ---- published blocks ---- */

/* It is there since before the capture began, lives on, and is not in the file yet. */
static bool is_wanted(
	const struct kv_pool *pool, const struct kept_nodes *nodes, uint32_t node_idx, uint64_t now_ns)
{
	const struct kv_prefix_node *node = &pool->prefixes->nodes[node_idx];

	return node->is_used && node->serial <= nodes->serial_max && nodes->numbers[node_idx] == 0 &&
		(node->expires_ns == 0 || node->expires_ns > now_ns);
}

/* Those of the node's path that are not in the file yet: whoever was there at the beginning has its parents
 * from before. */
static void take_path(
	struct kv_capture *capture, const struct kv_pool *pool, uint32_t node_idx, uint64_t now_ns)
{
	const struct kv_prefix_index *index = pool->prefixes;
	struct kept_nodes *kept = &capture->nodes[pool->pool_idx];
	uint32_t n = 0, idx = node_idx;

	for (; !(idx & KV_PREFIX_ROOT) && kept->numbers[idx] == 0; idx = index->nodes[idx].parent)
		n++;
	KV_ASSERT(n <= capture->n_entries_max);
	const uint32_t above = idx & KV_PREFIX_ROOT ? KV_CAPTURE_NO_BLOCK : kept->numbers[idx] - 1;

	capture->n_path = n;
	idx = node_idx;
	for (uint32_t i = n; i-- > 0; idx = index->nodes[idx].parent) {
		const uint64_t expires_ns = index->nodes[idx].expires_ns;

		kept->numbers[idx] = kept->n_numbers + i + 1;
		capture->path[i] = (struct path_node){ .number = kept->n_numbers + i,
			.parent = i > 0 ? kept->n_numbers + i - 1 : above,
			.ttl_left_ns = expires_ns > 0 ? expires_ns - now_ns : 0,
			.is_end = index->nodes[idx].is_end };
		memcpy(capture->tokens + 4 * (uint64_t)index->block_size * i, kv_prefix_tokens_of(index, idx),
			4 * (size_t)index->block_size);
		for (uint32_t g = 0; g < index->n_groups; g++)
			capture->blocks[g][i] = index->blocks[(uint64_t)idx * index->n_groups + g];
	}
	kept->n_numbers += n;
	capture->identity = idx & KV_PREFIX_ROOT ? index->identities[idx & ~KV_PREFIX_ROOT]
						 : (struct kv_prefix_identity){ 0 };
}

bool kv_capture_take_prefix(
	struct kv_capture *capture, struct kv_pool *pool, uint64_t now_ns, uint32_t *n_looks)
{
	struct kept_nodes *nodes = &capture->nodes[pool->pool_idx];
	const struct kv_prefix_index *index = pool->prefixes;

	KV_ASSERT(capture->n_pending == 0);
	for (; nodes->cursor<index->n_touched && * n_looks> 0; nodes->cursor++, --*n_looks) {
		if (is_wanted(pool, nodes, nodes->cursor, now_ns))
			break;
	}
	if (nodes->cursor >= index->n_touched || *n_looks == 0)
		return false;
	take_path(capture, pool, nodes->cursor, now_ns);
	capture->sequence = (struct kv_captured_sequence){
		.pool = pool, .lengths = capture->lengths, .n_exact = capture->exact
	};
	for (uint32_t l = 0; l < pool->spec->n_layers; l++) {
		capture->lengths[l] = capture->n_path * index->block_size;
		capture->exact[l] = 0;
	}
	for (uint32_t g = 0; g < index->n_groups; g++) {
		capture->sequence.numbers[g] = capture->numbers[g];
		capture->sequence.n_entries[g] = capture->n_path;
		for (uint32_t i = 0; i < capture->n_path; i++)
			take_entry(capture, g, i);
	}
	capture->is_full_turn = false;
	capture->group_idx = capture->entry_idx = 0;
	return true;
}

uint32_t kv_capture_n_prefixes(const struct kv_capture *capture)
{
	return capture->n_path;
}

void kv_capture_prefix(const struct kv_capture *capture, uint32_t idx, struct kv_captured_prefix *prefix)
{
	const struct kv_pool_spec *spec = capture->sequence.pool->spec;
	const struct path_node *node = &capture->path[idx];

	*prefix = (struct kv_captured_prefix){
		.number = node->number,
		.parent = node->parent,
		.ttl_left_ns = node->ttl_left_ns,
		.is_end = node->is_end,
		.tokens = capture->tokens + 4 * (uint64_t)spec->block_size * idx,
		.adapter = "",
		.salt = "",
	};
	if (node->parent == KV_CAPTURE_NO_BLOCK) {
		prefix->tenant = capture->identity.tenant;
		prefix->adapter = capture->identity.adapter;
		prefix->salt = capture->identity.salt;
		prefix->adapter_bytes = capture->identity.adapter_bytes;
		prefix->salt_bytes = capture->identity.salt_bytes;
	}
	for (uint32_t g = 0; g < spec->n_groups; g++)
		prefix->blocks[g] = capture->numbers[g][idx];
}

/* ---- blocks ---- */

const struct kv_captured_sequence *kv_capture_sequence(const struct kv_capture *capture)
{
	return &capture->sequence;
}

/* The entry is to be sealed in this of the two turns. */
static bool is_next(const struct kv_capture *capture)
{
	const uint32_t g = capture->group_idx, i = capture->entry_idx;
	uint32_t fewest, most;

	if (capture->numbers[g][i] != PENDING)
		return false;
	if (capture->is_full_turn)
		return true;
	count_rows(capture, g, i, &fewest, &most);
	return fewest < capture->sequence.pool->spec->block_size;
}

bool kv_capture_peek(struct kv_capture *capture, struct kv_captured_block *block)
{
	const struct kv_captured_sequence *sequence = &capture->sequence;

	while (capture->n_pending > 0) {
		const uint32_t g = capture->group_idx, i = capture->entry_idx;

		if (g == sequence->pool->spec->n_groups) {
			KV_ASSERT(!capture->is_full_turn);
			capture->is_full_turn = true;
			capture->group_idx = capture->entry_idx = 0;
		} else if (i >= sequence->n_entries[g]) {
			capture->group_idx++;
			capture->entry_idx = 0;
		} else if (!is_next(capture)) {
			capture->entry_idx++;
		} else {
			*block = (struct kv_captured_block){
				.group_idx = g,
				.block_idx = capture->blocks[g][i],
				.number = capture->kept[sequence->pool->pool_idx][g].n_numbers,
				.token_first = i * sequence->pool->spec->block_size,
			};
			return true;
		}
	}
	return false;
}

void kv_capture_sealed(struct kv_capture *capture)
{
	struct kv_pool *pool = capture->sequence.pool;
	const uint32_t g = capture->group_idx, i = capture->entry_idx;
	const uint32_t block_idx = capture->blocks[g][i];
	struct kept *kept = &capture->kept[pool->pool_idx][g];
	uint32_t fewest, most;

	KV_ASSERT(capture->numbers[g][i] == PENDING);
	count_rows(capture, g, i, &fewest, &most);
	capture->numbers[g][i] = kept->n_numbers++;
	capture->n_pending--;
	/* Its table, this capture, and somebody else. */
	if (pool->blocks[g].owners[block_idx] > 2 && kept->numbers[block_idx] == 0) {
		kept->n_kept++;
	} else {
		disown(pool, g, block_idx);
		if (kept->numbers[block_idx] == 0)
			return;
	}
	kept->numbers[block_idx] = capture->numbers[g][i] + 1;
	kept->n_rows[block_idx] = (uint8_t)fewest;
}

uint32_t kv_capture_n_rows(
	const struct kv_capture *capture, const struct kv_captured_block *block, uint32_t layer_idx)
{
	return rows_in(
		capture->lengths[layer_idx], block->token_first, capture->sequence.pool->spec->block_size);
}

void kv_capture_count(const struct kv_capture *capture, const struct kv_pool *pool, uint32_t *const owners[])
{
	for (uint32_t g = 0; g < pool->spec->n_groups; g++) {
		const struct kept *kept = &capture->kept[pool->pool_idx][g];

		for (uint32_t i = 0; kept->n_kept > 0 && i < kept->n_blocks; i++)
			owners[g][i] += kept->numbers[i] > 0;
		if (capture->sequence.pool != pool)
			continue;
		for (uint32_t i = 0; i < capture->sequence.n_entries[g]; i++) {
			if (capture->numbers[g][i] == PENDING)
				owners[g][capture->blocks[g][i]]++;
		}
	}
}
