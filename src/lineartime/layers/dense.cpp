// `dense` with C linkage.

#include "dense.h"

extern "C" void dense(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t k, int64_t n,
                      int64_t threads) {
  dense_rows(x, weight, bias, out, rows, k, n, threads);
}
