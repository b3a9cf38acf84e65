/*
 * Conversions by integer arithmetic on the bits: the same result for every compiler, flag and processor.
 * Narrowing adds half a unit of the last kept place and lets the carry run; no step masks a float's bits
 * under a condition and converts back, which gcc 12.2 is known to drop.
 */
#include "core/number.h"

#include <float.h>

#include "core/error.h"
#include "core/row_kernels.h"

_Static_assert(FLT_EVAL_METHOD == 0, "stored bytes need float32 arithmetic without excess precision");
_Static_assert(FLT_MANT_DIG == 24 && DBL_MANT_DIG == 53, "stored bytes need IEEE 754 numbers");

#define F32_ABS_MASK  0x7FFFFFFFu
#define F32_INFINITY  0x7F800000u
#define F16_INFINITY  0x7C00u
#define F16_QUIET_NAN 0x7E00u
#define E4M3_MAX      0x7Eu
#define E4M3_NAN      0x7Fu

uint32_t kv_dtype_bytes(enum kv_dtype dtype)
{
	switch (dtype) {
	case KV_DTYPE_F32:
		return 4;
	case KV_DTYPE_F16:
	case KV_DTYPE_BF16:
		return 2;
	case KV_DTYPE_NONE:
	case KV_DTYPE_PACKED:
		break;
	}
	return 0;
}

const char *kv_dtype_name(enum kv_dtype dtype)
{
	switch (dtype) {
	case KV_DTYPE_NONE:
		return "none";
	case KV_DTYPE_F32:
		return "f32";
	case KV_DTYPE_F16:
		return "f16";
	case KV_DTYPE_BF16:
		return "bf16";
	case KV_DTYPE_PACKED:
		return "packed";
	}
	return "unknown";
}

uint16_t kv_f32_to_bf16(float value)
{
	const uint32_t bits = kv_f32_bits(value);

	if ((bits & F32_ABS_MASK) > F32_INFINITY)
		return (uint16_t)(bits >> 16 | 0x40u); /* quiet; the payload's top bits stay */
	/* Half a unit, less one when the kept part is even; infinity has no low bits and stays. */
	return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

uint16_t kv_f32_to_f16(float value)
{
	const uint32_t bits = kv_f32_bits(value);
	const uint32_t abs = bits & F32_ABS_MASK;
	const uint32_t sign = bits >> 16 & 0x8000u;

	if (abs > F32_INFINITY)
		return (uint16_t)(sign | F16_QUIET_NAN | (abs >> 13 & 0x1FFu));
	if (abs >= 0x47800000u) /* 2^16: beyond every float16, also before rounding */
		return (uint16_t)(sign | F16_INFINITY);
	if (abs >= 0x38800000u) {
		/* 2^-14 and up: rebias the exponent by 127 - 15, drop 13 bits; 65520 carries into infinity.
		 */
		const uint32_t rebiased = abs - (112u << 23);

		return (uint16_t)(sign | (rebiased + 0xFFFu + (rebiased >> 13 & 1u)) >> 13);
	}
	if (abs < 0x33000000u) /* below 2^-25: less than half of the smallest subnormal */
		return (uint16_t)sign;

	/* Subnormal: the value is mantissa * 2^(exponent - 150), a unit is 2^-24. */
	const uint32_t exponent = abs >> 23;
	const uint32_t mantissa = (abs & 0x7FFFFFu) | 0x800000u;
	const uint32_t shift = 126u - exponent; /* 14 to 24 */
	const uint32_t kept = mantissa >> shift;
	const uint32_t half_unit = 1u << (shift - 1);

	return (uint16_t)(sign | (mantissa + half_unit - 1u + (kept & 1u)) >> shift);
}

float kv_f16_to_f32(uint16_t half)
{
	const uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
	const uint32_t exponent = half >> 10 & 0x1Fu;
	const uint32_t mantissa = half & 0x3FFu;

	if (exponent == 0) { /* zero or subnormal: mantissa * 2^-24, exact */
		const float abs = (float)mantissa * 0x1p-24f;

		return sign ? -abs : abs;
	}
	if (exponent == 0x1Fu)
		return kv_f32_from_bits(sign | F32_INFINITY | mantissa << 13);
	return kv_f32_from_bits(sign | (exponent + 112u) << 23 | mantissa << 13);
}

uint8_t kv_f32_to_e4m3(float value)
{
	const uint32_t bits = kv_f32_bits(value);
	const uint32_t abs = bits & F32_ABS_MASK;
	const uint32_t sign = bits >> 24 & 0x80u;

	if (abs > F32_INFINITY)
		return (uint8_t)(sign | E4M3_NAN);
	if (abs >= 0x43E00000u) /* 448 */
		return (uint8_t)(sign | E4M3_MAX);
	if (abs >= 0x3C800000u) {
		/* 2^-6 and up: rebias the exponent by 127 - 7, drop 20 bits. */
		const uint32_t rebiased = abs - (120u << 23);

		return (uint8_t)(sign | (rebiased + 0x7FFFFu + (rebiased >> 20 & 1u)) >> 20);
	}
	if (abs < 0x3A800000u) /* below 2^-10: less than half of the smallest subnormal */
		return (uint8_t)sign;

	/* Subnormal: the value is mantissa * 2^(exponent - 150), a unit is 2^-9. */
	const uint32_t exponent = abs >> 23;
	const uint32_t mantissa = (abs & 0x7FFFFFu) | 0x800000u;
	const uint32_t shift = 141u - exponent; /* 21 to 24 */
	const uint32_t kept = mantissa >> shift;
	const uint32_t half_unit = 1u << (shift - 1);

	return (uint8_t)(sign | (mantissa + half_unit - 1u + (kept & 1u)) >> shift);
}

void kv_rows_load_f32(enum kv_dtype dtype, const void *src, size_t n, float *dst)
{
	const uint8_t *bytes = src;

	KV_ASSERT(kv_dtype_bytes(dtype) != 0);
	if (dtype == KV_DTYPE_F32) {
		memcpy(dst, bytes, n * sizeof(float));
	} else if (dtype == KV_DTYPE_F16) {
		for (size_t i = 0; i < n; i++)
			dst[i] = kv_f16_to_f32(kv_load_u16(bytes + 2 * i));
	} else {
		kv_row_kernels()->widen_bf16(bytes, n, dst);
	}
}

void kv_rows_store(enum kv_dtype dtype, const float *src, size_t n, void *dst)
{
	uint8_t *bytes = dst;

	KV_ASSERT(kv_dtype_bytes(dtype) != 0);
	if (dtype == KV_DTYPE_F32) {
		memcpy(bytes, src, n * sizeof(float));
	} else if (dtype == KV_DTYPE_F16) {
		for (size_t i = 0; i < n; i++)
			kv_store_u16(kv_f32_to_f16(src[i]), bytes + 2 * i);
	} else {
		for (size_t i = 0; i < n; i++)
			kv_store_u16(kv_f32_to_bf16(src[i]), bytes + 2 * i);
	}
}

bool kv_rows_are_finite(const float *values, size_t n)
{
	uint32_t n_bad = 0;

	for (size_t i = 0; i < n; i++)
		n_bad += !kv_f32_is_finite(values[i]);
	return n_bad == 0;
}
