#define AVX512
#define REAL double
#define REAL_IS_DOUBLE
#define KERNELS avx512_double
#include "kernels.h"
