// Products of group-quantized weights as in checkpoints: memory is read once for any number of rows.
//
// A group's sum is over integers, exact in any order. It is rounded to a float, multiplied by the product of the two
// scales, and added to the sums of earlier groups, followed by the contribution of a lowest value. Nothing is fused, so
// every instruction set, number of rows and division of the work gives the same bits.
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

// Adds one group of R rows to their sums. `x` are the first row's numbers; the other pointers are what follows these.
template <int BITS, int SIZE, int R>
FORERUN_INLINE void add_stored(const Groups& g, const char* scales, const char* lines, const char* x, const char* scale,
                               const char* total, const char* start, int64_t stride, float (*sums)[LANES]) {
  constexpr int NUMBER = BITS == 8 && WORDS ? 2 : 1;
  IntRegister group[R][PARTS];
  for (int r = 0; r < R; r++)
    for (int part = 0; part < PARTS; part++) group[r][part] = number_at<int32_t>(start + r * stride) - IntRegister{};
#pragma GCC unroll 8
  for (int i = 0; i < SIZE; i += 4)
    for (int part = 0; part < PARTS; part++) {
      const auto weights = stored_weights<BITS>(lines, i, part);
      for (int r = 0; r < R; r++) {
        group[r][part] = add_inputs<BITS>(group[r][part], weights, x + r * stride + i * NUMBER);
        in_register(group[r][part]);
      }
    }
  for (int part = 0; part < PARTS; part++) {
    const FloatRegister weight_scale = stored_scale(scales, part, g.wide);
    const FloatRegister least = g.has_least ? stored_scale(scales + g.line_bytes(), part, g.wide) : FloatRegister{};
    for (int r = 0; r < R; r++) {
      const float row_scale = number_at<float>(scale + r * stride);
      const IntRegister whole = BITS == 4 ? whole_sums(group[r][part]) : group[r][part];
      FloatRegisterAnywhere* const sum = reinterpret_cast<FloatRegisterAnywhere*>(sums[r]) + part;
      *sum = *sum + __builtin_convertvector(whole, FloatRegister) * (weight_scale * row_scale);
      if (g.has_least) *sum = *sum + least * number_at<float>(total + r * stride);
    }
  }
}

// R rows times a panel, over a range of blocks of its inputs.
template <int BITS, int SIZE, int R>
__attribute__((noinline)) void multiply_stored_eight(const Linear& l, int64_t column, Rows rows, int64_t row, int64_t first,
                                                     int64_t end, Out out) {
  constexpr int FIRST = R <= AT_ONCE ? R : (R + 1) / 2, NUMBER = BITS == 8 && WORDS ? 2 : 1;
  alignas(64) float sums[R][LANES] = {};
  const Groups groups = l.groups;
  const int64_t stride = l.row_bytes(), bytes = groups.block_bytes(), ahead = panel_ahead_bytes(R);
  const int64_t scale_bytes = (1 + groups.has_least) * groups.line_bytes(), lines_at = (1 + groups.has_least) * groups.scale_bytes();
  const auto place = [&](int r) { return out.at(row + r, column); };
  if (first)
    for (int r = 0; r < R; r++) memcpy(sums[r], place(r), sizeof sums[r]);
  const char* block = l.panel(column) + first * bytes;
  const char* const numbers = rows.data + row * stride;
  const char* const scales = numbers + l.depth * NUMBER;
  const char* const totals = scales + l.depth / GROUP * 4;
  const char* const starts = totals + l.depth / SIZE * 4;
  for (int64_t b = first; b < end; b++, block += bytes) {
    for (int64_t i = 0; i < bytes && ahead; i += 64) fetch(block + ahead + i);
    for (int g = 0; g < WIDTH / SIZE; g++) {
      const int64_t input = b * WIDTH + g * SIZE;
      const char *own = block + g * scale_bytes, *lines = block + lines_at + g * SIZE * LANES * BITS / 8;
      const char *x = numbers + input * NUMBER, *scale = scales + input / GROUP * 4;
      const char *total = totals + input / SIZE * 4, *start = starts + input / SIZE * 4;
      add_stored<BITS, SIZE, FIRST>(groups, own, lines, x, scale, total, start, stride, sums);
      if constexpr (R > FIRST) {
        x += FIRST * stride;
        asm volatile("" : "+r"(x));
        add_stored<BITS, SIZE, R - FIRST>(groups, own, lines, x, scale + FIRST * stride, total + FIRST * stride,
                                          start + FIRST * stride, stride, sums + FIRST);
      }
    }
  }
  for (int r = 0; r < R; r++)
    if (end < l.num_blocks()) memcpy(place(r), sums[r], sizeof sums[r]);
    else store(place(r), load(sums[r]) + load(l.bias + column));
}

template <int BITS, int SIZE>
void multiply_stored_rows(const Linear& l, int64_t panel, int64_t end_panel, Rows rows, int64_t num_rows, Out out) {
  const auto one = [&](int64_t c, int64_t row, int64_t count, int64_t first, int64_t end) {
    switch (count) {
      case 1: multiply_stored_eight<BITS, SIZE, 1>(l, c, rows, row, first, end, out); break;
      case 2: multiply_stored_eight<BITS, SIZE, 2>(l, c, rows, row, first, end, out); break;
      case 3: multiply_stored_eight<BITS, SIZE, 3>(l, c, rows, row, first, end, out); break;
      case 4: multiply_stored_eight<BITS, SIZE, 4>(l, c, rows, row, first, end, out); break;
      case 5: multiply_stored_eight<BITS, SIZE, 5>(l, c, rows, row, first, end, out); break;
      case 6: multiply_stored_eight<BITS, SIZE, 6>(l, c, rows, row, first, end, out); break;
      case 7: multiply_stored_eight<BITS, SIZE, 7>(l, c, rows, row, first, end, out); break;
      case 8: multiply_stored_eight<BITS, SIZE, 8>(l, c, rows, row, first, end, out); break;
    }
  };
  each_eight(l, panel, end_panel, num_rows, STRETCH_BLOCKS * 4 / BITS, one);
}

// Multiplies any number of rows by some panels.
inline void multiply_stored(const Linear& l, int64_t panel, int64_t end_panel, Rows rows, int64_t num_rows, Out out) {
  if (l.groups.bits == 4) return multiply_stored_rows<4, 32>(l, panel, end_panel, rows, num_rows, out);
  if (l.groups.size == 16) return multiply_stored_rows<8, 16>(l, panel, end_panel, rows, num_rows, out);
  multiply_stored_rows<8, 32>(l, panel, end_panel, rows, num_rows, out);
}

}  // namespace forerun
