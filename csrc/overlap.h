// Whether strided tensors share memory: exactly, since a cache may keep keys and values side by
// side, with elements of one between those of the other.
#pragma once

#include <cstdint>

namespace attention_ext {

struct StridedMemory {
  const void* data;
  int64_t element;  // bytes
  int64_t dim;      // at most kMaxDims
  const int64_t* size;
  const int64_t* stride;  // in elements
};

// Whether some element of a and some element of b, both of one size, have a byte in common.
bool overlap(const StridedMemory& a, const StridedMemory& b);

// Whether two different elements of t have.
bool overlaps_itself(const StridedMemory& t);

}  // namespace attention_ext
