#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d128_b2_h8, grid<128, 2, 128, 2, 2, 4>)
