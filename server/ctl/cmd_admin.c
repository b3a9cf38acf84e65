/* What an operator does to the daemon as a whole: reload, drain, the log's level, audit, self-test. */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "server/ctl/ctl.h"
#include "server/ctl/table.h"

/* Asks, and prints the answer as JSON, or as the function does. */
static enum kv_status ask(const struct srv_ctl *ctl, const char *method, const char *path, const json_t *body,
	void (*print)(const json_t *answer), json_t **kept, struct kv_error *err)
{
	json_t *answer = NULL;
	const enum kv_status status = srv_ctl_api(ctl, method, path, body, &answer, err);

	if (status == KV_OK && ctl->is_json)
		srv_ctl_print_json(answer);
	else if (status == KV_OK)
		print(answer);
	if (kept)
		*kept = answer;
	else
		json_decref(answer);
	return status;
}

static void print_names(const char *what, const json_t *names)
{
	const json_t *name;
	size_t i;

	if (json_array_size(names) == 0)
		return;
	printf("%s:", what);
	json_array_foreach (names, i, name)
		printf(" %s", json_is_string(name) ? json_string_value(name) : "-");
	printf("\n");
}

static void print_reload(const json_t *answer)
{
	const json_t *changed = json_object_get(answer, "changed");
	const json_t *waiting = json_object_get(answer, "needs_restart");

	if (json_array_size(changed) == 0 && json_array_size(waiting) == 0)
		printf("nothing has changed\n");
	print_names("changed", changed);
	print_names("keeps its value until a restart", waiting);
}

static enum kv_status run_reload(struct srv_ctl *ctl, struct kv_error *err)
{
	return ask(ctl, "POST", "/v1/reload", NULL, print_reload, NULL, err);
}

static void print_drain(const json_t *answer)
{
	printf("draining: %llu sessions of %llu connections go on for at most drain_timeout_ms, %llu "
	       "requests "
	       "wait\n",
		(unsigned long long)srv_json_u64(answer, "n_sessions"),
		(unsigned long long)srv_json_u64(answer, "n_connections"),
		(unsigned long long)srv_json_u64(answer, "n_queued"));
}

static enum kv_status run_drain(struct srv_ctl *ctl, struct kv_error *err)
{
	return ask(ctl, "POST", "/v1/drain", NULL, print_drain, NULL, err);
}

static void print_level(const json_t *answer)
{
	printf("%s\n", srv_json_text(answer, "level"));
}

static enum kv_status run_log_level(struct srv_ctl *ctl, struct kv_error *err)
{
	if (ctl->n_operands == 0)
		return ask(ctl, "GET", "/v1/log-level", NULL, print_level, NULL, err);
	json_t *body = json_pack("{s:s}", "level", ctl->operands[0]);
	const enum kv_status status = body
		? ask(ctl, "PUT", "/v1/log-level", body, print_level, NULL, err)
		: kv_fail(err, KV_BAD_ARG, "'%.40s' is no level", ctl->operands[0]);

	json_decref(body);
	return status;
}

static void print_audit(const json_t *answer)
{
	if (json_is_true(json_object_get(answer, "is_clean")))
		printf("clean: %llu sessions, %llu sequences, %llu table entries, %llu blocks\n",
			(unsigned long long)srv_json_u64(answer, "n_sessions"),
			(unsigned long long)srv_json_u64(answer, "n_sequences"),
			(unsigned long long)srv_json_u64(answer, "n_table_entries"),
			(unsigned long long)srv_json_u64(answer, "n_blocks"));
}

static enum kv_status run_audit(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *answer = NULL;
	enum kv_status status = ask(ctl, "GET", "/v1/audit", NULL, print_audit, &answer, err);

	if (status == KV_OK && !json_is_true(json_object_get(answer, "is_clean")))
		status = kv_fail(err, KV_CORRUPT, "%s", srv_json_text(answer, "difference"));
	json_decref(answer);
	return status;
}

static void print_self_test(const json_t *answer)
{
	char took[SRV_HUMAN_BYTES];

	if (json_is_true(json_object_get(answer, "is_passed")))
		printf("passed in %s\n", srv_human_ns(srv_json_u64(answer, "duration_us") * 1000, took));
}

static enum kv_status run_self_test(struct srv_ctl *ctl, struct kv_error *err)
{
	json_t *answer = NULL;
	enum kv_status status = ask(ctl, "POST", "/v1/self-test", NULL, print_self_test, &answer, err);

	if (status == KV_OK && !json_is_true(json_object_get(answer, "is_passed")))
		status = kv_fail(err, KV_INTERNAL, "%s", srv_json_text(answer, "reason"));
	json_decref(answer);
	return status;
}

const struct srv_command srv_cmd_reload = {
	.name = "reload",
	.summary = "the daemon reads configuration, tokens and certificates again",
	.details = "Whole or not at all. SIGHUP does the same, and tells only the log.",
	.run = run_reload,
};

const struct srv_command srv_cmd_drain = {
	.name = "drain",
	.summary = "the daemon takes no new sessions, and ends",
	.details = "It ends when the sessions that are there have gone, or after drain_timeout_ms. SIGTERM "
		   "does the "
		   "same.",
	.run = run_drain,
};

const struct srv_command srv_cmd_log_level = {
	.name = "log-level",
	.operands = "[LEVEL]",
	.n_operands_max = 1,
	.summary = "the least severe level that is written; sets it to error, warning, info or debug",
	.details = "Until the next reload or start.",
	.run = run_log_level,
};

const struct srv_command srv_cmd_audit = {
	.name = "audit",
	.summary = "counts owners of blocks and entries of tables again; exit code 1 where they differ",
	.run = run_audit,
};

const struct srv_command srv_cmd_self_test = {
	.name = "self-test",
	.summary = "a decode with a known answer, now; exit code 1 when it is wrong",
	.run = run_self_test,
};
