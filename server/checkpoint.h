/*
 * Checkpoint: sessions into a file and back, beside everything else that the daemon does.
 *
 * One at a time. Each step is bounded: what fits into one chunk of memory is exported (or imported) by the
 * next batch of the pool's lane, and written (or read) by the io while batches of clients go on. A snapshot
 * takes in each sequence at one moment; sequences that begin after the snapshot did are not in it. A restore
 * fills a stage that nobody sees, and everything in it appears at once; whatever goes wrong before that
 * leaves the daemon as it was.
 *
 * Loop thread only.
 */
#ifndef SERVER_CHECKPOINT_H
#define SERVER_CHECKPOINT_H

#include "core/error.h"
#include "server/control.h"

struct srv_server;
struct srv_checkpoint;

/* What draining writes and the next start reads, with snapshot_on_drain. */
#define SRV_CHECKPOINT_DRAIN_NAME "drain"

KV_MUST_CHECK enum kv_status srv_checkpoint_create(
	struct srv_server *server, struct srv_checkpoint **out, struct kv_error *err);
/* NULL allowed; the backend and the io are done with its memory. */
void srv_checkpoint_destroy(struct srv_checkpoint *checkpoint);

/*
 * Begins; what comes of it is in the status. session: handle, 0 = all. BAD_ARG (name), BAD_STATE (no
 * snapshot_dir), BUSY_RETRY (one is running), NOT_FOUND (session), DRAINING (restoring), NO_MEMORY.
 */
KV_MUST_CHECK enum kv_status srv_checkpoint_save(
	struct srv_checkpoint *checkpoint, const char *name, uint64_t session, struct kv_error *err);
/* is_optional: no such file is no failure in the log; the status is NOT_FOUND, and the view says is_absent.
 */
KV_MUST_CHECK enum kv_status srv_checkpoint_load(
	struct srv_checkpoint *checkpoint, const char *name, bool is_optional, struct kv_error *err);

/* A plain name, so that it names a file in the directory and nothing else. Any thread. */
bool srv_checkpoint_is_name(const char *name);
bool srv_checkpoint_is_running(const struct srv_checkpoint *checkpoint);
void srv_checkpoint_status(const struct srv_checkpoint *checkpoint, struct srv_checkpoint_view *out);
/* Once a turn, before batches are sealed. */
void srv_checkpoint_turn(struct srv_checkpoint *checkpoint);
/* True: the next turn has something to do that no event announces. */
bool srv_checkpoint_has_work(const struct srv_checkpoint *checkpoint);
/* The device is gone: what runs fails. */
void srv_checkpoint_lose(struct srv_checkpoint *checkpoint);

#endif
