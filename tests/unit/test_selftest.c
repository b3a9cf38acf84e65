#include <math.h>
#include <string.h>

#include "tests/lib/batch_rig.h"

#include "core/batch_run.h"
#include "core/memory.h"
#include "core/selftest.h"
#include "core/selftest_golden.h"

/* The self-test on pages of its own, with the codecs of `spec`; *distance is the largest error of an output.
 */
static enum kv_status run_on(const struct kv_pool_spec *spec, float *distance, struct kv_error *err)
{
	uint64_t n_bytes = 0;
	struct kv_batch_pages pages;
	struct kv_batch batch;
	uint8_t *memory = NULL;
	struct kv_batch_scratch *scratch = calloc(1, sizeof(*scratch));

	ck_assert(kv_batch_pages_bytes(spec, &n_bytes));
	memory = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
	memset(memory, 0xAA, n_bytes); /* pages are undefined at first */

	uint8_t *area = aligned_alloc(64, (kv_selftest_area_bytes() + 63) / 64 * 64);

	ck_assert_int_eq(kv_batch_pages_init(&pages, spec, memory, NULL), KV_OK);
	kv_selftest_fill(spec, NULL, area, &batch);
	kv_batch_run(&pages, &batch, scratch);

	const enum kv_status status = kv_selftest_check(&batch, err);

	*distance = 0;
	for (uint32_t i = 0; i < 2 * 64; i++)
		*distance = fmaxf(*distance,
			fabsf(((float *)(void *)batch.decodes[0].out)[i] - selftest_out[i / 64][i % 64]));
	for (uint32_t h = 0; h < 2; h++)
		*distance = fmaxf(*distance, fabsf(batch.decodes[0].lse[h] - selftest_lse[h]));
	kv_batch_pages_finish(&pages);
	free(scratch);
	free(area);
	free(memory);
	return status;
}

/* The whole thing passes on the backend, again and again in the same pool. */
START_TEST(test_selftest_passes_on_the_cpu_backend)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_backend *backend = NULL;
	struct kv_backend_pool *pool = NULL;
	struct batch_rig rig = { 0 };
	struct kv_error err = { .msg = "" };
	uint64_t n_bytes = 0;

	ck_assert_int_eq(kv_selftest_spec_create(&spec, &err), KV_OK);
	ck_assert_int_eq(kv_backend_cpu_create(2, &backend, NULL), KV_OK);
	ck_assert_int_eq(backend->ops->pool_check(backend, spec, &n_bytes, NULL), KV_OK);
	ck_assert_int_eq(backend->ops->arena_create(backend, n_bytes, NULL), KV_OK);
	ck_assert_int_eq(backend->ops->pool_create(backend, spec, 0, &pool, NULL), KV_OK);

	uint8_t *area = backend->ops->host_alloc(backend, kv_selftest_area_bytes());

	rig.backend = backend;
	for (int i = 0; i < 3; i++) {
		kv_selftest_fill(spec, pool, area, &rig.batch);
		ck_assert_int_eq(kv_selftest_check(&rig.batch, &err), KV_INTERNAL); /* doing nothing fails */
		rig_run(&rig);
		ck_assert_msg(kv_selftest_check(&rig.batch, &err) == KV_OK, "%s", err.msg);
	}
	backend->ops->host_free(backend, area, kv_selftest_area_bytes());
	backend->ops->pool_destroy(backend, pool);
	backend->ops->destroy(backend);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* The oracle agrees with the independent implementation to float32: the tolerance is there for other backends
 * alone. */
START_TEST(test_selftest_oracle_is_far_inside_the_tolerance)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };
	float distance = 0;

	ck_assert_int_eq(kv_selftest_spec_create(&spec, NULL), KV_OK);
	ck_assert_msg(run_on(spec, &distance, &err) == KV_OK, "%s", err.msg);
	ck_assert_float_le(distance, 2e-6f);
	kv_pool_spec_destroy(spec);
}
END_TEST

/* A pool like the self-test's whose K or V rows are read with another table of centroids. */
struct corrupt {
	struct kv_pool_spec spec;
	struct kv_layer_spec layer;
	struct kv_row_codec k, v;
	float table[16];
};

static void corrupt_init(struct corrupt *corrupt, const struct kv_pool_spec *spec)
{
	corrupt->spec = *spec;
	corrupt->layer = spec->layers[0];
	corrupt->k = *spec->layers[0].k;
	corrupt->v = *spec->layers[0].v;
	memcpy(corrupt->table, corrupt->k.segments[0].table, sizeof(corrupt->table));
	corrupt->spec.layers = &corrupt->layer;
	corrupt->layer.k = &corrupt->k;
	corrupt->layer.v = &corrupt->v;
}

/* Each centroid in turn, moved half way to a neighbour, in the table of both K and V or of one of them, is
 * caught. */
START_TEST(test_selftest_catches_one_wrong_centroid)
{
	struct kv_pool_spec *spec = NULL;
	struct kv_error err = { .msg = "" };

	ck_assert_int_eq(kv_selftest_spec_create(&spec, NULL), KV_OK);
	for (int c = 0; c < 16; c++) {
		for (int side = 1; side <= 3; side++) { /* bit 0: K, bit 1: V */
			struct corrupt corrupt;
			float distance = 0;
			const int neighbour = c < 8 ? c + 1 : c - 1;

			corrupt_init(&corrupt, spec);
			corrupt.table[c] = (corrupt.table[c] + corrupt.table[neighbour]) / 2;
			if (side & 1)
				corrupt.k.segments[0].table = corrupt.table;
			if (side & 2)
				corrupt.v.segments[0].table = corrupt.table;
			ck_assert_msg(run_on(&corrupt.spec, &distance, &err) == KV_INTERNAL,
				"centroid %d of %s", c, side == 1 ? "K" : (side == 2 ? "V" : "both"));
			ck_assert_ptr_nonnull(strstr(err.msg, "expected"));
		}
	}
	kv_pool_spec_destroy(spec);
}
END_TEST

/* A backend that takes blocks in order instead of by the table does not pass. */
START_TEST(test_selftest_needs_the_block_table)
{
	static const uint32_t in_order[] = { 0, 1, 2 };
	struct kv_pool_spec *spec = NULL;
	uint64_t n_bytes = 0;
	struct kv_batch_pages pages;
	struct kv_batch batch;
	struct kv_batch_scratch *scratch = calloc(1, sizeof(*scratch));

	ck_assert_int_eq(kv_selftest_spec_create(&spec, NULL), KV_OK);
	ck_assert(kv_batch_pages_bytes(spec, &n_bytes));

	uint8_t *memory = aligned_alloc(64, (n_bytes + 63) / 64 * 64);
	uint8_t *area = aligned_alloc(64, (kv_selftest_area_bytes() + 63) / 64 * 64);

	memset(memory, 0, n_bytes);
	ck_assert_int_eq(kv_batch_pages_init(&pages, spec, memory, NULL), KV_OK);
	kv_selftest_fill(spec, NULL, area, &batch);
	batch.decodes[0].table = in_order;
	kv_batch_run(&pages, &batch, scratch);
	ck_assert_int_eq(kv_selftest_check(&batch, NULL), KV_INTERNAL);
	kv_batch_pages_finish(&pages);
	kv_pool_spec_destroy(spec);
	free(scratch);
	free(area);
	free(memory);
}
END_TEST

/* A refused item, an output that is not a number, or one that is a little off is not a pass. */
START_TEST(test_selftest_check_is_strict)
{
	struct batch_rig rig = { 0 };
	struct kv_error err = { .msg = "" };
	uint64_t n_bytes = 0;

	ck_assert_int_eq(kv_selftest_spec_create(&rig.spec, NULL), KV_OK);
	ck_assert_int_eq(kv_backend_cpu_create(0, &rig.backend, NULL), KV_OK);
	ck_assert_int_eq(rig.backend->ops->pool_check(rig.backend, rig.spec, &n_bytes, NULL), KV_OK);
	ck_assert_int_eq(rig.backend->ops->arena_create(rig.backend, n_bytes, NULL), KV_OK);
	ck_assert_int_eq(rig.backend->ops->pool_create(rig.backend, rig.spec, 0, &rig.pool, NULL), KV_OK);

	uint8_t *area = rig.backend->ops->host_alloc(rig.backend, kv_selftest_area_bytes());

	kv_selftest_fill(rig.spec, rig.pool, area, &rig.batch);
	rig_run(&rig);

	float *out = (float *)(void *)rig.batch.decodes[0].out, *lse = rig.batch.decodes[0].lse;
	const float kept = out[100], kept_lse = lse[1];

	ck_assert_int_eq(kv_selftest_check(&rig.batch, NULL), KV_OK);
	out[100] = kept + 0.006f;
	ck_assert_int_eq(kv_selftest_check(&rig.batch, &err), KV_INTERNAL);
	ck_assert_ptr_nonnull(strstr(err.msg, "query head 1 channel 36"));
	out[100] = NAN;
	ck_assert_int_eq(kv_selftest_check(&rig.batch, NULL), KV_INTERNAL);
	out[100] = kept;
	lse[1] = kept_lse - 0.03f;
	ck_assert_int_eq(kv_selftest_check(&rig.batch, &err), KV_INTERNAL);
	ck_assert_ptr_nonnull(strstr(err.msg, "log-sum-exp of query head 1"));
	lse[1] = NAN;
	ck_assert_int_eq(kv_selftest_check(&rig.batch, NULL), KV_INTERNAL);
	lse[1] = kept_lse;
	rig.batch.results[1].status = KV_BAD_VALUE;
	ck_assert_int_eq(kv_selftest_check(&rig.batch, &err), KV_INTERNAL);
	ck_assert_ptr_nonnull(strstr(err.msg, "the query with status 107"));
	rig.batch.results[1].status = KV_OK;
	ck_assert_int_eq(kv_selftest_check(&rig.batch, NULL), KV_OK);
	rig.backend->ops->host_free(rig.backend, area, kv_selftest_area_bytes());
	rig.backend->ops->pool_destroy(rig.backend, rig.pool);
	rig.backend->ops->destroy(rig.backend);
	kv_pool_spec_destroy(rig.spec);
}
END_TEST

/* Creating the pool fails whole for every allocation. */
START_TEST(test_selftest_spec_out_of_memory)
{
	for (int64_t k = 0;; k++) {
		struct kv_pool_spec *spec = NULL;

		kv_alloc_fail_after(k);

		const enum kv_status status = kv_selftest_spec_create(&spec, NULL);

		kv_alloc_fail_after(-1);
		if (status == KV_OK) {
			ck_assert_int_ge(k, 1);
			kv_pool_spec_destroy(spec);
			return;
		}
		ck_assert_int_eq(status, KV_NO_MEMORY);
		ck_assert_ptr_null(spec);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("selftest");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_selftest_passes_on_the_cpu_backend);
	tcase_add_test(tcase, test_selftest_oracle_is_far_inside_the_tolerance);
	tcase_add_test(tcase, test_selftest_catches_one_wrong_centroid);
	tcase_add_test(tcase, test_selftest_needs_the_block_table);
	tcase_add_test(tcase, test_selftest_check_is_strict);
	tcase_add_test(tcase, test_selftest_spec_out_of_memory);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
