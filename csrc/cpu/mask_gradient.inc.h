// Gradient of a float mask: dBias = dS, summed over every dimension that the mask shares, in the
// mask's shape.
//
// Each tile of the gradient has one owner, which goes through the batch elements and heads that
// share it in order: no atomics, no copy per thread, the same bits however many threads. A task
// owns one own slice (batch index and head, or unit of heads) of the mask, a stretch of queries
// (all, if the rows are shared) and a stretch of keys. Base computes dS^T of a lane tile: Backward,
// or BackwardTangent for its tangent. Where a lane has a row of the mask to itself, a task is one
// super-block; its tiles are summed as they come and transposed at the end.

template <class T, template <class> class Base>
class MaskGradient : public Base<T> {
  using Sweep<T>::p_;
  using Sweep<T>::tile_;
  using Sweep<T>::unit_;
  static constexpr int64_t kKeys = 10 * Sweep<T>::kBlock;  // of a task

 public:
  static int64_t tasks(const MaskGradParams& m) { return Tasks(m).count(); }

  MaskGradient(const MaskGradParams& params, void* memory)
      : Base<T>(base_params(params), memory), m_(params) {
    const Tasks tasks(m_);
    by_lanes_ = p_.heads_per_unit == 1 && !m_.shared_rows && !m_.shared_columns;
    slabs_ = m_.shared_heads ? 1 : p_.heads_per_unit;
    rows_ = m_.shared_rows ? 1 : tasks.queries;
    columns_ = m_.shared_columns ? kWidth<T> : round_up_to_vector<T>(kKeys);
    sum_ = this->arena_.template take<T>(slabs_ * rows_ * columns_);
  }

  void run(int64_t task) {
    const Tasks tasks(m_);
    const int64_t key_block = task % tasks.key_blocks,
                  query_block = task / tasks.key_blocks % tasks.query_blocks;
    const int64_t slice = task / (tasks.key_blocks * tasks.query_blocks);
    this->key_limit_ = {key_block * kKeys, (key_block + 1) * kKeys};
    first_query_ = query_block * tasks.queries;
    memset(sum_, 0, slabs_ * rows_ * columns_ * sizeof(T));
    const int64_t units_per_batch = p_.num_heads / p_.heads_per_unit;
    const int64_t own_units = m_.shared_heads ? 1 : units_per_batch;
    const int64_t own_unit = slice % own_units;
    for (int64_t i = 0; i < tasks.batches_sharing; ++i) {
      const int64_t batch = batch_of(slice / own_units, i);
      for (int64_t u = 0; u < units_per_batch / own_units; ++u) {
        this->for_super_blocks(
            batch * units_per_batch + own_unit + u, first_query_ * p_.heads_per_unit,
            (first_query_ + tasks.queries) * p_.heads_per_unit, [&] { super_block(); });
      }
    }
    write(batch_of(slice / own_units, 0) * units_per_batch + own_unit, tasks.queries);
  }

 private:
  struct Tasks {
    int64_t slices = 1, batches_sharing = 1, queries, query_blocks, key_blocks;
    explicit Tasks(const MaskGradParams& m) {
      const AttentionParams& p = m.call.grad.forward;
      for (int64_t d = 0; d < p.batch_dims; ++d)
        (m.shared_batch[d] ? batches_sharing : slices) *= p.batch_size[d];
      if (!m.shared_heads) slices *= p.num_heads / p.heads_per_unit;
      // Whole lane tiles: a multiple of kLanes queries.
      const int64_t tiles = Base<T>::most_tiles(base_params(m)) / p.heads_per_unit;
      queries = m.shared_rows ? p.seqlen_q : (tiles > 1 ? tiles : 1) * kLanes<T>;
      query_blocks = (p.seqlen_q + queries - 1) / queries;
      key_blocks = m.shared_columns ? 1 : (p.seqlen_kv + kKeys - 1) / kKeys;
    }
    int64_t count() const { return slices * query_blocks * key_blocks; }
  };
  static const typename Base<T>::Params& base_params(const MaskGradParams& m) {
    return Base<T>::params_of(m.call);
  }

  // The i-th batch element that shares own slice `own` of the mask.
  int64_t batch_of(int64_t own, int64_t i) const {
    int64_t batch = 0, step = 1;
    for (int64_t d = p_.batch_dims - 1; d >= 0; --d) {
      int64_t& rest = m_.shared_batch[d] ? i : own;
      batch += rest % p_.batch_size[d] * step;
      rest /= p_.batch_size[d];
      step *= p_.batch_size[d];
    }
    return batch;
  }

  void super_block() {
    if (m_.shared_columns) this->key_limit_.end = INT64_MAX;
    this->start_mask_rows();
    this->for_kv_tiles([&] {
      this->start_mask_keys();
      for (int64_t t = 0; t < this->tiles_; ++t) {
        const CellTile<T> cells = this->cells_of(t);
        if (cells.empty()) continue;
        const T* grads = this->mask_gradient_cells(t, cells);
        if (by_lanes_) {
          add_lanes(t, cells, grads);
        } else {
          add(cells, grads);
        }
      }
    });
  }

  // sum_[lane tile][key][lane] += the tile's dS^T.
  T* lanes_of(int64_t t) const { return sum_ + t * columns_ * kLanes<T>; }
  void add_lanes(int64_t t, const CellTile<T>& cells, const T* grads) {
    T* sum = lanes_of(t) + (this->first_key_ - this->key_limit_.begin) * kLanes<T>;
    const int64_t lanes = cells.lanes.vectors() * kWidth<T>;
    for (int64_t k = cells.begin; k < cells.end; ++k) {
      for (int64_t lane = 0; lane < lanes; lane += kWidth<T>) {
        T* out = sum + k * kLanes<T> + lane;
        store(out, load(out) + load(grads + k * this->stride() + lane));
      }
    }
  }

  // sum_[head][query][key] += the tile's dS.
  void add(const CellTile<T>& cells, const T* grads) {
    constexpr int w = kWidth<T>;
    for (int64_t lane = 0; lane < cells.lanes.count; lane += w) {
      for (int64_t k = 0; k < this->count_; k += w) {
        Vec<T> block[w];
        for (int i = 0; i < w; ++i) {
          block[i] =
              k + i < this->count_ ? load(grads + (k + i) * this->stride() + lane) : Vec<T>{};
        }
        transpose<T>(block);
        for (int64_t i = 0; i < w && lane + i < cells.lanes.count; ++i) {
          const int64_t slab = m_.shared_heads ? 0 : cells.lanes.heads[lane + i] - unit_.first_head;
          const int64_t row = m_.shared_rows ? 0 : cells.lanes.queries[lane + i] - first_query_;
          const int64_t key = m_.shared_columns ? 0 : this->first_key_ + k - this->key_limit_.begin;
          T* out = sum_ + (slab * rows_ + row) * columns_ + key;
          store(out, load(out) + block[i]);
        }
      }
    }
  }

  void write(int64_t unit, int64_t queries) {
    Unit u;
    find_unit(p_, unit, u);
    const int64_t rows = m_.shared_rows ? 1 : clamp_to(p_.seqlen_q - first_query_, 0, queries);
    const int64_t columns =
        m_.shared_columns ? 1 : clamp_to(p_.seqlen_kv - this->key_limit_.begin, 0, kKeys);
    const TensorView& view = m_.grad_mask;
    if (by_lanes_) {
      const int64_t step = view.row_stride * size_of(view.dtype);
      const char* first = address(view, p_, u, u.first_head, first_query_);
      first += this->key_limit_.begin * view.column_stride * size_of(view.dtype);
      alignas(64) T ones[kLanes<T>];
      for (T& one : ones) one = T(1);
      for (int64_t i = 0; i < rows; i += kLanes<T>) {
        const char* row[kLanes<T>];
        for (int64_t lane = 0; lane < kLanes<T>; ++lane) row[lane] = first + (i + lane) * step;
        unpack_lanes<T>(
            lanes_of(i / kLanes<T>), kLanes<T>, ones,
            {row, clamp_to(rows - i, 0, kLanes<T>), view.column_stride, columns, view.dtype});
      }
      return;
    }
    for (int64_t slab = 0; slab < slabs_; ++slab) {
      const int64_t head = m_.shared_heads ? 0 : u.first_head + slab;
      const char* first = address(view, p_, u, head, m_.shared_rows ? 0 : first_query_);
      first += (m_.shared_columns ? 0 : this->key_limit_.begin) * view.column_stride *
               size_of(view.dtype);
      for (int64_t row = 0; row < rows; ++row) {
        T* sum = sum_ + (slab * rows_ + row) * columns_;
        if (m_.shared_columns) {
          for (int i = 1; i < kWidth<T>; ++i) sum[0] += sum[i];
        }
        store_rows(view, first + row * view.row_stride * size_of(view.dtype), 1, columns, sum,
                   T(1));
      }
    }
  }

  const MaskGradParams& m_;
  bool by_lanes_;
  int64_t slabs_, rows_, columns_, first_query_ = 0;
  // [slabs][rows][columns]: heads of a unit, queries, keys, or 1 where the mask shares them;
  // by lanes [rows / kLanes][columns][kLanes].
  T* sum_;
};
