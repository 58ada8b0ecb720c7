// Rotary embedding: pair (a, b) of a row -> (a cos - b sin, b cos + a sin), cos and sin from the
// tables' row of its position. Serial over neighbouring rows, in T, products and sums rounded apart
// as torch's operations would, and the result once. Transposed it is the inverse rotation.

// Lanes 0, 2, 4, ... (kOdd: 1, 3, 5, ...) of two neighbouring vectors.
template <class T, int kOdd, size_t... kLane>
ATTENTION_EXT_INLINE Vec<T> every_other(Vec<T> a, Vec<T> b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, (2 * static_cast<int>(kLane) + kOdd)...);
}
// The way back: x and y taken in turns, from lane kFirst on.
template <class T, int kFirst, size_t... kLane>
ATTENTION_EXT_INLINE Vec<T> in_turns(Vec<T> x, Vec<T> y, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(
      x, y, (kFirst + static_cast<int>(kLane) / 2 + (kLane % 2 ? kWidth<T> : 0))...);
}

template <class T>
struct Rotary {
  static void run(const RotaryParams& r, const RotaryRows& rows) {
    dispatch_output<T>(r.input.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      for (int64_t i = 0; i < rows.count; ++i) {
        const int64_t given = rows.positions ? rows.positions[i] : rows.first_position + i;
        const S* in = static_cast<const S*>(r.input.data) + rows.input + i * r.input.row_stride;
        S* out = static_cast<S*>(const_cast<void*>(r.output.data)) + rows.output +
                 i * r.output.row_stride;
        row(r, in, out, given < 0 ? 0 : given);
      }
    });
  }

 private:
  static constexpr auto kLanes = std::make_index_sequence<kWidth<T>>{};

  struct Pairs {
    Vec<T> a, b;
  };
  static ATTENTION_EXT_INLINE Pairs turn(const RotaryParams& r, Pairs x, int64_t position,
                                         int64_t pair, int64_t count) {
    const Vec<T> cos =
        load_view<T>(r.cos, position * r.cos.row_stride + pair * r.cos.column_stride, count);
    const Vec<T> given =
        load_view<T>(r.sin, position * r.sin.row_stride + pair * r.sin.column_stride, count);
    const Vec<T> sin = r.inverse ? -given : given;
    return {x.a * cos - x.b * sin, x.b * cos + x.a * sin};
  }

  template <class S>
  static ATTENTION_EXT_INLINE void row(const RotaryParams& r, const S* in, S* out,
                                       int64_t position) {
    const int64_t from = r.input.column_stride, to = r.output.column_stride,
                  half = r.rotary_dim / 2;
    if (r.interleaved) {
      neighbours(r, in, out, position);
    } else {
      const int64_t next_in = half * from, next_out = half * to;
      for (int64_t i = 0; i < half; i += kWidth<T>) {
        const int64_t count = half - i < kWidth<T> ? half - i : kWidth<T>;
        const S* first = in + i * from;
        const Pairs x =
            turn(r, {load_some<T>(first, from, count), load_some<T>(first + next_in, from, count)},
                 position, i, count);
        store_some<T>(out + i * to, to, count, x.a);
        store_some<T>(out + i * to + next_out, to, count, x.b);
      }
    }
    for (int64_t j = r.rotary_dim; j < r.head_dim; ++j) out[j * to] = in[j * from];
  }

  template <class S>
  static ATTENTION_EXT_INLINE void neighbours(const RotaryParams& r, const S* in, S* out,
                                              int64_t position) {
    constexpr int64_t w = kWidth<T>;
    const int64_t from = r.input.column_stride, to = r.output.column_stride,
                  half = r.rotary_dim / 2;
    for (int64_t i = 0; i < half; i += w) {
      const int64_t count = half - i < w ? half - i : w;
      const int64_t low = 2 * count < w ? 2 * count : w,
                    high = 2 * count - low;  // columns of the two vectors
      const S* first = in + 2 * i * from;
      const Vec<T> a = load_some<T>(first, from, low),
                   b = load_some<T>(first + w * from, from, high);
      const Pairs x = turn(r, {every_other<T, 0>(a, b, kLanes), every_other<T, 1>(a, b, kLanes)},
                           position, i, count);
      S* there = out + 2 * i * to;
      store_some<T>(there, to, low, in_turns<T, 0>(x.a, x.b, kLanes));
      store_some<T>(there + w * to, to, high, in_turns<T, kWidth<T> / 2>(x.a, x.b, kLanes));
    }
  }
};
