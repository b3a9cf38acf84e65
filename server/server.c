/*
 * The server's life and its turn.
 *
 * A turn: take in events, reap the backend, answer a few control requests, let time pass (timeouts, leases,
 * the known-answer decode), give back blocks of closed sessions, wake who waits, seal and submit. Every step
 * is bounded, so no client can make the others wait for more than one turn's share.
 */
#include "server/internal.h"

#include "core/prefix.h"

#include <poll.h>
#include <string.h>

#include "core/memory.h"
#include "server/checkpoint.h"
#include "server/spill.h"
#include "server/tenants.h"

static const char watch_backend, watch_mailbox; /* their addresses tell the watched descriptors apart */

static enum kv_status make_pools(struct srv_server *server, struct kv_error *err)
{
	size_t i;
	json_t *json;

	json_array_foreach (server->options->pools, i, json) {
		struct kv_pool_spec *spec = NULL;
		struct kv_pool *pool;
		enum kv_status status = kv_pool_spec_create_with(json, kv_files_system(), &spec, err);

		if (status == KV_OK)
			status = srv_pool_create(server, spec, &pool, err);
		if (status != KV_OK) {
			kv_pool_spec_destroy(spec);
			srv_options_wrap_pool(server->options, i, err);
			return status;
		}
	}
	return KV_OK;
}

static void init_caps(struct srv_server *server)
{
	const struct kvp_header goaway = {
		.opcode = KVP_OP_GOAWAY,
		.flags = KVP_FLAG_RESPONSE,
		.status = KV_DRAINING,
	};

	server->caps = (struct kvp_caps){
		.features = SRV_FEATURES,
		.frame_bytes_max = server->options->frame_bytes_max,
		.items_max = KVP_ITEMS_MAX,
		.q_len_max = SRV_Q_LEN_MAX,
	};
	kvp_header_encode(&goaway, server->goaway_frame);
}

static enum kv_status watch_all(struct srv_server *server, struct kv_error *err)
{
	struct kv_io *io = server->io;

	server->backend_fd = server->backend->ops->event_fd(server->backend);
	if (server->backend_fd >= 0) {
		const enum kv_status status =
			io->ops->watch(io, server->backend_fd, (void *)(uintptr_t)&watch_backend, err);

		if (status != KV_OK)
			return status;
	}
	if (!server->seams.mailbox)
		return KV_OK;
	return io->ops->watch(io, server->seams.mailbox->event_fd, (void *)(uintptr_t)&watch_mailbox, err);
}

static enum kv_status build(struct srv_server *server, struct kv_error *err)
{
	const struct kv_domain_limits limits = {
		.sessions_max = server->options->sessions_max,
		.sequences_max = server->options->sequences_max,
		.lease_ms = server->options->lease_ms,
		.restored_lease_ms = server->options->restored_lease_ms,
		.lease_ms_max = 86400000,
		.evict_high_percent = server->options->evict_high_percent,
		.evict_low_percent = server->options->evict_low_percent,
	};
	enum kv_status status;

	init_caps(server);
	if ((status = kv_domain_create(&limits, server->seams.random, &server->domain, err)) != KV_OK)
		return status;
	srv_tenants_apply(server->options->tenants, kv_domain_tenants(server->domain));
	if ((status = server->backend->ops->arena_create(server->backend, server->seams.arena_bytes, err)) !=
		KV_OK)
		return status;
	if ((status = kv_arena_create(server->seams.arena_bytes, &server->arena, err)) != KV_OK)
		return status;
	if ((status = srv_conns_init(server, err)) != KV_OK)
		return status;
	if ((status = srv_slots_init(server, err)) != KV_OK)
		return status;
	if ((status = srv_probe_init(server, err)) != KV_OK)
		return status;
	if ((status = make_pools(server, err)) != KV_OK)
		return status;
	if ((status = srv_spill_create(server, &server->spill, err)) != KV_OK)
		return status;
	if ((status = srv_checkpoint_create(server, &server->checkpoint, err)) != KV_OK)
		return status;
	return watch_all(server, err);
}

enum kv_status srv_server_create(const struct srv_options *options, const struct srv_seams *seams,
	struct srv_server **out, struct kv_error *err)
{
	struct srv_server *server = kv_alloc(1, sizeof(*server));

	if (!server)
		return kv_fail(err, KV_NO_MEMORY, "server of %zu bytes", sizeof(*server));
	server->options = options;
	server->seams = *seams;
	server->io = seams->io;
	server->backend = seams->backend;
	server->now_ns = server->started_ns = kv_clock_now_ns(seams->clock);
	server->last_event_ns = server->now_ns;
	srv_take_settings(server);
	server->audit.next_ns = server->now_ns + server->options->audit_interval_ms * KV_NS_PER_MS;
	const enum kv_status status = build(server, err);

	if (status != KV_OK) {
		server->seams.backend = NULL; /* stays the caller's */
		srv_server_destroy(server);
		return status;
	}
	*out = server;
	return KV_OK;
}

void srv_server_destroy(struct srv_server *server)
{
	if (!server)
		return;
	/* Batches hold memory of slots and lanes: the backend must be done with them first. */
	while (srv_scheduler_in_flight(server) > 0 || server->probe.is_running) {
		struct kv_batch *batch = server->backend->ops->reap(server->backend);
		struct pollfd ready = { .fd = server->backend_fd, .events = POLLIN };

		if (!batch)
			poll(&ready, 1, 1);
		else if (batch == &server->probe.batch)
			server->probe.is_running = false;
		else
			((struct srv_flight *)batch->user)->is_submitted = false;
	}
	srv_checkpoint_destroy(server->checkpoint);
	srv_audit_finish(server);
	if (server->domain) {
		for (struct kv_pool *pool; (pool = kv_domain_pool_at(server->domain, 0));) {
			server->backend->ops->pool_destroy(server->backend, pool->backend_pool);
			pool->backend_pool = NULL;
			srv_lane_close(server, &server->lanes[pool->pool_idx]);
			kv_domain_pool_remove(pool);
		}
	}
	srv_spill_destroy(server->spill);
	srv_probe_finish(server);
	srv_slots_finish(server);
	srv_conns_finish(server);
	kv_arena_destroy(server->arena);
	kv_domain_destroy(server->domain);
	if (server->seams.backend)
		server->backend->ops->destroy(server->backend);
	srv_settings_put(server->settings);
	kv_free(server);
}

enum kv_status srv_server_listen(struct srv_server *server, struct kv_error *err)
{
	for (uint32_t i = 0; i < server->options->n_listen; i++) {
		const enum kv_status status = server->io->ops->listen(server->io, &server->options->listen[i],
			server->listeners[i], sizeof(server->listeners[i]), err);

		if (status != KV_OK)
			return status;
		server->n_listeners = i + 1;
	}
	return KV_OK;
}

const char *srv_server_listener(const struct srv_server *server, uint32_t idx)
{
	return idx < server->n_listeners ? server->listeners[idx] : NULL;
}

/* ---- the turn ---- */

static void take_events(struct srv_server *server, int64_t timeout_ns)
{
	if (timeout_ns != 0 && server->backend->ops->will_sleep)
		server->backend->ops->will_sleep(server->backend);

	const int n = server->io->ops->wait(server->io, timeout_ns, server->events, SRV_EVENTS_PER_TURN);

	server->now_ns = kv_clock_now_ns(server->seams.clock);
	srv_scheduler_end_plans(server); /* answers have left, and nobody was heard since */
	if (n < 0) {
		srv_log(SRV_LOG_ERROR, "event loop broke: %s", strerror(-n));
		server->is_lost = true;
	}
	for (int i = 0; i < n; i++) {
		if (server->events[i].kind == KV_IO_FILE) {
			struct srv_file *file = kv_container_of(server->events[i].file, struct srv_file, op);

			file->done(file);
		} else if (server->events[i].kind != KV_IO_WATCHED) {
			srv_conn_event(server, &server->events[i]);
		}
	}
	if (n > 0)
		server->last_event_ns = server->now_ns;
}

/*
 * Those that go on have had their share of this turn. While others wait in the mailbox they get half of it:
 * what waits for a batch, perhaps of a backend that hangs, keeps nobody else from an answer.
 */
static void take_control(struct srv_server *server)
{
	const bool has_mail = server->seams.mailbox && !srv_mailbox_is_empty(server->seams.mailbox);
	const uint32_t n_parked_max = has_mail ? SRV_CONTROL_PER_TURN / 2 : SRV_CONTROL_PER_TURN;
	const uint32_t n_parked = server->n_parked < n_parked_max ? server->n_parked : n_parked_max;
	uint32_t n = 0;

	for (; n < n_parked; n++)
		srv_server_control(server, srv_control_unpark(server));
	for (; has_mail && n < SRV_CONTROL_PER_TURN; n++) {
		struct srv_control *control = srv_mailbox_take(server->seams.mailbox);

		if (!control)
			return;
		srv_server_control(server, control);
	}
}

/* No request is anywhere between its first byte and the last one of its reply. */
static bool is_quiet(const struct srv_server *server)
{
	if (server->slots[0].n_used > 0 || server->slots[1].n_used > 0 || srv_scheduler_in_flight(server) > 0)
		return false;
	kv_list_for_each (node, &server->conns_open) {
		const struct srv_conn *conn = kv_container_of(node, struct srv_conn, link);

		if (conn->is_send_posted || conn->filling || conn->sm.state == CONN_PAYLOAD)
			return false;
	}
	return true;
}

/* What is in flight is answered, or its time is over, too. */
static bool is_answered(const struct srv_server *server)
{
	return server->stopped_ns != 0 &&
		(is_quiet(server) || server->now_ns >= server->drain_end_ns + SRV_DRAIN_LAST_NS);
}

/* Sessions go on until nobody that is here has one, or the time is over. Behind that comes the snapshot. */
static void drain_step(struct srv_server *server)
{
	struct kv_error err = { 0 };

	if (!server->is_draining)
		return;
	if (server->stopped_ns == 0 &&
		(server->now_ns >= server->drain_end_ns || kv_domain_n_owned(server->domain) == 0)) {
		server->stopped_ns = server->now_ns;
		if (!server->options->snapshot_on_drain && kv_domain_n_sessions(server->domain) > 0)
			srv_log(SRV_LOG_WARNING,
				"%u sessions end here, and their rows with them: snapshot_on_drain is off",
				kv_domain_n_sessions(server->domain));
	}
	if (!server->options->snapshot_on_drain || server->has_saved || !is_answered(server) ||
		srv_checkpoint_is_running(server->checkpoint))
		return;
	server->has_saved = true;
	if (srv_checkpoint_save(server->checkpoint, SRV_CHECKPOINT_DRAIN_NAME, 0, &err) != KV_OK) {
		server->is_save_refused = true;
		srv_log(SRV_LOG_ERROR, "no snapshot while draining: %s", err.msg);
	}
}

/* At most a line a second; what came meanwhile is in the next one. */
static void tell_expired(struct srv_server *server)
{
	const uint64_t n = server->counters.sessions_expired - server->n_expired_told;

	if (n == 0 ||
		(server->expired_told_ns != 0 &&
			server->now_ns - server->expired_told_ns < 1000 * KV_NS_PER_MS))
		return;
	server->n_expired_told += n;
	server->expired_told_ns = server->now_ns;
	srv_log(SRV_LOG_INFO,
		"lease ran out: %llu sessions closed, and their rows with them: nobody was heard for so "
		"long; "
		"%llu since the start",
		(unsigned long long)n, (unsigned long long)server->n_expired_told);
}

static void pass_time(struct srv_server *server)
{
	drain_step(server);
	if (server->now_ns >= server->next_timer_ns) {
		srv_conns_scan_timed(server);
		server->next_timer_ns = server->now_ns + SRV_TIMER_SCAN_NS;
	}
	if (kv_session_next_expiry_ns(server->domain) <= server->now_ns)
		server->counters.sessions_expired +=
			kv_session_expire(server->domain, server->now_ns, SRV_EXPIRE_PER_TURN);
	tell_expired(server);
	srv_probe_turn(server);
}

/* A reload published new ones: from this turn on everything works with them. */
void srv_take_settings(struct srv_server *server)
{
	struct srv_settings_box *box = server->seams.settings;

	if (!box || atomic_load(&box->generation) == server->settings_generation)
		return;
	/* First the number: whoever publishes in between is seen next turn. */
	server->settings_generation = atomic_load(&box->generation);
	struct srv_settings *old = server->settings;

	server->settings = srv_settings_get(box);
	server->options = &server->settings->options;
	/* What was changed over HTTP holds until the list in the file is another. */
	if (server->domain && old && !json_equal(old->options.tenants, server->options->tenants))
		srv_tenants_apply(server->options->tenants, kv_domain_tenants(server->domain));
	srv_settings_put(old);
}

void srv_server_turn(struct srv_server *server, int64_t timeout_ns)
{
	srv_take_settings(server);
	take_events(server, timeout_ns);
	srv_scheduler_reap(server);
	take_control(server);
	pass_time(server);
	kv_prefix_expire(server->domain, server->now_ns, SRV_PREFIX_LOOKS);
	server->n_work = kv_domain_release(server->domain, SRV_RELEASE_PER_TURN);
	srv_conns_retry_waiting(server);
	srv_checkpoint_turn(server->checkpoint);
	srv_spill_turn(server->spill);
	srv_audit_turn(server);
	srv_scheduler_seal(server);
	srv_scheduler_reap(server); /* small batches are finished inside submit() */
	if (server->is_lost) {
		srv_scheduler_lose(server);
		srv_checkpoint_lose(server->checkpoint);
		srv_spill_lose(server->spill);
	}
	server->turns++;
	if (server->seams.pulse)
		atomic_store(&server->seams.pulse->turn_ns, server->now_ns);
#ifdef KV_AUDIT_TURNS
	srv_audit_whole(server);
#endif
}

static int64_t until(uint64_t now_ns, uint64_t then_ns, int64_t bound_ns)
{
	const int64_t left = then_ns > now_ns ? (int64_t)(then_ns - now_ns) : 0;

	return left < bound_ns ? left : bound_ns;
}

static bool is_waiting_work(struct srv_server *server)
{
	const bool has_waiting = !kv_list_is_empty(&server->waiting_session) ||
		!kv_list_is_empty(&server->slots[0].waiting) || !kv_list_is_empty(&server->slots[1].waiting);

	return (server->has_finished && has_waiting) ||
		(server->replies_free && !kv_list_is_empty(&server->waiting_reply));
}

/*
 * A device works without us, and to be woken at its end takes as long as many a batch. So short batches are
 * polled for, the last one telling what is short; nothing else waits for the processor meanwhile but who came
 * to the socket, which every turn looks at.
 */
static bool is_worth_polling(const struct srv_server *server)
{
	return server->backend->ops->will_sleep && srv_scheduler_in_flight(server) > 0 &&
		server->batch_ns < SRV_POLL_NS && srv_scheduler_oldest_ns(server) < SRV_POLL_NS;
}

int64_t srv_server_wait_ns(struct srv_server *server)
{
	const uint64_t now_ns = kv_clock_now_ns(server->seams.clock);
	/* /livez wants a turn now and then, also when nothing happens. */
	int64_t wait_ns = 1000 * (int64_t)KV_NS_PER_MS;

	if (srv_scheduler_has_work(server) || kv_domain_has_zombies(server->domain) ||
		is_waiting_work(server) || srv_checkpoint_has_work(server->checkpoint) ||
		srv_spill_has_work(server->spill))
		return 0;
	if (server->seams.mailbox && !srv_mailbox_is_empty(server->seams.mailbox))
		return 0;
	/* Some wait for a batch to be sealed: not at once again, but soon. */
	if (server->parked)
		wait_ns = until(now_ns, now_ns + KV_NS_PER_MS / 10, wait_ns);
	if (is_worth_polling(server))
		return 0;
	if (server->options->busy_poll_us > 0 &&
		now_ns - server->last_event_ns < server->options->busy_poll_us * KV_NS_PER_US)
		return 0;
	/* Blocks come back with batches and sessions, and in turns like these. */
	if (!kv_list_is_empty(&server->waiting_blocks))
		wait_ns = until(now_ns, now_ns + 2 * KV_NS_PER_MS, wait_ns);
	if (!kv_list_is_empty(&server->timed))
		wait_ns = until(now_ns, server->next_timer_ns, wait_ns);
	const uint64_t expiry_ns = kv_session_next_expiry_ns(server->domain);

	if (expiry_ns != UINT64_MAX)
		wait_ns = until(now_ns, expiry_ns, wait_ns);
	if (srv_audit_next_ns(server) != UINT64_MAX)
		wait_ns = until(now_ns, srv_audit_next_ns(server), wait_ns);
	if (srv_spill_next_ns(server->spill) != UINT64_MAX && !server->is_lost)
		wait_ns = until(now_ns, srv_spill_next_ns(server->spill), wait_ns);
	/* Its end is an event, and a lost device gets none: neither must make us spin. */
	if (!server->probe.is_running && !server->is_lost)
		wait_ns = until(now_ns, server->probe.next_ns, wait_ns);
	/* A snapshot that takes longer ends with an event. */
	if (server->is_draining && server->stopped_ns == 0)
		wait_ns = until(now_ns, server->drain_end_ns, wait_ns);
	else if (server->is_draining && server->now_ns < server->drain_end_ns + SRV_DRAIN_LAST_NS)
		wait_ns = until(now_ns, server->drain_end_ns + SRV_DRAIN_LAST_NS, wait_ns);
	if (srv_scheduler_is_refused(server) ||
		(server->backend_fd < 0 && srv_scheduler_in_flight(server) > 0))
		wait_ns = until(now_ns, now_ns + KV_NS_PER_MS, wait_ns);
	return wait_ns;
}

/* ---- the end ---- */

void srv_server_drain(struct srv_server *server)
{
	if (server->is_draining)
		return;
	server->is_draining = true;
	srv_log(SRV_LOG_INFO,
		"stopping: sessions (%u) go on for at most %u ms (drain_timeout_ms), what is in flight is "
		"answered",
		kv_domain_n_sessions(server->domain), server->options->drain_timeout_ms);
	server->drain_end_ns = server->now_ns + server->options->drain_timeout_ms * KV_NS_PER_MS;
	server->io->ops->stop_listening(server->io);
	srv_conns_goaway(server);
	drain_step(server);
}

bool srv_server_is_done(const struct srv_server *server)
{
	if (server->is_lost)
		return is_quiet(server) || server->now_ns - server->last_event_ns > 1000 * KV_NS_PER_MS;
	if (!server->is_draining || srv_checkpoint_is_running(server->checkpoint))
		return false;
	if (server->options->snapshot_on_drain && !server->has_saved)
		return false;
	return is_answered(server);
}

bool srv_server_is_draining(const struct srv_server *server)
{
	return server->is_draining;
}

bool srv_server_is_stuck(const struct srv_server *server)
{
	return srv_scheduler_oldest_ns(server) >= SRV_BATCH_STUCK_NS;
}

int srv_server_exit_code(const struct srv_server *server)
{
	struct srv_checkpoint_view last;

	if (server->is_lost)
		return 4;
	if (!server->has_saved)
		return 0;
	srv_checkpoint_status(server->checkpoint, &last);
	return server->is_save_refused || last.status != KV_OK ? 1 : 0;
}

void srv_server_answer_waiting(struct srv_server *server)
{
	for (uint32_t i = 0; i < server->probe.n_deep; i++) {
		struct srv_control *control = server->probe.deep[i];

		control->status = kv_fail(&control->error, KV_DRAINING, "the daemon is stopping");
		control->done(control);
	}
	server->probe.n_deep = 0;
	srv_control_stop(server);
}

void srv_server_describe(struct srv_server *server, struct kv_backend_info *device, struct srv_gauges *gauges)
{
	server->backend->ops->info(server->backend, device);
	srv_server_gauges(server, gauges);
}

/* ---- for tests ---- */

struct kv_domain *srv_server_domain(struct srv_server *server)
{
	return server->domain;
}

const struct srv_counters *srv_server_counters(const struct srv_server *server)
{
	return &server->counters;
}
