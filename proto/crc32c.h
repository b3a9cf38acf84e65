/*
 * CRC-32C (Castagnoli): reflected polynomial 0x82F63B78, start and final xor 0xFFFFFFFF.
 *
 * Incremental: start with 0 and feed the previous result, `crc = kvp_crc32c(crc, next, n_bytes)`. Uses the
 * SSE4.2 instruction where the processor has it, else a table. No state; any thread.
 */
#ifndef PROTO_CRC32C_H
#define PROTO_CRC32C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* `data` may be NULL when n_bytes is 0. */
uint32_t kvp_crc32c(uint32_t crc, const void *data, size_t n_bytes);

/* The two ways that kvp_crc32c() chooses from, for tests and benchmarks. kvp_crc32c_hw() needs has_hw(). */
bool kvp_crc32c_has_hw(void);
uint32_t kvp_crc32c_hw(uint32_t crc, const void *data, size_t n_bytes);
uint32_t kvp_crc32c_table(uint32_t crc, const void *data, size_t n_bytes);

#endif
