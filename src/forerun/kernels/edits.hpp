// The edits of a node's logits before temperature: bans, biases, minimum length, banned words and penalties, which
// change few ids, and the mask of a grammar.
//
// All edits are elementwise, with the same operations in the same order as in torch, so the bits are the same too. The
// logits themselves are never written: the few changed values replace lanes as the vocabulary is read.
#pragma once
#include <algorithm>
#include <vector>

#include "laws.hpp"

namespace forerun {

struct Edit {
  int32_t id;
  float logit;
};

// `bounded` in transforms.py: finite values stay finite.
inline float bounded(float x, float before) {
  return std::isfinite(before) ? std::min(std::max(x, -LARGEST), LARGEST) : x;
}

inline float penalised(const RowLaw& row, float x, int32_t times) {
  if (row.repetition != 1) x = bounded(x > 0 ? x / row.repetition : x * row.repetition, x);
  if (row.counts()) x = x - row.frequency * static_cast<float>(times) - row.presence * (times > 0 ? 1.0f : 0.0f);
  return x;
}

// Whether the answer up to a node ends with all tokens of a banned word except the last.
inline bool completes(const RowLaw& row, const DraftPath& path, const int32_t* word, int64_t length) {
  for (int64_t back = 1; back < length; back++) {
    const int64_t in_path = path.length - back, in_answer = row.num_ending + in_path;
    if (in_answer < 0) return false;
    const int64_t token = in_path >= 0 ? path.tokens[in_path] : row.ending[in_answer];
    if (token != word[length - 1 - back]) return false;
  }
  return true;
}

// The ids that must not be sampled after a node, except those with a fixed ban, in ascending order.
inline std::vector<int32_t> banned_at(const Law& law) {
  const RowLaw& row = law.row;
  std::vector<int32_t> ids;
  if (law.position < row.ends_from) ids.assign(row.ends, row.ends + row.num_ends);
  const int32_t* word = row.words;
  for (int64_t i = 0; i < row.num_words; word += row.lengths[i++])
    if (completes(row, law.path, word, row.lengths[i])) ids.push_back(word[row.lengths[i] - 1]);
  std::sort(ids.begin(), ids.end());
  return ids;
}

// An iterator over ids in ascending order.
struct Ids {
  const int32_t *next, *end;
  int32_t id() const { return next == end ? std::numeric_limits<int32_t>::max() : *next; }
  int32_t take(int32_t wanted) {  // how often it comes next
    const int32_t* const first = next;
    while (id() == wanted && next != end) next++;
    return static_cast<int32_t>(next - first);
  }
};

inline Ids ids_of(const std::vector<int32_t>& ids) { return {ids.data(), ids.data() + ids.size()}; }

// All ids below `count` whose logits are edited, in ascending order. NaN stays NaN even where torch bans it.
inline std::vector<Edit> edits_of(const Law& law, const float* logits, int64_t count) {
  const RowLaw& row = law.row;
  const std::vector<int32_t> never = banned_at(law);
  std::vector<int32_t> path_tokens;
  if (row.penalises()) path_tokens.assign(law.path.tokens, law.path.tokens + law.path.length);
  std::sort(path_tokens.begin(), path_tokens.end());
  Ids fixed = {row.fixed, row.fixed + row.num_fixed}, counted = {row.counted, row.counted + row.num_counted};
  Ids banned = ids_of(never), in_path = ids_of(path_tokens);
  std::vector<Edit> edits;
  edits.reserve(row.num_fixed + row.num_counted + never.size() + path_tokens.size());
  while (true) {
    const int32_t id = std::min(std::min(fixed.id(), counted.id()), std::min(banned.id(), in_path.id()));
    if (id >= count) return edits;
    const float logit = logits[id];
    float x = logit;
    const int64_t in_fixed = fixed.next - row.fixed, in_counted = counted.next - row.counted;
    if (fixed.take(id)) x = row.added[in_fixed] == LOWEST ? LOWEST : bounded(x + row.added[in_fixed], x);
    if (banned.take(id)) x = LOWEST;
    const bool in_text = counted.take(id);
    const int32_t times_in_path = in_path.take(id);
    if (in_text || times_in_path) x = penalised(row, x, times_in_path + (in_text ? row.times[in_counted] : 0));
    edits.push_back({id, logit == logit ? x : logit});
  }
}

// Sets the logits of the sixteen ids from `first`, a multiple of LANES, to -inf if their bit is not set. Penalties do
// not change -inf, so it does not matter that the mask is applied after them here.
inline Floats masked(Floats x, const uint32_t* mask, int64_t first) {
  const uint32_t allowed = mask[first / 32] >> (first % 32) & 0xFFFF;
  if (allowed == 0xFFFF) return x;
  if (allowed == 0) return all(LOWEST);
  int32_t lanes[LANES];
  for (int j = 0; j < LANES; j++) lanes[j] = -static_cast<int32_t>(allowed >> j & 1);
  return choose(load(lanes), x, all(LOWEST));
}

// A node's logits with its edits and its mask.
struct Shaped {
  const float* logits;
  int64_t count;
  std::vector<Edit> edits;
  const uint32_t* mask;

  Shaped(const Law& law, const float* logits, int64_t count)
      : logits(logits), count(count), edits(edits_of(law, logits, count)), mask(law.mask) {}

  // Calls take(logits, first id) for each sixteen ids from `first`, a multiple of LANES, to `last`; -inf after it.
  template <typename Take>
  void each(int64_t first, int64_t last, const Take& take) const {
    const Edit *edit = edits.data(), *const end = edit + edits.size();
    edit = std::lower_bound(edit, end, first, [](const Edit& e, int64_t id) { return e.id < id; });
    int64_t plain = edit == end ? last : std::min<int64_t>(last, edit->id);
    for (int64_t i = first; i < last; i += LANES) {
      const float* from = logits + i;
      float lanes[LANES];
      if (i + LANES > plain) {
        for (int64_t j = 0; j < LANES; j++) lanes[j] = i + j < last ? from[j] : LOWEST;
        for (; edit != end && edit->id < std::min(i + LANES, last); edit++) lanes[edit->id - i] = edit->logit;
        plain = edit == end ? last : std::min<int64_t>(last, edit->id);
        from = lanes;
      }
      take(mask ? masked(load(from), mask, i) : load(from), i);
    }
  }
};

}  // namespace forerun
