/*
 * Eight values are `bits` whole bytes, so rows are packed eight values at a time through one word, and
 * unpacked the same way or byte by byte where no value straddles bytes. Each width has a loop of its own, in
 * which every shift is known to the compiler. What is left over goes through a window of at most 15 bits that
 * runs along the stream: values enter at its top, bytes leave at its bottom.
 */
#include "core/pack.h"

#include <string.h>

#include "core/error.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the low byte of a word is its first one");

#define GROUP_VALUES 8u

uint32_t kv_packed_bytes(uint32_t n_values, uint32_t bits)
{
	return (uint32_t)(((uint64_t)n_values * bits + 7) / 8);
}

/* Eight values, one in each byte, moved together: in pairs, then fours, then all. */
static inline uint64_t join_values(uint64_t word, uint32_t bits)
{
	const uint64_t one = (((uint64_t)1 << bits) - 1) * 0x0001000100010001u;
	const uint64_t two = (((uint64_t)1 << 2 * bits) - 1) * 0x0000000100000001u;
	const uint64_t four = ((uint64_t)1 << 4 * bits) - 1;

	word = (word & one) | (word >> (8 - bits) & one << bits);
	word = (word & two) | (word >> (16 - 2 * bits) & two << 2 * bits);
	return (word & four) | (word >> (32 - 4 * bits) & four << 4 * bits);
}

static inline void pack_groups(const uint8_t *values, uint32_t n_groups, uint32_t bits, uint8_t *out)
{
	const uint32_t n_per_byte = 8 / bits;

	if (8 % bits == 0) { /* no value straddles bytes: a loop that compilers vectorise */
		for (uint32_t i = 0; i < n_groups * bits; i++) {
			uint32_t byte = 0;

			for (uint32_t k = 0; k < n_per_byte; k++)
				byte |= (uint32_t)values[i * n_per_byte + k] << k * bits;
			out[i] = (uint8_t)byte;
		}
		return;
	}
	for (uint32_t g = 0; g < n_groups; g++) {
		uint64_t word;

		memcpy(&word, values + (size_t)g * GROUP_VALUES, sizeof(word));
		word = join_values(word, bits);
		memcpy(out + (size_t)g * bits, &word, bits);
	}
}

static inline void unpack_groups(const uint8_t *packed, uint32_t n_groups, uint32_t bits, uint8_t *values)
{
	const uint32_t mask = (1u << bits) - 1, n_per_byte = 8 / bits;

	if (8 % bits == 0) { /* no value straddles bytes: a loop that compilers vectorise */
		for (uint32_t i = 0; i < n_groups * bits; i++) {
			for (uint32_t k = 0; k < n_per_byte; k++)
				values[i * n_per_byte + k] = packed[i] >> k * bits & mask;
		}
		return;
	}
	for (uint32_t g = 0; g < n_groups; g++) {
		uint64_t word = 0;

		/* Byte by byte: a word that is copied in pieces is read back before it is written. */
		for (uint32_t k = 0; k < bits; k++)
			word |= (uint64_t)packed[(size_t)g * bits + k] << 8 * k;
		for (uint32_t k = 0; k < GROUP_VALUES; k++)
			values[g * GROUP_VALUES + k] = (uint8_t)(word >> k * bits & mask);
	}
}

#define WIDTHS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)

enum kv_status kv_pack(const uint8_t *values, uint32_t n_values, uint32_t bits, uint8_t *out)
{
	const uint32_t n_groups = n_values / GROUP_VALUES;
	uint32_t window = 0, n_window_bits = 0;
	uint8_t all = 0;

	KV_ASSERT(bits >= 1 && bits <= KV_PACK_BITS_MAX);
	for (uint32_t i = 0; i < n_values; i++)
		all = (uint8_t)(all | values[i]);
	if (all >> bits)
		return KV_BAD_VALUE;
	switch (bits) {
#define PACK_CASE(width)                                     \
	case width:                                          \
		pack_groups(values, n_groups, (width), out); \
		break;
		WIDTHS(PACK_CASE)
#undef PACK_CASE
	}
	out += (size_t)n_groups * bits;
	for (uint32_t i = n_groups * GROUP_VALUES; i < n_values; i++) {
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
	const uint32_t n_groups = n_values / GROUP_VALUES, mask = (1u << bits) - 1;
	uint32_t window = 0, n_window_bits = 0;

	KV_ASSERT(bits >= 1 && bits <= KV_PACK_BITS_MAX);
	switch (bits) {
#define UNPACK_CASE(width)                                        \
	case width:                                               \
		unpack_groups(packed, n_groups, (width), values); \
		break;
		WIDTHS(UNPACK_CASE)
#undef UNPACK_CASE
	}
	packed += (size_t)n_groups * bits;
	for (uint32_t i = n_groups * GROUP_VALUES; i < n_values; i++) {
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
