// The head, and the token that is chosen by its logits: the likeliest, or under noise that is a pure
// function of (seed, position, token), as kangaroo/sampling.py defines it.

#pragma once

#include "layers.h"

namespace {

template <class T> struct Head {
  const T *norm, *weight;  // without a norm where it is null
  i64 outputs;
  const i64* ids;  // the token of each output; null where they are all tokens, in order
  i64 token(i64 output) const { return ids ? ids[output] : output; }
};

// logits[m][n] = norm(x[m]) . weight[n]
template <class T>
void read_out(const Sizes& s, const Head<T>& head, const T* x, i64 tokens, float* logits) {
#pragma omp parallel num_threads(s.threads)
  {
    std::vector<T> normed(head.norm ? tokens * s.hidden : 0);
    std::vector<float> block(tokens * LANES);
    for (i64 m = 0; head.norm && m < tokens; m++)
      rms_norm(x + m * s.hidden, head.norm, s.hidden, s.eps, normed.data() + m * s.hidden);
    Matrix<T> in{head.norm ? normed.data() : x, tokens, s.hidden}, w{head.weight, head.outputs, s.hidden};
    Part mine(blocks(head.outputs));
    for (i64 i = mine.first; i < mine.last; i++) {
      i64 n = i * LANES;
      products(in, Block<T>{&w, n, w.row(n + LANES)}, block.data());
      for (i64 m = 0; m < tokens; m++)
        put(logits + m * head.outputs + n, get(&block[m * LANES]), head.outputs - n);
    }
  }
}

Words mix(Words x) {  // the 32-bit finaliser of MurmurHash3
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// What the noise of one position is drawn from.
Words noise_key(i64 seed, i64 position) {
  Words low = Words{} + std::uint32_t(seed), high = mix(Words{} + std::uint32_t(seed >> 32));
  return mix((Words{} + std::uint32_t(position) * 0x9e3779b1u) + mix(low ^ high));
}

Floats race16(Words tokens, Words key) {  // the logarithm of exponentially distributed noise
  Words bits = mix(mix(tokens * 0x85ebca77u + 0x27d4eb2fu) ^ key);
  Floats u = (__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-32f;
  const Floats largest = Floats{} + (1.0f - 0x1p-24f);
  u = u > largest ? largest : u;
  // -log1p(-u) by Kahan's correction of log(1 - u)
  Floats rest = 1.0f - u, lost = rest - 1.0f;
  Floats race = lost == 0.0f ? u : log16(rest) * (u / lost);
  return log16(race);
}

struct Choice {
  i64 token, runner_up;         // the best and the second best
  float top = 0, second = 0;    // probabilities of the two likeliest, before temperature and noise
};

// The first of the largest among [first, last).
i64 largest_of(const float* x, i64 first, i64 last) {
  Floats most = Floats{} + NEVER;
  for (i64 i = first; i < last; i += LANES) {
    Floats part = get(x + i, last - i);
    for (i64 j = last - i; j < LANES; j++) part[j] = NEVER;
    most = larger(part, most);
  }
  return std::find(x + first, x + last, fold(most, larger)) - x;
}

i64 second_largest_of(const float* x, i64 count, i64 largest) {
  i64 below = largest_of(x, 0, largest), above = largest_of(x, largest + 1, count);
  return above == count || (below < largest && x[below] >= x[above]) ? below : above;
}

// Of one row of logits; of equals the first. A `temperature` of 0 is greedy.
//   grade: the probabilities and the second best are wanted too; there are two outputs or more.
template <class T>
Choice choose(const Head<T>& head, const float* logits, double temperature, i64 seed, i64 position,
              bool grade) {
  i64 n = head.outputs, best = largest_of(logits, 0, n), second = best;
  Choice choice;
  if (grade) {
    second = second_largest_of(logits, n, best);
    Floats total{};
    for (i64 i = 0; i < n; i += LANES) {
      Floats part = get(logits + i, n - i) - logits[best];
      for (i64 j = n - i; j < LANES; j++) part[j] = NEVER;
      total += exp16(part);
    }
    choice.top = 1.0f / sum_of(total);
    choice.second = choice.top * std::exp(logits[second] - logits[best]);
  }
  if (temperature > 0) {
    constexpr float MOST_NOISE = 24;  // none exceeds 22.9
    Words key = noise_key(seed, position);
    float reached = NEVER, beaten = NEVER;
    for (i64 i = 0; i < n; i += LANES) {
      i64 count = std::min<i64>(LANES, n - i);
      Floats warped = get(logits + i, count) / float(temperature);
      for (i64 j = count; j < LANES; j++) warped[j] = NEVER;
      if (fold(warped, larger) + MOST_NOISE < (grade ? beaten : reached)) continue;
      Words tokens;
      for (i64 j = 0; j < LANES; j++) tokens[j] = head.token(std::min(i + j, n - 1));
      Floats score = warped - race16(tokens, key);
      for (i64 j = 0; j < count; j++) {
        if (score[j] > reached) {
          beaten = reached, second = best;
          reached = score[j], best = i + j;
        } else if (score[j] > beaten) {
          beaten = score[j], second = i + j;
        }
      }
    }
  }
  choice.token = head.token(best);
  choice.runner_up = head.token(second);
  return choice;
}

}  // namespace
