// The table of contents of the extension: every operator's schema. They are private; attention_ext/functional.py
// and attention_ext/autograd.py are the way in. Arguments: the tensors that are always there first, and a
// default for everything else, since an argument that is left out costs a call nothing.

#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "checks.h"

namespace attention_ext {
namespace {

// What every operator takes after its tensors, in the order of AttentionOptions (pack_params.h).
const std::string kOptions =
    "Tensor? attn_mask=None, bool is_causal=False, float? scale=None, bool enable_gqa=False, bool lower_right=False, "
    "int window_left=-1, int window_right=-1, float softcap=0., float dropout_p=0., Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? seqused_k=None, Tensor? seed=None, int shared_batch_dims=0, "
    "Tensor? cu_seq_q=None, Tensor? cu_seq_k=None, int max_q=0, int max_k=0";

// The result of the forward, its upstream gradients and the inputs: what a derivative starts from.
const std::string kForward = "Tensor query, Tensor key, Tensor value, ";
const std::string kUpstream = "Tensor? grad_output, Tensor? grad_lse, ";
const std::string kResults = "Tensor output, Tensor state, ";
const std::string kDirection =
    "Tensor? query_tangent, Tensor? key_tangent, Tensor? value_tangent, Tensor? mask_tangent, "
    "Tensor? slopes_tangent, Tensor? sinks_tangent, ";
const std::string kUpstreamTangents =
    "Tensor? grad_output_tangent, Tensor? grad_lse_tangent, Tensor output_tangent, Tensor lse_tangent, ";
const std::string kGradients =
    "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_slopes, Tensor grad_sinks)";

// The checks of a call on shapes and dtypes alone, for fake kernels. Tensors in the order query, key, value,
// attn_mask, alibi_slopes, sinks, seqused_k, cu_seq_q, cu_seq_k: dimensions of each (-1: absent), all sizes one
// after the other, dtypes.
void check_forward(std::vector<int64_t> ranks, std::vector<int64_t> sizes, std::vector<int64_t> dtypes, bool enable_gqa,
                   int64_t window_left, int64_t window_right, double softcap, double dropout_p) {
  expect(ranks.size() == 9 && dtypes.size() == 9 && ranks[0] >= 0 && ranks[1] >= 0 && ranks[2] >= 0, "value",
         "check_forward", "ranks and dtypes of nine tensors, of which query, key and value are present, got ",
         ranks.size(), " and ", dtypes.size());
  int64_t total = 0;
  for (const int64_t rank : ranks) total += rank > 0 ? rank : 0;
  expect(static_cast<int64_t>(sizes.size()) == total, "value", "check_forward", total, " sizes, got ", sizes.size());
  const char* names[] = {"query", "key", "value", "attn_mask", "alibi_slopes", "sinks", "seqused_k", "cu_seq_q", "cu_seq_k"};
  std::vector<std::optional<TensorInfo>> tensors;
  const int64_t* next = sizes.data();
  for (size_t i = 0; i < 9; ++i) {
    tensors.emplace_back();
    if (ranks[i] < 0) continue;
    tensors.back() = TensorInfo{names[i], static_cast<ScalarType>(dtypes[i]), ranks[i], next};
    next += ranks[i];
  }
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

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY(attention_ext, m) {
  using namespace attention_ext;
  m.def(("forward(" + kForward + kOptions + ") -> (Tensor output, Tensor lse, Tensor state)").c_str());
  m.def(("backward(" + kUpstream + "Tensor? grad_weights, " + kForward + kResults + kOptions + ") -> " + kGradients).c_str());
  m.def(("mask_gradient(" + kUpstream + "Tensor? grad_weights, " + kForward + kResults + kOptions + ") -> Tensor").c_str());
  m.def(("weights(" + kForward + "Tensor state, " + kOptions + ") -> Tensor").c_str());
  m.def(("tangent(" + kDirection + kForward + kResults + kOptions + ") -> (Tensor output_tangent, Tensor lse_tangent)").c_str());
  m.def(("backward_tangent(" + kUpstreamTangents + kDirection + kUpstream + kForward + kResults + kOptions + ") -> " +
         kGradients).c_str());
  m.def(("mask_gradient_tangent(" + kUpstreamTangents + kDirection + kUpstream + kForward + kResults + kOptions +
         ") -> Tensor").c_str());
  m.def(
      "check_forward(int[] ranks, int[] sizes, int[] dtypes, bool enable_gqa=False, int window_left=-1, "
      "int window_right=-1, float softcap=0., float dropout_p=0.) -> ()");
  m.def("cpu_capability() -> str");
  m.def("fma_peak(float seconds) -> float");
}

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CompositeExplicitAutograd, m) {
  m.impl("check_forward", TORCH_BOX(&attention_ext::check_forward));
}
