#include "tests/sim/fake_backend.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/batch_run.h"
#include "core/checked.h"
#include "core/number.h"
#include "core/plan.h"
#include "proto/crc32c.h"
#include "tests/sim/payload.h"

#define DEPTH_MAX 160u
#define JOBS_MAX  16u

struct kv_backend_pool {
	struct kv_batch_pages pages;
};

struct flight {
	struct kv_batch *batch;
	uint64_t due_ns;
	uint32_t crc; /* of the plan area and of the rows, as submitted */
	bool is_early, is_done;
	bool refused[KV_PLAN_ITEMS_MAX];
};

struct sim_backend {
	struct kv_backend base;
	struct sim_backend_options options;
	struct sim_backend_hooks hooks;
	struct sim_clock *clock;
	struct sim_rng rng;
	uint8_t *arena;
	uint64_t arena_bytes;
	struct flight *flights; /* ring [DEPTH_MAX] */
	uint32_t first, n_flights;
	uint32_t n_awaited; /* of them, since will_sleep() */
	uint64_t due_last_ns;
	bool is_signalled, is_held, is_lost, is_hurried, has_failed;
	int64_t refuse_countdown, submit_countdown, host_alloc_countdown;
	enum kv_status submit_status;
	uint32_t n_host_allocs, n_pools;
	uint64_t host_bytes;
	struct kv_job *jobs;
	struct kv_batch_scratch scratch;
};

static struct sim_backend *from_base(struct kv_backend *base)
{
	return kv_container_of(base, struct sim_backend, base);
}

static struct flight *flight_at(struct sim_backend *self, uint32_t i)
{
	return &self->flights[(self->first + i) % DEPTH_MAX];
}

static bool counts_down(struct sim_backend *self, int64_t *countdown)
{
	if (*countdown < 0 || (*countdown)-- > 0)
		return false;
	self->has_failed = true;
	return true;
}

/* ---- memory and pools ---- */

static void sim_info(struct kv_backend *base, struct kv_backend_info *out)
{
	memset(out, 0, sizeof(*out));
	snprintf(out->device, sizeof(out->device), "simulated device");
	out->memory_bytes = from_base(base)->arena_bytes;
}

static enum kv_status sim_pool_check(
	struct kv_backend *base, const struct kv_pool_spec *spec, uint64_t *arena_bytes, struct kv_error *err)
{
	uint64_t n_bytes = 0;

	(void)base;
	if (!kv_batch_pages_bytes(spec, &n_bytes))
		return kv_fail(err, KV_UNSUPPORTED, "pool %s is too large", spec->name);
	*arena_bytes = kv_round_up_u64(n_bytes, 4096);
	return KV_OK;
}

static enum kv_status sim_arena_create(struct kv_backend *base, uint64_t n_bytes, struct kv_error *err)
{
	struct sim_backend *self = from_base(base);

	SIM_CHECK(!self->arena, "arena_create() twice");
	self->arena = aligned_alloc(4096, kv_round_up_u64(n_bytes, 4096));
	if (!self->arena)
		return kv_fail(err, KV_NO_MEMORY, "arena");
	self->arena_bytes = n_bytes;
	return KV_OK;
}

static enum kv_status sim_pool_create(struct kv_backend *base, const struct kv_pool_spec *spec,
	uint64_t arena_offset, struct kv_backend_pool **out, struct kv_error *err)
{
	struct sim_backend *self = from_base(base);
	struct kv_backend_pool *pool = calloc(1, sizeof(*pool));
	uint64_t n_bytes = 0;

	SIM_CHECK(pool && kv_batch_pages_bytes(spec, &n_bytes), "pool_create() of an impossible pool");
	SIM_CHECK(arena_offset + n_bytes <= self->arena_bytes, "a pool outside the arena");
	/* Contents are undefined at first: make them plainly wrong. */
	memset(self->arena + arena_offset, 0xA5, n_bytes);
	const enum kv_status status =
		kv_batch_pages_init(&pool->pages, spec, self->arena + arena_offset, err);

	if (status != KV_OK) {
		free(pool);
		return status;
	}
	self->n_pools++;
	*out = pool;
	return KV_OK;
}

static void sim_pool_destroy(struct kv_backend *base, struct kv_backend_pool *pool)
{
	struct sim_backend *self = from_base(base);

	if (!pool)
		return;
	for (uint32_t i = 0; i < self->n_flights; i++)
		SIM_CHECK(flight_at(self, i)->batch->pool != pool, "pool_destroy() with a batch in flight");
	kv_batch_pages_finish(&pool->pages);
	free(pool);
	self->n_pools--;
}

static void *sim_host_alloc(struct kv_backend *base, uint64_t n_bytes)
{
	struct sim_backend *self = from_base(base);

	if (counts_down(self, &self->host_alloc_countdown))
		return NULL;
	void *memory = aligned_alloc(4096, kv_round_up_u64(n_bytes, 4096));

	SIM_CHECK(memory, "no host memory");
	self->n_host_allocs++;
	self->host_bytes += n_bytes;
	return memory;
}

static void sim_host_free(struct kv_backend *base, void *memory, uint64_t n_bytes)
{
	struct sim_backend *self = from_base(base);

	SIM_CHECK(self->n_host_allocs > 0 && self->host_bytes >= n_bytes, "host_free() of nothing");
	self->n_host_allocs--;
	self->host_bytes -= n_bytes;
	free(memory);
}

/* ---- batches ---- */

static uint32_t rows_crc(const struct kv_pool_spec *spec, const struct kv_rows *rows, bool is_v,
	uint32_t layer_first, uint32_t n_layers, uint32_t n_tokens, uint32_t crc)
{
	const uint8_t *at = rows->base;

	for (uint32_t l = layer_first; at && l < layer_first + n_layers; l++) {
		const uint64_t token_bytes = sim_token_bytes(spec, l, is_v, (enum kv_dtype)rows->dtype);

		crc = kvp_crc32c(crc, at, n_tokens * token_bytes);
		at += rows->tokens_stride * token_bytes;
	}
	return crc;
}

/* Everything that the batch reads outside the pages, except results. */
static uint32_t batch_crc(const struct kv_batch *batch)
{
	const struct kv_pool_spec *spec = batch->pool->pages.spec;
	uint32_t crc =
		kvp_crc32c(0, (const uint8_t *)batch->copies, batch->n_copies * sizeof(batch->copies[0]));

	for (uint32_t i = 0; i < batch->n_updates; i++) {
		const struct kv_update_op *op = &batch->updates[i];

		crc = kvp_crc32c(crc, (const uint8_t *)op, sizeof(*op));
		crc = kvp_crc32c(crc, (const uint8_t *)op->slots,
			(size_t)spec->n_groups * op->n_tokens * sizeof(op->slots[0]));
		if (op->exact_slots)
			crc = kvp_crc32c(crc, (const uint8_t *)op->exact_slots,
				op->n_tokens * sizeof(op->exact_slots[0]));
		crc = rows_crc(spec, &op->k, false, op->layer_first, op->n_layers, op->n_tokens, crc);
		crc = rows_crc(spec, &op->v, true, op->layer_first, op->n_layers, op->n_tokens, crc);
	}
	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		crc = kvp_crc32c(crc, (const uint8_t *)op, sizeof(*op));
		crc = kvp_crc32c(crc, (const uint8_t *)op->table,
			kv_div_up_u32(op->n_tokens_seen, spec->block_size) * sizeof(op->table[0]));
		if (op->exact_table)
			crc = kvp_crc32c(crc, (const uint8_t *)op->exact_table,
				(kv_div_up_u32(op->n_tokens_seen, spec->block_size) -
					op->exact_lo / spec->block_size) *
					sizeof(op->exact_table[0]));
		crc = kvp_crc32c(crc, op->q,
			(size_t)op->q_len * spec->q_heads * spec->k_head_dim *
				kv_dtype_bytes((enum kv_dtype)op->q_dtype));
	}
	for (uint32_t i = 0; i < batch->n_transfers; i++) {
		const struct kv_transfer_op *op = &batch->transfers[i];

		crc = kvp_crc32c(crc, (const uint8_t *)op, sizeof(*op));
		crc = kvp_crc32c(crc, (const uint8_t *)op->slots,
			(size_t)spec->n_groups * op->n_tokens * sizeof(op->slots[0]));
		if (op->exact_slots)
			crc = kvp_crc32c(crc, (const uint8_t *)op->exact_slots,
				op->n_tokens * sizeof(op->exact_slots[0]));
	}
	return crc;
}

/* A refused item may have written anything to its own slots. */
static void spoil(const struct kv_batch *batch, const struct kv_update_op *op)
{
	const struct kv_batch_pages *pages = &batch->pool->pages;
	const struct kv_pool_spec *spec = pages->spec;

	for (uint32_t l = op->layer_first; l < op->layer_first + op->n_layers; l++) {
		const struct kv_layer_spec *layer = &spec->layers[l];
		const uint64_t k_bytes = (uint64_t)spec->kv_heads * layer->k->row_bytes;
		const uint64_t v_bytes = (uint64_t)spec->kv_heads * layer->v->row_bytes;
		const uint64_t exact_k_bytes = 2ull * spec->kv_heads * spec->k_head_dim;
		const uint64_t exact_v_bytes = 2ull * spec->kv_heads * spec->v_head_dim;
		const int64_t *slots = op->slots + (uint64_t)layer->group_idx * op->n_tokens;

		for (uint32_t t = 0; t < op->n_tokens; t++) {
			if (slots[t] < 0)
				continue;
			memset(pages->layers[l].k + (uint64_t)slots[t] * k_bytes, 0xE7, k_bytes);
			memset(pages->layers[l].v + (uint64_t)slots[t] * v_bytes, 0xE7, v_bytes);
			if (!op->exact_slots || op->exact_slots[t] < 0)
				continue;
			memset(pages->layers[l].exact_k + (uint64_t)op->exact_slots[t] * exact_k_bytes, 0xE7,
				exact_k_bytes);
			memset(pages->layers[l].exact_v + (uint64_t)op->exact_slots[t] * exact_v_bytes, 0xE7,
				exact_v_bytes);
		}
	}
}

static void refuse(struct sim_backend *self, struct flight *flight, uint32_t result_idx, uint32_t layer_first,
	uint32_t n_layers, uint32_t n_tokens)
{
	flight->refused[result_idx] = true;
	flight->batch->results[result_idx] = (struct kv_result){
		.status = KV_BAD_VALUE,
		.layer = (uint16_t)(layer_first + sim_below(&self->rng, n_layers)),
		.row = sim_below(&self->rng, n_tokens),
	};
}

/* The server's own known-answer batch, which has no user, is left alone. */
static bool must_refuse(struct sim_backend *self, const struct kv_batch *batch)
{
	if (!batch->user)
		return false;
	return sim_chance(&self->rng, self->options.refuse_per_mille) ||
		counts_down(self, &self->refuse_countdown);
}

static void work(struct sim_backend *self, struct flight *flight)
{
	struct kv_batch *batch = flight->batch;

	SIM_CHECK(batch_crc(batch) == flight->crc, "memory of a submitted batch changed");
	kv_batch_run(&batch->pool->pages, batch, &self->scratch);
	for (uint32_t i = 0; i < batch->n_updates; i++) {
		const struct kv_update_op *op = &batch->updates[i];

		if (must_refuse(self, batch))
			refuse(self, flight, op->result_idx, op->layer_first, op->n_layers, op->n_tokens);
		if (batch->results[op->result_idx].status != KV_OK)
			spoil(batch, op);
	}
	for (uint32_t i = 0; i < batch->n_decodes; i++) {
		const struct kv_decode_op *op = &batch->decodes[i];

		if (!flight->refused[op->result_idx] && batch->results[op->result_idx].status == KV_OK &&
			must_refuse(self, batch))
			refuse(self, flight, op->result_idx, op->layer, 1, 1);
	}
	kv_batch_end(&batch->pool->pages, batch);
	flight->is_early = true;
}

static enum kv_status sim_submit(struct kv_backend *base, struct kv_batch *batch, struct kv_error *err)
{
	struct sim_backend *self = from_base(base);

	if (self->is_lost)
		return kv_fail(err, KV_DEVICE_LOST, "the simulated device is gone");
	if (counts_down(self, &self->submit_countdown)) {
		self->is_lost = self->submit_status == KV_DEVICE_LOST;
		return kv_fail(err, self->submit_status, "submit was told to fail");
	}
	if (counts_down(self, &self->options.lose_after)) {
		self->is_lost = true;
		return kv_fail(err, KV_DEVICE_LOST, "the simulated device got lost");
	}
	if (self->n_flights >= self->options.depth_max || self->n_flights == DEPTH_MAX ||
		sim_chance(&self->rng, self->options.busy_per_mille))
		return KV_BUSY_RETRY;
	SIM_CHECK(batch->n_results <= KV_PLAN_ITEMS_MAX, "a batch of %u results", batch->n_results);
	SIM_CHECK(batch->n_results > 0 || batch->n_copies > 0, "an empty batch was submitted");
	struct flight *flight = flight_at(self, self->n_flights++);
	uint64_t due_ns = self->clock->now_ns;

	if (self->options.latency_ns_max > 0)
		due_ns += sim_rng_next(&self->rng) % self->options.latency_ns_max;
	if (due_ns > self->due_last_ns)
		self->due_last_ns = due_ns;
	memset(flight, 0, sizeof(*flight));
	flight->batch = batch;
	flight->due_ns = self->due_last_ns;
	flight->crc = batch_crc(batch);
	self->is_signalled = false;
	if (self->hooks.submitted)
		self->hooks.submitted(self->hooks.user, batch);
	/* Early only when everything before it has been done. */
	if ((self->n_flights == 1 || flight_at(self, self->n_flights - 2)->is_early) &&
		sim_chance(&self->rng, 300))
		work(self, flight);
	return KV_OK;
}

static bool is_ready(const struct sim_backend *self)
{
	const struct flight *flight = &self->flights[self->first];

	return self->n_flights > 0 &&
		(self->is_lost || (!self->is_held && flight->due_ns <= self->clock->now_ns));
}

static struct kv_batch *sim_reap(struct kv_backend *base)
{
	struct sim_backend *self = from_base(base);
	struct flight *flight = flight_at(self, 0);

	if (!is_ready(self)) {
		/* Whoever asks again and again lets time pass. */
		self->clock->now_ns += self->is_hurried ? KV_NS_PER_MS
			: self->options.is_silent       ? 20000
							: 100;
		return NULL;
	}
	struct kv_batch *batch = flight->batch;

	if (self->is_lost) {
		batch->status = KV_DEVICE_LOST;
	} else {
		if (!flight->is_early)
			work(self, flight);
		batch->status = KV_OK;
	}
	batch->copy_in_us = 1;
	batch->kernel_us = 2;
	batch->copy_out_us = 3;
	if (self->hooks.completed)
		self->hooks.completed(self->hooks.user, batch, flight->refused);
	self->first = (self->first + 1) % DEPTH_MAX;
	self->n_flights--;
	self->n_awaited -= self->n_awaited > 0;
	self->is_signalled = false;
	return batch;
}

static bool sim_job_post(struct kv_backend *base, struct kv_job *job)
{
	struct sim_backend *self = from_base(base);

	job->run(job);
	job->next = self->jobs;
	self->jobs = job;
	return true;
}

static struct kv_job *sim_job_reap(struct kv_backend *base)
{
	struct sim_backend *self = from_base(base);
	struct kv_job *job = self->jobs;

	if (job)
		self->jobs = job->next;
	return job;
}

static int sim_event_fd(struct kv_backend *base)
{
	return from_base(base)->options.has_event_fd ? SIM_BACKEND_FD : -1;
}

static void sim_will_sleep(struct kv_backend *base)
{
	from_base(base)->n_awaited = from_base(base)->n_flights;
}

static void sim_destroy(struct kv_backend *base)
{
	if (!base)
		return;
	struct sim_backend *self = from_base(base);

	SIM_CHECK(self->n_flights == 0, "destroy() with %u batches in flight", self->n_flights);
	SIM_CHECK(self->n_pools == 0, "destroy() with %u pools", self->n_pools);
	SIM_CHECK(self->n_host_allocs == 0, "%u pieces of host memory were not freed", self->n_host_allocs);
	free(self->arena);
	free(self->flights);
	free(self);
}

static const struct kv_backend_ops sim_ops = { "sim", sim_info, sim_pool_check, sim_arena_create,
	sim_pool_create, sim_pool_destroy, sim_host_alloc, sim_host_free, sim_submit, sim_reap, sim_job_post,
	sim_job_reap, sim_event_fd, NULL, sim_destroy };
static const struct kv_backend_ops sim_silent_ops = { "sim", sim_info, sim_pool_check, sim_arena_create,
	sim_pool_create, sim_pool_destroy, sim_host_alloc, sim_host_free, sim_submit, sim_reap, sim_job_post,
	sim_job_reap, sim_event_fd, sim_will_sleep, sim_destroy };

/* ---- for the simulation ---- */

struct sim_backend *sim_backend_create(const struct sim_backend_options *options,
	const struct sim_backend_hooks *hooks, struct sim_clock *clock, uint64_t seed)
{
	struct sim_backend *self = calloc(1, sizeof(*self));

	SIM_CHECK(self, "no memory for the backend");
	self->flights = calloc(DEPTH_MAX, sizeof(*self->flights));
	SIM_CHECK(self->flights, "no memory for the backend");
	self->base.ops = options->is_silent ? &sim_silent_ops : &sim_ops;
	self->options = *options;
	if (hooks)
		self->hooks = *hooks;
	self->clock = clock;
	sim_rng_init(&self->rng, seed, 3);
	self->refuse_countdown = self->submit_countdown = self->host_alloc_countdown = -1;
	return self;
}

struct kv_backend *sim_backend_base(struct sim_backend *backend)
{
	return &backend->base;
}

uint64_t sim_backend_due_ns(void *backend)
{
	const struct sim_backend *self = backend;

	if (self->n_flights == 0 || self->is_signalled)
		return UINT64_MAX;
	if (self->is_lost)
		return self->clock->now_ns;
	if (self->options.is_silent && self->n_awaited == 0)
		return UINT64_MAX;
	return self->is_held ? UINT64_MAX : self->flights[self->first].due_ns;
}

void sim_backend_clear(void *backend)
{
	((struct sim_backend *)backend)->is_signalled = true;
}

void sim_backend_hold(struct sim_backend *backend, bool is_held)
{
	backend->is_held = is_held;
	backend->is_signalled = false;
}

void sim_backend_hurry(struct sim_backend *backend)
{
	backend->is_held = false;
	backend->is_hurried = true;
}

void sim_backend_refuse_after(struct sim_backend *backend, int64_t countdown)
{
	backend->refuse_countdown = countdown;
}

void sim_backend_fail_submit_after(struct sim_backend *backend, int64_t countdown, enum kv_status status)
{
	backend->submit_countdown = countdown;
	backend->submit_status = status;
}

void sim_backend_fail_host_alloc_after(struct sim_backend *backend, int64_t countdown)
{
	backend->host_alloc_countdown = countdown;
}

bool sim_backend_has_failed(const struct sim_backend *backend)
{
	return backend->has_failed;
}

bool sim_backend_is_lost(const struct sim_backend *backend)
{
	return backend->is_lost;
}

uint32_t sim_backend_n_in_flight(const struct sim_backend *backend)
{
	return backend->n_flights;
}

uint32_t sim_backend_n_host_allocs(const struct sim_backend *backend)
{
	return backend->n_host_allocs;
}

uint32_t sim_backend_hash_blocks(const struct kv_backend_pool *pool, const uint32_t owners[], uint32_t crc)
{
	const struct kv_pool_spec *spec = pool->pages.spec;
	const uint64_t n_rows = (uint64_t)spec->block_size * spec->kv_heads;

	for (uint32_t i = 0; i < spec->n_blocks[0]; i++) {
		if (owners[i] == 0)
			continue;
		for (uint32_t l = 0; l < spec->n_layers; l++) {
			const uint64_t k_bytes = n_rows * spec->layers[l].k->row_bytes;
			const uint64_t v_bytes = n_rows * spec->layers[l].v->row_bytes;

			crc = kvp_crc32c(crc, pool->pages.layers[l].k + i * k_bytes, k_bytes);
			crc = kvp_crc32c(crc, pool->pages.layers[l].v + i * v_bytes, v_bytes);
		}
	}
	return crc;
}
