// Tensors -> params: the only place that reads sizes and strides, and that knows how they broadcast.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>

#include "checks.h"
#include "core/params.h"

namespace attention_ext {

using torch::stable::Tensor;

struct AttentionOptions {
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  bool lower_right = false;
};

TensorInfo info(const char* name, const Tensor& t);

// A view as (batch..., head, row, column) of tensor t, broadcast to the call's sizes. `heads` is the number
// of heads of the call: a tensor with one head is broadcast over them.
TensorView view_of(const Tensor& t, const AttentionParams& p, int64_t heads);

// The same of a tensor without columns (lse): (batch..., head, row).
TensorView row_view_of(const Tensor& t, const AttentionParams& p);

// Checks the call and fills in everything but output and lse.
AttentionParams pack_params(const Tensor& query, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>& attn_mask, const AttentionOptions& options);

// An uninitialised tensor of the given sizes whose dimensions lie in memory in the order of model's, as in
// torch.empty_like(model); contiguous where model is broadcast (or smaller than sizes).
Tensor empty_laid_out_like(const Tensor& model, int64_t dim, const int64_t* sizes, ScalarType dtype);

Tensor empty_contiguous(const Tensor& model, int64_t dim, const int64_t* sizes, ScalarType dtype);

// The shape of the output: the broadcast leading dimensions, then (seqlen_q, last); without `last` where it is
// negative. Returns the number of dimensions.
int64_t output_shape(const AttentionParams& p, const Tensor& query, const Tensor& key, const Tensor& value,
                     int64_t last, int64_t* sizes);

}  // namespace attention_ext
