// The division of a pass among threads. It never changes a result.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace forerun {

constexpr int64_t PIECES = 4;  // of a thread's share

struct alignas(64) Taken {  // in a cache line of its own
  std::atomic<int64_t> pieces{0};
};

// The pieces that were taken of each thread's share: one set of counters for every second piece of work.
using Counters = std::vector<Taken>;

// One thread's part of the work between two barriers. Every thread has a share. With counters it takes its share in
// pieces, and then pieces that are left of the other shares, because a core may be slower than another for a while.
class Division {
 public:
  const int thread, num_threads;

  Division(int thread, int num_threads, Counters& counters)
      : thread(thread), num_threads(num_threads), counters(counters.empty() ? nullptr : counters.data()) {}

  // Room for the counters of a pass; none if threads should keep to their shares.
  static Counters room(int64_t num_threads, bool in_pieces) { return Counters(in_pieces && num_threads > 1 ? 2 * num_threads : 0); }

  int64_t start(int64_t units, int owner) const { return units * owner / num_threads; }

  // Calls f(i) for the thread's share of so many rows or numbers, always the same ones.
  template <typename F>
  void each_of(int64_t count, F f) const {
    const int64_t end = start(count, thread + 1);
    for (int64_t i = start(count, thread); i < end; i++) f(i);
  }

  // Calls work(first, end) for parts of this many units, of which all threads have shares of equal size.
  template <typename F>
  void each(int64_t units, F work) {
    each_from([&](int owner) { return start(units, owner); }, work);
  }

  // As `each`, where the share of a thread are the units from start(thread) to start(thread + 1).
  template <typename Start, typename F>
  void each_from(Start start, F work) {
    if (!counters) return work(start(thread), start(thread + 1));
    Taken* const taken = counters + turn * num_threads;
    turn = 1 - turn;
    counters[turn * num_threads + thread].pieces.store(0, std::memory_order_relaxed);  // nobody takes these before a barrier
    for (int i = 0; i < num_threads; i++) {
      const int owner = (thread + i) % num_threads;
      const int64_t first = start(owner), size = start(owner + 1) - first, num = std::min(size, PIECES);
      std::atomic<int64_t>& pieces = taken[owner].pieces;
      while (pieces.load(std::memory_order_relaxed) < num) {
        const int64_t piece = pieces.fetch_add(1, std::memory_order_relaxed);
        if (piece < num) work(first + size * piece / num, first + size * (piece + 1) / num);
      }
    }
  }

 private:
  Taken* const counters;
  int turn = 0;
};

}  // namespace forerun
