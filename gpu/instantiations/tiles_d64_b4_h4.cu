#include "gpu/decode_tiles.cuh"
KVG_TILES_VARIANT(d64_b4_h4, pairs<64, 128, 2, true, 8>)
