// What a FLASH layer computes between its two dense maps for one more token of each stream; see `step_projected` of stream.py.
//
// Shapes: B streams, C chunk size, e value width, s query/key width (even). Matrices are contiguous.
// T is the type of tokens, A that of the state and of everything in between.

#include <algorithm>
#include <vector>

namespace {

template <class A>
struct Stream {
  A *gate, *v, *z, *queries, *weights;  // [e] [e] [s] [2, s] [C]
};

template <class T, class A = typename Type<T>::A>
void step(const T* projected, const T* gamma, const T* beta, const A* cosines, const A* sines, int64_t turn_by_stream,
          const T* bias, int64_t bias_by_stream, const int64_t* slots, const A* share, const A* summary_share,
          double score_scale, A* sums, A* keys, A* values, int64_t* position, T* gated, int64_t streams, int64_t c, int64_t e,
          int64_t s, int64_t threads) {
  constexpr int64_t keys_at_once = 32, values_at_once = 128;
  const int64_t half = s / 2, key_parts = (c + keys_at_once - 1) / keys_at_once;
  const int64_t value_parts = (e + values_at_once - 1) / values_at_once, size = 2 * e + 3 * s + c;
  std::vector<A> memory(streams * size);
  const auto of = [&](int64_t b) {
    A* at = memory.data() + b * size;
    return Stream<A>{at, at + e, at + 2 * e, at + 2 * e + s, at + 2 * e + 3 * s};
  };
  const int used = int(std::min(threads, 1 + streams * s * e / 16384));  // starting threads takes as long as reading some memory
#pragma omp parallel num_threads(used)
  {
    // The token: U, V and Z, its queries, and its keys and values, which go to their slot of the open chunk.
#pragma omp for schedule(static)
    for (int64_t b = 0; b < streams; ++b) {
      const Stream<A> to = of(b);
      const T* __restrict from = projected + b * (2 * e + s);
      A* __restrict all = to.gate;
      for (int64_t i = 0; i < 2 * e + s; ++i) {
        const A x = load(from[i]);
        all[i] = x * sigmoid<T>(x);
      }
      const A* cosine = cosines + b * turn_by_stream;
      const A* sine = sines + b * turn_by_stream;
      for (int64_t map = 0; map < 4; ++map) {  // q_quad, k_quad, q_lin, k_lin
        const T* g = gamma + map * s;
        const T* o = beta + map * s;
        A* out = map % 2 == 0 ? to.queries + map / 2 * s : keys + ((b * 2 + map / 2) * c + slots[b]) * s;
        for (int64_t i = 0; i < half; ++i) {
          const A x = to.z[i] * load(g[i]) + load(o[i]), y = to.z[i + half] * load(g[i + half]) + load(o[i + half]);
          out[i] = x * cosine[i] - y * sine[i];
          out[i + half] = x * sine[i] + y * cosine[i];
        }
      }
      std::copy(to.v, to.v + e, values + (b * c + slots[b]) * e);
      ++position[b];
    }
    // The weights of the visible tokens of the chunk. The sums hold them too: their part in these is taken out here.
#pragma omp for schedule(static)
    for (int64_t task = 0; task < streams * key_parts; ++task) {
      const int64_t b = task / key_parts, first = task % key_parts * keys_at_once;
      const int64_t last = std::min(first + keys_at_once, slots[b] + 1);
      const Stream<A> at = of(b);
      const A* __restrict q_quad = at.queries;
      const A* __restrict q_lin = at.queries + s;
      for (int64_t j = first; j < last; ++j) {
        const A* __restrict k_quad = keys + (b * 2 * c + j) * s;
        const A* __restrict k_lin = keys + ((b * 2 + 1) * c + j) * s;
        A quadratic = 0, linear = 0;
#pragma omp simd reduction(+ : quadratic, linear)
        for (int64_t i = 0; i < s; ++i) {
          quadratic += q_quad[i] * k_quad[i];
          linear += q_lin[i] * k_lin[i];
        }
        const A score = quadratic * A(score_scale) + (bias == nullptr ? A(0) : load(bias[b * bias_by_stream + j]));
        const A positive = score > 0 ? score : (score == score ? A(0) : score);  // NaN stays NaN
        at.weights[j] = positive * positive * share[b * c + j] - linear * summary_share[b];
      }
    }
    // The sums of k_lin v^T, and what the token reads of them and of its chunk.
#pragma omp for schedule(static)
    for (int64_t task = 0; task < streams * value_parts; ++task) {
      const int64_t b = task / value_parts, first = task % value_parts * values_at_once;
      const int64_t width = std::min(values_at_once, e - first);
      const Stream<A> at = of(b);
      const A* __restrict k_lin = keys + ((b * 2 + 1) * c + slots[b]) * s;
      const A* __restrict v = at.v + first;
      A read[values_at_once] = {};
      for (int64_t i = 0; i < s; ++i) {
        A* __restrict sum = sums + (b * s + i) * e + first;
        const A k = k_lin[i], q = at.queries[s + i] * summary_share[b];
        for (int64_t x = 0; x < width; ++x) {
          sum[x] += k * v[x];
          read[x] += q * sum[x];
        }
      }
      for (int64_t j = 0; j <= slots[b]; ++j) {
        const A* __restrict value = values + (b * c + j) * e + first;
        const A weight = at.weights[j];
        for (int64_t x = 0; x < width; ++x) read[x] += weight * value[x];
      }
      for (int64_t x = 0; x < width; ++x) store(gated[b * e + first + x], at.gate[first + x] * read[x]);
    }
  }
}

}  // namespace

#define STEP(NAME, T, A)                                                                                                       \
  void step_##NAME(const T* projected, const T* gamma, const T* beta, const A* cosines, const A* sines, int64_t turn_by_stream, \
                   const T* bias, int64_t bias_by_stream, const int64_t* slots, const A* share, const A* summary_share,         \
                   double score_scale, A* sums, A* keys, A* values, int64_t* position, T* gated, int64_t streams, int64_t c,    \
                   int64_t e, int64_t s, int64_t threads) {                                                                    \
    step<T>(projected, gamma, beta, cosines, sines, turn_by_stream, bias, bias_by_stream, slots, share, summary_share,          \
            score_scale, sums, keys, values, position, gated, streams, c, e, s, threads);                                      \
  }

extern "C" {
STEP(bfloat16, bf16, float)
STEP(float32, float, float)
STEP(float64, double, double)
}
