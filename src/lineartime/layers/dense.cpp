// `dense_by` with C linkage, by OpenMP.

#include "dense.h"

#include <omp.h>

#include <utility>

namespace {

struct Team {
  int64_t me, size;
  void wait() const {
#pragma omp barrier
  }
  std::pair<int64_t, int64_t> share(int64_t n) const { return {n * me / size, n * (me + 1) / size}; }
};

}  // namespace

// out [rows, n] = x [rows, k] times the transpose of weight [n, k], plus bias [n], if there is one.
extern "C" void dense(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t k, int64_t n, int64_t threads) {
  // Starting threads takes as long as reading some memory. All or one: libgomp ends those that a smaller team leaves out.
  const int64_t used = n * k < 16384 ? 1 : threads;
  std::vector<A> own(used * own_size(k)), shared(shared_size(rows, k));
#pragma omp parallel num_threads(int(used))
  {
    const Team team{omp_get_thread_num(), omp_get_num_threads()};
    dense_by(team, x, Matrix{weight, nullptr, bias}, rows, k, n, own.data() + team.me * own_size(k), shared.data(),
             [&](int64_t row, int64_t first, int64_t count, const T* values) {
               std::copy_n(values, count, out + row * n + first);
             });
  }
}
