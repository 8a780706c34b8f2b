// The product of a few rows with a matrix: as fast as the matrix can be read.

#pragma once

#include <algorithm>
#include <vector>

namespace {

// x [rows, k] times weight [n, k], transposed, plus bias [n], if there is one: out [rows, n].
template <class T, class A = typename Type<T>::A>
void dense(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t k, int64_t n, int64_t threads) {
  std::vector<A> memory(rows * k);
  for (int64_t i = 0; i < rows * k; ++i) memory[i] = load(x[i]);
  const int used = int(std::min(threads, 1 + n * k / 16384));  // starting threads takes as long as reading some memory
#pragma omp parallel for schedule(static) num_threads(used)
  for (int64_t column = 0; column < n; ++column) {
    const T* __restrict w = weight + column * k;
    for (int64_t row = 0; row < rows; ++row) {
      const A* __restrict values = memory.data() + row * k;
      A sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t i = 0; i < k; ++i) sum += values[i] * load(w[i]);
      store(out[row * n + column], bias == nullptr ? sum : sum + load(bias[column]));
    }
  }
}

}  // namespace
