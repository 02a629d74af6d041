// Products of sixteen rows of weights with sixteen tokens by a processor's matrix unit (AMX), where it has
// one: then sixteen tokens take hardly longer than one. Its sums are of another order than the vectors', but
// the same for any number of tokens, so a matrix is multiplied by one or the other throughout.

#pragma once

#include "numbers.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#define TILES 1
#endif

namespace {

#ifdef TILES

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Whether the system lets this process use tiles; it has to be asked.
bool tiles_allowed() {
  constexpr long REQUEST = 0x1023, TILE_DATA = 18;
  static const bool allowed = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
  return allowed;
}

// A thread uses tiles as long as this lives.
struct TileUse {
  TileUse() {
    if (!tiles_allowed()) return;
    TileConfig config;
    std::fill(config.rows, config.rows + 6, 16);
    std::fill(config.row_bytes, config.row_bytes + 6, 64);
    _tile_loadconfig(&config);
  }
  ~TileUse() {
    if (tiles_allowed()) _tile_release();
  }
};

// out[j][i] = row j of the weights . token i; meanwhile what lies at `next` is fetched, if anything.
//   tokens: sixteen side by side, a word being two numbers.
//   step: numbers from row to row of the weights.
void times_tiles(const Words* tokens, i64 width, const bf16* weights, i64 step, const char* next,
                 Floats* out) {
  const i64 stride = step * sizeof(bf16);
  auto fetch = [&] {
    if (!next) return;
    for (int i = 0; i < 16; i++, next += 64) __builtin_prefetch(next);
  };
  _tile_zero(0);
  _tile_zero(1);
  for (i64 k = 0; k < width; k += 64) {
    _tile_loadd(2, weights + k, stride);
    _tile_loadd(3, tokens + k / 2, 64);
    _tile_dpbf16ps(0, 2, 3);
    fetch();
    if (k + 32 == width) break;
    _tile_loadd(4, weights + k + 32, stride);
    _tile_loadd(5, tokens + k / 2 + 16, 64);
    _tile_dpbf16ps(1, 4, 5);
    fetch();
  }
  Floats odd[LANES];
  _tile_stored(0, out, 64);
  _tile_stored(1, odd, 64);
  for (int j = 0; j < LANES; j++) out[j] += odd[j];
}

template <class T> bool has_tiles() { return false; }
template <> bool has_tiles<bf16>() { return tiles_allowed(); }

#else

struct TileUse {
  ~TileUse() {}
};
template <class T> bool has_tiles() { return false; }
void times_tiles(const Words*, i64, const bf16*, i64, const char*, Floats*) {}

#endif

void times_tiles(const Words*, i64, const float*, i64, const char*, Floats*) {}  // has none

}  // namespace
