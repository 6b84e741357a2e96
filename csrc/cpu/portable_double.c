#define REAL double
#define KERNELS portable_double
#include "kernels.h"
