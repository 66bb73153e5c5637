// Row-wise operations: norm, rotation, activation. The result of a row does not depend on other rows.
#pragma once
#include <cmath>

#include "vectors.hpp"

namespace forerun {

// out = x / rms(x) * gain, in float32. Widths are padded with zeros; `size` is the true one.
__attribute__((noinline)) inline void norm_row(const float* x, const float* gain, float eps, int64_t size, float* out) {
  Floats squares[4] = {};
  for (int64_t i = 0; i < padded(size); i += WIDTH)
    for (int j = 0; j < 4; j++) squares[j] = fma(load(x + i + j * LANES), load(x + i + j * LANES), squares[j]);
  const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(size);
  const float factor = 1.0f / std::sqrt(mean + eps);
  for (int64_t i = 0; i < padded(size); i += LANES) store(out + i, load(x + i) * factor * load(gain + i));
}

struct Silu {
  FORERUN_INLINE Floats operator()(Floats gate, Floats up) const { return gate / (exponential(-gate) + 1.0f) * up; }
};

struct Gelu {  // x * Phi(x), Phi by a tanh, as models are trained with it (Hendrycks and Gimpel 1606.08415, section 2)
  FORERUN_INLINE Floats operator()(Floats gate, Floats up) const {
    const Floats inner = (gate * gate * gate * 0.044715f + gate) * 1.59576912160573f;  // 2 sqrt(2 / pi)
    return gate / (exponential(-inner) + 1.0f) * up;
  }
};

struct Bounded {  // clamped: gate at most the limit, up within the limit on both sides
  float alpha, limit;
  FORERUN_INLINE Floats operator()(Floats gate, Floats up) const {
    const Floats most = all(limit), least = all(-limit), g = choose(gate > most, most, gate);
    return g / (exponential(g * -alpha) + 1.0f) * (choose(up > most, most, choose(up < least, least, up)) + 1.0f);
  }
};

// The activation of gate and up, of `size` numbers each, zero-padded. If `up` is null, the MLP is not gated.
template <typename Activation>
__attribute__((noinline)) inline void activate_row(const float* gate, const float* up, int64_t size, float* out,
                                                   Activation activation) {
  const auto up_at = [&](int64_t i) { return up ? load(up + i) : all(1.0f); };
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) store(out + i, activation(load(gate + i), up_at(i)));
  float last[LANES] = {}, last_up[LANES] = {};
  memcpy(last, gate + i, (size - i) * sizeof(float));
  if (!up) store(last_up, all(1.0f));
  else memcpy(last_up, up + i, (size - i) * sizeof(float));
  for (; i < padded(size); i += LANES) {
    store(out + i, activation(load(last), load(last_up)));
    memset(last, 0, sizeof last), memset(last_up, 0, sizeof last_up);
  }
}

// Norms one head, or all heads as one vector: x / rms(x) * gain, in place.
inline void norm_head(float* x, int64_t size, const float* gain, float eps) {
  Floats sums{};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) sums = fma(load(x + i), load(x + i), sums);
  float squares = sum(sums);
  for (; i < size; i++) squares += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(squares / static_cast<float>(size) + eps);
  for (i = 0; i + LANES <= size; i += LANES) store(x + i, load(x + i) * factor * load(gain + i));
  for (; i < size; i++) x[i] = x[i] * factor * gain[i];
}

// One head: normed if it has gains, then rotated by halves, in place.
__attribute__((noinline)) inline void rotate_head(float* x, int64_t head_dim, const float* gain, float eps,
                                                  const float* cos, const float* sin) {
  const int64_t half = head_dim / 2;
  if (gain) norm_head(x, head_dim, gain, eps);
  int64_t i = 0;
  for (; i + LANES <= half; i += LANES) {
    const Floats first = load(x + i), second = load(x + i + half);
    store(x + i, first * load(cos + i) - second * load(sin + i));
    store(x + i + half, second * load(cos + i + half) + first * load(sin + i + half));
  }
  for (; i < half; i++) {
    const float first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i + half] + first * sin[i + half];
  }
}

}  // namespace forerun
