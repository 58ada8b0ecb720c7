// Every check of an argument, once, below the dispatcher and before anything is allocated.
//
// A check looks at shapes and dtypes only (TensorInfo), so that the same code serves real tensors
// and the fake tensors of torch.compile; what tensors hold (lengths, offsets) is checked where it
// is read, in pack_params. The text is "[kind] function: expected <rule>, got <values>": the stable
// ABI can only raise RuntimeError, and attention_ext/errors.py turns the kind into the exception's
// type.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <sstream>
#include <string>

namespace attention_ext {

using torch::headeronly::ScalarType;

constexpr int64_t kMaxDims = 8;

struct TensorInfo {
  const char* name;
  ScalarType dtype;
  int64_t dim;
  const int64_t* size;

  int64_t from_end(int64_t i) const {
    return i <= dim ? size[dim - i] : 1;
  }  // missing dimensions are 1
};

// For messages: "name (2, 4, 8)", and "torch.float32".
std::ostream& operator<<(std::ostream& s, const TensorInfo& t);
struct DtypeName {
  explicit DtypeName(ScalarType t) : dtype(t) {}
  ScalarType dtype;
};
std::ostream& operator<<(std::ostream& s, const DtypeName& name);

// Arguments of an attention call that a check looks at.
struct CallInfo {
  TensorInfo query, key, value;
  std::optional<TensorInfo> attn_mask = {}, alibi_slopes = {}, sinks = {}, seqused_k = {},
                            cu_seq_q = {}, cu_seq_k = {};
  bool enable_gqa = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0, dropout_p = 0.0;

  // Packed sequences: (total, heads, width) instead of (*batch, heads, length, width).
  bool packed() const { return cu_seq_q.has_value(); }
  const char* function() const { return packed() ? "varlen_attn" : "scaled_dot_product_attention"; }
};

// Arguments of attention_with_kv_cache that a check looks at.
struct CacheCallInfo {
  TensorInfo query, key_cache, value_cache, cache_seqlens;
  std::optional<TensorInfo> key = {}, value = {}, block_table = {}, cache_batch_idx = {},
                            rotary_cos = {}, rotary_sin = {}, alibi_slopes = {}, sinks = {};
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;

  static constexpr const char* kFunction = "attention_with_kv_cache";
  int64_t batch() const { return query.size[0]; }
};

// Arguments of apply_rotary that a check looks at.
struct RotaryCallInfo {
  TensorInfo x, cos, sin;
  std::optional<TensorInfo> positions = {};
  int64_t position_dim = -2;  // of x, from the end

  static constexpr const char* kFunction = "apply_rotary";
};

[[noreturn]] void raise(const char* kind, const std::string& text);

// Throws "[kind] function: expected <parts>" unless the rule holds.
template <class... Parts>
void expect(bool rule, const char* kind, const char* function, const Parts&... parts) {
  if (rule) return;
  std::ostringstream text;
  text << function << ": expected ";
  (text << ... << parts);
  raise(kind, text.str());
}

// Throws unless the call is legal.
void check_call(const CallInfo& call);
void check_cache_call(const CacheCallInfo& call);
void check_rotary_call(const RotaryCallInfo& call);
void check_rms_norm(const TensorInfo& x, const TensorInfo& weight, double epsilon);
void check_swiglu(const TensorInfo& x);

// One of the four floating dtypes; int32 or int64.
void check_floating(const char* function, const TensorInfo& t);
void check_integers(const char* function, const TensorInfo& t);

// A gradient or tangent must have the shape and dtype of what it belongs to.
void check_like(const TensorInfo& tensor, const TensorInfo& of,
                const char* function = "scaled_dot_product_attention");

}  // namespace attention_ext
