/*
 * Tokens: who may do what. One text file, one token a line:
 *
 *	# role  name    token (16 to 512 printable bytes)   tenant (data only, optional)
 *	data    worker  9f2c0f7f6b7a4d3e8c51              tenant=7
 *	read    grafana 0d1c7e0b4e6f4a4aa1fd
 *	admin   ops     5b1f3b1e9f3b4ef2a7c4
 *
 * data: sessions and rows on the data port. read: everything that GET answers. admin: all of the control API
 * and the data port. The name stands in the log, the token never does.
 *
 * A token is compared with all of the table in a time that depends on neither. Logins that fail are limited
 * per peer: struct srv_login_gate. A table is immutable once parsed, any thread; a gate belongs to whoever
 * locks it.
 */
#ifndef SERVER_AUTH_H
#define SERVER_AUTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "core/error.h"

#define SRV_TOKENS_MAX            64u
#define SRV_TOKEN_BYTES_MIN       16u
#define SRV_TOKEN_BYTES_MAX       512u
#define SRV_TOKEN_NAME_BYTES_MAX  64u
#define SRV_TOKENS_FILE_BYTES_MAX 65536u

enum srv_role { SRV_ROLE_NONE, SRV_ROLE_DATA, SRV_ROLE_READ, SRV_ROLE_ADMIN };

struct srv_token {
	enum srv_role role;
	char name[SRV_TOKEN_NAME_BYTES_MAX + 1];
	bool has_tenant;
	uint64_t tenant;
	uint32_t n_bytes;
	uint8_t bytes[SRV_TOKEN_BYTES_MAX]; /* zeroes behind */
};

struct srv_tokens {
	uint32_t n;
	struct srv_token tokens[SRV_TOKENS_MAX];
};

/*
 * BAD_CONFIG names source and line, never what stands in it: the text may be another file than was meant, and
 * messages are shown to people. At least one token. `out` is
 * wiped on failure.
 */
KV_MUST_CHECK enum kv_status srv_tokens_parse(
	const char *text, uint64_t n_bytes, const char *source, struct srv_tokens *out, struct kv_error *err);
/* NULL: none of them. */
const struct srv_token *srv_tokens_find(const struct srv_tokens *tokens, const char *bytes, size_t n_bytes);
/* Overwrites the tokens, so that freed memory does not keep them. */
void srv_tokens_wipe(struct srv_tokens *tokens);

/* "any", or whole numbers with commas between them. */
bool srv_uids_are_valid(const char *text);
bool srv_uids_hold(const char *text, uint32_t uid);

/* After SRV_LOGINS_FAILED_MAX failures within a minute a peer's logins are refused until the minute is over.
 */
#define SRV_LOGINS_FAILED_MAX 10u
#define SRV_LOGIN_WINDOW_NS   60000000000ull
#define SRV_LOGIN_PEERS       256u /* remembered at a time; the oldest window makes room */

struct srv_login_gate {
	struct {
		uint64_t peer_key, begun_ns;
		uint32_t n_failed; /* 0: unused */
	} peers[SRV_LOGIN_PEERS];
};
bool srv_login_is_limited(const struct srv_login_gate *gate, uint64_t peer_key, uint64_t now_ns);
void srv_login_failed(struct srv_login_gate *gate, uint64_t peer_key, uint64_t now_ns);

#endif
