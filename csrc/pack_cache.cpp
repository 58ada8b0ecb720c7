#include "pack_cache.h"

#include <algorithm>

#include "overlap.h"

namespace attention_ext {
namespace {

constexpr const char* kFunction = CacheCallInfo::kFunction;

CacheCallInfo describe(const CacheArguments& a) {
  CacheCallInfo c{info("query", a.query), info("key_cache", a.key_cache),
                  info("value_cache", a.value_cache), info("cache_seqlens", a.cache_seqlens)};
  c.key = info("key", a.key);
  c.value = info("value", a.value);
  c.block_table = info("block_table", a.block_table);
  c.cache_batch_idx = info("cache_batch_idx", a.cache_batch_idx);
  c.rotary_cos = info("rotary_cos", a.rotary_cos);
  c.rotary_sin = info("rotary_sin", a.rotary_sin);
  c.alibi_slopes = info("alibi_slopes", a.alibi_slopes);
  c.sinks = info("sinks", a.sinks);
  c.window_left = a.window_left;
  c.window_right = a.window_right;
  c.softcap = a.softcap;
  return c;
}

// Element (row, column) of a tensor of integers of one or two dimensions.
class Integers {
 public:
  explicit Integers(const Tensor& t)
      : data_(t.const_data_ptr()), dtype_(t.scalar_type()), geometry_(geometry(t)) {}
  int64_t at(int64_t row, int64_t column = 0) const {
    const int64_t across = geometry_.dim > 1 ? column * geometry_.stride[1] : 0;
    return read_integer(data_, dtype_, row * geometry_.stride[0] + across);
  }

 private:
  const void* data_;
  ScalarType dtype_;
  Geometry geometry_;
};

// Sequences' lengths after the call and positions of their first queries.
void read_lengths(CacheCall& c, const CacheArguments& a, const CacheCallInfo& checked) {
  const int64_t length = checked.query.size[2], added = a.key ? length : 0;
  const int64_t pages = a.block_table ? checked.block_table->size[1] : 1,
                size = checked.key_cache.size[2];
  const int64_t capacity = size > 0 && pages > INT64_MAX / size ? INT64_MAX : pages * size;
  const Integers used(a.cache_seqlens);
  for (int64_t b = 0; b < checked.batch(); ++b) {
    const int64_t n = used.at(b);
    expect(n >= 0, "value", kFunction, "cache_seqlens of at least 0, got ", n, " for sequence ", b);
    expect(n <= capacity - added, "value", kFunction,
           "cache_seqlens and new positions within the capacity, ", capacity, ", got ", n, " and ",
           added, " for sequence ", b);
    c.call.used_keys.push_back(n + added);
    c.start.push_back(n + added - length);
    c.call.params.seqlen_kv = std::max(c.call.params.seqlen_kv, n + added);
  }
  if (!a.rotary_cos || length == 0) return;
  expect(c.call.params.seqlen_kv <= checked.rotary_cos->size[0], "value", kFunction,
         "rotary tables that reach position ", c.call.params.seqlen_kv - 1, ", got ",
         *checked.rotary_cos);
}

// Pages in use; entries of the table beyond them are not read.
void read_pages(CacheCall& c, const CacheArguments& a, const CacheCallInfo& checked) {
  Pages& p = c.call.params.pages;
  const int64_t batch = checked.batch(), slices = checked.key_cache.size[0];
  p.size = std::max<int64_t>(checked.key_cache.size[2], 1);
  p.per_batch = a.block_table ? (c.call.params.seqlen_kv + p.size - 1) / p.size : 1;
  c.pages.resize(batch * p.per_batch);
  for (int64_t b = 0; b < batch; ++b) {
    int64_t* page = c.pages.data() + b * p.per_batch;
    if (a.block_table) {
      const Integers table(*a.block_table);
      const int64_t in_use = (c.call.used_keys[b] + p.size - 1) / p.size;
      for (int64_t i = 0; i < in_use; ++i) {
        page[i] = table.at(b, i);
        expect(page[i] >= 0 && page[i] < slices, "value", kFunction,
               "block_table of page indices from 0 to ", slices - 1, ", got ", page[i],
               " for page ", i, " of sequence ", b);
      }
    } else {
      *page = a.cache_batch_idx ? Integers(*a.cache_batch_idx).at(b) : b;
      expect(*page >= 0 && *page < slices, "value", kFunction,
             "cache_batch_idx of rows of the cache, from 0 to ", slices - 1, ", got ", *page,
             " for sequence ", b);
    }
  }
  p.table = c.pages.data();
}

// No slot is written twice.
void check_slots(const CacheCall& c, const CacheArguments& a, const CacheCallInfo& checked) {
  if (!a.block_table && !a.cache_batch_idx) return;
  struct Piece {  // of a page
    int64_t page, begin, end, sequence;
  };
  std::vector<Piece> pieces;
  const Pages& p = c.call.params.pages;
  for (int64_t b = 0; b < checked.batch(); ++b) {
    for (int64_t j = c.start[b]; j < c.call.used_keys[b];) {
      const int64_t page = j / p.size, first = page * p.size,
                    stop = std::min(first + p.size, c.call.used_keys[b]);
      pieces.push_back({c.pages[b * p.per_batch + page], j - first, stop - first, b});
      j = stop;
    }
  }
  std::sort(pieces.begin(), pieces.end(), [](const Piece& x, const Piece& y) {
    return x.page != y.page ? x.page < y.page : x.begin < y.begin;
  });
  for (size_t i = 1; i < pieces.size(); ++i) {
    const Piece &x = pieces[i - 1], &y = pieces[i];
    expect(x.page != y.page || x.end <= y.begin, "value", kFunction,
           a.block_table ? "block_table that gives each new position a slot of its own, got page "
                         : "cache_batch_idx of distinct rows for new positions, got row ",
           y.page, " for sequences ", std::min(x.sequence, y.sequence), " and ",
           std::max(x.sequence, y.sequence));
  }
}

StridedMemory memory_of(const Tensor& t, const TensorInfo& checked) {
  return {t.const_data_ptr(), static_cast<int64_t>(t.element_size()), checked.dim, checked.size,
          geometry(t).stride};
}

// Writing a slot changes nothing else.
void check_memory(const CacheArguments& a, const CacheCallInfo& checked) {
  struct Part {
    StridedMemory memory;
    const char* name;
  };
  const auto part = [](const Tensor& t, const TensorInfo& i) {
    return Part{memory_of(t, i), i.name};
  };
  const Part parts[] = {part(a.key_cache, checked.key_cache),
                        part(a.value_cache, checked.value_cache), part(a.query, checked.query),
                        part(*a.key, *checked.key), part(*a.value, *checked.value)};
  for (int i = 0; i < 2; ++i) {
    expect(!overlaps_itself(parts[i].memory), "value", kFunction, parts[i].name,
           " whose elements do not share memory, got one that is expanded or overlaps itself: "
           "clone it");
    for (int j = i + 1; j < 5; ++j) {
      expect(!overlap(parts[i].memory, parts[j].memory), "value", kFunction, parts[i].name,
             " that does not share memory with ", parts[j].name, ", got two that overlap");
    }
  }
}

void pack_rotary(CacheCall& c, const CacheArguments& a, const CacheCallInfo& checked) {
  if (!a.rotary_cos || c.call.params.seqlen_kv == 0) return;  // no key, nothing to see
  c.rotary.cos = table_view(*a.rotary_cos);
  c.rotary.sin = table_view(*a.rotary_sin);
  c.rotary.head_dim = c.call.params.head_dim;
  c.rotary.rotary_dim = 2 * checked.rotary_cos->size[1];
  c.rotary.interleaved = a.rotary_interleaved;
}

void pack_views(CacheCall& c, const CacheArguments& a) {
  AttentionParams& p = c.call.params;
  p.query = view_of(a.query, c.call, p.num_heads);
  p.key = view_of(a.key_cache, c.call, c.num_kv_heads);
  p.value = view_of(a.value_cache, c.call, c.num_kv_heads);
  if (a.alibi_slopes) p.alibi_slopes = head_view_of(*a.alibi_slopes, c.call);
  if (a.sinks) p.sinks = head_view_of(*a.sinks, c.call);
  if (!a.key) return;
  p.key.data = a.key_cache.mutable_data_ptr();
  p.value.data = a.value_cache.mutable_data_ptr();
  c.new_key = view_of(*a.key, c.call, c.num_kv_heads);
  c.new_value = view_of(*a.value, c.call, c.num_kv_heads);
}

}  // namespace

CacheCall pack_cache_call(const CacheArguments& a) {
  const CacheCallInfo checked = describe(a);
  check_cache_call(checked);

  CacheCall c;
  AttentionParams& p = c.call.params;
  p.batch_dims = 1;
  p.num_batches = p.batch_size[0] = checked.batch();
  p.num_heads = checked.query.size[1];
  c.num_kv_heads = checked.key_cache.size[1];
  p.heads_per_unit = std::max<int64_t>(p.num_heads / std::max<int64_t>(c.num_kv_heads, 1), 1);
  p.key_group = p.value_group = p.heads_per_unit;
  p.seqlen_q = checked.query.size[2];
  p.head_dim = checked.query.size[3];
  p.value_dim = checked.value_cache.size[3];
  p.scale = scale_of(a.scale, p.head_dim);
  p.softcap = a.softcap;
  p.visibility = {a.window_left, /*right=*/0, /*lower_right=*/true};

  read_lengths(c, a, checked);
  p.lengths.used_keys = c.call.used_keys.data();
  read_pages(c, a, checked);
  if (a.key) {
    check_slots(c, a, checked);
    check_memory(a, checked);
  }
  pack_views(c, a);
  pack_rotary(c, a, checked);
  return c;
}

}  // namespace attention_ext
