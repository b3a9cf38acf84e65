#include "server/ctl/progress.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BAR_CELLS 24u
#define REDRAW_NS (100 * KV_NS_PER_MS)

void srv_progress_init(struct srv_progress *progress, FILE *out, struct kv_clock *clock, const char *label,
	const char *unit, uint64_t n_total)
{
	const char *terminal = getenv("TERM");

	*progress = (struct srv_progress){
		.out = out,
		.clock = clock,
		.label = label,
		.unit = unit,
		.n_total = n_total,
		.start_ns = kv_clock_now_ns(clock),
		.is_shown = isatty(fileno(out)) && terminal && strcmp(terminal, "dumb") != 0,
	};
}

void srv_progress_line(
	const struct srv_progress *progress, uint64_t now_ns, char line[static SRV_PROGRESS_LINE_BYTES])
{
	const double elapsed_s = (double)(now_ns - progress->start_ns) / 1e9;
	const double share =
		progress->n_total == 0 ? 1 : (double)progress->n_done / (double)progress->n_total;
	const double rate = elapsed_s > 0 ? (double)progress->n_done / elapsed_s : 0;
	const uint32_t n_cells = (uint32_t)(share * BAR_CELLS);
	char bar[BAR_CELLS + 1];
	char left[32] = "--:--";

	memset(bar, '.', BAR_CELLS);
	memset(bar, '#', n_cells < BAR_CELLS ? n_cells : BAR_CELLS);
	bar[BAR_CELLS] = '\0';
	if (rate > 0) {
		const double left_s = (double)(progress->n_total - progress->n_done) / rate;

		/* 100 hours: above this the guess says nothing. */
		if (left_s < 360000)
			snprintf(left, sizeof(left), "%02u:%02u:%02u", (unsigned)left_s / 3600,
				(unsigned)left_s / 60 % 60, (unsigned)left_s % 60);
	}
	snprintf(line, SRV_PROGRESS_LINE_BYTES, "%-8.16s [%s] %3u%%  %.0f %.16s/s  %s left", progress->label,
		bar, (unsigned)(share * 100), rate, progress->unit, left);
}

void srv_progress_set(struct srv_progress *progress, uint64_t n_done)
{
	char line[SRV_PROGRESS_LINE_BYTES];

	progress->n_done = n_done < progress->n_total ? n_done : progress->n_total;
	if (!progress->is_shown)
		return;

	const uint64_t now_ns = kv_clock_now_ns(progress->clock);

	if (now_ns - progress->drawn_ns < REDRAW_NS)
		return;
	progress->drawn_ns = now_ns;
	srv_progress_line(progress, now_ns, line);
	fprintf(progress->out, "\r%s\033[K", line);
	fflush(progress->out);
}

void srv_progress_finish(struct srv_progress *progress)
{
	if (progress->is_shown && progress->drawn_ns != 0) {
		fputs("\r\033[K", progress->out);
		fflush(progress->out);
	}
	*progress = (struct srv_progress){ 0 };
}
