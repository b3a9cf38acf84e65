/*
 * Bytes of the wire: little-endian loads and stores at any address.
 *
 * Only byte access, so neither the machine's byte order nor alignment matters; compilers turn each into one
 * move. No state; any thread.
 */
#ifndef PROTO_BYTES_H
#define PROTO_BYTES_H

#include <stdint.h>
#include <string.h>

static inline uint8_t kvp_get_u8(const uint8_t *in)
{
	return in[0];
}

static inline uint16_t kvp_get_u16(const uint8_t *in)
{
	return (uint16_t)(in[0] | in[1] << 8);
}

static inline uint32_t kvp_get_u32(const uint8_t *in)
{
	return (uint32_t)in[0] | (uint32_t)in[1] << 8 | (uint32_t)in[2] << 16 | (uint32_t)in[3] << 24;
}

static inline uint64_t kvp_get_u64(const uint8_t *in)
{
	return (uint64_t)kvp_get_u32(in) | (uint64_t)kvp_get_u32(in + 4) << 32;
}

/* IEEE-754 binary32; the bits pass through unchanged, signalling NaN included. */
static inline float kvp_get_f32(const uint8_t *in)
{
	const uint32_t bits = kvp_get_u32(in);
	float value;

	memcpy(&value, &bits, sizeof(value));
	return value;
}

static inline void kvp_put_u8(uint8_t *out, uint8_t value)
{
	out[0] = value;
}

static inline void kvp_put_u16(uint8_t *out, uint16_t value)
{
	out[0] = (uint8_t)value;
	out[1] = (uint8_t)(value >> 8);
}

static inline void kvp_put_u32(uint8_t *out, uint32_t value)
{
	kvp_put_u16(out, (uint16_t)value);
	kvp_put_u16(out + 2, (uint16_t)(value >> 16));
}

static inline void kvp_put_u64(uint8_t *out, uint64_t value)
{
	kvp_put_u32(out, (uint32_t)value);
	kvp_put_u32(out + 4, (uint32_t)(value >> 32));
}

static inline void kvp_put_f32(uint8_t *out, float value)
{
	uint32_t bits;

	memcpy(&bits, &value, sizeof(bits));
	kvp_put_u32(out, bits);
}

#endif
