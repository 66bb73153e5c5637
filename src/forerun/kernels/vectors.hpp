// Vectors of 16 floats, lane by lane the same arithmetic on every processor; the compiler cuts them to what it has.
//
// Nothing here adds lanes in an order that depends on how much else is computed, and products are only fused with
// additions where `fma` says so: a row's bits are its own. Compile with -ffp-contract=off.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace forerun {

constexpr int LANES = 16;
constexpr int WIDTH = 64;  // rows are padded with zeros to a multiple of this, so that no loop has a tail

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef Floats FloatsAnywhere __attribute__((aligned(4), may_alias));
typedef Ints IntsAnywhere __attribute__((aligned(4), may_alias));
typedef Halves HalvesAnywhere __attribute__((aligned(2), may_alias));
typedef uint16_t bfloat16;  // the upper half of a float

inline int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }
inline Floats load(const float* p) { return *reinterpret_cast<const FloatsAnywhere*>(p); }
inline void store(float* p, Floats x) { *reinterpret_cast<FloatsAnywhere*>(p) = x; }
inline Floats all(float x) { return x - Floats{}; }
inline Ints bits(Floats x) { return (Ints)x; }  // between vectors a cast keeps the bits
inline Floats floats(Ints x) { return (Floats)x; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

inline bool any(Ints x) {  // whether any lane is not 0
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)x, (__m512i)x);
#else
  int64_t words[8], found = 0;
  memcpy(words, &x, 64);
  for (int64_t word : words) found |= word;
  return found;
#endif
}

inline Floats fma(Floats a, Floats b, Floats c) {  // a * b + c, rounded once where the processor can
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 x[2], y[2], z[2];
  memcpy(x, &a, 64), memcpy(y, &b, 64), memcpy(z, &c, 64);
  for (int i = 0; i < 2; i++) z[i] = _mm256_fmadd_ps(x[i], y[i], z[i]);
  memcpy(&c, z, 64);
  return c;
#else
  return a * b + c;
#endif
}

#if defined(__clang__)
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

// The sums of 16 vectors' lanes, in their order: every vector is added up in the same way. Halves of two vectors are
// added at a time: one that takes lanes where they are, which is cheap, and one that takes what is left across.
inline Floats sums(Floats v[16]) {
  for (int i = 0; i < 8; i++)
    v[i] = FORERUN_SHUFFLE(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31) +
           FORERUN_SHUFFLE(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23);
  for (int i = 0; i < 4; i++)
    v[i] = FORERUN_SHUFFLE(v[i], v[i + 4], 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31) +
           FORERUN_SHUFFLE(v[i], v[i + 4], 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27);
  for (int i = 0; i < 2; i++)
    v[i] = FORERUN_SHUFFLE(v[i], v[i + 2], 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31) +
           FORERUN_SHUFFLE(v[i], v[i + 2], 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29);
  return FORERUN_SHUFFLE(v[0], v[1], 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31) +
         FORERUN_SHUFFLE(v[0], v[1], 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30);
}

inline float sum(Floats x) {
  float s[LANES];
  store(s, x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) s[i] += s[i + half];
  return s[0];
}

inline float largest(Floats x) {
  float s[LANES], top;
  store(s, x);
  top = s[0];
  for (int i = 1; i < LANES; i++) top = s[i] > top ? s[i] : top;
  return top;
}

// e^x to about one unit in the last place; below -87 it is 0. Polynomial of the Cephes library (S. Moshier), expf.
inline Floats exponential(Floats x) {
  const Floats lowest = all(-87.0f), highest = all(88.0f);
  Floats y = x < lowest ? lowest : (x > highest ? highest : x);
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Floats n = (y * 1.44269504088896341f + shift) - shift;
  y = fma(n, all(-0.693359375f), y);
  y = fma(n, all(2.12194440e-4f), y);
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, y, all(c));
  p = fma(p, y * y, y + 1.0f);
  const Floats power = floats(bits(n + shift) << 23);  // the low bits of n + shift are n itself
  const Floats result = floats(bits(p) + bits(power));
  return x < lowest ? Floats{} : (x != x ? x : result);
}

// The logarithm of normal numbers above 0, to about one unit in the last place. Polynomial of Cephes, logf.
inline Floats logarithm(Floats x) {
  const Ints raw = bits(x) - 0x3f3504f3;  // what lies between two powers of 2 is cut at the square root of a half
  const Floats power = __builtin_convertvector(raw >> 23, Floats);
  const Floats y = floats((raw & 0x007fffff) + 0x3f3504f3) - 1.0f, z = y * y;
  Floats p = all(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, y, all(c));
  p = fma(power, all(-2.12194440e-4f), p * y * z) - z * 0.5f;
  return fma(power, all(0.693359375f), y + p);
}

inline Floats widened(const bfloat16* p) {
  Halves h = *reinterpret_cast<const HalvesAnywhere*>(p);
  Ints w;
  w = __builtin_convertvector(h, Ints);
  return floats(w << 16);
}
inline Floats widened(const float* p) { return load(p); }

inline void narrow(bfloat16* p, Floats x) {  // to the nearest, ties to even
  const Ints b = bits(x), rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
  const Ints kept = x == x ? rounded : (b >> 16) | 0x40;
  *reinterpret_cast<HalvesAnywhere*>(p) = __builtin_convertvector(kept, Halves);
}
inline void narrow(float* p, Floats x) { store(p, x); }

}  // namespace forerun
