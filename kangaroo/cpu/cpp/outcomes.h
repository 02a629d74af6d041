// Training from kept distributions: a student's probabilities of a few tokens and of all others together, and the
// gradient of its logits. kangaroo/training/distill.py defines the results.
//
// Names: C rows of logits, K logits of each, J tokens of each, O = J + 1 outcomes.

#pragma once

#include "sampling.h"

namespace {

constexpr float LEAST = 1e-30f;

template <class T> struct Outcomes {
  i64 rows, logits, tokens, threads;
  const T* scores;             // [C, K]
  const i64* index;            // [C, J]
  const std::uint8_t* inside;  // [C, J]: whether the logits include a token
  float* log_q;                // [C, O]
  float *largest, *rest;       // [C]: the largest logit; the sum of exp(logit - largest) over all other tokens
  i64* best;                   // [C]: where the largest logit is

  bool has(i64 i) const { return inside[i] && std::uint64_t(index[i]) < std::uint64_t(logits); }

  // Sets all results of a row. `room` is memory for K numbers.
  void find(i64 row, float* room) const {
    const T* from = scores + row * logits;
    Floats most = Floats{} + NEVER;
    for (i64 k = 0; k < logits; k += LANES) {
      Floats part = get(from + k, logits - k);
      for (i64 j = logits - k; j < LANES; j++) part[j] = NEVER;
      put(room + k, part);
      most = larger(most, part);
    }
    largest[row] = fold(most, larger_few);
    i64 place = std::find(room, room + logits, largest[row]) - room;
    best[row] = std::min(place, logits - 1);  // a valid place even if all are NaN
    float *own = log_q + row * (tokens + 1), ours = 0;
    for (i64 j = 0; j < tokens; j++) {
      i64 i = row * tokens + j;
      own[j] = has(i) ? room[index[i]] - largest[row] : 0;
      ours += has(i) ? std::exp(own[j]) : 0;
    }
    for (i64 j = 0; j < tokens; j++)
      if (has(row * tokens + j)) room[index[row * tokens + j]] = NEVER;
    Floats others{};
    for (i64 k = 0; k < logits; k += LANES) others += exp16(get(room + k) - largest[row]);
    rest[row] = sum_of(others);
    own[tokens] = std::log(std::max(rest[row], LEAST));
    float total = std::log(ours + rest[row]);
    for (i64 j = 0; j <= tokens; j++) own[j] -= total;
  }

  // The gradient of a row's logits, by that of its outcomes.
  void back(i64 row, const float* gradients, T* to) const {
    const float *g = gradients + row * (tokens + 1), *own = log_q + row * (tokens + 1);
    float sum = g[tokens];
    for (i64 j = 0; j < tokens; j++) sum += has(row * tokens + j) ? g[j] : 0;
    float others = std::max(rest[row], LEAST);
    float total = others / std::exp(own[tokens]), scale = g[tokens] / others - sum / total;
    const T* from = scores + row * logits;
    for (i64 k = 0; k < logits; k += LANES)
      put(to + k, exp16(get(from + k, logits - k) - largest[row]) * scale, logits - k);
    for (i64 j = 0; j < tokens; j++) {
      i64 i = row * tokens + j;
      if (has(i)) put(to + index[i], Floats{} + (g[j] - sum * std::exp(own[j])), 1);
    }
  }
};

template <class T> void find_outcomes(const Outcomes<T>& o) {
  PARALLEL(o.threads) {
    std::vector<float> room(o.logits + LANES);
    SHARED_FOR(row, o.rows) o.find(row, room.data());
  };
}

template <class T> void outcomes_back(const Outcomes<T>& o, const float* gradients, T* to) {
  PARALLEL_FOR(o.threads, row, o.rows) { o.back(row, gradients, to + row * o.logits); };
}

}  // namespace
