#include "tests/unit/fake_server.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include <check.h>

#include "proto/check.h"
#include "proto/crc32c.h"

static int64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static bool read_all(int fd, uint8_t *out, size_t n_bytes)
{
	while (n_bytes > 0) {
		const ssize_t n = read(fd, out, n_bytes);

		if (n <= 0) {
			if (n < 0 && errno == EINTR)
				continue;
			return false;
		}
		out += n;
		n_bytes -= (size_t)n;
	}
	return true;
}

static bool send_all(int fd, const uint8_t *data, size_t n_bytes)
{
	while (n_bytes > 0) {
		const ssize_t n = send(fd, data, n_bytes, MSG_NOSIGNAL);

		if (n <= 0) {
			if (n < 0 && errno == EINTR)
				continue;
			return false;
		}
		data += n;
		n_bytes -= (size_t)n;
	}
	return true;
}

/* ---- Answers ---- */

static void refuse(
	const struct kvp_header *header, unsigned status, uint32_t retry_after_ms, struct fake_reply *reply)
{
	struct kvp_fault fault;

	(void)kvp_fault_set(&fault, (enum kv_status)status, 0, 1, 2, "the fake refuses");
	reply->frame = malloc(KVP_ERROR_FRAME_BYTES_MAX);
	reply->n_bytes = kvp_error_frame_encode(header, &fault, NULL, retry_after_ms, reply->frame);
}

static void answer_hello(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	const struct fake_fault *fault, struct fake_reply *reply)
{
	struct kvp_hello_req hello;
	struct kvp_header answer;
	struct kvp_fault unused;

	kvp_hello_req_decode(body, header->op_bytes, &hello);
	fake->boot_id_seen = hello.boot_id_seen;
	kvp_hello_reply_encode(&fake->limits, fake_reply_init(reply, header, KVP_BYTES(hello_reply), 0, 0));
	ck_assert_int_eq(kvp_header_decode(reply->frame, &answer, &unused), KV_OK);
	if (hello.boot_id_seen != 0 && hello.boot_id_seen != fake->limits.boot_id)
		answer.status = KV_STALE_EPOCH;
	if (fault && fault->action == FAKE_REFUSE_FRAME)
		answer.status = fault->status;
	kvp_header_encode(&answer, reply->frame);
}

static void answer_open(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	struct fake_reply *reply)
{
	const char *payload =
		(const char *)body + kvp_payload_start(header->op_bytes, header->n_items, header->item_bytes);
	struct fake_session *session = NULL;
	struct kvp_open_req open;
	char name[129] = "";

	kvp_open_req_decode(body, header->op_bytes, &open);
	memcpy(name, payload + open.pool_name_bytes, open.session_name_bytes);
	if (open.fingerprint != 0 && open.fingerprint != fake->pool_fingerprint) {
		refuse(header, KV_FORMAT_MISMATCH, 0, reply);
		return;
	}
	for (uint32_t i = 0; i < fake->n_sessions && header->opcode == KVP_OP_ATTACH; i++)
		if (strcmp(fake->sessions[i].name, name) == 0)
			session = &fake->sessions[i];
	if (header->opcode == KVP_OP_ATTACH && !session) {
		refuse(header, KV_NOT_FOUND, 0, reply);
		return;
	}
	if (!session) {
		ck_assert_uint_lt(fake->n_sessions, FAKE_SESSIONS);
		session = &fake->sessions[fake->n_sessions++];
		session->handle =
			(uint64_t)0x5a17c3 << 32 | (uint64_t)fake->boot_tag << 16 | (fake->n_sessions + 2);
		memcpy(session->name, name, sizeof(name));
	}

	const struct kvp_open_reply answer = {
		.session = session->handle,
		.boot_id = fake->limits.boot_id,
		.fingerprint = fake->pool_fingerprint,
		.lease_ms = 60000,
		.n_layers = FAKE_LAYERS,
		.block_size = 16,
		.q_heads = FAKE_Q_HEADS,
		.kv_heads = FAKE_KV_HEADS,
		.k_head_dim = FAKE_K_DIM,
		.v_head_dim = FAKE_V_DIM,
		.sequences_max = FAKE_SEQUENCES,
		.tokens_max = 100000,
	};

	kvp_open_reply_encode(&answer, fake_reply_init(reply, header, KVP_BYTES(open_reply), 0, 0));
}

static void answer_pool_info(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	struct fake_reply *reply)
{
	struct kvp_pool_info_req req;
	const size_t json_bytes = strlen(fake->pool_json);
	struct kvp_pool_info_reply info = { fake->pool_fingerprint, (uint32_t)json_bytes, 1 };

	kvp_pool_info_req_decode(body, header->op_bytes, &req);
	if (req.what == KVP_POOL_INFO_JSON) {
		uint8_t *out = fake_reply_init(reply, header, KVP_BYTES(pool_info_reply), 0, json_bytes);

		kvp_pool_info_reply_encode(&info, out);
		memcpy(out + 64, fake->pool_json, json_bytes);
		return;
	}
	/* A 16 x 16 matrix, five rows at a time: entry (i, j) is 100 i + j. */
	const uint32_t n_rows = req.row_first >= 16 ? 0 : 16 - req.row_first < 5 ? 16 - req.row_first : 5;

	info.json_bytes = n_rows * 64;

	uint8_t *out = fake_reply_init(reply, header, KVP_BYTES(pool_info_reply), 0, info.json_bytes);

	kvp_pool_info_reply_encode(&info, out);
	for (uint32_t i = 0; i < n_rows * 16; i++)
		kvp_put_f32(out + 64 + 4 * i, (float)(100 * (req.row_first + i / 16) + i % 16));
}

static void answer_ping(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	struct fake_reply *reply)
{
	const struct kvp_ping_reply ping = { 1, 1, 1, 1, fake->limits.boot_id };
	const uint64_t payload_bytes = kvp_payload_bytes(header);
	struct kvp_ping_req req;

	kvp_ping_req_decode(body, header->op_bytes, &req);

	uint8_t *out = fake_reply_init(reply, header, KVP_BYTES(ping_reply), 0, req.reply_payload_bytes);
	const uint64_t n_bytes =
		payload_bytes < req.reply_payload_bytes ? payload_bytes : req.reply_payload_bytes;

	kvp_ping_reply_encode(&ping, out);
	if (n_bytes > 0)
		memcpy(out + 64, body + kvp_payload_start(header->op_bytes, 0, 32), n_bytes);
}

static void answer(struct fake_server *fake, const struct kvp_header *header, const uint8_t *body,
	const struct fake_fault *fault, struct fake_reply *reply)
{
	if (header->opcode == KVP_OP_HELLO) {
		answer_hello(fake, header, body, fault, reply);
		return;
	}
	if (fault && fault->action == FAKE_REFUSE_FRAME) {
		refuse(header, fault->status, fault->retry_after_ms, reply);
		return;
	}
	if (header->session != 0 && (header->session >> 16 & 0xFFFF) != fake->boot_tag) {
		refuse(header, KV_STALE_EPOCH, 0, reply);
		return;
	}
	switch (header->opcode) {
	case KVP_OP_PING:
		answer_ping(fake, header, body, reply);
		return;
	case KVP_OP_CANCEL:
		memset(fake_reply_init(reply, header, KVP_BYTES(cancel_reply), 0, 0), 0, 1);
		reply->frame[KVP_HEADER_BYTES] = KVP_CANCEL_TOO_LATE;
		return;
	case KVP_OP_POOL_INFO:
		answer_pool_info(fake, header, body, reply);
		return;
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		answer_open(fake, header, body, reply);
		return;
	case KVP_OP_CLOSE:
		(void)fake_reply_init(reply, header, 0, 0, 0);
		return;
	case KVP_OP_TELL:
		fake_tell(fake, header, body, reply);
		return;
	case KVP_OP_READ:
		fake_read(fake, header, body, reply);
		return;
	default:
		fake_rows(fake, header, body, fault, reply);
	}
}

/* ---- Faults ---- */

static bool item_matches(const struct fake_fault *fault, const struct kvp_header *header, const uint8_t *body)
{
	if (fault->action != FAKE_REFUSE_ITEM)
		return true;
	for (uint32_t item_idx = 0; item_idx < header->n_items; item_idx++)
		if (fake_refuses(fault,
			    kvp_get_u64(body +
				    kvp_structs_bytes(header->op_bytes, item_idx, header->item_bytes))))
			return true;
	return false;
}

static struct fake_fault take_fault(
	struct fake_server *fake, const struct kvp_header *header, const uint8_t *body)
{
	for (uint32_t i = 0; i < FAKE_FAULTS; i++) {
		struct fake_fault *fault = &fake->faults[i];

		if (fault->n_times == 0 ||
			(fault->opcode ? fault->opcode != header->opcode : header->opcode == KVP_OP_HELLO) ||
			!item_matches(fault, header, body))
			continue;
		if (fault->n_skip > 0) {
			fault->n_skip--;
			continue;
		}
		fault->n_times--;
		return *fault;
	}
	return (struct fake_fault){ 0 };
}

static void flip(struct fake_reply *reply, const struct fake_fault *fault)
{
	ck_assert_uint_lt(fault->at, reply->n_bytes);
	reply->frame[fault->at] ^= fault->mask;
	if (fault->action == FAKE_FLIP_BYTE && fault->at < KVP_HEADER_BYTES)
		kvp_put_u32(reply->frame + KVP_AT_HEADER_CRC, kvp_crc32c(0, reply->frame, KVP_AT_HEADER_CRC));
}

static bool release_held(struct fake_server *fake)
{
	bool is_sent = true;

	while (fake->n_held > 0) {
		fake->n_held--;
		is_sent = is_sent &&
			send_all(fake->fd, fake->held[fake->n_held], fake->held_bytes[fake->n_held]);
		free(fake->held[fake->n_held]);
	}
	return is_sent;
}

/* False: the connection ends. Called without the lock while sending, so that a test can look at a stuck
 * server. */
static bool deliver(struct fake_server *fake, struct fake_reply *reply, const struct fake_fault *fault)
{
	bool is_open = true;

	switch (fault->action) {
	case FAKE_SILENT:
		break;
	case FAKE_DROP_BEFORE:
	case FAKE_DROP_AFTER:
		is_open = false;
		break;
	case FAKE_HALF_REPLY:
		is_open = send_all(fake->fd, reply->frame, reply->n_bytes / 2);
		break;
	case FAKE_HOLD:
		fake->held[fake->n_held] = reply->frame;
		fake->held_bytes[fake->n_held++] = reply->n_bytes;
		reply->frame = NULL;
		return fake->n_held < fake->n_hold || release_held(fake);
	case FAKE_FLIP_BYTE:
	case FAKE_FLIP_RAW:
		flip(reply, fault);
		is_open = send_all(fake->fd, reply->frame, reply->n_bytes);
		break;
	default:
		is_open = send_all(fake->fd, reply->frame, reply->n_bytes);
		break;
	}
	free(reply->frame);
	reply->frame = NULL;
	return is_open;
}

/* ---- The loop ---- */

static void note(
	struct fake_server *fake, const struct kvp_header *header, uint8_t *frame, size_t frame_bytes)
{
	const uint16_t opcode = header->opcode & 127;

	fake->n_requests[opcode]++;
	if (header->body_bytes > fake->body_bytes_largest)
		fake->body_bytes_largest = header->body_bytes;
	fake->deadline_us = header->deadline_us;
	fake->flags = header->flags;
	if (opcode >= KVP_OP_APPEND && opcode <= KVP_OP_APPEND_DECODE && fake->n_request_ms < 64)
		fake->request_ms[fake->n_request_ms++] = now_ms();
	free(fake->last_frame[opcode]);
	fake->last_frame[opcode] = frame;
	fake->last_frame_bytes[opcode] = frame_bytes;
}

static void send_goaway(struct fake_server *fake)
{
	const struct kvp_header goaway = {
		.opcode = KVP_OP_GOAWAY,
		.flags = KVP_FLAG_RESPONSE,
		.status = KV_DRAINING,
		.item_bytes = KVP_ITEM_BYTES,
	};
	uint8_t frame[KVP_HEADER_BYTES];

	kvp_header_encode(&goaway, frame);
	(void)send_all(fake->fd, frame, sizeof(frame));
	fake->sends_goaway = false;
}

static bool serve_one(struct fake_server *fake)
{
	uint8_t head[KVP_HEADER_BYTES];
	struct kvp_header header;
	struct kvp_fault fault;
	struct fake_reply reply = { 0 };

	if (!read_all(fake->fd, head, sizeof(head)))
		return false;
	ck_assert_int_eq(kvp_header_decode(head, &header, &fault), KV_OK);

	const size_t frame_bytes = KVP_HEADER_BYTES + (size_t)header.body_bytes;
	uint8_t *frame = malloc(frame_bytes);

	memcpy(frame, head, sizeof(head));
	if (!read_all(fake->fd, frame + KVP_HEADER_BYTES, (size_t)header.body_bytes)) {
		free(frame);
		return false;
	}
	if (header.flags & KVP_FLAG_BODY_CRC)
		ck_assert_uint_eq(
			header.body_crc, kvp_crc32c(0, frame + KVP_HEADER_BYTES, (size_t)header.body_bytes));
	fake_lock(fake);
	note(fake, &header, frame, frame_bytes);

	struct fake_fault action = take_fault(fake, &header, frame + KVP_HEADER_BYTES);

	if (action.action != FAKE_DROP_BEFORE)
		answer(fake, &header, frame + KVP_HEADER_BYTES,
			action.n_times || action.action ? &action : NULL, &reply);
	if (fake->sends_goaway)
		send_goaway(fake);
	fake_unlock(fake);
	return deliver(fake, &reply, &action);
}

static void *run(void *arg)
{
	struct fake_server *fake = arg;

	for (;;) {
		const int fd = accept(fake->listen_fd, NULL, NULL);

		fake_lock(fake);

		const bool is_stopping = fake->is_stopping;

		if (fd >= 0 && !is_stopping)
			fake->n_connections++;
		fake->fd = fd;
		fake_unlock(fake);
		if (fd < 0 || is_stopping) {
			if (fd >= 0)
				close(fd);
			return NULL;
		}
		while (serve_one(fake))
			;
		fake_lock(fake);
		while (fake->n_held > 0)
			free(fake->held[--fake->n_held]);
		fake->fd = -1;
		fake_unlock(fake);
		close(fd);
	}
}

void fake_start(struct fake_server *fake)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX };

	memset(fake, 0, sizeof(*fake));
	fake->fd = -1;
	fake->boot_tag = 0x9e21;
	fake->pool_fingerprint = 0x1122334455667788;
	fake->pool_json = "{\"block_size\":16,\"layers\":[{\"k\":\"f32\",\"v\":\"f32\"}]}";
	fake->limits = (struct kvp_hello_reply){
		.proto = 1,
		.proto_min = 1,
		.proto_max = 1,
		.n_pools = 1,
		.boot_id = 0xB007,
		.frame_bytes_max = KVP_FRAME_BYTES_MIN,
		.inflight_bytes_max = 4 * KVP_FRAME_BYTES_MIN,
		.inflight_requests_max = 64,
		.items_max = 256,
		.sessions_max = 16,
		.sequences_max = FAKE_SEQUENCES,
		.q_len_max = 8,
		.lease_ms = 60000,
	};
	pthread_mutex_init(&fake->lock, NULL);
	snprintf(fake->dir, sizeof(fake->dir), "/tmp/tqkv-test-XXXXXX");
	ck_assert_ptr_nonnull(mkdtemp(fake->dir));
	snprintf(fake->path, sizeof(fake->path), "%s/sock", fake->dir);
	snprintf(fake->address, sizeof(fake->address), "unix:%s", fake->path);
	memcpy(name.sun_path, fake->path, strlen(fake->path) + 1);
	fake->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ck_assert_int_ge(fake->listen_fd, 0);
	ck_assert_int_eq(bind(fake->listen_fd, (struct sockaddr *)&name, sizeof(name)), 0);
	ck_assert_int_eq(listen(fake->listen_fd, 16), 0);
	ck_assert_int_eq(pthread_create(&fake->thread, NULL, run, fake), 0);
}

void fake_stop(struct fake_server *fake)
{
	fake_lock(fake);
	fake->is_stopping = true;
	if (fake->fd >= 0)
		shutdown(fake->fd, SHUT_RDWR);
	shutdown(fake->listen_fd, SHUT_RDWR);
	fake_unlock(fake);
	pthread_join(fake->thread, NULL);
	close(fake->listen_fd);
	unlink(fake->path);
	rmdir(fake->dir);
	for (uint32_t i = 0; i < FAKE_SEQUENCES; i++)
		fake_free_sequence(&fake->sequences[i]);
	for (uint32_t i = 0; i < 128; i++)
		free(fake->last_frame[i]);
	pthread_mutex_destroy(&fake->lock);
}

void fake_lock(struct fake_server *fake)
{
	pthread_mutex_lock(&fake->lock);
}

void fake_unlock(struct fake_server *fake)
{
	pthread_mutex_unlock(&fake->lock);
}

void fake_fault(struct fake_server *fake, struct fake_fault fault)
{
	bool is_placed = false;

	fake_lock(fake);
	for (uint32_t i = 0; i < FAKE_FAULTS && !is_placed; i++)
		if (fake->faults[i].n_times == 0) {
			fake->faults[i] = fault;
			is_placed = true;
		}
	fake_unlock(fake);
	ck_assert(is_placed);
}

void fake_hang_up(struct fake_server *fake)
{
	fake_lock(fake);
	if (fake->fd >= 0)
		shutdown(fake->fd, SHUT_RDWR);
	fake_unlock(fake);
}

void fake_restart_restored(struct fake_server *fake)
{
	fake_lock(fake);
	fake->limits.boot_id++;
	fake->boot_tag++;
	for (uint32_t i = 0; i < fake->n_sessions; i++)
		fake->sessions[i].handle += 1u << 16;
	fake_unlock(fake);
	fake_hang_up(fake);
}

void fake_restart(struct fake_server *fake)
{
	fake_lock(fake);
	fake->limits.boot_id++;
	fake->boot_tag++;
	fake->n_sessions = 0;
	for (uint32_t i = 0; i < FAKE_SEQUENCES; i++)
		fake_free_sequence(&fake->sequences[i]);
	fake_unlock(fake);
	fake_hang_up(fake);
}

uint32_t fake_length(struct fake_server *fake, uint64_t sequence, uint32_t layer)
{
	uint32_t length = 0;

	fake_lock(fake);
	for (uint32_t i = 0; i < FAKE_SEQUENCES; i++)
		if (fake->sequences[i].sequence == sequence)
			length = fake->sequences[i].layers[layer].length;
	fake_unlock(fake);
	return length;
}

uint32_t fake_n_requests(struct fake_server *fake, uint16_t opcode)
{
	uint32_t n;

	fake_lock(fake);
	n = fake->n_requests[opcode];
	fake_unlock(fake);
	return n;
}
