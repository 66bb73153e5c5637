// Attention of some queries over the cached keys of one path, in blocks of 16 keys, read in place.
//
// A query visits only its own keys, in their order, so its bits depend neither on other queries nor on the rest of the
// cache. The keys of a path are in the sequence's contiguous slots, and from some key on in the slots of a list: so the
// nodes of a tree are read as a chain without being copied.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "formats.hpp"

namespace forerun {

constexpr int MAX_HEAD = 512;      // widest head
constexpr int CHUNK_QUERIES = 32;  // queries, times the heads of a group, that share the keys that are read
constexpr int64_t AHEAD_KEYS = 32;  // from the keys that are fetched into the L1 cache to those for the L2 cache
constexpr int MOST_WEIGHED = 4;     // queries at one position that share the values in registers

struct Path {
  int64_t first_slot, num_plain;  // the slot of key 0; keys from num_plain on are in `slots`
  const int64_t* slots;
  int64_t slot(int64_t key) const { return key < num_plain ? first_slot + key : slots[key - num_plain]; }
};

struct Query {
  const float* q;
  float* out;
  int64_t position;  // its last key
  float sink;        // extra score that takes weight but has no value; minus infinity: none
};

// Prefetches the 16 keys (or values) from `first` on into the cache of this level.
template <int LEVEL, typename T>
FORERUN_INLINE void fetch_into(const T* cache, const Path& path, int64_t first, int64_t end, int64_t head_dim) {
  const int64_t to = std::min({first + LANES, end, path.num_plain});
  if (first >= to) return;
  const char* const data = reinterpret_cast<const char*>(cache + path.slot(first) * head_dim);
  for (int64_t i = 0; i < (to - first) * head_dim * int64_t{sizeof(T)}; i += 64) LEVEL == 1 ? fetch_now(data + i) : fetch(data + i);
}

// Prefetches the 16 keys (or values) from `first` on, and later ones into L2: since the last pass, weights displaced them.
template <typename T>
FORERUN_INLINE void fetch_keys(const T* cache, const Path& path, int64_t first, int64_t end, int64_t head_dim) {
  fetch_into<2>(cache, path, first + AHEAD_KEYS, end, head_dim);
  fetch_into<1>(cache, path, first, end, head_dim);
}

// 16 keys (or values) as float32; zeros beyond a head's width and for keys from `end` on.
template <typename T>
inline void load_block(const T* cache, const Path& path, int64_t first, int64_t end, int64_t head_dim, int64_t width,
                       float* block) {
  fetch_keys(cache, path, first + LANES, end, head_dim);
  for (int k = 0; k < LANES; k++) {
    float* to = block + k * width;
    if (first + k >= end) {
      memset(to, 0, width * sizeof(float));
      continue;
    }
    const T* from = cache + path.slot(first + k) * head_dim;
    int64_t i = 0;
    for (; i + LANES <= head_dim; i += LANES) store(to + i, widened(from + i));
    if (i < head_dim) {
      T rest[LANES] = {};
      memcpy(rest, from + i, (head_dim - i) * sizeof(T));
      store(to + i, widened(rest)), i += LANES;
    }
    for (; i < width; i += LANES) store(to + i, Floats{});
  }
}

// Q queries times 16 keys, register by register, as many keys at a time as have registers for their sums.
template <int Q>
__attribute__((noinline)) void score(const float (*q)[MAX_HEAD], const float* block, int64_t width, float* scores,
                                     int64_t stride) {
  constexpr int MOST = (NUM_REGISTERS - 4) / Q, AT_ONCE = MOST >= 16 ? 16 : MOST >= 8 ? 8 : 4, STEP = LANES / PARTS;
  Floats dots[Q][LANES];
  for (int part = 0; part < PARTS; part++)
    for (int first = 0; first < LANES; first += AT_ONCE) {
      FloatRegister some[Q][AT_ONCE] = {};
      for (int64_t i = part * STEP; i < width; i += LANES)
        for (int k = 0; k < AT_ONCE; k++) {
          const FloatRegister key = register_at(block + (first + k) * width + i);
          for (int r = 0; r < Q; r++) some[r][k] = fma(register_at(q[r] + i), key, some[r][k]);
        }
      for (int r = 0; r < Q; r++)
        for (int k = 0; k < AT_ONCE; k++) part_of(dots[r][first + k], part) = some[r][k];
    }
  for (int r = 0; r < Q; r++) store(scores + r * stride, sums(dots[r]));
}

// Turns scores, soft-capped by `cap` unless it is 0, into weights that sum to `total`, with the sink's; the first score
// is that of key `first`, and keys outside get weight 0.
__attribute__((noinline)) inline float weigh(float* scores, int64_t first, int64_t seen_from, int64_t position, float sink,
                                             float cap) {
  const int64_t count = position + 1 - first, end = (count + LANES - 1) / LANES * LANES;
  const float never = -INFINITY;
  if (cap)
    for (int64_t k = 0; k < end; k += LANES) store(scores + k, soft_capped(load(scores + k), cap));
  for (int64_t k = 0; k < seen_from - first; k++) scores[k] = never;
  for (int64_t k = count; k < end; k++) scores[k] = never;
  Floats top = all(never), total{};
  for (int64_t k = 0; k < end; k += LANES) top = larger(load(scores + k), top);
  const Floats most = all(largest(top));
  for (int64_t k = 0; k < end; k += LANES) {
    const Floats score = load(scores + k), weight = exponential(score - most);
    const Floats kept = choose(score == all(never), Floats{}, weight);
    store(scores + k, kept);
    total += kept;
  }
  if (sink == never) return sum(total);
  float weight[LANES];
  store(weight, exponential(all(sink) - most));
  return sum(total) + weight[0];
}

// J times 16 numbers of the results of G queries, in registers.
template <int G, int J>
inline void add_columns(float (*out)[MAX_HEAD], const float* weights, int64_t stride, const float* block, int from, int end,
                        int64_t width, int64_t column) {
  Floats sums[G][J];
  for (int g = 0; g < G; g++)
    for (int j = 0; j < J; j++) sums[g][j] = load(out[g] + column + j * LANES);
  for (int k = from; k < end; k++)
    for (int j = 0; j < J; j++) {
      const Floats value = load(block + k * width + column + j * LANES);
      for (int g = 0; g < G; g++) sums[g][j] = fma(all(weights[g * stride + k]), value, sums[g][j]);
    }
  for (int g = 0; g < G; g++)
    for (int j = 0; j < J; j++) store(out[g] + column + j * LANES, sums[g][j]);
}

// G queries at one position: each value is read once for all of them. Every sum runs over the keys one by one.
template <int G>
inline void add_values(float (*out)[MAX_HEAD], const float* weights, int64_t stride, const float* block, int from, int end,
                       int64_t width) {
  constexpr int J = std::clamp((NUM_REGISTERS - 4) / PARTS / G, 1, 4);
  int64_t i = 0;
  for (; i + J * LANES <= width; i += J * LANES) add_columns<G, J>(out, weights, stride, block, from, end, width, i);
  for (; i < width; i += LANES) add_columns<G, 1>(out, weights, stride, block, from, end, width, i);
}

// Keys and values as float32. A score is the sum of a register of products along the head.
template <typename T>
struct FloatBlocks {
  typedef float Number;  // of queries and weights
  static constexpr int64_t STEP = LANES;  // numbers of a head that are computed together
  static constexpr int MOST_SCORED = PARTS == 1 ? 1 : 3;  // queries that share the keys in registers
  alignas(64) float block[LANES * MAX_HEAD];  // [key, number]

  void load_keys(const T* keys, const Path& path, int64_t first, int64_t end, int64_t head_dim, int64_t width) {
    load_block(keys, path, first, end, head_dim, width, block);
  }

  void load_values(const T* values, const Path& path, int64_t first, int64_t end, int64_t head_dim, int64_t width) {
    load_block(values, path, first, end, head_dim, width, block);
  }

  template <int Q>
  void score(const float (*q)[MAX_HEAD], int64_t width, float* scores, int64_t stride) const {
    forerun::score<Q>(q, block, width, scores, stride);
  }

  template <int G>
  void add_values(float (*sums)[MAX_HEAD], const float* weights, int64_t stride, int from, int end, int64_t width) const {
    forerun::add_values<G>(sums, weights, stride, block, from, end, width);
  }

  static void restore_order(float*, int64_t) {}  // of the numbers in sums
};

// Queries that share a key head, in ascending positions; `window` 0: all keys. `scores` is the thread's scratch memory.
// Blocks are 16 keys or values in the form in which they are multiplied.
template <typename Blocks, typename T>
void attend(const std::vector<Query>& queries, const Path& path, const T* keys, const T* values, int64_t head_dim,
            int64_t window, float scale, float cap, std::vector<float>& scores) {
  typedef typename Blocks::Number Number;
  const int64_t width = (head_dim + Blocks::STEP - 1) / Blocks::STEP * Blocks::STEP;
  const auto seen_from = [&](const Query& q) { return window && q.position >= window ? q.position + 1 - window : 0; };
  const int64_t first = seen_from(queries.front()) / LANES * LANES, end = queries.back().position + 1;
  const int64_t stride = (end - first + LANES - 1) / LANES * LANES, weight_stride = stride * sizeof(float) / sizeof(Number);
  const int64_t count = queries.size();
  alignas(64) Number q[CHUNK_QUERIES][MAX_HEAD];
  alignas(64) float sums[CHUNK_QUERIES][MAX_HEAD];
  float totals[CHUNK_QUERIES];
  Blocks blocks;
  fetch_keys(keys, path, first, end, head_dim);
  scores.resize(count * stride);
  Number* const weights = reinterpret_cast<Number*>(scores.data());  // the weights of a query overwrite its scores
  for (int64_t i = 0; i < count; i++) {
    alignas(64) float scaled[MAX_HEAD];
    for (int64_t d = 0; d < head_dim; d++) scaled[d] = queries[i].q[d] * scale;
    memset(q[i], 0, width * sizeof(Number)), memset(sums[i], 0, width * sizeof(float));
    put(q[i], scaled, head_dim);
  }
  for (int64_t key = first; key < end; key += LANES) {
    blocks.load_keys(keys, path, key, end, head_dim, width);
    for (int64_t i = 0, some; i < count; i += some) {  // scores of keys that a query does not see are not used
      some = std::min<int64_t>(Blocks::MOST_SCORED, count - i);
      if (key > queries[i + some - 1].position || key + LANES <= seen_from(queries[i])) continue;
      with_constant<Blocks::MOST_SCORED>(
          some, [&](auto number) { blocks.template score<number>(q + i, width, &scores[i * stride + key - first], stride); });
    }
  }
  fetch_keys(values, path, first, end, head_dim);
  for (int64_t i = 0; i < count; i++) {
    const Query& query = queries[i];
    const int64_t begin = seen_from(query) / LANES * LANES;  // the first block that this query sees
    float* const seen = &scores[i * stride + begin - first];
    totals[i] = weigh(seen, begin, seen_from(query), query.position, query.sink, cap);
    for (int64_t k = 0; k < query.position + 1 - begin && sizeof(Number) < sizeof(float); k += LANES)
      narrow(weights + i * weight_stride + begin - first + k, load(seen + k));
  }
  for (int64_t key = first; key < end; key += LANES) {
    blocks.load_values(values, path, key, end, head_dim, width);
    for (int64_t i = 0, same; i < count; i += same) {
      const Query& query = queries[i];
      for (same = 1; same < MOST_WEIGHED && i + same < count && queries[i + same].position == query.position;) same++;
      if (key > query.position || key + LANES <= seen_from(query)) continue;  // it sees no key of this block
      const int from = std::max<int64_t>(0, seen_from(query) - key);
      const int to = std::min<int64_t>(LANES, query.position + 1 - key);
      with_constant<MOST_WEIGHED>(same, [&](auto number) {
        blocks.template add_values<number>(sums + i, weights + i * weight_stride + key - first, weight_stride, from, to, width);
      });
    }
  }
  for (int64_t i = 0; i < count; i++) {
    Blocks::restore_order(sums[i], width);
    for (int64_t d = 0; d < head_dim; d++) queries[i].out[d] = sums[i][d] / totals[i];
  }
}

}  // namespace forerun
