// Dropout's factors, 0 or 1 / (1 - p), of the cells of a lane tile: philox.h in vectors of 64-bit
// integers, the words of even and of odd lanes apart until they are compared.

// Several vectors of words for philox, which go through its rounds together: one alone would wait
// for its products.
template <int kN>
struct WideVecs {
  WideVec part[kN];

  static ATTENTION_EXT_INLINE WideVecs broadcast(uint64_t word) {
    WideVecs r;
#pragma GCC unroll 4
    for (WideVec& part : r.part) part = word - WideVec{};
    return r;
  }
  friend ATTENTION_EXT_INLINE WideVecs operator^(WideVecs a, const WideVecs& b) {
#pragma GCC unroll 4
    for (int i = 0; i < kN; ++i) a.part[i] ^= b.part[i];
    return a;
  }
  friend ATTENTION_EXT_INLINE WideVecs operator^(WideVecs a, uint64_t b) {
#pragma GCC unroll 4
    for (WideVec& part : a.part) part ^= b;
    return a;
  }
  friend ATTENTION_EXT_INLINE WideVecs operator>>(WideVecs a, int bits) {
#pragma GCC unroll 4
    for (WideVec& part : a.part) part >>= bits;
    return a;
  }
};

// Dropout's factors of W cells, given by query, number of batch element and head, and block of four
// keys. A cell keeps its weight, divided by 1 - p, where its random word reaches p * 2^32.
template <class T>
struct DropoutCells {
  static constexpr int kParts = 8 / static_cast<int>(sizeof(T));
  // One word of each lane: lane i is element i / kParts of part i % kParts.
  typedef WideVecs<kParts> Lanes;
  struct Rows {
    Lanes query, low_place, high_place;
  };
  typedef typename std::make_unsigned<typename VecTypes<T>::Int>::type Word;
  typedef Word Words __attribute__((vector_size(Tuning::kVectorBytes)));

  uint64_t seed, first_place;
  Word threshold;
  T kept;

  DropoutCells(const AttentionParams& p, const Unit& u)
      : seed(static_cast<uint64_t>(p.dropout.seed[u.batch])),
        first_place(static_cast<uint64_t>(u.batch % p.dropout.batches_per_pattern) *
                    static_cast<uint64_t>(p.num_heads)),
        threshold(static_cast<Word>(
            p.dropout.probability < 1.0 ? p.dropout.probability * 4294967296.0 : 0.0)),
        kept(static_cast<T>(p.dropout.probability < 1.0 ? 1.0 / (1.0 - p.dropout.probability)
                                                        : 0.0)) {}

  template <class F>
  static ATTENTION_EXT_INLINE Lanes lanes(F&& word_of_lane) {
    Lanes r;
    for (int part = 0; part < kParts; ++part) {
      uint64_t word[kWidth<double>];
      for (int i = 0; i < kWidth<double>; ++i) word[i] = word_of_lane(i * kParts + part);
      memcpy(&r.part[part], word, sizeof(word));
    }
    return r;
  }
  Rows rows(const int64_t* queries, const int64_t* heads) const {
    const auto place = [&](int lane) { return first_place + static_cast<uint64_t>(heads[lane]); };
    return {lanes([&](int lane) { return static_cast<uint64_t>(queries[lane]); }), lanes(place),
            lanes([&](int lane) { return place(lane) >> 32; })};
  }
  Rows row(int64_t query, int64_t head) const {
    const uint64_t place = first_place + static_cast<uint64_t>(head);
    return {Lanes::broadcast(static_cast<uint64_t>(query)), Lanes::broadcast(place),
            Lanes::broadcast(place >> 32)};
  }

  // factor[4 * i + k]: of key k of each lane's i-th block.
  template <int kBlocks>
  ATTENTION_EXT_INLINE void factors(const Lanes (&blocks)[kBlocks], const Rows& rows,
                                    Vec<T> (&factor)[4 * kBlocks]) const {
    typedef WideVecs<kBlocks * kParts> Wide;
    Wide key_block, query, low_place, high_place;
#pragma GCC unroll 4
    for (int i = 0; i < kBlocks * kParts; ++i) {
      key_block.part[i] = blocks[i / kParts].part[i % kParts];
      query.part[i] = rows.query.part[i % kParts];
      low_place.part[i] = rows.low_place.part[i % kParts];
      high_place.part[i] = rows.high_place.part[i % kParts];
    }
    const PhiloxWords<Wide> words =
        philox<Wide>(seed, key_block, query, low_place, high_place,
                     [](Wide a, uint64_t b) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (WideVec& part : a.part) part = multiply_low_halves(part, b - WideVec{});
      return a;
    });
    const Vec<T> factor_of_kept = broadcast(kept);
#pragma GCC unroll 8
    for (int i = 0; i < 4 * kBlocks; ++i) {
      const Wide& word = words.word[i % 4];
      const Words own = join(word.part[i / 4 * kParts], word.part[(i / 4 + 1) * kParts - 1]);
      factor[i] = own >= threshold ? factor_of_kept : Vec<T>{};
    }
  }

 private:
  // The words of all lanes from the first and the last part.
  static ATTENTION_EXT_INLINE Words join(WideVec first, WideVec last) {
    if constexpr (kParts == 1) {
      return first & Word{0xffffffff};
    } else {
      Vec<T> even = bit_cast<Vec<T>>(first), odd = bit_cast<Vec<T>>(last);
      exchange_blocks<T, 1>(even, odd, std::make_index_sequence<kWidth<T>>{});
      return bit_cast<Words>(even);
    }
  }
};

// f(key, its factors) for the rows of vector v and the keys [begin, end) of the kv tile at
// first_key, a multiple of 4; and for the keys beside them in the same blocks.
template <class T, class F>
ATTENTION_EXT_INLINE void for_dropout_factors(const DropoutCells<T>& cells, const LaneTile<T>& tile,
                                              int v, int64_t first_key, int64_t begin, int64_t end,
                                              F&& f) {
  // As many blocks as the registers hold: 18.1 cycles for a vector of factors against 19.0 with one
  // (AVX-512, 2026).
  constexpr int kBlocks = Tuning::kVectorBytes == 64 ? 2 : 1;
  constexpr int kKeys = 4 * kBlocks;
  static_assert(kBlockKV % kKeys == 0 && Tuning::kBackwardBlockKV % kKeys == 0,
                "a tile ends with a block");
  const auto rows = cells.rows(tile.queries + v * kWidth<T>, tile.heads + v * kWidth<T>);
  for (int64_t key = begin / kKeys * kKeys; key < end; key += kKeys) {
    typename DropoutCells<T>::Lanes blocks[kBlocks];
    for (int i = 0; i < kBlocks; ++i) {
      blocks[i] =
          DropoutCells<T>::Lanes::broadcast(static_cast<uint64_t>((first_key + key) / 4 + i));
    }
    Vec<T> factor[kKeys];
    cells.factors(blocks, rows, factor);
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) f(key + i, factor[i]);
  }
}

// f(v, key, its factors) for all vectors and keys of a tile's cells, and for keys beside them.
template <class T, class F>
ATTENTION_EXT_INLINE void for_dropout_factors(const AttentionParams& p, const Unit& u,
                                              const CellTile<T>& tile, F&& f) {
  const DropoutCells<T> cells(p, u);
  for (int v = 0; v < tile.lanes.vectors(); ++v) {
    const KeyRange keys = tile.keys_of(v);
    for_dropout_factors(cells, tile.lanes, v, tile.first_key, keys.begin, keys.end,
                        [&](int64_t k, Vec<T> factor) { f(v, k, factor); });
  }
}

// The same for one row and the W keys from first_key on.
template <class T>
inline Vec<T> dropout_of_keys(const AttentionParams& p, const Unit& u, int64_t head, int64_t query,
                              int64_t first_key) {
  typedef DropoutCells<T> Cells;
  const Cells cells(p, u);
  const typename Cells::Lanes block[1] = {
      Cells::lanes([&](int lane) { return static_cast<uint64_t>((first_key + lane) / 4); })};
  Vec<T> factor[4], own;
  cells.factors(block, cells.row(query, head), factor);
  for (int i = 0; i < kWidth<T>; ++i) own[i] = factor[(first_key + i) % 4][i];
  return own;
}
