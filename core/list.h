/*
 * Intrusive doubly linked list. A zeroed node is not linked; a list must be initialised.
 */
#ifndef CORE_LIST_H
#define CORE_LIST_H

#include <stdbool.h>
#include <stddef.h>

#include "core/checked.h"

struct kv_list_node {
	struct kv_list_node *prev, *next;
};
struct kv_list {
	struct kv_list_node head;
};

static inline void kv_list_init(struct kv_list *list)
{
	list->head.prev = list->head.next = &list->head;
}
static inline bool kv_list_is_empty(const struct kv_list *list)
{
	return list->head.next == &list->head;
}
static inline bool kv_list_is_linked(const struct kv_list_node *node)
{
	return node->next != NULL;
}
static inline void kv_list_push_back(struct kv_list *list, struct kv_list_node *node)
{
	node->prev = list->head.prev;
	node->next = &list->head;
	list->head.prev->next = node;
	list->head.prev = node;
}
static inline void kv_list_push_front(struct kv_list *list, struct kv_list_node *node)
{
	node->next = list->head.next;
	node->prev = &list->head;
	list->head.next->prev = node;
	list->head.next = node;
}
/* No effect on a node that is not linked. */
static inline void kv_list_remove(struct kv_list_node *node)
{
	if (!kv_list_is_linked(node))
		return;
	node->prev->next = node->next;
	node->next->prev = node->prev;
	node->prev = node->next = NULL;
}
static inline struct kv_list_node *kv_list_first(const struct kv_list *list)
{
	return kv_list_is_empty(list) ? NULL : list->head.next;
}

#define kv_list_for_each(node, list) \
	for (struct kv_list_node *node = (list)->head.next; node != &(list)->head; node = node->next)
/* The body may remove `node`. */
#define kv_list_for_each_safe(node, list)                                              \
	for (struct kv_list_node *node = (list)->head.next, *node##_next = node->next; \
		node != &(list)->head; node = node##_next, node##_next = node->next)

#endif
