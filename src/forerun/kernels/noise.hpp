// The noise of sampling, as in `sampling/noise.py`; logarithms differ from torch's in their last bits.
#pragma once
#include "vectors.hpp"

namespace forerun {

constexpr uint32_t LOUD = 1 << 23;  // hashes below this have the largest noise;
constexpr float QUIET = 6.25f;      // the noise of all others is at most this

// One round of the hash within a key.
inline Words keyed_round(Words x, uint32_t key) {
  x = (x ^ (x >> 16)) * 0x7feb352du + key;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}

// The uniform bits of 16 ids under a key.
inline Words hashed(Ints ids, uint64_t key) {
  return keyed_round(keyed_round(words(ids), 0) ^ static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
}

inline uint64_t absorbed(uint64_t key, uint64_t word) {
  uint64_t x = (key ^ word) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The Gumbel noise of 16 hashes, to a few units in the last place; the uniform numbers are exact.
inline Floats gumbel(Words hash) {
  Floats minus = converted(bits(hash)) * -0x1p-32f;
  minus = minus - choose(minus > Floats{}, all(1.0f), Floats{}) - 0x1p-33f;
  minus = larger(minus, all(-(1.0f - 0x1p-24f)));
  const Floats rest = minus + 1.0f;  // the rounding error matters if w is tiny
  return -logarithm(-(logarithm(rest) + (minus - (rest - 1.0f)) / rest));
}

}  // namespace forerun
