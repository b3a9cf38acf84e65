/*
 * Rows on the device, one warp per row: the same arithmetic as core/format*.c, operation for operation.
 * Stored bytes depend on every rounding here, so whatever includes this for encoding is built with
 * -fmad=false.
 *
 * All functions are called by whole warps; `scratch` is the warp's own shared memory. Numbers of a row lie in
 * shared memory, lane l takes elements l, l + 32, ..; a __syncwarp() ends every function that writes there.
 */
#ifndef GPU_DEVICE_ROWS_CUH
#define GPU_DEVICE_ROWS_CUH

#include "gpu/kernels.h"

#define KVG_F16_OVERFLOW 65520.0f
#define KVG_NORM_MIN     1e-12f

struct kvg_row_scratch {
	double wide[KVG_DIM_MAX];
	float x[KVG_DIM_MAX];    /* the row; what is left of it later */
	float unit[KVG_DIM_MAX]; /* also: decoded values */
	float turned[KVG_DIM_MAX];
	uint8_t row[KVG_ROW_BYTES_MAX + 16];
	uint8_t codes[KVG_DIM_MAX];
};

static __device__ __forceinline__ uint32_t kvg_lane()
{
	return threadIdx.x & 31u;
}

/* ---- numbers ---- */

static __device__ __forceinline__ bool kvg_is_finite(float value)
{
	return (__float_as_uint(value) & 0x7F800000u) != 0x7F800000u;
}

static __device__ __forceinline__ float kvg_f16_to_f32(uint32_t half)
{
	const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 0x1Fu, mantissa = half & 0x3FFu;

	if (exponent == 0) {
		const float abs = (float)mantissa * 5.9604644775390625e-8f; /* 2^-24 */

		return sign ? -abs : abs;
	}
	if (exponent == 0x1Fu)
		return __uint_as_float(sign | 0x7F800000u | mantissa << 13);
	return __uint_as_float(sign | (exponent + 112u) << 23 | mantissa << 13);
}

static __device__ __forceinline__ uint32_t kvg_f32_to_bf16(float value)
{
	const uint32_t bits = __float_as_uint(value);

	if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
		return bits >> 16 | 0x40u;
	return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

static __device__ __forceinline__ uint32_t kvg_f32_to_f16(float value)
{
	const uint32_t bits = __float_as_uint(value), abs = bits & 0x7FFFFFFFu, sign = bits >> 16 & 0x8000u;

	if (abs > 0x7F800000u)
		return sign | 0x7E00u | (abs >> 13 & 0x1FFu);
	if (abs >= 0x47800000u)
		return sign | 0x7C00u;
	if (abs >= 0x38800000u) {
		const uint32_t rebiased = abs - (112u << 23);

		return sign | (rebiased + 0xFFFu + (rebiased >> 13 & 1u)) >> 13;
	}
	if (abs < 0x33000000u)
		return sign;

	const uint32_t mantissa = (abs & 0x7FFFFFu) | 0x800000u, shift = 126u - (abs >> 23);
	const uint32_t kept = mantissa >> shift, half_unit = 1u << (shift - 1);

	return sign | (mantissa + half_unit - 1u + (kept & 1u)) >> shift;
}

static __device__ __forceinline__ uint32_t kvg_f32_to_e4m3(float value)
{
	const uint32_t bits = __float_as_uint(value), abs = bits & 0x7FFFFFFFu, sign = bits >> 24 & 0x80u;

	if (abs > 0x7F800000u)
		return sign | 0x7Fu;
	if (abs >= 0x43E00000u)
		return sign | 0x7Eu;
	if (abs >= 0x3C800000u) {
		const uint32_t rebiased = abs - (120u << 23);

		return sign | (rebiased + 0x7FFFFu + (rebiased >> 20 & 1u)) >> 20;
	}
	if (abs < 0x3A800000u)
		return sign;

	const uint32_t mantissa = (abs & 0x7FFFFFu) | 0x800000u, shift = 141u - (abs >> 23);
	const uint32_t kept = mantissa >> shift, half_unit = 1u << (shift - 1);

	return sign | (mantissa + half_unit - 1u + (kept & 1u)) >> shift;
}

static __device__ __forceinline__ uint32_t kvg_number_bytes(uint32_t number)
{
	return number == KVG_F32 ? 4u : 2u;
}

/* One number at any address. */
static __device__ __forceinline__ float kvg_load_number(const uint8_t *src, uint32_t number)
{
	if (number == KVG_F32) {
		if (((uintptr_t)src & 3u) == 0)
			return *(const float *)src;
		return __uint_as_float((uint32_t)src[0] | (uint32_t)src[1] << 8 | (uint32_t)src[2] << 16 |
			(uint32_t)src[3] << 24);
	}

	const uint32_t bits = ((uintptr_t)src & 1u) == 0 ? *(const uint16_t *)src
							 : (uint32_t)src[0] | (uint32_t)src[1] << 8;

	return number == KVG_F16 ? kvg_f16_to_f32(bits) : __uint_as_float(bits << 16);
}

static __device__ __forceinline__ void kvg_store_number(float value, uint32_t number, uint8_t *dst)
{
	if (number == KVG_F32) {
		const uint32_t bits = __float_as_uint(value);

		if (((uintptr_t)dst & 3u) == 0) {
			*(uint32_t *)dst = bits;
			return;
		}
		for (int i = 0; i < 4; i++)
			dst[i] = (uint8_t)(bits >> 8 * i);
		return;
	}

	const uint32_t bits = number == KVG_F16 ? kvg_f32_to_f16(value) : kvg_f32_to_bf16(value);

	if (((uintptr_t)dst & 1u) == 0) {
		*(uint16_t *)dst = (uint16_t)bits;
	} else {
		dst[0] = (uint8_t)bits;
		dst[1] = (uint8_t)(bits >> 8);
	}
}

/* Code i of a little-endian bit stream. */
static __device__ __forceinline__ uint32_t kvg_code_at(const uint8_t *payload, uint32_t bits, uint32_t i)
{
	const uint32_t bit = i * bits, at = bit >> 3, shift = bit & 7u;
	uint32_t window = payload[at];

	if (shift + bits > 8)
		window |= (uint32_t)payload[at + 1] << 8;
	return window >> shift & ((1u << bits) - 1);
}

static __device__ __forceinline__ const float *kvg_floats(const struct kvg_tables *tables, uint32_t word)
{
	return (const float *)(tables->words + word);
}

/* The codec of K or V rows of one KV head. */
static __device__ __forceinline__ const struct kvg_codec *kvg_codec_of(
	const struct kvg_tables *tables, const struct kvg_layer *layer, bool is_v, uint32_t head)
{
	const uint32_t heads = is_v ? layer->v_heads : layer->k_heads;

	return &tables->codecs[heads != KVG_NONE ? tables->words[heads + head]
			: is_v                   ? layer->v_codec
						 : layer->k_codec];
}

/* What is taken off K rows of one KV head before they are stored; NULL: nothing. */
static __device__ __forceinline__ const float *kvg_center_of(
	const struct kvg_tables *tables, const struct kvg_layer *layer, uint32_t head)
{
	return layer->k_center == KVG_NONE ? NULL
					   : kvg_floats(tables, layer->k_center) + head * tables->k_head_dim;
}

/* ---- lengths ---- */

/* len(v) of FORMATS 0: squares in float64, added as a tree over the next power of two, rounded once. */
static __device__ float kvg_length(const float *values, uint32_t n, double *wide)
{
	const uint32_t lane = kvg_lane();
	uint32_t padded = 32;

	while (padded < n)
		padded *= 2;
	for (uint32_t i = lane; i < padded; i += 32)
		wide[i] = i < n ? (double)values[i] * (double)values[i] : 0.0;
	/* A lane's elements are 32 apart, so down to 32 it adds what is its own; zeros of the padding change
	 * nothing. */
	for (uint32_t half = padded / 2; half >= 32; half /= 2) {
		for (uint32_t i = lane; i < half; i += 32)
			wide[i] += wide[i + half];
	}

	double sum = wide[lane];

	for (uint32_t half = 16; half >= 1; half /= 2)
		sum += __shfl_down_sync(0xFFFFFFFFu, sum, half);
	sum = __shfl_sync(0xFFFFFFFFu, sum, 0);
	__syncwarp();
	return (float)sqrt(sum);
}

/* ---- rotations ---- */

static __device__ void kvg_butterflies(float *x, uint32_t n)
{
	const uint32_t lane = kvg_lane();
	uint32_t first = 0;

	for (uint32_t power = 9; power-- > 0;) {
		const uint32_t block = n & 1u << power;

		for (uint32_t stride = 1, log = 0; stride < block; stride *= 2, log++) {
			for (uint32_t i = lane; i < block / 2; i += 32) {
				const uint32_t at = first + ((i >> log) << (log + 1)) + (i & (stride - 1));
				const float a = x[at], b = x[at + stride];

				x[at] = a + b;
				x[at + stride] = a - b;
			}
			__syncwarp();
		}
		first += block;
	}
}

/* The power of two whose block channel i lies in. */
static __device__ __forceinline__ uint32_t kvg_block_power(uint32_t n, uint32_t i)
{
	uint32_t first = 0;

	for (uint32_t power = 9; power-- > 0;) {
		first += n & 1u << power;
		if (i < first)
			return power;
	}
	return 0;
}

/* to = P from, or P^T from. `from` and `to` are different arrays of shared memory. */
static __device__ void kvg_rotate(const struct kvg_tables *tables, const struct kvg_rotation *rotation,
	bool is_backward, const float *from, float *to)
{
	const uint32_t lane = kvg_lane(), n = rotation->dim;

	if (rotation->is_dense) {
		/* Lanes take results side by side, so that a warp reads the matrix in whole lines. */
		const float *matrix =
			kvg_floats(tables, is_backward ? rotation->matrix : rotation->matrix_transposed);

		for (uint32_t i = lane; i < n; i += 32) {
			double sum = 0;

			for (uint32_t j = 0; j < n; j++)
				sum += (double)matrix[j * n + i] * (double)from[j];
			to[i] = (float)sum;
		}
		__syncwarp();
		return;
	}

	const float *before = kvg_floats(tables, is_backward ? rotation->signs_out : rotation->signs_in);
	const float *after = kvg_floats(tables, is_backward ? rotation->signs_in : rotation->signs_out);

	for (uint32_t i = lane; i < n; i += 32)
		to[i] = before[i] * from[i];
	__syncwarp();
	kvg_butterflies(to, n);
	for (uint32_t i = lane; i < n; i += 32)
		to[i] = after[i] * (to[i] * rotation->factors[kvg_block_power(n, i)]);
	__syncwarp();
}

#endif
