// Draws as other parts of the library ask for them.
#pragma once
#include "laws.hpp"

namespace forerun {

// Places at which a token is drawn: each has a row of logits, the row of the round that it belongs to, and guesses that
// lead to it, which begin at its start.
struct Nodes {
  const RowLaw* laws;  // by row of the round
  float slack;
  const float* logits;
  int64_t stride, num_ids, count;
  const int64_t *rows, *lengths, *starts, *guesses;
  Masks masks;

  Law law(int64_t i) const { return {laws[rows[i]], {guesses + starts[i], lengths[i]}, slack, masks.of(i)}; }
};

// For each node its first largest score, -1 where undecided.
void choose_each(const Nodes& nodes, int64_t* chosen, int64_t num_threads);

// For each node its `width` largest scores and their shares of all, by softmax; marks those that are undecided.
void offer_each(const Nodes& nodes, int64_t width, int64_t* tokens, float* survival, int64_t* undecided,
                int64_t num_threads);

}  // namespace forerun
