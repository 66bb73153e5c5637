// The structures of a decoder and of a pass, and the functions that other parts of the library call.
#pragma once
#include "multiply.hpp"

namespace forerun {

// All-gathers the columns of rows. On entry each row begins with the columns that this rank has computed; on return it
// has all `columns`. Rows are `stride` apart.
typedef void (*Gather)(void* ranks, int64_t what, float* rows, int64_t stride, int64_t columns, int64_t num_rows);
enum Gathered { HEADS, HIDDEN, NEURONS };  // the kind of columns

struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, cache_format;  // Format of keys and values
  int64_t all_heads;  // of all ranks together; `heads` and `kv_heads` are this rank's
  int64_t gelu;  // whether the activation is tanh-GELU; else it is SiLU
  float norm_eps, score_cap;  // score_cap: soft cap of attention scores; 0: none
  Gather gather;  // null: the layers are not shared with other ranks
  void* ranks;
};

struct Gated {  // an MLP: gate and up (only the activated layer if it is not gated), and down; null: no MLP
  const Linear *gate_up, *down;
  int64_t plain;  // whether the MLP is not gated

  int64_t neurons() const { return gate_up->outputs / (plain ? 1 : 2); }  // of this rank
};

struct Experts {
  int64_t count, active, normalised;  // normalised: weights are a softmax over the active experts, else over all
  const Linear* router;               // a last output, if any, is the gate of the shared expert
  const Gated* gated;
  float alpha, limit;  // of a clamped activation; limit 0: SiLU
};

struct Layer {
  const Linear *qkv, *out;
  Gated dense;             // the MLP of all tokens: a dense layer's only one, or the shared expert
  const Experts* experts;  // or null
  const float *attention_norm, *mlp_norm;  // zero-padded gains of the input norms; null: no norm
  const float *attention_out_norm, *mlp_out_norm;  // of the outputs; or null
  const float* qk_norm;                    // gains of each query head, then of each key head; or null
  int64_t joint_norm;                      // whether all query heads are normed as one vector, and all key heads
  const float* sinks;                      // extra attention score of each query head; or null
  int64_t window;                          // 0: no sliding window
  int64_t rope_start, query_rope_start;    // rows of position 0 in the rotary tables, for keys and queries
  int64_t parallel;                        // whether the MLP has the same input as attention

  int64_t per_token() const { return (experts ? experts->active : 0) + (dense.down != nullptr); }  // MLPs of a token
};

struct Pass {  // without paths only keys and values are computed, from `read` in all layers, and `x` is not used
  int64_t num_tokens, num_paths, first_layer, end_layer, num_threads;
  float* x;           // [num_tokens, hidden], in and out
  const float* read;  // input of the first layer's attention instead of normed x, [num_tokens, depth of qkv]; or null
  const int64_t *positions, *slots, *path_of, *last_key;         // of each token
  const int64_t *first_slots, *num_plain, *source_ends, *sources;  // of each path; `sources` is packed
  void *keys, *values;                                           // [layers, kv_heads, slots, head_dim]
  int64_t num_slots;
  const float *cos, *sin;  // [positions, head_dim]
  int64_t* num_experts;    // incremented by the number of experts that are read; or null
};

struct Decoder;

}  // namespace forerun

extern "C" {
void forerun_forward(forerun::Decoder* decoder, const forerun::Pass* pass);
void forerun_multiply(const forerun::Linear* linear, const float* x, int64_t num_rows, const float* norm, float eps,
                      float* out, int64_t num_threads);
}
