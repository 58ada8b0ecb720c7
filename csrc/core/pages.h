// Where the rows of a paged cache lie.
#pragma once

#include "params.h"

namespace attention_ext {

struct PagedRows {
  int64_t offset;  // of a row's first element, in head 0
  int64_t count;   // how many rows follow each other, row_stride apart, from that one on
};

// Row `row` of batch element `batch` in the tensor of keys or values.
static inline PagedRows paged_rows(const Pages& pages, const TensorView& view, int64_t batch, int64_t row) {
  const int64_t page = row / pages.size, place = row - page * pages.size;
  return {pages.table[batch * pages.per_batch + page] * view.batch_stride[0] + place * view.row_stride,
          pages.size - place};
}

}  // namespace attention_ext
