// A draft model's chains in one call: draw a token of every row, read them, draw again. A small model's step is so short
// that going back to Python between steps would take a good part of it.
#include <vector>

#include "decoder.hpp"
#include "draws.hpp"

namespace forerun {

struct Chains {
  int64_t num_rows, depth;                      // the deepest row's
  const int64_t *depths, *starts, *positions;   // of each row: guesses wanted, its run's first slot, its first guess
  const float* logits;                          // after the roots, [num_rows, stride]
  int64_t stride, num_ids;
  const RowLaw* laws;
  const void* embedding;      // [vocab, hidden]
  int64_t embedding_format, hidden, num_layers;
  const Linear* head;
  const float* norm;
  float norm_eps, slack;
  const float* prices;  // of each row: the least survival of a guess that is worth having; null: all are
  int64_t* tokens;      // [num_rows, depth], out; -1 where there are none
  float* survival;      // [num_rows, depth], out: of the guesses, along the chain; null where there are no prices
  float* states;        // [num_rows, depth, hidden], out: the residual stream behind each guess that was read; or null
};

// A token's embedding in float32.
void embed(const Chains& c, int64_t token, float* x) {
  const int64_t first = token * c.hidden;
  if (c.embedding_format == BFLOAT16) get(x, static_cast<const bfloat16*>(c.embedding) + first, c.hidden);
  else if (c.embedding_format == FLOAT16) get(x, static_cast<const float16*>(c.embedding) + first, c.hidden);
  else get(x, static_cast<const float*>(c.embedding) + first, c.hidden);
}

}  // namespace forerun

using namespace forerun;

// `frame` is a pass whose cache, tables and threads hold for all steps. A row ends where its draw is not certain, and
// where its guess is not worth its price.
extern "C" void forerun_chains(Decoder* decoder, const Chains* chains, const Pass* frame) {
  const Chains& c = *chains;
  const int64_t width = c.head->width;
  std::vector<float> x(c.num_rows * c.hidden), logits(c.num_rows * width);
  std::vector<int64_t> rows, chosen(c.num_rows), first_guesses, lengths, positions, slots, starts, order;
  const std::vector<int64_t> whole(c.num_rows, int64_t{1} << 62), none(c.num_rows, 0);
  std::vector<float> shares(c.num_rows), reached(c.num_rows, 1.0f);
  std::vector<int64_t> undecided(c.num_rows);
  const float* given = c.logits;
  int64_t stride = c.stride;
  std::fill(c.tokens, c.tokens + c.num_rows * c.depth, -1);
  for (int64_t row = 0; row < c.num_rows; row++)
    if (c.depths[row] > 0) rows.push_back(row);
  for (int64_t level = 0; !rows.empty(); level++) {
    first_guesses.clear();
    for (int64_t row : rows) first_guesses.push_back(row * c.depth);
    lengths.assign(rows.size(), level);
    const int64_t count = rows.size();
    const Nodes nodes = {c.laws, c.slack, given, stride, c.num_ids, count, rows.data(), lengths.data(),
                         first_guesses.data(), c.tokens, {nullptr, 0}};
    if (c.prices) offer_each(nodes, 1, chosen.data(), shares.data(), undecided.data(), frame->num_threads);
    else choose_each(nodes, chosen.data(), frame->num_threads);
    std::vector<int64_t> ahead;
    positions.clear(), slots.clear(), starts.clear(), order.clear();
    for (size_t i = 0; i < rows.size(); i++) {
      const int64_t row = rows[i], position = c.positions[row] + level;
      if (c.prices) {
        reached[row] *= shares[i];
        if (undecided[i] || reached[row] < c.prices[row]) continue;
        c.survival[row * c.depth + level] = reached[row];
      }
      c.tokens[row * c.depth + level] = chosen[i];
      if (chosen[i] < 0 || c.depths[row] == level + 1) continue;
      embed(c, chosen[i], x.data() + ahead.size() * c.hidden);
      order.push_back(ahead.size());
      ahead.push_back(row);
      positions.push_back(position);
      slots.push_back(c.starts[row] + position);
      starts.push_back(c.starts[row]);
    }
    rows = ahead;
    if (rows.empty()) return;
    Pass pass = *frame;
    pass.num_tokens = pass.num_paths = rows.size();
    pass.first_layer = 0, pass.end_layer = c.num_layers;
    pass.x = x.data();
    pass.positions = pass.last_key = positions.data();
    pass.slots = slots.data(), pass.path_of = order.data(), pass.first_slots = starts.data();
    pass.num_plain = whole.data(), pass.source_ends = pass.sources = none.data();
    forerun_forward(decoder, &pass);
    for (size_t i = 0; c.states && i < rows.size(); i++)
      memcpy(c.states + (rows[i] * c.depth + level) * c.hidden, x.data() + i * c.hidden, c.hidden * sizeof(float));
    forerun_multiply(c.head, x.data(), rows.size(), c.norm, c.norm_eps, logits.data(), frame->num_threads);
    given = logits.data(), stride = width;
  }
}
