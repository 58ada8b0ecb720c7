// The cells of one lane tile and one kv tile: which are visible, what is added to their scores,
// what dropout leaves of them. Everything of a cell that does not come from Q, K, V.

// Lanes' visible intervals relative to a kv tile, as vectors of integers to compare keys with. A
// lane without a row sees nothing.
template <class T>
struct LaneIntervals {
  Mask<T> begin[Tuning::kLaneVectors], end[Tuning::kLaneVectors];

  LaneIntervals(const LaneTile<T>& tile, int64_t first_key, int64_t count) {
    for (int v = 0; v < tile.vectors(); ++v) {
      within(tile.begin + v * kWidth<T>, first_key, count, begin[v]);
      within(tile.end + v * kWidth<T>, first_key, count, end[v]);
      if (tile.count < (v + 1) * kWidth<T>) end[v] &= first_lanes<T>(tile.count - v * kWidth<T>);
    }
  }
  ATTENTION_EXT_INLINE Mask<T> visible(int v, int64_t key) const {
    const Mask<T> k = broadcast_index<T>(key);
    return (begin[v] <= k) & (k < end[v]);
  }

 private:
  static ATTENTION_EXT_INLINE void within(const int64_t* keys, int64_t first_key, int64_t count,
                                          Mask<T>& lanes) {
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

// A look at the stored bytes of a bool mask: most tiles of a padding, window or block mask hide all
// or nothing, and need no packing. Bytes are 0 or 1; anything else is kMixed.
class BoolScan {
 public:
  void add(const char* row, int64_t count) {
    constexpr int64_t kBytes = sizeof(Bytes);
    if (count < kBytes) {
      Bytes zeros = {}, ones = kOnes - Bytes{};
      memcpy(&zeros, row, count);
      memcpy(&ones, row, count);
      any_ |= zeros;
      all_ &= ones;
      return;
    }
    for (int64_t k = 0; k < count; k += kBytes) {
      Bytes bytes;
      memcpy(&bytes, row + (k + kBytes <= count ? k : count - kBytes), sizeof(bytes));
      any_ |= bytes;
      all_ &= bytes;
    }
  }
  MaskTile found() const {
    if ((any_[0] | any_[1] | any_[2] | any_[3]) == 0) return MaskTile::kAllHidden;
    return (all_[0] & all_[1] & all_[2] & all_[3]) == kOnes ? MaskTile::kNone : MaskTile::kMixed;
  }

 private:
  typedef uint64_t Bytes __attribute__((vector_size(32)));
  static constexpr uint64_t kOnes = 0x0101010101010101u;

  Bytes any_ = {}, all_ = ~Bytes{};
};
inline MaskTile scan_bools(const char* const* row, int64_t rows, int64_t count) {
  constexpr int64_t kRows = 8;  // between two looks at what was found
  BoolScan scan;
  for (int64_t i = 0; i < rows; ++i) {
    scan.add(row[i], count);
    if (i % kRows == kRows - 1 && scan.found() == MaskTile::kMixed) break;
  }
  return scan.found();
}

// Fills out[key][lane] with the mask's addends, in powers of two, for the keys [begin, end) of the
// kv tile at first_key, and says how large they get. kNone if every addend is 0 there, kAllHidden
// if every one hides.
template <class T>
inline MaskTile pack_mask(const TensorView& view, const LaneTile<T>& tile, int64_t first_key,
                          int64_t begin, int64_t end, T* __restrict out, T& largest_addend) {
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
  if (view.dtype == DType::kBool && view.column_stride == 1)
    return MaskTile::kMixed;  // only 0 and -infinity
  Mask<T> some_shown = {}, some_changed = {};
  Vec<T> largest = {};
  for (int64_t k = 0; k < end - begin; ++k) {
    for (int v = 0; v < vectors; ++v) {
      const Vec<T> x = load(out + k * kLanes<T> + v * w);
      const Mask<T> shown = x != -kInfinity<T>;
      some_shown |= shown;
      some_changed |= x != T(0);
      largest = maximum(keep<T>(shown, x < T(0) ? -x : x), largest);
    }
  }
  if (!any(some_shown)) return MaskTile::kAllHidden;
  if (!any(some_changed)) return MaskTile::kNone;
  with_flag(is_drawn(horizontal_max<T>(largest)), [&](auto drawn) {
    const auto power = [](auto x) {
      if constexpr (decltype(drawn)::value) x = draw_together<T>(x);
      return x * kLog2E<T>;
    };
    for (int64_t k = 0; k < end - begin; ++k) {
      for (int v = 0; v < vectors; ++v) {
        T* cell = out + k * kLanes<T> + v * w;
        store(cell, power(load(cell)));
      }
    }
    largest_addend = power(horizontal_max<T>(largest));
  });
  return MaskTile::kMixed;
}

template <class T>
struct CellTile {
  const LaneTile<T>& lanes;
  const int64_t first_key;
  Segments<T> segments;
  const LaneIntervals<T> intervals;
  int64_t begin = 0, end = 0;  // keys that the intervals let some row see
  MaskTile mask = MaskTile::kNone;
  bool trimmed = false;  // the segments leave out what the mask hides from all rows of a vector
  const T* addend = nullptr;   // [kBlockKV][kLanes], if mask is kMixed; -infinity hides
  T largest_addend = T(0);     // in size, of those that do not hide
  const T* dropout = nullptr;  // [kBlockKV][kLanes], if there is dropout: 0 or 1 / (1 - p)

  CellTile(const LaneTile<T>& tile, int64_t first, int64_t count)
      : lanes(tile), first_key(first), segments(tile, first, count), intervals(tile, first, count) {
    if (segments.size == 0) return;
    begin = segments.segment[0].begin;
    end = segments.segment[segments.size - 1].end;
  }

  bool empty() const { return segments.size == 0 || mask == MaskTile::kAllHidden; }

  // Reads the mask's cells into `memory` [kBlockKV][kLanes].
  void read_mask(const TensorView& view, T* memory) {
    addend = memory;
    mask = pack_mask(view, lanes, first_key, begin, end, memory, largest_addend);
    if (mask == MaskTile::kMixed) trim();
  }

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
    return general_exponent(score, dot, addend_at(v, key), load(lanes.slope + v * kWidth<T>),
                            distance(v, key), reference);
  }
  // One cell, for the rare ones that need care.
  bool cell_visible(int64_t lane, int64_t key) const {
    const int64_t j = first_key + key;
    if (j < lanes.begin[lane] || j >= lanes.end[lane]) return false;
    return mask == MaskTile::kNone || addend[key * kLanes<T> + lane] != -kInfinity<T>;
  }

 private:
  // Cuts the segments down to what the mask shows to some row of each vector. Every vector keeps at
  // most one piece of a segment: a row's sums are those of the whole segment but for zeros,
  // whatever its neighbours see.
  void trim() {
    Segments<T> pieces;
    for (int i = 0; i < segments.size; ++i) {
      const Segment& s = segments.segment[i];
      for (int v = s.first_vector; v < s.last_vector; ++v) {
        const KeyRange keys = shown(v, s);
        if (keys.begin == keys.end) continue;
        Segment* last = pieces.size ? &pieces.segment[pieces.size - 1] : nullptr;
        if (last && last->last_vector == v && last->begin == keys.begin && last->end == keys.end) {
          last->last_vector = v + 1;
        } else {
          pieces.segment[pieces.size++] = {keys.begin, keys.end, v, v + 1, s.partial};
        }
      }
    }
    trimmed = true;
    segments = pieces;
  }
  // The keys of the segment that the mask shows to some row of vector v, rounded outwards to whole
  // blocks of rows.
  KeyRange shown(int v, const Segment& s) const {
    constexpr int64_t kRound = 8;
    const auto hidden = [&](int64_t k) {
      return !any(Mask<T>(load(addend + k * kLanes<T> + v * kWidth<T>) != -kInfinity<T>));
    };
    int64_t begin = s.begin, end = s.end;
    while (begin < end && hidden(begin)) ++begin;
    if (begin == end) return {end, end};
    while (hidden(end - 1)) --end;
    begin -= (begin - s.begin) % kRound;
    return {begin, clamp_to(begin + (end - begin + kRound - 1) / kRound * kRound, begin, s.end)};
  }
};
