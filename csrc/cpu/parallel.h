// Threads for the serial kernels: torch's pool, a shared counter, and scratch memory for each
// worker.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <new>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

namespace attention_ext {

// Below about this many multiply-adds a call stays on the caller's thread.
constexpr double kSerialWork = 5e5;

inline int64_t num_workers(int64_t tasks, double multiply_adds) {
  if (multiply_adds < kSerialWork) return 1;
  return std::max<int64_t>(std::min<int64_t>(tasks, torch::stable::get_num_threads()), 1);
}

// Aligned memory that a thread keeps for its next call, up to kKept bytes: the system clears every
// page that it gives, at the price of some thousand multiply-adds. What no call touched has no
// pages.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) {
    Cache& cache = this_thread();
    if (bytes <= cache.size) {
      memory_ = cache.memory;
      size_ = cache.size;
      cache = {};
    } else {
      size_ = (bytes + 4095) / 4096 * 4096;
      memory_ = std::aligned_alloc(4096, size_);
      if (!memory_) throw std::bad_alloc();
    }
  }
  ~Scratch() {
    Cache& cache = this_thread();
    if (size_ <= kKept && size_ > cache.size) {
      std::free(cache.memory);
      cache.memory = memory_;
      cache.size = size_;
    } else {
      std::free(memory_);
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  char* at(int64_t offset) const { return static_cast<char*>(memory_) + offset; }

 private:
  static constexpr int64_t kKept = 64 << 20;
  struct Cache {
    void* memory = nullptr;
    int64_t size = 0;
  };
  struct Owner : Cache {
    ~Owner() { std::free(memory); }
  };
  static Cache& this_thread() {
    static thread_local Owner owner;
    return owner;
  }

  void* memory_;
  int64_t size_;
};

// While it lives, results too small for a normal number become 0 on this thread. Weights of far
// keys are that small, and arithmetic on subnormals is up to fifty times slower.
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
  ~FlushSubnormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#endif
};

// body(task, worker) for every task, each worker taking the next ones: one, or a few neighbours
// where there are many (one at a time, 128 heads of 64 rows took 5 % longer on two Xeon cores,
// 2026-11). The body must not throw.
template <class F>
void run_tasks(int64_t tasks, int64_t workers, const F& body) {
  if (workers <= 1) {
    const FlushSubnormals flush;
    for (int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  const int64_t grain = std::max<int64_t>(tasks / (16 * workers), 1);
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t begin, int64_t end) {
    const FlushSubnormals flush;
    for (int64_t worker = begin; worker < end; ++worker) {
      for (int64_t first; (first = next.fetch_add(grain, std::memory_order_relaxed)) < tasks;) {
        const int64_t stop = std::min(first + grain, tasks);
        for (int64_t task = first; task < stop; ++task) body(task, worker);
      }
    }
  });
}

}  // namespace attention_ext
