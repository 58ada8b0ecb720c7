// What every pass over the scores after the forward shares: super-blocks of rows against kv tiles,
// with P recomputed from the softmax state (m, l) of each row. Derived: backward, mask gradient,
// weights, tangents.
//
//   P = 2^(score(scale * Q K^T) * log2(e) - m) / l = exp(score(scale * Q K^T) - lse)
//
// The exponent has the forward's bits, where lse, rounded, would cost digits if scores are large.

// dK or dV (or their tangents) of one unit, whole vectors of columns: in an accumulator or in the
// gradient itself.
template <class T>
struct KeySums {
  T* data;
  int64_t stride;  // between keys
  T factor;        // of every product that is added: the scale in dK

  T* row(int64_t key) const { return data + key * stride; }
  void clear(int64_t first, int64_t last, int64_t columns) const {
    for (int64_t key = first; key < last; ++key) memset(row(key), 0, columns * sizeof(T));
  }
};

// An accumulator: [seqlen_kv][head_dim, padded], then [seqlen_kv][value_dim, padded].
template <class T>
struct KeyAccumulator {
  KeySums<T> key, value;

  KeyAccumulator(const AttentionParams& p, T* memory)
      : key{memory, round_up_to_vector<T>(p.head_dim), static_cast<T>(p.scale)},
        value{memory + p.seqlen_kv * key.stride, round_up_to_vector<T>(p.value_dim), T(1)} {}
  static int64_t size(const AttentionParams& p) {
    return p.seqlen_kv * (round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim));
  }
};

template <class T>
class Sweep {
 public:
  int64_t scratch_bytes() const { return arena_.used(); }

 protected:
  static constexpr int kVectors = Tuning::kLaneVectors;
  static constexpr int kBlock = Tuning::kBackwardBlockKV;

  // Lane tiles of a super-block, when each row takes `columns` numbers.
  static int64_t tiles_that_fit(int64_t columns) {
    const int64_t bytes = (columns + 2 * kBlock) * kLanes<T> * static_cast<int64_t>(sizeof(T));
    return clamp_to(Tuning::kCacheBytes / bytes, 1, Tuning::kBackwardRows / kLanes<T>);
  }

  Sweep(const AttentionParams& params, int64_t most_tiles, void* memory)
      : p_(params), score_(params), most_tiles_(most_tiles), arena_(memory) {
    tile_ = arena_.template take<LaneTile<T>>(most_tiles_);
    reference_ = arena_.template take<T>(most_rows());
    sum_ = arena_.template take<T>(most_rows());
    factor_ = arena_.template take<T>(most_rows());
    query_lanes_ = arena_.template take<T>(most_rows() * p_.head_dim);
    addend_ = arena_.template take<T>(p_.attn_mask.data ? kBlock * kLanes<T> : 0);
    dropout_ = arena_.template take<T>(p_.dropout.probability > 0 ? kBlock * kLanes<T> : 0);
    key_buffer_ = arena_.template take<T>(kBlock * head_padded());
    cells_ = arena_.template take<T>(p_.has_few_rows(FewRows<T>::kMost) ? kBlock * kLanes<T> : 0);
  }

  int64_t most_rows() const { return most_tiles_ * kLanes<T>; }
  int64_t head_padded() const { return round_up_to_vector<T>(p_.head_dim); }
  int64_t value_padded() const { return round_up_to_vector<T>(p_.value_dim); }
  int64_t stride() const { return tiles_ * kLanes<T>; }  // of tiles [key][row of the super-block]
  T* query_of(int64_t t) const { return query_lanes_ + t * p_.head_dim * kLanes<T>; }

  // body() for each super-block of rows [first_row, last_row) of the unit, with its tiles started;
  // super-blocks are of about equal size.
  template <class F>
  void for_super_blocks(int64_t unit, int64_t first_row, int64_t last_row, F&& body) {
    find_unit(p_, unit, unit_);
    for_super_blocks(first_row, last_row, body);
  }
  template <class F>
  void for_super_blocks(int64_t first_row, int64_t last_row, F&& body) {
    if (unit_.rows(p_) < last_row) last_row = unit_.rows(p_);
    for (int64_t row = first_row; row < last_row; row += tiles_ * kLanes<T>) {
      const int64_t left = (last_row - row + kLanes<T> - 1) / kLanes<T>,
                    blocks = (left + most_tiles_ - 1) / most_tiles_;
      tiles_ = (left + blocks - 1) / blocks;
      for (int64_t t = 0; t < tiles_; ++t) start(t, row + t * kLanes<T>);
      if (p_.has_few_rows(FewRows<T>::kMost)) normalize();
      body();
    }
  }

  // body() for each kv tile that the super-block sees, with first_key_, count_ and key_ set.
  template <class F>
  void for_kv_tiles(F&& body) {
    const int64_t first = tile_[0].keys().begin, last = tile_[tiles_ - 1].keys().end;
    const int64_t begin = first > key_limit_.begin ? first : key_limit_.begin;
    const int64_t stop = last < key_limit_.end ? last : key_limit_.end;
    for (int64_t k = begin / kBlock * kBlock; k < stop; k += kBlock) {
      first_key_ = k;
      count_ = stop - k < kBlock ? stop - k : kBlock;
      key_ = stage_keys<T>(p_, unit_, p_.key, p_.key_group, k, count_, p_.head_dim, Stage::kFinite,
                           key_buffer_, key_row_);
      body();
    }
  }

  // The same for all kv tiles, without the limit: what a row's sums need before a stretch of keys
  // is looked at.
  template <class F>
  void for_all_kv_tiles(F&& body) {
    const KeyRange limit = key_limit_;
    key_limit_ = {0, INT64_MAX};
    for_kv_tiles(body);
    key_limit_ = limit;
  }

  // Reads the rows of a lane tile: Q and the softmax state.
  void start(int64_t t, int64_t first_row) {
    LaneTile<T>& tile = tile_[t];
    describe_lanes(p_, unit_, first_row, tile);
    pack_rows(p_.query, tile, p_.head_dim, query_of(t));
    read_state(p_, unit_, tile, reference_ + t * kLanes<T>, sum_ + t * kLanes<T>);
    for (int v = 0; v < kVectors; ++v) set_factor(t * kLanes<T> + v * kWidth<T>);
  }

  // 1 / l, and 0 in rows that have no P.
  void set_factor(int64_t lane) {
    const Vec<T> sum = load(sum_ + lane);
    store(factor_ + lane, keep<T>(sum != T(0), T(1) / sum));
  }

  // The forward of a unit with few rows sums its products in another order; where scores are large
  // that shows in P's last digits, and the rows' factors are set anew from the sums as they are
  // here.
  void normalize() {
    const LaneTile<T>& tile = tile_[0];
    Vec<T> sum[kVectors] = {};
    for_all_kv_tiles([&] {
      const CellTile<T> cells = cells_of(0);
      if (cells.empty()) return;
      for (int i = 0; i < cells.segments.size; ++i) {
        const Segment& s = cells.segments.segment[i];
        product_tile<T>(key_, query_lanes_ + s.first_vector * kWidth<T>, p_.head_dim, s, cells_,
                        kLanes<T>);
        for_cells(s, [&](int v, int64_t k) {
          const Vec<T> x = cells.exponent(score_, load(cells_ + k * kLanes<T> + v * kWidth<T>), v,
                                          k, load(reference_ + v * kWidth<T>));
          sum[v] += keep<T>(cells.visible(v, k), exp2_or_zero<T>(x));
        });
      }
    });
    alignas(64) T sink[kLanes<T>];
    if (p_.sinks.data) read_sinks(p_, unit_, tile, sink);
    for (int v = 0; v < tile.vectors(); ++v) {
      Vec<T> total = sum[v];
      if (p_.sinks.data)
        total += exp2_or_zero<T>(load(sink + v * kWidth<T>) - load(reference_ + v * kWidth<T>));
      store(sum_ + v * kWidth<T>, keep<T>(load(sum_ + v * kWidth<T>) != T(0), total));
      set_factor(v * kWidth<T>);
    }
  }

  // dst[column][lane] in the vectors that hold a row: the tile's rows of a tensor, or 0 if it is
  // absent.
  void pack_rows(const TensorView& view, const LaneTile<T>& tile, int64_t columns, T* dst) const {
    if (!view.data) {
      memset(dst, 0, columns * kLanes<T> * sizeof(T));
      return;
    }
    const char* row[kLanes<T>];
    row_addresses(view, p_, unit_, tile, row);
    pack_lanes<T>({row, tile.count, view.column_stride, columns, view.dtype},
                  tile.vectors() * kWidth<T>, kLanes<T>, dst);
  }

  // lanes[lane] = rowsum(a * b) of two tensors shaped like the output; 0 if one is absent.
  void dot_outputs(const TensorView& a, const TensorView& b, const LaneTile<T>& tile,
                   T* lanes) const {
    memset(lanes, 0, kLanes<T> * sizeof(T));
    if (!a.data || !b.data) return;
    const char *a_row[kLanes<T>], *b_row[kLanes<T>];
    row_addresses(a, p_, unit_, tile, a_row);
    row_addresses(b, p_, unit_, tile, b_row);
    dot_rows<T>({a_row, tile.count, a.column_stride, p_.value_dim, a.dtype},
                {b_row, tile.count, b.column_stride, p_.value_dim, b.dtype}, lanes);
  }

  // dst[key][lane] for the cells of a lane tile: an [L][S] tensor (gradient of the weights, tangent
  // of the mask).
  void pack_cells(const TensorView& view, const CellTile<T>& cells, T* dst) const {
    const char* row[kLanes<T>];
    row_addresses(view, p_, unit_, cells.lanes, row);
    const int64_t skip = (first_key_ + cells.begin) * view.column_stride * size_of(view.dtype);
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) row[lane] += skip;
    pack_lanes<T>({row, cells.lanes.count, view.column_stride, cells.end - cells.begin, view.dtype},
                  kLanes<T>, kLanes<T>, dst + cells.begin * kLanes<T>);
  }

  // Rows for the sums over queries; NaN and infinity are left out and the answer is false. The
  // missing rows of a vector are 0.
  bool finite_rows(const TensorView& view, const LaneTile<T>& tile, int64_t columns, T* dst) const {
    const int64_t padded = round_up_to_vector<T>(columns);
    if (!view.data) {
      memset(dst, 0, kLanes<T> * padded * sizeof(T));
      return true;
    }
    const char* row[kLanes<T>];
    row_addresses(view, p_, unit_, tile, row);
    const Rows rows{row, tile.count, view.column_stride, columns, view.dtype};
    const bool finite = copy_rows<T, false>(rows, dst, padded);
    if (!finite) copy_rows<T, true>(rows, dst, padded);
    const int64_t missing = tile.vectors() * kWidth<T> - tile.count;
    memset(dst + tile.count * padded, 0, missing * padded * sizeof(T));
    return finite;
  }

  // The same for the super-block, read in place where its rows lie well and fill whole vectors.
  StagedRows<T> stage_lanes(const TensorView& view, int64_t columns, T* buffer) const {
    const LaneTile<T>& last = tile_[tiles_ - 1];
    const int64_t count = (tiles_ - 1) * kLanes<T> + last.count;
    if (p_.heads_per_unit == 1 && count % kWidth<T> == 0 &&
        lies_in_vectors<T>(view, columns, 2 * columns)) {
      const char* first =
          address(view, p_, unit_, unit_.first_head, unit_.query_start + tile_[0].queries[0]);
      const T* rows = reinterpret_cast<const T*>(first);
      if (all_finite(rows, view.row_stride, count, columns))
        return {rows, view.row_stride, true, T(0)};
    }
    const int64_t padded = round_up_to_vector<T>(columns);
    bool finite = true;
    for (int64_t t = 0; t < tiles_; ++t) {
      finite &= finite_rows(view, tile_[t], columns, buffer + t * kLanes<T> * padded);
    }
    return {buffer, padded, finite, T(0)};
  }

  // The current kv tile's rows of key, value or their tangents (view), as they are or with 0 for
  // what is not finite; an absent tensor is 0.
  StagedRows<T> stage(const TensorView& view, int64_t group, int64_t columns, Stage stage,
                      T* buffer, const char** row) const {
    if (view.data)
      return stage_keys<T>(p_, unit_, view, group, first_key_, count_, columns, stage, buffer, row);
    const int64_t padded = round_up_to_vector<T>(columns);
    memset(buffer, 0, count_ * padded * sizeof(T));
    return {buffer, padded, true, T(0)};
  }

  // The cells of lane tile t and the current kv tile, with mask and dropout.
  CellTile<T> cells_of(int64_t t) const {
    CellTile<T> cells(tile_[t], first_key_, count_);
    if (cells.empty()) return cells;
    if (p_.attn_mask.data) {
      cells.read_mask(p_.attn_mask, addend_);
      if (cells.empty()) return cells;
    }
    if (p_.dropout.probability > 0) {
      T* const factors = dropout_;
      for_dropout_factors(p_, unit_, cells, [=](int v, int64_t k, Vec<T> factor) {
        store(factors + k * kLanes<T> + v * kWidth<T>, factor);
      });
      cells.dropout = dropout_;
    }
    return cells;
  }

  // P of a cell from its raw product; 0 where hidden, in empty rows and where there is no row.
  ATTENTION_EXT_INLINE Vec<T> prob(const CellTile<T>& cells, Vec<T> dot, int64_t t, int v,
                                   int64_t key) const {
    const int64_t lane = t * kLanes<T> + v * kWidth<T>;
    const Vec<T> factor = load(factor_ + lane);
    const Vec<T> power =
        exp2_or_zero<T>(cells.exponent(score_, dot, v, key, load(reference_ + lane)));
    return keep<T>(cells.visible(v, key) & (factor != T(0)),
                   share<T>(power, load(sum_ + lane), factor));
  }

  // f(v, key) for the vectors of cells of a segment.
  template <class F>
  static ATTENTION_EXT_INLINE void for_cells(const Segment& s, F&& f) {
    for (int64_t k = s.begin; k < s.end; ++k) {
      for (int v = s.first_vector; v < s.last_vector; ++v) f(v, k);
    }
  }

  // The tile's columns of a [key][row] array to 0, unless one segment will fill them all.
  void clear_unless_whole(const CellTile<T>& cells, int64_t t, T* array) const {
    const Segments<T>& s = cells.segments;
    const bool whole = !cells.empty() && s.size == 1 &&
                       s.segment[0].end - s.segment[0].begin == count_ &&
                       s.segment[0].last_vector - s.segment[0].first_vector == kVectors;
    if (!whole) clear(t, array);
  }
  void clear(int64_t t, T* array) const {
    for (int64_t k = 0; k < count_; ++k)
      memset(array + k * stride() + t * kLanes<T>, 0, kLanes<T> * sizeof(T));
  }

  // 0 in the cells that for_key_blocks reads beyond those that a vector's rows see: its blocks of
  // keys begin and end up to so many keys away. All cells that they see are computed, or none,
  // unless a mask cut the segments.
  void clear_around(const CellTile<T>& cells, int64_t t, T* array,
                    int64_t away = kBlockRows<> - 1) const {
    if (cells.trimmed) return clear(t, array);
    const LaneTile<T>& lanes = cells.lanes;
    for (int v = 0; v < lanes.vectors(); ++v) {
      const int64_t begin = clamp_to(lanes.begin[v * kWidth<T>] - first_key_, 0, count_);
      const int64_t end = clamp_to(lanes.end[(v + 1) * kWidth<T> - 1] - first_key_, 0, count_);
      T* column = array + t * kLanes<T> + v * kWidth<T>;
      for (int64_t k = begin > away ? begin - away : 0; k < (cells.empty() ? end : begin); ++k) {
        store(column + k * stride(), Vec<T>{});
      }
      for (int64_t k = end; k < end + away && k < count_; ++k)
        store(column + k * stride(), Vec<T>{});
    }
  }

  // out += (rows left out of a product because they are not finite) for the cells that see them:
  // out[column][lane] += weight[key][lane] * rows[key][column].
  void add_non_finite_keys(const CellTile<T>& cells, const TensorView& view, const char* const* row,
                           int64_t columns, const T* weight, int64_t weight_stride, T* out) const {
    const int64_t step = view.column_stride * size_of(view.dtype);
    for (int64_t k = 0; k < count_; ++k) {
      for (int64_t c = 0; c < columns; ++c) {
        const T x = load_scalar<T>(row[k] + c * step, view.dtype);
        if (x - x == T(0)) continue;
        for (int64_t lane = 0; lane < cells.lanes.count; ++lane) {
          if (cells.cell_visible(lane, k))
            out[c * kLanes<T> + lane] += weight[k * weight_stride + lane] * x;
        }
      }
    }
  }
  // sums[key][column] += factor * weight[key][lane] * lanes[column][lane], lanes that are not
  // finite only.
  void add_non_finite_lanes(const CellTile<T>& cells, const T* lanes, int64_t columns,
                            const T* weight, int64_t weight_stride, const KeySums<T>& sums) const {
    for (int64_t lane = 0; lane < cells.lanes.count; ++lane) {
      for (int64_t c = 0; c < columns; ++c) {
        const T x = lanes[c * kLanes<T> + lane];
        if (x - x == T(0)) continue;
        for (int64_t k = 0; k < count_; ++k) {
          if (cells.cell_visible(lane, k)) {
            sums.row(first_key_ + k)[c] += sums.factor * (weight[k * weight_stride + lane] * x);
          }
        }
      }
    }
  }

  // The tile's rows of a gradient: lanes[column][lane] * factor, in the caller's layout.
  void write_lanes(const TensorView& view, const LaneTile<T>& tile, const T* lanes, int64_t columns,
                   T factor) const {
    alignas(64) T factors[kLanes<T>];
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) factors[lane] = factor;
    const char* row[kLanes<T>];
    row_addresses(view, p_, unit_, tile, row);
    unpack_lanes<T>(lanes, kLanes<T>, factors,
                    {row, tile.count, view.column_stride, columns, view.dtype});
  }

  const AttentionParams& p_;
  const ScoreParams<T> score_;
  const int64_t most_tiles_;
  Arena arena_;
  Unit unit_{};
  int64_t tiles_ = 0;

  // Per lane tile of the super-block; [rows] stands for [tiles][kLanes].
  LaneTile<T>* tile_;  // [tiles]
  T* reference_;       // [rows]: m of the softmax state
  T* sum_;             // [rows]: l
  T* factor_;          // [rows]: 1 / l
  T* query_lanes_;     // [tiles][head_dim][kLanes]

  KeyRange key_limit_{0,
                      INT64_MAX};  // kv tiles outside are left out; begin is a multiple of kBlock

  // Of the current kv tile.
  int64_t first_key_ = 0, count_ = 0;
  StagedRows<T> key_{};
  const char* key_row_[kBlock];
  T* addend_;      // [kBlock][kLanes]: the mask
  T* dropout_;     // [kBlock][kLanes]: factors of dropout
  T* key_buffer_;  // [kBlock][head_dim, padded]
  T* cells_;       // [kBlock][kLanes]: products, for normalize()
};

// f(key, Constant<keys>, first row, last row): the rows of the super-block, in whole vectors, that
// see any key of each block of kKeys keys; first == last if none does.
template <class T, int kKeys = kBlockRows<>, class F>
inline void for_key_blocks(const LaneTile<T>* tile, int64_t tiles, int64_t first_key, int64_t count,
                           F&& f) {
  constexpr int kVectors = Tuning::kLaneVectors;
  const int vectors = static_cast<int>((tiles - 1) * kVectors + tile[tiles - 1].vectors());
  const auto end_of = [&](int v) {
    return tile[v / kVectors].end[(v % kVectors + 1) * kWidth<T> - 1];
  };
  const auto begin_of = [&](int v) { return tile[v / kVectors].begin[v % kVectors * kWidth<T>]; };
  int first = 0, last = 0;
  for_row_blocks<kKeys>(0, count, [&](int64_t k, auto rows) {
    while (first < vectors && end_of(first) <= first_key + k) ++first;
    while (last < vectors && begin_of(last) < first_key + k + decltype(rows)::value) ++last;
    f(k, rows, first * kWidth<T>, (first < last ? last : first) * kWidth<T>);
  });
}
