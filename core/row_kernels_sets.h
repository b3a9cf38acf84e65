/* The sets that core/row_kernels.c can be compiled into. Included by core/row_kernels*.c only. */
#ifndef CORE_ROW_KERNELS_SETS_H
#define CORE_ROW_KERNELS_SETS_H

#include "core/row_kernels.h"

extern const struct kv_row_kernels kv_row_kernels_baseline;
extern const struct kv_row_kernels kv_row_kernels_avx2;   /* where the build defines KV_HAVE_AVX2_KERNELS */
extern const struct kv_row_kernels kv_row_kernels_avx512; /* KV_HAVE_AVX512_KERNELS */

#endif
