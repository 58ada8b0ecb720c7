// Forward of a unit with few rows against many keys: decoding. At most one vector of rows, so that queries
// along the lanes would waste most of the work: here keys are along the lanes, and K and V are read along the
// head, each row once for all rows of the unit.
//
//   1. scores      S[row][key] = q K^T, vectors along the head, then the sums of one vector of keys at a time
//   2. modify, 3. hide, 4. softmax   as forward.inc.h, for one row and a vector of keys
//   5. accumulate  acc[row][column] += P V, vectors along the head
//
// Keys are cut into chunks at fixed bounds, whoever computes them; partial results (m, l, acc) merge in order.

template <class T>
class FewRows {
 public:
  static constexpr int64_t kTile = 32;       // keys: whole vectors in every instruction set
  static constexpr int64_t kChunk = 1024;    // keys
  static constexpr int kMost = kWidth<T>;    // rows

  FewRows(const AttentionParams& params, void* memory) : p_(params), score_(params), arena_(memory) {
    tile_ = arena_.take<LaneTile<T>>(1);
    query_ = arena_.take<T>(kMost * head_padded());
    sums_ = arena_.take<T>(kMost * kWidth<T> * kWidth<T>);
    dots_ = arena_.take<T>(kMost * kTile);
    probs_ = arena_.take<T>(kMost * kTile);
    key_buffer_ = arena_.take<T>(kTile * head_padded());
    value_buffer_ = arena_.take<T>(kTile * value_padded());
  }
  int64_t scratch_bytes() const { return arena_.used(); }

  static int64_t chunks(const AttentionParams& p) { return p.seqlen_kv > 0 ? (p.seqlen_kv + kChunk - 1) / kChunk : 1; }
  // A partial result is m [kMost], l [kMost] and acc [kMost][value_dim, padded].
  static int64_t partial_size(const AttentionParams& p) { return kMost * (2 + round_up_to_vector<T>(p.value_dim)); }

  void run(int64_t unit, int64_t chunk, T* partial) {
    start(unit);
    const char* row[kLanes<T>];
    row_addresses(p_.query, p_, unit_, *tile_, row);
    copy_rows<T, false>({row, rows_, p_.query.column_stride, p_.head_dim, p_.query.dtype}, query_, head_padded());
    pass(chunk, partial, /*careful=*/false);
    // 0 * NaN of a hidden value, or overflow: once more, with what is not finite apart.
    Vec<T> difference = {};
    for (int64_t i = 0; i < rows_ * value_padded(); i += kWidth<T>) difference += load(acc_ + i) - load(acc_ + i);
    if (any(Mask<T>(difference != T(0)))) pass(chunk, partial, /*careful=*/true);
  }

  // Output, lse and state of a unit from its chunks' partial results, which are used up.
  void merge(int64_t unit, T* partial) {
    start(unit);
    const int64_t count = chunks(p_), size = partial_size(p_);
    Vec<T> reference = load(partial), any_key = load(partial + kMost);
    for (int64_t i = 1; i < count; ++i) {
      const Vec<T> next = load(partial + i * size), sum = load(partial + i * size + kMost);
      reference = (any_key == T(0)) | ((sum != T(0)) & (next > reference)) ? next : reference;
      any_key += sum;
    }
    SoftmaxState<T> state{reference, Vec<T>{}};
    T* acc = partial + 2 * kMost;
    for (int64_t i = 0; i < count; ++i) {
      const Vec<T> sum = load(partial + i * size + kMost);
      const Vec<T> share = keep<T>(sum != T(0), exp2_or_zero<T>(load(partial + i * size) - reference));
      state.sum += sum * share;
      if (count == 1) break;
      for (int64_t r = 0; r < rows_; ++r) {
        for (int64_t c = r * value_padded(); c < (r + 1) * value_padded(); c += kWidth<T>) {
          const Vec<T> x = load(acc + i * size + c) * share[r];
          store(acc + c, i == 0 ? x : load(acc + c) + x);
        }
      }
    }
    SoftmaxResult<T> result = softmax_result(state);
    if (p_.sinks.data) {
      alignas(64) T sink[kLanes<T>];
      read_sinks(p_, unit_, *tile_, sink);
      result = softmax_result(state, load(sink));
    }
    const char* row[kLanes<T>];
    row_addresses(p_.output, p_, unit_, *tile_, row);
    for (int64_t r = 0; r < rows_; ++r) {
      store_rows(p_.output, row[r], 1, p_.value_dim, acc + r * value_padded(), result.output_factor[r]);
    }
    write_statistics(p_, unit_, *tile_, score_.drawn, &result);
  }

 private:
  int64_t head_padded() const { return round_up_to_vector<T>(p_.head_dim); }
  int64_t value_padded() const { return round_up_to_vector<T>(p_.value_dim); }

  void start(int64_t unit) {
    unit_ = unit_of(p_, unit);
    describe_lanes(p_, unit_, 0, *tile_);
    rows_ = tile_->count;
  }

  // One chunk of keys. Careful: NaN and infinity among the values only reach the rows that see them.
  void pass(int64_t chunk, T* partial, bool careful) {
    reference_ = partial;
    sum_ = partial + kMost;
    acc_ = partial + 2 * kMost;
    memset(partial, 0, partial_size(p_) * sizeof(T));
    const KeyRange keys = tile_->keys();
    const int64_t begin = clamp_to(keys.begin / kTile * kTile, chunk * kChunk, INT64_MAX);
    const int64_t stop = keys.end < (chunk + 1) * kChunk ? keys.end : (chunk + 1) * kChunk;
    for (first_key_ = begin; first_key_ < stop; first_key_ += kTile) {
      count_ = stop - first_key_ < kTile ? stop - first_key_ : kTile;
      attend(careful);
    }
  }

  // Steps 1 to 5 for one kv tile.
  void attend(bool careful) {
    const char* value_row[kTile] = {};
    const StagedRows<T> key = rows_of(p_.key, p_.key_group, p_.head_dim, key_buffer_, value_row);
    const StagedRows<T> value = rows_of(p_.value, p_.value_group, p_.value_dim, value_buffer_, value_row);
    for (int64_t k = 0; k < count_; k += kWidth<T>) scores(key, k);
    for (int64_t r = 0; r < rows_; ++r) softmax(r);
    if (careful) {
      const Rows rows{value_row, count_, p_.value.column_stride, p_.value_dim, p_.value.dtype};
      copy_rows<T, true>(rows, value_buffer_, value_padded());
      accumulate({value_buffer_, value_padded(), true, T(0)});
      add_non_finite_values(value_row);
    } else {
      accumulate(value);
    }
  }

  StagedRows<T> rows_of(const TensorView& view, int64_t group, int64_t columns, T* buffer, const char** row) const {
    const bool even = key_rows(view, p_, unit_, group, first_key_, count_, row);
    const Rows rows{row, count_, view.column_stride, columns, view.dtype};
    return place_rows<T>(view, rows, even ? INT64_MAX : -1, buffer);
  }

  // Step 1 for the keys [k, k + W) of the tile; what lies beyond the tile's end stays 0.
  void scores(const StagedRows<T>& key, int64_t k) {
    constexpr int w = kWidth<T>;
    const int64_t keys = count_ - k < w ? count_ - k : w;
    if (keys < w) memset(sums_, 0, rows_ * w * w * sizeof(T));
    for_row_blocks(0, rows_, [&](int64_t r, auto rows) {
      constexpr int kRows = decltype(rows)::value;
      int64_t i = 0;
      for (; i + 2 <= keys; i += 2) products<kRows, 2>(key.data + (k + i) * key.stride, key.stride, r, i);
      if (i < keys) products<kRows, 1>(key.data + (k + i) * key.stride, key.stride, r, i);
    });
    for (int64_t r = 0; r < rows_; ++r) {
      Vec<T> sums[w];
      for (int i = 0; i < w; ++i) sums[i] = load(sums_ + (r * w + i) * w);
      store(dots_ + r * kTile + k, horizontal_sums<T>(sums));
    }
  }
  template <int kRows, int kKeys>
  ATTENTION_EXT_INLINE void products(const T* key, int64_t stride, int64_t r, int64_t i) {
    constexpr int w = kWidth<T>;
    const int64_t padded = head_padded();
    Vec<T> sum[kKeys][kRows] = {};
    for (int64_t d = 0; d < padded; d += w) {
      for (int j = 0; j < kKeys; ++j) {
        const Vec<T> x = load(key + j * stride + d);
        for (int q = 0; q < kRows; ++q) sum[j][q] = fma(x, load(query_ + (r + q) * padded + d), sum[j][q]);
      }
    }
    for (int j = 0; j < kKeys; ++j) {
      for (int q = 0; q < kRows; ++q) store(sums_ + ((r + q) * w + i + j) * w, sum[j][q]);
    }
  }

  // Steps 2 to 4 for one row: probs_[row][key], hidden keys exact zeros.
  void softmax(int64_t r) {
    constexpr int w = kWidth<T>;
    const Vec<T> top = broadcast(horizontal_max<T>(exponents(r)));
    const SoftmaxState<T> state{broadcast(reference_[r]), broadcast(sum_[r])};
    const T shift = reference_shift(state, top)[0];
    if (shift != T(0)) {
      move_reference(r, shift);
      exponents(r);
    }
    T* probs = probs_ + r * kTile;
    Vec<T> sum = {};
    for (int64_t k = 0; k < count_; k += w) {
      const Vec<T> x = exp2_or_zero<T>(load(probs + k));
      sum += x;
      store(probs + k, p_.dropout.probability > 0 ? x * dropout_factors(r, k) : x);
    }
    for (int i = w / 2; i > 0; i /= 2) {
      for (int j = 0; j < i; ++j) sum[j] += sum[j + i];
    }
    sum_[r] += sum[0];
  }

  // probs_[row][key] = x - m, -infinity where hidden; returns the largest of each lane.
  Vec<T> exponents(int64_t r) {
    const Vec<T> reference = broadcast(reference_[r]);
    const Mask<T> begin = broadcast_index<T>(clamp_to(tile_->begin[r] - first_key_, 0, kTile));
    const Mask<T> end = broadcast_index<T>(clamp_to(tile_->end[r] - first_key_, 0, count_));
    Vec<T> largest = broadcast(-kInfinity<T>);
    for (int64_t k = 0; k < count_; k += kWidth<T>) {
      const Mask<T> key = key_numbers(k);
      Vec<T> x = load(dots_ + r * kTile + k);
      if (score_.plain() && !p_.attn_mask.data) {
        x = plain_exponent(score_, x, reference);
      } else {
        Vec<T> addend = {};
        if (p_.attn_mask.data) addend = draw_together<T>(mask_values(r, k)) * kLog2E<T>;
        const Vec<T> distance = tile_->position[r] - (__builtin_convertvector(key, Vec<T>) + static_cast<T>(first_key_));
        x = general_exponent(score_, x, addend, broadcast(tile_->slope[r]), distance < T(0) ? -distance : distance,
                             reference);
      }
      x = (key >= begin) & (key < end) ? x : broadcast(-kInfinity<T>);
      store(probs_ + r * kTile + k, x);
      largest = maximum(x, largest);
    }
    return largest;
  }

  void move_reference(int64_t r, T shift) {
    const T factor = exp2_or_zero<T>(broadcast(shift > T(0) ? -shift : T(0)))[0];
    reference_[r] += shift;
    sum_[r] *= factor;
    for (int64_t c = r * value_padded(); c < (r + 1) * value_padded(); c += kWidth<T>) {
      store(acc_ + c, load(acc_ + c) * factor);
    }
  }

  static ATTENTION_EXT_INLINE Mask<T> key_numbers(int64_t k) {
    typename VecTypes<T>::Int number[kWidth<T>];
    for (int i = 0; i < kWidth<T>; ++i) number[i] = static_cast<typename VecTypes<T>::Int>(k + i);
    Mask<T> m;
    memcpy(&m, number, sizeof(m));
    return m;
  }
  // The mask's addends of one row for the keys [k, k + W) of the tile.
  Vec<T> mask_values(int64_t r, int64_t k) const {
    const TensorView& view = p_.attn_mask;
    const int64_t left = count_ - k, keys = left < kWidth<T> ? left : kWidth<T>;
    const char* place = tile_->mask_row[r] + (first_key_ + k) * view.column_stride * size_of(view.dtype);
    Vec<T> x = {};
    dispatch_storage<T>(view.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      x = load_some<T>(reinterpret_cast<const S*>(place), view.column_stride, keys);
    });
    return x;
  }
  Vec<T> dropout_factors(int64_t r, int64_t k) const {
    return dropout_of_keys<T>(p_, unit_, tile_->heads[r], tile_->queries[r], first_key_ + k);
  }

  // Step 5.
  void accumulate(const StagedRows<T>& value) {
    const int64_t vectors = value_padded() / kWidth<T>;
    for_row_blocks(0, rows_, [&](int64_t r, auto rows) {
      constexpr int kRows = decltype(rows)::value;
      constexpr int most = kRows <= 2 ? 2 * Tuning::kLaneVectors : Tuning::kLaneVectors;
      const int64_t strips = (vectors + most - 1) / most;
      for (int64_t s = 0; s < strips; ++s) {
        const int64_t left = vectors * s / strips, right = vectors * (s + 1) / strips;
        with_constant<most>(right - left, [&](auto width) {
          constexpr int kVectors = decltype(width)::value;
          Vec<T> sum[kRows][kVectors];
          broadcast_rows<T, kRows, kVectors>(probs_ + r * kTile, kTile, value.data + left * kWidth<T>, value.stride,
                                             count_, sum);
          for (int i = 0; i < kRows; ++i) {
            for (int v = 0; v < kVectors; ++v) {
              T* out = acc_ + (r + i) * value_padded() + (left + v) * kWidth<T>;
              store(out, load(out) + sum[i][v]);
            }
          }
        });
      }
    });
  }

  // NaN and infinity were taken for 0; the rows that see such a key get its product now.
  void add_non_finite_values(const char* const* value_row) {
    const int64_t step = p_.value.column_stride * size_of(p_.value.dtype);
    for (int64_t k = 0; k < count_; ++k) {
      for (int64_t c = 0; c < p_.value_dim; ++c) {
        const T x = load_scalar<T>(value_row[k] + c * step, p_.value.dtype);
        if (x - x == T(0)) continue;
        for (int64_t r = 0; r < rows_; ++r) {
          const int64_t j = first_key_ + k;
          if (j < tile_->begin[r] || j >= tile_->end[r]) continue;
          if (p_.attn_mask.data && mask_values(r, k)[0] == -kInfinity<T>) continue;
          acc_[r * value_padded() + c] += probs_[r * kTile + k] * x;
        }
      }
    }
  }

  const AttentionParams& p_;
  const ScoreParams<T> score_;
  Arena arena_;
  Unit unit_{};
  LaneTile<T>* tile_;  // the unit's rows
  int64_t rows_ = 0;
  T* query_;           // [kMost][head_dim, padded]

  // The partial result.
  T* reference_ = nullptr;  // [kMost]
  T* sum_ = nullptr;        // [kMost]
  T* acc_ = nullptr;        // [kMost][value_dim, padded]

  // Of the current kv tile.
  int64_t first_key_ = 0, count_ = 0;
  T* sums_;          // [kMost][W keys][W]: products before the sum over the lanes
  T* dots_;          // [kMost][kTile]: q K^T
  T* probs_;         // [kMost][kTile]: exponents, then P
  T* key_buffer_;    // [kTile][head_dim, padded]
  T* value_buffer_;  // [kTile][value_dim, padded]
};
