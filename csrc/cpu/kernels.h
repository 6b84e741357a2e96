/* All kernels for one instruction set and type of sums, which the including file names. */
#include "columns.h"
#include "conv.h"
#include "direct.h"
#include "wgrad.h"

const kernels_t KERNELS = {kRows, kLanes, kVectors, kDotColumns, pack, conv, wgrad, direct, col2im, im2col};
