#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d128_b2_h4, grid<128, 2, 128, 2, 1, 8>)
