// Tensors -> params of the layers beside attention: rows of tensors, and the positions that rows
// have.
#pragma once

#include <vector>

#include "core/layers.h"
#include "pack_params.h"

namespace attention_ext {

// The rows of t: its dimensions but the last and, where one is given, but `without`.
RowsView rows_view(const Tensor& t, int64_t without = -1);
int64_t num_rows(const TensorInfo& t);

// A table or weight: its last two dimensions as rows and columns.
TensorView table_view(const Tensor& t);

// A checked call of apply_rotary: L neighbouring rows for each place in the other dimensions. All
// but the output.
struct RotaryCall {
  RotaryParams params;
  RowsView places;  // of the input
  int64_t num_places = 0;
  int64_t length = 0;
  int64_t position_dim = 0;
  std::vector<int64_t> positions;   // (sequence, L), or empty: 0 to L - 1
  int64_t places_per_sequence = 1;  // places that share positions follow each other
};

RotaryCall pack_rotary_call(const Tensor& x, const Tensor& cos, const Tensor& sin,
                            const std::optional<Tensor>& positions, bool interleaved, bool inverse,
                            int64_t position_dim);

}  // namespace attention_ext
