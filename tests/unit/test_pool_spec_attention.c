/* Attention options in a pool's JSON: what layers get, the canonical text, and what is refused. */
#include "core/checked.h"
#include "tests/lib/kv_spec_test.h"

#define POOL                                                                                          \
	"\"name\":\"p\",\"q_heads\":2,\"kv_heads\":1,\"block_size\":16,\"blocks\":4,\"head_dim\":16," \
	"\"k\":\"f32\",\"v\":\"f32\",\"layers\":3"

/* One value serves all layers, an array gives each its own; null and 0 mean none. */
START_TEST(test_pool_spec_attention_of_layers)
{
	struct kv_pool_spec *spec =
		make(POOL ",\"window\":128,\"sink_tokens\":4,\"softcap\":50,\"scale\":0.5,"
			  "\"sinks\":[0.5,-1],\"alibi\":[0.25,0.125]");

	for (uint32_t l = 0; l < 3; l++) {
		const struct kv_layer_spec *layer = &spec->layers[l];

		ck_assert_uint_eq(layer->window, 128);
		ck_assert_uint_eq(layer->sink_tokens, 4);
		ck_assert_float_eq(layer->softcap, 50);
		ck_assert_float_eq(layer->scale, 0.5f);
		ck_assert(layer->sinks[0] == 0.5f && layer->sinks[1] == -1);
		ck_assert(layer->alibi[0] == 0.25f && layer->alibi[1] == 0.125f);
	}
	kv_pool_spec_destroy(spec);
	spec = make(POOL ",\"window\":[128,0,7],\"sink_tokens\":3,\"softcap\":[0,30,0],\"scale\":[1,2,3],"
			 "\"sinks\":[[1,2],null,[3,4]],\"alibi\":[null,[5,6],null]");
	ck_assert_uint_eq(spec->layers[0].window, 128);
	ck_assert_uint_eq(spec->layers[1].window, 0);
	ck_assert_uint_eq(spec->layers[2].window, 7);
	ck_assert_uint_eq(spec->layers[0].sink_tokens, 3);
	ck_assert_uint_eq(spec->layers[1].sink_tokens, 0); /* no window that they could leave */
	ck_assert_uint_eq(spec->layers[2].sink_tokens, 3);
	ck_assert(spec->layers[0].softcap == 0 && spec->layers[1].softcap == 30);
	ck_assert(spec->layers[0].scale == 1 && spec->layers[2].scale == 3);
	ck_assert(spec->layers[0].sinks[1] == 2 && spec->layers[2].sinks[0] == 3);
	ck_assert_ptr_null(spec->layers[1].sinks);
	ck_assert_ptr_null(spec->layers[0].alibi);
	ck_assert(spec->layers[1].alibi[0] == 5);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* The short form has what is one number. */
START_TEST(test_pool_spec_attention_short_form)
{
	struct kv_pool_spec *spec =
		kv_test_spec("name=x,layers=2,q_heads=1,kv_heads=1,head_dim=16,k=f32,v=f32,"
			     "block_size=16,blocks=4,window=64,sink_tokens=1,softcap=1.5",
			NULL);
	struct kv_error err = { .msg = "" };
	json_t *json = NULL;

	ck_assert_uint_eq(spec->layers[1].window, 64);
	ck_assert_uint_eq(spec->layers[1].sink_tokens, 1);
	ck_assert_float_eq(spec->layers[1].softcap, 1.5f);
	kv_pool_spec_destroy(spec);
	kv_assert_status(kv_pool_spec_parse_short("sinks=1", &json, &err), KV_BAD_CONFIG);
	kv_assert_status(kv_pool_spec_parse_short("window=all", &json, &err), KV_BAD_CONFIG);
}
END_TEST

/* Canonical text and fingerprint equal those of an independent program (Python's json, the xxHash library).
 */
START_TEST(test_pool_spec_attention_canonical_text_is_golden)
{
	struct kv_pool_spec *spec =
		make(POOL ",\"window\":[128,0,7],\"sink_tokens\":[4,0,4],\"softcap\":50,"
			  "\"scale\":[0.1,0.2,0.1],\"sinks\":[[0.5,-1],null,[0,8]],\"alibi\":[-0.5,0.25]");

	ck_assert_str_eq(spec->canonical_json,
		"{\"alibi\":\"1bddc544714ebebdedfd5a4f6924aee6\",\"block_size\":16,\"groups\":[[0],[1],[2]],"
		"\"k\":\"f32\",\"k_head_dim\":16,\"kv_heads\":1,\"layers\":3,\"model\":\"\",\"q_heads\":2,"
		"\"scale\":[\"3dcccccd\",\"3e4ccccd\",\"3dcccccd\"],\"sink_tokens\":[4,0,4],"
		"\"sinks\":\"a29e47e3663e2fb2c929b0eae3bd0476\",\"softcap\":\"42480000\",\"v\":\"f32\","
		"\"v_head_dim\":16,\"window\":[128,0,7]}");
	ck_assert_uint_eq(spec->fingerprint, 0x562bfc0c1204c6a7ull);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* What is off has no place in the text, however it is written; what is on has one, and differs. */
START_TEST(test_pool_spec_attention_and_fingerprints)
{
	static const char *const same[] = { ",\"window\":0,\"sink_tokens\":0,\"softcap\":0",
		",\"window\":[0,0,0],\"sinks\":[null,null,null],\"alibi\":[null,null,null]",
		",\"scale\":[0.25,0.25,0.25],\"softcap\":[0,0.0,0]", ",\"sink_tokens\":[0,0,0]" };
	static const char *const others[] = { ",\"window\":1", ",\"window\":[1,0,0]", ",\"window\":[0,1,0]",
		",\"softcap\":1", ",\"softcap\":[1,0,0]", ",\"sinks\":[0,0]", ",\"sinks\":[[0,0],null,null]",
		",\"sinks\":[null,[0,0],null]", ",\"alibi\":[0,0]", ",\"scale\":[0.25,0.25,0.5]",
		",\"window\":1,\"sink_tokens\":1" };
	uint64_t seen[KV_LENGTH(others)];

	for (size_t i = 0; i < KV_LENGTH(same); i++) {
		char text[512];

		snprintf(text, sizeof(text), POOL "%s", same[i]);
		struct kv_pool_spec *spec = make(text);

		ck_assert_uint_eq(
			spec->fingerprint, 0x175d7177fdebebf3ull); /* that of the pool without them */
		kv_pool_spec_destroy(spec);
	}
	for (size_t i = 0; i < KV_LENGTH(others); i++) {
		char text[512];

		snprintf(text, sizeof(text), POOL "%s", others[i]);
		struct kv_pool_spec *spec = make(text);

		seen[i] = spec->fingerprint;
		ck_assert_uint_ne(seen[i], 0x175d7177fdebebf3ull);
		for (size_t j = 0; j < i; j++)
			ck_assert_uint_ne(seen[i], seen[j]);
		kv_pool_spec_destroy(spec);
	}
}
END_TEST

static const struct {
	const char *text, *msg; /* behind `pool "p": ` */
} refusals[] = {
	{ "\"window\":-1", "window -1: expected an integer from 0 to 4294967294" },
	{ "\"window\":4294967295", "window 4294967295: expected an integer from 0 to 4294967294" },
	{ "\"window\":\"all\"", "window \"all\": expected an integer from 0 to 4294967294" },
	{ "\"window\":[1,2]",
		"window is an array: expected one value, or an array with one for each of 3 layers" },
	{ "\"window\":[1,2,0.5]", "window[2] 0.5: expected an integer from 0 to 4294967294" },
	{ "\"window\":[1,2,null]", "window[2] is null: expected an integer from 0 to 4294967294" },
	{ "\"sink_tokens\":4", "sink_tokens 4: expected a window beside it, else no token ever leaves" },
	{ "\"window\":[8,0,8],\"sink_tokens\":[1,1,1]",
		"sink_tokens[1] 1: expected 0 where the layer has no window, which no token leaves" },
	{ "\"softcap\":-1", "softcap -1: expected 0, or a float32 number above 0 and up to 1e38" },
	{ "\"softcap\":1e-60", "softcap 1e-60: expected 0, or a float32 number above 0 and up to 1e38" },
	{ "\"softcap\":[1,1e39,1]",
		"softcap[1] 1e+39: expected 0, or a float32 number above 0 and up to 1e38" },
	{ "\"scale\":[1,0,1]", "scale[1] 0: expected a float32 number above 0 and up to 1e38" },
	{ "\"scale\":[1]",
		"scale is an array: expected one value, or an array with one for each of 3 layers" },
	{ "\"sinks\":1", "sinks 1: expected an array of numbers, or of such arrays" },
	{ "\"sinks\":[]", "sinks is an array: expected an array of numbers, or of such arrays" },
	{ "\"sinks\":[1,2,3]", "sinks is an array: expected an array of 2 numbers, one per query head" },
	{ "\"sinks\":[[1,2],[3,4]]",
		"sinks is an array: expected one value, or an array with one for each of 3 layers" },
	{ "\"sinks\":[[1,2],[3],null]",
		"sinks[1] is an array: expected an array of 2 numbers, one per query head" },
	{ "\"sinks\":[[1,2],[3,4],5]", "sinks[2] 5: expected an array of 2 numbers, one per query head" },
	{ "\"alibi\":[1,\"2\"]", "alibi[1] \"2\": expected a number from -1e+28 to 1e+28" },
	{ "\"sinks\":[1,-3e38]", "sinks[1] -3e+38: expected a number from -1e+38 to 1e+38" },
	{ "\"scale\":2e38", "scale 2e+38: expected a float32 number above 0 and up to 1e38" },
	{ "\"alibi\":[[1,2],[1,1e39],null]", "alibi[1][1] 1e+39: expected a number from -1e+28 to 1e+28" },
};

/* Every refusal says which member, which layer, what was found and what was expected. */
START_TEST(test_pool_spec_attention_refusals)
{
	for (size_t i = 0; i < KV_LENGTH(refusals); i++) {
		struct kv_pool_spec *spec = NULL;
		struct kv_error err = { .msg = "" };
		char text[512];

		snprintf(text, sizeof(text), POOL ",%s", refusals[i].text);
		kv_assert_status(create(text, NULL, &spec, &err), KV_BAD_CONFIG);
		ck_assert_ptr_null(spec);
		ck_assert_msg(strncmp(err.msg, "pool \"p\": ", 10) == 0, "%s", err.msg);
		ck_assert_str_eq(err.msg + 10, refusals[i].msg);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("pool spec attention");
	TCase *tc = tcase_create("options");

	tcase_add_test(tc, test_pool_spec_attention_of_layers);
	tcase_add_test(tc, test_pool_spec_attention_short_form);
	tcase_add_test(tc, test_pool_spec_attention_canonical_text_is_golden);
	tcase_add_test(tc, test_pool_spec_attention_and_fingerprints);
	tcase_add_test(tc, test_pool_spec_attention_refusals);
	suite_add_tcase(suite, tc);
	return kv_test_run(suite, CK_NOFORK);
}
