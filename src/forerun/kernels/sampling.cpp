// A round's bookkeeping over tokens, in plain C: draws, where a tree's nodes are, and how far a verdict follows them.
//
// Each function gives what the tensor code of the same name gives, or says that it cannot. Logarithms here differ from
// torch's in their last bits, so a draw whose two best scores are too close for that is left to torch.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.hpp"

namespace forerun {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float ROUNDING = 0x1p-21f;  // more than the rounding of two scores, in parts of them
constexpr uint32_t LOUD = 1 << 23;    // hashes below this have the loudest noise, all others
constexpr float QUIET = 6.25f;        // at most so much
constexpr int64_t SERIAL = 1 << 17;   // below so many scores a second thread costs more than it brings
constexpr int64_t LEAST = 1 << 15;    // scores of one node that a thread should have

// `sampling/noise.py`: one round of the hash within a key.
inline Words keyed_round(Words x, uint32_t key) {
  x = (x ^ (x >> 16)) * 0x7feb352du + key;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

inline uint64_t absorbed(uint64_t key, uint64_t word) {
  uint64_t x = (key ^ word) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The Gumbel noise of 16 hashes, to a few units in the last place; the uniform below it has the very bits.
inline Floats gumbel(Words hash) {
  Floats minus = converted(bits(hash)) * -0x1p-32f;
  minus = minus - choose(minus > Floats{}, all(1.0f), Floats{}) - 0x1p-33f;
  minus = larger(minus, all(-(1.0f - 0x1p-24f)));
  const Floats rest = minus + 1.0f;  // what rounding took from it counts where w is tiny
  return -logarithm(-(logarithm(rest) + (minus - (rest - 1.0f)) / rest));
}

// How a node draws: the key of its noise, and its temperature, 0 where it is greedy. `slack` is more than noise can
// differ from torch's.
struct Law {
  uint64_t key;
  float temperature, slack;

  bool noisy() const { return temperature > 0; }

  // How far below the best a score can be and still pass for it.
  float margin(float best) const { return slack + ROUNDING * std::abs(best); }
};

// The two best of some scores, lane by lane.
struct Best {
  Floats score = all(LOWEST), second = all(LOWEST);
  Ints at = {}, bad = {};

  void take(Floats x, Ints ids) {
    second = larger(second, choose(x < score, x, score));
    at = choose(x > score, ids, at);
    score = larger(x, score);
  }

  // Joins those of later ids.
  void join(const Best& later) {
    second = larger(larger(second, later.second), choose(later.score < score, later.score, score));
    at = choose(later.score > score, later.at, at);
    score = larger(later.score, score);
    bad |= later.bad;
  }

  // The id of the best; -1 where it is not finite, or where draws are noisy and two are within the law's margin.
  int64_t id(const Law& law) const {
    float best = LOWEST, other = LOWEST;
    int32_t found = 0;
    for (int j = 0; j < LANES; j++) {
      if (bad[j]) return -1;
      const bool wins = score[j] > best || (score[j] == best && at[j] < found);
      other = std::max({other, second[j], wins ? best : score[j]});
      if (wins) best = score[j], found = at[j];
    }
    if (!(std::abs(best) <= std::numeric_limits<float>::max())) return -1;
    return law.noisy() && best - other <= law.margin(best) ? -1 : found;
  }
};

// The best scores of the ids from `first`, a multiple of LANES, to `count`: logits, or with a temperature logits over it
// plus noise.
//
// Noise above QUIET belongs to one id in 512, which the hash tells. Where no id of sixteen has it, and no logit reaches
// as far without, the sixteen are passed over: nothing of theirs could win, or come close.
Best best_from(int64_t first, int64_t count, const float* logits, const Law& law) {
  const uint32_t low = static_cast<uint32_t>(law.key), high = static_cast<uint32_t>(law.key >> 32);
  const Words loud = words(Ints{} + int32_t{LOUD});
  Best best;
  Floats least = all(LOWEST);
  Ints ids = counted(static_cast<int32_t>(first));
  const auto take = [&](Floats x) {
    best.bad |= x != x;
    if (law.noisy()) {
      x = x / law.temperature;
      const Words hash = keyed_round(keyed_round(words(ids), 0) ^ low, high);
      if (any((hash < loud) | (x >= least))) {
        best.take(x + gumbel(hash), ids);
        const float reached = largest(best.score);
        least = all(reached - QUIET - 2 * law.margin(reached));
      }
    } else {
      best.take(x, ids);
    }
    ids += LANES;
  };
  int64_t i = first;
  for (; i + LANES <= count; i += LANES) take(load(logits + i));
  if (i < count) {
    float rest[LANES];
    for (int j = 0; j < LANES; j++) rest[j] = i + j < count ? logits[i + j] : LOWEST;
    take(load(rest));
  }
  return best;
}

// The id of the best of `count` scores, or -1 where only torch can say; so many threads share the ids.
int64_t choose(const float* logits, int64_t count, const Law& law, int64_t num_threads) {
  if (num_threads == 1) return best_from(0, count, logits, law).id(law);
  std::vector<Best> parts(num_threads);
  const int64_t part = (count / num_threads / LANES + 1) * LANES;
#pragma omp parallel for num_threads(num_threads)
  for (int64_t t = 0; t < num_threads; t++)
    parts[t] = best_from(t * part, std::min((t + 1) * part, count), logits, law);
  for (int64_t t = 1; t < num_threads; t++) parts[0].join(parts[t]);
  return parts[0].id(law);
}

// Has threads share the tasks, of `size` scores in all; or, if that is more threads, the `count` scores of a node.
template <typename Task>
void share(int64_t num_tasks, int64_t size, int64_t count, int64_t num_threads, const Task& task) {
  const int64_t of_node = count < SERIAL ? 1 : std::min(num_threads, count / LEAST);
  if (size < SERIAL || num_tasks < of_node) {  // not from within a region: one in another would be slow
    for (int64_t i = 0; i < num_tasks; i++) task(i, of_node);
    return;
  }
#pragma omp parallel for num_threads(num_threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < num_tasks; i++) task(i, 1);
}

// The `width` largest of the same scores, the first ids among equals, and their shares of all, by softmax; -1 and 0 where
// there are fewer. False where only torch can say. `scores` is room for all of them.
bool offer(const float* logits, int64_t count, const Law& law, int64_t width, float* scores, int64_t* tokens,
           float* survival) {
  const uint32_t low = static_cast<uint32_t>(law.key), high = static_cast<uint32_t>(law.key >> 32);
  Ints ids = counted(0), bad = {};
  std::vector<std::pair<float, int64_t>> best(width + 1, {LOWEST, -1});  // one more, to tell it from the last
  const auto insert = [&](float score, int64_t id) {
    int64_t i = width;
    for (; i > 0 && score > best[i - 1].first; i--) best[i] = best[i - 1];
    best[i] = {score, id};
  };
  for (int64_t i = 0; i < count; i += LANES, ids += LANES) {
    float rest[LANES];
    for (int64_t j = i; j < i + LANES && i + LANES > count; j++) rest[j - i] = j < count ? logits[j] : LOWEST;
    Floats x = load(i + LANES <= count ? logits + i : rest);
    bad |= x != x;
    if (law.noisy()) x = x / law.temperature + gumbel(keyed_round(keyed_round(words(ids), 0) ^ low, high));
    store(scores + i, x);
    if (any(x > all(best[width].first)))
      for (int j = 0; j < LANES; j++)
        if (x[j] > best[width].first) insert(x[j], i + j);
  }
  if (any(bad) || !(std::abs(best[0].first) <= std::numeric_limits<float>::max())) return false;
  Floats mass = {};
  for (int64_t i = 0; i < count; i += LANES) mass = mass + exponential(load(scores + i) - best[0].first);
  const float whole = sum(mass);
  for (int64_t i = 0; i < width; i++) {
    const float score = best[i].first, next = best[i + 1].first;
    if (law.noisy() && score - next <= law.margin(std::max(std::abs(score), std::abs(next)))) return false;
    tokens[i] = best[i].second;
    survival[i] = tokens[i] < 0 ? 0.0f : std::exp(score - best[0].first) / whole;
  }
  return true;
}

}  // namespace forerun

using namespace forerun;

extern "C" {

// For each node its first largest score, -1 where undecided; returns how many are. A row's temperature of 0 is greedy.
int64_t forerun_choose(const float* logits, int64_t stride, int64_t num_ids, int64_t num_nodes, const int64_t* rows,
                       const int64_t* positions, const uint64_t* row_keys, const float* temperatures, float slack,
                       int64_t* chosen, int64_t num_threads) {
  share(num_nodes, num_nodes * num_ids, num_ids, num_threads, [&](int64_t i, int64_t own_threads) {
    const Law law = {absorbed(row_keys[rows[i]], positions[i]), temperatures[rows[i]], slack};
    chosen[i] = choose(logits + i * stride, num_ids, law, own_threads);
  });
  return std::count_if(chosen, chosen + num_nodes, [](int64_t id) { return id < 0; });
}

// For each node its `width` best guesses and their survival; returns how many nodes are undecided, and marks them.
int64_t forerun_offer(const float* logits, int64_t stride, int64_t num_ids, int64_t num_nodes, const int64_t* rows,
                      const int64_t* positions, const uint64_t* row_keys, const float* temperatures, float slack,
                      int64_t width, int64_t* tokens, float* survival, int64_t* undecided, int64_t num_threads) {
  int64_t num_undecided = 0;
#pragma omp parallel for num_threads(num_nodes * num_ids < SERIAL ? 1 : num_threads) reduction(+ : num_undecided)
  for (int64_t i = 0; i < num_nodes; i++) {
    std::vector<float> scores(num_ids + LANES);
    const Law law = {absorbed(row_keys[rows[i]], positions[i]), temperatures[rows[i]], slack};
    undecided[i] = !offer(logits + i * stride, num_ids, law, width, scores.data(), tokens + i * width,
                          survival + i * width);
    num_undecided += undecided[i];
  }
  return num_undecided;
}

// `Draws.nodes`: row of the batch and position of what is drawn there, for every valid node; returns their number.
int64_t forerun_places(const int64_t* tokens, const int64_t* parents, int64_t batch, int64_t columns,
                       const int64_t* roots, int64_t* rows, int64_t* positions) {
  std::vector<int64_t> position(columns);
  int64_t count = 0;
  for (int64_t b = 0; b < batch; b++, tokens += columns, parents += columns)
    for (int64_t i = 0; i < columns; i++) {
      position[i] = (parents[i] < 0 ? roots[b] : position[parents[i]]) + 1;
      if (tokens[i] < 0) continue;
      rows[count] = b;
      positions[count++] = position[i];
    }
  return count;
}

// `rules.follow`: per row the accepted length, the next token and the path of depth + 1 nodes. `drawn` is packed.
void forerun_follow(const int64_t* tokens, const int64_t* parents, int64_t batch, int64_t columns,
                    const int64_t* drawn, int64_t depth, int64_t* verdict) {
  std::vector<int64_t> said(columns);
  for (int64_t b = 0; b < batch; b++, tokens += columns, parents += columns, verdict += depth + 3) {
    for (int64_t i = 0; i < columns; i++) said[i] = tokens[i] < 0 ? -1 : *drawn++;
    int64_t *const path = verdict + 2, node = 0, length = 0;
    path[0] = 0;
    for (int64_t i = 1; i < columns && length < depth; i++)  // parents come before their children
      if (parents[i] == node && tokens[i] == said[node]) path[++length] = node = i;
    for (int64_t i = length + 1; i <= depth; i++) path[i] = -1;
    verdict[0] = length;
    verdict[1] = said[node];
  }
}

// A whole verdict by coupled draws, of which only those on accepted paths are made; returns how many rows have one that
// is undecided, and then there is no verdict. -1 where the tree has another number of nodes than there are logits.
int64_t forerun_judge(const int64_t* tokens, const int64_t* parents, int64_t batch, int64_t columns,
                      const int64_t* roots, const float* logits, int64_t num_rows, int64_t stride, int64_t num_ids,
                      const uint64_t* keys, const float* temperatures, float slack, int64_t depth, int64_t* verdict,
                      int64_t num_threads) {
  std::vector<int64_t> place(batch * columns + 1);  // of each node's logits
  for (int64_t i = 0; i < batch * columns; i++) place[i + 1] = place[i] + (tokens[i] >= 0);
  if (place.back() != num_rows) return -1;
  share(batch, num_rows * num_ids, num_ids, num_threads, [&](int64_t b, int64_t own_threads) {
    const int64_t *const own = tokens + b * columns, *const above = parents + b * columns;
    int64_t *const result = verdict + b * (depth + 3), *const path = result + 2, node = 0, length = 0, said;
    path[0] = 0;
    while (true) {
      const Law law = {absorbed(keys[b], roots[b] + length + 1), temperatures[b], slack};
      said = choose(logits + place[b * columns + node] * stride, num_ids, law, own_threads);
      int64_t next = node + 1;
      while (next < columns && !(above[next] == node && own[next] == said)) next++;
      if (said < 0 || length == depth || next == columns) break;
      path[++length] = node = next;
    }
    for (int64_t i = length + 1; i <= depth; i++) path[i] = -1;
    result[0] = length;
    result[1] = said;
  });
  int64_t undecided = 0;
  for (int64_t b = 0; b < batch; b++) undecided += verdict[b * (depth + 3) + 1] < 0;
  return undecided;
}

// Whether `sanitize` would leave every row of a tree as it is. `limits` holds depth, width and nodes of each row.
// `seen` gets, per row, the number of valid nodes, then as many nodes, parents and tokens, each in `columns` places.
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
