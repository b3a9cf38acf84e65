#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d64_b2_h4, grid<64, 2, 128, 2, 16, 1, 1, 4, 0, false>)
