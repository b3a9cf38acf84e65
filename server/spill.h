/*
 * Spill: moves rows of sequences between the pools and the tiers, one sequence at a time, beside everything
 * else: a chunk of blocks per batch of the pool's lane, a page per file operation. The host tier is tried
 * first, then the file tier. Loop thread only.
 */
#ifndef SERVER_SPILL_H
#define SERVER_SPILL_H

#include "core/domain.h"
#include "server/control.h"

struct srv_server;
struct srv_spill;

KV_MUST_CHECK enum kv_status srv_spill_create(
	struct srv_server *server, struct srv_spill **out, struct kv_error *err);
/* NULL allowed; the backend and the io are done with its memory, or gone. */
void srv_spill_destroy(struct srv_spill *spill);

/*
 * The sequence begins to move out. OK (also when it is out already), BAD_STATE (there is no tier), POOL_FULL
 * (no tier has so many pages free), BUSY_RETRY (it is used, or being cut), CORRUPT (its rows are lost).
 */
KV_MUST_CHECK enum kv_status srv_spill_out(struct srv_spill *spill, struct kv_sequence *sequence);
/* It begins to come back. OK (also when it is back), POOL_FULL, BUSY_RETRY, CORRUPT. */
KV_MUST_CHECK enum kv_status srv_spill_in(struct srv_spill *spill, struct kv_sequence *sequence);

/* The same for SPILL and PREFETCH; NOT_FOUND. */
KV_MUST_CHECK enum kv_status srv_spill_item(
	struct srv_spill *spill, struct kv_session *session, uint64_t sequence_id, bool is_out);
/* Somebody was refused because the sequence is not there: it begins to come back if there is room. */
void srv_spill_touch(struct srv_spill *spill, struct kv_session *session, uint64_t sequence_id);
/* The state that TELL tells. */
uint16_t srv_spill_told(const struct kv_sequence *sequence);
/* The same for operators, who see what is on its way, too: static text. */
const char *srv_spill_state_name(const struct kv_sequence *sequence);
/* "host" or "file", where its image is; NULL: it has none. */
const char *srv_spill_tier_name(const struct srv_spill *spill, const struct kv_sequence *sequence);

/* Once a turn, before batches are sealed. */
void srv_spill_turn(struct srv_spill *spill);
bool srv_spill_has_work(const struct srv_spill *spill);
/* Something is on its way. */
bool srv_spill_is_busy(const struct srv_spill *spill);
/* When srv_spill_turn() wants to look at idle sequences; UINT64_MAX: never. */
uint64_t srv_spill_next_ns(const struct srv_spill *spill);
void srv_spill_lose(struct srv_spill *spill);
void srv_spill_gauges(const struct srv_spill *spill, struct srv_gauges *out);
/* Every page is in exactly one image, or free. */
KV_MUST_CHECK enum kv_status srv_spill_audit(struct srv_spill *spill, struct kv_error *err);

#endif
