/*
 * Preloaded into unit tests that tests/meson.build does not name under unit_threads: one that starts a thread
 * all the same ends here, so that the thread sanitizer runs whatever can race.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *data)
{
	(void)thread, (void)attributes, (void)run, (void)data;
	fputs("a thread is started by a test that is not in unit_threads (tests/meson.build)\n", stderr);
	abort();
}
