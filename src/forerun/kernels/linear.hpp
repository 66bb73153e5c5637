// Packed linear layers at the memory limit: y = x @ weight.T, any number of rows, each with bits of its own.
//
// Weights lie in panels of 16 outputs, so that a step along the inputs reads one 64-byte line: 1 float32, 2 bfloat16 or
// 4 int8 inputs of each of the 16 outputs. Every output is summed along the inputs in one fixed order, whatever the
// number of rows. Memory is read once per pass, from large pages. Knows nothing of layers.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "vectors.hpp"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__)
#define FORERUN_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forerun {

enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

constexpr int PANELS = 4;  // are multiplied at once: WIDTH outputs
constexpr int TILE = 16;   // rows of an AMX tile
constexpr int64_t HUGE_PAGE = 2 << 20;

inline bool has_amx() {  // the system must grant the tiles' registers to a process
#if defined(FORERUN_AMX)
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return granted;
#else
  return false;
#endif
}

struct Memory {  // zeros, in large pages where there is enough to fill some
  char* data = nullptr;
  const int64_t bytes;
  explicit Memory(int64_t num_bytes) : bytes(num_bytes), size(num_bytes + HUGE_PAGE) {
    base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return;
    data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
    if (bytes >= HUGE_PAGE) madvise(data, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Memory() {
    if (data) munmap(base, size);
  }
  Memory(const Memory&) = delete;

 private:
  void* base;
  int64_t size;
};

// What goes into a product: rows in the layer's format, padded to whole tiles; int8 rows have scales.
struct Rows {
  char* data;
  float* scales;
};

struct Linear {
  Format format;
  int64_t outputs, inputs, width, depth;  // the latter two padded: of the result, and of the sum
  Memory panels;
  float *bias, *scales;
  int32_t* offsets;  // 128 times the sum of an output's int8 weights

  static int64_t size(Format f) { return f == FLOAT32 ? 4 : f == BFLOAT16 ? 2 : 1; }
  int64_t row_bytes() const { return depth * size(format); }
  int64_t panel_bytes() const { return LANES * row_bytes(); }
  bool tiled() const { return format != FLOAT32 && has_amx(); }

  // `weight` is [outputs, inputs] in the format itself; `scales` one for each output, int8 only; `bias` may be null.
  Linear(Format f, int64_t n, int64_t k, const void* weight, const float* weight_scales, const float* b)
      : format(f), outputs(n), inputs(k), width(padded(n)), depth(padded(k)), panels(width * depth * size(f)) {
    bias = static_cast<float*>(calloc(width, sizeof(float)));
    scales = static_cast<float*>(calloc(width, sizeof(float)));
    offsets = static_cast<int32_t*>(calloc(width, sizeof(int32_t)));
    if (!panels.data) return;
    if (b) memcpy(bias, b, n * sizeof(float));
    if (weight_scales) memcpy(scales, weight_scales, n * sizeof(float));
    const int64_t row = k * size(f);
#pragma omp parallel for
    for (int64_t o = 0; o < n; o++) {
      const char* from = static_cast<const char*>(weight) + o * row;
      char* panel = panels.data + o / LANES * panel_bytes() + o % LANES * 4;
      for (int64_t at = 0; at < row; at += 4) memcpy(panel + at * LANES, from + at, std::min<int64_t>(4, row - at));
      if (f == INT8)
        for (int64_t i = 0; i < k; i++) offsets[o] += 128 * reinterpret_cast<const int8_t*>(from)[i];
    }
  }
  ~Linear() { free(bias), free(scales), free(offsets); }
};

// One row of floats (padded with zeros to the layer's depth) in the layer's format.
__attribute__((noinline)) inline void prepare_row(const Linear& l, const float* x, Rows rows, int64_t row) {
  char* to = rows.data + row * l.row_bytes();
  if (l.format == FLOAT32) {
    memcpy(to, x, l.row_bytes());
  } else if (l.format == BFLOAT16) {
    for (int64_t i = 0; i < l.depth; i += LANES) narrow(reinterpret_cast<bfloat16*>(to) + i, load(x + i));
  } else {
    Floats top{}, finite{};
    for (int64_t i = 0; i < l.depth; i += LANES) {
      top = larger(top, floats(bits(load(x + i)) & 0x7fffffff));
      finite += load(x + i) * 0.0f;
    }
    const float spoilt = sum(finite);  // 0, or not a number: then nothing of the row is one
    const float scale = spoilt == 0 ? std::max(largest(top) / 127.0f, 1.17549435e-38f) : spoilt;
    const Floats shift = all(12582912.0f);
    for (int64_t i = 0; i < l.depth; i += LANES) {
      const Floats whole = (load(x + i) / scale + shift) - shift;
      float w[LANES];
      store(w, whole);
      for (int j = 0; j < LANES; j++) to[i + j] = static_cast<int8_t>(w[j]);
    }
    rows.scales[row] = scale;
  }
}

template <Format F>
struct Dot {  // one line of 16 outputs times the same inputs of one row, added to the sums so far
  typedef Floats Sums;
  static Floats add(Floats sums, const char* line, const char* x) {
    if (F == FLOAT32) {
      float a;
      memcpy(&a, x, 4);
      return fma(load(reinterpret_cast<const float*>(line)), all(a), sums);
    }
    int32_t pair;
    memcpy(&pair, x, 4);
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_loadu_si512(line), (__m512bh)_mm512_set1_epi32(pair));
#else
    const Ints w = *reinterpret_cast<const IntsAnywhere*>(line), v = pair - Ints{};
    sums = fma(floats(w << 16), floats(v << 16), sums);
    return fma(floats(w & int32_t(0xffff0000)), floats(v & int32_t(0xffff0000)), sums);
#endif
  }
};

template <>
struct Dot<INT8> {  // sums of whole numbers: exact in any order
  typedef Ints Sums;
  static Ints add(Ints sums, const char* line, const char* x) {
    int32_t four;
    memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)  // takes one side unsigned: 128 is added to x here, and `offsets` taken off in the end
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four ^ int32_t(0x80808080)), _mm512_loadu_si512(line));
#else
    const Ints w = *reinterpret_cast<const IntsAnywhere*>(line), v = four - Ints{};
    for (int shift = 24; shift >= 0; shift -= 8) sums += ((w << shift) >> 24) * ((v << shift) >> 24);
    return sums;
#endif
  }
};

// Sums as floats, in the place of the first of them.
inline void finish(const Linear& l, float* out, int64_t column, Floats sums, float) {
  store(out + column, sums + load(l.bias + column));
}
inline void finish(const Linear& l, float* out, int64_t column, Ints sums, float scale) {
  const Floats whole = __builtin_convertvector(sums, Floats);
  store(out + column, (whole * load(l.scales + column)) * scale + load(l.bias + column));
}

template <Format F, int R>
inline void multiply_block(const Linear& l, int64_t column, Rows rows, int64_t row, float* out) {
  typedef typename Dot<F>::Sums Sums;
  Sums sums[R][PANELS] = {};
  const char* panel = l.panels.data + column / LANES * l.panel_bytes();
  const char* x = rows.data + row * l.row_bytes();
  for (int64_t at = 0, line = 0; at < l.row_bytes(); at += 4, line += 64) {
    for (int p = 0; p < PANELS; p++) __builtin_prefetch(panel + p * l.panel_bytes() + line + 1024);
    for (int r = 0; r < R; r++)
      for (int p = 0; p < PANELS; p++)
        sums[r][p] = Dot<F>::add(sums[r][p], panel + p * l.panel_bytes() + line, x + r * l.row_bytes() + at);
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < PANELS; p++) {
      if (F == INT8) {
#if defined(__AVX512VNNI__)
        sums[r][p] = (Sums)((Ints)sums[r][p] - *reinterpret_cast<const IntsAnywhere*>(l.offsets + column + p * LANES));
#endif
      }
      finish(l, out + (row + r) * l.width, column + p * LANES, sums[r][p], rows.scales ? rows.scales[row + r] : 0);
    }
}

template <Format F>
void multiply_rows(const Linear& l, int64_t column, Rows rows, int64_t num_rows, float* out) {
  int64_t row = 0;
  for (; row + 6 <= num_rows; row += 6) multiply_block<F, 6>(l, column, rows, row, out);
  switch (num_rows - row) {
    case 1: return multiply_block<F, 1>(l, column, rows, row, out);
    case 2: return multiply_block<F, 2>(l, column, rows, row, out);
    case 3: return multiply_block<F, 3>(l, column, rows, row, out);
    case 4: return multiply_block<F, 4>(l, column, rows, row, out);
    case 5: return multiply_block<F, 5>(l, column, rows, row, out);
  }
}

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
    const Ints line = *reinterpret_cast<const IntsAnywhere*>(sums[r]);
    const float scale = rows.scales ? rows.scales[row + r] : 0;
    if (F == INT8) finish(l, out + (row + r) * l.width, column, line, scale);
    else finish(l, out + (row + r) * l.width, column, floats(line), scale);
  }
}

#define FORERUN_TILE_DOT(sums, x, w) \
  if (F == INT8) _tile_dpbssd(sums, x, w); \
  else _tile_dpbf16ps(sums, x, w);

template <Format F>
void multiply_tiles(const Linear& l, int64_t column, Rows rows, int64_t num_rows, float* out) {
  alignas(64) int32_t sums[TILE][LANES];
  const int64_t stride = l.row_bytes();
  const char* panel = l.panels.data + column / LANES * l.panel_bytes();
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

// The share of one thread: every `num_threads`-th part of the outputs. `out` is [num_rows, width].
inline void multiply(const Linear& l, Rows rows, int64_t num_rows, float* out, int thread, int num_threads) {
  const int64_t groups = l.width / WIDTH, first = groups * thread / num_threads, end = groups * (thread + 1) / num_threads;
#if defined(FORERUN_AMX)
  if (l.tiled()) {
    configure_tiles();
    for (int64_t g = first; g < end; g++)
      if (l.format == INT8) multiply_tiles<INT8>(l, g * WIDTH, rows, num_rows, out);
      else multiply_tiles<BFLOAT16>(l, g * WIDTH, rows, num_rows, out);
    _tile_release();
    return;
  }
#endif
  for (int64_t g = first; g < end; g++)
    if (l.format == INT8) multiply_rows<INT8>(l, g * WIDTH, rows, num_rows, out);
    else if (l.format == BFLOAT16) multiply_rows<BFLOAT16>(l, g * WIDTH, rows, num_rows, out);
    else multiply_rows<FLOAT32>(l, g * WIDTH, rows, num_rows, out);
}

}  // namespace forerun
