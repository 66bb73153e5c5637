// Products in vector registers: a block of rows times a block of panels, with all sums in registers.
//
// The shape of a block depends on the instruction set: as many sums as leave registers for a line of weights and a
// number of a row. With more rows than a block has, the blocks use a stretch of the weights while it is in the core's
// cache, and sums are kept in the result in between: memory is read once for any number of rows. Every output is summed
// over the inputs in their order, however rows and stretches are divided.
#pragma once
#include "linear.hpp"

namespace forerun {

constexpr int LINE_BYTES = 4 * LANES;  // of a panel: some inputs of its 16 outputs
constexpr int STRETCH_BYTES = 64 << 10;  // weights that blocks of rows share: with the next stretch, half of a core's cache

inline IntRegister weights_at(const char* line, int part) {
  return *reinterpret_cast<const IntRegisterAnywhere*>(line + part * REGISTER_BYTES);
}

// sum += a * b, of floats or of pairs of words, in the register of the sum: otherwise GCC moves sums between registers
// and spills some if there are 16. The compiler must not see the address of a sum in a loop.
inline void add_product(FloatRegister& sum, FloatRegister a, FloatRegister b) {
#if defined(__AVX2__) && !defined(__AVX512F__) && defined(__FMA__)
  FloatRegister kept = sum;
  asm("vfmadd231ps %2, %1, %0" : "+x"(kept) : "x"(a), "x"(b));
  sum = kept;
#else
  sum = fma(a, b, sum);
#endif
}
#if defined(__AVX2__) && !defined(__AVX512F__)
inline void add_product(IntRegister& sum, __m256i a, __m256i b) {
  IntRegister kept = sum;
  asm("vpaddd %1, %0, %0" : "+x"(kept) : "x"(_mm256_madd_epi16(a, b)));
  sum = kept;
}
#endif

// The weights of one input of 16 outputs times that input of R rows.
template <int R>
inline void add_products(FloatRegister (*sums)[PARTS], const FloatRegister* weights, const char* x, int64_t stride) {
  for (int r = 0; r < R; r++)
    for (int part = 0; part < PARTS; part++)
      add_product(sums[r][part], weights[part], number_at<float>(x + r * stride) - FloatRegister{});
}

// Adds a line of weights times the same inputs of R rows to their sums, in `TURNS` turns: all panels take the first
// turn before the second, so that only one turn's inputs are in registers. `STEP` are the bytes of a prepared row for a
// line; `SPARE` are the registers that sums must leave free, found in GCC's output.
template <Format F>
struct Dot;

template <>
struct Dot<FLOAT32> {
  typedef FloatRegister Sums;
  static constexpr int STEP = 4, SPARE = PARTS == 4 ? 16 : PARTS + 1, TURNS = 1;

  template <int R>
  static void add(Sums (*sums)[PARTS], const char* line, const char* x, int64_t stride, int) {
    for (int r = 0; r < R; r++)
      for (int part = 0; part < PARTS; part++)
        sums[r][part] = fma((FloatRegister)weights_at(line, part), number_at<float>(x + r * stride) - Sums{}, sums[r][part]);
  }
};

template <>
struct Dot<BFLOAT16> {  // two inputs of each output
  typedef FloatRegister Sums;
#if defined(__AVX512BF16__)
  static constexpr int STEP = 4, SPARE = PARTS + 1, TURNS = 1;

  template <int R>
  static void add(Sums (*sums)[PARTS], const char* line, const char* x, int64_t stride, int) {
    for (int r = 0; r < R; r++)
      sums[r][0] = (Sums)_mm512_dpbf16_ps((__m512)sums[r][0], (__m512bh)_mm512_loadu_si512(line),
                                          (__m512bh)_mm512_set1_epi32(number_at<int32_t>(x + r * stride)));
  }
#else  // widened in registers; rows are prepared as floats
  static constexpr int STEP = 8, SPARE = PARTS == 4 ? 20 : PARTS == 2 ? 5 : 9, TURNS = 2;

  template <int R>
  static void add(Sums (*sums)[PARTS], const char* line, const char* x, int64_t stride, int turn) {
    FloatRegister weights[PARTS];
    for (int part = 0; part < PARTS; part++) {
      const IntRegister pairs = weights_at(line, part);
      weights[part] = (FloatRegister)(turn ? upper_halves(pairs) : pairs << 16);
    }
    add_products<R>(sums, weights, x + 4 * turn, stride);
  }

  static IntRegister upper_halves(IntRegister pairs) {  // with zeros, which unlike a mask need no register for the loop
#if defined(__AVX512BW__)
    return (IntRegister)_mm512_maskz_mov_epi16(0xaaaaaaaa, (__m512i)pairs);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (IntRegister)_mm256_blend_epi16(_mm256_setzero_si256(), (__m256i)pairs, 0xaa);
#else
    return pairs & int32_t(0xffff0000);
#endif
  }
#endif
};

template <>
struct Dot<FLOAT16> {  // two inputs, each of all outputs; widened in registers
  typedef FloatRegister Sums;
  static constexpr int STEP = 8, SPARE = PARTS == 4 ? 16 : PARTS == 2 ? 5 : 9, TURNS = 2;

  template <int R>
  static void add(Sums (*sums)[PARTS], const char* line, const char* x, int64_t stride, int turn) {
    const float16* const halves = reinterpret_cast<const float16*>(line) + turn * LANES;
    FloatRegister weights[PARTS];
    for (int part = 0; part < PARTS; part++) weights[part] = widened_register(halves + part * (LANES / PARTS));
    add_products<R>(sums, weights, x + 4 * turn, stride);
  }
};

template <>
struct Dot<INT8> {  // four inputs of each output; integer sums, exact in any order
  typedef IntRegister Sums;
#if defined(__AVX2__) && !defined(__AVX512F__)
  static constexpr int STEP = 8, SPARE = 5, TURNS = 2;  // two inputs a turn, as words

  template <int R>
  static void add(Sums (*sums)[PARTS], const char* line, const char* x, int64_t stride, int turn) {
    __m256i weights[PARTS];
    for (int part = 0; part < PARTS; part++)
      weights[part] = _mm256_cvtepi8_epi16(number_at<__m128i>(line + (PARTS * turn + part) * REGISTER_BYTES / 2));
    for (int r = 0; r < R; r++)
      for (int part = 0; part < PARTS; part++)
        add_product(sums[r][part], weights[part], _mm256_set1_epi32(number_at<int32_t>(x + r * stride + 4 * turn)));
  }
#else
  static constexpr int STEP = 4, SPARE = PARTS == 4 ? 20 : 6, TURNS = 1;

  template <int R>
  static void add(Sums (*sums)[PARTS], const char* line, const char* x, int64_t stride, int) {
    constexpr int KEPT = NUM_REGISTERS - R * PARTS - 4;  // rows whose inputs stay in a register until the next part
    for (int part = 0; part < PARTS; part++) {
      const IntRegister weights = weights_at(line, part);
      const char* from = x;
      for (int r = 0; r < R; r++) {
        if (PARTS > 1 && r == KEPT) asm volatile("" : "+r"(from));  // read again for every part: otherwise they displace sums
        sums[r][part] = dot(sums[r][part], weights, number_at<int32_t>(from + r * stride));
      }
    }
  }

  static Sums dot(Sums sums, IntRegister weights, int32_t four) {
#if defined(__AVX512VNNI__)  // one operand is unsigned: 128 is added to x here, and `offsets` subtracted at the end
    return (Sums)_mm512_dpbusd_epi32((__m512i)sums, _mm512_set1_epi32(four ^ int32_t(0x80808080)), (__m512i)weights);
#else
    const IntRegister x = four - Sums{};
    for (int shift = 24; shift >= 0; shift -= 8) sums += ((weights << shift) >> 24) * ((x << shift) >> 24);
    return sums;
#endif
  }
#endif

  // The excess in the sums of 16 outputs over the products.
  static Ints excess([[maybe_unused]] const Linear& l, [[maybe_unused]] int64_t output) {
#if defined(__AVX512VNNI__)
    return load(l.offsets + output);
#else
    return Ints{};
#endif
  }
};

// R rows times P panels along the lines from `first` to `end`, both the whole panel or a stretch of it. With every line
// the memory at `ahead`, and as far behind it as the panels are apart, is fetched; `step` is how far `ahead` then
// moves. A function of its own in the library, so that a test can find its loop there and see that sums do stay in
// registers.
template <Format F, int R, int P>
__attribute__((noinline)) void multiply_block(const Linear& l, int64_t column, Rows rows, int64_t row, int64_t first,
                                              int64_t end, Out out, const char* ahead, int64_t step) {
  typedef typename Dot<F>::Sums Sums;
  typedef Sums Anywhere __attribute__((aligned(4), may_alias));
  Sums sums[P][R][PARTS] = {};
  const auto place = [&](int p, int r) { return out.at(row + r, column + p * LANES); };
  const auto each = [&](auto f) {
    for (int p = 0; p < P; p++)
      for (int r = 0; r < R; r++)
        for (int part = 0; part < PARTS; part++) f(sums[p][r][part], reinterpret_cast<Anywhere*>(place(p, r))[part]);
  };
  if (first) each([](Sums& sum, Anywhere& waiting) { sum = waiting; });
  const int64_t panel = l.panel_bytes(), stride = l.row_bytes();  // otherwise computed for every line
  const bool fetches = R > FEW_ROWS || P < PANELS || fetches_few();
  const char* line = l.panel(column) + first * LINE_BYTES;
  const char* x = rows.data + row * stride + first * Dot<F>::STEP;
  for (const char* const last = line + (end - first) * LINE_BYTES; line < last; line += LINE_BYTES) {
    for (int p = 0; p < P && fetches; p++) fetch(ahead + p * panel);
    const char* from = line;
#pragma GCC unroll 2  // early enough for sums to become registers
    for (int turn = 0; turn < Dot<F>::TURNS; turn++) {
      if (F == BFLOAT16 && PARTS == 1 && turn) asm volatile("" : "+r"(from));  // read again: otherwise the first turn's weights displace sums
      for (int p = 0; p < P; p++) Dot<F>::template add<R>(sums[p], from + p * panel, x, stride, turn);
    }
    x += Dot<F>::STEP, ahead += step;
  }
  each([](Sums& sum, Anywhere& waiting) { waiting = sum; });
  if (end < l.num_lines()) return;
  for (int p = 0; p < P; p++)
    for (int r = 0; r < R; r++) {
      float* const result = place(p, r);
      const int64_t output = column + p * LANES;
      if (F != INT8) finish(l, result, output, load(result), 0);
      else finish(l, result, output, bits(load(result)) - Dot<INT8>::excess(l, output), rows.scales[row + r]);
    }
}

// Whether the sums of a block stay in registers. With a single panel one more is free where there are 16: no row's
// input waits there for the next panel.
template <Format F>
constexpr bool fits(int num_rows, int panels) {
  return num_rows * panels * PARTS + Dot<F>::SPARE - (NUM_REGISTERS == 16 && panels == 1) <= NUM_REGISTERS;
}

// How many panels a block of so many rows takes, and the most rows that a block can have.
template <Format F>
constexpr int panels_for(int num_rows) {
  int panels = PARTS == 4 ? 1 : PANELS;  // a line takes four registers there, so only one panel's sums fit
  while (panels > 1 && !fits<F>(num_rows, panels)) panels /= 2;
  return panels;
}
template <Format F>
constexpr int most_rows() {
  int rows = 6;
  while (!fits<F>(rows, 1)) rows--;
  return rows;
}

// All rows of one block, and all panels of a group.
template <Format F, int R>
inline void multiply_few(const Linear& l, int64_t column, Rows rows, Out out) {
  constexpr int P = panels_for<F>(R);
  for (int64_t c = column; c < column + WIDTH; c += P * LANES)
    multiply_block<F, R, P>(l, c, rows, 0, 0, l.num_lines(), out, l.panel(c) + AHEAD_BYTES / P, LINE_BYTES);
}

// Any number of rows in blocks of nearly the same size, stretch by stretch. While a stretch of all panels of the group
// is in the core's cache, every block of rows is multiplied with it and prefetches its share of the next stretch.
template <Format F>
inline void multiply_many(const Linear& l, int64_t column, Rows rows, int64_t num_rows, Out out) {
  constexpr int MOST = most_rows<F>(), P = panels_for<F>(MOST);
  static_assert(MOST >= 3, "with fewer, some of the blocks would have a single row, which the switch leaves out");
  const int64_t num_blocks = (num_rows + MOST - 1) / MOST, stretch = STRETCH_BYTES / LINE_BYTES / PANELS;
  const int64_t step = (LINE_BYTES + num_blocks - 1) / num_blocks;
  for (int64_t first = 0; first < l.num_lines(); first += stretch) {
    const int64_t end = std::min(first + stretch, l.num_lines());
    for (int64_t block = 0; block < num_blocks; block++) {
      const int64_t row = num_rows * block / num_blocks, share = (end - first) * step * block;
      for (int64_t c = column; c < column + WIDTH; c += P * LANES) {
        const char* ahead = (end < l.num_lines() ? l.panel(c) + end * LINE_BYTES : l.panel(c + WIDTH)) + share;
        switch (num_rows * (block + 1) / num_blocks - row) {
          case 2: multiply_block<F, std::min(2, MOST), P>(l, c, rows, row, first, end, out, ahead, step); break;
          case 3: multiply_block<F, std::min(3, MOST), P>(l, c, rows, row, first, end, out, ahead, step); break;
          case 4: multiply_block<F, std::min(4, MOST), P>(l, c, rows, row, first, end, out, ahead, step); break;
          case 5: multiply_block<F, std::min(5, MOST), P>(l, c, rows, row, first, end, out, ahead, step); break;
          case 6: multiply_block<F, std::min(6, MOST), P>(l, c, rows, row, first, end, out, ahead, step); break;
        }
      }
    }
  }
}

template <Format F>
void multiply_rows(const Linear& l, int64_t column, Rows rows, int64_t num_rows, Out out) {
  constexpr int MOST = most_rows<F>();  // no function is instantiated for more rows: their sums would not fit
  if (num_rows > MOST) return multiply_many<F>(l, column, rows, num_rows, out);
  switch (num_rows) {
    case 1: return multiply_few<F, 1>(l, column, rows, out);
    case 2: return multiply_few<F, std::min(2, MOST)>(l, column, rows, out);
    case 3: return multiply_few<F, std::min(3, MOST)>(l, column, rows, out);
    case 4: return multiply_few<F, std::min(4, MOST)>(l, column, rows, out);
    case 5: return multiply_few<F, std::min(5, MOST)>(l, column, rows, out);
    case 6: return multiply_few<F, std::min(6, MOST)>(l, column, rows, out);
  }
}

}  // namespace forerun
