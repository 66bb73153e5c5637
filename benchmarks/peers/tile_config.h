// Included before every C++ file of llama.cpp. GCC 12's _tile_loadconfig tells the compiler that it reads 8 bytes of
// the 64 it does read, so stores to the other 56 are dropped and the processor refuses what is left: a server with
// 8-bit or 4-bit weights dies at its first token on any processor with AMX. This makes all 64 count.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define _tile_loadconfig(config) \
    (__extension__({ __asm__ volatile("" : : "r"(config) : "memory"); _tile_loadconfig(config); }))
#endif
