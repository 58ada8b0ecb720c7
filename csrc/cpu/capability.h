// The instruction sets that this library was built with, and which of them runs.
#pragma once

#include "kernels.h"

namespace attention_ext {

// The set in use: the best that the processor has, or the one that ATTENTION_EXT_CPU_CAPABILITY
// names. A name that is unknown or that the processor lacks throws, listing the valid ones.
const Kernels& kernels();

}  // namespace attention_ext
