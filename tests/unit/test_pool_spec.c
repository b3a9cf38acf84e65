#include "core/pool_spec.h"

#include <math.h>

#include "core/format.h"
#include "core/memory.h"
#include "tests/lib/kv_core_test.h"

#define SMOL "name=smol,layers=30,q_heads=9,kv_heads=3,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=4096"

/* The JSON of the short form with one more or replaced member, as JSON text; NULL text removes it. */
static json_t *with(const char *text, const char *member, const char *value)
{
	json_t *json = NULL;

	kv_assert_ok(kv_pool_spec_parse_short(text, &json, NULL));
	if (value)
		ck_assert_int_eq(
			json_object_set_new(json, member, json_loads(value, JSON_DECODE_ANY, NULL)), 0);
	else
		ck_assert_int_eq(json_object_del(json, member), 0);
	return json;
}

/* The pool of the issue: every field follows from the short form, options have their defaults. */
START_TEST(test_pool_spec_short_form_gives_the_pool)
{
	struct kv_pool_spec *spec = kv_test_spec(SMOL, NULL);
	uint64_t n_bytes = 0;

	ck_assert_str_eq(spec->name, "smol");
	ck_assert_uint_eq(spec->n_layers, 30);
	ck_assert_uint_eq(spec->q_heads, 9);
	ck_assert_uint_eq(spec->kv_heads, 3);
	ck_assert_uint_eq(spec->k_head_dim, 64);
	ck_assert_uint_eq(spec->v_head_dim, 64);
	ck_assert_uint_eq(spec->block_size, 16);
	ck_assert_uint_eq(spec->n_groups, 1);
	ck_assert_uint_eq(spec->n_blocks[0], 4096);
	ck_assert_uint_eq(spec->tokens_max, 65536);
	for (uint32_t l = 0; l < 30; l++) {
		ck_assert_str_eq(spec->layers[l].k->format->name, "tq4");
		ck_assert_ptr_eq(spec->layers[l].v, spec->layers[0].k);
		ck_assert_uint_eq(spec->layers[l].group_idx, 0);
		ck_assert_uint_eq(spec->layers[l].window, 0);
		ck_assert_float_eq(spec->layers[l].scale, 0.125f);
	}
	ck_assert_uint_eq(spec->layers[0].k->rotation->seed, 42);
	ck_assert_uint_eq(spec->layers[0].k->rotation->head_dim, 64);
	ck_assert(!spec->has_k_center && !spec->has_head_codecs);
	/* 64 channels of 4 bits and a float32 norm: 36 bytes; K and V, 3 heads, 30 layers */
	ck_assert_uint_eq(spec->token_bytes[0], 30 * 3 * 2 * 36);
	ck_assert(kv_pool_spec_page_bytes(spec, &n_bytes));
	ck_assert_uint_eq(n_bytes, 30ull * 3 * 2 * 36 * 16 * 4096);
	kv_pool_spec_destroy(spec);
	kv_pool_spec_destroy(NULL);
}
END_TEST

/* Options: K and V dims and formats of their own, groups, scale, seed, tokens_max. */
START_TEST(test_pool_spec_options_are_taken)
{
	struct kv_pool_spec *spec = kv_test_spec(
		"name=a.b_c:d-1,layers=4,q_heads=8,kv_heads=2,k_head_dim=128,v_head_dim=64,k=tq4,v=tq4,"
		"block_size=64,blocks=10,scale=0.5,seed=7,tokens_max=100,model=m",
		"[[3,1],[0],[2]]");

	ck_assert_uint_eq(spec->k_head_dim, 128);
	ck_assert_uint_eq(spec->v_head_dim, 64);
	ck_assert_uint_eq(spec->layers[0].k->rotation->head_dim, 128);
	ck_assert_uint_eq(spec->layers[0].v->rotation->head_dim, 64);
	ck_assert_uint_eq(spec->layers[0].v->rotation->seed, 7);
	ck_assert_ptr_eq(spec->layers[2].k, spec->layers[0].k);
	ck_assert_ptr_eq(spec->layers[2].v, spec->layers[0].v);
	ck_assert_float_eq(spec->layers[3].scale, 0.5f);
	ck_assert_uint_eq(spec->tokens_max, 100);
	/* groups are numbered by their first layers */
	ck_assert_uint_eq(spec->n_groups, 3);
	ck_assert_uint_eq(spec->layers[0].group_idx, 0);
	ck_assert_uint_eq(spec->layers[1].group_idx, 1);
	ck_assert_uint_eq(spec->layers[2].group_idx, 2);
	ck_assert_uint_eq(spec->layers[3].group_idx, 1);
	ck_assert_uint_eq(spec->n_blocks[2], 10);
	ck_assert_uint_eq(spec->token_bytes[1], 2 * 2 * ((64 + 4) + (32 + 4)));
	kv_pool_spec_destroy(spec);

	spec = kv_test_spec("name=x,layers=1,q_heads=1,kv_heads=1,k_head_dim=48,v_head_dim=128,k=f32,v=tq4,"
			    "block_size=32,blocks=1",
		NULL);
	ck_assert_uint_eq(spec->layers[0].v->rotation->head_dim, 128);
	ck_assert_ptr_null(spec->layers[0].k->rotation);
	ck_assert_float_eq(spec->layers[0].scale, (float)(1.0 / sqrt(48.0)));
	kv_pool_spec_destroy(spec);

	/* more slots than a length can count */
	spec = kv_test_spec("name=x,layers=1,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,"
			    "block_size=16,blocks=1073741824",
		NULL);
	ck_assert_ptr_null(spec->layers[0].v->rotation);
	ck_assert_uint_eq(spec->rotation_bytes, 0);
	ck_assert_uint_eq(spec->tokens_max, UINT32_MAX - 1);
	kv_pool_spec_destroy(spec);
}
END_TEST

/*
 * Canonical texts and fingerprints equal those of an independent program: sorted compact JSON by Python,
 * matrices from tests/golden/reference.py, hashes by the xxHash library.
 */
START_TEST(test_pool_spec_canonical_text_is_golden)
{
	struct kv_pool_spec *spec = kv_test_spec(
		"name=smol,layers=3,q_heads=9,kv_heads=3,head_dim=64,k=tq4,v=tq4,block_size=16,blocks=9",
		NULL);

	ck_assert_str_eq(spec->canonical_json,
		"{\"block_size\":16,\"groups\":[[0,1,2]],\"k\":\"tq4\","
		"\"k_codebook\":\"f5a8c784fb4f0994805bb7eb65b3e617\",\"k_head_dim\":64,"
		"\"k_rotation\":{\"kind\":\"rht\",\"matrix\":\"968385dfb392871661b9bab24006f353\",\"seed\":"
		"42},"
		"\"kv_heads\":3,\"layers\":3,\"model\":\"\",\"q_heads\":9,\"scale\":\"3e000000\",\"v\":"
		"\"tq4\","
		"\"v_codebook\":\"f5a8c784fb4f0994805bb7eb65b3e617\",\"v_head_dim\":64,"
		"\"v_rotation\":{\"kind\":\"rht\",\"matrix\":\"968385dfb392871661b9bab24006f353\",\"seed\":"
		"42}}");
	ck_assert_uint_eq(spec->canonical_json_bytes, strlen(spec->canonical_json));
	ck_assert_uint_eq(spec->fingerprint, 0x48fbb29a74d13fb0ull);
	kv_pool_spec_destroy(spec);

	json_t *json =
		with("name=mix,layers=3,q_heads=4,kv_heads=2,k_head_dim=48,v_head_dim=128,k=bf16,v=tq4,"
		     "block_size=32,blocks=8,seed=7,scale=0.25",
			"groups", "[[1],[2,0]]");

	json_object_set_new(json, "model",
		json_string("m\xC3\xB6"
			    "del \"x\""));
	kv_assert_ok(kv_pool_spec_create(json, &spec, NULL));
	json_decref(json);
	ck_assert_str_eq(spec->canonical_json,
		"{\"block_size\":32,\"groups\":[[0,2],[1]],\"k\":\"bf16\",\"k_head_dim\":48,\"kv_heads\":2,"
		"\"layers\":3,\"model\":\"m\xC3\xB6"
		"del \\\"x\\\"\",\"q_heads\":4,\"scale\":\"3e800000\",\"v\":\"tq4\","
		"\"v_codebook\":\"71653208c0ac4d232336b450742f4758\",\"v_head_dim\":128,"
		"\"v_rotation\":{\"kind\":\"rht\",\"matrix\":\"3b4d98f47bc966a2d4d16252482a02a8\",\"seed\":7}"
		"}");
	ck_assert_uint_eq(spec->fingerprint, 0xa438f2542f32bab0ull);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* What does not decide bytes or results leaves the fingerprint alone; everything else changes it. */
START_TEST(test_pool_spec_fingerprint_covers_what_decides_bytes)
{
	static const struct {
		const char *member, *value;
		bool is_same;
	} rows[] = {
		{ "name", "\"other\"", true },
		{ "blocks", "17", true },
		{ "tokens_max", "5", true },
		{ "seed", "42", true },
		{ "scale", "0.125", true },
		{ "model", "\"\"", true },
		{ "groups",
			"[[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23,24,25,26,27,28,29]]",
			true },
		{ "layers", "29", false },
		{ "q_heads", "6", false },
		{ "kv_heads", "9", false },
		{ "head_dim", "128", false },
		{ "k", "\"bf16\"", false },
		{ "v", "\"f32\"", false },
		{ "block_size", "32", false },
		{ "seed", "43", false },
		{ "scale", "0.126", false },
		{ "model", "\"m\"", false },
		{ "groups",
			"[[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14],[15,16,17,18,19,20,21,22,23,24,25,26,27,28,29]"
			"]",
			false },
	};
	struct kv_pool_spec *base = kv_test_spec(SMOL, NULL);

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_pool_spec *spec = NULL;
		json_t *json = with(SMOL, rows[i].member, rows[i].value);

		kv_assert_ok(kv_pool_spec_create(json, &spec, NULL));
		ck_assert_msg(
			(spec->fingerprint == base->fingerprint) == rows[i].is_same, "%s", rows[i].member);
		kv_pool_spec_destroy(spec);
		json_decref(json);
	}
	kv_pool_spec_destroy(base);
}
END_TEST

/* What is changed in the pool of the issue, and how it is refused. */
static const struct {
	const char *member, *value; /* NULL: the member is removed */
	enum kv_status status;
	const char *msg;
} refusals[] = {
	{ "head_dim", "20", KV_BAD_CONFIG,
		"pool \"smol\": head_dim 20: expected a multiple of 16 from 16 to 256" },
	{ "head_dim", "0", KV_BAD_CONFIG,
		"pool \"smol\": head_dim 0: expected a multiple of 16 from 16 to 256" },
	{ "head_dim", "272", KV_BAD_CONFIG,
		"pool \"smol\": head_dim 272: expected a multiple of 16 from 16 to 256" },
	{ "head_dim", "-16", KV_BAD_CONFIG,
		"pool \"smol\": head_dim -16: expected a multiple of 16 from 16 to 256" },
	{ "head_dim", "64.0", KV_BAD_CONFIG,
		"pool \"smol\": head_dim 64: expected a multiple of 16 from 16 to 256" },
	{ "head_dim", NULL, KV_BAD_CONFIG,
		"pool \"smol\": head_dim is missing: expected a multiple of 16 from 16 to 256" },
	{ "k_head_dim", "64", KV_BAD_CONFIG,
		"pool \"smol\": head_dim: expected either head_dim or k_head_dim and v_head_dim" },
	{ "name", NULL, KV_BAD_CONFIG,
		"pool: name is missing: expected 1 to 64 characters of A-Z a-z 0-9 . _ : -" },
	{ "name", "\"a b\"", KV_BAD_CONFIG,
		"pool: name \"a b\": expected 1 to 64 characters of A-Z a-z 0-9 . _ : -" },
	{ "name", "\"a\\nb\\u007f\"", KV_BAD_CONFIG,
		"pool: name \"a?b?\": expected 1 to 64 characters of A-Z a-z 0-9 . _ : -" },
	{ "name", "\"\"", KV_BAD_CONFIG,
		"pool: name \"\": expected 1 to 64 characters of A-Z a-z 0-9 . _ : -" },
	{ "name", "\"01234567890123456789012345678901234567890123456789012345678901234\"", KV_BAD_CONFIG,
		"pool: name \"0123456789012345678901234567890123456789012345678901234567890123..\": "
		"expected 1 to 64 characters of A-Z a-z 0-9 . _ : -" },
	{ "name", "{}", KV_BAD_CONFIG,
		"pool: name is an object: expected 1 to 64 characters of A-Z a-z 0-9 . _ : -" },
	{ "blocksize", "16", KV_BAD_CONFIG, "pool \"smol\": unknown member \"blocksize\"" },
	{ "layers", "0", KV_BAD_CONFIG, "pool \"smol\": layers 0: expected an integer from 1 to 1024" },
	{ "layers", "1025", KV_BAD_CONFIG, "pool \"smol\": layers 1025: expected an integer from 1 to 1024" },
	{ "layers", "\"30\"", KV_BAD_CONFIG,
		"pool \"smol\": layers \"30\": expected an integer from 1 to 1024" },
	{ "layers", "null", KV_BAD_CONFIG,
		"pool \"smol\": layers is null: expected an integer from 1 to 1024" },
	{ "layers", "[1]", KV_BAD_CONFIG,
		"pool \"smol\": layers is an array: expected an integer from 1 to 1024" },
	{ "layers", "true", KV_BAD_CONFIG,
		"pool \"smol\": layers is true: expected an integer from 1 to 1024" },
	{ "layers", "9223372036854775807", KV_BAD_CONFIG,
		"pool \"smol\": layers 9223372036854775807: expected an integer from 1 to 1024" },
	{ "q_heads", "10", KV_BAD_CONFIG, "pool \"smol\": q_heads 10: expected a multiple of kv_heads 3" },
	{ "kv_heads", "2000", KV_BAD_CONFIG,
		"pool \"smol\": kv_heads 2000: expected an integer from 1 to 1024" },
	{ "block_size", "17", KV_BAD_CONFIG, "pool \"smol\": block_size 17: expected 16, 32 or 64" },
	{ "block_size", NULL, KV_BAD_CONFIG, "pool \"smol\": block_size is missing: expected 16, 32 or 64" },
	{ "blocks", "0", KV_BAD_CONFIG, "pool \"smol\": blocks 0: expected an integer from 1 to 1073741824" },
	{ "blocks", "1073741825", KV_BAD_CONFIG,
		"pool \"smol\": blocks 1073741825: expected an integer from 1 to 1073741824" },
	{ "tokens_max", "65537", KV_BAD_CONFIG,
		"pool \"smol\": tokens_max 65537: expected an integer from 1 to 65536" },
	{ "tokens_max", "0", KV_BAD_CONFIG,
		"pool \"smol\": tokens_max 0: expected an integer from 1 to 65536" },
	{ "seed", "4294967296", KV_BAD_CONFIG,
		"pool \"smol\": seed 4294967296: expected an integer from 0 to 4294967295" },
	{ "scale", "-1", KV_BAD_CONFIG,
		"pool \"smol\": scale -1: expected a float32 number above 0 and up to 1e38" },
	{ "scale", "1e40", KV_BAD_CONFIG,
		"pool \"smol\": scale 1e+40: expected a float32 number above 0 and up to 1e38" },
	{ "scale", "1e-60", KV_BAD_CONFIG,
		"pool \"smol\": scale 1e-60: expected a float32 number above 0 and up to 1e38" },
	{ "scale", "false", KV_BAD_CONFIG,
		"pool \"smol\": scale is false: expected a float32 number above 0 and up to 1e38" },
	{ "model", "5", KV_BAD_CONFIG, "pool \"smol\": model 5: expected a text of at most 256 bytes" },
	{ "v", "4", KV_BAD_CONFIG, "pool \"smol\": v 4: expected the name of a row format" },
	{ "groups", "5", KV_BAD_CONFIG,
		"pool \"smol\": groups 5: expected an array of 1 to 8 arrays of layer numbers" },
	{ "groups", "[]", KV_BAD_CONFIG,
		"pool \"smol\": groups is an array: expected an array of 1 to 8 arrays of layer "
		"numbers" },
	{ "groups", "[[0],[]]", KV_BAD_CONFIG,
		"pool \"smol\": groups[1] is an array: expected an array with at least one layer "
		"number" },
	{ "groups", "[[0],1]", KV_BAD_CONFIG,
		"pool \"smol\": groups[1] 1: expected an array with at least one layer number" },
	{ "groups", "[[0,30]]", KV_BAD_CONFIG,
		"pool \"smol\": groups[0][1] 30: expected a layer number from 0 to 29" },
	{ "groups", "[[0,\"1\"]]", KV_BAD_CONFIG,
		"pool \"smol\": groups[0][1] \"1\": expected a layer number from 0 to 29" },
	{ "groups", "[[0,1],[2,1]]", KV_BAD_CONFIG,
		"pool \"smol\": groups[1][1] 1: expected every layer once" },
	{ "groups", "[[0,1],[2]]", KV_BAD_CONFIG,
		"pool \"smol\": groups: layer 3 is in none, expected every layer once" },
	{ "groups", "[[0],[1],[2],[3],[4],[5],[6],[7],[8]]", KV_BAD_CONFIG,
		"pool \"smol\": groups is an array: expected an array of 1 to 8 arrays of layer "
		"numbers" },
};

/* Every refusal names pool, member, value and what was expected, and leaves the output alone. */
START_TEST(test_pool_spec_refusals_name_the_member)
{
	for (uint32_t i = 0; i < KV_LENGTH(refusals); i++) {
		struct kv_pool_spec *spec = NULL;
		struct kv_error err = { 0 };
		json_t *json = with(SMOL, refusals[i].member, refusals[i].value);

		kv_assert_status(kv_pool_spec_create(json, &spec, &err), refusals[i].status);
		kv_assert_status(err.status, refusals[i].status);
		ck_assert_ptr_null(spec);
		ck_assert_str_eq(err.msg, refusals[i].msg);
		kv_assert_status(kv_pool_spec_create(json, &spec, NULL), refusals[i].status);
		json_decref(json);
	}
}
END_TEST

/* A format that is not served at a dim is refused when the pool is made, with the format's own reason. */
START_TEST(test_pool_spec_formats_say_why_not)
{
	static const uint32_t dims[] = { 16, 48, 64, 96, 256 };

	for (uint32_t i = 0; i < kv_format_count() * KV_LENGTH(dims); i++) {
		const struct kv_format *format = kv_format_at(i / KV_LENGTH(dims));
		const uint32_t head_dim = dims[i % KV_LENGTH(dims)];
		struct kv_error cause = { 0 }, err = { 0 };
		enum kv_status status = kv_format_check(format, head_dim, &cause);
		struct kv_pool_spec *spec = NULL;
		char start[96];
		json_t *json = with(SMOL, "k", "\"bf16\"");

		if (status != KV_OK && status != KV_UNSUPPORTED)
			status = KV_BAD_CONFIG;
		json_object_set_new(json, "v", json_string(format->name));
		json_object_set_new(json, "head_dim", json_integer(head_dim));
		kv_assert_status(kv_pool_spec_create(json, &spec, &err), status);
		if (status != KV_OK) {
			snprintf(start, sizeof(start), "pool \"smol\": v \"%s\": ", format->name);
			ck_assert_ptr_eq(strstr(err.msg, start), err.msg);
			ck_assert_str_eq(err.msg + strlen(start), cause.msg);
		}
		kv_pool_spec_destroy(spec);
		json_decref(json);
	}
}
END_TEST

/* Unknown formats are named without control characters; what is no object is no pool. */
START_TEST(test_pool_spec_unknown_formats_are_named)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { 0 };
	json_t *json = with(SMOL, "k", "\"tq\\n9\"");

	kv_assert_status(kv_pool_spec_create(json, &spec, &err), KV_BAD_CONFIG);
	ck_assert_ptr_eq(strstr(err.msg, "pool \"smol\": k \"tq?9\": unknown row format \"tq?9\""), err.msg);
	ck_assert_ptr_nonnull(strstr(err.msg, "tq4"));
	json_decref(json);
	json = json_array();
	kv_assert_status(kv_pool_spec_create(json, &spec, &err), KV_BAD_CONFIG);
	ck_assert_str_eq(err.msg, "pool: expected an object");
	kv_assert_status(kv_pool_spec_create(NULL, &spec, &err), KV_BAD_CONFIG);
	json_decref(json);
}
END_TEST

/* A pool whose pages no 63-bit number can count is refused when it is made, not when it is used. */
START_TEST(test_pool_spec_page_bytes_are_checked)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { 0 };
	json_t *json = NULL;

	/* 1024 layers * 1024 heads * 2 * 1024 bytes * 64 tokens * 2^30 blocks = 2^67 */
	kv_assert_ok(kv_pool_spec_parse_short(
		"name=big,layers=1024,q_heads=1024,kv_heads=1024,head_dim=256,k=f32,v=f32,block_size=64,"
		"blocks=1073741824",
		&json, NULL));
	kv_assert_status(kv_pool_spec_create(json, &spec, &err), KV_BAD_CONFIG);
	ck_assert_str_eq(
		err.msg, "pool \"big\": blocks 1073741824: expected pages of less than 2^63 bytes in all");
	json_object_set_new(json, "blocks", json_integer(1 << 24));
	kv_assert_ok(kv_pool_spec_create(json, &spec, &err));
	json_decref(json);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* The short form refuses what is not member=value, naming the part. */
START_TEST(test_pool_spec_short_form_refusals_name_the_part)
{
	static const struct {
		const char *text, *msg;
	} rows[] = {
		{ "", "pool: \"\": expected member=value" },
		{ "name=a,", "pool: \"\": expected member=value" },
		{ "name=a,layers", "pool: \"layers\": expected member=value" },
		{ "name=a,layer=3", "pool: \"layer=3\": expected a member of a pool before the '='" },
		{ "=3", "pool: \"=3\": expected a member of a pool before the '='" },
		{ "layers=3,layers=3", "pool: \"layers=3\": expected every member once" },
		{ "layers=", "pool: \"layers=\": expected an integer behind the '='" },
		{ "layers=3x", "pool: \"layers=3x\": expected an integer behind the '='" },
		{ "layers= 3", "pool: \"layers= 3\": expected an integer behind the '='" },
		{ "layers=3.5", "pool: \"layers=3.5\": expected an integer behind the '='" },
		{ "layers=99999999999999999999",
			"pool: \"layers=99999999999999999999\": expected an integer behind the '='" },
		{ "scale=inf", "pool: \"scale=inf\": expected a number behind the '='" },
		{ "scale=0x1p3", "pool: \"scale=0x1p3\": expected a number behind the '='" },
		{ "scale=1e999", "pool: \"scale=1e999\": expected a number behind the '='" },
		{ "groups=0", "pool: \"groups=0\": expected no lists here: use the configuration file" },
		{ "model=\xFF", "pool: \"model=\xFF\": expected UTF-8 text behind the '='" },
	};
	char longer[500];

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_error err = { 0 };
		json_t *json = NULL;

		kv_assert_status(kv_pool_spec_parse_short(rows[i].text, &json, &err), KV_BAD_CONFIG);
		ck_assert_str_eq(err.msg, rows[i].msg);
		ck_assert_ptr_null(json);
	}
	memset(longer, 'm', sizeof(longer) - 1);
	longer[sizeof(longer) - 1] = '\0';
	kv_assert_status(kv_pool_spec_parse_short(longer, &(json_t *){ NULL }, NULL), KV_BAD_CONFIG);
}
END_TEST

static void *counted_malloc(size_t n_bytes)
{
	return kv_alloc(1, n_bytes);
}

/*
 * When the k-th allocation fails, jansson's included, the answer is NO_MEMORY and nothing leaks, for every k.
 */
START_TEST(test_pool_spec_survives_every_failed_allocation)
{
	struct kv_pool_spec *spec = NULL;
	uint32_t n_failed = 0;

	json_set_alloc_funcs(counted_malloc, kv_free);

	json_t *json = with("name=x,layers=2,q_heads=2,kv_heads=1,k_head_dim=64,v_head_dim=128,k=tq4,v=tq4,"
			    "block_size=16,blocks=4,model=m",
		"groups", "[[0],[1]]");

	for (int64_t k = 0;; k++) {
		struct kv_error err = { 0 };

		kv_alloc_fail_after(k);
		const enum kv_status status = kv_pool_spec_create(json, &spec, &err);

		kv_alloc_fail_after(-1);
		if (status == KV_OK)
			break;
		kv_assert_status(status, KV_NO_MEMORY);
		kv_assert_status(err.status, KV_NO_MEMORY);
		ck_assert_ptr_null(spec);
		n_failed++;
	}
	ck_assert_uint_gt(n_failed, 20);
	kv_pool_spec_destroy(spec);
	json_decref(json);
	for (int64_t k = 0;; k++) {
		json = NULL;
		kv_alloc_fail_after(k);
		const enum kv_status status = kv_pool_spec_parse_short(SMOL, &json, NULL);

		kv_alloc_fail_after(-1);
		if (status == KV_OK)
			break;
		ck_assert_ptr_null(json);
	}
	json_decref(json);
	json_set_alloc_funcs(malloc, free);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("pool_spec");
	TCase *tcase = tcase_create("pool_spec");

	tcase_add_test(tcase, test_pool_spec_short_form_gives_the_pool);
	tcase_add_test(tcase, test_pool_spec_options_are_taken);
	tcase_add_test(tcase, test_pool_spec_canonical_text_is_golden);
	tcase_add_test(tcase, test_pool_spec_fingerprint_covers_what_decides_bytes);
	tcase_add_test(tcase, test_pool_spec_refusals_name_the_member);
	tcase_add_test(tcase, test_pool_spec_formats_say_why_not);
	tcase_add_test(tcase, test_pool_spec_unknown_formats_are_named);
	tcase_add_test(tcase, test_pool_spec_page_bytes_are_checked);
	tcase_add_test(tcase, test_pool_spec_short_form_refusals_name_the_part);
	tcase_add_test(tcase, test_pool_spec_survives_every_failed_allocation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
