/*
 * The probe behind /readyz: a known-answer decode through the real backend, at start, then every
 * self_test_interval_ms, and at once for /readyz?deep=1. The daemon is ready while the last one passed and is
 * not older than three intervals. It has a small pool of its own that no client can see.
 */
#include "server/internal.h"

#include <stdio.h>
#include <string.h>

#include "core/memory.h"

enum kv_status srv_probe_init(struct srv_server *server, struct kv_error *err)
{
	struct srv_probe *probe = &server->probe;
	uint64_t n_bytes = 0, offset = 0;
	enum kv_status status = kv_selftest_spec_create(&probe->spec, err);

	probe->area_bytes = kv_selftest_area_bytes();
	snprintf(probe->reason, sizeof(probe->reason), "the self-test has not run yet");
	if (status == KV_OK)
		status = server->backend->ops->pool_check(server->backend, probe->spec, &n_bytes, err);
	if (status == KV_OK)
		status = kv_arena_carve(server->arena, n_bytes, &offset, err);
	if (status == KV_OK)
		status = server->backend->ops->pool_create(
			server->backend, probe->spec, offset, &probe->pool, err);
	if (status != KV_OK) {
		kv_error_wrap(err, "self-test");
		return status;
	}
	probe->area = server->backend->ops->host_alloc(server->backend, probe->area_bytes);
	if (!probe->area)
		return kv_fail(
			err, KV_NO_MEMORY, "self-test: %llu bytes", (unsigned long long)probe->area_bytes);
	return KV_OK;
}

void srv_probe_finish(struct srv_server *server)
{
	struct srv_probe *probe = &server->probe;

	if (probe->area)
		server->backend->ops->host_free(server->backend, probe->area, probe->area_bytes);
	if (probe->pool)
		server->backend->ops->pool_destroy(server->backend, probe->pool);
	kv_pool_spec_destroy(probe->spec);
	memset(probe, 0, sizeof(*probe));
}

static void answer_deep(struct srv_server *server)
{
	struct srv_probe *probe = &server->probe;

	for (uint32_t i = 0; i < probe->n_deep; i++) {
		struct srv_control *control = probe->deep[i];

		if (control->kind == SRV_CONTROL_SELF_TEST) {
			control->is_passed = probe->is_passed;
			control->duration_us = probe->duration_us;
			snprintf(control->ready_reason, sizeof(control->ready_reason), "%s", probe->reason);
			control->done(control);
			continue;
		}
		control->status =
			srv_probe_is_ready(server, control->ready_reason, sizeof(control->ready_reason))
			? KV_OK
			: KV_UNAVAILABLE;
		control->done(control);
	}
	probe->n_deep = 0;
}

static void finish(struct srv_server *server, enum kv_status status, const struct kv_error *err)
{
	struct srv_probe *probe = &server->probe;

	/* The clock's own time: a batch may have been computed since this turn began. */
	probe->duration_us = probe->is_running
		? (uint32_t)srv_us_since(kv_clock_now_ns(server->seams.clock), probe->started_ns)
		: 0;
	probe->is_running = false;
	server->counters.self_tests++;
	probe->next_ns = server->now_ns + server->options->self_test_interval_ms * KV_NS_PER_MS;
	if (status == KV_OK) {
		probe->is_passed = true;
		probe->passed_ns = server->now_ns;
		probe->reason[0] = '\0';
	} else {
		if (probe->is_passed || server->counters.self_tests_failed == 0)
			srv_log(SRV_LOG_ERROR, "self-test failed: %s", err->msg);
		probe->is_passed = false;
		server->counters.self_tests_failed++;
		snprintf(probe->reason, sizeof(probe->reason), "self-test failed: %.120s", err->msg);
	}
	answer_deep(server);
}

void srv_probe_turn(struct srv_server *server)
{
	struct srv_probe *probe = &server->probe;
	struct kv_error err = { 0 };

	if (probe->is_running || server->is_lost || server->now_ns < probe->next_ns)
		return;
	kv_selftest_fill(probe->spec, probe->pool, probe->area, &probe->batch);
	const enum kv_status status = server->backend->ops->submit(server->backend, &probe->batch, &err);

	if (status == KV_BUSY_RETRY) {
		probe->next_ns = server->now_ns + KV_NS_PER_MS;
		return;
	}
	if (status == KV_OK) {
		probe->is_running = true;
		probe->started_ns = server->now_ns;
		/* Not again before it is back; a backend that never answers is found by the age. */
		probe->next_ns = server->now_ns + server->options->self_test_interval_ms * KV_NS_PER_MS;
		return;
	}
	finish(server, status, &err);
	server->is_lost = true;
}

void srv_probe_reaped(struct srv_server *server)
{
	struct kv_error err = { 0 };
	enum kv_status status = server->probe.batch.status;

	if (status == KV_OK)
		status = kv_selftest_check(&server->probe.batch, &err);
	else
		kv_fail(&err, status, "the backend failed the batch");
	finish(server, status, &err);
}

bool srv_probe_is_ready(struct srv_server *server, char *reason, uint32_t reason_bytes)
{
	const struct srv_probe *probe = &server->probe;
	const uint64_t interval_ns = server->options->self_test_interval_ms * KV_NS_PER_MS;

	if (server->is_lost)
		snprintf(reason, reason_bytes, "device lost");
	else if (server->is_draining)
		snprintf(reason, reason_bytes, "draining");
	else if (srv_server_is_stuck(server))
		snprintf(reason, reason_bytes, "the backend has not finished a batch for %llu ms",
			(unsigned long long)(srv_scheduler_oldest_ns(server) / KV_NS_PER_MS));
	else if (!probe->is_passed)
		snprintf(reason, reason_bytes, "%s", probe->reason);
	else if (server->now_ns - probe->passed_ns > 3 * interval_ns)
		snprintf(reason, reason_bytes, "the last self-test that passed is %llu ms old",
			(unsigned long long)((server->now_ns - probe->passed_ns) / KV_NS_PER_MS));
	else
		return true;
	return false;
}
