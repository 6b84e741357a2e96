#define REAL float
#define KERNELS portable_float
#include "kernels.h"
