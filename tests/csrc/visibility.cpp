// core/visibility.h against its definition: a query at position p sees the keys j with
// p - left <= j <= p + right.
#include "core/visibility.h"

#include "check.h"

namespace {

using attention_ext::KeyRange;
using attention_ext::Visibility;
using attention_ext::visible_keys;

constexpr int64_t kUnlimited = Visibility::kUnlimited;

bool is_visible(const Visibility& v, int64_t position, int64_t j) {
  return (v.left == kUnlimited || j >= position - v.left) &&
         (v.right == kUnlimited || j <= position + v.right);
}

TEST(the_interval_holds_exactly_the_visible_keys) {
  for (int64_t keys = 0; keys <= 5; ++keys)
    for (int64_t position = -4; position <= 8; ++position)
      for (int64_t left = kUnlimited; left <= 3; ++left)
        for (int64_t right = kUnlimited; right <= 3; ++right) {
          Visibility v;
          v.left = left, v.right = right;
          const KeyRange range = visible_keys(v, position, keys);
          CHECK(0 <= range.begin && range.begin <= range.end && range.end <= keys);
          for (int64_t j = 0; j < keys; ++j)
            CHECK(is_visible(v, position, j) == (range.begin <= j && j < range.end));
        }
}

TEST(both_ends_of_the_interval_grow_with_the_position) {
  Visibility v;
  v.left = 2, v.right = 1;
  for (int64_t position = -5; position < 15; ++position) {
    const KeyRange here = visible_keys(v, position, 10), next = visible_keys(v, position + 1, 10);
    CHECK(here.begin <= next.begin && here.end <= next.end);
  }
}

}  // namespace
