// Backward: all gradients of one unit for one part of its rows, super-block by super-block.
//
//   P  = exp(scale * Q K^T + mask - lse)          delta = rowsum(dO * O) - dlse
//   dS = P * (dO V^T - delta)
//   dV += P^T dO      dK += scale * dS^T Q        dQ += scale * dS K
//
// for each super-block of rows, for each kv tile, for each lane tile (queries along the lanes, as the forward):
//   1. scores      S^T[key][lane] = K Q^T         the forward's step 1
//   2. modify      x = S * scale * log2(e) + mask - lse * log2(e)
//   3. hide        P and dS are selected, not multiplied, to 0 outside the visible cells
//   4. softmax     P = 2^x                        the forward's P / l
//   5. gradients   dS^T = P^T * (V dO^T - delta); then dV, dK by rows of keys over the whole super-block,
//                  dQ^T[column][lane] += K^T dS^T
//
// dK and dV of the unit are accumulated in scratch, one owner, rows in order. A unit with many rows is cut into
// parts of fixed size, each with accumulators of its own, that are added in order: whoever computes a part,
// the sums are the same.

template <class T>
class Backward {
 public:
  static int64_t most_tiles(const GradParams& g) {
    const AttentionParams& p = g.forward;
    const int64_t bytes = (3 * p.head_dim + 2 * p.value_dim + 2 * kBlock) * kLanes<T> * static_cast<int64_t>(sizeof(T));
    return clamp_to(Tuning::kCacheBytes / bytes, 1, Tuning::kBackwardRows / kLanes<T>);
  }

  Backward(const GradParams& params, void* memory)
      : g_(params), p_(params.forward), score_(p_.scale), most_tiles_(most_tiles(params)), arena_(memory) {
    const int64_t rows = most_tiles_ * kLanes<T>;
    tile_ = arena_.take<LaneTile<T>>(most_tiles_);
    lse_ = arena_.take<T>(rows);
    delta_ = arena_.take<T>(rows);
    query_lanes_ = arena_.take<T>(rows * p_.head_dim);
    grad_output_lanes_ = arena_.take<T>(rows * p_.value_dim);
    output_lanes_ = arena_.take<T>(kLanes<T> * p_.value_dim);
    query_rows_ = arena_.take<T>(rows * head_padded());
    grad_output_rows_ = arena_.take<T>(rows * value_padded());
    grad_query_ = arena_.take<T>(rows * p_.head_dim);
    probs_ = arena_.take<T>(rows * kBlock);
    grad_scores_ = arena_.take<T>(rows * kBlock);
    addend_ = arena_.take<T>(p_.attn_mask.data ? kBlock * kLanes<T> + kWidth<T> : 0);
    key_buffer_ = arena_.take<T>(kBlock * head_padded());
    finite_key_buffer_ = arena_.take<T>(kBlock * head_padded());
    value_buffer_ = arena_.take<T>(kBlock * value_padded());
  }
  int64_t scratch_bytes() const { return arena_.used(); }

  // dK [seqlen_kv][head_dim, padded], then dV [seqlen_kv][value_dim, padded].
  static int64_t accumulator_size(const AttentionParams& p) {
    return p.seqlen_kv * (round_up_to_vector<T>(p.head_dim) + round_up_to_vector<T>(p.value_dim));
  }

  // Overwrites the accumulator with the sums over rows [first_row, last_row) and writes these rows' dQ.
  void run(int64_t unit, int64_t first_row, int64_t last_row, T* accumulator) {
    unit_ = unit_of(p_, unit);
    memset(accumulator, 0, accumulator_size(p_) * sizeof(T));
    grad_key_ = accumulator;
    grad_value_ = accumulator + p_.seqlen_kv * head_padded();
    for (int64_t row = first_row; row < last_row; row += most_tiles_ * kLanes<T>) {
      const int64_t left = (last_row - row + kLanes<T> - 1) / kLanes<T>;
      tiles_ = left < most_tiles_ ? left : most_tiles_;
      super_block(row);
    }
  }

 private:
  static constexpr int kVectors = Tuning::kLaneVectors;
  static constexpr int kBlock = Tuning::kBackwardBlockKV;
  int64_t head_padded() const { return round_up_to_vector<T>(p_.head_dim); }
  int64_t value_padded() const { return round_up_to_vector<T>(p_.value_dim); }
  int64_t stride() const { return tiles_ * kLanes<T>; }  // of probs_ and grad_scores_

  void super_block(int64_t first_row) {
    queries_finite_ = grad_outputs_finite_ = true;
    for (int64_t t = 0; t < tiles_; ++t) start(t, first_row + t * kLanes<T>);
    memset(grad_query_, 0, stride() * p_.head_dim * sizeof(T));
    const char* keys = address(p_.key, p_, unit_, unit_.first_head / p_.key_group, 0);
    const char* values = address(p_.value, p_, unit_, unit_.first_head / p_.value_group, 0);
    const int64_t stop = tile_[tiles_ - 1].keys().end;
    for (int64_t k = tile_[0].keys().begin / kBlock * kBlock; k < stop; k += kBlock) {
      first_key_ = k;
      count_ = stop - k < kBlock ? stop - k : kBlock;
      const char* row[kBlock];
      value_ = stage_rows<T>(p_.value, values + k * p_.value.row_stride * size_of(p_.value.dtype), count_,
                             p_.value_dim, false, value_buffer_, row);
      const char* first = keys + k * p_.key.row_stride * size_of(p_.key.dtype);
      key_ = stage_rows<T>(p_.key, first, count_, p_.head_dim, false, key_buffer_, row);
      finite_key_ = key_.summary.finite
                        ? key_
                        : stage_rows<T>(p_.key, first, count_, p_.head_dim, true, finite_key_buffer_, row);
      for (int64_t t = 0; t < tiles_; ++t) lane_tile(t, row);
      gradients_of_keys();
    }
    alignas(64) T factor[kLanes<T>];
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) factor[lane] = score_.scale;
    for (int64_t t = 0; t < tiles_; ++t) {
      const char* row[kLanes<T>];
      row_addresses(g_.grad_query, p_, unit_, tile_[t], row);
      unpack_lanes<T>(grad_query_ + t * p_.head_dim * kLanes<T>, kLanes<T>, factor,
                      {row, tile_[t].count, g_.grad_query.column_stride, p_.head_dim, g_.grad_query.dtype});
    }
  }

  // Reads the rows of a lane tile: Q and dO as lanes and as rows, lse and delta.
  void start(int64_t t, int64_t first_row) {
    LaneTile<T>& tile = tile_[t];
    describe_lanes(p_, unit_, first_row, tile);
    const char* row[kLanes<T>];
    row_addresses(p_.query, p_, unit_, tile, row);
    const Rows queries{row, tile.count, p_.query.column_stride, p_.head_dim, p_.query.dtype};
    pack_lanes<T>(queries, kLanes<T>, kLanes<T>, query_lanes_ + t * p_.head_dim * kLanes<T>);
    queries_finite_ = copy_finite(queries, query_rows_ + t * kLanes<T> * head_padded(), head_padded()) && queries_finite_;

    T* delta = delta_ + t * kLanes<T>;
    T* lse = lse_ + t * kLanes<T>;
    for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
      // An empty row, or none at all: no P, whatever the scores are.
      T x = -kInfinity<T>, grad = T(0);
      if (lane < tile.count) {
        const int64_t place = (unit_.batch * p_.num_heads + tile.heads[lane]) * p_.seqlen_q + tile.queries[lane];
        x = static_cast<const T*>(p_.lse)[place];
        if (g_.grad_lse.data) {
          grad = load_scalar<T>(address(g_.grad_lse, p_, unit_, tile.heads[lane], tile.queries[lane]), g_.grad_lse.dtype);
        }
      }
      lse[lane] = x == -kInfinity<T> ? T(1e30) : x * kLog2E<T>;
      delta[lane] = -grad;
    }
    T* grad_lanes = grad_output_lanes_ + t * p_.value_dim * kLanes<T>;
    T* grad_rows = grad_output_rows_ + t * kLanes<T> * value_padded();
    if (!g_.grad_output.data) {
      memset(grad_lanes, 0, kLanes<T> * p_.value_dim * sizeof(T));
      memset(grad_rows, 0, kLanes<T> * value_padded() * sizeof(T));
      return;
    }
    row_addresses(p_.output, p_, unit_, tile, row);
    pack_lanes<T>({row, tile.count, p_.output.column_stride, p_.value_dim, p_.output.dtype}, kLanes<T>, kLanes<T>,
                  output_lanes_);
    row_addresses(g_.grad_output, p_, unit_, tile, row);
    const Rows grads{row, tile.count, g_.grad_output.column_stride, p_.value_dim, g_.grad_output.dtype};
    pack_lanes<T>(grads, kLanes<T>, kLanes<T>, grad_lanes);
    grad_outputs_finite_ = copy_finite(grads, grad_rows, value_padded()) && grad_outputs_finite_;
    for (int v = 0; v < kVectors; ++v) {
      Vec<T> sum = {};
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        sum = fma(load(grad_lanes + c * kLanes<T> + v * kWidth<T>), load(output_lanes_ + c * kLanes<T> + v * kWidth<T>),
                  sum);
      }
      store(delta + v * kWidth<T>, load(delta + v * kWidth<T>) + sum);
    }
  }

  // Rows for the sums over queries; NaN and infinity are left out and the answer is false. Missing rows are 0.
  static bool copy_finite(const Rows& rows, T* dst, int64_t padded) {
    copy_rows<T, false>(rows, dst, padded);
    memset(dst + rows.count * padded, 0, (kLanes<T> - rows.count) * padded * sizeof(T));
    const bool finite = summarize_rows<T>(dst, padded, rows.count, padded).finite;
    if (!finite) copy_rows<T, true>(rows, dst, padded);
    return finite;
  }

  // Steps 1 to 5 for one lane tile; what is left of step 5 sums over the whole super-block.
  void lane_tile(int64_t t, const char* const* key_row) {
    const LaneTile<T>& tile = tile_[t];
    const Segments<T> segments(tile, first_key_, count_);
    T* probs = probs_ + t * kLanes<T>;
    T* grad_scores = grad_scores_ + t * kLanes<T>;
    const bool whole = segments.size == 1 && segments.segment[0].end - segments.segment[0].begin == count_ &&
                       segments.segment[0].last_vector - segments.segment[0].first_vector == kVectors;
    if (!whole) {
      for (int64_t k = 0; k < count_; ++k) {
        memset(probs + k * stride(), 0, kLanes<T> * sizeof(T));
        memset(grad_scores + k * stride(), 0, kLanes<T> * sizeof(T));
      }
    }
    if (segments.size == 0) return;
    MaskTile mask = MaskTile::kNone;
    if (p_.attn_mask.data) {
      mask = pack_mask(p_, tile, first_key_, segments.segment[0].begin, segments.segment[segments.size - 1].end,
                       addend_);
    }
    const LaneIntervals<T> lanes(tile, first_key_, count_);
    for (int i = 0; i < segments.size; ++i) {
      const Segment& s = segments.segment[i];
      with_constant<kVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
        if (s.partial || mask != MaskTile::kNone) {
          probs_and_grad_scores<decltype(vectors)::value, true>(t, s, lanes, mask);
        } else {
          probs_and_grad_scores<decltype(vectors)::value, false>(t, s, lanes, mask);
        }
      });
      gradient_of_queries(t, s);
    }
    if (!key_.summary.finite) add_non_finite_keys(t, mask, key_row);
    if (!queries_finite_ || !grad_outputs_finite_) add_non_finite_rows(t, mask);
  }

  template <int kN, bool kHide>
  void probs_and_grad_scores(int64_t t, const Segment& s, const LaneIntervals<T>& lanes, MaskTile mask) {
    const int64_t first = s.first_vector * kWidth<T>, lane = t * kLanes<T> + first;
    const T* query = query_lanes_ + t * p_.head_dim * kLanes<T> + first;
    const T* grad_output = grad_output_lanes_ + t * p_.value_dim * kLanes<T> + first;
    for_row_blocks(s.begin, s.end, [&](int64_t k, auto rows) {
      constexpr int kRows = decltype(rows)::value;
      Vec<T> sum[kRows][kN];
      broadcast_rows<T, kRows, kN>(key_.data + k * key_.stride, key_.stride, query, kLanes<T>, p_.head_dim, sum);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kN; ++v) {
          const Vec<T> lse = load(lse_ + lane + v * kWidth<T>);
          Vec<T> x = plain_exponent(score_, sum[i][v], lse);
          if (kHide && mask != MaskTile::kNone) {
            x = masked_exponent(score_, sum[i][v], load(addend_ + (k + i) * kLanes<T> + first + v * kWidth<T>), lse);
          }
          x = exp2_or_zero<T>(x);
          if (kHide) x = keep<T>(lanes.visible(s.first_vector + v, k + i), x);
          store(probs_ + (k + i) * stride() + lane + v * kWidth<T>, x);
        }
      }
      broadcast_rows<T, kRows, kN>(value_.data + k * value_.stride, value_.stride, grad_output, kLanes<T>,
                                   p_.value_dim, sum);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kN; ++v) {
          const int64_t place = (k + i) * stride() + lane + v * kWidth<T>;
          Vec<T> x = load(probs_ + place) * (sum[i][v] - load(delta_ + lane + v * kWidth<T>));
          if (kHide) {
            Mask<T> visible = lanes.visible(s.first_vector + v, k + i);
            if (mask != MaskTile::kNone) {
              visible &= load(addend_ + (k + i) * kLanes<T> + first + v * kWidth<T>) != -kInfinity<T>;
            }
            x = keep<T>(visible, x);
          }
          store(grad_scores_ + place, x);
        }
      }
    });
  }

  // dQ^T += K^T dS^T
  void gradient_of_queries(int64_t t, const Segment& s) {
    const int64_t first = s.first_vector * kWidth<T>;
    const T* grad_scores = grad_scores_ + s.begin * stride() + t * kLanes<T> + first;
    const T* key = finite_key_.data + s.begin * finite_key_.stride;
    T* out = grad_query_ + t * p_.head_dim * kLanes<T> + first;
    with_constant<kVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
      for_row_blocks(0, p_.head_dim, [&](int64_t c, auto columns) {
        broadcast_columns<T, decltype(columns)::value, decltype(vectors)::value>(
            key + c, finite_key_.stride, grad_scores, stride(), s.end - s.begin, out + c * kLanes<T>, kLanes<T>);
      });
    });
  }

  // dV += P^T dO and dK += dS^T Q over the vectors of rows that see a key of the block.
  void gradients_of_keys() {
    const int vectors = static_cast<int>(tiles_) * kVectors;
    const auto end_of = [&](int v) { return tile_[v / kVectors].end[(v % kVectors + 1) * kWidth<T> - 1]; };
    const auto begin_of = [&](int v) { return tile_[v / kVectors].begin[v % kVectors * kWidth<T>]; };
    int first = 0, last = 0;
    for_row_blocks(0, count_, [&](int64_t k, auto rows) {
      constexpr int kRows = decltype(rows)::value;
      while (first < vectors && end_of(first) <= first_key_ + k) ++first;
      while (last < vectors && begin_of(last) < first_key_ + k + kRows) ++last;
      if (first >= last) return;
      const int64_t begin = first * kWidth<T>, end = last * kWidth<T>, row = first_key_ + k;
      add_product<T, kRows>(probs_ + k * stride(), stride(), grad_output_rows_, value_padded(), begin, end,
                            value_padded(), grad_value_ + row * value_padded(), value_padded());
      add_product<T, kRows>(grad_scores_ + k * stride(), stride(), query_rows_, head_padded(), begin, end,
                            head_padded(), grad_key_ + row * head_padded(), head_padded());
    });
  }

  // NaN and infinity were left out of the products; the cells that see them get theirs now.
  void add_non_finite_keys(int64_t t, MaskTile mask, const char* const* key_row) {
    const int64_t step = p_.key.column_stride * size_of(p_.key.dtype);
    for (int64_t k = 0; k < count_; ++k) {
      for (int64_t c = 0; c < p_.head_dim; ++c) {
        const T x = load_scalar<T>(key_row[k] + c * step, p_.key.dtype);
        if (x - x == T(0)) continue;
        T* out = grad_query_ + (t * p_.head_dim + c) * kLanes<T>;
        for (int64_t lane = 0; lane < tile_[t].count; ++lane) {
          if (cell_visible(tile_[t], lane, first_key_, k, mask, addend_)) {
            out[lane] += grad_scores_[k * stride() + t * kLanes<T> + lane] * x;
          }
        }
      }
    }
  }
  void add_non_finite_rows(int64_t t, MaskTile mask) {
    if (!queries_finite_) {
      add_non_finite_lanes(t, mask, query_lanes_ + t * p_.head_dim * kLanes<T>, p_.head_dim, grad_scores_, grad_key_,
                           head_padded());
    }
    if (!grad_outputs_finite_) {
      add_non_finite_lanes(t, mask, grad_output_lanes_ + t * p_.value_dim * kLanes<T>, p_.value_dim, probs_,
                           grad_value_, value_padded());
    }
  }
  void add_non_finite_lanes(int64_t t, MaskTile mask, const T* lanes, int64_t columns, const T* weight, T* out,
                            int64_t padded) {
    for (int64_t lane = 0; lane < tile_[t].count; ++lane) {
      for (int64_t c = 0; c < columns; ++c) {
        const T x = lanes[c * kLanes<T> + lane];
        if (x - x == T(0)) continue;
        for (int64_t k = 0; k < count_; ++k) {
          if (cell_visible(tile_[t], lane, first_key_, k, mask, addend_)) {
            out[(first_key_ + k) * padded + c] += weight[k * stride() + t * kLanes<T> + lane] * x;
          }
        }
      }
    }
  }

  const GradParams& g_;
  const AttentionParams& p_;
  const ScoreParams<T> score_;
  const int64_t most_tiles_;
  Arena arena_;
  Unit unit_{};
  int64_t tiles_ = 0;

  // Per lane tile of the super-block; [rows] stands for [tiles][kLanes].
  LaneTile<T>* tile_;           // [tiles]
  T* lse_;                      // [rows]: powers of two
  T* delta_;                    // [rows]
  T* query_lanes_;              // [tiles][head_dim][kLanes]
  T* grad_output_lanes_;        // [tiles][value_dim][kLanes]
  T* output_lanes_;             // [value_dim][kLanes]: of one lane tile
  T* query_rows_;               // [rows][head_dim, padded]: finite
  T* grad_output_rows_;         // [rows][value_dim, padded]: finite
  T* grad_query_;               // [tiles][head_dim][kLanes]
  bool queries_finite_ = true, grad_outputs_finite_ = true;

  // Of the current kv tile.
  int64_t first_key_ = 0, count_ = 0;
  StagedRows<T> key_{}, finite_key_{}, value_{};
  T* probs_;                    // [kBlock][rows]
  T* grad_scores_;              // [kBlock][rows]
  T* addend_;                   // [kBlock][kLanes]: the mask
  T* key_buffer_;               // [kBlock][head_dim, padded]
  T* finite_key_buffer_;
  T* value_buffer_;             // [kBlock][value_dim, padded]
  T* grad_key_ = nullptr;       // [seqlen_kv][head_dim, padded]
  T* grad_value_ = nullptr;     // [seqlen_kv][value_dim, padded]
};
