// Threads of a parallel region wait for each other.
//
// A pass has seven such places in every layer, and OpenMP's own barrier puts threads to sleep where it counts
// more of them in the program than there are processors: a thread that does nothing but exist, since it has
// decoded once, is enough. With that barrier a second Python thread decoded half as fast (docs/architecture.md).

#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <sched.h>

#include <atomic>

#include "threads.h"

namespace {

constexpr int PATIENCE = 2000;  // looks until the processor is offered to others: some hundredths of a millisecond

class Barrier {
 public:
  // Called by all threads of the region that it is shared by.
  void wait() {
    const int threads = thread_count();
    const unsigned before = passed.load(std::memory_order_relaxed);
    if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived.store(0, std::memory_order_relaxed);
      passed.store(before + 1, std::memory_order_release);
      return;
    }
    for (int looks = 0; passed.load(std::memory_order_acquire) == before;)
      if (looks < PATIENCE) looks++, pause();
      else sched_yield();
  }

 private:
  static void pause() {
#ifdef __x86_64__
    _mm_pause();
#endif
  }

  alignas(64) std::atomic<int> arrived{0};
  alignas(64) std::atomic<unsigned> passed{0};
};

}  // namespace
