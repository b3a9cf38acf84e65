/*
 * The token that tqkvctl shows: from a file or the environment, never from the command line, which everybody
 * on the machine can read.
 */
#include <stdlib.h>
#include <string.h>

#include "core/io.h"
#include "core/memory.h"
#include "server/ctl/ctl.h"

#define FILE_BYTES_MAX 4096u

enum kv_status srv_ctl_read_token(struct srv_ctl *ctl, struct kv_error *err)
{
	const char *environment = getenv("TQKV_TOKEN");
	char *text = NULL;
	uint64_t n_bytes = 0;

	ctl->token[0] = '\0';
	if (!ctl->token_file[0]) {
		if (environment && strlen(environment) >= sizeof(ctl->token))
			return kv_fail(err, SRV_CTL_USAGE, "TQKV_TOKEN: more than 512 bytes");
		strcpy(ctl->token, environment ? environment : "");
	} else {
		const enum kv_status status =
			kv_files_system()->read_all(ctl->token_file, FILE_BYTES_MAX, &text, &n_bytes, err);

		if (status != KV_OK)
			return status;
		const size_t line_bytes = strcspn(text, "\r\n");

		if (line_bytes > 0 && line_bytes < sizeof(ctl->token)) {
			memcpy(ctl->token, text, line_bytes);
			ctl->token[line_bytes] = '\0';
		}
		explicit_bzero(text, (size_t)n_bytes);
		kv_free(text);
		if (!ctl->token[0])
			return kv_fail(err, SRV_CTL_USAGE,
				"--token-file: the first line is no token of 1 to 512 bytes");
	}
	/* It becomes a header line: nothing in it may end one. */
	for (const char *c = ctl->token; *c; c++)
		if (*c < 0x21 || *c > 0x7E)
			return kv_fail(err, SRV_CTL_USAGE, "the token has a byte that no token has");
	return KV_OK;
}
