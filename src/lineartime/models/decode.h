// Parts of decode.cpp: norms, and sums of weighted rows.

#pragma once

#include <cmath>

#include "../layers/dense.h"
#include "pick.h"
#include "team.h"

namespace {

// A norm, or none if `weight` is null. All features share one weight if norm_by is 0.
struct Norm {
  const T *weight, *bias;
  int64_t by, centred;
  double eps;

  void apply(const T* x, T* out, int64_t d) const {
    if (weight == nullptr) {
      if (out != x) std::copy_n(x, d, out);
      return;
    }
    A mean = 0, squares = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < d; ++i) mean += load(x[i]);
    mean = centred ? mean / d : A(0);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < d; ++i) squares += (load(x[i]) - mean) * (load(x[i]) - mean);
    const A scale = 1 / std::sqrt(squares / d + A(eps));
    for (int64_t i = 0; i < d; ++i) {
      const A normed = (load(x[i]) - mean) * scale * load(weight[i * by]);
      store(out[i], bias == nullptr ? normed : normed + load(bias[i]));
    }
  }
};

// out [width] += weights [n] times rows [n, width] with the stride `by`.
template <class S, class A>
void add_rows(A* __restrict out, const A* weights, const S* rows, int64_t n, int64_t width, int64_t by) {
  int64_t j = 0;
  for (; j + 4 <= n; j += 4) {
    const S* __restrict first = rows + j * by;
    const A w0 = weights[j], w1 = weights[j + 1], w2 = weights[j + 2], w3 = weights[j + 3];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) {
      out[i] += w0 * load(first[i]) + w1 * load(first[by + i]) + (w2 * load(first[2 * by + i]) + w3 * load(first[3 * by + i]));
    }
  }
  for (; j < n; ++j) {
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] += weights[j] * load(rows[j * by + i]);
  }
}

}  // namespace
