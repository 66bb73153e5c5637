// Products of int4 weights, whose groups of 32 inputs have a scale each: memory is read once for any number of rows.
//
// A group's sum is over integers, exact in any order. As a float it has at most 15 significant bits and a scale has 8,
// so their product is exact too, whether it is rounded before the addition or not. Groups are added in their order. So
// every instruction set, number of rows and division of the work gives the same bits.
#pragma once
#include "linear.hpp"

namespace forerun {

constexpr int64_t BLOCK_BYTES = BLOCK_LINES * 64, BLOCK_GROUPS = WIDTH / GROUP;
constexpr int64_t STRETCH_BLOCKS = 28;  // blocks of a panel that several eights of rows share: half of the L1 cache
constexpr int EIGHT = 8;                // rows whose sums are kept while the weights of a panel are read
constexpr int AT_ONCE = REGISTER_BYTES == 32 ? 6 : PARTS == 1 ? EIGHT : 4;  // rows whose group sums fit the registers

// The distance of the prefetch of a panel. Processors with registers of 32 bytes need a short one: measured on a Zen 3.
inline int64_t panel_ahead_bytes(int num_rows) {
  return num_rows > FEW_ROWS ? AHEAD_BYTES : REGISTER_BYTES == 32 ? 2048 : fetches_few() ? 4096 : 0;
}

// The first or the last four of the eight inputs in a line, of some of its outputs: a byte each, plus 8.
inline IntRegister halves(const char* line, int part, bool high) {
  const IntRegister bytes = *reinterpret_cast<const IntRegisterAnywhere*>(line + part * REGISTER_BYTES);
  return (high ? bytes >> 4 : bytes) & int32_t(0x0f0f0f0f);
}

// Adds four more inputs of a row to a group's sums.
inline IntRegister add_four(IntRegister sums, IntRegister weights, int32_t four) {
#if defined(__AVX512VNNI__)
  return (IntRegister)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(four));
#elif defined(__AVX512BW__)
  return (IntRegister)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(four)));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (IntRegister)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(four)));
#elif defined(__ARM_FEATURE_DOTPROD)  // both operands signed; 0 to 15 is the same either way
  return (IntRegister)vdotq_s32((int32x4_t)sums, (int8x16_t)weights, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#else
  for (int shift = 0; shift < 32; shift += 8) sums += ((weights >> shift) & 255) * int32_t(static_cast<int8_t>(four >> shift));
  return sums;
#endif
}

// A group's sums in 32 bits.
inline IntRegister whole_sums(IntRegister sums) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
  return (IntRegister)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (IntRegister)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#else
  return sums;
#endif
}

// Makes the compiler finish a sum before it begins the next: otherwise it computes all products first and, with 16
// registers, spills half of them.
inline void in_register([[maybe_unused]] IntRegister& sum) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm volatile("" : "+x"(sum));
#endif
}

// Adds one group of R rows to their sums. `x` and `start` are those of the first row. A function call for every group
// would take a sixth of the time.
template <int R>
FORERUN_INLINE void add_group(const char* scales, const char* line, const char* x, const char* start, int64_t stride,
                              float (*sums)[LANES]) {
  IntRegister group[R][PARTS];
  for (int r = 0; r < R; r++)
    for (int part = 0; part < PARTS; part++) group[r][part] = number_at<int32_t>(start + r * stride) - IntRegister{};
#pragma GCC unroll 8
  for (int i = 0; i < GROUP; i += 4) {
    IntRegister weights[PARTS];
    for (int part = 0; part < PARTS; part++) {
      weights[part] = halves(line + i / 8 * 64, part, i % 8);
      in_register(weights[part]);
    }
    for (int r = 0; r < R; r++)
      for (int part = 0; part < PARTS; part++) {
        group[r][part] = add_four(group[r][part], weights[part], number_at<int32_t>(x + r * stride + i));
        in_register(group[r][part]);
      }
  }
  for (int part = 0; part < PARTS; part++) {
    const FloatRegister scale = widened_register(reinterpret_cast<const bfloat16*>(scales) + part * (LANES / PARTS));
    for (int r = 0; r < R; r++) {
      FloatRegisterAnywhere* const sum = reinterpret_cast<FloatRegisterAnywhere*>(sums[r]) + part;
      *sum = fma(__builtin_convertvector(whole_sums(group[r][part]), FloatRegister), scale, (FloatRegister)*sum);
    }
  }
}

// R rows times a panel, over a range of blocks of its inputs. The first rows read each group from memory. The compiler
// must not relate the addresses of other rows to these: it would keep one for every row, on the stack.
template <int R>
__attribute__((noinline)) void multiply_eight(const Linear& l, int64_t column, Rows rows, int64_t row, int64_t first,
                                              int64_t end, Out out) {
  constexpr int FIRST = R <= AT_ONCE ? R : (R + 1) / 2;
  alignas(64) float sums[R][LANES] = {};
  const int64_t stride = l.row_bytes(), ahead = panel_ahead_bytes(R);
  const auto place = [&](int r) { return out.at(row + r, column); };
  if (first)
    for (int r = 0; r < R; r++) memcpy(sums[r], place(r), sizeof sums[r]);
  const char* block = l.panel(column) + first * BLOCK_BYTES;
  const char* x = rows.data + row * stride + first * WIDTH;
  const char* start = rows.data + row * stride + l.depth + first * BLOCK_GROUPS * 4;
  for (int64_t b = first; b < end; b++, block += BLOCK_BYTES, x += WIDTH, start += BLOCK_GROUPS * 4) {
    for (int i = 0; i < BLOCK_LINES && ahead; i++) fetch(block + ahead + i * 64);
    for (int g = 0; g < BLOCK_GROUPS; g++) {
      const char *scales = block + g * LANES * 2, *line = block + 64 + g * GROUP * 8, *inputs = x + g * GROUP;
      add_group<FIRST>(scales, line, inputs, start + 4 * g, stride, sums);
      if constexpr (R > FIRST) {
        inputs += FIRST * stride;
        asm volatile("" : "+r"(inputs));
        add_group<R - FIRST>(scales, line, inputs, start + 4 * g + FIRST * stride, stride, sums + FIRST);
      }
    }
  }
  for (int r = 0; r < R; r++)
    if (end < l.num_blocks()) memcpy(place(r), sums[r], sizeof sums[r]);
    else store(place(r), load(sums[r]) * rows.scales[row + r] + load(l.bias + column));
}

// Calls `f` for every eight (or nearly) of rows and every panel, stretch by stretch of their inputs. Each eight is used
// with as many panels as fit into a stretch while it is in the cache.
template <typename F>
inline void each_eight(const Linear& l, int64_t panel, int64_t end_panel, int64_t num_rows, int64_t stretch, F f) {
  const int64_t num_eights = (num_rows + EIGHT - 1) / EIGHT, blocks = l.num_blocks();
  const int64_t together = num_eights == 1 ? 1 : std::max<int64_t>(1, stretch / blocks);
  for (; panel < end_panel; panel += together)
    for (int64_t first = 0, end; first < blocks; first = end) {
      end = num_eights == 1 ? blocks : std::min(first + stretch, blocks);
      for (int64_t eight = 0; eight < num_eights; eight++) {
        const int64_t row = num_rows * eight / num_eights, count = num_rows * (eight + 1) / num_eights - row;
        for (int64_t p = panel; p < std::min(panel + together, end_panel); p++) f(p * LANES, row, count, first, end);
      }
    }
}

// Multiplies any number of rows by some panels.
inline void multiply_groups(const Linear& l, int64_t panel, int64_t end_panel, Rows rows, int64_t num_rows, Out out) {
  const auto one = [&](int64_t c, int64_t row, int64_t count, int64_t first, int64_t end) {
    with_constant<EIGHT>(count, [&](auto R) { multiply_eight<R>(l, c, rows, row, first, end, out); });
  };
  each_eight(l, panel, end_panel, num_rows, STRETCH_BLOCKS, one);
}

}  // namespace forerun
