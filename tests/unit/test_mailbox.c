/* Mailbox: requests from any thread to the loop thread, in order, bounded, none lost and none twice. */
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/mailbox.h"
#include "tests/lib/kv_test.h"

#define N_THREADS 4
#define N_EACH    2000

static struct srv_mailbox mailbox;

static void setup(void)
{
	struct kv_error error;

	ck_assert_int_eq(srv_mailbox_init(&mailbox, &error), KV_OK);
}

static void teardown(void)
{
	srv_mailbox_finish(&mailbox);
	ck_assert_int_eq(mailbox.event_fd, -1);
	srv_mailbox_finish(&mailbox);
}

/* The real struct is 100 KiB; the mailbox only touches `next`. */
static struct srv_control *make(uint64_t id)
{
	struct srv_control *control = kv_alloc(1, sizeof(*control));

	ck_assert_ptr_nonnull(control);
	control->id = id;
	return control;
}

static bool is_readable(void)
{
	struct pollfd poll_fd = { .fd = mailbox.event_fd, .events = POLLIN };

	return poll(&poll_fd, 1, 0) == 1;
}

/* Requests come out in the order in which they went in, and the descriptor says that there are some. */
START_TEST(test_mailbox_keeps_order)
{
	eventfd_t n;

	ck_assert(srv_mailbox_is_empty(&mailbox));
	ck_assert(!is_readable());
	ck_assert_ptr_null(srv_mailbox_take(&mailbox));
	for (uint64_t i = 0; i < 3; i++)
		ck_assert(srv_mailbox_post(&mailbox, make(i)));
	ck_assert(!srv_mailbox_is_empty(&mailbox));
	ck_assert(is_readable());
	ck_assert_int_eq(eventfd_read(mailbox.event_fd, &n), 0);
	ck_assert_uint_eq(n, 3);
	for (uint64_t i = 0; i < 3; i++) {
		struct srv_control *control = srv_mailbox_take(&mailbox);

		ck_assert_ptr_nonnull(control);
		ck_assert_uint_eq(control->id, i);
		ck_assert_ptr_null(control->next);
		kv_free(control);
	}
	ck_assert(srv_mailbox_is_empty(&mailbox));
	ck_assert_ptr_null(srv_mailbox_take(&mailbox));
	/* Empty and used again. */
	ck_assert(srv_mailbox_post(&mailbox, make(7)));
	struct srv_control *control = srv_mailbox_take(&mailbox);

	ck_assert_uint_eq(control->id, 7);
	kv_free(control);
}
END_TEST

/* The 257th waiting request is refused and stays the caller's; room that was made can be used. */
START_TEST(test_mailbox_is_bounded)
{
	struct srv_control *extra = make(1000);

	for (uint64_t i = 0; i < SRV_MAILBOX_WAITING_MAX; i++)
		ck_assert(srv_mailbox_post(&mailbox, make(i)));
	ck_assert(!srv_mailbox_post(&mailbox, extra));
	struct srv_control *control = srv_mailbox_take(&mailbox);

	ck_assert_uint_eq(control->id, 0);
	kv_free(control);
	ck_assert(srv_mailbox_post(&mailbox, extra));
	uint64_t last = 0;

	while ((control = srv_mailbox_take(&mailbox)) != NULL) {
		last = control->id;
		kv_free(control);
	}
	ck_assert_uint_eq(last, 1000);
}
END_TEST

/* After close() nothing goes in, and what was in comes out. */
START_TEST(test_mailbox_close_keeps_what_was_posted)
{
	struct srv_control *late = make(2);

	ck_assert(srv_mailbox_post(&mailbox, make(1)));
	srv_mailbox_close(&mailbox);
	ck_assert(!srv_mailbox_post(&mailbox, late));
	struct srv_control *control = srv_mailbox_take(&mailbox);

	ck_assert_uint_eq(control->id, 1);
	kv_free(control);
	ck_assert_ptr_null(srv_mailbox_take(&mailbox));
	srv_mailbox_close(&mailbox);
	kv_free(late);
}
END_TEST

struct poster {
	pthread_t thread;
	uint64_t idx;
};

static void *post_many(void *cls)
{
	struct poster *poster = cls;

	for (uint64_t i = 0; i < N_EACH;) {
		struct srv_control *control = kv_alloc(1, sizeof(*control));

		control->id = poster->idx * N_EACH + i;
		if (srv_mailbox_post(&mailbox, control)) {
			i++;
		} else {
			kv_free(control);
			usleep(50); /* full: the loop takes some */
		}
	}
	return NULL;
}

/* Four threads post, one takes: all arrive once, each thread's in its order. */
START_TEST(test_mailbox_many_threads)
{
	struct poster posters[N_THREADS];
	uint64_t next[N_THREADS] = { 0 };
	uint64_t n_taken = 0;

	for (uint64_t i = 0; i < N_THREADS; i++) {
		posters[i].idx = i;
		ck_assert_int_eq(pthread_create(&posters[i].thread, NULL, post_many, &posters[i]), 0);
	}
	while (n_taken < N_THREADS * N_EACH) {
		struct pollfd poll_fd = { .fd = mailbox.event_fd, .events = POLLIN };
		eventfd_t n;
		struct srv_control *control;

		ck_assert_int_eq(poll(&poll_fd, 1, 10000), 1);
		ck_assert_int_eq(eventfd_read(mailbox.event_fd, &n), 0);
		while ((control = srv_mailbox_take(&mailbox)) != NULL) {
			const uint64_t thread_idx = control->id / N_EACH;

			ck_assert_uint_lt(thread_idx, N_THREADS);
			ck_assert_uint_eq(control->id % N_EACH, next[thread_idx]);
			next[thread_idx]++;
			n_taken++;
			kv_free(control);
		}
	}
	for (uint64_t i = 0; i < N_THREADS; i++) {
		pthread_join(posters[i].thread, NULL);
		ck_assert_uint_eq(next[i], N_EACH);
	}
	ck_assert(srv_mailbox_is_empty(&mailbox));
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("mailbox");
	TCase *tcase = tcase_create("mailbox");

	tcase_add_checked_fixture(tcase, setup, teardown);
	tcase_add_test(tcase, test_mailbox_keeps_order);
	tcase_add_test(tcase, test_mailbox_is_bounded);
	tcase_add_test(tcase, test_mailbox_close_keeps_what_was_posted);
	tcase_add_test(tcase, test_mailbox_many_threads);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
