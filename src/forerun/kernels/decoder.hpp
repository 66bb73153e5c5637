// What a decoder and a pass through it are, and the functions that other parts of the library call.
#pragma once
#include "multiply.hpp"

namespace forerun {

// Makes rows whole of which every one of `ranks` has computed some columns and laid them at the row's beginning: `columns`
// numbers each, `stride` apart.
typedef void (*Gather)(void* ranks, int64_t what, float* rows, int64_t stride, int64_t columns, int64_t num_rows);
enum Gathered { HEADS, HIDDEN, NEURONS };  // what the columns are

struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, cache_format;  // Format of keys and values
  int64_t all_heads;  // of all ranks that share the layers; `heads` and `kv_heads` are this rank's
  int64_t gelu;  // whether the activation is GELU by tanh; else it is SiLU
  float norm_eps, score_cap;  // the last bounds scores of attention softly; 0: nothing does
  Gather gather;  // null: this process has the layers alone
  void* ranks;
};

struct Gated {  // an MLP: gate over up, or what is activated alone, and down; or null
  const Linear *gate_up, *down;
  int64_t plain;  // whether nothing is gated

  int64_t neurons() const { return gate_up->outputs / (plain ? 1 : 2); }  // of this rank
};

struct Experts {  // of which each token takes some
  int64_t count, active, normalised;  // the last: weights of those add up to 1, else those of all
  const Linear* router;               // an output behind the experts' is the gate of what every token takes
  const Gated* gated;
  float alpha, limit;  // of a bounded activation; limit 0: it is SiLU
};

struct Layer {
  const Linear *qkv, *out;
  Gated dense;             // what every token takes
  const Experts* experts;  // or null
  const float *attention_norm, *mlp_norm;  // padded with zeros; null: what is read is not normed
  const float *attention_out_norm, *mlp_out_norm;  // of what is added to the stream; or null
  const float* qk_norm;                    // gains of each query head, then of each key head; or null
  int64_t joint_norm;                      // whether all query heads are normed as one, and all key heads
  const float* sinks;                      // each query head's score of nothing; or null
  int64_t window;                          // 0: sees everything
  int64_t rope_start, query_rope_start;    // of the tables of cosines and sines: the row of position 0, of keys and queries
  int64_t parallel;                        // whether the MLP reads what attention reads

  int64_t per_token() const { return (experts ? experts->active : 0) + (dense.down != nullptr); }  // MLPs that one takes
};

struct Pass {  // without paths nothing looks: keys and values are made of `read`, in all layers, and `x` is not used
  int64_t num_tokens, num_paths, first_layer, end_layer, num_threads;
  float* x;           // [num_tokens, hidden], in and out
  const float* read;  // what the first layer's attention reads in place of x, normed, [num_tokens, depth of qkv]; or null
  const int64_t *positions, *slots, *path_of, *last_key;         // of each token
  const int64_t *first_slots, *num_plain, *source_ends, *sources;  // of each path; `sources` lies packed
  void *keys, *values;                                           // [layers, kv_heads, slots, head_dim]
  int64_t num_slots;
  const float *cos, *sin;  // [positions, head_dim]
  int64_t* num_experts;    // grows by the experts that are read; or null
};

struct Decoder;

}  // namespace forerun

extern "C" {
void forerun_forward(forerun::Decoder* decoder, const forerun::Pass* pass);
void forerun_multiply(const forerun::Linear* linear, const float* x, int64_t num_rows, const float* norm, float eps,
                      float* out, int64_t num_threads);
}
