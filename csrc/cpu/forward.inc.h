// Forward: one super-block of rows of one unit against all keys that they see.
//
//   output = dropout(softmax(score(scale * Q K^T))) V,   lse = log sum exp(score)        per row
//
// for each kv tile (kBlockKV keys at fixed bounds, read or converted once for the whole
// super-block):
//   for each lane tile (kLanes rows, queries along the lanes):
//     1. scores      S^T[key][lane] = K Q^T
//     2. modify      x = score(S) * log2(e) - m              (score.inc.h)
//     3. hide        cells outside a row's interval or masked off become exact zeros of P
//     4. softmax     P = 2^x, l += sum P; m moves where it must (online_softmax.inc.h)
//     5. accumulate  acc^T[column][lane] += V^T dropout(P^T)
// then output = acc / l, transposed back into the caller's layout.
//
// Where |q||k| and the mask's addends bound every score of the tile and nothing else modifies them,
// no m can move and steps 1 to 4 are one pass with the scores in registers; otherwise they are
// three passes over a tile in the L1 cache, with the same bits for every row.

template <class T>
class Forward {
 public:
  static int64_t most_tiles(const AttentionParams& p) {
    const int64_t bytes = (p.head_dim + p.value_dim) * kLanes<T> * static_cast<int64_t>(sizeof(T));
    const int64_t fit = Tuning::kCacheBytes / (bytes > 0 ? bytes : 1);
    return clamp_to(fit, 1, Tuning::kForwardRows / kLanes<T>);
  }

  Forward(const AttentionParams& params, int64_t tiles, void* memory)
      : p_(params), score_(params), tiles_(tiles), arena_(memory) {
    tile_ = arena_.take<LaneTile<T>>(tiles);
    state_ = arena_.take<SoftmaxState<T>>(tiles * Tuning::kLaneVectors);
    query_bound_ = arena_.take<T>(tiles);
    query_norm2_ = arena_.take<T>(tiles);
    query_ = arena_.take<T>(tiles * p_.head_dim * kLanes<T>);
    acc_ = arena_.take<T>(tiles * p_.value_dim * kLanes<T>);
    probs_ = arena_.take<T>(kBlockKV * kLanes<T>);
    addend_ = arena_.take<T>(p_.attn_mask.data ? kBlockKV * kLanes<T> : 0);
    key_buffer_ = arena_.take<T>(kBlockKV * round_up_to_vector<T>(p_.head_dim));
    value_buffer_ = arena_.take<T>(kBlockKV * round_up_to_vector<T>(p_.value_dim));
  }
  int64_t scratch_bytes() const { return arena_.used(); }

  void run(int64_t unit, int64_t first_row) {
    find_unit(p_, unit, unit_);
    const int64_t left = (unit_.rows(p_) - first_row + kLanes<T> - 1) / kLanes<T>;
    if (left <= 0) return;  // a shorter sequence than the longest
    const int64_t tiles = left < tiles_ ? left : tiles_;
    for (int64_t t = 0; t < tiles; ++t)
      describe_lanes(p_, unit_, first_row + t * kLanes<T>, tile_[t]);
    const int64_t begin = tile_[0].keys().begin / kBlockKV * kBlockKV,
                  stop = tile_[tiles - 1].keys().end;
    for (int64_t t = 0; t < tiles; ++t) start(t);
    for (int64_t k = begin; k < stop; k += kBlockKV) {
      first_key_ = k;
      count_ = stop - k < kBlockKV ? stop - k : kBlockKV;
      staged_ = false;
      for (int64_t t = 0; t < tiles; ++t) attend(t);
    }
    for (int64_t t = 0; t < tiles; ++t) finish(t);
  }

 private:
  static constexpr int kVectors = Tuning::kLaneVectors;

  void start(int64_t t) {
    const LaneTile<T>& tile = tile_[t];
    const char* row[kLanes<T>];
    row_addresses(p_.query, p_, unit_, tile, row);
    T* query = query_ + t * p_.head_dim * kLanes<T>;
    alignas(64) T norm2[kLanes<T>];
    pack_lanes<T>({row, tile.count, p_.query.column_stride, p_.head_dim, p_.query.dtype}, kLanes<T>,
                  kLanes<T>, query, norm2);
    Vec<T> largest = {};
    for (int v = 0; v < kVectors; ++v) {
      const Vec<T> x = load(norm2 + v * kWidth<T>);
      largest = x > largest || x != x ? x : largest;
      state_[t * kVectors + v] = {Vec<T>{}, Vec<T>{}};
    }
    query_norm2_[t] = horizontal_max<T>(largest) * score_.scale_log2e * score_.scale_log2e;
    query_bound_[t] = kReach<T>;
    memset(acc_ + t * p_.value_dim * kLanes<T>, 0, p_.value_dim * kLanes<T> * sizeof(T));
  }

  // The rows of the current kv tile, when the first lane tile needs them.
  void stage() {
    if (staged_) return;
    staged_ = true;
    key_ = stage_keys<T>(p_, unit_, p_.key, p_.key_group, first_key_, count_, p_.head_dim,
                         Stage::kNorm, key_buffer_, value_row_);
    value_ = stage_keys<T>(p_, unit_, p_.value, p_.value_group, first_key_, count_, p_.value_dim,
                           Stage::kFiniteCopy, value_buffer_, value_row_);
  }

  // Steps 1 to 5 for one lane tile and the current kv tile.
  void attend(int64_t t) {
    CellTile<T> cells(tile_[t], first_key_, count_);
    if (cells.empty()) return;
    if (p_.attn_mask.data) {
      cells.read_mask(p_.attn_mask, addend_);
      if (cells.empty()) return;
    }
    stage();
    const T bound = query_bound_[t] - cells.largest_addend;
    const bool bounded = bound > T(0) && query_norm2_[t] * key_.norm2 <= bound * bound;
    Vec<T> tile_sum[kVectors] = {};
    if (bounded && score_.plain() && p_.head_dim <= kBlockDepth) {
      for (int s = 0; s < cells.segments.size; ++s)
        bounded_probs(t, cells.segments.segment[s], cells, tile_sum);
    } else {
      general_probs(t, cells, tile_sum);
    }
    for (int v = 0; v < kVectors; ++v) state_[t * kVectors + v].sum += tile_sum[v];
    if (p_.dropout.probability > 0) drop(cells);
    for (int s = 0; s < cells.segments.size; ++s) {
      add_transposed_product<T>(value_, p_.value_dim, cells.segments.segment[s], probs_, kLanes<T>,
                                acc_ + t * p_.value_dim * kLanes<T>);
    }
    if (!value_.finite) add_non_finite_values(t, cells);
  }

  const T* query_of(int64_t t, const Segment& s) const {
    return query_ + t * p_.head_dim * kLanes<T> + s.first_vector * kWidth<T>;
  }

  // Steps 1 to 4 in one pass: no score of the tile can move a reference.
  void bounded_probs(int64_t t, const Segment& s, const CellTile<T>& cells, Vec<T>* tile_sum) {
    with_constant<kVectors>(s.last_vector - s.first_vector, [&](auto vectors) {
      with_flag(s.partial, [&](auto partial) {
        with_flag(cells.mask == MaskTile::kMixed, [&](auto masked) {
          bounded_probs<decltype(vectors)::value, decltype(partial)::value,
                        decltype(masked)::value>(t, s, cells, tile_sum);
        });
      });
    });
  }
  template <int kN, bool kPartial, bool kMasked>
  __attribute__((noinline)) void bounded_probs(int64_t t, const Segment& s,
                                               const CellTile<T>& cells, Vec<T>* tile_sum) {
    // Local copies: the stores below might change members, for all that the compiler knows.
    const int first_vector = s.first_vector;
    const SoftmaxState<T>* const state = state_ + t * kVectors + first_vector;
    const T* const query = query_of(t, s);
    T* const __restrict probs = probs_ + first_vector * kWidth<T>;
    const T* const __restrict addend = addend_ + first_vector * kWidth<T>;
    Vec<T>* const total = tile_sum + first_vector;
    const StagedRows<T> key = key_;
    const ScoreParams<T> score = score_;
    const int64_t head_dim = p_.head_dim;
    for_row_blocks<kBlockRows<kN>>(s.begin, s.end,
                                   [&](int64_t k, auto rows) __attribute__((always_inline)) {
      constexpr int kRows = decltype(rows)::value;
      Vec<T> dot[kRows][kN];
      broadcast_rows<T, kRows, kN>(key.data + k * key.stride, key.stride, query, kLanes<T>,
                                   head_dim, dot);
      Vec<T> sum[kN];
      for (int v = 0; v < kN; ++v) sum[v] = total[v];
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 4
        for (int v = 0; v < kN; ++v) {
          Vec<T> x = plain_exponent(score, dot[i][v], state[v].reference);
          if (kMasked) {
            x = exp2_or_zero<T>(x + load(addend + (k + i) * kLanes<T> + v * kWidth<T>));
          } else {
            x = exp2_bounded(x);
          }
          if (kPartial) x = keep<T>(cells.intervals.visible(first_vector + v, k + i), x);
          store(probs + (k + i) * kLanes<T> + v * kWidth<T>, x);
          sum[v] += x;
        }
      }
      for (int v = 0; v < kN; ++v) total[v] = sum[v];
    });
  }

  // Steps 1 to 4 in passes over the tile.
  void general_probs(int64_t t, const CellTile<T>& cells, Vec<T>* tile_sum) {
    Vec<T> largest[kVectors];
    exponents(t, cells, largest);
    bool moved = false;
    for (int v = 0; v < kVectors; ++v) moved |= move_reference(t, v, largest[v]);
    if (moved) {
      exponents(t, cells, largest);
      bound_queries(t);
    }
    for (int i = 0; i < cells.segments.size; ++i) powers(cells.segments.segment[i], tile_sum);
  }

  // probs_ = x - m, -infinity where hidden, and the largest of each lane.
  void exponents(int64_t t, const CellTile<T>& cells, Vec<T>* largest) {
    const SoftmaxState<T>* state = state_ + t * kVectors;
    for (int v = 0; v < kVectors; ++v) largest[v] = broadcast(-kInfinity<T>);
    for (int i = 0; i < cells.segments.size; ++i) {
      const Segment& s = cells.segments.segment[i];
      product_tile<T>(key_, query_of(t, s), p_.head_dim, s, probs_, kLanes<T>);
      for (int v = s.first_vector; v < s.last_vector; ++v) {
        for (int64_t k = s.begin; k < s.end; ++k) {
          T* cell = probs_ + k * kLanes<T> + v * kWidth<T>;
          Vec<T> x = cells.exponent(score_, load(cell), v, k, state[v].reference);
          if (s.partial) x = cells.intervals.visible(v, k) ? x : broadcast(-kInfinity<T>);
          store(cell, x);
          largest[v] = maximum(x, largest[v]);
        }
      }
    }
  }

  // m += shift, and everything that was relative to m follows, if some lane's must. Lanes with
  // shift 0 keep their bits.
  bool move_reference(int64_t t, int v, Vec<T> largest) {
    SoftmaxState<T>& state = state_[t * kVectors + v];
    const Vec<T> shift = reference_shift(state, largest);
    if (!any(Mask<T>(shift != T(0)))) return false;
    // A shift downwards only happens before anything was added: nothing to rescale.
    const Vec<T> factor = exp2_or_zero<T>(-maximum(shift, Vec<T>{}));
    state.reference += shift;
    state.sum *= factor;
    T* acc = acc_ + t * p_.value_dim * kLanes<T> + v * kWidth<T>;
    for (int64_t c = 0; c < p_.value_dim; ++c)
      store(acc + c * kLanes<T>, load(acc + c * kLanes<T>) * factor);
    return true;
  }

  // The |q||k| up to which no reference of the lane tile can move.
  void bound_queries(int64_t t) {
    const SoftmaxState<T>* state = state_ + t * kVectors;
    Vec<T> highest = state[0].reference, lowest_negated = -state[0].reference;
    for (int v = 1; v < kVectors; ++v) {
      highest = maximum(state[v].reference, highest);
      lowest_negated = maximum(-state[v].reference, lowest_negated);
    }
    const T low = kReach<T> - horizontal_max<T>(lowest_negated),
            high = kReach<T> - horizontal_max<T>(highest);
    query_bound_[t] = low < high ? low : high;
  }

  // In the order of sums of bounded_probs: key by key.
  void powers(const Segment& s, Vec<T>* tile_sum) {
    for (int v = s.first_vector; v < s.last_vector; ++v) {
      T* const column = probs_ + v * kWidth<T>;
      Vec<T> sum = tile_sum[v];
      for (int64_t k = s.begin; k < s.end; ++k) {
        const Vec<T> x = exp2_or_zero<T>(load(column + k * kLanes<T>));
        store(column + k * kLanes<T>, x);
        sum += x;
      }
      tile_sum[v] = sum;
    }
  }

  // Dropout comes after the sum: the kept weights grow, the denominator stays.
  void drop(const CellTile<T>& cells) {
    T* const probs = probs_;
    for_dropout_factors(p_, unit_, cells, [=](int v, int64_t k, Vec<T> factor) {
      T* cell = probs + k * kLanes<T> + v * kWidth<T>;
      store(cell, load(cell) * factor);
    });
  }

  // NaN and infinity were taken for 0 in step 5; the rows that see such a key get its product now.
  void add_non_finite_values(int64_t t, const CellTile<T>& cells) {
    const int64_t step = p_.value.column_stride * size_of(p_.value.dtype);
    for (int64_t k = 0; k < count_; ++k) {
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        const T x = load_scalar<T>(value_row_[k] + c * step, p_.value.dtype);
        if (x - x == T(0)) continue;
        T* acc = acc_ + (t * p_.value_dim + c) * kLanes<T>;
        for (int64_t lane = 0; lane < tile_[t].count; ++lane) {
          if (cells.cell_visible(lane, k)) acc[lane] += probs_[k * kLanes<T> + lane] * x;
        }
      }
    }
  }

  void finish(int64_t t) {
    const LaneTile<T>& tile = tile_[t];
    alignas(64) T factor[kLanes<T>];
    alignas(64) T sink[kLanes<T>];
    SoftmaxResult<T> result[kVectors];
    if (p_.sinks.data) read_sinks(p_, unit_, tile, sink);
    for (int v = 0; v < kVectors; ++v) {
      const SoftmaxState<T>& state = state_[t * kVectors + v];
      result[v] =
          p_.sinks.data ? softmax_result(state, load(sink + v * kWidth<T>)) : softmax_result(state);
      store(factor + v * kWidth<T>, result[v].output_factor);
    }
    const char* row[kLanes<T>];
    row_addresses(p_.output, p_, unit_, tile, row);
    unpack_lanes<T>(acc_ + t * p_.value_dim * kLanes<T>, kLanes<T>, factor,
                    {row, tile.count, p_.output.column_stride, p_.value_dim, p_.output.dtype});
    write_statistics(p_, unit_, tile, score_.drawn, result);
  }

  const AttentionParams& p_;
  const ScoreParams<T> score_;
  const int64_t tiles_;
  Arena arena_;
  Unit unit_{};

  // Per lane tile of the super-block.
  LaneTile<T>* tile_;       // [tiles]
  SoftmaxState<T>* state_;  // [tiles][kVectors]
  T* query_bound_;          // [tiles]: |q||k| up to here moves no reference
  T* query_norm2_;          // [tiles]: largest |q|^2, in powers of two
  T* query_;                // [tiles][head_dim][kLanes]
  T* acc_;                  // [tiles][value_dim][kLanes]

  // Of the current kv tile.
  int64_t first_key_ = 0, count_ = 0;
  bool staged_ = false;
  StagedRows<T> key_{}, value_{};
  const char* value_row_[kBlockKV];
  T* probs_;         // [kBlockKV][kLanes]: raw scores, exponents, then P^T
  T* addend_;        // [kBlockKV][kLanes]: the mask
  T* key_buffer_;    // [kBlockKV][head_dim, padded]
  T* value_buffer_;  // [kBlockKV][value_dim, padded]
};
