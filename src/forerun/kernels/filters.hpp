// Top-k, min-p and top-p: the ids that remain of a node that samples with noise.
//
// Top-k and min-p are exact. The nucleus of top-p is defined by torch's sums of torch's probabilities, which have other
// bits than the sums here, so its edge is known up to the errors of both: `certain` tells which values remain for
// certain. If an uncertain value wins, torch decides the sample.
#pragma once
#include "edits.hpp"

namespace forerun {

constexpr float NEAR = 10.0f;  // a nucleus nearly always ends within this distance of the largest logit

struct Candidate {
  float value, mass;  // logit over temperature; e^value relative to that of the largest
  int32_t id;
};
typedef std::vector<Candidate> Candidates;

inline bool likelier(const Candidate& a, const Candidate& b) { return a.value > b.value; }

// The ids that may remain; those whose value is above `sure`, or equals `edge`, remain for certain.
struct Filtered {
  Candidates left;
  double sure = LOWEST;
  float edge = LOWEST;

  bool certain(float value) const { return value > sure || value == edge; }
};

// A sum of many numbers, rounded to float32 at most RUN times on the way.
struct Mass {
  static constexpr int RUN = 32;
  Floats part = {};
  double whole = 0;
  int count = 0;

  void add(Floats x) {
    part = part + x;
    if (++count % RUN == 0) whole += sum(part), part = Floats{};
  }
  double total() const { return whole + sum(part); }
};

// Drops all values below the `k`-th largest, which is returned.
inline float keep_largest(Candidates& some, int64_t k) {
  if (static_cast<int64_t>(some.size()) <= k) return LOWEST;
  std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), likelier);
  const float least = some[k - 1].value;
  some.erase(std::remove_if(some.begin(), some.end(), [&](const Candidate& c) { return c.value < least; }), some.end());
  return least;
}

// Collects the ids of values of at least `least`: at most the `top_k` largest and their equals; `also` gets all values.
// False if a logit is NaN.
template <typename Also>
bool collect(const Shaped& node, const RowLaw& row, float least, Candidates& collected, const Also& also) {
  const int64_t top_k = row.top_k < node.count ? row.top_k : 0;
  size_t most = top_k > 0 ? 2 * top_k + LANES : node.count + 1;
  Ints bad = {};
  Floats bound = all(least);
  collected.clear();
  node.each(0, node.count, [&](Floats x, int64_t first) {
    x = x / row.temperature;
    bad |= x != x;
    also(x);
    if (!any(x >= bound)) return;
    float lanes[LANES];
    store(lanes, x);
    for (int j = 0; j < LANES; j++)
      if (lanes[j] >= least && lanes[j] > LOWEST) collected.push_back({lanes[j], 0, static_cast<int32_t>(first + j)});
    if (collected.size() < most) return;
    least = std::max(least, keep_largest(collected, top_k));
    bound = all(least);
    most = 2 * collected.size() + LANES;
  });
  if (top_k > 0) keep_largest(collected, top_k);
  return !any(bad);
}

inline float peak_of(const Shaped& node) {  // -inf if a logit is NaN
  Floats top = all(LOWEST);
  Ints bad = {};
  node.each(0, node.count, [&](Floats x, int64_t) {
    top = larger(x, top);
    bad |= x != x;
  });
  return any(bad) ? LOWEST : largest(top);
}

// Sets the masses, and returns their sum.
inline double weigh(Candidates& some, float peak) {
  double whole = 0;
  for (size_t i = 0; i < some.size(); i += LANES) {
    float lanes[LANES] = {};
    const size_t count = std::min<size_t>(LANES, some.size() - i);
    for (size_t j = 0; j < count; j++) lanes[j] = some[i + j].value;
    store(lanes, exponential(load(lanes) - peak));
    for (size_t j = 0; j < count; j++) whole += some[i + j].mass = lanes[j];
  }
  return whole;
}

// The value at which the largest values together reach a mass; -inf if all of them do not. Reorders them.
inline float reaches(Candidates& some, double mass) {
  Candidate *first = some.data(), *last = first + some.size();
  while (last - first > 1) {
    Candidate* const middle = first + (last - first) / 2;
    std::nth_element(first, middle, last, likelier);
    double upper = 0;
    for (const Candidate* c = first; c < middle; c++) upper += c->mass;
    if (upper >= mass) last = middle;
    else mass -= upper, first = middle;
  }
  return first < last && first->mass >= mass ? first->value : LOWEST;
}

// The relative error of torch's sum for each number; torch has so many partial sums.
#if defined(__AVX2__)
constexpr double SUM_ERROR = 0x1p-24 / 8;
#else
constexpr double SUM_ERROR = 0x1p-24 / 4;
#endif

// Finds the edge of the nucleus; `whole` is the mass of the `count` ids that top-k and min-p leave. Values that differ
// by less than half the slack may have probabilities in any order. Equal values have equal ones. Returns the value
// below which nothing remains, -inf if `left` does not reach that far.
inline double keep_nucleus(Filtered& f, const Law& law, double whole, int64_t count) {
  const double near = law.slack / 2;
  const double error = law.slack / 8 + count * SUM_ERROR;
  const double wanted = whole * law.row.top_p;
  const double last = reaches(f.left, wanted * (1 + error)) - near;
  const float edge = reaches(f.left, wanted * (1 - error));
  f.sure = edge + near;
  const auto beside = [&](const Candidate& c) { return c.value != edge && std::abs(double{c.value} - edge) <= near; };
  f.edge = std::any_of(f.left.begin(), f.left.end(), beside) ? LOWEST : edge;
  if (edge == LOWEST) f.sure = LOWEST;
  return last;
}

// False if only torch can decide.
inline bool filter(const Shaped& node, const Law& law, Filtered& f) {
  const RowLaw& row = law.row;
  const auto nothing = [](Floats) {};
  const auto drop_below = [&](double least) {
    const auto below = [&](const Candidate& c) { return c.value < least; };
    f.left.erase(std::remove_if(f.left.begin(), f.left.end(), below), f.left.end());
  };
  float peak = LOWEST;
  if (row.top_k > 0) {
    if (!collect(node, row, LOWEST, f.left, nothing)) return false;
    for (const Candidate& c : f.left) peak = std::max(peak, c.value);
  } else {
    peak = peak_of(node) / row.temperature;
  }
  if (!std::isfinite(peak)) return false;
  const float least = peak + row.min_p;
  const bool part = row.top_k == 0 && row.min_p == LOWEST;  // only the largest values are collected at first
  Mass mass;
  if (row.top_k > 0) drop_below(least);
  else if (!part) collect(node, row, least, f.left, nothing);
  else collect(node, row, peak - NEAR, f.left, [&](Floats x) { mass.add(exponential(x - peak)); });
  if (row.top_p > LARGEST) return true;
  double whole = weigh(f.left, peak);
  if (part) whole = mass.total();
  double last = keep_nucleus(f, law, whole, part ? node.count : f.left.size());
  if (part && last < peak - NEAR) {
    collect(node, row, LOWEST, f.left, nothing);
    weigh(f.left, peak);
    last = keep_nucleus(f, law, whole, node.count);
  }
  drop_below(last);
  return true;
}

}  // namespace forerun
