/*
 * Snapshots against the whole server: what comes back is compared with the model, row by row; whatever is
 * wrong with a file leaves everything as it was. Rows S1, S2, S3 and L10 of the list of failures.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "tests/sim/checkpoint_words.h"

/* S3, S5: closed sessions come back with all their rows, lengths per layer and shared blocks. */
START_TEST(test_what_was_saved_comes_back)
{
	struct srv_checkpoint_view view;
	uint64_t handles[2], again[2];

	start(1);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	const struct kv_block_counts before = *sim_script_blocks(&world, 0);

	ck_assert_int_eq(save("s", &view), KV_OK);
	ck_assert_uint_eq(view.n_sessions, 2);
	ck_assert_uint_eq(view.n_sequences, 5);
	ck_assert_uint_eq(view.n_skipped, 1);
	ck_assert_uint_eq(sim_files_find(sim_net_files(world.net), PATH)->n_bytes, view.n_bytes);
	decode_all(peer, handles);
	ck_assert_int_eq(load("s", &view), KV_EXISTS);
	ck_assert_ptr_nonnull(strstr(view.detail, "\"one\""));
	close_all(peer, handles);
	ck_assert_int_eq(load("s", &view), KV_OK);
	ck_assert_uint_eq(view.n_sessions, 2);
	again[0] = attach(peer, "one");
	again[1] = attach(peer, "two");
	ck_assert_uint_ne(again[0], handles[0]);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_free, before.n_free);
	ck_assert_uint_eq(sim_script_blocks(&world, 0)->n_shared, before.n_shared);
	decode_all(peer, again);
	/* And they go on: into a shared block, too. */
	ck_assert_int_eq(sim_script_append(peer, again[0], 3, 90, 20), KV_OK);
	ck_assert_int_eq(sim_script_append(peer, again[0], 1, 90, 3), KV_OK);
	decode_all(peer, again);
	sim_script_end(&world);
}
END_TEST

/* S3, S6: the same in another process: another boot, the same rows. */
START_TEST(test_another_daemon_takes_it_over)
{
	struct srv_checkpoint_view view;
	struct sim_saved saved;
	uint64_t handles[2];

	start(2);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	const uint64_t boot_id = kv_domain_boot_id(world.server->domain);
	const struct sim_file *file = sim_files_find(sim_net_files(world.net), PATH);
	const uint64_t n_bytes = file->n_bytes;
	uint8_t *bytes = malloc(n_bytes);

	memcpy(bytes, file->bytes, n_bytes);
	saved = world.model.saved;
	memset(&world.model.saved, 0, sizeof(world.model.saved));
	sim_world_finish(&world, false);

	start(3);
	world.model.saved = saved;
	ck_assert_uint_ne(kv_domain_boot_id(world.server->domain), boot_id);
	sim_files_put(sim_net_files(world.net), PATH, bytes, n_bytes);
	free(bytes);
	ck_assert_int_eq(load("s", &view), KV_OK);
	peer = sim_script_connect(&world, 0);
	handles[0] = attach(peer, "one");
	handles[1] = attach(peer, "two");
	decode_all(peer, handles);
	sim_script_end(&world);
}
END_TEST

/* S1: one bit anywhere in the file, or any length but the right one: CORRUPT, and nothing has changed. */
START_TEST(test_a_damaged_file_changes_nothing)
{
	struct srv_checkpoint_view view;
	uint64_t handles[2], random = 77;
	uint32_t n_named[SRV_RECORD_KINDS] = { 0 };

	struct sim_config config = sim_config_plain(4);

	config.lease_ms = 3600000;
	config.pools[0].exact_tokens = 16;
	config.pools[0].exact_blocks = 8;
	sim_world_init(&world, &config);
	world.server->checkpoint->chunk_bytes_min = 1;
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill_published(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, handles[1]), KV_OK);
	ck_assert_int_eq(sim_script_close(peer, handles[0]), KV_OK);
	handles[0] = sim_script_open(peer, 0, "other");
	ck_assert_int_eq(sim_script_append(peer, handles[0], 1, 0, 50), KV_OK);
	sim_script_pass(&world, 5 * MS);
	struct sim_file *file = sim_files_find(sim_net_files(world.net), PATH);
	const uint64_t n_bytes = file->n_bytes;
	const uint32_t hash = state_hash();

	world.config.audits_every_turn = false;
	for (uint64_t at = 0; at < n_bytes;) {
		struct srv_record record;

		ck_assert_int_eq(srv_record_decode(file->bytes + at, n_bytes, &record, NULL), KV_OK);
		const uint64_t record_bytes = srv_record_bytes(record.payload_bytes);

		/* In the header, in the payload, in the padding behind it. */
		for (uint32_t part = 0; part < 3; part++) {
			const uint64_t from = part == 0 ? 0 : part == 1 ? 64 : record_bytes - 8;
			const uint64_t to = part == 0 ? 64 : record_bytes;
			const uint64_t bad = at + from + kv_test_random(&random) % (to - from);
			const uint8_t bit = (uint8_t)(1u << kv_test_random(&random) % 8);

			file->bytes[bad] ^= bit;
			ck_assert_msg(load("s", &view) == KV_CORRUPT, "byte %llu: %s, %s",
				(unsigned long long)bad, kv_status_name(view.status), view.detail);
			/* Behind a header that is whole, the record has a name. */
			ck_assert_msg(part == 0 || strstr(view.detail, srv_record_name(record.kind)),
				"byte %llu: %s", (unsigned long long)bad, view.detail);
			n_named[record.kind] += part > 0;
			file->bytes[bad] ^= bit;
			sim_script_pass(&world, MS);
			ck_assert_msg(
				state_hash() == hash, "byte %llu changed something", (unsigned long long)bad);
		}
		at += record_bytes;
	}
	sim_world_check(&world);
	for (uint32_t k = 1; k < SRV_RECORD_KINDS; k++)
		ck_assert_msg(n_named[k] > 0, "no failure named a %s", srv_record_name(k));
	for (uint64_t n = 0; n < n_bytes; n += 1 + kv_test_random(&random) % 1500) {
		file->n_bytes = n;
		ck_assert_int_eq(load("s", &view), KV_CORRUPT);
	}
	sim_files_put(sim_net_files(world.net), "dir/long.tqkv", file->bytes, n_bytes);
	struct sim_file *longer = sim_files_find(sim_net_files(world.net), "dir/long.tqkv");

	longer->bytes[n_bytes] = 0;
	longer->n_bytes++;
	ck_assert_int_eq(load("long", &view), KV_CORRUPT);
	sim_script_pass(&world, MS);
	ck_assert_uint_eq(state_hash(), hash);
	ck_assert_int_eq(sim_script_decode(peer, handles[0], 1, KV_LENGTH_PLANNED), KV_OK);
	sim_script_end(&world);
}
END_TEST

/* S2: a pool of another format is refused by the name of the member that differs; a missing one by its own.
 */
START_TEST(test_another_pool_is_refused)
{
	struct sim_config config = sim_config_plain(5);
	struct srv_checkpoint_view view;
	uint64_t handles[2];

	start(5);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	const struct sim_file *file = sim_files_find(sim_net_files(world.net), PATH);
	const uint64_t n_bytes = file->n_bytes;
	uint8_t *bytes = malloc(n_bytes);

	memcpy(bytes, file->bytes, n_bytes);
	sim_world_finish(&world, false);

	config.pools[0].v = "bf16";
	sim_world_init(&world, &config);
	sim_files_put(sim_net_files(world.net), PATH, bytes, n_bytes);
	ck_assert_int_eq(load("s", &view), KV_FORMAT_MISMATCH);
	ck_assert_msg(strstr(view.detail, "p0") && strstr(view.detail, " v"), "%s", view.detail);
	sim_world_check_empty(&world);
	sim_world_finish(&world, true);

	config = sim_config_plain(6);
	config.n_pools = 1;
	sim_world_init(&world, &config);
	sim_files_put(sim_net_files(world.net), PATH, bytes, n_bytes);
	free(bytes);
	ck_assert_int_eq(load("s", &view), KV_NOT_FOUND);
	sim_script_pass(&world, MS);
	sim_world_check_empty(&world);
	sim_world_finish(&world, true);
}
END_TEST

/* Names that would lead out of the directory are refused before anything is opened. */
START_TEST(test_names_are_plain)
{
	static const char *const names[] = { "", ".", "..", "../s", "a/b", "/s", ".s", "a b", "s\n" };
	struct srv_checkpoint_view view;

	start(7);
	for (uint32_t i = 0; i < KV_LENGTH(names); i++) {
		ck_assert_int_eq(save(names[i], &view), KV_BAD_ARG);
		ck_assert_int_eq(load(names[i], &view), KV_BAD_ARG);
	}
	ck_assert_int_eq(load("absent", &view), KV_NOT_FOUND);
	sim_script_end(&world);
}
END_TEST

/* S1: every file operation fails once: a failed snapshot leaves the older one, a failed restore nothing. */
START_TEST(test_every_file_operation_may_fail)
{
	struct srv_checkpoint_view view;
	struct sim_files *files;
	uint64_t handles[2];
	int64_t k = 0;
	uint32_t n_replaced = 0;

	start(8);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	files = sim_net_files(world.net);
	fill(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	const struct sim_file *file = sim_files_find(files, PATH);
	const uint32_t crc = kvp_crc32c(0, file->bytes, file->n_bytes);

	world.config.audits_every_turn = false;
	for (;; k++) {
		files->fail_countdown = k;
		files->fail_errno = k % 2 ? ENOSPC : EIO;
		files->has_failed = false;
		const enum kv_status status = save("s", &view);

		sim_world_check(&world);
		if (!files->has_failed)
			break;
		ck_assert_int_eq(status, KV_IO_ERROR);
		ck_assert_ptr_null(sim_files_find(files, "dir/.s.tmp"));
		ck_assert_uint_eq(files->n_open, 0);
		file = sim_files_find(files, PATH);
		ck_assert_ptr_nonnull(file);
		n_replaced += kvp_crc32c(0, file->bytes, file->n_bytes) != crc;
	}
	ck_assert_int_gt(k, 8);
	/* Behind the rename the directory is opened and synced: the new one is whole and has its name by
	 * then. */
	ck_assert_uint_le(n_replaced, 2);
	close_all(peer, handles);
	const uint32_t hash = state_hash();

	for (k = 0;; k++) {
		files->fail_countdown = k;
		files->has_failed = false;
		const enum kv_status status = load("s", &view);

		sim_script_pass(&world, MS);
		sim_world_check(&world);
		if (!files->has_failed)
			break;
		ck_assert_int_eq(status, KV_IO_ERROR);
		ck_assert_uint_eq(state_hash(), hash);
		ck_assert_uint_eq(files->n_open, 0);
	}
	ck_assert_int_gt(k, 5);
	handles[0] = attach(peer, "one");
	handles[1] = attach(peer, "two");
	decode_all(peer, handles);
	sim_script_end(&world);
}
END_TEST

/* A disk that is full in the middle: IO_ERROR, nothing half-written is left. */
START_TEST(test_a_full_disk)
{
	struct srv_checkpoint_view view;
	uint64_t handles[2];

	start(9);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	sim_net_files(world.net)->options.disk_bytes_max = 5000;
	ck_assert_int_eq(save("s", &view), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(view.detail, "No space"));
	ck_assert_ptr_null(sim_files_find(sim_net_files(world.net), "dir/.s.tmp"));
	decode_all(peer, handles);
	sim_script_end(&world);
}
END_TEST

/* A restore that does not fit says POOL_FULL and gives back what it took. */
START_TEST(test_a_pool_that_is_too_full)
{
	struct srv_checkpoint_view view;
	uint64_t handles[2];

	start(10);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	close_all(peer, handles);
	handles[0] = sim_script_open(peer, 0, "hog");
	for (uint32_t i = 1; i <= 4; i++)
		ck_assert_int_eq(sim_script_append(peer, handles[0], i, 0, 224), KV_OK);
	const uint32_t hash = state_hash();

	ck_assert_int_eq(load("s", &view), KV_POOL_FULL);
	sim_script_pass(&world, MS);
	ck_assert_uint_eq(state_hash(), hash);
	sim_script_end(&world);
}
END_TEST

/* Nobody has to be back within the lease of a session that is restored; once it is attached, its own lease
 * runs. */
START_TEST(test_a_restored_session_waits_to_be_attached)
{
	struct sim_config config = sim_config_plain(12);
	struct srv_checkpoint_view view;
	uint64_t handles[2];

	config.lease_ms = 1000;
	config.restored_lease_ms = 10000;
	sim_world_init(&world, &config);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	close_all(peer, handles);
	ck_assert_int_eq(load("s", &view), KV_OK);
	sim_script_pass(&world, 8000 * MS);
	ck_assert_uint_eq(kv_domain_n_sessions(world.server->domain), 2);
	attach(peer, "one");
	sim_script_pass(&world, 1200 * MS);
	ck_assert_uint_eq(kv_domain_n_sessions(world.server->domain), 1);
	sim_script_pass(&world, 1200 * MS);
	ck_assert_uint_eq(kv_domain_n_sessions(world.server->domain), 0);
	sim_script_end(&world);
}
END_TEST

/* L10: a half-written session is restored, its lease ends, and then its old owner goes on writing. */
START_TEST(test_a_half_written_session_expires)
{
	struct srv_checkpoint_view view;
	uint64_t handles[2];

	start_with(11, 1000);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	ck_assert_int_eq(save("s", &view), KV_OK);
	close_all(peer, handles);
	ck_assert_int_eq(load("s", &view), KV_OK);
	const uint64_t handle = attach(peer, "one");
	struct sim_request *half = sim_script_new(peer, KVP_OP_APPEND, handle);

	/* The rest of layer 1, of which the first half of the frame is sent before the lease ends. */
	sim_script_layers(half, 1, 1);
	sim_script_item(half, 4, 17, 23);
	world.options.io_timeout_ms = 60000;
	sim_peer_send(peer, half, sim_request_bytes(half) / 2);
	sim_script_pass(&world, (world.config.lease_ms + 200) * MS);
	ck_assert_uint_eq(kv_domain_n_sessions(world.server->domain), 0);
	sim_net_write(world.net, peer->conn, peer->unsent.data, peer->unsent.n);
	ck_assert_int_eq(sim_script_wait(half), KV_SESSION_EXPIRED);
	struct sim_request *later = sim_script_new(peer, KVP_OP_APPEND, handle);

	later->spec = half->spec;
	sim_script_layers(later, 1, 1);
	sim_script_item(later, 4, 17, 23);
	ck_assert_int_eq(sim_script_call(later), KV_SESSION_EXPIRED);
	sim_script_end(&world);
}
END_TEST

/* While clients append, truncate, fork and close, a snapshot holds each sequence as it was at one moment. */
START_TEST(test_saving_beside_writers)
{
	struct srv_checkpoint_view view;
	uint64_t handles[2];

	start(12);
	struct sim_peer *peer = sim_script_connect(&world, 0);
	uint32_t length = 90;

	fill(peer, handles);
	for (uint32_t round = 0; round < 20; round++) {
		struct kv_error err = { 0 };

		ck_assert_int_eq(srv_checkpoint_save(world.server->checkpoint, "s", 0, &err), KV_OK);
		do {
			struct sim_request *cut = sim_script_new(peer, KVP_OP_TRUNCATE, handles[0]);

			sim_script_item(cut, 1, length -= 7, 0);
			ck_assert_int_eq(sim_script_call(cut), KV_OK);
			/* A snapshot may have been taken between the two. */
			const uint32_t n = length < 60 ? 40 : length < 150 ? 7 + round % 3 : 3;

			ck_assert_int_eq(sim_script_append(peer, handles[0], 1, length, n), KV_OK);
			length += n;
			srv_checkpoint_status(world.server->checkpoint, &view);
		} while (view.is_running);
		ck_assert_int_eq(view.status, KV_OK);
		sim_script_pass(&world, MS);
		close_all(peer, handles);
		ck_assert_int_eq(load("s", &view), KV_OK);
		handles[0] = attach(peer, "one");
		handles[1] = attach(peer, "two");
		decode_all(peer, handles);
		length = sim_script_length(&world, handles[0], 1, 0);
	}
	sim_script_end(&world);
}
END_TEST

/* A disk that takes seconds for everything stalls nobody: rows are written and decoded beside a snapshot and
 * beside a restore as quickly as ever. */
START_TEST(test_a_slow_disk_stalls_nobody)
{
	struct srv_checkpoint_view view;
	struct kv_error err = { 0 };
	uint64_t handles[2];
	uint32_t length = 1;

	start(13);
	struct sim_peer *peer = sim_script_connect(&world, 0);

	fill(peer, handles);
	const uint64_t other = sim_script_open(peer, 0, NULL);

	ck_assert_int_eq(sim_script_append(peer, other, 1, 0, 1), KV_OK);
	sim_net_files(world.net)->options.delay_ns_max = 4000 * MS;
	for (uint32_t i = 0; i < 2; i++) {
		const uint64_t begun_ns = world.clock.now_ns;

		if (i == 1)
			close_all(peer, handles);
		ck_assert_int_eq(i == 0 ? srv_checkpoint_save(world.server->checkpoint, "s", 0, &err)
					: srv_checkpoint_load(world.server->checkpoint, "s", false, &err),
			KV_OK);
		do {
			const uint64_t asked_ns = world.clock.now_ns;

			if (length < 100)
				ck_assert_int_eq(sim_script_append(peer, other, 1, length++, 1), KV_OK);
			ck_assert_int_eq(sim_script_decode(peer, other, 1, KV_LENGTH_PLANNED), KV_OK);
			ck_assert_uint_lt(world.clock.now_ns - asked_ns, 20 * MS);
			sim_script_pass(&world, 100 * MS);
			srv_checkpoint_status(world.server->checkpoint, &view);
		} while (view.is_running);
		ck_assert_int_eq(view.status, KV_OK);
		ck_assert_uint_gt(world.clock.now_ns - begun_ns, 5000 * MS);
	}
	handles[0] = attach(peer, "one");
	handles[1] = attach(peer, "two");
	decode_all(peer, handles);
	sim_script_end(&world);
}
END_TEST

int main(void)
{
	TCase *tcase = tcase_create("checkpoint");
	Suite *suite = suite_create("sim_checkpoint");

	tcase_set_timeout(tcase, 120);
	tcase_add_test(tcase, test_what_was_saved_comes_back);
	tcase_add_test(tcase, test_another_daemon_takes_it_over);
	tcase_add_test(tcase, test_a_damaged_file_changes_nothing);
	tcase_add_test(tcase, test_another_pool_is_refused);
	tcase_add_test(tcase, test_names_are_plain);
	tcase_add_test(tcase, test_every_file_operation_may_fail);
	tcase_add_test(tcase, test_a_full_disk);
	tcase_add_test(tcase, test_a_pool_that_is_too_full);
	tcase_add_test(tcase, test_a_half_written_session_expires);
	tcase_add_test(tcase, test_a_restored_session_waits_to_be_attached);
	tcase_add_test(tcase, test_saving_beside_writers);
	tcase_add_test(tcase, test_a_slow_disk_stalls_nobody);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
