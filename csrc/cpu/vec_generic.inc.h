// The operations of vec_<set>.h in portable C++. Included inside an instruction set's namespace.

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#ifdef __FMA__
  Vec<float> r;
  for (int i = 0; i < kWidth<float>; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
#ifdef __FMA__
  Vec<double> r;
  for (int i = 0; i < kWidth<double>; ++i) r[i] = __builtin_fma(a[i], b[i], c[i]);
  return r;
#else
  return a * b + c;
#endif
}

template <class M>
inline bool any(M m) {
  auto r = m[0];
  for (size_t i = 1; i < sizeof(M) / sizeof(r); ++i) r |= m[i];
  return r != 0;
}

inline WideVec multiply_low_halves(WideVec a, WideVec b) {
  const uint64_t low = 0xffffffff;
  return (a & low) * (b & low);
}

inline float bits_to_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

template <class M>
inline void load_bytes(const uint8_t* p, M& m) {
  for (size_t i = 0; i < sizeof(M) / sizeof(m[0]); ++i) m[i] = p[i];
}
inline Vec<float> load_bfloat16(const uint16_t* p) {
  typedef uint16_t Half __attribute__((vector_size(Tuning::kVectorBytes / 2)));
  Half h;
  memcpy(&h, p, sizeof(h));
  return reinterpret_cast<Vec<float>>(__builtin_convertvector(h, Mask<float>) << 16);
}
// IEEE half to float: rebias the exponent, then repair subnormals, infinities and NaN.
inline Vec<float> load_float16(const uint16_t* p) {
  Vec<float> r = {};
  for (int i = 0; i < kWidth<float>; ++i) {
    const uint32_t sign = static_cast<uint32_t>(p[i] & 0x8000) << 16;
    const uint32_t rest = static_cast<uint32_t>(p[i] & 0x7fff) << 13;
    // Multiplication by a power of two is exact and renormalises subnormals; infinity and NaN keep
    // theirs.
    const float value = bits_to_float(rest) * 0x1p112f;
    r[i] =
        rest >= 0x7c00u << 13 ? bits_to_float(0x7f800000u | rest | sign) : (sign ? -value : value);
  }
  return r;
}

// Float to IEEE half, to nearest even.
inline void store_float16(uint16_t* p, Vec<float> x) {
  for (int i = 0; i < kWidth<float>; ++i) {
    uint32_t bits;
    const float value = x[i];
    memcpy(&bits, &value, 4);
    const uint32_t sign = (bits >> 16) & 0x8000;
    bits &= 0x7fffffff;
    uint32_t half;
    if (bits > 0x7f800000) {
      half = 0x7e00 | ((bits >> 13) & 0x3ff);  // NaN
    } else if (bits >= 0x477ff000) {
      half = 0x7c00;                 // rounds to infinity
    } else if (bits < 0x38800000) {  // subnormal: let the float unit round at bit 2^-24
      float magnitude;
      memcpy(&magnitude, &bits, 4);
      magnitude += 0.5f;
      memcpy(&half, &magnitude, 4);
      half -= 0x3f000000;
    } else {
      half = (bits + 0xfff + ((bits >> 13) & 1) - 0x38000000) >> 13;
    }
    p[i] = static_cast<uint16_t>(sign | half);
  }
}
