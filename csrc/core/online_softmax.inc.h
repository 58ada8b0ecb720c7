// The recurrence at the heart: softmax over keys that arrive tile by tile, one row per lane.
//
// A row keeps a reference m (in powers of two), l = sum of 2^(x - m) and acc = sum of 2^(x - m) *
// value, where x = score * log2(e). Any m gives the same quotient acc / l; it only has to keep the
// powers in range. So m stays where it is (0 at first) as long as the row's own visible scores stay
// within kReach of it, and moves when they leave: scores above, or, before anything was added, all
// below. It moves back to 0 if their maximum is within kReach of that, since x - m has fewest
// digits to lose there, else to their maximum. A row's bits therefore depend on what the row sees
// and on nothing else, and a bound on |q||k| that proves no row would move lets the kernel skip the
// maximum altogether with the same result to the bit.
//
//   m' = m + shift,  l' = l * 2^-shift + sum 2^(x - m'),  acc' = acc * 2^-shift + sum 2^(x - m')
//   value lse = (m + log2 l) * ln 2,  output = acc / l
//
// m is a whole number, so that it moves without rounding and 2^-shift is exact; the exponents of
// the tile that made it move are computed anew, since x - m would have lost digits to a distant m.
//
// A sink is one more key with a logit of its own and no value; it joins l at the end.
//
// Online softmax: Milakov and Gimelshein 2018 (arXiv 1805.02867); by tiles: Dao et al. 2022 (arXiv
// 2205.14135).

// 2^48 * |value| must not overflow, and 2^-48 must keep its precision.
template <class T>
constexpr T kReach = static_cast<T>(48);

template <class T>
struct SoftmaxState {
  Vec<T> reference;  // m
  Vec<T> sum;        // l
};

// To a whole number; beyond 2^22 (2^51) floating point has few other numbers anyway.
ATTENTION_EXT_INLINE Vec<float> round_to_whole(Vec<float> x) {
  const Vec<float> size = x < 0.f ? -x : x;
  return size < 4194304.f ? (x + 12582912.f) - 12582912.f : x;
}
ATTENTION_EXT_INLINE Vec<double> round_to_whole(Vec<double> x) {
  const Vec<double> size = x < 0.0 ? -x : x;
  return size < 2251799813685248.0 ? (x + 6755399441055744.0) - 6755399441055744.0 : x;
}

// How far the lanes' references move, given the tile's largest visible x - m (-infinity: nothing
// visible). NaN and infinite scores: the comparison with NaN is false, so NaN flows into the row's
// result.
template <class T>
ATTENTION_EXT_INLINE Vec<T> reference_shift(const SoftmaxState<T>& s, Vec<T> largest) {
  const Mask<T> above = largest > kReach<T>;
  const Mask<T> below = (s.sum == T(0)) & (largest < -kReach<T>)&(largest > -kInfinity<T>);
  const Vec<T> top = s.reference + largest;
  const Mask<T> near_zero = (top <= kReach<T>)&(top >= -kReach<T>);
  return keep<T>(above | below, near_zero ? -s.reference : round_to_whole(largest));
}

// What is left of a row: P = 2^(x - reference) / sum for every key, output = acc * output_factor.
template <class T>
struct SoftmaxResult {
  Vec<T> reference;
  Vec<T> sum;  // 0 for an empty row
  Vec<T> output_factor;
  Vec<T> lse;  // natural logarithm; an empty row has -infinity
};

template <class T>
ATTENTION_EXT_INLINE SoftmaxResult<T> softmax_result(const SoftmaxState<T>& s) {
  const Mask<T> empty = s.sum == T(0);
  const Vec<T> factor = keep<T>(~empty, T(1) / s.sum);
  const Vec<T> lse = (s.reference + log2(s.sum)) * kLn2<T>;
  return {s.reference, s.sum, factor, empty ? broadcast(-kInfinity<T>) : lse};
}

// The same with a sink, a logit in powers of two: one more key, without a value.
template <class T>
ATTENTION_EXT_INLINE SoftmaxResult<T> softmax_result(SoftmaxState<T> s, Vec<T> sink) {
  const Vec<T> shift = reference_shift(s, sink - s.reference);
  const Vec<T> rescale = exp2_or_zero<T>(-maximum(shift, Vec<T>{}));
  s.reference += shift;
  s.sum = s.sum * rescale + exp2_or_zero<T>(sink - s.reference);
  SoftmaxResult<T> r = softmax_result(s);
  r.output_factor *= rescale;
  return r;
}

// power / sum, correctly rounded but for ties, from factor = 1 / sum: a row's only key has the
// weight 1, not 1 - 2^-24, and P cancels as well as the plain formula's.
template <class T>
ATTENTION_EXT_INLINE Vec<T> share(Vec<T> power, Vec<T> sum, Vec<T> factor) {
  const Vec<T> p = power * factor;
  return fma(fma(-p, sum, power), factor, p);
}
