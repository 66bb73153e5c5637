// y = x @ weight.T: the share that one thread has in a product, by the processor's tiles or its vector registers.
#pragma once
#include "multiply_registers.hpp"
#include "multiply_stored.hpp"
#include "multiply_tiles.hpp"

namespace forerun {

// Some of the outputs, counted in groups of WIDTH. `out` is [num_rows, width].
inline void multiply_part(const Linear& l, Rows rows, int64_t num_rows, float* out, int64_t first, int64_t end) {
#if defined(FORERUN_AMX)
  if (l.tiled() && (l.format != INT4 || num_rows > EIGHT)) {  // a group leaves the tiles as often for one row as for 16
    configure_tiles(l.format);
    for (int64_t g = first; g < end; g++)
      if (l.format == INT4) multiply_group_tiles(l, g * WIDTH, rows, num_rows, out);
      else if (l.format == INT8) multiply_tiles<INT8>(l, g * WIDTH, rows, num_rows, out);
      else multiply_tiles<BFLOAT16>(l, g * WIDTH, rows, num_rows, out);
    _tile_release();
    return;
  }
#endif
  for (int64_t g = first; g < end; g++)
    if (l.format == INT4) multiply_groups(l, g * WIDTH, rows, num_rows, out);
    else if (l.format == GROUPED) multiply_stored(l, g * WIDTH, rows, num_rows, out);
    else if (l.format == INT8) multiply_rows<INT8>(l, g * WIDTH, rows, num_rows, out);
    else if (l.format == BFLOAT16) multiply_rows<BFLOAT16>(l, g * WIDTH, rows, num_rows, out);
    else if (l.format == FLOAT16) multiply_rows<FLOAT16>(l, g * WIDTH, rows, num_rows, out);
    else multiply_rows<FLOAT32>(l, g * WIDTH, rows, num_rows, out);
}

// The share of one thread: every `num_threads`-th part of the outputs.
inline void multiply(const Linear& l, Rows rows, int64_t num_rows, float* out, int thread, int num_threads) {
  const int64_t groups = l.width / WIDTH;
  multiply_part(l, rows, num_rows, out, groups * thread / num_threads, groups * (thread + 1) / num_threads);
}

}  // namespace forerun
