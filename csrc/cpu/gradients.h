// What backward and its tangent have in common: tensors for the results, the parts of a unit, sums
// over heads.
#pragma once

#include <deque>
#include <mutex>
#include <optional>
#include <tuple>
#include <vector>

#include "../pack_params.h"
#include "capability.h"
#include "parallel.h"

namespace attention_ext {

const KernelTable& table_for(ScalarType dtype);
ScalarType accumulation_type(ScalarType dtype);
int64_t round_up(int64_t n, int64_t multiple);

// Score and value products of one pass; half of it is hidden by causality.
double multiply_adds(const AttentionParams& p);

// Results of a forward, checked: output and softmax state of the call.
void set_results(Call& call, const Tensor& output, const Tensor& state);
void set_state(Call& call, const Tensor& query, const Tensor& state);
// An optional tensor in the shape of the output (or of lse), checked; absent: a view without data.
TensorView output_like_view(const Call& call, const char* name, const std::optional<Tensor>& t,
                            const Tensor& output);
TensorView lse_like_view(const Call& call, const char* name, const std::optional<Tensor>& t,
                         const Tensor& output);

// The gradients of query, key, value, slopes and sinks, or their tangents: allocated, given to the
// kernels as views, and finished after they ran.
class Gradients {
 public:
  struct Result {
    Tensor query, key, value;
    std::optional<Tensor> slopes, sinks;  // of a call that has them
  };

  Gradients(const Call& call, const Tensor& query, const Tensor& key, const Tensor& value,
            const AttentionOptions& options);
  void set_views(GradParams& g) const;
  // Sums over what the inputs broadcast; everything 0 if nothing ran.
  Result finish(const Call& call);

  // Rows in order, batch element by batch element: dslope = sum of slope_sums, dsink = -sum P_sink
  // * delta.
  void sum_slopes(const Call& call);
  void sum_sinks(const Call& call, const Tensor& state, const AttentionOptions& options);
  // Its tangent: -sum (P_sink * (sink' - lse') * delta + P_sink * delta').
  void sum_sink_tangents(const Call& call, const Tensor& state, const Tensor& lse_tangent,
                         const Tensor& delta_tangent, const std::optional<Tensor>& sinks_tangent,
                         const AttentionOptions& options);

  // Per row, (*batch, heads, seqlen_q), if the call has sinks or slopes.
  std::optional<Tensor> delta, slope_sums;

 private:
  // A gradient that the kernels can write: the tensor to return, and, where several units share a
  // slice of the input, a temporary one with a slice for each unit (query: for each head).
  struct Target {
    Tensor grad;
    std::optional<Tensor> temporary;  // (*batch, slices, rows, columns), accumulation type
    TensorView view;
  };
  static Target make_target(const Call& call, const Tensor& input, int64_t slices, int64_t rows,
                            int64_t columns);
  static void sum(const Call& call, Target& target);

  Target query_, key_, value_;
  std::optional<Tensor> slopes_, sinks_;
};

// As an operator returns them: an empty tensor for what the call does not have.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> all_results(Gradients::Result result);

// Adds the accumulators of a unit's parts, the last part first, whatever the order in which they
// get ready.
class OrderedSum {
 public:
  explicit OrderedSum(int64_t parts) : next_(parts - 1), ready_(parts) {}

  // Takes a part's accumulator; add(into, from) adds, finish(sum) gets the sum of all. Memory that
  // was added is given to release(memory). One caller adds at a time, the others go on with their
  // work.
  template <class Add, class Finish, class Release>
  void put(int64_t part, char* accumulator, Add&& add, Finish&& finish, Release&& release) {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_[part] = accumulator;
    if (adding_) return;
    adding_ = true;
    for (; next_ >= 0 && ready_[next_]; --next_) {
      char* const from = ready_[next_];
      if (!sum_) {
        sum_ = from;
        continue;
      }
      lock.unlock();
      add(sum_, from);
      release(from);
      lock.lock();
    }
    adding_ = false;
    if (next_ < 0) {
      finish(sum_);
      release(sum_);
    }
  }

 private:
  std::mutex mutex_;
  int64_t next_;
  bool adding_ = false;
  char* sum_ = nullptr;
  std::vector<char*> ready_;
};

// Equal pieces of memory, the ones in use before as long as there are any: those are in the caches.
class Pieces {
 public:
  Pieces(char* memory, int64_t count, int64_t bytes) {
    for (int64_t i = count - 1; i >= 0; --i) free_.push_back(memory + i * bytes);
  }
  char* take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    char* const piece = free_.back();
    free_.pop_back();
    return piece;
  }
  void release(char* piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(piece);
  }

 private:
  std::mutex mutex_;
  std::vector<char*> free_;
};

// Runs a part kernel over all units and stores the accumulators.
template <class Params>
void run_parts(const Params& params, const AttentionParams& p, const PartKernel<Params>& kernel,
               const KernelTable& table, double work) {
  const int64_t units = p.num_units(), parts = kernel.most_parts(params);
  const int64_t threads = num_workers(units * parts, work);
  // Whole units while there are enough for all threads, the parts of the last ones each on their
  // own.
  const int64_t split = units < 4 * threads && parts > 1 ? units % threads : 0,
                whole = units - split;
  const int64_t accumulator = round_up(table.accumulator_bytes(p), 64);
  if (whole > 0) {
    const int64_t bytes =
        round_up(kernel.scratch(params) + (parts > 1 ? 2 : 1) * accumulator, 4096);
    const int64_t workers = std::min(threads, whole);
    const Scratch scratch(bytes * workers);
    run_tasks(whole, workers, [&](int64_t unit, int64_t worker) {
      char* sum = scratch.at(worker * bytes);
      char* next = parts > 1 ? sum + accumulator : sum;
      char* const own = next + accumulator;
      for (int64_t last = kernel.parts(params, unit) - 1, part = last; part >= 0; --part) {
        kernel.run(params, unit, part, part == last ? sum : next, own);
        if (part < last) table.add_accumulator(p, sum, next);
      }
      kernel.store(params, unit, sum);
    });
  }
  if (split == 0) return;
  const int64_t bytes = round_up(kernel.scratch(params), 4096);
  const int64_t workers = std::min(threads, split * parts);
  const Scratch scratch(bytes * workers + accumulator * split * parts);
  Pieces pieces(scratch.at(bytes * workers), split * parts, accumulator);
  std::deque<OrderedSum> sums;
  for (int64_t unit = 0; unit < split; ++unit)
    sums.emplace_back(kernel.parts(params, whole + unit));
  run_tasks(split * parts, workers, [&](int64_t task, int64_t worker) {
    const int64_t part = parts - 1 - task % parts, unit = task / parts;
    if (part >= kernel.parts(params, whole + unit)) return;  // a shorter sequence than the longest
    char* const piece = pieces.take();
    kernel.run(params, whole + unit, part, piece, scratch.at(worker * bytes));
    sums[unit].put(part, piece,
                   [&](char* into, char* from) { table.add_accumulator(p, into, from); },
                   [&](char* sum) { kernel.store(params, whole + unit, sum); },
                   [&](char* unused) { pieces.release(unused); });
  });
}

// Runs a row kernel over all units.
template <class Params>
void run_rows(const Params& params, const AttentionParams& p, const RowKernel<Params>& kernel,
              double work) {
  const int64_t rows = p.rows_per_unit(), each = kernel.rows(params);
  if (p.num_units() == 0 || rows == 0) return;
  const int64_t blocks = (rows + each - 1) / each, tasks = p.num_units() * blocks;
  const int64_t workers = num_workers(tasks, work), bytes = round_up(kernel.scratch(params), 4096);
  const Scratch scratch(bytes * workers);
  run_tasks(tasks, workers, [&](int64_t task, int64_t worker) {
    const int64_t block = blocks - 1 - task % blocks;
    kernel.run(params, task / blocks, block * each, scratch.at(worker * bytes));
  });
}

// The gradient of a float mask (or its tangent), in the mask's own shape.
Tensor mask_gradient(MaskGradParams& m, const Call& call, const Tensor& attn_mask,
                     const TaskKernel<MaskGradParams>& kernel, double work);

}  // namespace attention_ext
