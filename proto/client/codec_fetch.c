/* A codec from a server's pool: its JSON, and the rows that the JSON has only by their hash. */
#include <stdlib.h>

#include "proto/client/codec.h"

enum { JSON_BYTES_MAX = 1 << 20 }; /* of a server's word; a daemon's is at most 32 KB */

/* What was fetched; freed by the caller. */
struct fetched {
	float *rotations[2];
	float *k_center;
};

/* A call with timeout 0 would get the connection's own; one that is too late gets its last millisecond. */
static uint32_t left_ms(int64_t deadline_ns)
{
	const int64_t left_ns = deadline_ns - tqkv_now_ns();

	return left_ns > 1000000 ? (uint32_t)(left_ns / 1000000) : 1;
}

static enum tqkv_status fetch_center(struct tqkv_conn *conn, const char *pool,
	const struct tqkv_pool_text *text, float **out, int64_t deadline_ns, struct tqkv_error *err)
{
	const uint32_t head_dim = text->sides[0].head_dim;
	const size_t layer_floats = (size_t)text->kv_heads * head_dim;
	enum tqkv_status status = TQKV_OK;

	*out = calloc(text->n_layers * layer_floats, sizeof(**out));
	if (!*out)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for the pool's k_center");
	for (uint32_t l = 0; status == TQKV_OK && l < text->n_layers; l++)
		status = tqkv_pool_rows(conn, pool, TQKV_POOL_K_CENTER, l, text->kv_heads, head_dim,
			*out + l * layer_floats, left_ms(deadline_ns), err);
	return status;
}

/* One matrix, or one for each layer; layers that are not rotated have none to ask for. */
static enum tqkv_status fetch_side(struct tqkv_conn *conn, const char *pool,
	const struct tqkv_pool_text *text, bool is_v, float **out, int64_t deadline_ns,
	struct tqkv_error *err)
{
	const struct tqkv_side_text *side = &text->sides[is_v];
	const size_t matrix_floats = (size_t)side->head_dim * side->head_dim;
	float *rows =
		calloc(side->is_per_layer ? text->n_layers * matrix_floats : matrix_floats, sizeof(*rows));
	enum tqkv_status status = TQKV_OK;

	*out = rows;
	if (!rows)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for the pool's matrices");
	for (uint32_t l = 0; status == TQKV_OK && l < text->n_layers; l++) {
		if (!kv_format_is_rotated(side->formats[l]))
			continue;
		status = tqkv_pool_rows(conn, pool, is_v ? TQKV_POOL_V_ROTATION : TQKV_POOL_ROTATION, l,
			side->head_dim, side->head_dim, rows + (side->is_per_layer ? l * matrix_floats : 0),
			left_ms(deadline_ns), err);
		if (!side->is_per_layer)
			break;
	}
	return status;
}

static enum tqkv_status fetch_rotations(struct tqkv_conn *conn, const char *pool,
	const struct tqkv_pool_text *text, struct fetched *fetched, int64_t deadline_ns,
	struct tqkv_error *err)
{
	enum tqkv_status status = TQKV_OK;

	for (uint32_t i = 0; status == TQKV_OK && i < 2; i++) {
		const struct tqkv_side_text *side = &text->sides[i];

		if (side->rotation != KV_ROTATION_FILE && side->rotation != KV_ROTATION_QR)
			continue;
		status = fetch_side(conn, pool, text, i != 0, &fetched->rotations[i], deadline_ns, err);
	}
	return status;
}

static bool has_given_matrix(const struct tqkv_pool_text *text)
{
	return text->sides[0].rotation == KV_ROTATION_FILE || text->sides[1].rotation == KV_ROTATION_FILE;
}

static bool has_qr(const struct tqkv_pool_text *text)
{
	return text->sides[0].rotation == KV_ROTATION_QR || text->sides[1].rotation == KV_ROTATION_QR;
}

static enum tqkv_status create(struct tqkv_conn *conn, const char *pool, const char *json,
	const struct tqkv_pool_text *text, struct tqkv_codec_params *params, struct fetched *fetched,
	int64_t deadline_ns, struct tqkv_codec **out, struct tqkv_error *err)
{
	enum tqkv_status status = TQKV_OK;

	if (text->k_center[0] != '\0')
		status = fetch_center(conn, pool, text, &fetched->k_center, deadline_ns, err);
	if (status == TQKV_OK && has_given_matrix(text))
		status = fetch_rotations(conn, pool, text, fetched, deadline_ns, err);
	if (status != TQKV_OK)
		return status;
	params->k_center = fetched->k_center;
	params->k_rotation = fetched->rotations[0];
	params->v_rotation = fetched->rotations[1];
	status = tqkv_codec_create_from_pool_json(json, params, out, err);
	/* A qr matrix is computed here first: it is the same nearly always, and one asks for less. */
	if (status != TQKV_FORMAT_MISMATCH || !has_qr(text))
		return status;
	status = fetch_rotations(conn, pool, text, fetched, deadline_ns, err);
	if (status != TQKV_OK)
		return status;
	params->k_rotation = fetched->rotations[0];
	params->v_rotation = fetched->rotations[1];
	return tqkv_codec_create_from_pool_json(json, params, out, err);
}

enum tqkv_status tqkv_codec_create(struct tqkv_conn *conn, const char *pool,
	const struct tqkv_codec_params *params, uint32_t timeout_ms, struct tqkv_codec **out,
	struct tqkv_error *err)
{
	if (!conn || !out)
		return tqkv_fail_null(err, "conn, out");

	const int64_t deadline_ns = tqkv_conn_deadline_ns(conn, timeout_ms);
	struct tqkv_codec_params all = { 0 };
	struct fetched fetched = { { NULL, NULL }, NULL };
	struct tqkv_pool_text text;
	struct tqkv_pool_info info;
	enum tqkv_status status = tqkv_pool_info(conn, pool, 0, NULL, 0, &info, timeout_ms, err);
	char *json;

	if (status != TQKV_OK)
		return status;
	if (info.json_bytes > JSON_BYTES_MAX)
		return tqkv_fail(err, TQKV_TOO_LARGE, "the pool's JSON has %u bytes, expected at most %d",
			info.json_bytes, JSON_BYTES_MAX);
	json = malloc((size_t)info.json_bytes + 1);
	if (!json)
		return tqkv_fail(err, TQKV_NO_MEMORY, "no memory for the pool's JSON");
	if (params) {
		all.k_high_channels = params->k_high_channels;
		all.v_high_channels = params->v_high_channels;
	}
	status = tqkv_pool_info(
		conn, pool, 0, json, (size_t)info.json_bytes + 1, &info, left_ms(deadline_ns), err);
	if (status == TQKV_OK) {
		status = tqkv_pool_text_init(&text, json, err);
		if (status == TQKV_OK)
			status = create(conn, pool, json, &text, &all, &fetched, deadline_ns, out, err);
		tqkv_pool_text_finish(&text);
	}
	free(fetched.rotations[0]);
	free(fetched.rotations[1]);
	free(fetched.k_center);
	free(json);
	return status;
}
