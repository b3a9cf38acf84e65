/*
 * Operations on whole sequences, blocking. Their items carry no rows; the rest is like any row operation.
 */
#include "proto/client/bulk.h"

enum tqkv_status tqkv_truncate(struct tqkv_session *session, const struct tqkv_item *items, uint32_t n,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return tqkv_run_items(session, TQKV_OP_TRUNCATE, items, NULL, n, timeout_ms, result, err);
}

enum tqkv_status tqkv_free_sequences(struct tqkv_session *session, const struct tqkv_item *items, uint32_t n,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return tqkv_run_items(session, TQKV_OP_FREE, items, NULL, n, timeout_ms, result, err);
}

enum tqkv_status tqkv_free_sequence(
	struct tqkv_session *session, uint64_t sequence, uint32_t timeout_ms, struct tqkv_error *err)
{
	const struct tqkv_item item = { .sequence = sequence };
	struct tqkv_item_result got = { 0 };
	struct tqkv_rows_result result = { .items = &got };
	const enum tqkv_status status = tqkv_free_sequences(session, &item, 1, timeout_ms, &result, err);

	if (status == TQKV_OK && got.status != TQKV_OK)
		return tqkv_fail(err, got.status, "sequence %llu: %s", (unsigned long long)sequence,
			tqkv_status_text(got.status));
	return status;
}

enum tqkv_status tqkv_spill(struct tqkv_session *session, const struct tqkv_item *items, uint32_t n,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return tqkv_run_items(session, TQKV_OP_SPILL, items, NULL, n, timeout_ms, result, err);
}

enum tqkv_status tqkv_prefetch(struct tqkv_session *session, const struct tqkv_item *items, uint32_t n,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return tqkv_run_items(session, TQKV_OP_PREFETCH, items, NULL, n, timeout_ms, result, err);
}

enum tqkv_status tqkv_fork(struct tqkv_session *session, const struct tqkv_item *items,
	const uint64_t *parents, uint32_t n, uint32_t timeout_ms, struct tqkv_rows_result *result,
	struct tqkv_error *err)
{
	if (!parents)
		return tqkv_fail(err, TQKV_BAD_ARG, "there are no parents");
	return tqkv_run_items(session, TQKV_OP_FORK, items, parents, n, timeout_ms, result, err);
}

enum tqkv_status tqkv_pin(struct tqkv_session *session, const struct tqkv_item *items, uint32_t n,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return tqkv_run_items(session, TQKV_OP_PIN, items, NULL, n, timeout_ms, result, err);
}

enum tqkv_status tqkv_unpin(struct tqkv_session *session, const struct tqkv_item *items, uint32_t n,
	uint32_t timeout_ms, struct tqkv_rows_result *result, struct tqkv_error *err)
{
	return tqkv_run_items(session, TQKV_OP_UNPIN, items, NULL, n, timeout_ms, result, err);
}
