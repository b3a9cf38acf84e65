/*
 * Fuzz target: bytes as a snapshot, restored by the whole server with the scalar backend, in one thread and
 * without time of its own. The audit runs after every turn. A refused one leaves nothing behind; one that is
 * taken can be saved and restored again.
 *
 * Input: one byte, then the file. Bit 0: checksums of records are mended, so that what is behind them is
 * looked at; bit 1: so is what the trailer says; bit 2: chunks are as small as they may be.
 */
#include "core/backend_cpu.h"
#include "core/checked.h"
#include "server/checkpoint_internal.h"
#include "tests/fuzz/fuzz.h"
#include "tests/mutation/memory_io.h"

#define AHEAD     3u
#define TURNS_MAX 20000u

/* As make_snapshots has them; formats whose tables need not be computed. */
static const char pools_text[] =
	"[{\"name\": \"smol\", \"layers\": 2, \"q_heads\": 1, \"kv_heads\": 1, \"head_dim\": 16, "
	"\"k\": \"bf16\", \"v\": \"bf16\", \"block_size\": 16, \"blocks\": 12, \"tokens_max\": 64, "
	"\"exact_tokens\": 16},"
	" {\"name\": \"slide\", \"layers\": 2, \"q_heads\": 1, \"kv_heads\": 1, \"head_dim\": 16, "
	"\"k\": \"bf16\", \"v\": \"bf16\", \"block_size\": 16, \"blocks\": 12, \"tokens_max\": 160, "
	"\"window\": [0, 20], \"sink_tokens\": 4}]";

struct world {
	struct mem_clock clock;
	struct mem_random random;
	struct mem_io io;
	struct srv_server *server;
};

static const struct srv_options *fuzz_options(void)
{
	static struct srv_options options;
	struct kv_error err;

	if (options.pools)
		return &options;
	FUZZ_CHECK(srv_options_init(&options, &err) == KV_OK);
	json_decref(options.pools);
	options.pools = json_loads(pools_text, 0, NULL);
	FUZZ_CHECK(options.pools != NULL);
	options.frame_bytes_max = KVP_FRAME_BYTES_MIN;
	options.large_slots = 2;
	options.small_slots = 2;
	options.read_ahead_buffers = AHEAD;
	options.reply_buffers = 2;
	options.connections_max = 2;
	options.sessions_max = 4;
	options.sequences_max = 8;
	options.self_test_interval_ms = 1000;
	snprintf(options.snapshot_dir, sizeof(options.snapshot_dir), "dir");
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
	world->server->probe.next_ns = UINT64_MAX / 4;
}

static void turn(struct world *world)
{
	struct kv_error err = { 0 };

	srv_server_turn(world->server, 0);
	if (srv_server_audit(world->server, &err) != KV_OK)
		fuzz_fail(err.msg, __FILE__, __LINE__);
}

/* Nothing is there that a client could have put there. */
static void check_empty(struct world *world)
{
	for (uint32_t i = 0; i < TURNS_MAX && kv_domain_has_zombies(world->server->domain); i++)
		turn(world);
	FUZZ_CHECK(kv_domain_n_sessions(world->server->domain) == 0);
	for (uint32_t i = 0; i < kv_domain_n_pools(world->server->domain); i++) {
		const struct kv_pool *pool = kv_domain_pool_at(world->server->domain, i);

		FUZZ_CHECK(pool->n_sequences == 0 && pool->n_zombies == 0 && pool->n_exact_rows == 0);
		for (uint32_t g = 0; g < pool->spec->n_tables; g++)
			FUZZ_CHECK(pool->blocks[g].counts.n_free + pool->blocks[g].counts.n_idle ==
				pool->blocks[g].counts.n_total);
	}
}

static enum kv_status finish(struct world *world)
{
	struct srv_checkpoint_view view;

	for (uint32_t i = 0; srv_checkpoint_is_running(world->server->checkpoint); i++) {
		FUZZ_CHECK(i < TURNS_MAX);
		turn(world);
	}
	srv_checkpoint_status(world->server->checkpoint, &view);
	FUZZ_CHECK(view.status == KV_OK || view.detail[0] != '\0');
	FUZZ_CHECK(world->io.n_files_open == 0);
	return view.status;
}

static enum kv_status load(struct world *world, const char *name)
{
	struct kv_error err;

	FUZZ_CHECK(srv_checkpoint_load(world->server->checkpoint, name, false, &err) == KV_OK);
	return finish(world);
}

static void close_all(struct world *world)
{
	uint32_t slot = 0;

	for (struct kv_session *session; (session = kv_session_next(world->server->domain, &slot));)
		srv_session_close(world->server, session);
}

/* Headers and payloads become what their checksums say, in order; `end` becomes what the trailer must say. */
static void mend(uint8_t *file, uint64_t n_bytes, bool mends_trailer)
{
	struct srv_record_end end = { 0 };

	for (uint64_t at = 0; n_bytes - at >= SRV_RECORD_BYTES;) {
		uint8_t *header = file + at;
		const uint64_t payload_bytes = kvp_get_u64(header + 8);

		memcpy(header, "TKS1", 4);
		if (payload_bytes > n_bytes - at - SRV_RECORD_BYTES ||
			srv_record_padded(payload_bytes) > n_bytes - at - SRV_RECORD_BYTES)
			return;
		if (kvp_get_u16(header + 4) == SRV_RECORD_END && mends_trailer &&
			payload_bytes == SRV_RECORD_END_BYTES)
			srv_record_end_encode(&end, header + SRV_RECORD_BYTES);
		kvp_put_u32(header + 16,
			kvp_crc32c(0, header + SRV_RECORD_BYTES, (size_t)srv_record_padded(payload_bytes)));
		kvp_put_u32(header + 60, kvp_crc32c(0, header, 60));
		end.chain_crc = kvp_crc32c(end.chain_crc, header, SRV_RECORD_BYTES);
		end.n_records++;
		end.n_sessions += kvp_get_u16(header + 4) == SRV_RECORD_SESSION;
		end.n_sequences += kvp_get_u16(header + 4) == SRV_RECORD_SEQUENCE;
		end.n_blocks += kvp_get_u16(header + 4) == SRV_RECORD_BLOCK;
		at += srv_record_bytes(payload_bytes);
	}
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	static struct world world;
	struct fuzz_input input = { data, n_bytes };
	const uint8_t how = fuzz_u8(&input);
	struct kv_error err;

	if (input.n_bytes > 1 << 18)
		return 0;
	start(&world);
	struct mem_file *file = mem_file_put(&world.io, "dir/s.tqkv", input.data, input.n_bytes);

	if (how & 1)
		mend(file->bytes.data, file->bytes.n_bytes, (how & 2) != 0);
	if (how & 4)
		world.server->checkpoint->chunk_bytes_min = 1;
	const enum kv_status status = load(&world, "s");

	if (status != KV_OK) {
		FUZZ_CHECK(status == KV_CORRUPT || status == KV_FORMAT_MISMATCH || status == KV_NOT_FOUND ||
			status == KV_POOL_FULL || status == KV_LIMIT || status == KV_BUSY_RETRY ||
			status == KV_VERSION_UNSUPPORTED || status == KV_EXISTS);
	} else {
		FUZZ_CHECK(srv_checkpoint_save(world.server->checkpoint, "t", 0, &err) == KV_OK);
		FUZZ_CHECK(finish(&world) == KV_OK);
		close_all(&world);
		check_empty(&world);
		FUZZ_CHECK(load(&world, "t") == KV_OK);
		close_all(&world);
	}
	check_empty(&world);
	srv_server_destroy(world.server);
	mem_io_finish(&world.io);
	return 0;
}
