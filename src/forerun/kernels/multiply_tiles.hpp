// Products by AMX: tiles of 16 rows of a layer's input times 16 outputs.
#pragma once
#include "linear.hpp"

namespace forerun {

#if defined(FORERUN_AMX)
// Tiles 0-3 hold sums, 4-5 rows, 6-7 weights; all of 16 rows of 64 bytes. Rows that are not there are computed in vain.
inline void configure_tiles() {
  struct alignas(64) Config {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  };
  // Not a local variable: GCC 12 takes the instruction to read 8 bytes only, and may leave out stores to the rest.
  static const Config config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE}};
  _tile_loadconfig(&config);
}

template <Format F>
inline void finish_tile(const Linear& l, int64_t column, const int32_t (*sums)[LANES], Rows rows, int64_t row, int64_t end, float* out) {
  for (int r = 0; r < TILE && row + r < end; r++) {
    const Ints line = load(sums[r]);
    const float scale = rows.scales ? rows.scales[row + r] : 0;
    float* const result = out + (row + r) * l.width + column;
    if (F == INT8) finish(l, result, column, line, scale);
    else finish(l, result, column, floats(line), scale);
  }
}

#define FORERUN_TILE_DOT(sums, x, w) \
  if (F == INT8) _tile_dpbssd(sums, x, w); \
  else _tile_dpbf16ps(sums, x, w);

template <Format F>
void multiply_tiles(const Linear& l, int64_t column, Rows rows, int64_t num_rows, float* out) {
  alignas(64) int32_t sums[TILE][LANES];
  const int64_t stride = l.row_bytes();
  const char* panel = l.panel(column);
#define FORERUN_STORE(tile, c, r)            \
  _tile_stored(tile, sums, 64);              \
  finish_tile<F>(l, c, sums, rows, r, num_rows, out);
  int64_t row = 0;
  for (; row + TILE < num_rows; row += 2 * TILE)  // two tiles of rows, two panels of weights at a time
    for (int64_t c = 0; c < WIDTH; c += 2 * LANES) {
      const char *x = rows.data + row * stride, *w = panel + c / LANES * l.panel_bytes();
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int64_t at = 0; at < stride; at += 64) {
        _tile_loadd(4, x + at, stride);
        _tile_loadd(5, x + TILE * stride + at, stride);
        _tile_loadd(6, w + at * LANES, 64);
        _tile_loadd(7, w + l.panel_bytes() + at * LANES, 64);
        FORERUN_TILE_DOT(0, 4, 6) FORERUN_TILE_DOT(1, 4, 7) FORERUN_TILE_DOT(2, 5, 6) FORERUN_TILE_DOT(3, 5, 7)
      }
      FORERUN_STORE(0, column + c, row) FORERUN_STORE(1, column + c + LANES, row)
      FORERUN_STORE(2, column + c, row + TILE) FORERUN_STORE(3, column + c + LANES, row + TILE)
    }
  if (row >= num_rows) return;
  const char* x = rows.data + row * stride;  // one tile of rows, all four panels
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t at = 0; at < stride; at += 64) {
    const char* w = panel + at * LANES;
    for (int p = 0; p < PANELS; p++)
      for (int i = 0; i < TILE; i++) __builtin_prefetch(w + p * l.panel_bytes() + i * 64 + 2048);
    _tile_loadd(4, x + at, stride);
    _tile_loadd(6, w, 64);
    FORERUN_TILE_DOT(0, 4, 6)
    _tile_loadd(7, w + l.panel_bytes(), 64);
    FORERUN_TILE_DOT(1, 4, 7)
    _tile_loadd(6, w + 2 * l.panel_bytes(), 64);
    FORERUN_TILE_DOT(2, 4, 6)
    _tile_loadd(7, w + 3 * l.panel_bytes(), 64);
    FORERUN_TILE_DOT(3, 4, 7)
  }
  FORERUN_STORE(0, column, row) FORERUN_STORE(1, column + LANES, row)
  FORERUN_STORE(2, column + 2 * LANES, row) FORERUN_STORE(3, column + 3 * LANES, row)
#undef FORERUN_STORE
}
#undef FORERUN_TILE_DOT
#endif

}  // namespace forerun
