#include "gpu/decode_grid.cuh"
KVG_GRID_VARIANT(d128_b2_h4, 2, 128, 2, 12, 1, 4)
