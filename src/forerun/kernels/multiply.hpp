// y = x @ weight.T: one thread's share of a product, by AMX tiles or vector registers.
#pragma once
#include "division.hpp"
#include "multiply_registers.hpp"
#include "multiply_stored.hpp"
#include "multiply_tiles.hpp"

namespace forerun {

// Computes some panels of outputs. `out` has `width` columns.
inline void multiply_part(const Linear& l, Rows rows, int64_t num_rows, Out out, int64_t first, int64_t end) {
#if defined(FORERUN_AMX)
  if (l.tiled() && (l.format != INT4 || num_rows > EIGHT)) {  // int4 sums leave the tiles for each group, even for one row
    configure_tiles(l.format);
    for (int64_t p = first; p < end; p += PANELS)
      if (l.format == INT4) multiply_group_tiles(l, p * LANES, rows, num_rows, out);
      else if (l.format == INT8) multiply_tiles<INT8>(l, p * LANES, rows, num_rows, out);
      else multiply_tiles<BFLOAT16>(l, p * LANES, rows, num_rows, out);
    _tile_release();
    return;
  }
#endif
  if (l.format == INT4) return multiply_groups(l, first, end, rows, num_rows, out);
  if (l.format == GROUPED) return multiply_stored(l, first, end, rows, num_rows, out);
  for (int64_t p = first; p < end; p += PANELS)
    if (l.format == INT8) multiply_rows<INT8>(l, p * LANES, rows, num_rows, out);
    else if (l.format == BFLOAT16) multiply_rows<BFLOAT16>(l, p * LANES, rows, num_rows, out);
    else if (l.format == FLOAT16) multiply_rows<FLOAT16>(l, p * LANES, rows, num_rows, out);
    else multiply_rows<FLOAT32>(l, p * LANES, rows, num_rows, out);
}

// The share of one thread: a contiguous `num_threads`-th of the outputs.
inline void multiply(const Linear& l, Rows rows, int64_t num_rows, Out out, Division& division) {
  const int64_t step = l.format == GROUPED ? 1 : PANELS;
  division.each(l.width / LANES / step, [&](int64_t first, int64_t end) {
    multiply_part(l, rows, num_rows, out, first * step, end * step);
  });
}

}  // namespace forerun
