// Products of group-quantized weights as in checkpoints: memory is read once for any number of rows.
//
// A group's sum is over integers, exact in any order. It is rounded to a float, multiplied by the product of the two
// scales, and added to the sums of earlier groups, followed by the contribution of a lowest value. Both additions are
// fused with their multiplication on every processor, so every instruction set, number of rows and division of the work
// gives the same bits.
#pragma once
#include "multiply_groups.hpp"

namespace forerun {

// Four inputs of some of a line's outputs, as `add_inputs` takes them.
template <int BITS>
FORERUN_INLINE auto stored_weights(const char* lines, int i, int part) {
  if constexpr (BITS == 4) return halves(lines + i / 8 * 64, part, i % 8);
#if defined(__AVX2__) && !defined(__AVX512F__)
  else return std::pair{_mm256_cvtepi8_epi16(number_at<__m128i>(lines + i / 4 * 64 + part * 16)),
                        _mm256_cvtepi8_epi16(number_at<__m128i>(lines + i / 4 * 64 + 32 + part * 16))};
#else
  else return *reinterpret_cast<const IntRegisterAnywhere*>(lines + i / 4 * 64 + part * REGISTER_BYTES);
#endif
}

// Adds four more inputs of a row, whose numbers begin at `x`, to the sums.
template <int BITS, typename W>
FORERUN_INLINE IntRegister add_inputs(IntRegister sums, W weights, const char* x) {
  if constexpr (BITS == 4) return add_four(sums, weights, number_at<int32_t>(x));
#if defined(__AVX2__) && !defined(__AVX512F__)
  else {
    const auto pair = [](__m256i w, const char* at) {
      return (IntRegister)_mm256_madd_epi16(w, _mm256_set1_epi32(number_at<int32_t>(at)));
    };
    return sums + pair(weights.first, x) + pair(weights.second, x + 4);
  }
#elif defined(__AVX512VNNI__)
  else return add_four(sums, weights, number_at<int32_t>(x));
#elif defined(__ARM_FEATURE_DOTPROD)
  else return add_four(sums, weights, number_at<int32_t>(x));
#else
  else {
    const IntRegister four = number_at<int32_t>(x) - IntRegister{};
    for (int shift = 24; shift >= 0; shift -= 8) sums += ((weights << shift) >> 24) * ((four << shift) >> 24);
    return sums;
  }
#endif
}

FORERUN_INLINE FloatRegister stored_scale(const char* line, int part, bool wide) {
  if (wide) return register_at(reinterpret_cast<const float*>(line) + part * (LANES / PARTS));
  return widened_register(reinterpret_cast<const float16*>(line) + part * (LANES / PARTS));
}

// Where the parts of a prepared row begin that belong to a group, in bytes from the row.
struct GroupPlace {
  int64_t numbers, scale, total, start;
};

// Adds one group of R rows to their sums.
template <int BITS, int SIZE, int R, bool LEAST>
FORERUN_INLINE void add_stored(const Groups& g, const char* scales, const char* lines, const char* const* rows, GroupPlace at,
                               FloatRegister (*sums)[PARTS]) {
  constexpr int NUMBER = BITS == 8 && WORDS ? 2 : 1;
  IntRegister group[R][PARTS];
  for (int r = 0; r < R; r++)
    for (int part = 0; part < PARTS; part++) group[r][part] = number_at<int32_t>(rows[r] + at.start) - IntRegister{};
#pragma GCC unroll 8
  for (int i = 0; i < SIZE; i += 4)
    for (int part = 0; part < PARTS; part++) {
      const auto weights = stored_weights<BITS>(lines, i, part);
      for (int r = 0; r < R; r++) {
        group[r][part] = add_inputs<BITS>(group[r][part], weights, rows[r] + at.numbers + i * NUMBER);
        in_register(group[r][part]);
      }
    }
  for (int part = 0; part < PARTS; part++) {
    const FloatRegister weight_scale = stored_scale(scales, part, g.wide);
    const FloatRegister least = LEAST ? stored_scale(scales + g.line_bytes(), part, g.wide) : FloatRegister{};
    for (int r = 0; r < R; r++) {
      const float row_scale = number_at<float>(rows[r] + at.scale);
      const IntRegister whole = BITS == 4 ? whole_sums(group[r][part]) : group[r][part];
      FloatRegister& sum = sums[r][part];
      sum = fused(__builtin_convertvector(whole, FloatRegister), weight_scale * row_scale, sum);
      if constexpr (LEAST) sum = fused(least, number_at<float>(rows[r] + at.total) - FloatRegister{}, sum);
    }
  }
}

// R rows times a panel, over a range of blocks of its inputs.
template <int BITS, int SIZE, int R, bool LEAST>
__attribute__((noinline)) void multiply_stored_eight(const Linear& l, int64_t column, Rows rows, int64_t row, int64_t first,
                                                     int64_t end, Out out) {
  constexpr int FIRST = R <= AT_ONCE ? R : (R + 1) / 2, NUMBER = BITS == 8 && WORDS ? 2 : 1;
  FloatRegister sums[R][PARTS] = {};
  const Groups groups = l.groups;
  const int64_t bytes = groups.block_bytes(), ahead = panel_ahead_bytes(R);
  const int64_t scale_bytes = (1 + LEAST) * groups.line_bytes(), lines_at = (1 + LEAST) * groups.scale_bytes();
  const auto place = [&](int r) { return out.at(row + r, column); };
  if (first)
    for (int r = 0; r < R; r++) memcpy(sums[r], place(r), sizeof sums[r]);
  const char* block = l.panel(column) + first * bytes;
  const char* at[R];
  for (int r = 0; r < R; r++) at[r] = rows.data + (row + r) * l.row_bytes();
  const int64_t scales = l.depth * NUMBER, totals = scales + l.depth / GROUP * 4, starts = totals + l.depth / SIZE * 4;
  for (int64_t b = first; b < end; b++, block += bytes) {
    for (int64_t i = 0; i < bytes && ahead; i += 64) fetch(block + ahead + i);
    for (int g = 0; g < WIDTH / SIZE; g++) {
      const int64_t input = b * WIDTH + g * SIZE;
      const char *group_scales = block + g * scale_bytes, *lines = block + lines_at + g * SIZE * LANES * BITS / 8;
      const GroupPlace group{input * NUMBER, scales + input / GROUP * 4, totals + input / SIZE * 4, starts + input / SIZE * 4};
      add_stored<BITS, SIZE, FIRST, LEAST>(groups, group_scales, lines, at, group, sums);
      if constexpr (R > FIRST)
        add_stored<BITS, SIZE, R - FIRST, LEAST>(groups, group_scales, lines, at + FIRST, group, sums + FIRST);
    }
  }
  for (int r = 0; r < R; r++) {
    memcpy(place(r), sums[r], sizeof sums[r]);
    if (end == l.num_blocks()) store(place(r), load(place(r)) + load(l.bias + column));
  }
}

template <int BITS, int SIZE, bool LEAST>
void multiply_stored_rows(const Linear& l, int64_t panel, int64_t end_panel, Rows rows, int64_t num_rows, Out out) {
  const auto one = [&](int64_t c, int64_t row, int64_t count, int64_t first, int64_t end) {
    with_constant<EIGHT>(count, [&](auto R) { multiply_stored_eight<BITS, SIZE, R, LEAST>(l, c, rows, row, first, end, out); });
  };
  each_eight(l, panel, end_panel, num_rows, STRETCH_BLOCKS * 4 / BITS, one);
}

template <int BITS, int SIZE>
void multiply_stored_any(const Linear& l, int64_t panel, int64_t end_panel, Rows rows, int64_t num_rows, Out out) {
  if (l.groups.has_least) multiply_stored_rows<BITS, SIZE, true>(l, panel, end_panel, rows, num_rows, out);
  else multiply_stored_rows<BITS, SIZE, false>(l, panel, end_panel, rows, num_rows, out);
}

// Multiplies any number of rows by some panels.
inline void multiply_stored(const Linear& l, int64_t panel, int64_t end_panel, Rows rows, int64_t num_rows, Out out) {
  if (l.groups.bits == 4) return multiply_stored_any<4, 32>(l, panel, end_panel, rows, num_rows, out);
  if (l.groups.size == 16) return multiply_stored_any<8, 16>(l, panel, end_panel, rows, num_rows, out);
  multiply_stored_any<8, 32>(l, panel, end_panel, rows, num_rows, out);
}

}  // namespace forerun
