// fma_peak: the rate that the rate of a call is measured by.

#include <torch/csrc/stable/library.h>

#include <chrono>
#include <vector>

#include "../checks.h"
#include "capability.h"
#include "parallel.h"

namespace attention_ext {
namespace {

// GFLOP/s of float32 multiply-adds inside the registers, all of torch's threads together, for about
// so many seconds. Each thread times itself: one that starts late, since its core is busy, counts
// as if it ran.
double fma_peak(double seconds) {
  if (!(seconds > 0 && seconds <= 10)) {
    raise("value",
          "fma_peak: expected seconds above 0 and at most 10, got " + std::to_string(seconds));
  }
  constexpr int64_t kRounds = 4096;  // between two looks at the clock: some 10 microseconds
  const Kernels& kernel = kernels();
  const int64_t workers = torch::stable::get_num_threads();
  std::vector<double> rates(workers);  // rounds per second
  run_tasks(workers, workers, [&](int64_t task, int64_t) {
    const auto start = std::chrono::steady_clock::now();
    std::chrono::duration<double> taken{};
    for (int64_t rounds = kRounds; taken.count() < seconds; rounds += kRounds) {
      kernel.multiply_adds(kRounds);
      taken = std::chrono::steady_clock::now() - start;
      rates[task] = static_cast<double>(rounds) / taken.count();
    }
  });
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return 2e-9 * sum * static_cast<double>(kernel.multiply_adds_per_round);
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("fma_peak", TORCH_BOX(&attention_ext::fma_peak));
}
