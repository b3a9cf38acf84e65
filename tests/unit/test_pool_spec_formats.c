/* Formats, rotations and other options of a pool: what they make, what they refuse, what they are hashed to.
 */
#include <math.h>

#include "core/format.h"
#include "core/pool_spec.h"
#include "core/preset.h"
#include "tests/lib/kv_spec_test.h"

static void assert_formats(const struct kv_pool_spec *spec, const char *k, const char *v)
{
	char found[2][256] = { "", "" };

	for (uint32_t l = 0; l < spec->n_layers; l++) {
		for (int i = 0; i < 2; i++) {
			const struct kv_row_codec *codec = i ? spec->layers[l].v : spec->layers[l].k;

			snprintf(found[i] + strlen(found[i]), sizeof(found[i]) - strlen(found[i]), "%s%s",
				l ? " " : "", codec->format->name);
		}
	}
	ck_assert_str_eq(found[0], k);
	ck_assert_str_eq(found[1], v);
}

/* ---- formats of layers ---- */

/* Presets are pairs of formats that exist, each name once, and are listed where one is unknown. */
START_TEST(test_pool_spec_presets_name_formats)
{
	const struct kv_preset *preset = NULL;
	const struct kv_format *format;
	struct kv_error err = { .msg = "" };

	ck_assert_uint_eq(kv_preset_count(), 6);
	for (uint32_t i = 0; i < kv_preset_count(); i++) {
		kv_assert_ok(kv_preset_parse(kv_preset_at(i)->name, &preset, NULL));
		ck_assert_ptr_eq(preset, kv_preset_at(i));
		kv_assert_ok(kv_format_parse(preset->k, &format, NULL));
		kv_assert_ok(kv_format_parse(preset->v, &format, NULL));
	}
	kv_assert_ok(kv_format_parse(KV_PRESET_EXACT, &format, NULL));
	kv_assert_status(kv_preset_parse("5bit", &preset, &err), KV_BAD_ARG);
	ck_assert_str_eq(err.msg, "unknown preset \"5bit\" (known: k8v4, 4bit, k3v4, 3bit, k3v2, 2bit)");
}
END_TEST

/* A name is for all layers, an array has one for each, a preset gives both; exact layers are at both ends. */
START_TEST(test_pool_spec_formats_of_layers)
{
	static const struct {
		const char *text, *k, *v, *k_name, *v_name; /* per layer; of the pool */
	} rows[] = {
		{ "\"layers\":3,\"k\":\"tq3\",\"v\":\"v4\"", "tq3 tq3 tq3", "v4 v4 v4", "tq3", "v4" },
		{ "\"layers\":3,\"k\":[\"tq3\",\"tq3\",\"f16\"],\"v\":\"v4\"", "tq3 tq3 f16", "v4 v4 v4",
			"mixed", "v4" },
		{ "\"layers\":2,\"k\":[\"tqp3\",\"fp8\"],\"v\":[\"turboquant25\",\"v2\"]", "tqp3 fp8",
			"turboquant25 v2", "mixed", "mixed" },
		{ "\"layers\":2,\"preset\":\"k8v4\"", "fp8 fp8", "v4 v4", "fp8", "v4" },
		{ "\"layers\":2,\"preset\":\"4bit\"", "tq4 tq4", "v4 v4", "tq4", "v4" },
		{ "\"layers\":2,\"preset\":\"k3v4\"", "tq3 tq3", "v4 v4", "tq3", "v4" },
		{ "\"layers\":2,\"preset\":\"3bit\"", "tq3 tq3", "v3 v3", "tq3", "v3" },
		{ "\"layers\":2,\"preset\":\"2bit\"", "tq2 tq2", "v2 v2", "tq2", "v2" },
		{ "\"layers\":5,\"preset\":\"k3v2\",\"exact_layers\":2", "bf16 bf16 tq3 bf16 bf16",
			"bf16 bf16 v2 bf16 bf16", "mixed", "mixed" },
		{ "\"layers\":4,\"k\":\"tq4\",\"v\":\"tq4\",\"exact_layers\":1", "bf16 tq4 tq4 bf16",
			"bf16 tq4 tq4 bf16", "mixed", "mixed" },
		{ "\"layers\":1,\"preset\":\"2bit\",\"exact_layers\":0", "tq2", "v2", "tq2", "v2" },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		char text[512];

		snprintf(text, sizeof(text), DIM64 ",%s", rows[i].text);
		struct kv_pool_spec *spec = make(text);
		uint64_t token_bytes = 0;

		assert_formats(spec, rows[i].k, rows[i].v);
		for (uint32_t l = 0; l < spec->n_layers; l++)
			token_bytes += 2ull * (spec->layers[l].k->row_bytes + spec->layers[l].v->row_bytes);
		ck_assert_uint_eq(spec->token_bytes[0], token_bytes);
		ck_assert_str_eq(kv_pool_spec_format_name(spec, false), rows[i].k_name);
		ck_assert_str_eq(kv_pool_spec_format_name(spec, true), rows[i].v_name);
		/* Layers of one format share the codec. */
		for (uint32_t l = 1; l < spec->n_layers; l++)
			ck_assert((spec->layers[l].k == spec->layers[l - 1].k) ==
				(spec->layers[l].k->format == spec->layers[l - 1].k->format));
		kv_pool_spec_destroy(spec);
	}
}
END_TEST

/* ---- rotations ---- */

/* Every kind at dims where it can be; without a wish rht at powers of two and qr elsewhere. */
START_TEST(test_pool_spec_rotation_kinds)
{
	static const struct {
		const char *text;
		enum kv_rotation_kind kind;
	} rows[] = {
		{ "\"head_dim\":64", KV_ROTATION_RHT },
		{ "\"head_dim\":64,\"rotation\":\"rht\"", KV_ROTATION_RHT },
		{ "\"head_dim\":64,\"rotation\":\"qr\",\"seed\":9", KV_ROTATION_QR },
		{ "\"head_dim\":80", KV_ROTATION_QR },
		{ "\"head_dim\":96,\"rotation\":\"qr\"", KV_ROTATION_QR },
		{ "\"head_dim\":240", KV_ROTATION_QR },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		char text[512];

		snprintf(text, sizeof(text), SMALL ",\"layers\":3,\"k\":\"tq4\",\"v\":\"tqp3\",%s",
			rows[i].text);
		struct kv_pool_spec *spec = make(text);

		ck_assert_int_eq(spec->layers[0].k->rotation->kind, rows[i].kind);
		ck_assert_uint_eq(spec->layers[0].k->rotation->seed, strstr(text, "seed") ? 9 : 42);
		/* K and V, and all layers, have one. */
		ck_assert_ptr_eq(spec->layers[2].v->rotation, spec->layers[0].k->rotation);
		kv_pool_spec_destroy(spec);
	}
}
END_TEST

/* per_layer: layer l has the rotation of seed + 1000003 l, for K and V alike, and so its own codecs. */
START_TEST(test_pool_spec_rotation_per_layer)
{
	struct kv_pool_spec *spec = make(
		SMALL ",\"layers\":3,\"k_head_dim\":64,\"v_head_dim\":48,\"k\":\"tq4\",\"v\":[\"tq2\",\"v4\","
		      "\"tq2\"],\"per_layer\":true,\"seed\":7");
	struct kv_pool_spec *shared = make(
		SMALL ",\"layers\":3,\"k_head_dim\":64,\"v_head_dim\":48,\"k\":\"tq4\",\"v\":[\"tq2\",\"v4\","
		      "\"tq2\"],\"per_layer\":false,\"seed\":7");

	for (uint32_t l = 0; l < 3; l++) {
		ck_assert_uint_eq(spec->layers[l].k->rotation->seed, 7 + 1000003 * l);
		ck_assert_uint_eq(shared->layers[l].k->rotation->seed, 7);
	}
	ck_assert_uint_eq(spec->layers[2].v->rotation->seed, 7 + 2000006);
	ck_assert_ptr_null(spec->layers[1].v->rotation);
	ck_assert(spec->layers[0].k != spec->layers[1].k);
	ck_assert_ptr_eq(shared->layers[0].v, shared->layers[2].v);
	ck_assert_uint_ne(spec->fingerprint, shared->fingerprint);
	ck_assert_ptr_nonnull(strstr(spec->canonical_json, "\"per_layer\":true,\"seed\":7"));
	/* rht: signs and factors; qr: a matrix of 48 x 48. Per layer: three and two of them instead of one
	 * each. */
	const uint64_t rht = sizeof(struct kv_rotation), qr = sizeof(struct kv_rotation) + 2 * 48 * 48 * 4;

	ck_assert_uint_eq(shared->rotation_bytes, rht + qr);
	ck_assert_uint_eq(spec->rotation_bytes, 3 * rht + 2 * qr);
	kv_pool_spec_destroy(spec);
	kv_pool_spec_destroy(shared);
}
END_TEST

/* A matrix that is given, in the JSON or as a file, is the rotation; the kind and its hash tell which. */
START_TEST(test_pool_spec_rotation_matrix)
{
	static float matrix[16 * 16];
	char inline_text[8192] =
		SMALL ",\"layers\":1,\"head_dim\":16,\"k\":\"tq4\",\"v\":\"f32\",\"rotation\":\"file\","
		      "\"rotation_matrix\":[";
	struct kv_pool_spec *from_text, *from_file;
	struct kv_error err = { .msg = "" };
	struct kv_pool_spec *spec = NULL;
	float row[16];

	/* A permutation with signs is orthogonal. */
	for (uint32_t i = 0; i < 16; i++)
		matrix[i * 16 + (i * 5 + 3) % 16] = i % 3 ? 1 : -1;
	for (uint32_t i = 0; i < 16; i++) {
		for (uint32_t j = 0; j < 16; j++)
			snprintf(inline_text + strlen(inline_text), 64, "%s%g",
				j           ? ","
					: i ? ",["
					    : "[",
				(double)matrix[i * 16 + j]);
		strcat(inline_text, "]");
	}
	strcat(inline_text, "]");
	put_file("m.f32", (const char *)matrix, sizeof(matrix));
	from_text = make(inline_text);
	from_file =
		make(SMALL ",\"layers\":1,\"head_dim\":16,\"k\":\"tq4\",\"v\":\"f32\",\"rotation\":\"file\","
			   "\"rotation_file\":\"m.f32\"");
	kv_rotation_matrix(from_file->layers[0].k->rotation, 3, 1, row);
	ck_assert_mem_eq(row, matrix + 3 * 16, sizeof(row));
	ck_assert_int_eq(from_file->layers[0].k->rotation->kind, KV_ROTATION_FILE);
	ck_assert_str_eq(from_text->canonical_json, from_file->canonical_json);
	ck_assert_ptr_nonnull(strstr(from_file->canonical_json, "\"kind\":\"file\""));
	kv_pool_spec_destroy(from_text);
	kv_pool_spec_destroy(from_file);

	matrix[3] += 0.5f;
	kv_assert_status(
		create(SMALL
			",\"layers\":1,\"head_dim\":16,\"k\":\"tq4\",\"v\":\"f32\",\"rotation\":\"file\","
			"\"rotation_file\":\"m.f32\"",
			&fake_files, &spec, &err),
		KV_BAD_CONFIG);
	ck_assert_msg(strstr(err.msg, "pool \"p\": rotation matrix: ") == err.msg, "%s", err.msg);
}
END_TEST

/* ---- recipes ---- */

/* Lists of channels make codecs of KV heads; whoever asks by head gets the right one, and bytes stay the
 * same. */
START_TEST(test_pool_spec_recipe_channels)
{
	static const char recipe[] =
		RECIPE("model.layers.1.attn", LIST_16_0, LIST_16_16, LIST_16_16, LIST_16_0);
	struct kv_pool_spec *plain =
		make(DIM64 ",\"layers\":2,\"k\":\"turboquant25\",\"v\":\"turboquant25\"");
	struct kv_pool_spec *spec, *from_file;

	put_file("r.json", recipe, strlen(recipe));
	spec = make(DIM64 ",\"layers\":2,\"k\":\"turboquant25\",\"v\":\"turboquant25\",\"recipe\":" RECIPE(
		"1", LIST_16_0, LIST_16_16, LIST_16_16, LIST_16_0));
	from_file = make(DIM64
		",\"layers\":2,\"k\":\"turboquant25\",\"v\":\"turboquant25\",\"recipe_file\":\"r.json\"");
	ck_assert_str_eq(spec->canonical_json, from_file->canonical_json);
	ck_assert_uint_ne(spec->fingerprint, plain->fingerprint);
	ck_assert(spec->has_head_codecs);
	ck_assert(!plain->has_head_codecs);
	/* Layer 0 is not listed. */
	ck_assert_ptr_null(spec->layers[0].k_heads);
	ck_assert_ptr_eq(kv_layer_k(&spec->layers[0], 1), spec->layers[0].v);
	/* Layer 1: head 0 of K and head 1 of V have the default. */
	ck_assert_ptr_eq(kv_layer_k(&spec->layers[1], 0), spec->layers[0].k);
	ck_assert_uint_eq(kv_layer_k(&spec->layers[1], 1)->channels[0], 16);
	ck_assert_uint_eq(kv_layer_v(&spec->layers[1], 0)->channels[0], 16);
	ck_assert_uint_eq(kv_layer_v(&spec->layers[1], 1)->channels[0], 0);
	ck_assert_ptr_eq(spec->layers[1].v, kv_layer_v(&spec->layers[1], 0));
	ck_assert_uint_eq(spec->token_bytes[0], plain->token_bytes[0]);
	/* They borrow what is large. */
	ck_assert_uint_eq(spec->rotation_bytes, plain->rotation_bytes);
	ck_assert_uint_eq(spec->codebook_bytes, plain->codebook_bytes);
	/* dims 16 and 48, 2 and 1 bits: 4 + 3 and 2 + 1 numbers */
	ck_assert_uint_eq(plain->codebook_bytes, (7 + 3) * sizeof(float));
	kv_pool_spec_destroy(plain);
	kv_pool_spec_destroy(from_file);
	/* Lists that say the default make no difference at all. */
	plain = make(DIM64 ",\"layers\":2,\"k\":\"turboquant25\",\"v\":\"bf16\"");
	from_file = make(DIM64 ",\"layers\":2,\"k\":\"turboquant25\",\"v\":\"bf16\",\"recipe\":" RECIPE(
		"0", LIST_16_0, LIST_16_0, LIST_16_16, LIST_16_16));
	ck_assert_uint_eq(plain->fingerprint, from_file->fingerprint);
	ck_assert(!from_file->has_head_codecs);
	kv_pool_spec_destroy(plain);
	kv_pool_spec_destroy(from_file);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* ---- k_center ---- */

/* [2 layers][2 heads][16], number i is i / 4. */
static void write_center(char *text, size_t size, const char *last)
{
	size_t n = 0;

	for (uint32_t i = 0; i < 64; i++) {
		n += (size_t)snprintf(text + n, size - n, "%s%s%s",
			i == 0                ? "["
				: i % 32 == 0 ? "]],"
				: i % 16 == 0 ? "],"
					      : ",",
			i % 32 == 0 ? "[" : "", i % 16 == 0 ? "[" : "");
		n += i == 63 && last ? (size_t)snprintf(text + n, size - n, "%s", last)
				     : (size_t)snprintf(text + n, size - n, "%g", i / 4.0);
	}
	snprintf(text + n, size - n, "]]]");
}

/* k_center is [layer][head][channel], from the JSON or a file, and is part of what the pool is. */
START_TEST(test_pool_spec_k_center)
{
	char center[2048], text[4096], file[4096];
	struct kv_pool_spec *plain, *spec, *from_file, *other;

	write_center(center, sizeof(center), NULL);
	snprintf(text, sizeof(text),
		SMALL ",\"layers\":2,\"head_dim\":16,\"k\":\"tq4\",\"v\":\"f32\",\"k_center\":%s", center);
	snprintf(file, sizeof(file), "{\"version\":1,\"note\":\"more\",\"k_center\":%s}", center);
	put_file("center.json", file, strlen(file));
	plain = make(SMALL ",\"layers\":2,\"head_dim\":16,\"k\":\"tq4\",\"v\":\"f32\"");
	spec = make(text);
	from_file = make(SMALL ",\"layers\":2,\"head_dim\":16,\"k\":\"tq4\",\"v\":\"f32\",\"k_center_file\":"
			       "\"center.json\"");
	ck_assert(spec->has_k_center);
	ck_assert_ptr_null(plain->layers[1].k_center);
	for (uint32_t i = 0; i < 64; i++)
		ck_assert_float_eq(spec->layers[i / 32].k_center[i % 32], (float)i / 4);
	ck_assert_str_eq(spec->canonical_json, from_file->canonical_json);
	ck_assert_uint_ne(spec->fingerprint, plain->fingerprint);
	ck_assert_uint_eq(spec->rotation_bytes, plain->rotation_bytes + 64 * sizeof(float));
	write_center(center, sizeof(center), "15.7500010");
	snprintf(text, sizeof(text),
		SMALL ",\"layers\":2,\"head_dim\":16,\"k\":\"tq4\",\"v\":\"f32\",\"k_center\":%s", center);
	other = make(text);
	ck_assert_uint_ne(other->fingerprint, spec->fingerprint);
	kv_pool_spec_destroy(plain);
	kv_pool_spec_destroy(spec);
	kv_pool_spec_destroy(from_file);
	kv_pool_spec_destroy(other);
}
END_TEST

/* ---- codebooks ---- */

/* A user's codebook replaces the one of its dim and bits, and changes the fingerprint. */
START_TEST(test_pool_spec_codebook_files)
{
	static const char text[] =
		SMALL ",\"layers\":2,\"head_dim\":16,\"k\":[\"tq1\",\"tqp2\"],\"v\":\"tq2\"";
	struct kv_pool_spec *plain = make(text), *spec;
	char longer[512];

	put_file("c.json", CODEBOOK_16_1, strlen(CODEBOOK_16_1));
	snprintf(longer, sizeof(longer), "%s,\"codebook_files\":[\"c.json\"]", text);
	spec = make(longer);
	for (uint32_t l = 0; l < 2; l++) {
		ck_assert_float_eq(spec->layers[l].k->segments[0].table[1], 0.25f);
		ck_assert_float_ne(plain->layers[l].k->segments[0].table[1], 0.25f);
	}
	ck_assert_float_eq(spec->layers[0].v->segments[0].table[1], plain->layers[0].v->segments[0].table[1]);
	ck_assert_uint_ne(spec->fingerprint, plain->fingerprint);
	kv_pool_spec_destroy(plain);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* ---- what is hashed ---- */

/* Options that decide bytes or results change the fingerprint, with their defaults written out they do not.
 */
START_TEST(test_pool_spec_fingerprint_covers_options)
{
	static const char base[] =
		DIM64 ",\"layers\":3,\"k\":[\"tq3\",\"tqp3\",\"turboquant35\"],\"v\":\"v4\"";
	static const struct {
		const char *more;
		bool is_same;
	} rows[] = {
		{ "\"exact_layers\":0", true },
		{ "\"rotation\":\"rht\"", true },
		{ "\"per_layer\":false", true },
		{ "\"norm_correction\":false", true },
		{ "\"group\":32", true },
		{ "\"recipe_scale\":\"exact\"", true },
		{ "\"rotation\":\"qr\"", false },
		{ "\"per_layer\":true", false },
		{ "\"norm_correction\":true", false },
		{ "\"group\":16", false },
		{ "\"recipe_scale\":\"published\"", false },
		{ "\"seed\":43", false },
	};
	struct kv_pool_spec *plain = make(base);
	uint64_t seen[KV_LENGTH(rows) + 1] = { plain->fingerprint };
	uint32_t n_seen = 1;

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		char text[512];

		/* exact_layers does not go with an array */
		snprintf(text, sizeof(text), "%s,%s", base, rows[i].more);
		if (i == 0)
			snprintf(text, sizeof(text), "%s", base);
		struct kv_pool_spec *spec = make(text);

		ck_assert_msg(
			(spec->fingerprint == plain->fingerprint) == rows[i].is_same, "%s", rows[i].more);
		for (uint32_t s = 1; s < n_seen && !rows[i].is_same; s++)
			ck_assert_uint_ne(seen[s], spec->fingerprint);
		if (!rows[i].is_same)
			seen[n_seen++] = spec->fingerprint;
		kv_pool_spec_destroy(spec);
	}
	kv_pool_spec_destroy(plain);
}
END_TEST

/* Options of the canonical text by name; what no layer has is absent. */
START_TEST(test_pool_spec_canonical_names_options)
{
	struct kv_pool_spec *spec =
		make(DIM64 ",\"layers\":3,\"k\":[\"tq3\",\"tqp3\",\"turboquant35\"],\"v\":\"v4\","
			   "\"norm_correction\":true,\"group\":16,\"recipe_scale\":\"published\"");
	static const char *const parts[] = { "\"group\":16", "\"k\":[\"tq3\",\"tqp3\",\"turboquant35\"]",
		"\"k_channels\":\"", "\"k_codebook\":\"", "\"k_projection\":\"",
		"\"k_rotation\":{\"kind\":\"rht\",", "\"norm_correction\":true",
		"\"recipe_scale\":\"published\"", "\"v\":\"v4\"" };
	static const char *const absent[] = { "k_center", "v_channels", "v_codebook", "v_projection",
		"v_rotation", "per_layer", "blocks" };

	for (uint32_t i = 0; i < KV_LENGTH(parts); i++)
		ck_assert_msg(
			strstr(spec->canonical_json, parts[i]), "%s in %s", parts[i], spec->canonical_json);
	for (uint32_t i = 0; i < KV_LENGTH(absent); i++)
		ck_assert_msg(!strstr(spec->canonical_json, absent[i]), "%s", absent[i]);
	kv_pool_spec_destroy(spec);
	/* norm_correction is an option of tqN: exact layers do not have it, and K alone may. */
	spec = make(DIM64 ",\"layers\":3,\"preset\":\"3bit\",\"exact_layers\":1,\"norm_correction\":true");
	ck_assert(spec->layers[1].k->norm_correction);
	ck_assert(!spec->layers[0].k->norm_correction);
	kv_pool_spec_destroy(spec);
}
END_TEST

/*
 * The canonical text of layers of many formats equals that of an independent program: matrices, codebooks and
 * channels from tests/golden/reference.py, hashes by the xxHash library.
 */
START_TEST(test_pool_spec_canonical_text_of_formats_is_golden)
{
	char members[8192] = DIM64
		",\"layers\":3,\"k\":[\"tqp3\",\"turboquant25\",\"tq3\"],\"v\":[\"tq3\",\"v4\",\"tq3\"],"
		"\"group\":16,\"norm_correction\":true,\"per_layer\":true,\"seed\":7,"
		"\"recipe_scale\":\"published\",\"recipe\":" RECIPE(
			"1", LIST_16_0, LIST_16_16, LIST_16_0, LIST_16_0) ",\"k_center\":";
	struct kv_pool_spec *spec;

	/* number i is i / 4 - 20 */
	for (uint32_t i = 0; i < 3 * 2 * 64; i++)
		snprintf(members + strlen(members), 32, "%s%g",
			i == 0                 ? "[[["
				: i % 128 == 0 ? "]],[["
				: i % 64 == 0  ? "],["
					       : ",",
			i / 4.0 - 20);
	strcat(members, "]]]");
	spec = make(members);
	ck_assert_str_eq(spec->canonical_json,
		"{\"block_size\":16,\"group\":16,\"groups\":[[0,1,2]],\"k\":[\"tqp3\",\"turboquant25\",\"tq"
		"3\"],\"k_center\":\"db640a9619ae1cd38318b3babf9d2c44\",\"k_channels\":\"81ca1895dc9ce0107f"
		"5d391826063f91\",\"k_codebook\":\"58d431082b4bf4ca22ebd93c9ae36051\",\"k_head_dim\":64,\"k"
		"_projection\":\"73dadcf1ae1fee6276fa7321fcc0ce40\",\"k_rotation\":{\"kind\":\"rht\",\"matr"
		"ix\":\"923ffc0618f4ab557a9ffd8e79b79be4\",\"per_layer\":true,\"seed\":7},\"kv_heads\":2,\""
		"layers\":3,\"model\":\"\",\"norm_correction\":true,\"q_heads\":2,\"recipe_scale\":\"publis"
		"hed\",\"scale\":\"3e000000\",\"v\":[\"tq3\",\"v4\",\"tq3\"],\"v_codebook\":\"19ae6fdb867ab"
		"4965efb45d4cc36145f\",\"v_head_dim\":64,\"v_rotation\":{\"kind\":\"rht\",\"matrix\":\"923f"
		"fc0618f4ab557a9ffd8e79b79be4\",\"per_layer\":true,\"seed\":7}}");
	ck_assert_uint_eq(spec->fingerprint, 0xc19238b5e7dbe8f5ull);
	kv_pool_spec_destroy(spec);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("pool_spec_formats");
	TCase *tcase = tcase_create("pool_spec_formats");

	tcase_add_test(tcase, test_pool_spec_presets_name_formats);
	tcase_add_test(tcase, test_pool_spec_formats_of_layers);
	tcase_add_test(tcase, test_pool_spec_rotation_kinds);
	tcase_add_test(tcase, test_pool_spec_rotation_per_layer);
	tcase_add_test(tcase, test_pool_spec_rotation_matrix);
	tcase_add_test(tcase, test_pool_spec_recipe_channels);
	tcase_add_test(tcase, test_pool_spec_k_center);
	tcase_add_test(tcase, test_pool_spec_codebook_files);
	tcase_add_test(tcase, test_pool_spec_fingerprint_covers_options);
	tcase_add_test(tcase, test_pool_spec_canonical_names_options);
	tcase_add_test(tcase, test_pool_spec_canonical_text_of_formats_is_golden);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
