// What every processor of the architecture has: SSE2 on x86-64, NEON on AArch64, whatever the compiler makes of it elsewhere.
#define KERNELS_NAMESPACE plain
#define KERNELS_TABLE kernels_plain
#if defined(__aarch64__)
#define KERNELS_NAME "neon"
#else
#define KERNELS_NAME "plain"
#endif
#define KERNELS_WIDTH 16
#include "kernels_impl.hpp"

#include <cstdlib>
#include <initializer_list>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace commbench {

#if defined(__x86_64__)
namespace {
bool has_f16c() {  // not among the names that every compiler's __builtin_cpu_supports knows
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
}  // namespace
#endif

const Kernels* kernels_named(const char* name) {
  if (!std::strcmp(name, kernels_plain.name)) return &kernels_plain;
#if defined(__x86_64__)
  if (!std::strcmp(name, "avx2") && __builtin_cpu_supports("avx2") && has_f16c())
    return &kernels_avx2;
  if (!std::strcmp(name, "avx512") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return &kernels_avx512;
#endif
  return nullptr;
}

const Kernels& kernels() {
  static const Kernels& chosen = []() -> const Kernels& {
    const char* asked = std::getenv("COMMBENCH_SHM_ISA");
    if (asked) {
      if (const Kernels* k = kernels_named(asked)) return *k;
    }
    for (const char* name : {"avx512", "avx2"}) {
      if (const Kernels* k = kernels_named(name)) return *k;
    }
    return kernels_plain;
  }();
  return chosen;
}

}  // namespace commbench
