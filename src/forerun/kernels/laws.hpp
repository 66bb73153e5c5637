// RowLaw: the sampling transforms of a row, as defined in `sampling/transforms.py`.
#pragma once
#include <cmath>
#include <limits>

#include "noise.hpp"

namespace forerun {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float LARGEST = std::numeric_limits<float>::max();
constexpr float ROUNDING = 0x1p-21f;  // bound of the relative rounding error of two scores

// One row of a round. Lists of ids are ascending and have no duplicates.
struct RowLaw {
  uint64_t key;           // of the row's noise, without the position
  int64_t root;           // position of the last token of the text
  int64_t torch_decides;  // not 0: torch samples this row
  int64_t top_k;          // 0: off
  float temperature;      // 0: greedy
  float min_p;            // its logarithm; -inf: off
  float top_p;            // infinite: off
  float repetition, frequency, presence;  // 1, 0 and 0: off
  int64_t ends_from;                      // the position from which `ends` may be sampled
  int64_t num_fixed, num_ends, num_counted, num_words, num_ending;
  const int32_t *fixed, *ends, *counted;
  const float* added;              // to the logits of `fixed`; -inf bans them
  const int32_t* times;            // occurrences of each of `counted` in the answer; all are in the text
  const int32_t *words, *lengths;  // banned words, concatenated, and their numbers of tokens
  const int32_t* ending;           // the last tokens of the answer, as many as the longest word needs

  bool noisy() const { return temperature > 0; }
  bool filters() const { return noisy() && (top_k > 0 || min_p > LOWEST || top_p < LARGEST); }
  bool penalises() const { return repetition != 1 || counts(); }
  bool counts() const { return frequency != 0 || presence != 0; }
};

// The draft tokens between a row's root and a node.
struct DraftPath {
  const int64_t* tokens;
  int64_t length;
};

// The ids that a grammar allows at each node: a bit for every id, the lowest first, in 32-bit words.
struct Masks {
  const uint32_t* first;  // null: all ids are allowed
  int64_t stride;         // words of a node

  Masks(const uint32_t* first, int64_t vocab) : first(first), stride((vocab + 31) / 32) {}
  const uint32_t* of(int64_t node) const { return first ? first + node * stride : nullptr; }
};

// The law of a node. `slack` bounds the difference of the noise from torch's; `mask` is null without a grammar.
struct Law {
  const RowLaw& row;
  DraftPath path;
  float slack;
  const uint32_t* mask;
  int64_t position;
  uint64_t key;

  Law(const RowLaw& row, const DraftPath& path, float slack, const uint32_t* mask)
      : row(row), path(path), slack(slack), mask(mask), position(row.root + 1 + path.length),
        key(absorbed(row.key, position)) {}

  bool noisy() const { return row.noisy(); }

  // The distance below the best score within which another could be the best one in torch.
  float margin(float best) const { return slack + ROUNDING * std::abs(best); }
};

}  // namespace forerun
