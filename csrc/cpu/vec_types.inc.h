// Vec<T> and Mask<T> for the width in Tuning, on the compiler's vector extension: + - * / and
// comparisons are operators, x > y ? a : b selects per lane. Included inside an instruction set's
// namespace by vec_<set>.h, which adds the few operations that the extension has no word for: fma,
// any, bytes, bfloat16, float16, and the product of the low halves of 64-bit integers.

template <class T>
struct VecTypes {
  using Int = typename std::conditional<sizeof(T) == 4, int32_t, int64_t>::type;
  static constexpr int kWidth = Tuning::kVectorBytes / static_cast<int>(sizeof(T));
  typedef T Vec __attribute__((vector_size(Tuning::kVectorBytes)));
  typedef Int Mask __attribute__((vector_size(Tuning::kVectorBytes)));
};
template <class T>
using Vec = typename VecTypes<T>::Vec;
template <class T>
using Mask = typename VecTypes<T>::Mask;  // -1 (true) or 0 per lane; also the lanes' integers
template <class T>
constexpr int kWidth = VecTypes<T>::kWidth;

typedef uint64_t WideVec __attribute__((vector_size(Tuning::kVectorBytes)));
