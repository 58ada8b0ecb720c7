// A lane tile: up to kLanes rows (queries) side by side, one per vector lane, and the keys they may
// see.
//
// Rows are position-major, so both ends of the visible interval grow with the lane. A stretch of
// keys is cut into segments in which the same vectors have a visible key; a causal diagonal is thus
// cut at single vectors, not at whole tiles, and what no row of a vector sees is never computed or
// read.

template <class T>
constexpr int kLanes = Tuning::kLaneVectors * kWidth<T>;
constexpr int kBlockKV = Tuning::kBlockKV;

struct Segment {
  int64_t begin, end;             // keys, relative to the kv tile
  int first_vector, last_vector;  // vectors [first, last) see at least one of these keys
  bool partial;                   // some cell of these is hidden by the interval
};

// Which slices one unit of work reads; everything that does not depend on the row.
struct Unit {
  int64_t batch;                   // linear batch index
  int64_t index[kMaxBatchDims];    // the same, per dimension
  int64_t first_head;              // of heads_per_unit output heads
  int64_t seqlen_q, seqlen_kv;     // of this batch element
  int64_t query_start, key_start;  // first row in the tensors, for packed sequences
  int64_t offset;                  // position of query 0

  int64_t rows(const AttentionParams& p) const { return seqlen_q * p.heads_per_unit; }
};

// In place: a copy of what was just written number by number would wait for all of it.
inline void find_unit(const AttentionParams& p, int64_t unit, Unit& u) {
  const int64_t units_per_batch = p.num_heads / p.heads_per_unit;
  u.batch = unit / units_per_batch;
  u.first_head = unit % units_per_batch * p.heads_per_unit;
  int64_t rest = u.batch;
  for (int64_t d = p.batch_dims - 1; d >= 0; --d) {
    u.index[d] = rest % p.batch_size[d];
    rest /= p.batch_size[d];
  }
  const int64_t *query_start = p.lengths.query_start, *key_start = p.lengths.key_start;
  u.query_start = query_start ? query_start[u.batch] : 0;
  u.seqlen_q = query_start ? query_start[u.batch + 1] - u.query_start : p.seqlen_q;
  u.key_start = key_start ? key_start[u.batch] : 0;
  u.seqlen_kv = p.lengths.used_keys ? p.lengths.used_keys[u.batch]
                : key_start         ? key_start[u.batch + 1] - u.key_start
                                    : p.seqlen_kv;
  u.offset = p.visibility.lower_right ? u.seqlen_kv - u.seqlen_q : 0;
}

// All keys of the batch element, also those beyond its used length: their gradient is 0.
inline int64_t keys_with_gradient(const AttentionParams& p, const Unit& u) {
  return p.lengths.key_start ? u.seqlen_kv : p.seqlen_kv;
}

// Address of element (unit's batch, head, row, 0); the row counts from the unit's first.
inline const char* address(const TensorView& view, const AttentionParams& p, const Unit& u,
                           int64_t head, int64_t row) {
  int64_t offset = head * view.head_stride + row * view.row_stride;
  for (int64_t d = 0; d < p.batch_dims; ++d) offset += u.index[d] * view.batch_stride[d];
  return static_cast<const char*>(view.data) + offset * size_of(view.dtype);
}

// Addresses of the key or value rows [first, first + count) of the unit's head: where keys lie is
// decided here alone. Returns whether the rows are row_stride apart.
inline bool key_rows(const TensorView& view, const AttentionParams& p, const Unit& u, int64_t group,
                     int64_t first, int64_t count, const char** row) {
  const int64_t head = u.first_head / group, step = view.row_stride * size_of(view.dtype);
  if (!p.pages.table) {
    const char* place = address(view, p, u, head, u.key_start + first);
    for (int64_t i = 0; i < count; ++i) row[i] = place + i * step;
    return true;
  }
  const char* base =
      static_cast<const char*>(view.data) + head * view.head_stride * size_of(view.dtype);
  PagedRows rows(p.pages, u.batch, first);
  const bool even = count <= rows.count();
  for (int64_t i = 0; i < count; rows.next_page()) {
    const int64_t stop = count - i < rows.count() ? count : i + rows.count();
    const char* place = base + rows.offset(view) * size_of(view.dtype);
    for (; i < stop; ++i, place += step) row[i] = place;
  }
  return even;
}

template <class T>
struct LaneTile {
  int64_t count = 0;  // rows, the first `count` lanes; the rest of a vector repeats the last row
  int64_t begin[kLanes<T>];  // visible keys of each lane
  int64_t end[kLanes<T>];
  int64_t heads[kLanes<T>];  // output head and query of each lane
  int64_t queries[kLanes<T>];
  const char* mask_row[kLanes<T>];  // the mask's element for key 0, if there is a mask
  T position[kLanes<T>];            // on the key axis
  T slope[kLanes<T>];               // ALiBi's, if there are any

  int64_t vectors() const {
    return (count + kWidth<T> - 1) / kWidth<T>;
  }  // with any row; the others are unset
  KeyRange keys() const { return {begin[0], end[count - 1]}; }  // seen by any row
};

// Addresses of the tile's rows in a tensor that has a row for every query and output head.
template <class T>
inline void row_addresses(const TensorView& view, const AttentionParams& p, const Unit& u,
                          const LaneTile<T>& tile, const char** row) {
  const int64_t size = size_of(view.dtype), lanes = tile.vectors() * kWidth<T>;
  if (p.heads_per_unit == 1) {  // one head's rows follow each other
    const char* first = address(view, p, u, tile.heads[0], u.query_start + tile.queries[0]);
    const int64_t step = view.row_stride * size;
    for (int64_t lane = 0; lane < lanes; ++lane)
      row[lane] = first + (lane < tile.count ? lane : tile.count - 1) * step;
    return;
  }
  const char* base = address(view, p, u, 0, u.query_start);
  for (int64_t lane = 0; lane < lanes; ++lane) {
    row[lane] =
        base + (tile.heads[lane] * view.head_stride + tile.queries[lane] * view.row_stride) * size;
  }
}

// One number per row (lse, its gradient, delta) into lanes, and back.
template <class T>
inline void read_rows(const TensorView& view, const AttentionParams& p, const Unit& u,
                      const LaneTile<T>& tile, T* lanes) {
  const char* row[kLanes<T>];
  row_addresses(view, p, u, tile, row);
  for (int64_t lane = 0; lane < kLanes<T>; ++lane)
    lanes[lane] = lane < tile.count ? load_scalar<T>(row[lane], view.dtype) : T(0);
}
template <class T>
inline void write_rows(const TensorView& view, const AttentionParams& p, const Unit& u,
                       const LaneTile<T>& tile, const T* lanes) {
  const char* row[kLanes<T>];
  row_addresses(view, p, u, tile, row);
  for (int64_t lane = 0; lane < tile.count; ++lane)
    memcpy(const_cast<char*>(row[lane]), &lanes[lane], sizeof(T));
}

// One number per head (sinks, their tangents) into the lanes.
template <class T>
inline void read_heads(const TensorView& view, const AttentionParams& p, const Unit& u,
                       const LaneTile<T>& tile, T* lanes) {
  for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
    const int64_t used = lane < tile.count ? lane : tile.count - 1;
    lanes[lane] = load_scalar<T>(address(view, p, u, tile.heads[used], 0), view.dtype);
  }
}

// Which row is in which lane: queries and heads of the tile from first_row on.
template <class T>
inline void fill_lanes(const AttentionParams& p, const Unit& u, int64_t first_row,
                       LaneTile<T>& tile) {
  // Local copies: the stores below might change what p and u hold, for all that the compiler knows.
  const int64_t left = u.rows(p) - first_row, count = left < kLanes<T> ? left : kLanes<T>,
                heads = p.heads_per_unit, first_head = u.first_head;
  tile.count = count;
  const int64_t lanes = tile.vectors() * kWidth<T>;
  if (heads == 1) {
    for (int64_t lane = 0; lane < lanes; ++lane) {
      tile.queries[lane] = first_row + (lane < count ? lane : count - 1);
      tile.heads[lane] = first_head;
    }
    return;
  }
  int64_t query = first_row / heads, head = first_row % heads;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    tile.queries[lane] = query;
    tile.heads[lane] = first_head + head;
    if (lane + 1 < count && ++head == heads) {
      head = 0;
      ++query;
    }
  }
}

template <class T>
inline void describe_lanes(const AttentionParams& p, const Unit& u, int64_t first_row,
                           LaneTile<T>& tile) {
  fill_lanes(p, u, first_row, tile);
  const Visibility visibility = p.visibility;  // copies again
  const int64_t offset = u.offset, keys = u.seqlen_kv, lanes = tile.vectors() * kWidth<T>;
  for (int64_t lane = 0; lane < lanes; ++lane) {
    const int64_t position = tile.queries[lane] + offset;
    const KeyRange range = visible_keys(visibility, position, keys);
    tile.begin[lane] = range.begin;
    tile.end[lane] = range.end;
    tile.position[lane] = static_cast<T>(position);
  }
  if (p.attn_mask.data) row_addresses(p.attn_mask, p, u, tile, tile.mask_row);
  if (p.alibi_slopes.data) read_heads(p.alibi_slopes, p, u, tile, tile.slope);
}

// The sinks of the lanes' heads, in powers of two.
template <class T>
inline void read_sinks(const AttentionParams& p, const Unit& u, const LaneTile<T>& tile, T* lanes) {
  read_heads(p.sinks, p, u, tile, lanes);
  for (int64_t lane = 0; lane < kLanes<T>; ++lane)
    lanes[lane] = draw_together<T>(lanes[lane]) * kLog2E<T>;
}

// Whether a tile's rows follow each other, `columns` numbers each, without a gap.
inline bool rows_are_dense(const TensorView& view, const AttentionParams& p, int64_t columns) {
  return p.heads_per_unit == 1 && view.row_stride == columns &&
         (columns == 1 || view.column_stride == 1);
}

// The first and second numbers of pairs that follow each other in two vectors, and back.
template <class T, size_t... kLane>
ATTENTION_EXT_INLINE void split_pairs(const T* pairs, T* first, T* second,
                                      std::index_sequence<kLane...>) {
  const Vec<T> low = load(pairs), high = load(pairs + kWidth<T>);
  store(first, Vec<T>(__builtin_shufflevector(low, high, (2 * static_cast<int>(kLane))...)));
  store(second, Vec<T>(__builtin_shufflevector(low, high, (2 * static_cast<int>(kLane) + 1)...)));
}
template <class T, size_t... kLane>
ATTENTION_EXT_INLINE void join_pairs(Vec<T> first, Vec<T> second, T* pairs,
                                     std::index_sequence<kLane...>) {
  constexpr int w = kWidth<T>;
  constexpr auto source = [](size_t place) {
    return static_cast<int>(place / 2 + (place % 2 ? w : 0));
  };
  store(pairs, Vec<T>(__builtin_shufflevector(first, second, source(kLane)...)));
  store(pairs + w, Vec<T>(__builtin_shufflevector(first, second, source(kLane + w)...)));
}

// The two numbers of each row's softmax state; 0 in lanes without a row.
template <class T>
inline void read_state(const AttentionParams& p, const Unit& u, const LaneTile<T>& tile,
                       T* reference, T* sum) {
  const char* row[kLanes<T>];
  row_addresses(p.state, p, u, tile, row);
  const int64_t together = rows_are_dense(p.state, p, 2) ? tile.count / kWidth<T> * kWidth<T> : 0;
  for (int64_t lane = 0; lane < together; lane += kWidth<T>) {
    split_pairs<T>(reinterpret_cast<const T*>(row[lane]), reference + lane, sum + lane,
                   std::make_index_sequence<kWidth<T>>{});
  }
  for (int64_t lane = together; lane < kLanes<T>; ++lane) {
    const T* state = reinterpret_cast<const T*>(row[lane]);
    reference[lane] = lane < tile.count ? state[0] : T(0);
    sum[lane] = lane < tile.count ? state[p.state.column_stride] : T(0);
  }
}

// What a forward leaves of its rows beside the output: lse and the softmax state.
template <class T>
inline void write_statistics(const AttentionParams& p, const Unit& u, const LaneTile<T>& tile,
                             bool drawn, const SoftmaxResult<T>* result) {
  const char *lse_row[kLanes<T>], *state_row[kLanes<T>];
  if (p.lse.data) row_addresses(p.lse, p, u, tile, lse_row);
  if (p.state.data) row_addresses(p.state, p, u, tile, state_row);
  const bool dense = (!p.lse.data || rows_are_dense(p.lse, p, 1)) &&
                     (!p.state.data || rows_are_dense(p.state, p, 2));
  int64_t lane = 0;
  for (; dense && !drawn && lane + kWidth<T> <= tile.count; lane += kWidth<T>) {
    const SoftmaxResult<T>& r = result[lane / kWidth<T>];
    if (p.lse.data) store(reinterpret_cast<T*>(const_cast<char*>(lse_row[lane])), r.lse);
    if (!p.state.data) continue;
    join_pairs<T>(r.reference, r.sum, reinterpret_cast<T*>(const_cast<char*>(state_row[lane])),
                  std::make_index_sequence<kWidth<T>>{});
  }
  for (; lane < tile.count; ++lane) {
    const SoftmaxResult<T>& r = result[lane / kWidth<T>];
    const int64_t i = lane % kWidth<T>;
    const T lse = r.lse[i], state[2] = {r.reference[i], r.sum[i]};
    if (p.lse.data)
      *reinterpret_cast<T*>(const_cast<char*>(lse_row[lane])) = drawn ? draw_apart<T>(lse) : lse;
    if (p.state.data) memcpy(const_cast<char*>(state_row[lane]), state, sizeof(state));
  }
}

// Stages `count` key or value rows from `first` on (stage_rows) of the unit's head.
template <class T>
inline StagedRows<T> stage_keys(const AttentionParams& p, const Unit& u, const TensorView& view,
                                int64_t group, int64_t first, int64_t count, int64_t columns,
                                Stage stage, T* buffer, const char** row) {
  const bool even = key_rows(view, p, u, group, first, count, row);
  return stage_rows<T>(view, {row, count, view.column_stride, columns, view.dtype}, even, stage,
                       buffer);
}

// The segments of keys [first_key, first_key + count). A row may start and end in here once each,
// so there are at most 2 * kLaneVectors + 1 of them, and kLaneVectors times as many pieces of them
// (CellTile::trim).
template <class T>
struct Segments {
  Segment segment[(2 * Tuning::kLaneVectors + 1) * Tuning::kLaneVectors];
  int size = 0;

  Segments() = default;
  Segments(const LaneTile<T>& tile, int64_t first_key, int64_t count) {
    constexpr int w = kWidth<T>;
    const int live = static_cast<int>((tile.count + w - 1) / w);
    const int64_t stop = first_key + count;
    int64_t key = first_key;
    while (key < stop) {
      int first = 0, last = 0;
      while (first < live && tile.end[first * w + w - 1] <= key)
        ++first;                                                  // already past all its keys
      while (last < live && tile.begin[last * w] <= key) ++last;  // has reached its first key
      int64_t next = stop;
      if (first < live && tile.end[first * w + w - 1] < next) next = tile.end[first * w + w - 1];
      if (last < live && tile.begin[last * w] < next) next = tile.begin[last * w];
      if (next <= key) next = stop;
      if (first < last) {
        const bool partial = tile.begin[(last - 1) * w + w - 1] > key || tile.end[first * w] < next;
        segment[size++] = {key - first_key, next - first_key, first, last, partial};
      } else if (first >= live) {
        break;
      }
      key = next;
    }
  }
};

// Longer sums than this are cut into blocks, each summed from 0: the error of a wide head stays
// below that of one of this width.
constexpr int64_t kBlockDepth = 128;
constexpr int64_t kWideBlockDepth = 48;

// out[key][lane] = sum_d rows[key][d] * lanes[d][lane] for the cells of a segment: a product as it
// is. `lanes` starts at the segment's first vector, `out` at the tile's.
template <class T>
inline void product_tile(const StagedRows<T>& rows, const T* lanes, int64_t depth, const Segment& s,
                         T* out, int64_t out_stride) {
  const int64_t most = depth <= kBlockDepth ? kBlockDepth : kWideBlockDepth;
  with_constant<Tuning::kLaneVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
    constexpr int kN = decltype(vectors)::value;
    for_row_blocks<kBlockRows<kN>>(s.begin, s.end, [&](int64_t k, auto count) {
      constexpr int kRows = decltype(count)::value;
      T* block = out + k * out_stride + s.first_vector * kWidth<T>;
      int64_t d = 0;
      do {
        const int64_t width = depth - d < most ? depth - d : most;
        Vec<T> sum[kRows][kN];
        broadcast_rows<T, kRows, kN>(rows.data + k * rows.stride + d, rows.stride,
                                     lanes + d * kLanes<T>, kLanes<T>, width, sum);
#pragma GCC unroll 16
        for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
          for (int v = 0; v < kN; ++v) {
            T* cell = block + i * out_stride + v * kWidth<T>;
            store(cell, d == 0 ? sum[i][v] : load(cell) + sum[i][v]);
          }
        }
        d += most;
      } while (d < depth);
    });
  });
}

// out[column][lane] += sum_k rows[k][column] * cells[k][lane] over the keys of a segment.
template <class T, int kN>
__attribute__((noinline)) void add_transposed_product(const T* rows, int64_t rows_stride,
                                                      int64_t columns, const T* cells,
                                                      int64_t cells_stride, int64_t depth, T* out) {
  for_row_blocks<kBlockRows<kN>>(0, columns,
                                 [=](int64_t c, auto count) __attribute__((always_inline)) {
    broadcast_columns<T, decltype(count)::value, kN>(rows + c, rows_stride, cells, cells_stride,
                                                     depth, out + c * kLanes<T>, kLanes<T>);
  });
}
template <class T>
inline void add_transposed_product(const StagedRows<T>& rows, int64_t columns, const Segment& s,
                                   const T* cells, int64_t cells_stride, T* out) {
  const int64_t first = s.first_vector * kWidth<T>;
  with_constant<Tuning::kLaneVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
    add_transposed_product<T, decltype(vectors)::value>(
        rows.data + s.begin * rows.stride, rows.stride, columns,
        cells + s.begin * cells_stride + first, cells_stride, s.end - s.begin, out + first);
  });
}
