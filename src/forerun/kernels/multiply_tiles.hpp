// Products by AMX: tiles of 16 rows of a layer's input times 16 outputs.
#pragma once
#include "multiply_groups.hpp"

namespace forerun {

#if defined(FORERUN_AMX)
struct alignas(64) TileConfig {
  uint8_t palette, start, reserved[14];
  uint16_t bytes[16];
  uint8_t rows[16];
};

// Tiles 0-3 hold sums, 4-5 rows, 6-7 weights; all of 16 rows of 64 bytes. Missing rows are computed and ignored. For
// int4 the weights are those of one group, and so are the 32 bytes of each row.
inline void configure_tiles(Format format) {
  // Not local variables: GCC 12 takes the instruction to read 8 bytes only, and may leave out stores to the rest.
  static const TileConfig whole = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE}};
  static const TileConfig group = {1, 0, {}, {64, 64, 64, 64, GROUP, GROUP, 64, 64}, {TILE, TILE, TILE, TILE, TILE, TILE, 8, 8}};
  _tile_loadconfig(format == INT4 ? &group : &whole);
}

template <Format F>
inline void finish_tile(const Linear& l, int64_t column, const int32_t (*sums)[LANES], Rows rows, int64_t row, int64_t end, Out out) {
  for (int r = 0; r < TILE && row + r < end; r++) {
    const Ints line = load(sums[r]);
    const float scale = rows.scales ? rows.scales[row + r] : 0;
    float* const result = out.at(row + r, column);
    if (F == INT8) finish(l, result, column, line, scale);
    else finish(l, result, column, floats(line), scale);
  }
}

#define FORERUN_TILE_DOT(sums, x, w) \
  if (F == INT8) _tile_dpbssd(sums, x, w); \
  else _tile_dpbf16ps(sums, x, w);

template <Format F>
void multiply_tiles(const Linear& l, int64_t column, Rows rows, int64_t num_rows, Out out) {
  alignas(64) int32_t sums[TILE][LANES];
  const int64_t stride = l.row_bytes(), bytes = l.depth * Linear::size(F);  // of a row, with the gap after it and without
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
      for (int64_t at = 0; at < bytes; at += 64) {
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
  for (int64_t at = 0; at < bytes; at += 64) {
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

// int4: a panel is unpacked once for all rows. A group's sums leave the tiles to be scaled and are added in registers.
inline void multiply_group_tiles(const Linear& l, int64_t column, Rows rows, int64_t num_rows, Out out) {
  thread_local std::vector<Ints> unpacked;
  unpacked.resize(l.depth / 4);  // four inputs of 16 outputs each
  alignas(64) int32_t sums[BLOCK_GROUPS][TILE][LANES];
  for (int64_t c = column; c < column + WIDTH; c += LANES) {
    const char* const panel = l.panel(c);
    for (int64_t i = 0; i < l.depth / 8; i++) {
      const char* line = panel + i / 8 * BLOCK_BYTES + 64 + i % 8 * 64;
      for (int high = 0; high < 2; high++)
        unpacked[2 * i + high] = (Ints)_mm512_sub_epi8((__m512i)halves(line, 0, high), _mm512_set1_epi8(8));
    }
    for (int64_t row = 0; row < num_rows; row += TILE) {
      const char* const x = rows.data + row * l.row_bytes();
      Floats total[TILE] = {};
      for (int64_t b = 0; b < l.num_blocks(); b++) {
        const Ints* const weights = unpacked.data() + b * WIDTH / 4;
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, x + b * WIDTH, l.row_bytes());
        _tile_loadd(6, weights, 64);
        _tile_dpbssd(0, 4, 6);
        _tile_stored(0, sums[0], 64);
        _tile_loadd(5, x + b * WIDTH + GROUP, l.row_bytes());
        _tile_loadd(7, weights + GROUP / 4, 64);
        _tile_dpbssd(1, 5, 7);
        _tile_stored(1, sums[1], 64);
        for (int g = 0; g < BLOCK_GROUPS; g++) {
          const Floats scale = widened_register(reinterpret_cast<const bfloat16*>(panel + b * BLOCK_BYTES) + g * LANES);
          for (int r = 0; r < TILE; r++) total[r] = fma(converted(load(sums[g][r])), scale, total[r]);
        }
      }
      for (int64_t r = 0; r < TILE && row + r < num_rows; r++)
        store(out.at(row + r, c), total[r] * rows.scales[row + r] + load(l.bias + c));
    }
  }
}
#endif

}  // namespace forerun
