/*
 * A treap: search tree by id, heap by a priority that clients cannot guess. Expected depth is logarithmic
 * whatever the ids are.
 */
#include "core/domain_internal.h"

void kv_sequence_tree_insert(struct kv_sequence **root, struct kv_sequence *sequence)
{
	struct kv_sequence **link = root;

	while (*link && (*link)->tree_priority >= sequence->tree_priority)
		link = sequence->id < (*link)->id ? &(*link)->tree_left : &(*link)->tree_right;

	/* It takes this place; what was below is split by its id. */
	struct kv_sequence *rest = *link;
	struct kv_sequence **below = &sequence->tree_left, **above = &sequence->tree_right;

	*link = sequence;
	while (rest) {
		if (rest->id < sequence->id) {
			*below = rest;
			below = &rest->tree_right;
			rest = *below;
		} else {
			*above = rest;
			above = &rest->tree_left;
			rest = *above;
		}
	}
	*below = *above = NULL;
}

void kv_sequence_tree_remove(struct kv_sequence **root, struct kv_sequence *sequence)
{
	struct kv_sequence **link = root;

	while (*link != sequence) {
		KV_ASSERT(*link != NULL);
		link = sequence->id < (*link)->id ? &(*link)->tree_left : &(*link)->tree_right;
	}

	struct kv_sequence *left = sequence->tree_left, *right = sequence->tree_right;

	while (left && right) {
		if (left->tree_priority >= right->tree_priority) {
			*link = left;
			link = &left->tree_right;
			left = *link;
		} else {
			*link = right;
			link = &right->tree_left;
			right = *link;
		}
	}
	*link = left ? left : right;
	sequence->tree_left = sequence->tree_right = NULL;
}

struct kv_sequence *kv_sequence_tree_at_least(struct kv_sequence *root, uint64_t id)
{
	struct kv_sequence *found = NULL;

	while (root) {
		if (root->id >= id) {
			found = root;
			root = root->tree_left;
		} else {
			root = root->tree_right;
		}
	}
	return found;
}

/* ---- listing ---- */

struct kv_sequence *kv_sequence_next(struct kv_session *session, uint64_t from)
{
	return kv_sequence_tree_at_least(kv_slot_of(session)->tree, from);
}

uint32_t kv_sequence_list(
	struct kv_session *session, uint64_t from, struct kv_sequence *out[], uint32_t n_max, uint64_t *next)
{
	struct kv_sequence *root = kv_slot_of(session)->tree;
	struct kv_sequence *sequence = kv_sequence_tree_at_least(root, from);
	uint32_t n = 0;

	while (sequence && n < n_max) {
		out[n++] = sequence;
		sequence =
			sequence->id < UINT64_MAX ? kv_sequence_tree_at_least(root, sequence->id + 1) : NULL;
	}
	*next = sequence ? sequence->id : 0;
	return n;
}
