#include "capability.h"

#include <cstdlib>
#include <cstring>
#include <string>

#include "../checks.h"

namespace attention_ext {
namespace baseline {
const Kernels* get();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels* get();
}
namespace avx512 {
const Kernels* get();
}
#endif

namespace {

struct Capability {
  const char* name;
  const Kernels* (*get)();
  bool (*supported)();
};

// From plain to best. Every processor with AVX2 and FMA has F16C, which not every compiler can ask
// for.
const Capability kCapabilities[] = {
    {"baseline", baseline::get, [] { return true; }},
#if defined(__x86_64__)
    {"avx2", avx2::get,
     [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
    {"avx512", avx512::get,
     [] {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("fma");
}},
#endif
};

const Kernels* choose() {
  const char* wanted = std::getenv("ATTENTION_EXT_CPU_CAPABILITY");
  const Kernels* best = nullptr;
  std::string valid;
  for (const Capability& c : kCapabilities) {
    if (!c.supported()) continue;
    valid += (valid.empty() ? "" : ", ") + std::string(c.name);
    if (!wanted || !*wanted || std::strcmp(wanted, c.name) == 0) best = c.get();
  }
  if (!best) {
    raise("value", "ATTENTION_EXT_CPU_CAPABILITY: expected one of " + valid +
                       " (what this processor and build have), got '" + wanted + "'");
  }
  return best;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* const chosen = choose();
  return *chosen;
}

}  // namespace attention_ext
