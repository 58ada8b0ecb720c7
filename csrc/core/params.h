// What a kernel is told about one call: plain structs, no torch, host and device.
//
// Every tensor is seen as (batch..., head, row, column) with a stride for each, 0 where it is
// broadcast, so that nothing is expanded or copied. The kernels work on "units": the largest groups
// of neighbouring query heads of one batch element that read the same key head and the same value
// head. A unit has heads_per_unit * seqlen_q rows, position-major: row r is query r /
// heads_per_unit of head r % heads_per_unit.
#pragma once

#include <cstdint>

namespace attention_ext {

constexpr int kMaxBatchDims = 6;  // tensors of up to 8 dimensions

enum class DType : int32_t { kFloat64, kFloat32, kBFloat16, kFloat16, kBool };
// Bytes of one element.
static inline int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 8;
    case DType::kFloat32:
      return 4;
    case DType::kBool:
      return 1;
    default:
      return 2;
  }
}

// Strides in elements. Without data the tensor is absent: no mask, a gradient of zero, nothing to
// write.
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
  int64_t left = kUnlimited;
  int64_t right = kUnlimited;
  bool lower_right = false;  // offset = keys - queries instead of 0
};

// Packed sequences and lengths: one entry per batch element (starts: one more), or null.
struct Lengths {
  const int64_t* used_keys = nullptr;
  const int64_t* query_start = nullptr;
  const int64_t* key_start = nullptr;
};

// Where a cache holds keys and values: those of batch element b are cut into pages of `size` rows,
// and page n is slice table[b * per_batch + n] of the key and value tensors, along their batch
// dimension. Without a table slice b holds all of them.
struct Pages {
  const int64_t* table = nullptr;
  int64_t per_batch = 0;
  int64_t size = 0;
};

struct Dropout {
  double probability = 0.0;         // of dropping
  const int64_t* seed = nullptr;    // one per batch element
  int64_t batches_per_pattern = 1;  // element b has pattern b % batches_per_pattern of its seed
};

struct AttentionParams {
  int64_t batch_dims = 0;
  int64_t batch_size[kMaxBatchDims] = {};
  int64_t num_batches = 1;     // product of batch_size
  int64_t num_heads = 0;       // of the output
  int64_t heads_per_unit = 1;  // G, see above
  int64_t key_group = 1;       // output head h reads key head h / key_group
  int64_t value_group = 1;     // and value head h / value_group
  int64_t seqlen_q = 0;        // the longest, where lengths differ
  int64_t seqlen_kv = 0;
  int64_t head_dim = 0;
  int64_t value_dim = 0;
  double scale = 1.0;
  double softcap = 0.0;  // 0: off
  Visibility visibility;
  Lengths lengths;
  Pages pages;
  Dropout dropout;

  TensorView query;         // (batch..., head, seqlen_q, head_dim)
  TensorView key;           // (batch..., kv head, seqlen_kv, head_dim)
  TensorView value;         // (batch..., kv head, seqlen_kv, value_dim)
  TensorView attn_mask;     // (batch..., head, seqlen_q, seqlen_kv)
  TensorView alibi_slopes;  // (batch..., head)
  TensorView sinks;         // (batch..., head)
  TensorView output;        // (batch..., head, seqlen_q, value_dim); written by the forward
  TensorView
      lse;  // (batch..., head, seqlen_q), accumulation type; written by the forward, or absent
  TensorView
      state;  // (batch..., head, seqlen_q, 2), the same: P = 2^(x - state[0]) / state[1], or absent

  int64_t units_per_batch() const { return num_heads / heads_per_unit; }
  int64_t num_units() const { return num_batches * units_per_batch(); }
  int64_t rows_per_unit() const {
    return heads_per_unit * seqlen_q;
  }  // at most, where lengths differ
  // Units of at most so many rows have a forward of their own. Not packed ones: those differ in
  // length, and a row's bits must not depend on its neighbours'.
  bool has_few_rows(int64_t most) const { return rows_per_unit() <= most && !lengths.query_start; }
};

// The tensors that the inputs have gradients, tangents or directions of.
struct InputViews {
  TensorView query;
  TensorView key;
  TensorView value;
  TensorView attn_mask;
  TensorView alibi_slopes;
  TensorView sinks;
};

// Gradients of key and value are written through views of their own: where several units read one
// slice of an input, each unit writes a slice of a temporary tensor, and the glue adds these up in
// order.
struct GradParams {
  AttentionParams forward;
  TensorView grad_output;   // (batch..., head, seqlen_q, value_dim)
  TensorView grad_lse;      // (batch..., head, seqlen_q)
  TensorView grad_weights;  // (batch..., head, seqlen_q, seqlen_kv)

  TensorView grad_query;  // (batch..., head, seqlen_q, head_dim); written
  TensorView grad_key;    // (batch..., head / grad_key_group, seqlen_kv, head_dim); written
  TensorView grad_value;  // (batch..., head / grad_value_group, seqlen_kv, value_dim); written
  int64_t grad_key_group = 1;
  int64_t grad_value_group = 1;
  TensorView
      delta;  // (batch..., head, seqlen_q): rowsum(dO * O) - dlse, accumulation type; written
  TensorView
      slope_sums;  // (batch..., head, seqlen_q): the row's part of the slope's gradient; written
};

struct WeightsParams {
  AttentionParams forward;
  TensorView weights;  // (batch..., head, seqlen_q, seqlen_kv), zeros; written
};

// The direction of a tangent, and tangents of results.
struct TangentParams {
  GradParams
      grad;  // grad_query etc. are the tangents of the gradients; written by backward_tangent
  InputViews tangent;              // of the inputs, in their shapes
  TensorView grad_output_tangent;  // (batch..., head, seqlen_q, value_dim)
  TensorView grad_lse_tangent;     // (batch..., head, seqlen_q)
  TensorView
      output_tangent;      // (batch..., head, seqlen_q, value_dim); written by tangent, then read
  TensorView lse_tangent;  // (batch..., head, seqlen_q), accumulation type; the same
  TensorView
      delta_tangent;  // (batch..., head, seqlen_q), accumulation type; written by backward_tangent
};

// The gradient of a float mask, in the mask's own shape: dimensions that it shares are summed over.
struct MaskGradParams {
  TangentParams call;    // for the gradient itself only call.grad is used
  TensorView grad_mask;  // (batch..., head, row, column) of the mask's own sizes; written
  bool shared_batch[kMaxBatchDims] = {};
  bool shared_heads = false, shared_rows = false, shared_columns = false;
};

}  // namespace attention_ext
