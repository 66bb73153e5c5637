// The attention of attention.hpp for bfloat16 caches with AVX-512: keys are transposed, 16 at a time, so that each lane
// has the score of one key, summed along the head, and no sums of lanes are needed.
#pragma once
#include "attention.hpp"

#if defined(__AVX512F__)
namespace forerun {

constexpr int PAIRED = 32;  // numbers of a head in a register
constexpr int PAIR_SPACE = MAX_HEAD / 2;  // registers that 16 keys or values take, in pairs

// 16 rows of keys or values from the cache; rows from `end` on and numbers beyond a head's width are zeros.
struct BlockRows {
  const bfloat16* row[LANES];
  alignas(64) bfloat16 copy[LANES * MAX_HEAD];

  void find(const bfloat16* cache, const Path& path, int64_t first, int64_t end, int64_t head_dim, int64_t width) {
    fetch_keys(cache, path, first + LANES, end, head_dim);
    if (head_dim == width && first + LANES <= std::min(end, path.num_plain)) {  // consecutive slots
      const bfloat16* const at = cache + path.slot(first) * head_dim;
      for (int k = 0; k < LANES; k++) row[k] = at + k * head_dim;
      return;
    }
    for (int k = 0; k < LANES; k++) {
      const bfloat16* const at = first + k < end ? cache + path.slot(first + k) * head_dim : nullptr;
      row[k] = at;
      if (at && head_dim == width) continue;
      bfloat16* const to = copy + k * width;
      memset(to, 0, width * sizeof(bfloat16));
      if (at) memcpy(to, at, head_dim * sizeof(bfloat16));
      row[k] = to;
    }
  }
};

// Transposes keys by pairs of numbers: register p has numbers 2 p and 2 p + 1 of all 16 keys. Four rows that are four
// apart share a register, 16 bytes of each, which are then permuted within registers.
inline void transpose_keys(const BlockRows& rows, int64_t width, __m512i* pairs) {
  for (int64_t i = 0; i < width; i += 8) {
    __m512i four[4];
    for (int r = 0; r < 4; r++) {
      const auto part = [&](int lane) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows.row[4 * lane + r] + i)); };
      four[r] = _mm512_zextsi128_si512(part(0));
      four[r] = _mm512_maskz_inserti32x4(0xffff, four[r], part(1), 1);
      four[r] = _mm512_maskz_inserti32x4(0xffff, four[r], part(2), 2);
      four[r] = _mm512_maskz_inserti32x4(0xffff, four[r], part(3), 3);
    }
    const __m512i a = _mm512_maskz_unpacklo_epi32(0xffff, four[0], four[1]);
    const __m512i b = _mm512_maskz_unpackhi_epi32(0xffff, four[0], four[1]);
    const __m512i c = _mm512_maskz_unpacklo_epi32(0xffff, four[2], four[3]);
    const __m512i d = _mm512_maskz_unpackhi_epi32(0xffff, four[2], four[3]);
    __m512i* const to = pairs + i / 2;
    to[0] = _mm512_maskz_unpacklo_epi64(0xff, a, c), to[1] = _mm512_maskz_unpackhi_epi64(0xff, a, c);
    to[2] = _mm512_maskz_unpacklo_epi64(0xff, b, d), to[3] = _mm512_maskz_unpackhi_epi64(0xff, b, d);
  }
}

// The scores of Q queries for 16 keys. Even and odd numbers have separate sums, so that additions wait less for each
// other.
template <int Q>
inline void score_lanes(const float (*q)[MAX_HEAD], const __m512i* pairs, int64_t width, float* scores, int64_t stride) {
  Floats sums[Q][2] = {};
  for (int64_t p = 0; p < width / 2; p++) {
    const Ints pair = (Ints)pairs[p];
    const Floats numbers[2] = {floats(pair << 16), floats(pair & int32_t(0xffff0000))};
    for (int odd = 0; odd < 2; odd++)
      for (int r = 0; r < Q; r++) sums[r][odd] = fma(all(q[r][2 * p + odd]), numbers[odd], sums[r][odd]);
  }
  for (int r = 0; r < Q; r++) store(scores + r * stride, sums[r][0] + sums[r][1]);
}

// Keys in pairs of bfloat16, transposed.
struct TransposedKeys {
  static constexpr int64_t STEP = PAIRED;
  alignas(64) __m512i pairs[PAIR_SPACE];  // of values too, in PairBlocks
  BlockRows rows;

  void load_keys(const bfloat16* keys, const Path& path, int64_t first, int64_t end, int64_t head_dim, int64_t width) {
    rows.find(keys, path, first, end, head_dim, width);
    transpose_keys(rows, width, pairs);
  }
};

// Values as in FloatBlocks; keys transposed.
struct LaneBlocks : FloatBlocks<bfloat16>, TransposedKeys {
  using TransposedKeys::STEP, TransposedKeys::load_keys;
  static constexpr int MOST_SCORED = 6;

  template <int Q>
  void score(const float (*q)[MAX_HEAD], int64_t width, float* scores, int64_t stride) const {
    score_lanes<Q>(q, pairs, width, scores, stride);
  }
};

}  // namespace forerun
#endif
