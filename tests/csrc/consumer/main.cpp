// Loads the library, which registers its operators with torch, and asks which instruction set it
// runs on.
#include <dlfcn.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <cstdio>
#include <string>

int main() {
  if (!dlopen(ATTENTION_EXT_LIBRARY, RTLD_NOW)) {
    std::printf("%s\n", dlerror());
    return 1;
  }
  std::array<StableIValue, 1> stack{};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("attention_ext::cpu_capability", "", stack.data(), TORCH_ABI_VERSION));
  const auto capability = torch::stable::detail::to<std::string>(stack[0]);
  std::printf("attention_ext runs on %s\n", capability.c_str());
  return capability.empty();
}
