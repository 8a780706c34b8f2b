// `dense_rows`: the product of a few rows with a matrix.
//
// For one or two rows, the time is that of reading the matrix. For more, a vector holds a value of each row, so that the sums
// of all rows are computed together.

#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

typedef Number T;
typedef Sum A;

namespace {

constexpr int64_t few_rows = 2;

// out [rows, n] = x [rows, k] times the transpose of weight [n, k], plus bias [n], if there is one.
void dense_of_few(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t k, int64_t n, int64_t threads) {
  std::vector<A> memory(rows * k);
  for (int64_t i = 0; i < rows * k; ++i) memory[i] = load(x[i]);
#pragma omp parallel for schedule(static) num_threads(threads)
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

#ifdef __AVX512F__
constexpr int64_t vector_bytes = 64;
#else
constexpr int64_t vector_bytes = 32;
#endif

// How vectors with a value for each row are multiplied by a weight.
template <class T>
struct Lanes {
  using A = typename Type<T>::A;
  typedef A Vector __attribute__((vector_size(vector_bytes)));
  static constexpr int64_t together = 1;  // values of a row per lane
  static A pack(const T* x) { return load(*x); }
  static A pack_last(const T* x) { return load(*x); }
  static void add(Vector& sum, const Vector& x, A weight) { sum += x * weight; }
};

#ifdef __AVX512BF16__
// The CPU multiplies pairs, and adds both products to a sum in fp32.
template <>
struct Lanes<bf16> {
  using A = float;
  typedef A Vector __attribute__((vector_size(vector_bytes)));
  static constexpr int64_t together = 2;
  static A pack(const bf16* x) {
    A both;
    std::memcpy(&both, x, sizeof(both));
    return both;
  }
  static A pack_last(const bf16* x) { return bits<A>(uint32_t(x->bits)); }  // paired with a zero
  static void add(Vector& sum, const Vector& x, A weight) {
    sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)_mm512_set1_ps(weight));
  }
};
#endif

// Reads a vector from anywhere. A copy by memcpy would go through the stack, in halves.
template <class A>
inline typename Lanes<A>::Vector read_vector(const A* from) {
  typedef typename Lanes<A>::Vector Loose __attribute__((aligned(alignof(A)), may_alias));
  return *reinterpret_cast<const Loose*>(from);
}

// `columns` columns of the result, for rows packed in `vectors` vectors per value; the rows of `out` have the stride by_row.
// A sum of products becomes result(column, sum).
template <int64_t vectors, int64_t columns, class Result>
void dense_columns(const A* packed, const T* weight, T* out, int64_t rows, int64_t k, int64_t by_row, Result result) {
  using Vector = typename Lanes<T>::Vector;
  constexpr int64_t together = Lanes<T>::together, lanes = vectors * vector_bytes / int64_t(sizeof(A));
  Vector sums[columns][vectors] = {};
  const auto add = [&](int64_t i, auto pack) {
    Vector x[vectors];
#pragma GCC unroll 2
    for (int64_t v = 0; v < vectors; ++v) x[v] = read_vector(packed + i / together * lanes + v * (lanes / vectors));
#pragma GCC unroll 8
    for (int64_t column = 0; column < columns; ++column) {
      const A w = pack(weight + column * k + i);
#pragma GCC unroll 2
      for (int64_t v = 0; v < vectors; ++v) Lanes<T>::add(sums[column][v], x[v], w);
    }
  };
  const int64_t whole = k / together * together;
  for (int64_t i = 0; i < whole; i += together) add(i, [](const T* w) { return Lanes<T>::pack(w); });
  if (whole < k) add(whole, [](const T* w) { return Lanes<T>::pack_last(w); });
  A by_column[columns][lanes];
  std::memcpy(by_column, sums, sizeof(sums));
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < columns; ++i) store(out[row * by_row + i], result(i, by_column[i][row]));
  }
}

// The same as `dense_of_few`, for as many rows as `vectors` vectors hold.
template <int64_t vectors>
void dense_of_many(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t k, int64_t n, int64_t threads) {
  constexpr int64_t lanes = vectors * vector_bytes / int64_t(sizeof(A)), together = Lanes<T>::together;
  constexpr int64_t columns = vector_bytes / 8;       // as many as there are registers for their sums
  constexpr int64_t strip = 64 / int64_t(sizeof(T));  // columns of a cache line: rows may evict each other from the cache
  std::vector<A> packed((k + together - 1) / together * lanes);
  for (int64_t row = 0; row < rows; ++row) {
    const T* from = x + row * k;
    A* to = packed.data() + row;
    for (int64_t i = 0; i < k / together; ++i) to[i * lanes] = Lanes<T>::pack(from + i * together);
    if (k % together != 0) to[k / together * lanes] = Lanes<T>::pack_last(from + k - 1);
  }
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t first = 0; first < n; first += strip) {
    const int64_t count = std::min(strip, n - first);
    T results[lanes * strip];
    const auto compute = [&](auto width, int64_t column) {
      dense_columns<vectors, width.value>(
          packed.data(), weight + (first + column) * k, results + column, rows, k, strip,
          [&](int64_t i, A sum) { return bias == nullptr ? sum : sum + load(bias[first + column + i]); });
    };
    int64_t column = 0;
    for (; column + columns <= count; column += columns) compute(std::integral_constant<int64_t, columns>(), column);
    for (; column < count; ++column) compute(std::integral_constant<int64_t, 1>(), column);
    for (int64_t row = 0; row < rows; ++row) std::copy_n(results + row * strip, count, out + row * n + first);
  }
}

void dense_rows(const T* x, const T* weight, const T* bias, T* out, int64_t rows, int64_t k, int64_t n, int64_t threads) {
  constexpr int64_t lanes = vector_bytes / int64_t(sizeof(A));
  // Starting threads takes as long as reading some memory. All or one: libgomp ends those that a smaller team leaves out.
  const int64_t used = n * k < 16384 ? 1 : threads;
  if (rows <= few_rows) return dense_of_few(x, weight, bias, out, rows, k, n, used);
  for (int64_t row = 0; row < rows;) {
    const int64_t count = std::min(2 * lanes, rows - row);
    (count > lanes ? dense_of_many<2> : dense_of_many<1>)(x + row * k, weight, bias, out + row * n, count, k, n, used);
    row += count;
  }
}

}  // namespace
