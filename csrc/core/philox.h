// Counter-based random bits for dropout: Philox4x32-10 (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3"). Four 32-bit words belong to a key (the seed) and a 128-bit counter
// (the place), whoever asks.
//
// Place: key position j / 4 (word j % 4 of the four), query position i, and the 64-bit number of
// the batch element and head. Written over a type that holds a 32-bit word in the low half of a
// 64-bit integer: one, or a vector of them. What the high half holds means nothing, in arguments
// and results.
#pragma once

#include <cstdint>

namespace attention_ext {

template <class Wide>
struct PhiloxWords {
  Wide word[4];
};

// multiply(a, b): the 64-bit product of the low halves of a and the constant b.
template <class Wide, class Multiply>
static inline __attribute__((always_inline)) PhiloxWords<Wide> philox(uint64_t seed, Wide c0,
                                                                      Wide c1, Wide c2, Wide c3,
                                                                      Multiply&& multiply) {
  uint64_t k0 = seed & 0xffffffffu, k1 = seed >> 32;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    const Wide p0 = multiply(c0, uint64_t{0xD2511F53}), p1 = multiply(c2, uint64_t{0xCD9E8D57});
    c0 = (p1 >> 32) ^ c1 ^ k0;
    c2 = (p0 >> 32) ^ c3 ^ k1;
    c1 = p1;
    c3 = p0;
    k0 = (k0 + 0x9E3779B9) & 0xffffffffu;
    k1 = (k1 + 0xBB67AE85) & 0xffffffffu;
  }
  return {{c0, c1, c2, c3}};
}

}  // namespace attention_ext
