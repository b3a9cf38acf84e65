/* Bit packing. Golden bytes are worked out by hand from FORMATS 4. */
#include "core/pack.h"

#include <stdio.h>
#include <string.h>

#include "tests/lib/kv_test.h"

/* Low bits first, values straddle bytes, unused bits are 0. */
START_TEST(test_pack_golden)
{
	static const uint8_t ones[] = { 1, 0, 0, 1, 1, 0, 1, 0, 1, 1 };
	static const uint8_t threes[] = { 5, 3, 7, 1, 0, 6, 2, 4, 1 };
	static const uint8_t fours[] = { 1, 2, 3 };
	static const uint8_t sevens[] = { 127, 0, 65 };
	static const uint8_t eights[] = { 0xAB, 0x01 };
	static const struct {
		const uint8_t *values;
		uint32_t n_values, bits, n_bytes;
		uint8_t packed[5];
	} rows[] = {
		{ ones, 10, 1, 2, { 0x59, 0x03 } },
		{ threes, 9, 3, 4, { 0xDD, 0x03, 0x8B, 0x01 } },
		{ fours, 3, 4, 2, { 0x21, 0x03 } },
		{ sevens, 3, 7, 3, { 0x7F, 0x40, 0x10 } },
		{ eights, 2, 8, 2, { 0xAB, 0x01 } },
		{ ones, 0, 5, 0, { 0 } },
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		uint8_t packed[5], values[16];

		memset(packed, 0xEE, sizeof(packed));
		ck_assert_uint_eq(kv_packed_bytes(rows[i].n_values, rows[i].bits), rows[i].n_bytes);
		ck_assert_int_eq(kv_pack(rows[i].values, rows[i].n_values, rows[i].bits, packed), KV_OK);
		ck_assert_mem_eq(packed, rows[i].packed, rows[i].n_bytes);
		if (rows[i].n_bytes < 5)
			ck_assert_uint_eq(packed[rows[i].n_bytes], 0xEE);
		kv_unpack(packed, rows[i].n_values, rows[i].bits, values);
		ck_assert_mem_eq(values, rows[i].values, rows[i].n_values);
	}
}
END_TEST

/* Any values of any width and number come back, and only their bytes are written. */
START_TEST(test_pack_round_trip)
{
	uint64_t state = 77;

	printf("seed 77\n");
	for (uint32_t bits = 1; bits <= 8; bits++) {
		for (uint32_t n = 0; n <= 70; n++) {
			const uint32_t n_bytes = kv_packed_bytes(n, bits);
			uint8_t values[71], packed[72], back[71];

			for (uint32_t i = 0; i < n; i++)
				values[i] = (uint8_t)(kv_test_random(&state) >> 40 & ((1u << bits) - 1));
			memset(packed, 0xEE, sizeof(packed));
			memset(back, 0xEE, sizeof(back));
			ck_assert_int_eq(kv_pack(values, n, bits, packed), KV_OK);
			ck_assert_uint_eq(packed[n_bytes], 0xEE);
			ck_assert(kv_packed_tail_is_zero(packed, n * bits, n_bytes));
			kv_unpack(packed, n, bits, back);
			ck_assert_mem_eq(back, values, n);
			ck_assert_uint_eq(back[n], 0xEE);
		}
	}
}
END_TEST

/* A value that does not fit is an error at any place, and nothing is written. */
START_TEST(test_pack_refuses_large_values)
{
	for (uint32_t bits = 1; bits <= 7; bits++) {
		for (uint32_t bad = 0; bad < 9; bad++) {
			uint8_t values[9] = { 0 }, packed[9];

			memset(packed, 0xEE, sizeof(packed));
			values[bad] = (uint8_t)(1u << bits);
			ck_assert_int_eq(kv_pack(values, 9, bits, packed), KV_BAD_VALUE);
			for (uint32_t i = 0; i < 9; i++)
				ck_assert_uint_eq(packed[i], 0xEE);
		}
	}
}
END_TEST

/* Each single bit beyond the used ones is noticed, and no used one is. */
START_TEST(test_pack_tail_sees_every_bit)
{
	for (uint32_t n_used = 0; n_used <= 24; n_used++) {
		for (uint32_t bit = 0; bit < 24; bit++) {
			uint8_t packed[3] = { 0 };

			packed[bit / 8] = (uint8_t)(1u << bit % 8);
			ck_assert_int_eq(kv_packed_tail_is_zero(packed, n_used, 3), bit < n_used);
		}
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("pack");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_pack_golden);
	tcase_add_test(tcase, test_pack_round_trip);
	tcase_add_test(tcase, test_pack_refuses_large_values);
	tcase_add_test(tcase, test_pack_tail_sees_every_bit);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
