// Every check of an argument, once, below the dispatcher and before anything is allocated.
//
// A check looks at shapes and dtypes only (TensorInfo), so that the same code serves real tensors and the fake
// tensors of torch.compile. Its text is "[kind] function: expected <rule>, got <values>": the stable ABI can
// only raise RuntimeError, and attention_ext/errors.py turns the kind into the exception's type.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>
#include <string>

namespace attention_ext {

using torch::headeronly::ScalarType;

constexpr int64_t kMaxDims = 8;

struct TensorInfo {
  const char* name;
  ScalarType dtype;
  int64_t dim;
  const int64_t* size;

  int64_t from_end(int64_t i) const { return i <= dim ? size[dim - i] : 1; }  // missing dimensions are 1
};

// Arguments of an attention call that a check looks at.
struct CallInfo {
  TensorInfo query, key, value;
  std::optional<TensorInfo> attn_mask;
  bool enable_gqa;
};

[[noreturn]] void raise(const char* kind, const std::string& text);

// Throws unless the call is legal.
void check_call(const CallInfo& call);

// A backward's gradient must have the shape it is the gradient of.
void check_gradient(const TensorInfo& gradient, const TensorInfo& of);

}  // namespace attention_ext
