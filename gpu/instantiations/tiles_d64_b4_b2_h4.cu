#include "gpu/decode_mixed.cuh"
KVG_TILES_VARIANT(d64_b4_b2_h4, mixed<64, 2, 64, 3, 12, true, 12>)
