// attention_with_kv_cache on the CPU: check, turn query and new keys, append keys and values, attend to the pages
// in use. Work follows the lengths, not the capacity.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>

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
void copy_rows(const TensorView& into, int64_t into_offset, const TensorView& from, int64_t from_offset, int64_t rows,
               int64_t columns, int64_t size) {
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

// New rows of one batch element and head into their slots.
void append_rows(const CacheCall& c, const TensorView& cache, const TensorView& rows, int64_t batch, int64_t head,
                 int64_t columns, int64_t size) {
  if (columns == 0) return;  // an empty tensor has no address
  const int64_t length = c.call.params.seqlen_q, source = batch * rows.batch_stride[0] + head * rows.head_stride;
  PagedRows slots(c.call.params.pages, batch, c.start[batch]);
  for (int64_t i = 0, count; i < length; i += count, slots.next_page()) {
    count = std::min(length - i, slots.count());
    copy_rows(cache, head * cache.head_stride + slots.offset(cache), rows, source + i * rows.row_stride, count, columns,
              size);
  }
}

// New values, and new keys unless they turn.
void append(const CacheCall& c, int64_t size) {
  const AttentionParams& p = c.call.params;
  if (!c.new_key.data || p.seqlen_q == 0) return;
  const int64_t tasks = p.num_batches * c.num_kv_heads;
  const double elements = static_cast<double>(tasks) * p.seqlen_q * (p.head_dim + p.value_dim);
  run_tasks(tasks, num_workers(tasks, elements), [&](int64_t task, int64_t) {
    const int64_t batch = task / c.num_kv_heads, head = task % c.num_kv_heads;
    if (c.rotary.half == 0) append_rows(c, p.key, c.new_key, batch, head, p.head_dim, size);
    append_rows(c, p.value, c.new_value, batch, head, p.value_dim, size);
  });
}

// The heads of one batch element and position, from one tensor's row into another's.
RotaryRows heads_of(const TensorView& from, int64_t from_offset, const TensorView& into, int64_t into_offset,
                    int64_t heads, int64_t columns, int64_t size) {
  return {element(from, from_offset, size), element(into, into_offset, size), from.dtype, heads, columns,
          from.head_stride, from.column_stride, into.head_stride, into.column_stride};
}

// Queries turned into `turned`, new keys into their slots. (Queries before position 0 see nothing.)
void turn(const CacheCall& c, const TensorView& turned, const KernelTable& kernel, int64_t size) {
  const AttentionParams& p = c.call.params;
  const int64_t tasks = p.num_batches * p.seqlen_q, bytes = round_up(kernel.rotate_scratch(c.rotary), 64);
  const int64_t workers = num_workers(tasks, static_cast<double>(tasks) * (p.num_heads + c.num_kv_heads) * p.head_dim);
  const Scratch scratch(bytes * workers);
  const auto row = [](const TensorView& view, int64_t batch, int64_t i) {
    return batch * view.batch_stride[0] + i * view.row_stride;
  };
  run_tasks(tasks, workers, [&](int64_t task, int64_t worker) {
    const int64_t batch = task / p.seqlen_q, i = task % p.seqlen_q, position = c.start[batch] + i;
    RotaryRows rows[2] = {heads_of(p.query, row(p.query, batch, i), turned, row(turned, batch, i), p.num_heads,
                                   p.head_dim, size)};
    if (c.new_key.data) {
      rows[1] = heads_of(c.new_key, row(c.new_key, batch, i), p.key,
                         PagedRows(p.pages, batch, position).offset(p.key), c.num_kv_heads, p.head_dim, size);
    }
    kernel.rotate(c.rotary, std::max<int64_t>(position, 0), rows, c.new_key.data ? 2 : 1, scratch.at(worker * bytes));
  });
}

std::tuple<Tensor, Tensor> attention_with_kv_cache(
    Tensor query, Tensor key_cache, Tensor value_cache, Tensor cache_seqlens, std::optional<Tensor> key,
    std::optional<Tensor> value, std::optional<Tensor> block_table, std::optional<Tensor> cache_batch_idx,
    std::optional<Tensor> rotary_cos, std::optional<Tensor> rotary_sin, bool rotary_interleaved, int64_t window_left,
    int64_t window_right, double softcap, std::optional<Tensor> alibi_slopes, std::optional<Tensor> sinks,
    std::optional<double> scale) {
  const CacheArguments arguments{std::move(query),        std::move(key_cache),   std::move(value_cache),
                                 std::move(cache_seqlens), std::move(key),         std::move(value),
                                 std::move(block_table),  std::move(cache_batch_idx), std::move(rotary_cos),
                                 std::move(rotary_sin),   rotary_interleaved,     window_left,
                                 window_right,            softcap,                std::move(alibi_slopes),
                                 std::move(sinks),        scale};
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
  std::optional<Tensor> turned;
  if (c.rotary.half > 0) {
    dim = c.call.output_shape(p.head_dim, sizes);
    turned = empty_contiguous(arguments.query, dim, sizes, dtype);
    const TensorView view = view_of(*turned, c.call, p.num_heads);
    if (p.seqlen_kv > 0) turn(c, view, kernel, size);
    p.query = view;
  }
  append(c, size);
  run_forward(p, kernel);
  return {std::move(output), std::move(lse)};
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  m.impl("attention_with_kv_cache", TORCH_BOX(&attention_ext::attention_with_kv_cache));
}
