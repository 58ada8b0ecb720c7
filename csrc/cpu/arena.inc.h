// Hands out aligned pieces of the scratch memory; with no memory it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : begin_(static_cast<char*>(memory)) {}
  template <class U>
  U* take(int64_t count) {
    char* piece = begin_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(U)) + 63) / 64 * 64;
    return reinterpret_cast<U*>(piece);
  }
  int64_t used() const { return used_; }

 private:
  char* begin_;
  int64_t used_ = 0;
};
