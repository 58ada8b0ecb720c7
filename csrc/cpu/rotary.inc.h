// Rotary position embedding: the first R columns of a row turn by its position, the others are copied.
//
//   (a, b) -> (a cos - b sin, b cos + a sin)      pairs of halves (c, c + R/2) or of neighbours (2c, 2c + 1)
//
// in the accumulation type, rounded once. Products and sums are rounded apart, as torch's operations would.

// a[i] = (a, b)[2i], b[i] = (a, b)[2i + 1], and back.
template <class T, size_t... kLane>
ATTENTION_EXT_INLINE void split_neighbours(Vec<T>& a, Vec<T>& b, std::index_sequence<kLane...>) {
  const Vec<T> even = __builtin_shufflevector(a, b, (2 * static_cast<int>(kLane))...);
  const Vec<T> odd = __builtin_shufflevector(a, b, (2 * static_cast<int>(kLane) + 1)...);
  a = even;
  b = odd;
}
template <class T, size_t... kLane>
ATTENTION_EXT_INLINE void join_neighbours(Vec<T>& a, Vec<T>& b, std::index_sequence<kLane...>) {
  constexpr int w = kWidth<T>;
  const Vec<T> low = __builtin_shufflevector(a, b, (static_cast<int>(kLane) / 2 + (kLane % 2 ? w : 0))...);
  const Vec<T> high = __builtin_shufflevector(a, b, (static_cast<int>(kLane) / 2 + (kLane % 2 ? w : 0) + w / 2)...);
  a = low;
  b = high;
}

// The rows of one position.
template <class T>
class Rotary {
 public:
  Rotary(const RotaryTable& table, void* memory) : table_(table), arena_(memory) {
    cos_ = arena_.take<T>(round_up_to_vector<T>(table.half));
    sin_ = arena_.take<T>(round_up_to_vector<T>(table.half));
  }
  int64_t scratch_bytes() const { return arena_.used(); }

  void read_position(int64_t position) {
    read(table_.cos, position, cos_);
    read(table_.sin, position, sin_);
  }

  void rotate(const RotaryRows& rows) const {
    dispatch_storage<T>(rows.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      if constexpr (kIsOutput<S>) {
        for (int64_t i = 0; i < rows.count; ++i) {
          const S* from = static_cast<const S*>(rows.from) + i * rows.from_stride;
          S* into = static_cast<S*>(rows.into) + i * rows.into_stride;
          for (int64_t c = 0; c < table_.half; c += kWidth<T>) turn(from, into, rows, c);
          for (int64_t c = 2 * table_.half; c < rows.columns; ++c) {
            into[c * rows.into_column_stride] = from[c * rows.from_column_stride];
          }
        }
      }
    });
  }

 private:
  void read(const TensorView& view, int64_t position, T* out) const {
    const char* row = static_cast<const char*>(view.data) + position * view.row_stride * size_of(view.dtype);
    copy_rows<T, false>({&row, 1, view.column_stride, table_.half, view.dtype}, out, 0);
  }

  // The pairs [c, c + W).
  template <class S>
  ATTENTION_EXT_INLINE void turn(const S* from, S* into, const RotaryRows& rows, int64_t c) const {
    constexpr int w = kWidth<T>;
    constexpr auto kLanesOf = std::make_index_sequence<w>{};
    const int64_t count = table_.half - c < w ? table_.half - c : w;
    // Neighbours: 2 * count columns, in two vectors.
    const int64_t first = table_.interleaved ? 2 * c : c, second = table_.interleaved ? first + w : table_.half + c;
    const int64_t in_first = table_.interleaved && 2 * count < w ? 2 * count : table_.interleaved ? w : count;
    const int64_t in_second = table_.interleaved ? 2 * count - in_first : count;
    Vec<T> a = load_some<T>(from + first * rows.from_column_stride, rows.from_column_stride, in_first);
    Vec<T> b = load_some<T>(from + second * rows.from_column_stride, rows.from_column_stride, in_second);
    if (table_.interleaved) split_neighbours<T>(a, b, kLanesOf);
    const Vec<T> cos = load(cos_ + c), sin = load(sin_ + c);
    Vec<T> x = a * cos - b * sin, y = b * cos + a * sin;
    if (table_.interleaved) join_neighbours<T>(x, y, kLanesOf);
    store_some<T>(into + first * rows.into_column_stride, rows.into_column_stride, in_first, x);
    store_some<T>(into + second * rows.into_column_stride, rows.into_column_stride, in_second, y);
  }

  const RotaryTable& table_;
  Arena arena_;
  T* cos_;  // [half, padded]: of the position
  T* sin_;
};
