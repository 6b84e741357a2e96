#define AVX512
#define REAL float
#define KERNELS avx512_float
#include "kernels.h"
