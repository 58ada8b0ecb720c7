// What changes a score, in the contract's order, and nothing else does:
//
//   s = scale * q.k  ->  softcap * tanh(s / softcap)  ->  + mask  ->  - slope * |position - j|
//
// Templates over the number type: a vector of lanes on the CPU. A plain score takes one
// multiply-add, x = (q.k) * (scale * log2 e) - m, with q.k unrounded by scale or log2 e.

template <class T>
struct ScoreParams {
  T scale;        // natural units
  T scale_log2e;  // scale * log2(e)
  T softcap;      // 0: off
  bool alibi;
  bool drawn;  // masks and sinks come drawn together (extremes.h)

  explicit ScoreParams(const AttentionParams& p)
      : scale(static_cast<T>(p.scale)),
        scale_log2e(static_cast<T>(p.scale * 1.4426950408889634074)),
        softcap(static_cast<T>(p.softcap)),
        alibi(p.alibi_slopes.data != nullptr),
        drawn(p.attn_mask.data || p.sinks.data) {}
  bool plain() const { return softcap == T(0) && !alibi; }
};

// tanh(x): x + x^3 P(x^2) / Q(x^2) near 0, 1 - 2 / (e^2|x| + 1) beyond (the two of the Cephes
// library); both good to a few units in the last place.
template <class T>
ATTENTION_EXT_INLINE Vec<T> tanh(Vec<T> x) {
  const Vec<T> z = x * x;
  Vec<T> p =
      fma(broadcast(T(-9.64399179425052238628e-1)), z, broadcast(T(-9.92877231001918586564e1)));
  p = fma(p, z, broadcast(T(-1.61468768441708447952e3)));
  Vec<T> q = z + T(1.12811678491632931402e2);
  q = fma(q, z, broadcast(T(2.23548839060100448583e3)));
  q = fma(q, z, broadcast(T(4.84406305325125486048e3)));
  const Vec<T> near_zero = fma(x, z * (p / q), x);
  const Vec<T> size = x < T(0) ? -x : x;
  const Vec<T> limited = size > T(40) ? broadcast(T(40)) : size;
  const Vec<T> far = T(1) - T(2) / (exp2_bounded(limited * (T(2) * kLog2E<T>)) + T(1));
  const Vec<T> r = size < T(0.625) ? near_zero : (x < T(0) ? -far : far);
  return x != x ? x : r;
}

// x - m in powers of two, for a raw dot product that nothing else changes.
template <class T>
ATTENTION_EXT_INLINE Vec<T> plain_exponent(const ScoreParams<T>& score, Vec<T> dot,
                                           Vec<T> reference) {
  return fma(dot, broadcast(score.scale_log2e), -reference);
}

// The same with everything: `slope` and `distance` of the lane and key, and the mask's addend in
// powers of two
// (-infinity hides, whatever the score is). An addend of 0 on a plain score changes no bit.
template <class T>
ATTENTION_EXT_INLINE Vec<T> general_exponent(const ScoreParams<T>& score, Vec<T> dot, Vec<T> addend,
                                             Vec<T> slope, Vec<T> distance, Vec<T> reference) {
  Vec<T> x;
  if (score.softcap != T(0)) {
    const Vec<T> capped = tanh<T>(dot * (score.scale / score.softcap)) * score.softcap;
    x = fma(capped, broadcast(kLog2E<T>), -reference);
  } else {
    x = plain_exponent(score, dot, reference);
  }
  x += addend;  // not fused: as m, the addend is rounded, so that equal ones of any size cancel
  if (score.alibi) x = fma(-slope * distance, broadcast(kLog2E<T>), x);
  return addend == -kInfinity<T> ? addend : x;
}

// How the score follows u = scale * q.k: ds/du, and the derivative of that.
template <class T>
struct ScoreSlope {
  Vec<T> first;
  Vec<T> second;
};
template <class T>
ATTENTION_EXT_INLINE ScoreSlope<T> score_slope(const ScoreParams<T>& score, Vec<T> dot) {
  if (score.softcap == T(0)) return {broadcast(T(1)), Vec<T>{}};
  const Vec<T> t = tanh<T>(dot * (score.scale / score.softcap));
  const Vec<T> first = T(1) - t * t;
  return {first, t * first * (T(-2) / score.softcap)};
}
