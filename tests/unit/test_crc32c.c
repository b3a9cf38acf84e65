#include "proto/crc32c.h"

#include <stdio.h>
#include <string.h>

#include "tests/lib/kv_test.h"

/* The definition, bit by bit: what both fast ways must agree with. */
static uint32_t crc_by_bits(const uint8_t *data, size_t n_bytes)
{
	uint32_t crc = 0xFFFFFFFFU;

	for (size_t i = 0; i < n_bytes; i++) {
		crc ^= data[i];
		for (int bit = 0; bit < 8; bit++)
			crc = (crc & 1) ? crc >> 1 ^ 0x82F63B78U : crc >> 1;
	}
	return ~crc;
}

/* The check value of the protocol text and the four vectors of RFC 3720 appendix B.4 come out. */
START_TEST(test_crc32c_known_answers)
{
	uint8_t data[32];

	ck_assert_uint_eq(kvp_crc32c(0, "123456789", 9), 0xE3069283U);
	ck_assert_uint_eq(kvp_crc32c(0, NULL, 0), 0);
	memset(data, 0, sizeof(data));
	ck_assert_uint_eq(kvp_crc32c(0, data, 32), 0x8A9136AAU);
	memset(data, 0xFF, sizeof(data));
	ck_assert_uint_eq(kvp_crc32c(0, data, 32), 0x62A8AB43U);
	for (unsigned i = 0; i < 32; i++)
		data[i] = (uint8_t)i;
	ck_assert_uint_eq(kvp_crc32c(0, data, 32), 0x46DD794EU);
	for (unsigned i = 0; i < 32; i++)
		data[i] = (uint8_t)(31 - i);
	ck_assert_uint_eq(kvp_crc32c(0, data, 32), 0x113FDB5CU);
}
END_TEST

/* Each of the 256 entries of the table is what eight steps of the polynomial make of its index. */
START_TEST(test_crc32c_table_is_derived)
{
	for (unsigned i = 0; i < 256; i++) {
		const uint8_t byte = (uint8_t)i;

		ck_assert_uint_eq(kvp_crc32c_table(0, &byte, 1), crc_by_bits(&byte, 1));
	}
}
END_TEST

/* Instruction, table and definition agree at every length around the 3 x 4096 byte rounds and at every
 * alignment. */
START_TEST(test_crc32c_ways_agree)
{
	static const size_t lengths[] = { 0, 1, 7, 8, 9, 60, 63, 64, 65, 4095, 4096, 12287, 12288, 12289,
		12296, 24575, 24576, 24577, 40000 };
	static uint8_t data[40008];
	uint64_t seed = 0x5EED0001;

	printf("test_crc32c seed %llu\n", (unsigned long long)seed);
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(kv_test_random(&seed) >> 32);
	for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
		for (size_t shift = 0; shift < 8; shift++) {
			const uint32_t expected = crc_by_bits(data + shift, lengths[i]);

			ck_assert_uint_eq(kvp_crc32c_table(0, data + shift, lengths[i]), expected);
			ck_assert_uint_eq(kvp_crc32c(0, data + shift, lengths[i]), expected);
			if (kvp_crc32c_has_hw())
				ck_assert_uint_eq(kvp_crc32c_hw(0, data + shift, lengths[i]), expected);
		}
}
END_TEST

/* Feeding a text in any two pieces gives the same as feeding it at once, also when the two ways are mixed. */
START_TEST(test_crc32c_is_incremental)
{
	static uint8_t data[13000];
	uint64_t seed = 0x5EED0002;

	printf("test_crc32c seed %llu\n", (unsigned long long)seed);
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (uint8_t)(kv_test_random(&seed) >> 32);

	const uint32_t whole = crc_by_bits(data, sizeof(data));

	for (size_t cut = 0; cut <= sizeof(data); cut += 97) {
		const uint32_t head = kvp_crc32c(0, data, cut);

		ck_assert_uint_eq(kvp_crc32c(head, data + cut, sizeof(data) - cut), whole);
		ck_assert_uint_eq(kvp_crc32c_table(head, data + cut, sizeof(data) - cut), whole);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("crc32c");
	TCase *tcase = tcase_create("crc32c");

	tcase_add_test(tcase, test_crc32c_known_answers);
	tcase_add_test(tcase, test_crc32c_table_is_derived);
	tcase_add_test(tcase, test_crc32c_ways_agree);
	tcase_add_test(tcase, test_crc32c_is_incremental);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
