/*
 * Checked 64-bit arithmetic: every size that comes from outside goes through here.
 * The functions return false on overflow and leave `*out` untouched.
 */
#ifndef CORE_CHECKED_H
#define CORE_CHECKED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

static inline bool kv_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
	uint64_t product;

	if (__builtin_mul_overflow(a, b, &product))
		return false;
	*out = product;
	return true;
}

static inline bool kv_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
	uint64_t sum;

	if (__builtin_add_overflow(a, b, &sum))
		return false;
	*out = sum;
	return true;
}

/* Rounds up to a multiple of `unit`, a power of two. */
static inline uint64_t kv_round_up_u64(uint64_t n, uint64_t unit)
{
	return (n + unit - 1) & ~(unit - 1);
}

static inline uint32_t kv_div_up_u32(uint32_t n, uint32_t unit)
{
	return n / unit + (n % unit != 0);
}

#define kv_container_of(ptr, type, member) ((type *)(void *)((char *)(ptr)-offsetof(type, member)))
#define KV_LENGTH(array)                   (sizeof(array) / sizeof((array)[0]))

#endif
