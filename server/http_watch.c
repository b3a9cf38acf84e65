/*
 * The watchdog of the control thread: resumes requests whose call the loop did not answer in time, and shuts
 * connections down whose peer does not come to the end of a request.
 *
 * The library's own timeout counts from the last byte, so a peer that sends a byte now and then would keep
 * its place for ever, and SRV_HTTP_CONNECTIONS_MAX such peers all of them. Here the time counts from accept
 * (or from the last answer) to the end of the next answer. Shutting a socket down wakes the library, which
 * closes it; the descriptor stays valid until srv_http_on_connection() takes it off the list, under the same
 * lock.
 */
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include "core/memory.h"
#include "server/http_internal.h"
#include "server/http_tls.h"

/* How late a slow peer may be noticed. */
#define SCAN_MS 250u
/* Of the library's threads. Where processors are few, rendering a list must not keep the loop from one. */
#define NICE 10

/* Once in each of the library's threads; where it may not be done answers are as good. */
static void give_way_to_the_loop(void)
{
	static _Thread_local bool has_given;

	if (!has_given)
		(void)setpriority(PRIO_PROCESS, (id_t)gettid(), NICE);
	has_given = true;
}

/* Its certificates, for as long as it lasts. Without a set the handshake fails. */
static void hand_certificates(
	struct srv_http *http, struct MHD_Connection *connection, struct srv_http_conn *conn)
{
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);

	if (!info || !info->tls_session || !http->settings)
		return;
	struct srv_settings *settings = srv_settings_get(http->settings);

	if (settings->tls && srv_http_tls_attach(settings->tls, (gnutls_session_t)info->tls_session))
		conn->settings = settings;
	else
		srv_settings_put(settings);
}

static void begin_connection(
	struct srv_http_listener *listener, struct MHD_Connection *connection, void **socket_context)
{
	struct srv_http *http = listener->http;
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
	struct srv_http_conn *conn = kv_alloc(1, sizeof(*conn));

	atomic_fetch_add(&http->counters.connections, 1);
	*socket_context = conn;
	if (!conn)
		return; /* not watched; the library's own timeout remains. No certificate, so no TLS */
	conn->fd = info ? info->connect_fd : -1;
	conn->since_ns = srv_http_monotonic_ns();
	hand_certificates(http, connection, conn);
	pthread_mutex_lock(&http->lock);
	kv_list_push_back(&http->conns, &conn->link);
	http->n_conns++;
	pthread_cond_broadcast(&http->changed);
	pthread_mutex_unlock(&http->lock);
}

void srv_http_on_connection(void *cls, struct MHD_Connection *connection, void **socket_context,
	enum MHD_ConnectionNotificationCode code)
{
	struct srv_http_listener *listener = cls;
	struct srv_http_conn *conn = *socket_context;

	if (code == MHD_CONNECTION_NOTIFY_STARTED) {
		give_way_to_the_loop();
		begin_connection(listener, connection, socket_context);
		return;
	}
	*socket_context = NULL;
	if (!conn)
		return;
	pthread_mutex_lock(&listener->http->lock);
	kv_list_remove(&conn->link);
	listener->http->n_conns--;
	pthread_mutex_unlock(&listener->http->lock);
	srv_settings_put(conn->settings);
	kv_free(conn);
}

bool srv_http_conn_is_current(const struct srv_http_request *request)
{
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(request->connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
	const struct srv_http_conn *conn = info ? info->socket_context : NULL;

	return !conn || !conn->settings || conn->settings == request->settings ||
		!srv_http_tls_asks_clients(request->settings->tls);
}

void srv_http_conn_answered(struct srv_http *http, struct MHD_Connection *connection)
{
	const union MHD_ConnectionInfo *info =
		MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
	struct srv_http_conn *conn = info ? info->socket_context : NULL;

	if (!conn)
		return;
	pthread_mutex_lock(&http->lock);
	if (!conn->is_ended) {
		conn->since_ns = srv_http_monotonic_ns();
		kv_list_remove(&conn->link);
		kv_list_push_back(&http->conns, &conn->link);
	}
	pthread_mutex_unlock(&http->lock);
}

/* Under lock: the list is in order of time, so the first ones are the slowest. */
static void end_slow_connections(struct srv_http *http, uint64_t now_ns)
{
	const uint64_t total_ms =
		http->n_conns > SRV_HTTP_CONNECTIONS_MAX / 2 ? http->crowded_ms : http->total_ms;

	kv_list_for_each (node, &http->conns) {
		struct srv_http_conn *conn = kv_container_of(node, struct srv_http_conn, link);

		if (now_ns - conn->since_ns < total_ms * KV_NS_PER_MS)
			return;
		if (conn->is_ended)
			continue;
		conn->is_ended = true;
		atomic_fetch_add(&http->counters.connections_slow, 1);
		if (conn->fd >= 0)
			shutdown(conn->fd, SHUT_RDWR);
	}
}

/* Under lock: gives up calls whose time is over; returns when the next one's is. */
static uint64_t end_late_calls(struct srv_http *http, uint64_t now_ns, uint64_t until_ns)
{
	struct kv_list_node *first;

	while ((first = kv_list_first(&http->calls))) {
		struct srv_http_call *call = kv_container_of(first, struct srv_http_call, link);

		if (now_ns < call->deadline_ns)
			return call->deadline_ns < until_ns ? call->deadline_ns : until_ns;
		srv_http_give_up(call, SRV_HTTP_LATE);
	}
	return until_ns;
}

void *srv_http_watch(void *cls)
{
	struct srv_http *http = cls;

	pthread_setname_np(pthread_self(), "tqkvd-http-wd");
	pthread_mutex_lock(&http->lock);
	while (!http->is_stopping) {
		if (kv_list_is_empty(&http->calls) && kv_list_is_empty(&http->conns)) {
			pthread_cond_wait(&http->changed, &http->lock);
			continue;
		}
		const uint64_t now_ns = srv_http_monotonic_ns();

		end_slow_connections(http, now_ns);
		const struct timespec until =
			srv_http_to_timespec(end_late_calls(http, now_ns, now_ns + SCAN_MS * KV_NS_PER_MS));

		pthread_cond_timedwait(&http->changed, &http->lock, &until);
	}
	pthread_mutex_unlock(&http->lock);
	return NULL;
}
