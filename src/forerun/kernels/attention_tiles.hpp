// The attention of attention.hpp for bfloat16 caches on processors with AMX: tiles of 16 queries, 32 keys at a time.
//
// Scores are computed as [key, query], so each lane computes the weights of one query. Keys that a query does not see
// get weight 0, which changes no sum: so the bits of a query do not depend on other queries here either. Queries and
// weights are rounded to bfloat16, as in torch's attention.
#pragma once
#include "attention_pairs.hpp"
#include "multiply_tiles.hpp"

#if defined(FORERUN_AMX)
namespace forerun {

constexpr int QUERY_TILES = CHUNK_QUERIES / TILE;

struct alignas(64) PairTile {  // a tile of pairs of bfloat16
  Ints row[TILE];
};

struct TileScratch {  // memory of one thread; grows with the longest text
  std::vector<PairTile> memory;
  PairTile *values, *weights;
  float* scores;  // [tile of queries, key, query]

  void room(int64_t num_blocks, int64_t value_tiles) {
    const size_t num_tiles = num_blocks * (value_tiles + 3 * QUERY_TILES);
    if (memory.size() < num_tiles) memory.resize(num_tiles);
    values = memory.data(), weights = values + num_blocks * value_tiles;
    scores = reinterpret_cast<float*>(weights + num_blocks * QUERY_TILES);
  }
};

inline Ints paired(const bfloat16* low, const bfloat16* high) {
  const Ints a = __builtin_convertvector(*reinterpret_cast<const HalvesAnywhere*>(low), Ints);
  const Ints b = __builtin_convertvector(*reinterpret_cast<const HalvesAnywhere*>(high), Ints);
  return a | (b << 16);
}

inline void transpose(PairTile& tile) {  // exchanges halves, quarters, ... across the diagonal
  for (int step = TILE / 2; step; step /= 2) {
    Ints low, high;
    for (int i = 0; i < LANES; i++) low[i] = i & step ? LANES + i - step : i, high[i] = i & step ? LANES + i : i + step;
    for (int i = 0; i < TILE; i++) {
      if (i & step) continue;
      const __m512i a = (__m512i)tile.row[i], b = (__m512i)tile.row[i + step];
      tile.row[i] = (Ints)_mm512_permutex2var_epi32(a, (__m512i)low, b);
      tile.row[i + step] = (Ints)_mm512_permutex2var_epi32(a, (__m512i)high, b);
    }
  }
}

// 32 rows of keys or values: a pointer into the cache if their slots are contiguous, else a copy.
inline const bfloat16* rows_of(const bfloat16* cache, const Path& path, int64_t first, int64_t end, int64_t head_dim,
                               int64_t width, bfloat16* copy) {
  const int64_t count = std::min<int64_t>(PAIRED, end - first);
  if (count == PAIRED && first + PAIRED <= path.num_plain && head_dim == width) return cache + path.slot(first) * head_dim;
  memset(copy, 0, PAIRED * width * sizeof(bfloat16));
  for (int64_t k = 0; k < count; k++)
    memcpy(copy + k * width, cache + path.slot(first + k) * head_dim, head_dim * sizeof(bfloat16));
  return copy;
}

// Turns scores, soft-capped by `cap` unless it is 0, into pairs of weights, as rows of queries; lane i sees the keys
// from `from` to `last`. Returns the total weight of each lane, with its sink's.
inline Floats weigh_lanes(float* scores, int64_t first, int64_t num_keys, Ints last, Ints from, Floats sinks, float scale,
                          float cap, PairTile* weights) {
  const Floats never = all(-INFINITY);
  if (cap) {
    for (int64_t k = 0; k < num_keys; k++) store(scores + k * LANES, soft_capped(load(scores + k * LANES) * scale, cap));
    scale = 1.0f;
  }
  const auto score_of = [&](int64_t k) {
    const Ints key = static_cast<int32_t>(first + k) - Ints{};
    return (key <= last) & (key >= from) ? load(scores + k * LANES) * scale : never;
  };
  Floats top = never, total{};
  for (int64_t k = 0; k < num_keys; k++) top = larger(score_of(k), top);
  top = top == never ? Floats{} : top;
  for (int64_t block = 0; block < num_keys; block += PAIRED) {
    PairTile& tile = weights[block / PAIRED];
    for (int pair = 0; pair < TILE; pair++) {
      bfloat16 rounded[2][LANES];
      for (int i = 0; i < 2; i++) {
        const Floats score = score_of(block + 2 * pair + i), weight = exponential(score - top);
        const Floats kept = score == never ? Floats{} : weight;
        total += kept;
        narrow(rounded[i], kept);
      }
      tile.row[pair] = paired(rounded[0], rounded[1]);
    }
    transpose(tile);
  }
  return total + exponential(sinks - top);  // 0 without a sink
}

inline void attend_tiles(const std::vector<Query>& queries, const Path& path, const bfloat16* keys, const bfloat16* values,
                         int64_t head_dim, int64_t window, float scale, float cap, TileScratch& s) {
  const int64_t width = (head_dim + PAIRED - 1) / PAIRED * PAIRED, value_tiles = width / LANES;
  const int num_tiles = (queries.size() + TILE - 1) / TILE;
  const auto seen_from = [&](const Query& q) { return window && q.position >= window ? q.position + 1 - window : 0; };
  const int64_t first = seen_from(queries.front()) / PAIRED * PAIRED, end = queries.back().position + 1;
  const int64_t num_blocks = (end - first + PAIRED - 1) / PAIRED, num_keys = num_blocks * PAIRED;
  alignas(64) bfloat16 copy[PAIRED * MAX_HEAD];
  alignas(64) float sums[TILE][LANES];
  PairTile q[QUERY_TILES][MAX_HEAD / PAIRED];
  s.room(num_blocks, value_tiles);
  for (int t = 0; t < num_tiles; t++)
    for (int64_t d = 0; d < width; d += PAIRED) {
      PairTile& tile = q[t][d / PAIRED];
      for (int i = 0; i < TILE; i++) {
        float wide[PAIRED] = {};
        bfloat16 rounded[PAIRED];
        const size_t n = t * TILE + i;
        if (n < queries.size()) memcpy(wide, queries[n].q + d, std::min<int64_t>(PAIRED, head_dim - d) * sizeof(float));
        narrow(rounded, load(wide)), narrow(rounded + LANES, load(wide + LANES));
        memcpy(&tile.row[i], rounded, sizeof rounded);
      }
      transpose(tile);
    }
  configure_tiles(BFLOAT16);
  for (int64_t b = 0; b < num_blocks; b++) {
    const bfloat16* k = rows_of(keys, path, first + b * PAIRED, end, head_dim, width, copy);
    for (int t = 0; t < num_tiles; t++) {
      float* scores = s.scores + (t * num_keys + b * PAIRED) * LANES;
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t d = 0; d < width; d += PAIRED) {
        _tile_loadd(4, k + d, width * sizeof(bfloat16));
        _tile_loadd(5, k + TILE * width + d, width * sizeof(bfloat16));
        _tile_loadd(6, &q[t][d / PAIRED], 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 5, 6);
      }
      _tile_stored(0, scores, 64);
      _tile_stored(1, scores + TILE * LANES, 64);
    }
    const bfloat16* v = rows_of(values, path, first + b * PAIRED, end, head_dim, width, copy);
    for (int64_t d = 0; d < value_tiles; d++)
      for (int pair = 0; pair < TILE; pair++) {
        const bfloat16* low = v + 2 * pair * width + d * LANES;
        s.values[b * value_tiles + d].row[pair] = paired(low, low + width);
      }
  }
  for (int t = 0; t < num_tiles; t++) {
    Ints last = Ints{} - 1, from{};
    Floats sinks = all(-INFINITY);
    const int count = std::min<int>(TILE, queries.size() - t * TILE);
    for (int i = 0; i < count; i++) {
      const Query& query = queries[t * TILE + i];
      last[i] = query.position, from[i] = seen_from(query), sinks[i] = query.sink;
    }
    PairTile* const weights = s.weights + t * num_blocks;
    const Floats totals =
        weigh_lanes(s.scores + t * num_keys * LANES, first, num_keys, last, from, sinks, scale, cap, weights);
    for (int64_t d = 0; d < value_tiles; d += 2) {  // two tiles of sums; a head's width is an even number of them
      _tile_zero(0);
      _tile_zero(1);
      for (int64_t b = 0; b < num_blocks; b++) {
        _tile_loadd(4, weights + b, 64);
        _tile_loadd(6, s.values + b * value_tiles + d, 64);
        _tile_loadd(7, s.values + b * value_tiles + d + 1, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      for (int half = 0; half < 2; half++) {
        if (half) _tile_stored(1, sums, 64);
        else _tile_stored(0, sums, 64);
        const int64_t column = (d + half) * LANES, numbers = std::min<int64_t>(LANES, head_dim - column);
        for (int i = 0; i < count; i++)
          for (int64_t n = 0; n < numbers; n++) queries[t * TILE + i].out[column + n] = sums[i][n] / totals[i];
      }
    }
  }
  _tile_release();
}

}  // namespace forerun
#endif
