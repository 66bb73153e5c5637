// Packed linear layers at the memory limit: y = x @ weight.T, any number of rows, each with bits of its own.
//
// This file lays weights and rows out; multiply.hpp multiplies them. Weights lie in panels of 16 outputs, so that a step
// along the inputs reads one 64-byte line: 1 float32, 2 bfloat16 or 4 int8 inputs of each of the 16 outputs.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

#include "vectors.hpp"

// Rows of bfloat16 are the same for tiles and for registers, which is why both have to multiply pairs.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define FORERUN_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forerun {

enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };

constexpr int PANELS = 4;  // are multiplied at once: WIDTH outputs
constexpr int TILE = 16;   // rows of an AMX tile
constexpr int64_t ROW_GAP = 64;  // bytes after a prepared row: rows a power of two apart would share places in a cache
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

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // the processor multiplies pairs of bfloat16
#else
constexpr bool PAIRS = false;  // bfloat16 is widened to float32, rows before the product
#endif

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
  int64_t panel_bytes() const { return LANES * depth * size(format); }
  const char* panel(int64_t output) const { return panels.data + output / LANES * panel_bytes(); }
  int64_t num_lines() const { return panel_bytes() / 64; }
  int64_t row_bytes() const { return depth * (format == BFLOAT16 && !PAIRS ? 4 : size(format)) + ROW_GAP; }  // as prepared
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
    memcpy(to, x, l.depth * sizeof(float));
  } else if (l.format == BFLOAT16) {
    for (int64_t i = 0; i < l.depth; i += LANES) {
      if (PAIRS) narrow(reinterpret_cast<bfloat16*>(to) + i, load(x + i));
      else store(reinterpret_cast<float*>(to) + i, floats(rounded(load(x + i)) << 16));
    }
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

// Sums of 16 outputs as floats, at the place of the first of them.
inline void finish(const Linear& l, float* out, int64_t output, Floats sums, float) {
  store(out, sums + load(l.bias + output));
}
inline void finish(const Linear& l, float* out, int64_t output, Ints sums, float scale) {
  const Floats whole = converted(sums);
  store(out, (whole * load(l.scales + output)) * scale + load(l.bias + output));
}

}  // namespace forerun
