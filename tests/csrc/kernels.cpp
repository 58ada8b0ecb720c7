// The kernels of one instruction set against the formula in double precision, without torch: two
// batches, four query heads over two key-value heads, odd sizes, and padded rows whose padding must
// stay as it was.
#include "cpu/kernels.h"

#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"

namespace attention_ext::ATTENTION_EXT_ISA {
const Kernels* get();
}

namespace {

using namespace attention_ext;

constexpr int64_t kBatch = 2, kHeads = 4, kKvHeads = 2, kQueries = 37, kKeys = 70;
constexpr int64_t kHeadDim = 20, kValueDim = 9, kPadding = 3;
constexpr double kGuard = -12345.0;

// A (kBatch, heads, rows, columns) tensor whose rows are kPadding longer than they look.
template <class T>
struct Padded {
  int64_t heads, rows, columns;
  std::vector<T> data;

  Padded(int64_t heads, int64_t rows, int64_t columns)
      : heads(heads), rows(rows), columns(columns) {
    data.assign(kBatch * heads * rows * (columns + kPadding), static_cast<T>(kGuard));
  }
  T& at(int64_t b, int64_t h, int64_t i, int64_t d) {
    return data[((b * heads + h) * rows + i) * (columns + kPadding) + d];
  }
  void fill(unsigned seed) {  // numbers in [-1, 1), the same on every machine
    for (int64_t row = 0; row < kBatch * heads * rows; ++row)
      for (int64_t d = 0; d < columns; ++d) {
        seed = seed * 1664525u + 1013904223u;
        data[row * (columns + kPadding) + d] = static_cast<T>(seed / 2147483648.0 - 1.0);
      }
  }
  bool guards_stand() {
    for (int64_t row = 0; row < kBatch * heads * rows; ++row)
      for (int64_t d = columns; d < columns + kPadding; ++d)
        if (data[row * (columns + kPadding) + d] != static_cast<T>(kGuard)) return false;
    return true;
  }
  TensorView view() {
    TensorView v;
    v.data = data.data();
    v.dtype = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
    v.row_stride = columns + kPadding;
    v.column_stride = 1;
    v.head_stride = rows * v.row_stride;
    v.batch_stride[0] = heads * v.head_stride;
    return v;
  }
};

// Scratch memory of just the size that was asked for, with guard bytes behind it.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : bytes_(bytes) {
    memory_ = static_cast<char*>(std::aligned_alloc(64, (bytes + 2 * 64) / 64 * 64));
    std::memset(memory_, 0x7f, bytes + 64);
  }
  ~Scratch() {
    for (int64_t i = 0; i < 64; ++i) CHECK(memory_[bytes_ + i] == 0x7f);
    std::free(memory_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  void* get() { return memory_; }

 private:
  char* memory_;
  int64_t bytes_;
};

template <class T>
const KernelTable& table() {
  const Kernels* kernels = ATTENTION_EXT_ISA::get();
  if constexpr (sizeof(T) == 8)
    return kernels->float64;
  else
    return kernels->float32;
}

template <class T>
struct Problem {
  Padded<T> query{kHeads, kQueries, kHeadDim}, key{kKvHeads, kKeys, kHeadDim},
      value{kKvHeads, kKeys, kValueDim}, output{kHeads, kQueries, kValueDim},
      grad_output{kHeads, kQueries, kValueDim}, grad_query{kHeads, kQueries, kHeadDim},
      grad_key{kKvHeads, kKeys, kHeadDim}, grad_value{kKvHeads, kKeys, kValueDim};
  Padded<T> lse{kHeads, kQueries, 1}, state{kHeads, kQueries, 2};
  AttentionParams params;

  explicit Problem(bool causal) {
    query.fill(1), key.fill(2), value.fill(3), grad_output.fill(4);
    params.batch_dims = 1;
    params.batch_size[0] = params.num_batches = kBatch;
    params.num_heads = kHeads;
    params.heads_per_unit = params.key_group = params.value_group = kHeads / kKvHeads;
    params.seqlen_q = kQueries;
    params.seqlen_kv = kKeys;
    params.head_dim = kHeadDim;
    params.value_dim = kValueDim;
    params.scale = 0.7;
    if (causal) params.visibility.right = 0;
    params.query = query.view();
    params.key = key.view();
    params.value = value.view();
    params.output = output.view();
    params.lse = lse.view();
    params.state = state.view();
  }

  void run_forward(int64_t rows_per_task) {
    for (int64_t unit = 0; unit < params.num_units(); ++unit)
      for (int64_t row = 0; row < params.rows_per_unit(); row += rows_per_task) {
        Scratch scratch(table<T>().forward_scratch(params, rows_per_task));
        table<T>().forward(params, unit, row, rows_per_task, scratch.get());
      }
  }

  void run_backward() {
    GradParams grad;
    grad.forward = params;
    grad.grad_output = grad_output.view();
    grad.grad_query = grad_query.view();
    grad.grad_key = grad_key.view();
    grad.grad_value = grad_value.view();
    grad.grad_key_group = grad.grad_value_group = kHeads / kKvHeads;
    for (int64_t unit = 0; unit < params.num_units(); ++unit) {
      Scratch sum(table<T>().accumulator_bytes(params)), part(table<T>().accumulator_bytes(params));
      for (int64_t i = 0; i < table<T>().backward.parts(grad, unit); ++i) {
        Scratch scratch(table<T>().backward.scratch(grad));
        table<T>().backward.run(grad, unit, i, (i == 0 ? sum : part).get(), scratch.get());
        if (i > 0) table<T>().add_accumulator(params, sum.get(), part.get());
      }
      table<T>().backward.store(grad, unit, sum.get());
    }
  }
};

// The formulas, one score at a time; `got` holds the inputs and the results that are compared.
template <class T>
void compare_with_formula(Problem<T>& got, double tolerance) {
  const int64_t group = kHeads / kKvHeads;
  const double scale = got.params.scale;
  Padded<double> grad_key(kKvHeads, kKeys, kHeadDim), grad_value(kKvHeads, kKeys, kValueDim);
  std::fill(grad_key.data.begin(), grad_key.data.end(), 0.0);
  std::fill(grad_value.data.begin(), grad_value.data.end(), 0.0);
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t h = 0; h < kHeads; ++h)
      for (int64_t i = 0; i < kQueries; ++i) {
        const int64_t kv = h / group;
        const int64_t visible = got.params.visibility.right == 0 ? i + 1 : kKeys;
        std::vector<double> score(visible), grad_prob(visible);
        double sum = 0, delta = 0;
        for (int64_t j = 0; j < visible; ++j) {
          for (int64_t d = 0; d < kHeadDim; ++d)
            score[j] += scale * got.query.at(b, h, i, d) * got.key.at(b, kv, j, d);
          sum += std::exp(score[j]);
        }
        const double lse = std::log(sum);
        CHECK_NEAR(got.lse.at(b, h, i, 0), lse, tolerance);
        for (int64_t d = 0; d < kValueDim; ++d) {
          double output = 0;
          for (int64_t j = 0; j < visible; ++j)
            output += std::exp(score[j] - lse) * got.value.at(b, kv, j, d);
          CHECK_NEAR(got.output.at(b, h, i, d), output, tolerance);
          const double grad = got.grad_output.at(b, h, i, d);
          delta += grad * output;
          for (int64_t j = 0; j < visible; ++j) {
            grad_prob[j] += grad * got.value.at(b, kv, j, d);
            grad_value.at(b, kv, j, d) += std::exp(score[j] - lse) * grad;
          }
        }
        for (int64_t d = 0; d < kHeadDim; ++d) {
          double grad_query = 0;
          for (int64_t j = 0; j < visible; ++j) {
            const double grad_score = scale * std::exp(score[j] - lse) * (grad_prob[j] - delta);
            grad_query += grad_score * got.key.at(b, kv, j, d);
            grad_key.at(b, kv, j, d) += grad_score * got.query.at(b, h, i, d);
          }
          CHECK_NEAR(got.grad_query.at(b, h, i, d), grad_query, tolerance);
        }
      }
  for (int64_t b = 0; b < kBatch; ++b)
    for (int64_t kv = 0; kv < kKvHeads; ++kv)
      for (int64_t j = 0; j < kKeys; ++j) {
        for (int64_t d = 0; d < kHeadDim; ++d)
          CHECK_NEAR(got.grad_key.at(b, kv, j, d), grad_key.at(b, kv, j, d), tolerance);
        for (int64_t d = 0; d < kValueDim; ++d)
          CHECK_NEAR(got.grad_value.at(b, kv, j, d), grad_value.at(b, kv, j, d), tolerance);
      }
}

template <class T>
void check_kernels(double tolerance) {
  for (const bool causal : {false, true}) {
    Problem<T> problem(causal);
    problem.run_forward(table<T>().forward_rows(problem.params));
    problem.run_backward();
    compare_with_formula(problem, tolerance);
    CHECK(problem.output.guards_stand() && problem.lse.guards_stand());
    CHECK(problem.state.guards_stand() && problem.grad_query.guards_stand());
    CHECK(problem.grad_key.guards_stand() && problem.grad_value.guards_stand());
  }
}

template <class T>
void check_tasks() {
  Problem<T> whole(true), pieces(true);
  whole.run_forward(table<T>().forward_rows(whole.params));
  pieces.run_forward(table<T>().lanes);
  CHECK(whole.output.data == pieces.output.data);
  CHECK(whole.lse.data == pieces.lse.data);
}

TEST(forward_and_backward_follow_the_formula_in_float32) { check_kernels<float>(2e-5); }
TEST(forward_and_backward_follow_the_formula_in_float64) { check_kernels<double>(1e-13); }
TEST(the_size_of_a_task_changes_no_bit_in_float32) { check_tasks<float>(); }
TEST(the_size_of_a_task_changes_no_bit_in_float64) { check_tasks<double>(); }

}  // namespace
