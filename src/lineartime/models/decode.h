// Parts of decode.cpp: products by a team of threads that share them, and norms.

#pragma once

#include <cmath>

#include "../layers/dense.h"
#include "pick.h"
#include "team.h"

namespace {

// Two vectors of weights. Those of bf16 are the even and the odd ones, which are widened without moving them between lanes.
template <class T>
struct Halves {
  using A = typename Type<T>::A;
  using Vector = typename Lanes<A>::Vector;
  static constexpr int64_t step = 2 * vector_bytes / int64_t(sizeof(A));
  static Vector first(const T* from) { return read_vector(from); }
  static Vector second(const T* from) { return read_vector(from + step / 2); }
  static int64_t place(int64_t i) { return i; }
};
template <>
struct Halves<bf16> {
  using Vector = typename Lanes<float>::Vector;
  typedef uint32_t Both __attribute__((vector_size(vector_bytes)));
  typedef Both Loose __attribute__((aligned(2), may_alias));
  static constexpr int64_t step = vector_bytes / 2;
  static Vector first(const bf16* from) { return (Vector)(*reinterpret_cast<const Loose*>(from) << 16); }
  static Vector second(const bf16* from) { return (Vector)(*reinterpret_cast<const Loose*>(from) & 0xffff0000); }
  static int64_t place(int64_t i) { return i / 2 + i % 2 * (step / 2); }
};

// A row in the order in which `dots` multiplies it by weights of type T.
template <class S>
void prepare(const S* __restrict from, A* __restrict to, int64_t k) {
  constexpr int64_t step = Halves<T>::step;
  const int64_t whole = k / step * step;
  for (int64_t first = 0; first < whole; first += step) {
    for (int64_t i = 0; i < step; ++i) to[first + Halves<T>::place(i)] = load(from[first + i]);
  }
  for (int64_t i = whole; i < k; ++i) to[i] = load(from[i]);
}

// The products of prepared rows [rows, k] with a row of weights [k]. One row of weights at a time is read fastest.
template <int64_t rows>
void dots(const A* x, const T* w, int64_t k, A* out, int64_t by_row) {
  using Vector = typename Lanes<A>::Vector;
  constexpr int64_t step = Halves<T>::step, half = step / 2;
  Vector sums[rows][4] = {};
  int64_t i = 0;
  const auto add = [&](int64_t from, int64_t to) {
    const Vector first = Halves<T>::first(w + from), second = Halves<T>::second(w + from);
#pragma GCC unroll 2
    for (int64_t row = 0; row < rows; ++row) {
      sums[row][to] += read_vector(x + row * k + from) * first;
      sums[row][to + 1] += read_vector(x + row * k + from + half) * second;
    }
  };
  for (; i + 2 * step <= k; i += 2 * step) add(i, 0), add(i + step, 2);
  if (i + step <= k) add(i, 0), i += step;
#pragma GCC unroll 2
  for (int64_t row = 0; row < rows; ++row) {
    const Vector all = (sums[row][0] + sums[row][1]) + (sums[row][2] + sums[row][3]);
    A sum = 0;
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < half; ++lane) sum += all[lane];
    for (int64_t j = i; j < k; ++j) sum += x[row * k + j] * load(w[j]);
    out[row * by_row] = sum;
  }
}

constexpr int64_t strip = 16;  // the columns that are given to a thread, and to `use`, together

// The products of rows packed in `vectors` vectors per value with `count` rows of a matrix [.., k] -> out [rows, strip].
template <int64_t vectors>
void strip_of_many(const A* packed, const T* weight, const T* bias, T* out, int64_t rows, int64_t k, int64_t count) {
  constexpr int64_t columns = vector_bytes / 8;  // as many as there are registers for their sums
  for (int64_t i = 0; i < count; i += i + columns <= count ? columns : 1) {
    const T* its_bias = bias == nullptr ? nullptr : bias + i;
    if (i + columns <= count) {
      dense_columns<vectors, columns>(packed, weight + i * k, its_bias, out + i, rows, k, strip);
    } else {
      dense_columns<vectors, 1>(packed, weight + i * k, its_bias, out + i, rows, k, strip);
    }
  }
}

// x [rows, k] times the transpose of weight [n, k] plus bias [n] by a team: use(row, first, count, values) for each strip.
// `own` holds 2 k numbers for each thread, and `shared` holds k numbers for each row, rounded up to whole vectors.
template <class Use>
void dense_by(const Team& team, const T* x, const T* weight, const T* bias, int64_t rows, int64_t k, int64_t n, A* own,
              A* shared, Use use) {
  const auto [begin, end] = team.share((n + strip - 1) / strip);
  if (rows <= few_rows) {
    for (int64_t row = 0; row < rows; ++row) prepare(x + row * k, own + row * k, k);
    for (int64_t first = begin * strip; first < std::min(n, end * strip); first += strip) {
      const int64_t count = std::min(strip, n - first);
      A sums[few_rows][strip];
      T values[few_rows][strip];
      const T* w = weight + first * k;
      for (int64_t i = 0; i < count; ++i) {
        rows == 1 ? dots<1>(own, w + i * k, k, sums[0] + i, strip) : dots<2>(own, w + i * k, k, sums[0] + i, strip);
      }
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < count; ++i) {
          store(values[row][i], bias == nullptr ? sums[row][i] : sums[row][i] + load(bias[first + i]));
        }
        use(row, first, count, values[row]);
      }
    }
    return;
  }
  constexpr int64_t lanes = vector_bytes / int64_t(sizeof(A)), together = Lanes<T>::together;
  const int64_t pairs = (k + together - 1) / together;
  const auto [from, to] = team.share(pairs);
  for (int64_t row = 0; row < rows; ++row) {  // rows that fill one or two vectors are packed together
    const int64_t group = row / (2 * lanes) * (2 * lanes), by = rows - group > lanes ? 2 * lanes : lanes;
    A* packed = shared + group * pairs + row - group;
    for (int64_t i = from; i < to; ++i) {
      const T* value = x + row * k + i * together;
      packed[i * by] = (i + 1) * together <= k ? Lanes<T>::pack(value) : Lanes<T>::pack_last(value);
    }
  }
  team.wait();
  for (int64_t first = begin * strip; first < std::min(n, end * strip); first += strip) {
    const int64_t count = std::min(strip, n - first);
    for (int64_t group = 0; group < rows; group += 2 * lanes) {
      T results[2 * lanes * strip];
      const int64_t some = std::min(2 * lanes, rows - group);
      const A* packed = shared + group * pairs;
      const T *w = weight + first * k, *its_bias = bias == nullptr ? nullptr : bias + first;
      if (some > lanes) {
        strip_of_many<2>(packed, w, its_bias, results, some, k, count);
      } else {
        strip_of_many<1>(packed, w, its_bias, results, some, k, count);
      }
      for (int64_t row = 0; row < some; ++row) use(group + row, first, count, results + row * strip);
    }
  }
}

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
