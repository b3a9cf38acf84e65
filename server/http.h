/*
 * Control thread: libmicrohttpd, JSON and text over HTTP. Owns no session and no pool; everything it tells
 * comes as a snapshot through the mailbox.
 * The routes are listed in http_routes.c and described by openapi.json.
 */
#ifndef SERVER_HTTP_H
#define SERVER_HTTP_H

#include <stdatomic.h>
#include <stdint.h>

#include "core/clock.h"
#include "core/error.h"
#include "server/mailbox.h"
#include "server/options.h"
#include "server/settings.h"

struct srv_http;

/* What /livez reads: the loop stores the time of every turn here. */
struct srv_pulse {
	atomic_uint_fast64_t turn_ns; /* kv_clock_now_ns at the last turn */
};

/* What the control thread works with. All outlive it. */
struct srv_http_seams {
	struct srv_mailbox *mailbox;
	struct srv_pulse *pulse;
	struct kv_clock *clock;
	struct srv_settings_box *settings; /* (optional) tokens, and options that a reload replaces */
};

/*
 * Starts the threads; `bound` gets "HOST:PORT" with the real port, or nothing where the options say "off" and
 * only metrics are served.
 */
KV_MUST_CHECK enum kv_status srv_http_start(const struct srv_options *options,
	const struct srv_http_seams *seams, struct srv_http **out, char *bound, uint32_t bound_bytes_max,
	struct kv_error *err);
/* Answers what is in flight with 503 and stops the thread. The mailbox must be closed and drained first. NULL
 * allowed. */
void srv_http_stop(struct srv_http *http);

#endif
