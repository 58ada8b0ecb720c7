// AVX2 with FMA and F16C: 8 floats a vector, 16 registers. A lane tile is 2 vectors, a block 6
// keys: 12 accumulators, two vectors of queries and one broadcast fill the register file exactly.
#pragma once

#include <immintrin.h>

#include "vec.inc.h"

namespace attention_ext {
namespace ATTENTION_EXT_ISA {
namespace {

using Tuning =
    TuningOf</*kVectorBytes=*/32, /*kLaneVectors=*/2, /*kBlockKV=*/96, /*kForwardRows=*/192,
             /*kBackwardBlockKV=*/48, /*kBackwardRows=*/96, /*kCacheBytes=*/256 << 10,
             /*kPrefetchBytes=*/1 << 20>;
#include "vec_types.inc.h"

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm256_fmadd_ps(a, b, c); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return _mm256_fmadd_pd(a, b, c);
}
inline bool any(Mask<float> m) { return _mm256_movemask_ps(reinterpret_cast<__m256>(m)) != 0; }
inline bool any(Mask<double> m) { return _mm256_movemask_pd(reinterpret_cast<__m256d>(m)) != 0; }
inline WideVec multiply_low_halves(WideVec a, WideVec b) {
  return reinterpret_cast<WideVec>(
      _mm256_mul_epu32(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
}
inline void load_bytes(const uint8_t* p, Mask<float>& m) {
  m = reinterpret_cast<Mask<float>>(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline void load_bytes(const uint8_t* p, Mask<double>& m) {
  int four;
  memcpy(&four, p, sizeof(four));
  m = reinterpret_cast<Mask<double>>(_mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four)));
}
inline Vec<float> load_bfloat16(const uint16_t* p) {
  const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return reinterpret_cast<Vec<float>>(_mm256_slli_epi32(x, 16));
}
inline Vec<float> load_float16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store_float16(uint16_t* p, Vec<float> x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace
}  // namespace ATTENTION_EXT_ISA
}  // namespace attention_ext
