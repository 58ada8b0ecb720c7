// Everything that an instruction set is made of, in its own namespace; kernels_<set>.cpp includes
// this after its vec_<set>.h. No torch header, no standard container, no static initialiser: only
// get() leaves the unit. ATTENTION_EXT_ISA, the set's name, comes from csrc/flags.txt.

#include "../core/extremes.h"
#include "../core/pages.h"
#include "../core/philox.h"
#include "../core/visibility.h"
#include "kernels.h"

#define ATTENTION_EXT_STRING_OF(x) #x
#define ATTENTION_EXT_STRING(x) ATTENTION_EXT_STRING_OF(x)

namespace attention_ext {
namespace ATTENTION_EXT_ISA {
namespace {

// The order is the order of use.
#include "vec_math.inc.h"
#include "../core/online_softmax.inc.h"
#include "../core/score.inc.h"
#include "arena.inc.h"
#include "pack.inc.h"
#include "micro_kernels.inc.h"
#include "lane_tile.inc.h"
#include "cell_tile.inc.h"
#include "dropout.inc.h"
#include "forward.inc.h"
#include "few_rows.inc.h"
#include "sweep.inc.h"
#include "backward.inc.h"
#include "weights.inc.h"
#include "tangent.inc.h"
#include "backward_tangent.inc.h"
#include "mask_gradient.inc.h"
#include "columns.inc.h"
#include "rotary.inc.h"
#include "rms_norm.inc.h"
#include "swiglu.inc.h"
#include "fma_peak.inc.h"

inline const AttentionParams& forward_of(const GradParams& g) { return g.forward; }
inline const AttentionParams& forward_of(const TangentParams& c) { return c.grad.forward; }
inline const GradParams& grad_of(const GradParams& g) { return g; }
inline const GradParams& grad_of(const TangentParams& c) { return c.grad; }

template <class T>
struct ForwardEntry {
  static int64_t rows(const AttentionParams& p) { return Forward<T>::most_tiles(p) * kLanes<T>; }
  static int64_t scratch(const AttentionParams& p, int64_t rows) {
    return Forward<T>(p, rows / kLanes<T>, nullptr).scratch_bytes();
  }
  static void run(const AttentionParams& p, int64_t unit, int64_t first_row, int64_t rows,
                  void* scratch) {
    Forward<T>(p, rows / kLanes<T>, scratch).run(unit, first_row);
  }
};

template <class T>
struct FewRowsEntry {
  static int64_t scratch(const AttentionParams& p) {
    return FewRows<T>(p, nullptr).scratch_bytes();
  }
  static int64_t partial_bytes(const AttentionParams& p) {
    return FewRows<T>::partial_size(p) * static_cast<int64_t>(sizeof(T));
  }
  static void chunk(const AttentionParams& p, int64_t unit, int64_t chunk, void* partial,
                    void* scratch) {
    FewRows<T>(p, scratch).run(unit, chunk, static_cast<T*>(partial));
  }
  static void merge(const AttentionParams& p, int64_t unit, void* partials, void* scratch) {
    FewRows<T>(p, scratch).merge(unit, static_cast<T*>(partials));
  }
};

template <class T>
struct WeightsEntry {
  static int64_t rows(const WeightsParams& w) {
    return Weights<T>::most_tiles(w.forward) * kLanes<T>;
  }
  static int64_t scratch(const WeightsParams& w) {
    return Weights<T>(w.forward, nullptr).scratch_bytes();
  }
  static void run(const WeightsParams& w, int64_t unit, int64_t first_row, void* scratch) {
    Weights<T>(w.forward, scratch).run(w.weights, unit, first_row);
  }
  static constexpr RowKernel<WeightsParams> kernel() { return {rows, scratch, run}; }
};

template <class T>
struct TangentEntry {
  static int64_t rows(const TangentParams& c) { return Tangent<T>::most_tiles(c) * kLanes<T>; }
  static int64_t scratch(const TangentParams& c) { return Tangent<T>(c, nullptr).scratch_bytes(); }
  static void run(const TangentParams& c, int64_t unit, int64_t first_row, void* scratch) {
    Tangent<T>(c, scratch).run(unit, first_row);
  }
  static constexpr RowKernel<TangentParams> kernel() { return {rows, scratch, run}; }
};

template <class T>
struct AccumulatorEntry {
  static int64_t bytes(const AttentionParams& p) {
    return KeyAccumulator<T>::size(p) * static_cast<int64_t>(sizeof(T));
  }
  static void add(const AttentionParams& p, void* into, const void* from) {
    T* a = static_cast<T*>(into);
    const T* b = static_cast<const T*>(from);
    const int64_t size = KeyAccumulator<T>::size(p);  // whole vectors: the rows are padded
    for (int64_t i = 0; i < size; i += kWidth<T>) store(a + i, load(a + i) + load(b + i));
  }
  static void write(const GradParams& g, int64_t unit, const void* accumulator) {
    const AttentionParams& p = g.forward;
    Unit u;
    find_unit(p, unit, u);
    const KeyAccumulator<T> sums(p, static_cast<T*>(const_cast<void*>(accumulator)));
    const int64_t keys = keys_with_gradient(p, u);
    store_rows(g.grad_key, address(g.grad_key, p, u, u.first_head / g.grad_key_group, u.key_start),
               keys, p.head_dim, sums.key.data);
    store_rows(g.grad_value,
               address(g.grad_value, p, u, u.first_head / g.grad_value_group, u.key_start), keys,
               p.value_dim, sums.value.data);
  }
};

// Backward or BackwardTangent.
template <class T, template <class> class Kernel>
struct PartEntry {
  using Params = typename Kernel<T>::Params;

  static int64_t most_parts(const Params& params) {
    return parts_of(forward_of(params).rows_per_unit());
  }
  static int64_t parts(const Params& params, int64_t unit) {
    return parts_of(unit_of(params, unit).rows(forward_of(params)));
  }
  static int64_t scratch(const Params& params) {
    return Kernel<T>(params, nullptr).scratch_bytes();
  }
  static void run(const Params& params, int64_t unit, int64_t part, void* accumulator,
                  void* scratch) {
    const Unit u = unit_of(params, unit);
    const int64_t first = first_tile(params, u, part) * kLanes<T>;
    const int64_t stop = first_tile(params, u, part + 1) * kLanes<T>;
    Kernel<T>(params, scratch)
        .run(unit, first, stop, in_place(params) ? nullptr : static_cast<T*>(accumulator));
  }
  static void store(const Params& params, int64_t unit, const void* accumulator) {
    if (!in_place(params)) AccumulatorEntry<T>::write(grad_of(params), unit, accumulator);
  }
  static constexpr PartKernel<Params> kernel() { return {most_parts, parts, scratch, run, store}; }

 private:
  static constexpr int64_t kPartRows = 512;

  static bool in_place(const Params& params) {
    return most_parts(params) == 1 && Kernel<T>::sums_in_place(params);
  }
  static Unit unit_of(const Params& params, int64_t unit) {
    Unit u;
    find_unit(forward_of(params), unit, u);
    return u;
  }
  // One, or an even number up to eight, of kPartRows on average: enough threads for one head, no
  // odd one left over for a second thread, few sums to add.
  static int64_t parts_of(int64_t rows) {
    const int64_t pairs = rows / (2 * kPartRows);
    return pairs < 1 ? 1 : 2 * clamp_to(pairs, 1, 4);
  }
  // The lane tile with which a part begins: parts have about the same work.
  static int64_t first_tile(const Params& params, const Unit& u, int64_t part) {
    const int64_t rows = u.rows(forward_of(params)), count = (rows + kLanes<T> - 1) / kLanes<T>,
                  all = parts_of(rows);
    if (part == 0 || part == all) return part == 0 ? 0 : count;
    int64_t total = 0, before = 0, tile = 0;
    for (int64_t i = 0; i < count; ++i) total += work(params, u, i);
    for (; tile < count; ++tile) {
      const int64_t own = work(params, u, tile);
      if (before + own / 2 >= total * part / all) break;
      before += own;
    }
    return tile;
  }
  // Keys that some row of a lane tile sees.
  static int64_t work(const Params& params, const Unit& u, int64_t tile) {
    const AttentionParams& p = forward_of(params);
    const int64_t first = tile * kLanes<T>, end = clamp_to(first + kLanes<T>, 0, u.rows(p));
    const auto keys = [&](int64_t row) {
      return visible_keys(p.visibility, row / p.heads_per_unit + u.offset, u.seqlen_kv);
    };
    return keys(end - 1).end - keys(first).begin;
  }
};

template <class T, template <class> class Kernel>
struct MaskGradientEntry {
  static int64_t scratch(const MaskGradParams& m) {
    return MaskGradient<T, Kernel>(m, nullptr).scratch_bytes();
  }
  static void run(const MaskGradParams& m, int64_t task, void* scratch) {
    MaskGradient<T, Kernel>(m, scratch).run(task);
  }
  static constexpr TaskKernel<MaskGradParams> kernel() {
    return {MaskGradient<T, Kernel>::tasks, scratch, run};
  }
};

template <class T>
constexpr KernelTable table() {
  return {kLanes<T>,
          ForwardEntry<T>::rows,
          ForwardEntry<T>::scratch,
          ForwardEntry<T>::run,
          FewRows<T>::kMost,
          FewRows<T>::chunks,
          FewRowsEntry<T>::scratch,
          FewRowsEntry<T>::partial_bytes,
          FewRowsEntry<T>::chunk,
          FewRowsEntry<T>::merge,
          WeightsEntry<T>::kernel(),
          TangentEntry<T>::kernel(),
          PartEntry<T, Backward>::kernel(),
          PartEntry<T, BackwardTangent>::kernel(),
          MaskGradientEntry<T, Backward>::kernel(),
          MaskGradientEntry<T, BackwardTangent>::kernel(),
          AccumulatorEntry<T>::bytes,
          AccumulatorEntry<T>::add,
          Rotary<T>::run,
          RmsNorm<T>::forward,
          RmsNorm<T>::backward,
          RmsNorm<T>::add_weight_sums,
          Swiglu<T>::forward,
          Swiglu<T>::backward};
}

}  // namespace

const Kernels* get() {
  static constexpr Kernels kernels{ATTENTION_EXT_STRING(ATTENTION_EXT_ISA), multiply_adds,
                                   kMultiplyAddsPerRound, table<float>(), table<double>()};
  return &kernels;
}

}  // namespace ATTENTION_EXT_ISA
}  // namespace attention_ext
