// RMSNorm of rows x of n columns, with x^ = x r:
//
//   r = 1 / sqrt(mean(x^2) + eps)        y = x^ w
//   dx = r (dy w - x^ mean(dy w x^))     dw = sum over rows of dy x^
//
// Serial over rows, sums in T. dw is summed over blocks of rows that the sizes fix, and the blocks
// in order.

template <class T>
struct RmsNorm {
  static void forward(const RmsNormParams& p, int64_t first, int64_t rows) {
    dispatch_output<T>(p.input.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      const int64_t from = p.input.column_stride, to = p.output.column_stride;
      for (int64_t i = first; i < first + rows; ++i) {
        const S* x = row_of<const S>(p.input, i);
        S* y = row_of<S>(p.output, i);
        Vec<T> squares[4] = {};
        for_columns<T>(p.width, [&](auto place, int64_t c, int64_t count) {
          const Vec<T> v = load_some<T>(x + c * from, from, count);
          squares[place()] = fma(v, v, squares[place()]);
        });
        const T r = reciprocal(p, sum_of<T>(squares));
        for_columns<T>(p.width, [&](auto, int64_t c, int64_t count) {
          const Vec<T> weight = load_view<T>(p.weight, c * p.weight.column_stride, count);
          store_some<T>(y + c * to, to, count,
                        load_some<T>(x + c * from, from, count) * r * weight);
        });
      }
    });
  }

  // Overwrites weight_sums [width] with this block's part of dw.
  static void backward(const RmsNormParams& p, int64_t first, int64_t rows, void* weight_sums) {
    T* sums = static_cast<T*>(weight_sums);
    memset(sums, 0, p.width * sizeof(T));
    dispatch_output<T>(p.input.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      for (int64_t i = first; i < first + rows; ++i) {
        backward_row(p, row_of<const S>(p.input, i), row_of<const S>(p.grad_output, i),
                     row_of<S>(p.grad_input, i), sums);
      }
    });
  }

  // dw = the sums [blocks][width] of all blocks, added in order.
  static void add_weight_sums(const RmsNormParams& p, const void* weight_sums, int64_t blocks) {
    const T* sums = static_cast<const T*>(weight_sums);
    dispatch_output<T>(p.grad_weight.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      S* out = static_cast<S*>(const_cast<void*>(p.grad_weight.data));
      for_columns<T>(p.width, [&](auto, int64_t c, int64_t count) {
        Vec<T> total = {};
        for (int64_t block = 0; block < blocks; ++block) {
          total += load_some<T>(sums + block * p.width + c, 1, count);
        }
        store_some<T>(out + c * p.grad_weight.column_stride, p.grad_weight.column_stride, count,
                      total);
      });
    });
  }

 private:
  static T reciprocal(const RmsNormParams& p, T squares) {
    const T mean = squares / static_cast<T>(p.width) + static_cast<T>(p.epsilon);
    return T(1) / static_cast<T>(sizeof(T) == 4 ? __builtin_sqrtf(mean) : __builtin_sqrt(mean));
  }

  template <class S>
  static ATTENTION_EXT_INLINE void backward_row(const RmsNormParams& p, const S* x, const S* grad,
                                                S* out, T* sums) {
    const int64_t from = p.input.column_stride, above = p.grad_output.column_stride,
                  to = p.grad_input.column_stride;
    Vec<T> squares[4] = {}, products[4] = {};
    for_columns<T>(p.width, [&](auto place, int64_t c, int64_t count) {
      const Vec<T> v = load_some<T>(x + c * from, from, count);
      const Vec<T> weight = load_view<T>(p.weight, c * p.weight.column_stride, count);
      squares[place()] = fma(v, v, squares[place()]);
      products[place()] =
          fma(load_some<T>(grad + c * above, above, count) * weight, v, products[place()]);
    });
    const T r = reciprocal(p, sum_of<T>(squares));
    const T mean = sum_of<T>(products) * r / static_cast<T>(p.width);
    for_columns<T>(p.width, [&](auto, int64_t c, int64_t count) {
      const Vec<T> scaled = load_some<T>(x + c * from, from, count) * r;
      const Vec<T> g = load_some<T>(grad + c * above, above, count);
      const Vec<T> weight = load_view<T>(p.weight, c * p.weight.column_stride, count);
      store_some<T>(out + c * to, to, count, fma(-scaled, broadcast(mean), g * weight) * r);
      store_some<T>(sums + c, 1, count, fma(g, scaled, load_some<T>(sums + c, 1, count)));
    });
  }
};
