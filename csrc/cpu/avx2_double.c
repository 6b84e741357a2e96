#define AVX2
#define REAL double
#define KERNELS avx2_double
#include "kernels.h"
