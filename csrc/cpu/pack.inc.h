// Between the caller's tensors (any dtype, any strides) and the tiles of the kernels (T, aligned,
// padded). All conversion of half types, and all reading for NaN and infinity, happens here, while
// data is copied.

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;
};

typedef uint16_t HalfVec
    __attribute__((vector_size(Tuning::kVectorBytes / 2)));  // kWidth<float> half-width numbers
typedef uint32_t UnsignedVec __attribute__((vector_size(Tuning::kVectorBytes)));
typedef float HalfFloatVec __attribute__((vector_size(Tuning::kVectorBytes / 2)));

template <class T>
constexpr int64_t round_up_to_vector(int64_t n) {
  return (n + kWidth<T> - 1) / kWidth<T> * kWidth<T>;
}

// load_as<T>: a vector of T from kWidth<T> neighbouring stored elements.
template <class T>
ATTENTION_EXT_INLINE Vec<T> load_as(const double* p) {
  return load(p);
}
template <class T>
ATTENTION_EXT_INLINE Vec<T> load_as(const float* p) {
  if constexpr (sizeof(T) == 4) {
    return load(p);
  } else {  // a float32 mask with float64 inputs
    HalfFloatVec h;
    memcpy(&h, p, sizeof(h));
    return __builtin_convertvector(h, Vec<T>);
  }
}
template <class T>
ATTENTION_EXT_INLINE Vec<T> load_as(const BFloat16* p) {
  return load_bfloat16(&p->bits);
}
template <class T>
ATTENTION_EXT_INLINE Vec<T> load_as(const Float16* p) {
  return load_float16(&p->bits);
}
// A bool mask is an addend: 0 where the key may be seen, -infinity where it is hidden.
template <class T>
ATTENTION_EXT_INLINE Vec<T> load_as(const Bool* p) {
  Mask<T> bytes;
  load_bytes(&p->bits, bytes);
  return keep<T>(bytes == Mask<T>{}, broadcast(-kInfinity<T>));
}

ATTENTION_EXT_INLINE void store_as(float* p, Vec<float> x) { store(p, x); }
ATTENTION_EXT_INLINE void store_as(double* p, Vec<double> x) { store(p, x); }
ATTENTION_EXT_INLINE void store_as(float* p, Vec<double> x) {
  const HalfFloatVec h = __builtin_convertvector(x, HalfFloatVec);
  memcpy(p, &h, sizeof(h));
}
ATTENTION_EXT_INLINE void store_as(BFloat16* p, Vec<float> x) {  // to nearest even, NaN stays NaN
  const Mask<float> u = bit_cast<Mask<float>>(x);
  const Mask<float> rounded = u + 0x7fff + ((u >> 16) & 1);
  const Mask<float> bits = x != x ? u | 0x400000 : rounded;
  const HalfVec h = __builtin_convertvector(bit_cast<UnsignedVec>(bits) >> 16, HalfVec);
  memcpy(p, &h, sizeof(h));
}
ATTENTION_EXT_INLINE void store_as(Float16* p, Vec<float> x) { store_float16(&p->bits, x); }

// count <= kWidth<T> elements, stride apart; the lanes beyond are 0 (for Bool: visible).
template <class T, class S>
ATTENTION_EXT_INLINE Vec<T> load_some(const S* p, int64_t stride, int64_t count) {
  if (stride == 1 && count == kWidth<T>) return load_as<T>(p);
  S some[kWidth<T>];
  memset(some, std::is_same<S, Bool>::value ? 1 : 0, sizeof(some));
  for (int64_t i = 0; i < count; ++i) some[i] = p[i * stride];
  return load_as<T>(some);
}
template <class T, class S>
ATTENTION_EXT_INLINE void store_some(S* p, int64_t stride, int64_t count, Vec<T> x) {
  if (stride == 1 && count == kWidth<T>) {
    store_as(p, x);
    return;
  }
  S some[kWidth<T>];
  store_as(some, x);
  for (int64_t i = 0; i < count; ++i) p[i * stride] = some[i];
}

template <class T, class S>
ATTENTION_EXT_INLINE bool is_finite(const S* p) {
  const T x = load_some<T>(p, 1, 1)[0];
  return x - x == T(0);
}

// Masks alone are bool, or float32 beside float64.
template <class S>
constexpr bool kIsOutput = !std::is_same<S, Bool>::value;

// Calls f with a null pointer of the storage type; which types can meet T is decided here alone.
template <class T, class F>
ATTENTION_EXT_INLINE void dispatch_storage(DType dtype, F&& f) {
  if constexpr (sizeof(T) == 8) {
    if (dtype == DType::kBool) return f(static_cast<Bool*>(nullptr));
    if (dtype == DType::kFloat32) return f(static_cast<float*>(nullptr));
    return f(static_cast<double*>(nullptr));
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return f(static_cast<BFloat16*>(nullptr));
      case DType::kFloat16:
        return f(static_cast<Float16*>(nullptr));
      case DType::kBool:
        return f(static_cast<Bool*>(nullptr));
      default:
        return f(static_cast<float*>(nullptr));
    }
  }
}

// Rows of a tensor at arbitrary places: row i is `columns` elements from row[i], stride apart.
struct Rows {
  const char* const* row;
  int64_t count;
  int64_t stride;  // between columns, in elements
  int64_t columns;
  DType dtype;
};

// dst[column][lane], lane = row: up to kLanes rows side by side; missing rows are 0. If asked for,
// norm2[lane] is a row's sum of squares.
template <class T>
inline void pack_lanes(const Rows& src, int64_t lanes, int64_t lane_stride, T* __restrict dst,
                       T* norm2 = nullptr) {
  constexpr int w = kWidth<T>;
  dispatch_storage<T>(src.dtype, [&](auto* tag) {
    using S = typename std::remove_pointer<decltype(tag)>::type;
    for (int64_t lane = 0; lane < lanes; lane += w) {
      Vec<T> sum = {};
      for (int64_t c = 0; c < src.columns; c += w) {
        const int64_t count = src.columns - c < w ? src.columns - c : w;
        Vec<T> block[w];
        if (src.stride == 1 && count == w && lane + w <= src.count) {
#pragma GCC unroll 16
          for (int i = 0; i < w; ++i)
            block[i] = load_as<T>(reinterpret_cast<const S*>(src.row[lane + i]) + c);
        } else {
          for (int i = 0; i < w; ++i) {
            block[i] = Vec<T>{};
            if (lane + i >= src.count) continue;
            block[i] = load_some<T>(reinterpret_cast<const S*>(src.row[lane + i]) + c * src.stride,
                                    src.stride, count);
          }
        }
        transpose<T>(block);
        T* out = dst + c * lane_stride + lane;
        if (count == w) {
#pragma GCC unroll 16
          for (int i = 0; i < w; ++i) {
            store(out + i * lane_stride, block[i]);
            sum = fma(block[i], block[i], sum);
          }
        } else {
          for (int64_t i = 0; i < count; ++i) {
            store(out + i * lane_stride, block[i]);
            sum = fma(block[i], block[i], sum);
          }
        }
      }
      if (norm2) store(norm2 + lane, sum);
    }
  });
}

// dst row i = src[column][lane i] * factor[lane i]: the way back, written in the caller's dtype and
// strides.
template <class T>
inline void unpack_lanes(const T* __restrict src, int64_t lane_stride, const T* factor,
                         const Rows& dst) {
  constexpr int w = kWidth<T>;
  dispatch_storage<T>(dst.dtype, [&](auto* tag) {
    using S = typename std::remove_pointer<decltype(tag)>::type;
    if constexpr (kIsOutput<S>) {
      for (int64_t lane = 0; lane < dst.count; lane += w) {
        const Vec<T> f = load(factor + lane);
        for (int64_t c = 0; c < dst.columns; c += w) {
          const int64_t count = dst.columns - c < w ? dst.columns - c : w;
          Vec<T> block[w];
          const T* in = src + c * lane_stride + lane;
          if (count == w) {
#pragma GCC unroll 16
            for (int i = 0; i < w; ++i) block[i] = load(in + i * lane_stride) * f;
          } else {
            for (int i = 0; i < w; ++i)
              block[i] = i < count ? load(in + i * lane_stride) * f : Vec<T>{};
          }
          transpose<T>(block);
          const auto out = [&](int64_t i) {
            return reinterpret_cast<S*>(const_cast<char*>(dst.row[lane + i])) + c * dst.stride;
          };
          if (dst.stride == 1 && count == w && lane + w <= dst.count) {
#pragma GCC unroll 16
            for (int i = 0; i < w; ++i) store_as(out(i), block[i]);
          } else {
            for (int64_t i = 0; i < w && lane + i < dst.count; ++i)
              store_some<T>(out(i), dst.stride, count, block[i]);
          }
        }
      }
    }
  });
}

template <class T>
ATTENTION_EXT_INLINE Mask<T> not_finite(Vec<T> x) {
  return (x - x) != Vec<T>{};
}

// dst[row][column], row stride dst_stride >= columns rounded up, the padding 0; returns whether all
// was finite. With kReplace NaN and infinity become 0 (kept apart by the caller, who adds them to
// the rows that may see them).
template <class T, bool kReplace>
inline bool copy_rows(const Rows& src, T* __restrict dst, int64_t dst_stride) {
  constexpr int w = kWidth<T>;
  const int64_t whole = src.stride == 1 ? src.columns / w * w : 0;  // columns to load as vectors
  Vec<T> differences = {};  // x - x, which only a finite number has 0
  dispatch_storage<T>(src.dtype, [&](auto* tag) {
    using S = typename std::remove_pointer<decltype(tag)>::type;
    for (int64_t i = 0; i < src.count; ++i) {
      const S* in = reinterpret_cast<const S*>(src.row[i]);
      T* out = dst + i * dst_stride;
      const auto copy = [&](int64_t c, Vec<T> x) {
        differences += x - x;
        store(out + c, kReplace ? keep<T>(~not_finite<T>(x), x) : x);
      };
      for (int64_t c = 0; c < whole; c += w) copy(c, load_as<T>(in + c));
      for (int64_t c = whole; c < src.columns; c += w) {
        copy(c, load_some<T>(in + c * src.stride, src.stride,
                             src.columns - c < w ? src.columns - c : w));
      }
    }
  });
  return !any(Mask<T>(differences != T(0)));
}

// Largest sum of squares of a row; NaN or infinity where a row is not finite (or too large). Rows
// are padded with 0 to whole vectors, or their width is a multiple of one.
template <class T>
inline T largest_norm2(const T* rows, int64_t stride, int64_t count, int64_t columns) {
  constexpr int w = kWidth<T>;
  Vec<T> largest = {};
  for (int64_t i = 0; i < count; i += w) {
    Vec<T> sums[w];
    for (int j = 0; j < w; ++j) {
      Vec<T> even = {}, odd = {};
      if (i + j < count) {
        const T* row = rows + (i + j) * stride;
        int64_t c = 0;
        for (; c + 2 * w <= columns; c += 2 * w) {
          const Vec<T> a = load(row + c), b = load(row + c + w);
          even = fma(a, a, even);
          odd = fma(b, b, odd);
        }
        for (; c < columns; c += w) {
          const Vec<T> a = load(row + c);
          even = fma(a, a, even);
        }
      }
      sums[j] = even + odd;
    }
    const Vec<T> norms = horizontal_sums<T>(sums);
    largest = norms > largest || norms != norms ? norms : largest;
  }
  return horizontal_max<T>(largest);
}

// Whether there is no NaN and no infinity: those are not 0 when multiplied by 0.
template <class T>
inline bool all_finite(const T* rows, int64_t stride, int64_t count, int64_t columns) {
  constexpr int w = kWidth<T>;
  if (stride == columns) {
    columns *= count;
    count = 1;
  }
  Vec<T> product[4] = {};
  for (int64_t i = 0; i < count; ++i) {
    const T* row = rows + i * stride;
    int64_t c = 0;
    for (; c + 4 * w <= columns; c += 4 * w) {
      for (int j = 0; j < 4; ++j) product[j] = fma(load(row + c + j * w), Vec<T>{}, product[j]);
    }
    for (; c < columns; c += w) product[0] = fma(load(row + c), Vec<T>{}, product[0]);
  }
  return !any(Mask<T>((product[0] + product[1]) + (product[2] + product[3]) != T(0)));
}

// out[i] = sum over columns of a[i] * b[i] for each row, two tensors of one dtype; rows beyond the
// count get 0, up to a whole vector.
template <class T>
inline void dot_rows(const Rows& a, const Rows& b, T* out) {
  constexpr int w = kWidth<T>;
  const int64_t whole =
      a.stride == 1 && b.stride == 1 ? a.columns / w * w : 0;  // columns to load as vectors
  dispatch_storage<T>(a.dtype, [&](auto* tag) {
    using S = typename std::remove_pointer<decltype(tag)>::type;
    for (int64_t i = 0; i < a.count; i += w) {
      Vec<T> sums[w] = {};
      for (int64_t j = 0; j < w && i + j < a.count; ++j) {
        const S *x = reinterpret_cast<const S*>(a.row[i + j]),
                *y = reinterpret_cast<const S*>(b.row[i + j]);
        Vec<T> sum = {};
        for (int64_t c = 0; c < whole; c += w) sum = fma(load_as<T>(x + c), load_as<T>(y + c), sum);
        for (int64_t c = whole; c < a.columns; c += w) {
          const int64_t count = a.columns - c < w ? a.columns - c : w;
          sum = fma(load_some<T>(x + c * a.stride, a.stride, count),
                    load_some<T>(y + c * b.stride, b.stride, count), sum);
        }
        sums[j] = sum;
      }
      store(out + i, horizontal_sums<T>(sums));
    }
  });
}

// A tile of key or value rows as the micro-kernels read it.
template <class T>
struct StagedRows {
  const T* data;  // [count][stride]
  int64_t stride;
  bool finite;  // no NaN, no infinity
  T norm2;      // largest sum of squares of a row, if asked for
};

// What stage_rows looks for in a tile.
// kAsIs: nothing; the tile counts as finite.
enum class Stage { kAsIs, kFinite, kFiniteCopy, kNorm };

// Whether rows can be used where they lie: T, neighbouring columns, whole vectors, and rows at most
// `far` elements apart (negative: never).
template <class T>
inline bool lies_in_vectors(const TensorView& view, int64_t columns, int64_t far) {
  const DType own = sizeof(T) == 8 ? DType::kFloat64 : DType::kFloat32;
  return view.data && view.dtype == own && view.column_stride == 1 && columns % kWidth<T> == 0 &&
         view.row_stride >= 0 && view.row_stride <= far;
}

// Such rows are read in place, others copied to buffer [count][padded columns].
template <class T>
inline StagedRows<T> place_rows(const TensorView& view, const Rows& rows, int64_t far, T* buffer) {
  const int64_t padded = round_up_to_vector<T>(rows.columns);
  if (lies_in_vectors<T>(view, rows.columns, far)) {
    return {reinterpret_cast<const T*>(rows.row[0]), view.row_stride, true, T(0)};
  }
  copy_rows<T, false>(rows, buffer, padded);
  return {buffer, padded, true, T(0)};
}

// The same for a tile that is read many times, so that its rows should not fall into the same cache
// sets. kNorm looks for the largest norm, which says too whether all is finite (an overflow counts
// as not: the safe side); kFiniteCopy copies a tile that is not finite, with 0 for NaN and
// infinity. Even: the rows are row_stride apart.
template <class T>
inline StagedRows<T> stage_rows(const TensorView& view, const Rows& rows, bool even, Stage stage,
                                T* buffer) {
  const int64_t padded = round_up_to_vector<T>(rows.columns);
  StagedRows<T> tile = place_rows<T>(view, rows, even ? 2 * rows.columns : -1, buffer);
  if (stage == Stage::kAsIs) return tile;
  if (stage == Stage::kNorm) {
    tile.norm2 = largest_norm2(tile.data, tile.stride, rows.count, padded);
    tile.finite = tile.norm2 - tile.norm2 == T(0);
  } else {
    tile.finite = all_finite(tile.data, tile.stride, rows.count, padded);
  }
  if (stage == Stage::kFiniteCopy && !tile.finite) {
    copy_rows<T, true>(rows, buffer, padded);
    tile.data = buffer;
    tile.stride = padded;
  }
  return tile;
}

// One stored element.
template <class T>
inline T load_scalar(const char* p, DType dtype) {
  T r = T(0);
  dispatch_storage<T>(dtype, [&](auto* tag) {
    using S = typename std::remove_pointer<decltype(tag)>::type;
    r = load_some<T>(reinterpret_cast<const S*>(p), 1, 1)[0];
  });
  return r;
}

// Rows of whole vectors back into a tensor: row i at first + i * row_stride, times factor.
template <class T>
inline void store_rows(const TensorView& view, const char* first, int64_t count, int64_t columns,
                       const T* src, T factor = T(1)) {
  constexpr int w = kWidth<T>;
  const int64_t padded = round_up_to_vector<T>(columns);
  dispatch_storage<T>(view.dtype, [&](auto* tag) {
    using S = typename std::remove_pointer<decltype(tag)>::type;
    if constexpr (kIsOutput<S>) {
      S* out = reinterpret_cast<S*>(const_cast<char*>(first));
      const int64_t whole =
          view.column_stride == 1 ? columns / w * w : 0;  // columns to store as vectors
      for (int64_t i = 0; i < count; ++i, out += view.row_stride, src += padded) {
        for (int64_t c = 0; c < whole; c += w) store_as(out + c, load(src + c) * factor);
        for (int64_t c = whole; c < columns; c += w) {
          store_some<T>(out + c * view.column_stride, view.column_stride,
                        columns - c < w ? columns - c : w, load(src + c) * factor);
        }
      }
    }
  });
}
