/*
 * Metrics text: numbers out of Prometheus text format 0.0.4, as GET /metrics gives it. Pure functions over a
 * borrowed, zero-terminated text; a line that makes no sense is skipped.
 */
#ifndef SERVER_CTL_METRICS_TEXT_H
#define SERVER_CTL_METRICS_TEXT_H

#include <stdbool.h>
#include <stdint.h>

/* The sample of exactly this name, labels included; 0 where there is none. */
double srv_metrics_value(const char *text, const char *name);
/* The sum over all samples whose name begins like this: "tqkv_rejected_total{". */
double srv_metrics_sum(const char *text, const char *prefix);

#define SRV_METRICS_BUCKETS_MAX 64u
/*
 * The upper edge of the bucket in which the share `p` of a histogram's observations between two scrapes
 * ends, in the histogram's unit; the greatest finite edge where that is beyond it. False: nothing was
 * observed. `before` NULL: since start. `name` without _bucket.
 */
bool srv_metrics_quantile(const char *now, const char *before, const char *name, double p, double *edge);

#endif
