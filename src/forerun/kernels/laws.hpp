// How rows draw: what a request and its text do to logits, as `sampling/transforms.py` defines it.
#pragma once
#include <cmath>
#include <limits>

#include "noise.hpp"

namespace forerun {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LARGEST = std::numeric_limits<float>::max();
constexpr float ROUNDING = 0x1p-21f;  // more than the rounding of two scores, in parts of them

// One row of a round. Lists of ids are in rising order, and no id stands twice in one list.
struct RowLaw {
  uint64_t key;           // of the row's noise; the position is still to be absorbed
  int64_t root;           // position of the last token of the text
  int64_t torch_decides;  // not 0: nothing of this row can be decided here
  int64_t top_k;          // 0: off
  float temperature;      // 0: greedy
  float min_p;            // its logarithm; -inf: off
  float top_p;            // infinite: off
  float repetition, frequency, presence;  // 1, 0 and 0: off
  int64_t ends_from;                      // the position from which `ends` may be drawn
  int64_t num_fixed, num_ends, num_counted, num_words, num_said;
  const int32_t *fixed, *ends, *counted;
  const float* added;              // to the logits of `fixed`; -inf bans them
  const int32_t* times;            // how often each of `counted` stands in the answer; all stand in the text
  const int32_t *words, *lengths;  // words not to be completed, one behind the other, and their numbers of tokens
  const int32_t* said;             // the answer's last tokens, as many as a word can need

  bool noisy() const { return temperature > 0; }
  bool filters() const { return noisy() && (top_k > 0 || min_p > LOWEST || top_p < LARGEST); }
  bool penalises() const { return repetition != 1 || counts(); }
  bool counts() const { return frequency != 0 || presence != 0; }
};

// The guesses between a row's root and a node.
struct GuessPath {
  const int64_t* tokens;
  int64_t length;
};

// What a grammar allows at each of many nodes: a bit for every id, the lowest first, in words of 32.
struct Masks {
  const uint32_t* first;  // null: everything
  int64_t stride;         // words of a node

  Masks(const uint32_t* first, int64_t vocab) : first(first), stride((vocab + 31) / 32) {}
  const uint32_t* of(int64_t node) const { return first ? first + node * stride : nullptr; }
};

// How a node draws. `slack` is more than noise can differ from torch's; `mask` is null where there is no grammar.
struct Law {
  const RowLaw& row;
  GuessPath path;
  float slack;
  const uint32_t* mask;
  int64_t position;
  uint64_t key;

  Law(const RowLaw& row, const GuessPath& path, float slack, const uint32_t* mask)
      : row(row), path(path), slack(slack), mask(mask), position(row.root + 1 + path.length),
        key(absorbed(row.key, position)) {}

  bool noisy() const { return row.noisy(); }

  // How far below the best a score can be and still pass for it.
  float margin(float best) const { return slack + ROUNDING * std::abs(best); }
};

}  // namespace forerun
