/*
 * A control thread under test: srv_http with a fake loop thread behind its mailbox, and an HTTP client on a
 * raw socket that can be as rude as it likes.
 */
#ifndef TESTS_LIB_KV_TEST_HTTP_H
#define TESTS_LIB_KV_TEST_HTTP_H

#include <arpa/inet.h>
#include <check.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "core/clock.h"
#include "core/memory.h"
#include "server/http_internal.h"
#include "server/options.h"
#include "tests/lib/kv_test.h"

#define KV_TEST_HELD_MAX 512

/* A header, and the pool that the fake loop knows. */
#define JSON_TYPE "Content-Type: application/json\r\n"
#define SMOL                                                                                                \
	"{\"name\":\"smol\",\"layers\":2,\"q_heads\":2,\"kv_heads\":1,\"head_dim\":64,\"k\":\"tq4\",\"v\":" \
	"\"tq4\","                                                                                          \
	"\"block_size\":16,\"blocks\":64}"

/* What the fake loop does with a request. */
enum kv_test_loop_mode {
	KV_TEST_LOOP_ANSWER, /* answers at once */
	KV_TEST_LOOP_HOLD,   /* takes it and keeps it until the mode changes */
	KV_TEST_LOOP_DEAD,   /* takes nothing */
};

/* What the loop was asked last. */
struct kv_test_asked {
	enum srv_control_kind kind;
	char name[KV_SESSION_NAME_BYTES_MAX + 1];
	uint64_t id, cursor, sequence_id, tenant;
	uint32_t n_rows_max, group_idx;
	enum srv_session_sort sort;
	struct srv_sort_key cursor_key;
	bool is_deep, has_spec, has_tenant, has_cursor_key;
};

struct kv_test_http {
	struct srv_options options;
	struct srv_settings_box settings; /* in use where there are tokens */
	struct srv_mailbox mailbox;
	struct srv_pulse pulse;
	struct srv_http *http;
	char bound[64];
	uint16_t port;
	pthread_t loop;
	bool has_loop;
	atomic_int mode;
	atomic_bool must_end;
	atomic_uint n_taken, n_held;
	pthread_mutex_t lock;
	/* under lock */
	enum kv_status answer_status;
	char answer_text[64]; /* error text, or why not ready */
	struct kv_test_asked asked;
};

struct kv_test_response {
	int status; /* 0: the connection ended without a whole answer */
	char head[4096];
	char body[262144];
	size_t body_bytes;
	bool is_closing; /* "Connection: close" */
};

/* ---- the fake loop ---- */

static inline void kv_test_fill(struct kv_test_http *test, struct srv_control *control)
{
	control->status = test->answer_status;
	if (control->status != KV_OK)
		(void)kv_fail(&control->error, control->status, "%s", test->answer_text);
	control->info.backend = "cpu";
	control->info.io = "epoll";
	switch (control->kind) {
	case SRV_CONTROL_READY:
		if (control->status == KV_OK)
			snprintf(control->ready_reason, sizeof(control->ready_reason), "%s",
				test->answer_text);
		break;
	case SRV_CONTROL_POOL:
	case SRV_CONTROL_POOLS:
	case SRV_CONTROL_OCCUPANCY:
	case SRV_CONTROL_METRICS:
		control->n_rows = 1;
		strcpy(control->rows.pools[0].name, "smol");
		break;
	case SRV_CONTROL_SESSIONS:
		/* A full page: `limit` rows, each naming its cursor. */
		control->n_rows = control->n_rows_max;
		for (uint32_t i = 0; i < control->n_rows; i++)
			control->rows.sessions[i].handle = control->cursor + i;
		control->cursor_next = control->cursor + control->n_rows;
		break;
	case SRV_CONTROL_POOL_CREATE:
		if (control->status == KV_OK) {
			/* As the loop does: the specification is now the pool's. */
			kv_pool_spec_destroy(control->spec);
			control->spec = NULL;
		}
		break;
	default:
		break;
	}
}

static inline void kv_test_answer(struct kv_test_http *test, struct srv_control *control)
{
	pthread_mutex_lock(&test->lock);
	test->asked.kind = control->kind;
	memcpy(test->asked.name, control->name, sizeof(test->asked.name));
	test->asked.id = control->id;
	test->asked.cursor = control->cursor;
	test->asked.n_rows_max = control->n_rows_max;
	test->asked.is_deep = control->is_deep;
	test->asked.has_spec = control->spec != NULL;
	test->asked.sequence_id = control->sequence_id;
	test->asked.tenant = control->tenant;
	test->asked.has_tenant = control->has_tenant;
	test->asked.group_idx = control->group_idx;
	test->asked.sort = control->sort;
	test->asked.cursor_key = control->cursor_key;
	test->asked.has_cursor_key = control->has_cursor_key;
	kv_test_fill(test, control);
	pthread_mutex_unlock(&test->lock);
	control->done(control);
}

/* What the loop answers from now on: a status and its text, or OK and why /readyz is not ready. */
static inline void kv_test_http_set_answer(struct kv_test_http *test, enum kv_status status, const char *text)
{
	pthread_mutex_lock(&test->lock);
	test->answer_status = status;
	snprintf(test->answer_text, sizeof(test->answer_text), "%s", text);
	pthread_mutex_unlock(&test->lock);
}

static inline struct kv_test_asked kv_test_http_asked(struct kv_test_http *test)
{
	pthread_mutex_lock(&test->lock);
	const struct kv_test_asked asked = test->asked;

	pthread_mutex_unlock(&test->lock);
	return asked;
}

static inline void *kv_test_run_loop(void *cls)
{
	struct kv_test_http *test = cls;
	static struct srv_control *held[KV_TEST_HELD_MAX];
	unsigned n_held = 0;

	while (!atomic_load(&test->must_end)) {
		struct pollfd poll_fd = { .fd = test->mailbox.event_fd, .events = POLLIN };
		struct srv_control *control;
		eventfd_t n;

		if (poll(&poll_fd, 1, 1) == 1)
			(void)eventfd_read(test->mailbox.event_fd, &n);
		atomic_store(&test->pulse.turn_ns, kv_clock_now_ns(kv_clock_system()));
		const int mode = atomic_load(&test->mode);

		if (mode == KV_TEST_LOOP_DEAD)
			continue;
		while (mode == KV_TEST_LOOP_ANSWER && n_held > 0)
			kv_test_answer(test, held[--n_held]);
		while ((control = srv_mailbox_take(&test->mailbox)) != NULL) {
			atomic_fetch_add(&test->n_taken, 1);
			if (mode == KV_TEST_LOOP_ANSWER || n_held == KV_TEST_HELD_MAX)
				kv_test_answer(test, control);
			else
				held[n_held++] = control;
		}
		atomic_store(&test->n_held, n_held);
	}
	while (n_held > 0)
		kv_test_answer(test, held[--n_held]);
	return NULL;
}

/* What the fake file system holds: tokens, under any name. */
static const char *kv_test_tokens_text;

static inline enum kv_status kv_test_read_tokens(
	const char *path, uint64_t n_bytes_max, char **data, uint64_t *n_bytes, struct kv_error *err)
{
	(void)n_bytes_max;
	if (!kv_test_tokens_text)
		return kv_fail(err, KV_IO_ERROR, "%s: no such file", path);
	*n_bytes = strlen(kv_test_tokens_text);
	*data = kv_strndup(kv_test_tokens_text, strlen(kv_test_tokens_text));
	return *data ? KV_OK : KV_NO_MEMORY;
}

static const struct kv_files kv_test_token_files = { kv_test_read_tokens };

/* Published settings with these tokens, read again at a reload. */
static inline void kv_test_http_make_settings(struct kv_test_http *test, const char *tokens)
{
	static char name[] = "tqkvd", flag[] = "--tokens-file=tokens", http[300];
	static char *argv[] = { name, flag, http, NULL };
	struct srv_options options;
	struct kv_error error = { 0 };

	kv_test_tokens_text = tokens;
	snprintf(http, sizeof(http), "--http=%s", test->options.http);
	ck_assert_int_eq(srv_options_parse(&options, 3, argv, &kv_test_token_files, &error), SRV_OPTIONS_RUN);
	ck_assert_int_eq(
		srv_settings_init(&test->settings, &options, 3, argv, &kv_test_token_files, &error), KV_OK);
}

/* http_text: the http option; tokens NULL: nobody needs one. The loop runs in ANSWER mode. */
static inline void kv_test_http_begin_with(
	struct kv_test_http *test, const char *http_text, bool is_insecure, const char *tokens)
{
	struct kv_error error;

	memset(test, 0, sizeof(*test));
	ck_assert_int_eq(pthread_mutex_init(&test->lock, NULL), 0);
	ck_assert_int_eq(srv_options_init(&test->options, &error), KV_OK);
	snprintf(test->options.http, sizeof(test->options.http), "%s", http_text);
	test->options.insecure = is_insecure;
	if (tokens)
		kv_test_http_make_settings(test, tokens);
	ck_assert_int_eq(srv_mailbox_init(&test->mailbox, &error), KV_OK);
	const struct srv_http_seams seams = {
		.mailbox = &test->mailbox,
		.pulse = &test->pulse,
		.clock = kv_clock_system(),
		.settings = tokens ? &test->settings : NULL,
	};

	ck_assert_msg(srv_http_start(&test->options, &seams, &test->http, test->bound, sizeof(test->bound),
			      &error) == KV_OK,
		"%s", error.msg);
	const char *port = strrchr(test->bound, ':');

	ck_assert_ptr_nonnull(port);
	test->port = (uint16_t)atoi(port + 1);
	ck_assert_uint_ne(test->port, 0);
	ck_assert_int_eq(pthread_create(&test->loop, NULL, kv_test_run_loop, test), 0);
	test->has_loop = true;
}

static inline void kv_test_http_begin(struct kv_test_http *test, const char *http_text, bool is_insecure)
{
	kv_test_http_begin_with(test, http_text, is_insecure, NULL);
}

/* Ends the loop before everything else. */
static inline void kv_test_http_end_loop(struct kv_test_http *test)
{
	if (!test->has_loop)
		return;
	atomic_store(&test->must_end, true);
	pthread_join(test->loop, NULL);
	test->has_loop = false;
}

/* Stops HTTP first (unless stopped), then the loop. */
static inline void kv_test_http_end(struct kv_test_http *test)
{
	srv_mailbox_close(&test->mailbox);
	srv_http_stop(test->http);
	kv_test_http_end_loop(test);
	srv_mailbox_finish(&test->mailbox);
	srv_settings_finish(&test->settings);
	srv_options_finish(&test->options);
	pthread_mutex_destroy(&test->lock);
}

/* ---- the client ---- */

static inline int kv_test_connect(const struct kv_test_http *test)
{
	const struct timeval timeout = { .tv_sec = 20 };
	const struct sockaddr_in address = {
		.sin_family = AF_INET,
		.sin_port = htons(test->port),
		.sin_addr.s_addr = htonl(INADDR_LOOPBACK),
	};
	const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	ck_assert_int_ge(fd, 0);
	ck_assert_int_eq(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)), 0);
	ck_assert_int_eq(connect(fd, (const struct sockaddr *)&address, sizeof(address)), 0);
	return fd;
}

/* False when the peer is gone. */
static inline bool kv_test_send(int fd, const char *bytes, size_t n_bytes)
{
	while (n_bytes > 0) {
		const ssize_t n = send(fd, bytes, n_bytes, MSG_NOSIGNAL);

		if (n <= 0)
			return false;
		bytes += n;
		n_bytes -= (size_t)n;
	}
	return true;
}

/* The value of a reply header, or NULL. The text is overwritten by the next call. */
static inline const char *kv_test_header(const struct kv_test_response *response, const char *name)
{
	static _Thread_local char value[256];
	const size_t n_bytes = strlen(name);

	for (const char *line = strstr(response->head, "\r\n"); line && line[2];
		line = strstr(line + 2, "\r\n")) {
		if (strncasecmp(line + 2, name, n_bytes) != 0 || line[2 + n_bytes] != ':')
			continue;
		const char *begin = line + 2 + n_bytes + 1;

		begin += strspn(begin, " ");
		snprintf(value, sizeof(value), "%.*s", (int)strcspn(begin, "\r"), begin);
		return value;
	}
	return NULL;
}

/* Byte by byte up to the empty line: what follows may belong to the next answer. */
static inline bool kv_test_receive_head(int fd, struct kv_test_response *response)
{
	size_t used = 0;

	while (used + 1 < sizeof(response->head)) {
		if (recv(fd, response->head + used, 1, 0) != 1)
			return false;
		response->head[++used] = '\0';
		if (used >= 4 && strcmp(response->head + used - 4, "\r\n\r\n") == 0)
			return true;
	}
	return false;
}

static inline void kv_test_receive(int fd, bool is_head, struct kv_test_response *response)
{
	memset(response, 0, sizeof(*response));
	if (!kv_test_receive_head(fd, response))
		return;
	const char *length = kv_test_header(response, "Content-Length");
	const size_t wanted = length && !is_head ? (size_t)strtoull(length, NULL, 10) : 0;

	if (wanted >= sizeof(response->body))
		return;
	while (response->body_bytes < wanted) {
		const ssize_t n =
			recv(fd, response->body + response->body_bytes, wanted - response->body_bytes, 0);

		if (n <= 0)
			return;
		response->body_bytes += (size_t)n;
	}
	response->body[response->body_bytes] = '\0';
	const char *connection = kv_test_header(response, "Connection");

	response->is_closing = connection && strcasecmp(connection, "close") == 0;
	if (sscanf(response->head, "HTTP/1.%*d %d", &response->status) != 1)
		response->status = 0;
}

/* One request on a connection of its own. `headers`: lines that end in \r\n, Host is added. body NULL: none.
 */
static inline void kv_test_ask(const struct kv_test_http *test, const char *method, const char *path,
	const char *headers, const char *body, struct kv_test_response *response)
{
	char head[2048], length[64] = "";
	const int fd = kv_test_connect(test);

	if (body)
		snprintf(length, sizeof(length), "Content-Length: %zu\r\n", strlen(body));
	const int n = snprintf(head, sizeof(head), "%s %s HTTP/1.1\r\n%s%s%s\r\n", method, path,
		strstr(headers, "Host:") ? "" : "Host: localhost\r\n", headers, length);

	ck_assert_int_lt(n, (int)sizeof(head));
	ck_assert(kv_test_send(fd, head, (size_t)n));
	if (body)
		ck_assert(kv_test_send(fd, body, strlen(body)));
	kv_test_receive(fd, strcmp(method, "HEAD") == 0, response);
	close(fd);
}

#endif
