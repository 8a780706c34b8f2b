// One more token of each stream through a whole model of FLASH layers, by one team of threads; see decoder.py.
//
// Shapes: B streams, d model width, C chunk size, e value width, s query/key width (even), V vocabulary. Matrices are
// contiguous.
// T is the type of vectors and of the open chunk, A the type of the summary and of intermediate values, by NUMBER; W that of
// matrices.

#include <cmath>

#include "../layers/dense.h"
#include "pick.h"
#include "team.h"

namespace {

constexpr int64_t near = 64;  // angles are sums: of a position that is divisible by this, and of the rest

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

// out [width] += weights [n] times rows [n, width] with the stride `by`. With `skip`, rows whose weights are zero are not read.
template <class S, class A>
void add_rows(A* __restrict out, const A* weights, const S* rows, int64_t n, int64_t width, int64_t by, bool skip = false) {
  int64_t at[4], found = 0;
  for (int64_t j = 0; j < n; ++j) {
    if (skip && weights[j] == 0) continue;
    at[found++] = j;
    if (found < 4) continue;
    const S *__restrict r0 = rows + at[0] * by, *__restrict r1 = rows + at[1] * by;
    const S *__restrict r2 = rows + at[2] * by, *__restrict r3 = rows + at[3] * by;
    const A w0 = weights[at[0]], w1 = weights[at[1]], w2 = weights[at[2]], w3 = weights[at[3]];
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] += w0 * load(r0[i]) + w1 * load(r1[i]) + (w2 * load(r2[i]) + w3 * load(r3[i]));
    found = 0;
  }
  for (int64_t k = 0; k < found; ++k) {
    const S* __restrict row = rows + at[k] * by;
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] += weights[at[k]] * load(row[i]);
  }
}

struct Layer {
  const T *gamma, *beta;  // [4, s]; of another memory than the sum, the last two rows of beta multiply the Y of the token before
  const A* bias;          // [C], the relative bias by the distance of a key from C - 1 down to 0; or null
  Norm norm;
  Matrix to_projected, to_output;
};

// The state of a layer: `ShiftedState`, and `MixedChunkState` or `MemoryState` in Python.
struct State {
  T* last_shifted;  // [B, shifted], the first normed features of the previous token; or null
  A* summary;
  T *keys, *values;
  int64_t* position;
  T* last_y;  // [B, s], the Y of the previous token, of which Z is silu, of mesa, whose full chunks Python folds; null of the sum
};

struct Model {
  int64_t layers, d, e, s, c, vocabulary;
  int64_t shifted;                       // the number of features that are shifted, or 0
  int64_t published, divides_by_chunk;   // what sums are divided by: see `weight_factor` and `summary_factor`
  double score_scale;
  int64_t rotated, angles;               // of the angles of a position, the first are those of rotations
  const double *frequencies, *cosines;   // [angles], and [near, angles, 2], the cosines and sines of positions below `near`
  Matrix embedding;                      // [V, d]
  const T* token_type;                   // [d], or null
  const T *sine_scale, *learned;         // the scale of sinusoids [1], or learned positions [.., d], or both null
  int64_t n_learned;
  Norm embedding_norm, norm;
  Matrix to_logits;                      // [V, d]
  const Layer* layer;
};

// Memory for intermediate values, which is kept between tokens.
struct Scratch {
  char* next;
  int64_t *slot, *before;      // [B], the place of a new token in its chunk, and the number of tokens before the chunk
  int64_t* turned_at;          // [B], the position of the angles in `turned`, plus 1
  double* turned;              // [B, angles, 2], the cosines and sines of positions that are divisible by `near`
  A *rotations, *activated;    // [B, 2, s / 2], [B, 2 e + s]
  T *x, *normed, *gated;       // [B, d], [B, d], [B, e]
  T* y;                        // [B, s]
  T* logits;                   // [B, V]
  A *shared, *own;             // see `dense_by`
  int64_t size_of_own;

  template <class P>
  void take(P*& pointer, int64_t n) {
    pointer = reinterpret_cast<P*>(next);
    next += (n * int64_t(sizeof(P)) + 63) / 64 * 64;
  }

  Scratch(char* from, const Model& m, int64_t rows, int64_t threads) : next(from) {
    const int64_t k = std::max(m.d, m.e);
    take(slot, rows);
    take(before, rows);
    take(turned_at, rows);
    take(turned, rows * m.angles * 2);
    take(rotations, rows * m.s);
    take(activated, rows * (2 * m.e + m.s));
    take(x, rows * m.d);
    take(normed, rows * m.d);
    take(gated, rows * m.e);
    take(y, rows * m.s);
    take(logits, rows * m.vocabulary);
    take(shared, shared_size(rows, k));
    size_of_own = std::max(own_size(k), 6 * m.s + m.c + m.e + m.c * m.s) + 64;
    take(own, size_of_own * threads);
  }
};

// One token of each stream, computed by a team.
struct Step {
  const Model& m;
  const State* states;
  int64_t rows;
  const Scratch& scratch;
  Team team;

  A* own() const { return scratch.own + team.me * scratch.size_of_own; }

  // The factor of the weights of the visible tokens of the open chunk; a token in slot i sees i + 1 of them.
  A weight_factor(int64_t slot) const { return m.published ? A(1) : A(1) / A(slot + 1); }

  // The factor of the sum over the `read` tokens of the previous chunks.
  A summary_factor(int64_t read) const { return read == 0 ? A(0) : A(1) / A(m.divides_by_chunk ? m.c : read); }

  // Where the token of a row stands, its rotations, and what its position adds to its embedding.
  void add_position(int64_t row) const {
    const int64_t position = states[0].position[row], rest = (position % near + near) % near, half = m.s / 2;
    scratch.slot[row] = (position % m.c + m.c) % m.c;  // inside the chunk, whatever the position is
    scratch.before[row] = position - scratch.slot[row];
    double* turned = scratch.turned + row * m.angles * 2;
    if (scratch.turned_at[row] != position - rest + 1) {  // 0 in new memory
      for (int64_t i = 0; i < m.angles; ++i) {
        const double angle = double(position - rest) * m.frequencies[i];
        turned[2 * i] = std::cos(angle), turned[2 * i + 1] = std::sin(angle);
      }
      scratch.turned_at[row] = position - rest + 1;
    }
    T* x = scratch.x + row * m.d;
    const double* table = m.cosines + rest * m.angles * 2;
    const auto cosine = [&](int64_t i) { return turned[2 * i] * table[2 * i] - turned[2 * i + 1] * table[2 * i + 1]; };
    const auto sine = [&](int64_t i) { return turned[2 * i] * table[2 * i + 1] + turned[2 * i + 1] * table[2 * i]; };
    A* rotations = scratch.rotations + row * m.s;
    for (int64_t i = 0; i < half; ++i) {
      rotations[i] = i < m.rotated ? A(cosine(i)) : A(1);
      rotations[half + i] = i < m.rotated ? A(sine(i)) : A(0);
    }
    if (m.sine_scale != nullptr) {
      const A scale = load(*m.sine_scale);
      for (int64_t i = 0; i < m.d; ++i) {
        const int64_t angle = m.rotated + i % (m.d / 2);
        T rounded;  // like the sinusoids of the model
        store(rounded, A(i < m.d / 2 ? sine(angle) : cosine(angle)));
        store(rounded, scale * load(rounded));
        store(x[i], load(x[i]) + load(rounded));
      }
    }
    if (m.learned != nullptr) add(x, m.learned + position * m.d);
    if (m.token_type != nullptr) add(x, m.token_type);
    m.embedding_norm.apply(x, x, m.d);
  }

  void add(T* x, const T* y) const {
    for (int64_t i = 0; i < m.d; ++i) store(x[i], load(x[i]) + load(y[i]));
  }

  // The attention of a stream's token, gated, in some of the e columns.
  void attend(const Layer& layer, const State& state, int64_t row, int64_t first, int64_t last) const {
    const int64_t e = m.e, s = m.s, c = m.c, slot = scratch.slot[row], width = last - first;
    A* maps = own();  // q_quad, q_lin, k_quad, k_lin
    A *query = maps + 4 * s, *weights = query + 2 * s, *out = weights + c, *by_feature = out + e;
    const A* activated = scratch.activated + row * (2 * e + s);
    const A* rotations = scratch.rotations + row * s;
    for (int64_t map = 0; map < 4; ++map) {
      const int64_t of = map % 2 * 2 + map / 2;
      if (state.last_y != nullptr && of >= 2) {
        of_memory(scratch.y + row * s, state.last_y + row * s, layer.gamma + of * s, layer.beta + of * s, of == 3, maps + map * s);
        continue;
      }
      rotate(activated + 2 * e, layer.gamma + of * s, layer.beta + of * s, rotations, rotations + s / 2, A(1), maps + map * s,
             s / 2);
    }
    T* keys = state.keys + row * 2 * c * s;
    for (int64_t i = 2 * s; i < 4 * s; ++i) {  // other threads may store the same keys, but read only earlier ones
      T rounded;
      store(rounded, maps[i]);
      maps[i] = load(rounded);
      if (first == 0) keys[(i / s - 2) * c * s + slot * s + i % s] = rounded;
    }
    prepare<T>(maps, query, s);
    for (int64_t j = 0; j < slot; ++j) dots<1>(query, keys + j * s, s, weights + j, 0);
    A product = 0;
    for (int64_t i = 0; i < s; ++i) product += maps[i] * maps[2 * s + i];
    weights[slot] = product;
    const A by = weight_factor(slot), scale = A(m.score_scale);
    for (int64_t j = 0; j <= slot; ++j) {
      const A positive = relu(weights[j] * scale + (layer.bias == nullptr ? A(0) : layer.bias[c - 1 - slot + j]));
      weights[j] = positive * positive * by;
    }
    std::fill_n(out, width, A(0));
    const T* values = state.values + row * c * e + first;
    // relu^2 makes many weights zero. The chunk of a single stream lies in the cache, where it is read in one go.
    add_rows(out, weights, values, slot + 1, width, e, rows > few_rows);
    A* summary = state.summary + row * s * e + first;
    if (scratch.before[row] != 0) {
      const A by = state.last_y != nullptr ? A(1) : summary_factor(scratch.before[row]);
      for (int64_t i = 0; i < s; ++i) query[i] = maps[s + i] * by;
      add_rows(out, query, summary, s, width, e);
    }
    T* gated = scratch.gated + row * e + first;
    for (int64_t i = 0; i < width; ++i) store(gated[i], activated[first + i] * out[i]);
    if (slot == c - 1 && state.last_y == nullptr) fold(keys + c * s, maps + 3 * s, values, summary, by_feature, width);
  }

  // The query or key of mesa, of Y and that of the token before.
  void of_memory(const T* y, const T* before, const T* now, const T* then, bool key, A* out) const {
    A sum = 0;
    for (int64_t i = 0; i < m.s; ++i) {
      out[i] = load(y[i]) * load(now[i]) + load(before[i]) * load(then[i]);
      sum += out[i] * out[i];
    }
    if (!key) return;
    const A by = std::sqrt(A(m.s)) / std::max(std::sqrt(sum), A(1e-6));
    for (int64_t i = 0; i < m.s; ++i) out[i] *= by;
  }

  // Add the products of a full chunk's linear keys, the last of which is `last_key`, and values to the summary. `by_feature`
  // holds c s numbers.
  void fold(const T* keys, const A* last_key, const T* values, A* summary, A* by_feature, int64_t width) const {
    constexpr int64_t together = 4 * vector_bytes / int64_t(sizeof(A));  // columns, whose values stay in the cache
    for (int64_t j = 0; j < m.c; ++j) {
      for (int64_t i = 0; i < m.s; ++i) by_feature[i * m.c + j] = j == m.c - 1 ? last_key[i] : load(keys[j * m.s + i]);
    }
    for (int64_t first = 0; first < width; first += together) {
      for (int64_t i = 0; i < m.s; ++i) {
        add_rows(summary + i * m.e + first, by_feature + i * m.c, values + first, m.c, std::min(together, width - first), m.e);
      }
    }
  }

  void run_layer(const Layer& layer, const State& state) const {
    const int64_t d = m.d, e = m.e, s = m.s;
    const auto [begin, end] = team.share(rows);
    for (int64_t row = begin; row < end; ++row) {
      T* normed = scratch.normed + row * d;
      layer.norm.apply(scratch.x + row * d, normed, d);
      if (m.shifted) std::swap_ranges(state.last_shifted + row * m.shifted, state.last_shifted + (row + 1) * m.shifted, normed);
    }
    team.wait();
    dense_by(team, scratch.normed, layer.to_projected, rows, d, 2 * e + s, own(), scratch.shared,
             [&](int64_t row, int64_t first, int64_t count, const T* values) {
               A* activated = scratch.activated + row * (2 * e + s) + first;
#pragma omp simd
               for (int64_t i = 0; i < count; ++i) activated[i] = silu<T>(load(values[i]));
               const int64_t from = std::max(first, e), to = std::min(first + count, 2 * e);
               T* value = state.values + (row * m.c + scratch.slot[row]) * e;
               for (int64_t i = from; i < to; ++i) store(value[i - e], activated[i - first]);
               for (int64_t i = std::max(first, 2 * e); i < first + count; ++i) {
                 scratch.y[row * s + i - 2 * e] = values[i - first];
               }
             });
    team.wait();
    const int64_t parts = std::max(int64_t(1), std::min(team.size / rows, e / strip));
    const auto [first_task, last_task] = team.share(rows * parts);
    for (int64_t task = first_task; task < last_task; ++task) {
      const int64_t part = task % parts, strips = (e + strip - 1) / strip;
      attend(layer, state, task / parts, strips * part / parts * strip, std::min(e, strips * (part + 1) / parts * strip));
    }
    team.wait();
    for (int64_t row = begin; state.last_y != nullptr && row < end; ++row) {
      std::copy_n(scratch.y + row * s, s, state.last_y + row * s);
    }
    dense_by(team, scratch.gated, layer.to_output, rows, e, d, own(), scratch.shared,
             [&](int64_t row, int64_t first, int64_t count, const T* values) {
               T* x = scratch.x + row * d + first;
               for (int64_t i = 0; i < count; ++i) store(x[i], load(x[i]) + load(values[i]));
             });
    team.wait();
  }

  // Where ids are null, `out` holds the embedded tokens [B, d], and then their hidden vectors; otherwise, their logits
  // [B, V]. With uniform numbers [B], tokens are drawn into `drawn` [B].
  void run(const int64_t* ids, T* out, const double* uniform, const Sampling& sampling, int64_t* drawn) const {
    const auto [begin, end] = team.share(rows);
    for (int64_t row = begin; row < end; ++row) {
      if (ids == nullptr) {
        std::copy_n(out + row * m.d, m.d, scratch.x + row * m.d);
      } else {
        const Matrix of_token = m.embedding.from(ids[row], m.d);
        for (int64_t i = 0; i < m.d; ++i) store(scratch.x[row * m.d + i], of_token.result(0, load(of_token.weight[i])));
      }
      add_position(row);
    }
    for (int64_t i = 0; i < m.layers; ++i) run_layer(m.layer[i], states[i]);
    for (int64_t row = begin; row < end; ++row) {
      m.norm.apply(scratch.x + row * m.d, (ids == nullptr ? out : scratch.normed) + row * m.d, m.d);
    }
    if (ids == nullptr) return;
    team.wait();
    dense_by(team, scratch.normed, m.to_logits, rows, m.d, m.vocabulary, own(), scratch.shared,
             [&](int64_t row, int64_t first, int64_t count, const T* values) {
               std::copy_n(values, count, out + row * m.vocabulary + first);
             });
    if (drawn == nullptr) return;
    team.wait();
    for (int64_t row = begin; row < end; ++row) {
      drawn[row] = pick(out + row * m.vocabulary, m.vocabulary, uniform[row], sampling);
    }
  }
};

}  // namespace

extern "C" {

int64_t bytes(const Model* m, int64_t rows, int64_t threads) {
  return int64_t(Scratch(nullptr, *m, rows, threads).next - static_cast<char*>(nullptr));
}

// Returns 0, or the first stream, counted from 1, whose id or position the model does not have; nothing has changed then.
int64_t decode(const Model* model, const State* states, int64_t rows, char* memory, int64_t threads, const int64_t* ids, T* out,
               const double* uniform, double temperature, int64_t top_k, double top_p, double min_p, int64_t* drawn) {
  const Model& m = *model;
  const Sampling sampling{temperature, top_p, min_p, top_k};
  for (int64_t row = 0; row < rows; ++row) {
    if (ids != nullptr && (ids[row] < 0 || ids[row] >= m.vocabulary)) return row + 1;
    const int64_t position = states[0].position[row];
    if (m.learned != nullptr && (position < 0 || position >= m.n_learned)) return row + 1;
  }
  const Scratch scratch(memory, m, rows, threads);
  if (drawn != nullptr) out = scratch.logits;
  const int64_t weights = m.d * (m.layers * (3 * m.e + m.s) + m.vocabulary);
  const int64_t used = rows * m.d * (2 * m.e + m.s) < 16384 ? 1 : threads;  // to wake others takes as long
  Pool::run(used, double(weights * (8 + rows)),
            [&](const Team& team) { Step{m, states, rows, scratch, team}.run(ids, out, uniform, sampling, drawn); });
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = states[0].position[row] + 1;
    for (int64_t i = 0; i < m.layers; ++i) states[i].position[row] = position;
  }
  return 0;
}

}  // extern "C"
