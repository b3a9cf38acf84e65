#include "server/auth.h"

#include <string.h>

#include "server/http_rules.h"

#define FIELDS_MAX  4u
#define FIELD_BYTES (SRV_TOKEN_BYTES_MAX + 1)

struct line {
	uint32_t n_fields;
	char fields[FIELDS_MAX][FIELD_BYTES];
};

/* One line without its end; false: too many or too long fields, or bytes that no token has. */
static bool split(const char *text, size_t n_bytes, struct line *line)
{
	size_t i = 0;

	line->n_fields = 0;
	while (i < n_bytes) {
		size_t used = 0;

		if (text[i] == ' ' || text[i] == '\t' || text[i] == '\r') {
			i++;
			continue;
		}
		if (text[i] == '#' && line->n_fields == 0)
			return true;
		if (line->n_fields == FIELDS_MAX)
			return false;
		for (; i < n_bytes && text[i] != ' ' && text[i] != '\t' && text[i] != '\r'; i++) {
			if (text[i] < 0x21 || text[i] > 0x7E || used + 1 >= FIELD_BYTES)
				return false;
			line->fields[line->n_fields][used++] = text[i];
		}
		line->fields[line->n_fields++][used] = '\0';
	}
	return true;
}

static bool read_role(const char *text, enum srv_role *role)
{
	*role = strcmp(text, "data") == 0    ? SRV_ROLE_DATA
		: strcmp(text, "read") == 0  ? SRV_ROLE_READ
		: strcmp(text, "admin") == 0 ? SRV_ROLE_ADMIN
					     : SRV_ROLE_NONE;
	return *role != SRV_ROLE_NONE;
}

/* NULL, or what is wrong. */
static const char *read_token(const struct line *line, struct srv_token *token)
{
	memset(token, 0, sizeof(*token));
	if (line->n_fields < 3)
		return "expected role, name and token";
	if (!read_role(line->fields[0], &token->role))
		return "the role is none of data, read and admin";
	if (strlen(line->fields[1]) > SRV_TOKEN_NAME_BYTES_MAX)
		return "the name has more than 64 bytes";
	token->n_bytes = (uint32_t)strlen(line->fields[2]);
	if (token->n_bytes < SRV_TOKEN_BYTES_MIN)
		return "the token has fewer than 16 bytes";
	strcpy(token->name, line->fields[1]);
	memcpy(token->bytes, line->fields[2], token->n_bytes);
	if (line->n_fields == 3)
		return NULL;
	if (strncmp(line->fields[3], "tenant=", 7) != 0 ||
		!srv_http_read_u64(line->fields[3] + 7, UINT64_MAX - 1, &token->tenant))
		return "behind the token only tenant=NUMBER may stand";
	if (token->role != SRV_ROLE_DATA)
		return "only a data token may have a tenant";
	token->has_tenant = true;
	return NULL;
}

/* NULL, or what is wrong. */
static const char *add(struct srv_tokens *tokens, const struct srv_token *token)
{
	if (tokens->n == SRV_TOKENS_MAX)
		return "more than 64 tokens";
	for (uint32_t i = 0; i < tokens->n; i++) {
		if (strcmp(tokens->tokens[i].name, token->name) == 0)
			return "the name stands there twice";
		if (memcmp(tokens->tokens[i].bytes, token->bytes, sizeof(token->bytes)) == 0)
			return "the token stands there twice";
	}
	tokens->tokens[tokens->n++] = *token;
	return NULL;
}

enum kv_status srv_tokens_parse(
	const char *text, uint64_t n_bytes, const char *source, struct srv_tokens *out, struct kv_error *err)
{
	struct line line = { 0 };
	struct srv_token token;
	const char *wrong = NULL;
	uint32_t line_no = 0;

	out->n = 0;
	for (uint64_t at = 0; at < n_bytes && !wrong;) {
		const char *end = memchr(text + at, '\n', (size_t)(n_bytes - at));
		const size_t line_bytes = end ? (size_t)(end - text) - (size_t)at : (size_t)(n_bytes - at);

		line_no++;
		if (!split(text + at, line_bytes, &line))
			wrong = "expected role, name and token, printable and with blanks between";
		else if (line.n_fields > 0)
			wrong = read_token(&line, &token);
		if (!wrong && line.n_fields > 0)
			wrong = add(out, &token);
		at += line_bytes + 1;
	}
	explicit_bzero(&line, sizeof(line));
	explicit_bzero(&token, sizeof(token));
	if (!wrong && out->n > 0)
		return KV_OK;
	const bool is_empty = !wrong;

	srv_tokens_wipe(out);
	if (is_empty)
		return kv_fail(err, KV_BAD_CONFIG, "%s: holds no token, so nobody could log in", source);
	return kv_fail(err, KV_BAD_CONFIG, "%s: line %u: %s", source, line_no, wrong);
}

const struct srv_token *srv_tokens_find(const struct srv_tokens *tokens, const char *bytes, size_t n_bytes)
{
	uint8_t given[SRV_TOKEN_BYTES_MAX] = { 0 };
	const struct srv_token *found = NULL;

	if (n_bytes == 0 || n_bytes > sizeof(given))
		return NULL;
	memcpy(given, bytes, n_bytes);
	/* All of every token, whatever was found. No token has a zero byte, so padding cannot be given. */
	for (uint32_t i = 0; i < tokens->n; i++) {
		volatile uint8_t different = 0;

		for (size_t k = 0; k < sizeof(given); k++)
			different |= given[k] ^ tokens->tokens[i].bytes[k];
		if (different == 0)
			found = &tokens->tokens[i];
	}
	explicit_bzero(given, sizeof(given));
	return found && found->n_bytes == n_bytes ? found : NULL;
}

void srv_tokens_wipe(struct srv_tokens *tokens)
{
	explicit_bzero(tokens, sizeof(*tokens));
}

/* The number at *text, and moves it behind number and comma; false: there is none. */
static bool next_uid(const char **text, uint64_t *uid)
{
	char number[16];
	const size_t n_bytes = strcspn(*text, ",");

	if (n_bytes == 0 || n_bytes >= sizeof(number))
		return false;
	memcpy(number, *text, n_bytes);
	number[n_bytes] = '\0';
	*text += n_bytes + ((*text)[n_bytes] == ',');
	return srv_http_read_u64(number, UINT32_MAX - 1, uid);
}

bool srv_uids_are_valid(const char *text)
{
	uint64_t uid;

	if (strcmp(text, "any") == 0)
		return true;
	if (!*text || text[strlen(text) - 1] == ',')
		return false;
	while (*text)
		if (!next_uid(&text, &uid))
			return false;
	return true;
}

bool srv_uids_hold(const char *text, uint32_t wanted)
{
	uint64_t uid;

	if (strcmp(text, "any") == 0)
		return true;
	while (*text && next_uid(&text, &uid))
		if (uid == wanted)
			return true;
	return false;
}

bool srv_login_is_limited(const struct srv_login_gate *gate, uint64_t peer_key, uint64_t now_ns)
{
	for (uint32_t i = 0; i < SRV_LOGIN_PEERS; i++)
		if (gate->peers[i].n_failed > 0 && gate->peers[i].peer_key == peer_key)
			return gate->peers[i].n_failed >= SRV_LOGINS_FAILED_MAX &&
				now_ns - gate->peers[i].begun_ns < SRV_LOGIN_WINDOW_NS;
	return false;
}

void srv_login_failed(struct srv_login_gate *gate, uint64_t peer_key, uint64_t now_ns)
{
	uint32_t at = 0;

	for (uint32_t i = 0; i < SRV_LOGIN_PEERS; i++) {
		if (gate->peers[i].n_failed > 0 && gate->peers[i].peer_key == peer_key) {
			at = i;
			break;
		}
		if (gate->peers[i].n_failed == 0 ||
			(gate->peers[at].n_failed > 0 && gate->peers[i].begun_ns < gate->peers[at].begun_ns))
			at = i;
	}
	if (gate->peers[at].n_failed == 0 || gate->peers[at].peer_key != peer_key ||
		now_ns - gate->peers[at].begun_ns >= SRV_LOGIN_WINDOW_NS) {
		gate->peers[at].peer_key = peer_key;
		gate->peers[at].begun_ns = now_ns;
		gate->peers[at].n_failed = 0;
	}
	gate->peers[at].n_failed++;
}
