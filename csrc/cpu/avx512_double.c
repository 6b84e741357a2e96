#define AVX512
#define REAL double
#define KERNELS avx512_double
#include "kernels.h"
