/* The daemon as it is now, again and again: load, latency, occupancy, the largest sessions. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/clock.h"
#include "core/memory.h"
#include "server/ctl/ctl.h"
#include "server/ctl/metrics_text.h"
#include "server/ctl/table.h"

#define SRV_TOP_REASON_BYTES 508u

enum { ARG_INTERVAL, ARG_COUNT, ARG_SESSIONS, N_ARGS };

static const struct srv_arg args[N_ARGS] = {
	[ARG_INTERVAL] = { .name = "interval-ms",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "MS",
		.number = 2000,
		.min = 100,
		.max = 3600000,
		.help = "time between two looks" },
	[ARG_COUNT] = { .name = "count",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 0,
		.min = 0,
		.max = UINT32_MAX,
		.help = "looks before the end, 0: until interrupted" },
	[ARG_SESSIONS] = { .name = "sessions",
		.kind = SRV_ARG_NUMBER,
		.placeholder = "N",
		.number = 10,
		.min = 0,
		.max = 256,
		.help = "largest sessions to show" },
};

struct look {
	char *metrics; /* owned */
	json_t *occupancy, *sessions, *info;
	uint64_t at_ns;
	bool is_ready;
	char why_not[SRV_TOP_REASON_BYTES];
};

static void look_finish(struct look *look)
{
	kv_free(look->metrics);
	json_decref(look->occupancy);
	json_decref(look->sessions);
	json_decref(look->info);
	*look = (struct look){ 0 };
}

static enum kv_status look_take(
	const struct srv_ctl *ctl, struct kv_clock *clock, struct look *look, struct kv_error *err)
{
	struct kv_error unready = { .status = KV_OK };
	enum kv_status status;

	*look = (struct look){ 0 };
	status = srv_ctl_api_text(ctl, "/metrics", &look->metrics, err);
	look->at_ns = kv_clock_now_ns(clock);
	if (status == KV_OK)
		status = srv_ctl_api(ctl, "GET", "/v1/info", NULL, &look->info, err);
	if (status == KV_OK)
		status = srv_ctl_api(ctl, "GET", "/v1/occupancy", NULL, &look->occupancy, err);
	if (status == KV_OK)
		status = srv_ctl_api_list(ctl, "/v1/sessions", "sessions", &look->sessions, err);
	if (status != KV_OK) {
		look_finish(look);
		return status;
	}
	look->is_ready = srv_ctl_api(ctl, "GET", "/readyz", NULL, NULL, &unready) == KV_OK;
	snprintf(look->why_not, sizeof(look->why_not), "%s", unready.msg);
	return KV_OK;
}

/* What happened between two looks; the first has none before it. */
struct rates {
	bool are_known, has_latency;
	double requests, rows_in, rows_out, rejected; /* per second */
	double p50_s, p99_s;
};

static double rate(const struct look *now, const struct look *before, const char *name, double seconds)
{
	const double n = srv_metrics_value(now->metrics, name) - srv_metrics_value(before->metrics, name);

	return n > 0 ? n / seconds : 0;
}

static struct rates compare(const struct look *now, const struct look *before)
{
	struct rates rates = { 0 };

	if (!before->metrics ||
		strcmp(srv_json_text(now->info, "boot_id"), srv_json_text(before->info, "boot_id")))
		return rates;
	const double seconds = (double)(now->at_ns - before->at_ns) / 1e9;

	if (!(seconds > 0))
		return rates;
	rates.are_known = true;
	rates.requests = rate(now, before, "tqkv_request_seconds_count", seconds);
	rates.rows_in = rate(now, before, "tqkv_rows_in_total", seconds);
	rates.rows_out = rate(now, before, "tqkv_rows_out_total", seconds);
	rates.rejected = (srv_metrics_sum(now->metrics, "tqkv_rejected_total{") -
				 srv_metrics_sum(before->metrics, "tqkv_rejected_total{")) /
		seconds;
	rates.has_latency = srv_metrics_quantile(now->metrics, before->metrics, "tqkv_request_seconds", 0.5,
				    &rates.p50_s) &&
		srv_metrics_quantile(
			now->metrics, before->metrics, "tqkv_request_seconds", 0.99, &rates.p99_s);
	return rates;
}

static void print_rates(const struct rates *rates)
{
	char p50[SRV_HUMAN_BYTES], p99[SRV_HUMAN_BYTES];

	if (!rates->are_known) {
		printf("load      measured from the second look on\n");
		return;
	}
	printf("load      %.1f requests/s, rows/s %.0f in %.0f out, rejected/s %.1f\n", rates->requests,
		rates->rows_in, rates->rows_out, rates->rejected);
	if (rates->has_latency)
		printf("latency   p50 up to %s, p99 up to %s\n",
			srv_human_ns((uint64_t)(rates->p50_s * 1e9), p50),
			srv_human_ns((uint64_t)(rates->p99_s * 1e9), p99));
	else
		printf("latency   no request\n");
}

/* What the bar is made of: only states that there are. */
static void print_states(const json_t *pool)
{
	static const char *const states[] = { "owned", "shared", "pinned", "exact", "draining", "reserved",
		"free" };
	const char *separator = ": ";

	printf("blocks of %s", srv_json_text(pool, "name"));
	for (size_t i = 0; i < KV_LENGTH(states); i++) {
		const uint64_t n = srv_json_u64(json_object_get(pool, "blocks"), states[i]);

		if (n == 0)
			continue;
		printf("%s%llu %s", separator, (unsigned long long)n, states[i]);
		separator = ", ";
	}
	printf("\n");
}

/* "[######....]" of what is not free; reserved blocks count as taken. */
static void print_pools(const json_t *occupancy)
{
	enum { CELLS = 30 };
	static const char *const titles[] = { "<pool", "<blocks taken", "share", "tokens", "in blocks",
		"compression", "sequences", "sessions" };
	struct srv_table table;
	const json_t *pool;
	size_t i;

	if (json_array_size(json_object_get(occupancy, "pools")) == 0) {
		printf("no pools\n");
		return;
	}
	srv_table_init(&table, titles, KV_LENGTH(titles));
	json_array_foreach (json_object_get(occupancy, "pools"), i, pool) {
		const uint64_t total = srv_json_u64(pool, "blocks.total");
		const uint64_t free_blocks = srv_json_u64(pool, "blocks.free");
		const double taken = total ? (double)(total - free_blocks) / (double)total : 0;
		char bar[CELLS + 1], text[SRV_HUMAN_BYTES];

		for (int n = 0; n < CELLS; n++)
			bar[n] = n < (int)(taken * CELLS + 0.999) ? '#' : '.';
		bar[CELLS] = '\0';
		srv_table_cell(&table, "%s", srv_json_text(pool, "name"));
		srv_table_cell(&table, "[%s]", bar);
		srv_table_cell(&table, "%.1f %%", taken * 100);
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "memory.n_tokens"));
		srv_table_cell(&table, "%s", srv_human_bytes(srv_json_u64(pool, "used_bytes"), text));
		if (srv_json_u64(pool, "used_bytes") == 0)
			srv_table_cell(&table, "-");
		else
			srv_table_cell(&table, "%.2f", srv_json_real(pool, "effective_compression"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "n_sequences"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(pool, "n_sessions"));
	}
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
	json_array_foreach (json_object_get(occupancy, "pools"), i, pool)
		print_states(pool);
}

/* Takes the largest that is not marked yet; NULL: none is left. */
static const json_t *largest(const json_t *sessions, bool *is_shown)
{
	const json_t *session, *found = NULL;
	size_t i, found_idx = 0;

	json_array_foreach (sessions, i, session) {
		if (is_shown[i] ||
			(found &&
				srv_json_u64(session, "memory.stored_bytes") <=
					srv_json_u64(found, "memory.stored_bytes")))
			continue;
		found = session;
		found_idx = i;
	}
	if (found)
		is_shown[found_idx] = true;
	return found;
}

static enum kv_status print_sessions(const json_t *sessions, uint64_t n_max, struct kv_error *err)
{
	static const char *const titles[] = { "<session", "<name", "<pool", "<tenant", "tokens", "rows",
		"sequences", "open requests", "lease left" };
	const size_t n_sessions = json_array_size(sessions);
	struct srv_table table;

	if (n_sessions == 0 || n_max == 0)
		return KV_OK;
	bool *is_shown = kv_alloc(n_sessions, sizeof(*is_shown));

	if (!is_shown)
		return kv_fail(err, KV_NO_MEMORY, "no memory for %zu sessions", n_sessions);
	srv_table_init(&table, titles, KV_LENGTH(titles));
	for (uint64_t n = 0; n < n_max; n++) {
		static const char *const texts[] = { "id", "name", "pool" };
		const json_t *session = largest(sessions, is_shown);
		char text[SRV_HUMAN_BYTES], tenant[SRV_TABLE_CELL_BYTES];

		if (!session)
			break;
		for (size_t i = 0; i < KV_LENGTH(texts); i++)
			srv_table_cell(&table, "%s", srv_json_text(session, texts[i]));
		srv_table_cell(&table, "%s", srv_human_tenant(srv_json_text(session, "tenant"), tenant));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(session, "memory.n_tokens"));
		srv_table_cell(
			&table, "%s", srv_human_bytes(srv_json_u64(session, "memory.stored_bytes"), text));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(session, "n_sequences"));
		srv_table_cell(&table, "%llu", (unsigned long long)srv_json_u64(session, "n_outstanding"));
		srv_table_cell(&table, "%s", srv_human_ms(srv_json_u64(session, "lease_left_ms"), text));
	}
	printf("\n");
	srv_table_print(&table, stdout);
	srv_table_finish(&table);
	kv_free(is_shown);
	if (n_sessions > n_max)
		printf("and %zu more: tqkvctl sessions\n", n_sessions - (size_t)n_max);
	return KV_OK;
}

static enum kv_status print_human(
	const struct look *look, const struct rates *rates, uint64_t n_sessions_max, struct kv_error *err)
{
	char up[SRV_HUMAN_BYTES], resident[SRV_HUMAN_BYTES];

	printf("tqkvd %s  %s, %s  up %s  resident %s\n", srv_json_text(look->info, "version"),
		srv_json_text(look->info, "device"), srv_json_text(look->info, "io"),
		srv_human_ms(srv_json_u64(look->info, "uptime_ms"), up),
		srv_human_bytes((uint64_t)srv_metrics_value(look->metrics, "tqkv_resident_bytes"), resident));
	if (look->is_ready)
		printf("health    ready\n");
	else
		printf("health    NOT READY: %s\n", look->why_not);
	print_rates(rates);
	printf("\n");
	print_pools(look->occupancy);
	return print_sessions(look->sessions, n_sessions_max, err);
}

/* One object a look, a line each, so that a stream of them can be read. */
static enum kv_status print_json(const struct look *look, const struct rates *rates, struct kv_error *err)
{
	json_t *json = json_pack("{s:b, s:O, s:O, s:O}", "is_ready", look->is_ready, "info", look->info,
		"occupancy", look->occupancy, "sessions", look->sessions);
	json_t *load = rates->are_known
		? json_pack("{s:f, s:f, s:f, s:f, s:o, s:o}", "requests_per_s", rates->requests,
			  "rows_in_per_s", rates->rows_in, "rows_out_per_s", rates->rows_out,
			  "rejected_per_s", rates->rejected, "p50_seconds",
			  rates->has_latency ? json_real(rates->p50_s) : json_null(), "p99_seconds",
			  rates->has_latency ? json_real(rates->p99_s) : json_null())
		: json_null();

	if (!json || json_object_set_new(json, "load", load) < 0) {
		json_decref(json);
		return kv_fail(err, KV_NO_MEMORY, "no memory for a look");
	}
	json_dumpf(json, stdout, JSON_COMPACT | JSON_REAL_PRECISION(9));
	putchar('\n');
	json_decref(json);
	return KV_OK;
}

/* In small steps, so that an interrupt is noticed soon. */
static void wait_ms(uint64_t ms)
{
	for (; ms > 0 && !srv_interrupt_seen(); ms -= ms < 50 ? ms : 50)
		usleep((useconds_t)((ms < 50 ? ms : 50) * 1000));
}

static enum kv_status run_top(struct srv_ctl *ctl, struct kv_error *err)
{
	const uint64_t count = ctl->values[ARG_COUNT].number;
	const bool is_redrawn = !ctl->is_json && isatty(STDOUT_FILENO);
	struct kv_clock *clock = kv_clock_system();
	struct look now = { 0 }, before = { 0 };
	enum kv_status status = KV_OK;

	srv_interrupt_catch();
	for (uint64_t n = 0; status == KV_OK && (count == 0 || n < count) && !srv_interrupt_seen(); n++) {
		if (n > 0)
			wait_ms(ctl->values[ARG_INTERVAL].number);
		if (n > 0 && srv_interrupt_seen())
			break;
		status = look_take(ctl, clock, &now, err);
		if (status != KV_OK)
			break;
		const struct rates rates = compare(&now, &before);

		/* Home and erase below: what stood there is written over without a flash. */
		if (is_redrawn)
			printf("\x1b[H\x1b[J");
		else if (n > 0 && !ctl->is_json)
			printf("\n");
		status = ctl->is_json ? print_json(&now, &rates, err)
				      : print_human(&now, &rates, ctl->values[ARG_SESSIONS].number, err);
		fflush(stdout);
		look_finish(&before);
		before = now;
		now = (struct look){ 0 };
	}
	look_finish(&before);
	return status;
}

const struct srv_command srv_cmd_top = {
	.name = "top",
	.summary = "load, latency, occupancy and the largest sessions, again and again",
	.details = "On a terminal the screen is drawn anew; elsewhere looks follow each other, with --json "
		   "one object\n"
		   "a line. in blocks: what lies there, shared rows once; compression: bf16 over it; rows: "
		   "what a "
		   "session's\n"
		   "sequences see, shared ones for each. Rates and latency are those between two looks. "
		   "Latencies are upper edges of "
		   "buckets.",
	.args = args,
	.n_args = N_ARGS,
	.run = run_top,
};
