// Vectors of 16 numbers in the processor's registers, with the same arithmetic in every lane on every processor.
//
// The order in which lanes are summed never depends on what else is computed, and multiplications are fused with
// additions only in `fma`: so the bits of a row do not depend on other rows. Compile with -ffp-contract=off.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace forerun {

// For functions of vectors that the compiler does not inline by itself: 16 numbers in several registers would be passed
// through memory, several times slower.
#define FORERUN_INLINE __attribute__((always_inline)) inline

constexpr int LANES = 16;
constexpr int WIDTH = 64;  // rows are zero-padded to a multiple of this, so that no loop has a tail

#if defined(__AVX512F__)
constexpr int REGISTER_BYTES = 64, NUM_REGISTERS = 32;
#elif defined(__AVX2__)
constexpr int REGISTER_BYTES = 32, NUM_REGISTERS = 16;
#else
constexpr int REGISTER_BYTES = 16, NUM_REGISTERS = 32;  // NEON, and a default for other processors
#endif
constexpr int PARTS = 4 * LANES / REGISTER_BYTES;  // registers that 16 numbers take

typedef float FloatRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef int32_t IntRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef uint32_t WordRegister __attribute__((vector_size(REGISTER_BYTES)));
typedef FloatRegister FloatRegisterAnywhere __attribute__((aligned(4), may_alias));
typedef IntRegister IntRegisterAnywhere __attribute__((aligned(4), may_alias));

inline FloatRegister register_at(const float* p) { return *reinterpret_cast<const FloatRegisterAnywhere*>(p); }

inline FloatRegister fma(FloatRegister a, FloatRegister b, FloatRegister c) {  // a * b + c, rounded once if supported
#if defined(__AVX512F__)
  return (FloatRegister)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (FloatRegister)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_FEATURE_FMA)
  return (FloatRegister)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline FloatRegister fused(FloatRegister a, FloatRegister b, FloatRegister c) {  // a * b + c, rounded once everywhere
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return fma(a, b, c);
#else
  for (int i = 0; i < REGISTER_BYTES / 4; i++) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
#endif
}

#if defined(__clang__)
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FORERUN_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, IntRegister{__VA_ARGS__})
#endif

// Within a register: lane j is a[j] + a[j + STEP] if bit STEP of j is 0, else b[j] + b[j - STEP].
template <int STEP, size_t... J>
inline FloatRegister folded(FloatRegister a, FloatRegister b, std::index_sequence<J...>) {
  return FORERUN_SHUFFLE(a, b, int(J & STEP ? J + sizeof...(J) : J)...) +
         FORERUN_SHUFFLE(a, b, int(J & STEP ? J - STEP + sizeof...(J) : J + STEP)...);
}

#if defined(__AVX512F__)

// 16 numbers: a register.
typedef FloatRegister Floats;
typedef IntRegister Ints;
typedef WordRegister Words;
typedef IntRegisterAnywhere IntsAnywhere;

inline FloatRegister& part_of(Floats& x, int) { return x; }
inline Floats load(const float* p) { return register_at(p); }
inline void store(float* p, Floats x) { *reinterpret_cast<FloatRegisterAnywhere*>(p) = x; }
inline Ints load(const int32_t* p) { return *reinterpret_cast<const IntRegisterAnywhere*>(p); }
inline void store(int32_t* p, Ints x) { *reinterpret_cast<IntRegisterAnywhere*>(p) = x; }
inline Floats all(float x) { return x - Floats{}; }
inline Ints bits(Floats x) { return (Ints)x; }  // between vectors a cast keeps the bits
inline Ints bits(Words x) { return (Ints)x; }
inline Floats floats(Ints x) { return (Floats)x; }
inline Words words(Ints x) { return (Words)x; }
inline Floats converted(Ints x) { return __builtin_convertvector(x, Floats); }
inline Floats choose(Ints which, Floats a, Floats b) { return which ? a : b; }  // lane by lane; of `which` all bits or none
inline Ints choose(Ints which, Ints a, Ints b) { return which ? a : b; }
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline bool any(Ints x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x); }  // whether any lane is not 0

template <int STEP>
inline Floats folded(Floats a, Floats b) {
  return folded<STEP>(a, b, std::make_index_sequence<LANES>());
}

#else

// 16 numbers in several registers. A vector type larger than a register would be kept in memory.
template <typename R>
struct Registers {
  R part[PARTS];
  auto operator[](int lane) const { return part[lane / (LANES / PARTS)][lane % (LANES / PARTS)]; }
};
typedef Registers<FloatRegister> Floats;
typedef Registers<IntRegister> Ints;
typedef Registers<WordRegister> Words;

#define FORERUN_EACH_PART(T, expression) \
  T result;                              \
  for (int i = 0; i < PARTS; i++) result.part[i] = expression; \
  return result;
#define FORERUN_OPERATOR(op)                                                     \
  template <typename R>                                                          \
  inline Registers<R> operator op(Registers<R> a, Registers<R> b) {              \
    FORERUN_EACH_PART(Registers<R>, a.part[i] op b.part[i])                      \
  }                                                                              \
  template <typename R>                                                          \
  inline Registers<R> operator op(Registers<R> a, decltype(R{}[0] + 0) b) {      \
    FORERUN_EACH_PART(Registers<R>, a.part[i] op b)                              \
  }                                                                              \
  template <typename R, typename B>                                              \
  inline Registers<R>& operator op##=(Registers<R>& a, B b) {                    \
    return a = a op b;                                                           \
  }
#define FORERUN_COMPARISON(op)                                                   \
  template <typename R>                                                          \
  inline Ints operator op(Registers<R> a, Registers<R> b) {                      \
    FORERUN_EACH_PART(Ints, (IntRegister)(a.part[i] op b.part[i]))               \
  }
FORERUN_OPERATOR(+)
FORERUN_OPERATOR(-)
FORERUN_OPERATOR(*)
FORERUN_OPERATOR(/)
FORERUN_OPERATOR(&)
FORERUN_OPERATOR(|)
FORERUN_OPERATOR(^)
FORERUN_OPERATOR(<<)
FORERUN_OPERATOR(>>)
FORERUN_COMPARISON(<)
FORERUN_COMPARISON(>)
FORERUN_COMPARISON(>=)
FORERUN_COMPARISON(==)
FORERUN_COMPARISON(!=)

inline FloatRegister& part_of(Floats& x, int i) { return x.part[i]; }
inline Floats load(const float* p) { FORERUN_EACH_PART(Floats, register_at(p + i * (LANES / PARTS))) }
inline void store(float* p, Floats x) {
  for (int i = 0; i < PARTS; i++) *reinterpret_cast<FloatRegisterAnywhere*>(p + i * (LANES / PARTS)) = x.part[i];
}
inline Ints load(const int32_t* p) {
  FORERUN_EACH_PART(Ints, (*reinterpret_cast<const IntRegisterAnywhere*>(p + i * (LANES / PARTS))))
}
inline void store(int32_t* p, Ints x) {
  for (int i = 0; i < PARTS; i++) *reinterpret_cast<IntRegisterAnywhere*>(p + i * (LANES / PARTS)) = x.part[i];
}
inline Floats all(float x) { FORERUN_EACH_PART(Floats, x - FloatRegister{}) }
inline Floats operator-(Floats x) { FORERUN_EACH_PART(Floats, -x.part[i]) }
inline Ints bits(Floats x) { FORERUN_EACH_PART(Ints, (IntRegister)x.part[i]) }  // between vectors a cast keeps the bits
inline Ints bits(Words x) { FORERUN_EACH_PART(Ints, (IntRegister)x.part[i]) }
inline Floats floats(Ints x) { FORERUN_EACH_PART(Floats, (FloatRegister)x.part[i]) }
inline Words words(Ints x) { FORERUN_EACH_PART(Words, (WordRegister)x.part[i]) }
inline Floats converted(Ints x) { FORERUN_EACH_PART(Floats, __builtin_convertvector(x.part[i], FloatRegister)) }
inline Floats choose(Ints which, Floats a, Floats b) {  // lane by lane; of `which` all bits or none
  FORERUN_EACH_PART(Floats, (which.part[i] ? a.part[i] : b.part[i]))
}
inline Ints choose(Ints which, Ints a, Ints b) { FORERUN_EACH_PART(Ints, (which.part[i] ? a.part[i] : b.part[i])) }
inline Floats larger(Floats a, Floats b) { FORERUN_EACH_PART(Floats, (a.part[i] > b.part[i] ? a.part[i] : b.part[i])) }
inline Floats fma(Floats a, Floats b, Floats c) { FORERUN_EACH_PART(Floats, fma(a.part[i], b.part[i], c.part[i])) }

inline bool any(Ints x) {  // whether any lane is not 0
  IntRegister found = x.part[0];
  for (int i = 1; i < PARTS; i++) found |= x.part[i];
#if defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)found, (__m256i)found);
#else
  int64_t words[REGISTER_BYTES / 8], all = 0;
  memcpy(words, &found, sizeof words);
  for (int64_t word : words) all |= word;
  return all;
#endif
}

template <int STEP>
inline Floats folded(Floats a, Floats b) {
  constexpr int IN_PART = LANES / PARTS, BETWEEN = STEP / IN_PART;
  Floats result;
  for (int i = 0; i < PARTS; i++) {
    if constexpr (BETWEEN > 0) result.part[i] = i & BETWEEN ? b.part[i] + b.part[i - BETWEEN] : a.part[i] + a.part[i + BETWEEN];
    else result.part[i] = folded<STEP>(a.part[i], b.part[i], std::make_index_sequence<IN_PART>());
  }
  return result;
}

#endif

template <typename T>
inline T number_at(const char* p) {
  T number;
  memcpy(&number, p, sizeof number);
  return number;
}

// Prefetches a line into the L2 cache. In L1, lines fetched so early would displace current data; from L2 to L1 the
// processor prefetches by itself. Always inlined: GCC removes calls of functions that do nothing but prefetch.
FORERUN_INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

// Prefetches a line that is read soon into the L1 cache.
FORERUN_INLINE void fetch_now(const char* line) { __builtin_prefetch(line, 0, 3); }

// Calls `f` with `count`, from 1 to MOST, as a constant.
template <int MOST, typename F>
FORERUN_INLINE void with_constant(int64_t count, F f) {
  if constexpr (MOST > 1)
    if (count < MOST) return with_constant<MOST - 1>(count, f);
  f(std::integral_constant<int, MOST>());
}

inline int64_t padded(int64_t n) { return (n + WIDTH - 1) / WIDTH * WIDTH; }

inline Ints counted(int32_t first) {  // first, first + 1, ...
  int32_t lanes[LANES];
  for (int j = 0; j < LANES; j++) lanes[j] = first + j;
  return load(lanes);
}

// The lane sums of 16 vectors, in their order: every vector is summed in the same way, halves of two at a time.
inline Floats sums(Floats v[16]) {
  for (int i = 0; i < 8; i++) v[i] = folded<8>(v[i], v[i + 8]);
  for (int i = 0; i < 4; i++) v[i] = folded<4>(v[i], v[i + 4]);
  for (int i = 0; i < 2; i++) v[i] = folded<2>(v[i], v[i + 2]);
  return folded<1>(v[0], v[1]);
}

// Reduces all lanes to one, halves of the vector at a time; `join` combines two values.
template <typename Vector, typename Join>
FORERUN_INLINE auto reduced(Vector x, Join join) {
#if defined(__AVX512F__)
  x = join(x, FORERUN_SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  x = join(x, FORERUN_SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  x = join(x, FORERUN_SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  return join(x, FORERUN_SHUFFLE(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14))[0];
#else
  std::remove_cv_t<std::remove_reference_t<decltype(x[0])>> s[LANES];
  store(s, x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) s[i] = join(s[i], s[i + half]);
  return s[0];
#endif
}

FORERUN_INLINE float sum(Floats x) {
  return reduced(x, [](auto a, auto b) { return a + b; });
}
FORERUN_INLINE int32_t sum(Ints x) {
  return reduced(x, [](auto a, auto b) { return a + b; });
}
FORERUN_INLINE float largest(Floats x) {
  return reduced(x, [](auto a, auto b) { return b > a ? b : a; });
}

// e^x to about one unit in the last place; below -87 it is 0. Polynomial of the Cephes library (S. Moshier), expf.
FORERUN_INLINE Floats exponential(Floats x) {
  const Floats lowest = all(-87.0f), highest = all(88.0f);
  const Floats y0 = choose(x < lowest, lowest, choose(x > highest, highest, x));
  const Floats shift = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = (y0 * 1.44269504088896341f + shift) - shift;
  Floats y = fma(n, all(-0.693359375f), y0);
  y = fma(n, all(2.12194440e-4f), y);
  Floats p = all(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    p = fma(p, y, all(c));
  p = fma(p, y * y, y + 1.0f);
  const Floats power = floats(bits(n + shift) << 23);  // the low bits of n + shift are n itself
  const Floats result = floats(bits(p) + bits(power));
  return choose(x < lowest, Floats{}, choose(x != x, x, result));
}

// limit * tanh(x / limit), to about a unit in the last place of the limit.
FORERUN_INLINE Floats soft_capped(Floats x, float limit) {
  return all(limit) - all(2.0f * limit) / (exponential(x * (2.0f / limit)) + 1.0f);
}

// The logarithm of normal numbers above 0, to about one unit in the last place. Polynomial of Cephes, logf.
FORERUN_INLINE Floats logarithm(Floats x) {
  const Ints raw = bits(x) - 0x3f3504f3;  // splits each binade at the square root of a half
  const Floats power = converted(raw >> 23);
  const Floats y = floats((raw & 0x007fffff) + 0x3f3504f3) - 1.0f, z = y * y;
  Floats p = all(7.0376836292e-2f);
  for (float c : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                  2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f})
    p = fma(p, y, all(c));
  p = fma(power, all(-2.12194440e-4f), p * y * z) - z * 0.5f;
  return fma(power, all(0.693359375f), y + p);
}

}  // namespace forerun
