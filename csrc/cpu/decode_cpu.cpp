// attention_with_kv_cache on the CPU: check, append the new keys and values, attend to the pages in
// use. Work follows the lengths, not the capacity. New keys are rotated on their way into the
// cache, queries into a buffer.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "../core/pages.h"
#include "../pack_cache.h"
#include "attention_cpu.h"
#include "gradients.h"

namespace attention_ext {
namespace {

char* element(const TensorView& view, int64_t offset, int64_t size) {
  return static_cast<char*>(const_cast<void*>(view.data)) + offset * size;
}

// Rows from one view into another of the same dtype.
void copy_rows(const TensorView& into, int64_t into_offset, const TensorView& from,
               int64_t from_offset, int64_t rows, int64_t columns, int64_t size) {
  if (columns == 0) return;  // an empty tensor has no address
  const bool dense = into.column_stride == 1 && from.column_stride == 1;
  for (int64_t i = 0; i < rows; ++i) {
    char* out = element(into, into_offset + i * into.row_stride, size);
    const char* in = element(from, from_offset + i * from.row_stride, size);
    if (dense) {
      std::memcpy(out, in, columns * size);
      continue;
    }
    for (int64_t j = 0; j < columns; ++j) {
      std::memcpy(out + j * into.column_stride * size, in + j * from.column_stride * size, size);
    }
  }
}

// New rows of one batch element and head, from offset `source` on, into their slots.
template <class Copy>
void append_rows(const CacheCall& c, const TensorView& cache, const TensorView& rows, int64_t batch,
                 int64_t head, const Copy& copy) {
  const int64_t length = c.call.params.seqlen_q,
                source = batch * rows.batch_stride[0] + head * rows.head_stride;
  PagedRows slots(c.call.params.pages, batch, c.start[batch]);
  for (int64_t i = 0, count; i < length; i += count, slots.next_page()) {
    count = std::min(length - i, slots.count());
    copy(head * cache.head_stride + slots.offset(cache), source + i * rows.row_stride, count,
         c.start[batch] + i);
  }
}

RotaryParams rotation(const CacheCall& c, const TensorView& from, const TensorView& into) {
  RotaryParams r = c.rotary;
  r.input = from;
  r.output = into;
  return r;
}

void append(const CacheCall& c, const KernelTable& kernel, int64_t size) {
  const AttentionParams& p = c.call.params;
  const RotaryParams rotary = rotation(c, c.new_key, p.key);
  if (!c.new_key.data || p.seqlen_q == 0) return;
  const int64_t tasks = p.num_batches * c.num_kv_heads;
  const double elements = static_cast<double>(tasks) * p.seqlen_q * (p.head_dim + p.value_dim);
  run_tasks(tasks, num_workers(tasks, elements), [&](int64_t task, int64_t) {
    const int64_t batch = task / c.num_kv_heads, head = task % c.num_kv_heads;
    append_rows(c, p.key, c.new_key, batch, head,
                [&](int64_t to, int64_t from, int64_t rows, int64_t position) {
      if (rotary.rotary_dim > 0) {
        kernel.rotate(rotary, {from, to, rows, position, nullptr});
      } else {
        copy_rows(p.key, to, c.new_key, from, rows, p.head_dim, size);
      }
    });
    append_rows(c, p.value, c.new_value, batch, head,
                [&](int64_t to, int64_t from, int64_t rows, int64_t) {
      copy_rows(p.value, to, c.new_value, from, rows, p.value_dim, size);
    });
  });
}

// Puts a rotated copy, (batch, head, L, width), in the place of the query; returns its memory.
std::unique_ptr<char[]> rotate_query(CacheCall& c, const KernelTable& kernel, int64_t size) {
  AttentionParams& p = c.call.params;
  const int64_t heads = p.num_batches * p.num_heads, each = p.seqlen_q * p.head_dim;
  if (c.rotary.rotary_dim == 0 || heads * each == 0) return nullptr;
  std::unique_ptr<char[]> memory(new char[heads * each * size]);
  TensorView rotated = p.query;
  rotated.data = memory.get();
  rotated.column_stride = 1;
  rotated.row_stride = p.head_dim;
  rotated.head_stride = each;
  rotated.batch_stride[0] = p.num_heads * each;
  const RotaryParams rotary = rotation(c, p.query, rotated);
  run_tasks(heads, num_workers(heads, 2.0 * heads * each), [&](int64_t task, int64_t) {
    const int64_t batch = task / p.num_heads, head = task % p.num_heads;
    kernel.rotate(rotary, {batch * p.query.batch_stride[0] + head * p.query.head_stride,
                           task * each, p.seqlen_q, c.start[batch], nullptr});
  });
  p.query = rotated;
  return memory;
}

std::tuple<Tensor, Tensor> attention_with_kv_cache(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor cache_seqlens,
    std::optional<Tensor> key, std::optional<Tensor> value, std::optional<Tensor> block_table,
    std::optional<Tensor> cache_batch_idx, std::optional<Tensor> rotary_cos,
    std::optional<Tensor> rotary_sin, bool rotary_interleaved, int64_t window_left,
    int64_t window_right, double softcap, std::optional<Tensor> alibi_slopes,
    std::optional<Tensor> sinks, std::optional<double> scale) {
  const CacheArguments arguments{std::move(query),
                                 std::move(key_cache),
                                 std::move(value_cache),
                                 std::move(cache_seqlens),
                                 std::move(key),
                                 std::move(value),
                                 std::move(block_table),
                                 std::move(cache_batch_idx),
                                 std::move(rotary_cos),
                                 std::move(rotary_sin),
                                 rotary_interleaved,
                                 window_left,
                                 window_right,
                                 softcap,
                                 std::move(alibi_slopes),
                                 std::move(sinks),
                                 scale};
  CacheCall c = pack_cache_call(arguments);
  AttentionParams& p = c.call.params;
  const ScalarType dtype = arguments.query.scalar_type();
  int64_t sizes[kMaxDims];
  int64_t dim = c.call.output_shape(p.value_dim, sizes);
  Tensor output = empty_laid_out_like(arguments.query, dim, sizes, dtype);
  dim = c.call.output_shape(-1, sizes);
  Tensor lse = empty_contiguous(arguments.query, dim, sizes, accumulation_type(dtype));
  p.output = view_of(output, c.call, p.num_heads);
  p.lse = row_view_of(lse, c.call);
  const KernelTable& kernel = table_for(dtype);
  const int64_t size = static_cast<int64_t>(arguments.query.element_size());
  append(c, kernel, size);
  const auto rotated = rotate_query(c, kernel, size);
  run_forward(p, kernel);
  return {std::move(output), std::move(lse)};
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  m.impl("attention_with_kv_cache", TORCH_BOX(&attention_ext::attention_with_kv_cache));
}
