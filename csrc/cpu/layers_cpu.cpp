// RMSNorm and SwiGLU on the CPU: check, allocate, run blocks of rows.

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "../pack_layers.h"
#include "gradients.h"

namespace attention_ext {
namespace {

Tensor new_like(const Tensor& t) {
  const Geometry g = geometry(t);
  return empty_laid_out_like(t, g.dim, g.size, t.scalar_type());
}

// body(first_row, rows, worker) for blocks of rows that are worth a task; `work`: multiply-adds of
// an element.
template <class F>
void run_row_blocks(int64_t rows, int64_t width, double work, const F& body) {
  if (rows == 0 || width == 0) return;
  const int64_t each = std::max<int64_t>(16384 / width, 1), tasks = (rows + each - 1) / each;
  run_tasks(tasks, num_workers(tasks, work * rows * width),
            [&](int64_t task, int64_t) { body(task * each, std::min(each, rows - task * each)); });
}

RmsNormParams pack_rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  const TensorInfo in = info("x", x);
  check_rms_norm(in, info("weight", weight), epsilon);
  RmsNormParams p;
  p.input = rows_view(x);
  p.weight = table_view(weight);
  p.rows = num_rows(in);
  p.width = in.from_end(1);
  p.epsilon = epsilon;
  return p;
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  RmsNormParams p = pack_rms_norm(x, weight, eps);
  Tensor output = new_like(x);
  p.output = rows_view(output);
  const KernelTable& kernel = table_for(x.scalar_type());
  run_row_blocks(p.rows, p.width, 2.0,
                 [&](int64_t first, int64_t rows) { kernel.rms_norm(p, first, rows); });
  return output;
}

std::tuple<Tensor, Tensor> rms_norm_backward(Tensor grad_output, Tensor x, Tensor weight,
                                             double eps) {
  RmsNormParams p = pack_rms_norm(x, weight, eps);
  check_like(info("grad_output", grad_output), info("x", x), "rms_norm");
  Tensor grad_x = new_like(x), grad_weight = new_like(weight);
  p.grad_output = rows_view(grad_output);
  p.grad_input = rows_view(grad_x);
  p.grad_weight = table_view(grad_weight);
  const KernelTable& kernel = table_for(x.scalar_type());
  // At most 32 blocks of at least 32 rows, from the sizes alone: the sums are the same for every
  // thread count.
  const int64_t each = std::max<int64_t>((p.rows + 31) / 32, 32),
                blocks = (p.rows + each - 1) / each;
  const int64_t size = accumulation_type(x.scalar_type()) == ScalarType::Double ? 8 : 4;
  const Scratch sums(std::max<int64_t>(blocks * p.width * size, 1));
  run_tasks(blocks, num_workers(blocks, 6.0 * p.rows * p.width), [&](int64_t block, int64_t) {
    const int64_t first = block * each;
    kernel.rms_norm_backward(p, first, std::min(each, p.rows - first),
                             sums.at(block * p.width * size));
  });
  kernel.add_weight_sums(p, sums.at(0), blocks);
  return {std::move(grad_x), std::move(grad_weight)};
}

SwigluParams pack_swiglu(const Tensor& x) {
  const TensorInfo in = info("x", x);
  check_swiglu(in);
  SwigluParams p;
  p.input = rows_view(x);
  p.rows = num_rows(in);
  p.width = in.from_end(1) / 2;
  return p;
}

// The output's sizes.
int64_t halved(const Tensor& x, int64_t* sizes) {
  const Geometry g = geometry(x);
  std::copy(g.size, g.size + g.dim, sizes);
  sizes[g.dim - 1] /= 2;
  return g.dim;
}

constexpr double kSigmoidWork = 12.0;  // multiply-adds that an element takes, about

Tensor swiglu(Tensor x) {
  SwigluParams p = pack_swiglu(x);
  int64_t sizes[kMaxDims];
  const int64_t dim = halved(x, sizes);
  Tensor output = empty_laid_out_like(x, dim, sizes, x.scalar_type());
  p.output = rows_view(output);
  const KernelTable& kernel = table_for(x.scalar_type());
  run_row_blocks(p.rows, p.width, kSigmoidWork,
                 [&](int64_t first, int64_t rows) { kernel.swiglu(p, first, rows); });
  return output;
}

Tensor swiglu_backward(Tensor grad_output, Tensor x) {
  SwigluParams p = pack_swiglu(x);
  int64_t sizes[kMaxDims];
  const int64_t dim = halved(x, sizes);
  check_like(info("grad_output", grad_output), {"the output", x.scalar_type(), dim, sizes},
             "swiglu");
  Tensor grad_x = new_like(x);
  p.grad_output = rows_view(grad_output);
  p.grad_input = rows_view(grad_x);
  const KernelTable& kernel = table_for(x.scalar_type());
  run_row_blocks(p.rows, p.width, kSigmoidWork,
                 [&](int64_t first, int64_t rows) { kernel.swiglu_backward(p, first, rows); });
  return grad_x;
}

}  // namespace
}  // namespace attention_ext

STABLE_TORCH_LIBRARY_IMPL(attention_ext, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&attention_ext::rms_norm));
  m.impl("rms_norm_backward", TORCH_BOX(&attention_ext::rms_norm_backward));
  m.impl("swiglu", TORCH_BOX(&attention_ext::swiglu));
  m.impl("swiglu_backward", TORCH_BOX(&attention_ext::swiglu_backward));
}
