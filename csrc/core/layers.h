// What the kernels beside attention are told: rotary embedding, RMSNorm and SwiGLU. Plain structs,
// no torch.
#pragma once

#include "params.h"

namespace attention_ext {

constexpr int kMaxRowDims = 8;

// All rows of a tensor of any strides: every dimension but the last, neighbours in memory taken
// together. Row numbers count in the order of the dimensions.
struct RowsView {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t dims = 0;
  int64_t size[kMaxRowDims] = {};  // the outermost first
  int64_t stride[kMaxRowDims] = {};
  int64_t column_stride = 0;
};

// Where a row begins; static, so that no two files share the code.
static inline int64_t row_offset(const RowsView& view, int64_t row) {
  int64_t sum = 0;
  for (int64_t d = view.dims - 1; d > 0; --d) {
    sum += row % view.size[d] * view.stride[d];
    row /= view.size[d];
  }
  return view.dims > 0 ? sum + row * view.stride[0] : 0;
}

// Pair i of a row at position p turns by the angle whose cos and sin stand in row p of the tables.
// Of the input's and output's views only the strides of rows and columns are read.
struct RotaryParams {
  TensorView input;   // (row, head_dim)
  TensorView output;  // (row, head_dim); written
  TensorView cos;     // (position, rotary_dim / 2)
  TensorView sin;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;    // the columns beyond are copied
  bool interleaved = false;  // pairs are (2i, 2i + 1), else (i, i + rotary_dim / 2)
  bool inverse = false;      // turn back
};

// Neighbouring rows. Positions count up from `first_position`, or stand in `positions`, one for
// each row. A row before position 0, which sees nothing, turns as at 0.
struct RotaryRows {
  int64_t input;  // offset of the first row
  int64_t output;
  int64_t count;
  int64_t first_position;
  const int64_t* positions;
};

struct RmsNormParams {
  RowsView input;          // (row, width)
  TensorView weight;       // (width): only data, dtype and column_stride are read
  RowsView output;         // (row, width); written by the forward
  RowsView grad_output;    // of the backward alone, as the following
  RowsView grad_input;     // written
  TensorView grad_weight;  // written by add_weight_sums
  int64_t rows = 0;
  int64_t width = 0;
  double epsilon = 0.0;
};

struct SwigluParams {
  RowsView input;        // (row, 2 * width): gate, then up
  RowsView output;       // (row, width); written by the forward
  RowsView grad_output;  // of the backward alone, as the following
  RowsView grad_input;   // (row, 2 * width); written
  int64_t rows = 0;
  int64_t width = 0;
};

}  // namespace attention_ext
