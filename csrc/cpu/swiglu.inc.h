// SwiGLU of rows (g | u), with s = 1 / (1 + e^-g):
//
//   y = g s u        dg = dy u s (1 + g (1 - s))        du = dy g s
//
// Serial over rows; every element by itself.

// e^x for x <= 0: the part of x log2(e) that rounding loses goes into a factor of its own.
template <class T>
ATTENTION_EXT_INLINE Vec<T> exp_negative(Vec<T> x) {
  x = x < T(-2000) ? broadcast(T(-2000)) : x;  // e^-2000 is 0, and nothing below overflows
  const Vec<T> power = x * kLog2E<T>;
  const Vec<T> lost = fma(x, broadcast(kLog2E<T>), -power);
  const Vec<T> e = exp2_or_zero<T>(power);
  return fma(e, lost * kLn2<T>, e);
}

template <class T>
struct Swiglu {
  static void forward(const SwigluParams& p, int64_t first, int64_t rows) {
    dispatch_output<T>(p.input.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      const int64_t from = p.input.column_stride, to = p.output.column_stride;
      for (int64_t i = first; i < first + rows; ++i) {
        const S* gate = row_of<const S>(p.input, i);
        const S* up = gate + p.width * from;
        S* y = row_of<S>(p.output, i);
        for_columns<T>(p.width, [&](auto, int64_t c, int64_t count) {
          const Vec<T> g = load_some<T>(gate + c * from, from, count);
          store_some<T>(y + c * to, to, count,
                        g * sigmoid(g).value * load_some<T>(up + c * from, from, count));
        });
      }
    });
  }

  static void backward(const SwigluParams& p, int64_t first, int64_t rows) {
    dispatch_output<T>(p.input.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      const int64_t from = p.input.column_stride, above = p.grad_output.column_stride;
      const int64_t to = p.grad_input.column_stride;
      for (int64_t i = first; i < first + rows; ++i) {
        const S* gate = row_of<const S>(p.input, i);
        const S* up = gate + p.width * from;
        const S* upstream = row_of<const S>(p.grad_output, i);
        S* grad_gate = row_of<S>(p.grad_input, i);
        S* grad_up = grad_gate + p.width * to;
        for_columns<T>(p.width, [&](auto, int64_t c, int64_t count) {
          const Vec<T> g = load_some<T>(gate + c * from, from, count),
                       u = load_some<T>(up + c * from, from, count);
          const Vec<T> dy = load_some<T>(upstream + c * above, above, count);
          const Sigmoid s = sigmoid(g);
          store_some<T>(grad_gate + c * to, to, count,
                        dy * u * s.value * fma(g, s.complement, broadcast(T(1))));
          store_some<T>(grad_up + c * to, to, count, dy * (g * s.value));
        });
      }
    });
  }

 private:
  struct Sigmoid {
    Vec<T> value;
    Vec<T> complement;  // 1 - value, without cancellation
  };
  static ATTENTION_EXT_INLINE Sigmoid sigmoid(Vec<T> x) {
    const Mask<T> positive = x > T(0);
    const Vec<T> e = exp_negative<T>(positive ? -x : x);
    const Vec<T> large = T(1) / (T(1) + e), small = e * large;
    return {positive ? large : small, positive ? small : large};
  }
};
