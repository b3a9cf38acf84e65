#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d64_b3_h8, grid<64, 3, 64, 3, 12, 1, 2, 4, 2, false>)
