#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "core/checked.h"
#include "server/io_address.h"
#include "tests/lib/io_rig.h"
#include "tests/lib/kv_test.h"

/* Both forms are read into their parts. */
START_TEST(test_io_address_parse)
{
	struct kv_io_address address;

	ck_assert_int_eq(srv_io_address_parse("unix:/run/tqkv/tqkvd.sock", &address, NULL), KV_OK);
	ck_assert_int_eq(address.transport, KV_IO_UNIX);
	ck_assert_str_eq(address.path, "/run/tqkv/tqkvd.sock");
	ck_assert_uint_eq(address.socket_mode, 0660);
	ck_assert_int_eq(srv_io_address_parse("tcp:127.0.0.1:7870", &address, NULL), KV_OK);
	ck_assert_int_eq(address.transport, KV_IO_TCP);
	ck_assert_str_eq(address.host, "127.0.0.1");
	ck_assert_uint_eq(address.port, 7870);
	ck_assert_int_eq(srv_io_address_parse("tcp:[::1]:65535", &address, NULL), KV_OK);
	ck_assert_str_eq(address.host, "::1");
	ck_assert_uint_eq(address.port, 65535);
	ck_assert_int_eq(srv_io_address_parse("tcp:localhost:0", &address, NULL), KV_OK);
	ck_assert_str_eq(address.host, "localhost");
	ck_assert_uint_eq(address.port, 0);
}
END_TEST

/* What is no address is refused with the text in the message, and the output is untouched. */
START_TEST(test_io_address_refused)
{
	static const char *const texts[] = { "", "unix:", "tcp:", "udp:127.0.0.1:1", "/run/socket",
		"tcp:127.0.0.1", "tcp:127.0.0.1:", "tcp:127.0.0.1:65536", "tcp:127.0.0.1:-1",
		"tcp:127.0.0.1:+1", "tcp:127.0.0.1: 1", "tcp:127.0.0.1:1x", "tcp:127.0.0.1:000001",
		"tcp::7870", "tcp:example.org:7870", "tcp:127.0.0:1", "tcp:::1:7870", "tcp:[::1]",
		"tcp:[::1]7870", "tcp:[::1:7870", "tcp:[]:7870", "tcp:[127.0.0.1]:1", "tcp:[fe80::1%eth0]:1",
		"tcp:0x7f.1:1" };
	char long_path[256] = "unix:", long_host[400] = "tcp:";
	struct kv_io_address address, untouched;
	struct kv_error err;

	memset(&untouched, 0xA5, sizeof(untouched));
	address = untouched;
	for (size_t i = 0; i < KV_LENGTH(texts); i++) {
		memset(&err, 0, sizeof(err));
		ck_assert_msg(
			srv_io_address_parse(texts[i], &address, &err) == KV_BAD_CONFIG, "%s", texts[i]);
		ck_assert_ptr_nonnull(strstr(err.msg, texts[i]));
	}
	memset(long_path + 5, 'p', 108); /* one more than fits with its zero byte */
	ck_assert_int_eq(srv_io_address_parse(long_path, &address, &err), KV_BAD_CONFIG);
	ck_assert_ptr_nonnull(strstr(err.msg, "108 bytes"));
	memset(long_host + 4, '1', 300);
	memcpy(long_host + 304, ":1", 3);
	ck_assert_int_eq(srv_io_address_parse(long_host, &address, &err), KV_BAD_CONFIG);
	ck_assert_mem_eq(&address, &untouched, sizeof(address));
	long_path[5 + 107] = '\0';
	ck_assert_int_eq(srv_io_address_parse(long_path, &address, &err), KV_OK);
}
END_TEST

/* Loopback is what only this machine reaches; anything else is not, however it is written. */
START_TEST(test_io_address_is_loopback)
{
	static const char *const near[] = { "unix:/x", "tcp:127.0.0.1:1", "tcp:127.255.0.3:1",
		"tcp:localhost:1", "tcp:[::1]:1", "tcp:[0:0:0:0:0:0:0:1]:1" };
	static const char *const far[] = { "tcp:0.0.0.0:1", "tcp:[::]:1", "tcp:192.168.0.1:1",
		"tcp:128.0.0.1:1", "tcp:126.255.255.255:1", "tcp:[::2]:1", "tcp:[::ffff:127.0.0.1]:1",
		"tcp:[fe80::1]:1" };
	struct kv_io_address address;

	for (size_t i = 0; i < KV_LENGTH(near); i++) {
		ck_assert_int_eq(srv_io_address_parse(near[i], &address, NULL), KV_OK);
		ck_assert_msg(srv_io_address_is_loopback(&address), "%s", near[i]);
	}
	for (size_t i = 0; i < KV_LENGTH(far); i++) {
		ck_assert_int_eq(srv_io_address_parse(far[i], &address, NULL), KV_OK);
		ck_assert_msg(!srv_io_address_is_loopback(&address), "%s", far[i]);
	}
}
END_TEST

/* ---- listeners; loop index 0: io_uring, 1: epoll ---- */

static enum kv_status listen_at(struct rig *rig, const char *text, uint32_t mode, struct kv_error *err)
{
	struct kv_io_address address;
	char bound[128];

	ck_assert_int_eq(srv_io_address_parse(text, &address, NULL), KV_OK);
	address.socket_mode = mode;
	return rig->io->ops->listen(rig->io, &address, bound, sizeof(bound), err);
}

/* The socket file has the mode that was asked for, whatever the umask, and the umask is what it was. */
START_TEST(test_io_listener_socket_mode)
{
	struct rig rig;
	struct stat found;
	char text[128];

	if (!rig_init(&rig, _i, 4, 4))
		return;
	umask(0);
	snprintf(text, sizeof(text), "unix:%s/socket", rig.dir);
	ck_assert_int_eq(listen_at(&rig, text, 0640, NULL), KV_OK);
	ck_assert_int_eq(stat(text + 5, &found), 0);
	ck_assert(S_ISSOCK(found.st_mode));
	ck_assert_uint_eq(found.st_mode & 07777, 0640);
	ck_assert_uint_eq(umask(022), 0);
	rig_finish(&rig);
}
END_TEST

/* A file, a directory or a link at the path is named and left as it is. */
START_TEST(test_io_listener_refuses_what_is_no_socket)
{
	struct rig rig;
	struct kv_error err;
	char text[128], byte = 0;
	const char *path = text + 5;

	if (!rig_init(&rig, _i, 4, 4))
		return;
	snprintf(text, sizeof(text), "unix:%s/socket", rig.dir);

	FILE *file = fopen(path, "w");

	fputs("precious", file);
	fclose(file);
	ck_assert_int_eq(listen_at(&rig, text, 0600, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, "a regular file is there"));
	file = fopen(path, "r");
	ck_assert_ptr_nonnull(file);
	ck_assert_uint_eq(fread(&byte, 1, 1, file), 1);
	ck_assert_int_eq(byte, 'p');
	fclose(file);
	unlink(path);
	ck_assert_int_eq(mkdir(path, 0700), 0);
	ck_assert_int_eq(listen_at(&rig, text, 0600, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, "a directory is there"));
	rmdir(path);
	ck_assert_int_eq(symlink("/nowhere", path), 0);
	ck_assert_int_eq(listen_at(&rig, text, 0600, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, "a symbolic link is there"));
	unlink(path);
	/* The refusals kept no lock. */
	ck_assert_int_eq(listen_at(&rig, text, 0600, NULL), KV_OK);
	rig_finish(&rig);
}
END_TEST

/* A socket that a killed process left behind, lock file and all, is replaced. */
START_TEST(test_io_listener_replaces_a_stale_socket)
{
	struct rig rig;
	struct sockaddr_un un = { .sun_family = AF_UNIX };
	char text[128], lock[140];

	if (!rig_init(&rig, _i, 4, 4))
		return;
	snprintf(text, sizeof(text), "unix:%s/socket", rig.dir);
	snprintf(lock, sizeof(lock), "%s.lock", text + 5);
	memcpy(un.sun_path, text + 5, strlen(text + 5) + 1);

	const int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	ck_assert_int_eq(bind(fd, (struct sockaddr *)&un, sizeof(un)), 0);
	close(fd);
	fclose(fopen(lock, "w"));
	ck_assert_int_eq(access(text + 5, F_OK), 0);
	close(rig_connect(&rig, rig_listen(&rig, false)));
	rig_finish(&rig);
}
END_TEST

/* The path of a living listener is refused by name, and the living one is not disturbed. */
START_TEST(test_io_listener_lock_is_respected)
{
	struct rig rig, other;
	struct kv_error err;
	char text[128];

	if (!rig_init(&rig, _i, 4, 4) || !rig_init(&other, 1, 4, 4))
		return;

	const int listener_idx = rig_listen(&rig, false);

	snprintf(text, sizeof(text), "unix:%s/socket", rig.dir);
	ck_assert_int_eq(listen_at(&other, text, 0600, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, "another process listens"));
	ck_assert_ptr_nonnull(strstr(err.msg, text));
	rig_finish(&other);
	close(rig_connect(&rig, listener_idx));
	rig_finish(&rig);
}
END_TEST

/* A port in use, an address that is not ours and a missing directory are failures with a reason. */
START_TEST(test_io_listener_errors_have_a_reason)
{
	struct rig rig;
	struct kv_error err;
	char text[128];

	if (!rig_init(&rig, _i, 4, 4))
		return;

	const int listener_idx = rig_listen(&rig, true);
	const int n_before = rig_count_fds();

	snprintf(text, sizeof(text), "tcp:127.0.0.1:%u", rig.bound[listener_idx].port);
	ck_assert_int_eq(listen_at(&rig, text, 0, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, strerror(EADDRINUSE)));
	ck_assert_int_eq(listen_at(&rig, "tcp:192.0.2.1:0", 0, &err), KV_IO_ERROR);
	ck_assert_ptr_nonnull(strstr(err.msg, strerror(EADDRNOTAVAIL)));
	ck_assert_int_eq(listen_at(&rig, "unix:/nowhere/socket", 0600, &err), KV_IO_ERROR);
	ck_assert_str_eq(err.msg,
		"unix:/nowhere/socket: the folder /nowhere is missing: make it, or name another place with "
		"--listen "
		"unix:PATH");
	ck_assert_int_eq(rig_count_fds(), n_before);
	rig_finish(&rig);
}
END_TEST

/* IPv6 and IPv4 wildcards can be bound to the same port side by side. */
START_TEST(test_io_listener_ipv6)
{
	struct rig rig;
	struct kv_error err;
	char text[64], bound[128];
	struct kv_io_address address;

	if (!rig_init(&rig, _i, 4, 4))
		return;
	ck_assert_int_eq(srv_io_address_parse("tcp:[::1]:0", &address, NULL), KV_OK);
	if (rig.io->ops->listen(rig.io, &address, bound, sizeof(bound), &err) != KV_OK) {
		printf("not run: no IPv6 here: %s\n", err.msg);
		rig_finish(&rig);
		return;
	}
	ck_assert_int_eq(strncmp(bound, "tcp:[::1]:", 10), 0);
	ck_assert_int_eq(srv_io_address_parse(bound, &rig.bound[rig.n_bound++], NULL), KV_OK);
	snprintf(text, sizeof(text), "tcp:127.0.0.1:%u", rig.bound[0].port);
	ck_assert_int_eq(listen_at(&rig, text, 0, NULL), KV_OK);
	close(rig_connect(&rig, 0));
	ck_assert_int_eq(strncmp(rig_accepted(&rig, 0)->peer.address, "[::1]:", 6), 0);
	rig_finish(&rig);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("io_address");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_io_address_parse);
	tcase_add_test(tcase, test_io_address_refused);
	tcase_add_test(tcase, test_io_address_is_loopback);
	tcase_add_loop_test(tcase, test_io_listener_socket_mode, 0, 2);
	tcase_add_loop_test(tcase, test_io_listener_refuses_what_is_no_socket, 0, 2);
	tcase_add_loop_test(tcase, test_io_listener_replaces_a_stale_socket, 0, 2);
	tcase_add_loop_test(tcase, test_io_listener_lock_is_respected, 0, 2);
	tcase_add_loop_test(tcase, test_io_listener_errors_have_a_reason, 0, 2);
	tcase_add_loop_test(tcase, test_io_listener_ipv6, 0, 2);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
