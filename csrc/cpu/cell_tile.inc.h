// The cells of one lane tile and one kv tile: which are visible, what is added to their scores, what dropout
// leaves of them. Everything of a cell that does not come from Q, K, V.

// Lanes' visible intervals relative to a kv tile, as vectors of integers to compare keys with.
template <class T>
struct LaneIntervals {
  Mask<T> begin[Tuning::kLaneVectors], end[Tuning::kLaneVectors];

  LaneIntervals(const LaneTile<T>& tile, int64_t first_key, int64_t count) {
    for (int v = 0; v < tile.vectors(); ++v) {
      within(tile.begin + v * kWidth<T>, first_key, count, begin[v]);
      within(tile.end + v * kWidth<T>, first_key, count, end[v]);
    }
  }
  ATTENTION_EXT_INLINE Mask<T> visible(int v, int64_t key) const {
    const Mask<T> k = broadcast_index<T>(key);
    return (begin[v] <= k) & (k < end[v]);
  }

 private:
  static ATTENTION_EXT_INLINE void within(const int64_t* keys, int64_t first_key, int64_t count, Mask<T>& lanes) {
    constexpr int w = kWidth<double>;
    typedef typename VecTypes<T>::Int Narrow __attribute__((vector_size(w * sizeof(T))));
    const Mask<double> first = first_key - Mask<double>{}, last = count - Mask<double>{};
    for (int i = 0; i < kWidth<T>; i += w) {
      Mask<double> k;
      memcpy(&k, keys + i, sizeof(k));
      k -= first;
      k = k < 0 ? Mask<double>{} : k;
      k = k > last ? last : k;
      const Narrow narrow = __builtin_convertvector(k, Narrow);
      memcpy(reinterpret_cast<char*>(&lanes) + i * sizeof(T), &narrow, sizeof(narrow));
    }
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

// Dropout's random words of W cells, given by query, number of batch element and head (low and high word), and
// block of four keys; a cell keeps its weight, divided by 1 - p, where its word reaches p * 2^32.
template <class T>
struct DropoutCells {
  typedef typename WideVecOf<T>::type Wide;
  uint64_t seed, first_place, threshold;
  T kept;

  DropoutCells(const AttentionParams& p, const Unit& u)
      : seed(static_cast<uint64_t>(p.dropout.seed[u.batch])),
        first_place(static_cast<uint64_t>(u.batch % p.dropout.batches_per_pattern) * static_cast<uint64_t>(p.num_heads)),
        threshold(static_cast<uint64_t>(p.dropout.probability * 4294967296.0)),
        kept(static_cast<T>(p.dropout.probability < 1.0 ? 1.0 / (1.0 - p.dropout.probability) : 0.0)) {}

  PhiloxWords<Wide> words(Wide key_block, Wide query, Wide head) const {
    const Wide place = head + first_place;
    return philox<Wide>(seed, key_block & uint64_t{0xffffffff}, query & uint64_t{0xffffffff},
                        place & uint64_t{0xffffffff}, place >> 32);
  }
  Vec<T> factors(Wide word) const {
    return keep<T>(__builtin_convertvector(word >= threshold, Mask<T>), broadcast(kept));
  }
};

// Fills out[key][lane] with dropout's factors for the keys [begin, end) of the kv tile at first_key, a multiple
// of 4.
template <class T>
inline void pack_dropout(const AttentionParams& p, const Unit& u, const LaneTile<T>& tile, int64_t first_key,
                         int64_t begin, int64_t end, T* __restrict out) {
  typedef typename WideVecOf<T>::type Wide;
  const DropoutCells<T> cells(p, u);
  for (int v = 0; v < tile.vectors(); ++v) {
    Wide query, head;
    for (int i = 0; i < kWidth<T>; ++i) {
      query[i] = static_cast<uint64_t>(tile.queries[v * kWidth<T> + i]);
      head[i] = static_cast<uint64_t>(tile.heads[v * kWidth<T> + i]);
    }
    for (int64_t key = begin / 4 * 4; key < end; key += 4) {
      const Wide block = static_cast<uint64_t>((first_key + key) / 4) - Wide{};
      const PhiloxWords<Wide> words = cells.words(block, query, head);
      for (int i = 0; i < 4 && key + i < end; ++i) {
        store(out + (key + i) * kLanes<T> + v * kWidth<T>, cells.factors(words.word[i]));
      }
    }
  }
}

// The same for one row and the W keys from first_key on.
template <class T>
inline Vec<T> dropout_of_keys(const AttentionParams& p, const Unit& u, int64_t head, int64_t query, int64_t first_key) {
  typedef typename WideVecOf<T>::type Wide;
  const DropoutCells<T> cells(p, u);
  Wide block;
  for (int i = 0; i < kWidth<T>; ++i) block[i] = static_cast<uint64_t>((first_key + i) / 4);
  const PhiloxWords<Wide> words =
      cells.words(block, static_cast<uint64_t>(query) - Wide{}, static_cast<uint64_t>(head) - Wide{});
  Wide own;
  for (int i = 0; i < kWidth<T>; ++i) own[i] = words.word[(first_key + i) % 4][i];
  return cells.factors(own);
}
