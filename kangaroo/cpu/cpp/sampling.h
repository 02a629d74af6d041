// The head, and the token that is chosen by its logits: the likeliest one, or one under noise that is a pure function
// of (seed, position, token), as kangaroo/engine/sampling.py defines it.

#pragma once

#include <numeric>

#include "layers.h"

namespace {

template <class T> struct Head {
  const T* norm;  // before the head; null for none
  const void* weight;
  i64 kind, outputs;
  const i64* ids;   // the token of each output; null if outputs are all tokens in order
  i64 passing = 0;  // as in `Weights`, and the next
  const float* scales = nullptr;
  i64 token(i64 output) const { return ids ? ids[output] : output; }
  // The tokens of sixteen outputs; beyond the last output they are arbitrary.
  Words tokens16(i64 first) const {
    Words tokens = Words{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + std::uint32_t(first);
    for (i64 j = 0; ids && j < LANES; j++) tokens[j] = ids[std::min(first + j, outputs - 1)];
    return tokens;
  }
};

// Products of all tokens, whose states are normed, with `count` blocks of a head, of which the i-th begins at row
// row_of(i).
//   store(i, sums): sums of the i-th block, [tokens, 16].
template <class T, class RowOf, class Store>
void multiply_head(const Sizes& s, const Head<T>& head, const T* normed, i64 tokens, i64 count, RowOf row_of,
                   Store store) {
  const Weights w{head.weight, head.kind, head.outputs, s.hidden, head.passing, head.scales};
  Shares shares(s.threads);
  PARALLEL(s.threads) {
    TileUse tiles;
    Rooms rooms;
    Room room_for_sums;
    const Input<T> in = input(Matrix<T>{normed, tokens, s.hidden}, {head.kind}, rooms);
    shares.divide(count, shares.at_a_time(count), [&](const Item& item) {
      products(
          in, item, [&](i64 i) { return Block{&w, row_of(i)}; },
          item.end < count ? w.block<T>(row_of(item.end)) : nullptr, room_for_sums, store);
    });
  };
}

template <class T> std::vector<T> normed(const Sizes& s, const T* norm, const T* x, i64 tokens) {
  std::vector<T> states(x, x + tokens * s.hidden);
  for (i64 m = 0; norm && m < tokens; m++) rms_norm(x + m * s.hidden, norm, s.hidden, s.eps, &states[m * s.hidden]);
  return states;
}

// logits[m][n] = norm(x[m]) . weight[n]
template <class T> void read_out(const Sizes& s, const Head<T>& head, const T* x, i64 tokens, float* logits) {
  if (!tokens) return;
  const std::vector<T> states = normed(s, head.norm, x, tokens);
  multiply_head(
      s, head, states.data(), tokens, blocks(head.outputs), [](i64 i) { return i * LANES; },
      [&](i64 i, const float* sums) {
        i64 n = i * LANES;
        for (i64 m = 0; m < tokens; m++)
          put(logits + m * head.outputs + n, get(sums + m * LANES), head.outputs - n);
      });
}

Register smaller(Register a, Register b) { return a < b ? a : b; }

Words mix(Words x) {  // the 32-bit finaliser of MurmurHash3
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

// What determines the noise at a position.
Words noise_key(i64 seed, i64 position) {
  Words low = Words{} + std::uint32_t(seed), high = mix(Words{} + std::uint32_t(seed >> 32));
  return mix((Words{} + std::uint32_t(position) * 0x9e3779b1u) + mix(low ^ high));
}

Floats uniform16(Words tokens, Words key) {  // in (0, 1)
  Words bits = mix(mix(tokens * 0x85ebca77u + 0x27d4eb2fu) ^ key);
  Floats u = (__builtin_convertvector(bits, Floats) + 0.5f) * 0x1p-32f;
  const Floats largest = Floats{} + (1.0f - 0x1p-24f);
  return u > largest ? largest : u;
}

Floats race16(Floats u) {  // the logarithm of exponentially distributed noise, which is at least u
  // -log1p(-u) by Kahan's correction of log(1 - u)
  Floats rest = 1.0f - u, lost = rest - 1.0f;
  Floats race = lost == 0.0f ? u : log16(rest) * (u / lost);
  return log16(race);
}

// Whether one of sixteen may exceed a score under this noise, without logarithms. The margin far exceeds rounding.
bool may_exceed(float least, Floats warped, Floats u) {
  return !(fold(u - exp16(warped - std::max(least, -1e30f)) * 1.001f, smaller) >= 0);
}

// Sixteen numbers, or what is left of them padded with -inf.
Floats get_or_never(const float* from, i64 count) {
  Floats part = get(from, count);
  for (i64 j = count; j < LANES; j++) part[j] = NEVER;
  return part;
}

// How a text's tokens are drawn; see `Sampling` in kangaroo/engine/sampling.py. A `temperature` of 0 is greedy.
struct Draw {
  double temperature, top_p;
  i64 top_k, seed;
  bool filtered(i64 outputs) const { return (top_k > 0 && top_k < outputs) || top_p < 1; }
};

// A head in fewer bits (bytes, or blocks), without norm; and by how much the logits of each row may be wrong, as a
// share of the state's length. Both repeat the last row up to a whole block.
struct Rough {
  void* weight;
  i64 kind;
  float *scales, *errors;
  i64 passing;

  // Whether it saves time for so many tokens. With instructions for bfloat16, many tokens take the time of arithmetic,
  // which bytes do not save.
  bool pays(i64 tokens) const { return weight && (kind != IN_BYTES || PARTS > 1 || tokens <= ALONE); }
};

// Sets the bytes, scales and errors of a head. The errors include the rounding of states, by at most half a step of
// each number (`rounded`), and of sums in float32.
template <class T> void round_head(const Sizes& s, const Head<T>& head, const Rough& rough) {
  const i64 width = s.hidden, whole = blocks(head.outputs) * LANES;
  const T* weight = (const T*)head.weight;
  const float state = 0.51f * std::sqrt(float(width)) / most_steps(width), sums = (width / 8 + 16) * 0x1p-22f;
  PARALLEL_FOR(s.threads, n, whole) {
    const T* row = weight + std::min(n, head.outputs - 1) * width;
    Floats most = Floats{} + 1e-30f, sizes{}, errors{};
    for (i64 k = 0; k < width; k += LANES) {
      const Floats part = get(row + k, width - k);
      most = larger(most, larger(part, -part));
    }
    const float scale = fold(most, larger_few) / 127, per_step = 1 / scale;
    for (i64 k = 0; k < width; k += LANES) {
      const Floats part = get(row + k, width - k), steps = (part * per_step + NO_FRACTION) - NO_FRACTION;
      const Floats rest = part - steps * scale;
      sizes += steps * steps, errors += rest * rest;
      for (i64 j = 0; n < head.outputs && j < std::min<i64>(LANES, width - k); j++)
        ((Byte*)rough.weight)[n * width + k + j] = std::isfinite(steps[j]) ? steps[j] : 0;
    }
    const float size = std::sqrt(sum_of(sizes)) * scale, error = std::sqrt(sum_of(errors));
    const float all = 1.001f * (error + (size + error) * (state + sums));
    const bool limited = std::isfinite(all);  // false if weights are infinite or NaN
    rough.scales[n] = limited ? scale : 0;
    rough.errors[n] = limited ? all : INFINITY;
  };
}

// The same for a head of Q8_0's blocks, of which the upper five bits are kept in Q5_1's form. Both multiply the same
// tokens in eight bits, which are at most a 43rd longer than the states; sums are in float32.
void round_blocks(const Sizes& s, const Octet* head, i64 row_bytes, i64 outputs, const Rough& rough) {
  constexpr float longer = 1.024f;
  const i64 width = s.hidden, bytes = packed_bytes(FormQ5_1::kind, width);
  PARALLEL_FOR(s.threads, block, blocks(outputs)) {
    Octet* to = (Octet*)rough.weight + block * bytes;
    float errors[LANES] = {}, sizes[LANES] = {};
    for (i64 k = 0; k < width / 32; k++, to += FormQ5_1::bytes)
      for (int i = 0; i < LANES; i++) {
        Unpacked full, few;
        unpack(FormQ8_0{}, head + std::min(block * LANES + i, outputs - 1) * row_bytes + k * FormQ8_0::block, full);
        const float step = widen_half(full.d);
        few.d = narrow_half(8 * step), few.m = narrow_half(-124.5f * step);
        for (int j = 0; j < 32; j++) {
          few.q[j] = full.q[j] / 8;
          const float rest = step * (full.q[j] - 128) - (widen_half(few.d) * few.q[j] + widen_half(few.m));
          errors[i] += rest * rest;
        }
        sizes[i] += 32 * 384 * 384 * step * step;  // of 255 steps and 128 steps, whatever their signs
        place<FormQ5_1>(few, i, to);
      }
    for (int i = 0; i < LANES; i++) {
      const float sums = 2 * (width / 8 + 16) * 0x1p-22f;
      const float all = 1.001f * longer * (std::sqrt(errors[i]) + std::sqrt(sizes[i]) * sums);
      const bool limited = std::isfinite(all);
      rough.errors[block * LANES + i] = limited ? all : INFINITY;
      for (Octet* from = to - bytes; !limited && from < to; from += FormQ5_1::bytes) place<FormQ5_1>({}, i, from);
    }
  };
}

// How a state's logits become scores: at a temperature of 0 they are the scores, otherwise noise is added.
struct Noise {
  float temperature = 0;
  Words key{};
  Noise() = default;
  Noise(const Draw& draw, i64 position) : temperature(draw.temperature), key(noise_key(draw.seed, position)) {}
};

// Which tokens may have the largest score after some states, by all rows of a head in fewer bits.
template <class T> struct Candidates {
  const Sizes& s;
  const Head<T>& head;
  const i64 tokens, count;  // number of states, and of blocks of rows
  std::vector<T> states;
  std::vector<float> most, least;  // upper bounds of scores by block, [tokens, count]; lower bounds of the largest one

  Candidates(const Sizes& s, const Head<T>& head, const Rough& rough, const T* x, const std::vector<Noise>& noises)
      : s(s), head(head), tokens(noises.size()), count(blocks(head.outputs)), states(normed(s, head.norm, x, tokens)),
        most(tokens * count), least(s.threads * tokens, NEVER) {
    const Head<T> in_few_bits{nullptr, rough.weight, rough.kind, head.outputs, nullptr, rough.passing, rough.scales};
    std::vector<float> size(tokens);
    for (i64 m = 0; m < tokens; m++) {
      Floats squares{};
      for (i64 k = 0; k < s.hidden; k += LANES) {
        Floats part = get(&states[m * s.hidden + k], s.hidden - k);
        squares += part * part;
      }
      size[m] = std::sqrt(sum_of(squares)) * 1.0001f;  // rounded up
    }
    multiply_head(
        s, in_few_bits, states.data(), tokens, count, [](i64 i) { return i * LANES; },
        [&](i64 i, const float* sums) {
          float* own = &least[thread_number() * tokens];
          for (i64 m = 0; m < tokens; m++) {
            const Floats about = get_or_never(sums + m * LANES, head.outputs - i * LANES);
            const Floats error = get(rough.errors + i * LANES) * size[m];
            Floats high = about + error, low = about - error;
            if (const Noise& noise = noises[m]; noise.temperature > 0) {
              const Floats u = uniform16(head.tokens16(i * LANES), noise.key);
              high = high / noise.temperature, low = low / noise.temperature;
              if (!may_exceed(own[m], high, u)) {
                most[m * count + i] = NEVER;
                continue;
              }
              const Floats race = race16(u);
              high -= race, low -= race;
            }
            most[m * count + i] = fold(high, larger_few);
            own[m] = std::max(own[m], fold(low, larger_few));
          }
        });
    for (i64 m = 0; m < tokens; m++)
      for (i64 thread = 1; thread < s.threads; thread++) least[m] = std::max(least[m], least[thread * tokens + m]);
  }

  // The candidates after `few` states from `first` on, in ascending order, and their logits by full rows, [few, ids].
  std::vector<i64> read(i64 first, i64 few, std::vector<float>& logits) const {
    std::vector<i64> rows, ids;
    for (i64 i = 0; i < count; i++) {
      bool may = false;
      for (i64 m = first; m < first + few; m++) may |= !(most[m * count + i] < least[m]);  // true for NaN, too
      if (may) rows.push_back(i * LANES);
    }
    for (i64 row : rows)
      for (i64 j = 0; j < LANES; j++) ids.push_back(std::min(row + j, head.outputs - 1));
    logits.resize(few * ids.size());
    multiply_head(
        s, head, states.data() + first * s.hidden, few, rows.size(), [&](i64 i) { return rows[i]; },
        [&](i64 i, const float* sums) {
          for (i64 m = 0; m < few; m++) put(&logits[m * ids.size() + i * LANES], get(sums + m * LANES), LANES);
        });
    return ids;
  }
};

// Choices for a chain's last token; the most choices of a tree's node; and the most likeliest tokens that are kept.
constexpr i64 CHOICES = 3, MOST_CHOICES = 16, MOST = 64;

// The best choices, and the probabilities of as many likeliest tokens, before temperature and noise.
struct Choice {
  i64 tokens[MOST_CHOICES];
  float chances[MOST_CHOICES] = {};
};

// Where the likeliest tokens of a distribution go, and their probabilities, which are those of `Choice`.
struct Kept {
  i64 count = 0;  // at most MOST
  std::int32_t* tokens = nullptr;
  float* chances = nullptr;
};

// The largest numbers seen, in descending order; of equal ones the first.
struct Best {
  float values[MOST];
  i64 places[MOST];
  i64 count;

  explicit Best(i64 count) : count(count) {
    std::fill_n(values, count, NEVER);
    std::fill_n(places, count, 0);
  }
  float least() const { return values[count - 1]; }

  void see(float value, i64 place) {
    if (!(value > least())) return;
    i64 i = count - 1;
    for (; i > 0 && value > values[i - 1]; i--) {
      values[i] = values[i - 1];
      places[i] = places[i - 1];
    }
    values[i] = value, places[i] = place;
  }

  // The same for sixteen numbers from `place` on.
  void see(Floats part, i64 place) {
    if (fold(part, larger_few) > least())
      for (i64 j = 0; j < LANES; j++) see(part[j], place + j);
  }
};

// A whole number near 2^44 e^x for x <= 0, the same as by `whole_exp` in kangaroo/engine/sampling.py.
i64 whole_exp(float x) {
  const std::int32_t power = (x > -32.0f ? x : -32.0f) * 24204406.0f;
  const std::uint64_t part = power & 0xffffff;
  std::uint64_t scaled = 2004817;
  for (std::uint64_t coefficient : {9681959, 59914703, 257874614, 744265554, 1 << 30})
    scaled = (scaled * part >> 24) + coefficient;
  return scaled << 14 >> -(power >> 24);
}

// The places that top-k and top-p leave of these logits, the likeliest first, by the order and rounding of `warp`:
// those tied with the k-th stay, and of equal ones at the end of top-p the first.
std::vector<i64> unfiltered(const float* logits, i64 n, const Draw& draw) {
  std::vector<float> warped(n);
  for (i64 i = 0; i < n; i += LANES) put(&warped[i], get(logits + i, n - i) / float(draw.temperature), n - i);
  auto before = [&](i64 a, i64 b) { return warped[a] != warped[b] ? warped[a] > warped[b] : a < b; };
  std::vector<i64> places(n);
  std::iota(places.begin(), places.end(), 0);
  i64 sorted = 0, left = n;  // how many are sorted, and how many may stay
  auto sort_until = [&](i64 count) {  // a few at a time, since mostly a few are enough
    while (sorted < std::min(count, n)) {
      i64 next = std::min(n, std::max<i64>(128, 8 * sorted));
      std::partial_sort(places.begin() + sorted, places.begin() + next, places.end(), before);
      sorted = next;
    }
  };
  if (draw.top_k > 0 && draw.top_k < n) {
    left = draw.top_k;
    sort_until(left + 1);
    while (left < n && warped[places[left]] == warped[places[left - 1]]) sort_until(++left + 1);
  }
  if (draw.top_p < 1) {
    sort_until(1);
    const float most = warped[places[0]];
    i64 total = 0, sum = 0;
    if (left == n)
      for (i64 i = 0; i < n; i++) total += whole_exp(warped[i] - most);
    else
      for (i64 i = 0; i < left; i++) total += whole_exp(warped[places[i]] - most);
    const double reached = double(float(draw.top_p)) * double(total);
    for (i64 i = 0; i < left; i++) {
      sort_until(i + 1);
      if (i && double(sum) >= reached) left = i;
      sum += whole_exp(warped[places[i]] - most);
    }
  }
  places.resize(left);
  return places;
}

// The best ones under noise.
template <class T>
void draw_from_all(const Head<T>& head, const float* logits, const Draw& draw, Words key, Best& best) {
  constexpr float MOST_NOISE = 24;  // none exceeds 22.9
  const i64 n = head.outputs;
  for (i64 i = 0; i < n; i += LANES) {
    Floats warped = get_or_never(logits + i, n - i) / float(draw.temperature);
    if (fold(warped, larger_few) + MOST_NOISE < best.least()) continue;
    Floats u = uniform16(head.tokens16(i), key);
    if (may_exceed(best.least(), warped, u)) best.see(warped - race16(u), i);
  }
}

// The best ones under noise that the filters leave. If these are too few, the likeliest others follow.
template <class T>
void draw_from_few(const Head<T>& head, const float* logits, const Draw& draw, Words key,
                   const Best& likeliest, Best& best) {
  std::vector<i64> places = unfiltered(logits, head.outputs, draw);
  std::sort(places.begin(), places.end());  // of equal ones the first wins
  for (i64 i = 0; i < i64(places.size()); i += LANES) {
    i64 count = std::min<i64>(LANES, places.size() - i);
    Floats warped = Floats{} + NEVER;
    Words tokens{};
    for (i64 j = 0; j < count; j++) {
      warped[j] = logits[places[i + j]] / float(draw.temperature);
      tokens[j] = head.token(places[i + j]);
    }
    Floats score = warped - race16(uniform16(tokens, key));
    for (i64 j = 0; j < count; j++) best.see(score[j], places[i + j]);
  }
  for (i64 j = places.size(), next = 0; j < best.count; next++) {
    i64* end = best.places + j;
    if (std::find(best.places, end, likeliest.places[next]) == end) best.places[j++] = likeliest.places[next];
  }
}

// The choice by one row of logits.
//   graded: how many choices are wanted, with probabilities; 0 is a single choice without one.
template <class T>
Choice choose(const Head<T>& head, const float* logits, const Draw& draw, i64 position, i64 graded,
              const Kept& kept) {
  i64 n = head.outputs, wanted = std::max<i64>(graded, 1);
  Best likeliest(std::max(wanted, kept.count));
  for (i64 i = 0; i < n; i += LANES) likeliest.see(get_or_never(logits + i, n - i), i);
  Choice choice;
  if (graded || kept.count) {
    Floats total{};
    for (i64 i = 0; i < n; i += LANES)
      total += exp16(get_or_never(logits + i, n - i) - likeliest.values[0]);
    float sum = sum_of(total);
    auto chance = [&](i64 j) { return std::exp(likeliest.values[j] - likeliest.values[0]) / sum; };
    for (i64 j = 0; j < graded; j++) choice.chances[j] = chance(j);
    for (i64 j = 0; j < kept.count; j++) {
      kept.tokens[j] = head.token(likeliest.places[j]);
      kept.chances[j] = chance(j);
    }
  }
  Best best = likeliest;
  best.count = wanted;
  if (draw.temperature > 0) {
    Words key = noise_key(draw.seed, position);
    best = Best(wanted);
    if (draw.filtered(n)) draw_from_few(head, logits, draw, key, likeliest, best);
    else draw_from_all(head, logits, draw, key, best);
  }
  for (i64 j = 0; j < wanted; j++) choice.tokens[j] = head.token(best.places[j]);
  return choice;
}

// The likeliest token after each state.
template <class T>
void choose_likeliest(const Sizes& s, const Head<T>& head, const Rough& rough, const T* x, i64 tokens, i64* chosen) {
  std::vector<float> logits;
  std::vector<i64> ids;
  Head<T> all{nullptr, nullptr, PLAIN, head.outputs};
  if (rough.pays(tokens)) {
    ids = Candidates<T>(s, head, rough, x, std::vector<Noise>(tokens)).read(0, tokens, logits);
    all = {nullptr, nullptr, PLAIN, i64(ids.size()), ids.data()};
  } else {
    logits.resize(tokens * head.outputs);
    read_out(s, head, x, tokens, logits.data());
  }
  for (i64 m = 0; m < tokens; m++)
    chosen[m] = choose(all, &logits[m * all.outputs], Draw{}, 0, 0, Kept{}).tokens[0];
}

}  // namespace
