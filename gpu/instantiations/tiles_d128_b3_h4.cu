#include "gpu/decode_grid.cuh"
KVG_GRID_VARIANT(d128_b3_h4, 3, 64, 2, 12, 1, 4)
