// The table of contents of the extension: every operator's schema. They are private; attention_ext/functional.py
// and attention_ext/autograd.py are the way in. Arguments: the tensors that are always there first, and a
// default for everything else, since an argument that is left out costs a call nothing.

#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <optional>
#include <vector>

#include "checks.h"

namespace attention_ext {
namespace {

// The checks of forward on shapes and dtypes alone, for fake kernels; mask_dtype is -1 without a mask.
void check_forward(std::vector<int64_t> query_shape, std::vector<int64_t> key_shape, std::vector<int64_t> value_shape,
                   std::optional<std::vector<int64_t>> mask_shape, int64_t query_dtype, int64_t key_dtype,
                   int64_t value_dtype, int64_t mask_dtype, std::optional<double>, bool, bool enable_gqa) {
  const auto info = [](const char* name, const std::vector<int64_t>& shape, int64_t dtype) {
    return TensorInfo{name, static_cast<ScalarType>(dtype), static_cast<int64_t>(shape.size()), shape.data()};
  };
  CallInfo call{info("query", query_shape, query_dtype), info("key", key_shape, key_dtype),
                info("value", value_shape, value_dtype), std::nullopt, enable_gqa};
  if (mask_shape) call.attn_mask = info("attn_mask", *mask_shape, mask_dtype);
  check_call(call);
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY(attention_ext, m) {
  m.def(
      "forward(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, bool is_causal=False, "
      "float? scale=None, bool enable_gqa=False, bool lower_right=False) -> (Tensor output, Tensor lse)");
  m.def(
      "backward(Tensor? grad_output, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor output, "
      "Tensor lse, Tensor? attn_mask=None, bool is_causal=False, float? scale=None, bool enable_gqa=False, "
      "bool lower_right=False) -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)");
  m.def(
      "check_forward(int[] query_shape, int[] key_shape, int[] value_shape, int[]? mask_shape, int query_dtype, "
      "int key_dtype, int value_dtype, int mask_dtype, float? scale, bool is_causal, bool enable_gqa) -> ()");
  m.def("cpu_capability() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("check_forward", TORCH_BOX(&attention_ext::check_forward));
}
