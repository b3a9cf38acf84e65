#include "core/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kv_status kv_fail(struct kv_error *err, enum kv_status status, const char *fmt, ...)
{
	if (err) {
		va_list args;

		err->status = status;
		va_start(args, fmt);
		vsnprintf(err->msg, sizeof(err->msg), fmt, args);
		va_end(args);
	}
	return status;
}

void kv_error_wrap(struct kv_error *err, const char *fmt, ...)
{
	char context[sizeof(err->msg)];
	va_list args;

	if (!err)
		return;
	va_start(args, fmt);
	int n = vsnprintf(context, sizeof(context), fmt, args);

	va_end(args);
	if (n < 0)
		return;
	size_t used = (size_t)n < sizeof(context) ? (size_t)n : sizeof(context) - 1;

	/* The cause keeps its head when both do not fit: it is what the reader looks for. */
	if (used > sizeof(context) / 2)
		used = sizeof(context) / 2;
	size_t tail = strlen(err->msg);

	if (used + 2 + tail >= sizeof(err->msg))
		tail = sizeof(err->msg) - used - 3;
	memmove(err->msg + used + 2, err->msg, tail);
	memcpy(err->msg, context, used);
	memcpy(err->msg + used, ": ", 2);
	err->msg[used + 2 + tail] = '\0';
}

_Noreturn void kv_assert_failed(const char *cond, const char *file, int line)
{
	fprintf(stderr, "<0>assertion failed: %s at %s:%d\n", cond, file, line);
	abort();
}
