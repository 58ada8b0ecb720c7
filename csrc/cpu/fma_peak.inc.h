// How fast a core multiplies and adds at best: chains that depend on nothing but themselves and
// never leave the registers. `bench` measures calls by it.

constexpr int kChains =
    12;  // two units, latency 4 or 5, and some to spare; with the operands they fit 16 registers
constexpr int64_t kMultiplyAddsPerRound = kChains * kWidth<float>;

// A multiply-add on every chain in each round; the result depends on all of them.
inline float multiply_adds(int64_t rounds) {
  Vec<float> chain[kChains];
  for (int i = 0; i < kChains; ++i) chain[i] = broadcast(static_cast<float>(i));
  const Vec<float> factor = broadcast(1.f - 0x1p-10f), summand = broadcast(0x1p-10f);  // towards 1
  for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 16
    for (int i = 0; i < kChains; ++i) chain[i] = fma(chain[i], factor, summand);
  }
  for (int i = 1; i < kChains; ++i) chain[0] += chain[i];
  float sum = 0.f;
  for (int i = 0; i < kWidth<float>; ++i) sum += chain[0][i];
  return sum;
}
