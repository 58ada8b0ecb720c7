// The cells of one lane tile and one kv tile: which are visible, what is added to their scores, what dropout
// leaves of them. Everything of a cell that does not come from Q, K, V.

// Lanes' visible intervals relative to a kv tile, as vectors of integers to compare keys with.
template <class T>
struct LaneIntervals {
  Mask<T> begin[Tuning::kLaneVectors], end[Tuning::kLaneVectors];

  LaneIntervals(const LaneTile<T>& tile, int64_t first_key, int64_t count) {
    using Int = typename VecTypes<T>::Int;
    for (int v = 0; v < tile.vectors(); ++v) {
      Int first[kWidth<T>], last[kWidth<T>];
      for (int i = 0; i < kWidth<T>; ++i) {
        first[i] = static_cast<Int>(clamp_to(tile.begin[v * kWidth<T> + i] - first_key, 0, count));
        last[i] = static_cast<Int>(clamp_to(tile.end[v * kWidth<T> + i] - first_key, 0, count));
      }
      memcpy(&begin[v], first, sizeof(first));
      memcpy(&end[v], last, sizeof(last));
    }
  }
  ATTENTION_EXT_INLINE Mask<T> visible(int v, int64_t key) const {
    const Mask<T> k = broadcast_index<T>(key);
    return (begin[v] <= k) & (k < end[v]);
  }
};

// What the mask tensor says about a lane tile and kv tile.
enum class MaskTile { kNone, kAllHidden, kMixed };

template <class T>
struct CellTile {
  const LaneTile<T>& lanes;
  const int64_t first_key;
  const Segments<T> segments;
  const LaneIntervals<T> intervals;
  MaskTile mask = MaskTile::kNone;
  const T* addend = nullptr;   // [kBlockKV][kLanes], if mask is kMixed; -infinity hides
  T largest_addend = T(0);     // in size, of those that do not hide
  const T* dropout = nullptr;  // [kBlockKV][kLanes], if there is dropout: 0 or 1 / (1 - p)

  CellTile(const LaneTile<T>& tile, int64_t first, int64_t count)
      : lanes(tile), first_key(first), segments(tile, first, count), intervals(tile, first, count) {}

  bool empty() const { return segments.size == 0 || mask == MaskTile::kAllHidden; }
  int64_t begin() const { return segments.segment[0].begin; }
  int64_t end() const { return segments.segment[segments.size - 1].end; }
  // The keys of vector v's cells.
  KeyRange keys_of(int v) const {
    KeyRange keys{0, 0};
    for (int i = 0; i < segments.size; ++i) {
      const Segment& s = segments.segment[i];
      if (v < s.first_vector || v >= s.last_vector) continue;
      if (keys.begin == keys.end) keys.begin = s.begin;
      keys.end = s.end;
    }
    return keys;
  }

  ATTENTION_EXT_INLINE Vec<T> addend_at(int v, int64_t key) const {
    return mask == MaskTile::kMixed ? load(addend + key * kLanes<T> + v * kWidth<T>) : Vec<T>{};
  }
  ATTENTION_EXT_INLINE Vec<T> dropout_at(int v, int64_t key) const {
    return dropout ? load(dropout + key * kLanes<T> + v * kWidth<T>) : broadcast(T(1));
  }
  ATTENTION_EXT_INLINE Vec<T> distance(int v, int64_t key) const {
    const Vec<T> d = load(lanes.position + v * kWidth<T>) - static_cast<T>(first_key + key);
    return d < T(0) ? -d : d;
  }
  ATTENTION_EXT_INLINE Mask<T> visible(int v, int64_t key) const {
    Mask<T> m = intervals.visible(v, key);
    if (mask == MaskTile::kMixed) m &= addend_at(v, key) != -kInfinity<T>;
    return m;
  }
  ATTENTION_EXT_INLINE Vec<T> exponent(const ScoreParams<T>& score, Vec<T> dot, int v, int64_t key,
                                       Vec<T> reference) const {
    if (score.plain() && mask != MaskTile::kMixed) return plain_exponent(score, dot, reference);
    return general_exponent(score, dot, addend_at(v, key), load(lanes.slope + v * kWidth<T>), distance(v, key),
                            reference);
  }
  // One cell, for the rare ones that need care.
  bool cell_visible(int64_t lane, int64_t key) const {
    const int64_t j = first_key + key;
    if (j < lanes.begin[lane] || j >= lanes.end[lane]) return false;
    return mask == MaskTile::kNone || addend[key * kLanes<T> + lane] != -kInfinity<T>;
  }
};

// A look at the stored bytes of a bool mask, eight at a time: most tiles of a padding, window or block mask hide
// all or nothing, and need no packing. Bytes are 0 or 1; anything else, and a broken pattern, is kMixed.
inline MaskTile scan_bools(const char* const* row, int64_t rows, int64_t count) {
  uint64_t any = 0, all = ~uint64_t{0};
  for (int64_t i = 0; i < rows; ++i) {
    int64_t k = 0;
    for (; k + 8 <= count; k += 8) {
      uint64_t word;
      memcpy(&word, row[i] + k, 8);
      any |= word;
      all &= word;
    }
    for (; k < count; ++k) {
      const uint64_t word = static_cast<uint8_t>(row[i][k]) * 0x0101010101010101u;
      any |= word;
      all &= word;
    }
  }
  if (any == 0) return MaskTile::kAllHidden;
  return all == 0x0101010101010101u ? MaskTile::kNone : MaskTile::kMixed;
}

// Fills out[key][lane] with the mask's addends, in powers of two, for the keys [begin, end) of the kv tile at
// first_key, and says how large they get. kNone if every addend is 0 there, kAllHidden if every one hides.
template <class T>
inline MaskTile pack_mask(const TensorView& view, const LaneTile<T>& tile, int64_t first_key, int64_t begin,
                          int64_t end, T* __restrict out, T& largest_addend) {
  constexpr int w = kWidth<T>;
  const int64_t vectors = tile.vectors(), lanes = vectors * w;
  const int64_t skip = (first_key + begin) * view.column_stride * size_of(view.dtype);
  const char* row[kLanes<T>];
  bool same = true;  // a mask that all rows share is read once
  for (int64_t lane = 0; lane < lanes; ++lane) {
    row[lane] = tile.mask_row[lane] + skip;
    same = same && row[lane] == row[0];
  }
  const Rows rows{row, same ? 1 : lanes, view.column_stride, end - begin, view.dtype};
  if (view.dtype == DType::kBool && view.column_stride == 1) {
    const MaskTile found = scan_bools(row, rows.count, rows.columns);
    if (found != MaskTile::kMixed) return found;
  }
  out += begin * kLanes<T>;
  if (same) {
    T line[kBlockKV + w];
    copy_rows<T, false>(rows, line, 0);
    for (int64_t k = 0; k < end - begin; ++k) {
      for (int v = 0; v < vectors; ++v) store(out + k * kLanes<T> + v * w, broadcast(line[k]));
    }
  } else {
    pack_lanes<T>(rows, lanes, kLanes<T>, out);
  }
  if (view.dtype == DType::kBool && view.column_stride == 1) return MaskTile::kMixed;  // only 0 and -infinity
  Mask<T> some_shown = {}, some_changed = {};
  Vec<T> largest = {};
  for (int64_t k = 0; k < end - begin; ++k) {
    for (int v = 0; v < vectors; ++v) {
      const Vec<T> x = draw_together<T>(load(out + k * kLanes<T> + v * w)) * kLog2E<T>;
      store(out + k * kLanes<T> + v * w, x);
      const Mask<T> shown = x != -kInfinity<T>;
      some_shown |= shown;
      some_changed |= x != T(0);
      largest = maximum(keep<T>(shown, x < T(0) ? -x : x), largest);
    }
  }
  largest_addend = horizontal_max<T>(largest);
  if (!any(some_shown)) return MaskTile::kAllHidden;
  return any(some_changed) ? MaskTile::kMixed : MaskTile::kNone;
}

// Dropout's factors of W cells, given by query, number of batch element and head, and block of four keys. A cell
// keeps its weight, divided by 1 - p, where its random word reaches p * 2^32.
template <class T>
struct DropoutCells {
  static constexpr int kParts = 8 / static_cast<int>(sizeof(T));
  typedef typename std::make_unsigned<typename VecTypes<T>::Int>::type Word;
  typedef Word Words __attribute__((vector_size(Tuning::kVectorBytes)));

  // 32-bit words as philox takes them: lane i is element i / kParts of part i % kParts.
  struct Lanes {
    WideVec part[kParts];

    template <class F>
    static ATTENTION_EXT_INLINE Lanes of(F&& word_of_lane) {
      Lanes lanes;
      for (int part = 0; part < kParts; ++part) {
        uint64_t word[kWidth<double>];
        for (int i = 0; i < kWidth<double>; ++i) word[i] = word_of_lane(i * kParts + part);
        memcpy(&lanes.part[part], word, sizeof(word));
      }
      return lanes;
    }
    static ATTENTION_EXT_INLINE Lanes broadcast(uint64_t word) {
      Lanes lanes;
      for (WideVec& part : lanes.part) part = word - WideVec{};
      return lanes;
    }
  };
  struct Rows {
    Lanes query, low_place, high_place;
  };

  uint64_t seed, first_place;
  Word threshold;
  T kept;

  DropoutCells(const AttentionParams& p, const Unit& u)
      : seed(static_cast<uint64_t>(p.dropout.seed[u.batch])),
        first_place(static_cast<uint64_t>(u.batch % p.dropout.batches_per_pattern) * static_cast<uint64_t>(p.num_heads)),
        threshold(static_cast<Word>(p.dropout.probability < 1.0 ? p.dropout.probability * 4294967296.0 : 0.0)),
        kept(static_cast<T>(p.dropout.probability < 1.0 ? 1.0 / (1.0 - p.dropout.probability) : 0.0)) {}

  Rows row(int64_t query, int64_t head) const {
    const uint64_t place = first_place + static_cast<uint64_t>(head);
    return {Lanes::broadcast(static_cast<uint64_t>(query)), Lanes::broadcast(place), Lanes::broadcast(place >> 32)};
  }
  Rows rows(const int64_t* queries, const int64_t* heads) const {
    const auto place = [&](int lane) { return first_place + static_cast<uint64_t>(heads[lane]); };
    return {Lanes::of([&](int lane) { return static_cast<uint64_t>(queries[lane]); }), Lanes::of(place),
            Lanes::of([&](int lane) { return place(lane) >> 32; })};
  }

  // Of key k of each lane's block of four.
  struct Factors {
    Vec<T> key[4];
  };
  ATTENTION_EXT_INLINE Factors factors(const Lanes& key_block, const Rows& rows) const {
    PhiloxWords<WideVec> words[kParts];
    for (int i = 0; i < kParts; ++i) {
      words[i] = philox<WideVec>(
          seed, key_block.part[i], rows.query.part[i], rows.low_place.part[i], rows.high_place.part[i],
          [](WideVec a, uint64_t b) __attribute__((always_inline)) { return multiply_low_halves(a, b - WideVec{}); });
    }
    const Vec<T> kept_lanes = broadcast(kept);
    Factors factors;
    for (int k = 0; k < 4; ++k) {
      Words word;
      if constexpr (kParts == 2) {
        Vec<T> even = bit_cast<Vec<T>>(words[0].word[k]), odd = bit_cast<Vec<T>>(words[1].word[k]);
        exchange_blocks<T, 1>(even, odd, std::make_index_sequence<kWidth<T>>{});
        word = bit_cast<Words>(even);
      } else {
        word = words[0].word[k] & Word{0xffffffff};
      }
      factors.key[k] = word >= threshold ? kept_lanes : Vec<T>{};
    }
    return factors;
  }
};

// f(key, its factors) for the rows of vector v and the keys [begin, end) of the kv tile at first_key, a multiple of
// 4; for up to three keys before and after them too.
template <class T, class F>
ATTENTION_EXT_INLINE void for_dropout_factors(const DropoutCells<T>& cells, const LaneTile<T>& tile, int v,
                                              int64_t first_key, int64_t begin, int64_t end, F&& f) {
  const auto rows = cells.rows(tile.queries + v * kWidth<T>, tile.heads + v * kWidth<T>);
  for (int64_t key = begin / 4 * 4; key < end; key += 4) {
    const auto block = DropoutCells<T>::Lanes::broadcast(static_cast<uint64_t>((first_key + key) / 4));
    const auto factors = cells.factors(block, rows);
    for (int i = 0; i < 4; ++i) f(key + i, factors.key[i]);
  }
}

// The same for one row and the W keys from first_key on.
template <class T>
inline Vec<T> dropout_of_keys(const AttentionParams& p, const Unit& u, int64_t head, int64_t query, int64_t first_key) {
  const DropoutCells<T> cells(p, u);
  const auto block =
      DropoutCells<T>::Lanes::of([&](int lane) { return static_cast<uint64_t>((first_key + lane) / 4); });
  const auto factors = cells.factors(block, cells.row(query, head));
  Vec<T> own;
  for (int i = 0; i < kWidth<T>; ++i) own[i] = factors.key[(first_key + i) % 4][i];
  return own;
}
