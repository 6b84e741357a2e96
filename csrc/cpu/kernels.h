/* All kernels for one instruction set and type of sums, which the including file names. */
#if defined(__x86_64__) || !(defined(AVX2) || defined(AVX512))
#include "checksum.h"
#include "columns.h"
#include "conv.h"
#include "direct.h"
#include "wgrad.h"

const kernels_t KERNELS = {kRows, kLanes, kVectors, kDotColumns, pack, conv, wgrad, direct, col2im, im2col, checksum};
#endif
