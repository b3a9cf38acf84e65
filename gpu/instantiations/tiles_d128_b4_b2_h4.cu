#include "gpu/decode_mixed.cuh"
KVG_TILES_VARIANT(d128_b4_b2_h4, mixed<128, 2, 96, 2, true, 8>)
