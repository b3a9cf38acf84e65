/*
 * Errors: a status and one readable sentence.
 *
 * A function fails into `err` where the cause is first known; callers only put context in front of it. `err`
 * may be NULL where nobody reads the text. Refusals that are expected on the data path (POOL_FULL, POSITION)
 * carry no text at all. Any thread; a struct kv_error belongs to its caller.
 */
#ifndef CORE_ERROR_H
#define CORE_ERROR_H

#include <stdint.h>

#include "proto/status.h"

struct kv_error {
	enum kv_status status;
	char msg[508];
};

#if defined(__GNUC__)
#define KV_PRINTF(fmt_idx, arg_idx) __attribute__((format(printf, fmt_idx, arg_idx)))
#else
#define KV_PRINTF(fmt_idx, arg_idx)
#endif

/* Writes the text and returns `status`: `return kv_fail(err, KV_BAD_ARG, "head_dim %u is not a multiple of
 * 16", d);` */
enum kv_status kv_fail(struct kv_error *err, enum kv_status status, const char *fmt, ...) KV_PRINTF(3, 4);
/* Puts "context: " in front of the text of a failure. */
void kv_error_wrap(struct kv_error *err, const char *fmt, ...) KV_PRINTF(2, 3);

/* Our own promises; stays on in release builds. Never on bytes from outside. One condition each. */
#define KV_ASSERT(cond) ((cond) ? (void)0 : kv_assert_failed(#cond, __FILE__, __LINE__))
#ifdef KV_DEBUG
#define KV_DEBUG_ASSERT(cond) KV_ASSERT(cond)
#else
#define KV_DEBUG_ASSERT(cond) ((void)sizeof((cond) ? 1 : 0))
#endif
_Noreturn void kv_assert_failed(const char *cond, const char *file, int line);

#endif
