// The constants that make up an instruction set; vec_<set>.h fills them in.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

namespace attention_ext {
namespace ATTENTION_EXT_ISA {
namespace {

template <int kVectorBytes_, int kLaneVectors_, int kBlockKV_, int kForwardRows_,
          int kBackwardBlockKV_, int kBackwardRows_, int kCacheBytes_, int kPrefetchBytes_>
struct TuningOf {
  static constexpr int kVectorBytes = kVectorBytes_;
  static constexpr int kLaneVectors =
      kLaneVectors_;                          // vectors of queries side by side in a lane tile
  static constexpr int kBlockKV = kBlockKV_;  // keys per kv tile
  static constexpr int kForwardRows = kForwardRows_;  // rows per super-block that shares a kv tile
  static constexpr int kBackwardBlockKV = kBackwardBlockKV_;  // the same two in the backward
  static constexpr int kBackwardRows = kBackwardRows_;
  static constexpr int kCacheBytes = kCacheBytes_;  // what a super-block may fill of the L2 cache
  static constexpr int kPrefetchBytes =
      kPrefetchBytes_;  // of K and V, from which decoding fetches ahead
};

}  // namespace
}  // namespace ATTENTION_EXT_ISA
}  // namespace attention_ext
