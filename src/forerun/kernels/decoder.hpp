// What a decoder and a pass through it are, and the functions that other parts of the library call.
#pragma once
#include "multiply.hpp"

namespace forerun {

struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, intermediate, cache_format;  // Format of keys and values
  float norm_eps;
};

struct Layer {
  const Linear *qkv, *out, *gate_up, *down;
  const float *attention_norm, *mlp_norm;  // padded with zeros
  const float* qk_norm;                    // gains of each query head, then of each key head; or null
  int64_t window;                          // 0: sees everything
};

struct Pass {
  int64_t num_tokens, num_paths, first_layer, end_layer, num_threads;
  float* x;  // [num_tokens, hidden], in and out
  const int64_t *positions, *slots, *path_of, *last_key;         // of each token
  const int64_t *first_slots, *num_plain, *source_ends, *sources;  // of each path; `sources` lies packed
  void *keys, *values;                                           // [layers, kv_heads, slots, head_dim]
  int64_t num_slots;
  const float *cos, *sin;  // [positions, head_dim]
};

struct Decoder;

}  // namespace forerun

extern "C" {
void forerun_forward(forerun::Decoder* decoder, const forerun::Pass* pass);
void forerun_multiply(const forerun::Linear* linear, const float* x, int64_t num_rows, const float* norm, float eps,
                      float* out, int64_t num_threads);
}
