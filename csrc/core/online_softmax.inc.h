// The recurrence at the heart: softmax over keys that arrive tile by tile, one row per lane.
//
// A row keeps a reference m (in powers of two), l = sum of 2^(x - m) and acc = sum of 2^(x - m) * value, where
// x = score * log2(e). Any m gives the same quotient acc / l; it only has to keep the powers in range. So m
// stays where it is (0 at first) as long as the row's own visible scores stay within kReach of it, and moves to
// their maximum when they leave: scores above, or, before anything was added, all below. A row's bits
// therefore depend on what the row sees and on nothing else, and a bound on |q||k| that proves no row would
// move lets the kernel skip the maximum altogether with the same result to the bit.
//
//   m' = m + shift,  l' = l * 2^-shift + sum 2^(x - m'),  acc' = acc * 2^-shift + sum 2^(x - m') value
//   lse = (m + log2 l) * ln 2,  output = acc / l
//
// Online softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867); by tiles: Dao et al. 2022 (arXiv 2205.14135).

// 2^48 * |value| must not overflow, and 2^-48 must keep its precision.
template <class T>
constexpr T kReach = static_cast<T>(48);

template <class T>
struct SoftmaxState {
  Vec<T> reference;  // m
  Vec<T> sum;        // l
};

// How far the lanes' references move, given the tile's largest visible x - m (-infinity: nothing visible).
// NaN and infinite scores: the comparison with NaN is false, so NaN flows into the row's result.
template <class T>
ATTENTION_EXT_INLINE Vec<T> reference_shift(const SoftmaxState<T>& s, Vec<T> largest) {
  const Mask<T> above = largest > kReach<T>;
  const Mask<T> below = (s.sum == T(0)) & (largest < -kReach<T>) & (largest > -kInfinity<T>);
  return keep<T>(above | below, largest);
}

// Natural-logarithm lse; an empty row has -infinity.
template <class T>
ATTENTION_EXT_INLINE Vec<T> log_sum_exp(const SoftmaxState<T>& s) {
  const Vec<T> lse = (s.reference + log2(s.sum)) * kLn2<T>;
  return s.sum == T(0) ? broadcast(-kInfinity<T>) : lse;
}
template <class T>
ATTENTION_EXT_INLINE Vec<T> reciprocal_sum(const SoftmaxState<T>& s) {
  return keep<T>(~(s.sum == T(0)), T(1) / s.sum);
}
