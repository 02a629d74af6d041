// Threads that share a piece of work: OpenMP's, or those of the standard library if the compiler has no OpenMP.
//
// A block and a semicolon follow PARALLEL or PARALLEL_FOR in both cases. Without OpenMP the block is that of a lambda,
// and its threads end with it: starting them takes some hundredths of a millisecond, but none is left when the process
// forks or ends. Which thread does what changes no result.

#pragma once

#ifdef _OPENMP
#include <omp.h>
#else
#include <thread>
#include <vector>
#endif

#include "numbers.h"

namespace {

#ifdef _OPENMP
i64 thread_number() { return omp_get_thread_num(); }
i64 thread_count() { return omp_get_num_threads(); }
#else
thread_local i64 own_number = 0, own_count = 1;
i64 thread_number() { return own_number; }
i64 thread_count() { return own_count; }
#endif

struct Part {  // what a thread does of `count` pieces of work
  i64 first, last;
  Part(i64 first, i64 last) : first(first), last(last) {}
  explicit Part(i64 count) : Part(count, thread_number(), thread_count()) {}
  Part(i64 count, i64 thread, i64 threads) : Part(count * thread / threads, count * (thread + 1) / threads) {}

  // The same for pieces of different costs: those whose middle lies in this thread's part of the total cost.
  template <class Cost> static Part by_cost(i64 count, Cost cost) {
    i64 all = 0, before = 0;
    for (i64 i = 0; i < count; i++) all += cost(i);
    Part mine(all), pieces(0, 0);
    for (i64 i = 0; i < count; i++) {
      const i64 own = cost(i), middle = before + own / 2;
      before += own;
      if (middle < mine.first) pieces.first = i + 1;
      if (middle < mine.last) pieces.last = i + 1;
    }
    return pieces;
  }
};

#ifdef _OPENMP

#define OMP(directive) _Pragma(#directive)
#define PARALLEL(threads) OMP(omp parallel num_threads(threads))
#define PARALLEL_FOR(threads, i, count) OMP(omp parallel for num_threads(threads)) for (i64 i = 0; i < (count); i++)
#define SHARED_FOR(i, count) OMP(omp for) for (i64 i = 0; i < (count); i++)  // within PARALLEL

#else

struct Team {
  i64 threads, count;  // `count` pieces of work
  template <class Work> void operator+(const Work& work) const {
    auto run = [&](i64 number) {
      own_number = number, own_count = threads;
      Part mine(count);
      for (i64 i = mine.first; i < mine.last; i++) work(i);
    };
    std::vector<std::thread> others;
    for (i64 number = 1; number < threads; number++) others.emplace_back(run, number);
    run(0);
    for (std::thread& other : others) other.join();
    own_count = 1;
  }
};

#define PARALLEL(threads) Team{threads, threads} + [&](i64)  // a piece for each thread
#define PARALLEL_FOR(threads, i, count) Team{threads, count} + [&](i64 i)
#define SHARED_FOR(i, count) for (i64 i = Part(count).first; i < Part(count).last; i++)

#endif

}  // namespace
