// Which keys may query i see: what hides a score, as opposed to what changes it (score.inc.h).
// Integers only.
//
// Causality, windows and lengths hide all but one interval of keys, and both ends of the interval
// grow with i. The kernels rely on that: whole tiles are skipped or known to be visible from the
// first and last row alone.
#pragma once

#include "params.h"

namespace attention_ext {

struct KeyRange {
  int64_t begin;  // first visible key
  int64_t end;    // one past the last; begin == end: the query sees nothing
};

static inline int64_t clamp_to(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

// Keys that a query at `position` sees of `keys` in use, before a mask tensor hides more.
static inline KeyRange visible_keys(const Visibility& v, int64_t position, int64_t keys) {
  KeyRange range;
  range.begin = v.left == Visibility::kUnlimited ? 0 : clamp_to(position - v.left, 0, keys);
  range.end = v.right == Visibility::kUnlimited ? keys : clamp_to(position + v.right + 1, 0, keys);
  if (range.end < range.begin) range.end = range.begin;
  return range;
}

}  // namespace attention_ext
