/* Snapshots: what is saved comes back, with everything beside rows; what is wrong with a file leaves no
 * trace. */
#include <string.h>

#include "server/checkpoint.h"
#include "tests/mutation/rig.h"
#include "tests/mutation/scenarios.h"

#define TURNS_MAX 2000u

static const char exact_pool[] =
	"{\"name\":\"exact\",\"layers\":2,\"q_heads\":2,\"kv_heads\":1,\"head_dim\":16,"
	"\"k\":\"f32\",\"v\":\"f32\",\"block_size\":16,\"blocks\":6,\"exact_tokens\":16}";
static const struct rig_open keep = { .name = "keep" };

static enum kv_status finish(struct srv_checkpoint_view *view)
{
	for (uint32_t i = 0; i < TURNS_MAX; i++) {
		srv_checkpoint_status(rig.server->checkpoint, view);
		if (!view->is_running)
			return view->status;
		rig_turn(0);
	}
	CHECK(!"a snapshot ends");
}

static enum kv_status save(struct srv_checkpoint_view *view)
{
	struct kv_error err;

	CHECK(srv_checkpoint_save(rig.server->checkpoint, "s", 0, &err) == KV_OK);
	return finish(view);
}

static enum kv_status load(struct srv_checkpoint_view *view)
{
	struct kv_error err;

	CHECK(srv_checkpoint_load(rig.server->checkpoint, "s", false, &err) == KV_OK);
	return finish(view);
}

static uint64_t attach(void)
{
	struct rig_frame frame = rig_open_frame("", &keep);
	struct kvp_open_reply opened;

	frame.header.opcode = KVP_OP_ATTACH;
	const struct rig_reply *reply = rig_call(0, &frame);

	CHECK(reply->header.status == KV_OK);
	kvp_open_reply_decode(reply->body, reply->header.op_bytes, &opened);
	return opened.session;
}

static enum kv_status ask_item(uint16_t opcode, uint64_t session, uint64_t sequence, uint64_t parent)
{
	struct rig_frame frame = rig_plain(opcode, session);

	frame.n_items = 1;
	frame.items[0] = (struct kvp_rows_item){ .sequence = sequence, .position = parent ? 40 : 0 };
	frame.parents[0] = parent;
	return rig_item(0, &frame);
}

static enum kv_status ask_prefix(uint16_t opcode, uint64_t session, uint64_t sequence)
{
	static uint8_t tokens[4 * 40];
	struct rig_frame frame = rig_plain(opcode, session);

	for (uint32_t i = 0; i < 40; i++)
		kvp_put_u32(tokens + 4 * i, i);
	frame.op_bytes = KVP_BYTES(prefix_req);
	kvp_prefix_req_encode(&(struct kvp_prefix_req){ .sequence = sequence, .n_tokens = 40 }, frame.op);
	frame.payload = tokens;
	frame.payload_bytes = sizeof(tokens);
	return rig_ask(0, &frame);
}

static void close_session(uint64_t session)
{
	const struct rig_frame frame = rig_plain(KVP_OP_CLOSE, session);

	CHECK(rig_ask(0, &frame) == KV_OK);
	rig_settle();
}

/* Rows, forks, a published prefix and a pin, over the end of their session and of the prefix. */
static void snapshots_bring_everything_back(void)
{
	struct srv_checkpoint_view view;

	rig_start();
	rig_hello(0, 1);
	uint64_t session = rig_open_session(0, &keep);
	struct rig_frame frame = rig_append(session, 5, 0, 40);

	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(ask_item(KVP_OP_FORK, session, 6, 5) == KV_OK);
	CHECK(ask_prefix(KVP_OP_PUBLISH, session, 5) == KV_OK);
	CHECK(ask_item(KVP_OP_PIN, session, 5, 0) == KV_OK);
	const struct kv_block_counts before = rig_blocks();

	CHECK(save(&view) == KV_OK);
	CHECK(view.n_sessions == 1 && view.n_sequences == 2 && view.n_blocks == 3 && view.n_prefixes == 2);
	CHECK(rig_blocks().n_shared == before.n_shared &&
		rig_blocks().n_extra_owners == before.n_extra_owners);
	CHECK(load(&view) == KV_EXISTS);
	rig_settle();
	CHECK(rig_blocks().n_free == before.n_free);
	close_session(session);
	/* Room for all of it is only where the prefix was: it goes, and comes back. */
	uint64_t hog = rig_open_session(0, &(struct rig_open){ .reserve_blocks = RIG_BLOCKS });

	close_session(hog);
	CHECK(rig_blocks().n_free == RIG_BLOCKS);
	CHECK(load(&view) == KV_OK);
	CHECK(view.n_sessions == 1 && view.n_sequences == 2 && view.n_prefixes == 2);
	session = attach();
	CHECK(rig_blocks().n_free == before.n_free && rig_blocks().n_shared == before.n_shared);
	CHECK(rig_blocks().n_kept == 2);
	CHECK(rig_length(0, session, 6) == 40);
	rig_check_rows(0, session, 5, 40);
	rig_check_decode(0, session, 5, 40);
	CHECK(ask_prefix(KVP_OP_MATCH, session, 7) == KV_OK);
	CHECK(rig_length(0, session, 7) == 32);
	CHECK(ask_item(KVP_OP_UNPIN, session, 5, 0) == KV_OK);
	CHECK(ask_item(KVP_OP_UNPIN, session, 5, 0) == KV_BAD_STATE);
	close_session(session);
	hog = rig_open_session(0, &(struct rig_open){ .reserve_blocks = RIG_BLOCKS });
	close_session(hog);
	rig_stop();
}

/* Tokens that are exact before are exact afterwards. */
static void exact_windows_come_back(void)
{
	struct srv_checkpoint_view view;
	struct kv_session *found = NULL;
	struct kvp_open_reply opened;

	rig_start();
	rig_hello(0, 1);
	CHECK(rig_control(SRV_CONTROL_POOL_CREATE, NULL, exact_pool)->status == KV_OK);
	struct rig_frame frame = rig_open_frame("exact", &keep);
	const struct rig_reply *reply = rig_call(0, &frame);

	CHECK(reply->header.status == KV_OK);
	kvp_open_reply_decode(reply->body, reply->header.op_bytes, &opened);
	frame = rig_append(opened.session, 5, 0, 20);
	CHECK(rig_item(0, &frame) == KV_OK);
	frame = rig_decode(opened.session, 5, 20);
	const struct rig_reply before = *rig_call(0, &frame);

	CHECK(save(&view) == KV_OK);
	close_session(opened.session);
	/* Other rows take the places of what was exact. */
	frame = rig_open_frame("exact", &keep);
	reply = rig_call(0, &frame);
	CHECK(reply->header.status == KV_OK);
	kvp_open_reply_decode(reply->body, reply->header.op_bytes, &opened);
	frame = rig_append(opened.session, 9, 0, 40);
	CHECK(rig_item(0, &frame) == KV_OK);
	close_session(opened.session);
	CHECK(load(&view) == KV_OK);
	frame = rig_decode(attach(), 5, 20);
	reply = rig_call(0, &frame);
	CHECK(reply->header.status == KV_OK && before.header.body_bytes == reply->header.body_bytes);
	CHECK(memcmp(reply->body, before.body, (size_t)before.header.body_bytes) == 0);
	CHECK(kv_session_find(rig.server->domain, attach(), &found) == KV_OK);
	CHECK(kv_sequence_n_exact_least(kv_sequence_find(found, 5)) == 16);
	rig_stop();
}

/* A bit of each record is wrong in turn: nothing comes of the file, and nothing is left of it. */
static void damage_leaves_no_trace(void)
{
	struct srv_checkpoint_view view;

	rig_start();
	rig_hello(0, 1);
	const uint64_t session = rig_open_session(0, &keep);
	struct rig_frame frame = rig_append(session, 5, 0, 20);

	CHECK(rig_item(0, &frame) == KV_OK);
	CHECK(save(&view) == KV_OK);
	CHECK(save(&view) == KV_OK); /* again, over the first */
	close_session(session);
	struct mem_file *file = mem_file_find(&rig.io, "dir/s.tqkv");

	CHECK(file);
	for (uint64_t at = 40; at < file->bytes.n_bytes; at += 509) {
		file->bytes.data[at] ^= 16;
		CHECK(load(&view) == KV_CORRUPT);
		file->bytes.data[at] ^= 16;
		rig_settle();
		CHECK(rig_blocks().n_free == RIG_BLOCKS);
	}
	file->bytes.n_bytes -= 128;
	CHECK(load(&view) == KV_CORRUPT);
	rig_settle();
	CHECK(rig_blocks().n_free == RIG_BLOCKS &&
		rig_control(SRV_CONTROL_SESSIONS, NULL, NULL)->n_rows == 0);
	file->bytes.n_bytes += 128;
	CHECK(load(&view) == KV_OK);
	rig_check_rows(0, attach(), 5, 20);
	rig_stop();
}

void scenario_snapshots(void)
{
	snapshots_bring_everything_back();
	exact_windows_come_back();
	damage_leaves_no_trace();
}
