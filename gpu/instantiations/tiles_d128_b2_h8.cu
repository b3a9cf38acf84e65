#include "gpu/decode_grid.cuh"
KVG_TILES_VARIANT(d128_b2_h8, grid<2, 128, 2, 12, 1, 2, 2, 0, false>)
