#define REAL double
#define REAL_IS_DOUBLE
#define KERNELS portable_double
#include "kernels.h"
