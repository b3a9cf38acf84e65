/*
 * Life of the control thread: start, requests coming in, calls going to the loop and back, stop. What a
 * request means is in http_routes.c; who owns what when is in http_internal.h.
 *
 * A connection is suspended before its call is posted: the loop may answer before post() has returned, and
 * resuming a connection that is not suspended yet would be lost. A client that goes away while it is
 * suspended is noticed when the answer is sent; nothing is freed before that.
 */
#include "server/http.h"

#include <errno.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_rules.h"
#include "server/io_address.h"
#include "server/log.h"

#define LISTEN_BACKLOG 128

static uint64_t monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

static struct timespec to_timespec(uint64_t time_ns)
{
	const struct timespec time = {
		.tv_sec = (time_t)(time_ns / 1000000000ull),
		.tv_nsec = (long)(time_ns % 1000000000ull),
	};

	return time;
}

/* Frees http when this was the last reference. Called with the lock held; it is released. */
static void unref_and_unlock(struct srv_http *http)
{
	const bool is_last = --http->n_refs == 0;

	pthread_mutex_unlock(&http->lock);
	if (!is_last)
		return;
	pthread_cond_destroy(&http->changed);
	pthread_mutex_destroy(&http->lock);
	kv_free(http);
}

/* ---- calls ---- */

void srv_http_call_free(struct srv_http_call *call)
{
	if (!call)
		return;
	kv_pool_spec_destroy(call->control.spec);
	kv_free(call);
}

/* Loop thread. */
static void on_answered(struct srv_control *control)
{
	struct srv_http_call *call = kv_container_of(control, struct srv_http_call, control);
	struct srv_http *http = call->http;

	pthread_mutex_lock(&http->lock);
	if (call->request) {
		kv_list_remove(&call->link);
		call->request->wait = SRV_HTTP_ANSWERED;
		MHD_resume_connection(call->request->connection);
	} else {
		srv_http_call_free(call);
	}
	unref_and_unlock(http); /* http may be gone below this line */
}

/* Takes the call from its request, which answers without it. Under lock; done() will free the call. */
static void give_up(struct srv_http_call *call, enum srv_http_wait why)
{
	struct srv_http_request *request = call->request;

	kv_list_remove(&call->link);
	call->request = NULL;
	request->call = NULL;
	request->wait = why;
	MHD_resume_connection(request->connection);
}

void srv_http_post(struct srv_http_request *request, struct srv_http_call *call)
{
	struct srv_http *http = request->http;

	MHD_suspend_connection(request->connection);
	call->http = http;
	call->request = request;
	call->control.done = on_answered;
	call->deadline_ns = monotonic_ns();
	pthread_mutex_lock(&http->lock);
	call->deadline_ns += http->answer_timeout_ms * KV_NS_PER_MS;
	http->n_waiting++;
	request->call = call;
	request->wait = SRV_HTTP_WAITING;
	/* The loop may take it at once; its done() waits for this lock. */
	if (!http->is_stopping && srv_mailbox_post(http->mailbox, &call->control)) {
		http->n_refs++;
		kv_list_push_back(&http->calls, &call->link);
		pthread_cond_broadcast(&http->changed);
		pthread_mutex_unlock(&http->lock);
		return;
	}
	pthread_mutex_lock(&http->mailbox->lock);
	const bool is_closed = http->is_stopping || http->mailbox->is_closed;

	pthread_mutex_unlock(&http->mailbox->lock);
	give_up(call, is_closed ? SRV_HTTP_STOPPED : SRV_HTTP_REFUSED);
	pthread_mutex_unlock(&http->lock);
	srv_http_call_free(call);
}

/* Resumes requests whose call the loop did not answer in time. */
static void *watch(void *cls)
{
	struct srv_http *http = cls;

	pthread_setname_np(pthread_self(), "tqkvd-http-wd");
	pthread_mutex_lock(&http->lock);
	while (!http->is_stopping) {
		struct kv_list_node *first = kv_list_first(&http->calls);

		if (!first) {
			pthread_cond_wait(&http->changed, &http->lock);
			continue;
		}
		struct srv_http_call *call = kv_container_of(first, struct srv_http_call, link);

		if (monotonic_ns() >= call->deadline_ns) {
			give_up(call, SRV_HTTP_LATE);
			continue;
		}
		const struct timespec until = to_timespec(call->deadline_ns);

		pthread_cond_timedwait(&http->changed, &http->lock, &until);
	}
	pthread_mutex_unlock(&http->lock);
	return NULL;
}

/* ---- requests ---- */

static void on_completed(
	void *cls, struct MHD_Connection *connection, void **con_cls, enum MHD_RequestTerminationCode why)
{
	struct srv_http *http = cls;
	struct srv_http_request *request = *con_cls;
	struct srv_http_call *unused = NULL;

	(void)connection;
	(void)why;
	if (!request)
		return;
	*con_cls = NULL;
	pthread_mutex_lock(&http->lock);
	/* A suspended request never completes, so the loop does not have this call. */
	KV_ASSERT(request->wait != SRV_HTTP_WAITING);
	unused = request->call;
	if (request->wait != SRV_HTTP_NOT_POSTED) {
		http->n_waiting--;
		pthread_cond_broadcast(&http->changed);
	}
	pthread_mutex_unlock(&http->lock);
	srv_http_call_free(unused);
	kv_free(request->body);
	kv_free(request);
}

/* First callback: only headers are there. Answering here closes the connection, which is right for a huge
 * body only. */
static enum MHD_Result begin(struct srv_http *http, struct MHD_Connection *connection, void **con_cls)
{
	struct srv_http_request *request = kv_alloc(1, sizeof(*request));
	uint64_t length_bytes = 0;

	if (!request)
		return MHD_NO;
	request->http = http;
	request->connection = connection;
	*con_cls = request;
	const char *length =
		MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);

	if (length &&
		(!srv_http_read_u64(length, UINT64_MAX, &length_bytes) ||
			length_bytes > SRV_HTTP_BODY_BYTES_MAX))
		return srv_http_problem(request, MHD_HTTP_CONTENT_TOO_LARGE, "TOO_LARGE",
			"the body is larger than 65536 bytes");
	return MHD_YES;
}

static enum MHD_Result collect(struct srv_http_request *request, const char *bytes, size_t n_bytes)
{
	const uint64_t room = request->body_bytes < SRV_HTTP_BODY_BYTES_MAX
		? SRV_HTTP_BODY_BYTES_MAX - request->body_bytes
		: 0;
	const size_t n_kept = n_bytes < room ? n_bytes : (size_t)room;

	if (!request->body) {
		request->body = kv_alloc(SRV_HTTP_BODY_BYTES_MAX + 1, 1);
		if (!request->body)
			return MHD_NO;
	}
	memcpy(request->body + (SRV_HTTP_BODY_BYTES_MAX - room), bytes, n_kept);
	request->body_bytes += n_bytes;
	return request->body_bytes <= SRV_HTTP_DISCARD_BYTES_MAX ? MHD_YES : MHD_NO;
}

static enum MHD_Result on_request(void *cls, struct MHD_Connection *connection, const char *url,
	const char *method, const char *version, const char *upload_data, size_t *upload_data_bytes,
	void **con_cls)
{
	struct srv_http *http = cls;
	struct srv_http_request *request = *con_cls;

	(void)version;
	if (!request)
		return begin(http, connection, con_cls);
	if (*upload_data_bytes > 0) {
		const size_t n_bytes = *upload_data_bytes;

		*upload_data_bytes = 0;
		return collect(request, upload_data, n_bytes);
	}
	pthread_mutex_lock(&http->lock);
	const enum srv_http_wait wait = request->wait;

	pthread_mutex_unlock(&http->lock);
	if (wait == SRV_HTTP_NOT_POSTED)
		return srv_http_dispatch(request, url, method);
	return srv_http_finish(request);
}

/* Escapes stay as they are: http_routes.c undoes them where it knows what may stand there, and refuses zero
 * bytes. */
static size_t keep_escapes(void *cls, struct MHD_Connection *connection, char *text)
{
	(void)cls;
	(void)connection;
	return strlen(text);
}

/* What libmicrohttpd has to say (a peer that sent nonsense, mostly) is worth a line when somebody looks for
 * it. */
static void log_library(void *cls, const char *fmt, va_list args)
{
	char line[256];

	(void)cls;
	vsnprintf(line, sizeof(line), fmt, args);
	line[strcspn(line, "\n")] = '\0';
	srv_log(SRV_LOG_DEBUG, "http: %s", line);
}

/* ---- start and stop ---- */

static enum kv_status bind_listener(
	struct srv_http *http, int *fd, char *bound, uint32_t bound_bytes_max, struct kv_error *err)
{
	const char *wanted = http->options->http;
	struct sockaddr_storage name;
	struct kv_io_address address;
	char text[sizeof(http->options->http) + 8];
	const int on = 1;

	memset(&address, 0, sizeof(address));
	snprintf(text, sizeof(text), "tcp:%s", wanted);
	const enum kv_status status = srv_io_address_parse(text, &address, err);

	if (status != KV_OK)
		return status;
	if (!http->options->insecure && !srv_io_address_is_loopback(&address))
		return kv_fail(err, KV_BAD_CONFIG,
			"http %s is not a loopback address and --insecure is not given", wanted);
	socklen_t name_bytes = srv_io_address_to_sockaddr(&address, &name);

	*fd = socket(name.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	if (*fd < 0)
		return kv_fail(err, KV_IO_ERROR, "http %s: socket: %s", wanted, strerror(errno));
	setsockopt(*fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (name.ss_family == AF_INET6)
		setsockopt(*fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
	if (bind(*fd, (struct sockaddr *)&name, name_bytes) != 0 || listen(*fd, LISTEN_BACKLOG) != 0)
		return kv_fail(err, KV_IO_ERROR, "http: cannot listen on %s: %s", wanted, strerror(errno));
	name_bytes = sizeof(name);
	if (getsockname(*fd, (struct sockaddr *)&name, &name_bytes) != 0)
		return kv_fail(err, KV_IO_ERROR, "http %s: getsockname: %s", wanted, strerror(errno));
	snprintf(http->host, sizeof(http->host), "%s", address.host);
	srv_io_sockaddr_text(&name, bound, bound_bytes_max);
	return KV_OK;
}

/* libmicrohttpd's thread and the watchdog; neither takes the process's signals. */
static enum kv_status start_threads(struct srv_http *http, int fd, struct kv_error *err)
{
	const unsigned flags = MHD_USE_INTERNAL_POLLING_THREAD | MHD_USE_EPOLL | MHD_ALLOW_SUSPEND_RESUME |
		MHD_USE_ITC | MHD_USE_ERROR_LOG;
	sigset_t all, before;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	const int error = pthread_create(&http->watchdog, NULL, watch, http);

	http->has_watchdog = error == 0;
	if (error == 0)
		http->daemon = MHD_start_daemon(flags, 0, NULL, NULL, on_request, http,
			MHD_OPTION_EXTERNAL_LOGGER, log_library, NULL, MHD_OPTION_LISTEN_SOCKET, fd,
			MHD_OPTION_NOTIFY_COMPLETED, on_completed, http, MHD_OPTION_UNESCAPE_CALLBACK,
			keep_escapes, NULL, MHD_OPTION_CONNECTION_LIMIT, SRV_HTTP_CONNECTIONS_MAX,
			MHD_OPTION_CONNECTION_TIMEOUT, SRV_HTTP_IDLE_S, MHD_OPTION_CONNECTION_MEMORY_LIMIT,
			(size_t)SRV_HTTP_MEMORY_BYTES, MHD_OPTION_END);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (error != 0)
		return kv_fail(err, KV_IO_ERROR, "http: cannot start a thread: %s", strerror(error));
	if (!http->daemon)
		return kv_fail(err, KV_IO_ERROR, "http: libmicrohttpd %s could not start: %s",
			MHD_get_version(), strerror(errno));
	return KV_OK;
}

static struct srv_http *create(void)
{
	struct srv_http *http = kv_alloc(1, sizeof(*http));
	pthread_condattr_t attr;

	if (!http)
		return NULL;
	http->n_refs = 1;
	http->answer_timeout_ms = SRV_HTTP_ANSWER_TIMEOUT_MS;
	kv_list_init(&http->calls);
	pthread_mutex_init(&http->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&http->changed, &attr);
	pthread_condattr_destroy(&attr);
	return http;
}

enum kv_status srv_http_start(const struct srv_options *options, struct srv_mailbox *mailbox,
	struct srv_pulse *pulse, struct kv_clock *clock, struct srv_http **out, char *bound,
	uint32_t bound_bytes_max, struct kv_error *err)
{
	struct srv_http *http = create();
	int fd = -1;

	if (!http)
		return kv_fail(err, KV_NO_MEMORY, "http: no memory");
	http->options = options;
	http->mailbox = mailbox;
	http->pulse = pulse;
	http->clock = clock;
	http->started_ns = kv_clock_now_ns(clock);
	enum kv_status status = bind_listener(http, &fd, bound, bound_bytes_max, err);

	if (status == KV_OK)
		status = start_threads(http, fd, err);
	if (status != KV_OK) {
		if (fd >= 0)
			close(fd);
		srv_http_stop(http);
		return status;
	}
	*out = http;
	return KV_OK;
}

/* Waits until every answer that was begun is with its client, or the time is over. Under lock. */
static void wait_for_answers(struct srv_http *http)
{
	const struct timespec until = to_timespec(monotonic_ns() + SRV_HTTP_STOP_MS * KV_NS_PER_MS);
	int error = 0;

	while (http->n_waiting > 0 && error == 0)
		error = pthread_cond_timedwait(&http->changed, &http->lock, &until);
}

/* What nobody takes any more, where the loop ended without draining. */
static void answer_leftovers(struct srv_mailbox *mailbox)
{
	struct srv_control *control;

	srv_mailbox_close(mailbox);
	while ((control = srv_mailbox_take(mailbox)) != NULL) {
		control->status = KV_DRAINING;
		control->done(control);
	}
}

void srv_http_stop(struct srv_http *http)
{
	if (!http)
		return;
	if (http->daemon)
		answer_leftovers(http->mailbox);
	pthread_mutex_lock(&http->lock);
	http->is_stopping = true;
	pthread_cond_broadcast(&http->changed);
	/* Drained means that the loop has nothing left. What it still has all the same must not keep us from
	 * stopping. */
	while (!kv_list_is_empty(&http->calls))
		give_up(kv_container_of(kv_list_first(&http->calls), struct srv_http_call, link),
			SRV_HTTP_STOPPED);
	if (http->daemon)
		wait_for_answers(http);
	pthread_mutex_unlock(&http->lock);
	if (http->daemon)
		MHD_stop_daemon(http->daemon);
	if (http->has_watchdog)
		pthread_join(http->watchdog, NULL);
	pthread_mutex_lock(&http->lock);
	unref_and_unlock(http);
}
