/*
 * Life of the control thread: start, requests coming in, calls going to the loop and back, stop. What a
 * request means is in http_request.c; who owns what when is in http_internal.h.
 *
 * A connection is suspended before its call is posted: the loop may answer before post() has returned, and
 * resuming a connection that is not suspended yet would be lost. A client that goes away while it is
 * suspended is noticed when the answer is sent; nothing is freed before that.
 */
#include "server/http.h"

#include <signal.h>
#include <string.h>
#include <time.h>

#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_rules.h"

uint64_t srv_http_monotonic_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

struct timespec srv_http_to_timespec(uint64_t time_ns)
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

void srv_http_give_up(struct srv_http_call *call, enum srv_http_wait why)
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
	call->deadline_ns = srv_http_monotonic_ns();
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
	srv_http_give_up(call, is_closed ? SRV_HTTP_STOPPED : SRV_HTTP_REFUSED);
	pthread_mutex_unlock(&http->lock);
	srv_http_call_free(call);
}

/* ---- requests ---- */

void srv_http_on_completed(
	void *cls, struct MHD_Connection *connection, void **con_cls, enum MHD_RequestTerminationCode why)
{
	struct srv_http_listener *listener = cls;
	struct srv_http *http = listener->http;
	struct srv_http_request *request = *con_cls;
	struct srv_http_call *unused = NULL;

	(void)why;
	srv_http_conn_answered(http, connection);
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
	if (request->body_bytes_max > SRV_HTTP_BODY_BYTES_MAX) {
		pthread_mutex_lock(&http->lock);
		http->n_large_bodies--;
		pthread_mutex_unlock(&http->lock);
	}
	srv_settings_put(request->settings);
	kv_free(request->body);
	kv_free(request);
}

/* First callback: only headers are there. Answering here closes the connection, which is right for a huge
 * body, and for one whose end a proxy in front of this daemon may see elsewhere. */
static enum MHD_Result begin(struct srv_http_listener *listener, struct MHD_Connection *connection,
	const char *url, const char *method, void **con_cls)
{
	struct srv_http *http = listener->http;
	struct srv_http_request *request = kv_alloc(1, sizeof(*request));
	uint64_t length_bytes = 0;

	if (!request)
		return MHD_NO;
	request->http = http;
	request->listener = listener;
	request->connection = connection;
	request->options = http->options;
	request->body_bytes_max = SRV_HTTP_BODY_BYTES_MAX;
	if (http->settings) {
		request->settings = srv_settings_get(http->settings);
		request->options = &request->settings->options;
	}
	atomic_fetch_add(&http->counters.requests, 1);
	*con_cls = request;
	if (!srv_http_conn_is_current(request))
		return MHD_NO;
	if (srv_http_has_two_ends(request))
		return srv_http_refuse(request, KV_BAD_ARG,
			"of Content-Length and Transfer-Encoding one may stand there, once");
	const char *length =
		MHD_lookup_connection_value(connection, MHD_HEADER_KIND, MHD_HTTP_HEADER_CONTENT_LENGTH);

	if (length && !srv_http_read_u64(length, UINT64_MAX, &length_bytes))
		length_bytes = UINT64_MAX;
	return length_bytes > SRV_HTTP_BODY_BYTES_MAX
		? srv_http_expect_body(request, url, method, length_bytes)
		: MHD_YES;
}

static enum MHD_Result collect(struct srv_http_request *request, const char *bytes, size_t n_bytes)
{
	const uint64_t room = request->body_bytes < request->body_bytes_max
		? request->body_bytes_max - request->body_bytes
		: 0;
	const size_t n_kept = n_bytes < room ? n_bytes : (size_t)room;

	if (!request->body) {
		request->body = kv_alloc((size_t)request->body_bytes_max + 1, 1);
		if (!request->body)
			return MHD_NO;
	}
	memcpy(request->body + (request->body_bytes_max - room), bytes, n_kept);
	request->body_bytes += n_bytes;
	/* A length that was told ends by itself. */
	return request->body_bytes <= SRV_HTTP_DISCARD_BYTES_MAX ||
			request->body_bytes <= request->body_bytes_max
		? MHD_YES
		: MHD_NO;
}

enum MHD_Result srv_http_on_request(void *cls, struct MHD_Connection *connection, const char *url,
	const char *method, const char *version, const char *upload_data, size_t *upload_data_bytes,
	void **con_cls)
{
	struct srv_http_listener *listener = cls;
	struct srv_http *http = listener->http;
	struct srv_http_request *request = *con_cls;

	(void)version;
	if (!request)
		return begin(listener, connection, url, method, con_cls);
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

/* ---- start and stop ---- */

static struct srv_http *create(void)
{
	struct srv_http *http = kv_alloc(1, sizeof(*http));
	pthread_condattr_t attr;

	if (!http)
		return NULL;
	http->n_refs = 1;
	http->answer_timeout_ms = SRV_HTTP_ANSWER_TIMEOUT_MS;
	http->total_ms = SRV_HTTP_TOTAL_MS;
	http->crowded_ms = SRV_HTTP_CROWDED_MS;
	kv_list_init(&http->calls);
	kv_list_init(&http->conns);
	for (uint32_t i = 0; i < SRV_HTTP_LISTENERS; i++)
		http->listeners[i].http = http;
	pthread_mutex_init(&http->lock, NULL);
	pthread_condattr_init(&attr);
	pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
	pthread_cond_init(&http->changed, &attr);
	pthread_condattr_destroy(&attr);
	return http;
}

static enum kv_status start_watchdog(struct srv_http *http, struct kv_error *err)
{
	sigset_t all, before;

	/* The process's signals are the loop thread's. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	const int error = pthread_create(&http->watchdog, NULL, srv_http_watch, http);

	pthread_sigmask(SIG_SETMASK, &before, NULL);
	http->has_watchdog = error == 0;
	return error == 0 ? KV_OK
			  : kv_fail(err, KV_IO_ERROR, "http: cannot start a thread: %s", strerror(error));
}

enum kv_status srv_http_start(const struct srv_options *options, const struct srv_http_seams *seams,
	struct srv_http **out, char *bound, uint32_t bound_bytes_max, struct kv_error *err)
{
	struct srv_http *http = create();

	if (!http)
		return kv_fail(err, KV_NO_MEMORY, "http: no memory");
	http->options = options;
	http->mailbox = seams->mailbox;
	http->pulse = seams->pulse;
	http->clock = seams->clock;
	http->settings = seams->settings;
	http->started_ns = kv_clock_now_ns(http->clock);
	enum kv_status status = start_watchdog(http, err);

	if (status == KV_OK)
		status = srv_http_listen(http, bound, bound_bytes_max, err);
	if (status != KV_OK) {
		srv_http_stop(http);
		return status;
	}
	*out = http;
	return KV_OK;
}

/* Waits until every answer that was begun is with its client, or the time is over. Under lock. */
static void wait_for_answers(struct srv_http *http)
{
	const struct timespec until =
		srv_http_to_timespec(srv_http_monotonic_ns() + SRV_HTTP_STOP_MS * KV_NS_PER_MS);
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

static bool is_serving(const struct srv_http *http)
{
	return http->listeners[0].daemon || http->listeners[1].daemon;
}

void srv_http_stop(struct srv_http *http)
{
	if (!http)
		return;
	if (is_serving(http))
		answer_leftovers(http->mailbox);
	pthread_mutex_lock(&http->lock);
	http->is_stopping = true;
	pthread_cond_broadcast(&http->changed);
	/* Drained means that the loop has nothing left. What it still has all the same must not keep us from
	 * stopping. */
	while (!kv_list_is_empty(&http->calls))
		srv_http_give_up(kv_container_of(kv_list_first(&http->calls), struct srv_http_call, link),
			SRV_HTTP_STOPPED);
	if (is_serving(http))
		wait_for_answers(http);
	pthread_mutex_unlock(&http->lock);
	for (uint32_t i = 0; i < SRV_HTTP_LISTENERS; i++)
		if (http->listeners[i].daemon)
			MHD_stop_daemon(http->listeners[i].daemon);
	if (http->has_watchdog)
		pthread_join(http->watchdog, NULL);
	pthread_mutex_lock(&http->lock);
	unref_and_unlock(http);
}
