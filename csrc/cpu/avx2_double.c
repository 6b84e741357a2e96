#define AVX2
#define REAL double
#define REAL_IS_DOUBLE
#define KERNELS avx2_double
#include "kernels.h"
