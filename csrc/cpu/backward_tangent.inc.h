// Tangent of the backward in a direction of all inputs and upstream gradients. By the symmetry of
// second derivatives it serves double backward (the direction is the cotangent of the gradients) as
// well as forward over reverse. The first sweep, tangent.inc.h, has given output' and lse'.
//
//   delta' = rowsum(dO' * O) + rowsum(dO * O') - dlse'
//   P' = P * (s' - lse')                    dP = Z * (dO V^T),  dP' = Z * (dO' V^T + dO V'^T)
//   dS' = P' * (dP - delta) + P * (dP' - delta')
//   dU' = score' * dS' + score'' * u' * dS
//   dQ' = scale * (dU' K + dU K')           dK' = scale * (dU'^T Q + dU^T Q')
//   dV' = (Z * P')^T dO + (Z * P)^T dO'     dslope' = -sum dS' * distance
//
// Where these come from and a check against automatic differentiation: tests/test_autograd.py.

template <class T>
class BackwardTangent : public TangentSweep<T> {
 public:
  using Params = TangentParams;
  static const Params& params_of(const TangentParams& c) { return c; }
  static int64_t most_tiles(const TangentParams& c) {
    return BackwardTangent::tiles_that_fit(5 * c.grad.forward.head_dim +
                                           4 * c.grad.forward.value_dim);
  }

  BackwardTangent(const TangentParams& params, void* memory)
      : TangentSweep<T>(params, most_tiles(params), memory), g_(params.grad) {
    const int64_t rows = this->most_rows();
    for (T** x : {&delta_, &delta_tangent_, &lse_tangent_, &slope_sums_})
      *x = arena_.template take<T>(rows);
    for (T** x : {&grad_output_lanes_, &grad_output_tangent_lanes_})
      *x = arena_.template take<T>(rows * p_.value_dim);
    for (T** x : {&query_rows_, &query_tangent_rows_})
      *x = arena_.template take<T>(rows * this->head_padded());
    for (T** x : {&grad_output_rows_, &grad_output_tangent_rows_}) {
      *x = arena_.template take<T>(rows * this->value_padded());
    }
    grad_query_ = arena_.template take<T>(rows * p_.head_dim);
    for (T** x : {&probs_, &probs_tangent_, &grad_scores_, &grad_scores_tangent_}) {
      *x = arena_.template take<T>(rows * kBlock);
    }
    for (T** x : {&finite_key_buffer_, &finite_key_tangent_buffer_}) {
      *x = arena_.template take<T>(kBlock * this->head_padded());
    }
    spare_ = arena_.template take<T>(rows * kBlock);
  }

  static bool sums_in_place(const TangentParams&) { return false; }

  void run(int64_t unit, int64_t first_row, int64_t last_row, T* accumulator) {
    memset(accumulator, 0, KeyAccumulator<T>::size(p_) * sizeof(T));
    const KeyAccumulator<T> sums(p_, accumulator);
    key_sums_ = sums.key;
    value_sums_ = sums.value;
    this->for_super_blocks(unit, first_row, last_row, [&] { super_block(); });
  }

 protected:
  using Base = TangentSweep<T>;
  using Base::arena_;
  using Base::c_;
  using Base::count_;
  using Base::first_key_;
  using Base::kBlock;
  using Base::key_;
  using Base::key_tangent_;
  using Base::kVectors;
  using Base::p_;
  using Base::score_;
  using Base::tile_;
  using Base::tiles_;
  using Base::unit_;

  void super_block() {
    start_mask_rows();
    memset(grad_query_, 0, this->stride() * p_.head_dim * sizeof(T));
    this->for_kv_tiles([&] {
      this->stage_tangent_keys(Stage::kFinite);
      const char* row[kBlock] = {};
      finite_key_ = key_.finite ? key_
                                : this->stage(p_.key, p_.key_group, p_.head_dim, Stage::kFiniteCopy,
                                              finite_key_buffer_, row);
      finite_key_tangent_ = key_tangent_.finite
                                ? key_tangent_
                                : this->stage(c_.tangent.key, p_.key_group, p_.head_dim,
                                              Stage::kFiniteCopy, finite_key_tangent_buffer_, row);
      for (int64_t t = 0; t < tiles_; ++t) lane_tile(t);
      gradients_of_keys();
    });
    for (int64_t t = 0; t < tiles_; ++t) {
      this->write_lanes(g_.grad_query, tile_[t], grad_query_ + t * p_.head_dim * kLanes<T>,
                        p_.head_dim, score_.scale);
      if (g_.delta.data) write_rows(g_.delta, p_, unit_, tile_[t], delta_ + t * kLanes<T>);
      if (c_.delta_tangent.data)
        write_rows(c_.delta_tangent, p_, unit_, tile_[t], delta_tangent_ + t * kLanes<T>);
      if (g_.slope_sums.data)
        write_rows(g_.slope_sums, p_, unit_, tile_[t], slope_sums_ + t * kLanes<T>);
    }
  }

  // Upstream gradients and their tangents as lanes and as rows, Q and Q' as rows, delta and delta'.
  void start_mask_rows() {
    this->start_tangent_rows();
    finite_ = true;
    for (int64_t t = 0; t < tiles_; ++t) {
      const LaneTile<T>& tile = tile_[t];
      const int64_t lanes = t * p_.value_dim * kLanes<T>, row = t * kLanes<T>;
      this->pack_rows(g_.grad_output, tile, p_.value_dim, grad_output_lanes_ + lanes);
      this->pack_rows(c_.grad_output_tangent, tile, p_.value_dim,
                      grad_output_tangent_lanes_ + lanes);
      read_rows(c_.lse_tangent, p_, unit_, tile, lse_tangent_ + row);
      alignas(64) T moved[kLanes<T>];
      alignas(64) T grad_lse[kLanes<T>];
      this->dot_outputs(g_.grad_output, p_.output, tile, delta_ + row);
      this->dot_outputs(c_.grad_output_tangent, p_.output, tile, delta_tangent_ + row);
      this->dot_outputs(g_.grad_output, c_.output_tangent, tile, moved);
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) delta_tangent_[row + lane] += moved[lane];
      read_or_zero(g_.grad_lse, tile, grad_lse);
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) delta_[row + lane] -= grad_lse[lane];
      read_or_zero(c_.grad_lse_tangent, tile, grad_lse);
      for (int64_t lane = 0; lane < kLanes<T>; ++lane) delta_tangent_[row + lane] -= grad_lse[lane];
      const int64_t head = row * this->head_padded(), value = row * this->value_padded();
      finite_ &= this->finite_rows(p_.query, tile, p_.head_dim, query_rows_ + head);
      finite_ &= this->finite_rows(c_.tangent.query, tile, p_.head_dim, query_tangent_rows_ + head);
      finite_ &= this->finite_rows(g_.grad_output, tile, p_.value_dim, grad_output_rows_ + value);
      finite_ &= this->finite_rows(c_.grad_output_tangent, tile, p_.value_dim,
                                   grad_output_tangent_rows_ + value);
    }
    memset(slope_sums_, 0, this->stride() * sizeof(T));
  }
  void start_mask_keys() { this->stage_tangent_keys(Stage::kFinite); }

  void read_or_zero(const TensorView& view, const LaneTile<T>& tile, T* lanes) const {
    if (view.data) {
      read_rows(view, p_, unit_, tile, lanes);
    } else {
      memset(lanes, 0, kLanes<T> * sizeof(T));
    }
  }

  // For MaskGradient: the tangent of dS^T of one lane tile.
  const T* mask_gradient_cells(int64_t t, const CellTile<T>& cells) {
    this->clear_unless_whole(cells, t, grad_scores_tangent_);
    if (!cells.empty()) compute_cells(t, cells, /*before_softcap=*/true);
    return grad_scores_tangent_ + t * kLanes<T>;
  }

  void lane_tile(int64_t t) {
    const CellTile<T> cells = this->cells_of(t);
    for (T* x : {probs_, probs_tangent_, grad_scores_, grad_scores_tangent_})
      this->clear_around(cells, t, x);
    if (cells.empty()) return;
    compute_cells(t, cells, /*before_softcap=*/false);
    const int64_t first = t * kLanes<T>, stride = this->stride();
    T* grad_query = grad_query_ + t * p_.head_dim * kLanes<T>;
    for (int i = 0; i < cells.segments.size; ++i) {
      const Segment& s = cells.segments.segment[i];
      add_transposed_product<T>(finite_key_, p_.head_dim, s, grad_scores_tangent_ + first, stride,
                                grad_query);
      add_transposed_product<T>(finite_key_tangent_, p_.head_dim, s, grad_scores_ + first, stride,
                                grad_query);
    }
    if (!key_.finite) {
      this->add_non_finite_keys(cells, p_.key, this->key_row_, p_.head_dim,
                                grad_scores_tangent_ + first, stride, grad_query);
    }
    if (!key_tangent_.finite) {
      this->add_non_finite_keys(cells, c_.tangent.key, this->key_tangent_row_, p_.head_dim,
                                grad_scores_ + first, stride, grad_query);
    }
    if (finite_) return;
    const int64_t head = t * p_.head_dim * kLanes<T>, value = t * p_.value_dim * kLanes<T>;
    const auto add = [&](const T* lanes, int64_t columns, const T* weight, const KeySums<T>& sums) {
      this->add_non_finite_lanes(cells, lanes, columns, weight + first, stride, sums);
    };
    add(this->query_lanes_ + head, p_.head_dim, grad_scores_tangent_, key_sums_);
    add(this->query_tangent_lanes_ + head, p_.head_dim, grad_scores_, key_sums_);
    add(grad_output_lanes_ + value, p_.value_dim, probs_tangent_, value_sums_);
    add(grad_output_tangent_lanes_ + value, p_.value_dim, probs_, value_sums_);
  }

  // probs_ = Z P, probs_tangent_ = Z P', grad_scores_ = dU, grad_scores_tangent_ = dU' (dS' if
  // before_softcap).
  void compute_cells(int64_t t, const CellTile<T>& cells, bool before_softcap) {
    if (c_.tangent.attn_mask.data)
      this->pack_cells(c_.tangent.attn_mask, cells, this->mask_tangent_);
    const int64_t first = t * kLanes<T>, stride = this->stride();
    for (int i = 0; i < cells.segments.size; ++i) {
      const Segment& s = cells.segments.segment[i];
      const int64_t lane = s.first_vector * kWidth<T>;
      const T* grads = grad_output_lanes_ + t * p_.value_dim * kLanes<T> + lane;
      const T* grads_tangent = grad_output_tangent_lanes_ + t * p_.value_dim * kLanes<T> + lane;
      this->products(t, s, probs_ + first, probs_tangent_ + first, spare_, stride);
      product_tile<T>(this->value_, grads, p_.value_dim, s, grad_scores_ + first, stride);
      this->product_sum(this->value_tangent_, grads, this->value_, grads_tangent, p_.value_dim, s,
                        grad_scores_tangent_ + first, spare_, stride);
      this->for_cells(s, [&](int v, int64_t k) {
        const int64_t place = k * stride + first + v * kWidth<T>, row = first + v * kWidth<T>;
        const Mask<T> visible = cells.visible(v, k);
        const Vec<T> dot = load(probs_ + place), prob = this->prob(cells, dot, t, v, k);
        const ScoreSlope<T> slope = score_slope(score_, dot);
        const Vec<T> moved = load(probs_tangent_ + place), factor = cells.dropout_at(v, k);
        const Vec<T> score_tangent = this->score_tangent(cells, t, v, k, slope.first, moved);
        const Vec<T> prob_tangent =
            keep<T>(visible, prob * (score_tangent - load(lse_tangent_ + row)));
        const Vec<T> centered = load(grad_scores_ + place) * factor - load(delta_ + row);
        const Vec<T> centered_tangent =
            load(grad_scores_tangent_ + place) * factor - load(delta_tangent_ + row);
        Vec<T> grad = keep<T>(visible, prob * centered);
        Vec<T> grad_tangent = keep<T>(visible, prob_tangent * centered + prob * centered_tangent);
        if (score_.alibi) {
          store(slope_sums_ + row,
                fma(-grad_tangent, cells.distance(v, k), load(slope_sums_ + row)));
        }
        if (score_.softcap != T(0) && !before_softcap) {
          grad_tangent = slope.first * grad_tangent + slope.second * (moved * score_.scale) * grad;
          grad_tangent = keep<T>(visible, grad_tangent);
          grad = keep<T>(visible, slope.first * grad);
        }
        store(probs_ + place, prob * factor);
        store(probs_tangent_ + place, prob_tangent * factor);
        store(grad_scores_ + place, grad);
        store(grad_scores_tangent_ + place, grad_tangent);
      });
    }
  }

  void gradients_of_keys() {
    const int64_t stride = this->stride(), head = this->head_padded(), value = this->value_padded();
    for_key_blocks(tile_, tiles_, first_key_, count_,
                   [&](int64_t k, auto rows, int64_t begin, int64_t end) {
      if (begin == end) return;
      const auto add = [&](const T* cells, const T* lanes, int64_t columns,
                           const KeySums<T>& sums) {
        add_product<T, decltype(rows)::value>(cells + k * stride, stride, lanes, columns, begin,
                                              begin, end, columns, sums.factor, /*is_first=*/false,
                                              sums.row(first_key_ + k), sums.stride);
      };
      add(probs_tangent_, grad_output_rows_, value, value_sums_);
      add(probs_, grad_output_tangent_rows_, value, value_sums_);
      add(grad_scores_tangent_, query_rows_, head, key_sums_);
      add(grad_scores_, query_tangent_rows_, head, key_sums_);
    });
  }

  const GradParams& g_;
  KeySums<T> key_sums_{}, value_sums_{};

  // Per lane tile of the super-block; [rows] stands for [tiles][kLanes].
  T *delta_, *delta_tangent_, *lse_tangent_, *slope_sums_;  // [rows]
  T *grad_output_lanes_, *grad_output_tangent_lanes_;       // [tiles][value_dim][kLanes]
  T *query_rows_, *query_tangent_rows_;                     // [rows][head_dim, padded]: finite
  T *grad_output_rows_, *grad_output_tangent_rows_;         // [rows][value_dim, padded]: finite
  T* grad_query_;                                           // [tiles][head_dim][kLanes]
  bool finite_ = true;                                      // all four of the rows above

  // Of the current kv tile.
  StagedRows<T> finite_key_{}, finite_key_tangent_{};
  T *probs_, *probs_tangent_, *grad_scores_, *grad_scores_tangent_;  // [kBlock][rows]
  T* spare_;                                                         // [kBlock][rows]
  T *finite_key_buffer_, *finite_key_tangent_buffer_;                // [kBlock][head_dim, padded]
};
