// Backward: all gradients of one unit for one part of its rows, super-block by super-block.
//
//   P  = exp(score(scale * Q K^T) - lse)        delta = rowsum(P * dP) - dlse = rowsum(dO * O) +
//   rowsum(P * dW) - dlse dP = Z * (dO V^T) + dW                      Z: dropout's factors, dW:
//   gradient of the weights dS = P * (dP - delta)                       dU = score'(scale * Q K^T)
//   * dS dV += (Z * P)^T dO      dK += scale * dU^T Q      dQ += scale * dU K      dslope = -sum dS
//   * distance
//
// for each super-block of rows, for each kv tile, for each lane tile (queries along the lanes, as
// the forward):
//   1. scores      S^T[key][lane] = K Q^T         the forward's step 1
//   2. modify      x = score(S) * log2(e) - m     m and l: the row's softmax state
//   3. hide        P and dS are selected, not multiplied, to 0 outside the visible cells
//   4. softmax     P = 2^x / l                    as the forward's
//   5. gradients   dS^T = P^T * (V dO^T - delta); then dV, dK by rows of keys over the whole
//   super-block,
//                  dQ^T[column][lane] += K^T dU^T
//
// dK and dV of the unit are summed by one owner, rows in order, in the gradients themselves where
// they lie well, else in an accumulator. A unit with many rows is cut into parts of equal work,
// each with an accumulator of its own, that are added in order: whoever computes a part, the sums
// are the same.

template <class T>
class Backward : public Sweep<T> {
 public:
  using Params = GradParams;
  static const Params& params_of(const TangentParams& c) { return c.grad; }
  static int64_t most_tiles(const GradParams& g) {
    return Backward::tiles_that_fit(3 * g.forward.head_dim + 2 * g.forward.value_dim);
  }

  Backward(const GradParams& params, void* memory)
      : Sweep<T>(params.forward, most_tiles(params), memory), g_(params) {
    const int64_t rows = this->most_rows();
    delta_ = arena_.template take<T>(rows);
    delta_sums_ = arena_.template take<T>(kLanes<T>);
    slope_sums_ = arena_.template take<T>(rows);
    grad_output_lanes_ = arena_.template take<T>(rows * p_.value_dim);
    query_buffer_ = arena_.template take<T>(rows * this->head_padded());
    grad_output_buffer_ = arena_.template take<T>(rows * this->value_padded());
    grad_query_ = arena_.template take<T>(rows * p_.head_dim);
    computed_ = arena_.template take<KeyRange>(p_.attn_mask.data ? rows / kWidth<T> : 0);
    probs_ = arena_.template take<T>(rows * kBlock);
    grad_scores_ = arena_.template take<T>(rows * kBlock);
    grad_weights_ = arena_.template take<T>(g_.grad_weights.data ? kBlock * kLanes<T> : 0);
    finite_key_buffer_ = arena_.template take<T>(kBlock * this->head_padded());
    value_buffer_ = arena_.template take<T>(kBlock * this->value_padded());
    const int64_t head = strip_width(this->head_padded() / kWidth<T>);
    const int64_t value = strip_width(this->value_padded() / kWidth<T>);
    widest_ = head > value ? head : value;
    with_constant<kVectors>(widest_,
                            [&](auto widest) { key_block_ = kBlockRows<decltype(widest)::value>; });
  }

  // Whether dK and dV can be summed where the caller wants them.
  static bool sums_in_place(const GradParams& g) {
    const AttentionParams& p = g.forward;
    return lies_in_vectors<T>(g.grad_key, p.head_dim, 2 * p.head_dim) &&
           lies_in_vectors<T>(g.grad_value, p.value_dim, 2 * p.value_dim);
  }

  // Overwrites the accumulator, or without one the unit's dK and dV, with the sums over rows
  // [first_row, last_row), and writes these rows' results.
  void run(int64_t unit, int64_t first_row, int64_t last_row, T* accumulator) {
    find_unit(p_, unit, unit_);
    if (accumulator) {
      const KeyAccumulator<T> sums(p_, accumulator);
      key_sums_ = sums.key;
      value_sums_ = sums.value;
    } else {
      key_sums_ = place(g_.grad_key, g_.grad_key_group, score_.scale);
      value_sums_ = place(g_.grad_value, g_.grad_value_group, T(1));
    }
    summed_keys_ = 0;
    this->for_super_blocks(first_row, last_row, [&] { super_block(); });
    clear_sums(accumulator ? p_.seqlen_kv : keys_with_gradient(p_, unit_));
  }

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
  using Sweep<T>::addend_;
  using Sweep<T>::dropout_;
  using Sweep<T>::kVectors;
  using Sweep<T>::kBlock;

  KeySums<T> place(const TensorView& view, int64_t group, T factor) const {
    const char* first = address(view, p_, unit_, unit_.first_head / group, unit_.key_start);
    return {reinterpret_cast<T*>(const_cast<char*>(first)), view.row_stride, factor};
  }

  void super_block() {
    start_rows();
    memset(grad_query_, 0, this->stride() * p_.head_dim * sizeof(T));
    this->for_kv_tiles([&] {
      start_sums();
      stage_values();
      const char* row[kBlock];
      finite_key_ = key_.finite ? key_
                                : this->stage(p_.key, p_.key_group, p_.head_dim, Stage::kFiniteCopy,
                                              finite_key_buffer_, row);
      for (int64_t t = 0; t < tiles_; ++t) lane_tile(t);
      gradients_of_keys();
    });
    for (int64_t t = 0; t < tiles_; ++t) {
      this->write_lanes(g_.grad_query, tile_[t], grad_query_ + t * p_.head_dim * kLanes<T>,
                        p_.head_dim, score_.scale);
      if (g_.delta.data) write_rows(g_.delta, p_, unit_, tile_[t], delta_ + t * kLanes<T>);
      if (g_.slope_sums.data)
        write_rows(g_.slope_sums, p_, unit_, tile_[t], slope_sums_ + t * kLanes<T>);
    }
  }

  void stage_values() {
    const char* row[kBlock];
    value_ = this->stage(p_.value, p_.value_group, p_.value_dim, Stage::kAsIs, value_buffer_, row);
  }

  // The first sums of a key overwrite what lies there: whole kv tiles that no super-block had
  // before. Keys passed over, and those of a tile that begins or ends elsewhere, get 0 instead.
  void start_sums() {
    const int64_t last = first_key_ + count_;
    first_sums_ = summed_keys_ <= first_key_ && query_rows_.finite && grad_output_rows_.finite;
    clear_sums(first_sums_ ? first_key_ : last);
    if (summed_keys_ < last) summed_keys_ = last;
  }
  void clear_sums(int64_t last_key) {
    if (summed_keys_ >= last_key) return;
    key_sums_.clear(summed_keys_, last_key, this->head_padded());
    value_sums_.clear(summed_keys_, last_key, this->value_padded());
    summed_keys_ = last_key;
  }

  // dO as lanes and as rows, Q as rows, delta.
  void start_rows() {
    query_rows_ = this->stage_lanes(p_.query, p_.head_dim, query_buffer_);
    grad_output_rows_ = this->stage_lanes(g_.grad_output, p_.value_dim, grad_output_buffer_);
    for (int64_t t = 0; t < tiles_; ++t) {
      const LaneTile<T>& tile = tile_[t];
      T* grads = grad_output_lanes_ + t * p_.value_dim * kLanes<T>;
      this->pack_rows(g_.grad_output, tile, p_.value_dim, grads);
      T* delta = delta_ + t * kLanes<T>;
      this->dot_outputs(g_.grad_output, p_.output, tile, delta);
      if (g_.grad_lse.data) {
        alignas(64) T grad_lse[kLanes<T>];
        read_rows(g_.grad_lse, p_, unit_, tile, grad_lse);
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) delta[lane] -= grad_lse[lane];
      }
    }
    memset(slope_sums_, 0, this->stride() * sizeof(T));
    sum_deltas();
  }

  // delta = rowsum(P * dP) - dlse in a sweep of its own, where rowsum(dO * O) will not do: with a
  // gradient of the weights, and in rows of large scores, whose reference moved or whose sum of
  // powers passed 2^20 (an empty row's factor of 0 counts too). There P is near 0 or 1, dP - delta
  // cancels, and only the very same P and dP cancel well.
  void sum_deltas() {
    alignas(64) T grad_lse[kLanes<T>];
    for (int64_t t = 0; t < tiles_; ++t) {
      Mask<T> moved = {};
      for (int v = 0; v < kVectors; ++v) moved |= needs_sweep(t, v);
      if (!any(moved)) continue;
      T* sum = delta_sums_;
      memset(sum, 0, kLanes<T> * sizeof(T));
      this->for_all_kv_tiles([&] {
        stage_values();
        add_deltas(t, sum);
      });
      memset(grad_lse, 0, sizeof(grad_lse));
      if (g_.grad_lse.data) read_rows(g_.grad_lse, p_, unit_, tile_[t], grad_lse);
      for (int v = 0; v < kVectors; ++v) {
        T* delta = delta_ + t * kLanes<T> + v * kWidth<T>;
        store(delta, needs_sweep(t, v) ? load(sum + v * kWidth<T>) - load(grad_lse + v * kWidth<T>)
                                       : load(delta));
      }
    }
  }
  Mask<T> needs_sweep(int64_t t, int v) const {
    if (g_.grad_weights.data) return ~Mask<T>{};
    const int64_t lane = t * kLanes<T> + v * kWidth<T>;
    const Mask<T> large =
        (load(this->reference_ + lane) != T(0)) | (load(this->factor_ + lane) < T(0x1p-20));
    return large & first_lanes<T>(tile_[t].count - v * kWidth<T>);
  }
  void add_deltas(int64_t t, T* sum) {
    const CellTile<T> cells = this->cells_of(t);
    if (cells.empty()) return;
    if (g_.grad_weights.data) this->pack_cells(g_.grad_weights, cells, grad_weights_);
    const int64_t stride = this->stride();
    T* probs = probs_ + t * kLanes<T>;
    T* grad_probs = grad_scores_ + t * kLanes<T>;
    for (int i = 0; i < cells.segments.size; ++i) {
      const Segment& s = cells.segments.segment[i];
      products(t, s, probs, grad_probs);
      this->for_cells(s, [&](int v, int64_t k) {
        const int64_t place = k * stride + v * kWidth<T>;
        const Vec<T> prob = this->prob(cells, load(probs + place), t, v, k);
        const Vec<T> product =
            keep<T>(cells.visible(v, k), prob * grad_prob(cells, load(grad_probs + place), v, k));
        store(sum + v * kWidth<T>, load(sum + v * kWidth<T>) + product);
      });
    }
  }

  // For MaskGradient: per super-block, per kv tile, and the dS^T[key][lane] of one lane tile.
  void start_mask_rows() { start_rows(); }
  void start_mask_keys() { stage_values(); }
  const T* mask_gradient_cells(int64_t t, const CellTile<T>& cells) {
    this->clear_unless_whole(cells, t, grad_scores_);
    if (!cells.empty()) probs_and_grad_scores(t, cells, /*before_softcap=*/true);
    return grad_scores_ + t * kLanes<T>;
  }

  // Steps 1 to 5 for one lane tile; what is left of step 5 sums over the whole super-block.
  void lane_tile(int64_t t) {
    const CellTile<T> cells = this->cells_of(t);
    this->clear_around(cells, t, probs_, key_block_ - 1);
    this->clear_around(cells, t, grad_scores_, key_block_ - 1);
    for (int v = 0; p_.attn_mask.data && v < kVectors; ++v) {
      computed_[t * kVectors + v] = cells.empty() ? KeyRange{0, 0} : cells.keys_of(v);
    }
    if (cells.empty()) return;
    T* grad_query = grad_query_ + t * p_.head_dim * kLanes<T>;
    const T* grad_scores = grad_scores_ + t * kLanes<T>;
    probs_and_grad_scores(t, cells);
    for (int i = 0; i < cells.segments.size; ++i) {
      add_transposed_product<T>(finite_key_, p_.head_dim, cells.segments.segment[i], grad_scores,
                                this->stride(), grad_query);
    }
    if (!key_.finite) {
      this->add_non_finite_keys(cells, p_.key, this->key_row_, p_.head_dim, grad_scores,
                                this->stride(), grad_query);
    }
    if (!query_rows_.finite) {
      this->add_non_finite_lanes(cells, this->query_of(t), p_.head_dim, grad_scores, this->stride(),
                                 key_sums_);
    }
    if (!grad_output_rows_.finite) {
      this->add_non_finite_lanes(cells, grad_output_lanes_ + t * p_.value_dim * kLanes<T>,
                                 p_.value_dim, probs_ + t * kLanes<T>, this->stride(), value_sums_);
    }
  }

  // probs_ = Z * P and grad_scores_ = dU (dS if before_softcap: what a mask's gradient is made of).
  void probs_and_grad_scores(int64_t t, const CellTile<T>& cells, bool before_softcap = false) {
    const bool plain = score_.plain() && !g_.grad_weights.data;
    // In a lane without a row q is 0, and 0 * infinity is not: it must be hidden like a cell
    // outside the interval.
    const auto is_partial = [&](const Segment& s) { return s.partial || !key_.finite; };
    const bool simple = plain && cells.mask == MaskTile::kNone && !cells.dropout &&
                        p_.head_dim <= kBlockDepth && p_.value_dim <= kBlockDepth;
    if (g_.grad_weights.data) this->pack_cells(g_.grad_weights, cells, grad_weights_);
    for (int i = 0; i < cells.segments.size; ++i) {
      const Segment& s = cells.segments.segment[i];
      if (simple) {
        with_constant<kVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
          with_flag(is_partial(s), [&](auto partial) {
            simple_cells<decltype(vectors)::value, decltype(partial)::value>(t, s, cells);
          });
        });
        continue;
      }
      products(t, s, probs_ + t * kLanes<T>, grad_scores_ + t * kLanes<T>);
      if (plain) {
        with_flag(is_partial(s), [&](auto partial) {
          with_flag(cells.mask == MaskTile::kMixed, [&](auto masked) {
            with_flag(cells.dropout != nullptr, [&](auto dropout) {
              plain_cells<decltype(partial)::value, decltype(masked)::value,
                          decltype(dropout)::value>(t, s, cells);
            });
          });
        });
      } else {
        general_cells(t, s, cells, before_softcap);
      }
    }
  }

  // In registers: a plain score, hidden by the interval alone.
  template <int kN, bool kPartial>
  void simple_cells(int64_t t, const Segment& s, const CellTile<T>& cells) {
    // Local copies: the stores below might change members, for all that the compiler knows.
    const int first_vector = s.first_vector;
    const int64_t first = first_vector * kWidth<T>, lane = t * kLanes<T> + first,
                  stride = this->stride();
    const T* const query = this->query_of(t) + first;
    const T* const grad_output = grad_output_lanes_ + t * p_.value_dim * kLanes<T> + first;
    const T* const references = this->reference_ + lane;
    const T* const sums = this->sum_ + lane;
    const T* const factors = this->factor_ + lane;
    const T* const deltas = delta_ + lane;
    T* const __restrict probs = probs_ + lane;
    T* const __restrict grad_scores = grad_scores_ + lane;
    const StagedRows<T> key = key_, value = value_;
    const ScoreParams<T> score = score_;
    const int64_t head_dim = p_.head_dim, value_dim = p_.value_dim;
    for_row_blocks<kBlockRows<kN>>(s.begin, s.end,
                                   [&](int64_t k, auto rows) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value;
      Vec<T> sum[kRows][kN];
      broadcast_rows<T, kRows, kN>(key.data + k * key.stride, key.stride, query, kLanes<T>,
                                   head_dim, sum);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kN; ++v) {
          const Vec<T> reference = load(references + v * kWidth<T>);
          const Vec<T> power = exp2_or_zero<T>(plain_exponent(score, sum[i][v], reference));
          Vec<T> x = share<T>(power, load(sums + v * kWidth<T>), load(factors + v * kWidth<T>));
          if (kPartial) x = keep<T>(cells.intervals.visible(first_vector + v, k + i), x);
          store(probs + (k + i) * stride + v * kWidth<T>, x);
        }
      }
      broadcast_rows<T, kRows, kN>(value.data + k * value.stride, value.stride, grad_output,
                                   kLanes<T>, value_dim, sum);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kN; ++v) {
          const int64_t place = (k + i) * stride + v * kWidth<T>;
          Vec<T> x = load(probs + place) * (sum[i][v] - load(deltas + v * kWidth<T>));
          if (kPartial) x = keep<T>(cells.intervals.visible(first_vector + v, k + i), x);
          store(grad_scores + place, x);
        }
      }
    });
  }

  // Q K^T and dO V^T of a segment, as they are.
  void products(int64_t t, const Segment& s, T* dots, T* grad_dots) const {
    const int64_t first = s.first_vector * kWidth<T>;
    product_tile<T>(key_, this->query_of(t) + first, p_.head_dim, s, dots, this->stride());
    product_tile<T>(value_, grad_output_lanes_ + t * p_.value_dim * kLanes<T> + first, p_.value_dim,
                    s, grad_dots, this->stride());
  }
  // dP of a cell.
  ATTENTION_EXT_INLINE Vec<T> grad_prob(const CellTile<T>& cells, Vec<T> dot, int v,
                                        int64_t k) const {
    Vec<T> x = dot * cells.dropout_at(v, k);
    if (g_.grad_weights.data) x += load(grad_weights_ + k * kLanes<T> + v * kWidth<T>);
    return x;
  }

  // From the products: a plain score, with mask and dropout. The same bits as in registers.
  template <bool kPartial, bool kMasked, bool kDropout>
  void plain_cells(int64_t t, const Segment& s, const CellTile<T>& cells) {
    const int64_t stride = this->stride();
    const ScoreParams<T> score = score_;
    for (int v = s.first_vector; v < s.last_vector; ++v) {
      const int64_t first = v * kWidth<T>, lane = t * kLanes<T> + first;
      const Vec<T> reference = load(this->reference_ + lane), sum = load(this->sum_ + lane);
      const Vec<T> factor = load(this->factor_ + lane), delta = load(delta_ + lane);
      const Mask<T> some = factor != T(0);  // no empty row
      const T* const __restrict addends = addend_ + first;
      const T* const __restrict kept = dropout_ + first;
      T* const __restrict probs = probs_ + lane;
      T* const __restrict grad_scores = grad_scores_ + lane;
      for (int64_t k = s.begin; k < s.end; ++k) {
        Vec<T> x = plain_exponent(score, load(probs + k * stride), reference),
               grad = load(grad_scores + k * stride);
        Mask<T> visible = some;
        if (kPartial) visible &= cells.intervals.visible(v, k);
        if (kMasked) {
          const Vec<T> addend = load(addends + k * kLanes<T>);
          visible &= addend != -kInfinity<T>;
          x += addend;
        }
        Vec<T> prob = share<T>(exp2_or_zero<T>(x), sum, factor);
        if (kPartial || kMasked) prob = keep<T>(visible, prob);
        if (kDropout) grad *= load(kept + k * kLanes<T>);
        grad = prob * (grad - delta);
        if (kPartial || kMasked) grad = keep<T>(visible, grad);
        if (kDropout) prob *= load(kept + k * kLanes<T>);
        store(probs + k * stride, prob);
        store(grad_scores + k * stride, grad);
      }
    }
  }

  // From the products: every option.
  void general_cells(int64_t t, const Segment& s, const CellTile<T>& cells, bool before_softcap) {
    const int64_t stride = this->stride();
    T* probs = probs_ + t * kLanes<T>;
    T* grad_scores = grad_scores_ + t * kLanes<T>;
    this->for_cells(s, [&](int v, int64_t k) {
      const int64_t place = k * stride + v * kWidth<T>;
      const Vec<T> dot = load(probs + place);
      const Vec<T> prob = this->prob(cells, dot, t, v, k), factor = cells.dropout_at(v, k);
      const Mask<T> visible = cells.visible(v, k);
      const Vec<T> centered = grad_prob(cells, load(grad_scores + place), v, k) -
                              load(delta_ + t * kLanes<T> + v * kWidth<T>);
      Vec<T> grad = keep<T>(visible, prob * centered);
      if (score_.alibi) {
        T* sum = slope_sums_ + t * kLanes<T> + v * kWidth<T>;
        store(sum, fma(-grad, cells.distance(v, k), load(sum)));
      }
      if (score_.softcap != T(0) && !before_softcap)
        grad = keep<T>(visible, grad * score_slope(score_, dot).first);
      store(probs + place, prob * factor);
      store(grad_scores + place, grad);
    });
  }

  // dV += (Z P)^T dO and dK += dU^T Q over the vectors of rows that see a key of the block.
  void gradients_of_keys() {
    with_constant<kVectors>(widest_,
                            [&](auto widest) { gradients_of_keys<decltype(widest)::value>(); });
  }
  template <int kWidest>
  void gradients_of_keys() {
    constexpr int kKeys = kBlockRows<kWidest>;
    for_key_blocks<T, kKeys>(tile_, tiles_, first_key_, count_,
                             [&](int64_t k, auto rows, int64_t begin, int64_t end) {
      constexpr int kRows = decltype(rows)::value;
      const int64_t first = begin;
      if (p_.attn_mask.data) leave_out_hidden(k, k + kRows, begin, end);
      if (begin == end && !first_sums_) return;
      const auto add = [&](const T* cells, const StagedRows<T>& lanes, int64_t columns,
                           const KeySums<T>& sums) {
        add_product<T, kRows, kWidest>(cells + k * this->stride(), this->stride(), lanes.data,
                                       lanes.stride, first, begin, end, columns, sums.factor,
                                       first_sums_, sums.row(first_key_ + k), sums.stride);
      };
      add(probs_, grad_output_rows_, this->value_padded(), value_sums_);
      add(grad_scores_, query_rows_, this->head_padded(), key_sums_);
    });
  }

  // Narrows rows [begin, end) by vectors at both ends in which no cell of keys [first, last) was
  // computed.
  void leave_out_hidden(int64_t first, int64_t last, int64_t& begin, int64_t& end) const {
    const auto hidden = [&](int64_t row) {
      const KeyRange& keys = computed_[row / kWidth<T>];
      return keys.end <= first || keys.begin >= last;
    };
    while (begin < end && hidden(begin)) begin += kWidth<T>;
    while (begin < end && hidden(end - 1)) end -= kWidth<T>;
  }

  const GradParams& g_;
  KeySums<T> key_sums_{}, value_sums_{};
  int64_t widest_;           // vectors in the widest strip of columns of dK and dV
  int64_t key_block_;        // keys beside each other in these sums: as many as the registers hold
  int64_t summed_keys_ = 0;  // the first keys of both that hold something
  bool first_sums_ = false;  // of the current kv tile's keys

  // Per lane tile of the super-block; [rows] stands for [tiles][kLanes].
  T* delta_;              // [rows]
  T* delta_sums_;         // [kLanes]: deltas of one lane tile, while they are summed
  T* slope_sums_;         // [rows]
  T* grad_output_lanes_;  // [tiles][value_dim][kLanes]
  T* grad_query_;         // [tiles][head_dim][kLanes]
  // Rows of the super-block, in place or in the buffer behind, without what is not finite.
  StagedRows<T> query_rows_{}, grad_output_rows_{};
  T* query_buffer_;        // [rows][head_dim, padded]
  T* grad_output_buffer_;  // [rows][value_dim, padded]

  // Of the current kv tile.
  StagedRows<T> finite_key_{}, value_{};
  KeyRange* computed_;    // [tiles][kVectors]: keys of the computed cells, if there is a mask
  T* probs_;              // [kBlock][rows]
  T* grad_scores_;        // [kBlock][rows]
  T* grad_weights_;       // [kBlock][kLanes]: of one lane tile
  T* finite_key_buffer_;  // [kBlock][head_dim, padded]
  T* value_buffer_;       // [kBlock][value_dim, padded]
};
