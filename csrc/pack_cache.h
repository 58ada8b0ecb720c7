// attention_with_kv_cache: tensors -> params, and every check of what they hold and of where they
// lie. A cache is always seen as pages: those of block_table, or one page of the whole capacity for
// each sequence.
#pragma once

#include "pack_layers.h"

namespace attention_ext {

// The arguments of the operator, in its order.
struct CacheArguments {
  Tensor query, key_cache, value_cache, cache_seqlens;
  std::optional<Tensor> key, value, block_table, cache_batch_idx, rotary_cos, rotary_sin;
  bool rotary_interleaved = false;
  int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  std::optional<Tensor> alibi_slopes, sinks;
  std::optional<double> scale;
};

// A checked call.
struct CacheCall {
  Call call;                   // attention to the cache; params.key and params.value are its pages
  std::vector<int64_t> pages;  // (batch, pages in use)
  std::vector<int64_t> start;  // (batch): position of the first query
  int64_t num_kv_heads = 0;
  TensorView new_key;  // (batch, kv head, new position, column); absent: nothing to append
  TensorView new_value;
  RotaryParams rotary;  // of query and new key, but for input and output; rotary_dim 0: none
};

// Checks the call and fills in everything but output and lse. Nothing has been written when it
// throws.
CacheCall pack_cache_call(const CacheArguments& arguments);

}  // namespace attention_ext
