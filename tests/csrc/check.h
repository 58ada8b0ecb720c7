// The test framework of this folder: TEST(name) { CHECK(...); } defines a test, main() is here and
// runs them.
//
// One source file is one program. Where ATTENTION_EXT_ISA is defined, the program is skipped (exit
// status 77) on a machine that lacks that instruction set.
#pragma once

#include <cmath>
#include <cstdio>

namespace attention_ext_test {

struct Test {
  const char* name;
  void (*run)();
  Test* next;
};

inline Test* first_test = nullptr;
inline int failures = 0;

struct Registration {
  explicit Registration(Test* test) {
    test->next = first_test;
    first_test = test;
  }
};

inline void report(const char* file, int line, const char* what) {
  std::printf("%s:%d: failed: %s\n", file, line, what);
  ++failures;
}

inline void report_near(const char* file, int line, const char* what, double got, double want,
                        double tolerance) {
  // Written so that a NaN fails; equal infinities pass.
  if (got == want || std::fabs(got - want) <= tolerance) return;
  std::printf("%s:%d: failed: %s: got %.17g, expected %.17g within %g\n", file, line, what, got,
              want, tolerance);
  ++failures;
}

#define ATTENTION_EXT_TEXT(x) #x
#define ATTENTION_EXT_TEXT_OF(x) ATTENTION_EXT_TEXT(x)

inline bool is_supported() {
#if defined(ATTENTION_EXT_ISA) && defined(__x86_64__)
  const char* isa = ATTENTION_EXT_TEXT_OF(ATTENTION_EXT_ISA);
  __builtin_cpu_init();
  if (isa[0] == 'b') return true;  // baseline
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return false;
  return isa[3] == '2' ||
         (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"));
#else
  return true;
#endif
}

inline int run_all() {
  if (!is_supported()) {
    std::printf("skipped: this machine lacks the instruction set\n");
    return 77;
  }
  int count = 0;
  for (Test* test = first_test; test; test = test->next, ++count) {
    const int before = failures;
    test->run();
    std::printf("%s %s\n", failures == before ? "ok    " : "FAILED", test->name);
  }
  std::printf("%d tests, %d failed checks\n", count, failures);
  return count == 0 || failures > 0;
}

}  // namespace attention_ext_test

#define TEST(name)                                                                 \
  static void name();                                                              \
  static attention_ext_test::Test name##_test{#name, name, nullptr};               \
  static const attention_ext_test::Registration name##_registration{&name##_test}; \
  static void name()

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) attention_ext_test::report(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_NEAR(got, want, tolerance) \
  attention_ext_test::report_near(__FILE__, __LINE__, #got, got, want, tolerance)

int main() { return attention_ext_test::run_all(); }
