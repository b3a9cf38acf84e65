#include "tests/mutation/rig.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/backend_cpu.h"
#include "core/checked.h"

#define AHEAD       4u
#define TURNS_MAX   64u
#define KEPT_MAX    64u
#define BATCHES_MAX 16u

struct rig rig;
struct rig_backend_faults rig_backend;

void rig_fail(const char *what, const char *file, int line)
{
	fprintf(stderr, "%s:%d: does not hold: %s\n", file, line, what);
	exit(1);
}

static void check_ok(enum kv_status status, const struct kv_error *err, const char *file, int line)
{
	if (status != KV_OK)
		rig_fail(err->msg, file, line);
}

/* ---- the backend's front ---- */

struct front {
	struct kv_backend base;
	struct kv_backend *back;
	struct kv_batch *done[BATCHES_MAX]; /* finished, in order */
	uint32_t n_done;
};
static struct front front;
static struct kv_backend_ops front_ops;

static void front_info(struct kv_backend *base, struct kv_backend_info *out)
{
	(void)base;
	front.back->ops->info(front.back, out);
}

static enum kv_status front_pool_check(
	struct kv_backend *base, const struct kv_pool_spec *spec, uint64_t *arena_bytes, struct kv_error *err)
{
	(void)base;
	return front.back->ops->pool_check(front.back, spec, arena_bytes, err);
}

static enum kv_status front_arena_create(struct kv_backend *base, uint64_t n_bytes, struct kv_error *err)
{
	(void)base;
	return front.back->ops->arena_create(front.back, n_bytes, err);
}

static enum kv_status front_pool_create(struct kv_backend *base, const struct kv_pool_spec *spec,
	uint64_t arena_offset, struct kv_backend_pool **out, struct kv_error *err)
{
	(void)base;
	return front.back->ops->pool_create(front.back, spec, arena_offset, out, err);
}

static void front_pool_destroy(struct kv_backend *base, struct kv_backend_pool *pool)
{
	(void)base;
	front.back->ops->pool_destroy(front.back, pool);
}

static void *front_host_alloc(struct kv_backend *base, uint64_t n_bytes)
{
	(void)base;
	return front.back->ops->host_alloc(front.back, n_bytes);
}

static void front_host_free(struct kv_backend *base, void *ptr, uint64_t n_bytes)
{
	(void)base;
	front.back->ops->host_free(front.back, ptr, n_bytes);
}

static bool is_self_test(const struct kv_batch *batch)
{
	return batch == &rig.server->probe.batch;
}

static enum kv_status front_submit(struct kv_backend *base, struct kv_batch *batch, struct kv_error *err)
{
	(void)base;
	if (rig_backend.loses && !is_self_test(batch))
		return kv_fail(err, KV_DEVICE_LOST, "as asked");
	const enum kv_status status = front.back->ops->submit(front.back, batch, err);

	if (status != KV_OK)
		return status;
	CHECK(front.back->ops->reap(front.back) == batch);
	for (uint32_t i = 0; rig_backend.spoils && i < batch->n_decodes; i++)
		*(float *)(void *)batch->decodes[i].out += 1;
	CHECK(front.n_done < BATCHES_MAX);
	front.done[front.n_done++] = batch;
	return KV_OK;
}

static struct kv_batch *front_reap(struct kv_backend *base)
{
	(void)base;
	if (front.n_done == 0 || (rig_backend.holds && !is_self_test(front.done[0])))
		return NULL;
	struct kv_batch *batch = front.done[0];

	memmove(front.done, front.done + 1, --front.n_done * sizeof(front.done[0]));
	return batch;
}

static int front_event_fd(struct kv_backend *base)
{
	(void)base;
	return -1;
}

static void front_destroy(struct kv_backend *base)
{
	(void)base;
	front.back->ops->destroy(front.back);
}

static struct kv_backend *make_front(void)
{
	struct kv_error err = { 0 };

	memset(&front, 0, sizeof(front));
	check_ok(kv_backend_cpu_create(0, &front.back, &err), &err, __FILE__, __LINE__);
	front_ops = *front.back->ops;
	front_ops.info = front_info;
	front_ops.pool_check = front_pool_check;
	front_ops.arena_create = front_arena_create;
	front_ops.pool_create = front_pool_create;
	front_ops.pool_destroy = front_pool_destroy;
	front_ops.host_alloc = front_host_alloc;
	front_ops.host_free = front_host_free;
	front_ops.submit = front_submit;
	front_ops.reap = front_reap;
	front_ops.job_post = NULL; /* the server has none */
	front_ops.job_reap = NULL;
	front_ops.event_fd = front_event_fd;
	front_ops.destroy = front_destroy;
	front.base.ops = &front_ops;
	return &front.base;
}

/* ---- start and stop ---- */

static void set_options(struct srv_options *options)
{
	static const char pools[] =
		"[{\"name\": \"" RIG_POOL "\", \"layers\": 2, \"q_heads\": 2, \"kv_heads\": 1,"
		"\"head_dim\": 16, \"k\": \"f32\", \"v\": \"f32\", \"block_size\": 16, \"blocks\": 8,"
		"\"tokens_max\": 100}]";
	struct kv_error err = { 0 };

	check_ok(srv_options_init(options, &err), &err, __FILE__, __LINE__);
	json_decref(options->pools);
	options->pools = json_loads(pools, 0, NULL);
	CHECK(options->pools != NULL);
	options->frame_bytes_max = RIG_FRAME_BYTES;
	options->large_slots = 4;
	options->small_slots = 16;
	options->read_ahead_buffers = AHEAD;
	options->reply_buffers = 8;
	options->connections_max = MEM_CONNS;
	options->sessions_max = 4;
	options->sequences_max = 64;
	options->lease_ms = 1000;
	options->io_timeout_ms = 400;
	options->send_timeout_ms = 600;
	options->hello_timeout_ms = 500;
	options->drain_timeout_ms = 300;
	options->host_tier_bytes = KV_TIER_PAGE_BYTES; /* one sequence */
	options->self_test_interval_ms = 1000;
	snprintf(options->snapshot_dir, sizeof(options->snapshot_dir), "dir");
}

void rig_start(void)
{
	struct srv_seams seams = { .arena_bytes = 1 << 20 };
	struct kv_error err = { 0 };

	memset(&rig, 0, sizeof(rig));
	memset(&rig_backend, 0, sizeof(rig_backend));
	srv_log_set_level((enum srv_log_level)0);
	set_options(&rig.options);
	mem_clock_init(&rig.clock);
	mem_random_init(&rig.random);
	mem_io_init(&rig.io, &rig.clock, AHEAD);
	check_ok(srv_mailbox_init(&rig.mailbox, &err), &err, __FILE__, __LINE__);
	seams.io = &rig.io.base;
	seams.clock = &rig.clock.base;
	seams.random = &rig.random.base;
	seams.backend = make_front();
	seams.mailbox = &rig.mailbox;
	check_ok(srv_server_create(&rig.options, &seams, &rig.server, &err), &err, __FILE__, __LINE__);
	check_ok(srv_server_listen(rig.server, &err), &err, __FILE__, __LINE__);
	rig_turn(0);
}

void rig_turn(uint64_t ms)
{
	struct kv_error err = { 0 };

	rig.clock.now_ns += ms * KV_NS_PER_MS + 1000;
	srv_server_turn(rig.server, 0);
	check_ok(srv_server_audit(rig.server, &err), &err, __FILE__, __LINE__);
}

/* Deadlines aside, has the server nothing to do? */
static bool is_quiet(void)
{
	return mem_io_is_quiet(&rig.io) && !kv_domain_has_zombies(rig.server->domain) &&
		srv_mailbox_is_empty(&rig.mailbox) && (rig_backend.holds || front.n_done == 0) &&
		(rig_backend.holds || !srv_scheduler_has_work(rig.server));
}

void rig_settle(void)
{
	uint32_t n_quiet = 0;

	/* Twice in a row: what an event moved may wait for the next turn. */
	for (uint32_t i = 0; i < TURNS_MAX && n_quiet < 3; i++) {
		rig_turn(0);
		n_quiet = is_quiet() ? n_quiet + 1 : 0;
	}
	CHECK(n_quiet == 3);
}

static void check_nothing_left(void)
{
	const struct srv_server *server = rig.server;
	struct kv_pool *pool;

	CHECK(server->n_conns == 0);
	CHECK(server->slots[0].n_used == 0 && server->slots[1].n_used == 0);
	CHECK(server->n_replies_used == 0);
	CHECK(rig.io.n_ahead_out == 0);
	CHECK(kv_domain_n_sessions(server->domain) == 0 && !kv_domain_has_zombies(server->domain));
	for (uint32_t i = 0; (pool = kv_domain_pool_at(server->domain, i)); i++) {
		CHECK(pool->blocks[0].counts.n_free == pool->blocks[0].n_blocks);
		CHECK(pool->blocks[0].counts.n_reserved == 0);
	}
}

void rig_stop(void)
{
	rig_backend.holds = false;
	for (uint32_t i = 0; i < MEM_CONNS; i++) {
		rig.io.conns[i].is_reading = true;
		rig.io.conns[i].is_ended = true;
	}
	rig_settle();
	rig_turn(5000); /* the longest lease of any scenario */
	rig_settle();
	check_nothing_left();
	rig_end();
}

void rig_end(void)
{
	srv_server_answer_waiting(rig.server);
	srv_server_destroy(rig.server);
	mem_io_finish(&rig.io);
	srv_mailbox_finish(&rig.mailbox);
	srv_options_finish(&rig.options);
}

/* ---- frames out ---- */

static uint64_t build(const struct rig_frame *frame, uint64_t request_id, uint8_t out[RIG_FRAME_BYTES])
{
	struct kvp_header header = frame->header;
	uint8_t *body = out + KVP_HEADER_BYTES;
	uint8_t *item_at = body + frame->op_bytes;

	header.request_id = request_id;
	header.op_bytes = frame->op_bytes;
	header.n_items = (uint16_t)frame->n_items;
	header.item_bytes = frame->n_items ? KVP_ITEM_BYTES : 0;
	header.body_bytes =
		kvp_body_bytes(frame->op_bytes, frame->n_items, header.item_bytes, frame->payload_bytes);
	CHECK(KVP_HEADER_BYTES + header.body_bytes <= RIG_FRAME_BYTES);
	memset(body, 0, (size_t)header.body_bytes);
	memcpy(body, frame->op, frame->op_bytes);
	for (uint32_t i = 0; i < frame->n_items; i++, item_at += KVP_ITEM_BYTES) {
		kvp_rows_item_encode(&frame->items[i], item_at);
		kvp_put_u64(item_at + KVP_AT(fork_item, parent), frame->parents[i]);
	}
	if (frame->payload_bytes > 0)
		memcpy(body + header.body_bytes - frame->payload_bytes, frame->payload,
			(size_t)frame->payload_bytes);
	if (header.flags & KVP_FLAG_BODY_CRC)
		header.body_crc = kvp_crc32c(0, body, (size_t)header.body_bytes) ^ frame->is_bad_crc;
	kvp_header_encode(&header, out);
	return KVP_HEADER_BYTES + header.body_bytes;
}

static uint64_t next_request_id(void)
{
	static uint64_t last;

	return ++last;
}

uint64_t rig_send(uint32_t conn, const struct rig_frame *frame)
{
	static uint8_t bytes[RIG_FRAME_BYTES];
	const uint64_t request_id = next_request_id();
	const uint64_t n_bytes = build(frame, request_id, bytes);

	mem_bytes_add(&rig.io.conns[conn].in, bytes, n_bytes);
	return request_id;
}

void rig_send_part(uint32_t conn, const struct rig_frame *frame, uint64_t n_bytes)
{
	static uint8_t bytes[RIG_FRAME_BYTES];

	CHECK(n_bytes <= build(frame, next_request_id(), bytes));
	mem_bytes_add(&rig.io.conns[conn].in, bytes, n_bytes);
}

/* ---- replies in ---- */

bool rig_take(uint32_t conn, uint64_t request_id, struct rig_reply *reply)
{
	struct mem_bytes *out = &rig.io.conns[conn].out;
	struct kvp_fault fault;
	uint64_t at = 0;

	while (out->n_bytes >= at + KVP_HEADER_BYTES) {
		struct kvp_header header;

		CHECK(kvp_header_decode(out->data + at, &header, &fault) == KV_OK);
		CHECK(header.flags & KVP_FLAG_RESPONSE);
		CHECK(KVP_HEADER_BYTES + header.body_bytes <= RIG_FRAME_BYTES + KVP_HEADER_BYTES);
		const uint64_t n_bytes = KVP_HEADER_BYTES + header.body_bytes;

		if (out->n_bytes < at + n_bytes)
			return false;
		if (header.request_id == request_id) {
			const uint64_t n_behind = out->n_bytes - at - n_bytes;

			reply->header = header;
			memcpy(reply->body, out->data + at + KVP_HEADER_BYTES, (size_t)header.body_bytes);
			if (n_behind > 0)
				memmove(out->data + at, out->data + at + n_bytes, (size_t)n_behind);
			out->n_bytes -= n_bytes;
			return true;
		}
		at += n_bytes;
	}
	return false;
}

const struct rig_reply *rig_call(uint32_t conn, const struct rig_frame *frame)
{
	static struct rig_reply reply;
	const uint64_t request_id = rig_send(conn, frame);

	for (uint32_t i = 0; i < TURNS_MAX; i++) {
		rig_turn(0);
		if (rig_take(conn, request_id, &reply)) {
			CHECK(reply.header.opcode == frame->header.opcode);
			return &reply;
		}
	}
	rig_fail("a reply comes", __FILE__, __LINE__);
}

enum kv_status rig_ask(uint32_t conn, const struct rig_frame *frame)
{
	return (enum kv_status)rig_call(conn, frame)->header.status;
}

/* ---- control requests ---- */

static void control_done(struct srv_control *control)
{
	control->user = NULL;
}

uint64_t rig_control_id, rig_control_sequence_id, rig_control_tenant;
struct kv_tenant_policy rig_control_policy;

struct srv_control *rig_control(enum srv_control_kind kind, const char *name, const char *pool_json)
{
	static struct srv_control control;
	struct kv_error err = { 0 };

	kv_pool_spec_destroy(control.spec);
	memset(&control, 0, sizeof(control));
	control.kind = kind;
	control.done = control_done;
	control.user = &control;
	control.id = rig_control_id;
	control.sequence_id = rig_control_sequence_id;
	control.tenant = rig_control_tenant;
	control.policy = rig_control_policy;
	if (name)
		snprintf(control.name, sizeof(control.name), "%s", name);
	if (pool_json) {
		json_t *json = json_loads(pool_json, 0, NULL);

		check_ok(kv_pool_spec_create(json, &control.spec, &err), &err, __FILE__, __LINE__);
		json_decref(json);
	}
	CHECK(srv_mailbox_post(&rig.mailbox, &control));
	for (uint32_t i = 0; i < TURNS_MAX && control.user; i++)
		rig_turn(0);
	CHECK(!control.user);
	return &control;
}

struct kv_block_counts rig_blocks(void)
{
	const struct srv_control *control = rig_control(SRV_CONTROL_OCCUPANCY, NULL, NULL);
	const struct kv_block_counts counts = control->rows.pools[0].blocks[0];

	CHECK(control->status == KV_OK && control->n_rows >= 1);
	CHECK(counts.n_free + counts.n_owned + counts.n_shared + counts.n_pinned + counts.n_draining ==
		counts.n_total);
	return counts;
}
