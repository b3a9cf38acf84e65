#include "proto/status.h"

#define N_ROWS (sizeof(rows) / sizeof(rows[0]))

static const struct kv_status_row rows[] = {
#define STATUS_ROW(name, number, scope, retryable, http, text) \
	{ #name, text, number, http, KV_SCOPE_##scope, retryable },
	KV_STATUS_MAP(STATUS_ROW)
#undef STATUS_ROW
};

const struct kv_status_row *kv_status_row(unsigned number)
{
	const struct kv_status_row *internal = &rows[0];

	for (unsigned row_idx = 0; row_idx < N_ROWS; row_idx++) {
		if (rows[row_idx].number == number)
			return &rows[row_idx];
		if (rows[row_idx].number == KV_INTERNAL)
			internal = &rows[row_idx];
	}
	return internal;
}
