/*
 * Fuzz target: what a hostile server may send to libtqkv.
 *
 * A connection over a socket pair has one request of each kind in flight, those of the golden frames. The
 * input is cut into frames; magic, version and checksum are made right and a request id is picked from those
 * in flight, because nothing behind a wrong checksum is worth much. The first byte of the input chooses: bit
 * 0 leaves the bytes as they are, bits 1-3 the sizes of the chunks that arrive. Every byte that a decoded
 * reply points at is read, so that a wrong offset is a crash under the address sanitizer.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "proto/client/rows.h"
#include "proto/crc32c.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

enum {
	N_REQUESTS = 8,
	INPUT_BYTES_MAX = 4096, /* stays inside the socket's buffer */
};

struct target {
	struct tqkv_conn conn;
	struct tqkv_session session;
	struct tqkv_request *requests[N_REQUESTS];
	uint32_t n_requests;
	int peer;
};

static void start_conn(struct target *target)
{
	struct tqkv_conn *conn = &target->conn;
	int fds[2];

	memset(target, 0, sizeof(*target));
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, fds) != 0)
		abort();
	conn->fd = fds[0];
	target->peer = fds[1];
	conn->address = strdup("unix:/fuzz");
	conn->options.requests_max = 16;
	conn->options.timeout_ms = 1;
	conn->has_hello = true;
	conn->server = (struct tqkv_server_info){
		.boot_id = 1,
		.frame_bytes_max = 65536,
		.inflight_bytes_max = 1 << 20,
		.inflight_requests_max = 64,
		.items_max = 256,
		.q_len_max = 8,
	};
	conn->requests_mask = 63;
	conn->requests = calloc(64, sizeof(*conn->requests));
	if (!conn->requests || !conn->address)
		abort();
	for (uint32_t i = 0; i < 64; i++)
		conn->requests[i].conn = conn;
	target->session = (struct tqkv_session){
		.conn = conn,
		.info = { .handle = 77,
			.n_layers = 3,
			.q_heads = 2,
			.kv_heads = 1,
			.k_head_dim = 16,
			.v_head_dim = 16 },
		.geometry = { .n_layers = 3,
			.q_heads = 2,
			.kv_heads = 1,
			.k_head_dim = 16,
			.v_head_dim = 16 },
	};
}

static void submit(
	struct target *target, uint16_t opcode, uint32_t op_bytes, const void *op, bool has_session)
{
	const struct tqkv_shape shape = { .opcode = opcode, .op_bytes = op_bytes };
	struct tqkv_request *request;

	if (tqkv_request_begin(&target->conn, has_session ? &target->session : NULL, &shape,
		    tqkv_deadline_ns(1), &request, NULL) != TQKV_OK)
		abort();
	if (op_bytes > 0)
		memcpy(tqkv_request_body(request), op, op_bytes);
	tqkv_request_submit(request, 0);
	target->requests[target->n_requests++] = request;
}

/* The requests of the golden frames, so that the golden replies are accepted and the fuzzer starts from
 * there. */
static void submit_rows(
	struct target *target, enum tqkv_op op, const struct tqkv_item *items, uint32_t n_items)
{
	static const float zeros[64];
	const bool is_decode = op == TQKV_OP_DECODE;
	const struct tqkv_rows rows = {
		.items = items,
		.n_items = n_items,
		.n_layers = 1,
		.k = is_decode ? NULL : zeros,
		.v = is_decode ? NULL : zeros,
		.q = zeros,
		.k_bytes = is_decode ? 0 : 64,
		.v_bytes = is_decode ? 0 : 64,
		.q_bytes = n_items * 128,
		.k_dtype = is_decode ? TQKV_NONE : TQKV_F32,
		.v_dtype = is_decode ? TQKV_NONE : TQKV_F32,
		.q_dtype = TQKV_F32,
		.out_dtype = TQKV_F32,
		.flags = is_decode ? 0 : TQKV_LSE,
	};
	uint64_t id;

	if (tqkv_submit_rows(&target->session, op, &rows, 0, &id, NULL) != TQKV_OK)
		abort();
	target->requests[target->n_requests++] = tqkv_request_find(&target->conn, id);
}

static void submit_all(struct target *target)
{
	static const struct tqkv_item step = { 7, 64, 1, 1, 0 };
	static const struct tqkv_item queries[2] = { { 7, TQKV_POSITION_PLANNED, 0, 1, 0 },
		{ 9, 3, 0, 1, 0 } };
	uint8_t op[64];

	submit_rows(target, TQKV_OP_APPEND_DECODE, &step, 1);
	submit_rows(target, TQKV_OP_DECODE, queries, 2);
	kvp_read_req_encode(&(struct kvp_read_req){ 7, 0, 2, 1, 3, KVP_DTYPE_BF16, 0, 0 }, op);
	submit(target, KVP_OP_READ, KVP_BYTES(read_req), op, true);
	kvp_read_req_encode(&(struct kvp_read_req){ 7, 0, 1, 1, 3, KVP_DTYPE_PACKED, 0, 0 }, op);
	submit(target, KVP_OP_READ, KVP_BYTES(read_req), op, true);
	kvp_tell_req_encode(&(struct kvp_tell_req){ 1, 8, KVP_TELL_PER_LAYER }, op);
	submit(target, KVP_OP_TELL, KVP_BYTES(tell_req), op, true);
	kvp_ping_req_encode(&(struct kvp_ping_req){ 8 }, op);
	submit(target, KVP_OP_PING, KVP_BYTES(ping_req), op, false);
	kvp_pool_info_req_encode(&(struct kvp_pool_info_req){ 0 }, op);
	submit(target, KVP_OP_POOL_INFO, KVP_BYTES(pool_info_req), op, false);
	submit(target, KVP_OP_OPEN, 0, NULL, false);
}

/* Makes the frame at `frame` one that gets past the header; returns its bytes. */
static size_t mend_frame(struct target *target, uint8_t *frame, size_t n_bytes)
{
	const uint64_t body_bytes = kvp_get_u64(frame + KVP_AT_BODY_BYTES);
	const uint64_t room = n_bytes - KVP_HEADER_BYTES;
	const uint32_t which = frame[KVP_AT_REQUEST_ID] % (N_REQUESTS + 1);

	memcpy(frame, "TKV1\1\10", 6);
	kvp_put_u32(frame + KVP_AT_FLAGS, (kvp_get_u32(frame + KVP_AT_FLAGS) & ~2U) | KVP_FLAG_RESPONSE);
	if (which < N_REQUESTS) {
		kvp_put_u64(frame + KVP_AT_REQUEST_ID, target->requests[which]->id);
		kvp_put_u16(frame + KVP_AT_OPCODE, target->requests[which]->header.opcode);
		kvp_put_u64(frame + KVP_AT_SESSION, target->requests[which]->header.session);
	} else {
		kvp_put_u64(frame + KVP_AT_REQUEST_ID, 0);
	}
	if (body_bytes > room)
		kvp_put_u64(frame + KVP_AT_BODY_BYTES, room);
	kvp_put_u32(frame + KVP_AT_HEADER_CRC, kvp_crc32c(0, frame, KVP_AT_HEADER_CRC));
	return KVP_HEADER_BYTES + (size_t)kvp_get_u64(frame + KVP_AT_BODY_BYTES);
}

static volatile uint8_t sink;

static void touch(const void *bytes, uint64_t n_bytes)
{
	for (uint64_t i = 0; i < n_bytes; i++)
		sink = (uint8_t)(sink + ((const uint8_t *)bytes)[i]);
}

static void fetch(struct tqkv_request *request)
{
	struct tqkv_reply reply;
	union tqkv_reply_op op;
	struct tqkv_error err = { .message = "" };

	if (tqkv_request_fetch(request, &reply, &op, &err) != TQKV_OK) {
		if (err.message[0] == '\0' || memchr(err.message, '\0', sizeof(err.message)) == NULL)
			abort(); /* every refusal says why */
		return;
	}
	touch(reply.out, reply.out_bytes);
	touch(reply.lse, reply.lse ? reply.n_q_total * 2 * sizeof(float) : 0);
	touch(reply.k, reply.k_bytes);
	touch(reply.v, reply.v_bytes);
	touch(reply.payload, reply.payload_bytes);
	touch(reply.lengths, reply.lengths ? reply.n_items * 3 * sizeof(uint32_t) : 0);
	if (reply.n_ok + reply.n_failed != 0 && reply.n_ok + reply.n_failed != reply.n_items)
		abort();
}

static void stop_conn(struct target *target)
{
	struct tqkv_error failure;

	tqkv_fail(&failure, TQKV_IO_ERROR, "the input ends");
	tqkv_conn_lose(&target->conn, &failure);
	for (uint32_t i = 0; i < N_REQUESTS; i++)
		fetch(target->requests[i]);
	tqkv_request_finish_fetched(&target->conn);
	if (target->conn.n_requests != 0 || target->conn.n_in_flight != 0 ||
		target->conn.in_flight_bytes != 0)
		abort();
	for (uint32_t i = 0; i < target->conn.n_spare; i++)
		free(target->conn.spare[i].data);
	free(target->conn.requests);
	free(target->conn.address);
	close(target->peer);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	struct target target;
	uint8_t input[INPUT_BYTES_MAX];

	if (n_bytes < 2 || n_bytes > sizeof(input))
		return 0;

	const bool is_raw = data[0] & 1;
	const size_t chunk_bytes = (size_t)1 << (4 + (data[0] >> 1 & 7));

	n_bytes--;
	memcpy(input, data + 1, n_bytes);
	start_conn(&target);
	submit_all(&target);
	for (size_t at = 0; !is_raw && n_bytes - at >= KVP_HEADER_BYTES;)
		at += mend_frame(&target, input + at, n_bytes - at);
	for (size_t at = 0; at < n_bytes && target.conn.fd >= 0;) {
		const size_t n = n_bytes - at < chunk_bytes ? n_bytes - at : chunk_bytes;

		if (write(target.peer, input + at, n) != (ssize_t)n)
			break;
		at += n;
		(void)tqkv_conn_turn(&target.conn, 0);
	}
	stop_conn(&target);
	return 0;
}
