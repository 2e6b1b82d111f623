// Included once per instruction set, with KERNELS_NAMESPACE, KERNELS_TABLE, KERNELS_NAME and KERNELS_WIDTH set.
// Everything here has internal linkage, so that code built for AVX-512 cannot stand in for the plain one.
//
// Vectors are GCC/Clang vector extensions. The last, partial vector of an array goes through a padded local buffer
// and the same vector code, so an element's result never depends on where in the array it stands.

#include <cstring>

#include "kernels.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace commbench {
namespace {
namespace KERNELS_NAMESPACE {

constexpr int width = KERNELS_WIDTH;  // bytes in a vector

template <class T>
struct Vec {
  typedef T type __attribute__((vector_size(width)));
  static constexpr int lanes = width / int(sizeof(T));
};

template <class V>
inline V load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof v);
}

// How an element type is stored and in what type it is accumulated. load and store move `lanes` elements.
template <class T>
struct Plain {
  using Acc = T;
  using V = typename Vec<T>::type;
  static constexpr int lanes = Vec<T>::lanes;
  static constexpr int size = sizeof(T);
  static V read(const unsigned char* p) { return load<V>(p); }
  static void write(unsigned char* p, V v) { store(p, v); }
};

inline uint32_t bits_of(float f) {
  uint32_t u;
  __builtin_memcpy(&u, &f, 4);
  return u;
}
inline float float_of(uint32_t u) {
  float f;
  __builtin_memcpy(&f, &u, 4);
  return f;
}

struct BFloat16 {
  using Acc = float;
  using V = Vec<float>::type;
  static constexpr int lanes = Vec<float>::lanes;
  static constexpr int size = 2;
  typedef uint16_t Half __attribute__((vector_size(width / 2)));
  using U = Vec<uint32_t>::type;
  static V read(const unsigned char* p) {
    Half h = load<Half>(p);
    U u = __builtin_convertvector(h, U) << 16;
    return (V)u;
  }
  static void write(unsigned char* p, V v) {  // round to nearest even; a NaN stays a (quiet) NaN
    U u = (U)v;
    U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    U nan = (u >> 16) | 0x40u;
    U is_nan = (U)(v != v);
    U r = (is_nan & nan) | (~is_nan & rounded);
    store(p, __builtin_convertvector(r, Half));
  }
};

// IEEE binary16 by integer arithmetic, where the processor does not convert. Subnormals, infinities and NaN included.
inline float half_to_float(uint16_t h) {
  uint32_t sign = uint32_t(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 0x1fu;
  uint32_t fraction = h & 0x3ffu;
  if (exponent == 31) return float_of(sign | 0x7f800000u | (fraction << 13) | (fraction ? 0x400000u : 0u));
  if (exponent == 0) {
    float magnitude = float(fraction) * 0x1p-24f;
    return float_of(sign | bits_of(magnitude));
  }
  return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
}
inline uint16_t float_to_half(float f) {
  uint32_t u = bits_of(f);
  uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((u >> 13) & 0x3ffu));
  if (u >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and above round to infinity
  if (u < 0x38800000u) {                                  // below 2^-14: subnormal; adding 0.5 rounds at 2^-24
    float shifted = float_of(u) + 0.5f;
    return uint16_t(sign | (bits_of(shifted) - 0x3f000000u));
  }
  uint32_t rounded = u + 0xfffu + ((u >> 13) & 1u);
  return uint16_t(sign | ((rounded - 0x38000000u) >> 13));
}

struct Float16 {
  using Acc = float;
  using V = Vec<float>::type;
  static constexpr int lanes = Vec<float>::lanes;
  static constexpr int size = 2;
  static V read(const unsigned char* p) {
#if defined(__AVX512F__)
    return (V)_mm512_cvtph_ps(load<__m256i>(p));
#elif defined(__F16C__) && KERNELS_WIDTH == 32
    return (V)_mm256_cvtph_ps(load<__m128i>(p));
#elif defined(__aarch64__)
    return (V)vcvt_f32_f16(load<float16x4_t>(p));
#else
    V v;
    for (int i = 0; i < lanes; ++i) v[i] = half_to_float(load<uint16_t>(p + 2 * i));
    return v;
#endif
  }
  static void write(unsigned char* p, V v) {
#if defined(__AVX512F__)
    store(p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__) && KERNELS_WIDTH == 32
    store(p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
    store(p, vcvt_f16_f32((float32x4_t)v));
#else
    for (int i = 0; i < lanes; ++i) store(p + 2 * i, float_to_half(v[i]));
#endif
  }
};

// Sums and products of integers wrap around: they are done on unsigned vectors, where that is defined.
struct Sum {
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};
struct Prod {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};
// A NaN on either side gives NaN, as in torch. (a != a) is never true for integers.
struct Min {
  template <class V>
  static V apply(V a, V b) {
    return ((a < b) | (a != a)) ? a : b;
  }
};
struct Max {
  template <class V>
  static V apply(V a, V b) {
    return ((a > b) | (a != a)) ? a : b;
  }
};

template <class T, class F, bool Avg, int N>
inline void reduce_vectors(void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t at) {
  constexpr size_t step = size_t(T::lanes) * T::size;
  typename T::V acc[N];
  const unsigned char* s = static_cast<const unsigned char*>(srcs[0]) + at;
  for (int k = 0; k < N; ++k) acc[k] = T::read(s + k * step);
  for (int j = 1; j < n_srcs; ++j) {
    s = static_cast<const unsigned char*>(srcs[j]) + at;
    for (int k = 0; k < N; ++k) acc[k] = F::apply(acc[k], T::read(s + k * step));
  }
  if constexpr (Avg) {
    for (int k = 0; k < N; ++k) acc[k] /= typename T::Acc(n_srcs);
  }
  for (int d = 0; d < n_dsts; ++d) {
    unsigned char* out = static_cast<unsigned char*>(dsts[d]) + at;
    for (int k = 0; k < N; ++k) T::write(out + k * step, acc[k]);
  }
}

template <class T, class F, bool Avg>
void reduce(void* const* dsts, int n_dsts, const void* const* srcs, int n_srcs, size_t count) {
  constexpr size_t step = size_t(T::lanes) * T::size;
  const size_t bytes = count * T::size;
  size_t at = 0;
  if (n_srcs == 2 && n_dsts == 1) {  // two ranks, known to the compiler: no inner loops
    for (; at + 4 * step <= bytes; at += 4 * step) reduce_vectors<T, F, Avg, 4>(dsts, 1, srcs, 2, at);
  } else if (n_srcs == 2 && n_dsts == 2) {
    for (; at + 4 * step <= bytes; at += 4 * step) reduce_vectors<T, F, Avg, 4>(dsts, 2, srcs, 2, at);
  } else {
    for (; at + 4 * step <= bytes; at += 4 * step) reduce_vectors<T, F, Avg, 4>(dsts, n_dsts, srcs, n_srcs, at);
  }
  for (; at + step <= bytes; at += step) reduce_vectors<T, F, Avg, 1>(dsts, n_dsts, srcs, n_srcs, at);
  const size_t rest = bytes - at;
  if (rest == 0) return;
  unsigned char padded[step];
  std::memset(padded, 0, step);
  std::memcpy(padded, static_cast<const unsigned char*>(srcs[0]) + at, rest);
  typename T::V acc = T::read(padded);
  for (int j = 1; j < n_srcs; ++j) {
    std::memcpy(padded, static_cast<const unsigned char*>(srcs[j]) + at, rest);
    acc = F::apply(acc, T::read(padded));
  }
  if constexpr (Avg) acc /= typename T::Acc(n_srcs);
  T::write(padded, acc);
  for (int d = 0; d < n_dsts; ++d) std::memcpy(static_cast<unsigned char*>(dsts[d]) + at, padded, rest);
}

void stream(void* dst, const void* src, size_t bytes) {
  auto* d = static_cast<unsigned char*>(dst);
  auto* s = static_cast<const unsigned char*>(src);
#if defined(__x86_64__)
  const size_t head = (64 - (reinterpret_cast<uintptr_t>(d) & 63)) & 63;
  if (bytes < head + 64) {
    std::memcpy(d, s, bytes);
    return;
  }
  std::memcpy(d, s, head);
  size_t at = head;
  for (; at + 64 <= bytes; at += 64) {
#if defined(__AVX512F__)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(d + at), load<__m512i>(s + at));
#elif defined(__AVX2__)
    _mm256_stream_si256(reinterpret_cast<__m256i*>(d + at), load<__m256i>(s + at));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(d + at + 32), load<__m256i>(s + at + 32));
#else
    for (int k = 0; k < 64; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(d + at + k), load<__m128i>(s + at + k));
#endif
  }
  _mm_sfence();  // streaming stores are not ordered by the release store of a flag that follows
  std::memcpy(d + at, s + at, bytes - at);
#else
  std::memcpy(d, s, bytes);
#endif
}

#define INT_OPS(S, U) \
  { reduce<Plain<U>, Sum, false>, reduce<Plain<U>, Prod, false>, reduce<Plain<S>, Min, false>, \
    reduce<Plain<S>, Max, false>, nullptr }
#define FLOAT_OPS(T) \
  { reduce<T, Sum, false>, reduce<T, Prod, false>, reduce<T, Min, false>, reduce<T, Max, false>, reduce<T, Sum, true> }

}  // namespace KERNELS_NAMESPACE
}  // namespace

using namespace KERNELS_NAMESPACE;

extern const Kernels KERNELS_TABLE = {
    KERNELS_NAME,
    {FLOAT_OPS(Plain<float>), FLOAT_OPS(Plain<double>), FLOAT_OPS(Float16), FLOAT_OPS(BFloat16),
     INT_OPS(int8_t, uint8_t), INT_OPS(uint8_t, uint8_t), INT_OPS(int32_t, uint32_t), INT_OPS(int64_t, uint64_t)},
    stream,
};

}  // namespace commbench
