#include "gpu/decode_tiles.cuh"
KVG_TILES_VARIANT(d128_b4_h8, pairs<128, 48, 2, 12, false, 6>)
