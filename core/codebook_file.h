/*
 * Codebook files: a user's own codebook in the schema of codebooks/codebook_d{d}_b{b}.json, which may replace
 * a built-in one. The text comes from outside, so every number is checked; reading the file is the caller's.
 * Any thread.
 */
#ifndef CORE_CODEBOOK_FILE_H
#define CORE_CODEBOOK_FILE_H

#include <stddef.h>

#include "codebooks/codebook.h"
#include "core/error.h"

#define KV_CODEBOOK_FILE_BYTES_MAX (64u << 10) /* 513 numbers of 25 characters are 13 KiB */

/*
 * Fills *codebook, every number rounded once to float32. BAD_CONFIG with the line, or the member and what is
 * wrong with it: members `d`, `bits`, `centroids` [2^bits] and `boundaries` [2^bits + 1] from -1 to 1, both
 * ascending and symmetric within 1e-6, every centroid in its cell; `mse_per_coord` and `mse_total` = d times
 * it. Other members are ignored.
 */
KV_MUST_CHECK enum kv_status kv_codebook_file_parse(
	const char *text, size_t text_bytes, struct kvcb_codebook *codebook, struct kv_error *err);

#endif
