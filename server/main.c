/*
 * tqkvd: wiring only. Reads the options, chooses io and backend, starts the server and the control thread,
 * turns the loop until it is drained or lost. Exit codes: 0 drained, 1 drained without the snapshot that was
 * asked for, 2 usage or configuration, 3 a backend or listener could not start, 4 device lost.
 */
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/backend_cpu.h"
#include "core/fast.h"
#include "core/system_memory.h"
#include "gpu/backend_cuda.h"
#include "server/http.h"
#include "server/io_backends.h"
#include "server/lock_file.h"
#include "server/log.h"
#include "server/notify.h"
#include "server/options.h"
#include "server/server.h"
#include "server/settings.h"

enum { EXIT_DRAINED = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_NO_START = 3 };

static volatile sig_atomic_t n_stop_signals, n_reload_signals;
static volatile sig_atomic_t wake_fd =
	-1; /* the mailbox's: a signal between looking and waiting must not be slept over */

static void on_signal(int signal_number)
{
	const int error = errno;
	const uint64_t one = 1;

	if (signal_number == SIGHUP)
		n_reload_signals++;
	else
		n_stop_signals++;
	if (wake_fd >= 0)
		(void)!write(wake_fd, &one, sizeof(one));
	errno = error;
}

/* No SA_RESTART: the waiting loop must come back and look. */
static void catch_signals(void)
{
	struct sigaction action = { .sa_handler = on_signal };

	sigemptyset(&action.sa_mask);
	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGHUP, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
}

#define SPARE_DESCRIPTORS 256u /* of what is no connection of the data port: files, the control API */

/*
 * One descriptor per connection: as many as the system lets us have. Fewer than asked for: how many
 * connections there may be, so that peers that fill the data port leave the control API and snapshots what
 * they need.
 */
static uint32_t raise_descriptor_limit(const struct srv_options *options)
{
	struct rlimit limit;
	const rlim_t wanted = (rlim_t)options->connections_max + SPARE_DESCRIPTORS;

	if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted)
		return options->connections_max;

	const rlim_t before = limit.rlim_cur;

	limit.rlim_cur = limit.rlim_max < wanted ? limit.rlim_max : wanted;
	if (setrlimit(RLIMIT_NOFILE, &limit) != 0)
		limit.rlim_cur = before;
	if (limit.rlim_cur >= wanted)
		return options->connections_max;

	const rlim_t spare = limit.rlim_cur < 2 * SPARE_DESCRIPTORS ? limit.rlim_cur / 2 : SPARE_DESCRIPTORS;
	const uint32_t n_max = limit.rlim_cur - spare > 1 ? (uint32_t)(limit.rlim_cur - spare) : 1;

	srv_log(SRV_LOG_WARNING,
		"descriptors limited to %llu: %u connections at a time instead of connections_max %u",
		(unsigned long long)limit.rlim_cur, n_max, options->connections_max);
	return n_max;
}

static enum kv_status choose_io(const struct srv_options *options, uint32_t connections_max,
	struct kv_io **out, char *reason, size_t n_bytes, struct kv_error *err)
{
	struct kv_error denied = { 0 };
	enum kv_status status;

	if (options->io != SRV_IO_EPOLL) {
		status = srv_io_uring_create(options->read_ahead_buffers, connections_max, out, &denied);
		if (status == KV_OK) {
			snprintf(reason, n_bytes, "%s",
				options->io == SRV_IO_AUTO ? "available" : "asked for");
			return KV_OK;
		}
		if (options->io == SRV_IO_URING)
			return kv_fail(err, status, "%s", denied.msg);
		srv_log(SRV_LOG_WARNING, "using epoll: %s", denied.msg);
	}
	snprintf(reason, n_bytes, "%.150s", options->io == SRV_IO_EPOLL ? "asked for" : denied.msg);
	return srv_io_epoll_create(options->read_ahead_buffers, connections_max, out, err);
}

static enum kv_status choose_backend(const struct srv_options *options, struct kv_backend **out, char *reason,
	size_t n_bytes, struct kv_error *err)
{
	struct kv_error absent = { 0 };

	if (options->backend == SRV_BACKEND_AUTO || options->backend == SRV_BACKEND_CUDA) {
		const enum kv_status status = kvg_backend_cuda_create(0, out, &absent);

		if (status == KV_OK) {
			snprintf(reason, n_bytes, "%s",
				options->backend == SRV_BACKEND_AUTO ? "a device is present" : "asked for");
			return KV_OK;
		}
		if (options->backend == SRV_BACKEND_CUDA)
			return kv_fail(err, status, "backend cuda: %s", absent.msg);
	}
	snprintf(reason, n_bytes, "%.150s", options->backend == SRV_BACKEND_AUTO ? absent.msg : "asked for");
	uint32_t n_threads = options->threads;

	if (n_threads == 0) {
		const long n_cores = sysconf(_SC_NPROCESSORS_ONLN);

		n_threads = n_cores > 0 ? (uint32_t)n_cores : 1;
	}
	/* Processors without the kernels' instruction sets are served by the scalar one. */
	return kv_backend_cpu_create_with(
		n_threads, options->backend == SRV_BACKEND_CPU_SCALAR ? NULL : kv_fast_kernels(), out, err);
}

/* What the arena's memory can still give: the device's, or the machine's (or container's); 1 GiB where that
 * is unknown. */
static uint64_t free_memory_bytes(struct kv_backend *backend)
{
	uint64_t n_bytes = 0, total_bytes = 0;

	if (strcmp(backend->ops->name, "cuda") == 0) {
		kvg_backend_cuda_memory(backend, &n_bytes, &total_bytes);
		return n_bytes;
	}
	return kv_system_memory_available(&n_bytes) ? n_bytes : 1ull << 30;
}

/* SIGHUP: read on a thread of its own, so that files that are slow do not hold the loop. */
struct reloader {
	pthread_t thread;
	bool is_running;     /* a thread must be joined */
	atomic_bool is_over; /* and is done */
};

struct parts {
	struct srv_settings_box settings;
	struct srv_settings *first; /* what everything was started with */
	struct reloader reloader;
	struct srv_mailbox mailbox;
	struct srv_pulse pulse;
	struct srv_http *http;
	struct kv_io *io;
	struct kv_backend *backend;
	struct srv_server *server;
	struct srv_notify notify;
	int drain_lock_fd; /* -1: none */
	char drain_lock[320];
	char io_reason[160], backend_reason[160], http_bound[300];
};

static enum kv_status start_http(struct parts *parts, struct kv_error *err)
{
	const struct srv_options *options = &parts->first->options;
	const struct srv_http_seams seams = {
		.mailbox = &parts->mailbox,
		.pulse = &parts->pulse,
		.clock = kv_clock_system(),
		.settings = &parts->settings,
	};

	if (strcmp(options->http, "off") == 0 && strcmp(options->metrics_listen, "off") == 0)
		return KV_OK;
	return srv_http_start(
		options, &seams, &parts->http, parts->http_bound, sizeof(parts->http_bound), err);
}

/*
 * A drain replaces the snapshot that another daemon's may have just written, so a folder for it belongs to
 * one daemon. Taking the lock writes there: a drain that could not is told now, while there is nothing to
 * lose.
 */
static enum kv_status lock_drain(struct parts *parts, struct kv_error *err)
{
	const struct srv_options *options = &parts->first->options;
	const char *dir = options->snapshot_dir;

	if (!options->snapshot_on_drain || strcmp(dir, "off") == 0)
		return KV_OK;
	snprintf(parts->drain_lock, sizeof(parts->drain_lock), "%.300s/.drain.lock", dir);
	parts->drain_lock_fd = srv_lock_file_take(parts->drain_lock);
	if (parts->drain_lock_fd >= 0)
		return KV_OK;

	const int reason = -parts->drain_lock_fd;

	parts->drain_lock_fd = -1;
	if (reason == EWOULDBLOCK)
		return kv_fail(err, KV_IO_ERROR,
			"another process writes its snapshot into %s when it drains (it holds %s): each "
			"needs a "
			"snapshot_dir of its own",
			dir, parts->drain_lock);
	if (reason == ENOLCK || reason == EOPNOTSUPP) { /* network file systems */
		srv_log(SRV_LOG_WARNING,
			"%s: %s: nothing keeps another daemon from draining into this folder",
			parts->drain_lock, strerror(reason));
		return KV_OK;
	}
	return kv_fail(err, KV_IO_ERROR,
		"snapshot_dir: %s: %s: the snapshot of a drain could not be written there", parts->drain_lock,
		strerror(reason));
}

static enum kv_status start(struct parts *parts, struct kv_error *err)
{
	const struct srv_options *options = &parts->first->options;
	struct srv_seams seams = { .clock = kv_clock_system(), .random = kv_random_system() };
	enum kv_status status;

	const uint32_t connections_max = raise_descriptor_limit(options);

	if ((status = srv_mailbox_init(&parts->mailbox, err)) != KV_OK)
		return status;
	wake_fd = parts->mailbox.event_fd;
	if ((status = choose_io(options, connections_max, &parts->io, parts->io_reason,
		     sizeof(parts->io_reason), err)) != KV_OK)
		return status;
	if ((status = choose_backend(options, &parts->backend, parts->backend_reason,
		     sizeof(parts->backend_reason), err)) != KV_OK)
		return status;
	if ((status = srv_options_memory_bytes(
		     options, free_memory_bytes(parts->backend), &seams.arena_bytes, err)) != KV_OK)
		return status;
	seams.io = parts->io;
	seams.backend = parts->backend;
	seams.mailbox = &parts->mailbox;
	seams.pulse = &parts->pulse;
	seams.settings = &parts->settings;
	seams.backend_reason = parts->backend_reason;
	seams.io_reason = parts->io_reason;
	if ((status = srv_server_create(options, &seams, &parts->server, err)) != KV_OK)
		return status;
	parts->backend = NULL; /* the server's now */
	if ((status = lock_drain(parts, err)) != KV_OK)
		return status;
	if ((status = srv_server_restore(parts->server, err)) != KV_OK)
		return status;
	if ((status = srv_server_listen(parts->server, err)) != KV_OK)
		return status;
	if ((status = start_http(parts, err)) != KV_OK) {
		srv_options_tell_environment(options, err);
		return status;
	}
	/* The last step: a start that fails leaves the snapshot to the next one. */
	return srv_server_settle_drained(parts->server, err);
}

static void say_started(struct parts *parts)
{
	struct kv_backend_info device;
	struct srv_gauges gauges;

	srv_server_describe(parts->server, &device, &gauges);
	srv_log(SRV_LOG_INFO, "tqkvd %s commit %s", srv_version, srv_commit);
	srv_log(SRV_LOG_INFO, "backend %s (%s), instruction set %s, io %s (%s)", device.device,
		parts->backend_reason, device.instruction_set, parts->io->ops->name, parts->io_reason);
	srv_log(SRV_LOG_INFO, "memory: pools %llu bytes, request slots %llu bytes",
		(unsigned long long)gauges.arena_bytes, (unsigned long long)gauges.slots_bytes);
	for (uint32_t i = 0; srv_server_listener(parts->server, i); i++)
		srv_log(SRV_LOG_INFO, "listening on %s", srv_server_listener(parts->server, i));
	const struct srv_options *options = &parts->first->options;
	const bool has_tls = strcmp(options->http_certificate_file, "off") != 0;

	if (parts->http_bound[0])
		srv_log(SRV_LOG_INFO, "control API on http%s://%s", has_tls ? "s" : "", parts->http_bound);
	if (options->insecure && parts->first->tokens.n == 0)
		srv_log(SRV_LOG_WARNING, "insecure: nothing authenticates the listeners");
}

static void *reload(void *cls)
{
	struct parts *parts = cls;
	struct srv_reload found = { 0 };
	struct kv_error err = { 0 };
	const uint64_t one = 1;

	/* Said in the log and counted where it fails; there is nobody else to tell. */
	(void)!srv_settings_reload(&parts->settings, &found, &err);
	atomic_store(&parts->reloader.is_over, true);
	(void)!write(parts->mailbox.event_fd, &one, sizeof(one));
	return NULL;
}

static void end_reload(struct parts *parts)
{
	if (!parts->reloader.is_running)
		return;
	pthread_join(parts->reloader.thread, NULL);
	parts->reloader.is_running = false;
}

/* At most one at a time; a signal that comes meanwhile starts another one afterwards. */
static void look_after_reload(struct parts *parts, int *n_seen)
{
	char state[96];

	if (parts->reloader.is_running && atomic_load(&parts->reloader.is_over)) {
		end_reload(parts);
		srv_notify_send(&parts->notify, "READY=1");
	}
	if (n_reload_signals == *n_seen || parts->reloader.is_running)
		return;
	*n_seen = n_reload_signals;
	snprintf(state, sizeof(state), "RELOADING=1\nMONOTONIC_USEC=%llu",
		(unsigned long long)(kv_clock_now_ns(kv_clock_system()) / KV_NS_PER_US));
	srv_notify_send(&parts->notify, state);
	atomic_store(&parts->reloader.is_over, false);
	const int error = pthread_create(&parts->reloader.thread, NULL, reload, parts);

	parts->reloader.is_running = error == 0;
	if (error != 0)
		srv_log(SRV_LOG_ERROR, "reload: cannot start a thread: %s", strerror(error));
}

static void turn_until_done(struct parts *parts)
{
	struct srv_server *server = parts->server;
	int n_seen = 0, n_reloads_seen = 0;
	bool has_said_stopping = false;

	while (!srv_server_is_done(server)) {
		look_after_reload(parts, &n_reloads_seen);
		if (n_stop_signals > n_seen) {
			n_seen = n_stop_signals;
			srv_server_drain(server);
		}
		/* By a signal, or over HTTP. */
		if (srv_server_is_draining(server) && !has_said_stopping) {
			has_said_stopping = true;
			srv_notify_send(&parts->notify, "STOPPING=1");
		}
		int64_t wait_ns = srv_server_wait_ns(server);

		/* A loop that turns over a backend that stands still is no sign of life. */
		if (!srv_server_is_stuck(server))
			wait_ns =
				srv_notify_turn(&parts->notify, kv_clock_now_ns(kv_clock_system()), wait_ns);
		srv_server_turn(server, wait_ns);
	}
}

static void stop(struct parts *parts)
{
	struct srv_control *control;

	end_reload(parts);
	/* Nobody turns the loop any more: what is in the mailbox is answered here, so that no HTTP reply
	 * hangs. */
	srv_mailbox_close(&parts->mailbox);
	while ((control = srv_mailbox_take(&parts->mailbox))) {
		control->status = kv_fail(&control->error, KV_DRAINING, "the daemon is stopping");
		control->done(control);
	}
	if (parts->server)
		srv_server_answer_waiting(parts->server);
	srv_http_stop(parts->http);
	/* The io before the server: until its operations have ended, the kernel may write into request slots.
	 */
	if (parts->io)
		parts->io->ops->destroy(parts->io);
	srv_server_destroy(parts->server);
	srv_lock_file_drop(parts->drain_lock, parts->drain_lock_fd);
	if (parts->backend)
		parts->backend->ops->destroy(parts->backend);
	wake_fd = -1;
	srv_mailbox_finish(&parts->mailbox);
	srv_notify_finish(&parts->notify);
	srv_settings_put(parts->first);
	srv_settings_finish(&parts->settings);
}

/*
 * A drain would find out too late, with rows in hand and nowhere to put them. The daemon makes no folder: one
 * that is missing may be a disk that was not mounted.
 */
static enum kv_status check_snapshot_dir(const struct srv_options *options, struct kv_error *err)
{
	const char *dir = options->snapshot_dir;
	struct stat found;

	if (strcmp(dir, "off") == 0)
		return KV_OK;
	if (stat(dir, &found) != 0)
		return kv_fail(err, KV_BAD_CONFIG, "snapshot_dir: %.200s: %s%s", dir, strerror(errno),
			errno == ENOENT ? "; make it, and let the daemon's user write there" : "");
	if (!S_ISDIR(found.st_mode))
		return kv_fail(err, KV_BAD_CONFIG, "snapshot_dir: %.200s is no folder", dir);
	if (access(dir, R_OK | W_OK | X_OK) != 0)
		return kv_fail(err, KV_BAD_CONFIG,
			"snapshot_dir: %.200s: %s; the daemon's user (%u) has to read and write there", dir,
			strerror(errno), (unsigned)geteuid());
	return KV_OK;
}

/* Reads the options. False: *exit_code says how the program ends. */
static bool read_settings(struct parts *parts, int argc, char **argv, int *exit_code)
{
	struct srv_options options;
	struct kv_error err = { 0 };

	switch (srv_options_parse(&options, argc, argv, kv_files_system(), &err)) {
	case SRV_OPTIONS_EXIT_OK:
		*exit_code = EXIT_DRAINED;
		return false;
	case SRV_OPTIONS_USAGE:
		fprintf(stderr, "tqkvd: %s\n", err.msg);
		*exit_code = EXIT_USAGE;
		return false;
	case SRV_OPTIONS_RUN:
		break;
	}
	const bool is_check_only = options.is_check_only;
	enum kv_status status = check_snapshot_dir(&options, &err);

	if (status != KV_OK)
		srv_options_tell_environment(&options, &err);
	else
		status = srv_settings_init(&parts->settings, &options, argc, argv, kv_files_system(), &err);
	if (status != KV_OK) {
		fprintf(stderr, "tqkvd: %s\n", err.msg);
		srv_options_finish(&options);
		*exit_code = EXIT_USAGE;
		return false;
	}
	if (!is_check_only)
		return true;
	printf("configuration is valid\n");
	srv_settings_finish(&parts->settings);
	*exit_code = EXIT_DRAINED;
	return false;
}

int main(int argc, char **argv)
{
	static struct parts parts;
	struct kv_error err = { 0 };
	int exit_code = 0;

	parts.mailbox.event_fd = parts.drain_lock_fd = -1;
	if (!read_settings(&parts, argc, argv, &exit_code))
		return exit_code;
	parts.first = srv_settings_get(&parts.settings);
	catch_signals();
	srv_notify_init(&parts.notify);
	const enum kv_status status = start(&parts, &err);

	if (status != KV_OK) {
		srv_log(SRV_LOG_ERROR, "cannot start: %s", err.msg);
		stop(&parts);
		return status == KV_BAD_CONFIG || status == KV_UNSUPPORTED ? EXIT_USAGE : EXIT_NO_START;
	}
	say_started(&parts);
	srv_notify_send(&parts.notify, "READY=1");
	turn_until_done(&parts);
	exit_code = srv_server_exit_code(parts.server);
	srv_log(exit_code == 1 ? SRV_LOG_ERROR : SRV_LOG_INFO,
		exit_code == 0           ? "drained"
			: exit_code == 1 ? "drained without its snapshot: what it held is gone"
					 : "device lost");
	stop(&parts);
	return exit_code;
}
