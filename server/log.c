/*
 * One write(2) per line, so that lines of two threads never mix. A line is cut at LINE_BYTES_MAX. What is not
 * printable ASCII (a peer may have chosen it) is written as \xNN, so that one event is always exactly one
 * line and no byte of a peer reaches a terminal or a collector as it came; a backslash is doubled, so that
 * this can be told from what looks like it.
 */
#include "server/log.h"

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Longer than the longest struct kv_error text with its context. */
#define LINE_BYTES_MAX 1024

/* syslog(3); between warning and info. */
#define LEVEL_NOTICE 5

#define GATE_NS 1000000000ull

static atomic_int level_max = SRV_LOG_INFO;

void srv_log_set_level(enum srv_log_level level)
{
	atomic_store_explicit(&level_max, (int)level, memory_order_relaxed);
}

enum srv_log_level srv_log_level_now(void)
{
	return (enum srv_log_level)atomic_load_explicit(&level_max, memory_order_relaxed);
}

static bool is_written(enum srv_log_level level)
{
	return (int)level <= atomic_load_explicit(&level_max, memory_order_relaxed);
}

/* Returns the bytes written; never half of an escape. */
static size_t escape(const char *text, char *out, size_t n_bytes)
{
	static const char digits[] = "0123456789abcdef";
	size_t used = 0;

	for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
		const bool is_plain = *c >= 0x20 && *c < 0x7F;
		const size_t n = !is_plain ? 4 : *c == '\\' ? 2 : 1;

		if (n > n_bytes - used)
			break;
		if (n > 1)
			out[used++] = '\\';
		if (n == 4) {
			out[used++] = 'x';
			out[used++] = digits[*c >> 4];
			out[used++] = digits[*c & 15];
		} else {
			out[used++] = (char)*c;
		}
	}
	return used;
}

/* n_suppressed > 0: says at the end how many lines of this kind were left out. */
static void write_line(enum srv_log_level level, uint64_t n_suppressed, const char *fmt, va_list args)
{
	char text[LINE_BYTES_MAX], line[LINE_BYTES_MAX + 64];
	/* The level is for journald and whoever collects the lines; a person at a terminal reads without. */
	size_t used = isatty(STDERR_FILENO) ? 0 : (size_t)snprintf(line, sizeof(line), "<%d>", (int)level);

	if (vsnprintf(text, sizeof(text), fmt, args) > 0)
		used += escape(text, line + used, LINE_BYTES_MAX - 1 - used);
	if (n_suppressed > 0)
		used += (size_t)snprintf(line + used, sizeof(line) - used, ", left_out %llu",
			(unsigned long long)n_suppressed);
	line[used++] = '\n';
	/* Nobody is left to tell when stderr is gone. */
	if (write(STDERR_FILENO, line, used) < 0)
		return;
}

void srv_log(enum srv_log_level level, const char *fmt, ...)
{
	va_list args;

	if (!is_written(level))
		return;
	va_start(args, fmt);
	write_line(level, 0, fmt, args);
	va_end(args);
}

void srv_log_audit(const char *fmt, ...)
{
	va_list args;

	va_start(args, fmt);
	write_line((enum srv_log_level)LEVEL_NOTICE, 0, fmt, args);
	va_end(args);
}

void srv_log_limited(
	struct srv_log_gate *gate, uint64_t now_ns, enum srv_log_level level, const char *fmt, ...)
{
	va_list args;

	if (!is_written(level))
		return;
	/* last_ns 0: nothing was written through this gate yet (a clock never says 0). */
	if (gate->last_ns != 0 && now_ns - gate->last_ns < GATE_NS) {
		gate->n_suppressed++;
		return;
	}
	va_start(args, fmt);
	write_line(level, gate->n_suppressed, fmt, args);
	va_end(args);
	gate->last_ns = now_ns;
	gate->n_suppressed = 0;
}
