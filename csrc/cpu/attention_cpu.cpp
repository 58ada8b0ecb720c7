// forward, backward, mask_gradient and weights on the CPU: check, allocate, pack, call. Which
// thread computes what never shows in a bit: a task's sums depend on the sizes and options of its
// own batch element and heads.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <memory>

#include "../with_options.h"
#include "attention_cpu.h"
#include "gradients.h"

namespace attention_ext {
namespace {

// Few rows against many keys: tasks are chunks of keys; whoever computes a unit's last one merges
// them.
void run_few_rows(const AttentionParams& p, const KernelTable& kernel) {
  const int64_t units = p.num_units(), chunks = kernel.few_rows_chunks(p);
  const int64_t workers = num_workers(units * chunks, multiply_adds(p));
  const int64_t bytes = round_up(kernel.few_rows_scratch(p), 4096),
                partial = kernel.partial_bytes(p);
  const Scratch scratch(bytes * workers + partial * units * chunks);
  const auto done = std::make_unique<std::atomic<int64_t>[]>(units);
  run_tasks(units * chunks, workers, [&](int64_t task, int64_t worker) {
    const int64_t unit = task / chunks, chunk = task % chunks;
    char* const partials = scratch.at(bytes * workers + partial * chunks * unit);
    kernel.few_rows_chunk(p, unit, chunk, partials + chunk * partial, scratch.at(worker * bytes));
    if (done[unit].fetch_add(1, std::memory_order_acq_rel) + 1 < chunks) return;
    kernel.few_rows_merge(p, unit, partials, scratch.at(worker * bytes));
  });
}

}  // namespace

void run_forward(const AttentionParams& p, const KernelTable& kernel) {
  const int64_t rows = p.rows_per_unit();
  if (p.num_units() == 0 || rows == 0) return;
  if (p.has_few_rows(kernel.few_rows)) return run_few_rows(p, kernel);
  // A super-block shares its key and value tiles; it shrinks until every thread has some, which
  // moves no bit.
  int64_t each = std::min(kernel.forward_rows(p), round_up(rows, kernel.lanes));
  const double work = multiply_adds(p);
  const int64_t threads = work < kSerialWork ? 1 : torch::stable::get_num_threads();
  while (threads > 1 && each > kernel.lanes &&
         p.num_units() * ((rows + each - 1) / each) < 3 * threads) {
    each -= kernel.lanes;
  }
  const int64_t blocks = (rows + each - 1) / each, tasks = p.num_units() * blocks;
  const int64_t workers = num_workers(tasks, work);
  const int64_t bytes = round_up(kernel.forward_scratch(p, each), 4096);
  const Scratch scratch(bytes * workers);
  run_tasks(tasks, workers, [&](int64_t task, int64_t worker) {
    const int64_t block = blocks - 1 - task % blocks;  // causal: the longest first
    kernel.forward(p, task / blocks, block * each, each, scratch.at(worker * bytes));
  });
}

namespace {

// Gives the call an output.
Tensor make_output(Call& call, const Tensor& query) {
  AttentionParams& p = call.params;
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(p.value_dim, sizes);
  Tensor output = empty_laid_out_like(query, dim, sizes, query.scalar_type());
  p.output = view_of(output, call, p.num_heads);
  return output;
}

Tensor forward_output(const AttentionOptions& options, const Tensor& query, const Tensor& key,
                      const Tensor& value) {
  Call call = pack_call(query, key, value, options);
  Tensor output = make_output(call, query);
  run_forward(call.params, table_for(query.scalar_type()));
  return output;
}

// Gives the call a softmax state, which the backward reads.
Tensor make_state(Call& call, const Tensor& query) {
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(2, sizes);
  Tensor state = empty_contiguous(query, dim, sizes, accumulation_type(query.scalar_type()));
  call.params.state = view_of(state, call, call.params.num_heads);
  return state;
}

std::tuple<Tensor, Tensor> forward_with_state(const AttentionOptions& options, const Tensor& query,
                                              const Tensor& key, const Tensor& value) {
  Call call = pack_call(query, key, value, options);
  Tensor output = make_output(call, query), state = make_state(call, query);
  run_forward(call.params, table_for(query.scalar_type()));
  return {std::move(output), std::move(state)};
}

std::tuple<Tensor, Tensor, Tensor> forward(const AttentionOptions& options, const Tensor& query,
                                           const Tensor& key, const Tensor& value) {
  Call call = pack_call(query, key, value, options);
  AttentionParams& p = call.params;
  const ScalarType dtype = query.scalar_type();
  Tensor output = make_output(call, query), state = make_state(call, query);
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(-1, sizes);
  Tensor lse = empty_contiguous(query, dim, sizes, accumulation_type(dtype));
  p.lse = row_view_of(lse, call);
  if (call.packed) {  // slack rows
    for (Tensor* result : {&output, &lse, &state}) torch::stable::zero_(*result);
  }
  run_forward(p, table_for(dtype));
  return {std::move(output), std::move(lse), std::move(state)};
}

GradParams pack_backward(Call& call, const std::optional<Tensor>& grad_output,
                         const std::optional<Tensor>& grad_lse,
                         const std::optional<Tensor>& grad_weights, const Tensor& output,
                         const Tensor& state) {
  set_results(call, output, state);
  GradParams g;
  g.grad_output = output_like_view(call, "grad_output", grad_output, output);
  g.grad_lse = lse_like_view(call, "grad_lse", grad_lse, output);
  if (grad_weights) {
    int64_t sizes[kMaxDims];
    const int64_t dim = call.output_shape(call.params.seqlen_kv, sizes);
    check_like(info("grad_weights", *grad_weights),
               {"this call's weights", output.scalar_type(), dim, sizes});
    g.grad_weights = view_of(*grad_weights, call, call.params.num_heads);
  }
  g.forward = call.params;
  return g;
}

Gradients::Result gradients_of(const AttentionOptions& options,
                               const std::optional<Tensor>& grad_output,
                               const std::optional<Tensor>& grad_lse,
                               const std::optional<Tensor>& grad_weights, const Tensor& query,
                               const Tensor& key, const Tensor& value, const Tensor& output,
                               const Tensor& state) {
  Call call = pack_call(query, key, value, options);
  GradParams g = pack_backward(call, grad_output, grad_lse, grad_weights, output, state);
  Gradients gradients(call, query, key, value, options);
  gradients.set_views(g);
  if (gradients.delta) g.delta = row_view_of(*gradients.delta, call);
  if (gradients.slope_sums) g.slope_sums = row_view_of(*gradients.slope_sums, call);
  const KernelTable& table = table_for(query.scalar_type());
  if (call.params.num_units() > 0)
    run_parts(g, g.forward, table.backward, table, 2.5 * multiply_adds(call.params));
  gradients.sum_slopes(call);
  gradients.sum_sinks(call, state, options);
  return gradients.finish(call);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(
    const AttentionOptions& options, const std::optional<Tensor>& grad_output,
    const std::optional<Tensor>& grad_lse, const std::optional<Tensor>& grad_weights,
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& output,
    const Tensor& state) {
  return all_results(
      gradients_of(options, grad_output, grad_lse, grad_weights, query, key, value, output, state));
}

// Tensors in the order in which autograd keeps them, so that Python does not sort them.
std::tuple<Tensor, Tensor, Tensor> backward_short(const AttentionOptions& options,
                                                  const Tensor& grad_output, const Tensor& output,
                                                  const Tensor& state, const Tensor& query,
                                                  const Tensor& key, const Tensor& value) {
  Gradients::Result grads = gradients_of(options, grad_output, std::nullopt, std::nullopt, query,
                                         key, value, output, state);
  return {std::move(grads.query), std::move(grads.key), std::move(grads.value)};
}

Tensor backward_of_mask(const AttentionOptions& options, const std::optional<Tensor>& grad_output,
                        const std::optional<Tensor>& grad_lse,
                        const std::optional<Tensor>& grad_weights, const Tensor& query,
                        const Tensor& key, const Tensor& value, const Tensor& output,
                        const Tensor& state) {
  Call call = pack_call(query, key, value, options);
  MaskGradParams m;
  m.call.grad = pack_backward(call, grad_output, grad_lse, grad_weights, output, state);
  return mask_gradient(m, call, options.attn_mask.value(),
                       table_for(query.scalar_type()).mask_gradient, multiply_adds(call.params));
}

Tensor weights(const AttentionOptions& options, const Tensor& query, const Tensor& key,
               const Tensor& value, const Tensor& state) {
  Call call = pack_call(query, key, value, options);
  WeightsParams w;
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(call.params.seqlen_kv, sizes);
  Tensor result = empty_contiguous(query, dim, sizes, query.scalar_type());
  torch::stable::zero_(result);
  set_state(call, query, state);
  call.params.dropout = {};  // the weights are those before dropout
  w.forward = call.params;
  w.weights = view_of(result, call, call.params.num_heads);
  run_rows(w, w.forward, table_for(query.scalar_type()).weights, 0.5 * multiply_adds(w.forward));
  return result;
}

std::string cpu_capability() { return kernels().name; }

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  using namespace attention_ext;
  m.impl("forward", TORCH_BOX(&WithOptions<&forward>::call));
  m.impl("forward.with_state", TORCH_BOX(&WithFewOptions<&forward_with_state>::call));
  m.impl("forward.output", TORCH_BOX(&WithFewOptions<&forward_output>::call));
  m.impl("backward.short", TORCH_BOX(&WithFewOptions<&backward_short>::call));
  m.impl("backward", TORCH_BOX(&WithOptions<&backward>::call));
  m.impl("mask_gradient", TORCH_BOX(&WithOptions<&backward_of_mask>::call));
  m.impl("weights", TORCH_BOX(&WithOptions<&weights>::call));
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("cpu_capability", TORCH_BOX(&attention_ext::cpu_capability));
}
