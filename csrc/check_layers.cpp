// The checks of the layers beside attention.

#include <cmath>

#include "checks.h"

namespace attention_ext {
namespace {

void check_table_dtype(const TensorInfo& t, const TensorInfo& x) {
  expect(t.dtype == ScalarType::Float || t.dtype == ScalarType::Double || t.dtype == x.dtype,
         "type", RotaryCallInfo::kFunction, t.name,
         " of torch.float32, torch.float64 or x's dtype, got ", t.name, " ", DtypeName(t.dtype),
         " with x ", DtypeName(x.dtype));
}

// Positions (L,) or (B, L); under vmap with more leading dimensions, each that of x or 1.
bool positions_fit(const RotaryCallInfo& c, int64_t position_dim) {
  const TensorInfo& p = *c.positions;
  const int64_t leading = p.dim - 1;
  bool fits = leading >= 0 && leading <= position_dim && p.size[leading] == c.x.size[position_dim];
  for (int64_t d = 0; fits && d < leading; ++d) fits = p.size[d] == c.x.size[d] || p.size[d] == 1;
  return fits;
}

}  // namespace

void check_rotary_call(const RotaryCallInfo& c) {
  constexpr const char* kFunction = RotaryCallInfo::kFunction;
  check_floating(kFunction, c.x);
  check_table_dtype(c.cos, c.x);
  check_table_dtype(c.sin, c.x);
  if (c.positions) check_integers(kFunction, *c.positions);
  const int64_t position_dim = c.x.dim + c.position_dim;
  expect(c.position_dim < -1 && position_dim >= 0, "value", kFunction,
         "x of shape (..., L, D), got ", c.x);
  expect(c.x.dim <= kMaxDims, "unsupported", kFunction, "x of at most ", kMaxDims,
         " dimensions, got ", c.x, "; flatten some of the leading dimensions");
  expect(c.cos.dim == 2 && c.sin.dim == 2 && c.cos.size[0] == c.sin.size[0] &&
             c.cos.size[1] == c.sin.size[1],
         "value", kFunction, "cos and sin of one shape (positions, half the rotary width), got ",
         c.cos, " and ", c.sin);
  const int64_t width = c.x.size[c.x.dim - 1];
  expect(2 * c.cos.size[1] <= width, "value", kFunction,
         "a rotary width of at most x's last dimension, ", width, ", got ", c.cos,
         ", which is half of ", 2 * c.cos.size[1]);
  if (c.positions) {
    expect(positions_fit(c, position_dim), "value", kFunction,
           "positions of shape (L,) or (B, L), B and L being the ",
           "first and the second to last dimension of x, got ", *c.positions, " with ", c.x);
  } else {
    expect(c.x.size[position_dim] <= c.cos.size[0], "value", kFunction,
           "tables that reach position ", c.x.size[position_dim] - 1, ", got ", c.cos, " with ",
           c.x);
  }
}

void check_rms_norm(const TensorInfo& x, const TensorInfo& weight, double epsilon) {
  constexpr char kFunction[] = "rms_norm";
  check_floating(kFunction, x);
  expect(weight.dtype == ScalarType::Float || weight.dtype == x.dtype, "type", kFunction,
         "weight of torch.float32 or x's dtype, got weight ", DtypeName(weight.dtype), " with x ",
         DtypeName(x.dtype));
  expect(x.dim >= 1 && weight.dim == 1 && weight.size[0] == x.from_end(1), "value", kFunction,
         "x (..., width) and weight (width,), got ", x, " and ", weight);
  expect(x.dim <= kMaxDims, "unsupported", kFunction, "x of at most ", kMaxDims,
         " dimensions, got ", x);
  expect(epsilon >= 0 && std::isfinite(epsilon), "value", kFunction,
         "eps that is finite and at least 0, got ", epsilon);
}

void check_swiglu(const TensorInfo& x) {
  constexpr char kFunction[] = "swiglu";
  check_floating(kFunction, x);
  expect(x.dim >= 1 && x.from_end(1) % 2 == 0, "value", kFunction,
         "x (..., 2 * width), the gate and what it opens for, got ", x);
  expect(x.dim <= kMaxDims, "unsupported", kFunction, "x of at most ", kMaxDims,
         " dimensions, got ", x);
}

}  // namespace attention_ext
