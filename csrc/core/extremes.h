// Mask values near the largest finite number, kept in range.
//
// Scores are computed in powers of two: a mask value times log2(e) must not overflow, or finfo.min
// would hide a key. Beyond a quarter of the range values are drawn together, x -> sign(x) * (q +
// (|x| - q) / 4), which keeps their order and equality and leaves everything else alone; lse is
// drawn apart again at the end.
#pragma once

#include <limits>

namespace attention_ext {

// Whether draw_together changes it.
template <class T>
static inline bool is_drawn(T x) {
  constexpr T q = std::numeric_limits<T>::max() / 4;
  return x > q || x < -q;
}
template <class T, class V>
static inline V draw_together(V x) {
  constexpr T q = std::numeric_limits<T>::max() / 4;
  const V high = x * T(0.25) + q * T(0.75), low = x * T(0.25) - q * T(0.75);
  return x > q ? high : (x < -q ? low : x);
}
// Rounding must not make an infinity of the largest numbers.
template <class T>
static inline T draw_apart(T x) {
  constexpr T most = std::numeric_limits<T>::max(), q = most / 4;
  if (!(x > q) && !(x < -q)) return x;
  if (x - x != T(0)) return x;
  const T far = ((x < 0 ? -x : x) - q) * 4;
  const T size = far < most - q ? far + q : most;
  return x < 0 ? -size : size;
}

}  // namespace attention_ext
