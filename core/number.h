/*
 * Numbers on the wire and in rows: float32, float16, bfloat16, little-endian, unaligned.
 *
 * Narrowing is to nearest, ties to even, with subnormals, and keeps NaN a NaN. A value beyond the narrow
 * type's range becomes infinity: formats that must not store one check before they convert. Widening is
 * exact. Pure functions, any thread, no heap. Source and destination may not overlap.
 */
#ifndef CORE_NUMBER_H
#define CORE_NUMBER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* The numbers are those of the wire (PROTOCOL 1). */
enum kv_dtype {
	KV_DTYPE_NONE = 0,
	KV_DTYPE_F32 = 1,
	KV_DTYPE_F16 = 2,
	KV_DTYPE_BF16 = 3,
	KV_DTYPE_PACKED = 16, /* rows in the layer's own format; has no size of its own */
};

/* Bytes of one number; 0 for NONE, PACKED and numbers that are not a dtype. */
uint32_t kv_dtype_bytes(enum kv_dtype dtype);
/* "f32", "f16", "bf16", "packed", "none"; "unknown" for anything else. */
const char *kv_dtype_name(enum kv_dtype dtype);

static inline uint32_t kv_f32_bits(float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	return bits;
}

static inline float kv_f32_from_bits(uint32_t bits)
{
	float value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

/* By exponent bits, so that no compiler flag can turn it into "always true". */
static inline bool kv_f32_is_finite(float value)
{
	return (kv_f32_bits(value) & 0x7F800000u) != 0x7F800000u;
}

uint16_t kv_f32_to_bf16(float value);
/* From here on, either sign, a value becomes an infinite float16. */
#define KV_F16_OVERFLOW 65520.0f
uint16_t kv_f32_to_f16(float value);
float kv_f16_to_f32(uint16_t half);
/*
 * OCP E4M3: sign, 4 exponent bits, 3 mantissa bits; no infinity, 0x7F and 0xFF are NaN, the largest number is
 * 448. Saturating: anything beyond it, infinity included, becomes 448. NaN stays NaN. The sign is always
 * kept.
 */
#define KV_E4M3_MAX 448.0f
uint8_t kv_f32_to_e4m3(float value);

static inline float kv_bf16_to_f32(uint16_t bfloat)
{
	return kv_f32_from_bits((uint32_t)bfloat << 16);
}

/* Little-endian fields at any address; the hosts that are served are little-endian themselves. */
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rows are little-endian");

static inline float kv_load_f32(const uint8_t *src)
{
	float value;

	memcpy(&value, src, sizeof(value));
	return value;
}

static inline void kv_store_f32(float value, uint8_t *dst)
{
	memcpy(dst, &value, sizeof(value));
}

static inline uint16_t kv_load_u16(const uint8_t *src)
{
	uint16_t value;

	memcpy(&value, src, sizeof(value));
	return value;
}

static inline void kv_store_u16(uint16_t value, uint8_t *dst)
{
	memcpy(dst, &value, sizeof(value));
}

/* `n` numbers of a dtype that has a size (1, 2, 3), back to back at any address, to floats and back. */
void kv_rows_load_f32(enum kv_dtype dtype, const void *src, size_t n, float *dst);
void kv_rows_store(enum kv_dtype dtype, const float *src, size_t n, void *dst);

/* True when none of the values is NaN or infinity. */
bool kv_rows_are_finite(const float *values, size_t n);

#endif
