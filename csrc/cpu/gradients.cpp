#include "gradients.h"

#include <cmath>
#include <vector>

#include "../core/extremes.h"

namespace attention_ext {
namespace {

template <class T>
T* data_of(const Tensor& t) {
  return static_cast<T*>(const_cast<void*>(t.const_data_ptr()));
}

// Calls f with a null pointer of the accumulation type.
template <class F>
void dispatch_accumulation(ScalarType dtype, F&& f) {
  if (dtype == ScalarType::Double) {
    f(static_cast<double*>(nullptr));
  } else {
    f(static_cast<float*>(nullptr));
  }
}

int64_t num_elements(const TensorInfo& t) {
  int64_t n = 1;
  for (int64_t i = 0; i < t.dim; ++i) n *= t.size[i];
  return n;
}

// Linear index, among the batch elements of a tensor with its own sizes, of the call's batch
// element b. The tensor's last batch dimension is the `last`-th from the end.
int64_t own_batch(const AttentionParams& p, const TensorInfo& own, int64_t last, int64_t b) {
  int64_t index = 0, step = 1;
  for (int64_t d = p.batch_dims - 1; d >= 0; --d) {
    const int64_t size = own.from_end(last + p.batch_dims - 1 - d);
    index += (size == 1 ? 0 : b % p.batch_size[d]) * step;
    step *= size;
    b /= p.batch_size[d];
  }
  return index;
}

// Adds the slices of a temporary gradient that belong to one slice of the input, in order.
template <class T>
void sum_slices(const Tensor& from, const Tensor& into, const AttentionParams& p) {
  const TensorInfo source = info("from", from), own = info("into", into);
  const int64_t slices = source.from_end(3), own_slices = own.from_end(3);
  const int64_t size = source.from_end(2) * source.from_end(1);
  T* out = data_of<T>(into);
  std::fill_n(out, num_elements(own), T(0));
  const T* in = data_of<T>(from);
  for (int64_t b = 0; b < p.num_batches; ++b) {
    T* batch = out + own_batch(p, own, 4, b) * own_slices * size;
    for (int64_t slice = 0; slice < slices; ++slice) {
      T* sum = batch + slice / (slices / own_slices) * size;
      for (int64_t i = 0; i < size; ++i) sum[i] += *in++;
    }
  }
}

void zero(const Tensor& t) {
  Tensor copy = t;
  torch::stable::zero_(copy);
}

Tensor dense_copy(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

Tensor in_accumulation_type(const Tensor& t) {
  return dense_copy(torch::stable::to(t, accumulation_type(t.scalar_type())));
}

// A sink's share of a row's softmax, state (m, l); 0 for a sink of -infinity, also in an empty row.
template <class T>
double sink_share(T sink, const T* state) {
  if (state[1] == T(0)) return 0.0;
  return std::exp2(draw_together<T>(sink) * 1.4426950408889634074 - static_cast<double>(state[0])) /
         state[1];
}

// Sums f(rows, row, i) over the rows of a contiguous (*batch, heads, seqlen_q) tensor, packed
// (total, heads), into element i of a tensor (heads,) or (*batch, heads) with its own batch sizes.
template <class F>
void sum_rows(const Call& call, const Tensor& rows, Tensor& into, F&& f) {
  const AttentionParams& p = call.params;
  const TensorInfo own = info("into", into);
  std::vector<double> sums(num_elements(own), 0.0);
  dispatch_accumulation(rows.scalar_type(), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    const T* data = data_of<const T>(rows);
    if (call.packed) {
      const int64_t used = call.query_start.back() * p.num_heads;
      for (int64_t i = 0; i < used; ++i) sums[i % p.num_heads] += f(data, i, i % p.num_heads);
      return;
    }
    for (int64_t b = 0; b < p.num_batches; ++b) {
      const int64_t first = own_batch(p, own, 2, b) * p.num_heads;
      for (int64_t i = 0; i < p.num_heads * p.seqlen_q; ++i) {
        const int64_t place = first + i / p.seqlen_q;
        sums[place] += f(data, b * p.num_heads * p.seqlen_q + i, place);
      }
    }
  });
  const Tensor wide = empty_contiguous(into, own.dim, own.size, ScalarType::Double);
  std::copy(sums.begin(), sums.end(), data_of<double>(wide));
  torch::stable::copy_(into, wide);
}

Tensor like(const Tensor& model, ScalarType dtype) {
  const TensorInfo own = info("", model);
  return empty_contiguous(model, own.dim, own.size, dtype);
}

}  // namespace

const KernelTable& table_for(ScalarType dtype) {
  return dtype == ScalarType::Double ? kernels().float64 : kernels().float32;
}
ScalarType accumulation_type(ScalarType dtype) {
  return dtype == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}
int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

double multiply_adds(const AttentionParams& p) {
  const double pairs = static_cast<double>(p.num_units()) * p.rows_per_unit() * p.seqlen_kv;
  return pairs * (p.head_dim + p.value_dim) *
         (p.visibility.right == Visibility::kUnlimited ? 1.0 : 0.5);
}

TensorView output_like_view(const Call& call, const char* name, const std::optional<Tensor>& t,
                            const Tensor& output) {
  if (!t) return {};
  check_like(info(name, *t), info("output", output));
  return view_of(*t, call, call.params.num_heads);
}
TensorView lse_like_view(const Call& call, const char* name, const std::optional<Tensor>& t,
                         const Tensor& output) {
  if (!t) return {};
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(-1, sizes);
  check_like(info(name, *t),
             {"this call's lse", accumulation_type(output.scalar_type()), dim, sizes});
  return row_view_of(*t, call);
}

void set_state(Call& call, const Tensor& query, const Tensor& state) {
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(2, sizes);
  check_like(info("state", state),
             {"this call's state", accumulation_type(query.scalar_type()), dim, sizes});
  call.params.state = view_of(state, call, call.params.num_heads);
}

void set_results(Call& call, const Tensor& output, const Tensor& state) {
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(call.params.value_dim, sizes);
  check_like(info("output", output), {"this call's output", output.scalar_type(), dim, sizes});
  call.params.output = view_of(output, call, call.params.num_heads);
  set_state(call, output, state);
}

Gradients::Target Gradients::make_target(const Call& call, const Tensor& input, int64_t slices,
                                         int64_t rows, int64_t columns) {
  const AttentionParams& p = call.params;
  const TensorInfo own = info("input", input);
  const int64_t heads = own.from_end(call.packed ? 2 : 3);
  Target target{
      empty_laid_out_like(input, own.dim, own.size, input.scalar_type()), std::nullopt, {}};
  if (call.packed) zero(target.grad);  // slack rows
  int64_t batches = 1;
  for (int64_t i = 4; i <= own.dim; ++i) batches *= own.from_end(i);
  if (heads == slices && (call.packed || batches == p.num_batches)) {
    target.view = view_of(target.grad, call, heads);
    return target;
  }
  int64_t sizes[kMaxDims];
  if (call.packed) {  // only key and value heads that differ in number come here
    sizes[0] = own.from_end(3);
    sizes[1] = slices;
    sizes[2] = columns;
    target.temporary = empty_contiguous(input, 3, sizes, accumulation_type(input.scalar_type()));
    zero(*target.temporary);
  } else {
    std::copy_n(p.batch_size, p.batch_dims, sizes);
    sizes[p.batch_dims] = slices;
    sizes[p.batch_dims + 1] = rows;
    sizes[p.batch_dims + 2] = columns;
    target.temporary =
        empty_contiguous(input, p.batch_dims + 3, sizes, accumulation_type(input.scalar_type()));
  }
  target.view = view_of(*target.temporary, call, slices);
  return target;
}

void Gradients::sum(const Call& call, Target& target) {
  if (!target.temporary) return;
  Tensor sum = like(target.grad, accumulation_type(target.grad.scalar_type()));
  dispatch_accumulation(sum.scalar_type(), [&](auto* tag) {
    using T = std::remove_pointer_t<decltype(tag)>;
    if (!call.packed) return sum_slices<T>(*target.temporary, sum, call.params);
    const TensorInfo source = info("from", *target.temporary), own = info("into", sum);
    const int64_t columns = own.from_end(1), share = source.from_end(2) / own.from_end(2);
    const T* in = data_of<T>(*target.temporary);
    T* out = data_of<T>(sum);
    for (int64_t i = 0; i < num_elements(own); ++i) {
      T total = T(0);
      for (int64_t j = 0; j < share; ++j)
        total += in[(i / columns * share + j) * columns + i % columns];
      out[i] = total;
    }
  });
  torch::stable::copy_(target.grad, sum);
}

Gradients::Gradients(const Call& call, const Tensor& query, const Tensor& key, const Tensor& value,
                     const AttentionOptions& options)
    : query_(make_target(call, query, call.params.num_heads, call.params.seqlen_q,
                         call.params.head_dim)),
      key_(make_target(call, key, call.params.units_per_batch(), call.params.seqlen_kv,
                       call.params.head_dim)),
      value_(make_target(call, value, call.params.units_per_batch(), call.params.seqlen_kv,
                         call.params.value_dim)) {
  if (options.alibi_slopes)
    slopes_ = like(*options.alibi_slopes, options.alibi_slopes->scalar_type());
  if (options.sinks) sinks_ = like(*options.sinks, options.sinks->scalar_type());
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(-1, sizes);
  const ScalarType dtype = accumulation_type(query.scalar_type());
  if (options.alibi_slopes) slope_sums = empty_contiguous(query, dim, sizes, dtype);
  if (options.sinks) delta = empty_contiguous(query, dim, sizes, dtype);
}

void Gradients::set_views(GradParams& g) const {
  g.grad_query = query_.view;
  g.grad_key = key_.view;
  g.grad_value = value_.view;
  g.grad_key_group = g.grad_value_group = g.forward.heads_per_unit;
}

void Gradients::sum_slopes(const Call& call) {
  if (!slope_sums) return;
  sum_rows(call, *slope_sums, *slopes_, [](auto* sums, int64_t row, int64_t) { return sums[row]; });
}

void Gradients::sum_sinks(const Call& call, const Tensor& state, const AttentionOptions& options) {
  if (!delta) return;
  const Tensor logits = in_accumulation_type(*options.sinks), dense = dense_copy(state);
  sum_rows(call, *delta, *sinks_, [&](auto* deltas, int64_t row, int64_t head) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(deltas)>>;
    return -sink_share(data_of<T>(logits)[head], data_of<T>(dense) + 2 * row) * deltas[row];
  });
}

void Gradients::sum_sink_tangents(const Call& call, const Tensor& state, const Tensor& lse_tangent,
                                  const Tensor& delta_tangent,
                                  const std::optional<Tensor>& sinks_tangent,
                                  const AttentionOptions& options) {
  const Tensor logits = in_accumulation_type(*options.sinks), dense = dense_copy(state),
               moved = dense_copy(lse_tangent);
  const std::optional<Tensor> direction =
      sinks_tangent ? std::optional<Tensor>(in_accumulation_type(*sinks_tangent)) : std::nullopt;
  sum_rows(call, *delta, *sinks_, [&](auto* deltas, int64_t row, int64_t head) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(deltas)>>;
    const double share = sink_share(data_of<T>(logits)[head], data_of<T>(dense) + 2 * row);
    const double shift = (direction ? data_of<T>(*direction)[head] : T(0)) - data_of<T>(moved)[row];
    return -share * (shift * deltas[row] + data_of<T>(delta_tangent)[row]);
  });
}

Gradients::Result Gradients::finish(const Call& call) {
  for (Target* target : {&query_, &key_, &value_}) {
    if (call.params.num_units() == 0) {
      zero(target->grad);
    } else {
      sum(call, *target);
    }
  }
  return {std::move(query_.grad), std::move(key_.grad), std::move(value_.grad), std::move(slopes_),
          std::move(sinks_)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> all_results(Gradients::Result result) {
  const auto or_empty = [&](std::optional<Tensor>& t) {
    const int64_t none = 0;
    return t ? std::move(*t) : empty_contiguous(result.query, 1, &none, result.query.scalar_type());
  };
  Tensor slopes = or_empty(result.slopes), sinks = or_empty(result.sinks);
  return {std::move(result.query), std::move(result.key), std::move(result.value),
          std::move(slopes), std::move(sinks)};
}

Tensor mask_gradient(MaskGradParams& m, const Call& call, const Tensor& attn_mask,
                     const TaskKernel<MaskGradParams>& kernel, double work) {
  const AttentionParams& p = call.params;
  const TensorInfo own = info("attn_mask", attn_mask);
  expect(own.dtype != ScalarType::Bool, "type", "scaled_dot_product_attention",
         "a float attn_mask to differentiate, got torch.bool");
  Tensor grad = empty_laid_out_like(attn_mask, own.dim, own.size, own.dtype);
  if (num_elements(own) == 0) return grad;
  if (p.num_units() == 0 || p.seqlen_q == 0 || p.seqlen_kv == 0) {
    zero(grad);
    return grad;
  }
  for (int64_t d = 0; d < p.batch_dims; ++d)
    m.shared_batch[d] = own.from_end(3 + p.batch_dims - d) == 1;
  m.shared_heads = own.from_end(3) == 1;
  m.shared_rows = own.from_end(2) == 1;
  m.shared_columns = own.from_end(1) == 1;
  m.grad_mask = view_of(grad, call, p.num_heads);
  const int64_t tasks = kernel.tasks(m), workers = num_workers(tasks, work);
  const int64_t bytes = round_up(kernel.scratch(m), 4096);
  const Scratch scratch(bytes * workers);
  run_tasks(tasks, workers,
            [&](int64_t task, int64_t worker) { kernel.run(m, task, scratch.at(worker * bytes)); });
  return grad;
}

}  // namespace attention_ext
