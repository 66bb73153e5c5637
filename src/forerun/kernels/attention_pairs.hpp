// The attention of attention.hpp for bfloat16 caches on processors that multiply pairs of bfloat16 fast: AMD's.
//
// Keys are transposed, as in attention_lanes.hpp; values of two keys are interleaved. Queries and weights are rounded
// to bfloat16, as in torch's attention. Pairs of keys begin at even keys, and a key that a query sees without its
// neighbour is paired with a zero: so the bits of a query do not depend on other queries here either.
#pragma once
#include "attention_lanes.hpp"

#if defined(__AVX512BF16__)
namespace forerun {

// Adds the products of pairs with one pair, which is broadcast to all lanes.
inline __m512 add_pairs(__m512 sums, __m512i pairs, int32_t pair) {
  return _mm512_dpbf16_ps(sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
}

// The scores of Q queries for 16 keys. Even and odd pairs have separate sums, so that additions wait less for each
// other.
template <int Q>
inline void score_pairs(const bfloat16 (*q)[MAX_HEAD], const __m512i* pairs, int64_t width, float* scores, int64_t stride) {
  __m512 sums[Q][2] = {};
  for (int64_t p = 0; p < width / 2; p += 2)
    for (int odd = 0; odd < 2; odd++)
      for (int r = 0; r < Q; r++)
        sums[r][odd] =
            add_pairs(sums[r][odd], pairs[p + odd], number_at<int32_t>(reinterpret_cast<const char*>(q[r] + 2 * (p + odd))));
  for (int r = 0; r < Q; r++) store(scores + r * stride, (Floats)sums[r][0] + (Floats)sums[r][1]);
}

// Interleaves two rows: of every 32 numbers the lower four of every eight, and the upper four.
inline void join(const bfloat16* even, const bfloat16* odd, __m512i* to) {
  const __m512i a = even ? _mm512_loadu_si512(even) : __m512i{}, b = odd ? _mm512_loadu_si512(odd) : __m512i{};
  to[0] = _mm512_maskz_unpacklo_epi16(0xffffffff, a, b), to[1] = _mm512_maskz_unpackhi_epi16(0xffffffff, a, b);
}

// Restores the order of the head in sums that are ordered as by `join`, four of each eight in either register.
inline void part_again(float* sums, int64_t width) {
  for (int64_t i = 0; i < width; i += PAIRED) {
    const Floats low = load(sums + i), high = load(sums + i + LANES);
    store(sums + i, FORERUN_SHUFFLE(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23));
    store(sums + i + LANES,
          FORERUN_SHUFFLE(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31));
  }
}

// The sums of Q queries over the values of a range of keys in a block, J registers; `values` are the block's pairs.
template <int Q, int J>
inline void weigh_columns(float (*out)[MAX_HEAD], const bfloat16* weights, int64_t stride, const __m512i* values,
                          const BlockRows& rows, int from, int end, int64_t width, int64_t column) {
  __m512 sums[Q][J];
  for (int r = 0; r < Q; r++)
    for (int j = 0; j < J; j++) sums[r][j] = (__m512)load(out[r] + column + j * LANES);
  const auto add = [&](int even, const __m512i* pairs) {
    for (int r = 0; r < Q; r++) {
      const int32_t weight = number_at<int32_t>(reinterpret_cast<const char*>(weights + r * stride + even));
      for (int j = 0; j < J; j++) sums[r][j] = add_pairs(sums[r][j], pairs[j], weight);
    }
  };
  const auto add_one = [&](int key) {
    __m512i pairs[J];
    for (int j = 0; j < J; j += 2) {
      const bfloat16* const at = rows.row[key] + column + j * LANES;
      join(key % 2 ? nullptr : at, key % 2 ? at : nullptr, pairs + j);
    }
    add(key / 2 * 2, pairs);
  };
  int key = from;
  if (key % 2) add_one(key++);
  for (; key + 1 < end; key += 2) add(key, values + (key / 2 * width + column) / LANES);
  if (key < end) add_one(key);
  for (int r = 0; r < Q; r++)
    for (int j = 0; j < J; j++) store(out[r] + column + j * LANES, (Floats)sums[r][j]);
}

template <int Q>
inline void weigh_pairs(float (*out)[MAX_HEAD], const bfloat16* weights, int64_t stride, const __m512i* values,
                        const BlockRows& rows, int from, int end, int64_t width) {
  int64_t i = 0;
  for (; i + 4 * LANES <= width; i += 4 * LANES)
    weigh_columns<Q, 4>(out, weights, stride, values, rows, from, end, width, i);
  if (i < width) weigh_columns<Q, 2>(out, weights, stride, values, rows, from, end, width, i);
}

// Keys and values in pairs of bfloat16.
struct PairBlocks : TransposedKeys {
  typedef bfloat16 Number;
  static constexpr int MOST_SCORED = 4;

  void load_values(const bfloat16* values, const Path& path, int64_t first, int64_t end, int64_t head_dim, int64_t width) {
    rows.find(values, path, first, end, head_dim, width);
    for (int k = 0; k < LANES; k += 2)
      for (int64_t i = 0; i < width; i += PAIRED)
        join(rows.row[k] + i, rows.row[k + 1] + i, pairs + (k / 2 * width + i) / LANES);
  }

  template <int Q>
  void score(const bfloat16 (*q)[MAX_HEAD], int64_t width, float* scores, int64_t stride) const {
    score_pairs<Q>(q, pairs, width, scores, stride);
  }

  template <int G>
  void add_values(float (*sums)[MAX_HEAD], const bfloat16* weights, int64_t stride, int from, int end, int64_t width) const {
    weigh_pairs<G>(sums, weights, stride, pairs, rows, from, end, width);
  }

  static void restore_order(float* sums, int64_t width) { part_again(sums, width); }
};

}  // namespace forerun
#endif
