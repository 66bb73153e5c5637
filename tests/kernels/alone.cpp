// Tests the kernels without Python, so that they can run on emulated processors. Products, attention and draws are
// compared with plain loops in double precision, and each row and query with its result when it is computed alone.
// Differences are printed, then for each part a hash of all result bits, which is the same on all processors with the
// same arithmetic.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <omp.h>
#include <thread>
#include <vector>

#include "attention_pairs.hpp"
#include "decoder.hpp"
#include "division.hpp"
#include "experts.hpp"
#include "laws.hpp"

using namespace forerun;

extern "C" {
const char* forerun_instructions();
Linear* forerun_linear(int64_t format, int64_t outputs, int64_t inputs, const void* weight, const float* scales,
                       const float* bias);
void forerun_free_linear(Linear* linear);
void forerun_choose(const RowLaw* laws, float slack, const float* logits, int64_t stride, int64_t num_ids,
                    int64_t count, const uint32_t* masks, const int64_t* places, int64_t* chosen, int64_t num_threads);
}

static int failures = 0;

static uint32_t next_word() {
  static uint64_t state = 1;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return state >> 33;
}
static float number() { return static_cast<int32_t>(next_word() % 20001) * 1e-4f - 1.0f; }
static float as_float(bfloat16 x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  memcpy(&result, &bits, 4);
  return result;
}
static bfloat16 as_bfloat16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}

static float as_float(float16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float beyond = fraction ? NAN : INFINITY, size = exponent ? std::ldexp(1024.0f + fraction, exponent - 25) : std::ldexp(fraction, -24);
  return std::copysign(exponent == 31 ? beyond : size, x.bits >> 15 ? -1.0f : 1.0f);
}
static float16 as_float16(float x) {
  const float size = std::abs(x);
  const int sign = std::signbit(x) << 15, exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  if (size != size || size == INFINITY) return {static_cast<uint16_t>(sign | (size == INFINITY ? 0x7c00 : 0x7e00))};
  if (size > 65504) return {static_cast<uint16_t>(sign | 0x7bff)};
  return {static_cast<uint16_t>(sign | (((exponent + 14) << 10) + static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)))))};
}

struct Hash {
  uint64_t value = 0xcbf29ce484222325u;
  void add(const void* data, size_t size) {
    for (size_t i = 0; i < size; i++) value = (value ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  }
};

static void expect(bool holds, const char* what, int64_t a, int64_t b) {
  if (!holds && failures++ < 20) printf("wrong: %s, %" PRId64 ", %" PRId64 "\n", what, a, b);
}

struct Weights {  // in a format, and as the numbers that they stand for
  std::vector<float> plain, scales, bias;
  std::vector<uint16_t> halves;
  std::vector<int8_t> bytes;

  Weights(Format format, int64_t outputs, int64_t inputs) {
    for (int64_t o = 0; o < outputs; o++) {
      scales.push_back(0.01f + 0.001f * o), bias.push_back(number());
      for (int64_t i = 0; i < inputs; i++) {
        const float x = number();
        halves.push_back(format == FLOAT16 ? as_float16(x).bits : as_bfloat16(x)), bytes.push_back(static_cast<int8_t>(next_word() % 255) - 127);
        const float half = format == FLOAT16 ? as_float(float16{halves.back()}) : as_float(halves.back());
        plain.push_back(format == FLOAT32 ? x : format == INT8 ? bytes.back() : half);
      }
    }
  }
  const void* data(Format format) const {
    if (format == FLOAT32) return plain.data();
    return format == INT8 ? bytes.data() : static_cast<const void*>(halves.data());
  }
};

// One output by a plain loop, and the size of its terms; 8-bit products are exact, so they are rounded as there.
static double product(const Weights& w, Format format, const float* x, int64_t inputs, int64_t o, double* size) {
  double sum = 0;
  *size = 1e-20 + std::abs(w.bias[o]);
  float top = 0;
  for (int64_t i = 0; i < inputs; i++) top = std::max(top, std::abs(x[i]));
  const float scale = std::max(top / 127.0f, 1.17549435e-38f);
  for (int64_t i = 0; i < inputs; i++) {
    const float input = format == INT8 ? std::nearbyint(x[i] * (1.0f / scale)) : format == BFLOAT16 ? as_float(as_bfloat16(x[i])) : x[i];
    sum += double{input} * w.plain[o * inputs + i];
    *size += std::abs(double{input} * w.plain[o * inputs + i]);
  }
  if (format != INT8) return sum + w.bias[o];
  *size = 0;
  return (static_cast<float>(sum) * w.scales[o]) * scale + w.bias[o];
}

static void check_products(Format format, const char* name) {
  Hash hash;
  for (auto [outputs, inputs] : {std::pair<int64_t, int64_t>{1, 1}, {48, 83}, {130, 1000}}) {
    const Weights w(format, outputs, inputs);
    Linear* const linear = forerun_linear(format, outputs, inputs, w.data(format), w.scales.data(), w.bias.data());
    const int64_t most = 40, width = linear->width;
    std::vector<float> x(most * inputs), together(most * width), alone(most * width);
    for (float& each : x) each = number();
    for (int64_t r = 0; r < most; r++) forerun_multiply(linear, &x[r * inputs], 1, nullptr, 0, &alone[r * width], 1);
    for (int64_t count = 1; count <= most; count++) {
      forerun_multiply(linear, x.data(), count, nullptr, 0, together.data(), 1 + count % 3);
      for (int64_t r = 0; r < count; r++)
        expect(!memcmp(&together[r * width], &alone[r * width], outputs * sizeof(float)), "a row in company", count, r);
    }
    for (int64_t r = 0; r < most; r++)
      for (int64_t o = 0; o < outputs; o++) {
        double size;
        const double exact = product(w, format, &x[r * inputs], inputs, o, &size);
        expect(std::abs(alone[r * width + o] - exact) <= 1e-5 * size, name, r, o);
      }
    for (int64_t r = 0; r < most; r++) hash.add(&alone[r * width], outputs * sizeof(float));
    forerun_free_linear(linear);
  }
  printf("%s %016" PRIx64 "\n", name, hash.value);
}

// Tests the attention function `attend_some`; `most` is the largest error of its results.
template <typename T, typename Attend>
static void check_heads(const char* name, Attend attend_some, double most, int64_t head, Hash& hash) {
  constexpr int64_t slots = 120, split = 37;
  std::vector<T> keys(slots * head), values(slots * head);
  std::vector<float> wide_keys(slots * head), wide_values(slots * head), scores;
  for (int64_t i = 0; i < slots * head; i++) {
    float k[LANES] = {number()}, v[LANES] = {number()};
    T narrowed[LANES];
    narrow(narrowed, load(k)), keys[i] = narrowed[0], store(k, widened(narrowed)), wide_keys[i] = k[0];
    narrow(narrowed, load(v)), values[i] = narrowed[0], store(v, widened(narrowed)), wide_values[i] = v[0];
  }
  std::vector<int64_t> listed(slots);  // keys from `split` on lie backwards from the end
  for (int64_t i = split; i < slots; i++) listed[i - split] = slots - 1 - (i - split);
  const Path path{0, split, listed.data()};
  for (int64_t window : {0, 50}) for (float cap : {0.0f, 2.0f}) {
    std::vector<float> q(6 * head), out(6 * head), alone(head);
    for (float& each : q) each = number() * 3;
    std::vector<Query> queries;
    const int64_t positions[] = {0, 15, 60, 60, 60, 99};
    const auto sink = [](int64_t i) { return i % 2 ? 0.5f * i : -INFINITY; };
    for (int64_t i = 0; i < 6; i++) queries.push_back({&q[i * head], &out[i * head], positions[i], sink(i)});
    attend_some(queries, path, keys.data(), values.data(), head, window, 0.158f, cap, scores);
    for (int64_t i = 0; i < 6; i++) {
      const std::vector<Query> query = {{&q[i * head], alone.data(), positions[i], sink(i)}};
      attend_some(query, path, keys.data(), values.data(), head, window, 0.158f, cap, scores);
      expect(!memcmp(alone.data(), &out[i * head], head * sizeof(float)), "a query in company", i, window);
      std::vector<double> weights(positions[i] + 1), sums(head);
      double total = std::exp(double{sink(i)});
      for (int64_t k = window ? std::max<int64_t>(0, positions[i] + 1 - window) : 0; k <= positions[i]; k++) {
        double dot = 0;
        for (int64_t d = 0; d < head; d++) dot += 0.158 * q[i * head + d] * wide_keys[path.slot(k) * head + d];
        if (cap) dot = cap * std::tanh(dot / cap);
        total += std::exp(dot);
        for (int64_t d = 0; d < head; d++) sums[d] += std::exp(dot) * wide_values[path.slot(k) * head + d];
      }
      for (int64_t d = 0; d < head; d++) expect(std::abs(out[i * head + d] - sums[d] / total) < most, name, i, d);
    }
    hash.add(out.data(), out.size() * sizeof(float));
    const std::vector<float> before = out;  // of a key that only the last query sees the value may be NaN
    const T kept = values[path.slot(61) * head];
    memset(&values[path.slot(61) * head], 0xff, sizeof(T));
    attend_some(queries, path, keys.data(), values.data(), head, window, 0.158f, cap, scores);
    expect(!memcmp(before.data(), out.data(), 5 * head * sizeof(float)) && out[5 * head] != out[5 * head], "a poisoned value", window, 0);
    values[path.slot(61) * head] = kept;
  }
}

// With heads that fill registers and heads that do not. The hash is not printed where other processors have other bits.
template <typename T, typename Attend>
static void check_attention(const char* name, Attend attend_some, double most, bool same_everywhere = true) {
  Hash hash;
  for (int64_t head : {40, 64}) check_heads<T>(name, attend_some, most, head, hash);
  if (same_everywhere) printf("%s %016" PRIx64 "\n", name, hash.value);
}

static void check_conversions() {  // every float16, its neighbours in float32, and the middle between it and the next
  Hash hash;
  const auto check = [&](float x) {
    float lanes[LANES] = {x};
    float16 narrowed[LANES];
    narrow(narrowed, load(lanes));
    const bool both = x != x && as_float(narrowed[0]) != as_float(narrowed[0]);  // NaN, whose bits are not specified
    int32_t bits;
    memcpy(&bits, &x, 4);
    expect(both || narrowed[0].bits == as_float16(x).bits, "narrowed to float16", bits, narrowed[0].bits);
    if (!both) hash.add(narrowed, 2);
  };
  for (int i = 0; i < 1 << 16; i++) {
    const float16 half[LANES] = {{static_cast<uint16_t>(i)}};
    float wide[LANES];
    store(wide, widened(half));
    const float x = as_float(half[0]), next = as_float(float16{static_cast<uint16_t>(i + 1)});
    expect(x != x ? wide[0] != wide[0] : !memcmp(wide, &x, 4), "widened from float16", i, 0);
    for (float each : {x, (x + next) / 2}) check(std::nextafter(each, -INFINITY)), check(each), check(std::nextafter(each, INFINITY));
  }
  for (float x : {65519.9f, 65520.0f, 65536.0f, 1e5f, 3e38f, INFINITY, NAN, 1e-8f, 1e-40f, 0.0f}) check(x), check(-x);
  printf("conversions %016" PRIx64 "\n", hash.value);
}

static void check_functions() {
  Hash hash;
  for (int64_t i = 0; i < 4000; i++) {
    float x[LANES], y[LANES], z[LANES];
    for (float& each : x) each = number() * 80;
    store(y, exponential(load(x)));
    for (int j = 0; j < LANES; j++) {
      expect(std::abs(y[j] / std::exp(double{x[j]}) - 1) < 4e-7, "exponential", i, j);
      x[j] = std::abs(x[j]) + 1e-6f;
    }
    store(z, logarithm(load(x)));
    for (int j = 0; j < LANES; j++) {
      const double exact = std::log(double{x[j]});
      expect(std::abs(z[j] - exact) < 3e-7 * std::max(1.0, std::abs(exact)), "logarithm", i, j);
    }
    hash.add(y, sizeof y), hash.add(z, sizeof z);
  }
  printf("functions %016" PRIx64 "\n", hash.value);
}

// Experts in the order of their logits, which have many equals, and weights against plain loops; then their groups.
static void check_routes() {
  Hash hash;
  const Weights w(FLOAT32, 24, 8);
  for (int64_t shared : {0, 1})
    for (int64_t normalised : {0, 1}) {
      const int64_t count = 23, active = 5, per_token = active + shared, num_tokens = 40;
      Linear* const router = forerun_linear(FLOAT32, count + shared, 8, w.plain.data(), nullptr, nullptr);
      const Experts e = {count, active, normalised, router, nullptr, 0, 0};
      Routes routes;
      routes.room(num_tokens * per_token);
      for (int64_t t = 0; t < num_tokens; t++) {
        float logits[24];
        for (float& each : logits) each = static_cast<int>(number() * 4);
        int64_t* const mlps = &routes.mlps[t * per_token];
        float* const weights = &routes.weights[t * per_token];
        route(e, logits, mlps, weights);
        std::vector<int64_t> order;
        for (int64_t i = 0; i < count; i++) order.push_back(i);
        std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return logits[a] > logits[b]; });
        double total = 0;
        for (int64_t i = 0; i < (normalised ? active : count); i++) total += std::exp(double{logits[order[i]]});
        for (int64_t i = 0; i < active; i++) {
          expect(mlps[i] == order[i], "an expert", t, i);
          expect(std::abs(weights[i] - std::exp(double{logits[order[i]]}) / total) < 1e-6, "its weight", t, i);
        }
        if (shared) expect(mlps[active] == count, "the MLP that all take", t, mlps[active]);
        hash.add(weights, per_token * sizeof(float));
      }
      routes.group(num_tokens, per_token, count + 1);
      int64_t next = 0;
      for (const Group& g : routes.groups) {
        expect(g.first == next && g.end > g.first, "a group", g.first, next);
        next = g.end;
      }
      expect(next == num_tokens * per_token, "all pairs", next, per_token);
      for (int64_t p = 0; p < next; p++) {
        const int64_t place = routes.places[p];
        expect(routes.tokens[place] == p / per_token, "a pair's token", p, place);
        for (const Group& g : routes.groups)
          if (place >= g.first && place < g.end) expect(g.mlp == routes.mlps[p], "a pair's group", p, g.mlp);
      }
      forerun_free_linear(router);
    }
  printf("routes %016" PRIx64 "\n", hash.value);
}

// A law with a temperature and no other transforms; the caller adds those.
static RowLaw plain_law(uint64_t key, float temperature) {
  RowLaw law = {};
  law.key = key, law.root = 4 + key, law.temperature = temperature;
  law.min_p = LOWEST, law.top_p = INFINITY, law.repetition = 1;
  return law;
}

// Compares greedy draws with plain loops, with biases, bans, masks, and penalties of tokens in the text and in a node's
// path. Of draws with filters only the hash is printed.
static void check_draws() {
  Hash hash;
  const int32_t fixed[] = {0, 3}, counted[] = {1, 2, 7}, times[] = {2, 0, 1};
  const float added[] = {-INFINITY, 1.5f};
  const int64_t path[] = {2, 9};
  for (int64_t count : {12, 15, 16, 17, 1000}) {
    std::vector<float> logits(3 * count);
    for (float& each : logits) each = static_cast<int>(number() * 8);  // many are equal; the first of these wins
    std::vector<RowLaw> laws;
    for (uint64_t key : {1, 2, 3}) {
      RowLaw law = plain_law(key, 0);
      law.fixed = fixed, law.added = added, law.num_fixed = 2;
      law.counted = counted, law.times = times, law.num_counted = 3;
      law.repetition = 1.25f, law.frequency = 0.5f, law.presence = 0.25f;
      laws.push_back(law);
    }
    const int64_t places[] = {0, 1, 2, 0, 2, 1, path[0], path[1], path[1]};  // rows, lengths of paths, paths
    int64_t chosen[3], masked[3];
    const int64_t words = (count + 31) / 32;
    std::vector<uint32_t> masks(3 * words);
    for (int64_t i = 0; i < 3; i++)
      for (int64_t j = 0; j < count; j++)
        if (j == 5 || (j / 16 % 3 && number() > 0)) masks[i * words + j / 32] |= uint32_t{1} << (j % 32);
    forerun_choose(laws.data(), 0, logits.data(), count, count, 3, nullptr, places, chosen, 1);
    forerun_choose(laws.data(), 0, logits.data(), count, count, 3, masks.data(), places, masked, 1);
    for (int64_t i = 0; i < 3; i++) {
      std::vector<float> shaped(logits.begin() + i * count, logits.begin() + (i + 1) * count);
      shaped[0] = -INFINITY, shaped[3] += 1.5f;
      std::vector<int> num_times(count), in_text(count);
      for (int j = 0; j < 3; j++) num_times[counted[j]] = times[j], in_text[counted[j]] = 1;
      const int64_t begin = i == 2 ? 2 : 0;
      for (int64_t j = begin; j < begin + places[3 + i]; j++) num_times[places[6 + j]]++, in_text[places[6 + j]] = 1;
      for (int64_t j = 0; j < count; j++) {
        if (in_text[j]) shaped[j] = shaped[j] > 0 ? shaped[j] / 1.25f : shaped[j] * 1.25f;
        if (num_times[j]) shaped[j] = shaped[j] - 0.5f * num_times[j] - 0.25f;
      }
      expect(chosen[i] == std::max_element(shaped.begin(), shaped.end()) - shaped.begin(), "greedy draw", count, i);
      for (int64_t j = 0; j < count; j++)
        if (!(masks[i * words + j / 32] >> (j % 32) & 1)) shaped[j] = -INFINITY;
      expect(masked[i] == std::max_element(shaped.begin(), shaped.end()) - shaped.begin(), "masked draw", count, i);
    }
    for (RowLaw& law : laws) law.temperature = 0.7f, law.top_p = 0.9f, law.top_k = law.key == 2 ? 5 : 0;
    laws[2].min_p = -2.0f;
    for (float& each : logits) each += number();
    for (const uint32_t* allowed : std::vector<const uint32_t*>{nullptr, masks.data()}) {
      forerun_choose(laws.data(), 1e-4f, logits.data(), count, count, 3, allowed, places, chosen, 2);
      hash.add(chosen, sizeof chosen);
    }
  }
  printf("draws %016" PRIx64 "\n", hash.value);
}

// Every unit of work is done once, in a hundred pieces of work one after the other; and while one thread is held up in its
// first piece, the others do all that is left.
static void check_division() {
  for (int num_threads = 1; num_threads <= 5; num_threads++)
    for (const bool in_pieces : {false, true}) {
      std::vector<std::atomic<int>> done(100 * 50);
      Counters counters = Division::room(num_threads, in_pieces);
#pragma omp parallel num_threads(num_threads)
      {
        Division division(omp_get_thread_num(), omp_get_num_threads(), counters);
        for (int round = 0; round < 100; round++) {
          const int units = round % 50;
          division.each(units, [&](int64_t first, int64_t end) {
            for (int64_t i = first; i < end; i++) done[round * 50 + i]++;
          });
#pragma omp barrier
        }
      }
      for (int round = 0; round < 100; round++)
        for (int i = 0; i < 50; i++) expect(done[round * 50 + i] == (i < round % 50), "units done", num_threads, round);
    }
  std::atomic<int64_t> num_done = 0, most = 0;
  Counters counters = Division::room(2, true);
#pragma omp parallel num_threads(2)
  {
    Division division(omp_get_thread_num(), omp_get_num_threads(), counters);
    division.each(80, [&](int64_t first, int64_t end) {
      for (int i = 0; first == 0 && num_done < 80 - end && i < 1000; i++) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (first == 0) most = num_done.load();
      num_done += end - first;
    });
  }
  expect(num_done == 80 && most == 80 - 40 / PIECES, "units of a thread that is held up", most, num_done);
}

int main() {
  fprintf(stderr, "%s\n", forerun_instructions());
  check_products(FLOAT32, "float32");
  check_products(INT8, "int8");
  check_products(BFLOAT16, "bfloat16");
  check_products(FLOAT16, "float16");
  check_attention<float>("attention in float32", attend<FloatBlocks<float>, float>, 1e-4);
  check_attention<bfloat16>("attention in bfloat16", attend<FloatBlocks<bfloat16>, bfloat16>, 1e-4);
  check_attention<float16>("attention in float16", attend<FloatBlocks<float16>, float16>, 1e-4);
#if defined(__AVX512F__)
  check_attention<bfloat16>("attention with a key in each lane", attend<LaneBlocks, bfloat16>, 1e-4, false);
#endif
#if defined(__AVX512BF16__)
  check_attention<bfloat16>("attention in pairs of bfloat16", attend<PairBlocks, bfloat16>, 0.02, false);
#endif
  check_conversions();
  check_functions();
  check_routes();
  check_draws();
  check_division();
  return failures != 0;
}
