// What quadratic.py and tiles.py compute between the matrix products of a tile, each in one pass over the memory.
//
// Shapes: N chunks of a tile, C slots of a chunk, Q queries and K keys of a chunk, e value width, s query/key width (even),
// W = 2 e + s. Matrices are contiguous. A stride of zero means that all chunks, or all slots, share a value. Work is split by
// rows: the number of threads affects only the order of summation in d_bias, d_gamma and d_beta.

#include <algorithm>
#include <vector>

typedef Number T;
typedef Sum A;

namespace {

// The derivative of x sigmoid(x), given sigmoid(x).
inline A slope(A x, A sigmoid_x) {
  return sigmoid_x * (1 + x * (1 - sigmoid_x));
}

// Where the cosines and sines of a row are, in tables [R, C, s / 2] of which chunk g has row turns[g].
inline int64_t turned_at(const int64_t* turns, int64_t row, int64_t c, int64_t half) {
  return (turns[row / c] * c + row % c) * half;
}

inline int64_t visible_keys(int64_t query, int64_t queries, int64_t keys, bool causal) {
  return causal ? keys - queries + query + 1 : keys;
}

}  // namespace

extern "C" {

// U and V = silu(before + bias), [2, N, C, e], and four maps rope(silu(before + bias) gamma + beta) of Z, [4, N, C, s]; the third
// times `scale`.
void activate(const T* before, const A* bias, const A* gamma, const A* beta, const A* cosines, const A* sines,
              const int64_t* turns, const A* scale, T* active, T* maps, int64_t n, int64_t c, int64_t e, int64_t s,
              int64_t threads) {
  const int64_t rows = n * c, half = s / 2;
#pragma omp parallel num_threads(int(threads))
  {
    std::vector<A> memory(s + std::max(e, s));
    A* __restrict z = memory.data();
    A* __restrict result = z + s;
#pragma omp for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
      const T* __restrict from = before + row * (2 * e + s);
      for (int64_t part = 0; part < 2; ++part) {
        const T* __restrict source = from + part * e;
        const A* __restrict b = bias + part * e;
        for (int64_t i = 0; i < e; ++i) result[i] = silu<T>(load(source[i]) + b[i]);
        store_row(active + (part * rows + row) * e, result, e);
      }
      for (int64_t i = 0; i < s; ++i) z[i] = silu<T>(load(from[2 * e + i]) + bias[2 * e + i]);
      const int64_t turn = turned_at(turns, row, c, half);
      const A* __restrict cosine = cosines + turn;
      const A* __restrict sine = sines + turn;
      for (int64_t map = 0; map < 4; ++map) {
        const A by = map == 2 ? scale[row / c] : A(1);
        rotate(z, gamma + map * s, beta + map * s, cosine, sine, by, result, half);
        store_row(maps + (map * rows + row) * s, result, s);
      }
    }
  }
}

// The sum [m] over the chunks before each of n or, if backwards, after it; `total` carries it from one tile to the next.
// `sums` has the first n_sums chunks or, if backwards, the last; `out` has the first n_out. The sum restarts at the chunks that
// `begins` marks, which may be null.
void run_sums(A* total, const T* sums, T* out, const bool* begins, int64_t n, int64_t n_sums, int64_t n_out, int64_t backwards,
              int64_t m, int64_t threads) {
  const int64_t block = 2048, missing = backwards ? n - n_sums : 0;
#pragma omp parallel for schedule(static) num_threads(int(threads))
  for (int64_t begin = 0; begin < m; begin += block) {
    const int64_t size = m - begin < block ? m - begin : block;
    A* __restrict t = total + begin;
    for (int64_t step = 0; step < n; ++step) {
      const int64_t chunk = backwards ? n - 1 - step : step;
      if (begins && begins[chunk]) {
        for (int64_t i = 0; i < size; ++i) t[i] = 0;
      }
      if (chunk < n_out) {
        store_row(out + chunk * m + begin, t, size);
      }
      if (chunk >= missing && chunk - missing < n_sums) {
        const T* __restrict sum = sums + (chunk - missing) * m + begin;
        for (int64_t i = 0; i < size; ++i) t[i] += load(sum[i]);
      }
    }
  }
}

// Replaces products by weights = scale relu(score_scale products + bias)^2, [N, Q, K], zero for invisible keys: if causal, the last
// query sees all keys, and each query before it one key less. The bias of the first query begins at `bias_first`, and that of the
// next one `bias_by_query` further; it may be null, and so may `scale`, which is then 1.
void weigh(T* products, const A* bias, int64_t bias_first, int64_t bias_by_query, const A* scale, int64_t by_chunk, int64_t by_query,
           double score_scale, int64_t causal, int64_t n, int64_t queries, int64_t keys, int64_t threads) {
  const std::vector<A> zeros(bias ? 0 : keys);
#pragma omp parallel for schedule(static) num_threads(int(threads))
  for (int64_t row = 0; row < n * queries; ++row) {
    const int64_t query = row % queries, visible = visible_keys(query, queries, keys, causal);
    T* __restrict weights = products + row * keys;
    const A* __restrict b = bias ? bias + bias_first + query * bias_by_query : zeros.data();
    const A by = scale ? scale[row / queries * by_chunk + query * by_query] : A(1), of_scores = A(score_scale);
    for (int64_t j = 0; j < visible; ++j) {
      const A positive = relu(load(weights[j]) * of_scores + b[j]);
      store(weights[j], positive * positive * by);
    }
    for (int64_t j = visible; j < keys; ++j) store(weights[j], A(0));
  }
}

// `weigh`, and replaces gradients of weights by those of scores, times `gradient_scale`; adds those of scores, without it and
// summed over chunks, to d_bias [Q, K], null if bias is.
void weigh_backward(T* products, const A* bias, int64_t bias_first, int64_t bias_by_query, const A* scale, int64_t by_chunk,
                    int64_t by_query, double score_scale, int64_t causal, T* gradients, double gradient_scale, A* d_bias, int64_t n,
                    int64_t queries, int64_t keys, int64_t threads) {
  const std::vector<A> zeros(bias ? 0 : keys);
#pragma omp parallel for schedule(static) num_threads(int(threads))
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t visible = visible_keys(query, queries, keys, causal);
    std::vector<A> unread(d_bias ? 0 : keys);
    const A* __restrict b = bias ? bias + bias_first + query * bias_by_query : zeros.data();
    A* __restrict d_b = d_bias ? d_bias + query * keys : unread.data();
    const A of_scores = A(score_scale), of_gradients = A(gradient_scale);
    for (int64_t chunk = 0; chunk < n; ++chunk) {
      T* __restrict weights = products + (chunk * queries + query) * keys;
      T* __restrict d_scores = gradients + (chunk * queries + query) * keys;
      const A by = scale ? scale[chunk * by_chunk + query * by_query] : A(1);
      for (int64_t j = 0; j < visible; ++j) {
        const A positive = relu(load(weights[j]) * of_scores + b[j]), scaled = positive * by;
        const A d_score = 2 * load(d_scores[j]) * scaled;
        store(weights[j], positive * scaled);
        store(d_scores[j], d_score * of_gradients);
        d_b[j] += d_score;
      }
      for (int64_t j = visible; j < keys; ++j) {
        store(weights[j], A(0));
        store(d_scores[j], A(0));
      }
    }
  }
}

// The gradient of `before` [N, C, W], from those of the gated output, of V and of the four maps; adds to d_bias [W], d_gamma
// and d_beta [4, s].
// With `gates_again`, d_gated is overwritten with the gated output.
void finish(const T* before, const A* bias, T* d_gated, int64_t gates_again, const T* attended, const T* d_v, const T* d_maps,
            const A* gamma, const A* cosines, const A* sines, const int64_t* turns, const A* scale, double score_scale,
            T* d_before, A* d_bias, A* d_gamma, A* d_beta, int64_t n, int64_t c, int64_t e, int64_t s, int64_t threads) {
  const int64_t rows = n * c, half = s / 2, width = 2 * e + s, sums = 8 * s + width;
  std::vector<A> all_sums(threads * sums, A(0));  // of every thread, added in order, so that results are reproducible
#pragma omp parallel for schedule(static) num_threads(int(threads))
  for (int64_t thread = 0; thread < threads; ++thread) {
    std::vector<A> memory(3 * s);
    A* __restrict z = memory.data();
    A* __restrict d_z = z + s;
    A* __restrict turned = d_z + s;
    A* __restrict d_b = all_sums.data() + thread * sums + 8 * s;
    for (int64_t row = rows * thread / threads; row < rows * (thread + 1) / threads; ++row) {
      const T* __restrict from = before + row * (2 * e + s);
      T* __restrict d_g = d_gated + row * e;
      const T* __restrict out = attended + row * e;
      const T* __restrict d_value = d_v + row * e;
      T* __restrict to = d_before + row * (2 * e + s);
      for (int64_t i = 0; i < e; ++i) {
        const A x = load(from[i]) + bias[i], sigmoid_x = sigmoid<T>(x), attended_here = load(out[i]);
        const A gradient = load(d_g[i]) * attended_here * slope(x, sigmoid_x);
        if (gates_again) store(d_g[i], x * sigmoid_x * attended_here);
        store(to[i], gradient);
        d_b[i] += gradient;
      }
      for (int64_t i = e; i < 2 * e; ++i) {
        const A x = load(from[i]) + bias[i], gradient = load(d_value[i - e]) * slope(x, sigmoid<T>(x));
        store(to[i], gradient);
        d_b[i] += gradient;
      }
      for (int64_t i = 0; i < s; ++i) {
        z[i] = silu<T>(load(from[2 * e + i]) + bias[2 * e + i]);
        d_z[i] = 0;
      }
      const int64_t turn = turned_at(turns, row, c, half);
      const A* __restrict cosine = cosines + turn;
      const A* __restrict sine = sines + turn;
      for (int64_t map = 0; map < 4; ++map) {
        const T* __restrict d_map = d_maps + (map * rows + row) * s;
        const A* __restrict g = gamma + map * s;
        A* __restrict d_shift = all_sums.data() + thread * sums + map * s;
        A* __restrict d_scale = d_shift + 4 * s;
        const A by = map < 2 ? A(score_scale) : map == 2 ? scale[row / c] : A(1);
        for (int64_t i = 0; i < half; ++i) {
          const A x = by * load(d_map[i]), y = by * load(d_map[i + half]);
          turned[i] = x * cosine[i] + y * sine[i];
          turned[i + half] = y * cosine[i] - x * sine[i];
        }
        for (int64_t i = 0; i < s; ++i) {
          d_shift[i] += turned[i];
          d_scale[i] += turned[i] * z[i];
          d_z[i] += turned[i] * g[i];
        }
      }
      for (int64_t i = 0; i < s; ++i) {
        const A x = load(from[2 * e + i]) + bias[2 * e + i], gradient = d_z[i] * slope(x, sigmoid<T>(x));
        store(to[2 * e + i], gradient);
        d_b[2 * e + i] += gradient;
      }
    }
  }
  for (int64_t thread = 0; thread < threads; ++thread) {
    for (int64_t i = 0; i < 4 * s; ++i) {
      d_beta[i] += all_sums[thread * sums + i];
      d_gamma[i] += all_sums[thread * sums + 4 * s + i];
    }
    for (int64_t i = 0; i < width; ++i) d_bias[i] += all_sums[thread * sums + 8 * s + i];
  }
}

// One query of each stream to the first `seen` keys, which are read once, with their values: [B, s], [B, room, s], [B, room, e] ->
// [B, e]. `scale` [B] is the factor of the squared scores. Sums are of blocks of keys, so that they do not depend on the number of
// threads. A value whose weight is zero is not read.
void attend_token(const T* q, const T* k, const T* v, const A* bias, const int64_t* seen, const A* scale, T* out, double score_scale,
                  int64_t streams, int64_t room, int64_t s, int64_t e, int64_t longest, int64_t threads) {
  const int64_t block = 256, blocks = (longest + block - 1) / block, used = streams * longest * (s + e) < 65536 ? 1 : threads;
  std::vector<A> sums(streams * blocks * e);
#pragma omp parallel for schedule(static) num_threads(int(used))
  for (int64_t part = 0; part < streams * blocks; ++part) {
    const int64_t stream = part / blocks, first = part % blocks * block, last = std::min(first + block, seen[stream]);
    A* __restrict sum = sums.data() + part * e;
    for (int64_t j = first; j < last; ++j) {
      const T *__restrict query = q + stream * s, *__restrict key = k + (stream * room + j) * s;
      A product = 0;
#pragma omp simd reduction(+ : product)
      for (int64_t i = 0; i < s; ++i) product += load(query[i]) * load(key[i]);
      const A positive = relu(product * A(score_scale) + (bias ? bias[longest - seen[stream] + j] : A(0)));
      const A weight = positive * positive;
      const T* __restrict value = v + (stream * room + j) * e;
      if (weight == 0) continue;
#pragma omp simd
      for (int64_t i = 0; i < e; ++i) sum[i] += weight * load(value[i]);
    }
  }
  for (int64_t stream = 0; stream < streams; ++stream) {
    A* total = sums.data() + stream * blocks * e;
    for (int64_t part = 1; part < blocks; ++part) {
      for (int64_t i = 0; i < e; ++i) total[i] += total[part * e + i];
    }
    for (int64_t i = 0; i < e; ++i) store(out[stream * e + i], total[i] * scale[stream]);
  }
}

}  // extern "C"
