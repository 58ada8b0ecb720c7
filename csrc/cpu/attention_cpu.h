// The forward over all units, for every operator that attends.
#pragma once

#include "kernels.h"

namespace attention_ext {

// Fills in output, lse and, if there is one, state; brings the threads.
void run_forward(const AttentionParams& p, const KernelTable& kernel);

}  // namespace attention_ext
