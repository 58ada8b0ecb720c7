// A row of a tensor, a vector of columns after the other: what the kernels of whole rows share.

template <int kPlace>
using Place = std::integral_constant<int, kPlace>;

// f(place, column, count) for neighbouring vectors of columns; place runs round from 0 to 3, so
// that sums can go into four registers.
template <class T, class F>
ATTENTION_EXT_INLINE void for_columns(int64_t columns, F&& f) {
  constexpr int64_t w = kWidth<T>;
  int64_t c = 0;
  for (; c + 4 * w <= columns; c += 4 * w) {
    f(Place<0>{}, c, w);
    f(Place<1>{}, c + w, w);
    f(Place<2>{}, c + 2 * w, w);
    f(Place<3>{}, c + 3 * w, w);
  }
  for (; c < columns; c += w) f(Place<0>{}, c, columns - c < w ? columns - c : w);
}

template <class T, int kHalf = kWidth<T> / 2>
ATTENTION_EXT_INLINE T sum_of_lanes(Vec<T> x) {
  if constexpr (kHalf > 0) {
    return sum_of_lanes<T, kHalf / 2>(
        x + swap_lanes<T, kHalf>(x, std::make_index_sequence<kWidth<T>>{}));
  } else {
    return x[0];
  }
}
template <class T>
ATTENTION_EXT_INLINE T sum_of(const Vec<T> (&part)[4]) {
  return sum_of_lanes<T>((part[0] + part[1]) + (part[2] + part[3]));
}

template <class T>
constexpr DType kOwnType = sizeof(T) == 4 ? DType::kFloat32 : DType::kFloat64;

inline Vec<float> narrow_some(const double* p, int64_t stride, int64_t count) {
  typedef double Wide __attribute__((vector_size(2 * Tuning::kVectorBytes)));
  Wide some = {};
  for (int64_t i = 0; i < count; ++i) some[i] = p[i * stride];
  return __builtin_convertvector(some, Vec<float>);
}

// Columns of a view in whatever type it is stored: of weights and tables, which need not have the
// type of what they are multiplied with.
template <class T>
inline Vec<T> load_other(const TensorView& view, int64_t offset, int64_t count) {
  if constexpr (sizeof(T) == 4) {
    if (view.dtype == DType::kFloat64) {
      return narrow_some(static_cast<const double*>(view.data) + offset, view.column_stride, count);
    }
  }
  Vec<T> x;
  dispatch_storage<T>(view.dtype, [&](auto* tag) {
    using S = typename std::remove_pointer<decltype(tag)>::type;
    x = load_some<T>(static_cast<const S*>(view.data) + offset, view.column_stride, count);
  });
  return x;
}
template <class T>
ATTENTION_EXT_INLINE Vec<T> load_view(const TensorView& view, int64_t offset, int64_t count) {
  if (view.dtype == kOwnType<T> && view.column_stride == 1 && count == kWidth<T>) {
    return load(static_cast<const T*>(view.data) + offset);
  }
  return load_other<T>(view, offset, count);
}

template <class S>
ATTENTION_EXT_INLINE S* row_of(const RowsView& view, int64_t row) {
  return static_cast<S*>(const_cast<void*>(view.data)) + row_offset(view, row);
}

// f with a null pointer of the type that a tensor to be written is stored in.
template <class T, class F>
ATTENTION_EXT_INLINE void dispatch_output(DType dtype, F&& f) {
  dispatch_storage<T>(dtype, [&](auto* tag) {
    if constexpr (kIsOutput<typename std::remove_pointer<decltype(tag)>::type>) f(tag);
  });
}
