/*
 * Known answer: one decode whose result is known beforehand, run through the real backend at start and
 * periodically
 * (/readyz). Rows, queries and the expected output are committed constants, made by an implementation that
 * shares no code with this one (tests/golden/make_selftest.py); so a wrong codebook, rotation or kernel shows
 * before a client meets it.
 */
#ifndef CORE_SELFTEST_H
#define CORE_SELFTEST_H

#include <stdint.h>

#include "core/backend.h"

/* The tiny pool of its own that the rows live in; one layer, tq4. kv_pool_spec_destroy() it. */
KV_MUST_CHECK enum kv_status kv_selftest_spec_create(struct kv_pool_spec **out, struct kv_error *err);
/* Bytes of the area (host_alloc memory) that kv_selftest_fill() lays the batch out in. */
uint64_t kv_selftest_area_bytes(void);
/* Writes a complete batch (update and decode) for the pool; the output is preset so that doing nothing fails.
 */
void kv_selftest_fill(
	const struct kv_pool_spec *spec, struct kv_backend_pool *pool, uint8_t *area, struct kv_batch *batch);
/* After reap(): KV_OK, or INTERNAL with the first number that is off, what was expected and the tolerance. */
KV_MUST_CHECK enum kv_status kv_selftest_check(const struct kv_batch *batch, struct kv_error *err);

#endif
