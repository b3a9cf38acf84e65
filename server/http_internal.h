/*
 * The control thread, seen from inside. Only http*.c, route_*.c and their tests
 * include this.
 *
 * Three threads meet here. The HTTP thread (libmicrohttpd's) runs the handler: it reads a request, posts a
 * call to the mailbox and suspends the connection. The loop thread answers: done() resumes the connection.
 * The watchdog resumes connections whose call the loop did not answer in time. Whoever comes first wins,
 * under http->lock; a call that lost its request (late) belongs to the loop until its done(), which then only
 * frees it.
 *
 * So there are two lifetimes: a request lives from its first byte to libmicrohttpd's "completed", a call from
 * post() to the end of rendering, or to done() where the request did not wait. struct srv_http outlives both:
 * calls that the loop still has hold a reference.
 */
#ifndef SERVER_HTTP_INTERNAL_H
#define SERVER_HTTP_INTERNAL_H

#include <jansson.h>
#include <microhttpd.h>
#include <pthread.h>
#include <stdatomic.h>

#include "core/list.h"
#include "server/control.h"
#include "server/http.h"
#include "server/http_text.h"
#include "server/log.h"
#include "server/settings.h"

#define SRV_HTTP_BODY_BYTES_MAX 65536u
/* Of routes that take a pool: k_center of 80 layers, 8 heads and 128 channels is 81920 numbers. Its length
 * has to be told, and so many at once are received, because each takes its memory from the first byte on. */
#define SRV_HTTP_POOL_BODY_BYTES_MAX 4194304u
#define SRV_HTTP_LARGE_BODIES_MAX    4u
/* A body of unknown length is thrown away up to here, so that the client gets to read the 413; then the
 * connection. */
#define SRV_HTTP_DISCARD_BYTES_MAX 1048576u
#define SRV_HTTP_CONNECTIONS_MAX   256u
#define SRV_HTTP_IDLE_S            10u
/* From accept, or from the last answer, to the end of the next answer. A peer that sends a byte now and then
 * is never idle; this ends it all the same. When half of all connections are in use, those that wait make
 * room. */
#define SRV_HTTP_TOTAL_MS   30000u
#define SRV_HTTP_CROWDED_MS 2000u
/* Request line, headers and reply headers of one connection: four times what a browser sends. */
#define SRV_HTTP_MEMORY_BYTES      32768u
#define SRV_HTTP_ANSWER_TIMEOUT_MS 5000u
#define SRV_HTTP_PULSE_MS_MAX      5000u
/* How long stop() waits for answers to be sent. */
#define SRV_HTTP_STOP_MS       1000u
#define SRV_HTTP_LIMIT_DEFAULT 64u
#define SRV_HTTP_NAME_BYTES    129u

enum srv_http_wait {
	SRV_HTTP_NOT_POSTED,
	SRV_HTTP_WAITING,  /* suspended; the loop has the call */
	SRV_HTTP_ANSWERED, /* request->call is the request's again */
	SRV_HTTP_LATE,     /* the loop still has the call; request->call is NULL */
	SRV_HTTP_STOPPED,  /* not posted, or given up, because the daemon stops */
	SRV_HTTP_REFUSED,  /* not posted: the mailbox is full */
};

struct srv_http_request;

struct srv_http_call {
	struct srv_control control;
	struct srv_http *http;
	struct srv_http_request *request; /* NULL: nobody waits any more */
	uint64_t deadline_ns;             /* CLOCK_MONOTONIC */
	struct kv_list_node link;         /* http->calls while WAITING */
};

#define SRV_HTTP_NAMES_MAX    2u
#define SRV_HTTP_OPTION_BYTES 256u

/* What a route may be asked with, behind the '?'. */
enum srv_http_param {
	SRV_PARAM_NONE = 0,
	SRV_PARAM_PAGE = 1,         /* limit, cursor */
	SRV_PARAM_DEEP = 2,         /* deep */
	SRV_PARAM_TENANT = 4,       /* tenant */
	SRV_PARAM_SORT = 8,         /* sort */
	SRV_PARAM_GROUP = 16,       /* group */
	SRV_PARAM_PREFIX_SORT = 32, /* sort, of prefixes */
};

/* Who may ask. Higher ones may do what lower ones may. */
enum srv_http_access { SRV_ACCESS_OPEN, SRV_ACCESS_READ, SRV_ACCESS_ADMIN };

/* One row of the table in http_routes.c. */
struct srv_http_route {
	const char *method; /* GET answers HEAD, too */
	const char *path;   /* as the API document says it: "/v1/pools/{name}"; a part in braces is a name */
	enum srv_http_access access;
	unsigned params;  /* enum srv_http_param */
	unsigned success; /* HTTP status */
	enum srv_control_kind kind;
	/* Takes bodies of SRV_HTTP_POOL_BODY_BYTES_MAX from who may make pools. */
	bool has_pool_body;
	/* (optional) Answers without the loop. */
	enum MHD_Result (*answer)(struct srv_http_request *request);
	/* (optional) Reads names and body into the call. */
	enum kv_status (*prepare)(
		struct srv_http_request *request, struct srv_control *control, struct kv_error *err);
	void (*view)(const struct srv_control *control, struct srv_text *text); /* NULL: no body */
};
extern const struct srv_http_route srv_http_routes[];
extern const size_t srv_http_n_routes;

struct srv_http_request {
	struct srv_http *http;
	struct srv_http_listener *listener;
	struct MHD_Connection *connection;
	struct srv_settings *settings; /* NULL: options and tokens are http->options, and none */
	const struct srv_options *options;
	bool is_allowed;                    /* headers and login were right */
	const char *who;                    /* name of the token, for the log; NULL: nobody logged in */
	const struct srv_http_route *route; /* once dispatched to the loop */
	enum srv_http_wait wait;            /* under http->lock */
	struct srv_http_call *call;         /* under http->lock while WAITING */
	uint32_t body_bytes_max; /* larger than SRV_HTTP_BODY_BYTES_MAX: counted in n_large_bodies */
	char *body;              /* body_bytes_max + 1, once the first byte came */
	uint64_t body_bytes;     /* seen; above the maximum the rest is thrown away */
	char names[SRV_HTTP_NAMES_MAX][SRV_HTTP_NAME_BYTES]; /* parts of the path that are names, unescaped */
	char allow[48];                                      /* 405 */
	char location[KV_POOL_NAME_BYTES_MAX + 16];          /* 201 */
	bool is_shut_out; /* after failed logins: trying again at once is of no use */
};

/* One address. The second one serves health and metrics only, without login. */
struct srv_http_listener {
	struct srv_http *http;
	struct MHD_Daemon *daemon; /* NULL: not in use */
	bool is_metrics, is_loopback;
	char host[256]; /* as bound: what a Host header may say */
};

/* One connection, from accept to close: http->conns. */
struct srv_http_conn {
	struct kv_list_node link;
	int fd;
	uint64_t since_ns;             /* accepted, or the last answer was complete */
	bool is_ended;                 /* was too slow: shut down, waits for the library to notice */
	struct srv_settings *settings; /* whose certificates it uses; NULL: no TLS */
};

/* What HTTP itself counts. Any of its threads; read for a scrape. */
struct srv_http_counters {
	atomic_uint_fast64_t connections, connections_slow, requests, answers[6]; /* answers[n]: status n00 */
	atomic_uint_fast64_t logins_failed, logins_limited;
};

#define SRV_HTTP_LISTENERS 2u

struct srv_http {
	const struct srv_options *options; /* without a box; and until the first request */
	struct srv_settings_box *settings; /* NULL: options never change */
	struct srv_mailbox *mailbox;
	struct srv_pulse *pulse;
	struct kv_clock *clock;
	struct srv_http_listener listeners[SRV_HTTP_LISTENERS];
	uint64_t started_ns;
	struct srv_http_counters counters;
	pthread_mutex_t lock;
	pthread_cond_t changed; /* a first call, a finished request, a first connection, or stop */
	pthread_t watchdog;
	bool has_watchdog;
	/* under lock */
	bool is_stopping;
	uint32_t n_large_bodies;
	uint32_t answer_timeout_ms, total_ms, crowded_ms;
	uint32_t n_refs;      /* the owner, and each call that the loop has */
	uint32_t n_waiting;   /* requests that were posted and are not completed */
	struct kv_list calls; /* oldest first, so the first has the next deadline */
	struct kv_list conns; /* oldest since_ns first */
	uint32_t n_conns;
	struct srv_login_gate logins;
	struct srv_log_gate gate_refused;
};

/* http.c: for the library's callbacks, which http_listen.c hands over. `cls` is the listener. */
enum MHD_Result srv_http_on_request(void *cls, struct MHD_Connection *connection, const char *url,
	const char *method, const char *version, const char *upload_data, size_t *upload_data_bytes,
	void **con_cls);
void srv_http_on_completed(
	void *cls, struct MHD_Connection *connection, void **con_cls, enum MHD_RequestTerminationCode why);
/* Takes the call from its request, which answers without it. Under lock; done() will free the call. */
void srv_http_give_up(struct srv_http_call *call, enum srv_http_wait why);
uint64_t srv_http_monotonic_ns(void);
struct timespec srv_http_to_timespec(uint64_t time_ns);

/* http_listen.c: sockets, TLS, the library's threads. */
KV_MUST_CHECK enum kv_status srv_http_listen(
	struct srv_http *http, char *bound, uint32_t bound_bytes_max, struct kv_error *err);

/* http_watch.c: the thread behind answers that do not come and requests that do not end. */
void *srv_http_watch(void *http);
/* A connection begins, ends, or has had its answer. */
void srv_http_on_connection(void *cls, struct MHD_Connection *connection, void **socket_context,
	enum MHD_ConnectionNotificationCode code);
void srv_http_conn_answered(struct srv_http *http, struct MHD_Connection *connection);
/* False: its client was let in by certificates that a reload has replaced since; it has to come again. */
bool srv_http_conn_is_current(const struct srv_http_request *request);

/* http_access.c: may this be asked? True: it may not, and *result is what was answered. */
bool srv_http_is_refused(
	struct srv_http_request *request, const struct srv_http_route *route, enum MHD_Result *result);
/* A body larger than SRV_HTTP_BODY_BYTES_MAX is announced. The same, and who may not make pools is refused.
 */
bool srv_http_is_refused_as_large(
	struct srv_http_request *request, const struct srv_http_route *route, enum MHD_Result *result);
/* The headers say more than once how long the body is. */
bool srv_http_has_two_ends(const struct srv_http_request *request);
/* The line that every call which changes something leaves in the log. */
void srv_http_audit(struct srv_http_request *request, unsigned http_status);

/* http_request.c: one complete request, and the same once its call came back. HTTP thread. */
enum MHD_Result srv_http_dispatch(struct srv_http_request *request, const char *url, const char *method);
/* A body of so many bytes is announced: request->body_bytes_max is set, or what is wrong has been answered.
 */
enum MHD_Result srv_http_expect_body(
	struct srv_http_request *request, const char *url, const char *method, uint64_t length_bytes);
enum MHD_Result srv_http_finish(struct srv_http_request *request);

/* http_answer.c */
#define SRV_TYPE_JSON    "application/json"
#define SRV_TYPE_PROBLEM "application/problem+json"
#define SRV_TYPE_METRICS "text/plain; version=0.0.4; charset=utf-8"
void srv_http_count(struct srv_http_request *request, unsigned http_status);
/* Takes bytes over: kv_free(). */
enum MHD_Result srv_http_queue(struct srv_http_request *request, unsigned http_status, const char *type,
	char *bytes, size_t n_bytes);
/* Takes the text over. */
enum MHD_Result srv_http_queue_text(
	struct srv_http_request *request, unsigned http_status, const char *type, struct srv_text *text);
/* Queues a problem; also from the very first callback of a request, which closes the connection. */
enum MHD_Result srv_http_problem(
	struct srv_http_request *request, unsigned http_status, const char *code, const char *detail);
/* The problem of a status; detail NULL or empty: the status's own text. */
enum MHD_Result srv_http_refuse(struct srv_http_request *request, enum kv_status status, const char *detail);
/* The body as one JSON object; json_decref() it. BAD_CONFIG says what was wrong; `what` names the object. */
KV_MUST_CHECK enum kv_status srv_http_body(
	struct srv_http_request *request, const char *what, json_t **json, struct kv_error *err);

/* http_dashboard.c: GET / and the two files that its page loads. */
enum MHD_Result srv_http_answer_page(struct srv_http_request *request);
enum MHD_Result srv_http_answer_style(struct srv_http_request *request);
enum MHD_Result srv_http_answer_script(struct srv_http_request *request);

/* Hands the call to the loop (or frees it where that is impossible) and suspends; finish() follows in every
 * case. */
void srv_http_post(struct srv_http_request *request, struct srv_http_call *call);
void srv_http_call_free(struct srv_http_call *call);

#endif
