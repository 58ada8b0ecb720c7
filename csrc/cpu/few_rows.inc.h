// Forward of a unit with few rows against many keys: decoding. At most one vector of rows, so that
// queries along the lanes would waste most of the work: here keys are along the lanes, and K and V
// are read along the head, where they lie and as they are stored, each row once for all rows of the
// unit.
//
//   1. scores      S[row][key] = q K^T, vectors along the head, then the sums of one vector of keys
//   at a time
//   2. modify, 3. hide, 4. softmax   as forward.inc.h, for one row and a vector of keys
//   5. accumulate  acc[row][column] += P V, vectors along the head
//
// Keys are cut into chunks at fixed bounds, whoever computes them; partial results (m, l, acc)
// merge in order.
//
// Memory's rate decides where a cache is larger than the processor's: there, while a tile is worked
// on, the next one is fetched, whole rows in ascending order, K and V by turns.

// Asks for a row's cache lines. As volatile assembly: the compiler keeps the order, which the
// hardware's own prefetching follows.
ATTENTION_EXT_INLINE void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
#if defined(__x86_64__)
    asm volatile("prefetcht0 %0" : : "m"(row[i]));
#else
    __builtin_prefetch(row + i);
#endif
  }
}

template <class T>
class FewRows {
 public:
  static constexpr int64_t kTile = 32;     // keys: whole vectors in every instruction set
  static constexpr int64_t kChunk = 512;   // keys
  static constexpr int kMost = kWidth<T>;  // rows
  static constexpr int kKeys = Tuning::kLaneVectors;  // side by side in step 1

  FewRows(const AttentionParams& params, void* memory)
      : p_(params), score_(params), arena_(memory) {
    tile_ = arena_.take<LaneTile<T>>(1);
    query_ = arena_.take<T>(kMost * head_padded());
    dots_ = arena_.take<T>(kMost * kTile);
    probs_ = arena_.take<T>(kMost * kTile);
    sums_ = arena_.take<T>(kMost * kWidth<T>);
    key_bytes_ = p_.head_dim * size_of(p_.key.dtype);
    value_bytes_ = p_.value_dim * size_of(p_.value.dtype);
    prefetches_ =
        p_.num_units() * p_.seqlen_kv * (key_bytes_ + value_bytes_) >= Tuning::kPrefetchBytes;
    key_buffer_ = arena_.take<char>(kTile * head_padded() * sizeof(T));
    value_buffer_ = arena_.take<char>(kTile * value_padded() * sizeof(T));
  }
  int64_t scratch_bytes() const { return arena_.used(); }

  static int64_t chunks(const AttentionParams& p) {
    return p.seqlen_kv > 0 ? (p.seqlen_kv + kChunk - 1) / kChunk : 1;
  }
  // A partial result is m [kMost], l [kMost] and acc [kMost][value_dim, padded].
  static int64_t partial_size(const AttentionParams& p) {
    return kMost * (2 + round_up_to_vector<T>(p.value_dim));
  }

  void run(int64_t unit, int64_t chunk, T* partial) {
    start(unit);
    const char* row[kLanes<T>];
    row_addresses(p_.query, p_, unit_, *tile_, row);
    T* const rows = reinterpret_cast<T*>(key_buffer_);
    copy_rows<T, false>({row, rows_, p_.query.column_stride, p_.head_dim, p_.query.dtype}, rows,
                        head_padded());
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t d = 0; d < head_padded(); d += kWidth<T>) {
        store(query_ + d * kMost + r * kWidth<T>, load(rows + r * head_padded() + d));
      }
    }
    pass(chunk, partial, /*careful=*/false);
    // 0 * NaN of a hidden value, or overflow: once more, with what is not finite apart.
    Vec<T> difference = {};
    for (int64_t i = 0; i < rows_ * value_padded(); i += kWidth<T>)
      difference += load(acc_ + i) - load(acc_ + i);
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
      const Vec<T> share =
          keep<T>(sum != T(0), exp2_or_zero<T>(load(partial + i * size) - reference));
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
      store_rows(p_.output, row[r], 1, p_.value_dim, acc + r * value_padded(),
                 result.output_factor[r]);
    }
    write_statistics(p_, unit_, *tile_, score_.drawn, &result);
  }

 private:
  int64_t head_padded() const { return round_up_to_vector<T>(p_.head_dim); }
  int64_t value_padded() const { return round_up_to_vector<T>(p_.value_dim); }

  void start(int64_t unit) {
    find_unit(p_, unit, unit_);
    describe_lanes(p_, unit_, 0, *tile_);
    rows_ = tile_->count;
  }

  // One chunk of keys. Careful: NaN and infinity among the values only reach the rows that see
  // them.
  void pass(int64_t chunk, T* partial, bool careful) {
    reference_ = partial;
    acc_ = partial + 2 * kMost;
    memset(partial, 0, partial_size(p_) * sizeof(T));
    memset(sums_, 0, kMost * kWidth<T> * sizeof(T));
    const KeyRange keys = tile_->keys();
    const int64_t begin = clamp_to(keys.begin / kTile * kTile, chunk * kChunk, INT64_MAX);
    const int64_t stop = keys.end < (chunk + 1) * kChunk ? keys.end : (chunk + 1) * kChunk;
    find_rows(begin, stop);
    for (first_key_ = begin; first_key_ < stop; first_key_ += kTile) {
      const TileRows rows = next_;
      find_rows(first_key_ + kTile, stop);
      attend(rows, careful);
    }
    Vec<T> sum[kWidth<T>];
    for (int64_t r = 0; r < kMost; ++r) sum[r] = load(sums_ + r * kWidth<T>);
    store(partial + kMost, horizontal_sums<T>(sum));
  }

  // Where the rows of a tile lie.
  struct TileRows {
    int64_t count;
    const char* key[kTile];
    const char* value[kTile];
  };

  // The next tile: up to kTile keys from `first` on, none from `stop` on.
  void find_rows(int64_t first, int64_t stop) {
    next_.count = clamp_to(stop - first, 0, kTile);
    if (next_.count == 0) return;
    key_rows(p_.key, p_, unit_, p_.key_group, first, next_.count, next_.key);
    key_rows(p_.value, p_, unit_, p_.value_group, first, next_.count, next_.value);
  }

  // Asks for rows i to i + count of the next tile.
  ATTENTION_EXT_INLINE void prefetch(int64_t i, int count) const {
    if (!prefetches_) return;
    for (const int64_t stop = i + count < next_.count ? i + count : next_.count; i < stop; ++i) {
      prefetch_row(next_.key[i], key_bytes_);
      prefetch_row(next_.value[i], value_bytes_);
    }
  }

  // Steps 1 to 5 for one kv tile.
  void attend(const TileRows& tile, bool careful) {
    count_ = tile.count;
    with_rows(p_.key, p_.head_dim, tile.key, false, key_buffer_,
              [&](auto* const* rows) { scores(rows); });
    for (int64_t r = 0; r < rows_; ++r) softmax(r);
    with_rows(p_.value, p_.value_dim, tile.value, careful, value_buffer_,
              [&](auto* const* rows) { accumulate(rows); });
    if (careful) add_non_finite_values(tile.value);
  }

  // f(rows) for rows that can be read as whole vectors: in place where neighbouring elements fill
  // some, else copied, on request with 0 for NaN and infinity. What is read is the same to the bit.
  template <class F>
  void with_rows(const TensorView& view, int64_t columns, const char* const* row, bool finite,
                 char* buffer, F&& f) {
    const int64_t padded = round_up_to_vector<T>(columns);
    dispatch_storage<T>(view.dtype, [&](auto* tag) {
      using S = typename std::remove_pointer<decltype(tag)>::type;
      if constexpr (kIsOutput<S>) {
        const S* place[kTile];
        if (view.column_stride == 1 && padded == columns && !finite) {
          for (int64_t i = 0; i < count_; ++i) place[i] = reinterpret_cast<const S*>(row[i]);
        } else {
          memset(buffer, 0, count_ * padded * sizeof(S));
          for (int64_t i = 0; i < count_; ++i) {
            S* const copy = reinterpret_cast<S*>(buffer) + i * padded;
            place[i] = copy;
            for (int64_t c = 0; c < columns; ++c) {
              const S* const x = reinterpret_cast<const S*>(row[i]) + c * view.column_stride;
              if (!finite || is_finite<T>(x)) copy[c] = *x;
            }
          }
        }
        f(static_cast<const S* const*>(place));
      }
    });
  }

  // Step 1, for as many rows and keys at a time as have one vector of products. What lies beyond
  // the tile's end repeats its last key.
  template <class S>
  void scores(const S* const* key) {
    int64_t r = 0;
    if constexpr (kWidth<T> >= 4) {
      for (; rows_ - r >= 3; r += 4) scores_of<4>(key, r);  // three rows are padded
    }
    if (rows_ - r >= 2) {
      scores_of<2>(key, r);
      r += 2;
    }
    if (rows_ - r >= 1) scores_of<1>(key, r);
  }
  template <int kRows, class S>
  void scores_of(const S* const* key, int64_t r) {
    constexpr int keys = kWidth<T> / kRows;
    for (int64_t k = 0; k < count_; k += keys) {
      if (r == 0) prefetch(k / 2, (keys + 1) / 2);
      alignas(64) T dots[kWidth<T>];  // [kRows][keys]
      store(dots, products<kRows, keys>(key, k, r));
      for (int q = 0; q < kRows; ++q)
        memcpy(dots_ + (r + q) * kTile + k, dots + q * keys, keys * sizeof(T));
    }
  }
  template <int kRows, int kCount, class S>
  ATTENTION_EXT_INLINE Vec<T> products(const S* const* key, int64_t k, int64_t r) const {
    constexpr int w = kWidth<T>, side = kCount < kKeys ? kCount : kKeys;
    const int64_t padded = head_padded(), last = count_ - 1;
    const T* query = query_ + r * w;
    Vec<T> sum[kRows * kCount];
#pragma GCC unroll 16
    for (int i = 0; i < kCount; i += side) {
      const S* row[side];
#pragma GCC unroll 4
      for (int j = 0; j < side; ++j) row[j] = key[k + i + j < last ? k + i + j : last];
#pragma GCC unroll 16
      for (int q = 0; q < kRows * side; ++q) sum[q / side * kCount + i + q % side] = Vec<T>{};
      for (int64_t d = 0; d < padded; d += w) {
        Vec<T> x[side];
#pragma GCC unroll 4
        for (int j = 0; j < side; ++j) x[j] = load_as<T>(row[j] + d);
#pragma GCC unroll 4
        for (int q = 0; q < kRows; ++q) {
          const Vec<T> y = load(query + d * kMost + q * w);
#pragma GCC unroll 4
          for (int j = 0; j < side; ++j)
            sum[q * kCount + i + j] = fma(x[j], y, sum[q * kCount + i + j]);
        }
      }
    }
    return horizontal_sums<T>(sum);
  }

  // Steps 2 to 4 for one row: probs_[row][key], hidden keys exact zeros.
  void softmax(int64_t r) {
    constexpr int w = kWidth<T>;
    const Vec<T> largest = exponents(r);
    Vec<T> sum = load(sums_ + r * w);
    const bool first = !any(Mask<T>(sum != T(0)));
    if (first || any(Mask<T>(largest > kReach<T>))) {  // nothing else can move the reference
      const SoftmaxState<T> state{broadcast(reference_[r]), broadcast(T(first ? 0 : 1))};
      const T shift = reference_shift(state, broadcast(horizontal_max<T>(largest)))[0];
      if (shift != T(0)) {
        move_reference(r, shift);
        exponents(r);
        sum = load(sums_ + r * w);
      }
    }
    T* probs = probs_ + r * kTile;
    for (int64_t k = 0; k < count_; k += w) {
      const Vec<T> x = exp2_or_zero<T>(load(probs + k));
      sum += x;
      store(probs + k, p_.dropout.probability > 0 ? x * dropout_factors(r, k) : x);
    }
    store(sums_ + r * w, sum);
  }

  // probs_[row][key] = x - m, -infinity where hidden; returns the largest of each lane.
  Vec<T> exponents(int64_t r) {
    const Vec<T> reference = broadcast(reference_[r]);
    const int64_t begin = clamp_to(tile_->begin[r] - first_key_, 0, kTile);
    const int64_t end = clamp_to(tile_->end[r] - first_key_, 0, count_);
    const bool whole = begin == 0 && end == kTile;
    Vec<T> largest = broadcast(-kInfinity<T>);
    for (int64_t k = 0; k < count_; k += kWidth<T>) {
      Vec<T> x = load(dots_ + r * kTile + k);
      if (score_.plain() && !p_.attn_mask.data) {
        x = plain_exponent(score_, x, reference);
      } else {
        Vec<T> addend = {};
        if (p_.attn_mask.data) addend = draw_together<T>(mask_values(r, k)) * kLog2E<T>;
        const Vec<T> key =
            __builtin_convertvector(key_numbers(k), Vec<T>) + static_cast<T>(first_key_);
        const Vec<T> distance = tile_->position[r] - key;
        x = general_exponent(score_, x, addend, broadcast(tile_->slope[r]),
                             distance < T(0) ? -distance : distance, reference);
      }
      if (!whole) {
        const Mask<T> key = key_numbers(k);
        const Mask<T> seen = (key >= broadcast_index<T>(begin)) & (key < broadcast_index<T>(end));
        x = seen ? x : broadcast(-kInfinity<T>);
      }
      store(probs_ + r * kTile + k, x);
      largest = maximum(x, largest);
    }
    return largest;
  }

  void move_reference(int64_t r, T shift) {
    const T factor = exp2_or_zero<T>(broadcast(shift > T(0) ? -shift : T(0)))[0];
    reference_[r] += shift;
    store(sums_ + r * kWidth<T>, load(sums_ + r * kWidth<T>) * factor);
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
    const char* place =
        tile_->mask_row[r] + (first_key_ + k) * view.column_stride * size_of(view.dtype);
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

  // Step 5, in strips of columns of about equal width.
  template <class S>
  void accumulate(const S* const* value) {
    const int64_t vectors = value_padded() / kWidth<T>;
    for_row_blocks(0, rows_, [&](int64_t r, auto rows) {
      constexpr int kRows = decltype(rows)::value;
      constexpr int most = kRows <= 2 ? 2 * Tuning::kLaneVectors : Tuning::kLaneVectors;
      const int64_t strips = (vectors + most - 1) / most;
      for (int64_t s = 0; s < strips; ++s) {
        const int64_t left = vectors * s / strips, right = vectors * (s + 1) / strips;
        with_constant<most>(right - left, [&](auto width) {
          constexpr int kVectors = decltype(width)::value;
          if (r == 0 && s == 0) {
            add_strip<kRows, kVectors, true>(value, r, left);
          } else {
            add_strip<kRows, kVectors, false>(value, r, left);
          }
        });
      }
    });
  }
  template <int kRows, int kVectors, bool kPrefetch, class S>
  ATTENTION_EXT_INLINE void add_strip(const S* const* value, int64_t r, int64_t left) {
    constexpr int w = kWidth<T>;
    const T* probs = probs_ + r * kTile;
    Vec<T> sum[kRows][kVectors];
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) sum[i][v] = Vec<T>{};
    }
    const int64_t count = count_;
    for (int64_t k = 0; k < count; ++k) {
      if (kPrefetch && k % 2) prefetch((kTile + k) / 2, 1);
      const S* row = value[k] + left * w;
      Vec<T> x[kVectors];
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) x[v] = load_as<T>(row + v * w);
#pragma GCC unroll 6
      for (int i = 0; i < kRows; ++i) {
        const Vec<T> y = broadcast(probs[i * kTile + k]);
#pragma GCC unroll 8
        for (int v = 0; v < kVectors; ++v) sum[i][v] = fma(y, x[v], sum[i][v]);
      }
    }
    T* acc = acc_ + r * value_padded() + left * w;
#pragma GCC unroll 6
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        T* out = acc + i * value_padded() + v * w;
        store(out, load(out) + sum[i][v]);
      }
    }
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
  T* query_;  // [head_dim, padded, in vectors][kMost][W]

  // The partial result.
  T* reference_ = nullptr;  // [kMost]
  T* acc_ = nullptr;        // [kMost][value_dim, padded]
  T* sums_;                 // [kMost][W]: of P, one sum for each lane

  // Of the current kv tile, and the rows of the next.
  int64_t first_key_ = 0, count_ = 0;
  TileRows next_;
  int64_t key_bytes_, value_bytes_;  // of a row
  bool prefetches_;
  T* dots_;             // [kMost][kTile]: q K^T
  T* probs_;            // [kMost][kTile]: exponents, then P
  char* key_buffer_;    // [kTile][head_dim, padded], as stored
  char* value_buffer_;  // [kTile][value_dim, padded]
};
