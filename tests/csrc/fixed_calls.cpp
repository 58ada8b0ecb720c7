// Fixed calls of one instruction set's kernels, without torch: what count_instructions.py counts.
//
// Runs every call and prints its name. Each passes once through fixed_call(), which is all that is
// counted: tensors and what a derivative starts from are made before. With --compiler it only
// prints the compiler and its major version, which recorded counts belong to.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/kernels.h"

#define ATTENTION_EXT_TEXT(x) #x
#define ATTENTION_EXT_TEXT_OF(x) ATTENTION_EXT_TEXT(x)

namespace attention_ext::ATTENTION_EXT_ISA {
const Kernels* get();
}

namespace {

using namespace attention_ext;

#if defined(__clang__)
constexpr char kCompiler[] = "clang-" ATTENTION_EXT_TEXT_OF(__clang_major__);
#elif defined(__GNUC__)
constexpr char kCompiler[] = "gcc-" ATTENTION_EXT_TEXT_OF(__GNUC__);
#else
constexpr char kCompiler[] = "unknown-0";
#endif

enum class What { kForward, kBackward, kMaskGradient, kTangent, kBackwardTangent };
enum class Option { kNone, kCausal, kBoolMask, kFloatMask, kSoftcap, kAlibi, kDropout };

struct Spec {
  const char* name;
  What what;
  DType dtype = DType::kFloat32;
  Option option = Option::kNone;
  int64_t heads = 1, kv_heads = 1;
  int64_t queries = 150, keys = 150;
  int64_t head_dim = 64;
};

const Spec kSpecs[] = {
    {"forward_float32", What::kForward},
    {"forward_float32_causal", What::kForward, DType::kFloat32, Option::kCausal},
    {"forward_float32_bool_mask", What::kForward, DType::kFloat32, Option::kBoolMask},
    {"forward_float32_softcap", What::kForward, DType::kFloat32, Option::kSoftcap},
    {"forward_float32_alibi", What::kForward, DType::kFloat32, Option::kAlibi},
    {"forward_float32_dropout", What::kForward, DType::kFloat32, Option::kDropout},
    {"forward_bfloat16_causal", What::kForward, DType::kBFloat16, Option::kCausal},
    {"forward_float16_causal", What::kForward, DType::kFloat16, Option::kCausal},
    {"forward_float64_causal", What::kForward, DType::kFloat64, Option::kCausal},
    {"forward_float32_short_causal", What::kForward, DType::kFloat32, Option::kCausal, 8, 8, 64, 64,
     32},
    {"decode_float32", What::kForward, DType::kFloat32, Option::kNone, 8, 2, 1, 1000, 128},
    {"decode_bfloat16", What::kForward, DType::kBFloat16, Option::kNone, 8, 2, 1, 1000, 128},
    {"decode_float32_one_row", What::kForward, DType::kFloat32, Option::kNone, 2, 2, 1, 1000, 128},
    {"backward_float32", What::kBackward},
    {"backward_float32_causal", What::kBackward, DType::kFloat32, Option::kCausal},
    {"backward_float32_alibi", What::kBackward, DType::kFloat32, Option::kAlibi},
    {"backward_bfloat16_causal", What::kBackward, DType::kBFloat16, Option::kCausal},
    {"backward_float64_causal", What::kBackward, DType::kFloat64, Option::kCausal},
    {"mask_gradient_float32", What::kMaskGradient, DType::kFloat32, Option::kFloatMask},
    {"tangent_float32_causal", What::kTangent, DType::kFloat32, Option::kCausal},
    {"backward_tangent_float32_causal", What::kBackwardTangent, DType::kFloat32, Option::kCausal},
};

// Memory at a fixed place of a cache line, as torch's is.
struct Memory {
  explicit Memory(int64_t bytes)
      : data(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096 + 4096)) {}
  ~Memory() { std::free(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data;
};

// A contiguous (1, heads, rows, columns) tensor with numbers in [-1, 1), the same on every machine.
struct Tensor {
  Tensor(DType dtype, int64_t heads, int64_t rows, int64_t columns, uint32_t seed)
      : memory(heads * rows * columns * size_of(dtype)) {
    for (int64_t i = 0; i < heads * rows * columns; ++i) {
      seed = seed * 1664525u + 1013904223u;
      set(dtype, i, static_cast<float>(static_cast<int32_t>(seed) >> 8) / 8388608.f);
    }
    view.data = memory.data;
    view.dtype = dtype;
    view.head_stride = rows * columns;
    view.row_stride = columns;
    view.column_stride = 1;
  }
  void set(DType dtype, int64_t i, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (dtype == DType::kFloat64) {
      static_cast<double*>(memory.data)[i] = x;
    } else if (dtype == DType::kFloat32) {
      static_cast<float*>(memory.data)[i] = x;
    } else if (dtype == DType::kBFloat16) {
      static_cast<uint16_t*>(memory.data)[i] = static_cast<uint16_t>(bits >> 16);
    } else if (dtype == DType::kBool) {
      static_cast<uint8_t*>(memory.data)[i] = x < 0.5f;
    } else {  // float16: cut off; too small for a normal number is 0
      const uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
      const uint32_t half = rest < 0x38800000 ? 0 : (rest - 0x38000000) >> 13;
      static_cast<uint16_t*>(memory.data)[i] = static_cast<uint16_t>(sign | half);
    }
  }
  Memory memory;
  TensorView view;
};

// One of kSpecs: its tensors, and its tasks in the order in which one thread does them.
class Call {
 public:
  explicit Call(const Spec& spec)
      : spec_(spec), table_(spec.dtype == DType::kFloat64 ? kernels().float64 : kernels().float32) {
    const int64_t heads = spec.heads, queries = spec.queries, keys = spec.keys;
    const DType sums = spec.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    p_.num_heads = heads;
    p_.heads_per_unit = p_.key_group = p_.value_group = heads / spec.kv_heads;
    p_.seqlen_q = queries;
    p_.seqlen_kv = keys;
    p_.head_dim = p_.value_dim = spec.head_dim;
    p_.scale = 0.125;
    p_.query = query_like();
    p_.key = key_like();
    p_.value = key_like();
    p_.output = query_like();
    p_.lse = make(sums, heads, queries, 1);
    p_.state = make(sums, heads, queries, 2);
    set_option();
    if (spec.what == What::kForward) return;
    forward();
    set_derivatives(sums);
    if (spec.what == What::kBackwardTangent) run(What::kTangent);
  }

  void run() { run(spec_.what); }

 private:
  static const Kernels& kernels() { return *ATTENTION_EXT_ISA::get(); }

  TensorView make(DType dtype, int64_t heads, int64_t rows, int64_t columns) {
    const uint32_t seed = static_cast<uint32_t>(tensors_.size()) + 1;
    tensors_.push_back(std::make_unique<Tensor>(dtype, heads, rows, columns, seed));
    return tensors_.back()->view;
  }
  TensorView query_like() { return make(spec_.dtype, spec_.heads, spec_.queries, spec_.head_dim); }
  TensorView key_like() { return make(spec_.dtype, spec_.kv_heads, spec_.keys, spec_.head_dim); }

  void set_option() {
    switch (spec_.option) {
      case Option::kNone:
        break;
      case Option::kCausal:
        p_.visibility.right = 0;
        break;
      case Option::kBoolMask:
        p_.attn_mask = shared(make(DType::kBool, 1, spec_.queries, spec_.keys));
        break;
      case Option::kFloatMask:
        p_.attn_mask = shared(make(spec_.dtype, 1, spec_.queries, spec_.keys));
        break;
      case Option::kSoftcap:
        p_.softcap = 20.0;
        break;
      case Option::kAlibi:
        p_.alibi_slopes = make(DType::kFloat32, spec_.heads, 1, 1);
        break;
      case Option::kDropout:
        p_.dropout.probability = 0.1;
        p_.dropout.seed = &seed_;
        break;
    }
  }
  static TensorView shared(TensorView mask) {  // by all heads
    mask.head_stride = 0;
    return mask;
  }

  void set_derivatives(DType sums) {
    grad_.forward = p_;
    grad_.grad_output = query_like();
    grad_.grad_query = query_like();
    grad_.grad_key = key_like();
    grad_.grad_value = key_like();
    grad_.grad_key_group = grad_.grad_value_group = p_.key_group;
    if (p_.alibi_slopes.data) grad_.slope_sums = make(sums, spec_.heads, spec_.queries, 1);
    tangent_.grad = grad_;
    tangent_.tangent.query = query_like();
    tangent_.tangent.key = key_like();
    tangent_.tangent.value = key_like();
    tangent_.grad_output_tangent = query_like();
    tangent_.output_tangent = query_like();
    tangent_.lse_tangent = make(sums, spec_.heads, spec_.queries, 1);
    mask_.call.grad = grad_;
    mask_.shared_heads = true;
    if (p_.attn_mask.data)
      mask_.grad_mask = shared(make(spec_.dtype, 1, spec_.queries, spec_.keys));
  }

  void run(What what) {
    switch (what) {
      case What::kForward:
        forward();
        break;
      case What::kBackward:
        parts(table_.backward, grad_);
        break;
      case What::kMaskGradient:
        tasks(table_.mask_gradient, mask_);
        break;
      case What::kTangent:
        rows(table_.tangent, tangent_);
        break;
      case What::kBackwardTangent:
        parts(table_.backward_tangent, tangent_);
        break;
    }
  }

  void forward() {
    const int64_t units = p_.num_units(), all = p_.rows_per_unit();
    if (all <= table_.few_rows) {
      const int64_t chunks = table_.few_rows_chunks(p_), bytes = table_.partial_bytes(p_);
      char* partials = scratch(1, units * chunks * bytes);
      char* memory = scratch(0, table_.few_rows_scratch(p_));
      for (int64_t i = 0; i < units * chunks; ++i) {
        table_.few_rows_chunk(p_, i / chunks, i % chunks, partials + i * bytes, memory);
      }
      for (int64_t unit = 0; unit < units; ++unit) {
        table_.few_rows_merge(p_, unit, partials + unit * chunks * bytes, memory);
      }
      return;
    }
    const int64_t lanes = table_.lanes, most = table_.forward_rows(p_);
    const int64_t needed = (all + lanes - 1) / lanes * lanes, each = most < needed ? most : needed;
    char* memory = scratch(0, table_.forward_scratch(p_, each));
    for (int64_t unit = 0; unit < units; ++unit) {
      for (int64_t row = 0; row < all; row += each) table_.forward(p_, unit, row, each, memory);
    }
  }

  template <class Params>
  void rows(const RowKernel<Params>& kernel, const Params& params) {
    const int64_t each = kernel.rows(params);
    char* memory = scratch(0, kernel.scratch(params));
    for (int64_t unit = 0; unit < p_.num_units(); ++unit) {
      for (int64_t row = 0; row < p_.rows_per_unit(); row += each) {
        kernel.run(params, unit, row, memory);
      }
    }
  }

  template <class Params>
  void tasks(const TaskKernel<Params>& kernel, const Params& params) {
    char* memory = scratch(0, kernel.scratch(params));
    for (int64_t task = 0; task < kernel.tasks(params); ++task) kernel.run(params, task, memory);
  }

  template <class Params>
  void parts(const PartKernel<Params>& kernel, const Params& params) {
    const int64_t bytes = table_.accumulator_bytes(p_);
    char* sum = scratch(1, bytes);
    char* part = scratch(2, bytes);
    char* memory = scratch(0, kernel.scratch(params));
    for (int64_t unit = 0; unit < p_.num_units(); ++unit) {
      for (int64_t i = 0; i < kernel.parts(params, unit); ++i) {
        kernel.run(params, unit, i, i == 0 ? sum : part, memory);
        if (i > 0) table_.add_accumulator(p_, sum, part);
      }
      kernel.store(params, unit, sum);
    }
  }

  // Kept from one use to the next.
  char* scratch(int place, int64_t bytes) {
    if (bytes > bytes_[place]) {
      scratch_[place] = std::make_unique<Memory>(bytes);
      bytes_[place] = bytes;
    }
    return static_cast<char*>(scratch_[place]->data);
  }

  const Spec& spec_;
  const KernelTable& table_;
  std::vector<std::unique_ptr<Tensor>> tensors_;
  std::unique_ptr<Memory> scratch_[3];
  int64_t bytes_[3] = {-1, -1, -1};
  int64_t seed_ = 1;
  AttentionParams p_;
  GradParams grad_;
  TangentParams tangent_;
  MaskGradParams mask_;
};

// Whether this machine has the instruction set.
bool is_supported() {
#if defined(__AVX2__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return true;
#endif
}

}  // namespace

// What the counting starts and stops at.
extern "C" __attribute__((noinline)) void fixed_call(void* call) {
  static_cast<Call*>(call)->run();
}

int main(int count, char** arguments) {
  if (count > 1 && std::strcmp(arguments[1], "--compiler") == 0) {
    std::puts(kCompiler);
    return 0;
  }
  if (!is_supported()) return 77;
  for (const Spec& spec : kSpecs) {
    Call call(spec);
    fixed_call(&call);
    std::puts(spec.name);
  }
}
