#include "server/io_common.h"

#include <errno.h>
#include <linux/sockios.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>

#include "core/memory.h"

enum kv_status srv_io_check_sizes(uint32_t n_ahead_buffers, uint32_t n_connections_max, struct kv_error *err)
{
	if (n_ahead_buffers == 0 || n_ahead_buffers > SRV_IO_AHEAD_BUFFERS_MAX)
		return kv_fail(err, KV_BAD_ARG, "read_ahead_buffers %u is not from 1 to %u", n_ahead_buffers,
			SRV_IO_AHEAD_BUFFERS_MAX);
	if (n_connections_max == 0 || n_connections_max > SRV_IO_CONNECTIONS_MAX)
		return kv_fail(err, KV_BAD_ARG, "connections_max %u is not from 1 to %u", n_connections_max,
			SRV_IO_CONNECTIONS_MAX);
	return KV_OK;
}

enum kv_status srv_io_conns_init(struct srv_io_conns *conns, uint32_t n_max, struct kv_error *err)
{
	memset(conns, 0, sizeof(*conns));
	conns->conns = kv_pages_alloc((uint64_t)n_max * sizeof(*conns->conns));
	if (!conns->conns)
		return kv_fail(err, KV_NO_MEMORY, "table of %u connections", n_max);
	conns->n_max = n_max;
	conns->free_first = SRV_IO_NONE;
	return KV_OK;
}

void srv_io_conns_finish(struct srv_io_conns *conns)
{
	kv_pages_free(conns->conns, (uint64_t)conns->n_max * sizeof(*conns->conns));
	memset(conns, 0, sizeof(*conns));
}

struct kv_io_conn *srv_io_conns_take(struct srv_io_conns *conns, int fd, enum kv_io_transport transport)
{
	uint32_t conn_idx = conns->free_first;

	if (conn_idx != SRV_IO_NONE)
		conns->free_first = conns->conns[conn_idx].free_next;
	else if (conns->n_touched < conns->n_max)
		conn_idx = conns->n_touched++;
	else
		return NULL;

	struct kv_io_conn *conn = &conns->conns[conn_idx];

	memset(conn, 0, sizeof(*conn));
	conn->fd = fd;
	conn->conn_idx = conn_idx;
	conn->transport = (uint8_t)transport;
	conn->is_used = true;
	conns->n_used++;
	return conn;
}

void srv_io_conns_give(struct srv_io_conns *conns, struct kv_io_conn *conn)
{
	KV_ASSERT(conn->is_used);
	KV_ASSERT(conn->n_in_flight == 0);
	KV_ASSERT(!kv_list_is_linked(&conn->turn_node));
	KV_ASSERT(!kv_list_is_linked(&conn->ahead_node));
	conn->is_used = false;
	conn->free_next = conns->free_first;
	conns->free_first = conn->conn_idx;
	conns->n_used--;
}

struct kv_io_event *srv_io_out_add(struct srv_io_out *out, enum kv_io_kind kind, struct kv_io_conn *conn)
{
	KV_ASSERT(out->n < out->n_max);

	struct kv_io_event *event = &out->events[out->n++];

	memset(event, 0, sizeof(*event));
	event->kind = kind;
	event->conn = conn;
	event->user = conn ? conn->user : NULL;
	event->ahead_idx = SRV_IO_NONE;
	return event;
}

void srv_io_out_received(
	struct srv_io_out *out, struct kv_io_conn *conn, int64_t result, uint8_t *ahead, uint32_t ahead_idx)
{
	struct kv_io_event *event = srv_io_out_add(out, KV_IO_RECEIVED, conn);

	event->result = result;
	event->ahead = ahead;
	event->ahead_idx = ahead_idx;
	conn->recv = SRV_IO_RECV_NONE;
}

void srv_io_out_sent(struct srv_io_out *out, struct kv_io_conn *conn, int64_t result)
{
	srv_io_out_add(out, KV_IO_SENT, conn)->result = result;
	conn->is_sending = false;
}

void srv_io_send_begin(struct kv_io_conn *conn, const struct iovec iov[], uint32_t n_iov)
{
	KV_ASSERT(n_iov <= KV_IO_IOV_MAX);
	KV_ASSERT(!conn->is_sending);
	memset(&conn->msg, 0, sizeof(conn->msg));
	memcpy(conn->iov, iov, n_iov * sizeof(*iov));
	conn->msg.msg_iov = conn->iov;
	conn->msg.msg_iovlen = n_iov;
	conn->is_sending = true;
}

bool srv_io_send_advance(struct kv_io_conn *conn, uint64_t n_bytes)
{
	while (conn->msg.msg_iovlen > 0 && n_bytes >= conn->msg.msg_iov->iov_len) {
		n_bytes -= conn->msg.msg_iov->iov_len;
		conn->msg.msg_iov++;
		conn->msg.msg_iovlen--;
	}
	if (conn->msg.msg_iovlen == 0)
		return true;
	conn->msg.msg_iov->iov_base = (char *)conn->msg.msg_iov->iov_base + n_bytes;
	conn->msg.msg_iov->iov_len -= (size_t)n_bytes;
	return false;
}

uint64_t srv_io_unsent_bytes(struct kv_io *io, const struct kv_io_conn *conn)
{
	uint64_t n_bytes = 0;
	int n_queued = 0;

	(void)io;
	for (size_t i = 0; i < conn->msg.msg_iovlen; i++)
		n_bytes += conn->msg.msg_iov[i].iov_len;
	/* A Unix socket counts its buffers' overhead as well, which does not matter for a difference. */
	if (ioctl(conn->fd, SIOCOUTQ, &n_queued) == 0)
		n_bytes += (uint64_t)n_queued;
	return n_bytes;
}

bool srv_io_accept_may_retry(int reason)
{
	/* Linux also passes pending network errors of the new socket through accept(), see accept(2). */
	switch (reason) {
	case EINTR:
	case ECONNABORTED:
	case EPROTO:
	case ENETDOWN:
	case EHOSTDOWN:
	case ENONET:
	case EHOSTUNREACH:
	case ENETUNREACH:
		return true;
	default:
		return false;
	}
}

uint64_t srv_io_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

uint64_t srv_io_deadline_ns(int64_t timeout_ns)
{
	return timeout_ns > 0 ? srv_io_now_ns() + (uint64_t)timeout_ns : 0;
}

#ifdef KV_TEST_HOOKS
static struct {
	int64_t countdown;
	int errno_value;
} faults[] = { [SRV_IO_FAULT_RECV] = { .countdown = -1 }, [SRV_IO_FAULT_SEND] = { .countdown = -1 } };

void srv_io_fault_after(enum srv_io_fault fault, int64_t countdown, int errno_value)
{
	faults[fault].countdown = countdown;
	faults[fault].errno_value = errno_value;
}

int64_t srv_io_fault_apply(enum srv_io_fault fault, int64_t result)
{
	if (faults[fault].countdown < 0 || faults[fault].countdown-- > 0)
		return result;
	return -faults[fault].errno_value;
}
#endif
