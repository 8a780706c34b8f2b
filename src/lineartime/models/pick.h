// How the next token is drawn: `pick` of generation/decoding.py for a row of logits.

#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace {

// How tokens are drawn: see Sampling in Python.
struct Sampling {
  double temperature, top_p, min_p;
  int64_t top_k;
};

struct Candidate {
  float logit, share;  // its probability but for a factor
  int64_t id;
};

inline bool is_likelier(const Candidate& x, const Candidate& y) {  // equal logits rank by id
  return x.logit > y.logit || (x.logit == y.logit && x.id < y.id);
}

// The place of the candidate at which the sum of probabilities, from the likeliest on, reaches `goal` or, if `beyond`, exceeds
// it, or the last place of n. All before it are likelier then, and `sum` is the sum up to it.
inline int64_t reach(std::vector<Candidate>& all, int64_t n, double goal, bool beyond, float scale, double& sum) {
  int64_t from = 0, to = n;
  double before = 0;
  while (to - from > 1) {
    const int64_t middle = from + (to - from) / 2;
    std::nth_element(all.begin() + from, all.begin() + middle, all.begin() + to, is_likelier);
    double half = 0;
    for (int64_t i = from; i < middle; ++i) half += all[i].share * scale;
    if (beyond ? before + half > goal : before + half >= goal) {
      to = middle;
    } else {
      before += half, from = middle;
    }
  }
  sum = before + all[from].share * scale;
  return from;
}

template <class T>
int64_t pick(const T* logits, int64_t n, double uniform, const Sampling& sampling) {
  int64_t likeliest = 0;
  bool numbers = true;
  for (int64_t i = 0; i < n; ++i) {
    const float x = float(load(logits[i]));
    numbers &= x == x;
    if (x > float(load(logits[likeliest]))) likeliest = i;
  }
  const float most = float(load(logits[likeliest]));
  if (!numbers || !std::isfinite(most)) return -1;
  if (sampling.temperature == 0) return likeliest;

  const float temperature = std::max(float(sampling.temperature), std::numeric_limits<float>::min());
  std::vector<Candidate> all(n);
  for (int64_t i = 0; i < n; ++i) {
    const float logit = float(load(logits[i]));
    all[i] = {logit, std::exp((logit - most) / temperature), i};
  }
  if (sampling.top_k > 0 && sampling.top_k < n) {
    std::nth_element(all.begin(), all.begin() + sampling.top_k, all.end(), is_likelier);
    all.resize(sampling.top_k);
  }
  double total = 0;
  for (const Candidate& each : all) total += each.share;
  // Tokens below `least` have a probability of zero or, together, less than what top_p leaves out by more than rounding.
  const float scale = float(1 / total), enough = float(sampling.min_p) * scale;
  const double unneeded = sampling.top_k == 0 && sampling.top_p < 0.9999 ? (1 - sampling.top_p) / (2 * double(n)) : 0;
  const float least = std::max(enough, float(unneeded));
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Candidate& x) { return x.share * scale < least; }), all.end());
  double sum = 0, up_to_it;
  if (sampling.top_k > 0 || sampling.top_p < 1) {
    const double goal = sampling.top_p < 1 ? sampling.top_p : std::numeric_limits<double>::infinity();
    const int64_t kept = reach(all, int64_t(all.size()), goal, false, scale, sum) + 1;
    return all[reach(all, kept, std::min(uniform * sum, std::nextafter(sum, 0.0)), true, scale, up_to_it)].id;
  }
  for (const Candidate& each : all) sum += each.share * scale;
  const double reached = std::min(uniform * sum, std::nextafter(sum, 0.0));
  double below = 0;
  for (const Candidate& each : all) {
    below += each.share * scale;
    if (below > reached) return each.id;
  }
  return all.back().id;
}

}  // namespace
