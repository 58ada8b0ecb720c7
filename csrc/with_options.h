// Operators take their options one by one (schemas have no structs), kernels' glue takes a struct.
//
// WithOptions<&f>::call, for f(const AttentionOptions&, leading...), is the function to register:
// it takes the leading arguments and then every option in the order of library.cpp.
#pragma once

#include <utility>

#include "pack_params.h"

namespace attention_ext {

template <auto kFunction>
struct WithOptions;

template <class Result, class... Leading, Result (*kFunction)(const AttentionOptions&, Leading...)>
struct WithOptions<kFunction> {
  static Result call(Leading... leading, std::optional<Tensor> attn_mask, bool is_causal,
                     std::optional<double> scale, bool enable_gqa, bool lower_right,
                     int64_t window_left, int64_t window_right, double softcap, double dropout_p,
                     std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
                     std::optional<Tensor> seqused_k, std::optional<Tensor> seed,
                     int64_t shared_batch_dims, std::optional<Tensor> cu_seq_q,
                     std::optional<Tensor> cu_seq_k, int64_t max_q, int64_t max_k) {
    return kFunction({std::move(attn_mask), is_causal, scale, enable_gqa, lower_right, window_left,
                      window_right, softcap, dropout_p, std::move(alibi_slopes), std::move(sinks),
                      std::move(seqused_k), std::move(seed), shared_batch_dims, std::move(cu_seq_q),
                      std::move(cu_seq_k), max_q, max_k},
                     std::forward<Leading>(leading)...);
  }
};

// The same for the short form of an operator, which takes the first few options.
template <auto kFunction>
struct WithFewOptions;

template <class Result, class... Leading, Result (*kFunction)(const AttentionOptions&, Leading...)>
struct WithFewOptions<kFunction> {
  static Result call(Leading... leading, std::optional<Tensor> attn_mask, bool is_causal,
                     std::optional<double> scale, bool enable_gqa, bool lower_right) {
    AttentionOptions options;
    options.attn_mask = std::move(attn_mask);
    options.is_causal = is_causal;
    options.scale = scale;
    options.enable_gqa = enable_gqa;
    options.lower_right = lower_right;
    return kFunction(options, std::forward<Leading>(leading)...);
  }
};

}  // namespace attention_ext
