// apply_rotary on the CPU: check, allocate, rotate.

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "../pack_layers.h"
#include "gradients.h"

namespace attention_ext {
namespace {

Tensor rotary(Tensor x, Tensor cos, Tensor sin, std::optional<Tensor> positions, bool interleaved,
              bool inverse, int64_t position_dim) {
  RotaryCall c = pack_rotary_call(x, cos, sin, positions, interleaved, inverse, position_dim);
  RotaryParams& r = c.params;
  const Geometry g = geometry(x);
  Tensor output = empty_laid_out_like(x, g.dim, g.size, x.scalar_type());
  if (c.num_places == 0 || c.length == 0 || r.head_dim == 0) return output;
  const RowsView written = rows_view(output, c.position_dim);
  r.output = r.input;
  r.output.data = output.mutable_data_ptr();
  r.output.row_stride = geometry(output).stride[c.position_dim];
  r.output.column_stride = written.column_stride;

  constexpr int64_t kRows = 64;  // of a task
  const int64_t blocks = (c.length + kRows - 1) / kRows, tasks = c.num_places * blocks;
  const KernelTable& kernel = table_for(x.scalar_type());
  const double work = 2.0 * c.num_places * c.length * r.head_dim;
  run_tasks(tasks, num_workers(tasks, work), [&](int64_t task, int64_t) {
    const int64_t place = task / blocks, first = task % blocks * kRows;
    const int64_t* given =
        c.positions.empty() ? nullptr
                            : c.positions.data() + place / c.places_per_sequence * c.length + first;
    kernel.rotate(r, {row_offset(c.places, place) + first * r.input.row_stride,
                      row_offset(written, place) + first * r.output.row_stride,
                      std::min(kRows, c.length - first), first, given});
  });
  return output;
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  m.impl("rotary", TORCH_BOX(&attention_ext::rotary));
}
