// Arithmetic on Vec<T> that every instruction set shares: loads, stores, exp2, log2, transposes.
// Only fma() may contract a product and a sum (the units are compiled with -ffp-contract=off), so
// that two kernels that write the same formula round alike.

#define ATTENTION_EXT_INLINE inline __attribute__((always_inline))

template <class To, class From>
ATTENTION_EXT_INLINE To bit_cast(From x) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast: sizes differ");
  To r;
  memcpy(&r, &x, sizeof(To));
  return r;
}

template <class T>
ATTENTION_EXT_INLINE Vec<T> load(const T* p) {
  Vec<T> r;
  memcpy(&r, p, sizeof(r));
  return r;
}
template <class T>
ATTENTION_EXT_INLINE void store(T* p, Vec<T> x) {
  memcpy(p, &x, sizeof(x));
}
// x - 0 is a plain broadcast to the compiler; x + 0 would cost an addition (-0).
template <class T>
ATTENTION_EXT_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}
template <class T>
ATTENTION_EXT_INLINE Mask<T> broadcast_index(int64_t x) {
  return static_cast<typename VecTypes<T>::Int>(x) - Mask<T>{};
}
template <class T, size_t... kLane>
ATTENTION_EXT_INLINE Mask<T> lane_numbers(std::index_sequence<kLane...>) {
  return Mask<T>{static_cast<typename VecTypes<T>::Int>(kLane)...};
}
// All ones in the first `count` lanes.
template <class T>
ATTENTION_EXT_INLINE Mask<T> first_lanes(int64_t count) {
  return lane_numbers<T>(std::make_index_sequence<kWidth<T>>{}) < broadcast_index<T>(count);
}
template <class V>
ATTENTION_EXT_INLINE V maximum(V a, V b) {  // keeps b where a is NaN
  return a > b ? a : b;
}
// x where the mask is true, else 0; what x holds elsewhere (NaN, infinity) is gone.
template <class T>
ATTENTION_EXT_INLINE Vec<T> keep(Mask<T> m, Vec<T> x) {
  return bit_cast<Vec<T>>(bit_cast<Mask<T>>(x) & m);
}

template <class T>
constexpr T kInfinity = static_cast<T>(__builtin_inf());
template <class T>
constexpr T kLog2E = static_cast<T>(1.44269504088896340735992468100189214L);
template <class T>
constexpr T kLn2 = static_cast<T>(0.693147180559945309417232121458176568L);

// 2^x for |x| <= 126 (float) or 1022 (double). Float: minimax polynomial of degree 6 on [-1/2,
// 1/2], below one ulp. Double: Taylor series of degree 13, (ln 2)^n / n!.
ATTENTION_EXT_INLINE Vec<float> exp2_bounded(Vec<float> x) {
  const float magic = 12582912.f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec<float> t = x + magic;
  const Vec<float> r = x - (t - magic);
  Vec<float> p = fma(broadcast(1.535336192e-4f), r, broadcast(1.339887441e-3f));
  p = fma(p, r, broadcast(9.618437358e-3f));
  p = fma(p, r, broadcast(5.550332471e-2f));
  p = fma(p, r, broadcast(2.402264791e-1f));
  p = fma(p, r, broadcast(6.931472029e-1f));
  p = fma(p, r, broadcast(1.f));
  return bit_cast<Vec<float>>(bit_cast<Mask<float>>(p) + (bit_cast<Mask<float>>(t) << 23));
}
ATTENTION_EXT_INLINE Vec<double> exp2_bounded(Vec<double> x) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52
  const Vec<double> t = x + magic;
  const Vec<double> r = x - (t - magic);
  Vec<double> p = broadcast(1.3691488853904128881e-12);
  p = fma(p, r, broadcast(2.5678435993488205142e-11));
  p = fma(p, r, broadcast(4.4455382718708114976e-10));
  p = fma(p, r, broadcast(7.0549116208011233299e-9));
  p = fma(p, r, broadcast(1.0178086009239699727e-7));
  p = fma(p, r, broadcast(1.3215486790144309488e-6));
  p = fma(p, r, broadcast(1.5252733804059840280e-5));
  p = fma(p, r, broadcast(1.5403530393381609954e-4));
  p = fma(p, r, broadcast(1.3333558146428443423e-3));
  p = fma(p, r, broadcast(9.6181291076284771620e-3));
  p = fma(p, r, broadcast(5.5504108664821579953e-2));
  p = fma(p, r, broadcast(2.4022650695910071233e-1));
  p = fma(p, r, broadcast(6.9314718055994530942e-1));
  p = fma(p, r, broadcast(1.0));
  return bit_cast<Vec<double>>(bit_cast<Mask<double>>(p) + (bit_cast<Mask<double>>(t) << 52));
}
template <class T>
constexpr T kSmallestExponent = static_cast<T>(sizeof(T) == 4 ? -126 : -1022);
// 2^x for x <= 126 (1022), exactly 0 below the smallest normal exponent and for -infinity; NaN
// stays NaN. Where both are defined it has the bits of exp2_bounded.
template <class T>
ATTENTION_EXT_INLINE Vec<T> exp2_or_zero(Vec<T> x) {
  return keep<T>(~(x < kSmallestExponent<T>), exp2_bounded(x));
}

// log2 of positive numbers; of 0 it is -infinity.
ATTENTION_EXT_INLINE Vec<float> log2(Vec<float> x) {
  // mantissa into [sqrt(1/2), sqrt(2)), then the atanh series: relative error 1e-7
  const Mask<float> exponent = (bit_cast<Mask<float>>(x) - 0x3f3504f3) >> 23;
  const Vec<float> f = bit_cast<Vec<float>>(bit_cast<Mask<float>>(x) - (exponent << 23));
  const Vec<float> s = (f - 1.f) / (f + 1.f);
  const Vec<float> z = s * s;
  Vec<float> p = fma(broadcast(0.32059890f), z, broadcast(0.41219859f));
  p = fma(p, z, broadcast(0.57707802f));
  p = fma(p, z, broadcast(0.96179669f));
  p = fma(p, z, broadcast(2.88539008f));
  const Vec<float> y = fma(p, s, __builtin_convertvector(exponent, Vec<float>));
  return x > 0.f ? (x < kInfinity<float> ? y : x)
                 : (x == 0.f ? broadcast(-kInfinity<float>) : x - x);
}
ATTENTION_EXT_INLINE Vec<double> log2(Vec<double> x) {
  Vec<double> r;
  for (int i = 0; i < kWidth<double>; ++i) r[i] = __builtin_log2(x[i]);
  return r;
}

// One step of the recursive transpose: exchanges the off-diagonal h x h blocks of each pair (r[i],
// r[i + h]).
template <class T, int kHalf, size_t... kLane>
ATTENTION_EXT_INLINE void exchange_blocks(Vec<T>& a, Vec<T>& b, std::index_sequence<kLane...>) {
  constexpr int w = kWidth<T>;
  const Vec<T> low = __builtin_shufflevector(
      a, b, (kLane & kHalf ? w + static_cast<int>(kLane) - kHalf : static_cast<int>(kLane))...);
  const Vec<T> high = __builtin_shufflevector(
      a, b, (kLane & kHalf ? w + static_cast<int>(kLane) : static_cast<int>(kLane) + kHalf)...);
  a = low;
  b = high;
}
template <class T, int kHalf = kWidth<T> / 2>
ATTENTION_EXT_INLINE void transpose(Vec<T> (&r)[kWidth<T>]) {
  if constexpr (kHalf > 0) {
#pragma GCC unroll 16
    for (int i = 0; i < kWidth<T>; ++i) {
      if ((i & kHalf) == 0) {
        exchange_blocks<T, kHalf>(r[i], r[i + kHalf], std::make_index_sequence<kWidth<T>>{});
      }
    }
    transpose<T, kHalf / 2>(r);
  }
}

// Lane i of the result is the sum of the lanes of r[i]: a transpose that adds at each step.
template <class T, int kHalf = kWidth<T> / 2>
ATTENTION_EXT_INLINE Vec<T> horizontal_sums(Vec<T> (&r)[kWidth<T>]) {
  if constexpr (kHalf > 0) {
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      exchange_blocks<T, kHalf>(r[i], r[i + kHalf], std::make_index_sequence<kWidth<T>>{});
      r[i] += r[i + kHalf];
    }
    return horizontal_sums<T, kHalf / 2>(r);
  } else {
    return r[0];
  }
}
// Every lane gets the one kHalf away.
template <class T, int kHalf, size_t... kLane>
ATTENTION_EXT_INLINE Vec<T> swap_lanes(Vec<T> x, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(x, x, (static_cast<int>(kLane) ^ kHalf)...);
}
template <class T, int kHalf = kWidth<T> / 2>
ATTENTION_EXT_INLINE T horizontal_max(Vec<T> x) {  // NaN wins
  if constexpr (kHalf > 0) {
    const Vec<T> y = swap_lanes<T, kHalf>(x, std::make_index_sequence<kWidth<T>>{});
    return horizontal_max<T, kHalf / 2>(y > x || y != y ? y : x);
  } else {
    return x[0];
  }
}
