#include "gpu/decode_mixed.cuh"
KVG_TILES_VARIANT(d128_b4_b2_h8, mixed<128, 2, 96, 2, false, 4>)
