// `dense` for each type, with C linkage.

#include "dense.h"

extern "C" {
void dense_bfloat16(const bf16* x, const bf16* weight, const bf16* bias, bf16* out, int64_t rows, int64_t k, int64_t n,
                    int64_t threads) {
  dense(x, weight, bias, out, rows, k, n, threads);
}
void dense_float32(const float* x, const float* weight, const float* bias, float* out, int64_t rows, int64_t k, int64_t n,
                   int64_t threads) {
  dense(x, weight, bias, out, rows, k, n, threads);
}
void dense_float64(const double* x, const double* weight, const double* bias, double* out, int64_t rows, int64_t k, int64_t n,
                   int64_t threads) {
  dense(x, weight, bias, out, rows, k, n, threads);
}
}
