// What quadratic.py computes between the matrix products of a tile, each in one pass over memory.
//
// Shapes: N documents, Q queries, K keys. Matrices are contiguous. A bias has a value for each distance of a key from a query: of the
// first query, that for the first key is at `bias_first`, and that of the next query is one value before.
// If causal, the last query sees all keys, and each query before it one key less. Work is split by queries, so results do not
// depend on the number of threads.

#include <algorithm>
#include <vector>

typedef Number T;
typedef Sum A;

namespace {

inline int64_t visible_keys(int64_t query, int64_t queries, int64_t keys, bool causal) {
  return causal ? keys - queries + query + 1 : keys;
}

template <bool with_bias>
inline void weigh_query(T* __restrict products, const A* __restrict bias, A score_scale, int64_t visible, int64_t keys) {
  for (int64_t j = 0; j < visible; ++j) {
    const A positive = relu(load(products[j]) * score_scale + (with_bias ? bias[j] : A(0)));
    store(products[j], positive * positive);
  }
  for (int64_t j = visible; j < keys; ++j) store(products[j], A(0));
}

template <bool with_bias>
inline void weigh_query_backward(T* __restrict products, T* __restrict gradients, const A* __restrict bias, A* __restrict d_bias,
                                 A score_scale, int64_t visible, int64_t keys) {
  for (int64_t j = 0; j < visible; ++j) {
    const A positive = relu(load(products[j]) * score_scale + (with_bias ? bias[j] : A(0)));
    const A d_score = 2 * load(gradients[j]) * positive;
    store(products[j], positive * positive);
    store(gradients[j], d_score * score_scale);
    if (with_bias) d_bias[j] += d_score;
  }
  for (int64_t j = visible; j < keys; ++j) {
    store(products[j], A(0));
    store(gradients[j], A(0));
  }
}

}  // namespace

extern "C" {

// Replaces products by weights = relu(score_scale products + bias)^2, [N, Q, K], zero for invisible keys; bias may be null.
void weigh(T* products, const A* bias, int64_t bias_first, double score_scale, int64_t causal, int64_t n, int64_t queries,
           int64_t keys, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(int(threads))
  for (int64_t row = 0; row < n * queries; ++row) {
    const int64_t query = row % queries, visible = visible_keys(query, queries, keys, causal);
    T* weights = products + row * keys;
    if (bias) {
      weigh_query<true>(weights, bias + bias_first - query, A(score_scale), visible, keys);
    } else {
      weigh_query<false>(weights, nullptr, A(score_scale), visible, keys);
    }
  }
}

// `weigh`, and replaces gradients of weights by those of products; adds those of scores to d_scores [Q, K], null if bias is.
void weigh_backward(T* products, T* gradients, const A* bias, A* d_scores, int64_t bias_first, double score_scale, int64_t causal,
                    int64_t n, int64_t queries, int64_t keys, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads(int(threads))
  for (int64_t query = 0; query < queries; ++query) {
    const int64_t visible = visible_keys(query, queries, keys, causal);
    for (int64_t row = 0; row < n; ++row) {
      const int64_t begin = (row * queries + query) * keys;
      if (bias) {
        weigh_query_backward<true>(products + begin, gradients + begin, bias + bias_first - query, d_scores + query * keys,
                                   A(score_scale), visible, keys);
      } else {
        weigh_query_backward<false>(products + begin, gradients + begin, nullptr, nullptr, A(score_scale), visible, keys);
      }
    }
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
