// Sampling functions for other parts of the library.
#pragma once
#include "laws.hpp"

namespace forerun {

// Nodes after which a token is sampled. Each has its own logits, its row of the round, and the path of draft tokens
// that leads to it: `lengths` tokens of `draft_tokens`, from `starts` on.
struct Nodes {
  const RowLaw* laws;  // by row of the round
  float slack;
  const float* logits;
  int64_t stride, num_ids, count;
  const int64_t *rows, *lengths, *starts, *draft_tokens;
  Masks masks;

  Law law(int64_t i) const { return {laws[rows[i]], {draft_tokens + starts[i], lengths[i]}, slack, masks.of(i)}; }
};

// For each node the lowest id with the largest score, -1 if undecided.
void choose_each(const Nodes& nodes, int64_t* chosen, int64_t num_threads);

// For each node its `width` largest scores and their softmax; marks undecided nodes.
void offer_each(const Nodes& nodes, int64_t width, int64_t* tokens, float* survival, int64_t* undecided,
                int64_t num_threads);

}  // namespace forerun
