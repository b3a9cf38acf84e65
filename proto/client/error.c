#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "proto/client/conn.h"

/* The public numbers are those of the one table; a status that is added there and not here does not compile.
 */
#define STATUS_IS_SAME(name, number, scope, retryable, http, text) \
	_Static_assert((int)TQKV_##name == (int)KV_##name, #name);
KV_STATUS_MAP(STATUS_IS_SAME)
_Static_assert((int)TQKV_SCOPE_DAEMON == (int)KV_SCOPE_DAEMON, "scopes are the wire's");
_Static_assert((int)TQKV_PACKED == (int)KVP_DTYPE_PACKED && (int)TQKV_BF16 == (int)KVP_DTYPE_BF16, "dtypes");
_Static_assert((int)TQKV_LSE == (int)KVP_ROWS_LSE && (int)TQKV_NO_SINKS == (int)KVP_ROWS_NO_SINKS, "flags");
_Static_assert((int)TQKV_CREATE == (int)KVP_ITEM_CREATE, "item flags");
_Static_assert((int)TQKV_STATE_EVICTED == (int)KVP_STATE_EVICTED, "states");
_Static_assert((int)TQKV_CANCEL_UNKNOWN == (int)KVP_CANCEL_UNKNOWN, "outcomes");
_Static_assert((int)TQKV_OP_FREE == (int)KVP_OP_FREE && (int)TQKV_OP_APPEND == (int)KVP_OP_APPEND, "opcodes");
/* Rows and log-sum-exps pass through as the machine has them. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rows of the wire are little-endian");

const char *tqkv_status_name(unsigned status)
{
	return kv_status_name(status);
}

const char *tqkv_status_text(unsigned status)
{
	return kv_status_row(status)->text;
}

bool tqkv_status_is_retryable(unsigned status)
{
	return kv_status_row(status)->is_retryable;
}

const char *tqkv_version(void)
{
	return TQKV_VERSION;
}

enum tqkv_status tqkv_fail(struct tqkv_error *err, enum tqkv_status status, const char *fmt, ...)
{
	const struct kv_status_row *row = kv_status_row(status);
	va_list args;

	if (!err)
		return status;
	*err = (struct tqkv_error){
		.status = status,
		/* In the table IO_ERROR and NO_MEMORY are failures of a start, here of one connection or
		   call. */
		.scope = status == TQKV_IO_ERROR || status == TQKV_NO_MEMORY ? TQKV_SCOPE_CONN
									     : (enum tqkv_scope)row->scope,
		.is_retryable = row->is_retryable,
		.is_local = true,
		.item = KVP_NO_ITEM,
	};
	va_start(args, fmt);
	vsnprintf(err->message, sizeof(err->message), fmt, args);
	va_end(args);
	return status;
}

enum tqkv_status tqkv_fail_null(struct tqkv_error *err, const char *names)
{
	return tqkv_fail(err, TQKV_BAD_ARG, "%s: NULL where it may not be", names);
}

void tqkv_error_wrap(struct tqkv_error *err, const char *fmt, ...)
{
	char context[128];
	char message[sizeof(err->message)];
	va_list args;

	if (!err)
		return;
	va_start(args, fmt);
	vsnprintf(context, sizeof(context), fmt, args);
	va_end(args);
	memcpy(message, err->message, sizeof(message));
	/* The message's end may be cut; its start says what matters. */
	const size_t room = sizeof(err->message) - strlen(context) - 3;

	snprintf(err->message, sizeof(err->message), "%s: %.*s", context, (int)room, message);
}

enum tqkv_status tqkv_fail_fault(struct tqkv_error *err, const struct kvp_fault *fault)
{
	char text[256];

	kvp_fault_text(fault, text, sizeof(text));
	return tqkv_fail(err, TQKV_BAD_FRAME, "the server sent a bad frame: %s", text);
}
