// The C functions of sampling: draws, verdicts, ranks, and the check of drafts.
//
// Each function gives the result of the tensor code of the same name, or reports that it cannot. Logarithms here differ
// from torch's in their last bits, so a draw whose two best scores are too close is left to torch.
#include <omp.h>

#include <utility>

#include "draws.hpp"
#include "filters.hpp"

namespace forerun {

constexpr int64_t SERIAL = 1 << 17;   // with fewer scores a second thread costs more than it saves
constexpr int64_t LEAST = 1 << 15;    // fewest scores of one node for a thread
constexpr int64_t UNKNOWN = -2, UNDECIDED = -3;  // instead of a token; -1 is torch's result without a law

// The two best scores of each lane.
struct Best {
  Floats score = all(LOWEST), second = all(LOWEST);
  Ints at = {}, bad = {};

  void take(Floats x, Ints ids) {
    second = larger(second, choose(x < score, x, score));
    at = choose(x > score, ids, at);
    score = larger(x, score);
  }

  // Joins the result of later ids.
  void join(const Best& later) {
    second = larger(larger(second, later.second), choose(later.score < score, later.score, score));
    at = choose(later.score > score, later.at, at);
    score = larger(later.score, score);
    bad |= later.bad;
  }

  // The id of the best score; -1 if it is not finite, or if the law is noisy and two scores are within its margin.
  int64_t id(const Law& law) const {
    float best = LOWEST, other = LOWEST;
    int32_t winner = 0;
    for (int j = 0; j < LANES; j++) {
      if (bad[j]) return -1;
      const bool wins = score[j] > best || (score[j] == best && at[j] < winner);
      other = std::max({other, second[j], wins ? best : score[j]});
      if (wins) best = score[j], winner = at[j];
    }
    if (!(std::abs(best) <= LARGEST)) return -1;
    return law.noisy() && best - other <= law.margin(best) ? -1 : winner;
  }
};

// The best scores of the ids from `first`, a multiple of LANES, to `last`: the logits, or with a temperature logits
// over temperature plus noise.
//
// One id in 512 has noise above QUIET, as its hash shows. Sixteen ids without such noise, and without a logit that
// could win with QUIET noise, are skipped.
Best best_from(int64_t first, int64_t last, const Shaped& node, const Law& law) {
  const Words loud = words(Ints{} + int32_t{LOUD});
  const float temperature = law.row.temperature;
  const uint64_t key = law.key;
  Best best;
  Floats least = all(LOWEST);
  Ints ids = counted(static_cast<int32_t>(first));
  node.each(first, last, [&](Floats x, int64_t) {
    best.bad |= x != x;
    if (temperature > 0) {
      x = x / temperature;
      const Words hash = hashed(ids, key);
      if (any((hash < loud) | (x >= least))) {
        best.take(x + gumbel(hash), ids);
        const float reached = largest(best.score);
        least = all(reached - QUIET - 2 * law.margin(reached));
      }
    } else {
      best.take(x, ids);
    }
    ids += LANES;
  });
  return best;
}

// Calls take(scores, ids) for the ids that filters leave, sixteen at a time.
template <typename Take>
void each_score(const Candidates& left, const Law& law, const Take& take) {
  for (size_t i = 0; i < left.size(); i += LANES) {
    float values[LANES];
    int32_t ids[LANES];
    for (size_t j = 0; j < LANES; j++) {
      values[j] = i + j < left.size() ? left[i + j].value : LOWEST;
      ids[j] = i + j < left.size() ? left[i + j].id : 0;
    }
    const Ints at = load(ids);
    take(load(values) + gumbel(hashed(at, law.key)), at);
  }
}

// The winner of the ids that filters leave, or -1.
int64_t choose_filtered(const Shaped& node, const Law& law) {
  Filtered f;
  if (!filter(node, law, f)) return -1;
  Best best;
  each_score(f.left, law, [&](Floats x, Ints ids) { best.take(x, ids); });
  const int64_t winner = best.id(law);
  for (const Candidate& c : f.left)
    if (c.id == winner) return f.certain(c.value) ? winner : -1;
  return -1;
}

// The token of a node, or -1 if only torch can decide; `num_threads` threads share the ids.
int64_t choose(const Law& law, const float* logits, int64_t num_ids, int64_t num_threads) {
  if (law.row.torch_decides) return -1;
  const Shaped node(law, logits, num_ids);
  if (law.row.filters()) return choose_filtered(node, law);
  if (num_threads == 1) return best_from(0, node.count, node, law).id(law);
  std::vector<Best> parts(num_threads);
  const int64_t part = (node.count / num_threads / LANES + 1) * LANES;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t t = 0; t < num_threads; t++)
    parts[t] = best_from(t * part, std::min((t + 1) * part, node.count), node, law);
  for (int64_t t = 1; t < num_threads; t++) parts[0].join(parts[t]);
  return parts[0].id(law);
}

// Distributes the tasks, of `size` scores in all, over threads; or the `count` scores of a node, if that uses more.
template <typename Task>
void share(int64_t num_tasks, int64_t size, int64_t count, int64_t num_threads, const Task& task) {
  const int64_t of_node = count < SERIAL ? 1 : std::min(num_threads, count / LEAST);
  if (size < SERIAL || num_tasks < of_node) {  // not within a parallel region: nested ones are slow
    for (int64_t i = 0; i < num_tasks; i++) task(i, of_node);
    return;
  }
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < num_tasks; i++) task(i, 1);
}

// The `width` largest scores of a node in descending order, and one more, to compare the last with.
struct Ranked {
  std::vector<std::pair<float, int64_t>> best;

  explicit Ranked(int64_t width) : best(width + 1, {LOWEST, -1}) {}

  void take(Floats x, Ints ids) {
    if (!any(x > all(best.back().first))) return;
    for (int j = 0; j < LANES; j++) {
      if (!(x[j] > best.back().first)) continue;
      size_t i = best.size() - 1;
      for (; i > 0 && x[j] > best[i - 1].first; i--) best[i] = best[i - 1];
      best[i] = {x[j], ids[j]};
    }
  }

  // Writes them with their shares of a mass, padded with -1 and 0; false if their order is not certain.
  bool write(const Law& law, float mass, int64_t* tokens, float* survival) const {
    for (size_t i = 0; i + 1 < best.size(); i++) {
      const float score = best[i].first, next = best[i + 1].first;
      if (law.noisy() && next > LOWEST && score - next <= law.margin(std::max(std::abs(score), std::abs(next)))) return false;
      tokens[i] = best[i].second;
      survival[i] = tokens[i] < 0 ? 0.0f : std::exp(score - best[0].first) / mass;
    }
    return true;
  }
};

// The `width` largest of a node's scores, the lowest ids among equals, and their softmax. False if only torch can
// decide. `scores` is scratch memory for all scores.
bool offer(const Law& law, const float* logits, int64_t num_ids, int64_t width, float* scores, int64_t* tokens,
           float* survival) {
  if (law.row.torch_decides) return false;
  const Shaped node(law, logits, num_ids);
  Ranked ranked(width);
  Filtered f;
  Ints bad = {};
  float* end = scores;
  const auto take = [&](Floats x, Ints ids) {
    store(end, x);
    end += LANES;
    ranked.take(x, ids);
  };
  if (law.row.filters()) {
    if (!filter(node, law, f)) return false;
    each_score(f.left, law, take);
  } else {
    Ints ids = counted(0);
    node.each(0, node.count, [&](Floats x, int64_t) {
      bad |= x != x;
      take(law.noisy() ? x / law.row.temperature + gumbel(hashed(ids, law.key)) : x, ids);
      ids += LANES;
    });
  }
  const float top = ranked.best[0].first;
  if (any(bad) || !(std::abs(top) <= LARGEST)) return false;
  for (const Candidate& c : f.left)
    for (int64_t i = 0; i < width; i++)
      if (ranked.best[i].second == c.id && !f.certain(c.value)) return false;
  Floats mass = {};
  for (const float* s = scores; s < end; s += LANES) mass = mass + exponential(load(s) - top);
  return ranked.write(law, sum(mass), tokens, survival);
}

void choose_each(const Nodes& n, int64_t* chosen, int64_t num_threads) {
  share(n.count, n.count * n.num_ids, n.num_ids, num_threads, [&](int64_t i, int64_t task_threads) {
    chosen[i] = choose(n.law(i), n.logits + i * n.stride, n.num_ids, task_threads);
  });
}

void offer_each(const Nodes& n, int64_t width, int64_t* tokens, float* survival, int64_t* undecided,
                int64_t num_threads) {
  share(n.count, n.count * n.num_ids, 0, num_threads, [&](int64_t i, int64_t) {
    std::vector<float> scores(n.num_ids + LANES);
    undecided[i] = !offer(n.law(i), n.logits + i * n.stride, n.num_ids, width, scores.data(), tokens + i * width,
                          survival + i * width);
  });
}

// The offsets of concatenated paths.
std::vector<int64_t> starts_of(const int64_t* lengths, int64_t count) {
  std::vector<int64_t> starts(count + 1);
  for (int64_t i = 0; i < count; i++) starts[i + 1] = starts[i] + lengths[i];
  return starts;
}

// The number of a row's values before a token's (larger ones, and equal ones with lower ids), and the largest values.
// False if a value is NaN, or too few are above -inf.
bool rank(const float* values, int64_t count, int64_t token, int64_t top, int64_t* before, int64_t* ids) {
  Ranked ranked(top);
  const Floats picked_value = all(values[token]);
  const Ints picked = Ints{} + static_cast<int32_t>(token);
  Ints at = counted(0), ahead = {}, bad = {};
  for (int64_t i = 0; i < count; i += LANES, at += LANES) {
    float rest[LANES];
    for (int64_t j = i; j < i + LANES && i + LANES > count; j++) rest[j - i] = j < count ? values[j] : LOWEST;
    const Floats x = load(i + LANES <= count ? values + i : rest);
    bad |= x != x;
    ahead -= (x > picked_value) | ((x == picked_value) & (at < picked));
    if (top > 0) ranked.take(x, at);
  }
  *before = 0;
  for (int j = 0; j < LANES; j++) *before += ahead[j];
  for (int64_t i = 0; i < top; i++) ids[i] = ranked.best[i].second;
  return !any(bad) && (top == 0 || ids[top - 1] >= 0);
}

}  // namespace forerun

using namespace forerun;

extern "C" {

// For each row the rank of a token, from 1, and the ids of the `top` largest values; returns how many rows failed.
int64_t forerun_rank(const float* values, int64_t num_rows, int64_t count, const int64_t* tokens, int64_t top,
                     int64_t* ranks, int64_t* ids, int64_t num_threads) {
  std::vector<int64_t> failed(num_rows);
  share(num_rows, num_rows * count, 0, num_threads, [&](int64_t i, int64_t) {
    failed[i] = !rank(values + i * count, count, tokens[i], top, ranks + i, ids + i * top);
    ranks[i]++;
  });
  return std::count(failed.begin(), failed.end(), 1);
}

// `places` holds the rows of all nodes, the lengths of their paths, and the concatenated paths.
void forerun_choose(const RowLaw* laws, float slack, const float* logits, int64_t stride, int64_t num_ids,
                    int64_t count, const uint32_t* masks, const int64_t* places, int64_t* chosen, int64_t num_threads) {
  const std::vector<int64_t> starts = starts_of(places + count, count);
  choose_each({laws, slack, logits, stride, num_ids, count, places, places + count, starts.data(), places + 2 * count,
               {masks, stride}},
              chosen, num_threads);
}

// For each node its `width` best draft tokens and their survival; returns how many nodes are undecided, and marks them.
int64_t forerun_offer(const RowLaw* laws, float slack, const float* logits, int64_t stride, int64_t num_ids,
                      int64_t count, const uint32_t* masks, const int64_t* places, int64_t width, int64_t* tokens,
                      float* survival, int64_t* undecided, int64_t num_threads) {
  const std::vector<int64_t> starts = starts_of(places + count, count);
  const Nodes n = {laws, slack, logits, stride, num_ids, count, places, places + count, starts.data(),
                   places + 2 * count, {masks, stride}};
  offer_each(n, width, tokens, survival, undecided, num_threads);
  return std::count(undecided, undecided + n.count, 1);
}

// A whole verdict by coupled sampling, which samples only along accepted paths: for each row the accepted length, the
// next token and the path of depth + 1 nodes. `drawn` has a token for every column, UNKNOWN if it is not sampled yet;
// an undecided sample is marked there, and its row has no verdict. Returns the number of such rows, or -1 if the tree
// has another number of nodes than there are logits.
int64_t forerun_judge(const RowLaw* laws, float slack, const float* logits, int64_t stride, int64_t num_ids,
                      int64_t count, const uint32_t* masks, const int64_t* tokens, const int64_t* parents,
                      int64_t batch, int64_t columns, int64_t depth, int64_t* drawn, int64_t* verdict,
                      int64_t num_threads) {
  const Masks allowed(masks, stride);
  std::vector<int64_t> place(batch * columns + 1);  // of each node's logits
  for (int64_t i = 0; i < batch * columns; i++) place[i + 1] = place[i] + (tokens[i] >= 0);
  if (place.back() != count) return -1;
  std::vector<int64_t> undecided(batch);
  share(batch, count * num_ids, num_ids, num_threads, [&](int64_t b, int64_t task_threads) {
    const int64_t *const draft_tokens = tokens + b * columns, *const above = parents + b * columns;
    int64_t *const result = verdict + b * (depth + 3), *const path = result + 2, node = 0, length = 0;
    std::vector<int64_t> path_tokens;
    path[0] = 0;
    while (true) {
      int64_t& sampled = drawn[b * columns + node];
      const int64_t at = place[b * columns + node];
      if (sampled == UNKNOWN) {
        const Law law(laws[b], {path_tokens.data(), length}, slack, allowed.of(at));
        sampled = choose(law, logits + at * stride, num_ids, task_threads);
        if (sampled < 0) sampled = UNDECIDED;
      }
      int64_t next = node + 1;
      while (next < columns && !(above[next] == node && draft_tokens[next] == sampled)) next++;
      undecided[b] = sampled == UNDECIDED;
      result[0] = length;
      result[1] = sampled;
      if (sampled < 0 || length == depth || next == columns) break;
      path_tokens.push_back(sampled);
      path[++length] = node = next;
    }
    for (int64_t i = length + 1; i <= depth; i++) path[i] = -1;
  });
  return std::count(undecided.begin(), undecided.end(), 1);
}

// Whether `sanitize` would not change any row of a tree. `limits` holds depth, width and nodes of each row. `seen`
// receives, for each row, the number of valid nodes, then nodes, parents and tokens, `columns` places each.
int64_t forerun_clean(const int64_t* tokens, const int64_t* parents, int64_t batch, int64_t columns,
                      const int64_t* roots, const int64_t* limits, int64_t depth, int64_t width, int64_t vocab,
                      int64_t* seen) {
  std::vector<int64_t> level(columns), children(columns);
  const int64_t stride = 1 + 3 * columns;
  for (int64_t b = 0; b < batch; b++, tokens += columns, parents += columns, limits += 3, seen += stride) {
    const int64_t deepest = std::min(depth, limits[0]), widest = std::min(width, limits[1]);
    int64_t left = limits[2];
    if (tokens[0] != roots[b] || parents[0] != -1) return 0;
    for (int64_t i = 0; i < columns; i++) level[i] = children[i] = 0;
    for (int64_t i = 1; i < columns; i++) {
      const int64_t above = parents[i];
      if (tokens[i] == -1 && above == -1) continue;
      if (tokens[i] < 0 || tokens[i] >= vocab || above < 0 || above >= i || tokens[above] < 0) return 0;
      level[i] = level[above] + 1;
      if (level[i] > deepest || ++children[above] > widest || --left < 0) return 0;
      for (int64_t j = above + 1; children[above] > 1 && j < i; j++)
        if (parents[j] == above && tokens[j] == tokens[i]) return 0;
    }
    int64_t count = 0;
    for (int64_t i = 0; i < columns; i++) {
      if (tokens[i] < 0) continue;
      int64_t* const place = seen + 1 + count++;
      place[0] = i, place[columns] = parents[i], place[2 * columns] = tokens[i];
    }
    seen[0] = count;
  }
  return 1;
}
}
