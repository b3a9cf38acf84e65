/*
 * The matrix of a qr rotation: Q of the Householder QR of a Gaussian matrix, in float64, with the signs that
 * make it unique and a determinant of +1 (FORMATS 2). Included by core/rotation.c.
 */
#ifndef CORE_ROTATION_QR_H
#define CORE_ROTATION_QR_H

#include <stdint.h>

#include "proto/status.h"

/* Fills matrix[head_dim, head_dim], row-major. NO_MEMORY when the float64 work arrays cannot be had. */
KV_MUST_CHECK enum kv_status kv_rotation_qr_fill(uint32_t head_dim, uint32_t seed, float *matrix);

#endif
