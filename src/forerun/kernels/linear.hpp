// Packed linear layers at the limit of memory bandwidth: y = x @ weight.T for any number of rows; the bits of a row do
// not depend on other rows.
//
// This file defines the layout of weights and rows; multiply.hpp multiplies them. Weights are packed in panels of 16
// outputs, so that a step along the inputs reads one 64-byte line: 1 float32, 2 bfloat16 or float16, 4 int8 or 8 int4
// inputs of each of the 16 outputs. The inputs of an output are adjacent; those of float16 are separate, and those of
// int8 with AVX2 in pairs, so that one instruction widens a register of one input or of a pair. The scales of int4
// weights are one line before the eight lines that hold 64 inputs.
#pragma once
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

#include "formats.hpp"

// bfloat16 rows have the same layout for tiles and for registers, so both must multiply pairs.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__AVX512BF16__)
#define FORERUN_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace forerun {

enum Format : int64_t { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, FLOAT16 = 4, GROUPED = 5 };

constexpr int PANELS = 4;  // multiplied at once: WIDTH outputs
constexpr int TILE = 16;   // rows of an AMX tile
constexpr int GROUP = 32;  // inputs that share a scale: of an output in int4, and of a row for grouped weights
constexpr int BLOCK_LINES = 1 + WIDTH / 8;  // of int4: scales of two groups, then their weights
constexpr int64_t ROW_GAP = 64;  // bytes after a prepared row: at power-of-two strides rows would share cache sets
constexpr int64_t PAGE = 4096, HUGE_PAGE = 2 << 20, POOL_BYTES = 8 * HUGE_PAGE;
constexpr int64_t AHEAD_BYTES = 8192;  // distance of the prefetch of weights
constexpr int FEW_ROWS = 3;  // up to so many rows a product is bound by memory bandwidth

// Whether weights are prefetched for few rows too. AMD's processors with AVX-512 do best without, since an early
// prefetch delays their own; Intel's wait at every page. Measured on a Zen 4 and on a Xeon of the fifth generation.
inline bool fetches_few() {
#if defined(__AVX512F__)
  static const bool intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
  return intel;
#endif
  return false;
}

inline bool has_amx() {  // the system must permit a process to use the tile registers
#if defined(FORERUN_AMX)
  static const bool granted = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
  return granted;
#else
  return false;
#endif
}

struct Mapping {  // zeroed memory, in large pages if it is large enough
  char* data = nullptr;
  explicit Mapping(int64_t num_bytes) : size(num_bytes + HUGE_PAGE) {
    base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED) return;
    data = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(base) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE);
#if defined(MADV_HUGEPAGE)
    if (num_bytes >= HUGE_PAGE) madvise(data, num_bytes, MADV_HUGEPAGE);
#endif
  }
  ~Mapping() {
    if (data) munmap(base, size);
  }
  Mapping(const Mapping&) = delete;

 private:
  void* base;
  const int64_t size;
};

// Memory that is read repeatedly shares large pages (`pooled`): with small pages, a product with weights of less than a
// large page would wait for address translation.
struct Memory {
  char* data = nullptr;
  const int64_t bytes;
  explicit Memory(int64_t num_bytes, bool pooled = false) : bytes(num_bytes) {
    if (!pooled || bytes >= HUGE_PAGE) {
      mapping = std::make_shared<Mapping>(bytes);
      data = mapping->data;
      return;
    }
    static std::mutex lock;
    static std::shared_ptr<Mapping> last;
    static int64_t used = POOL_BYTES;  // of the last pool
    const std::lock_guard<std::mutex> guard(lock);
    if (used + bytes > POOL_BYTES) last = std::make_shared<Mapping>(POOL_BYTES), used = last->data ? 0 : POOL_BYTES;
    mapping = last;
    if (!last->data) return;
    data = last->data + used;
    used += (bytes + PAGE - 1) / PAGE * PAGE;
  }
  Memory(const Memory&) = delete;

 private:
  std::shared_ptr<Mapping> mapping;
};

#if defined(__AVX512BF16__)
constexpr bool PAIRS = true;  // the processor multiplies pairs of bfloat16
#else
constexpr bool PAIRS = false;  // bfloat16 is widened to float32; rows are widened before the product
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool WORDS = true;  // int8 is widened to 16 bits and multiplied in pairs; rows are widened before the product
#else
constexpr bool WORDS = false;
#endif

#if defined(__AVX512VNNI__)
constexpr bool UNSIGNED = true;  // one operand of a product of bytes is unsigned
#else
constexpr bool UNSIGNED = false;
#endif

#if defined(__AVX512BW__) && !defined(__AVX512VNNI__) || defined(__AVX2__) && !defined(__AVX512F__)
constexpr bool SHORT_SUMS = true;  // a group of int4 weights is summed in 16 bits: 16 * 15 * 127 fits after subtracting 8
#else
constexpr bool SHORT_SUMS = false;
#endif

// The input rows of a product in the layer's format, padded to whole tiles. For int8 and int4 weights rows are int8
// with scales; for int4, `starts` follow a row's numbers.
struct Rows {
  char* data;
  float* scales;
};

struct Out {  // the result of a product: rows of floats, `stride` floats apart
  float* data;
  int64_t stride;

  float* at(int64_t row, int64_t column) const { return data + row * stride + column; }
};

// Group-quantized weights as in checkpoints: numbers of 4 or 8 bits, and for every `size` inputs of an output a scale
// and, with `has_least`, a lowest value, which is added. Both are float16 if that is exact, and float32 otherwise.
struct Groups {
  int64_t bits, size, has_least, wide;

  int64_t line_bytes() const { return LANES * (wide ? 4 : 2); }  // scales of one group of 16 outputs
  int64_t scale_bytes() const { return WIDTH / size * line_bytes(); }  // of the groups in WIDTH inputs
  int64_t block_bytes() const { return (1 + has_least) * scale_bytes() + WIDTH * LANES * bits / 8; }
};

struct Linear {
  Format format;
  Groups groups;                          // of GROUPED weights
  int64_t outputs, inputs, width, depth;  // width, depth: padded outputs and inputs
  Memory panels;
  float *bias, *scales;
  float cap = 0;     // soft cap of the outputs; 0: none
  int32_t* offsets;  // 128 times the sum of an output's int8 weights

  static int64_t size(Format f) { return f == FLOAT32 ? 4 : f == BFLOAT16 || f == FLOAT16 ? 2 : 1; }
  int64_t num_blocks() const { return depth / WIDTH; }  // of int4
  int64_t panel_bytes() const {
    if (format == GROUPED) return num_blocks() * groups.block_bytes();
    return format == INT4 ? num_blocks() * BLOCK_LINES * 64 : LANES * depth * size(format);
  }
  const char* panel(int64_t output) const { return panels.data + output / LANES * panel_bytes(); }
  int64_t num_lines() const { return panel_bytes() / 64; }
  int64_t number_bytes() const {  // of the numbers of a prepared row
    if (format == GROUPED) return groups.bits == 8 && WORDS ? 2 : 1;
    return format == FLOAT16 || (format == BFLOAT16 && !PAIRS) ? 4 : format == INT8 && WORDS ? 2 : size(format);
  }
  int64_t row_bytes() const {
    if (format == GROUPED) return depth * number_bytes() + padded(depth / GROUP * 4 + depth / groups.size * 8) + ROW_GAP;
    const int64_t starts = format == INT4 ? padded(depth / GROUP * 4) : 0;
    return depth * number_bytes() + starts + ROW_GAP;
  }
  bool has_pieces() const { return format != INT8 && format != INT4; }  // rows can be prepared in pieces: no row scale
  bool tiled() const { return (format == BFLOAT16 || format == INT8 || format == INT4) && has_amx(); }

  // `weight` is [outputs, inputs] in the format itself, for int4 one byte for each number. `scales` are floats for each
  // output (int8), or bfloat16 for each group of each output (int4); `bias` may be null.
  Linear(Format f, int64_t n, int64_t k, const void* weight, const void* weight_scales, const float* b)
      : format(f), groups{}, outputs(n), inputs(k), width(padded(n)), depth(padded(k)), panels(width / LANES * panel_bytes(), true) {
    bias = static_cast<float*>(calloc(width, sizeof(float)));
    scales = static_cast<float*>(calloc(width, sizeof(float)));
    offsets = static_cast<int32_t*>(calloc(width, sizeof(int32_t)));
    if (!panels.data) return;
    if (b) memcpy(bias, b, n * sizeof(float));
    if (f == INT4) {
      pack_groups(static_cast<const int8_t*>(weight), static_cast<const bfloat16*>(weight_scales));
      return;
    }
    if (weight_scales) memcpy(scales, weight_scales, n * sizeof(float));
    const int64_t row = k * size(f);
    const int64_t unit = f == FLOAT16 || (f == INT8 && WORDS) ? 2 : 4;  // adjacent bytes of an output
#pragma omp parallel for
    for (int64_t o = 0; o < n; o++) {
      const char* from = static_cast<const char*>(weight) + o * row;
      char* panel = panels.data + o / LANES * panel_bytes() + o % LANES * unit;
      for (int64_t at = 0; at < row; at += unit) memcpy(panel + at * LANES, from + at, std::min(unit, row - at));
      if (f == INT8)
        for (int64_t i = 0; i < k; i++) offsets[o] += 128 * reinterpret_cast<const int8_t*>(from)[i];
    }
  }
  // `numbers` are bytes, [outputs, inputs]; `group_scales` and `least` (or null) are floats, [outputs, groups].
  Linear(Groups g, int64_t n, int64_t k, const int8_t* numbers, const float* group_scales, const float* least, const float* b)
      : format(GROUPED), groups(g), outputs(n), inputs(k), width(padded(n)), depth(padded(k)),
        panels(width / LANES * panel_bytes(), true), scales(nullptr), offsets(nullptr) {
    bias = static_cast<float*>(calloc(width, sizeof(float)));
    if (b) memcpy(bias, b, n * sizeof(float));
    if (panels.data) pack_stored(numbers, group_scales, least);
  }
  ~Linear() { free(bias), free(scales), free(offsets); }

  // Two numbers plus 8 in a byte: of every eight inputs the first four in the low halves of a line, the last four in
  // the high halves, so that `halves` gets four inputs of each output with one mask. Padding counts as zero.
  void pack_groups(const int8_t* weight, const bfloat16* group_scales) {
    const int64_t num_groups = (inputs + GROUP - 1) / GROUP;
#pragma omp parallel for
    for (int64_t o = 0; o < outputs; o++) {
      const int8_t* const row = weight + o * inputs;
      char* block = panels.data + o / LANES * panel_bytes();
      for (int64_t first = 0; first < depth; first += WIDTH, block += BLOCK_LINES * 64) {
        for (int64_t g = 0; g < 2 && first / GROUP + g < num_groups; g++)
          memcpy(block + (g * LANES + o % LANES) * 2, group_scales + o * num_groups + first / GROUP + g, 2);
        const auto half = [&](int64_t i) { return static_cast<uint8_t>((first + i < inputs ? row[first + i] : 0) + 8); };
        for (int64_t i = 0; i < WIDTH; i += 8)
          for (int64_t j = 0; j < 4; j++)
            block[64 + i * 8 + o % LANES * 4 + j] = static_cast<char>(half(i + j) | half(i + 4 + j) << 4);
      }
    }
  }

  // 4-bit numbers are packed as by `pack_groups`, plus 8 if there is no lowest value. 8-bit numbers: four adjacent
  // inputs of an output (two with AVX2), plus 128 if the processor needs one unsigned operand.
  void pack_stored(const int8_t* numbers, const float* group_scales, const float* least) {
    const int64_t num_groups = (inputs + groups.size - 1) / groups.size, in_block = WIDTH / groups.size;
    const uint8_t added = groups.bits == 4 ? (groups.has_least ? 0 : 8) : UNSIGNED ? 128 : 0;
    const int64_t unit = groups.bits == 8 && WORDS ? 2 : 4;
#pragma omp parallel for
    for (int64_t o = 0; o < outputs; o++) {
      const int8_t* const row = numbers + o * inputs;
      const int64_t lane = o % LANES;
      char* block = panels.data + o / LANES * panel_bytes();
      for (int64_t first = 0; first < depth; first += WIDTH, block += groups.block_bytes()) {
        const auto scale = [&](const float* values, int64_t g, char* to) {
          if (groups.wide) memcpy(to + lane * 4, values + o * num_groups + g, 4);
          else put(reinterpret_cast<float16*>(to) + lane, values + o * num_groups + g, 1);
        };
        for (int64_t j = 0; j < in_block && first / groups.size + j < num_groups; j++) {
          char* const to = block + j * (1 + groups.has_least) * groups.line_bytes();
          scale(group_scales, first / groups.size + j, to);
          if (groups.has_least) scale(least, first / groups.size + j, to + groups.line_bytes());
        }
        char* const lines = block + (1 + groups.has_least) * groups.scale_bytes();
        const auto number = [&](int64_t i) { return static_cast<uint8_t>((first + i < inputs ? row[first + i] : 0) + added); };
        if (groups.bits == 4)
          for (int64_t i = 0; i < WIDTH; i += 8)
            for (int64_t j = 0; j < 4; j++)
              lines[i * 8 + lane * 4 + j] = static_cast<char>(number(i + j) | number(i + 4 + j) << 4);
        else
          for (int64_t i = 0; i < WIDTH; i++)
            lines[i / unit * unit * LANES + lane * unit + i % unit] = static_cast<char>(number(i));
      }
    }
  }
};

// The initial value of the sums of a group of int4 weights. The weights are stored plus 8, so it is -8 times the sum of
// the group's inputs: in 32 bits, or as two sums of 16 bits if pairs of inputs are summed in these.
inline int32_t group_start(const int8_t* x) {
  int32_t low = 0, high = 0;
  for (int i = 0; i < GROUP; i += 4) low -= 8 * (x[i] + x[i + 1]), high -= 8 * (x[i + 2] + x[i + 3]);
  return SHORT_SUMS ? static_cast<int32_t>((low & 0xffff) | static_cast<uint32_t>(high) << 16) : low + high;
}

// Rounds numbers of magnitude at most 127 to the nearest integers.
FORERUN_INLINE Ints whole_of(Floats x) {
  const Ints near = bits(x + 12582912.0f);  // 1.5 * 2^23, so that the low bits are the number
  return (near << 24) >> 24;
}

// The scale that maps the largest magnitude of some inputs to 127; `finite` holds 0, or NaN for non-finite inputs.
FORERUN_INLINE float scale_of(Floats top, Floats finite) {
  return std::max(largest(top) / 127.0f, 1.17549435e-38f) + sum(finite);
}

// The low bits of 16 numbers.
template <typename T>
FORERUN_INLINE void put_lanes(T* to, Ints numbers) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 1) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)numbers));
    return;
  }
#endif
  int32_t lanes[LANES];
  store(lanes, numbers);
  for (int j = 0; j < LANES; j++) to[j] = static_cast<T>(lanes[j]);
}

// Quantizes inputs to integers of magnitude at most 127, passes whole vectors of them to `each`, and returns their
// scale. If an input is not finite, the whole row becomes NaN.
template <typename T, typename Each>
FORERUN_INLINE float round_inputs(const float* x, int64_t size, T* numbers, Each each) {
  Floats top{}, finite{};
  for (int64_t i = 0; i < size; i += LANES) {
    const Floats part = load(x + i);
    top = larger(floats(bits(part) & 0x7fffffff), top), finite += part * 0.0f;
  }
  const float scale = scale_of(top, finite), inverse = 1.0f / scale;
  for (int64_t i = 0; i < size; i += LANES) {
    const Ints whole = whole_of(load(x + i) * inverse);
    put_lanes(numbers + i, whole);
    each(i, whole);
  }
  return scale;
}

// A row for grouped weights: every GROUP inputs have a scale. The numbers are followed by the scales, then for each
// group of weights by the sum of its inputs times the scale, then by the initial values of its sums.
template <typename T>
inline void prepare_groups(const Linear& l, const float* x, T* numbers, int64_t from, int64_t end) {
  static_assert(GROUP == 2 * LANES, "a group is two vectors, which stay in registers");
  const int64_t size = l.groups.size, is_four = l.groups.bits == 4;
  const bool short_sums = SHORT_SUMS && is_four && !l.groups.has_least;
  const int32_t begin = is_four ? (l.groups.has_least ? 0 : -8) : UNSIGNED ? -128 : 0;  // times the inputs' sum
  float* const scales = reinterpret_cast<float*>(numbers + l.depth);
  float* const totals = scales + l.depth / GROUP;
  int32_t* const starts = reinterpret_cast<int32_t*>(totals + l.depth / size);
  for (int64_t first = from; first < end; first += GROUP) {
    const Floats low = load(x + first), high = load(x + first + LANES);
    const Floats top = larger(floats(bits(high) & 0x7fffffff), larger(floats(bits(low) & 0x7fffffff), Floats{}));
    const float scale = scale_of(top, low * 0.0f + high * 0.0f), inverse = 1.0f / scale;
    const Ints low_part = whole_of(low * inverse), high_part = whole_of(high * inverse);
    put_lanes(numbers + first, low_part), put_lanes(numbers + first + LANES, high_part);
    scales[first / GROUP] = scale;
    const auto tell = [&](int64_t at, Ints part) {
      const int32_t total = sum(part);
      totals[at] = scale * static_cast<float>(total);
      starts[at] = short_sums ? group_start(reinterpret_cast<const int8_t*>(numbers + first)) : begin * total;
    };
    if (size == GROUP) tell(first / GROUP, low_part + high_part);
    else tell(first / LANES, low_part), tell(first / LANES + 1, high_part);
  }
}

// Converts a row of floats (zero-padded to the layer's depth) to the layer's format; for float16 it stays float32, so
// that no input is too large. If rows can be prepared in pieces, only some columns, in whole groups.
__attribute__((noinline)) inline void prepare_columns(const Linear& l, const float* x, Rows rows, int64_t row, int64_t from,
                                                      int64_t end) {
  char* const to = rows.data + row * l.row_bytes();
  if (l.format == FLOAT32 || l.format == FLOAT16) {
    memcpy(to + from * sizeof(float), x + from, (end - from) * sizeof(float));
  } else if (l.format == BFLOAT16) {
    for (int64_t i = from; i < end; i += LANES) {
      if (PAIRS) narrow(reinterpret_cast<bfloat16*>(to) + i, load(x + i));
      else store(reinterpret_cast<float*>(to) + i, floats(rounded(load(x + i)) << 16));
    }
  } else if (l.format == GROUPED) {
    if (WORDS && l.groups.bits == 8) prepare_groups(l, x, reinterpret_cast<int16_t*>(to), from, end);
    else prepare_groups(l, x, reinterpret_cast<int8_t*>(to), from, end);
  } else {
    const auto none = [](int64_t, Ints) {};
    if (WORDS && l.format == INT8) rows.scales[row] = round_inputs(x, l.depth, reinterpret_cast<int16_t*>(to), none);
    else rows.scales[row] = round_inputs(x, l.depth, reinterpret_cast<int8_t*>(to), none);
    const int8_t* const numbers = reinterpret_cast<const int8_t*>(to);
    for (int64_t g = 0; l.format == INT4 && g < l.depth / GROUP; g++) {
      const int32_t start = group_start(numbers + g * GROUP);
      memcpy(to + l.depth + 4 * g, &start, 4);
    }
  }
}

inline void prepare_row(const Linear& l, const float* x, Rows rows, int64_t row) { prepare_columns(l, x, rows, row, 0, l.depth); }

// Stores the sums of 16 outputs as floats, from the place of the first one.
inline void finish(const Linear& l, float* out, int64_t output, Floats sums, float) {
  store(out, sums + load(l.bias + output));
}
inline void finish(const Linear& l, float* out, int64_t output, Ints sums, float scale) {
  const Floats whole = converted(sums);
  store(out, (whole * load(l.scales + output)) * scale + load(l.bias + output));
}

}  // namespace forerun
