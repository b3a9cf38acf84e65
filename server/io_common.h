/*
 * What the two io implementations share: the connection, the table of connections, the shared read-ahead
 * memory and the array that wait() fills. Loop thread only. Everything is sized at creation.
 */
#ifndef SERVER_IO_COMMON_H
#define SERVER_IO_COMMON_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "core/error.h"
#include "core/io.h"
#include "core/list.h"
#include "server/io_backends.h"
#include "server/io_listener.h"

/* How long accepting pauses when the process has no descriptor left. */
#define SRV_IO_ACCEPT_PAUSE_NS 100000000ull
#define SRV_IO_NONE            UINT32_MAX

enum srv_io_recv { SRV_IO_RECV_NONE, SRV_IO_RECV_AHEAD, SRV_IO_RECV_INTO };

/* A conn is idle with nothing on any list; 10^4 idle ones must stay cheap, so its size is asserted. */
struct kv_io_conn {
	struct kv_list_node turn_node;  /* on the list of connections that the next wait() works on */
	struct kv_list_node ahead_node; /* on the list of receives that wait for a read-ahead buffer */
	void *user;
	int fd; /* -1 once closed */
	uint32_t conn_idx;
	uint32_t free_next; /* while free */
	uint8_t transport;  /* enum kv_io_transport */
	uint8_t recv;       /* enum srv_io_recv: the open receive */
	bool is_used;
	bool is_sending;
	bool is_closing; /* close() was called; CLOSED is still to come */
	/* epoll: what the last attempts and edges say */
	bool may_recv, may_send;
	/* io_uring: operations to be submitted, and those whose completion is still to come */
	bool wants_recv, wants_send, wants_cancel;
	uint8_t n_in_flight;
	uint32_t recv_bytes;
	uint8_t *recv_buf;
	struct iovec iov[KV_IO_IOV_MAX]; /* what is still to be sent */
	struct msghdr msg;               /* points into iov */
};
_Static_assert(sizeof(struct kv_io_conn) <= 256,
	"10^4 idle connections are promised to cost under 4 KiB each in all");

struct srv_io_conns {
	struct kv_io_conn *conns; /* [n_max], pages touched only once used */
	uint32_t n_max;
	uint32_t n_touched; /* conns beyond were never used */
	uint32_t n_used;
	uint32_t free_first;
};

KV_MUST_CHECK enum kv_status srv_io_conns_init(
	struct srv_io_conns *conns, uint32_t n_max, struct kv_error *err);
void srv_io_conns_finish(struct srv_io_conns *conns);
/* A connection in its first state, or NULL: all are in use. */
struct kv_io_conn *srv_io_conns_take(struct srv_io_conns *conns, int fd, enum kv_io_transport transport);
void srv_io_conns_give(struct srv_io_conns *conns, struct kv_io_conn *conn);

/* The caller's array during one wait(). */
struct srv_io_out {
	struct kv_io_event *events;
	uint32_t n_max;
	uint32_t n;
};
static inline bool srv_io_out_is_full(const struct srv_io_out *out)
{
	return out->n == out->n_max;
}
/* The next event, zeroed but for these. There is room. */
struct kv_io_event *srv_io_out_add(struct srv_io_out *out, enum kv_io_kind kind, struct kv_io_conn *conn);
/* RECEIVED: ends the open receive. ahead_idx NONE: no read-ahead buffer goes with it. */
void srv_io_out_received(
	struct srv_io_out *out, struct kv_io_conn *conn, int64_t result, uint8_t *ahead, uint32_t ahead_idx);
/* SENT: ends the open send. */
void srv_io_out_sent(struct srv_io_out *out, struct kv_io_conn *conn, int64_t result);

/* Copies the parts and prepares conn->msg. */
void srv_io_send_begin(struct kv_io_conn *conn, const struct iovec iov[], uint32_t n_iov);
/* Takes n_bytes off the front; true when nothing is left to send. */
bool srv_io_send_advance(struct kv_io_conn *conn, uint64_t n_bytes);

/* kv_io_ops.unsent_bytes */
uint64_t srv_io_unsent_bytes(struct kv_io *io, const struct kv_io_conn *conn);

/* Sizes from the options, checked once for both. */
KV_MUST_CHECK enum kv_status srv_io_check_sizes(
	uint32_t n_ahead_buffers, uint32_t n_connections_max, struct kv_error *err);
/* True for an accept() that failed because of the peer or by accident: try the next one at once. */
bool srv_io_accept_may_retry(int reason);

uint64_t srv_io_now_ns(void);
/* Nanoseconds until deadline_ns, 0 when it is over. */
static inline int64_t srv_io_until_ns(uint64_t deadline_ns, uint64_t now_ns)
{
	return deadline_ns > now_ns ? (int64_t)(deadline_ns - now_ns) : 0;
}
/* The deadline of a wait: 0 when it has none (do not wait at all, or for ever). */
uint64_t srv_io_deadline_ns(int64_t timeout_ns);

#ifdef KV_TEST_HOOKS
/*
 * Fault injection, one for the process: the receive or send after `countdown` more fails with -errno_value,
 * once. Negative: never. What the kernel did is thrown away, so a failed receive loses bytes, as after a
 * reset.
 */
enum srv_io_fault { SRV_IO_FAULT_RECV, SRV_IO_FAULT_SEND };
void srv_io_fault_after(enum srv_io_fault fault, int64_t countdown, int errno_value);
int64_t srv_io_fault_apply(enum srv_io_fault fault, int64_t result);
#define SRV_IO_FAULT(fault, result) srv_io_fault_apply((fault), (result))
#else
#define SRV_IO_FAULT(fault, result) (result)
#endif

#endif
