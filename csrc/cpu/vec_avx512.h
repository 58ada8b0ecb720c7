// AVX-512: 16 floats a vector, 32 registers. A lane tile is 4 vectors, a block 6 keys: 24
// accumulators. Compiled without AVX-512 (the test build avx512_shape) the same code runs on pairs
// of AVX2 registers.
#pragma once

#include <immintrin.h>

#include "vec.inc.h"

namespace attention_ext {
namespace ATTENTION_EXT_ISA {
namespace {

using Tuning =
    TuningOf</*kVectorBytes=*/64, /*kLaneVectors=*/4, /*kBlockKV=*/48, /*kForwardRows=*/512,
             /*kBackwardBlockKV=*/48, /*kBackwardRows=*/256, /*kCacheBytes=*/1 << 20,
             /*kPrefetchBytes=*/64 << 20>;
#include "vec_types.inc.h"

#ifdef __AVX512F__
inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec<double> fma(Vec<double> a, Vec<double> b, Vec<double> c) {
  return _mm512_fmadd_pd(a, b, c);
}
inline bool any(Mask<float> m) { return _mm512_movepi32_mask(reinterpret_cast<__m512i>(m)) != 0; }
inline bool any(Mask<double> m) { return _mm512_movepi64_mask(reinterpret_cast<__m512i>(m)) != 0; }
inline WideVec multiply_low_halves(WideVec a, WideVec b) {
  return reinterpret_cast<WideVec>(
      _mm512_maskz_mul_epu32(0xff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}
inline void load_bytes(const uint8_t* p, Mask<float>& m) {
  m = reinterpret_cast<Mask<float>>(
      _mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
inline void load_bytes(const uint8_t* p, Mask<double>& m) {
  m = reinterpret_cast<Mask<double>>(
      _mm512_maskz_cvtepu8_epi64(0xff, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
// The zero-masked forms: GCC 12 warns of the others' undefined destination.
inline Vec<float> load_bfloat16(const uint16_t* p) {
  const __m512i x =
      _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return reinterpret_cast<Vec<float>>(_mm512_maskz_slli_epi32(0xffff, x, 16));
}
inline Vec<float> load_float16(const uint16_t* p) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store_float16(uint16_t* p, Vec<float> x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT));
}
#else
#include "vec_generic.inc.h"
#endif

}  // namespace
}  // namespace ATTENTION_EXT_ISA
}  // namespace attention_ext
