// Sixteen tokens side by side, as a matrix unit reads them: a word holds two consecutive numbers of a token.
//
// Products with sixteen rows of weights are sixteen numbers of sixteen tokens; a register holds one number of each
// token. Sums with the states, norms and activations are computed in this layout, and packed into words again, without
// a transposition. The order of sums is that for a token by itself (`rms_norm`).

#pragma once

#include "products.h"

namespace {

// The inverse of `side_by_side` in products.h: the tokens of a group one after another.
template <class T> void one_by_one(const Words* from, i64 group, const Matrix<T>& x, T* to) {
  const i64 count = std::min<i64>(LANES, x.rows - group * LANES);
  for (i64 k = 0; k < x.width / 2; k += LANES) {
    Words part[LANES];
    std::copy_n(from + k, LANES, part);
    transpose(part);
    for (i64 i = 0; i < count; i++) std::memcpy(to + (group * LANES + i) * x.width + 2 * k, &part[i], sizeof(Words));
  }
}

// `rms_norm` of sixteen tokens. The partial sums of a token, which lie side by side there, lie one after another here.
template <class T> void norm_side_by_side(const Words* x, const T* weight, i64 size, double eps, Words* out) {
  Floats squares[LANES] = {};
  for (i64 k = 0; k < size / 2; k += LANES / 2)
#pragma GCC unroll 8
    for (i64 i = 0; i < LANES / 2; i++) {
      Floats a = first_of(x[k + i]), b = second_of(x[k + i]);
      squares[2 * i] += a * a;
      squares[2 * i + 1] += b * b;
    }
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; i++) squares[i] += squares[i + half];
  Floats scale;
  for (int i = 0; i < LANES; i++) scale[i] = 1.0f / std::sqrt(squares[0][i] / float(size) + float(eps));
  for (i64 k = 0; k < size / 2; k++)
    out[k] = pair_of(widen(weight[2 * k]) * stored<T>(first_of(x[k]) * scale),
                    widen(weight[2 * k + 1]) * stored<T>(second_of(x[k]) * scale));
}

// x += the sums of sixteen rows, plus their `bias` if there is one.
template <class T> void add_side_by_side(const Floats* sums, const T* bias, Words* x) {
  auto added = [&](Floats before, int row) {
    Floats shift = bias ? Floats{} + widen(bias[row]) : Floats{};
    return before + stored<T>(sums[row] + shift);
  };
  for (int i = 0; i < LANES / 2; i++)
    x[i] = pair_of(added(first_of(x[i]), 2 * i), added(second_of(x[i]), 2 * i + 1));
}

// The gated activation, SwiGLU.
template <class T> Floats gated(Floats gate, Floats up) {
  return by_registers([](Register gate, Register up) {
    const Register g = stored_few<T>(gate), silu = stored_few<T>(g / (1.0f + exponential(-g)));
    return silu * stored_few<T>(up);
  }, gate, up);
}

template <class T> void activate_side_by_side(const Floats* gates, const Floats* ups, Words* to) {
  for (int i = 0; i < LANES / 2; i++)
    to[i] = pair_of(gated<T>(gates[2 * i], ups[2 * i]), gated<T>(gates[2 * i + 1], ups[2 * i + 1]));
}

// As `products`, by tiles: products of all tokens with one or two blocks.
//   store(i, m, sums, before): sums of block i with the tokens from m on, [16 rows, 16 tokens], and those of the block
//   before it or null.
template <class T, class BlockOf, class Store>
void products_side_by_side(const Input<T>& in, const Item& item, BlockOf block_of, const char* after, Room& room,
                           Store store) {
  const i64 rows = in.rows, i = item.first, count = item.last - i;
  room.hold(2 * rows * LANES, 0);
  Block block[2] = {block_of(i), block_of(i + count - 1)};
  for (i64 b = 0; b < count; b++) block[b].next = start_of<T>(i + count + b, item.end, block_of, after);
  (count == 2 ? sum_tiles<T, 2> : sum_tiles<T, 1>)(in, block, room.sums.data());
  for (i64 m = 0; m < rows; m += LANES) {
    Floats* before = nullptr;
    for (i64 b = 0; b < count; b++) {
      Floats* sums = room.sums.data() + sums_at(count, m, rows, b);
      store(i + b, m, sums, before);
      before = sums;
    }
  }
}

}  // namespace
