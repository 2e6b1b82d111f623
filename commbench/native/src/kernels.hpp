// The arithmetic: element-wise reductions of n arrays, and copies. One table per instruction set, chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace commbench {

enum class DType : int { f32, f64, f16, bf16, i8, u8, i32, i64 };
enum class Op : int { sum, prod, min, max, avg };
constexpr int n_dtypes = 8;
constexpr int n_ops = 5;

constexpr size_t item_size(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i8:
    case DType::u8:
      return 1;
  }
  return 0;
}

constexpr bool is_float(DType t) { return t == DType::f32 || t == DType::f64 || t == DType::f16 || t == DType::bf16; }

// dsts[d][i] = ((srcs[0][i] op srcs[1][i]) op srcs[2][i]) … for count elements: always in the order of srcs.
// avg divides the sum by n_srcs. A dst may be one of the srcs; any other overlap is not allowed. No alignment needed.
using ReduceFn = void (*)(void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t count);
using CopyFn = void (*)(void* dst, const void* src, size_t bytes);

struct Kernels {
  const char* name;
  ReduceFn reduce[n_dtypes][n_ops];  // null where the dtype has no such op (avg of integers)
  CopyFn stream;                     // copy with stores that bypass the caches, followed by a store fence
};

extern const Kernels kernels_plain;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#endif

// The best table for this processor. COMMBENCH_SHM_ISA=plain|avx2|avx512|neon asks for a lesser one.
const Kernels& kernels();
// A table by name, or null when this processor or build has none of that name.
const Kernels* kernels_named(const char* name);

}  // namespace commbench
