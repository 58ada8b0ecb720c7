// Everything that an instruction set is made of, in its own namespace; kernels_<set>.cpp includes this after
// its vec_<set>.h. No torch header, no standard container, no static initialiser: only get() leaves the unit.
// ATTENTION_EXT_ISA, the set's name, comes from csrc/flags.txt.

#include "../core/visibility.h"
#include "kernels.h"

#define ATTENTION_EXT_STRING_OF(x) #x
#define ATTENTION_EXT_STRING(x) ATTENTION_EXT_STRING_OF(x)

namespace attention_ext {
namespace ATTENTION_EXT_ISA {
namespace {

#include "vec_math.inc.h"
// The order is the order of use.
#include "../core/online_softmax.inc.h"
#include "../core/score.inc.h"
#include "arena.inc.h"
#include "pack.inc.h"
#include "micro_kernels.inc.h"
#include "lane_tile.inc.h"
#include "forward.inc.h"
#include "backward.inc.h"

template <class T>
struct Entry {
  static int64_t forward_rows(const AttentionParams& p) { return Forward<T>::most_tiles(p) * kLanes<T>; }
  static int64_t forward_scratch(const AttentionParams& p, int64_t rows) {
    return Forward<T>(p, rows / kLanes<T>, nullptr).scratch_bytes();
  }
  static void forward(const AttentionParams& p, int64_t unit, int64_t first_row, int64_t rows, void* scratch) {
    Forward<T>(p, rows / kLanes<T>, scratch).run(unit, first_row);
  }

  // Parts of at least two super-blocks, at most eight: enough threads for one head, few sums to add.
  static int64_t rows_per_part(const GradParams& g) {
    const int64_t rows = g.forward.rows_per_unit();
    const int64_t super_block = Backward<T>::most_tiles(g) * kLanes<T>;
    const int64_t blocks = (rows + super_block - 1) / super_block;
    const int64_t parts = clamp_to(blocks / 2, 1, 8);
    return (blocks + parts - 1) / parts * super_block;
  }
  static int64_t backward_parts(const GradParams& g) {
    const int64_t rows = g.forward.rows_per_unit(), each = rows_per_part(g);
    return rows > each ? (rows + each - 1) / each : 1;
  }
  static int64_t backward_scratch(const GradParams& g) { return Backward<T>(g, nullptr).scratch_bytes(); }
  static int64_t accumulator_bytes(const GradParams& g) {
    return Backward<T>::accumulator_size(g.forward) * static_cast<int64_t>(sizeof(T));
  }
  static void backward(const GradParams& g, int64_t unit, int64_t part, void* accumulator, void* scratch) {
    const int64_t rows = g.forward.rows_per_unit(), first = part * rows_per_part(g);
    const int64_t last = first + rows_per_part(g);
    Backward<T>(g, scratch).run(unit, first, last < rows ? last : rows, static_cast<T*>(accumulator));
  }
  static void add_accumulator(const GradParams& g, void* into, const void* from) {
    T* a = static_cast<T*>(into);
    const T* b = static_cast<const T*>(from);
    const int64_t size = Backward<T>::accumulator_size(g.forward);  // whole vectors: the rows are padded
    for (int64_t i = 0; i < size; i += kWidth<T>) store(a + i, load(a + i) + load(b + i));
  }
  static void store_accumulator(const GradParams& g, int64_t unit, const void* accumulator) {
    const AttentionParams& p = g.forward;
    const Unit u = unit_of(p, unit);
    const T* grad_key = static_cast<const T*>(accumulator);
    const int64_t head_padded = round_up_to_vector<T>(p.head_dim);
    store_rows(g.grad_key, address(g.grad_key, p, u, u.first_head / g.grad_key_group, 0), p.seqlen_kv, p.head_dim,
               grad_key, static_cast<T>(p.scale));
    store_rows(g.grad_value, address(g.grad_value, p, u, u.first_head / g.grad_value_group, 0), p.seqlen_kv,
               p.value_dim, grad_key + p.seqlen_kv * head_padded, T(1));
  }

  static constexpr KernelTable table() {
    return {kLanes<T>,        forward_rows,      forward_scratch, forward,         backward_parts,
            backward_scratch, accumulator_bytes, backward,        add_accumulator, store_accumulator};
  }
};

}  // namespace

const Kernels* get() {
  static constexpr Kernels table{ATTENTION_EXT_STRING(ATTENTION_EXT_ISA), Entry<float>::table(), Entry<double>::table()};
  return &table;
}

}  // namespace ATTENTION_EXT_ISA
}  // namespace attention_ext
