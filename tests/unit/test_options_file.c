/*
 * Options from a configuration file: what is read, what is refused and where, and that GET /v1/config gives
 * the same file back.
 */
#include <stdio.h>
#include <string.h>

#include "core/checked.h"
#include "tests/lib/kv_test_options.h"

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

/* All kinds of members are read from a file; sizes may be numbers or texts. */
START_TEST(test_options_file)
{
	struct srv_options options;

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	ck_assert_int_eq(merge(&options,
				 "{\"socket_mode\":\"0o640\",\"frame_bytes_max\":65536,\"inflight_bytes_"
				 "max\":\"1MiB\",\"lease_ms\":100,"
				 "\"io\":\"epoll\",\"http\":\"127.0.0.1:0\",\"insecure\":true,"
				 "\"listen\":[\"unix:/tmp/a\"],\"pools\":[" SMOL "]}"),
		KV_OK);
	ck_assert_uint_eq(options.frame_bytes_max, 65536);
	ck_assert_uint_eq(options.inflight_bytes_max, 1048576);
	ck_assert_uint_eq(options.socket_mode, 0640);
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
	{ "{\"lease_ms\":\"100\"}", "a.json: lease_ms: the text '100'",
		"a whole number from 100 to 86400000" },
	{ "{\"lease_ms\":99}", "a.json: lease_ms: '99'", "from 100 to 86400000" },
	{ "{\"lease_ms\":-1}", "a.json: lease_ms: -1", "from 100 to 86400000" },
	{ "{\"lease_ms\":4294967396}", "lease_ms: '4294967396'", "from 100" },
	{ "{\"lease_ms\":1e3}", "lease_ms: the fraction 1000", "whole number" },
	{ "{\"lease_ms\":99999999999999999999}", "a.json:1:", "too big" },
	{ "{\"lease_ms\":null}", "lease_ms: null", "whole number" },
	{ "{\"lease_ms\":[1]}", "lease_ms: an array", "whole number" },
	{ "{\"frame_bytes_max\":\"2XB\"}", "frame_bytes_max: '2XB'", "KiB, MiB, GiB or TiB" },
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
	{ "{\"pools\":[{\"name\":\"a\"},{\"name\":\"b\"},{\"name\":\"a\"}]}", "a.json: pools[2].name: 'a'",
		"pools[0]" },
};

/* A refused file changes nothing, and the message says where it is wrong. */
START_TEST(test_options_refuses_files)
{
	struct srv_options options;

	ck_assert_int_eq(srv_options_init(&options, &error), KV_OK);
	ck_assert_int_eq(merge(&options, "{\"pools\":[{\"name\":\"kept\"}],\"lease_ms\":777}"), KV_OK);
	char *before = dump(&options);

	for (size_t i = 0; i < KV_LENGTH(bad_files); i++) {
		ck_assert_msg(merge(&options, bad_files[i].text) == KV_BAD_CONFIG, "accepted: %s",
			bad_files[i].text);
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
	/* Memory of a size is known here; a share is found out by the start. */
	file_text = "{\"memory\":\"4KiB\",\"pools\":[" SMOL "]}";
	ck_assert_int_eq(PARSE(&options, "--check-config", "--config=c.json"), SRV_OPTIONS_USAGE);
	assert_has(error.msg, "pools[0]: pool \"smol\" takes ");
	assert_has(error.msg, "of memory (4KiB) 4096 are left for it");
	file_text = "{\"memory\":\"1%\",\"pools\":[" SMOL "]}";
	ck_assert_int_eq(PARSE(&options, "--check-config", "--config=c.json"), SRV_OPTIONS_RUN);
	srv_options_finish(&options);
}
END_TEST

/* What GET /v1/config returns is a valid configuration file that gives the same options again. */
START_TEST(test_options_round_trip)
{
	struct srv_options options, again;
	json_t *json;

	file_text = "{\"pools\":[" SMOL "]}";
	ck_assert_int_eq(
		PARSE(&options, "--config=c.json", "--insecure", "--listen=tcp:[::]:99",
			"--listen=unix:/tmp/x", "--io=io_uring", "--memory=1GiB", "--frame-bytes-max=65537"),
		SRV_OPTIONS_RUN);
	json = srv_options_to_json(&options);
	ck_assert_uint_eq(json_object_size(json), SRV_N_OPTIONS + 3);
	ck_assert_str_eq(json_string_value(json_object_get(json, "io")), "io_uring");
	ck_assert_int_eq(json_integer_value(json_object_get(json, "frame_bytes_max")), 65537);
	ck_assert(json_is_true(json_object_get(json, "insecure")));
	ck_assert_str_eq(
		json_string_value(json_array_get(json_object_get(json, "listen"), 0)), "tcp:[::]:99");
	ck_assert_str_eq(
		json_string_value(json_array_get(json_object_get(json, "listen"), 1)), "unix:/tmp/x");
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
		{ "1PiB", 1000000, 0 },
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
	Suite *suite = suite_create("options_file");
	TCase *tcase = tcase_create("options_file");

	tcase_add_test(tcase, test_options_file);
	tcase_add_test(tcase, test_options_refuses_files);
	tcase_add_test(tcase, test_options_refuses_huge_files);
	tcase_add_test(tcase, test_options_config_file_errors);
	tcase_add_test(tcase, test_options_check_config);
	tcase_add_test(tcase, test_options_round_trip);
	tcase_add_test(tcase, test_options_memory_bytes);
	tcase_add_test(tcase, test_options_survives_failing_allocations);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
