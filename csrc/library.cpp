// The table of contents of the extension: every operator's schema. They are private;
// attention_ext/functional.py and attention_ext/autograd.py are the way in. Arguments: the tensors
// that are always there first, and a default for everything else, since an argument that is left
// out costs a call nothing.

#include <torch/csrc/stable/library.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"

namespace attention_ext {
namespace {

// What every operator takes after its tensors, in the order of AttentionOptions (pack_params.h).
const std::string kOptions =
    "Tensor? attn_mask=None, bool is_causal=False, float? scale=None, bool enable_gqa=False, bool "
    "lower_right=False, "
    "int window_left=-1, int window_right=-1, float softcap=0., float dropout_p=0., Tensor? "
    "alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? seqused_k=None, Tensor? seed=None, int shared_batch_dims=0, "
    "Tensor? cu_seq_q=None, Tensor? cu_seq_k=None, int max_q=0, int max_k=0";

// The first of them, which are all that most calls have; in the order of WithFewOptions.
const std::string kFewOptions =
    "Tensor? attn_mask=None, bool is_causal=False, float? scale=None, bool enable_gqa=False, bool "
    "lower_right=False";

// The result of the forward, its upstream gradients and the inputs: what a derivative starts from.
const std::string kForward = "Tensor query, Tensor key, Tensor value, ";
const std::string kUpstream = "Tensor? grad_output, Tensor? grad_lse, ";
const std::string kResults = "Tensor output, Tensor state, ";
const std::string kDirection =
    "Tensor? query_tangent, Tensor? key_tangent, Tensor? value_tangent, Tensor? mask_tangent, "
    "Tensor? slopes_tangent, Tensor? sinks_tangent, ";
const std::string kUpstreamTangents =
    "Tensor? grad_output_tangent, Tensor? grad_lse_tangent, Tensor output_tangent, Tensor "
    "lse_tangent, ";
const std::string kGradients =
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_slopes, Tensor "
    "grad_sinks)";

// What a fake kernel knows of tensors: dimensions of each (-1: absent), all sizes one after the
// other, dtypes. The first `required` names are always present.
std::vector<std::optional<TensorInfo>> read_infos(const char* op,
                                                  std::initializer_list<const char*> names,
                                                  size_t required,
                                                  const std::vector<int64_t>& ranks,
                                                  const std::vector<int64_t>& sizes,
                                                  const std::vector<int64_t>& dtypes) {
  int64_t total = 0;
  bool present = ranks.size() == names.size() && dtypes.size() == names.size();
  for (size_t i = 0; i < ranks.size(); ++i) {
    total += ranks[i] > 0 ? ranks[i] : 0;
    present = present && (i >= required || ranks[i] >= 0);
  }
  expect(present && static_cast<int64_t>(sizes.size()) == total, "value", op,
         "ranks and dtypes of ", names.size(), " tensors, of which the first ", required,
         " are present, and as many sizes as ranks say, got ", ranks.size(), ", ", dtypes.size(),
         " and ", sizes.size());
  std::vector<std::optional<TensorInfo>> tensors;
  const int64_t* next = sizes.data();
  for (const char* name : names) {
    const size_t i = tensors.size();
    tensors.emplace_back();
    if (ranks[i] < 0) continue;
    tensors.back() = TensorInfo{name, static_cast<ScalarType>(dtypes[i]), ranks[i], next};
    next += ranks[i];
  }
  return tensors;
}

// The checks of a call on shapes and dtypes alone, for fake kernels.
void check_forward(std::vector<int64_t> ranks, std::vector<int64_t> sizes,
                   std::vector<int64_t> dtypes, bool enable_gqa, int64_t window_left,
                   int64_t window_right, double softcap, double dropout_p) {
  const auto tensors = read_infos("check_forward",
                                  {"query", "key", "value", "attn_mask", "alibi_slopes", "sinks",
                                   "seqused_k", "cu_seq_q", "cu_seq_k"},
                                  3, ranks, sizes, dtypes);
  CallInfo call{*tensors[0], *tensors[1], *tensors[2]};
  call.attn_mask = tensors[3];
  call.alibi_slopes = tensors[4];
  call.sinks = tensors[5];
  call.seqused_k = tensors[6];
  call.cu_seq_q = tensors[7];
  call.cu_seq_k = tensors[8];
  call.enable_gqa = enable_gqa;
  call.window_left = window_left;
  call.window_right = window_right;
  call.softcap = softcap;
  call.dropout_p = dropout_p;
  check_call(call);
}

// The same for attention_with_kv_cache; tensors in the order of its schema.
void check_cache(std::vector<int64_t> ranks, std::vector<int64_t> sizes,
                 std::vector<int64_t> dtypes, int64_t window_left, int64_t window_right,
                 double softcap) {
  const auto tensors = read_infos(
      "check_cache",
      {"query", "key_cache", "value_cache", "cache_seqlens", "key", "value", "block_table",
       "cache_batch_idx", "rotary_cos", "rotary_sin", "alibi_slopes", "sinks"},
      4, ranks, sizes, dtypes);
  CacheCallInfo call{*tensors[0], *tensors[1], *tensors[2], *tensors[3]};
  std::optional<TensorInfo>* const others[] = {
      &call.key,        &call.value,      &call.block_table,  &call.cache_batch_idx,
      &call.rotary_cos, &call.rotary_sin, &call.alibi_slopes, &call.sinks};
  for (size_t i = 0; i < 8; ++i) *others[i] = tensors[4 + i];
  call.window_left = window_left;
  call.window_right = window_right;
  call.softcap = softcap;
  check_cache_call(call);
}

// The same for the layers beside attention.
void check_rotary(std::vector<int64_t> ranks, std::vector<int64_t> sizes,
                  std::vector<int64_t> dtypes, int64_t position_dim) {
  const auto t =
      read_infos("check_rotary", {"x", "cos", "sin", "positions"}, 3, ranks, sizes, dtypes);
  check_rotary_call({*t[0], *t[1], *t[2], t[3], position_dim});
}
void check_rms_norm_call(std::vector<int64_t> ranks, std::vector<int64_t> sizes,
                         std::vector<int64_t> dtypes, double eps) {
  const auto t = read_infos("check_rms_norm", {"x", "weight"}, 2, ranks, sizes, dtypes);
  check_rms_norm(*t[0], *t[1], eps);
}
void check_swiglu_call(std::vector<int64_t> ranks, std::vector<int64_t> sizes,
                       std::vector<int64_t> dtypes) {
  check_swiglu(*read_infos("check_swiglu", {"x"}, 1, ranks, sizes, dtypes)[0]);
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY(attention_ext, m) {
  using namespace attention_ext;
  m.def(("forward(" + kForward + kOptions + ") -> (Tensor output, Tensor lse, Tensor state)")
            .c_str());
  // Short forms: an argument costs a call a tenth of a microsecond even where it is left out.
  m.def(("forward.output(" + kForward + kFewOptions + ") -> Tensor").c_str());
  m.def(("forward.with_state(" + kForward + kFewOptions + ") -> (Tensor output, Tensor state)")
            .c_str());
  m.def(("backward.short(Tensor grad_output, " + kResults + kForward + kFewOptions +
         ") -> (Tensor grad_query, Tensor grad_key, Tensor grad_value)")
            .c_str());
  m.def(("backward(" + kUpstream + "Tensor? grad_weights, " + kForward + kResults + kOptions +
         ") -> " + kGradients)
            .c_str());
  m.def(("mask_gradient(" + kUpstream + "Tensor? grad_weights, " + kForward + kResults + kOptions +
         ") -> Tensor")
            .c_str());
  m.def(("weights(" + kForward + "Tensor state, " + kOptions + ") -> Tensor").c_str());
  m.def(("tangent(" + kDirection + kForward + kResults + kOptions +
         ") -> (Tensor output_tangent, Tensor lse_tangent)")
            .c_str());
  m.def(("backward_tangent(" + kUpstreamTangents + kDirection + kUpstream + kForward + kResults +
         kOptions + ") -> " + kGradients)
            .c_str());
  m.def(("mask_gradient_tangent(" + kUpstreamTangents + kDirection + kUpstream + kForward +
         kResults + kOptions + ") -> Tensor")
            .c_str());
  m.def(
      "attention_with_kv_cache(Tensor query, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor "
      "cache_seqlens, "
      "Tensor? key=None, Tensor? value=None, Tensor? block_table=None, Tensor? "
      "cache_batch_idx=None, "
      "Tensor? rotary_cos=None, Tensor? rotary_sin=None, bool rotary_interleaved=False, int "
      "window_left=-1, "
      "int window_right=-1, float softcap=0., Tensor? alibi_slopes=None, Tensor? sinks=None, "
      "float? scale=None) -> "
      "(Tensor output, Tensor lse)");
  // position_dim: of x, from the end
  m.def(
      "rotary(Tensor x, Tensor cos, Tensor sin, Tensor? positions=None, bool interleaved=False, "
      "bool inverse=False, "
      "int position_dim=-2) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def(
      "rms_norm_backward(Tensor grad_output, Tensor x, Tensor weight, float eps) -> (Tensor "
      "grad_x, Tensor grad_weight)");
  m.def("swiglu(Tensor x) -> Tensor");
  m.def("swiglu_backward(Tensor grad_output, Tensor x) -> Tensor");
  m.def(
      "check_forward(int[] ranks, int[] sizes, int[] dtypes, bool enable_gqa=False, int "
      "window_left=-1, "
      "int window_right=-1, float softcap=0., float dropout_p=0.) -> ()");
  m.def(
      "check_cache(int[] ranks, int[] sizes, int[] dtypes, int window_left=-1, int "
      "window_right=-1, "
      "float softcap=0.) -> ()");
  m.def("check_rotary(int[] ranks, int[] sizes, int[] dtypes, int position_dim=-2) -> ()");
  m.def("check_rms_norm(int[] ranks, int[] sizes, int[] dtypes, float eps) -> ()");
  m.def("check_swiglu(int[] ranks, int[] sizes, int[] dtypes) -> ()");
  m.def("cpu_capability() -> str");
  m.def("fma_peak(float seconds) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("check_forward", TORCH_BOX(&attention_ext::check_forward));
  m.impl("check_cache", TORCH_BOX(&attention_ext::check_cache));
  m.impl("check_rotary", TORCH_BOX(&attention_ext::check_rotary));
  m.impl("check_rms_norm", TORCH_BOX(&attention_ext::check_rms_norm_call));
  m.impl("check_swiglu", TORCH_BOX(&attention_ext::check_swiglu_call));
}
