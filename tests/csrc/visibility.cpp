// core/visibility.h against its definition: query i at position p = i + offset sees the keys j with
// p - left <= j <= p + right.
#include "core/visibility.h"

#include "check.h"

namespace {

using attention_ext::KeyRange;
using attention_ext::Visibility;
using attention_ext::visible_keys;

constexpr int64_t kUnlimited = Visibility::kUnlimited;

bool is_visible(const Visibility& v, int64_t i, int64_t j) {
  const int64_t position = i + v.offset;
  return (v.left == kUnlimited || j >= position - v.left) &&
         (v.right == kUnlimited || j <= position + v.right);
}

TEST(the_interval_holds_exactly_the_visible_keys) {
  for (int64_t seqlen_kv = 0; seqlen_kv <= 5; ++seqlen_kv)
    for (int64_t offset = -4; offset <= 4; ++offset)
      for (int64_t left = kUnlimited; left <= 3; ++left)
        for (int64_t right = kUnlimited; right <= 3; ++right)
          for (int64_t i = 0; i < 4; ++i) {
            Visibility v;
            v.offset = offset, v.left = left, v.right = right;
            const KeyRange range = visible_keys(v, i, seqlen_kv);
            CHECK(0 <= range.begin && range.begin <= range.end && range.end <= seqlen_kv);
            for (int64_t j = 0; j < seqlen_kv; ++j)
              CHECK(is_visible(v, i, j) == (range.begin <= j && j < range.end));
          }
}

TEST(both_ends_of_the_interval_grow_with_the_query) {
  Visibility v;
  v.offset = -3, v.left = 2, v.right = 1;
  for (int64_t i = 0; i < 20; ++i) {
    const KeyRange here = visible_keys(v, i, 10), next = visible_keys(v, i + 1, 10);
    CHECK(here.begin <= next.begin && here.end <= next.end);
  }
}

}  // namespace
