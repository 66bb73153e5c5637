// How many products a machine can make with AVX2: loops of nothing but the instructions that kernels need for them, on
// registers alone, without reading or widening a number. No kernel of these instructions can be faster.
#include <immintrin.h>

namespace {

constexpr long TURNS = 1'000'000;

// Each takes two registers of inputs and twelve of sums.
#define EACH(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
#define FLOATS(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n"
#define WORDS(i) "vpmaddwd %%ymm14, %%ymm15, %%ymm12\n vpaddd %%ymm12, %%ymm" #i ", %%ymm" #i "\n"
#define BYTES(i) "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n vpaddw %%ymm12, %%ymm" #i ", %%ymm" #i "\n"
#define LOOP(f)                                                                                                     \
  for (long turn = 0; turn < TURNS; turn++)                                                                         \
    asm volatile(EACH(f)::: "ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", \
                 "ymm11", "ymm12")

}  // namespace

// Products of floats (0), of int8 widened to words (1) or of int8 and int4 (2), in 256 bits; returns how many it made.
extern "C" double multiply(int format, int num_threads) {
#pragma omp parallel num_threads(num_threads)
  {
    asm volatile("vxorps %%ymm14, %%ymm14, %%ymm14\n vxorps %%ymm15, %%ymm15, %%ymm15" ::: "ymm14", "ymm15");
    if (format == 0) LOOP(FLOATS);
    else if (format == 1) LOOP(WORDS);
    else LOOP(BYTES);
  }
  return 12.0 * TURNS * num_threads * (8 << format);
}
