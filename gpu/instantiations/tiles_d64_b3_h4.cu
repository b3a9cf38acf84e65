#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d64_b3_h4, grid<64, 3, 128, 3, 1, 8>)
