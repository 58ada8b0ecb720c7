#include "pack_params.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace attention_ext {
namespace {

struct Geometry {
  int64_t dim;
  const int64_t* size;
  const int64_t* stride;
};

Geometry geometry(const Tensor& t) {
  int64_t* sizes = nullptr;
  int64_t* strides = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &strides));
  return {t.dim(), sizes, strides};
}

DType storage_type(ScalarType t) {
  switch (t) {
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    case ScalarType::Bool:
      return DType::kBool;
    default:
      return DType::kFloat32;
  }
}

// Whether dimension a should lie outside dimension b in memory, as torch.empty_like decides.
bool outside(const Geometry& g, int64_t a, int64_t b) {
  if (g.stride[a] != g.stride[b]) return g.stride[a] > g.stride[b];
  return g.size[a] > g.size[b];
}

TensorView make_view(const Tensor& t, const AttentionParams& p, int64_t heads, int64_t has_columns) {
  const Geometry g = geometry(t);
  // Stride of the i-th dimension from the end, 0 where it is missing or broadcast to another size.
  const auto stride = [&](int64_t i, int64_t size) {
    return i > g.dim || i < 1 || (g.size[g.dim - i] == 1 && size != 1) ? 0 : g.stride[g.dim - i];
  };
  TensorView view;
  view.data = t.const_data_ptr();
  view.dtype = storage_type(t.scalar_type());
  view.column_stride = has_columns ? stride(1, 0) : 0;
  view.row_stride = stride(1 + has_columns, 0);
  view.head_stride = stride(2 + has_columns, heads);
  for (int64_t d = 0; d < p.batch_dims; ++d) {
    view.batch_stride[d] = stride(2 + has_columns + p.batch_dims - d, p.batch_size[d]);
  }
  return view;
}

// A factory of the C shim: 0.3 us against 1.9 us of torch::stable::new_empty.
Tensor empty_strided(const Tensor& model, int64_t dim, const int64_t* sizes, const int64_t* strides, ScalarType dtype) {
  int32_t device_type = 0, device_index = 0;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(model.get(), &device_type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(model.get(), &device_index));
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(dtype), device_type,
                                                         device_index, &handle));
  return Tensor(handle);
}

// `order`: dimensions, outermost first.
Tensor empty_in_order(const Tensor& model, int64_t dim, const int64_t* sizes, const int64_t* order, ScalarType dtype) {
  int64_t strides[kMaxDims], next = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[order[i]] = next;
    next *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return empty_strided(model, dim, sizes, strides, dtype);
}

}  // namespace

TensorInfo info(const char* name, const Tensor& t) {
  const Geometry g = geometry(t);
  return {name, t.scalar_type(), g.dim, g.size};
}

TensorView view_of(const Tensor& t, const AttentionParams& p, int64_t heads) {
  return make_view(t, p, heads, /*has_columns=*/1);
}

TensorView row_view_of(const Tensor& t, const AttentionParams& p) {
  return make_view(t, p, p.num_heads, /*has_columns=*/0);
}

AttentionParams pack_params(const Tensor& query, const Tensor& key, const Tensor& value,
                            const std::optional<Tensor>& attn_mask, const AttentionOptions& options) {
  CallInfo call{info("query", query), info("key", key), info("value", value), std::nullopt, options.enable_gqa};
  if (attn_mask) call.attn_mask = info("attn_mask", *attn_mask);
  check_call(call);

  AttentionParams p;
  const int64_t heads[] = {call.query.from_end(3), call.key.from_end(3), call.value.from_end(3)};
  const auto broadcast = [](int64_t a, int64_t b, int64_t c) { return a != 1 ? a : b != 1 ? b : c; };
  p.num_heads = options.enable_gqa ? heads[0] : broadcast(heads[0], heads[1], heads[2]);
  p.key_group = p.num_heads / std::max<int64_t>(heads[1], 1);
  p.value_group = p.num_heads / std::max<int64_t>(heads[2], 1);
  p.heads_per_unit = std::max<int64_t>(std::gcd(p.key_group, p.value_group), 1);
  p.batch_dims = std::max<int64_t>(std::max({call.query.dim, call.key.dim, call.value.dim}) - 3, 0);
  for (int64_t d = 0; d < p.batch_dims; ++d) {
    const int64_t i = 3 + p.batch_dims - d;
    p.batch_size[d] = broadcast(call.query.from_end(i), call.key.from_end(i), call.value.from_end(i));
    p.num_batches *= p.batch_size[d];
  }
  p.seqlen_q = call.query.from_end(2);
  p.seqlen_kv = call.key.from_end(2);
  p.head_dim = call.query.from_end(1);
  p.value_dim = call.value.from_end(1);
  // Width 0: every score is 0, whatever the default scale 1/sqrt(0) would say.
  p.scale = p.head_dim == 0 ? 0.0 : options.scale ? *options.scale : 1.0 / std::sqrt(static_cast<double>(p.head_dim));
  p.visibility.offset = options.lower_right ? p.seqlen_kv - p.seqlen_q : 0;
  p.visibility.right = options.is_causal ? 0 : Visibility::kUnlimited;

  p.query = view_of(query, p, p.num_heads);
  p.key = view_of(key, p, heads[1]);
  p.value = view_of(value, p, heads[2]);
  if (attn_mask) p.attn_mask = view_of(*attn_mask, p, p.num_heads);
  return p;
}

Tensor empty_laid_out_like(const Tensor& model, int64_t dim, const int64_t* sizes, ScalarType dtype) {
  const Geometry g = geometry(model);
  int64_t order[kMaxDims];  // dimensions, outermost first
  std::iota(order, order + dim, 0);
  bool own = g.dim == dim;
  for (int64_t i = 0; own && i < dim; ++i) {
    own = (i == dim - 1 || g.size[i] == sizes[i]) && (g.stride[i] != 0 || g.size[i] <= 1);
  }
  if (own) {
    for (int64_t i = 1; i < dim; ++i) {  // insertion sort; a dimension of size 1 may lie anywhere
      int64_t moving = i;
      for (int64_t j = i - 1; j >= 0; --j) {
        if (g.size[order[j]] == 1 || g.size[order[moving]] == 1) continue;
        if (!outside(g, order[moving], order[j])) break;
        std::swap(order[moving], order[j]);
        moving = j;
      }
    }
  }
  return empty_in_order(model, dim, sizes, order, dtype);
}

Tensor empty_contiguous(const Tensor& model, int64_t dim, const int64_t* sizes, ScalarType dtype) {
  int64_t order[kMaxDims];
  std::iota(order, order + dim, 0);
  return empty_in_order(model, dim, sizes, order, dtype);
}

int64_t output_shape(const AttentionParams& p, const Tensor& query, const Tensor& key, const Tensor& value,
                     int64_t last, int64_t* sizes) {
  int64_t dim = 0;
  for (int64_t d = 0; d < p.batch_dims; ++d) sizes[dim++] = p.batch_size[d];
  if (std::max({query.dim(), key.dim(), value.dim()}) >= 3) sizes[dim++] = p.num_heads;
  sizes[dim++] = p.seqlen_q;
  if (last >= 0) sizes[dim++] = last;
  return dim;
}

}  // namespace attention_ext
