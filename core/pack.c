/* A window of at most 15 bits runs along the stream: values enter at its top, bytes leave at its bottom. */
#include "core/pack.h"

#include "core/error.h"

uint32_t kv_packed_bytes(uint32_t n_values, uint32_t bits)
{
	return (uint32_t)(((uint64_t)n_values * bits + 7) / 8);
}

enum kv_status kv_pack(const uint8_t *values, uint32_t n_values, uint32_t bits, uint8_t *out)
{
	uint32_t window = 0, n_window_bits = 0;

	KV_ASSERT(bits >= 1 && bits <= KV_PACK_BITS_MAX);
	for (uint32_t i = 0; i < n_values; i++) {
		if (values[i] >> bits)
			return KV_BAD_VALUE;
	}
	for (uint32_t i = 0; i < n_values; i++) {
		window |= (uint32_t)values[i] << n_window_bits;
		n_window_bits += bits;
		if (n_window_bits >= 8) {
			*out++ = (uint8_t)(window & 0xFFu);
			window >>= 8;
			n_window_bits -= 8;
		}
	}
	if (n_window_bits != 0)
		*out = (uint8_t)window;
	return KV_OK;
}

void kv_unpack(const uint8_t *packed, uint32_t n_values, uint32_t bits, uint8_t *values)
{
	const uint32_t mask = (1u << bits) - 1;
	uint32_t window = 0, n_window_bits = 0;

	KV_ASSERT(bits >= 1 && bits <= KV_PACK_BITS_MAX);
	if (bits == 4) { /* the common width, and the one whose values never straddle bytes */
		for (uint32_t i = 0; i < n_values / 2; i++) {
			values[2 * i] = packed[i] & 0xFu;
			values[2 * i + 1] = packed[i] >> 4;
		}
		if (n_values % 2 != 0)
			values[n_values - 1] = packed[n_values / 2] & 0xFu;
		return;
	}
	for (uint32_t i = 0; i < n_values; i++) {
		if (n_window_bits < bits) {
			window |= (uint32_t)*packed++ << n_window_bits;
			n_window_bits += 8;
		}
		values[i] = (uint8_t)(window & mask);
		window >>= bits;
		n_window_bits -= bits;
	}
}

bool kv_packed_tail_is_zero(const uint8_t *packed, uint32_t n_bits_used, uint32_t packed_bytes)
{
	const uint32_t n_whole = n_bits_used / 8, n_rest = n_bits_used % 8;
	uint32_t tail = 0;

	for (uint32_t i = n_whole; i < packed_bytes; i++)
		tail |= i == n_whole ? (uint32_t)packed[i] >> n_rest : packed[i];
	return tail == 0;
}
