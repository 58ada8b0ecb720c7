// Tangent of the forward (forward mode) in a direction of all inputs: one sweep over the key tiles.
//
//   u' = scale * (Q' K^T + Q K'^T),  s' = score'(u) * u' + mask' - slope' * distance
//   lse' = sum P * s' + P_sink * sink'
//   output' = sum (Z * P * s') V + sum (Z * P) V' - lse' * output
//
// TangentSweep, what this shares with backward_tangent.inc.h, gives u' and s' of a lane tile.

template <class T>
class TangentSweep : public Sweep<T> {
 protected:
  using Sweep<T>::p_;
  using Sweep<T>::score_;
  using Sweep<T>::arena_;
  using Sweep<T>::unit_;
  using Sweep<T>::tile_;
  using Sweep<T>::tiles_;
  using Sweep<T>::first_key_;
  using Sweep<T>::count_;
  using Sweep<T>::key_;
  using Sweep<T>::kBlock;

  TangentSweep(const TangentParams& params, int64_t most_tiles, void* memory)
      : Sweep<T>(params.grad.forward, most_tiles, memory), c_(params) {
    query_tangent_lanes_ = arena_.template take<T>(this->most_rows() * p_.head_dim);
    slope_tangent_ = arena_.template take<T>(this->most_rows());
    key_tangent_buffer_ = arena_.template take<T>(kBlock * this->head_padded());
    value_buffer_ = arena_.template take<T>(kBlock * this->value_padded());
    value_tangent_buffer_ = arena_.template take<T>(kBlock * this->value_padded());
    mask_tangent_ = arena_.template take<T>(c_.tangent.attn_mask.data ? kBlock * kLanes<T> : 0);
  }

  T* query_tangent_of(int64_t t) const {
    return query_tangent_lanes_ + t * p_.head_dim * kLanes<T>;
  }

  void start_tangent_rows() {
    for (int64_t t = 0; t < tiles_; ++t) {
      this->pack_rows(c_.tangent.query, tile_[t], p_.head_dim, query_tangent_of(t));
      if (c_.tangent.alibi_slopes.data) {
        read_heads(c_.tangent.alibi_slopes, p_, unit_, tile_[t], slope_tangent_ + t * kLanes<T>);
      }
    }
  }

  void stage_tangent_keys(Stage values) {
    key_tangent_ = this->stage(c_.tangent.key, p_.key_group, p_.head_dim, Stage::kFinite,
                               key_tangent_buffer_, key_tangent_row_);
    value_ = this->stage(p_.value, p_.value_group, p_.value_dim, values, value_buffer_, value_row_);
    value_tangent_ = this->stage(c_.tangent.value, p_.value_group, p_.value_dim, values,
                                 value_tangent_buffer_, value_tangent_row_);
  }

  // dot[key][lane] = K Q^T and dot_tangent = K' Q^T + K Q'^T, without the scale. `spare` is a tile
  // as well.
  void products(int64_t t, const Segment& s, T* dot, T* dot_tangent, T* spare,
                int64_t stride) const {
    const int64_t first = s.first_vector * kWidth<T>;
    product_tile<T>(key_, this->query_of(t) + first, p_.head_dim, s, dot, stride);
    product_sum(key_tangent_, this->query_of(t) + first, key_, query_tangent_of(t) + first,
                p_.head_dim, s, dot_tangent, spare, stride);
  }
  // out = A x + B y, both with the same depth.
  static void product_sum(const StagedRows<T>& a, const T* x, const StagedRows<T>& b, const T* y,
                          int64_t depth, const Segment& s, T* out, T* spare, int64_t stride) {
    product_tile<T>(a, x, depth, s, out, stride);
    product_tile<T>(b, y, depth, s, spare, stride);
    Sweep<T>::for_cells(s, [&](int v, int64_t k) {
      const int64_t place = k * stride + v * kWidth<T>;
      store(out + place, load(out + place) + load(spare + place));
    });
  }

  // s' of a cell; what hidden cells hold is for the caller to select away.
  ATTENTION_EXT_INLINE Vec<T> score_tangent(const CellTile<T>& cells, int64_t t, int v, int64_t k,
                                            Vec<T> first_slope, Vec<T> dot_tangent) const {
    Vec<T> x = first_slope * (dot_tangent * score_.scale);
    if (c_.tangent.attn_mask.data) x += load(mask_tangent_ + k * kLanes<T> + v * kWidth<T>);
    if (c_.tangent.alibi_slopes.data) {
      x -= load(slope_tangent_ + t * kLanes<T> + v * kWidth<T>) * cells.distance(v, k);
    }
    return x;
  }

  const TangentParams& c_;

  T* query_tangent_lanes_;  // [tiles][head_dim][kLanes]
  T* slope_tangent_;        // [rows]

  // Of the current kv tile.
  StagedRows<T> key_tangent_{}, value_{}, value_tangent_{};
  const char* key_tangent_row_[kBlock];
  const char* value_row_[kBlock];
  const char* value_tangent_row_[kBlock];
  T* key_tangent_buffer_;  // [kBlock][head_dim, padded]
  T* value_buffer_;        // [kBlock][value_dim, padded]
  T* value_tangent_buffer_;
  T* mask_tangent_;  // [kBlock][kLanes]: of one lane tile
};

template <class T>
class Tangent : public TangentSweep<T> {
 public:
  static int64_t most_tiles(const TangentParams& c) {
    return Tangent::tiles_that_fit(2 * c.grad.forward.head_dim + c.grad.forward.value_dim);
  }

  Tangent(const TangentParams& params, void* memory)
      : TangentSweep<T>(params, most_tiles(params), memory) {
    acc_ = arena_.template take<T>(this->most_rows() * p_.value_dim);
    output_lanes_ = arena_.template take<T>(kLanes<T> * p_.value_dim);
    lse_tangent_ = arena_.template take<T>(this->most_rows());
    for (T*& tile : cell_) tile = arena_.template take<T>(kBlock * kLanes<T>);
  }

  void run(int64_t unit, int64_t first_row) {
    this->for_super_blocks(unit, first_row, first_row + this->most_rows(), [&] {
      this->start_tangent_rows();
      memset(acc_, 0, this->stride() * p_.value_dim * sizeof(T));
      memset(lse_tangent_, 0, this->stride() * sizeof(T));
      this->for_kv_tiles([&] {
        this->stage_tangent_keys(Stage::kFiniteCopy);
        for (int64_t t = 0; t < this->tiles_; ++t) lane_tile(t);
      });
      for (int64_t t = 0; t < this->tiles_; ++t) finish(t);
    });
  }

 private:
  using Base = TangentSweep<T>;
  using Base::arena_;
  using Base::c_;
  using Base::kBlock;
  using Base::p_;
  using Base::score_;
  using Base::unit_;

  void lane_tile(int64_t t) {
    const CellTile<T> cells = this->cells_of(t);
    if (cells.empty()) return;
    if (c_.tangent.attn_mask.data)
      this->pack_cells(c_.tangent.attn_mask, cells, this->mask_tangent_);
    T *probs = cell_[0], *moved = cell_[1], *spare = cell_[2];
    T* acc = acc_ + t * p_.value_dim * kLanes<T>;
    T* lse_tangent = lse_tangent_ + t * kLanes<T>;
    for (int i = 0; i < cells.segments.size; ++i) {
      const Segment& s = cells.segments.segment[i];
      this->products(t, s, probs, moved, spare, kLanes<T>);
      this->for_cells(s, [&](int v, int64_t k) {
        const int64_t place = k * kLanes<T> + v * kWidth<T>;
        const Vec<T> dot = load(probs + place), prob = this->prob(cells, dot, t, v, k);
        const Vec<T> tangent = this->score_tangent(cells, t, v, k, score_slope(score_, dot).first,
                                                   load(moved + place));
        const Vec<T> product = keep<T>(cells.visible(v, k), prob * tangent),
                     factor = cells.dropout_at(v, k);
        store(lse_tangent + v * kWidth<T>, load(lse_tangent + v * kWidth<T>) + product);
        store(probs + place, prob * factor);
        store(moved + place, product * factor);
      });
      add_transposed_product<T>(this->value_, p_.value_dim, s, moved, kLanes<T>, acc);
      add_transposed_product<T>(this->value_tangent_, p_.value_dim, s, probs, kLanes<T>, acc);
    }
    if (!this->value_.finite) {
      this->add_non_finite_keys(cells, p_.value, this->value_row_, p_.value_dim, moved, kLanes<T>,
                                acc);
    }
    if (!this->value_tangent_.finite) {
      this->add_non_finite_keys(cells, c_.tangent.value, this->value_tangent_row_, p_.value_dim,
                                probs, kLanes<T>, acc);
    }
  }

  void finish(int64_t t) {
    const LaneTile<T>& tile = this->tile_[t];
    T* lse_tangent = lse_tangent_ + t * kLanes<T>;
    if (p_.sinks.data && c_.tangent.sinks.data) {
      alignas(64) T sink[kLanes<T>];
      alignas(64) T direction[kLanes<T>];
      read_sinks(p_, unit_, tile, sink);
      read_heads(c_.tangent.sinks, p_, unit_, tile, direction);
      for (int v = 0; v < tile.vectors(); ++v) {
        const int64_t lane = v * kWidth<T>, row = t * kLanes<T> + lane;
        const Vec<T> share = exp2_or_zero<T>(load(sink + lane) - load(this->reference_ + row)) *
                             load(this->factor_ + row);
        store(lse_tangent + lane, load(lse_tangent + lane) + share * load(direction + lane));
      }
    }
    this->pack_rows(p_.output, tile, p_.value_dim, output_lanes_);
    T* acc = acc_ + t * p_.value_dim * kLanes<T>;
    for (int64_t c = 0; c < p_.value_dim; ++c) {
      for (int v = 0; v < tile.vectors(); ++v) {
        const int64_t place = c * kLanes<T> + v * kWidth<T>;
        store(acc + place, fma(-load(lse_tangent + v * kWidth<T>), load(output_lanes_ + place),
                               load(acc + place)));
      }
    }
    this->write_lanes(c_.output_tangent, tile, acc, p_.value_dim, T(1));
    write_rows(c_.lse_tangent, p_, unit_, tile, lse_tangent);
  }

  T* acc_;           // [tiles][value_dim][kLanes]
  T* output_lanes_;  // [value_dim][kLanes]: of one lane tile
  T* lse_tangent_;   // [rows]
  T* cell_[3];       // [kBlock][kLanes]: Z * P, Z * P * s', a spare one
};
