/*
 * Bit packing (FORMATS 4): value i occupies bits [i * bits, (i + 1) * bits) of a little-endian bit stream,
 * low bit first; bits beyond the last value are 0. Any thread, no heap.
 */
#ifndef CORE_PACK_H
#define CORE_PACK_H

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

#define KV_PACK_BITS_MAX 8u

/* ceil(n_values * bits / 8) */
uint32_t kv_packed_bytes(uint32_t n_values, uint32_t bits);

/* BAD_VALUE when a value is above 2^bits - 1; `out` is untouched then. bits is 1 to 8. */
KV_MUST_CHECK enum kv_status kv_pack(const uint8_t *values, uint32_t n_values, uint32_t bits, uint8_t *out);
void kv_unpack(const uint8_t *packed, uint32_t n_values, uint32_t bits, uint8_t *values);

/* True when every bit from bit `n_bits_used` of the stream to the end of its bytes is 0. */
bool kv_packed_tail_is_zero(const uint8_t *packed, uint32_t n_bits_used, uint32_t packed_bytes);

#endif
