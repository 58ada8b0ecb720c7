#include "checks.h"

#include <sstream>
#include <stdexcept>

namespace attention_ext {
namespace {

constexpr char kFunction[] = "scaled_dot_product_attention: expected ";

std::string shape(const TensorInfo& t) {
  std::ostringstream s;
  s << t.name << " (";
  for (int64_t i = 0; i < t.dim; ++i) s << (i ? ", " : "") << t.size[i];
  s << (t.dim == 1 ? ",)" : ")");
  return s.str();
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

template <class... Parts>
void expect(bool rule, const char* kind, const Parts&... parts) {
  if (rule) return;
  std::ostringstream text;
  text << kFunction;
  (text << ... << parts);
  raise(kind, text.str());
}

bool is_floating(ScalarType t) {
  return t == ScalarType::Double || t == ScalarType::Float || t == ScalarType::BFloat16 || t == ScalarType::Half;
}
bool is_complex(ScalarType t) {
  return t == ScalarType::ComplexFloat || t == ScalarType::ComplexDouble || t == ScalarType::ComplexHalf;
}

void check_dtypes(const CallInfo& c) {
  for (const TensorInfo* t : {&c.query, &c.key, &c.value}) {
    expect(!is_complex(t->dtype), "unsupported", "real tensors, got ", t->name, " of ", dtype_name(t->dtype),
           "; attention of complex tensors is not supported: pass real and imaginary parts on their own");
    expect(is_floating(t->dtype), "type", t->name, " of float64, float32, bfloat16 or float16, got ",
           dtype_name(t->dtype));
  }
  expect(c.key.dtype == c.query.dtype && c.value.dtype == c.query.dtype, "type",
         "query, key and value of one dtype, got query ", dtype_name(c.query.dtype), ", key ",
         dtype_name(c.key.dtype), ", value ", dtype_name(c.value.dtype));
  if (c.attn_mask) {
    const ScalarType mask = c.attn_mask->dtype;
    expect(mask == ScalarType::Bool || mask == ScalarType::Float || mask == c.query.dtype, "type",
           "attn_mask of torch.bool, torch.float32 or the query's dtype, got attn_mask ", dtype_name(mask),
           " with query ", dtype_name(c.query.dtype));
  }
}

void check_ranks(const CallInfo& c) {
  for (const TensorInfo* t : {&c.query, &c.key, &c.value}) {
    expect(t->dim >= 2, "value", "query, key and value of at least 2 dimensions, got ", shape(*t));
    expect(t->dim <= kMaxDims, "unsupported", "query, key and value of at most ", kMaxDims, " dimensions, got ",
           shape(*t), "; flatten some of the leading dimensions");
  }
  if (c.attn_mask) {
    expect(c.attn_mask->dim <= kMaxDims, "value", "attn_mask of at most ", kMaxDims, " dimensions, got ",
           shape(*c.attn_mask));
  }
}

void check_heads(const CallInfo& c) {
  const int64_t query = c.query.from_end(3), key = c.key.from_end(3), value = c.value.from_end(3);
  if (!c.enable_gqa) return;
  for (const TensorInfo* t : {&c.query, &c.key, &c.value}) {
    expect(t->dim >= 3, "value", "a head dimension (at least 3 dimensions) with enable_gqa=True, got ", shape(*t));
  }
  expect(query == 0 || (key > 0 && query % key == 0), "value",
         "a number of query heads that is a multiple of the key heads with enable_gqa=True, got ", query,
         " query heads and ", key, " key heads");
  expect(query == 0 || (value > 0 && query % value == 0), "value",
         "a number of query heads that is a multiple of the value heads with enable_gqa=True, got ", query,
         " query heads and ", value, " value heads");
}

// Dimension i from the end of the output's batch and head dimensions; -1 if the inputs do not broadcast.
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

void check_shapes(const CallInfo& c) {
  expect(c.query.from_end(1) == c.key.from_end(1), "value",
         "query and key of the same width (last dimension), got ", shape(c.query), " and ", shape(c.key));
  expect(c.key.from_end(2) == c.value.from_end(2), "value",
         "key and value of the same length (second to last dimension), got ", shape(c.key), " and ",
         shape(c.value));
  for (int64_t i = 3; i <= kMaxDims; ++i) {
    const int64_t size = broadcast_size(c, i);
    expect(size >= 0, "value",
           i == 3 ? "query, key and value heads that broadcast (equal, or 1; or pass enable_gqa=True), got "
                  : "leading dimensions of query, key and value that broadcast, got ",
           shape(c.query), ", ", shape(c.key), ", ", shape(c.value));
    if (c.attn_mask) {
      const int64_t own = c.attn_mask->from_end(i);
      expect(own == 1 || own == size, "value",
             "attn_mask that broadcasts to (*batch, heads, query length, key length), got ", shape(*c.attn_mask),
             " with ", shape(c.query), " and ", shape(c.key));
    }
  }
  if (c.attn_mask) {
    const int64_t rows = c.attn_mask->from_end(2), columns = c.attn_mask->from_end(1);
    expect((rows == 1 || rows == c.query.from_end(2)) && (columns == 1 || columns == c.key.from_end(2)), "value",
           "attn_mask that broadcasts to (*batch, heads, query length, key length), got ", shape(*c.attn_mask),
           " with query length ", c.query.from_end(2), " and key length ", c.key.from_end(2));
  }
}

}  // namespace

void raise(const char* kind, const std::string& text) {
  throw std::runtime_error("[" + std::string(kind) + "] " + text);
}

void check_call(const CallInfo& call) {
  check_ranks(call);
  check_dtypes(call);
  check_heads(call);
  check_shapes(call);
}

void check_gradient(const TensorInfo& gradient, const TensorInfo& of) {
  bool same = gradient.dim == of.dim;
  for (int64_t i = 0; same && i < of.dim; ++i) same = gradient.size[i] == of.size[i];
  expect(same, "value", gradient.name, " of the shape of ", shape(of), ", got ", shape(gradient));
  expect(gradient.dtype == of.dtype, "type", gradient.name, " of the dtype of ", of.name, " (",
         dtype_name(of.dtype), "), got ", dtype_name(gradient.dtype));
}

}  // namespace attention_ext
