/*
 * Test main: runs one check suite, prints its summary, returns the exit status that Meson expects
 * (0 passed, 1 failed, 77 skipped by the suite itself before any test ran).
 */
#ifndef TESTS_LIB_KV_TEST_H
#define TESTS_LIB_KV_TEST_H

#include <check.h>
#include <stdint.h>
#include <stdlib.h>

static inline int kv_test_run(Suite *suite, enum fork_status fork_status)
{
	SRunner *runner = srunner_create(suite);

	srunner_set_fork_status(runner, fork_status);
	srunner_run_all(runner, CK_NORMAL);
	const int n_failed = srunner_ntests_failed(runner);

	srunner_free(runner);
	return n_failed == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* xorshift64*: test inputs only; print the seed. */
static inline uint64_t kv_test_random(uint64_t *state)
{
	*state ^= *state >> 12;
	*state ^= *state << 25;
	*state ^= *state >> 27;
	return *state * 0x2545F4914F6CDD1DULL;
}

#endif
