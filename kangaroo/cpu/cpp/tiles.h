// Products of sixteen rows with sixteen tokens by a processor's matrix unit (AMX), in which sixteen tokens take hardly
// longer than one. Its order of sums differs from that of vectors, but is the same for any number of tokens. So a
// matrix is multiplied by tiles alone, or by vectors alone.

#pragma once

#include "numbers.h"

#if defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#endif

namespace {

// Memory that is fetched a few lines at a time, into the cache of a level (`close`: 3 is the first level).
struct Ahead {
  const char* at;
  i64 left, at_a_time;  // lines
  template <int close = 2> void fetch() {
    for (i64 i = 0; i < at_a_time && left > 0; i++, left--, at += 64) __builtin_prefetch(at, 0, close);
  }
};

#ifdef TILES

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Whether the system lets this process use tiles: a process has to ask.
bool tiles_allowed() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  static const bool allowed = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
  return allowed;
}

// The compiler does not know which memory the instructions for tiles read. What was written before this is there for
// them.
inline void all_written() { asm volatile("" ::: "memory"); }

// The sums, in tiles 0 to 3.
inline void zero_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// A thread may use tiles while this object lives.
struct TileUse {
  TileUse() {
    if (!tiles_allowed()) return;
    TileConfig config;
    std::fill(config.rows, config.rows + 8, 16);
    std::fill(config.row_bytes, config.row_bytes + 8, 64);
    all_written();
    _tile_loadconfig(&config);
  }
  ~TileUse() {
    if (tiles_allowed()) _tile_release();
  }
};

// Products of `blocks` (1 or 2) times sixteen rows of weights with `groups` (1 or 2) times sixteen tokens, over the
// numbers from `first` to `last` of both.
//   tokens: group after group, sixteen tokens of each side by side, a word being two numbers.
//   width: numbers of a row of weights, and of a token.
//   ahead: for each block, what is fetched meanwhile.
//   out: [blocks][groups][16 rows][16 tokens]; added to, unless `first` is 0.
template <int blocks, int groups>
void times_tiles(const Words* tokens, i64 first, i64 last, i64 width, const bf16* const* weights, Ahead* ahead,
                 Floats* out) {
  constexpr int close = groups > 1 ? 2 : 3;  // two groups fill the first-level cache
  const i64 stride = width * sizeof(bf16);
  const Words* more = tokens + width / 2;
  all_written();
  if (first) {
    _tile_loadd(0, out, 64);
    if (groups > 1) _tile_loadd(1, out + LANES, 64);
    if (blocks > 1) _tile_loadd(2, out + groups * LANES, 64);
    if (blocks > 1 && groups > 1) _tile_loadd(3, out + 3 * LANES, 64);
  } else {
    zero_sums();
  }
  for (i64 k = first; k < last; k += 32) {
    _tile_loadd(6, tokens + k / 2, 64);
    _tile_loadd(4, weights[0] + k, stride);
    _tile_dpbf16ps(0, 4, 6);
    if (groups > 1) {
      _tile_loadd(7, more + k / 2, 64);
      _tile_dpbf16ps(1, 4, 7);
    }
    ahead[0].fetch<close>();
    if (blocks > 1) {
      _tile_loadd(5, weights[1] + k, stride);
      _tile_dpbf16ps(2, 5, 6);
      if (groups > 1) _tile_dpbf16ps(3, 5, 7);
      ahead[1].fetch<close>();
    }
  }
  _tile_stored(0, out, 64);
  if (groups > 1) _tile_stored(1, out + LANES, 64);
  if (blocks > 1) _tile_stored(2, out + groups * LANES, 64);
  if (blocks > 1 && groups > 1) _tile_stored(3, out + 3 * LANES, 64);
}

// Products of 64 positions' keys with sixteen queries: out[n][i] for each position n and query i.
//   step: numbers from a key to the next; queries: side by side, a word being two numbers.
void scores_by_keys(const bf16* keys, i64 step, const Words* queries, i64 width, float* out) {
  const i64 stride = step * sizeof(bf16);
  all_written();
  zero_sums();
  for (i64 k = 0; k < width; k += 32) {
    _tile_loadd(7, queries + k / 2, 64);
    _tile_loadd(4, keys + k, stride);
    _tile_dpbf16ps(0, 4, 7);
    _tile_loadd(5, keys + 16 * step + k, stride);
    _tile_dpbf16ps(1, 5, 7);
    _tile_loadd(6, keys + 32 * step + k, stride);
    _tile_dpbf16ps(2, 6, 7);
    _tile_loadd(4, keys + 48 * step + k, stride);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, out, 64);
  _tile_stored(1, out + 256, 64);
  _tile_stored(2, out + 512, 64);
  _tile_stored(3, out + 768, 64);
}

// Sixteen rows of weights of 64 positions times the values at these positions: out[i][c].
//   weights: [16, 64]; paired: [32, width], a word holding the values of two positions.
void values_by_tiles(const bf16* weights, const std::uint32_t* paired, i64 width, float* out) {
  const i64 stride = width * sizeof(float);
  all_written();
  _tile_loadd(4, weights, 128);
  _tile_loadd(5, weights + 32, 128);
  for (i64 c = 0; c < width; c += 32) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(6, paired + c, stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, paired + c + 16, stride);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, paired + 16 * width + c, stride);
    _tile_dpbf16ps(0, 5, 6);
    _tile_loadd(7, paired + 16 * width + c + 16, stride);
    _tile_dpbf16ps(1, 5, 7);
    _tile_stored(0, out + c, stride);
    _tile_stored(1, out + c + 16, stride);
  }
}

template <class T> bool has_tiles() { return false; }
template <> bool has_tiles<bf16>() { return tiles_allowed(); }

#else

struct TileUse {
  ~TileUse() {}
};
template <class T> bool has_tiles() { return false; }

#endif

// Never called: other numbers, and other processors, have no tiles.
template <int, int, class T> void times_tiles(const Words*, i64, i64, i64, const T* const*, Ahead*, Floats*) {}
template <class T> void scores_by_keys(const T*, i64, const Words*, i64, float*) {}
template <class T> void values_by_tiles(const T*, const std::uint32_t*, i64, float*) {}

}  // namespace
