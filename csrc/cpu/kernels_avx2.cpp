#include "vec_avx2.h"

#include "kernels.inc.h"
