/*
 * Options under test: a command line as a list of words, a fake file system of one file, and refusals that
 * name both what was given and what was expected.
 */
#ifndef TESTS_LIB_KV_TEST_OPTIONS_H
#define TESTS_LIB_KV_TEST_OPTIONS_H

#include <check.h>
#include <string.h>

#include "core/memory.h"
#include "server/options_internal.h"
#include "tests/lib/kv_test.h"

#define SMOL                                                                                                 \
	"{\"name\":\"smol\",\"layers\":30,\"q_heads\":9,\"kv_heads\":3,\"head_dim\":64,\"k\":\"tq4\",\"v\":" \
	"\"tq4\","                                                                                           \
	"\"block_size\":16,\"blocks\":64}"
#define SMOL_SHORT "name=smol,layers=30,q_heads=9,kv_heads=3,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=64"

static struct kv_error error;
static const char *file_text; /* what the fake file system holds; NULL: no such file */
static const char *file_path; /* what was asked for last */

static inline enum kv_status fake_read_all(
	const char *path, uint64_t n_bytes_max, char **data, uint64_t *n_bytes, struct kv_error *err)
{
	file_path = path;
	if (!file_text)
		return kv_fail(err, KV_IO_ERROR, "%s: no such file", path);
	if (strlen(file_text) > n_bytes_max)
		return kv_fail(err, KV_IO_ERROR, "%s: too large", path);
	*n_bytes = strlen(file_text);
	*data = kv_strndup(file_text, strlen(file_text));
	return *data ? KV_OK : KV_NO_MEMORY;
}

static const struct kv_files fake_files = { fake_read_all };

/* Runs the command line "tqkvd" + args (NULL-terminated). */
static inline enum srv_options_outcome parse(struct srv_options *options, const char *const args[])
{
	char *argv[64] = { (char *)(uintptr_t) "tqkvd" };
	int argc = 1;

	for (size_t i = 0; args[i]; i++)
		argv[argc++] = (char *)(uintptr_t)args[i];
	memset(&error, 0, sizeof(error));
	return srv_options_parse(options, argc, argv, &fake_files, &error);
}

#define PARSE(options, ...) parse(options, (const char *const[]){ __VA_ARGS__, NULL })

static inline void assert_has(const char *text, const char *part)
{
	ck_assert_msg(strstr(text, part) != NULL, "'%s' does not hold '%s'", text, part);
}

/* The command line is refused, and the message holds all parts. */
#define ASSERT_REFUSED(part_1, part_2, ...)                                        \
	do {                                                                       \
		struct srv_options refused;                                        \
		ck_assert_int_eq(PARSE(&refused, __VA_ARGS__), SRV_OPTIONS_USAGE); \
		ck_assert_int_eq(error.status, KV_BAD_CONFIG);                     \
		assert_has(error.msg, part_1);                                     \
		assert_has(error.msg, part_2);                                     \
	} while (0)

#endif
