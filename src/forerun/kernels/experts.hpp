// Mixture of experts: the routing of each token, and the rows of each expert.
//
// A pair is a token and one of its MLPs: its experts by descending weight, then the shared expert, if there is one.
// Pairs are grouped by MLP, so that each MLP is read from memory once. Every token sums its outputs in the order of its
// own ranking, so results do not depend on other tokens.
#pragma once
#include <vector>

#include "decoder.hpp"

namespace forerun {

struct Group {  // the contiguous pairs of one MLP
  int64_t mlp, first, end;
};

struct Routes {
  int64_t num_pairs = 0;
  std::vector<int64_t> mlps;    // of each pair; the pairs of a token are contiguous
  std::vector<float> weights;   // of each pair
  std::vector<int64_t> tokens;  // of each place in the order of groups
  std::vector<int64_t> places;  // of each pair
  std::vector<Group> groups;    // groups with pairs, in ascending order of MLPs

  void room(int64_t most) { mlps.resize(most), weights.resize(most), tokens.resize(most), places.resize(most); }

  void group(int64_t num_tokens, int64_t per_token, int64_t num_mlps) {
    num_pairs = num_tokens * per_token;
    std::vector<int64_t> ends(num_mlps + 1);
    for (int64_t p = 0; p < num_pairs; p++) ends[mlps[p] + 1]++;
    groups.clear();
    for (int64_t m = 0; m < num_mlps; m++) {
      if (ends[m + 1]) groups.push_back({m, ends[m], ends[m] + ends[m + 1]});
      ends[m + 1] += ends[m];
    }
    for (int64_t p = 0; p < num_pairs; p++) {  // counts up from a group's begin to its end
      places[p] = ends[mlps[p]]++;
      tokens[places[p]] = p / per_token;
    }
  }
};

// exp(x - top) of `count` numbers, and their sum in a fixed order.
inline float powers(const float* x, int64_t count, float top, float* out) {
  Floats total{};
  for (int64_t i = 0; i < count; i += LANES) {
    float part[LANES];
    for (int j = 0; j < LANES; j++) part[j] = i + j < count ? x[i + j] : -INFINITY;
    const Floats power = exponential(load(part) - top);
    total += power;
    store(part, power);
    if (out) memcpy(out + i, part, std::min<int64_t>(LANES, count - i) * sizeof(float));
  }
  return sum(total);
}

// The experts of a token, the lowest index first among equal logits, and their weights.
inline void route(const Experts& e, const float* logits, int64_t* mlps, float* weights) {
  for (int64_t rank = 0, last = -1; rank < e.active; rank++) {
    int64_t best = -1;
    for (int64_t i = 0; i < e.count; i++) {
      const bool follows = last < 0 || logits[i] < logits[last] || (logits[i] == logits[last] && i > last);
      if (follows && (best < 0 || logits[i] > logits[best])) best = i;
    }
    last = mlps[rank] = best < 0 ? 0 : best;  // NaN has no order
    weights[rank] = logits[last];
  }
  const float top = weights[0], chosen = powers(weights, e.active, top, weights);
  const float total = e.normalised ? chosen : powers(logits, e.count, top, nullptr);
  for (int64_t rank = 0; rank < e.active; rank++) weights[rank] /= total;
  if (e.router->outputs > e.count) {
    float gate[LANES];
    store(gate, all(1.0f) / (exponential(all(-logits[e.count])) + 1.0f));
    mlps[e.active] = e.count, weights[e.active] = gate[0];
  }
}

// The linear layers of one kind of all experts, and the offsets of their groups.
struct Products {
  const Layer& layer;
  const Linear* Gated::*linear;
  int64_t row_bytes, width;

  // Each group's rows have room for at least `least` numbers.
  Products(const Layer& l, const Linear* Gated::*of, int64_t least) : layer(l), linear(of), row_bytes(0), width(least + LANES) {
    for (const Gated* each : {&l.experts->gated[0], &l.dense})
      if (each->down) {
        row_bytes = std::max(row_bytes, (each->*of)->row_bytes());
        width = std::max(width, (each->*of)->width + LANES);
      }
  }
  const Linear& of(const Group& g) const {
    return *((g.mlp < layer.experts->count ? layer.experts->gated[g.mlp] : layer.dense).*linear);
  }
  Rows rows(const Group& g, Rows all) const { return {all.data + g.first * row_bytes, all.scales + g.first}; }
  Out out(const Group& g, float* all) const { return {all + g.first * width, width}; }

  // Divides all groups by their cost: one part for the weights and one for every row.
  void multiply(const std::vector<Group>& groups, Rows rows_of_all, float* out_of_all, Division& division) const {
    constexpr int64_t READ = 8;
    const auto cost = [](const Group& g) { return READ + g.end - g.first; };
    int64_t total = 0;
    for (const Group& g : groups) total += of(g).width / WIDTH * cost(g);
    division.each(total, [&](int64_t from, int64_t to) {
      int64_t begin = 0;
      for (const Group& g : groups) {
        const Linear& l = of(g);
        const int64_t count = l.width / WIDTH, each = cost(g);
        const auto reached = [&](int64_t at) { return std::min((std::max<int64_t>(at - begin, 0) + each - 1) / each, count); };
        const int64_t first = reached(from), end = reached(to);
        if (first < end) multiply_part(l, rows(g, rows_of_all), g.end - g.first, out(g, out_of_all), first * PANELS, end * PANELS);
        begin += count * each;
      }
    });
  }
};

}  // namespace forerun
