// Forward: one super-block of rows of one unit against all keys that they see.
//
//   output = softmax(scale * Q K^T + mask) V,   lse = log sum exp        per row
//
// for each kv tile (kBlockKV keys at fixed bounds, read or converted once for the whole super-block):
//   for each lane tile (kLanes rows, queries along the lanes):
//     1. scores      S^T[key][lane] = K Q^T
//     2. modify      x = S * scale * log2(e) + mask - m
//     3. hide        cells outside a row's interval or masked off become exact zeros of P
//     4. softmax     P = 2^x, l += sum P; m moves where it must (online_softmax.inc.h)
//     5. accumulate  acc^T[column][lane] += V^T P^T
// then output = acc / l, transposed back into the caller's layout.
//
// Where |q||k| bounds every score of the tile, no m can move and steps 1 to 4 are one pass with the scores in
// registers; otherwise they are three passes over a tile in the L1 cache, with the same bits for every row.

template <class T>
class Forward {
 public:
  static int64_t most_tiles(const AttentionParams& p) {
    const int64_t bytes = (p.head_dim + p.value_dim) * kLanes<T> * static_cast<int64_t>(sizeof(T));
    const int64_t fit = Tuning::kCacheBytes / (bytes > 0 ? bytes : 1);
    return clamp_to(fit, 1, Tuning::kForwardRows / kLanes<T>);
  }

  Forward(const AttentionParams& params, int64_t tiles, void* memory)
      : p_(params), score_(params.scale), tiles_(tiles), arena_(memory) {
    tile_ = arena_.take<LaneTile<T>>(tiles);
    state_ = arena_.take<SoftmaxState<T>>(tiles * Tuning::kLaneVectors);
    query_bound_ = arena_.take<T>(tiles);
    query_norm2_ = arena_.take<T>(tiles);
    query_ = arena_.take<T>(tiles * p_.head_dim * kLanes<T>);
    acc_ = arena_.take<T>(tiles * p_.value_dim * kLanes<T>);
    probs_ = arena_.take<T>(kBlockKV * kLanes<T>);
    addend_ = arena_.take<T>(p_.attn_mask.data ? kBlockKV * kLanes<T> + kWidth<T> : 0);
    key_buffer_ = arena_.take<T>(kBlockKV * round_up_to_vector<T>(p_.head_dim));
    value_buffer_ = arena_.take<T>(kBlockKV * round_up_to_vector<T>(p_.value_dim));
  }
  int64_t scratch_bytes() const { return arena_.used(); }

  void run(int64_t unit, int64_t first_row) {
    unit_ = unit_of(p_, unit);
    const int64_t left = (p_.rows_per_unit() - first_row + kLanes<T> - 1) / kLanes<T>;
    const int64_t tiles = left < tiles_ ? left : tiles_;
    for (int64_t t = 0; t < tiles; ++t) start(t, first_row + t * kLanes<T>);
    const char* keys = address(p_.key, p_, unit_, unit_.first_head / p_.key_group, 0);
    const char* values = address(p_.value, p_, unit_, unit_.first_head / p_.value_group, 0);
    const int64_t stop = tile_[tiles - 1].keys().end;
    for (int64_t k = tile_[0].keys().begin / kBlockKV * kBlockKV; k < stop; k += kBlockKV) {
      first_key_ = k;
      count_ = stop - k < kBlockKV ? stop - k : kBlockKV;
      const char* row[kBlockKV];
      key_ = stage_rows<T>(p_.key, keys + k * p_.key.row_stride * size_of(p_.key.dtype), count_, p_.head_dim, false,
                           key_buffer_, row);
      value_ = stage_rows<T>(p_.value, values + k * p_.value.row_stride * size_of(p_.value.dtype), count_,
                             p_.value_dim, true, value_buffer_, row);
      for (int64_t t = 0; t < tiles; ++t) attend(t, row);
    }
    for (int64_t t = 0; t < tiles; ++t) finish(t);
  }

 private:
  static constexpr int kVectors = Tuning::kLaneVectors;

  void start(int64_t t, int64_t first_row) {
    LaneTile<T>& tile = tile_[t];
    describe_lanes(p_, unit_, first_row, tile);
    const char* row[kLanes<T>];
    row_addresses(p_.query, p_, unit_, tile, row);
    T* query = query_ + t * p_.head_dim * kLanes<T>;
    pack_lanes<T>({row, tile.count, p_.query.column_stride, p_.head_dim, p_.query.dtype}, kLanes<T>, kLanes<T>, query);
    Vec<T> norm2[kVectors] = {};
    for (int64_t d = 0; d < p_.head_dim; ++d) {
      for (int v = 0; v < kVectors; ++v) {
        const Vec<T> x = load(query + d * kLanes<T> + v * kWidth<T>);
        norm2[v] = fma(x, x, norm2[v]);
      }
    }
    T largest = T(0);
    for (int v = 0; v < kVectors; ++v) {
      const T x = horizontal_max<T>(norm2[v]);
      largest = x > largest || x != x ? x : largest;
      state_[t * kVectors + v] = {Vec<T>{}, Vec<T>{}};
    }
    query_norm2_[t] = largest * score_.scale_log2e * score_.scale_log2e;
    query_bound_[t] = kReach<T>;
    memset(acc_ + t * p_.value_dim * kLanes<T>, 0, p_.value_dim * kLanes<T> * sizeof(T));
  }

  // Steps 1 to 5 for one lane tile and the current kv tile.
  void attend(int64_t t, const char* const* value_row) {
    const LaneTile<T>& tile = tile_[t];
    const Segments<T> segments(tile, first_key_, count_);
    if (segments.size == 0) return;
    const LaneIntervals<T> lanes(tile, first_key_, count_);
    MaskTile mask = MaskTile::kNone;
    if (p_.attn_mask.data) {
      mask = pack_mask(p_, tile, first_key_, segments.segment[0].begin, segments.segment[segments.size - 1].end,
                       addend_);
      if (mask == MaskTile::kAllHidden) return;
    }
    const T bound = query_bound_[t];
    const bool bounded = bound > T(0) && query_norm2_[t] * key_.summary.largest_norm2 <= bound * bound;
    Vec<T> tile_sum[kVectors] = {};
    if (mask == MaskTile::kNone && bounded) {
      for (int s = 0; s < segments.size; ++s) bounded_probs(t, segments.segment[s], lanes, tile_sum);
    } else {
      general_probs(t, segments, lanes, mask, tile_sum);
    }
    for (int v = 0; v < kVectors; ++v) state_[t * kVectors + v].sum += tile_sum[v];
    for (int s = 0; s < segments.size; ++s) accumulate(t, segments.segment[s]);
    if (!value_.summary.finite) add_non_finite_values(t, mask, value_row);
  }

  const T* query_of(int64_t t, const Segment& s) const {
    return query_ + t * p_.head_dim * kLanes<T> + s.first_vector * kWidth<T>;
  }

  // Steps 1 to 4 in one pass: no score of the tile can move a reference.
  void bounded_probs(int64_t t, const Segment& s, const LaneIntervals<T>& lanes, Vec<T>* tile_sum) {
    with_constant<kVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
      if (s.partial) {
        bounded_probs<decltype(vectors)::value, true>(t, s, lanes, tile_sum);
      } else {
        bounded_probs<decltype(vectors)::value, false>(t, s, lanes, tile_sum);
      }
    });
  }
  template <int kN, bool kPartial>
  void bounded_probs(int64_t t, const Segment& s, const LaneIntervals<T>& lanes, Vec<T>* tile_sum) {
    const SoftmaxState<T>* state = state_ + t * kVectors + s.first_vector;
    const T* query = query_of(t, s);
    for_row_blocks(s.begin, s.end, [&](int64_t k, auto rows) {
      constexpr int kRows = decltype(rows)::value;
      Vec<T> dot[kRows][kN];
      broadcast_rows<T, kRows, kN>(key_.data + k * key_.stride, key_.stride, query, kLanes<T>, p_.head_dim, dot);
      Vec<T> sum[kN] = {};
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kN; ++v) {
          Vec<T> x = exp2_bounded(plain_exponent(score_, dot[i][v], state[v].reference));
          if (kPartial) x = keep<T>(lanes.visible(s.first_vector + v, k + i), x);
          store(probs_ + (k + i) * kLanes<T> + (s.first_vector + v) * kWidth<T>, x);
          sum[v] += x;
        }
      }
      for (int v = 0; v < kN; ++v) tile_sum[s.first_vector + v] += sum[v];
    });
  }

  // Steps 1 to 4 in passes over the tile.
  void general_probs(int64_t t, const Segments<T>& segments, const LaneIntervals<T>& lanes, MaskTile mask,
                     Vec<T>* tile_sum) {
    SoftmaxState<T>* state = state_ + t * kVectors;
    Vec<T> largest[kVectors];
    for (int v = 0; v < kVectors; ++v) largest[v] = broadcast(-kInfinity<T>);
    for (int i = 0; i < segments.size; ++i) {
      const Segment& s = segments.segment[i];
      raw_scores(t, s);
      for (int v = s.first_vector; v < s.last_vector; ++v) {
        for (int64_t k = s.begin; k < s.end; ++k) {
          T* cell = probs_ + k * kLanes<T> + v * kWidth<T>;
          Vec<T> x = mask == MaskTile::kMixed
                         ? masked_exponent(score_, load(cell), load(addend_ + k * kLanes<T> + v * kWidth<T>),
                                           state[v].reference)
                         : plain_exponent(score_, load(cell), state[v].reference);
          if (s.partial) x = lanes.visible(v, k) ? x : broadcast(-kInfinity<T>);
          store(cell, x);
          largest[v] = maximum(x, largest[v]);
        }
      }
    }
    for (int v = 0; v < kVectors; ++v) move_reference(t, v, reference_shift(state[v], largest[v]), segments);
    Vec<T> highest = state[0].reference, lowest_negated = -state[0].reference;
    for (int v = 1; v < kVectors; ++v) {
      highest = maximum(state[v].reference, highest);
      lowest_negated = maximum(-state[v].reference, lowest_negated);
    }
    const T low = kReach<T> - horizontal_max<T>(lowest_negated), high = kReach<T> - horizontal_max<T>(highest);
    query_bound_[t] = low < high ? low : high;
    for (int i = 0; i < segments.size; ++i) exponentials(segments.segment[i], tile_sum);
  }

  void raw_scores(int64_t t, const Segment& s) {
    const T* query = query_of(t, s);
    with_constant<kVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
      for_row_blocks(s.begin, s.end, [&](int64_t k, auto rows) {
        constexpr int kRows = decltype(rows)::value, kN = decltype(vectors)::value;
        Vec<T> dot[kRows][kN];
        broadcast_rows<T, kRows, kN>(key_.data + k * key_.stride, key_.stride, query, kLanes<T>, p_.head_dim, dot);
        for (int i = 0; i < kRows; ++i) {
          for (int v = 0; v < kN; ++v) {
            store(probs_ + (k + i) * kLanes<T> + (s.first_vector + v) * kWidth<T>, dot[i][v]);
          }
        }
      });
    });
  }

  // m += shift, and everything that was relative to m follows. Lanes with shift 0 keep their bits.
  void move_reference(int64_t t, int v, Vec<T> shift, const Segments<T>& segments) {
    if (!any(shift != T(0))) return;
    SoftmaxState<T>& state = state_[t * kVectors + v];
    // A shift downwards only happens before anything was added: nothing to rescale.
    const Vec<T> factor = exp2_or_zero<T>(-maximum(shift, Vec<T>{}));
    state.reference += shift;
    state.sum *= factor;
    T* acc = acc_ + t * p_.value_dim * kLanes<T> + v * kWidth<T>;
    for (int64_t c = 0; c < p_.value_dim; ++c) store(acc + c * kLanes<T>, load(acc + c * kLanes<T>) * factor);
    for (int i = 0; i < segments.size; ++i) {
      const Segment& s = segments.segment[i];
      if (v < s.first_vector || v >= s.last_vector) continue;
      for (int64_t k = s.begin; k < s.end; ++k) {
        T* cell = probs_ + k * kLanes<T> + v * kWidth<T>;
        store(cell, load(cell) - shift);
      }
    }
  }

  // In the same order of sums as bounded_probs.
  void exponentials(const Segment& s, Vec<T>* tile_sum) {
    for (int v = s.first_vector; v < s.last_vector; ++v) {
      for_row_blocks(s.begin, s.end, [&](int64_t k, auto rows) {
        Vec<T> sum = {};
#pragma GCC unroll 8
        for (int i = 0; i < decltype(rows)::value; ++i) {
          T* cell = probs_ + (k + i) * kLanes<T> + v * kWidth<T>;
          const Vec<T> x = exp2_or_zero<T>(load(cell));
          store(cell, x);
          sum += x;
        }
        tile_sum[v] += sum;
      });
    }
  }

  // Step 5.
  void accumulate(int64_t t, const Segment& s) {
    const T* probs = probs_ + s.begin * kLanes<T> + s.first_vector * kWidth<T>;
    const T* value = value_.data + s.begin * value_.stride;
    T* acc = acc_ + t * p_.value_dim * kLanes<T> + s.first_vector * kWidth<T>;
    with_constant<kVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
      for_row_blocks(0, p_.value_dim, [&](int64_t c, auto columns) {
        broadcast_columns<T, decltype(columns)::value, decltype(vectors)::value>(
            value + c, value_.stride, probs, kLanes<T>, s.end - s.begin, acc + c * kLanes<T>, kLanes<T>);
      });
    });
  }

  // NaN and infinity were taken for 0 in step 5; the rows that see such a key get its product now.
  void add_non_finite_values(int64_t t, MaskTile mask, const char* const* value_row) {
    const int64_t step = p_.value.column_stride * size_of(p_.value.dtype);
    for (int64_t k = 0; k < count_; ++k) {
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        const T x = load_scalar<T>(value_row[k] + c * step, p_.value.dtype);
        if (x - x == T(0)) continue;
        T* acc = acc_ + (t * p_.value_dim + c) * kLanes<T>;
        for (int64_t lane = 0; lane < tile_[t].count; ++lane) {
          if (cell_visible(tile_[t], lane, first_key_, k, mask, addend_)) acc[lane] += probs_[k * kLanes<T> + lane] * x;
        }
      }
    }
  }

  void finish(int64_t t) {
    const LaneTile<T>& tile = tile_[t];
    alignas(64) T factor[kLanes<T>];
    alignas(64) T lse[kLanes<T>];
    for (int v = 0; v < kVectors; ++v) {
      store(factor + v * kWidth<T>, reciprocal_sum(state_[t * kVectors + v]));
      store(lse + v * kWidth<T>, log_sum_exp(state_[t * kVectors + v]));
    }
    const char* row[kLanes<T>];
    row_addresses(p_.output, p_, unit_, tile, row);
    unpack_lanes<T>(acc_ + t * p_.value_dim * kLanes<T>, kLanes<T>, factor,
                    {row, tile.count, p_.output.column_stride, p_.value_dim, p_.output.dtype});
    T* out = static_cast<T*>(p_.lse) + unit_.batch * p_.num_heads * p_.seqlen_q;
    for (int64_t lane = 0; lane < tile.count; ++lane) {
      out[tile.heads[lane] * p_.seqlen_q + tile.queries[lane]] = lse[lane];
    }
  }

  const AttentionParams& p_;
  const ScoreParams<T> score_;
  const int64_t tiles_;
  Arena arena_;
  Unit unit_{};

  // Per lane tile of the super-block.
  LaneTile<T>* tile_;         // [tiles]
  SoftmaxState<T>* state_;    // [tiles][kVectors]
  T* query_bound_;            // [tiles]: |q||k| up to here moves no reference
  T* query_norm2_;            // [tiles]: largest |q|^2, in powers of two
  T* query_;                  // [tiles][head_dim][kLanes]
  T* acc_;                    // [tiles][value_dim][kLanes]

  // Of the current kv tile.
  int64_t first_key_ = 0, count_ = 0;
  StagedRows<T> key_{}, value_{};
  T* probs_;                  // [kBlockKV][kLanes]: raw scores, exponents, then P^T
  T* addend_;                 // [kBlockKV][kLanes]: the mask
  T* key_buffer_;             // [kBlockKV][head_dim, padded]
  T* value_buffer_;           // [kBlockKV][value_dim, padded]
};
