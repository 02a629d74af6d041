// A barrier, at which the threads of a parallel region wait for each other.
//
// A pass has seven of them in every layer. OpenMP's own barrier puts threads to sleep if it counts more threads in the
// program than there are processors, and counts those that have decoded once and now do nothing: with it a second
// Python thread decoded half as fast.

#pragma once

#ifdef __x86_64__
#include <immintrin.h>
#endif
#include <sched.h>

#include <atomic>

#include "threads.h"

namespace {

constexpr int PATIENCE = 2000;  // looks before the processor is yielded to others: some hundredths of a millisecond

class Barrier {
 public:
  // Every thread of the region calls it.
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
