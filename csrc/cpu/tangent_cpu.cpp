// tangent, backward_tangent and mask_gradient_tangent on the CPU: forward mode and second order.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "../with_options.h"
#include "gradients.h"

namespace attention_ext {
namespace {

using Optional = const std::optional<Tensor>&;

// Tangents in the order of the operators' arguments.
struct Direction {
  Optional query, key, value, attn_mask, alibi_slopes, sinks;
};

InputViews pack_direction(const Call& call, const Direction& d, const Tensor& query,
                          const Tensor& key, const Tensor& value, const AttentionOptions& o) {
  const int64_t head_place = call.packed ? 2 : 3;
  const auto input_view = [&](const char* name, Optional t, const Tensor& of) {
    if (!t) return TensorView{};
    check_like(info(name, *t), info("its input", of));
    return view_of(*t, call, std::max(info("", of).from_end(head_place), int64_t{1}));
  };
  const auto check = [&](const char* name, Optional t, Optional of) {
    if (!t) return false;
    check_like(info(name, *t), info("its input", of.value()));
    return true;
  };
  InputViews views;
  views.query = input_view("query_tangent", d.query, query);
  if (d.query) views.query = view_of(*d.query, call, call.params.num_heads);
  views.key = input_view("key_tangent", d.key, key);
  views.value = input_view("value_tangent", d.value, value);
  if (check("mask_tangent", d.attn_mask, o.attn_mask)) {
    views.attn_mask = view_of(*d.attn_mask, call, call.params.num_heads);
  }
  if (check("slopes_tangent", d.alibi_slopes, o.alibi_slopes)) {
    views.alibi_slopes = head_view_of(*d.alibi_slopes, call);
  }
  if (check("sinks_tangent", d.sinks, o.sinks)) views.sinks = head_view_of(*d.sinks, call);
  return views;
}

std::tuple<Tensor, Tensor> tangent(const AttentionOptions& options, Optional query_tangent,
                                   Optional key_tangent, Optional value_tangent,
                                   Optional mask_tangent, Optional slopes_tangent,
                                   Optional sinks_tangent, const Tensor& query, const Tensor& key,
                                   const Tensor& value, const Tensor& output, const Tensor& state) {
  Call call = pack_call(query, key, value, options);
  set_results(call, output, state);
  TangentParams c;
  c.grad.forward = call.params;
  c.tangent = pack_direction(
      call,
      {query_tangent, key_tangent, value_tangent, mask_tangent, slopes_tangent, sinks_tangent},
      query, key, value, options);
  int64_t sizes[kMaxDims];
  const int64_t dim = call.output_shape(call.params.value_dim, sizes);
  Tensor output_tangent = empty_laid_out_like(output, dim, sizes, output.scalar_type());
  Tensor lse_tangent =
      empty_contiguous(output, dim - 1, sizes, accumulation_type(output.scalar_type()));
  if (call.packed) {  // slack rows
    torch::stable::zero_(output_tangent);
    torch::stable::zero_(lse_tangent);
  }
  c.output_tangent = view_of(output_tangent, call, call.params.num_heads);
  c.lse_tangent = row_view_of(lse_tangent, call);
  run_rows(c, call.params, table_for(query.scalar_type()).tangent,
           2.5 * multiply_adds(call.params));
  return {std::move(output_tangent), std::move(lse_tangent)};
}

TangentParams pack_backward_tangent(Call& call, Optional grad_output_tangent,
                                    Optional grad_lse_tangent, const Tensor& output_tangent,
                                    const Tensor& lse_tangent, const Direction& direction,
                                    Optional grad_output, Optional grad_lse, const Tensor& query,
                                    const Tensor& key, const Tensor& value, const Tensor& output,
                                    const Tensor& state, const AttentionOptions& options) {
  set_results(call, output, state);
  TangentParams c;
  c.grad.grad_output = output_like_view(call, "grad_output", grad_output, output);
  c.grad.grad_lse = lse_like_view(call, "grad_lse", grad_lse, output);
  c.grad.forward = call.params;
  c.tangent = pack_direction(call, direction, query, key, value, options);
  c.grad_output_tangent =
      output_like_view(call, "grad_output_tangent", grad_output_tangent, output);
  c.grad_lse_tangent = lse_like_view(call, "grad_lse_tangent", grad_lse_tangent, output);
  c.output_tangent = output_like_view(call, "output_tangent", output_tangent, output);
  c.lse_tangent = lse_like_view(call, "lse_tangent", lse_tangent, output);
  return c;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_tangent(
    const AttentionOptions& options, Optional grad_output_tangent, Optional grad_lse_tangent,
    const Tensor& output_tangent, const Tensor& lse_tangent, Optional query_tangent,
    Optional key_tangent, Optional value_tangent, Optional mask_tangent, Optional slopes_tangent,
    Optional sinks_tangent, Optional grad_output, Optional grad_lse, const Tensor& query,
    const Tensor& key, const Tensor& value, const Tensor& output, const Tensor& state) {
  Call call = pack_call(query, key, value, options);
  TangentParams c = pack_backward_tangent(
      call, grad_output_tangent, grad_lse_tangent, output_tangent, lse_tangent,
      {query_tangent, key_tangent, value_tangent, mask_tangent, slopes_tangent, sinks_tangent},
      grad_output, grad_lse, query, key, value, output, state, options);
  Gradients gradients(call, query, key, value, options);
  gradients.set_views(c.grad);
  std::optional<Tensor> delta_tangent;
  if (gradients.delta) {
    const TensorInfo rows = info("lse_tangent", lse_tangent);
    delta_tangent = empty_contiguous(lse_tangent, rows.dim, rows.size, rows.dtype);
    c.grad.delta = row_view_of(*gradients.delta, call);
    c.delta_tangent = row_view_of(*delta_tangent, call);
  }
  if (gradients.slope_sums) c.grad.slope_sums = row_view_of(*gradients.slope_sums, call);
  const KernelTable& table = table_for(query.scalar_type());
  if (call.params.num_units() > 0) {
    run_parts(c, c.grad.forward, table.backward_tangent, table, 6 * multiply_adds(call.params));
  }
  gradients.sum_slopes(call);
  if (delta_tangent)
    gradients.sum_sink_tangents(call, state, lse_tangent, *delta_tangent, sinks_tangent, options);
  return all_results(gradients.finish(call));
}

Tensor mask_gradient_tangent(const AttentionOptions& options, Optional grad_output_tangent,
                             Optional grad_lse_tangent, const Tensor& output_tangent,
                             const Tensor& lse_tangent, Optional query_tangent,
                             Optional key_tangent, Optional value_tangent, Optional mask_tangent,
                             Optional slopes_tangent, Optional sinks_tangent, Optional grad_output,
                             Optional grad_lse, const Tensor& query, const Tensor& key,
                             const Tensor& value, const Tensor& output, const Tensor& state) {
  Call call = pack_call(query, key, value, options);
  MaskGradParams m;
  m.call = pack_backward_tangent(
      call, grad_output_tangent, grad_lse_tangent, output_tangent, lse_tangent,
      {query_tangent, key_tangent, value_tangent, mask_tangent, slopes_tangent, sinks_tangent},
      grad_output, grad_lse, query, key, value, output, state, options);
  return mask_gradient(m, call, options.attn_mask.value(),
                       table_for(query.scalar_type()).mask_gradient_tangent,
                       3 * multiply_adds(call.params));
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  using namespace attention_ext;
  m.impl("tangent", TORCH_BOX(&WithOptions<&tangent>::call));
  m.impl("backward_tangent", TORCH_BOX(&WithOptions<&backward_tangent>::call));
  m.impl("mask_gradient_tangent", TORCH_BOX(&WithOptions<&mask_gradient_tangent>::call));
}
