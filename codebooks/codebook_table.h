/* The embedded table: written by embed.py, read by codebook.c alone. Sorted by head_dim, then bits. */
#ifndef CODEBOOKS_CODEBOOK_TABLE_H
#define CODEBOOKS_CODEBOOK_TABLE_H

#include "codebooks/codebook.h"

extern const struct kvcb_codebook kvcb_table[];
extern const uint32_t kvcb_table_length;

#endif
