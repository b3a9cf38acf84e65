#include "gpu/decode_mixed.cuh"
KVG_TILES_VARIANT(d64_b4_b2_h8, mixed<64, 2, 128, 2, false, 8>)
