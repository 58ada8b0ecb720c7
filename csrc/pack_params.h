// Tensors -> params: the only place that reads sizes and strides, and that knows how they
// broadcast.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "checks.h"
#include "core/params.h"

namespace attention_ext {

using torch::stable::Tensor;

// Everything of a call but query, key and value; the trailing arguments of every operator, in their
// order.
struct AttentionOptions {
  std::optional<Tensor> attn_mask;
  bool is_causal = false;
  std::optional<double> scale;
  bool enable_gqa = false;
  bool lower_right = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  double dropout_p = 0.0;
  std::optional<Tensor> alibi_slopes, sinks, seqused_k;
  std::optional<Tensor> seed;  // int64, broadcasts to the batch dimensions; needed if dropout_p > 0
  int64_t shared_batch_dims =
      0;  // leading batch dimensions that have one dropout pattern in common
  std::optional<Tensor> cu_seq_q, cu_seq_k;  // packed sequences
  int64_t max_q = 0, max_k = 0;
};

// A checked call: the params, and what they point to.
struct Call {
  AttentionParams params;
  std::vector<int64_t> used_keys, query_start, key_start, seeds;
  bool packed = false;

  // The shape of the output: (*batch, heads, seqlen_q, last), packed (total, heads, last); without
  // `last` where it is negative. Returns the number of dimensions.
  int64_t output_shape(int64_t last, int64_t* sizes) const;
  int64_t has_heads = 1;  // 0: two-dimensional inputs
  int64_t total_queries = 0;
};

struct Geometry {
  int64_t dim;
  const int64_t* size;
  const int64_t* stride;
};
Geometry geometry(const Tensor& t);

DType storage_type(ScalarType dtype);

TensorInfo info(const char* name, const Tensor& t);
std::optional<TensorInfo> info(const char* name, const std::optional<Tensor>& t);

// Element i of a tensor of int32 or int64, counted in memory.
int64_t read_integer(const void* data, ScalarType dtype, int64_t i);

// Checks the call and fills in everything but output and lse.
Call pack_call(const Tensor& query, const Tensor& key, const Tensor& value,
               const AttentionOptions& options);

// The scale of a call, by default 1 / sqrt(head_dim); at width 0 every score is 0, whatever that
// would say.
double scale_of(std::optional<double> scale, int64_t head_dim);

// A view as (batch..., head, row, column) of tensor t, broadcast to the call's sizes. `heads` is
// the number of heads that the kernel counts: a tensor with one head is broadcast over them.
TensorView view_of(const Tensor& t, const Call& call, int64_t heads);
// The same of a tensor without columns, (batch..., head, row): lse.
TensorView row_view_of(const Tensor& t, const Call& call);
// The same of a tensor (head) or (batch..., head): slopes, sinks.
TensorView head_view_of(const Tensor& t, const Call& call);

// An uninitialised tensor of the given sizes whose dimensions lie in memory in the order of
// model's, as in torch.empty_like(model); contiguous where model is broadcast (or smaller than
// sizes).
Tensor empty_laid_out_like(const Tensor& model, int64_t dim, const int64_t* sizes,
                           ScalarType dtype);
Tensor empty_contiguous(const Tensor& model, int64_t dim, const int64_t* sizes, ScalarType dtype);

}  // namespace attention_ext
