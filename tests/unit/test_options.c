/*
 * Options: one table, four ways in (default, file, environment, flag), one way out (GET /v1/config). What is refused
 * is refused with its place, what was given and what was expected.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "core/checked.h"
#include "core/memory.h"
#include "server/control.h"
#include "server/options_internal.h"
#include "tests/lib/kv_test.h"

#define SMOL "{\"name\":\"smol\",\"layers\":30,\"q_heads\":9,\"kv_heads\":3,\"head_dim\":64,\"k\":\"tq4\",\"v\":\"tq4\"," \
	     "\"block_size\":16,\"blocks\":64}"
#define SMOL_SHORT "name=smol,layers=30,q_heads=9,kv_heads=3,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=64"

static struct kv_error error;
static const char *file_text; /* what the fake file system holds; NULL: no such file */
static const char *file_path; /* what was asked for last */

static enum kv_status fake_read_all(
	const char *path, uint64_t n_bytes_max, char **data, uint64_t *n_bytes, struct kv_error *err)
{
	file_path = path;
	if (!file_text)
		return kv_fail(err, KV_IO_ERROR, "%s: no such file", path);
	if (strlen(file_text) > n_bytes_max)
		return kv_fail(err, KV_IO_ERROR, "%s: too large", path);
	*n_bytes = strlen(file_text);
	*data = kv_strndup(file_text, strlen(file_text));
	return *data ? KV_OK : KV_NO_MEMORY;
}

static const struct kv_files fake_files = { fake_read_all };

/* Runs the command line "tqkvd" + args (NULL-terminated). */
static enum srv_options_outcome parse(struct srv_options *options, const char *const args[])
{
	char *argv[64] = { (char *)(uintptr_t)"tqkvd" };
	int argc = 1;

	for (size_t i = 0; args[i]; i++)
		argv[argc++] = (char *)(uintptr_t)args[i];
	memset(&error, 0, sizeof(error));
	return srv_options_parse(options, argc, argv, &fake_files, &error);
}

#define PARSE(options, ...) parse(options, (const char *const[]){ __VA_ARGS__, NULL })

static void assert_has(const char *text, const char *part)
{
	ck_assert_msg(strstr(text, part) != NULL, "'%s' does not hold '%s'", text, part);
}

/* The command line is refused, and the message holds all parts. */
#define ASSERT_REFUSED(part_1, part_2, ...)                                                                            \
	do {                                                                                                           \
		struct srv_options refused;                                                                            \
		ck_assert_int_eq(PARSE(&refused, __VA_ARGS__), SRV_OPTIONS_USAGE);                                     \
		ck_assert_int_eq(error.status, KV_BAD_CONFIG);                                                         \
		assert_has(error.msg, part_1);                                                                         \
		assert_has(error.msg, part_2);                                                                         \
	} while (0)

static enum kv_status merge(struct srv_options *options, const char *text)
{
	memset(&error, 0, sizeof(error));
	return srv_options_merge_json(options, text, strlen(text), "a.json", &error);
}

static char *dump(const struct srv_options *options)
{
	json_t *json = srv_options_to_json(options);

	ck_assert_ptr_nonnull(json);
	char *text = json_dumps(json, JSON_COMPACT | JSON_SORT_KEYS);

	json_decref(json);
	ck_assert_ptr_nonnull(text);
	return text;
}

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

	ck_assert_int_eq(PARSE(&options, "--frame-bytes-max", "2MiB", "--lease-ms=100", "--io", "epoll", "--backend=cpu",
				 "--inflight-bytes-max=1GiB", "--min-rate-bytes-per-s=0", "--memory", "50%",
				 "--log-level=debug", "--http=off"),
		SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.frame_bytes_max, 2097152);
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
	ck_assert_int_eq(PARSE(&options, "--listen", "unix:/x", "--config=c.json", "--listen=tcp:[::1]:0", "--pool",
				 SMOL_SHORT),
		SRV_OPTIONS_RUN);
	ck_assert_uint_eq(options.n_listen, 2);
	ck_assert_str_eq(options.listen[0].path, "/x");
	ck_assert_uint_eq(json_array_size(options.pools), 1);
	ck_assert_str_eq(json_string_value(json_object_get(json_array_get(options.pools, 0), "name")), "smol");
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
}
END_TEST

/* What is wrong on the command line is told with the option, what was given and what was expected. */
START_TEST(test_options_refuses_flags)
{
	ASSERT_REFUSED("--frame-bytes-max: '17'", "a size from 64 KiB to 16 MiB", "--frame-bytes-max", "17");
	ASSERT_REFUSED("--frame-bytes-max: '17MiB'", "from 64 KiB to 16 MiB", "--frame-bytes-max=17MiB");
	ASSERT_REFUSED("'1mib'", "KiB, MiB or GiB", "--frame-bytes-max=1mib");
	ASSERT_REFUSED("'1 MiB'", "KiB, MiB or GiB", "--frame-bytes-max=1 MiB");
	ASSERT_REFUSED("'18446744073709551616'", "from 64 KiB", "--frame-bytes-max=18446744073709551616");
	ASSERT_REFUSED("'17179869185GiB'", "from 64 KiB", "--frame-bytes-max=17179869185GiB"); /* 2^64 + 2^30 */
	ASSERT_REFUSED("--lease-ms: '-1'", "a whole number from 100 to 86400000", "--lease-ms", "-1");
	ASSERT_REFUSED("'4294967396'", "from 100 to 86400000", "--lease-ms=4294967396"); /* 2^32 + 100 */
	ASSERT_REFUSED("'+200'", "whole number", "--lease-ms=+200");
	ASSERT_REFUSED("'1e3'", "whole number", "--lease-ms=1e3");
	ASSERT_REFUSED("''", "whole number", "--lease-ms=");
	ASSERT_REFUSED("--socket-mode: '0440'", "from 0 to 511", "--socket-mode", "0440"); /* octal or decimal? */
	ASSERT_REFUSED("--io: 'kqueue'", "one of auto, io_uring, epoll", "--io", "kqueue");
	ASSERT_REFUSED("--io: 'e'", "one of auto, io_uring, epoll", "--io=e");
	ASSERT_REFUSED("--insecure: 'yes'", "true or false", "--insecure=yes");
	ASSERT_REFUSED("--memory: ''", "1 to 255 bytes", "--memory=");
	ASSERT_REFUSED("memory: '101%'", "share from 1% to 100%", "--memory=101%");
	ASSERT_REFUSED("memory: 'lots'", "expected a size", "--memory=lots");
	ASSERT_REFUSED("--http: '\xff:1'", "UTF-8", "--http=\xff:1");
	ASSERT_REFUSED("--frame: there is no such option", "did you mean --frame-bytes-max?", "--frame", "2MiB");
	ASSERT_REFUSED("--frames", "there is no such option", "--frames=1");
	ASSERT_REFUSED("-x", "there is no such option", "-x");
	ASSERT_REFUSED("--lease-ms", "its value is missing", "--io=auto", "--lease-ms");
	ASSERT_REFUSED("--help=1", "takes no value", "--help=1");
	ASSERT_REFUSED("'stray'", "not an option", "--io=auto", "stray", "--lease-ms=1000");
	ASSERT_REFUSED("inflight_bytes_max: 65536", "frame_bytes_max (1048576)", "--inflight-bytes-max=64KiB");
	ASSERT_REFUSED("--pool", "", "--pool", "name=x,layers=");
	ASSERT_REFUSED("pools[1].name", "'smol' is already the name of pools[0]", "--pool", SMOL_SHORT, "--pool", SMOL_SHORT);
}
END_TEST

/* Addresses: at most 8, of a known kind, and beyond loopback only with --insecure, for clients and for HTTP. */
START_TEST(test_options_addresses)
{
	struct srv_options options;
	const char *many[64] = { NULL };

	ASSERT_REFUSED("--listen", "expected unix:PATH or tcp:HOST:PORT", "--listen", "udp:1");
	ASSERT_REFUSED("--listen", "UTF-8", "--listen", "unix:/\xff");
	ASSERT_REFUSED("listen: 0.0.0.0:7870 can be reached from other machines", "--insecure", "--listen",
		"tcp:0.0.0.0:7870");
	ASSERT_REFUSED("listen: [::]:1 can be reached", "Unix socket", "--listen", "tcp:[::]:1");
	ASSERT_REFUSED("http: 10.1.2.3:80 can be reached", "127.0.0.1", "--http", "10.1.2.3:80");
	ASSERT_REFUSED("http: expected HOST:PORT or off", "tcp:127.0.0.1\"", "--http", "127.0.0.1");
	ASSERT_REFUSED("http: expected HOST:PORT or off", "host", "--http", "example.org:80");
	ck_assert_int_eq(PARSE(&options, "--http", "0.0.0.0:0", "--listen=tcp:0.0.0.0:1", "--insecure"), SRV_OPTIONS_RUN);
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

/* All kinds of members are read from a file; sizes may be numbers or texts. */
START_TEST(test_options_file)
{
	struct srv_options options;

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	ck_assert_int_eq(merge(&options, "{\"frame_bytes_max\":65536,\"inflight_bytes_max\":\"1MiB\",\"lease_ms\":100,"
					 "\"io\":\"epoll\",\"http\":\"127.0.0.1:0\",\"insecure\":true,"
					 "\"listen\":[\"unix:/tmp/a\"],\"pools\":[" SMOL "]}"),
		KV_OK);
	ck_assert_uint_eq(options.frame_bytes_max, 65536);
	ck_assert_uint_eq(options.inflight_bytes_max, 1048576);
	ck_assert_uint_eq(options.lease_ms, 100);
	ck_assert_uint_eq(options.io, SRV_IO_EPOLL);
	ck_assert_str_eq(options.http, "127.0.0.1:0");
	ck_assert(options.insecure);
	ck_assert_uint_eq(options.n_listen, 1);
	ck_assert_uint_eq(json_array_size(options.pools), 1);
	srv_options_finish(&options);
}
END_TEST

static const struct {
	const char *text, *part_1, *part_2;
} bad_files[] = {
	{ "{\"lease_ms\":100,\n  \"lease_ms\":200}", "a.json:2:", "duplicate" },
	{ "{\"lease_ms\":100,\n  \"io\": }", "a.json:2:", "'}'" },
	{ "", "a.json:1:0", "" },
	{ "[]", "a.json: top level: an array", "expected an object" },
	{ "{} {}", "a.json:1:4", "end of file" },
	{ "{\"lease\":1}", "a.json: lease: there is no such option", "--help" },
	{ "{\"config_path\":\"x\"}", "a.json: config_path: there is no such option", "" },
	{ "{\"lease_ms\":\"100\"}", "a.json: lease_ms: the text '100'", "a whole number from 100 to 86400000" },
	{ "{\"lease_ms\":99}", "a.json: lease_ms: '99'", "from 100 to 86400000" },
	{ "{\"lease_ms\":-1}", "a.json: lease_ms: -1", "from 100 to 86400000" },
	{ "{\"lease_ms\":4294967396}", "lease_ms: '4294967396'", "from 100" },
	{ "{\"lease_ms\":1e3}", "lease_ms: the fraction 1000", "whole number" },
	{ "{\"lease_ms\":99999999999999999999}", "a.json:1:", "too big" },
	{ "{\"lease_ms\":null}", "lease_ms: null", "whole number" },
	{ "{\"lease_ms\":[1]}", "lease_ms: an array", "whole number" },
	{ "{\"frame_bytes_max\":\"2XB\"}", "frame_bytes_max: '2XB'", "KiB, MiB or GiB" },
	{ "{\"frame_bytes_max\":true}", "frame_bytes_max: true", "a size from" },
	{ "{\"io\":1}", "io: 1", "one of auto, io_uring, epoll" },
	{ "{\"io\":\"poll\"}", "io: 'poll'", "one of auto, io_uring, epoll" },
	{ "{\"insecure\":\"true\"}", "insecure: the text 'true'", "true or false" },
	{ "{\"insecure\":1}", "insecure: 1", "true or false" },
	{ "{\"http\":{}}", "http: an object", "a text" },
	{ "{\"http\":\"\"}", "http: ''", "1 to 255 bytes" },
	{ "{\"http\":\"\\u0000\"}", "a.json:1:", "" },
	{ "{\"http\":\"\xff\"}", "a.json:1:", "unable to decode byte 0xff" },
	{ "{\"listen\":\"unix:/a\"}", "listen: the text 'unix:/a'", "an array of addresses" },
	{ "{\"listen\":[\"unix:/a\",7]}", "a.json: listen[1]: 7", "an address" },
	{ "{\"listen\":[\"tcp:x\"]}", "a.json: listen[0]", "expected tcp:HOST:PORT" },
	{ "{\"pools\":{}}", "pools: an object", "an array of pool objects" },
	{ "{\"pools\":[{},3]}", "a.json: pools[1]: 3", "an object" },
	{ "{\"pools\":[{\"name\":\"a\"},{\"name\":\"b\"},{\"name\":\"a\"}]}", "a.json: pools[2].name: 'a'", "pools[0]" },
};

/* A refused file changes nothing, and the message says where it is wrong. */
START_TEST(test_options_refuses_files)
{
	struct srv_options options;

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	ck_assert_int_eq(merge(&options, "{\"pools\":[{\"name\":\"kept\"}],\"lease_ms\":777}"), KV_OK);
	char *before = dump(&options);

	for (size_t i = 0; i < KV_LENGTH(bad_files); i++) {
		ck_assert_msg(merge(&options, bad_files[i].text) == KV_BAD_CONFIG, "accepted: %s", bad_files[i].text);
		ck_assert_int_eq(error.status, KV_BAD_CONFIG);
		assert_has(error.msg, bad_files[i].part_1);
		assert_has(error.msg, bad_files[i].part_2);
		char *after = dump(&options);

		ck_assert_str_eq(before, after);
		free(after);
	}
	free(before);
	srv_options_finish(&options);
}
END_TEST

/* More pools than the daemon can hold, and nesting without end, are refused. */
START_TEST(test_options_refuses_huge_files)
{
	static char text[300000];
	struct srv_options options;
	size_t used = (size_t)sprintf(text, "{\"pools\":[{}");

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	for (unsigned i = 0; i < 64; i++)
		used += (size_t)sprintf(text + used, ",{}");
	sprintf(text + used, "]}");
	ck_assert_int_eq(merge(&options, text), KV_BAD_CONFIG);
	assert_has(error.msg, "pools: 65 pools given, expected at most 64");
	memset(text, '[', sizeof(text) - 1);
	memcpy(text, "{\"pools\":", 9);
	ck_assert_int_eq(merge(&options, text), KV_BAD_CONFIG);
	assert_has(error.msg, "depth");
	srv_options_finish(&options);
}
END_TEST

/* A file that is missing or wrong is told with its path; exit code 2 is the caller's. */
START_TEST(test_options_config_file_errors)
{
	static char path[5000];

	file_text = NULL;
	{
		struct srv_options options;

		ck_assert_int_eq(PARSE(&options, "--config", "none.json"), SRV_OPTIONS_USAGE);
		assert_has(error.msg, "--config");
		assert_has(error.msg, "none.json");
	}
	file_text = "{\"io\":\n1}";
	ASSERT_REFUSED("c.json: io: 1", "one of", "--config=c.json");
	file_text = "{\"listen\":[]}";
	ASSERT_REFUSED("listen: the list is empty", "tcp:HOST:PORT", "--config=c.json");
	file_text = "{\"listen\":[\"tcp:0.0.0.0:1\"]}";
	ASSERT_REFUSED("listen: 0.0.0.0:1 can be reached", "--insecure", "--config=c.json");
	memset(path, 'x', sizeof(path) - 1);
	ASSERT_REFUSED("--config: the path has 4999 bytes", "at most 4095", "--config", path);
}
END_TEST

/* --check-config looks into the pools as well. */
START_TEST(test_options_check_config)
{
	struct srv_options options;

	file_text = "{\"pools\":[" SMOL "]}";
	ck_assert_int_eq(PARSE(&options, "--check-config", "--config=c.json"), SRV_OPTIONS_RUN);
	ck_assert(options.is_check_only);
	srv_options_finish(&options);
	file_text = "{\"pools\":[" SMOL ",{\"name\":\"bad\",\"layers\":0}]}";
	ck_assert_int_eq(PARSE(&options, "--check-config", "--config=c.json"), SRV_OPTIONS_USAGE);
	assert_has(error.msg, "pools[1]: ");
}
END_TEST

/* What GET /v1/config returns is a valid configuration file that gives the same options again. */
START_TEST(test_options_round_trip)
{
	struct srv_options options, again;
	json_t *json;

	file_text = "{\"pools\":[" SMOL "]}";
	ck_assert_int_eq(PARSE(&options, "--config=c.json", "--insecure", "--listen=tcp:[::]:99", "--listen=unix:/tmp/x",
				 "--io=io_uring", "--memory=1GiB", "--frame-bytes-max=65537"),
		SRV_OPTIONS_RUN);
	json = srv_options_to_json(&options);
	ck_assert_uint_eq(json_object_size(json), SRV_N_OPTIONS + 2);
	ck_assert_str_eq(json_string_value(json_object_get(json, "io")), "io_uring");
	ck_assert_int_eq(json_integer_value(json_object_get(json, "frame_bytes_max")), 65537);
	ck_assert(json_is_true(json_object_get(json, "insecure")));
	ck_assert_str_eq(json_string_value(json_array_get(json_object_get(json, "listen"), 0)), "tcp:[::]:99");
	ck_assert_str_eq(json_string_value(json_array_get(json_object_get(json, "listen"), 1)), "unix:/tmp/x");
	json_decref(json);
	char *text = dump(&options);

	ck_assert_int_eq(srv_options_init(&again, &error), KV_OK);
	ck_assert_int_eq(merge(&again, text), KV_OK);
	char *text_again = dump(&again);

	ck_assert_str_eq(text, text_again);
	free(text);
	free(text_again);
	srv_options_finish(&options);
	srv_options_finish(&again);
}
END_TEST

/* A size is taken as it is, a share of what is free without overflow; both in whole pages. */
START_TEST(test_options_memory_bytes)
{
	static const struct {
		const char *memory;
		uint64_t free_bytes, expected; /* 0: refused */
	} cases[] = {
		{ "2GiB", 0, 2147483648 },
		{ "8191", 0, 4096 },
		{ "80%", 1000000, 798720 },
		{ "100%", UINT64_MAX, UINT64_MAX - 4095 },
		{ "33%", UINT64_MAX, 6087425544324149248 }, /* 0.33 * (2^64 - 1), rounded down to a page */
		{ "1%", 409500, 0 },
		{ "1%", 409600, 4096 },
		{ "4095", 1, 0 },
		{ "0", 1, 0 },
		{ "0%", 1000000, 0 },
		{ "80 %", 1000000, 0 },
		{ "080%", 1000000, 0 },
		{ "1TiB", 1000000, 0 },
	};
	struct srv_options options;

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	for (size_t i = 0; i < KV_LENGTH(cases); i++) {
		uint64_t n_bytes = 77;

		strcpy(options.memory, cases[i].memory);
		const enum kv_status status =
			srv_options_memory_bytes(&options, cases[i].free_bytes, &n_bytes, &error);

		if (cases[i].expected == 0) {
			ck_assert_msg(status == KV_BAD_CONFIG, "%s", cases[i].memory);
			ck_assert_uint_eq(n_bytes, 77);
			assert_has(error.msg, "memory: ");
		} else {
			ck_assert_msg(status == KV_OK, "%s: %s", cases[i].memory, error.msg);
			ck_assert_uint_eq(n_bytes, cases[i].expected);
		}
	}
	srv_options_finish(&options);
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

/* Every failed allocation of our own is a clean error. (jansson has its own allocator.) */
START_TEST(test_options_survives_failing_allocations)
{
	struct srv_options options;
	bool is_done = false;

	file_text = "{\"pools\":[" SMOL "]}";
	for (int64_t k = 0; !is_done; k++) {
		ck_assert_int_lt(k, 1000);
		kv_alloc_fail_after(k);
		is_done = PARSE(&options, "--config=c.json", "--pool", SMOL_SHORT) == SRV_OPTIONS_RUN;
		kv_alloc_fail_after(-1);
		if (is_done)
			srv_options_finish(&options);
		else
			ck_assert_ptr_null(options.pools);
	}
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
	tcase_add_test(tcase, test_options_addresses);
	tcase_add_test(tcase, test_options_file);
	tcase_add_test(tcase, test_options_refuses_files);
	tcase_add_test(tcase, test_options_refuses_huge_files);
	tcase_add_test(tcase, test_options_config_file_errors);
	tcase_add_test(tcase, test_options_check_config);
	tcase_add_test(tcase, test_options_round_trip);
	tcase_add_test(tcase, test_options_memory_bytes);
	tcase_add_test(tcase, test_options_help);
	tcase_add_test(tcase, test_options_version);
	tcase_add_test(tcase, test_options_survives_failing_allocations);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
