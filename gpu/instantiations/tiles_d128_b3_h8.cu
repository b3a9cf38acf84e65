#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d128_b3_h8, grid<128, 3, 128, 2, 2, 4>)
