// `dense_by`: the product of a few rows with a matrix, by a team of threads.
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

#ifndef WEIGHT
#define WEIGHT NUMBER
#endif
typedef WEIGHT W;  // of matrices: T, or int8_t with a scale for each row

inline float load(int8_t x) { return x; }

// How a vector of words as wide as A, which hold `parts` numbers each, becomes `parts` vectors: the j-th numbers, over `unit`.
template <class S>
struct Widened {
  using Vector = typename Lanes<A>::Vector;
  typedef std::conditional_t<sizeof(A) == 8, int64_t, int32_t> Word;
  typedef Word Signed __attribute__((vector_size(vector_bytes)));
  typedef std::make_unsigned_t<Word> Words __attribute__((vector_size(vector_bytes)));
  typedef Words Loose __attribute__((aligned(1), may_alias));
  static constexpr int64_t parts = sizeof(A) / sizeof(S), lanes = vector_bytes / int64_t(sizeof(A)), step = parts * lanes;
  static constexpr int64_t below = 8 * int64_t(sizeof(A) - sizeof(S));  // the number is the upper bits of a word
  static constexpr A unit = std::is_integral<S>::value ? A(1) / A(uint64_t(1) << below) : A(1);

  static Words read(const S* from) { return *reinterpret_cast<const Loose*>(from); }
  static Vector part(Words all, int64_t j) {
    const Words upper = (all << (below - 8 * int64_t(sizeof(S)) * j)) >> below << below;
    if constexpr (std::is_integral<S>::value) return __builtin_convertvector((Signed)upper, Vector);
    return (Vector)upper;
  }
};

// A row in the order in which `dots` multiplies it by weights of type S.
template <class S, class X>
void prepare(const X* __restrict from, A* __restrict to, int64_t k) {
  constexpr int64_t parts = Widened<S>::parts, step = Widened<S>::step, lanes = Widened<S>::lanes;
  const int64_t whole = k / step * step;
  for (int64_t first = 0; first < whole; first += step) {
    for (int64_t i = 0; i < step; ++i) to[first + i % parts * lanes + i / parts] = load(from[first + i]);
  }
  for (int64_t i = whole; i < k; ++i) to[i] = load(from[i]);
}

// The sum of a vector, by halves.
inline A sum_of(typename Lanes<A>::Vector all) {
  typedef typename Widened<T>::Signed Places __attribute__((may_alias));
  alignas(vector_bytes) static constexpr typename Widened<T>::Word places[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  for (typename Widened<T>::Word half = Widened<T>::lanes / 2; half > 0; half /= 2) {
    all += __builtin_shuffle(all, *reinterpret_cast<const Places*>(places) ^ half);
  }
  return all[0];
}

// The products of prepared rows [rows, k] with a row of weights [k]. One row of weights at a time is read fastest.
template <int64_t rows, class S>
void dots(const A* x, const S* w, int64_t k, A* out, int64_t by_row) {
  using Wide = Widened<S>;
  constexpr int64_t parts = Wide::parts, step = Wide::step, n_sums = parts < 4 ? 4 : parts;
  typename Wide::Vector sums[rows][n_sums] = {};
  int64_t i = 0;
  const auto add = [&](int64_t from, int64_t to) {
    const typename Wide::Words all = Wide::read(w + from);
#pragma GCC unroll 8
    for (int64_t j = 0; j < parts; ++j) {
      const typename Wide::Vector weights = Wide::part(all, j);
#pragma GCC unroll 2
      for (int64_t row = 0; row < rows; ++row) sums[row][to + j] += read_vector(x + row * k + from + j * Wide::lanes) * weights;
    }
  };
  for (; i + n_sums / parts * step <= k; i += n_sums / parts * step) {
#pragma GCC unroll 4
    for (int64_t to = 0; to < n_sums; to += parts) add(i + to / parts * step, to);
  }
  for (; i + step <= k; i += step) add(i, 0);
#pragma GCC unroll 2
  for (int64_t row = 0; row < rows; ++row) {
    typename Wide::Vector all = {};
#pragma GCC unroll 8
    for (int64_t j = 0; j < n_sums; j += 2) all += sums[row][j] + sums[row][j + 1];
    A sum = sum_of(all) * Wide::unit;
    for (int64_t j = i; j < k; ++j) sum += x[row * k + j] * load(w[j]);
    out[row * by_row] = sum;
  }
}

// A linear map, or a table of vectors.
struct Matrix {
  const W* weight;  // [n, k]
  const A* scale;   // [n], the factors of rows; or null
  const T* bias;    // [n], or null

  A result(int64_t column, A sum) const {
    const A scaled = scale == nullptr ? sum : sum * scale[column];
    return bias == nullptr ? scaled : scaled + load(bias[column]);
  }
  Matrix from(int64_t column, int64_t k) const {
    return {weight + column * k, scale == nullptr ? nullptr : scale + column, bias == nullptr ? nullptr : bias + column};
  }
};

inline const T* as_numbers(const T* weights, int64_t, A*) { return weights; }
template <class S>
const T* as_numbers(const S* weights, int64_t n, A* memory) {
  T* to = reinterpret_cast<T*>(memory);
  for (int64_t i = 0; i < n; ++i) store(to[i], A(load(weights[i])));
  return to;
}

constexpr int64_t strip = 16;  // the columns that are given to a thread, and to `use`, together

// `columns` columns of the result, from `first` on, for rows packed in `vectors` vectors per value: [rows, strip] in all.
template <int64_t vectors, int64_t columns>
void dense_columns(const A* packed, const T* weight, const Matrix& matrix, int64_t first, T* out, int64_t rows, int64_t k) {
  using Vector = typename Lanes<T>::Vector;
  constexpr int64_t together = Lanes<T>::together, lanes = vectors * vector_bytes / int64_t(sizeof(A));
  Vector sums[columns][vectors] = {};
  const auto add = [&](int64_t i, auto pack) {
    Vector x[vectors];
#pragma GCC unroll 2
    for (int64_t v = 0; v < vectors; ++v) x[v] = read_vector(packed + i / together * lanes + v * (lanes / vectors));
#pragma GCC unroll 8
    for (int64_t column = 0; column < columns; ++column) {
      const A w = pack(weight + (first + column) * k + i);
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
    for (int64_t i = first; i < first + columns; ++i) store(out[row * strip + i], matrix.result(i, by_column[i - first][row]));
  }
}

// The products of rows packed in `vectors` vectors per value with `count` rows of a matrix [.., k] -> out [rows, strip].
template <int64_t vectors>
void strip_of_many(const A* packed, const Matrix& matrix, T* out, int64_t rows, int64_t k, int64_t count, A* memory) {
  constexpr int64_t columns = vector_bytes / 8;  // as many as there are registers for their sums
  const T* weight = as_numbers(matrix.weight, count * k, memory);
  int64_t i = 0;
  for (; i + columns <= count; i += columns) dense_columns<vectors, columns>(packed, weight, matrix, i, out, rows, k);
  for (; i < count; ++i) dense_columns<vectors, 1>(packed, weight, matrix, i, out, rows, k);
}

// x [rows, k] times the transpose of a matrix [n, k] by a team of threads, which share() the work and wait() for each other:
// use(row, first, count, values) for each strip. `own` holds `own_size(k)` numbers for each thread, and `shared` holds
// `shared_size(rows, k)`, for rows rounded up to whole vectors.
constexpr int64_t own_size(int64_t k) { return (std::is_same<W, T>::value ? few_rows : strip) * k; }
constexpr int64_t shared_size(int64_t rows, int64_t k) { return rows <= few_rows ? 0 : (rows + 31) / 32 * 32 * k; }
template <class Team, class Use>
void dense_by(const Team& team, const T* x, const Matrix& matrix, int64_t rows, int64_t k, int64_t n, A* own, A* shared,
              Use use) {
  const auto [begin, end] = team.share((n + strip - 1) / strip);
  if (rows <= few_rows) {
    for (int64_t row = 0; row < rows; ++row) prepare<W>(x + row * k, own + row * k, k);
    for (int64_t first = begin * strip; first < std::min(n, end * strip); first += strip) {
      const int64_t count = std::min(strip, n - first);
      A sums[few_rows][strip];
      T values[few_rows][strip];
      const W* w = matrix.weight + first * k;
      for (int64_t i = 0; i < count; ++i) {
        rows == 1 ? dots<1>(own, w + i * k, k, sums[0] + i, strip) : dots<2>(own, w + i * k, k, sums[0] + i, strip);
      }
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < count; ++i) store(values[row][i], matrix.result(first + i, sums[row][i]));
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
      (some > lanes ? strip_of_many<2> : strip_of_many<1>)(shared + group * pairs, matrix.from(first, k), results, some, k, count,
                                                           own);
      for (int64_t row = 0; row < some; ++row) use(group + row, first, count, results + row * strip);
    }
  }
}

}  // namespace
