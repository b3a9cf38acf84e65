/*
 * After a lost connection: HELLO with the boot id we know, ATTACH, TELL, TRUNCATE.
 */
#include <poll.h>
#include <string.h>

#include "proto/client/conn.h"

#define NS_PER_MS 1000000LL

/* For calls with a timeout inside a call with a deadline; 1 when it passed, because 0 means the default. */
static uint32_t left_ms(int64_t deadline_ns)
{
	const int64_t left_ns = deadline_ns - tqkv_now_ns();

	return left_ns <= NS_PER_MS                ? 1
		: left_ns / NS_PER_MS > UINT32_MAX ? UINT32_MAX
						   : (uint32_t)(left_ns / NS_PER_MS);
}

/* One page of sequences: cuts those whose layers differ, tells the caller. */
static enum tqkv_status settle_page(struct tqkv_session *session, struct tqkv_sequence *sequences, uint32_t n,
	const struct tqkv_reconnect_params *params, int64_t deadline_ns, struct tqkv_reconnect_report *report,
	struct tqkv_error *err)
{
	struct tqkv_item items[KVP_ITEMS_MAX];
	struct tqkv_item_result results[KVP_ITEMS_MAX];
	struct tqkv_rows_result result = { .items = results };
	uint32_t n_items = 0;
	enum tqkv_status status;

	for (uint32_t i = 0; i < n && !params->keep_lengths; i++)
		if (sequences[i].length_min != sequences[i].length_max)
			items[n_items++] = (struct tqkv_item){
				.sequence = sequences[i].sequence,
				.position = sequences[i].length_min,
			};
	if (n_items > 0) {
		status = tqkv_truncate(session, items, n_items, left_ms(deadline_ns), &result, err);
		if (status != TQKV_OK)
			return status;
		for (uint32_t item_idx = 0; item_idx < n_items; item_idx++)
			if (results[item_idx].status != TQKV_OK)
				return tqkv_fail(err, results[item_idx].status,
					"TRUNCATE of sequence %llu: %s",
					(unsigned long long)items[item_idx].sequence,
					tqkv_status_text(results[item_idx].status));
	}
	report->n_sequences += n;
	report->n_truncated += n_items;
	for (uint32_t i = 0; i < n && params->on_sequence; i++)
		params->on_sequence(params->arg, session, sequences[i].sequence, sequences[i].length_min,
			!params->keep_lengths && sequences[i].length_min != sequences[i].length_max);
	return TQKV_OK;
}

static enum tqkv_status settle_lengths(struct tqkv_session *session,
	const struct tqkv_reconnect_params *params, int64_t deadline_ns, struct tqkv_reconnect_report *report,
	struct tqkv_error *err)
{
	struct tqkv_sequence sequences[KVP_ITEMS_MAX];
	uint64_t from = 0;

	do {
		struct tqkv_reply reply;
		enum tqkv_status status =
			tqkv_session_tell_page(session, from, KVP_ITEMS_MAX, false, deadline_ns, &reply, err);

		if (status != TQKV_OK)
			return status;
		from = reply.next_sequence;

		/* The next call overwrites the reply. */
		const uint32_t n = reply.n_items;

		memcpy(sequences, reply.sequences, n * sizeof(*sequences));
		status = settle_page(session, sequences, n, params, deadline_ns, report, err);
		if (status != TQKV_OK)
			return status;
	} while (from != 0);
	return TQKV_OK;
}

static enum tqkv_status attach_one(struct tqkv_session *session, const struct tqkv_reconnect_params *params,
	int64_t deadline_ns, struct tqkv_reconnect_report *report, struct tqkv_error *err)
{
	enum tqkv_status status;

	if (session->name[0] == '\0') {
		session->lost = TQKV_STALE_HANDLE;
		return tqkv_session_check(session, err);
	}
	status = tqkv_session_reattach(session, deadline_ns, err);
	if (status == TQKV_OK)
		status = settle_lengths(session, params, deadline_ns, report, err);
	if (status == TQKV_OK) {
		report->n_attached++;
	} else if (session->conn->fd >= 0 && status != TQKV_DEADLINE) {
		session->lost = status;
		tqkv_error_wrap(err, "session %s", session->name);
	}
	return status;
}

/* It did not come back with the daemon. */
static bool is_gone(enum tqkv_status status)
{
	return status == TQKV_NOT_FOUND || status == TQKV_STALE_HANDLE;
}

static enum tqkv_status attach_all(struct tqkv_conn *conn, const struct tqkv_reconnect_params *params,
	bool is_restarted, int64_t deadline_ns, struct tqkv_reconnect_report *report, struct tqkv_error *err)
{
	enum tqkv_status first = TQKV_OK;

	for (struct tqkv_session *session = conn->sessions; session; session = session->next) {
		struct tqkv_error error;
		enum tqkv_status status;

		if (session->lost != TQKV_OK)
			continue;
		status = attach_one(session, params, deadline_ns, report, &error);
		if (is_restarted && session->lost != TQKV_OK && is_gone(status)) {
			session->lost = TQKV_STALE_EPOCH;
			status = tqkv_session_check(session, &error);
		}
		if (status != TQKV_OK && first == TQKV_OK) {
			first = status;
			if (err)
				*err = error;
		}
		if (conn->fd < 0)
			return first;
	}
	return first;
}

/* is_by_caller: who knows how far its sequences were; a call that is repeated by itself must not go on from
 * an older snapshot. */
static enum tqkv_status reconnect(struct tqkv_conn *conn, const struct tqkv_reconnect_params *params,
	bool is_by_caller, int64_t deadline_ns, struct tqkv_reconnect_report *report, struct tqkv_error *err)
{
	struct tqkv_error replaced;
	enum tqkv_status status;

	tqkv_request_finish_fetched(conn);
	*report = (struct tqkv_reconnect_report){ .boot_id_before = conn->server.boot_id };
	for (const struct tqkv_session *session = conn->sessions; session; session = session->next)
		report->n_sessions++;
	tqkv_fail(&replaced, TQKV_IO_ERROR, "connection to %.128s replaced by a new one", conn->address);
	tqkv_conn_lose(conn, &replaced);
	status = tqkv_conn_dial(conn, deadline_ns, err);
	if (conn->fd < 0)
		return status;
	report->boot_id = conn->server.boot_id;
	const bool is_restarted = status == TQKV_STALE_EPOCH || report->boot_id != report->boot_id_before;

	if (!is_restarted || is_by_caller)
		return attach_all(conn, params, is_restarted, deadline_ns, report, err);
	for (struct tqkv_session *session = conn->sessions; session; session = session->next)
		if (session->lost == TQKV_OK)
			session->lost = TQKV_STALE_EPOCH;
	return tqkv_fail(err, TQKV_STALE_EPOCH,
		"the daemon at %.128s was restarted: sessions are there again only if it restored a "
		"snapshot; attach them by name",
		conn->address);
}

static enum tqkv_status reconnect_once(struct tqkv_conn *conn, const struct tqkv_reconnect_params *params,
	bool is_by_caller, int64_t deadline_ns, struct tqkv_reconnect_report *report, struct tqkv_error *err)
{
	enum tqkv_status status;

	conn->is_reconnecting = true;
	status = reconnect(conn, params, is_by_caller, deadline_ns, report, err);
	conn->is_reconnecting = false;
	return status;
}

enum tqkv_status tqkv_reconnect(struct tqkv_conn *conn, const struct tqkv_reconnect_params *params,
	uint32_t timeout_ms, struct tqkv_reconnect_report *report, struct tqkv_error *err)
{
	if (!conn)
		return tqkv_fail_null(err, "conn");

	static const struct tqkv_reconnect_params no_params;
	struct tqkv_reconnect_report unused;

	return reconnect_once(conn, params ? params : &no_params, true,
		tqkv_conn_deadline_ns(conn, timeout_ms), report ? report : &unused, err);
}

bool tqkv_conn_recover(struct tqkv_conn *conn, enum tqkv_status status, uint32_t *n_recoveries,
	int64_t deadline_ns, struct tqkv_error *err)
{
	const struct tqkv_reconnect_params params = { .keep_lengths = true };
	struct tqkv_reconnect_report report;

	if (status != TQKV_IO_ERROR || !(conn->options.flags & TQKV_OPTION_RECONNECT) ||
		conn->is_reconnecting || *n_recoveries == 3)
		return false;
	(*n_recoveries)++;
	/* A daemon that restarts needs a moment until it listens again. */
	for (uint32_t n_attempts = 0;; n_attempts++) {
		const uint32_t pause_ms =
			tqkv_backoff_pause_ms(n_attempts, 0, &conn->options, tqkv_random(conn));

		/* What became of the sessions is told by tqkv_session_check() in each call. */
		status = reconnect_once(conn, &params, false, deadline_ns, &report, err);
		if (conn->fd >= 0)
			return true;
		if (status != TQKV_IO_ERROR || tqkv_deadline_ns(pause_ms) >= deadline_ns)
			return false;
		poll(NULL, 0, (int)pause_ms);
	}
}
