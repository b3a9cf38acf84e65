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
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
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

/* The level words of everybody but journald, which takes numbers. */
static const char *level_name(int level)
{
	return level == SRV_LOG_ERROR        ? "error"
		: level == SRV_LOG_WARNING   ? "warning"
		: level == LEVEL_NOTICE      ? "notice"
		: level == (int)SRV_LOG_INFO ? "info"
					     : "debug";
}

/* JOURNAL_STREAM is "device:inode" of the stream that the service manager gave us; stderr may have been
 * pointed elsewhere since, and a child of a service inherits the variable with another stderr. */
static bool is_journal(void)
{
	const char *stream = getenv("JOURNAL_STREAM");
	struct stat found;
	char own[48];

	if (!stream || fstat(STDERR_FILENO, &found) != 0)
		return false;
	snprintf(own, sizeof(own), "%llu:%llu", (unsigned long long)found.st_dev,
		(unsigned long long)found.st_ino);
	return strcmp(stream, own) == 0;
}

/* journald adds the time itself and reads the level from "<6>"; everybody else gets "TIME level ". */
static size_t write_prefix(char *out, size_t n_bytes, int level)
{
	struct timespec now = { 0 };
	struct tm parts = { 0 };
	char seconds[32] = "";

	if (is_journal())
		return (size_t)snprintf(out, n_bytes, "<%d>", level);
	clock_gettime(CLOCK_REALTIME, &now);
	if (gmtime_r(&now.tv_sec, &parts))
		strftime(seconds, sizeof(seconds), "%Y-%m-%dT%H:%M:%S", &parts);
	return (size_t)snprintf(
		out, n_bytes, "%s.%03uZ %s ", seconds, (unsigned)(now.tv_nsec / 1000000), level_name(level));
}

/* n_suppressed > 0: says at the end how many lines of this kind were left out. */
static void write_line(enum srv_log_level level, uint64_t n_suppressed, const char *fmt, va_list args)
{
	char text[LINE_BYTES_MAX], line[LINE_BYTES_MAX + 64];
	size_t used = write_prefix(line, sizeof(line), (int)level);

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
