// What a kernel is told about one call: plain structs, no torch, host and device.
//
// Every tensor is seen as (batch..., head, row, column) with a stride for each, 0 where it is broadcast, so
// that nothing is expanded or copied. The kernels work on "units": the largest groups of neighbouring query
// heads that read the same key head and the same value head. A unit has heads_per_unit * seqlen_q rows,
// position-major: row r is query r / heads_per_unit of head r % heads_per_unit.
#pragma once

#include <cstdint>

namespace attention_ext {

constexpr int kMaxBatchDims = 6;  // tensors of up to 8 dimensions

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };

// Strides in elements.
struct TensorView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t batch_stride[kMaxBatchDims] = {};
  int64_t head_stride = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 0;
};

// Query i stands at position i + offset on the key axis and sees the keys from position - left to
// position + right, both included. kUnlimited switches a bound off; causal is right = 0.
struct Visibility {
  static constexpr int64_t kUnlimited = -1;
  int64_t offset = 0;
  int64_t left = kUnlimited;
  int64_t right = kUnlimited;
};

struct AttentionParams {
  int64_t batch_dims = 0;
  int64_t batch_size[kMaxBatchDims] = {};
  int64_t num_batches = 1;     // product of batch_size
  int64_t num_heads = 0;       // of the output
  int64_t heads_per_unit = 1;  // G, see above
  int64_t key_group = 1;       // output head h reads key head h / key_group
  int64_t value_group = 1;     // and value head h / value_group
  int64_t seqlen_q = 0;
  int64_t seqlen_kv = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  double scale = 1.0;
  Visibility visibility;

  TensorView query;      // (batch..., head, seqlen_q, head_dim)
  TensorView key;        // (batch..., kv head, seqlen_kv, head_dim)
  TensorView value;      // (batch..., kv head, seqlen_kv, value_dim)
  TensorView attn_mask;  // (batch..., head, seqlen_q, seqlen_kv); data is null without a mask
  TensorView output;     // (batch..., head, seqlen_q, value_dim); written by the forward
  void* lse = nullptr;   // (num_batches, num_heads, seqlen_q) contiguous, accumulation type

  int64_t num_units() const { return num_batches * (num_heads / heads_per_unit); }
  int64_t rows_per_unit() const { return heads_per_unit * seqlen_q; }
};

// The gradients are written through views of their own: where several units read one slice of an input, each
// unit writes a slice of a temporary tensor, and the glue adds these up in order.
struct GradParams {
  AttentionParams forward;
  TensorView grad_output;          // (batch..., head, seqlen_q, value_dim); data may be null: zero
  TensorView grad_lse;             // (batch..., head, seqlen_q); data may be null: zero
  TensorView grad_query;           // (batch..., head, seqlen_q, head_dim); written
  TensorView grad_key;             // (batch..., head / grad_key_group, seqlen_kv, head_dim); written
  TensorView grad_value;           // (batch..., head / grad_value_group, seqlen_kv, value_dim); written
  int64_t grad_key_group = 1;
  int64_t grad_value_group = 1;
};

}  // namespace attention_ext
