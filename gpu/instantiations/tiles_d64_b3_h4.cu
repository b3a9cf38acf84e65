#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d64_b3_h4, grid<64, 3, 64, 3, 8, 2, 1, 4, 2, false>)
