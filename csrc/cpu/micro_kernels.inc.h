// The two products that all of attention is made of, with the accumulators in registers.
//
//   broadcast_rows     C[i][lane] = sum_d A[i][d] * B[d][lane]     S^T = K Q^T,  dP^T = V dO^T;  dV
//   = P dO,  dK = dS Q broadcast_columns  C[i][lane] += sum_k A[k][i] * B[k][lane]    O^T += V^T
//   P^T,  dQ^T += K^T dS^T
//
// A is read one element at a time and broadcast, B and C are vectors along the lanes: queries for
// the first two and the last two, columns of the head for dV and dK. kRows x kVectors accumulators;
// 6 x 4 (AVX-512) and 6 x 2 (AVX2) fill the register file and run at 92 to 98 % of the multiply-add
// peak from the L1 cache.

template <int kN>
using Constant = std::integral_constant<int, kN>;

// Rows of accumulators beside each other that kVectors vectors wide fill the registers; 8 and 16
// divide a diagonal's segments evenly.
template <int kVectors = Tuning::kLaneVectors>
constexpr int kBlockRows = 16 * kVectors <= 6 * Tuning::kLaneVectors  ? 16
                           : 8 * kVectors <= 6 * Tuning::kLaneVectors ? 8
                                                                      : 6;

// f(first, Constant<rows>) for [begin, end) in blocks of kRows rows and a tail of 8, 4, 2, 1.
template <int kRows = kBlockRows<>, class F>
ATTENTION_EXT_INLINE void for_row_blocks(int64_t begin, int64_t end, F&& f) {
  int64_t i = begin;
  for (; i + kRows <= end; i += kRows) f(i, Constant<kRows>{});
  if constexpr (kRows > 8) {
    if (end - i >= 8) {
      f(i, Constant<8>{});
      i += 8;
    }
  }
  if (end - i >= 4) {
    f(i, Constant<4>{});
    i += 4;
  }
  if (end - i >= 2) {
    f(i, Constant<2>{});
    i += 2;
  }
  if (end - i >= 1) f(i, Constant<1>{});
}

// f(Constant<n>) for a run-time n in 1 .. kMost.
template <int kMost, class F>
ATTENTION_EXT_INLINE void with_constant(int64_t n, F&& f) {
  if constexpr (kMost <= 1) {
    (void)n;
    f(Constant<1>{});
  } else {
    if (n == kMost) {
      f(Constant<kMost>{});
    } else {
      with_constant<kMost - 1>(n, f);
    }
  }
}

// f(std::true_type) or f(std::false_type).
template <class F>
ATTENTION_EXT_INLINE void with_flag(bool flag, F&& f) {
  if (flag) {
    f(std::true_type{});
  } else {
    f(std::false_type{});
  }
}

// sum[i][v] = sum over d of a[i * a_stride + d] * b[d * b_stride + v * width]
template <class T, int kRows, int kVectors>
ATTENTION_EXT_INLINE void broadcast_rows(const T* __restrict a, int64_t a_stride,
                                         const T* __restrict b, int64_t b_stride, int64_t depth,
                                         Vec<T> (&sum)[kRows][kVectors]) {
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec<T>{};
  }
#pragma GCC unroll 4
  for (int64_t d = 0; d < depth; ++d) {
    Vec<T> x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load(b + d * b_stride + v * kWidth<T>);
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> y = broadcast(a[i * a_stride + d]);
      for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(y, x[v], sum[i][v]);
    }
  }
}

// c[i * c_stride + v * width] += sum over k of a[k * a_stride + i] * b[k * b_stride + v * width].
// The sum starts at 0 and is added once: blocked summation, which halves the error of long rows.
template <class T, int kRows, int kVectors>
ATTENTION_EXT_INLINE void broadcast_columns(const T* __restrict a, int64_t a_stride,
                                            const T* __restrict b, int64_t b_stride, int64_t depth,
                                            T* __restrict c, int64_t c_stride) {
  Vec<T> sum[kRows][kVectors];
  for (int i = 0; i < kRows; ++i) {
    for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec<T>{};
  }
#pragma GCC unroll 4
  for (int64_t k = 0; k < depth; ++k) {
    Vec<T> x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = load(b + k * b_stride + v * kWidth<T>);
    for (int i = 0; i < kRows; ++i) {
      const Vec<T> y = broadcast(a[k * a_stride + i]);
      for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(y, x[v], sum[i][v]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      T* out = c + i * c_stride + v * kWidth<T>;
      store(out, load(out) + sum[i][v]);
    }
  }
}

// c[i][column] += factor * sum over r in [begin, end) of a[i][r] * b[r][column], for kRows rows i
// and whole vectors of columns, in strips of about equal width: dV and dK. Blocked summation again,
// kSumRows rows at a time, counted from `first` <= begin: rows of zeros may be left out. The first
// block of all overwrites what c holds.
constexpr int64_t kSumRows = 128;

template <class T, int kRows, int kVectors>
__attribute__((noinline)) void add_product(const T* a, int64_t a_stride, const T* b,
                                           int64_t b_stride, int64_t depth, T factor, bool is_first,
                                           T* c, int64_t c_stride) {
  Vec<T> sum[kRows][kVectors];
  broadcast_rows<T, kRows, kVectors>(a, a_stride, b, b_stride, depth, sum);
  const auto write = [&](auto adds) __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        T* out = c + i * c_stride + v * kWidth<T>;
        store(out, adds ? fma(sum[i][v], broadcast(factor), load(out)) : sum[i][v] * factor);
      }
    }
  };
  if (is_first) {
    write(std::false_type{});
  } else {
    write(std::true_type{});
  }
}
// How many strips of columns there are, and vectors in the widest.
inline int64_t strips_of(int64_t vectors) {
  return (vectors + Tuning::kLaneVectors - 1) / Tuning::kLaneVectors;
}
inline int64_t strip_width(int64_t vectors) {
  return vectors > 0 ? (vectors - 1) / strips_of(vectors) + 1 : 1;
}

// kWidest: vectors in the widest strip.
template <class T, int kRows, int kWidest = Tuning::kLaneVectors>
inline void add_product(const T* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t first,
                        int64_t begin, int64_t end, int64_t columns, T factor, bool is_first, T* c,
                        int64_t c_stride) {
  const int64_t vectors = columns / kWidth<T>;
  const int64_t strips = strips_of(vectors);
  for (int64_t s = 0; s < strips; ++s) {
    const int64_t column = vectors * s / strips * kWidth<T>,
                  stop = vectors * (s + 1) / strips * kWidth<T>;
    with_constant<kWidest>((stop - column) / kWidth<T>, [&](auto width) {
      int64_t r = begin;
      do {
        const int64_t left = kSumRows - (r - first) % kSumRows,
                      depth = end - r < left ? end - r : left;
        add_product<T, kRows, decltype(width)::value>(a + r, a_stride, b + r * b_stride + column,
                                                      b_stride, depth, factor,
                                                      is_first && r == begin, c + column, c_stride);
        r += depth;
      } while (r < end);
    });
  }
}
