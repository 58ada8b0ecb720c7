// forward and backward on the CPU: check, allocate, pack, call. Which thread computes what never shows in a bit:
// a task's sums depend on the sizes and options of its own batch element and heads alone.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "../pack_params.h"
#include "capability.h"
#include "parallel.h"

namespace attention_ext {
namespace {

const KernelTable& table_for(ScalarType dtype) {
  return dtype == ScalarType::Double ? kernels().float64 : kernels().float32;
}
ScalarType accumulation_type(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// Score and value products of one pass; half of it is hidden by causality.
double multiply_adds(const AttentionParams& p) {
  const double pairs = static_cast<double>(p.num_units()) * p.rows_per_unit() * p.seqlen_kv;
  return pairs * (p.head_dim + p.value_dim) * (p.visibility.right == Visibility::kUnlimited ? 1.0 : 0.5);
}

void run_forward(const AttentionParams& p, const KernelTable& kernel) {
  const int64_t rows = p.rows_per_unit();
  if (p.num_units() == 0 || rows == 0) return;
  // A super-block shares its key and value tiles; it shrinks until every thread has some, which moves no bit.
  int64_t each = std::min(kernel.forward_rows(p), round_up(rows, kernel.lanes));
  const double work = multiply_adds(p);
  const int64_t wanted = work < kSerialWork ? 1 : 3 * static_cast<int64_t>(torch::stable::get_num_threads());
  while (wanted > 3 && each > kernel.lanes && p.num_units() * ((rows + each - 1) / each) < wanted) each -= kernel.lanes;
  const int64_t blocks = (rows + each - 1) / each, tasks = p.num_units() * blocks;
  const int64_t workers = num_workers(tasks, work);
  const int64_t bytes = round_up(kernel.forward_scratch(p, each), 4096);
  const Scratch scratch(bytes * workers);
  run_tasks(tasks, workers, [&](int64_t task, int64_t worker) {
    const int64_t block = blocks - 1 - task % blocks;  // causal: the longest first
    kernel.forward(p, task / blocks, block * each, each, scratch.at(worker * bytes));
  });
}

std::tuple<Tensor, Tensor> forward(const Tensor& query, const Tensor& key, const Tensor& value,
                                   const std::optional<Tensor>& attn_mask, bool is_causal, std::optional<double> scale,
                                   bool enable_gqa, bool lower_right) {
  AttentionParams p = pack_params(query, key, value, attn_mask, {is_causal, scale, enable_gqa, lower_right});
  const ScalarType dtype = query.scalar_type();
  int64_t sizes[kMaxDims];
  int64_t dim = output_shape(p, query, key, value, p.value_dim, sizes);
  Tensor output = empty_laid_out_like(query, dim, sizes, dtype);
  dim = output_shape(p, query, key, value, -1, sizes);
  Tensor lse = empty_contiguous(query, dim, sizes, accumulation_type(dtype));
  p.output = view_of(output, p, p.num_heads);
  p.lse = lse.mutable_data_ptr();
  run_forward(p, table_for(dtype));
  return {std::move(output), std::move(lse)};
}

// A gradient that the kernels can write: the tensor to return, and, where several units share a slice of the
// input, a temporary one with a slice for each unit (query: for each head).
struct GradTarget {
  Tensor grad;                      // like the input
  std::optional<Tensor> temporary;  // (*batch, slices, rows, columns), accumulation type
  TensorView view;
};

GradTarget grad_target(const Tensor& input, const AttentionParams& p, int64_t heads, int64_t slices, int64_t rows,
                       int64_t columns) {
  const TensorInfo own = info("input", input);
  GradTarget target{empty_laid_out_like(input, own.dim, own.size, input.scalar_type()), std::nullopt, {}};
  int64_t batches = 1;
  for (int64_t i = 4; i <= own.dim; ++i) batches *= own.from_end(i);
  if (batches == p.num_batches && own.from_end(3) == slices) {
    target.view = view_of(target.grad, p, heads);
    return target;
  }
  int64_t sizes[kMaxDims];
  for (int64_t d = 0; d < p.batch_dims; ++d) sizes[d] = p.batch_size[d];
  sizes[p.batch_dims] = slices;
  sizes[p.batch_dims + 1] = rows;
  sizes[p.batch_dims + 2] = columns;
  target.temporary = empty_contiguous(input, p.batch_dims + 3, sizes, accumulation_type(input.scalar_type()));
  target.view = view_of(*target.temporary, p, slices);
  return target;
}

// Adds the slices of a temporary gradient that belong to one slice of the input, in order.
template <class T>
void sum_slices(const Tensor& from, Tensor& into, const AttentionParams& p) {
  const TensorInfo source = info("from", from), own = info("into", into);
  const int64_t slices = source.from_end(3), own_slices = own.from_end(3);
  const int64_t size = source.from_end(2) * source.from_end(1);
  int64_t own_total = size;
  for (int64_t i = 3; i <= own.dim; ++i) own_total *= own.from_end(i);
  T* out = static_cast<T*>(into.mutable_data_ptr());
  std::fill_n(out, own_total, T(0));
  const T* in = static_cast<const T*>(from.const_data_ptr());
  for (int64_t batch = 0; batch < p.num_batches; ++batch) {
    int64_t rest = batch, own_batch = 0, step = 1;
    for (int64_t d = p.batch_dims - 1; d >= 0; --d) {
      const int64_t own_size = own.from_end(3 + p.batch_dims - d);
      own_batch += (own_size == 1 ? 0 : rest % p.batch_size[d]) * step;
      step *= own_size;
      rest /= p.batch_size[d];
    }
    for (int64_t slice = 0; slice < slices; ++slice) {
      T* sum = out + (own_batch * own_slices + slice / (slices / own_slices)) * size;
      for (int64_t i = 0; i < size; ++i) sum[i] += *in++;
    }
  }
}

void finish(GradTarget& target, const AttentionParams& p) {
  if (!target.temporary) return;
  const ScalarType dtype = accumulation_type(target.grad.scalar_type());
  const TensorInfo own = info("grad", target.grad);
  Tensor sum = empty_contiguous(target.grad, own.dim, own.size, dtype);
  if (dtype == ScalarType::Double) {
    sum_slices<double>(*target.temporary, sum, p);
  } else {
    sum_slices<float>(*target.temporary, sum, p);
  }
  torch::stable::copy_(target.grad, sum);
}

void run_backward(const GradParams& g, const KernelTable& kernel) {
  const int64_t units = g.forward.num_units(), parts = kernel.backward_parts(g);
  const double work = 2.5 * multiply_adds(g.forward);
  const int64_t threads = num_workers(units * parts, work);
  // Whole units while there are enough for all threads, the parts of the last ones each on their own.
  const int64_t split = units < 4 * threads && parts > 1 ? units % threads : 0, whole = units - split;
  const int64_t accumulator = round_up(kernel.accumulator_bytes(g), 64);
  const int64_t bytes = round_up(kernel.backward_scratch(g) + 2 * accumulator, 4096);
  {
    const int64_t workers = std::min(threads, whole);
    const Scratch scratch(bytes * std::max<int64_t>(workers, 1));
    run_tasks(whole, workers, [&](int64_t unit, int64_t worker) {
      char* sum = scratch.at(worker * bytes);
      char* next = sum + accumulator;
      kernel.backward(g, unit, 0, sum, next + accumulator);
      for (int64_t part = 1; part < parts; ++part) {
        kernel.backward(g, unit, part, next, next + accumulator);
        kernel.add_accumulator(g, sum, next);
      }
      kernel.store_accumulator(g, unit, sum);
    });
  }
  if (split == 0) return;
  const int64_t workers = std::min(threads, split * parts);
  const int64_t work_bytes = round_up(kernel.backward_scratch(g), 4096);
  const Scratch scratch(work_bytes * workers), sums(accumulator * split * parts);
  run_tasks(split * parts, workers, [&](int64_t task, int64_t worker) {
    const int64_t part = parts - 1 - task % parts, unit = task / parts;
    kernel.backward(g, whole + unit, part, sums.at((unit * parts + part) * accumulator), scratch.at(worker * work_bytes));
  });
  run_tasks(split, std::min(threads, split), [&](int64_t unit, int64_t) {
    char* sum = sums.at(unit * parts * accumulator);
    for (int64_t part = 1; part < parts; ++part) kernel.add_accumulator(g, sum, sum + part * accumulator);
    kernel.store_accumulator(g, whole + unit, sum);
  });
}

std::tuple<Tensor, Tensor, Tensor> backward(const std::optional<Tensor>& grad_output,
                                            const std::optional<Tensor>& grad_lse, const Tensor& query,
                                            const Tensor& key, const Tensor& value, const Tensor& output,
                                            const Tensor& lse, const std::optional<Tensor>& attn_mask, bool is_causal,
                                            std::optional<double> scale, bool enable_gqa, bool lower_right) {
  GradParams g;
  AttentionParams& p = g.forward;
  p = pack_params(query, key, value, attn_mask, {is_causal, scale, enable_gqa, lower_right});
  int64_t sizes[kMaxDims];
  const ScalarType dtype = query.scalar_type();
  int64_t dim = output_shape(p, query, key, value, p.value_dim, sizes);
  const TensorInfo expected{"output", dtype, dim, sizes};
  check_gradient(info("output", output), expected);
  if (grad_output) check_gradient(info("grad_output", *grad_output), expected);
  int64_t lse_sizes[kMaxDims];
  dim = output_shape(p, query, key, value, -1, lse_sizes);
  const TensorInfo expected_lse{"lse", accumulation_type(dtype), dim, lse_sizes};
  check_gradient(info("lse", lse), expected_lse);
  if (grad_lse) check_gradient(info("grad_lse", *grad_lse), expected_lse);
  const Tensor dense_lse = lse.is_contiguous() ? lse : torch::stable::contiguous(lse);

  p.output = view_of(output, p, p.num_heads);
  p.lse = const_cast<void*>(dense_lse.const_data_ptr());
  if (grad_output) g.grad_output = view_of(*grad_output, p, p.num_heads);
  if (grad_lse) g.grad_lse = row_view_of(*grad_lse, p);
  const int64_t units = p.num_heads / p.heads_per_unit;
  GradTarget grad_query = grad_target(query, p, p.num_heads, p.num_heads, p.seqlen_q, p.head_dim);
  GradTarget grad_key = grad_target(key, p, info("", key).from_end(3), units, p.seqlen_kv, p.head_dim);
  GradTarget grad_value = grad_target(value, p, info("", value).from_end(3), units, p.seqlen_kv, p.value_dim);
  g.grad_query = grad_query.view;
  g.grad_key = grad_key.view;
  g.grad_value = grad_value.view;
  g.grad_key_group = g.grad_value_group = p.heads_per_unit;
  if (p.num_units() > 0) run_backward(g, table_for(dtype));
  for (GradTarget* target : {&grad_query, &grad_key, &grad_value}) {
    if (p.num_units() == 0) {
      torch::stable::zero_(target->grad);
    } else {
      finish(*target, p);
    }
  }
  return {std::move(grad_query.grad), std::move(grad_key.grad), std::move(grad_value.grad)};
}

std::string cpu_capability() { return kernels().name; }

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  m.impl("forward", TORCH_BOX(&attention_ext::forward));
  m.impl("backward", TORCH_BOX(&attention_ext::backward));
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&attention_ext::cpu_capability));
}
