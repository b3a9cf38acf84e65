#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d64_b2_h8, grid<64, 2, 128, 3, 2, 8>)
