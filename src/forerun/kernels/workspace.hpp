// The preparation of a pass before its threads start: scratch memory, which grows with the largest pass, and each
// thread's share of the queries.
#pragma once
#include <memory>

#include "attention.hpp"
#include "decoder.hpp"
#include "experts.hpp"

namespace forerun {

struct Task {  // some queries of one path, as token * group + head in the group
  int64_t path, kv_head;
  std::vector<int64_t> queries;
};

struct Scratch {  // grows with the largest pass
  int64_t num_tokens = 0;
  std::unique_ptr<Memory> memory;
  float *x, *normed, *wide, *mixed, *scales;  // `wide` holds the result of every product, see `out_of`
  char *rows, *next_rows;  // one is read by a product while the other is prepared for the next
  Routes routes;  // of the current mixture-of-experts layer
};

struct Decoder {
  Shape shape;
  std::vector<Layer> layers;
  Scratch scratch;

  int64_t q_size() const { return shape.all_heads * shape.head_dim; }

  Scratch& room(int64_t num_tokens) {
    Scratch& s = scratch;
    if (num_tokens <= s.num_tokens) return s;
    const int64_t hidden = padded(shape.hidden), mixed = padded(q_size());
    int64_t wide = std::max(hidden, padded((shape.heads + 2 * shape.kv_heads) * shape.head_dim));
    int64_t deep = std::max(hidden, mixed), per_token = 1, spare = 0;
    for (const Layer& l : layers) {
      deep = std::max(deep, l.qkv->depth);
      const auto take = [&](const Gated& g) {
        wide = std::max({wide, g.gate_up->width, g.down->depth}), deep = std::max(deep, g.down->depth);
      };
      if (l.dense.down) take(l.dense);
      if (!l.experts) continue;
      take(l.experts->gated[0]), wide = std::max(wide, l.experts->router->width);
      per_token = std::max(per_token, l.per_token()), spare = 2 * TILE;  // for a last group that begins within a tile
    }
    wide += LANES, deep += LANES;
    const int64_t rows = whole_tiles(num_tokens), pairs = rows * per_token + spare;
    const int64_t prepared = pairs * (deep + ROW_GAP / 4);  // most floats of prepared rows
    s.memory = std::make_unique<Memory>(4 * rows * (hidden + deep + mixed) + 4 * pairs * (wide + 1) + 8 * prepared + 8 * 64);
    char* at = s.memory->data;
    const auto take = [&](int64_t floats) {
      char* const taken = at;
      at += (4 * floats + 63) / 64 * 64;
      return reinterpret_cast<float*>(taken);
    };
    s.x = take(rows * hidden), s.normed = take(rows * deep), s.wide = take(pairs * wide), s.mixed = take(rows * mixed);
    s.scales = take(pairs);
    s.rows = reinterpret_cast<char*>(take(prepared)), s.next_rows = reinterpret_cast<char*>(take(prepared));
    s.routes.room(pairs);
    s.num_tokens = rows;
    return s;
  }

  static int64_t whole_tiles(int64_t num_rows) { return (num_rows + 2 * TILE - 1) / (2 * TILE) * (2 * TILE); }
};

struct Tasks {  // of attention
  std::vector<Task> tasks;
  std::vector<int64_t> starts;  // of every thread's share, and their number

  int64_t start(int thread, int num_threads) const {  // there may be fewer threads than were planned
    return starts[(starts.size() - 1) * thread / num_threads];
  }
};

// Distributes the queries over threads, in the order of paths and heads, such that each attends to equally many keys.
inline Tasks share_out(const Shape& shape, const Pass& pass) {
  Tasks all{{}, {0}};
  if (!pass.num_paths) return all;
  const int64_t group = shape.heads / shape.kv_heads;
  std::vector<std::vector<int64_t>> queries(pass.num_paths);
  int64_t total = 0, given = 0;
  for (int64_t token = 0; token < pass.num_tokens; token++) {
    total += shape.heads * (pass.last_key[token] + 1);
    for (int64_t g = 0; g < group; g++) queries[pass.path_of[token]].push_back(token * group + g);
  }
  for (int64_t path = 0; path < pass.num_paths; path++)
    for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++)
      for (int64_t query : queries[path]) {
        const int64_t number = all.tasks.size(), thread = given * pass.num_threads / total;
        given += pass.last_key[query / group] + 1;
        const bool begins = static_cast<int64_t>(all.starts.size()) <= thread;
        all.starts.resize(std::max<int64_t>(all.starts.size(), thread + 1), number);
        const Task* const last = number && !begins ? &all.tasks.back() : nullptr;
        if (!last || last->path != path || last->kv_head != kv_head || last->queries.size() == CHUNK_QUERIES)
          all.tasks.push_back({path, kv_head, {}});
        all.tasks.back().queries.push_back(query);
      }
  all.starts.resize(pass.num_threads + 1, all.tasks.size());
  return all;
}

}  // namespace forerun
