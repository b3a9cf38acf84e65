/* What runs, and what one scrape needs beside the counters. Loop thread. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "server/internal.h"
#include "server/spill.h"

void srv_control_info(struct srv_server *server, struct srv_info *info)
{
	memset(info, 0, sizeof(*info));
	snprintf(info->version, sizeof(info->version), "%s", srv_version);
	snprintf(info->commit, sizeof(info->commit), "%s", srv_commit);
	info->boot_id = kv_domain_boot_id(server->domain);
	info->backend = server->backend->ops->name;
	info->io = server->io->ops->name;
	snprintf(info->backend_reason, sizeof(info->backend_reason), "%s",
		server->seams.backend_reason ? server->seams.backend_reason : "");
	snprintf(info->io_reason, sizeof(info->io_reason), "%s",
		server->seams.io_reason ? server->seams.io_reason : "");
	server->backend->ops->info(server->backend, &info->device);
	info->frame_bytes_max = server->caps.frame_bytes_max;
	info->n_listeners = server->n_listeners;
	for (uint32_t i = 0; i < server->n_listeners; i++)
		memcpy(info->listeners[i], server->listeners[i], sizeof(info->listeners[i]));
	info->pid = (uint64_t)getpid();
	info->uptime_ms = (server->now_ns - server->started_ns) / KV_NS_PER_MS;
}

/* Bytes of the process that are in memory, from /proc; 0 where there is none. Control requests only. */
static uint64_t resident_bytes(void)
{
	unsigned long long total = 0, resident = 0;
	FILE *file = fopen("/proc/self/statm", "re");

	if (!file)
		return 0;
	const int n = fscanf(file, "%llu %llu", &total, &resident);

	fclose(file);
	return n == 2 ? resident * (uint64_t)sysconf(_SC_PAGESIZE) : 0;
}

void srv_server_gauges(struct srv_server *server, struct srv_gauges *out)
{
	uint32_t n_queued = 0;
	char reason[2];

	for (uint32_t i = 0; i < KV_POOLS_MAX; i++)
		n_queued += server->lanes[i].pool ? server->lanes[i].n_queued : 0;
	*out = (struct srv_gauges){
		.uptime_ms = (server->now_ns - server->started_ns) / KV_NS_PER_MS,
		.turns = server->turns,
		.n_connections = server->n_conns,
		.n_sessions = kv_domain_n_sessions(server->domain),
		.n_pools = kv_domain_n_pools(server->domain),
		.n_small_slots = server->slots[0].n,
		.n_small_slots_used = server->slots[0].n_used,
		.n_large_slots = server->slots[1].n,
		.n_large_slots_used = server->slots[1].n_used,
		.n_queued = n_queued,
		.n_batches_in_flight = srv_scheduler_in_flight(server),
		.n_reply_buffers = server->options->reply_buffers,
		.n_reply_buffers_used = server->n_replies_used,
		.arena_bytes = server->seams.arena_bytes,
		.arena_used_bytes = kv_arena_bytes(server->arena) - kv_arena_free_bytes(server->arena),
		.slots_bytes = server->slots[0].memory_bytes + server->slots[1].memory_bytes,
		.is_draining = server->is_draining,
	};
	for (uint32_t i = 0; i < out->n_pools; i++) {
		const struct kv_pool *pool = kv_domain_pool_at(server->domain, i);

		out->n_sequences += pool->n_sequences;
		out->tables_bytes += (uint64_t)pool->tables.n_chunks_used * sizeof(struct kv_table_chunk);
	}
	out->self_test_age_ms = server->probe.passed_ns
		? (server->now_ns - server->probe.passed_ns) / KV_NS_PER_MS
		: UINT64_MAX;
	out->batch_oldest_ms = srv_scheduler_oldest_ns(server) / KV_NS_PER_MS;
	srv_spill_gauges(server->spill, out);
	if (server->audit.has_difference) {
		out->has_difference = 1;
		out->difference_session = server->audit.difference.session;
		memcpy(out->difference_pool, server->audit.difference.pool, sizeof(out->difference_pool));
	}
	out->is_ready = srv_probe_is_ready(server, reason, sizeof(reason));
	out->resident_bytes = resident_bytes();
	out->config_generation = server->settings_generation;
	if (server->seams.settings) {
		out->n_reloads = atomic_load(&server->seams.settings->n_reloads);
		out->n_reload_failures = atomic_load(&server->seams.settings->n_failures);
	}
}
