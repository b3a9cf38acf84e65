#include "gpu/decode_tiles.cuh"
KVG_TILES_VARIANT(d128_b4_h4, pairs<128, 64, 2, true, 8>)
