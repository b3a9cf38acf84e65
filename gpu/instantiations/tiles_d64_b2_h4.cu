#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d64_b2_h4, grid<64, 2, 256, 2, 1, 8>)
