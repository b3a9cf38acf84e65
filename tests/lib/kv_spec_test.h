/* Pools from JSON text, and the files that they name: a file system of one file. */
#ifndef TESTS_LIB_KV_SPEC_TEST_H
#define TESTS_LIB_KV_SPEC_TEST_H

#include <stdio.h>

#include "core/format.h"
#include "core/io.h"
#include "core/memory.h"
#include "core/pool_spec.h"
#include "tests/lib/kv_core_test.h"

#define SMALL "\"name\":\"p\",\"q_heads\":2,\"kv_heads\":2,\"block_size\":16,\"blocks\":4"
#define DIM64 SMALL ",\"head_dim\":64"

static struct {
	const char *path;
	const char *data;
	size_t n_bytes;
} fake_file;

static inline enum kv_status fake_read_all(
	const char *path, uint64_t n_bytes_max, char **data, uint64_t *n_bytes, struct kv_error *err)
{
	if (!fake_file.path || strcmp(path, fake_file.path) != 0)
		return kv_fail(err, KV_IO_ERROR, "%s: no such file", path);
	if (fake_file.n_bytes > n_bytes_max)
		return kv_fail(err, KV_TOO_LARGE, "%s: too large", path);
	*data = kv_strndup(fake_file.data, fake_file.n_bytes);
	*n_bytes = fake_file.n_bytes;
	return *data ? KV_OK : kv_fail(err, KV_NO_MEMORY, "%s", path);
}

static const struct kv_files fake_files = { fake_read_all };

static inline void put_file(const char *path, const char *data, size_t n_bytes)
{
	fake_file.path = path;
	fake_file.data = data;
	fake_file.n_bytes = n_bytes;
}

/* The members of a pool, without the braces. */
static inline json_t *spec_json(const char *members)
{
	static char whole[1 << 16];
	json_error_t error;
	json_t *json;

	ck_assert_int_lt(snprintf(whole, sizeof(whole), "{%s}", members), (int)sizeof(whole));
	json = json_loads(whole, JSON_REJECT_DUPLICATES, &error);
	ck_assert_msg(json != NULL, "%s in %s", error.text, whole);
	return json;
}

static inline enum kv_status create(
	const char *members, const struct kv_files *files, struct kv_pool_spec **spec, struct kv_error *err)
{
	json_t *json = spec_json(members);
	const enum kv_status status = kv_pool_spec_create_with(json, files, spec, err);

	json_decref(json);
	return status;
}

static inline struct kv_pool_spec *make(const char *members)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };

	ck_assert_msg(create(members, &fake_files, &spec, &err) == KV_OK, "%s: %s", members, err.msg);
	return spec;
}

#define LIST_16_0  "[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]"
#define LIST_16_16 "[16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31]"
/* A recipe for two KV heads of 64 channels on one layer. */
#define RECIPE(layer, k0, k1, v0, v1)                                                                     \
	"{\"version\":1,\"recipe\":\"turboquant25\",\"head_size\":64,\"layers\":{\"" layer                \
	"\":{\"key_high_precision_indices\":[" k0 "," k1 "],\"value_high_precision_indices\":[" v0 "," v1 \
	"]}}}"
#define CODEBOOK_16_1                                                                                      \
	"{\"d\":16,\"bits\":1,\"centroids\":[-0.25,0.25],\"boundaries\":[-1,0,1],\"mse_per_coord\":0.025," \
	"\"mse_total\":0.4}"

#endif
