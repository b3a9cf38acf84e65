/*
 * A singly linked list of requests under one mutex; the eventfd only wakes the loop, the list is the truth.
 * The fd is written after the lock is released: the loop that wakes up never finds the lock held by the one
 * who woke it.
 */
#include "server/mailbox.h"

#include <errno.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum kv_status srv_mailbox_init(struct srv_mailbox *mailbox, struct kv_error *err)
{
	memset(mailbox, 0, sizeof(*mailbox));
	mailbox->event_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (mailbox->event_fd < 0)
		return kv_fail(err, KV_IO_ERROR, "mailbox: eventfd: %s", strerror(errno));
	const int error = pthread_mutex_init(&mailbox->lock, NULL);

	if (error != 0) {
		close(mailbox->event_fd);
		mailbox->event_fd = -1;
		return kv_fail(err, KV_NO_MEMORY, "mailbox: mutex: %s", strerror(error));
	}
	return KV_OK;
}

void srv_mailbox_finish(struct srv_mailbox *mailbox)
{
	if (mailbox->event_fd < 0)
		return;
	close(mailbox->event_fd);
	mailbox->event_fd = -1;
	pthread_mutex_destroy(&mailbox->lock);
}

bool srv_mailbox_post(struct srv_mailbox *mailbox, struct srv_control *control)
{
	const uint64_t one = 1;

	pthread_mutex_lock(&mailbox->lock);
	const bool is_taken_in = !mailbox->is_closed && mailbox->n_waiting < SRV_MAILBOX_WAITING_MAX;

	if (is_taken_in) {
		control->next = NULL;
		if (mailbox->last)
			mailbox->last->next = control;
		else
			mailbox->first = control;
		mailbox->last = control;
		mailbox->n_waiting++;
	}
	pthread_mutex_unlock(&mailbox->lock);
	if (is_taken_in) {
		const ssize_t n = write(mailbox->event_fd, &one, sizeof(one));

		/* The counter cannot overflow with 256 waiting requests. */
		KV_ASSERT(n == (ssize_t)sizeof(one));
	}
	return is_taken_in;
}

struct srv_control *srv_mailbox_take(struct srv_mailbox *mailbox)
{
	pthread_mutex_lock(&mailbox->lock);
	struct srv_control *control = mailbox->first;

	if (control) {
		mailbox->first = control->next;
		if (!mailbox->first)
			mailbox->last = NULL;
		mailbox->n_waiting--;
		control->next = NULL;
	}
	pthread_mutex_unlock(&mailbox->lock);
	return control;
}

bool srv_mailbox_is_empty(struct srv_mailbox *mailbox)
{
	pthread_mutex_lock(&mailbox->lock);
	const bool is_empty = mailbox->first == NULL;

	pthread_mutex_unlock(&mailbox->lock);
	return is_empty;
}

void srv_mailbox_close(struct srv_mailbox *mailbox)
{
	pthread_mutex_lock(&mailbox->lock);
	mailbox->is_closed = true;
	pthread_mutex_unlock(&mailbox->lock);
}
