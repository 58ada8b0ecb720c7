#include "pack_layers.h"

#include <algorithm>

namespace attention_ext {
namespace {

constexpr const char* kRotary = RotaryCallInfo::kFunction;

// Positions as (sequence, L), checked against the tables: their leading dimensions are the first
// ones of x, or 1.
std::vector<int64_t> read_positions(const Tensor& t, const TensorInfo& x, int64_t length,
                                    int64_t table_rows) {
  const Geometry g = geometry(t);
  const int64_t leading = g.dim - 1;
  int64_t sequences = 1;
  for (int64_t d = 0; d < leading; ++d) sequences *= x.size[d];
  std::vector<int64_t> positions(sequences * length);
  for (int64_t s = 0; s < sequences; ++s) {
    int64_t rest = s, offset = 0;
    for (int64_t d = leading - 1; d >= 0; --d) {
      offset += g.size[d] == 1 ? 0 : rest % x.size[d] * g.stride[d];
      rest /= x.size[d];
    }
    for (int64_t i = 0; i < length; ++i) {
      const int64_t p =
          read_integer(t.const_data_ptr(), t.scalar_type(), offset + i * g.stride[leading]);
      expect(p >= 0 && p < table_rows, "value", kRotary, "positions from 0 to ", table_rows - 1,
             ", as the tables reach, got ", p);
      positions[s * length + i] = p;
    }
  }
  return positions;
}

}  // namespace

int64_t num_rows(const TensorInfo& t) {
  int64_t n = 1;
  for (int64_t d = 0; d < t.dim - 1; ++d) n *= t.size[d];
  return n;
}

RowsView rows_view(const Tensor& t, int64_t without) {
  const Geometry g = geometry(t);
  RowsView view;
  view.data = t.const_data_ptr();
  view.dtype = storage_type(t.scalar_type());
  view.column_stride = g.stride[g.dim - 1];
  for (int64_t d = 0; d < g.dim - 1; ++d) {
    if (d == without || g.size[d] == 1) continue;
    const int64_t last = view.dims - 1;
    if (last >= 0 && view.stride[last] == g.size[d] * g.stride[d]) {
      view.size[last] *= g.size[d];
      view.stride[last] = g.stride[d];
      continue;
    }
    view.size[view.dims] = g.size[d];
    view.stride[view.dims++] = g.stride[d];
  }
  return view;
}

TensorView table_view(const Tensor& t) {
  const Geometry g = geometry(t);
  TensorView view;
  view.data = t.const_data_ptr();
  view.dtype = storage_type(t.scalar_type());
  view.row_stride = g.dim > 1 ? g.stride[g.dim - 2] : 0;
  view.column_stride = g.stride[g.dim - 1];
  return view;
}

RotaryCall pack_rotary_call(const Tensor& x, const Tensor& cos, const Tensor& sin,
                            const std::optional<Tensor>& positions, bool interleaved, bool inverse,
                            int64_t position_dim) {
  const RotaryCallInfo checked{info("x", x), info("cos", cos), info("sin", sin),
                               info("positions", positions), position_dim};
  check_rotary_call(checked);
  RotaryCall c;
  const TensorInfo& in = checked.x;
  c.position_dim = in.dim + position_dim;
  c.length = in.size[c.position_dim];
  c.places = rows_view(x, c.position_dim);
  c.num_places = 1;
  for (int64_t d = 0; d < in.dim - 1; ++d) c.num_places *= d == c.position_dim ? 1 : in.size[d];
  c.params.input.data = x.const_data_ptr();
  c.params.input.dtype = c.places.dtype;
  c.params.input.row_stride = geometry(x).stride[c.position_dim];
  c.params.input.column_stride = c.places.column_stride;
  c.params.cos = table_view(cos);
  c.params.sin = table_view(sin);
  c.params.head_dim = in.size[in.dim - 1];
  c.params.rotary_dim = 2 * checked.cos.size[1];
  c.params.interleaved = interleaved;
  c.params.inverse = inverse;
  if (positions) {
    c.positions = read_positions(*positions, in, c.length, checked.cos.size[0]);
    for (int64_t d = checked.positions->dim - 1; d < in.dim - 1; ++d) {
      c.places_per_sequence *= d == c.position_dim ? 1 : in.size[d];
    }
  }
  return c;
}

}  // namespace attention_ext
