#include "gpu/decode_tiles.cuh"
KVG_TILES_VARIANT(d64_b4_h8, pairs<64, 128, 2, false, 8>)
