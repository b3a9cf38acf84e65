#include "gpu/decode_grid.cuh"
KVG_GRID_VARIANT(d128_b3_h8, 3, 64, 2, 12, 2, 4)
