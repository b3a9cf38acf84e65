/*
 * Fuzz target: bytes as a configuration file. What is refused changes nothing; what is accepted comes back
 * from srv_options_to_json() as a file that gives the same options again.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "server/options_internal.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static char *dump(const struct srv_options *options)
{
	json_t *json = srv_options_to_json(options);
	char *text = json ? json_dumps(json, JSON_COMPACT | JSON_SORT_KEYS) : NULL;

	json_decref(json);
	if (!text)
		abort();
	return text;
}

static void check_round_trip(const struct srv_options *options)
{
	struct srv_options again;
	struct kv_error err;
	char *text = dump(options);

	if (srv_options_init(&again, &err) != KV_OK)
		abort();
	if (srv_options_merge_json(&again, text, strlen(text), "again", &err) != KV_OK)
		abort();
	char *text_again = dump(&again);

	if (strcmp(text, text_again) != 0)
		abort();
	free(text);
	free(text_again);
	srv_options_finish(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
	struct srv_options options;
	struct kv_error err = { .status = KV_OK };

	if (srv_options_init(&options, &err) != KV_OK)
		abort();
	char *before = dump(&options);
	const enum kv_status status =
		srv_options_merge_json(&options, (const char *)data, n_bytes, "file", &err);

	if (status != KV_OK) {
		char *after = dump(&options);

		/* Refused: with a text, and without effect. */
		if (strcmp(before, after) != 0 || err.status != status || err.msg[0] == '\0')
			abort();
		free(after);
	} else {
		check_round_trip(&options);
		(void)srv_options_check(&options, &err);
	}
	free(before);
	srv_options_finish(&options);
	return 0;
}
