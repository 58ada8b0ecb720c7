// Whatever the compiler targets by default (SSE2 on x86-64, NEON on arm64): 4 floats a vector.
#pragma once

#include "vec.inc.h"

namespace attention_ext {
namespace ATTENTION_EXT_ISA {
namespace {

using Tuning =
    TuningOf</*kVectorBytes=*/16, /*kLaneVectors=*/2, /*kBlockKV=*/96, /*kForwardRows=*/128,
             /*kBackwardBlockKV=*/48, /*kBackwardRows=*/96, /*kCacheBytes=*/256 << 10,
             /*kPrefetchBytes=*/1 << 20>;
#include "vec_types.inc.h"
#include "vec_generic.inc.h"

}  // namespace
}  // namespace ATTENTION_EXT_ISA
}  // namespace attention_ext
