// Blocks of weights that threads divide among themselves as they go (work stealing).
//
// Each thread begins with an equal share. When it is done, it takes blocks from the end of another's share: a core may
// be slower than the others by design, or because another user of the machine uses its memory. Which thread does what
// changes no result.

#pragma once

#include <atomic>
#include <vector>

#include "threads.h"

namespace {

struct Item {
  i64 first, last;  // blocks that are multiplied together
  i64 end;          // of the share from which this thread goes on
};

class Shares {
 public:
  explicit Shares(i64 threads) : left(threads) {}

  // How many blocks are taken together: two, which share a reading of the tokens, or one if there are few.
  i64 at_a_time(i64 blocks) const { return blocks >= 4 * i64(left.size()) ? 2 : 1; }

  // The first block of this thread's own share.
  i64 own_first(i64 blocks, i64 together) const { return Part((blocks + together - 1) / together).first * together; }

  // Calls work(item) until all are taken. All threads call it for the same work, with a barrier before the next.
  template <class Work> void divide(i64 blocks, i64 together, Work work) {
    const i64 items = (blocks + together - 1) / together, threads = left.size(), own = thread_number();
    const std::uint64_t round = ++left[own].rounds;
    for (i64 other = 0; other < threads; other++) {
      const i64 owner = (own + other) % threads;
      const Part share(items, owner, threads);
      for (i64 item; (item = take(owner, round, share, other > 0)) >= 0;) {
        const i64 first = item * together, last = std::min(first + together, blocks);
        work(Item{first, last, other ? last : std::min(share.last * together, blocks)});
      }
    }
  }

 private:
  // What is left of an owner's share in a round. The first thread of a round finds the word of an earlier one there.
  struct alignas(64) Left {
    std::atomic<std::uint64_t> word{0};  // round, first, last
    std::uint64_t rounds = 0;            // of this thread
  };
  static constexpr int BITS = 21;
  static constexpr std::uint64_t MASK = (1 << BITS) - 1;

  // The first item that is left, or the last one; below 0 if there is none.
  i64 take(i64 owner, std::uint64_t round, const Part& share, bool last_one) {
    std::uint64_t seen = left[owner].word.load(std::memory_order_relaxed), rest;
    i64 item;
    do {
      const bool begun = seen >> 2 * BITS == round;
      i64 first = begun ? seen >> BITS & MASK : share.first, last = begun ? seen & MASK : share.last;
      if (first >= last) return -1;
      item = last_one ? --last : first++;
      rest = round << 2 * BITS | std::uint64_t(first) << BITS | std::uint64_t(last);
    } while (!left[owner].word.compare_exchange_weak(seen, rest, std::memory_order_relaxed));
    return item;
  }

  std::vector<Left> left;
};

}  // namespace
