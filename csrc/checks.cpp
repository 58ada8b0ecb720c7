#include "checks.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <stdexcept>

namespace attention_ext {
namespace {

// Messages are put together only where a rule is broken: a good call formats nothing.
void write_shape(std::ostream& s, const TensorInfo& t) {
  s << t.name << " (";
  for (int64_t i = 0; i < t.dim; ++i) s << (i ? ", " : "") << t.size[i];
  s << (t.dim == 1 ? ",)" : ")");
}

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::Bool:
      return "torch.bool";
    default: {
      std::string name = torch::headeronly::toString(dtype);
      for (char& c : name) c = static_cast<char>(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
      if (name == "long") name = "int64";
      if (name == "int") name = "int32";
      if (name == "short") name = "int16";
      if (name == "char") name = "int8";
      if (name == "byte") name = "uint8";
      if (name == "complexfloat") name = "complex64";
      if (name == "complexdouble") name = "complex128";
      return "torch." + name;
    }
  }
}

bool is_floating(ScalarType t) {
  return t == ScalarType::Double || t == ScalarType::Float || t == ScalarType::BFloat16 ||
         t == ScalarType::Half;
}
bool is_complex(ScalarType t) {
  return t == ScalarType::ComplexFloat || t == ScalarType::ComplexDouble ||
         t == ScalarType::ComplexHalf;
}

// Slopes, sinks, tables of cosines: numbers that stand beside the query.
void check_beside(const char* function, const TensorInfo& t, const TensorInfo& query) {
  expect(t.dtype == ScalarType::Float || t.dtype == query.dtype, "type", function, t.name,
         " of torch.float32 or the query's dtype, got ", t.name, " ", DtypeName(t.dtype),
         " with query ", DtypeName(query.dtype));
}

void check_window_and_softcap(const char* function, int64_t left, int64_t right, double softcap) {
  expect(left >= -1 && right >= -1, "value", function,
         "window_size of two integers of at least -1 (-1: unlimited), got (", left, ", ", right,
         ")");
  expect(softcap >= 0 && std::isfinite(softcap), "value", function,
         "softcap that is positive and finite, or None or 0 for none, got ", softcap);
}

void check_dtypes(const CallInfo& c) {
  for (const TensorInfo* t : {&c.query, &c.key, &c.value}) check_floating(c.function(), *t);
  expect(c.key.dtype == c.query.dtype && c.value.dtype == c.query.dtype, "type", c.function(),
         "query, key and value of one dtype, got query ", DtypeName(c.query.dtype), ", key ",
         DtypeName(c.key.dtype), ", value ", DtypeName(c.value.dtype));
  if (c.attn_mask) {
    const ScalarType mask = c.attn_mask->dtype;
    expect(mask == ScalarType::Bool || mask == ScalarType::Float || mask == c.query.dtype, "type",
           c.function(),
           "attn_mask of torch.bool, torch.float32 or the query's dtype, got attn_mask ",
           DtypeName(mask), " with query ", DtypeName(c.query.dtype));
  }
  for (const auto* t : {&c.alibi_slopes, &c.sinks}) {
    if (*t) check_beside(c.function(), **t, c.query);
  }
  for (const auto* t : {&c.seqused_k, &c.cu_seq_q, &c.cu_seq_k}) {
    if (*t) check_integers(c.function(), **t);
  }
}

void check_ranks(const CallInfo& c) {
  for (const TensorInfo* t : {&c.query, &c.key, &c.value}) {
    if (c.packed()) {
      expect(t->dim == 3, "value", c.function(), t->name,
             " of shape (total length, heads, width), got ", *t);
    }
    expect(t->dim >= 2, "value", c.function(),
           "query, key and value of at least 2 dimensions, got ", *t);
    expect(t->dim <= kMaxDims, "unsupported", c.function(), "query, key and value of at most ",
           kMaxDims, " dimensions, got ", *t, "; flatten some of the leading dimensions");
  }
  if (c.attn_mask) {
    expect(c.attn_mask->dim <= kMaxDims, "value", c.function(), "attn_mask of at most ", kMaxDims,
           " dimensions, got ", *c.attn_mask);
  }
}

// Where the heads and the length are, from the end.
int64_t heads_of(const CallInfo& c, const TensorInfo& t) { return t.from_end(c.packed() ? 2 : 3); }
int64_t length_of(const CallInfo& c, const TensorInfo& t) { return t.from_end(c.packed() ? 3 : 2); }

void check_heads(const CallInfo& c) {
  if (!c.enable_gqa) return;
  for (const TensorInfo* t : {&c.query, &c.key, &c.value}) {
    expect(t->dim >= 3, "value", c.function(),
           "a head dimension (at least 3 dimensions) with enable_gqa=True, got ", *t);
  }
  const int64_t query = heads_of(c, c.query);
  for (const TensorInfo* t : {&c.key, &c.value}) {
    const int64_t own = heads_of(c, *t);
    expect(query == 0 || (own > 0 && query % own == 0), "value", c.function(),
           "a number of query heads that is a ", "multiple of the ", t->name,
           " heads with enable_gqa=True, got ", query, " query heads and ", own, " ", t->name,
           " heads");
  }
}

// Size of the output's dimension i from the end, a batch or head dimension; -1 if the inputs do not
// broadcast.
int64_t broadcast_size(const CallInfo& c, int64_t i) {
  if (i == 3 && c.enable_gqa) return c.query.from_end(3);
  int64_t size = 1;
  for (const TensorInfo* t : {&c.query, &c.key, &c.value}) {
    const int64_t own = t->from_end(i);
    if (own == 1 || own == size) continue;
    if (size != 1) return -1;
    size = own;
  }
  return size;
}

void check_mask(const CallInfo& c) {
  if (!c.attn_mask) return;
  bool fits = true;
  for (int64_t i = 1; i <= kMaxDims; ++i) {
    const int64_t size = i == 1   ? c.key.from_end(2)
                         : i == 2 ? c.query.from_end(2)
                                  : broadcast_size(c, i);
    const int64_t own = c.attn_mask->from_end(i);
    fits = fits && (own == 1 || own == size);
  }
  expect(fits, "value", c.function(),
         "attn_mask that broadcasts to (*batch, heads, query length, key length), got ",
         *c.attn_mask, " with ", c.query, " and ", c.key);
}

void check_shapes(const CallInfo& c) {
  expect(c.query.from_end(1) == c.key.from_end(1), "value", c.function(),
         "query and key of the same width (last dimension), got ", c.query, " and ", c.key);
  expect(length_of(c, c.key) == length_of(c, c.value), "value", c.function(),
         "key and value of the same length (", c.packed() ? "first" : "second to last",
         " dimension), got ", c.key, " and ", c.value);
  if (c.packed()) {
    const int64_t query = heads_of(c, c.query);
    expect(c.enable_gqa || (heads_of(c, c.key) == query && heads_of(c, c.value) == query), "value",
           c.function(), "query, key and value of as many heads (or pass enable_gqa=True), got ",
           c.query, ", ", c.key, ", ", c.value);
    return;
  }
  for (int64_t i = 3; i <= kMaxDims; ++i) {
    expect(broadcast_size(c, i) >= 0, "value", c.function(),
           i == 3 ? "query, key and value heads that broadcast (equal, or 1; or pass "
                    "enable_gqa=True), got "
                  : "leading dimensions of query, key and value that broadcast, got ",
           c.query, ", ", c.key, ", ", c.value);
  }
  check_mask(c);
}

// A tensor over the batch dimensions, followed by `trailing` numbers for each (-1: none).
void check_per_batch(const CallInfo& c, const TensorInfo& t, int64_t trailing,
                     const char* expected) {
  const int64_t heads = trailing >= 0 ? 1 : 0;
  bool fits = t.dim >= heads && (heads == 0 || t.from_end(1) == trailing);
  for (int64_t i = 1 + heads; fits && i <= t.dim; ++i) {
    const int64_t size = i + 3 - heads <= kMaxDims ? broadcast_size(c, i + 3 - heads) : 1;
    fits = t.from_end(i) == size || t.from_end(i) == 1;
  }
  expect(fits, "value", c.function(), t.name, " of shape ", expected, ", got ", t, " with ",
         c.query);
}

void check_options(const CallInfo& c) {
  check_window_and_softcap(c.function(), c.window_left, c.window_right, c.softcap);
  expect(c.dropout_p >= 0 && c.dropout_p <= 1, "value", c.function(), "dropout_p from 0 to 1, got ",
         c.dropout_p);
  const int64_t heads = c.packed() || c.enable_gqa ? heads_of(c, c.query) : broadcast_size(c, 3);
  if (c.packed()) {
    for (const auto* t : {&c.alibi_slopes, &c.sinks}) {
      if (!*t) continue;
      expect((*t)->from_end(1) == heads && (*t)->dim == 1, "value", c.function(), (*t)->name,
             " of shape (query heads,), got ", **t, " with ", heads, " query heads");
    }
    for (const auto* t : {&c.cu_seq_q, &c.cu_seq_k}) {
      expect((*t)->dim == 1 && (*t)->size[0] >= 1, "value", c.function(), (*t)->name,
             " of shape (sequences + 1,), got ", **t);
    }
    expect(c.cu_seq_q->size[0] == c.cu_seq_k->size[0], "value", c.function(),
           "cu_seq_q and cu_seq_k of as many sequences, got ", *c.cu_seq_q, " and ", *c.cu_seq_k);
    if (c.seqused_k) {
      expect(c.seqused_k->dim == 1 && c.seqused_k->size[0] == c.cu_seq_q->size[0] - 1, "value",
             c.function(), "seqused_k of shape (sequences,), got ", *c.seqused_k, " with ",
             *c.cu_seq_q);
    }
    return;
  }
  for (const auto* t : {&c.alibi_slopes, &c.sinks}) {
    if (*t) check_per_batch(c, **t, heads, "(query heads,) or (*batch, query heads)");
  }
  if (c.seqused_k) check_per_batch(c, *c.seqused_k, -1, "(*batch,)");
}

// ---- attention_with_kv_cache ----

constexpr const char* kCached = CacheCallInfo::kFunction;

bool has_shape(const TensorInfo& t, std::initializer_list<int64_t> shape) {
  return t.dim == static_cast<int64_t>(shape.size()) &&
         std::equal(shape.begin(), shape.end(), t.size);
}

void expect_both(const std::optional<TensorInfo>& a, const std::optional<TensorInfo>& b,
                 const char* names) {
  if (a.has_value() != b.has_value()) {
    expect(false, "value", kCached, names, " together or neither, got ", (a ? a : b)->name,
           " alone");
  }
}

void check_cache_presence(const CacheCallInfo& c) {
  expect_both(c.key, c.value, "key and value");
  expect_both(c.rotary_cos, c.rotary_sin, "rotary_cos and rotary_sin");
  expect(!c.block_table || !c.cache_batch_idx, "value", kCached,
         "block_table or cache_batch_idx, got both: with pages the table says where a sequence is");
}

void check_cache_dtypes(const CacheCallInfo& c) {
  check_floating(kCached, c.query);
  const auto same = [&](const TensorInfo& t) {
    expect(t.dtype == c.query.dtype, "type", kCached, t.name, " of the query's dtype, ",
           DtypeName(c.query.dtype), ", got ", DtypeName(t.dtype));
  };
  same(c.key_cache);
  same(c.value_cache);
  if (c.key) same(*c.key);
  if (c.value) same(*c.value);
  check_integers(kCached, c.cache_seqlens);
  for (const auto* t : {&c.block_table, &c.cache_batch_idx}) {
    if (*t) check_integers(kCached, **t);
  }
  for (const auto* t : {&c.rotary_cos, &c.rotary_sin, &c.alibi_slopes, &c.sinks}) {
    if (*t) check_beside(kCached, **t, c.query);
  }
}

void check_cache_shapes(const CacheCallInfo& c) {
  const TensorInfo &q = c.query, &keys = c.key_cache, &values = c.value_cache;
  expect(q.dim == 4, "value", kCached, "query of shape (batch, heads, new positions, width), got ",
         q);
  for (const TensorInfo* t : {&keys, &values}) {
    expect(t->dim == 4, "value", kCached, t->name, " of shape (", c.block_table ? "pages" : "batch",
           ", heads, ", c.block_table ? "page size" : "capacity", ", width), got ", *t);
  }
  for (int64_t i = 0; i < 3; ++i) {
    expect(keys.size[i] == values.size[i], "value", kCached,
           "key_cache and value_cache of one shape but for the width, got ", keys, " and ", values);
  }
  expect(q.size[1] == 0 || (keys.size[1] > 0 && q.size[1] % keys.size[1] == 0), "value", kCached,
         "a number of query heads that is a multiple of the cache's heads, got ", q, " and ", keys);
  expect(q.size[3] == keys.size[3], "value", kCached, "query and key_cache of the same width, got ",
         q, " and ", keys);
  expect(has_shape(c.cache_seqlens, {c.batch()}), "value", kCached, "cache_seqlens of shape (",
         c.batch(), ",), a length for each sequence, got ", c.cache_seqlens);
  if (c.block_table) {
    expect(c.block_table->dim == 2 && c.block_table->size[0] == c.batch(), "value", kCached,
           "block_table of shape (batch, pages of a sequence), got ", *c.block_table, " with ", q);
    expect(keys.size[2] > 0, "value", kCached, "pages of at least one position, got ", keys);
  } else if (c.cache_batch_idx) {
    expect(has_shape(*c.cache_batch_idx, {c.batch()}), "value", kCached,
           "cache_batch_idx of shape (", c.batch(),
           ",), a row of the cache for each sequence, got ", *c.cache_batch_idx);
  } else {
    expect(keys.size[0] == c.batch(), "value", kCached,
           "caches of the query's batch size (or pass cache_batch_idx), got ", q, " and ", keys);
  }
}

void check_new_rows(const CacheCallInfo& c) {
  if (!c.key) return;
  const int64_t heads = c.key_cache.size[1], length = c.query.size[2];
  const auto check = [&](const TensorInfo& t, const TensorInfo& cache) {
    expect(has_shape(t, {c.batch(), heads, length, cache.size[3]}), "value", kCached, t.name,
           " of the query's batch and length and the cache's heads and width, (", c.batch(), ", ",
           heads, ", ", length, ", ", cache.size[3], "), got ", t);
  };
  check(*c.key, c.key_cache);
  check(*c.value, c.value_cache);
}

void check_cache_options(const CacheCallInfo& c) {
  check_window_and_softcap(kCached, c.window_left, c.window_right, c.softcap);
  const int64_t heads = c.query.size[1];
  for (const auto* t : {&c.alibi_slopes, &c.sinks}) {
    if (!*t) continue;
    expect(
        has_shape(**t, {heads}) || has_shape(**t, {1, heads}) || has_shape(**t, {c.batch(), heads}),
        "value", kCached, (*t)->name, " of shape (query heads,) or (batch, query heads), got ", **t,
        " with ", c.query);
  }
  if (!c.rotary_cos) return;
  const TensorInfo &cos = *c.rotary_cos, &sin = *c.rotary_sin;
  expect(cos.dim == 2 && has_shape(sin, {cos.size[0], cos.size[1]}), "value", kCached,
         "rotary_cos and rotary_sin of one shape (positions, half the rotary width), got ", cos,
         " and ", sin);
  expect(2 * cos.size[1] <= c.query.size[3], "value", kCached,
         "a rotary width of at most the head's, ", c.query.size[3], ", got ", cos,
         ", which is half of ", 2 * cos.size[1]);
}

}  // namespace

std::ostream& operator<<(std::ostream& s, const TensorInfo& t) {
  write_shape(s, t);
  return s;
}
std::ostream& operator<<(std::ostream& s, const DtypeName& name) {
  return s << dtype_name(name.dtype);
}

void raise(const char* kind, const std::string& text) {
  throw std::runtime_error("[" + std::string(kind) + "] " + text);
}

void check_floating(const char* function, const TensorInfo& t) {
  expect(!is_complex(t.dtype), "unsupported", function, "real tensors, got ", t.name, " of ",
         DtypeName(t.dtype),
         "; complex tensors are not supported: pass real and imaginary parts apart");
  expect(is_floating(t.dtype), "type", function, t.name,
         " of torch.float64, torch.float32, torch.bfloat16 or torch.float16, got ",
         DtypeName(t.dtype));
}

void check_integers(const char* function, const TensorInfo& t) {
  expect(t.dtype == ScalarType::Int || t.dtype == ScalarType::Long, "type", function, t.name,
         " of torch.int32 or torch.int64, got ", DtypeName(t.dtype));
}

void check_call(const CallInfo& call) {
  check_ranks(call);
  check_dtypes(call);
  check_heads(call);
  check_shapes(call);
  check_options(call);
}

void check_cache_call(const CacheCallInfo& call) {
  check_cache_presence(call);
  check_cache_dtypes(call);
  check_cache_shapes(call);
  check_new_rows(call);
  check_cache_options(call);
}

void check_like(const TensorInfo& tensor, const TensorInfo& of, const char* function) {
  bool same = tensor.dim == of.dim;
  for (int64_t i = 0; same && i < of.dim; ++i) same = tensor.size[i] == of.size[i];
  expect(same, "value", function, tensor.name, " of the shape of ", of, ", got ", tensor);
  expect(tensor.dtype == of.dtype, "type", function, tensor.name, " of the dtype of ", of.name,
         " (", DtypeName(of.dtype), "), got ", DtypeName(tensor.dtype));
}

}  // namespace attention_ext
