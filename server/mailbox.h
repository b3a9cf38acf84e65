/*
 * Mailbox: control thread to loop thread, one lock-protected list and one eventfd. post() from any thread;
 * take() from the loop thread. After close() posting fails, and what was posted is still taken.
 */
#ifndef SERVER_MAILBOX_H
#define SERVER_MAILBOX_H

#include <pthread.h>
#include <stdbool.h>

#include "core/error.h"
#include "server/control.h"

struct srv_mailbox {
	pthread_mutex_t lock;
	struct srv_control *first, *last;
	unsigned n_waiting;
	bool is_closed;
	int event_fd;
};
/* Requests that may wait at a time; above: post() fails and the route answers 503. */
#define SRV_MAILBOX_WAITING_MAX 256u

KV_MUST_CHECK enum kv_status srv_mailbox_init(struct srv_mailbox *mailbox, struct kv_error *err);
void srv_mailbox_finish(struct srv_mailbox *mailbox);
/* False: closed or full; the request stays the caller's. */
KV_MUST_CHECK bool srv_mailbox_post(struct srv_mailbox *mailbox, struct srv_control *control);
struct srv_control *srv_mailbox_take(struct srv_mailbox *mailbox);
bool srv_mailbox_is_empty(struct srv_mailbox *mailbox);
void srv_mailbox_close(struct srv_mailbox *mailbox);

#endif
