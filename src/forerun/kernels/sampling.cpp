// A round's bookkeeping over tokens, in plain C: draws, where a tree's nodes are, and how far a verdict follows them.
//
// Decides nothing that Python does not define: each function gives what the tensor code of the same name gives, or says
// that it cannot. Logarithms here differ from torch's in their last bits, so a draw whose two best scores are too close
// for that is left to torch. Knows nothing of sequences.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "vectors.hpp"

namespace forerun {

typedef uint32_t Words __attribute__((vector_size(64)));

constexpr float LOWEST = -std::numeric_limits<float>::infinity();
constexpr float SLACK = 0x1p-14f;     // more than noise can differ from torch's
constexpr float ROUNDING = 0x1p-21f;  // more than the rounding of two scores, in parts of them
constexpr uint32_t LOUD = 1 << 23;    // hashes below this have the loudest noise, all others
constexpr float QUIET = 6.25f;        // at most so much
constexpr int64_t SERIAL = 1 << 17;   // below so many scores a second thread costs more than it brings

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
  Floats minus = __builtin_convertvector((Ints)hash, Floats) * -0x1p-32f;
  minus = minus - (minus > 0.0f ? all(1.0f) : Floats{}) - 0x1p-33f;
  minus = larger(minus, all(-(1.0f - 0x1p-24f)));
  const Floats rest = minus + 1.0f;  // what rounding took from it counts where w is tiny
  return -logarithm(-(logarithm(rest) + (minus - (rest - 1.0f)) / rest));
}

// How far below the best a score can be and still pass for it.
inline float slack(float best) { return SLACK + ROUNDING * std::abs(best); }

// The two best of some scores, lane by lane.
struct Best {
  Floats score = all(LOWEST), second = all(LOWEST);
  Ints at = {}, bad = {};

  void take(Floats x, Ints ids) {
    second = larger(second, x < score ? x : score);
    at = x > score ? ids : at;
    score = larger(x, score);
  }

  // The id of the best; -1 where it is not finite, or where two are closer than `slack` and draws are noisy.
  int64_t id(bool noisy) const {
    float best = LOWEST, other = LOWEST;
    int32_t found = 0;
    for (int j = 0; j < LANES; j++) {
      if (bad[j]) return -1;
      const bool wins = score[j] > best || (score[j] == best && at[j] < found);
      other = std::max({other, second[j], wins ? best : score[j]});
      if (wins) best = score[j], found = at[j];
    }
    if (!(std::abs(best) <= std::numeric_limits<float>::max())) return -1;
    return noisy && best - other <= slack(best) ? -1 : found;
  }
};

// The best of `count` scores: logits, or with a temperature logits over it plus noise. -1 where only torch can say.
//
// Noise above QUIET belongs to one id in 512, which the hash tells. Where no id of sixteen has it, and no logit reaches
// as far without, the sixteen are passed over: nothing of theirs could win, or come close.
int64_t choose(const float* logits, int64_t count, uint64_t key, float temperature) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  const Words loud = Words{} + LOUD;
  Best best;
  Floats least = all(LOWEST);
  Ints ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const auto take = [&](Floats x) {
    best.bad |= x != x;
    if (temperature > 0) {
      x = x / temperature;
      const Words hash = keyed_round(keyed_round((Words)ids, 0) ^ low, high);
      if (any((Ints)(hash < loud) | (x >= least))) {
        best.take(x + gumbel(hash), ids);
        const float reached = largest(best.score);
        least = all(reached - QUIET - 2 * slack(reached));
      }
    } else {
      best.take(x, ids);
    }
    ids += LANES;
  };
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) take(load(logits + i));
  if (i < count) {
    float rest[LANES];
    for (int j = 0; j < LANES; j++) rest[j] = i + j < count ? logits[i + j] : LOWEST;
    take(load(rest));
  }
  return best.id(temperature > 0);
}

// The `width` largest of the same scores, the first ids among equals, and their shares of all, by softmax; -1 and 0 where
// there are fewer. False where only torch can say. `scores` is room for all of them.
bool offer(const float* logits, int64_t count, uint64_t key, float temperature, int64_t width, float* scores,
           int64_t* tokens, float* survival) {
  const uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
  Ints ids = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, bad = {};
  std::vector<std::pair<float, int64_t>> best(width + 1, {LOWEST, -1});  // one more, to tell it from the last
  const auto insert = [&](float score, int64_t id) {
    int64_t i = width;
    for (; i > 0 && score > best[i - 1].first; i--) best[i] = best[i - 1];
    best[i] = {score, id};
  };
  for (int64_t i = 0; i < count; i += LANES, ids += LANES) {
    Floats x = all(LOWEST);
    if (i + LANES <= count)
      x = load(logits + i);
    else
      for (int64_t j = i; j < count; j++) x[j - i] = logits[j];
    bad |= x != x;
    if (temperature > 0) x = x / temperature + gumbel(keyed_round(keyed_round((Words)ids, 0) ^ low, high));
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
    if (temperature > 0 && score - next <= slack(std::max(std::abs(score), std::abs(next)))) return false;
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
                       const int64_t* positions, const uint64_t* row_keys, const float* temperatures, int64_t* chosen,
                       int64_t num_threads) {
  int64_t undecided = 0;
#pragma omp parallel for num_threads(num_nodes * num_ids < SERIAL ? 1 : num_threads) reduction(+ : undecided)
  for (int64_t i = 0; i < num_nodes; i++) {
    const uint64_t key = absorbed(row_keys[rows[i]], positions[i]);
    chosen[i] = choose(logits + i * stride, num_ids, key, temperatures[rows[i]]);
    undecided += chosen[i] < 0;
  }
  return undecided;
}

// For each node its `width` best guesses and their survival; returns how many nodes are undecided, and marks them.
int64_t forerun_offer(const float* logits, int64_t stride, int64_t num_ids, int64_t num_nodes, const int64_t* rows,
                      const int64_t* positions, const uint64_t* row_keys, const float* temperatures, int64_t width,
                      int64_t* tokens, float* survival, int64_t* undecided, int64_t num_threads) {
  int64_t num_undecided = 0;
#pragma omp parallel for num_threads(num_nodes * num_ids < SERIAL ? 1 : num_threads) reduction(+ : num_undecided)
  for (int64_t i = 0; i < num_nodes; i++) {
    std::vector<float> scores(num_ids + LANES);
    const uint64_t key = absorbed(row_keys[rows[i]], positions[i]);
    undecided[i] = !offer(logits + i * stride, num_ids, key, temperatures[rows[i]], width, scores.data(),
                          tokens + i * width, survival + i * width);
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

// A whole verdict by coupled draws; returns how many of them are undecided, and then there is none. -1 where the tree
// has another number of nodes than there are rows of logits.
int64_t forerun_judge(const int64_t* tokens, const int64_t* parents, int64_t batch, int64_t columns,
                      const int64_t* roots, const float* logits, int64_t num_rows, int64_t stride, int64_t num_ids,
                      const uint64_t* keys, const float* temperatures, int64_t depth, int64_t* verdict,
                      int64_t num_threads) {
  std::vector<int64_t> rows(batch * columns), positions(batch * columns), chosen(batch * columns);
  if (forerun_places(tokens, parents, batch, columns, roots, rows.data(), positions.data()) != num_rows) return -1;
  const int64_t undecided = forerun_choose(logits, stride, num_ids, num_rows, rows.data(), positions.data(), keys,
                                           temperatures, chosen.data(), num_threads);
  if (!undecided) forerun_follow(tokens, parents, batch, columns, chosen.data(), depth, verdict);
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
