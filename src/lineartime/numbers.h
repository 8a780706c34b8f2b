// What functions in C++ share: the types of tensors, activations and rotations. Included before every file that is built.
//
// T is the type of tensors: float, double, or bf16 as its bits. A is the type that they are computed in. A library is built for
// one type of tensors, NUMBER.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

template <class To, class From>
inline To bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

struct bf16 {
  uint16_t bits;
};

inline double load(double x) { return x; }
inline float load(float x) { return x; }
inline float load(bf16 x) { return bits<float>(uint32_t(x.bits) << 16); }

inline void store(double& to, double x) { to = x; }
inline void store(float& to, float x) { to = x; }
inline void store(bf16& to, float x) {  // to the nearest, ties to even
  const uint32_t all = bits<uint32_t>(x);
  const uint32_t rounded = (all + 0x7fff + ((all >> 16) & 1)) >> 16;
  to.bits = uint16_t((all & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);  // NaN stays NaN
}

// A row of numbers: rounded together, they take a third of the time, where the processor has a unit for it.
template <class A>
inline void store_row(A* __restrict to, const A* __restrict from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = from[i];
}
inline void store_row(bf16* __restrict to, const float* __restrict from, int64_t n) {
  int64_t i = 0;
#ifdef __AVX512BF16__
  for (; i + 32 <= n; i += 32) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + i + 16), _mm512_loadu_ps(from + i));
    std::memcpy(to + i, &rounded, sizeof(rounded));
  }
#endif
  for (; i < n; ++i) store(to[i], from[i]);
}

template <class T>
struct Type {
  using A = T;
};
template <>
struct Type<bf16> {
  using A = float;
};

template <class A>
inline A relu(A x) {
  return x > 0 ? x : (x == x ? A(0) : x);  // NaN stays NaN
}

// 1 / (1 + exp(-x)); of NaN, any number. 2^y = 2^n 2^f, with n the nearest whole number, and the series of 2^f as long as T needs.
template <class T>
inline float sigmoid(float x) {
  // The magnitude is limited as a whole number: for limits of a float, a compiler takes the paths apart, and computes them all,
  // with results below the smallest normal number, which are slow.
  const uint32_t all = bits<uint32_t>(x), magnitude = all & 0x7fffffff, most = 0x42ae0000;  // 87
  const float y = bits<float>((magnitude < most ? magnitude : most) | (all & 0x80000000)) * -1.44269504f;
  const float shifted = y + 12582912.0f;  // 1.5 * 2^23: the last bits are n
  const float f = y - (shifted - 12582912.0f);
  float p = 9.6181291e-3f;
  if (sizeof(T) > 2) {
    p = 1.5252734e-5f;
    p = p * f + 1.5403530e-4f;
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
  }
  p = p * f + 5.5504109e-2f;
  p = p * f + 2.4022651e-1f;
  p = p * f + 6.9314718e-1f;
  p = p * f + 1.0f;
  return 1.0f / (1.0f + bits<float>(bits<int32_t>(p) + int32_t(bits<uint32_t>(shifted) << 23)));
}
template <class T>
inline double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

template <class T, class A>
inline A silu(A x) {
  return x * sigmoid<T>(x);
}

// One token's z gamma + beta, [2 half], rotated by its angles and scaled.
template <class A, class P>
inline void rotate(const A* __restrict z, const P* __restrict gamma, const P* __restrict beta, const A* __restrict cosine,
                   const A* __restrict sine, A by, A* __restrict to, int64_t half) {
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const int64_t j = i + half;
    const A x = by * (z[i] * load(gamma[i]) + load(beta[i])), y = by * (z[j] * load(gamma[j]) + load(beta[j]));
    to[i] = x * cosine[i] - y * sine[i];
    to[j] = x * sine[i] + y * cosine[i];
  }
}

typedef NUMBER Number;
typedef Type<Number>::A Sum;

}  // namespace
