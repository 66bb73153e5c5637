// The attention of attention.hpp for bfloat16 caches on processors that multiply pairs of bfloat16.
//
// Keys are transposed, 16 at a time, so that each lane has the score of one key, summed along the head; values of two
// keys are interleaved. Queries and weights are rounded to bfloat16, as in torch's attention. Pairs of keys begin at
// even keys, and a key that a query sees without its neighbour is paired with a zero: so the bits of a query do not
// depend on other queries here either.
#pragma once
#include "attention.hpp"

#if defined(__AVX512BF16__)
namespace forerun {

constexpr int PAIRED = 32;  // numbers of a head in a register
constexpr int TOGETHER = 4;  // queries that share the keys and values in registers
constexpr int PAIR_SPACE = MAX_HEAD / 2;  // registers that 16 keys or values take, in pairs

// 16 rows of keys or values from the cache; rows from `end` on and numbers beyond a head's width are zeros.
struct BlockRows {
  const bfloat16* row[LANES];
  alignas(64) bfloat16 copy[LANES * MAX_HEAD];

  void find(const bfloat16* cache, const Path& path, int64_t first, int64_t end, int64_t head_dim, int64_t width) {
    fetch_keys(cache, path, first, end, head_dim);
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

// Adds the products of pairs with one pair, which is broadcast to all lanes.
inline __m512 add_pairs(__m512 sums, __m512i pairs, int32_t pair) {
  return _mm512_dpbf16_ps(sums, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(pair));
}

// The scores of Q queries for 16 keys. Even and odd pairs have separate sums, so that additions wait less for each
// other.
template <int Q>
inline void score_pairs(const bfloat16 (*q)[MAX_HEAD], const __m512i* pairs, int64_t width, float scale, float* scores,
                        int64_t stride) {
  __m512 sums[Q][2] = {};
  for (int64_t p = 0; p < width / 2; p += 2)
    for (int odd = 0; odd < 2; odd++)
      for (int r = 0; r < Q; r++)
        sums[r][odd] =
            add_pairs(sums[r][odd], pairs[p + odd], number_at<int32_t>(reinterpret_cast<const char*>(q[r] + 2 * (p + odd))));
  for (int r = 0; r < Q; r++) store(scores + r * stride, ((Floats)sums[r][0] + (Floats)sums[r][1]) * scale);
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

// As `attend`. The weights of a query overwrite its scores, two bytes for four.
inline void attend_pairs(const std::vector<Query>& queries, const Path& path, const bfloat16* keys, const bfloat16* values,
                         int64_t head_dim, int64_t window, float scale, float cap, std::vector<float>& scores) {
  const int64_t width = (head_dim + PAIRED - 1) / PAIRED * PAIRED;
  const int64_t count = static_cast<int64_t>(queries.size());
  const auto seen_from = [&](const Query& q) { return window && q.position >= window ? q.position + 1 - window : 0; };
  const int64_t first = seen_from(queries.front()) / LANES * LANES, end = queries.back().position + 1;
  const int64_t stride = (end - first + LANES - 1) / LANES * LANES;
  alignas(64) bfloat16 q[CHUNK_QUERIES][MAX_HEAD];
  alignas(64) float sums[CHUNK_QUERIES][MAX_HEAD];
  alignas(64) __m512i pairs[PAIR_SPACE];
  float totals[CHUNK_QUERIES];
  BlockRows rows;
  scores.resize(count * stride);
  bfloat16* const weights = reinterpret_cast<bfloat16*>(scores.data());
  for (int64_t i = 0; i < count; i++) {
    memset(q[i], 0, width * sizeof(bfloat16)), memset(sums[i], 0, width * sizeof(float));
    put(q[i], queries[i].q, head_dim);
  }
  for (int64_t key = first; key < end; key += LANES) {
    rows.find(keys, path, key, end, head_dim, width);
    transpose_keys(rows, width, pairs);
    for (int64_t i = 0, some; i < count; i += some) {  // scores of keys that a query does not see are not used
      some = std::min<int64_t>(TOGETHER, count - i);
      if (key > queries[i + some - 1].position || key + LANES <= seen_from(queries[i])) continue;
      float* const to = &scores[i * stride + key - first];
      if (some == 4) score_pairs<4>(q + i, pairs, width, scale, to, stride);
      else if (some == 3) score_pairs<3>(q + i, pairs, width, scale, to, stride);
      else if (some == 2) score_pairs<2>(q + i, pairs, width, scale, to, stride);
      else score_pairs<1>(q + i, pairs, width, scale, to, stride);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    const Query& query = queries[i];
    const int64_t own = seen_from(query) / LANES * LANES;  // the first block that this query sees
    float* const own_scores = &scores[i * stride + own - first];
    totals[i] = weigh(own_scores, own, seen_from(query), query.position, query.sink, cap);
    for (int64_t k = 0; k < query.position + 1 - own; k += LANES)
      narrow(weights + 2 * i * stride + own - first + k, load(own_scores + k));
  }
  for (int64_t key = first; key < end; key += LANES) {
    rows.find(values, path, key, end, head_dim, width);
    for (int k = 0; k < LANES; k += 2)
      for (int64_t i = 0; i < width; i += PAIRED)
        join(rows.row[k] + i, rows.row[k + 1] + i, pairs + (k / 2 * width + i) / LANES);
    for (int64_t i = 0, same; i < count; i += same) {
      const Query& query = queries[i];
      for (same = 1; same < TOGETHER && i + same < count && queries[i + same].position == query.position;) same++;
      if (key > query.position || key + LANES <= seen_from(query)) continue;
      const int from = std::max<int64_t>(0, seen_from(query) - key);
      const int to = std::min<int64_t>(LANES, query.position + 1 - key);
      const bfloat16* const own = weights + 2 * i * stride + key - first;
      if (same == 4) weigh_pairs<4>(sums + i, own, 2 * stride, pairs, rows, from, to, width);
      else if (same == 3) weigh_pairs<3>(sums + i, own, 2 * stride, pairs, rows, from, to, width);
      else if (same == 2) weigh_pairs<2>(sums + i, own, 2 * stride, pairs, rows, from, to, width);
      else weigh_pairs<1>(sums + i, own, 2 * stride, pairs, rows, from, to, width);
    }
  }
  for (int64_t i = 0; i < count; i++) {
    part_again(sums[i], width);
    for (int64_t d = 0; d < head_dim; d++) queries[i].out[d] = sums[i][d] / totals[i];
  }
}

}  // namespace forerun
#endif
