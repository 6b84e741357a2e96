#define AVX2
#define REAL float
#define KERNELS avx2_float
#include "kernels.h"
