// All-gather of columns between the ranks of one machine, through shared memory.
//
// Each rank writes its columns into its own area and increments a counter; then it reads those of the others. An area
// has two halves, used alternately: before a rank writes a half again it has seen all others arrive at the exchange in
// between, so all of them have read it. A rank locks a byte of the file while it lives, so that the others notice its
// end.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "decoder.hpp"

#if defined(F_OFD_SETLK)
namespace forerun {

constexpr int64_t LINE = 64, SPINS = 4096;  // SPINS: polls before a waiting rank yields its core
constexpr auto SUSPICIOUS = std::chrono::milliseconds(50);  // of waiting, after which it checks that the other rank lives

struct SharedRanks {
  int64_t rank, world, half;  // floats in half of an area
  std::vector<int64_t> heads;  // the first column of each rank's heads, and the end of the last one's
  int file;
  char* memory;
  std::chrono::milliseconds patience;  // timeout for a rank that lives
  uint64_t number = 0;  // of exchanges
  bool lost = false;

  std::atomic<uint64_t>& arrived(int64_t r) const { return *reinterpret_cast<std::atomic<uint64_t>*>(memory + r * LINE); }
  float* area(int64_t r, uint64_t n) const {
    return reinterpret_cast<float*>(memory + world * LINE) + (2 * r + (n & 1)) * half;
  }
  static int64_t num_bytes(int64_t world, int64_t half) { return world * LINE + world * 2 * half * sizeof(float); }

  // The first of `columns` that a rank has, as in `Shard.columns` in shard.py.
  int64_t first(int64_t what, int64_t columns, int64_t r) const {
    if (what == HEADS) return heads[r];
    const int64_t unit = what == NEURONS ? 32 : 1;
    return columns / unit * r / world * unit;
  }

  bool lives(int64_t r) const {
    struct flock lock = {};
    lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = r, lock.l_len = 1;
    return fcntl(file, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
  }

  bool wait_for(int64_t r) {
    for (int64_t i = 0; i < SPINS; i++) {
      if (arrived(r).load(std::memory_order_acquire) >= number) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    const auto end = std::chrono::steady_clock::now() + patience;
    auto next = std::chrono::steady_clock::now() + SUSPICIOUS;
    while (arrived(r).load(std::memory_order_acquire) < number) {
      std::this_thread::yield();
      if (std::chrono::steady_clock::now() < next) continue;
      if ((next > end || !lives(r)) && arrived(r).load(std::memory_order_acquire) < number) return false;
      next += SUSPICIOUS;
    }
    return true;
  }

  void gather(int64_t what, float* rows, int64_t stride, int64_t columns, int64_t num_rows) {
    int64_t widest = 1;
    for (int64_t r = 0; r < world; r++) widest = std::max(widest, first(what, columns, r + 1) - first(what, columns, r));
    const int64_t most = half / widest;
    for (int64_t from = 0; from < num_rows && !lost; from += most) {
      const int64_t end = std::min(num_rows, from + most), own = first(what, columns, rank + 1) - first(what, columns, rank);
      number++;
      for (int64_t i = from; i < end; i++)
        memcpy(area(rank, number) + (i - from) * own, rows + i * stride, own * sizeof(float));
      arrived(rank).store(number, std::memory_order_release);
      for (int64_t r = 0; r < world && !lost; r++) {
        lost = r != rank && !wait_for(r);
        const int64_t at = first(what, columns, r), count = first(what, columns, r + 1) - at;
        for (int64_t i = from; i < end && !lost; i++)
          memcpy(rows + i * stride + at, area(r, number) + (i - from) * count, count * sizeof(float));
      }
    }
  }
};

}  // namespace forerun

using namespace forerun;

extern "C" {

// A rank of those that share this file, which must be long enough and zeroed; null if mapping or locking fails.
SharedRanks* forerun_ranks(const char* path, int64_t rank, int64_t world, int64_t half, const int64_t* heads,
                           int64_t patience_ms) {
  const int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  struct flock lock = {};
  lock.l_type = F_WRLCK, lock.l_whence = SEEK_SET, lock.l_start = rank, lock.l_len = 1;
  void* const memory = mmap(nullptr, SharedRanks::num_bytes(world, half), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory != MAP_FAILED && fcntl(file, F_OFD_SETLK, &lock) == 0)
    return new SharedRanks{rank, world, half, {heads, heads + world + 1}, file, static_cast<char*>(memory),
                           std::chrono::milliseconds(patience_ms)};
  close(file);
  return nullptr;
}

// Whether another rank has ended; then exchanges do nothing.
int64_t forerun_ranks_lost(const SharedRanks* ranks) { return ranks->lost; }

// Resets the state, after the other ranks have ended and before new ones start.
void forerun_ranks_reset(SharedRanks* ranks) {
  memset(ranks->memory, 0, ranks->world * LINE);
  ranks->number = 0, ranks->lost = false;
}

void forerun_ranks_gather(void* ranks, int64_t what, float* rows, int64_t stride, int64_t columns, int64_t num_rows) {
  static_cast<SharedRanks*>(ranks)->gather(what, rows, stride, columns, num_rows);
}

void forerun_free_ranks(SharedRanks* ranks) {
  munmap(ranks->memory, SharedRanks::num_bytes(ranks->world, ranks->half));
  close(ranks->file);
  delete ranks;
}
}
#endif
