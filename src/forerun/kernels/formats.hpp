// Conversion of 16-bit numbers: widened to float32 in registers, and narrowed to the nearest, ties to even.
//
// bfloat16 is the upper half of a float32. float16 has 3 more fraction bits, and a range up to 65504: larger finite
// numbers become the largest finite one instead of infinite, since infinite keys give NaN scores. Infinities and NaN
// stay as they are.
#pragma once
#include "vectors.hpp"

namespace forerun {

typedef uint16_t Halves __attribute__((vector_size(REGISTER_BYTES / 2)));
typedef Halves HalvesAnywhere __attribute__((aligned(2), may_alias));
typedef uint16_t bfloat16;
struct float16 {
  uint16_t bits;
};

inline FloatRegister widened_register(const bfloat16* p) {
  const Halves h = *reinterpret_cast<const HalvesAnywhere*>(p);
#if defined(__AVX512F__)  // the compiler's own conversions take more instructions, or go through memory
  return (FloatRegister)((IntRegister)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h) << 16);
#elif defined(__AVX2__)
  return (FloatRegister)(IntRegister)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (FloatRegister)(__builtin_convertvector(h, IntRegister) << 16);
#endif
}

inline FloatRegister widened_register(const float16* p) {
  const Halves h = *reinterpret_cast<const HalvesAnywhere*>(p);
#if defined(__AVX512F__)
  return (FloatRegister)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);  // GCC warns of the form without a mask
#elif defined(__AVX2__) && defined(__F16C__)
  return (FloatRegister)_mm256_cvtph_ps((__m128i)h);
#elif defined(__ARM_NEON)
  return (FloatRegister)vcvt_f32_f16((float16x4_t)h);
#else  // as the fraction of a float32; a product corrects the exponent and makes subnormal numbers normal ones
  const IntRegister wide = __builtin_convertvector(h, IntRegister), size = wide & 0x7fff;
  const IntRegister number = (IntRegister)((FloatRegister)(size << 13) * 0x1p112f) | ((size >= 0x7c00) & 0x7f800000);
  return (FloatRegister)(number | (wide & 0x8000) << 16);
#endif
}

inline void narrow_register(void* p, IntRegister x) {  // keeps the lower halves
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i low = _mm256_and_si256((__m256i)x, _mm256_set1_epi32(0xffff));
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
#else
  *reinterpret_cast<HalvesAnywhere*>(p) = __builtin_convertvector(x, Halves);
#endif
}

inline void narrow_register(float16* p, FloatRegister x) {
#if defined(__AVX512F__)
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  *reinterpret_cast<HalvesAnywhere*>(p) = (Halves)_mm512_maskz_cvtps_ph(0xffff, (__m512)x, NEAREST);
#elif defined(__AVX2__) && defined(__F16C__)
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  *reinterpret_cast<HalvesAnywhere*>(p) = (Halves)_mm256_cvtps_ph((__m256)x, NEAREST);
#elif defined(__ARM_NEON)
  *reinterpret_cast<HalvesAnywhere*>(p) = (Halves)vcvt_f16_f32((float32x4_t)x);
#else
  const IntRegister size = (IntRegister)x & 0x7fffffff;
  const IntRegister normal = ((size + 0xfff + ((size >> 13) & 1)) >> 13) - (112 << 10);
  const IntRegister least = (IntRegister)((FloatRegister)size + 0.5f) - 0x3f000000;  // the sum has a step of 2^-24
  const IntRegister beyond = 0x7c00 | ((size > 0x7f800000) & 0x200);
  const IntRegister found = size < 0x38800000 ? least : size >= 0x7f800000 ? beyond : normal;
  narrow_register(static_cast<void*>(p), found | (((IntRegister)x >> 16) & 0x8000));
#endif
}

inline Floats widened(const float* p) { return load(p); }
inline void narrow(float* p, Floats x) { store(p, x); }

inline Ints rounded(Floats x) {  // to the nearest bfloat16, in the lower half
  const Ints b = bits(x), near = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  return choose(x == x, near, (b >> 16) | 0x40);
}

inline Floats bounded(Floats x) {  // clamps finite numbers to float16's range
  const Floats most = all(65504.0f), least = all(-65504.0f), none = x - x;  // 0 or NaN
  return choose(none == none, choose(x > most, most, choose(x < least, least, x)), x);
}

#if defined(__AVX512F__)
template <typename T>
inline Floats widened(const T* p) {
  return widened_register(p);
}
inline void narrow(bfloat16* p, Floats x) { narrow_register(p, rounded(x)); }
inline void narrow(float16* p, Floats x) { narrow_register(p, bounded(x)); }
#else
template <typename T>
inline Floats widened(const T* p) {
  FORERUN_EACH_PART(Floats, widened_register(p + i * (LANES / PARTS)))
}
inline void narrow(bfloat16* p, Floats x) {
  const Ints kept = rounded(x);
  for (int i = 0; i < PARTS; i++) narrow_register(p + i * (LANES / PARTS), kept.part[i]);
}
inline void narrow(float16* p, Floats x) {
  const Floats kept = bounded(x);
  for (int i = 0; i < PARTS; i++) narrow_register(p + i * (LANES / PARTS), kept.part[i]);
}
#endif

// Converts `size` numbers of a format to floats, and floats to numbers of a format.
template <typename T>
inline void get(float* to, const T* from, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(to + i, widened(from + i));
  T rest[LANES] = {};
  float wide[LANES];
  memcpy(rest, from + i, (size - i) * sizeof(T));
  store(wide, widened(rest));
  memcpy(to + i, wide, (size - i) * sizeof(float));
}

template <typename T>
inline void put(T* to, const float* from, int64_t size) {
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) narrow(to + i, load(from + i));
  float rest[LANES] = {};
  T narrowed[LANES];
  memcpy(rest, from + i, (size - i) * sizeof(float));
  narrow(narrowed, load(rest));
  memcpy(to + i, narrowed, (size - i) * sizeof(T));
}

}  // namespace forerun
