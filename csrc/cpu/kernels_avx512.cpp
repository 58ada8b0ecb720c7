#include "vec_avx512.h"

#include "kernels.inc.h"
