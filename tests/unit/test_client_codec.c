/*
 * The client's row codec against the pool it is made for: the daemon's own specification makes the canonical
 * JSON, the client makes a codec of that text, and both pack the same rows.
 */
#include "proto/client/tqkv_codec.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "core/format.h"
#include "core/k_center.h"
#include "core/pool_spec.h"
#include "tests/lib/kv_test.h"
#include "tests/unit/client_rig.h"
#include "tests/unit/fake_server.h"

#define GEOMETRY   "\"name\":\"p\",\"q_heads\":4,\"kv_heads\":2,\"block_size\":16,\"blocks\":8"
#define N_TOKENS   5u
#define VALUES_MAX (N_TOKENS * 2u * KV_HEAD_DIM_MAX)

static struct kv_pool_spec *spec_of(const char *json)
{
	struct kv_error err = { .msg = "" };
	struct kv_pool_spec *spec = NULL;
	json_t *parsed = json_loads(json, 0, NULL);

	ck_assert_ptr_nonnull(parsed);
	ck_assert_msg(kv_pool_spec_create(parsed, &spec, &err) == KV_OK, "%s", err.msg);
	json_decref(parsed);
	return spec;
}

static void fill(uint64_t *state, float *values, uint32_t n)
{
	for (uint32_t i = 0; i < n; i++)
		values[i] = (float)((double)(kv_test_random(state) >> 11) * 0x1p-52 - 1);
}

static void matrix_of(const struct kv_row_codec *codec, float *matrix)
{
	kv_rotation_matrix(codec->rotation, 0, codec->rotation->head_dim, matrix);
}

/* One side of one layer: the same bytes as the daemon's codec, and the same numbers back. */
static void check_layer(const struct tqkv_codec *codec, const struct kv_pool_spec *spec, uint32_t layer,
	bool is_v, uint64_t *state)
{
	static float rows[VALUES_MAX], decoded[VALUES_MAX];
	static uint8_t packed[N_TOKENS * 2 * KV_ROW_BYTES_MAX];
	static struct kv_row_scratch scratch;
	const struct kv_layer_spec *l = &spec->layers[layer];
	const uint32_t head_dim = is_v ? spec->v_head_dim : spec->k_head_dim;
	const uint32_t row_bytes = is_v ? l->v->row_bytes : l->k->row_bytes;
	const uint32_t n_rows = N_TOKENS * spec->kv_heads;
	const size_t rows_bytes = (size_t)n_rows * head_dim * sizeof(float);

	ck_assert_uint_eq(tqkv_codec_row_bytes(codec, layer, is_v), row_bytes);
	fill(state, rows, n_rows * head_dim);
	ck_assert_int_eq(tqkv_codec_encode(codec, layer, is_v, TQKV_F32, rows, rows_bytes, N_TOKENS, packed,
				 sizeof(packed), NULL),
		TQKV_OK);
	ck_assert_int_eq(tqkv_codec_decode(codec, layer, is_v, TQKV_F32, packed, (size_t)n_rows * row_bytes,
				 N_TOKENS, decoded, sizeof(decoded), NULL),
		TQKV_OK);
	for (uint32_t r = 0; r < n_rows; r++) {
		const uint32_t head = r % spec->kv_heads;
		const struct kv_row_codec *own = is_v ? kv_layer_v(l, head) : kv_layer_k(l, head);
		const float *center = is_v || !l->k_center ? NULL : l->k_center + (size_t)head * head_dim;
		float row[KV_HEAD_DIM_MAX];
		uint8_t expected[KV_ROW_BYTES_MAX];

		memcpy(row, rows + (size_t)r * head_dim, head_dim * sizeof(*row));
		if (center)
			kv_k_center_subtract(center, row, head_dim, row);
		ck_assert_int_eq(kv_row_codec_encode(own, row, expected, &scratch), KV_OK);
		ck_assert_mem_eq(packed + (size_t)r * row_bytes, expected, row_bytes);
		kv_row_codec_decode(own, expected, row, &scratch);
		if (center)
			kv_k_center_add(center, head_dim, row);
		ck_assert_mem_eq(decoded + (size_t)r * head_dim, row, head_dim * sizeof(*row));
	}
}

/* The codec for a pool, with what the JSON has only by its hash. */
static struct tqkv_codec *make(const struct kv_pool_spec *spec, const struct tqkv_codec_params *params)
{
	struct tqkv_error err = { .message = "" };
	struct tqkv_codec *codec = NULL;

	ck_assert_msg(tqkv_codec_create_from_pool_json(spec->canonical_json, params, &codec, &err) == TQKV_OK,
		"%s: %s", spec->canonical_json, err.message);
	return codec;
}

static enum tqkv_status try_make(const char *json, const struct tqkv_codec_params *params, char *message)
{
	struct tqkv_error err = { .message = "" };
	struct tqkv_codec *codec = NULL;
	const enum tqkv_status status = tqkv_codec_create_from_pool_json(json, params, &codec, &err);

	snprintf(message, sizeof(err.message), "%s", err.message);
	tqkv_codec_destroy(codec);
	return status;
}

static const char *const pools[] = {
	"{" GEOMETRY ",\"layers\":2,\"head_dim\":64,\"k\":\"tq4\",\"v\":\"tq4\"}",
	"{" GEOMETRY ",\"layers\":1,\"k_head_dim\":80,\"v_head_dim\":64,\"k\":\"tq3\",\"v\":\"tq2\"}",
	"{" GEOMETRY ",\"layers\":2,\"head_dim\":96,\"k\":\"tqp3\",\"v\":\"v4\",\"group\":20}",
	"{" GEOMETRY ",\"layers\":3,\"head_dim\":64,\"k\":[\"tq4\",\"bf16\",\"tq8\"],\"v\":[\"v4\",\"f16\","
	"\"fp8\"]}",
	"{" GEOMETRY
	",\"layers\":3,\"head_dim\":64,\"k\":\"tq4\",\"v\":\"tq2\",\"per_layer\":true,\"seed\":7}",
	"{" GEOMETRY ",\"layers\":3,\"head_dim\":48,\"k\":[\"f32\",\"tqp2\",\"tqp2\"],\"v\":\"tq2\","
	"\"per_layer\":true}",
	"{" GEOMETRY ",\"layers\":4,\"head_dim\":128,\"preset\":\"3bit\",\"exact_layers\":1,"
	"\"norm_correction\":true}",
	"{" GEOMETRY ",\"layers\":1,\"head_dim\":64,\"k\":\"tq4\",\"v\":\"tq4\",\"rotation\":\"qr\"}",
	"{" GEOMETRY ",\"layers\":2,\"head_dim\":64,\"k\":\"turboquant25\",\"v\":\"turboquant25\","
	"\"recipe_scale\":\"published\"}",
	"{" GEOMETRY ",\"layers\":2,\"head_dim\":96,\"k\":\"turboquant35\",\"v\":\"fp8\",\"model\":\"m, "
	"\\\"n\\\"\"}",
	"{" GEOMETRY ",\"layers\":2,\"head_dim\":32,\"k\":\"v8\",\"v\":\"v2\",\"groups\":[[0],[1]],"
	"\"scale\":0.3}",
};

/* Every kind of pool: all layers, K and V, byte for byte what the daemon would have stored. */
START_TEST(test_client_codec_packs_as_the_pool)
{
	struct kv_pool_spec *spec = spec_of(pools[_i]);
	struct tqkv_codec *codec = make(spec, NULL);
	struct tqkv_codec_info info;
	uint64_t state = 20240601 + (uint64_t)_i;

	tqkv_codec_info(codec, &info);
	ck_assert_uint_eq(info.n_layers, spec->n_layers);
	ck_assert_uint_eq(info.kv_heads, 2);
	ck_assert_uint_eq(info.k_head_dim, spec->k_head_dim);
	ck_assert_uint_eq(info.v_head_dim, spec->v_head_dim);
	for (uint32_t i = 0; i < 2 * spec->n_layers; i++)
		check_layer(codec, spec, i / 2, i % 2 != 0, &state);
	ck_assert_str_eq(tqkv_codec_format(codec, 0, false), spec->layers[0].k->format->name);
	ck_assert_ptr_null(tqkv_codec_format(codec, info.n_layers, false));
	ck_assert_uint_eq(tqkv_codec_row_bytes(codec, info.n_layers, true), 0);
	tqkv_codec_destroy(codec);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* By hand from FORMATS 5.3: 0 to 15 in one group of 16 are the codes 0 to 15, scale 1 and zero 0. */
START_TEST(test_client_codec_bytes_by_hand)
{
	static const uint8_t expected[12] = { 0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE, 0x00, 0x3C };
	struct kv_pool_spec *spec =
		spec_of("{\"name\":\"p\",\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,\"blocks\":8,"
			"\"layers\":1,\"head_dim\":16,\"k\":\"v4\",\"v\":\"v4\",\"group\":16}");
	struct tqkv_codec *codec = make(spec, NULL);
	float row[16], back[16];
	uint16_t halves[16];
	uint8_t packed[12];

	for (uint32_t i = 0; i < 16; i++)
		row[i] = (float)i;
	kv_rows_store(KV_DTYPE_BF16, row, 16, halves);
	ck_assert_int_eq(tqkv_codec_encode(codec, 0, true, TQKV_BF16, halves, sizeof(halves), 1, packed,
				 sizeof(packed), NULL),
		TQKV_OK);
	ck_assert_mem_eq(packed, expected, 12);
	ck_assert_int_eq(tqkv_codec_decode(codec, 0, true, TQKV_F32, packed, 12, 1, back, sizeof(back), NULL),
		TQKV_OK);
	ck_assert_mem_eq(back, row, sizeof(row));
	tqkv_codec_destroy(codec);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* A pool's JSON with k_center, a recipe's channels and a matrix of its own; the three are given beside it. */
static char *given_pool(char *json, size_t n, const char *formats, bool has_recipe, const float *matrix)
{
	size_t at = (size_t)snprintf(json, n, "{" GEOMETRY ",\"layers\":2,\"head_dim\":32,%s", formats);

	at += (size_t)snprintf(json + at, n - at, ",\"k_center\":[");
	for (uint32_t i = 0; i < 4; i++) {
		at += (size_t)snprintf(json + at, n - at, "%s[", i % 2 == 0 ? (i ? ",[" : "[") : ",");
		for (uint32_t c = 0; c < 32; c++)
			at += (size_t)snprintf(
				json + at, n - at, "%s%.3f", c ? "," : "", 0.125 * (double)(i + c));
		at += (size_t)snprintf(json + at, n - at, "]%s", i % 2 ? "]" : "");
	}
	at += (size_t)snprintf(json + at, n - at, "]");
	if (has_recipe)
		at += (size_t)snprintf(json + at, n - at,
			",\"recipe\":{\"version\":1,\"recipe\":\"turboquant35\",\"head_size\":32,\"layers\":{"
			"\"1\":{\"key_high_precision_indices\":[[0,2,4,6,8,10,12,14,16,18,20,22,24,26,28,30],"
			"[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]],\"value_high_precision_indices\":["
			"[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15],"
			"[16,17,18,19,20,21,22,23,24,25,26,27,28,29,30,31]]}}}");
	for (uint32_t i = 0; matrix && i < 32 * 32; i++)
		at += (size_t)snprintf(json + at, n - at, "%s%.9g%s",
			i == 0           ? ",\"rotation\":\"file\",\"rotation_matrix\":[["
				: i % 32 ? ","
					 : ",[",
			(double)matrix[i], i % 32 == 31 ? (i == 1023 ? "]]" : "]") : "");
	at += (size_t)snprintf(json + at, n - at, "}");
	ck_assert_uint_lt(at, n);
	return json;
}

/* [layers][heads][16] of the pool above. */
static void given_channels(uint16_t k[4][16], uint16_t v[4][16])
{
	for (uint16_t c = 0; c < 16; c++) {
		for (uint32_t i = 0; i < 4; i++)
			k[i][c] = v[i][c] = c;
		k[2][c] = (uint16_t)(2 * c);
		v[3][c] = (uint16_t)(16 + c);
	}
}

/* k_center, channels of single heads, a matrix: with them the bytes are the pool's, without them nothing is
 * made. */
START_TEST(test_client_codec_takes_what_the_json_has_by_hash)
{
	static char json[65536];
	static float matrix[32 * 32], center[2][2][32];
	uint16_t k[4][16], v[4][16];
	uint64_t state = 20240602;
	char message[512];

	for (uint32_t i = 0; i < 4; i++)
		for (uint32_t c = 0; c < 32; c++)
			center[i / 2][i % 2][c] = 0.125F * (float)(i + c);
	given_channels(k, v);

	struct tqkv_codec_params params = {
		.k_center = center[0][0],
		.k_high_channels = k[0],
		.v_high_channels = v[0],
	};
	struct kv_pool_spec *spec = spec_of(
		given_pool(json, sizeof(json), "\"k\":\"turboquant35\",\"v\":\"turboquant35\"", true, NULL));
	struct tqkv_codec *codec = make(spec, &params);

	for (uint32_t i = 0; i < 4; i++)
		check_layer(codec, spec, i / 2, i % 2 != 0, &state);
	tqkv_codec_destroy(codec);
	params.v_high_channels = NULL;
	ck_assert_int_eq(try_make(spec->canonical_json, &params, message), TQKV_FORMAT_MISMATCH);
	ck_assert_ptr_nonnull(strstr(message, "v_channels"));
	params.k_center = NULL;
	ck_assert_int_eq(try_make(spec->canonical_json, &params, message), TQKV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(message, "k_center"));
	kv_pool_spec_destroy(spec);

	spec = spec_of("{" GEOMETRY ",\"layers\":1,\"head_dim\":32,\"k\":\"tq4\",\"v\":\"f32\",\"rotation\":"
		       "\"qr\",\"seed\":5}");
	matrix_of(spec->layers[0].k, matrix);
	kv_pool_spec_destroy(spec);
	spec = spec_of(given_pool(json, sizeof(json), "\"k\":\"tq4\",\"v\":\"tqp3\"", false, matrix));
	params = (struct tqkv_codec_params){
		.k_center = center[0][0], .k_rotation = matrix, .v_rotation = matrix
	};
	codec = make(spec, &params);
	for (uint32_t i = 0; i < 4; i++)
		check_layer(codec, spec, i / 2, i % 2 != 0, &state);
	tqkv_codec_destroy(codec);
	center[1][0][3] = 7;
	ck_assert_int_eq(try_make(spec->canonical_json, &params, message), TQKV_FORMAT_MISMATCH);
	ck_assert_ptr_nonnull(strstr(message, "k_center"));
	params.k_rotation = NULL;
	ck_assert_int_eq(try_make(spec->canonical_json, &params, message), TQKV_BAD_ARG);
	ck_assert_ptr_nonnull(strstr(message, "k_rotation"));
	kv_pool_spec_destroy(spec);
}
END_TEST

/* A given matrix in place of the computed one of qr makes the same bytes. */
START_TEST(test_client_codec_takes_the_matrix_of_qr)
{
	static float matrix[80 * 80];
	struct kv_pool_spec *spec =
		spec_of("{" GEOMETRY ",\"layers\":2,\"head_dim\":80,\"k\":\"tq4\",\"v\":\"tqp4\"}");
	struct tqkv_codec_params params = { .k_rotation = matrix, .v_rotation = matrix };
	uint64_t state = 20240603;
	char message[512];

	matrix_of(spec->layers[0].k, matrix);

	struct tqkv_codec *codec = make(spec, &params);

	for (uint32_t i = 0; i < 4; i++)
		check_layer(codec, spec, i / 2, i % 2 != 0, &state);
	tqkv_codec_destroy(codec);
	matrix[17] = nextafterf(matrix[17], 1);
	ck_assert_int_eq(try_make(spec->canonical_json, &params, message), TQKV_FORMAT_MISMATCH);
	ck_assert_ptr_nonnull(strstr(message, "k_rotation"));
	kv_pool_spec_destroy(spec);
}
END_TEST

/* Whatever hash of the JSON is another one, no codec is handed out, and the member is named. */
START_TEST(test_client_codec_compares_every_hash)
{
	static const char *const names[] = { "k_codebook", "k_projection", "v_codebook", "v_channels" };
	struct kv_pool_spec *spec =
		spec_of("{" GEOMETRY ",\"layers\":1,\"head_dim\":64,\"k\":\"tqp3\",\"v\":\"turboquant35\"}");
	char json[2048], message[512];

	for (uint32_t i = 0; i < 4; i++) {
		snprintf(json, sizeof(json), "%s", spec->canonical_json);

		char *at = strstr(json, names[i]);

		ck_assert_ptr_nonnull(at);
		at += strlen(names[i]) + 3; /* the first digit, behind ":" and quotes */
		*at = *at == '0' ? '1' : '0';
		ck_assert_int_eq(try_make(json, NULL, message), TQKV_FORMAT_MISMATCH);
		ck_assert_msg(strstr(message, names[i]) != NULL, "%s: %s", names[i], message);
	}
	kv_pool_spec_destroy(spec);
}
END_TEST

/* Text that is not understood to its end makes no codec: cut off anywhere, or with a member of the future. */
START_TEST(test_client_codec_refuses_other_texts)
{
	static const char *const texts[] = { "", "{", "{}", "[]", "null", "{\"k\"}", "{\"k\":}", "{,}",
		"{\"layers\":1,}", "{\"layers\":1]" };
	struct kv_pool_spec *spec = spec_of(pools[3]);
	const size_t n_bytes = strlen(spec->canonical_json);
	char json[4096], message[512];

	for (uint32_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
		ck_assert_int_eq(try_make(texts[i], NULL, message), TQKV_BAD_ARG);
	for (size_t n = 0; n < n_bytes; n++) {
		snprintf(json, sizeof(json), "%.*s", (int)n, spec->canonical_json);
		ck_assert_msg(try_make(json, NULL, message) != TQKV_OK, "%s", json);
	}
	snprintf(json, sizeof(json),
		"{\"a_new_\x1b"
		"thing\":1,%s",
		spec->canonical_json + 1);
	ck_assert_int_eq(try_make(json, NULL, message), TQKV_UNSUPPORTED);
	ck_assert_ptr_nonnull(strstr(message, "a_new_?thing"));
	kv_pool_spec_destroy(spec);
}
END_TEST

/* Bytes changed at random give an error or a codec, never anything else (for the sanitizers). */
START_TEST(test_client_codec_survives_changed_texts)
{
	struct kv_pool_spec *spec = spec_of(pools[_i]);
	const size_t n_bytes = strlen(spec->canonical_json);
	uint64_t state = 20240604 + (uint64_t)_i;
	char json[4096], message[512];

	ck_assert_uint_lt(n_bytes, sizeof(json));
	for (uint32_t round = 0; round < 300; round++) {
		static const char bytes[] = "{}[]\",:\\0123456789tqv\x01";

		memcpy(json, spec->canonical_json, n_bytes + 1);
		for (uint32_t i = 0; i <= round % 3; i++)
			json[kv_test_random(&state) % n_bytes] =
				bytes[kv_test_random(&state) % (sizeof(bytes) - 1)];
		(void)try_make(json, NULL, message);
	}
	kv_pool_spec_destroy(spec);
}
END_TEST

/* Wrong sizes and bad rows are errors that say which token and head; a bad row leaves its output alone. */
START_TEST(test_client_codec_names_bad_rows)
{
	struct kv_pool_spec *spec = spec_of(pools[0]);
	struct tqkv_codec *codec = make(spec, NULL);
	static float rows[3 * 2 * 64], back[3 * 2 * 64];
	uint8_t packed[3 * 2 * 36];
	struct tqkv_error err;

	memset(packed, 0xEE, sizeof(packed));
	rows[(2 * 2 + 1) * 64 + 5] = NAN;
	ck_assert_int_eq(tqkv_codec_encode(codec, 1, false, TQKV_F32, rows, sizeof(rows), 3, packed,
				 sizeof(packed), &err),
		TQKV_BAD_VALUE);
	ck_assert_uint_eq(err.item, 2);
	ck_assert_msg(strstr(err.message, "token 2, KV head 1") != NULL, "%s", err.message);
	ck_assert_uint_eq(packed[5 * 36], 0xEE);
	rows[(2 * 2 + 1) * 64 + 5] = 0;
	ck_assert_int_eq(tqkv_codec_encode(codec, 1, false, TQKV_F32, rows, sizeof(rows), 3, packed,
				 sizeof(packed), &err),
		TQKV_OK);
	packed[3 * 36 - 1] |= 0x80; /* a negative norm */
	ck_assert_int_eq(tqkv_codec_decode(codec, 1, false, TQKV_F32, packed, sizeof(packed), 3, back,
				 sizeof(back), &err),
		TQKV_BAD_VALUE);
	ck_assert_msg(strstr(err.message, "token 1, KV head 0") != NULL, "%s", err.message);

	ck_assert_int_eq(tqkv_codec_encode(codec, 2, false, TQKV_F32, rows, sizeof(rows), 3, packed,
				 sizeof(packed), &err),
		TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_codec_encode(codec, 0, false, TQKV_PACKED, rows, sizeof(rows), 3, packed,
				 sizeof(packed), &err),
		TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_codec_encode(codec, 0, false, TQKV_F32, rows, sizeof(rows) - 4, 3, packed,
				 sizeof(packed), &err),
		TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_codec_encode(codec, 0, false, TQKV_F32, rows, sizeof(rows), 3, packed,
				 sizeof(packed) - 1, &err),
		TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_codec_decode(codec, 0, false, TQKV_F32, packed, sizeof(packed) - 1, 3, back,
				 sizeof(back), &err),
		TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_codec_decode(codec, 0, false, TQKV_F32, packed, sizeof(packed), 3, back,
				 sizeof(back) - 1, &err),
		TQKV_BAD_ARG);
	ck_assert_int_eq(tqkv_codec_encode(codec, 0, false, TQKV_F32, NULL, 0, 0, NULL, 0, &err), TQKV_OK);
	tqkv_codec_destroy(codec);
	kv_pool_spec_destroy(spec);
	tqkv_codec_destroy(NULL);
}
END_TEST

/* A codec from a server: its JSON is asked for, and what is in it is all that counts. */
START_TEST(test_client_codec_from_a_server)
{
	struct kv_pool_spec *spec = spec_of(pools[8]);
	struct fake_server fake;
	struct tqkv_conn *conn;
	struct tqkv_codec *codec = NULL;
	struct tqkv_error err = { .message = "" };
	uint64_t state = 20240605;

	fake_start(&fake);
	fake_lock(&fake);
	fake.pool_json = spec->canonical_json;
	fake_unlock(&fake);
	ck_assert_int_eq(tqkv_connect(fake.address, NULL, &conn, NULL), TQKV_OK);
	ck_assert_msg(tqkv_codec_create(conn, "p", NULL, 5000, &codec, &err) == TQKV_OK, "%s", err.message);
	for (uint32_t i = 0; i < 2 * spec->n_layers; i++)
		check_layer(codec, spec, i / 2, i % 2 != 0, &state);
	tqkv_codec_destroy(codec);
	fake_lock(&fake);
	fake.pool_json = "{\"layers\":[]}";
	fake_unlock(&fake);
	ck_assert_int_eq(tqkv_codec_create(conn, "p", NULL, 5000, &codec, &err), TQKV_BAD_ARG);
	tqkv_disconnect(conn);
	fake_stop(&fake);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* Channels with more bits, by hand from FORMATS 5.4. */
START_TEST(test_client_codec_high_channels)
{
	ck_assert_uint_eq(tqkv_codec_high_channels("turboquant25", 128), 32);
	ck_assert_uint_eq(tqkv_codec_high_channels("turboquant35", 80), 32);
	ck_assert_uint_eq(tqkv_codec_high_channels("turboquant25", 16), 0);
	ck_assert_uint_eq(tqkv_codec_high_channels("tq4", 128), 0);
	ck_assert_uint_eq(tqkv_codec_high_channels("nothing", 128), 0);
}
END_TEST

int main(void)
{
	const int n_pools = (int)(sizeof(pools) / sizeof(pools[0]));
	Suite *suite = suite_create("client_codec");
	TCase *tcase = tcase_create("codec");

	tcase_add_loop_test(tcase, test_client_codec_packs_as_the_pool, 0, n_pools);
	tcase_add_test(tcase, test_client_codec_bytes_by_hand);
	tcase_add_test(tcase, test_client_codec_takes_what_the_json_has_by_hash);
	tcase_add_test(tcase, test_client_codec_takes_the_matrix_of_qr);
	tcase_add_test(tcase, test_client_codec_compares_every_hash);
	tcase_add_test(tcase, test_client_codec_refuses_other_texts);
	tcase_add_loop_test(tcase, test_client_codec_survives_changed_texts, 0, n_pools);
	tcase_add_test(tcase, test_client_codec_names_bad_rows);
	tcase_add_test(tcase, test_client_codec_from_a_server);
	tcase_add_test(tcase, test_client_codec_high_channels);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_NOFORK);
}
