#include "overlap.h"

#include <algorithm>

#include "checks.h"

namespace attention_ext {
namespace {

// Two elements meet where distance + sum of stride * step is less than an element, for steps within
// the bounds of each dimension. Dimensions from the largest stride to the smallest leave one or two
// steps each to try, unless the memory is very irregular.
class Search {
 public:
  explicit Search(int64_t element) : element_(element) {}

  // One more dimension, of steps from low to high; those of one stride count as one. Returns
  // whether it is new.
  bool add(int64_t stride, int64_t low, int64_t high) {
    for (int64_t i = 0; i < count_; ++i) {
      if (term_[i].stride != stride) continue;
      term_[i].low += low;
      term_[i].high += high;
      return false;
    }
    term_[count_++] = {stride, low, high};
    return true;
  }

  // Moving: steps of 0 everywhere do not count.
  bool run(int64_t distance, bool moving) {
    std::sort(term_, term_ + count_,
              [](const Term& a, const Term& b) { return a.stride > b.stride; });
    for (int64_t i = count_; i-- > 0;) {
      const Term& t = term_[i];
      low_[i] = low_[i + 1] + t.low * t.stride;
      high_[i] = high_[i + 1] + t.high * t.stride;
    }
    left_ = 10000;
    return meets(0, distance, !moving);
  }

 private:
  struct Term {
    int64_t stride, low, high;
  };

  static int64_t floor_divide(int64_t a, int64_t b) { return a / b - (a % b < 0); }

  bool meets(int64_t i, int64_t distance, bool moved) {
    if (i == count_) return moved && distance > -element_ && distance < element_;
    if (--left_ < 0) return true;  // too irregular to tell
    const Term& t = term_[i];
    if (t.stride == 0) return meets(i + 1, distance, moved || t.low < t.high);
    // What the smaller strides can make up for.
    const int64_t first = -floor_divide(element_ - 1 + distance + high_[i + 1], t.stride);
    const int64_t last = floor_divide(element_ - 1 - distance - low_[i + 1], t.stride);
    for (int64_t step = std::max(first, t.low); step <= std::min(last, t.high); ++step) {
      if (meets(i + 1, distance + step * t.stride, moved || step != 0)) return true;
    }
    return false;
  }

  const int64_t element_;
  Term term_[2 * kMaxDims];
  int64_t count_ = 0, left_ = 0;
  int64_t low_[2 * kMaxDims + 1] = {}, high_[2 * kMaxDims + 1] = {};  // sums of the terms from i on
};

bool is_empty(const StridedMemory& t) {
  return std::find(t.size, t.size + t.dim, 0) != t.size + t.dim;
}

// Bytes from the first to the last.
int64_t extent(const StridedMemory& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim; ++d) last += (t.size[d] - 1) * t.stride[d];
  return (last + 1) * t.element;
}

}  // namespace

bool overlap(const StridedMemory& a, const StridedMemory& b) {
  if (is_empty(a) || is_empty(b)) return false;
  const auto first = [](const StridedMemory& t) { return reinterpret_cast<intptr_t>(t.data); };
  if (first(a) + extent(a) <= first(b) || first(b) + extent(b) <= first(a)) return false;
  Search search(a.element);
  for (int64_t d = 0; d < a.dim; ++d) search.add(a.stride[d] * a.element, 0, a.size[d] - 1);
  for (int64_t d = 0; d < b.dim; ++d) search.add(b.stride[d] * b.element, 1 - b.size[d], 0);
  return search.run(first(a) - first(b), /*moving=*/false);
}

bool overlaps_itself(const StridedMemory& t) {
  if (is_empty(t)) return false;
  Search search(t.element);
  for (int64_t d = 0; d < t.dim; ++d) {
    // A step forth in one dimension and back in another of the same stride leads to the same place.
    if (t.size[d] > 1 && !search.add(t.stride[d] * t.element, 1 - t.size[d], t.size[d] - 1))
      return true;
  }
  return search.run(0, /*moving=*/true);
}

}  // namespace attention_ext
