/*
 * Fuzz target: the whole server behind its sockets, with the scalar backend, in one thread and without time
 * of its own. The audit runs after every turn; at the end every connection goes, every lease runs out, and
 * every slot, buffer and block must be back.
 *
 * Input: a script. A step is one byte, action and connection (bits 0-2 and 3-4), with what the action takes:
 * CONNECT; FRAME u16 length and a frame, whose sizes and checksums are mended and whose session 1 to 8
 * becomes the handle that a reply told; RAW u8 length and bytes; TURN u8 (how much time passes before); END
 * and RESET of the peer; READING u8 (bit 0: it does not read; bit 1: late completions; the rest: size of
 * receives); CONTROL u8 kind, u8 argument. Every reply that comes back is read as a client would.
 */
#include "core/backend_cpu.h"
#include "core/checked.h"
#include "server/internal.h"
#include "tests/fuzz/fuzz.h"
#include "tests/mutation/memory_io.h"

#define PEERS       4u
#define HANDLES     8u
#define CONTROLS    8u
#define FRAME_BYTES 16384u
#define AHEAD       3u
#define STEPS_MAX   400u

/* Formats whose tables need not be computed; the self-test's pool has tq4. */
static const char pool_text[] = "[{\"name\": \"smol\", \"layers\": 6, \"q_heads\": 2, \"kv_heads\": 1, "
				"\"head_dim\": 16, \"k\": \"f32\","
				"\"v\": \"bf16\", \"block_size\": 16, \"blocks\": 12, \"tokens_max\": 64}]";
static const char extra_text[] = "{\"name\": \"extra\", \"layers\": 1, \"q_heads\": 1, \"kv_heads\": 1, "
				 "\"head_dim\": 16, \"k\": \"f32\","
				 "\"v\": \"f32\", \"block_size\": 16, \"blocks\": 4}";

struct asked {
	struct srv_control control;
	bool is_open;
};

struct world {
	struct mem_clock clock;
	struct mem_random random;
	struct mem_io io;
	struct srv_server *server;
	uint64_t handles[HANDLES];
	uint32_t n_handles;
	uint64_t n_replies[PEERS];
	struct asked asked[CONTROLS];
};

enum action { CONNECT, FRAME, RAW, TURN, END, RESET, READING, CONTROL };

/* ---- making ---- */

static const struct srv_options *fuzz_options(void)
{
	static struct srv_options options;
	struct kv_error err;

	if (options.pools)
		return &options;
	FUZZ_CHECK(srv_options_init(&options, &err) == KV_OK);
	json_decref(options.pools);
	options.pools = json_loads(pool_text, 0, NULL);
	FUZZ_CHECK(options.pools != NULL);
	options.frame_bytes_max = KVP_FRAME_BYTES_MIN;
	options.large_slots = 2;
	options.small_slots = 4;
	options.read_ahead_buffers = AHEAD;
	options.reply_buffers = 3;
	options.connections_max = 3; /* one less than there are peers */
	options.sessions_max = 3;
	options.sequences_max = 8;
	options.inflight_requests_max = 4;
	options.inflight_bytes_max = 262144;
	options.io_timeout_ms = 400;
	options.send_timeout_ms = 600;
	options.hello_timeout_ms = 2000;
	options.self_test_interval_ms = 1000;
	srv_log_set_level((enum srv_log_level)0);
	return &options;
}

static void start(struct world *world)
{
	const struct srv_options *options = fuzz_options();
	struct srv_seams seams = { .arena_bytes = 1 << 20 };
	struct kv_error err = { 0 };

	memset(world, 0, sizeof(*world));
	mem_clock_init(&world->clock);
	mem_random_init(&world->random);
	mem_io_init(&world->io, &world->clock, AHEAD);
	FUZZ_CHECK(kv_backend_cpu_create(0, &seams.backend, &err) == KV_OK);
	seams.io = &world->io.base;
	seams.clock = &world->clock.base;
	seams.random = &world->random.base;
	const enum kv_status status = srv_server_create(options, &seams, &world->server, &err);

	if (status != KV_OK)
		fuzz_fail(err.msg, __FILE__, __LINE__);
	FUZZ_CHECK(srv_server_listen(world->server, &err) == KV_OK);
	/* Only when a control request asks for it: it is slow. */
	world->server->probe.next_ns = UINT64_MAX / 4;
}

/* ---- replies ---- */

static void check_error(const struct kvp_header *header, const uint8_t *body)
{
	struct kvp_frame_error error;

	kvp_frame_error_decode(body, header->op_bytes, &error);
	FUZZ_CHECK(error.status == header->status && error.scope >= KV_SCOPE_ITEM);
	FUZZ_CHECK(error.offset < KVP_HEADER_BYTES + KVP_FRAME_BYTES_MIN);
	FUZZ_CHECK(error.detail_bytes > 0 && error.detail_bytes == kvp_payload_bytes(header));
}

static void check_rows_reply(const struct kvp_header *header, const uint8_t *body)
{
	struct kvp_rows_reply reply;
	struct kvp_rows_reply_item item;

	kvp_rows_reply_decode(body, header->op_bytes, &reply);
	FUZZ_CHECK(reply.n_ok + reply.n_failed == header->n_items);
	for (uint32_t i = 0; i < header->n_items; i++) {
		kvp_rows_reply_item_decode(
			body + header->op_bytes + (size_t)i * header->item_bytes, header->item_bytes, &item);
		FUZZ_CHECK(item.sequence != 0 && item.length <= 64);
		FUZZ_CHECK(kv_status_row(item.status)->number == item.status && item.status < 900);
	}
}

static void check_reply(struct world *world, const struct kvp_header *header, const uint8_t *body)
{
	FUZZ_CHECK(kv_status_row(header->status)->number == header->status && header->status < 900);
	if (header->flags & KVP_FLAG_BODY_CRC)
		FUZZ_CHECK(header->body_crc == kvp_crc32c(0, body, (size_t)header->body_bytes));
	if (header->opcode == KVP_OP_GOAWAY || header->opcode == KVP_OP_HELLO)
		return;
	if (header->status != KV_OK) {
		check_error(header, body);
		return;
	}
	switch (header->opcode) {
	case KVP_OP_OPEN:
	case KVP_OP_ATTACH:
		FUZZ_CHECK(header->op_bytes >= 8);
		world->handles[world->n_handles++ % HANDLES] = kvp_get_u64(body);
		break;
	case KVP_OP_APPEND:
	case KVP_OP_DECODE:
	case KVP_OP_APPEND_DECODE:
	case KVP_OP_TRUNCATE:
	case KVP_OP_FREE:
	case KVP_OP_FORK:
	case KVP_OP_SPILL:
	case KVP_OP_PREFETCH:
		check_rows_reply(header, body);
		break;
	default:
		break;
	}
}

/* Whole frames with right checksums, within the bound that HELLO tells. */
static void read_replies(struct world *world, uint32_t idx)
{
	struct mem_bytes *out = &world->io.conns[idx].out;

	while (out->n_bytes >= KVP_HEADER_BYTES) {
		struct kvp_header header;
		struct kvp_fault fault;

		FUZZ_CHECK(kvp_header_decode(out->data, &header, &fault) == KV_OK);
		FUZZ_CHECK(kvp_check_reply(&header, KVP_FRAME_BYTES_MIN, &fault) == KV_OK);
		if (out->n_bytes < KVP_HEADER_BYTES + header.body_bytes)
			return;
		check_reply(world, &header, out->data + KVP_HEADER_BYTES);
		world->n_replies[idx]++;
		mem_bytes_drop(out, KVP_HEADER_BYTES + header.body_bytes);
	}
}

/* ---- steps ---- */

static void check_server(struct world *world)
{
	struct kv_error err = { 0 };

	if (srv_server_audit(world->server, &err) != KV_OK)
		fuzz_fail(err.msg, __FILE__, __LINE__);
	FUZZ_CHECK(!world->server->is_lost);
}

static void turn(struct world *world, uint64_t ms)
{
	world->clock.now_ns += ms * KV_NS_PER_MS + 1000;
	srv_server_turn(world->server, 0);
	for (uint32_t i = 0; i < PEERS; i++)
		read_replies(world, i);
	check_server(world);
}

static void control_done(struct srv_control *control)
{
	struct asked *asked = kv_container_of(control, struct asked, control);

	FUZZ_CHECK(asked->is_open && control->n_rows <= SRV_CONTROL_ROWS_MAX);
	FUZZ_CHECK(control->status == KV_OK || control->kind == SRV_CONTROL_READY || control->error.msg[0]);
	FUZZ_CHECK(control->kind != SRV_CONTROL_AUDIT || control->is_passed);
	for (uint32_t i = 0;
		control->kind == SRV_CONTROL_OCCUPANCY && control->status == KV_OK && i < control->n_rows;
		i++) {
		const struct kv_block_counts *blocks = &control->rows.pools[i].blocks[0];
		const struct kv_memory_report *memory = &control->rows.pools[i].memory;

		FUZZ_CHECK(blocks->n_free + blocks->n_owned + blocks->n_shared + blocks->n_pinned +
				blocks->n_draining ==
			blocks->n_total);
		FUZZ_CHECK(memory->payload_bytes + memory->norms_bytes + memory->scales_bytes +
				memory->zeros_bytes + memory->exact_bytes ==
			memory->stored_bytes);
	}
	kv_pool_spec_destroy(control->spec);
	control->spec = NULL;
	asked->is_open = false;
}

static void ask(struct world *world, uint8_t kind, uint8_t argument)
{
	struct asked *asked = NULL;
	struct kv_error err;

	for (uint32_t i = 0; i < CONTROLS; i++) {
		if (!world->asked[i].is_open)
			asked = &world->asked[i];
	}
	if (!asked)
		return;
	memset(asked, 0, sizeof(*asked));
	asked->is_open = true;
	asked->control.kind = (enum srv_control_kind)(kind % (SRV_CONTROL_AUDIT + 1));
	asked->control.sort = (enum srv_session_sort)(argument % SRV_N_SORTS);
	asked->control.sequence_id = argument / 16;
	asked->control.group_idx = argument / 128;
	asked->control.n_rows_max = argument % 4;
	asked->control.cursor = argument / 4;
	asked->control.id = world->handles[argument % HANDLES];
	asked->control.is_deep = argument & 1;
	asked->control.done = control_done;
	snprintf(asked->control.name, sizeof(asked->control.name), "%s", argument & 1 ? "extra" : "smol");
	asked->control.policy = kv_tenant_policy_open();
	if (asked->control.kind == SRV_CONTROL_TENANT_SET) {
		asked->control.is_common = argument & 1;
		asked->control.policy.most[argument / 2 % KV_QUOTAS] = (uint64_t)argument * argument;
		asked->control.policy.weight = 1 + argument;
	}
	if (asked->control.kind == SRV_CONTROL_POOL_CREATE) {
		json_t *json = json_loads(extra_text, 0, NULL);

		FUZZ_CHECK(kv_pool_spec_create(json, &asked->control.spec, &err) == KV_OK);
		json_decref(json);
	}
	srv_server_control(world->server, &asked->control);
}

static void write_frame(struct world *world, struct kv_io_conn *conn, struct fuzz_input *input)
{
	uint8_t frame[FRAME_BYTES];
	const uint32_t n = fuzz_u16(input) % FRAME_BYTES;
	const uint32_t n_bytes = n > KVP_HEADER_BYTES ? n : KVP_HEADER_BYTES;

	fuzz_bytes(input, frame, n_bytes);
	const uint64_t session = kvp_get_u64(frame + KVP_AT_SESSION);

	if (session >= 1 && session <= HANDLES)
		kvp_put_u64(frame + KVP_AT_SESSION, world->handles[session - 1]);
	kvp_put_u64(frame + KVP_AT_BODY_BYTES, n_bytes - KVP_HEADER_BYTES);
	if (kvp_get_u32(frame + KVP_AT_BODY_CRC) == 0)
		kvp_put_u32(frame + KVP_AT_BODY_CRC,
			kvp_crc32c(0, frame + KVP_HEADER_BYTES, n_bytes - KVP_HEADER_BYTES));
	fuzz_mend_header(frame);
	mem_bytes_add(&conn->in, frame, n_bytes);
}

static void write_raw(struct kv_io_conn *conn, struct fuzz_input *input)
{
	uint8_t bytes[255];
	const uint32_t n_bytes = fuzz_u8(input);

	fuzz_bytes(input, bytes, n_bytes);
	mem_bytes_add(&conn->in, bytes, n_bytes);
}

static void set_reading(struct kv_io_conn *conn, uint8_t how)
{
	conn->is_reading = !(how & 1);
	conn->is_late = how & 2;
	conn->chunk_bytes = how >> 2;
}

static void step(struct world *world, struct fuzz_input *input)
{
	static const uint32_t uids[PEERS] = { 1000, 1000, 1001, UINT32_MAX };
	const uint8_t head = fuzz_u8(input);
	const uint32_t idx = head >> 3 & 3;
	struct kv_io_conn *conn = &world->io.conns[idx];
	const bool is_open = conn->phase == MEM_WAITS || conn->phase == MEM_OPEN;

	switch ((enum action)(head & 7)) {
	case CONNECT:
		if (mem_connect(&world->io, idx, uids[idx]))
			world->n_replies[idx] = 0;
		break;
	case FRAME:
		if (is_open && !conn->is_ended)
			write_frame(world, conn, input);
		break;
	case RAW:
		if (is_open && !conn->is_ended)
			write_raw(conn, input);
		break;
	case TURN:
		turn(world, (uint64_t)fuzz_u8(input) * 2);
		for (uint32_t i = 0; i < 6 && !mem_io_is_quiet(&world->io); i++)
			turn(world, 0);
		break;
	case END:
		conn->is_ended = true;
		break;
	case RESET:
		conn->is_reset = true;
		break;
	case READING:
		set_reading(conn, fuzz_u8(input));
		break;
	case CONTROL: {
		const uint8_t kind = fuzz_u8(input);

		ask(world, kind, fuzz_u8(input));
		break;
	}
	}
}

/* ---- the end ---- */

/* Turns until nothing is under way. Whatever a peer has done, that does not take for ever. */
static void settle(struct world *world)
{
	for (uint32_t i = 0; i < 2000; i++) {
		turn(world, 1);
		/* An audit takes turns of its own, some of them a while apart. */
		if (mem_io_is_quiet(&world->io) && srv_server_wait_ns(world->server) > 0 &&
			srv_scheduler_in_flight(world->server) == 0 && world->server->n_parked == 0)
			return;
	}
	fuzz_fail("it comes to rest", __FILE__, __LINE__);
}

/* Rule 4 of the protocol: one reply per request, while the connection lasts. */
static void check_all_answered(struct world *world)
{
	for (uint32_t i = 0; i < PEERS; i++) {
		const struct kv_io_conn *conn = &world->io.conns[i];
		const struct srv_conn *ours = conn->user;

		if (conn->phase != MEM_OPEN || !ours || ours->sm.state != CONN_HEADER)
			continue;
		FUZZ_CHECK(ours->n_inflight == 0 && !ours->filling);
		FUZZ_CHECK(world->n_replies[i] == ours->n_frames_in);
	}
}

static void check_nothing_left(struct world *world)
{
	struct srv_server *server = world->server;
	struct kv_pool *pool;

	FUZZ_CHECK(server->n_conns == 0 && kv_list_is_empty(&server->conns_open));
	FUZZ_CHECK(server->slots[0].n_used == 0 && server->slots[1].n_used == 0);
	FUZZ_CHECK(server->n_replies_used == 0);
	FUZZ_CHECK(world->io.n_ahead_out == 0);
	FUZZ_CHECK(kv_domain_n_sessions(server->domain) == 0 && !kv_domain_has_zombies(server->domain));
	for (uint32_t i = 0; (pool = kv_domain_pool_at(server->domain, i)); i++) {
		const struct kv_block_counts *blocks = &pool->blocks[0].counts;

		FUZZ_CHECK(blocks->n_free == blocks->n_total && blocks->n_reserved == 0);
		FUZZ_CHECK(pool->n_sequences == 0 && pool->n_tokens_committed == 0);
	}
}

static void stop(struct world *world)
{
	for (uint32_t i = 0; i < PEERS; i++)
		world->io.conns[i].is_reading = true;
	settle(world);
	check_all_answered(world);
	for (uint32_t i = 0; i < PEERS; i++)
		world->io.conns[i].is_ended = true;
	settle(world);
	turn(world, 86400001); /* the longest lease there is */
	settle(world);
	check_nothing_left(world);
	srv_server_answer_waiting(world->server);
	for (uint32_t i = 0; i < CONTROLS; i++)
		FUZZ_CHECK(!world->asked[i].is_open);
	srv_server_destroy(world->server);
	mem_io_finish(&world->io);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	static struct world world;
	struct fuzz_input input = { data, n_bytes };

	start(&world);
	for (uint32_t i = 0; i < STEPS_MAX && input.n_bytes > 0; i++)
		step(&world, &input);
	stop(&world);
	return 0;
}
