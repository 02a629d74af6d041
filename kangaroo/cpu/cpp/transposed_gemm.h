// Products of many tokens with rows of bfloat16, if a register holds sixteen numbers and there is no matrix unit.
//
// For a few tokens a register holds sixteen pairs of one row, and the sixteen places of each sum are added up at the
// end (`sums` in vectors.h). For many tokens that would take much of the time. Here the rows are transposed ("turned")
// first, so a register holds one pair of sixteen rows, and nothing is added within a register. Pairs that would share
// a place are multiplied one after the other, then the places are added in the order of `sums`: the bits are the same.

#pragma once

#include "numbers.h"
#include "tiles.h"

namespace {

#if defined(__AVX512F__) && !defined(__AMX_BF16__)
constexpr bool TURNS = true;
#else
constexpr bool TURNS = false;
#endif

// What is multiplied at a time: pairs, or first the one number of each pair and then the other, as in vectors.h.
#ifdef __AVX512BF16__
using Numbers = Words;
constexpr int PARTS = 1;
inline Numbers part_of(Words pairs, int) { return pairs; }
inline __attribute__((always_inline)) Floats dot(Floats sum, Numbers a, Numbers b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
#else
using Numbers = Floats;
constexpr int PARTS = 2;
inline Numbers part_of(Words pairs, int part) { return part ? second_of(pairs) : first_of(pairs); }
inline __attribute__((always_inline)) Floats dot(Floats sum, Numbers a, Numbers b) { return sum + a * b; }
#endif

constexpr i64 MANY = 64;                             // tokens that are treated like a prompt
// From how many tokens on it pays to turn the rows; and for rows of WIDE_ROW numbers, which vectors multiply in parts.
constexpr i64 TURNED_FROM = PARTS == 1 ? MANY : 32, WIDE_TURNED_FROM = PARTS == 1 ? MANY : 64, WIDE_ROW = 2048;
constexpr int TURNED_GROUP = 8;                 // tokens that share one reading of two registers of rows
constexpr int OF_GROUP = PARTS * TURNED_GROUP;  // words for one pair of each token of a group

// Sixteen rows with their pairs side by side: to[place][step][row], pair `16 * step + place` of each.
template <class Row> void turn_rows(Row row, i64 width, Words* to) {
  const i64 steps = width / 32;
  for (i64 step = 0; step < steps; step++) {
    Words part[LANES];
    for (i64 i = 0; i < LANES; i++) std::memcpy(&part[i], row(i) + 32 * step, sizeof part[i]);
    transpose(part);
    for (i64 place = 0; place < LANES; place++) to[place * steps + step] = part[place];
  }
}

// Tokens likewise, in groups: to[place][group][step][part][token], padded with zeros. The parts of a pair are its two
// numbers, if registers do not multiply pairs. Only `tokens`, whole groups, are turned; `to` has room for all.
template <class Row> void turn_tokens(Row row, Part tokens, i64 groups, i64 width, std::uint32_t* to) {
  const i64 steps = width / 32;
  for (i64 first = tokens.first; first < tokens.last; first += TURNED_GROUP)
    for (i64 step = 0; step < steps; step++) {
      Words part[LANES] = {};
      for (i64 i = 0; i < std::min<i64>(TURNED_GROUP, tokens.last - first); i++)
        std::memcpy(&part[i], row(first + i) + 32 * step, sizeof part[i]);
      transpose(part);
      for (i64 place = 0; place < LANES; place++)
        for (int i = 0; i < PARTS; i++) {
          const Numbers numbers = part_of(part[place], i);
          const i64 group = place * groups + first / TURNED_GROUP;
          std::memcpy(to + (group * steps + step) * OF_GROUP + i * TURNED_GROUP, &numbers, TURNED_GROUP * sizeof *to);
        }
    }
}

// The places of a register in the order in which `sums` adds them up, and the sums of 1, 2, 4 and 8 places that wait
// for as many further places, of a group of tokens with `blocks` times sixteen rows.
constexpr int PLACES[LANES] = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
template <int blocks> using Waiting = Floats[4][TURNED_GROUP][blocks];

// Products of a group of tokens (of which there are `count` left) with the rows, at their n-th place.
//   out: for each block, [token][row]; set at the last place.
template <int blocks>
void times_turned(int n, const std::uint32_t* token, i64 count, const Numbers* row, i64 steps,
                  Waiting<blocks>& waiting, float* const* out) {
  Floats sum[TURNED_GROUP][blocks] = {};
  for (i64 step = 0; step < steps; step++)
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; part++, row++, token += TURNED_GROUP) {
      Numbers of_rows[blocks];
#pragma GCC unroll 2
      for (int b = 0; b < blocks; b++) of_rows[b] = row[b * steps * PARTS];
#pragma GCC unroll 8
      for (int i = 0; i < TURNED_GROUP; i++) {
        const Numbers of_token = (Numbers)(Words{} + token[i]);
#pragma GCC unroll 2
        for (int b = 0; b < blocks; b++) sum[i][b] = dot(sum[i][b], of_rows[b], of_token);
      }
    }
#pragma GCC unroll 8
  for (int i = 0; i < TURNED_GROUP; i++)
#pragma GCC unroll 2
    for (int b = 0; b < blocks; b++) {
      Floats all = sum[i][b];
      int level = 0;
      for (; n >> level & 1; level++) all = waiting[level][i][b] + all;
      if (n < LANES - 1) waiting[level][i][b] = all;
      else if (i < count) put(out[b] + i * LANES, all);
    }
}

}  // namespace
