// The decoder's layers over packed tokens, in one parallel region per pass; called from Python through plain C.
//
// Between two barriers, threads divide rows (in row-wise operations), outputs (in products with weights) or queries (in
// attention) among themselves; the division never changes a result. The residual stream is float32. Each token has a
// position, a cache slot and the path that it attends to.
#include <omp.h>

#include <type_traits>

#include "attention_pairs.hpp"
#include "attention_tiles.hpp"
#include "rows.hpp"
#include "workspace.hpp"

namespace forerun {

// The form in which keys and values of a cache are multiplied.
#if defined(__AVX512BF16__)
template <typename T>
using BlocksOf = std::conditional_t<std::is_same_v<T, bfloat16>, PairBlocks, FloatBlocks<T>>;
#elif defined(__AVX512F__)
template <typename T>
using BlocksOf = std::conditional_t<std::is_same_v<T, bfloat16>, LaneBlocks, FloatBlocks<T>>;
#else
template <typename T>
using BlocksOf = FloatBlocks<T>;
#endif

template <typename T>
class Worker {  // computes one thread's part of a pass
 public:
  Worker(const Decoder& decoder, const Pass& pass, const Tasks& attention, Scratch& scratch, Division division)
      : d(decoder), c(decoder.shape), pass(pass), attention(attention), s(scratch), division(division) {}

  void run() {
    if (!pass.num_paths) return layers();
    const int64_t hidden = padded(c.hidden);
    each_row([&](int64_t r) {
      memcpy(s.x + r * hidden, pass.x + r * c.hidden, c.hidden * sizeof(float));
      memset(s.x + r * hidden + c.hidden, 0, (hidden - c.hidden) * sizeof(float));
    });
    layers();
    each_row([&](int64_t r) { memcpy(pass.x + r * c.hidden, s.x + r * hidden, c.hidden * sizeof(float)); });
  }

 private:
  void layers() {
    for (int64_t i = pass.first_layer; i < pass.end_layer; i++) layer(d.layers[i], i);
  }

  // The thread that computes a row also prepares it for the next product, in pieces if the format allows it: so no thread
  // waits in between, and no row moves to another core.
  void layer(const Layer& l, int64_t index) {
    const int64_t hidden = padded(c.hidden), mixed = padded(d.q_size());
    const Rows rows{s.rows, s.scales}, next_rows{s.next_rows, s.scales};
    const int64_t cache = index * c.kv_heads * pass.num_slots * c.head_dim;
    T *keys = static_cast<T*>(pass.keys) + cache, *values = static_cast<T*>(pass.values) + cache;
    const bool reads = pass.read && (index == pass.first_layer || !pass.num_paths);
    each_row([&](int64_t r) {
      if (!reads) norm_stream(r, l.attention_norm);
      prepare_row(*l.qkv, reads ? pass.read + r * l.qkv->depth : s.normed + r * hidden, rows, r);
    });
    wait();
    project_heads(l, rows, keys, values);
    wait();
    if (!pass.num_paths) return;
    const bool in_pieces = !c.gather && l.out->has_pieces() && c.head_dim % GROUP == 0 && d.q_size() % WIDTH == 0;
    const int64_t group = c.heads / c.kv_heads;
    const auto attend_tasks = [&](int64_t first, int64_t end) {
      for (int64_t i = first; i < end; i++) {
        const Task& task = attention.tasks[i];
        attend_task(task, l, keys, values);
        for (size_t n = 0; n < task.queries.size() && in_pieces; n++) {
          const int64_t token = task.queries[n] / group, head = task.kv_head * group + task.queries[n] % group;
          prepare_columns(*l.out, s.mixed + token * mixed, next_rows, token, head * c.head_dim, (head + 1) * c.head_dim);
        }
      }
    };
    division.each_from([&](int owner) { return attention.start(owner, division.num_threads); }, attend_tasks);
    if (!in_pieces) {
      wait();
      gather(HEADS, s.mixed, mixed, d.q_size(), mixed, pass.num_tokens);
      each_row([&](int64_t r) { prepare_row(*l.out, s.mixed + r * mixed, next_rows, r); });
    }
    add_up(*l.out, next_rows);
    const Linear& next = l.experts ? *l.experts->router : *l.dense.gate_up;
    each_row([&](int64_t r) {
      add(r, l.attention_out_norm);
      if (!l.parallel) norm_stream(r, l.mlp_norm);
      prepare_row(next, s.normed + r * hidden, rows, r);
    });
    if (l.experts) {
      wait();
      multiply(next, rows, pass.num_tokens, out_of(next), division);
      wait();
      return sparse(l, *l.experts, rows);
    }
    wait();
    activate(l.dense, rows, next_rows);
    add_up(*l.dense.down, next_rows);
    each_row([&](int64_t r) { add(r, l.mlp_out_norm); });
  }

  // Computes queries, keys and values. If panels consist of complete heads, each thread computes complete heads.
  void project_heads(const Layer& l, Rows rows, T* keys, T* values) {
    const int64_t num_heads = c.heads + 2 * c.kv_heads, columns = std::max<int64_t>(c.head_dim, WIDTH);
    if (num_heads * c.head_dim % columns == 0 && columns % c.head_dim == 0 && columns % WIDTH == 0 && !l.joint_norm) {
      return division.each(num_heads * c.head_dim / columns, [&](int64_t first, int64_t end) {
        first *= columns, end *= columns;
        multiply_part(*l.qkv, rows, pass.num_tokens, out_of(*l.qkv), first / LANES, end / LANES);
        for (int64_t token = 0; token < pass.num_tokens; token++)
          for (int64_t head = first / c.head_dim; head < end / c.head_dim; head++) store_head(l, token, head, keys, values);
      });
    }
    multiply(*l.qkv, rows, pass.num_tokens, out_of(*l.qkv), division);
    wait();
    if (l.qk_norm && l.joint_norm) {
      const int64_t queries = c.heads * c.head_dim;
      each_row([&](int64_t r) {
        norm_head(out_of(*l.qkv).at(r, 0), queries, l.qk_norm, c.norm_eps);
        norm_head(out_of(*l.qkv).at(r, queries), c.kv_heads * c.head_dim, l.qk_norm + queries, c.norm_eps);
      });
      wait();
    }
    division.each_of(pass.num_tokens * num_heads, [&](int64_t i) { store_head(l, i / num_heads, i % num_heads, keys, values); });
  }

  // The input rows of `down`; if the format allows pieces, each thread computes its own columns.
  void activate(const Gated& mlp, Rows rows, Rows next_rows) {
    const Linear &gate_up = *mlp.gate_up, &down = *mlp.down;
    const int64_t neurons = mlp.neurons();
    const auto columns = [&](int64_t r, int64_t from, int64_t end) {
      const float *gate = out_of(gate_up).at(r, from), *up = mlp.plain ? nullptr : gate + neurons;
      float* const out = active_row(down, r) + from;
      if (c.gelu) activate_row(gate, up, end - from, out, Gelu{});
      else activate_row(gate, up, end - from, out, Silu{});
    };
    if (!c.gather && neurons % WIDTH == 0 && down.has_pieces()) {
      const int64_t units = neurons / WIDTH;
      return division.each(units, [&](int64_t first, int64_t end) {
        for (int64_t half = 0; half < (mlp.plain ? 1 : 2); half++)
          multiply_part(gate_up, rows, pass.num_tokens, out_of(gate_up), (half * units + first) * PANELS, (half * units + end) * PANELS);
        for (int64_t r = 0; r < pass.num_tokens; r++) {
          columns(r, first * WIDTH, end * WIDTH);
          prepare_columns(down, active_row(down, r), next_rows, r, first * WIDTH, end * WIDTH);
        }
      });
    }
    multiply(gate_up, rows, pass.num_tokens, out_of(gate_up), division);
    wait();
    each_row([&](int64_t r) {
      columns(r, 0, neurons);
      if (!c.gather) prepare_row(down, active_row(down, r), next_rows, r);
    });
    if (!c.gather) return;
    wait();
    gather(NEURONS, s.normed, down.depth + LANES, down.inputs, down.depth, pass.num_tokens);
    each_row([&](int64_t r) { prepare_row(down, active_row(down, r), next_rows, r); });
  }

  void sparse(const Layer& l, const Experts& e, Rows rows) {
    const int64_t hidden = padded(c.hidden), per_token = l.per_token();
    Routes& routes = s.routes;
    each_row([&](int64_t r) {
      route(e, out_of(*e.router).at(r, 0), &routes.mlps[r * per_token], &routes.weights[r * per_token]);
    });
    wait();
    if (division.thread == 0) {
      routes.group(pass.num_tokens, per_token, e.count + 1);
      if (pass.num_experts) *pass.num_experts += routes.groups.size() - (per_token > e.active);
    }
    wait();
    const int64_t deep = std::max(e.gated[0].down->depth, l.dense.down ? l.dense.down->depth : 0);
    const Products up(l, &Gated::gate_up, deep), down(l, &Gated::down, hidden);
    each_pair([&](const Group& g, int64_t p) {
      prepare_row(up.of(g), s.normed + routes.tokens[p] * hidden, up.rows(g, rows), p - g.first);
    });
    wait();
    up.multiply(routes.groups, rows, s.wide, division);
    wait();
    each_pair([&](const Group& g, int64_t p) {  // in place: the activation overwrites the gate
      const Gated& mlp = g.mlp < e.count ? e.gated[g.mlp] : l.dense;
      float *const gate = up.out(g, s.wide).at(p - g.first, 0), *const values = gate + mlp.neurons();
      if (e.limit && g.mlp < e.count) activate_row(gate, values, mlp.neurons(), gate, Bounded{e.alpha, e.limit});
      else activate_row(gate, values, mlp.neurons(), gate, Silu{});
    });
    if (c.gather) {
      wait();
      const Group& last = routes.groups.back();
      const int64_t shared = last.mlp < e.count ? last.end : last.first;  // pairs of experts precede those of the shared MLP
      const Linear &expert = *e.gated[0].down, &dense = *(l.dense.down ? l.dense.down : e.gated[0].down);
      gather(NEURONS, s.wide, up.width, expert.inputs, expert.depth, shared);
      gather(NEURONS, s.wide + shared * up.width, up.width, dense.inputs, dense.depth, last.end - shared);
    }
    each_pair([&](const Group& g, int64_t p) {
      prepare_row(down.of(g), up.out(g, s.wide).at(p - g.first, 0), down.rows(g, rows), p - g.first);
    });
    wait();
    down.multiply(routes.groups, rows, s.wide, division);
    wait();
    gather(HIDDEN, s.wide, down.width, c.hidden, hidden, routes.num_pairs);
    each_row([&](int64_t r) {
      float* const x = s.x + r * hidden;
      for (int64_t i = 0; i < hidden; i += LANES) {
        Floats total{};
        for (int64_t p = r * per_token; p < (r + 1) * per_token; p++)
          total = fma(all(routes.weights[p]), load(s.wide + routes.places[p] * down.width + i), total);
        store(x + i, load(x + i) + total);
      }
    });
  }

  template <typename F>
  void each_pair(F f) {
    const int64_t num_pairs = s.routes.num_pairs;
    const int64_t from = division.start(num_pairs, division.thread), to = division.start(num_pairs, division.thread + 1);
    for (const Group& g : s.routes.groups)
      for (int64_t p = std::max(from, g.first); p < std::min(to, g.end); p++) f(g, p);
  }

  // Computes a product, whose result `add` then adds to the residual stream.
  void add_up(const Linear& linear, Rows rows) {
    const int64_t stride = padded(c.hidden) + LANES;
    wait();
    multiply(linear, rows, pass.num_tokens, {s.wide, stride}, division);
    wait();
    gather(HIDDEN, s.wide, stride, c.hidden, padded(c.hidden), pass.num_tokens);
  }

  // All-gathers the columns of the ranks in these rows, and pads them with zeros. Between two barriers.
  void gather(Gathered what, float* rows, int64_t stride, int64_t columns, int64_t end, int64_t num_rows) {
    if (!c.gather || !num_rows) return;
    if (division.thread == 0) {
      c.gather(c.ranks, what, rows, stride, columns, num_rows);
      for (int64_t r = 0; r < num_rows; r++) memset(rows + r * stride + columns, 0, (end - columns) * sizeof(float));
    }
    wait();
  }

  // Rows are one cache line further apart than they are wide: at page strides they would compete for the same cache
  // sets.
  Out out_of(const Linear& linear) const { return {s.wide, linear.width + LANES}; }
  float* active_row(const Linear& down, int64_t row) const { return s.normed + row * (down.depth + LANES); }

  void norm_stream(int64_t row, const float* gain) {
    const int64_t width = padded(c.hidden);
    if (gain) norm_row(s.x + row * width, gain, c.norm_eps, c.hidden, s.normed + row * width);
    else memcpy(s.normed + row * width, s.x + row * width, width * sizeof(float));
  }

  void add(int64_t row, const float* gain) {  // adds a product's result to the stream, normed if there is a gain
    const int64_t width = padded(c.hidden);
    float *x = s.x + row * width, *given = s.wide + row * (width + LANES);
    if (gain) norm_row(given, gain, c.norm_eps, c.hidden, given);
    for (int64_t i = 0; i < width; i += LANES) store(x + i, load(x + i) + load(given + i));
  }

  // Norms and rotates queries and keys; stores keys and values in their slots.
  void store_head(const Layer& l, int64_t token, int64_t head, T* keys, T* values) {
    const int64_t turn = (pass.positions[token] + (head < c.heads ? l.query_rope_start : l.rope_start)) * c.head_dim;
    float* const x = out_of(*l.qkv).at(token, head * c.head_dim);
    if (head < c.heads + c.kv_heads) {
      const float* gain = l.qk_norm && !l.joint_norm ? l.qk_norm + head * c.head_dim : nullptr;
      rotate_head(x, c.head_dim, gain, c.norm_eps, pass.cos + turn, pass.sin + turn);
    }
    if (head < c.heads) return;
    T* const to = head < c.heads + c.kv_heads ? keys : values;
    put(to + ((head - c.heads) % c.kv_heads * pass.num_slots + pass.slots[token]) * c.head_dim, x, c.head_dim);
  }

  void attend_task(const Task& task, const Layer& l, const T* keys, const T* values) {
    const int64_t group = c.heads / c.kv_heads, offset = task.kv_head * pass.num_slots * c.head_dim;
    queries.clear();
    for (int64_t number : task.queries) {
      const int64_t token = number / group, head = task.kv_head * group + number % group;
      queries.push_back({out_of(*l.qkv).at(token, head * c.head_dim),
                         s.mixed + token * padded(d.q_size()) + head * c.head_dim, pass.last_key[token],
                         l.sinks ? l.sinks[head] : -INFINITY});
    }
    const int64_t* sources = pass.sources + (task.path ? pass.source_ends[task.path - 1] : 0);
    const Path path{pass.first_slots[task.path], pass.num_plain[task.path], sources};
#if defined(FORERUN_AMX)
    if constexpr (std::is_same_v<T, bfloat16>)
      if (has_amx()) return attend_tiles(queries, path, keys + offset, values + offset, c.head_dim, l.window, scale(), c.score_cap, tiles);
#endif
    attend<BlocksOf<T>>(queries, path, keys + offset, values + offset, c.head_dim, l.window, scale(), c.score_cap, scores);
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(c.head_dim)); }

  template <typename F>
  void each_row(F f) {
    division.each_of(pass.num_tokens, f);
  }

  void wait() {
#pragma omp barrier
  }

  const Decoder& d;
  const Shape& c;
  const Pass& pass;
  const Tasks& attention;
  Scratch& s;
  Division division;
  std::vector<Query> queries;
  std::vector<float> scores;
#if defined(FORERUN_AMX)
  TileScratch tiles;
#endif
};

}  // namespace forerun

using namespace forerun;

extern "C" {

// The name of the instruction set of the products.
const char* forerun_instructions() {
#if defined(FORERUN_AMX)
  if (has_amx()) return "AMX";
#endif
#if defined(__AVX512BF16__)
  return "AVX-512 BF16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "vectors";
#endif
}

Linear* forerun_linear(int64_t format, int64_t outputs, int64_t inputs, const void* weight, const void* scales,
                       const float* bias) {
  auto* linear = new Linear(static_cast<Format>(format), outputs, inputs, weight, scales, bias);
  if (linear->panels.data) return linear;
  delete linear;
  return nullptr;
}

// A layer of group-quantized weights, as in checkpoints; `least` may be null.
Linear* forerun_grouped(const Groups* groups, int64_t outputs, int64_t inputs, const int8_t* numbers, const float* scales,
                        const float* least, const float* bias) {
  auto* linear = new Linear(*groups, outputs, inputs, numbers, scales, least, bias);
  if (linear->panels.data) return linear;
  delete linear;
  return nullptr;
}

void forerun_free_linear(Linear* linear) { delete linear; }

// Soft-caps the layer's outputs in `forerun_multiply` from now on: for a model's head.
void forerun_cap(Linear* linear, float limit) { linear->cap = limit; }

// x is [num_rows, inputs], out [num_rows, outputs padded to whole panels]; norm may be null.
void forerun_multiply(const Linear* linear, const float* x, int64_t num_rows, const float* norm, float eps, float* out,
                      int64_t num_threads) {
  const int64_t space = (num_rows + 2 * TILE - 1) / (2 * TILE) * (2 * TILE);
  const int64_t bytes = space * (linear->row_bytes() + 64 + linear->depth * 4);
  thread_local std::unique_ptr<Memory> memory;  // kept for the caller's next call
  if (!memory || memory->bytes < bytes) memory = std::make_unique<Memory>(bytes);
  char* const data = memory->data;
  memset(data, 0, bytes);
  float* const scales = reinterpret_cast<float*>(data + space * linear->row_bytes());
  float* const wide = scales + space * 16;
  const Rows rows{data, scales};
  Counters counters = Division::room(num_threads, num_rows > FEW_ROWS);
#pragma omp parallel num_threads(num_threads)
  {
    Division division(omp_get_thread_num(), omp_get_num_threads(), counters);
    division.each_of(num_rows, [&](int64_t r) {
      float* const row = wide + r * linear->depth;
      memcpy(row, x + r * linear->inputs, linear->inputs * sizeof(float));
      if (norm) norm_row(row, norm, eps, linear->inputs, row);
      prepare_row(*linear, row, rows, r);
    });
#pragma omp barrier
    multiply(*linear, rows, num_rows, {out, linear->width}, division);
    if (linear->cap) {
#pragma omp barrier
      division.each_of(num_rows * linear->width / LANES, [&](int64_t i) {
        store(out + i * LANES, soft_capped(load(out + i * LANES), linear->cap));
      });
    }
  }
}

Decoder* forerun_decoder(const Shape* shape, const Layer* layers, int64_t num_layers) {
  return new Decoder{*shape, std::vector<Layer>(layers, layers + num_layers), {}};
}

void forerun_free_decoder(Decoder* decoder) { delete decoder; }

// Not thread-safe.
void forerun_forward(Decoder* decoder, const Pass* pass) {
  Scratch& scratch = decoder->room(pass->num_tokens);
  Counters counters = Division::room(pass->num_threads, pass->num_tokens > FEW_ROWS);
  const Tasks attention = share_out(decoder->shape, *pass);
#pragma omp parallel num_threads(pass->num_threads)
  {
    const int format = decoder->shape.cache_format;
    const Division division(omp_get_thread_num(), omp_get_num_threads(), counters);
    if (format == BFLOAT16) Worker<bfloat16>(*decoder, *pass, attention, scratch, division).run();
    else if (format == FLOAT16) Worker<float16>(*decoder, *pass, attention, scratch, division).run();
    else Worker<float>(*decoder, *pass, attention, scratch, division).run();
  }
}
}
