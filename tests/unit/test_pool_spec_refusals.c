/* What a pool's formats and options are refused for: every message names pool, member, layer and what was
 * expected. */
#include "tests/lib/kv_spec_test.h"

#define TQ4      DIM64 ",\"layers\":3,\"k\":\"tq4\",\"v\":\"tq4\""
#define DENSE    DIM64 ",\"layers\":3,\"k\":\"f32\",\"v\":\"bf16\""
#define NO_K_V   DIM64 ",\"layers\":3"
#define TQ4_16   SMALL ",\"head_dim\":16,\"layers\":1,\"k\":\"tq4\",\"v\":\"tq4\""
#define RECIPES  DIM64 ",\"layers\":3,\"k\":\"turboquant25\",\"v\":\"turboquant25\""
#define NO_FILES "expected no file here: files are named in the daemon's configuration only"

static const struct {
	const char *text;
	enum kv_status status;
	const char *msg; /* behind `pool "p": `; a star at the end: the rest is somebody else's sentence */
} refusals[] = {
	/* formats of layers */
	{ NO_K_V ",\"k\":\"tq4\"", KV_BAD_CONFIG, "v is missing: expected the name of a row format" },
	{ NO_K_V ",\"k\":[\"tq4\",\"tq4\"],\"v\":\"tq4\"", KV_BAD_CONFIG,
		"k is an array: expected a name, or an array of 3 names, one per layer" },
	{ NO_K_V ",\"k\":[],\"v\":\"tq4\"", KV_BAD_CONFIG,
		"k is an array: expected a name, or an array of 3 names, one per layer" },
	{ NO_K_V ",\"k\":\"tq4\",\"v\":[\"tq4\",\"tq4\",7]", KV_BAD_CONFIG,
		"v[2] 7: expected the name of a row format" },
	{ NO_K_V ",\"k\":[\"tq4\",\"tq9\",\"tq4\"],\"v\":\"tq4\"", KV_BAD_CONFIG,
		"k[1] \"tq9\": unknown row format \"tq9\" (known: *" },
	{ SMALL ",\"head_dim\":16,\"layers\":2,\"k\":\"tq4\",\"v\":[\"tq4\",\"v4\"]", KV_BAD_CONFIG,
		"v[1] \"v4\": row format v4: a group of 32 is larger than head_dim 16" },
	{ SMALL ",\"head_dim\":16,\"layers\":1,\"k\":\"turboquant35\",\"v\":\"f32\"", KV_BAD_CONFIG,
		"k \"turboquant35\": *" },
	{ SMALL ",\"head_dim\":32,\"layers\":1,\"k\":\"f32\",\"v\":\"turboquant25\"", KV_BAD_CONFIG,
		"v \"turboquant25\": *" },
	/* presets */
	{ NO_K_V ",\"preset\":\"5bit\"", KV_BAD_CONFIG,
		"preset \"5bit\": unknown preset \"5bit\" (known: k8v4, 4bit, k3v4, 3bit, k3v2, 2bit)" },
	{ NO_K_V ",\"preset\":4", KV_BAD_CONFIG, "preset 4: expected the name of a preset" },
	{ TQ4 ",\"preset\":\"4bit\"", KV_BAD_CONFIG, "preset: expected either preset or k and v" },
	{ SMALL ",\"head_dim\":16,\"layers\":1,\"preset\":\"4bit\"", KV_BAD_CONFIG,
		"preset \"4bit\": row format v4: a group of 32 is larger than head_dim 16" },
	{ TQ4 ",\"exact_layers\":2", KV_BAD_CONFIG, "exact_layers 2: expected an integer from 0 to 1" },
	{ TQ4 ",\"exact_layers\":true", KV_BAD_CONFIG,
		"exact_layers is true: expected an integer from 0 to 1" },
	{ NO_K_V ",\"k\":[\"tq4\",\"tq4\",\"f32\"],\"v\":\"tq4\",\"exact_layers\":1", KV_BAD_CONFIG,
		"exact_layers: expected names in k and v, not arrays that say it all" },
	/* options of other types, out of range, or of no format */
	{ TQ4 ",\"per_layer\":1", KV_BAD_CONFIG, "per_layer 1: expected true or false" },
	{ TQ4 ",\"norm_correction\":\"yes\"", KV_BAD_CONFIG,
		"norm_correction \"yes\": expected true or false" },
	{ DENSE ",\"norm_correction\":true", KV_BAD_CONFIG,
		"norm_correction is true: expected a tqN format in k or v" },
	{ DENSE ",\"per_layer\":true", KV_BAD_CONFIG,
		"per_layer is true: expected a tqN or tqpN format in k or v" },
	{ DENSE ",\"rotation\":\"qr\"", KV_BAD_CONFIG,
		"rotation \"qr\": expected a tqN or tqpN format in k or v" },
	{ TQ4 ",\"group\":16", KV_BAD_CONFIG, "group 16: expected a vN format in k or v" },
	{ TQ4 ",\"recipe_scale\":\"exact\"", KV_BAD_CONFIG,
		"recipe_scale \"exact\": expected turboquant25 or turboquant35 in k or v" },
	{ NO_K_V ",\"k\":\"tq4\",\"v\":\"v4\",\"group\":0", KV_BAD_CONFIG,
		"group 0: expected an integer from 1 to 256" },
	{ NO_K_V ",\"k\":\"tq4\",\"v\":\"v4\",\"group\":257", KV_BAD_CONFIG,
		"group 257: expected an integer from 1 to 256" },
	{ NO_K_V ",\"k\":\"tq4\",\"v\":[\"f32\",\"v4\",\"v4\"],\"group\":65", KV_BAD_CONFIG,
		"v[1] \"v4\": row format v4: a group of 65 is larger than head_dim 64" },
	{ RECIPES ",\"recipe_scale\":\"best\"", KV_BAD_CONFIG,
		"recipe_scale \"best\": expected exact or published" },
	/* rotations */
	{ TQ4 ",\"rotation\":\"block\"", KV_BAD_CONFIG, "rotation \"block\": expected rht, qr or file" },
	{ TQ4 ",\"rotation\":5", KV_BAD_CONFIG, "rotation 5: expected rht, qr or file" },
	{ SMALL ",\"k_head_dim\":64,\"v_head_dim\":48,\"layers\":1,\"k\":\"f32\",\"v\":\"tq4\",\"rotation\":"
		"\"rht\"",
		KV_BAD_CONFIG, "rotation \"rht\": *" },
	{ TQ4 ",\"rotation\":\"file\"", KV_BAD_CONFIG,
		"rotation_matrix is missing: expected rotation_matrix or rotation_file with rotation file" },
	{ TQ4 ",\"rotation_file\":\"m.f32\"", KV_BAD_CONFIG,
		"rotation is missing: expected file, beside a matrix" },
	{ TQ4 ",\"rotation\":\"qr\",\"rotation_matrix\":[]", KV_BAD_CONFIG,
		"rotation \"qr\": expected file, beside a matrix" },
	{ TQ4 ",\"rotation\":\"file\",\"rotation_matrix\":[],\"rotation_file\":\"m.f32\"", KV_BAD_CONFIG,
		"rotation_matrix: expected either rotation_matrix or rotation_file" },
	{ TQ4 ",\"rotation\":\"file\",\"rotation_file\":\"m.f32\",\"per_layer\":true", KV_BAD_CONFIG,
		"per_layer true: expected rht or qr, a given matrix is one for all layers" },
	{ SMALL ",\"k_head_dim\":64,\"v_head_dim\":48,\"layers\":1,\"k\":\"tq4\",\"v\":\"tq4\",\"rotation\":"
		"\"file\",\"rotation_file\":\"m.f32\"",
		KV_UNSUPPORTED,
		"rotation \"file\": one matrix cannot serve k_head_dim 64 and v_head_dim 48" },
	{ TQ4 ",\"rotation\":\"file\",\"rotation_matrix\":[[1]]", KV_BAD_CONFIG,
		"rotation_matrix has 1 elements: expected an array of 64 rows" },
	{ TQ4_16 ",\"rotation\":\"file\",\"rotation_matrix\":[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]",
		KV_BAD_CONFIG, "rotation_matrix[0] 1: expected an array of 16 numbers" },
	{ TQ4 ",\"rotation\":\"file\",\"rotation_file\":\"file\"", KV_BAD_CONFIG,
		"rotation_file \"file\": expected a file of 16384 bytes, 64 x 64 float32" },
	{ TQ4 ",\"rotation\":\"file\",\"rotation_file\":\"other\"", KV_BAD_CONFIG,
		"rotation_file: other: no such file" },
	{ TQ4 ",\"rotation\":\"file\",\"rotation_file\":\"\"", KV_BAD_CONFIG,
		"rotation_file \"\": expected the path of a file" },
	/* recipes */
	{ TQ4 ",\"recipe\":{}", KV_BAD_CONFIG,
		"recipe is an object: expected turboquant25 or turboquant35 in k or v" },
	{ RECIPES ",\"recipe\":5", KV_BAD_CONFIG,
		"recipe 5: expected an object in the schema of turboquant_kv.json" },
	{ RECIPES ",\"recipe\":{}", KV_BAD_CONFIG, "recipe: recipe file: *" },
	{ RECIPES ",\"recipe_file\":\"file\"", KV_BAD_CONFIG, "recipe_file: recipe file: *" },
	{ RECIPES ",\"recipe\":{},\"recipe_file\":\"file\"", KV_BAD_CONFIG,
		"recipe: expected either recipe or recipe_file" },
	{ RECIPES ",\"recipe\":" RECIPE("3", LIST_16_0, LIST_16_0, LIST_16_0, LIST_16_0), KV_BAD_CONFIG,
		"recipe: has layer 3: expected layers below 3" },
	{ DIM64 ",\"layers\":1,\"k\":\"f32\",\"v\":\"turboquant35\",\"recipe\":" RECIPE(
		  "0", LIST_16_0, LIST_16_0, LIST_16_0, LIST_16_0),
		KV_BAD_CONFIG, "recipe: is for turboquant25: expected turboquant35 of v, layer 0" },
	{ SMALL ",\"k_head_dim\":64,\"v_head_dim\":128,\"layers\":1,\"k\":\"turboquant25\",\"v\":"
		"\"turboquant25\",\"recipe\":" RECIPE("0", LIST_16_0, LIST_16_0, LIST_16_0, LIST_16_0),
		KV_BAD_CONFIG, "recipe: head_size 64: expected 128 of v" },
	{ "\"name\":\"p\",\"q_heads\":1,\"kv_heads\":1,\"block_size\":16,\"blocks\":4,\"head_dim\":64,"
	  "\"layers\":1,"
	  "\"k\":\"turboquant25\",\"v\":\"f32\",\"recipe\":" RECIPE(
		  "0", LIST_16_0, LIST_16_0, LIST_16_0, LIST_16_0),
		KV_BAD_CONFIG, "recipe: has 2 KV heads: expected 1" },
	/* k_center */
	{ TQ4 ",\"k_center\":5", KV_BAD_CONFIG, "k_center 5: expected an array of 3 layers" },
	{ TQ4 ",\"k_center\":[[],[]]", KV_BAD_CONFIG,
		"k_center has 2 elements: expected an array of 3 layers" },
	{ TQ4 ",\"k_center\":[{},[],[]]", KV_BAD_CONFIG,
		"k_center[0] is an object: expected an array of 2 KV heads" },
	{ TQ4 ",\"k_center\":[[[0],[1]],[],[]]", KV_BAD_CONFIG,
		"k_center[0][0] has 1 elements: expected an array of 64 numbers" },
	{ TQ4_16 ",\"k_center\":[[" LIST_16_0 ",[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,\"15\"]]]", KV_BAD_CONFIG,
		"k_center[0][1][15] \"15\": expected a number that float32 can hold" },
	{ TQ4_16 ",\"k_center\":[[" LIST_16_0 ",[0,1,2,1e39,4,5,6,7,8,9,10,11,12,13,14,15]]]", KV_BAD_CONFIG,
		"k_center[0][1][3] 1e+39: expected a number that float32 can hold" },
	{ TQ4 ",\"k_center\":[],\"k_center_file\":\"file\"", KV_BAD_CONFIG,
		"k_center: expected either k_center or k_center_file" },
	{ TQ4 ",\"k_center_file\":\"file\"", KV_BAD_CONFIG, "k_center_file: version 2: expected 1" },
	{ TQ4 ",\"k_center_file\":7", KV_BAD_CONFIG, "k_center_file 7: expected the path of a file" },
	/* codebooks */
	{ TQ4 ",\"codebook_files\":\"file\"", KV_BAD_CONFIG,
		"codebook_files \"file\": expected an array of 1 to 64 paths" },
	{ TQ4 ",\"codebook_files\":[]", KV_BAD_CONFIG,
		"codebook_files is an array: expected an array of 1 to 64 paths" },
	{ TQ4 ",\"codebook_files\":[3]", KV_BAD_CONFIG, "codebook_files[0] 3: expected the path of a file" },
	{ TQ4 ",\"codebook_files\":[\"file\"]", KV_BAD_CONFIG, "codebook_files[0]: codebook: *" },
};

/* Every refusal, with the file `file` there and readable. */
START_TEST(test_pool_spec_refusals_of_options)
{
	static const char file[] = "{\"version\":2}";

	put_file("file", file, strlen(file));
	for (uint32_t i = 0; i < KV_LENGTH(refusals); i++) {
		static const char prefix[] = "pool \"p\": ";
		struct kv_pool_spec *spec = NULL;
		struct kv_error err = { .msg = "" };
		const char *wanted = refusals[i].msg;
		const size_t n = strlen(wanted);
		const bool is_open = wanted[n - 1] == '*';

		ck_assert_msg(create(refusals[i].text, &fake_files, &spec, &err) == refusals[i].status,
			"%s: %s", refusals[i].text, err.msg);
		ck_assert_ptr_null(spec);
		ck_assert_msg(strncmp(err.msg, prefix, strlen(prefix)) == 0, "%s", err.msg);
		if (is_open)
			ck_assert_msg(strncmp(err.msg + strlen(prefix), wanted, n - 1) == 0 &&
					strlen(err.msg) > strlen(prefix) + n,
				"%s", err.msg);
		else
			ck_assert_str_eq(err.msg + strlen(prefix), wanted);
		kv_assert_status(create(refusals[i].text, &fake_files, &spec, NULL), refusals[i].status);
	}
}
END_TEST

/* Codebooks that no format of the pool uses, or that are given twice, and files that are no JSON. */
START_TEST(test_pool_spec_refusals_of_files)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };

	put_file("c.json", CODEBOOK_16_1, strlen(CODEBOOK_16_1));
	kv_assert_status(
		create(TQ4_16 ",\"codebook_files\":[\"c.json\"]", &fake_files, &spec, &err), KV_BAD_CONFIG);
	ck_assert_str_eq(err.msg,
		"pool \"p\": codebook_files[0]: d 16, bits 1: expected those of a format of the pool");
	kv_assert_status(create(SMALL ",\"head_dim\":16,\"layers\":1,\"k\":\"tq1\",\"v\":\"f32\",\"codebook_"
				      "files\":[\"c.json\","
				      "\"c.json\"]",
				 &fake_files, &spec, &err),
		KV_BAD_CONFIG);
	ck_assert_str_eq(err.msg,
		"pool \"p\": codebook_files[1] \"c.json\": expected one codebook of a dim and a number of "
		"bits");
	put_file("k.json", "{]", 2);
	kv_assert_status(
		create(TQ4 ",\"k_center_file\":\"k.json\"", &fake_files, &spec, &err), KV_BAD_CONFIG);
	ck_assert_msg(strstr(err.msg, "pool \"p\": k_center_file: line 1: ") == err.msg, "%s", err.msg);
}
END_TEST

/* A pool from the network may not make the daemon open a file, whatever the member. */
START_TEST(test_pool_spec_files_are_the_operators)
{
	static const struct {
		const char *text, *msg;
	} rows[] = {
		{ TQ4 ",\"rotation\":\"file\",\"rotation_file\":\"/etc/passwd\"",
			"pool \"p\": rotation_file \"/etc/passwd\": " NO_FILES },
		{ TQ4 ",\"k_center_file\":\"/etc/passwd\"",
			"pool \"p\": k_center_file \"/etc/passwd\": " NO_FILES },
		{ TQ4 ",\"codebook_files\":[\"/etc/passwd\"]",
			"pool \"p\": codebook_files[0] \"/etc/passwd\": " NO_FILES },
		{ RECIPES ",\"recipe_file\":\"/etc/passwd\"",
			"pool \"p\": recipe_file \"/etc/passwd\": " NO_FILES },
	};

	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_pool_spec *spec = NULL;
		struct kv_error err = { .msg = "" };

		kv_assert_status(create(rows[i].text, NULL, &spec, &err), KV_BAD_CONFIG);
		ck_assert_str_eq(err.msg, rows[i].msg);
	}
}
END_TEST

/* A description that no reply could hold is refused when the pool is made. */
START_TEST(test_pool_spec_refuses_what_it_could_not_tell)
{
	static char text[1 << 16];
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };
	size_t n = 0;

	for (int is_v = 0; is_v < 2; is_v++) {
		n += (size_t)snprintf(text + n, sizeof(text) - n, "%s,\"%s\":[\"tq4\"",
			is_v ? "" : DIM64 ",\"layers\":1024", is_v ? "v" : "k");
		for (uint32_t l = 1; l < 1024; l++)
			n += (size_t)snprintf(text + n, sizeof(text) - n, ",\"turboquant25\"");
		n += (size_t)snprintf(text + n, sizeof(text) - n, "]");
	}
	kv_assert_status(create(text, NULL, &spec, &err), KV_UNSUPPORTED);
	ck_assert_msg(strstr(err.msg, "pool \"p\": its description has ") == err.msg, "%s", err.msg);
}
END_TEST

/* Matrices for minutes are refused; the same layers with rht, or with one matrix for all, are made. */
START_TEST(test_pool_spec_bounds_what_it_computes)
{
	static const char members[] =
		SMALL ",\"k_head_dim\":256,\"v_head_dim\":240,\"k\":\"tqp2\",\"v\":\"tqp2\",\"layers\":";
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };
	char text[512];

	/* per layer: a rotation of 256, and rotation and projection of 240 */
	snprintf(text, sizeof(text), "%s1024,\"per_layer\":true,\"rotation\":\"qr\"", members);
	kv_assert_status(create(text, NULL, &spec, &err), KV_UNSUPPORTED);
	ck_assert_str_eq(err.msg,
		"pool \"p\": per_layer true: expected at most as much as 256 qr matrices of 256 channels, "
		"not 11 times that; rht takes no time");
	snprintf(text, sizeof(text), "%s1024", members);
	kv_pool_spec_destroy(make(text));
	snprintf(
		text, sizeof(text), DIM64 ",\"layers\":1024,\"k\":\"tqp2\",\"v\":\"tq2\",\"per_layer\":true");
	kv_pool_spec_destroy(make(text));
}
END_TEST

/* Flags have a short form; lists and objects have none. */
START_TEST(test_pool_spec_short_form_of_options)
{
	struct kv_pool_spec *spec =
		kv_test_spec("name=x,layers=3,q_heads=1,kv_heads=1,head_dim=64,preset=k3v4,exact_layers=1,"
			     "rotation=qr,seed=3,"
			     "per_layer=true,norm_correction=true,group=16,block_size=16,blocks=1",
			NULL);
	static const struct {
		const char *text, *msg;
	} rows[] = {
		{ "per_layer=yes", "pool: \"per_layer=yes\": expected true or false behind the '='" },
		{ "k_center=1",
			"pool: \"k_center=1\": expected no lists here: use k_center_file=PATH, or the "
			"configuration file" },
		{ "recipe=1",
			"pool: \"recipe=1\": expected no lists here: use recipe_file=PATH, or the "
			"configuration file" },
		{ "rotation_matrix=1",
			"pool: \"rotation_matrix=1\": expected no lists here: use rotation_file=PATH, or the "
			"configuration file" },
		{ "sinks=1", "pool: \"sinks=1\": expected no lists here: use the configuration file" },
	};

	ck_assert_str_eq(spec->layers[1].k->format->name, "tq3");
	ck_assert_uint_eq(spec->layers[1].k->rotation->seed, 3 + 1000003);
	ck_assert_int_eq(spec->layers[1].k->rotation->kind, KV_ROTATION_QR);
	ck_assert(spec->layers[1].k->norm_correction);
	ck_assert_uint_eq(spec->layers[1].v->segments[0].group_channels, 16);
	kv_pool_spec_destroy(spec);
	for (uint32_t i = 0; i < KV_LENGTH(rows); i++) {
		struct kv_error err = { .msg = "" };
		json_t *json = NULL;

		kv_assert_status(kv_pool_spec_parse_short(rows[i].text, &json, &err), KV_BAD_CONFIG);
		ck_assert_str_eq(err.msg, rows[i].msg);
	}
}
END_TEST

static void *counted_malloc(size_t n_bytes)
{
	return kv_alloc(1, n_bytes);
}

/* When the k-th allocation fails, the answer is NO_MEMORY and nothing leaks, for every k. */
START_TEST(test_pool_spec_options_survive_every_failed_allocation)
{
	struct kv_pool_spec *spec = NULL;
	uint32_t n_failed = 0;

	put_file("c.json", CODEBOOK_16_1, strlen(CODEBOOK_16_1));
	json_set_alloc_funcs(counted_malloc, kv_free);

	json_t *json = spec_json(
		SMALL ",\"head_dim\":16,\"layers\":2,\"k\":[\"tq1\",\"tqp3\"],\"v\":\"v4\",\"group\":8,"
		      "\"per_layer\":true,\"rotation\":\"qr\",\"k_center\":[[" LIST_16_0 "," LIST_16_0
		      "],[" LIST_16_0 "," LIST_16_0 "]]");

	for (int64_t k = 0;; k++) {
		struct kv_error err = { .msg = "" };

		kv_alloc_fail_after(k);
		const enum kv_status status = kv_pool_spec_create_with(json, &fake_files, &spec, &err);

		kv_alloc_fail_after(-1);
		if (status == KV_OK)
			break;
		kv_assert_status(status, KV_NO_MEMORY);
		kv_assert_status(err.status, KV_NO_MEMORY);
		ck_assert_ptr_null(spec);
		n_failed++;
	}
	ck_assert_uint_gt(n_failed, 30);
	kv_pool_spec_destroy(spec);
	json_decref(json);
	json_set_alloc_funcs(malloc, free);
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("pool_spec_refusals");
	TCase *tcase = tcase_create("pool_spec_refusals");

	tcase_add_test(tcase, test_pool_spec_refusals_of_options);
	tcase_add_test(tcase, test_pool_spec_refusals_of_files);
	tcase_add_test(tcase, test_pool_spec_files_are_the_operators);
	tcase_add_test(tcase, test_pool_spec_refuses_what_it_could_not_tell);
	tcase_add_test(tcase, test_pool_spec_bounds_what_it_computes);
	tcase_add_test(tcase, test_pool_spec_short_form_of_options);
	tcase_add_test(tcase, test_pool_spec_options_survive_every_failed_allocation);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK_GETENV);
}
