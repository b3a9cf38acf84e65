/*
 * Progress: one line with a bar, the rate and the time left, redrawn in place on a terminal; nothing
 * elsewhere.
 *
 * Written to standard error, so that results can be piped while the bar is seen. At most ten lines a second.
 * One thread. The line is erased by finish, so whatever is printed afterwards starts on a clean line.
 */
#ifndef SERVER_CTL_PROGRESS_H
#define SERVER_CTL_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "core/clock.h"

struct srv_progress {
	FILE *out;
	struct kv_clock *clock;
	const char *label; /* static text */
	const char *unit;  /* static text: "tokens" */
	uint64_t n_total, n_done;
	uint64_t start_ns, drawn_ns;
	bool is_shown;
};

/* `out` is shown on when it is a terminal that can erase a line. */
void srv_progress_init(struct srv_progress *progress, FILE *out, struct kv_clock *clock, const char *label,
	const char *unit, uint64_t n_total);
/* n_done so far; draws when the last drawing is old enough. */
void srv_progress_set(struct srv_progress *progress, uint64_t n_done);
/* Erases the line. Zeroed and finished ones allowed. */
void srv_progress_finish(struct srv_progress *progress);

#define SRV_PROGRESS_LINE_BYTES 160u
/* The line as it is drawn, without control characters; apart, so that it can be tested. */
void srv_progress_line(
	const struct srv_progress *progress, uint64_t now_ns, char line[static SRV_PROGRESS_LINE_BYTES]);

#endif
