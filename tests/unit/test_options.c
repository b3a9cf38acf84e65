/*
 * Options: one table, four ways in (default, file, environment, flag), one way out (GET /v1/config). What is
 * refused is refused with its place, what was given and what was expected.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/checked.h"
#include "server/control.h"
#include "tests/lib/kv_test_options.h"

/* The defaults are those of the table, and two listeners that only this machine reaches. */
START_TEST(test_options_defaults)
{
	struct srv_options options;

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	ck_assert_uint_eq(options.frame_bytes_max, 1048576);
	ck_assert_uint_eq(options.large_slots, 16);
	ck_assert_uint_eq(options.lease_ms, 30000);
	ck_assert_uint_eq(options.socket_mode, 0660);
	ck_assert_uint_eq(options.backend, SRV_BACKEND_AUTO);
	ck_assert_uint_eq(options.io, SRV_IO_AUTO);
	ck_assert_str_eq(options.http, "127.0.0.1:7871");
	ck_assert_str_eq(options.memory, "80%");
	ck_assert(!options.insecure);
	ck_assert_uint_eq(options.n_listen, 2);
	ck_assert_int_eq(options.listen[0].transport, KV_IO_UNIX);
	ck_assert_str_eq(options.listen[0].path, "/run/tqkv/tqkvd.sock");
	ck_assert_uint_eq(options.listen[0].socket_mode, 0660);
	ck_assert_int_eq(options.listen[1].transport, KV_IO_TCP);
	ck_assert_str_eq(options.listen[1].host, "127.0.0.1");
	ck_assert_uint_eq(options.listen[1].port, 7870);
	ck_assert_uint_eq(json_array_size(options.pools), 0);
	srv_options_finish(&options);
	ck_assert_ptr_null(options.pools);
	srv_options_finish(&options);
}
END_TEST

/* Every row's default lies in its own range, and every name has its unit last (limits: _max behind it). */
START_TEST(test_options_table_is_consistent)
{
	for (size_t i = 0; i < SRV_N_OPTIONS; i++) {
		const struct srv_option_row *row = &srv_option_rows[i];
		char flag[SRV_OPTION_NAME_BYTES_MAX], env[SRV_OPTION_NAME_BYTES_MAX];

		ck_assert_uint_le(strlen(row->name) + 6, SRV_OPTION_NAME_BYTES_MAX);
		srv_option_flag_name(row, flag);
		srv_option_env_name(row, env);
		ck_assert_ptr_null(strchr(flag, '_'));
		ck_assert_int_eq(strncmp(env, "TQKV_", 5), 0);
		if (row->kind == SRV_OPTION_NUMBER || row->kind == SRV_OPTION_BYTES) {
			ck_assert_uint_le(row->min, row->default_number);
			ck_assert_uint_le(row->default_number, row->max);
		}
		if (row->kind == SRV_OPTION_NUMBER)
			ck_assert_uint_le(row->max, UINT32_MAX);
		if (row->kind == SRV_OPTION_BYTES)
			ck_assert_ptr_nonnull(strstr(row->name, "bytes"));
	}
	ck_assert_str_eq(srv_option_rows[SRV_OPTION_IDX_http].name, "http");
	ck_assert_str_eq(srv_option_rows[SRV_OPTION_IDX_insecure].name, "insecure");
}
END_TEST

/* A value may follow its flag or an equals sign; sizes take units; a flag of two values needs none. */
START_TEST(test_options_flags)
{
	struct srv_options options;

	ck_assert_int_eq(PARSE(&options, "--frame-bytes-max", "2MiB", "--lease-ms=100", "--io", "epoll",
				 "--backend=cpu", "--inflight-bytes-max=1GiB", "--min-rate-bytes-per-s=0",
				 "--memory", "50%", "--log-level=debug", "--http=off", "--socket-mode=0o600"),
		SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.frame_bytes_max, 2097152);
	ck_assert_uint_eq(options.socket_mode, 0600);
	ck_assert_uint_eq(options.lease_ms, 100);
	ck_assert_uint_eq(options.io, SRV_IO_EPOLL);
	ck_assert_uint_eq(options.backend, SRV_BACKEND_CPU);
	ck_assert_uint_eq(options.inflight_bytes_max, 1073741824);
	ck_assert_uint_eq(options.min_rate_bytes_per_s, 0);
	ck_assert_str_eq(options.memory, "50%");
	ck_assert_uint_eq(options.log_level, 3);
	ck_assert_str_eq(options.http, "off");
	ck_assert(!options.is_check_only);
	srv_options_finish(&options);
	ck_assert_int_eq(PARSE(&options, "--insecure"), SRV_OPTIONS_RUN);
	ck_assert(options.insecure);
	srv_options_finish(&options);
	ck_assert_int_eq(PARSE(&options, "--insecure", "--insecure=false"), SRV_OPTIONS_RUN);
	ck_assert(!options.insecure);
	srv_options_finish(&options);
	ck_assert_int_eq(PARSE(&options, "--threads", "1", "--threads", "2"), SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.threads, 2);
	srv_options_finish(&options);
}
END_TEST

/* The flags --listen and --pool replace what the file says, and add up among themselves. */
START_TEST(test_options_lists_replace_the_file)
{
	struct srv_options options;

	file_text = "{\"listen\":[\"tcp:127.0.0.1:1\"],\"pools\":[{\"name\":\"a\"}]}";
	ck_assert_int_eq(PARSE(&options, "--config", "c.json"), SRV_OPTIONS_RUN);
	ck_assert_str_eq(file_path, "c.json");
	ck_assert_uint_eq(options.n_listen, 1);
	ck_assert_uint_eq(json_array_size(options.pools), 1);
	srv_options_finish(&options);
	ck_assert_int_eq(PARSE(&options, "--listen", "unix:/x", "--config=c.json", "--listen=tcp:[::1]:0",
				 "--pool", SMOL_SHORT),
		SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.n_listen, 2);
	ck_assert_str_eq(options.listen[0].path, "/x");
	ck_assert_uint_eq(json_array_size(options.pools), 1);
	ck_assert_str_eq(
		json_string_value(json_object_get(json_array_get(options.pools, 0), "name")), "smol");
	srv_options_finish(&options);
}
END_TEST

/* A flag wins over the environment, the environment over the file, the file over the default. */
START_TEST(test_options_precedence)
{
	struct srv_options options;

	file_text = "{\"lease_ms\":1000,\"sessions_max\":10,\"sequences_max\":20}";
	setenv("TQKV_LEASE_MS", "2000", 1);
	setenv("TQKV_SESSIONS_MAX", "30", 1);
	setenv("TQKV_SEQUENCES_MAX", "", 1); /* empty counts as not set */
	setenv("TQKV_INSECURE", "true", 1);
	setenv("TQKV_PORT", "tcp://10.0.0.1:7870", 1); /* not ours: other programs set such names */
	ck_assert_int_eq(PARSE(&options, "--lease-ms", "3000", "--config", "c.json"), SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.lease_ms, 3000);
	ck_assert_uint_eq(options.sessions_max, 30);
	ck_assert_uint_eq(options.sequences_max, 20);
	ck_assert_uint_eq(options.large_slots, 16);
	ck_assert(options.insecure);
	srv_options_finish(&options);
	setenv("TQKV_FRAME_BYTES_MAX", "12 KiB", 1);
	ASSERT_REFUSED("environment TQKV_FRAME_BYTES_MAX: '12 KiB'", "from 64 KiB to 16 MiB", "--io=auto");
	unsetenv("TQKV_FRAME_BYTES_MAX");
	/* Set for tqkvctl, perhaps: a value that is refused later says where it is from, too, unless a flag
	 * won. */
	setenv("TQKV_HTTP", "https://localhost:7871", 1);
	ASSERT_REFUSED("environment TQKV_HTTP: http: expected HOST:PORT or off", "localhost", "--io=auto");
	ASSERT_REFUSED("http: expected HOST:PORT or off", "", "--http=nowhere");
	ck_assert_ptr_null(strstr(error.msg, "environment"));
	unsetenv("TQKV_HTTP");
	static const char *const names[] = { "TQKV_LEASE_MS", "TQKV_SESSIONS_MAX", "TQKV_SEQUENCES_MAX",
		"TQKV_INSECURE", "TQKV_PORT", "TQKV_FRAME_BYTES_MAX" };

	for (size_t i = 0; i < KV_LENGTH(names); i++)
		unsetenv(names[i]);
}
END_TEST

/* What is wrong on the command line is told with the option, what was given and what was expected. */
START_TEST(test_options_refuses_flags)
{
	ASSERT_REFUSED("--frame-bytes-max: '17'", "a size from 64 KiB to 16 MiB", "--frame-bytes-max", "17");
	ASSERT_REFUSED("--frame-bytes-max: '17MiB'", "from 64 KiB to 16 MiB", "--frame-bytes-max=17MiB");
	ASSERT_REFUSED("'1mib'", "KiB, MiB, GiB or TiB", "--frame-bytes-max=1mib");
	ASSERT_REFUSED("'1 MiB'", "KiB, MiB, GiB or TiB", "--frame-bytes-max=1 MiB");
	ASSERT_REFUSED("'18446744073709551616'", "from 64 KiB", "--frame-bytes-max=18446744073709551616");
	ASSERT_REFUSED(
		"'17179869185GiB'", "from 64 KiB", "--frame-bytes-max=17179869185GiB"); /* 2^64 + 2^30 */
	ASSERT_REFUSED("--lease-ms: '-1'", "a whole number from 100 to 86400000", "--lease-ms", "-1");
	ASSERT_REFUSED("'4294967396'", "from 100 to 86400000", "--lease-ms=4294967396"); /* 2^32 + 100 */
	ASSERT_REFUSED("'+200'", "whole number", "--lease-ms=+200");
	ASSERT_REFUSED("'1e3'", "whole number", "--lease-ms=1e3");
	ASSERT_REFUSED("''", "whole number", "--lease-ms=");
	ASSERT_REFUSED(
		"--socket-mode: '0440'", "from 0 to 511", "--socket-mode", "0440"); /* octal or decimal? */
	ASSERT_REFUSED("'0440'", "or octal: 0o660", "--socket-mode", "0440");
	ASSERT_REFUSED("'512'", "from 0 to 511", "--socket-mode", "0o1000");
	ASSERT_REFUSED("'0o'", "octal", "--socket-mode", "0o");
	ASSERT_REFUSED("'0o68'", "octal", "--socket-mode", "0o68");
	ASSERT_REFUSED("--lease-ms: '0o660'", "whole number", "--lease-ms", "0o660");
	ASSERT_REFUSED("--io: 'kqueue'", "one of auto, io_uring, epoll", "--io", "kqueue");
	ASSERT_REFUSED("--io: 'e'", "one of auto, io_uring, epoll", "--io=e");
	ASSERT_REFUSED("--insecure: 'yes'", "true or false", "--insecure=yes");
	ASSERT_REFUSED("--memory: ''", "1 to 255 bytes", "--memory=");
	ASSERT_REFUSED("memory: '101%'", "share from 1% to 100%", "--memory=101%");
	ASSERT_REFUSED("memory: 'lots'", "expected a size", "--memory=lots");
	ASSERT_REFUSED("--http: '\xff:1'", "UTF-8", "--http=\xff:1");
	ASSERT_REFUSED(
		"--frame: there is no such option", "did you mean --frame-bytes-max?", "--frame", "2MiB");
	ASSERT_REFUSED("--frames", "there is no such option", "--frames=1");
	ASSERT_REFUSED("-x", "there is no such option", "-x");
	ASSERT_REFUSED("--lease-ms", "its value is missing", "--io=auto", "--lease-ms");
	ASSERT_REFUSED("--help=1", "takes no value", "--help=1");
	ASSERT_REFUSED("'stray'", "not an option", "--io=auto", "stray", "--lease-ms=1000");
	ASSERT_REFUSED(
		"inflight_bytes_max: 65536", "frame_bytes_max (1048576)", "--inflight-bytes-max=64KiB");
	ASSERT_REFUSED("evict_low_percent: 80", "above evict_high_percent (50)", "--evict-high-percent=50",
		"--evict-low-percent=80");
	ASSERT_REFUSED("evict_low_percent: 80", "which is off", "--evict-low-percent=80");
	ASSERT_REFUSED("snapshot_on_drain", "there is no snapshot_dir", "--snapshot-on-drain");
	ASSERT_REFUSED("restore", "no snapshot_dir to restore 'one' from", "--restore=one");
	ASSERT_REFUSED("--pool", "", "--pool", "name=x,layers=");
	ASSERT_REFUSED("pools[1].name", "'smol' is already the name of pools[0]", "--pool", SMOL_SHORT,
		"--pool", SMOL_SHORT);
}
END_TEST

/*
 * Who may connect: tokens let the daemon listen beyond loopback, a certificate needs its key, client
 * certificates need both; metrics may be reached, since that is what their address is for.
 */
START_TEST(test_options_authentication)
{
	static const char *const allowed[][3] = {
		{ "--http=0.0.0.0:1", "--listen=tcp:0.0.0.0:1", "--tokens-file=/t" },
		{ "--http-certificate-file=/c", "--http-key-file=/k", "--unix-uids=0,1000" },
		{ "--metrics-listen=0.0.0.0:1", "--http=off", NULL },
	};
	struct srv_options options;
	const char *with_certificates[] = { "--http=0.0.0.0:1", "--http-certificate-file=/c",
		"--http-key-file=/k", "--http-client-ca-file=/a", NULL };

	for (size_t i = 0; i < KV_LENGTH(allowed); i++) {
		ck_assert_msg(PARSE(&options, allowed[i][0], allowed[i][1], allowed[i][2]) == SRV_OPTIONS_RUN,
			"%s", error.msg);
		srv_options_finish(&options);
	}
	ck_assert_msg(parse(&options, with_certificates) == SRV_OPTIONS_RUN, "%s", error.msg);
	srv_options_finish(&options);
	ASSERT_REFUSED("http_certificate_file and http_key_file", "both", "--http-key-file=/k");
	ASSERT_REFUSED("http_certificate_file and http_key_file", "both", "--http-certificate-file=/c");
	ASSERT_REFUSED("http_client_ca_file", "http_key_file", "--http-client-ca-file=/a");
	ASSERT_REFUSED("unix_uids: '7,x'", "user ids", "--unix-uids=7,x");
	ASSERT_REFUSED("metrics_listen: expected HOST:PORT or off", "tcp:x", "--metrics-listen=x");
	/* Client certificates guard the control API alone. */
	ASSERT_REFUSED("listen: 0.0.0.0:1 can be reached", "tokens_file", "--listen=tcp:0.0.0.0:1",
		"--http-certificate-file=/c", "--http-key-file=/k", "--http-client-ca-file=/a");
}
END_TEST

/* Addresses: at most 8, of a known kind, and beyond loopback only with --insecure, for clients and for HTTP.
 */
START_TEST(test_options_addresses)
{
	struct srv_options options;
	const char *many[64] = { NULL };

	ASSERT_REFUSED("--listen", "expected unix:PATH or tcp:HOST:PORT", "--listen", "udp:1");
	ASSERT_REFUSED("listen: unix:/x stands there twice", "unix", "--listen=unix:/x", "--listen=unix:/x");
	ASSERT_REFUSED("listen: tcp:127.0.0.1:7 stands", "twice", "--listen=tcp:127.0.0.1:7",
		"--listen=unix:/x", "--listen=tcp:127.0.0.1:7");
	ASSERT_REFUSED("--config", "is no file", "--config=");
	ASSERT_REFUSED("--listen", "UTF-8", "--listen", "unix:/\xff");
	ASSERT_REFUSED("listen: 0.0.0.0:7870 can be reached from other machines", "--insecure", "--listen",
		"tcp:0.0.0.0:7870");
	ASSERT_REFUSED("listen: [::]:1 can be reached", "Unix socket", "--listen", "tcp:[::]:1");
	ASSERT_REFUSED("http: 10.1.2.3:80 can be reached", "127.0.0.1", "--http", "10.1.2.3:80");
	ASSERT_REFUSED("http: expected HOST:PORT or off", "tcp:127.0.0.1\"", "--http", "127.0.0.1");
	ASSERT_REFUSED("http: expected HOST:PORT or off", "host", "--http", "example.org:80");
	ck_assert_int_eq(PARSE(&options, "--http", "0.0.0.0:0", "--listen=tcp:0.0.0.0:1", "--insecure"),
		SRV_OPTIONS_RUN);
	srv_options_finish(&options);
	ck_assert_int_eq(PARSE(&options, "--http", "[::1]:0", "--listen=tcp:127.9.9.9:1"), SRV_OPTIONS_RUN);
	srv_options_finish(&options);
	ck_assert_int_eq(PARSE(&options, "--socket-mode", "384", "--listen=unix:/a"), SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.listen[0].socket_mode, 0600);
	srv_options_finish(&options);
	for (size_t i = 0; i < SRV_LISTEN_MAX; i++)
		many[i] = "--listen=tcp:127.0.0.1:0";
	ck_assert_int_eq(parse(&options, many), SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.n_listen, SRV_LISTEN_MAX);
	srv_options_finish(&options);
	many[SRV_LISTEN_MAX] = "--listen=tcp:127.0.0.1:0";
	ck_assert_int_eq(parse(&options, many), SRV_OPTIONS_USAGE);
	assert_has(error.msg, "one address too many, at most 8");
}
END_TEST

/* Runs a command line that prints; returns what it printed. */
static const char *printed(const char *arg)
{
	static char text[65536];
	struct srv_options options;
	FILE *file = tmpfile();
	const int saved = dup(STDOUT_FILENO);

	ck_assert_ptr_nonnull(file);
	fflush(stdout);
	dup2(fileno(file), STDOUT_FILENO);
	const enum srv_options_outcome outcome = PARSE(&options, "--insecure", arg, "--nonsense");

	fflush(stdout);
	dup2(saved, STDOUT_FILENO);
	close(saved);
	rewind(file);
	text[fread(text, 1, sizeof(text) - 1, file)] = '\0';
	fclose(file);
	ck_assert_int_eq(outcome, SRV_OPTIONS_EXIT_OK);
	srv_options_finish(&options);
	return text;
}

static size_t count(const char *text, const char *part)
{
	size_t n = 0;

	for (const char *c = strstr(text, part); c; c = strstr(c + 1, part))
		n++;
	return n;
}

/* --help names every option once, with its default and range, and fits a terminal of 110 columns. */
START_TEST(test_options_help)
{
	const char *text = printed("--help");

	for (size_t i = 0; i < SRV_N_OPTIONS; i++) {
		char flag[SRV_OPTION_NAME_BYTES_MAX], line[SRV_OPTION_NAME_BYTES_MAX + 8];

		srv_option_flag_name(&srv_option_rows[i], flag);
		snprintf(line, sizeof(line), "\n  --%s%s", flag,
			srv_option_rows[i].kind == SRV_OPTION_FLAG ? "\n" : " ");
		ck_assert_msg(count(text, line) == 1, "--%s stands %zu times", flag, count(text, line));
		assert_has(text, srv_option_rows[i].help + 1); /* the first letter is made a capital */
	}
	assert_has(text, "--frame-bytes-max BYTES\n");
	assert_has(text, "Default 1 MiB; from 64 KiB to 16 MiB.\n");
	assert_has(text, "--lease-ms MILLISECONDS\n");
	assert_has(text, "Default 30000; from 100 to 86400000.\n");
	assert_has(text, "--io auto|io_uring|epoll\n");
	assert_has(text, "TQKV_FRAME_BYTES_MAX");
	assert_has(text, "Exit codes: 0");
	for (const char *line = text; *line; line += strcspn(line, "\n") + 1)
		ck_assert_uint_le(strcspn(line, "\n"), 110);
	ck_assert_str_eq(printed("-h"), text);
}
END_TEST

/* --version says which source it was built from. */
START_TEST(test_options_version)
{
	const char *text = printed("--version");

	assert_has(text, srv_version);
	assert_has(text, srv_commit);
	assert_has(text, "cuda ");
	assert_has(text, "libmicrohttpd ");
	assert_has(text, "jansson ");
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("options");
	TCase *tcase = tcase_create("options");

	tcase_add_test(tcase, test_options_defaults);
	tcase_add_test(tcase, test_options_table_is_consistent);
	tcase_add_test(tcase, test_options_flags);
	tcase_add_test(tcase, test_options_lists_replace_the_file);
	tcase_add_test(tcase, test_options_precedence);
	tcase_add_test(tcase, test_options_refuses_flags);
	tcase_add_test(tcase, test_options_authentication);
	tcase_add_test(tcase, test_options_addresses);
	tcase_add_test(tcase, test_options_help);
	tcase_add_test(tcase, test_options_version);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
