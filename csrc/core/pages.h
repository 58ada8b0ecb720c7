// Where the rows of a paged cache lie.
#pragma once

#include "params.h"

namespace attention_ext {

// The rows of one batch element from one on, page by page.
class PagedRows {
 public:
  PagedRows(const Pages& pages, int64_t batch, int64_t row)
      : page_(pages.table + batch * pages.per_batch + row / pages.size),
        place_(row % pages.size),
        size_(pages.size) {}

  // Of the row's first element, in head 0 of the tensor of keys or values.
  int64_t offset(const TensorView& view) const {
    return *page_ * view.batch_stride[0] + place_ * view.row_stride;
  }
  // Rows that follow each other, row_stride apart, from this one on.
  int64_t count() const { return size_ - place_; }
  void next_page() {
    ++page_;
    place_ = 0;
  }

 private:
  const int64_t* page_;
  int64_t place_, size_;
};

}  // namespace attention_ext
