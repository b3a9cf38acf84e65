/*
 * Back-off: exponential with full jitter, so that clients that were refused together do not come back
 * together.
 */
#include "proto/client/conn.h"

/* xorshift64*: spreads pauses, nothing secret. */
uint64_t tqkv_random(struct tqkv_conn *conn)
{
	conn->random_state ^= conn->random_state >> 12;
	conn->random_state ^= conn->random_state << 25;
	conn->random_state ^= conn->random_state >> 27;
	return conn->random_state * 0x2545F4914F6CDD1DULL;
}

uint32_t tqkv_backoff_pause_ms(
	uint32_t n_attempts, uint32_t retry_after_ms, const struct tqkv_options *options, uint64_t random)
{
	const uint32_t n_doublings = n_attempts < 20 ? n_attempts : 20;
	uint64_t bound_ms = (uint64_t)options->backoff_first_ms << n_doublings;

	if (bound_ms > options->backoff_max_ms)
		bound_ms = options->backoff_max_ms;

	const uint64_t pause_ms = retry_after_ms + random % (bound_ms + 1);

	return pause_ms > UINT32_MAX ? UINT32_MAX : (uint32_t)pause_ms;
}

bool tqkv_ends_by_itself(enum tqkv_status status)
{
	return status != TQKV_QUOTA;
}

bool tqkv_backoff_pause(
	struct tqkv_backoff *backoff, struct tqkv_conn *conn, uint32_t retry_after_ms, int64_t deadline_ns)
{
	const uint32_t pause_ms =
		tqkv_backoff_pause_ms(backoff->n_attempts, retry_after_ms, &conn->options, tqkv_random(conn));
	const int64_t until_ns = tqkv_deadline_ns(pause_ms);

	backoff->n_attempts++;
	if (conn->options.flags & TQKV_OPTION_NO_RETRY || until_ns >= deadline_ns)
		return false;
	return tqkv_conn_sleep(conn, until_ns);
}
