// Weights: P = exp(score - lse), written out as an [L][S] tensor per head. A second pass after the
// forward, so that asking for them changes nothing else. The tensor comes in as zeros; hidden cells
// stay so.

template <class T>
class Weights : public Sweep<T> {
 public:
  static int64_t most_tiles(const AttentionParams& p) {
    return Weights::tiles_that_fit(p.head_dim);
  }
  Weights(const AttentionParams& p, void* memory) : Sweep<T>(p, most_tiles(p), memory) {
    probs_ = this->arena_.template take<T>(Sweep<T>::kBlock * kLanes<T>);
  }

  void run(const TensorView& weights, int64_t unit, int64_t first_row) {
    this->for_super_blocks(unit, first_row, first_row + this->most_rows(), [&] {
      this->for_kv_tiles([&] {
        for (int64_t t = 0; t < this->tiles_; ++t) lane_tile(weights, t);
      });
    });
  }

 private:
  void lane_tile(const TensorView& weights, int64_t t) {
    const CellTile<T> cells = this->cells_of(t);
    if (cells.empty()) return;
    memset(probs_, 0, this->count_ * kLanes<T> * sizeof(T));
    for (int i = 0; i < cells.segments.size; ++i) {
      const Segment& s = cells.segments.segment[i];
      product_tile<T>(this->key_, this->query_of(t) + s.first_vector * kWidth<T>, this->p_.head_dim,
                      s, probs_, kLanes<T>);
      this->for_cells(s, [&](int v, int64_t k) {
        T* cell = probs_ + k * kLanes<T> + v * kWidth<T>;
        store(cell, this->prob(cells, load(cell), t, v, k));
      });
    }
    alignas(64) T ones[kLanes<T>];
    const char* row[kLanes<T>];
    row_addresses(weights, this->p_, this->unit_, cells.lanes, row);
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      ones[lane] = T(1);
      row[lane] +=
          (this->first_key_ + cells.begin) * weights.column_stride * size_of(weights.dtype);
    }
    unpack_lanes<T>(
        probs_ + cells.begin * kLanes<T>, kLanes<T>, ones,
        {row, cells.lanes.count, weights.column_stride, cells.end - cells.begin, weights.dtype});
  }

  T* probs_;  // [kBlock][kLanes]
};
