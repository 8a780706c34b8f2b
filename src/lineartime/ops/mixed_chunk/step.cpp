// One more token of each stream in FLASH: a layer between its two projections, or whole layers; see step_native.py.
//
// Shapes: B streams, d model width, C chunk size, e value width, s query/key width (even). Matrices are contiguous.
// T is the type of tokens and of the open chunk, A the type of the sums and of intermediate values.

#include <type_traits>

#include "../dense.h"

namespace {

constexpr int64_t values_at_once = 128;

template <class A>
struct Stream {
  A *gate, *v, *z, *maps, *weights;  // [e] [e] [s] [4, s] [C]
};

// Gated attention. For stream b with its token in slot i, the bias of slot j is bias[first + b by_stream + i by_slot + j].
template <class T, class A = typename Type<T>::A>
struct Attention {
  const T *gamma, *beta;
  const A* rotations;  // [2, turns, s / 2], or null; turns is 1, or B
  int64_t turns;
  const T* bias;  // or null
  int64_t bias_first, bias_by_stream, bias_by_slot;
  int64_t published, divides_by_chunk_size;  // what sums are divided by: see `share` and `summary_share`
  A score_scale;
  A* sums;
  T *keys, *values;
  int64_t* position;
  int64_t streams;
  int64_t group;  // the number of tokens that are added to the sums at once
  int64_t c, e, s;

  // The factor of the weights of the visible tokens of the open chunk; a token in slot i sees i + 1 of them.
  A share(int64_t slot) const { return published ? A(1) : A(1) / A(slot + 1); }

  // The factor of the sum over the `read` tokens of the previous chunks.
  A summary_share(int64_t read) const { return read == 0 ? A(0) : A(1) / A(divides_by_chunk_size ? c : read); }

  // The output of stream b's token in some columns, from the sums of k_lin v^T and from its chunk. A group that is now full is
  // added to the sums. A number of columns that the compiler knows, `known`, lets it keep the output in registers.
  template <int64_t known>
  void read_columns(const Stream<A>& at, int64_t b, int64_t slot, A before, int64_t first, int64_t some, T* gated) const {
    const int64_t width = known ? known : some;
    const int64_t place = slot % group, first_of_group = b * c + slot - place;
    const int64_t joining = place + 1 == group ? group : 0;  // the number of tokens that are added to the sums
    A out[values_at_once] = {};
    if (joining == 0) {
      for (int64_t i = 0; i < s; ++i) {
        const A* __restrict sum = sums + (b * s + i) * e + first;
        const A q = at.maps[s + i] * before;
        for (int64_t x = 0; x < width; ++x) out[x] += q * sum[x];
      }
    } else {
      A row[values_at_once];
      std::vector<A> v(joining * values_at_once);
      for (int64_t j = 0; j < joining; ++j) {
        const T* __restrict value = values + (first_of_group + j) * e + first;
        for (int64_t x = 0; x < width; ++x) v[j * values_at_once + x] = load(value[x]);
      }
      for (int64_t i = 0; i < s; ++i) {
        A* __restrict sum = sums + (b * s + i) * e + first;
        const A q = at.maps[s + i] * before;
        for (int64_t x = 0; x < width; ++x) row[x] = sum[x];
        for (int64_t x = 0; x < width; ++x) out[x] += q * row[x];
        for (int64_t j = 0; j < joining; ++j) {
          const A k = load(keys[(first_of_group + b * c + c + j) * s + i]);  // rounded like what is subtracted again
          const A* __restrict value = v.data() + j * values_at_once;
          for (int64_t x = 0; x < width; ++x) row[x] += k * value[x];
        }
        for (int64_t x = 0; x < width; ++x) sum[x] = row[x];
      }
    }
    for (int64_t j = 0; j <= slot; ++j) {
      const T* __restrict value = values + (b * c + j) * e + first;
      const A weight = at.weights[j];
      for (int64_t x = 0; x < width; ++x) out[x] += weight * load(value[x]);
    }
    for (int64_t x = 0; x < width; ++x) store(gated[b * e + first + x], at.gate[first + x] * out[x]);
  }

  // projected [B, 2 e + s] -> gated [B, e].
  void step(const T* projected, T* gated, int64_t threads) const {
    constexpr int64_t keys_at_once = 32;
    const std::vector<A> one(rotations ? 0 : s / 2, A(1)), zero(rotations ? 0 : s / 2);  // the cosine and sine of no rotation
    const int64_t half = s / 2, key_parts = (c + keys_at_once - 1) / keys_at_once;
    const int64_t value_parts = (e + values_at_once - 1) / values_at_once, size = 2 * e + 5 * s + c;
    std::vector<A> memory(streams * size);
    std::vector<int64_t> slots(streams), read(streams);  // the slots of new tokens, and the number of tokens in previous chunks
    for (int64_t b = 0; b < streams; ++b) {
      slots[b] = (position[b] % c + c) % c;  // inside the chunk, whatever the position is
      read[b] = position[b]++ - slots[b];
    }
    const auto of = [&](int64_t b) {
      A* at = memory.data() + b * size;
      return Stream<A>{at, at + e, at + 2 * e, at + 2 * e + s, at + 2 * e + 5 * s};
    };
    const int used = streams * s * e < 16384 ? 1 : int(threads);  // as in `dense`
#pragma omp parallel num_threads(used)
    {
      // The token: U, V and Z, its queries, and its keys and values, which are stored in their slot of the open chunk.
#pragma omp for schedule(static)
      for (int64_t b = 0; b < streams; ++b) {
        const Stream<A> to = of(b);
        const T* __restrict from = projected + b * (2 * e + s);
        A* __restrict all = to.gate;
        for (int64_t i = 0; i < 2 * e + s; ++i) all[i] = silu<T>(load(from[i]));
        const A* __restrict cosine = rotations ? rotations + (turns > 1 ? b * half : 0) : one.data();
        const A* __restrict sine = rotations ? cosine + turns * half : zero.data();
        for (int64_t map = 0; map < 4; ++map) {  // q_quad, q_lin, k_quad, k_lin
          const int64_t row = map % 2 * 2 + map / 2;
          rotate(to.z, gamma + row * s, beta + row * s, cosine, sine, A(1), to.maps + map * s, half);
        }
        for (int64_t map = 0; map < 2; ++map) {
          for (int64_t i = 0; i < s; ++i) store(keys[((b * 2 + map) * c + slots[b]) * s + i], to.maps[(2 + map) * s + i]);
        }
        for (int64_t i = 0; i < e; ++i) store(values[(b * c + slots[b]) * e + i], to.v[i]);
      }
      // The weights of the visible tokens of the chunk. The sums contain the full groups before the token's, which are subtracted.
#pragma omp for schedule(static)
      for (int64_t task = 0; task < streams * key_parts; ++task) {
        const int64_t b = task / key_parts, first = task % key_parts * keys_at_once;
        const int64_t last = std::min(first + keys_at_once, slots[b] + 1);
        const Stream<A> at = of(b);
        const A* __restrict q_quad = at.maps;
        const A* __restrict q_lin = at.maps + s;
        const A own = share(slots[b]), before = summary_share(read[b]);
        const int64_t summed = slots[b] - slots[b] % group;
        for (int64_t j = first; j < last; ++j) {
          const T* __restrict k_quad = keys + (b * 2 * c + j) * s;
          const T* __restrict k_lin = keys + ((b * 2 + 1) * c + j) * s;
          A quadratic = 0, linear = 0;
#pragma omp simd reduction(+ : quadratic)
          for (int64_t i = 0; i < s; ++i) quadratic += q_quad[i] * load(k_quad[i]);
          if (j < summed) {
#pragma omp simd reduction(+ : linear)
            for (int64_t i = 0; i < s; ++i) linear += q_lin[i] * load(k_lin[i]);
          }
          const A added = bias == nullptr ? A(0) : load(bias[bias_first + b * bias_by_stream + slots[b] * bias_by_slot + j]);
          const A positive = relu(quadratic * score_scale + added);
          at.weights[j] = positive * positive * own - linear * before;
        }
      }
      // The output of the token from the sums of k_lin v^T and from its chunk. A group that is now full is added to the sums.
#pragma omp for schedule(static)
      for (int64_t task = 0; task < streams * value_parts; ++task) {
        const int64_t b = task / value_parts, first = task % value_parts * values_at_once;
        const int64_t width = std::min(values_at_once, e - first);
        if (width == values_at_once) {
          read_columns<values_at_once>(of(b), b, slots[b], summary_share(read[b]), first, width, gated);
        } else {
          read_columns<0>(of(b), b, slots[b], summary_share(read[b]), first, width, gated);
        }
      }
    }
  }
};

// The rest of a layer. Norms differ in whether they are centred, and in whether all features share one weight.
template <class T, class A = typename Type<T>::A>
struct Layer {
  const T* norm_weight;
  int64_t norm_by;     // the stride of the weights of features
  const T* norm_bias;  // or null
  int64_t centred;
  A eps;
  T* last;  // [B, shifted], the first normed features of the previous token; or null
  int64_t shifted;
  const T *to_projected, *projected_bias, *to_output, *output_bias;
  int64_t d;

  void normalize(const T* x, T* out) const {
    A mean = 0, squares = 0;
#pragma omp simd reduction(+ : mean)
    for (int64_t i = 0; i < d; ++i) mean += load(x[i]);
    mean = centred ? mean / d : A(0);
#pragma omp simd reduction(+ : squares)
    for (int64_t i = 0; i < d; ++i) squares += (load(x[i]) - mean) * (load(x[i]) - mean);
    const A scale = 1 / std::sqrt(squares / d + eps);
    for (int64_t i = 0; i < d; ++i) {
      const A normed = (load(x[i]) - mean) * scale * load(norm_weight[i * norm_by]);
      store(out[i], norm_bias == nullptr ? normed : normed + load(norm_bias[i]));
    }
  }

  // x [B, d] -> out [B, d], which may be x.
  void step(const T* x, const Attention<T>& attention, T* out, int64_t threads) const {
    const int64_t rows = attention.streams, e = attention.e, width = 2 * e + attention.s;
    std::vector<T> normed(rows * d), projected(rows * width), gated(rows * e);
    for (int64_t row = 0; row < rows; ++row) {
      normalize(x + row * d, normed.data() + row * d);
      if (last != nullptr) std::swap_ranges(last + row * shifted, last + (row + 1) * shifted, normed.data() + row * d);
    }
    dense(normed.data(), to_projected, projected_bias, projected.data(), rows, d, width, threads);
    attention.step(projected.data(), gated.data(), threads);
    dense(gated.data(), to_output, output_bias, normed.data(), rows, e, d, threads);
    for (int64_t i = 0; i < rows * d; ++i) store(out[i], load(x[i]) + load(normed[i]));
  }
};

// Layers that differ only in their tensors, whose addresses are in the order below: x [B, d] -> out [B, d].
template <class T, class A = typename Type<T>::A>
void layers_step(const int64_t* addresses, int64_t layers, Attention<T> attention, Layer<T> layer, const T* x, T* out,
                 int64_t threads) {
  const auto next = [&](auto*& tensor) { tensor = reinterpret_cast<std::decay_t<decltype(tensor)>>(*addresses++); };
  for (int64_t i = 0; i < layers; ++i) {
    next(attention.gamma);
    next(attention.beta);
    next(attention.bias);
    next(layer.norm_weight);
    next(layer.norm_bias);
    next(layer.to_projected);
    next(layer.projected_bias);
    next(layer.to_output);
    next(layer.output_bias);
    next(layer.last);
    next(attention.sums);
    next(attention.keys);
    next(attention.values);
    next(attention.position);
    layer.step(i == 0 ? x : out, attention, out, threads);
  }
}

}  // namespace

#define SHARED(A)                                                                                                              \
  const A *rotations, int64_t turns, int64_t published, int64_t divides_by_chunk_size, double score_scale, int64_t streams, int64_t group,   \
      int64_t c, int64_t s, int64_t bias_first, int64_t bias_by_stream, int64_t bias_by_slot, int64_t e
#define ATTENTION(T, A, GAMMA, BETA, BIAS, SUMS, KEYS, VALUES, POSITION)                                                       \
  Attention<T> {                                                                                                               \
    GAMMA, BETA, rotations, turns, BIAS, bias_first, bias_by_stream, bias_by_slot, published, divides_by_chunk_size, A(score_scale), SUMS,   \
        KEYS, VALUES, POSITION, streams, group, c, e, s                                                                        \
  }

// The functions above for each type, with C linkage.
#define STEPS(NAME, T, A)                                                                                                      \
  void step_##NAME(SHARED(A), const T* gamma, const T* beta, const T* bias, A* sums, T* keys, T* values, int64_t* position,    \
                   const T* projected, T* gated, int64_t threads) {                                                            \
    ATTENTION(T, A, gamma, beta, bias, sums, keys, values, position).step(projected, gated, threads);                          \
  }                                                                                                                            \
  void layers_step_##NAME(SHARED(A), const int64_t* addresses, int64_t layers, int64_t norm_by, int64_t centred, double eps,   \
                          int64_t shifted, int64_t d, const T* x, T* out, int64_t threads) {                                   \
    Layer<T> layer{};                                                                                                          \
    layer.norm_by = norm_by, layer.centred = centred, layer.eps = A(eps), layer.shifted = shifted, layer.d = d;                \
    layers_step(addresses, layers, ATTENTION(T, A, {}, {}, {}, {}, {}, {}, {}), layer, x, out, threads);                       \
  }

extern "C" {
STEPS(bfloat16, bf16, float)
STEPS(float32, float, float)
STEPS(float64, double, double)
}
