// The peak rate of products with AVX2, an upper bound for kernels with the same instructions: the loops have only the
// instructions that multiply and add registers, and neither load nor widen numbers.
#include <omp.h>

namespace {

constexpr long TURNS = 1'000'000;

// Each instruction sequence multiplies two input registers and adds to the i-th of twelve sums.
#define EACH(f) f(0) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9) f(10) f(11)
#define FLOATS(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n"
#define WORDS(i) "vpmaddwd %%ymm14, %%ymm15, %%ymm12\n vpaddd %%ymm12, %%ymm" #i ", %%ymm" #i "\n"
#define BYTES(i) "vpmaddubsw %%ymm14, %%ymm15, %%ymm12\n vpaddw %%ymm12, %%ymm" #i ", %%ymm" #i "\n"
#define LOOP(f)                                                                                                    \
  asm volatile("vxorps %%ymm14, %%ymm14, %%ymm14\n vxorps %%ymm15, %%ymm15, %%ymm15\n .p2align 5\n"                 \
               "1:\n" EACH(f) "dec %0\n jnz 1b\n"                                                                 \
               : "+r"(turns)::"ymm0", "ymm1", "ymm2", "ymm3", "ymm4", "ymm5", "ymm6", "ymm7", "ymm8", "ymm9", "ymm10", \
                 "ymm11", "ymm12", "ymm14", "ymm15", "cc")

}  // namespace

// Multiplies floats (0), int8 widened to words (1), or int8 and int4 (2), in 256 bits; returns the number of products.
extern "C" double multiply(int format, int num_threads) {
#pragma omp parallel num_threads(num_threads)
  {
    if (omp_get_thread_num() == 0) num_threads = omp_get_num_threads();  // may be fewer
    long turns = TURNS;
    if (format == 0) LOOP(FLOATS);
    else if (format == 1) LOOP(WORDS);
    else LOOP(BYTES);
  }
  return 12.0 * TURNS * num_threads * (8 << format);
}
