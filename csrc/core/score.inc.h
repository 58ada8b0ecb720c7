// What changes a score, in the contract's order, and nothing else does:
//
//   s = scale * q.k  ->  + mask
//
// Templates over the number type: a vector of lanes on the CPU. The plain score takes one multiply-add,
// x = (q.k) * (scale * log2 e) - m, with q.k unrounded by scale or log2 e.

template <class T>
struct ScoreParams {
  T scale;        // natural units
  T scale_log2e;  // scale * log2(e)

  explicit ScoreParams(double s) : scale(static_cast<T>(s)), scale_log2e(static_cast<T>(s * 1.4426950408889634074)) {}
};

// x - m in powers of two, for a raw dot product.
template <class T>
ATTENTION_EXT_INLINE Vec<T> plain_exponent(const ScoreParams<T>& score, Vec<T> dot, Vec<T> reference) {
  return fma(dot, broadcast(score.scale_log2e), -reference);
}

// The same with a mask's addend (natural units; -infinity hides, whatever the score is).
template <class T>
ATTENTION_EXT_INLINE Vec<T> masked_exponent(const ScoreParams<T>& score, Vec<T> dot, Vec<T> addend, Vec<T> reference) {
  const Vec<T> x = fma(addend, broadcast(kLog2E<T>), plain_exponent(score, dot, reference));
  return addend == -kInfinity<T> ? addend : x;
}
