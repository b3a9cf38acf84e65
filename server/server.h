/*
 * The server: everything between the io, the domain and the backend, as one struct without globals. One
 * thread calls it; the simulation calls the same functions with a fake io, clock, random source and backend.
 */
#ifndef SERVER_SERVER_H
#define SERVER_SERVER_H

#include <stdbool.h>
#include <stdint.h>

#include "core/backend.h"
#include "core/clock.h"
#include "core/domain.h"
#include "core/io.h"
#include "core/plan.h"
#include "server/http.h"
#include "server/mailbox.h"
#include "server/metrics.h"
#include "server/options.h"

struct srv_server;

/* What the server runs on. All outlive it except backend, which it destroys. mailbox, pulse and settings may
 * be NULL.
 */
struct srv_seams {
	struct kv_io *io;
	struct kv_clock *clock;
	struct kv_random *random;
	struct kv_backend *backend;
	struct srv_mailbox *mailbox;
	struct srv_pulse *pulse;
	struct srv_settings_box *settings; /* (optional) tokens, and options that a reload replaces */
	uint64_t arena_bytes;
	const char *backend_reason, *io_reason;
};

/* Takes all memory, makes the configured pools, does not listen yet. On failure the backend stays the
 * caller's. */
KV_MUST_CHECK enum kv_status srv_server_create(const struct srv_options *options,
	const struct srv_seams *seams, struct srv_server **out, struct kv_error *err);
void srv_server_destroy(struct srv_server *server);
/* Listens on all addresses of the options. */
KV_MUST_CHECK enum kv_status srv_server_listen(struct srv_server *server, struct kv_error *err);
/* One turn: waits at most timeout_ns for events (0 = do not wait), handles them, seals and submits. */
void srv_server_turn(struct srv_server *server, int64_t timeout_ns);
/* How long the next turn may wait: time to the next deadline; 0 when work is left over; negative: for ever.
 */
int64_t srv_server_wait_ns(struct srv_server *server);
/*
 * What the options say about snapshots at start, in turns of its own, before anybody can connect: restores
 * `restore`, which must work; or with snapshot_on_drain what the last drain wrote, if anything, where a
 * failure only leaves the daemon empty. Files stay as they are.
 */
KV_MUST_CHECK enum kv_status srv_server_restore(struct srv_server *server, struct kv_error *err);
/*
 * Once nothing can keep the daemon from serving: what the last drain wrote is removed when it was restored,
 * and otherwise gets a name that no drain writes to. IO_ERROR: that did not work, and the next drain would
 * replace it.
 */
KV_MUST_CHECK enum kv_status srv_server_settle_drained(struct srv_server *server, struct kv_error *err);
/*
 * No new connections and sessions. Those that are there go on until nobody has one any more, or for
 * drain_timeout_ms; then what is in flight is answered, the snapshot is written where one is asked for, and
 * is_done() is true.
 */
void srv_server_drain(struct srv_server *server);
bool srv_server_is_done(const struct srv_server *server);
bool srv_server_is_draining(const struct srv_server *server);
/* True while a batch has not come back for so long that it is not expected to: let a supervisor act. */
bool srv_server_is_stuck(const struct srv_server *server);
/* 0 drained, 4 device lost, 1 drained without the snapshot that was asked for. Valid once done. */
int srv_server_exit_code(const struct srv_server *server);
/* Answers control requests that wait for something the loop will not bring any more. Before srv_http_stop().
 */
void srv_server_answer_waiting(struct srv_server *server);
/* What the start-up lines say. */
void srv_server_describe(
	struct srv_server *server, struct kv_backend_info *device, struct srv_gauges *gauges);
/* Text of listener idx ("unix:/run/...", "tcp:127.0.0.1:7870"), NULL behind the last. */
const char *srv_server_listener(const struct srv_server *server, uint32_t idx);

/* For tests and the simulation. */
struct kv_domain *srv_server_domain(struct srv_server *server);
const struct srv_counters *srv_server_counters(const struct srv_server *server);
void srv_server_gauges(struct srv_server *server, struct srv_gauges *out);
/* The whole audit: domain, batches, slots, queues. */
KV_MUST_CHECK enum kv_status srv_server_audit(struct srv_server *server, struct kv_error *err);
/* Answers one control request at once (what the mailbox does on the loop thread). */
void srv_server_control(struct srv_server *server, struct srv_control *control);

#endif
