/*
 * Log: one line per event on stderr, lower case, "key value" pairs. Where stderr is journald's stream, the
 * level is in front as journald reads it, "<6>listening on ..."; everywhere else the time and the level's
 * name, "2026-11-30T15:55:01.123Z info listening on ...". Only server/ logs. Any thread. Repeat offenders are
 * counted, not repeated (srv_log_limited).
 */
#ifndef SERVER_LOG_H
#define SERVER_LOG_H

#include <stdint.h>

#include "core/error.h"

enum srv_log_level { SRV_LOG_ERROR = 3, SRV_LOG_WARNING = 4, SRV_LOG_INFO = 6, SRV_LOG_DEBUG = 7 };

void srv_log_set_level(enum srv_log_level level);
enum srv_log_level srv_log_level_now(void);
void srv_log(enum srv_log_level level, const char *fmt, ...) KV_PRINTF(2, 3);
/* Who changed what: written at every level, as "notice". */
void srv_log_audit(const char *fmt, ...) KV_PRINTF(1, 2);
/* At most one line a second per `gate`; the next line says how many were left out. Loop thread. */
struct srv_log_gate {
	uint64_t last_ns, n_suppressed;
};
void srv_log_limited(struct srv_log_gate *gate, uint64_t now_ns, enum srv_log_level level, const char *fmt,
	...) KV_PRINTF(4, 5);

#endif
