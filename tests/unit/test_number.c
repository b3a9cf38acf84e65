/*
 * Number conversions. Narrowing is checked at every place where its result changes: midway between each pair
 * of neighbours of the narrow type, and one float32 to either side. Between such places rounding is constant.
 */
#include "core/number.h"

#include <math.h>

#include "tests/lib/kv_test.h"

static float next_up(float value)
{
	return nextafterf(value, INFINITY);
}

static float next_down(float value)
{
	return nextafterf(value, -INFINITY);
}

/* Every bfloat16 that is not NaN survives a round trip. */
START_TEST(test_number_bf16_round_trip)
{
	for (uint32_t b = 0; b <= 0xFFFF; b++) {
		if ((b & 0x7FFF) <= 0x7F80)
			ck_assert_uint_eq(kv_f32_to_bf16(kv_bf16_to_f32((uint16_t)b)), b);
	}
}
END_TEST

/* Between two neighbouring bfloat16 the nearer one is taken, the even one midway; both signs. */
START_TEST(test_number_bf16_rounds_to_nearest_even)
{
	for (uint32_t low = 0; low < 0x7F7F; low++) {
		const uint32_t high = low + 1, even = low & 1 ? high : low;
		/* exact: one more bit than a bfloat16 has */
		const double a = (double)kv_bf16_to_f32((uint16_t)low);
		const double b = (double)kv_bf16_to_f32((uint16_t)high);
		const float middle = (float)((a + b) / 2);

		ck_assert_uint_eq(kv_f32_to_bf16(middle), even);
		ck_assert_uint_eq(kv_f32_to_bf16(next_down(middle)), low);
		ck_assert_uint_eq(kv_f32_to_bf16(next_up(middle)), high);
		ck_assert_uint_eq(kv_f32_to_bf16(-middle), even | 0x8000);
		ck_assert_uint_eq(kv_f32_to_bf16(-next_down(middle)), low | 0x8000);
		ck_assert_uint_eq(kv_f32_to_bf16(-next_up(middle)), high | 0x8000);
	}
}
END_TEST

/* From midway between the largest bfloat16 and 2^128 on, values become infinity; below it they do not. */
START_TEST(test_number_bf16_overflows_to_infinity)
{
	const float middle = kv_f32_from_bits(0x7F7F8000);

	ck_assert_uint_eq(kv_f32_to_bf16(next_down(middle)), 0x7F7F);
	ck_assert_uint_eq(kv_f32_to_bf16(middle), 0x7F80);
	ck_assert_uint_eq(kv_f32_to_bf16(-middle), 0xFF80);
	ck_assert_uint_eq(kv_f32_to_bf16(INFINITY), 0x7F80);
}
END_TEST

/*
 * The result of a conversion can be used under a condition: a compiler that keeps the unrounded float (the
 * fault of gcc 12.2 with conditional masks) is caught, in a loop that it may vectorise.
 */
START_TEST(test_number_bf16_survives_optimisation)
{
	volatile uint32_t seed = 0x3F801234;
	float values[64], rounded[64];

	for (uint32_t i = 0; i < 64; i++)
		values[i] = kv_f32_from_bits(seed + i * 0x2FFF);
	for (uint32_t i = 0; i < 64; i++)
		rounded[i] = values[i] > 0 ? kv_bf16_to_f32(kv_f32_to_bf16(values[i])) : values[i];
	for (uint32_t i = 0; i < 64; i++) {
		ck_assert_uint_eq(kv_f32_bits(rounded[i]) & 0xFFFF, 0);
		ck_assert_double_le(fabs((double)rounded[i] / (double)values[i] - 1), 1.0 / 256);
	}
}
END_TEST

/* Hand-made float16 values, subnormals and both infinities included. */
START_TEST(test_number_f16_golden)
{
	static const struct {
		uint16_t half;
		float value;
	} rows[] = {
		{ 0x0000, 0.0f },
		{ 0x8000, -0.0f },
		{ 0x0001, 0x1p-24f },
		{ 0x83FF, -0x1.ff8p-15f },
		{ 0x0400, 0x1p-14f },
		{ 0x3555, 0x1.554p-2f },
		{ 0x3C00, 1.0f },
		{ 0xC000, -2.0f },
		{ 0x7BFF, 65504.0f },
		{ 0x7C00, INFINITY },
		{ 0xFC00, -INFINITY },
	};

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		ck_assert_uint_eq(kv_f32_bits(kv_f16_to_f32(rows[i].half)), kv_f32_bits(rows[i].value));
		ck_assert_uint_eq(kv_f32_to_f16(rows[i].value), rows[i].half);
	}
}
END_TEST

/* Every float16 that is not NaN survives a round trip. */
START_TEST(test_number_f16_round_trip)
{
	for (uint32_t h = 0; h <= 0xFFFF; h++) {
		if ((h & 0x7FFF) <= 0x7C00)
			ck_assert_uint_eq(kv_f32_to_f16(kv_f16_to_f32((uint16_t)h)), h);
	}
}
END_TEST

/* Between two neighbouring float16 the nearer one is taken, the even one midway; both signs. */
START_TEST(test_number_f16_rounds_to_nearest_even)
{
	for (uint32_t low = 0; low < 0x7BFF; low++) {
		const uint32_t high = low + 1, even = low & 1 ? high : low;
		const float middle =
			(kv_f16_to_f32((uint16_t)low) + kv_f16_to_f32((uint16_t)high)) / 2; /* exact */

		ck_assert_uint_eq(kv_f32_to_f16(middle), even);
		ck_assert_uint_eq(kv_f32_to_f16(next_down(middle)), low);
		ck_assert_uint_eq(kv_f32_to_f16(next_up(middle)), high);
		ck_assert_uint_eq(kv_f32_to_f16(-middle), even | 0x8000);
		ck_assert_uint_eq(kv_f32_to_f16(-next_up(middle)), high | 0x8000);
	}
	ck_assert_uint_eq(kv_f32_to_f16(next_down(65520.0f)), 0x7BFF);
	ck_assert_uint_eq(kv_f32_to_f16(65520.0f), 0x7C00);
	ck_assert_uint_eq(kv_f32_to_f16(3e38f), 0x7C00);
	ck_assert_uint_eq(kv_f32_to_f16(kv_f32_from_bits(1)), 0);
}
END_TEST

/* The value of an E4M3 code, by the definition of the type. */
static double e4m3_value(uint32_t code)
{
	const uint32_t exponent = code >> 3 & 0xF, mantissa = code & 7;
	const double size = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, (int)exponent - 10);

	return code & 0x80 ? -size : size;
}

/* Every E4M3 number survives a round trip, and both zeros keep their sign. */
START_TEST(test_number_e4m3_round_trip)
{
	for (uint32_t code = 0; code < 256; code++) {
		if ((code & 0x7F) != 0x7F)
			ck_assert_uint_eq(kv_f32_to_e4m3((float)e4m3_value(code)), code);
	}
	ck_assert_uint_eq(kv_f32_to_e4m3(-0.0f), 0x80);
	ck_assert(e4m3_value(0x7E) == (double)KV_E4M3_MAX);
}
END_TEST

/* Between two neighbouring E4M3 numbers the nearer one is taken, the even one midway; both signs. */
START_TEST(test_number_e4m3_rounds_to_nearest_even)
{
	for (uint32_t low = 0; low < 0x7E; low++) {
		const uint32_t high = low + 1, even = low & 1 ? high : low;
		const float middle = (float)((e4m3_value(low) + e4m3_value(high)) / 2); /* exact */

		ck_assert_uint_eq(kv_f32_to_e4m3(middle), even);
		ck_assert_uint_eq(kv_f32_to_e4m3(next_down(middle)), low);
		ck_assert_uint_eq(kv_f32_to_e4m3(next_up(middle)), high);
		ck_assert_uint_eq(kv_f32_to_e4m3(-middle), even | 0x80);
		ck_assert_uint_eq(kv_f32_to_e4m3(-next_down(middle)), low | 0x80);
		ck_assert_uint_eq(kv_f32_to_e4m3(-next_up(middle)), high | 0x80);
	}
	ck_assert_uint_eq(kv_f32_to_e4m3(kv_f32_from_bits(1)), 0);
	ck_assert_uint_eq(kv_f32_to_e4m3(kv_f32_from_bits(0x80000001)), 0x80);
}
END_TEST

/* Beyond 448 a value saturates, infinity too; only NaN becomes NaN. */
START_TEST(test_number_e4m3_saturates)
{
	static const float large[] = { 448.00003f, 464, 465, 1e30f, INFINITY };

	for (size_t i = 0; i < sizeof(large) / sizeof(large[0]); i++) {
		ck_assert_uint_eq(kv_f32_to_e4m3(large[i]), 0x7E);
		ck_assert_uint_eq(kv_f32_to_e4m3(-large[i]), 0xFE);
	}
	ck_assert_uint_eq(kv_f32_to_e4m3(kv_f32_from_bits(0x7FC00000)), 0x7F);
	ck_assert_uint_eq(kv_f32_to_e4m3(kv_f32_from_bits(0xFF800001)), 0xFF);
}
END_TEST

/* NaN stays NaN whatever its payload, in both narrow types and back. */
START_TEST(test_number_nan_stays_nan)
{
	static const uint32_t patterns[] = { 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF, 0xFF80FFFF };

	for (size_t i = 0; i < sizeof(patterns) / sizeof(patterns[0]); i++) {
		const float nan = kv_f32_from_bits(patterns[i]);

		ck_assert(isnan(kv_bf16_to_f32(kv_f32_to_bf16(nan))));
		ck_assert(isnan(kv_f16_to_f32(kv_f32_to_f16(nan))));
	}
}
END_TEST

/* Finite means neither NaN nor infinity; one bad value among many is found wherever it is. */
START_TEST(test_number_finds_values_that_are_not_finite)
{
	float values[37];

	for (uint32_t i = 0; i < 37; i++)
		values[i] = kv_f32_from_bits(0x7F7FFFFF);
	ck_assert(kv_rows_are_finite(values, 37));
	ck_assert(kv_rows_are_finite(values, 0));
	for (uint32_t i = 0; i < 37; i++) {
		const uint32_t bad[] = { 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001 };

		values[i] = kv_f32_from_bits(bad[i % 4]);
		ck_assert(!kv_rows_are_finite(values, 37));
		values[i] = -0.0f;
	}
	ck_assert(kv_rows_are_finite(values, 37));
}
END_TEST

/* Rows are little-endian, may lie at any address, and nothing beside them is written. */
START_TEST(test_number_rows_are_little_endian_and_unaligned)
{
	static const float values[3] = { 1.5f, -0.0f, 0x1p-14f };
	static const uint8_t f32[] = { 0, 0, 0xC0, 0x3F, 0, 0, 0, 0x80, 0, 0, 0x80, 0x38 };
	static const uint8_t f16[] = { 0, 0x3E, 0, 0x80, 0, 0x04 };
	static const uint8_t bf16[] = { 0xC0, 0x3F, 0, 0x80, 0x80, 0x38 };
	static const struct {
		enum kv_dtype dtype;
		const uint8_t *bytes;
	} rows[] = { { KV_DTYPE_F32, f32 }, { KV_DTYPE_F16, f16 }, { KV_DTYPE_BF16, bf16 } };

	for (size_t r = 0; r < 3; r++) {
		const size_t n_bytes = 3 * kv_dtype_bytes(rows[r].dtype);
		uint8_t stored[16];
		float loaded[3];

		memset(stored, 0xEE, sizeof(stored));
		kv_rows_store(rows[r].dtype, values, 3, stored + 1);
		ck_assert_mem_eq(stored + 1, rows[r].bytes, n_bytes);
		ck_assert_uint_eq(stored[0], 0xEE);
		ck_assert_uint_eq(stored[1 + n_bytes], 0xEE);
		kv_rows_load_f32(rows[r].dtype, stored + 1, 3, loaded);
		ck_assert_mem_eq(loaded, values, sizeof(values));
	}
}
END_TEST

/* Sizes and names go with the wire's numbers. */
START_TEST(test_number_dtypes_are_those_of_the_wire)
{
	static const struct {
		int number;
		uint32_t n_bytes;
		const char *name;
	} rows[] = { { 0, 0, "none" }, { 1, 4, "f32" }, { 2, 2, "f16" }, { 3, 2, "bf16" },
		{ 16, 0, "packed" }, { 7, 0, "unknown" } };

	for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
		ck_assert_uint_eq(kv_dtype_bytes((enum kv_dtype)rows[i].number), rows[i].n_bytes);
		ck_assert_str_eq(kv_dtype_name((enum kv_dtype)rows[i].number), rows[i].name);
	}
}
END_TEST

int main(void)
{
	Suite *suite = suite_create("number");
	TCase *tcase = tcase_create("all");

	tcase_add_test(tcase, test_number_bf16_round_trip);
	tcase_add_test(tcase, test_number_bf16_rounds_to_nearest_even);
	tcase_add_test(tcase, test_number_bf16_overflows_to_infinity);
	tcase_add_test(tcase, test_number_bf16_survives_optimisation);
	tcase_add_test(tcase, test_number_f16_golden);
	tcase_add_test(tcase, test_number_f16_round_trip);
	tcase_add_test(tcase, test_number_f16_rounds_to_nearest_even);
	tcase_add_test(tcase, test_number_e4m3_round_trip);
	tcase_add_test(tcase, test_number_e4m3_rounds_to_nearest_even);
	tcase_add_test(tcase, test_number_e4m3_saturates);
	tcase_add_test(tcase, test_number_nan_stays_nan);
	tcase_add_test(tcase, test_number_finds_values_that_are_not_finite);
	tcase_add_test(tcase, test_number_rows_are_little_endian_and_unaligned);
	tcase_add_test(tcase, test_number_dtypes_are_those_of_the_wire);
	suite_add_tcase(suite, tcase);
	return kv_test_run(suite, CK_FORK);
}
