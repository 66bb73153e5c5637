// Drafts entire chains in one call: sample a token for every row, read these tokens, sample again. A pass of a small
// model is so short that a return to Python after each would take a considerable part of the time.
#include <algorithm>
#include <numeric>
#include <vector>

#include "decoder.hpp"
#include "draws.hpp"
#include "rows.hpp"

namespace forerun {

struct Entry {  // the input of layers that read each token with the state before it (EAGLE, MTP); `StateEntry` in layer.py
  const Linear* map;                     // projects both to the stream; null: attention reads both, and the stream is the state
  const float *token_norm, *state_norm;  // padded gains; null: not normed
  int64_t state_first, normed_stream;    // the state precedes the token; the stream is the normed state
  int64_t reads_stream;                  // attention reads the mapped stream without norming it
  const float* output_norm;              // of the layers' output, which is the state before the next token; or null
};

struct Chains {
  int64_t num_rows, depth;                      // depth of the deepest row
  const int64_t *depths, *starts, *positions;   // of each row: depth, first slot, position of its first draft token
  const float* logits;                          // after the roots, [num_rows, stride]
  int64_t stride, num_ids;
  const RowLaw* laws;
  const void* embedding;      // [vocab, hidden]
  int64_t embedding_format, hidden, num_layers;
  const Linear* head;
  const int64_t* head_ids;  // the id of each of the head's outputs; null: output i is id i
  const float* norm;        // or null
  const Entry* entry;       // null: the layers read tokens only
  const float* before;      // the states after the roots, [num_rows, hidden]; null without an entry, and with texts
  const int64_t *text_counts, *text_tokens;  // of each row: tokens to be read first, at least one; packed; or null
  const float* text_states;                  // the states read with these tokens, [total, hidden]
  float* roots;                              // [num_rows, hidden], out: the states after the texts
  float norm_eps, slack;
  const float* min_survival;  // of each row: a chain ends before a token of less survival; null: no limit
  int64_t* tokens;      // [num_rows, depth], out; -1 after the end of a chain
  float* survival;      // [num_rows, depth], out: survival of the draft tokens; null without min_survival
  float* states;        // [num_rows, depth, hidden], out: the residual stream after each token that was read; or null
};

// A token's embedding in float32.
void embed(const Chains& c, int64_t token, float* x) {
  const int64_t first = token * c.hidden;
  if (c.embedding_format == BFLOAT16) get(x, static_cast<const bfloat16*>(c.embedding) + first, c.hidden);
  else if (c.embedding_format == FLOAT16) get(x, static_cast<const float16*>(c.embedding) + first, c.hidden);
  else get(x, static_cast<const float*>(c.embedding) + first, c.hidden);
}

class Step {  // the inputs and outputs of one pass, and the state after the last token of each row
 public:
  Step(const Chains& chains, int64_t most)  // most tokens of a pass
      : c(chains), e(chains.entry), x(most * c.hidden) {
    if (!e) return;
    joined_width = e->map ? 2 * c.hidden : padded(2 * c.hidden);
    joined.resize(most * joined_width), token_input.resize(padded(c.hidden)), state.resize(padded(c.hidden));
    states.resize(c.num_rows * c.hidden);
    if (c.before) memcpy(states.data(), c.before, states.size() * sizeof(float));
    if (e->map) mapped.resize(most * e->map->width);
  }

  void take(int64_t i, int64_t token, int64_t row) { take(i, token, states.data() + row * c.hidden); }

  void take(int64_t i, int64_t token, const float* state_before) {
    float* const stream = x.data() + i * c.hidden;
    if (!e) return embed(c, token, stream);
    embed(c, token, token_input.data());
    copy(state_before, state.data());
    copy(state.data(), stream);
    if (e->token_norm) norm_row(token_input.data(), e->token_norm, c.norm_eps, c.hidden, token_input.data());
    if (e->state_norm) norm_row(state.data(), e->state_norm, c.norm_eps, c.hidden, state.data());
    if (e->normed_stream) copy(state.data(), stream);
    float* const to = joined.data() + i * joined_width;
    copy(token_input.data(), to + (e->state_first ? c.hidden : 0));
    copy(state.data(), to + (e->state_first ? 0 : c.hidden));
  }

  void enter(Pass& pass) {
    pass.x = x.data();
    if (!e || !e->map) return void(pass.read = e ? joined.data() : nullptr);
    forerun_multiply(e->map, joined.data(), pass.num_tokens, nullptr, 0, mapped.data(), pass.num_threads);
    for (int64_t i = 0; i < pass.num_tokens; i++) copy(mapped.data() + i * e->map->width, x.data() + i * c.hidden);
    pass.read = e->reads_stream ? mapped.data() : nullptr;  // both are padded to whole panels
  }

  void leave(int64_t i, int64_t row) {
    float* const stream = x.data() + i * c.hidden;
    if (!e) return;
    copy(stream, state.data());
    if (e->output_norm) norm_row(state.data(), e->output_norm, c.norm_eps, c.hidden, state.data());
    copy(state.data(), stream);
    copy(stream, states.data() + row * c.hidden);
  }

  void move(int64_t i, int64_t to) { memmove(x.data() + to * c.hidden, output(i), c.hidden * sizeof(float)); }

  const float* output(int64_t i) const { return x.data() + i * c.hidden; }

 private:
  void copy(const float* from, float* to) const { memcpy(to, from, c.hidden * sizeof(float)); }

  const Chains& c;
  const Entry* const e;
  int64_t joined_width = 0;
  std::vector<float> x, joined, mapped, states, token_input, state;  // the last two have zeros up to the padded width
};

}  // namespace forerun

using namespace forerun;

// `frame` has the cache, tables and threads of all steps. A chain ends where a sample is not certain, or before a token
// whose survival is below its row's minimum.
extern "C" void forerun_chains(Decoder* decoder, const Chains* chains, const Pass* frame) {
  const Chains& c = *chains;
  const int64_t width = c.head->width;
  const int64_t num_text = c.text_counts ? std::accumulate(c.text_counts, c.text_counts + c.num_rows, int64_t{0}) : 0;
  Step step(c, std::max(c.num_rows, num_text));
  std::vector<float> logits(c.num_rows * width), spread(c.head_ids ? c.num_rows * c.stride : 0, -INFINITY);
  std::vector<int64_t> rows, chosen(c.num_rows), path_starts, lengths, positions, slots, starts, order;
  const std::vector<int64_t> whole(c.num_rows, int64_t{1} << 62), none(c.num_rows, 0);
  std::vector<float> shares(c.num_rows), reached(c.num_rows, 1.0f);
  std::vector<int64_t> undecided(c.num_rows);
  const float* last_logits = c.logits;
  int64_t stride = c.stride;
  std::fill(c.tokens, c.tokens + c.num_rows * c.depth, -1);
  const auto read = [&] {  // reads the sampled tokens; `order` maps them to rows
    Pass pass = *frame;
    pass.num_tokens = positions.size(), pass.num_paths = starts.size();
    pass.first_layer = 0, pass.end_layer = c.num_layers;
    step.enter(pass);
    pass.positions = pass.last_key = positions.data();
    pass.slots = slots.data(), pass.path_of = order.data(), pass.first_slots = starts.data();
    pass.num_plain = whole.data(), pass.source_ends = pass.sources = none.data();
    forerun_forward(decoder, &pass);
  };
  const auto score = [&](int64_t count) {  // computes the logits after the states of the first `count` rows
    forerun_multiply(c.head, step.output(0), count, c.norm, c.norm_eps, logits.data(), frame->num_threads);
    last_logits = logits.data(), stride = width;
    if (!c.head_ids) return;
    for (int64_t i = 0; i < count; i++)
      for (int64_t n = 0; n < c.head->outputs; n++) spread[i * c.stride + c.head_ids[n]] = logits[i * width + n];
    last_logits = spread.data(), stride = c.stride;
  };
  if (num_text) {
    for (int64_t row = 0, i = 0; row < c.num_rows; row++) {
      starts.push_back(c.starts[row]);
      for (int64_t left = c.text_counts[row]; left > 0; left--, i++) {
        step.take(i, c.text_tokens[i], c.text_states + i * c.hidden);
        order.push_back(row);
        positions.push_back(c.positions[row] - left);
        slots.push_back(c.starts[row] + positions.back());
      }
    }
    read();
    for (int64_t row = 0, last = -1; row < c.num_rows; row++) {
      last += c.text_counts[row];
      step.leave(last, row);
      step.move(last, row);
      memcpy(c.roots + row * c.hidden, step.output(row), c.hidden * sizeof(float));
    }
    score(c.num_rows);
  }
  for (int64_t row = 0; row < c.num_rows; row++)
    if (c.depths[row] > 0) rows.push_back(row);
  for (int64_t level = 0; !rows.empty(); level++) {
    path_starts.clear();
    for (int64_t row : rows) path_starts.push_back(row * c.depth);
    lengths.assign(rows.size(), level);
    const int64_t count = rows.size();
    const Nodes nodes = {c.laws, c.slack, last_logits, stride, c.num_ids, count, rows.data(), lengths.data(),
                         path_starts.data(), c.tokens, {nullptr, 0}};
    if (c.min_survival) offer_each(nodes, 1, chosen.data(), shares.data(), undecided.data(), frame->num_threads);
    else choose_each(nodes, chosen.data(), frame->num_threads);
    std::vector<int64_t> ahead;
    positions.clear(), slots.clear(), starts.clear(), order.clear();
    for (size_t i = 0; i < rows.size(); i++) {
      const int64_t row = rows[i], position = c.positions[row] + level;
      if (c.min_survival) {
        reached[row] *= shares[i];
        if (undecided[i] || reached[row] < c.min_survival[row]) continue;
        c.survival[row * c.depth + level] = reached[row];
      }
      c.tokens[row * c.depth + level] = chosen[i];
      if (chosen[i] < 0 || c.depths[row] == level + 1) continue;
      step.take(ahead.size(), chosen[i], row);
      order.push_back(ahead.size());
      ahead.push_back(row);
      positions.push_back(position);
      slots.push_back(c.starts[row] + position);
      starts.push_back(c.starts[row]);
    }
    rows = ahead;
    if (rows.empty()) return;
    read();
    for (size_t i = 0; i < rows.size(); i++) {
      if (c.states) memcpy(c.states + (rows[i] * c.depth + level) * c.hidden, step.output(i), c.hidden * sizeof(float));
      step.leave(i, rows[i]);
    }
    score(rows.size());
  }
}

// The norm of each row, with the bits of chains; rows and gain are zero-padded.
extern "C" void forerun_norm(const float* x, const float* gain, float eps, int64_t num_rows, int64_t size, float* out) {
  for (int64_t row = 0; row < num_rows; row++)
    norm_row(x + row * padded(size), gain, eps, size, out + row * padded(size));
}
