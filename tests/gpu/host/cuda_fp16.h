#ifndef TESTS_GPU_HOST_CUDA_FP16_H
#define TESTS_GPU_HOST_CUDA_FP16_H

struct __half {
	uint16_t bits;
};

static inline float __half2float(__half half)
{
	const uint32_t sign = (half.bits & 0x8000u) << 16, exponent = half.bits >> 10 & 31u,
		       mantissa = half.bits & 1023u;
	float abs = ldexpf((float)(exponent == 0 ? mantissa : mantissa + 1024u),
		(int)(exponent == 0 ? 1 : exponent) - 25);

	if (exponent == 31)
		abs = mantissa ? NAN : INFINITY;
	return sign ? -abs : abs;
}

#endif
