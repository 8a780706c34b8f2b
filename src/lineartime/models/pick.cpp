// `pick` for rows of logits [rows, n], with a number of [0, 1) for each.

#include "pick.h"

extern "C" void pick_rows(const Number* logits, const double* uniform, int64_t* tokens, int64_t rows, int64_t n,
                          double temperature, int64_t top_k, double top_p, double min_p, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(int(std::min(threads, rows)))
  for (int64_t row = 0; row < rows; ++row) {
    tokens[row] = pick(logits + row * n, n, uniform[row], Sampling{temperature, top_p, min_p, top_k});
  }
}
