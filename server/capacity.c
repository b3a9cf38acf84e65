#include "server/capacity.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "core/checked.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "server/models.h"

#define PROBE_BYTES (64ull << 20) /* above the caches of common machines */

static enum kv_status read_u64(
	const json_t *json, const char *name, uint64_t min, uint64_t max, uint64_t *out, struct kv_error *err)
{
	const json_t *value = json_object_get(json, name);

	if (!value)
		return KV_OK;
	if (!json_is_integer(value) || json_integer_value(value) < (json_int_t)min ||
		(uint64_t)json_integer_value(value) > max)
		return kv_fail(err, KV_BAD_CONFIG, "%s: expected a whole number from %llu to %llu", name,
			(unsigned long long)min, (unsigned long long)max);
	*out = (uint64_t)json_integer_value(value);
	return KV_OK;
}

static enum kv_status check_names(const json_t *json, struct kv_error *err)
{
	static const char *const known[] = { "model", "pool", "context_tokens", "sessions", "memory_bytes",
		"link_bytes_per_s", "device_bytes_per_s", "row_dtype" };
	const char *name;
	json_t *value;

	json_object_foreach ((json_t *)(uintptr_t)json, name, value) {
		bool is_known = false;

		for (size_t i = 0; i < KV_LENGTH(known); i++)
			is_known = is_known || strcmp(name, known[i]) == 0;
		if (!is_known)
			return kv_fail(err, KV_BAD_CONFIG,
				"%.40s: there is no such member; expected model, pool, context_tokens, "
				"sessions, memory_bytes, link_bytes_per_s, device_bytes_per_s, row_dtype",
				name);
	}
	return KV_OK;
}

/* Bytes of a number on the wire. */
static enum kv_status read_dtype(const json_t *json, uint64_t *n_bytes, struct kv_error *err)
{
	const json_t *value = json_object_get(json, "row_dtype");
	const char *name = json_string_value(value);

	*n_bytes = 2;
	if (!value || (name && (strcmp(name, "bf16") == 0 || strcmp(name, "f16") == 0)))
		return KV_OK;
	if (!name || strcmp(name, "f32") != 0)
		return kv_fail(err, KV_BAD_CONFIG, "row_dtype: expected bf16, f16 or f32");
	*n_bytes = 4;
	return KV_OK;
}

/* The geometry of a model by name, where the pool does not say it itself. */
static enum kv_status add_model(const json_t *json, json_t *pool, struct kv_error *err)
{
	const json_t *value = json_object_get(json, "model");
	const char *name = json_string_value(value);
	const struct srv_model *model = name ? srv_model_find(name) : NULL;
	int failed = 0;

	if (!value)
		return KV_OK;
	if (!model)
		return kv_fail(err, KV_BAD_CONFIG,
			"model: '%.40s' is not known by that name; 'tqkvctl plan --list' has the names, or "
			"give "
			"layers, q_heads, kv_heads and head_dim in pool",
			name ? name : "");
	const struct {
		const char *name;
		uint32_t number;
	} members[] = {
		{ "layers", model->n_layers },
		{ "q_heads", model->q_heads },
		{ "kv_heads", model->kv_heads },
		{ "head_dim", model->head_dim },
	};

	for (size_t i = 0; i < KV_LENGTH(members); i++)
		if (!json_object_get(pool, members[i].name))
			failed |= json_object_set_new(pool, members[i].name, json_integer(members[i].number));
	return failed ? kv_fail(err, KV_NO_MEMORY, "no memory") : KV_OK;
}

/* Rows as the pool's own rules make them: a pool of one block, which is thrown away. */
static enum kv_status read_pool(
	const json_t *json, uint64_t number_bytes, struct srv_capacity_ask *ask, struct kv_error *err)
{
	const json_t *members = json_object_get(json, "pool");
	json_t *pool = json_is_object(members) ? json_copy((json_t *)(uintptr_t)members) : NULL;
	struct kv_pool_spec *spec = NULL;

	if (!pool)
		return kv_fail(
			err, KV_BAD_CONFIG, "pool: expected an object (layers, q_heads, kv_heads, ...)");
	enum kv_status status = add_model(json, pool, err);

	if (status != KV_OK) {
		json_decref(pool);
		return status;
	}
	int failed = json_object_set_new(pool, "name", json_string("plan"));

	failed |= json_object_set_new(pool, "blocks", json_integer(1));
	if (!json_object_get(pool, "block_size"))
		failed |= json_object_set_new(pool, "block_size", json_integer(16));
	(void)json_object_del(
		pool, "tokens_max"); /* a bound of sequences; one block holds no such sequence */
	status = failed ? kv_fail(err, KV_NO_MEMORY, "no memory") : kv_pool_spec_create(pool, &spec, err);

	json_decref(pool);
	if (status != KV_OK)
		return status;
	const uint64_t n_rows = (uint64_t)spec->n_layers * spec->kv_heads;
	const uint64_t n_numbers = n_rows * (spec->k_head_dim + spec->v_head_dim);

	ask->token_bytes = 0;
	for (uint32_t g = 0; g < spec->n_groups; g++)
		ask->token_bytes += spec->token_bytes[g];
	ask->token_dense_bytes = 2 * n_numbers;
	ask->token_wire_bytes = number_bytes * n_numbers;
	ask->exact_tokens = spec->exact_tokens;
	ask->ring_token_bytes = spec->exact_tokens > 0 ? spec->token_bytes[spec->n_groups] : 0;
	ask->block_size = spec->block_size;
	ask->n_layers = spec->n_layers;
	snprintf(ask->k_format, sizeof(ask->k_format), "%s", kv_pool_spec_format_name(spec, false));
	snprintf(ask->v_format, sizeof(ask->v_format), "%s", kv_pool_spec_format_name(spec, true));
	kv_pool_spec_destroy(spec);
	return KV_OK;
}

enum kv_status srv_capacity_read(const json_t *json, struct srv_capacity_ask *ask, struct kv_error *err)
{
	struct srv_capacity_ask made = { .link_bytes_per_s = SRV_CAPACITY_LINK_BYTES_PER_S };
	uint64_t context_tokens = 0, n_sessions = 1, number_bytes = 2;
	enum kv_status status = check_names(json, err);

	if (status == KV_OK && !json_object_get(json, "context_tokens"))
		status = kv_fail(err, KV_BAD_CONFIG, "context_tokens is missing");
	if (status == KV_OK)
		status = read_u64(json, "context_tokens", 1, UINT32_MAX, &context_tokens, err);
	if (status == KV_OK)
		status = read_u64(json, "sessions", 1, 1000000, &n_sessions, err);
	if (status == KV_OK)
		status = read_u64(json, "memory_bytes", 1, 1ull << 50, &made.memory_bytes, err);
	if (status == KV_OK)
		status = read_u64(json, "link_bytes_per_s", 1, 1ull << 50, &made.link_bytes_per_s, err);
	if (status == KV_OK)
		status = read_u64(json, "device_bytes_per_s", 1, 1ull << 50, &made.device_bytes_per_s, err);
	if (status == KV_OK)
		status = read_dtype(json, &number_bytes, err);
	if (status == KV_OK)
		status = read_pool(json, number_bytes, &made, err);
	if (status != KV_OK)
		return status;
	made.context_tokens = (uint32_t)context_tokens;
	made.n_sessions = (uint32_t)n_sessions;
	*ask = made;
	return KV_OK;
}

/* Whole microseconds, rounded up; a time beyond 64 bits is UINT64_MAX. */
static uint64_t time_us(double n_bytes, uint64_t bytes_per_s)
{
	const double us = ceil(1e6 * n_bytes / (double)bytes_per_s);

	return us < 0x1p63 ? (uint64_t)us : UINT64_MAX;
}

enum kv_status srv_capacity_work_out(const struct srv_capacity_ask *ask, uint64_t arena_bytes,
	uint64_t device_bytes_per_s, struct srv_capacity *out, struct kv_error *err)
{
	struct srv_capacity made = {
		.memory_bytes = ask->memory_bytes ? ask->memory_bytes : arena_bytes,
		.device_bytes_per_s = ask->device_bytes_per_s ? ask->device_bytes_per_s : device_bytes_per_s,
		.context_blocks = ((uint64_t)ask->context_tokens + ask->block_size - 1) / ask->block_size,
	};
	const uint64_t n_ring = ask->exact_tokens / ask->block_size;
	const uint64_t ring_tokens =
		(n_ring < made.context_blocks ? n_ring : made.context_blocks) * ask->block_size;
	uint64_t all_tokens;

	if (!kv_mul_u64(ask->block_size, ask->token_bytes, &made.block_bytes) ||
		!kv_mul_u64(ring_tokens, ask->ring_token_bytes, &made.ring_bytes) ||
		!kv_mul_u64(made.context_blocks, made.block_bytes, &made.context_bytes) ||
		!kv_add_u64(made.context_bytes, made.ring_bytes, &made.context_bytes) ||
		!kv_mul_u64(made.context_bytes, ask->n_sessions, &made.asked_bytes) ||
		!kv_mul_u64(ask->context_tokens, ask->n_sessions, &all_tokens) ||
		!kv_mul_u64(all_tokens, ask->token_bytes, &made.read_bytes))
		return kv_fail(err, KV_BAD_ARG, "so many bytes cannot be counted in 64 bits");
	/* Less than asked_bytes, which has been counted. */
	const uint64_t rings_bytes = made.ring_bytes * ask->n_sessions;

	if (rings_bytes < made.memory_bytes)
		made.n_blocks = (made.memory_bytes - rings_bytes) / made.block_bytes;
	made.n_tokens = made.n_blocks * ask->block_size;
	made.n_sessions = made.memory_bytes / made.context_bytes;
	made.does_fit = made.n_sessions >= ask->n_sessions;
	if (made.device_bytes_per_s > 0) {
		made.floor_us = time_us((double)made.read_bytes, made.device_bytes_per_s);
		made.tokens_per_s =
			ask->n_sessions * (double)made.device_bytes_per_s / (double)made.read_bytes;
	}
	const double wire_bytes = (double)ask->context_tokens * (double)ask->token_wire_bytes;

	made.context_us = time_us(wire_bytes, ask->link_bytes_per_s);
	made.all_us = time_us(wire_bytes * ask->n_sessions, ask->link_bytes_per_s);
	*out = made;
	return KV_OK;
}

uint64_t srv_capacity_device_rate(const char *backend, const char *device)
{
	/* Reads of 16 bytes, measured: gpu/KERNELS.md. */
	if (strstr(device, "H200"))
		return 4630000000000ull;
	return strcmp(backend, "cpu") == 0 || strcmp(backend, "cpu-scalar") == 0 ? srv_capacity_memory_rate()
										 : 0;
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

uint64_t srv_capacity_memory_rate(void)
{
	static atomic_uint_fast64_t known;
	uint64_t sum = 0, rate = atomic_load(&known);

	if (rate > 0)
		return rate;
	uint64_t *words = kv_pages_alloc(PROBE_BYTES);

	if (!words)
		return 0;
	memset(words, 1, PROBE_BYTES);
	const uint64_t begun_ns = now_ns();

	for (uint64_t i = 0; i < PROBE_BYTES / sizeof(*words); i++)
		sum += words[i];
	const uint64_t took_ns = now_ns() - begun_ns;

	/* The sum is used, or the loop would be gone: 64 MiB of ones never add up to 0. */
	rate = sum != 0 ? (uint64_t)((double)PROBE_BYTES * 1e9 / (double)(took_ns > 0 ? took_ns : 1)) : 0;
	kv_pages_free(words, PROBE_BYTES);
	atomic_store(&known, rate);
	return rate;
}
