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

// Candidates by their ranks. Buckets of similar logits tell where a sum of probabilities is reached, so that only the candidates of
// one bucket are sorted.
class Ranking {
 public:
  Ranking(const std::vector<Candidate>& candidates, float most, float scale) : all(candidates), most(most), scale(scale) {
    float least = most;
    for (const Candidate& each : all) least = each.share > 0 ? std::min(least, each.logit) : least;
    by = (buckets - 1) / (most - least);
    for (const Candidate& each : all) sums[bucket(each)] += each.share * scale;
  }

  // The id at which the sum of probabilities, from the likeliest on, reaches `goal` or, if `beyond`, exceeds it, or the last id.
  // `sum` is the sum up to it.
  int64_t reach(double goal, bool beyond, double& sum) const {
    const auto is_reached = [&](double up_to) { return beyond ? up_to > goal : up_to >= goal; };
    int here = 0, last = buckets - 1;
    while (last > 0 && sums[last] == 0) --last;
    for (sum = 0; here < last && !is_reached(sum + sums[here]); ++here) sum += sums[here];
    std::vector<Candidate> own;
    for (const Candidate& each : all) {
      if (bucket(each) == here) own.push_back(each);
    }
    std::sort(own.begin(), own.end(), is_likelier);
    for (const Candidate& each : own) {
      sum += each.share * scale;
      if (is_reached(sum)) return each.id;
    }
    return own.back().id;
  }

 private:
  static constexpr int buckets = 256;
  const std::vector<Candidate>& all;
  float most, scale, by;
  double sums[buckets] = {};

  // Larger logits are not in later buckets. The last one has those that are not numbers after the subtraction, too.
  int bucket(const Candidate& each) const { return int(std::min(float(buckets - 1), (most - each.logit) * by)); }
};

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
    const Ranking ranking(all, most, scale);
    ranking.reach(sampling.top_p < 1 ? sampling.top_p : std::numeric_limits<double>::infinity(), false, sum);
    return ranking.reach(std::min(uniform * sum, std::nextafter(sum, 0.0)), true, up_to_it);
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
