#include "gpu/decode_grid.cuh"
KVG_GRID_VARIANT(d128_b2_h8, 2, 128, 2, 8, 2, 4)
