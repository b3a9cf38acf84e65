/*
 * Pools at random, as JSON: geometry, formats, and every option that attention and row formats have, most of
 * them as they should be, some not. What is drawn may be refused; whoever draws asks.
 */
#ifndef TESTS_LIB_RANDOM_POOL_H
#define TESTS_LIB_RANDOM_POOL_H

#include <jansson.h>
#include <string.h>

#include "core/checked.h"
#include "core/format.h"
#include "core/preset.h"
#include "tests/lib/kv_test.h"

struct random_pool {
	uint64_t *seed;
	json_t *json;
	uint32_t layers, q_heads, kv_heads, k_dim, v_dim, block_size; /* what the options are drawn for */
	uint32_t spoilt_per_mille;
};

static inline uint32_t random_below(uint64_t *seed, uint32_t n)
{
	return (uint32_t)(kv_test_random(seed) >> 32) % n;
}

/* From -1 to 1. */
static inline double random_unit(uint64_t *seed)
{
	return (double)random_below(seed, 20001) / 10000.0 - 1.0;
}

/* One of three, say. */
static inline bool random_one_of(uint64_t *seed, uint32_t n)
{
	return random_below(seed, n) == 0;
}

static inline void random_set(struct random_pool *pool, const char *member, json_t *value)
{
	static const char *const odd[] = { "null", "-1", "0", "1e39", "1.5", "\"x\"", "[]", "{}", "[[1]]",
		"true", "4294967295", "[1,null]" };

	if (random_below(pool->seed, 1000) < pool->spoilt_per_mille) {
		json_decref(value);
		value = json_loads(odd[random_below(pool->seed, KV_LENGTH(odd))], JSON_DECODE_ANY, NULL);
	}
	json_object_set_new(pool->json, member, value);
}

static inline json_t *random_numbers(uint64_t *seed, uint32_t n, double size)
{
	json_t *numbers = json_array();

	for (uint32_t i = 0; i < n; i++)
		json_array_append_new(numbers, json_real(size * random_unit(seed)));
	return numbers;
}

/* Now and then the largest that there may be. */
static inline double random_or_most(uint64_t *seed, double usual, double most)
{
	return !random_one_of(seed, 30) ? usual : usual < 0 ? -most : most;
}

static inline const char *random_format(uint64_t *seed)
{
	return random_one_of(seed, 3) ? "tq4" : kv_format_at(random_below(seed, kv_format_count()))->name;
}

static inline void random_geometry(struct random_pool *pool)
{
	static const uint32_t dims[] = { 16, 32, 48, 64, 64, 80, 96, 112, 128, 128, 160, 192, 256 };
	static const uint32_t odd_dims[] = { 1, 8, 20, 24, 40, 100, 250, 264 };
	uint64_t *seed = pool->seed;
	uint32_t *both[2] = { &pool->k_dim, &pool->v_dim };

	pool->layers = 1 + random_below(seed, 3);
	pool->kv_heads = 1 + random_below(seed, 3);
	pool->q_heads = pool->kv_heads * (1 + random_below(seed, 16)) + random_one_of(seed, 50);
	pool->block_size = 16u << random_below(seed, 3);
	for (uint32_t i = 0; i < 2; i++)
		*both[i] = random_one_of(seed, 60) ? odd_dims[random_below(seed, KV_LENGTH(odd_dims))]
						   : dims[random_below(seed, KV_LENGTH(dims))];
	if (random_one_of(seed, 2)) {
		pool->v_dim = pool->k_dim;
		random_set(pool, "head_dim", json_integer(pool->k_dim));
	} else {
		random_set(pool, "k_head_dim", json_integer(pool->k_dim));
		random_set(pool, "v_head_dim", json_integer(pool->v_dim));
	}
	json_object_set_new(pool->json, "name", json_string("p"));
	random_set(pool, "layers", json_integer(pool->layers));
	random_set(pool, "q_heads", json_integer(pool->q_heads));
	random_set(pool, "kv_heads", json_integer(pool->kv_heads));
	random_set(pool, "block_size", json_integer(pool->block_size));
	random_set(pool, "blocks", json_integer(1 + random_below(seed, 128 / pool->block_size)));
}

static inline void random_formats(struct random_pool *pool)
{
	static const char *const sides[2] = { "k", "v" };
	uint64_t *seed = pool->seed;

	if (random_one_of(seed, 10)) {
		random_set(pool, "preset",
			json_string(kv_preset_at(random_below(seed, kv_preset_count()))->name));
		return;
	}
	for (uint32_t i = 0; i < 2; i++) {
		json_t *names = json_array();

		for (uint32_t l = 0; l < pool->layers; l++)
			json_array_append_new(names, json_string(random_format(seed)));
		if (random_one_of(seed, 4)) {
			random_set(pool, sides[i], names);
		} else {
			random_set(pool, sides[i], json_incref(json_array_get(names, 0)));
			json_decref(names);
		}
	}
	if (random_one_of(seed, 20))
		random_set(pool, "exact_layers", json_integer(random_below(seed, 3)));
}

/* A value for all layers, or one for each. */
static inline void random_by_layer(struct random_pool *pool, const char *member,
	json_t *(*draw)(const struct random_pool *pool), bool may_be_null)
{
	json_t *values;

	if (random_one_of(pool->seed, 2)) {
		random_set(pool, member, draw(pool));
		return;
	}
	values = json_array();
	for (uint32_t l = 0; l < pool->layers; l++)
		json_array_append_new(
			values, may_be_null && random_one_of(pool->seed, 3) ? json_null() : draw(pool));
	random_set(pool, member, values);
}

static inline json_t *random_window(const struct random_pool *pool)
{
	return json_integer(random_one_of(pool->seed, 3) ? 0 : 1 + random_below(pool->seed, 80));
}

static inline json_t *random_sink_tokens(const struct random_pool *pool)
{
	return json_integer(random_below(pool->seed, 40));
}

static inline json_t *random_softcap(const struct random_pool *pool)
{
	return json_real(random_one_of(pool->seed, 4)
			? 0
			: random_or_most(pool->seed, 2.5 + 2 * random_unit(pool->seed), 1e38));
}

/* About what keeps logits as spread as the default does. */
static inline json_t *random_scale(const struct random_pool *pool)
{
	return json_real((1 + 0.5 * random_unit(pool->seed)) / (4 + pool->k_dim / 16.0));
}

static inline json_t *random_of_heads(const struct random_pool *pool, double size, double most)
{
	json_t *numbers = random_numbers(pool->seed, pool->q_heads, size);

	for (uint32_t h = 0; h < pool->q_heads; h++) {
		const double usual = json_number_value(json_array_get(numbers, h));

		json_array_set_new(numbers, h, json_real(random_or_most(pool->seed, usual, most)));
	}
	return numbers;
}

static inline json_t *random_sinks(const struct random_pool *pool)
{
	return random_of_heads(pool, 4, 1e38);
}

static inline json_t *random_alibi(const struct random_pool *pool)
{
	return random_of_heads(pool, 0.1, 1e28);
}

static inline void random_attention(struct random_pool *pool)
{
	static const struct {
		const char *member;
		json_t *(*draw)(const struct random_pool *pool);
		bool may_be_null;
	} options[] = { { "window", random_window, false }, { "sink_tokens", random_sink_tokens, false },
		{ "softcap", random_softcap, false }, { "scale", random_scale, false },
		{ "sinks", random_sinks, true }, { "alibi", random_alibi, true } };

	for (size_t i = 0; i < KV_LENGTH(options); i++) {
		/* Without a window they are refused, and with them much is. */
		if (strcmp(options[i].member, "sink_tokens") == 0 && !json_object_get(pool->json, "window") &&
			!random_one_of(pool->seed, 30))
			continue;
		if (random_one_of(pool->seed, 2))
			random_by_layer(pool, options[i].member, options[i].draw, options[i].may_be_null);
	}
	if (random_one_of(pool->seed, 2)) {
		const uint32_t n = 1 + random_below(pool->seed, 4);

		random_set(pool, "exact_tokens", json_integer(n * pool->block_size));
		if (random_one_of(pool->seed, 2))
			random_set(pool, "exact_blocks", json_integer(n + random_below(pool->seed, 3)));
	}
}

static inline json_t *random_center(const struct random_pool *pool)
{
	json_t *layers = json_array();

	for (uint32_t l = 0; l < pool->layers; l++) {
		json_t *heads = json_array();

		for (uint32_t h = 0; h < pool->kv_heads; h++)
			json_array_append_new(heads, random_numbers(pool->seed, pool->k_dim, 0.5));
		json_array_append_new(layers, heads);
	}
	return layers;
}

/* Each layer in a group; some other ways to share blocks are wrong. */
static inline json_t *random_groups(const struct random_pool *pool)
{
	json_t *groups = json_array();

	for (uint32_t l = 0; l < pool->layers; l++) {
		const size_t n = json_array_size(groups);

		if (n == 0 || random_one_of(pool->seed, 2))
			json_array_append_new(groups, json_array());
		json_array_append_new(json_array_get(groups, json_array_size(groups) - 1), json_integer(l));
	}
	return groups;
}

/* Options of formats; most pools have no format that takes them. */
static inline void random_rows(struct random_pool *pool)
{
	static const uint32_t group_sizes[] = { 16, 32, 64, 20, 7, 128 };
	uint64_t *seed = pool->seed;

	if (random_one_of(seed, 4))
		random_set(pool, "k_center", random_center(pool));
	if (random_one_of(seed, 8))
		random_set(pool, "rotation", json_string(random_one_of(seed, 2) ? "qr" : "rht"));
	if (random_one_of(seed, 8))
		random_set(pool, "per_layer", json_true());
	if (random_one_of(seed, 12))
		random_set(pool, "norm_correction", json_true());
	if (random_one_of(seed, 8))
		random_set(
			pool, "group", json_integer(group_sizes[random_below(seed, KV_LENGTH(group_sizes))]));
	if (random_one_of(seed, 60))
		random_set(pool, "recipe_scale", json_string("published"));
	if (random_one_of(seed, 4))
		random_set(pool, "groups", random_groups(pool));
}

/* The next pool; spoilt_per_mille of its members get a value from elsewhere. json_decref() it. */
static inline json_t *random_pool_json(uint64_t *seed, uint32_t spoilt_per_mille)
{
	struct random_pool pool = {
		.seed = seed, .json = json_object(), .spoilt_per_mille = spoilt_per_mille
	};

	random_geometry(&pool);
	random_formats(&pool);
	random_attention(&pool);
	random_rows(&pool);
	return pool.json;
}

#endif
