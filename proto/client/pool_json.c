/*
 * The first difference of two canonical JSON texts (compact, keys sorted), named as a path.
 *
 * Both texts are equal up to the first differing byte, so one scan of the common part gives the path for
 * both: a stack of open objects and arrays, each with its current key or index. No parsing of numbers, no
 * recursion.
 */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "proto/client/tqkv.h"

#define DEPTH_MAX 8 /* the schema has 3; deeper levels are named by their container */

struct level {
	bool is_array;
	size_t index;    /* array: of the current element */
	const char *key; /* object: the current key's text between the quotes; NULL before the first */
	size_t key_bytes;
};

struct scan {
	struct level levels[DEPTH_MAX];
	size_t depth;
	const char *token; /* start of the key or value that the scan is in */
	bool is_key;       /* the token is a key */
};

/* The end of the string that starts at the quote `text`: behind its closing quote, or `end`. */
static const char *string_end(const char *text, const char *end)
{
	for (text++; text < end; text++) {
		if (*text == '\\' && text + 1 < end)
			text++;
		else if (*text == '"')
			return text + 1;
	}
	return end;
}

static void scan_open(struct scan *scan, bool is_array, const char *next)
{
	if (scan->depth < DEPTH_MAX)
		scan->levels[scan->depth] = (struct level){ .is_array = is_array };
	scan->depth++;
	scan->token = next;
	scan->is_key = !is_array;
}

static struct level *scan_top(struct scan *scan)
{
	return scan->depth > 0 && scan->depth <= DEPTH_MAX ? &scan->levels[scan->depth - 1] : NULL;
}

/* Reads text[0..end) and leaves the path of the token at `end`. */
static void scan_to(struct scan *scan, const char *text, const char *end)
{
	*scan = (struct scan){ .token = text };
	while (text < end) {
		struct level *top = scan_top(scan);
		const char *next = text + 1;

		switch (*text) {
		case '"':
			next = string_end(text, end);
			if (scan->is_key && top && next < end) {
				top->key = text + 1;
				top->key_bytes = (size_t)(next - text) - 2;
			}
			break;
		case '{':
		case '[':
			scan_open(scan, *text == '[', next);
			break;
		case '}':
		case ']':
			if (scan->depth > 0)
				scan->depth--;
			break;
		case ':':
			scan->token = next;
			scan->is_key = false;
			break;
		case ',':
			if (top && top->is_array)
				top->index++;
			scan->token = next;
			scan->is_key = top && !top->is_array;
			break;
		default:
			break;
		}
		text = next;
	}
}

/* "layers[3].k"; the whole text is "the pool" */
static void write_path(const struct scan *scan, char *out, size_t n_bytes_max)
{
	size_t n = 0;

	out[0] = '\0';
	for (size_t level_idx = 0; level_idx < scan->depth && level_idx < DEPTH_MAX && n < n_bytes_max;
		level_idx++) {
		const struct level *level = &scan->levels[level_idx];
		/* In front of a key that differs, the last level has no member yet. */
		const bool is_open = scan->is_key && level_idx + 1 == scan->depth;
		int written = 0;

		if (level->is_array)
			written = snprintf(out + n, n_bytes_max - n, "[%zu]", level->index);
		else if (level->key && !is_open)
			written = snprintf(out + n, n_bytes_max - n, "%s%.*s", n ? "." : "",
				(int)(level->key_bytes < 64 ? level->key_bytes : 64), level->key);
		if (written > 0)
			n += (size_t)written;
	}
	if (n == 0)
		snprintf(out, n_bytes_max, "the pool");
}

/* The token from `start` on, to the delimiter behind it, at most 48 bytes. */
static int token_bytes(const char *start)
{
	const char *end = start + strlen(start);
	const char *text = start;
	size_t depth = 0;

	while (text < end && !(depth == 0 && strchr(",}]:", *text))) {
		if (*text == '"') {
			text = string_end(text, end);
			continue;
		}
		if (*text == '{' || *text == '[')
			depth++;
		else if (*text == '}' || *text == ']')
			depth--;
		text++;
	}
	return text - start < 48 ? (int)(text - start) : 48;
}

bool tqkv_pool_json_differs(const char *expected, const char *got, char *text, size_t text_bytes_max)
{
	size_t n_common = 0;
	struct scan scan;
	char path[128];

	if (!expected || !got) {
		if (text && text_bytes_max > 0)
			snprintf(text, text_bytes_max, "there is no text of a pool");
		return true;
	}
	while (expected[n_common] != '\0' && expected[n_common] == got[n_common])
		n_common++;
	if (expected[n_common] == '\0' && got[n_common] == '\0')
		return false;
	scan_to(&scan, expected, expected + n_common);
	write_path(&scan, path, sizeof(path));

	const char *expected_token = scan.token;
	const char *got_token = got + (scan.token - expected);
	int expected_bytes = token_bytes(expected_token);
	int got_bytes = token_bytes(got_token);

	/* The token is the same and what follows is not: one text has more elements. */
	if (expected_token + expected_bytes <= expected + n_common && got_token + got_bytes <= got + n_common)
		expected_bytes = got_bytes = 48;
	snprintf(text, text_bytes_max, "%s%s: expected %.*s, got %.*s", scan.is_key ? "a member of " : "",
		path, expected_bytes, expected_token, got_bytes, got_token);
	return true;
}
