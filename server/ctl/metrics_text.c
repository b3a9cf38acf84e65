#include "server/ctl/metrics_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The next sample line at or behind `text`, NULL at the end; *rest points behind it. */
static const char *next_sample(const char *text, const char **rest)
{
	while (*text != '\0') {
		const char *line = text;
		const size_t n = strcspn(text, "\n");

		text += n + (text[n] == '\n');
		if (n > 0 && line[0] != '#') {
			*rest = text;
			return line;
		}
	}
	return NULL;
}

static double sample_value(const char *line)
{
	const size_t n = strcspn(line, "\n");
	size_t at = n;

	/* Labels may hold blanks, values do not. */
	while (at > 0 && line[at - 1] != ' ')
		at--;
	return at > 0 ? strtod(line + at, NULL) : 0;
}

double srv_metrics_value(const char *text, const char *name)
{
	const size_t n = strlen(name);
	const char *line;

	while ((line = next_sample(text, &text))) {
		if (strncmp(line, name, n) == 0 && line[n] == ' ')
			return sample_value(line);
	}
	return 0;
}

double srv_metrics_sum(const char *text, const char *prefix)
{
	const size_t n = strlen(prefix);
	const char *line;
	double sum = 0;

	while ((line = next_sample(text, &text))) {
		if (strncmp(line, prefix, n) == 0)
			sum += sample_value(line);
	}
	return sum;
}

struct bucket {
	double edge, n;
};

/* Buckets in the order of the text, which is ascending; counts are cumulative. */
static uint32_t read_buckets(const char *text, const char *name, struct bucket buckets[])
{
	char prefix[128];
	const char *line;
	uint32_t n_buckets = 0;
	const int n = snprintf(prefix, sizeof(prefix), "%s_bucket{le=\"", name);

	if (n < 0 || (size_t)n >= sizeof(prefix))
		return 0;
	while (n_buckets < SRV_METRICS_BUCKETS_MAX && (line = next_sample(text, &text))) {
		if (strncmp(line, prefix, (size_t)n) != 0)
			continue;
		/* strtod() reads "+Inf" as well. */
		buckets[n_buckets++] = (struct bucket){ strtod(line + n, NULL), sample_value(line) };
	}
	return n_buckets;
}

bool srv_metrics_quantile(const char *now, const char *before, const char *name, double p, double *edge)
{
	struct bucket buckets[SRV_METRICS_BUCKETS_MAX], old[SRV_METRICS_BUCKETS_MAX];
	const uint32_t n = read_buckets(now, name, buckets);
	const uint32_t n_old = before ? read_buckets(before, name, old) : 0;

	for (uint32_t i = 0; i < n && n_old == n; i++)
		buckets[i].n -= old[i].n;
	if (n == 0 || !(buckets[n - 1].n > 0))
		return false;
	for (uint32_t i = 0; i < n; i++) {
		if (buckets[i].n < p * buckets[n - 1].n)
			continue;
		*edge = isinf(buckets[i].edge) && i > 0 ? buckets[i - 1].edge : buckets[i].edge;
		return true;
	}
	return false;
}
