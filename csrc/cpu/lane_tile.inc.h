// A lane tile: up to kLanes rows (queries) side by side, one per vector lane, and the keys they may see.
//
// Rows are position-major, so both ends of the visible interval grow with the lane. A stretch of keys is cut
// into segments in which the same vectors have a visible key; a causal diagonal is thus cut at single vectors,
// not at whole tiles, and what no row of a vector sees is never computed or read.

template <class T>
constexpr int kLanes = Tuning::kLaneVectors * kWidth<T>;
constexpr int kBlockKV = Tuning::kBlockKV;

struct Segment {
  int64_t begin, end;              // keys, relative to the kv tile
  int first_vector, last_vector;   // vectors [first, last) see at least one of these keys
  bool partial;                    // some cell of these is hidden by the interval
};

template <class T>
struct LaneTile {
  int64_t count = 0;                     // rows, the first `count` lanes
  int64_t begin[kLanes<T>];              // visible keys of each lane; unused lanes repeat the last row
  int64_t end[kLanes<T>];
  const char* mask_row[kLanes<T>];       // the mask's element for key 0, if there is a mask
  int64_t heads[kLanes<T>];              // output head and query of each lane
  int64_t queries[kLanes<T>];

  KeyRange keys() const { return {begin[0], end[kLanes<T> - 1]}; }  // seen by any row
};

// Which slices one unit of work reads; everything that does not depend on the row.
struct Unit {
  int64_t batch;                 // linear batch index
  int64_t index[kMaxBatchDims];  // the same, per dimension
  int64_t first_head;            // of heads_per_unit output heads
};

inline Unit unit_of(const AttentionParams& p, int64_t unit) {
  const int64_t units_per_batch = p.num_heads / p.heads_per_unit;
  Unit u;
  u.batch = unit / units_per_batch;
  u.first_head = unit % units_per_batch * p.heads_per_unit;
  int64_t rest = u.batch;
  for (int64_t d = p.batch_dims - 1; d >= 0; --d) {
    u.index[d] = rest % p.batch_size[d];
    rest /= p.batch_size[d];
  }
  return u;
}

// Address of element (unit's batch, head, row, 0).
inline const char* address(const TensorView& view, const AttentionParams& p, const Unit& u, int64_t head,
                           int64_t row) {
  int64_t offset = head * view.head_stride + row * view.row_stride;
  for (int64_t d = 0; d < p.batch_dims; ++d) offset += u.index[d] * view.batch_stride[d];
  return static_cast<const char*>(view.data) + offset * size_of(view.dtype);
}

// Addresses of the tile's rows in a tensor that has a row for every query and output head.
template <class T>
inline void row_addresses(const TensorView& view, const AttentionParams& p, const Unit& u, const LaneTile<T>& tile,
                          const char** row) {
  const char* base = address(view, p, u, 0, 0);
  const int64_t size = size_of(view.dtype);
  for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
    row[lane] = base + (tile.heads[lane] * view.head_stride + tile.queries[lane] * view.row_stride) * size;
  }
}

template <class T>
inline void describe_lanes(const AttentionParams& p, const Unit& u, int64_t first_row, LaneTile<T>& tile) {
  const int64_t left = p.rows_per_unit() - first_row;
  tile.count = left < kLanes<T> ? left : kLanes<T>;
  int64_t query = first_row / p.heads_per_unit;
  int64_t head = first_row % p.heads_per_unit;
  for (int64_t lane = 0; lane < kLanes<T>; ++lane) {
    const KeyRange range = visible_keys(p.visibility, query, p.seqlen_kv);
    tile.begin[lane] = range.begin;
    tile.end[lane] = range.end;
    tile.queries[lane] = query;
    tile.heads[lane] = u.first_head + head;
    if (lane + 1 < tile.count && ++head == p.heads_per_unit) {
      head = 0;
      ++query;
    }
  }
  if (p.attn_mask.data) row_addresses(p.attn_mask, p, u, tile, tile.mask_row);
}

// The segments of keys [first_key, first_key + count). A row may start and end in here once each, so there
// are at most 2 * kLaneVectors + 1 of them.
template <class T>
struct Segments {
  Segment segment[2 * Tuning::kLaneVectors + 2];
  int size = 0;

  Segments(const LaneTile<T>& tile, int64_t first_key, int64_t count) {
    constexpr int w = kWidth<T>;
    const int live = static_cast<int>((tile.count + w - 1) / w);
    const int64_t stop = first_key + count;
    int64_t key = first_key;
    while (key < stop) {
      int first = 0, last = 0;
      while (first < live && tile.end[first * w + w - 1] <= key) ++first;   // already past all its keys
      while (last < live && tile.begin[last * w] <= key) ++last;            // has reached its first key
      int64_t next = stop;
      if (first < live && tile.end[first * w + w - 1] < next) next = tile.end[first * w + w - 1];
      if (last < live && tile.begin[last * w] < next) next = tile.begin[last * w];
      if (next <= key) next = stop;
      if (first < last) {
        const bool partial = tile.begin[(last - 1) * w + w - 1] > key || tile.end[first * w] < next;
        segment[size++] = {key - first_key, next - first_key, first, last, partial};
      } else if (first >= live) {
        break;
      }
      key = next;
    }
  }
};

// Lanes' visible intervals relative to a kv tile, as vectors of integers to compare keys with.
template <class T>
struct LaneIntervals {
  Mask<T> begin[Tuning::kLaneVectors], end[Tuning::kLaneVectors];

  LaneIntervals(const LaneTile<T>& tile, int64_t first_key, int64_t count) {
    for (int v = 0; v < Tuning::kLaneVectors; ++v) {
      for (int i = 0; i < kWidth<T>; ++i) {
        const int64_t lane = v * kWidth<T> + i;
        using Int = typename VecTypes<T>::Int;
        begin[v][i] = static_cast<Int>(clamp_to(tile.begin[lane] - first_key, 0, count));
        end[v][i] = static_cast<Int>(clamp_to(tile.end[lane] - first_key, 0, count));
      }
    }
  }
  ATTENTION_EXT_INLINE Mask<T> visible(int v, int64_t key) const {
    const Mask<T> k = broadcast_index<T>(key);
    return (begin[v] <= k) & (k < end[v]);
  }
};

// What the mask tensor says about a lane tile and kv tile.
enum class MaskTile { kNone, kAllHidden, kMixed };

// Fills addend[key][lane] (-infinity: hidden) for the keys [begin, end) of the kv tile at first_key.
// kNone if every addend is 0 there, kAllHidden if every one hides.
template <class T>
inline MaskTile pack_mask(const AttentionParams& p, const LaneTile<T>& tile, int64_t first_key, int64_t begin,
                          int64_t end, T* __restrict addend) {
  constexpr int w = kWidth<T>, lanes = kLanes<T>;
  const int64_t skip = (first_key + begin) * p.attn_mask.column_stride * size_of(p.attn_mask.dtype);
  const char* row[kLanes<T>];
  bool same = true;  // a mask that all rows share is read once
  for (int64_t lane = 0; lane < lanes; ++lane) {
    row[lane] = tile.mask_row[lane] + skip;
    same = same && row[lane] == row[0];
  }
  const Rows rows{row, same ? 1 : lanes, p.attn_mask.column_stride, end - begin, p.attn_mask.dtype};
  T* out = addend + begin * lanes;
  if (same) {
    T line[kBlockKV + w];
    copy_rows<T, false>(rows, line, 0);
    for (int64_t k = 0; k < end - begin; ++k) {
      for (int v = 0; v < Tuning::kLaneVectors; ++v) store(out + k * lanes + v * w, broadcast(line[k]));
    }
  } else {
    pack_lanes<T>(rows, lanes, lanes, out);
  }
  Mask<T> some_shown = {}, some_changed = {};
  for (int64_t k = 0; k < (end - begin) * Tuning::kLaneVectors; ++k) {
    const Vec<T> x = load(out + k * w);
    some_shown |= x != -kInfinity<T>;
    some_changed |= x != T(0);
  }
  if (!any(some_shown)) return MaskTile::kAllHidden;
  return any(some_changed) ? MaskTile::kMixed : MaskTile::kNone;
}

// Whether lane may see a key of the kv tile; for the rare cells that need care one by one.
template <class T>
inline bool cell_visible(const LaneTile<T>& tile, int64_t lane, int64_t first_key, int64_t key, MaskTile mask,
                         const T* addend) {
  const int64_t j = first_key + key;
  if (j < tile.begin[lane] || j >= tile.end[lane]) return false;
  return mask != MaskTile::kMixed || addend[key * kLanes<T> + lane] != -kInfinity<T>;
}
