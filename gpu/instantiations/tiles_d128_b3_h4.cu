#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d128_b3_h4, grid<128, 3, 64, 2, 8, 2, 1, 4, 3, false>)
