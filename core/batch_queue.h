/*
 * Queues of batches and jobs, first in first out, linked through the `next` that belongs to the backend while
 * it has them. Not thread-safe.
 */
#ifndef CORE_BATCH_QUEUE_H
#define CORE_BATCH_QUEUE_H

#include <stddef.h>

#include "core/backend.h"

struct kv_batch_queue {
	struct kv_batch *first, *last;
};
struct kv_job_queue {
	struct kv_job *first, *last;
};

static inline void kv_batch_push(struct kv_batch_queue *queue, struct kv_batch *batch)
{
	batch->next = NULL;
	if (queue->last)
		queue->last->next = batch;
	else
		queue->first = batch;
	queue->last = batch;
}

static inline struct kv_batch *kv_batch_pop(struct kv_batch_queue *queue)
{
	struct kv_batch *batch = queue->first;

	if (!batch)
		return NULL;
	queue->first = batch->next;
	if (!queue->first)
		queue->last = NULL;
	batch->next = NULL;
	return batch;
}

static inline void kv_job_push(struct kv_job_queue *queue, struct kv_job *job)
{
	job->next = NULL;
	if (queue->last)
		queue->last->next = job;
	else
		queue->first = job;
	queue->last = job;
}

static inline struct kv_job *kv_job_pop(struct kv_job_queue *queue)
{
	struct kv_job *job = queue->first;

	if (!job)
		return NULL;
	queue->first = job->next;
	if (!queue->first)
		queue->last = NULL;
	job->next = NULL;
	return job;
}

#endif
