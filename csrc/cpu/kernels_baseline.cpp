#include "vec_baseline.h"

#include "kernels.inc.h"
