// Attention of a few tokens over cached keys and values, in pieces of CHUNK positions.

#pragma once

#include "products.h"
#include "sight.h"

namespace {

constexpr i64 WIDEST_HEAD = 1024;

struct Sizes {  // what all layers share, as Python fills it in
  i64 hidden, heads, kv_heads, head_size, feed_forward, threads;
  double eps, scaling;
  i64 group() const { return heads / kv_heads; }
};

// One thread's part of the work. Queries are [tokens, H, C]; partial sums [tokens, K, chunks, G, 2 + C]:
// the largest score, the sum of weights, the weighted values.
template <class T> class Attention {
 public:
  Attention(const Sizes& sizes, const Sight& sight, i64 n_slots)
      : s(sizes), sight(sight), n_slots(n_slots), scores(4 * CHUNK) {}

  i64 partial_size(i64 tokens) const { return tokens * s.heads * sight.chunks * (s.head_size + 2); }

  void attend(const T* queries, const T* keys, const T* values, float* partial) {
    i64 size = s.head_size, group = s.group(), stride = s.kv_heads * size;
    Part mine(i64(sight.pieces.size()) * s.kv_heads);
    for (i64 item = mine.first; item < mine.last; item++) {
      const Piece& piece = sight.pieces[item / s.kv_heads];
      const i64 head = item % s.kv_heads, *slots = sight.slots(piece);
      i64 at = piece.row * n_slots * stride + head * size;
      turn(keys + at, stride, piece, slots);
      for (i64 i = 0; i < piece.n_members * group; i += 4) {
        const T* asking[4];
        float* out[4];
        i64 width[4], count = std::min<i64>(4, piece.n_members * group - i);
        for (i64 j = 0; j < 4; j++) {
          i64 query = i + std::min(j, count - 1);
          const Member& member = sight.members[piece.members + query / group];
          asking[j] = queries + (member.token * s.heads + head * group + query % group) * size;
          out[j] = partial + place(member.token, head, piece.first / CHUNK, query % group);
          width[j] = member.width;
        }
        score(asking);
        for (i64 j = 0; j < count; j++) soften(&scores[j * CHUNK], width[j], out[j]);
        // of the next chunk as much as is this key head's share, in one piece, which memory likes
        i64 next = at - head * size + (piece.first + CHUNK) * stride + CHUNK * head * size;
        if (i == 0 && !slots)
          weigh<true>(values + at, stride, piece, slots, count, out, keys + next, values + next);
        else
          weigh<false>(values + at, stride, piece, slots, count, out);
      }
    }
  }

  // The chunks of each query, in their order, to [tokens, H, C].
  void merge(const float* partial, T* attended) const {
    i64 size = s.head_size, group = s.group();
    Part mine(i64(sight.seen.size()) * s.heads);
    for (i64 item = mine.first; item < mine.last; item++) {
      i64 m = item / s.heads, head = item % s.heads / group, query = item % group;
      i64 chunks = (sight.seen[m].count + CHUNK - 1) / CHUNK;
      float largest = NEVER, sum = 0;
      for (i64 chunk = 0; chunk < chunks; chunk++)
        largest = std::max(largest, partial[place(m, head, chunk, query)]);
      float total[WIDEST_HEAD + LANES] = {};
      for (i64 chunk = 0; chunk < chunks; chunk++) {
        const float* from = partial + place(m, head, chunk, query);
        float scale = std::exp(from[0] - largest);
        sum += scale * from[1];
        for (i64 c = 0; c < size; c++) total[c] += scale * from[2 + c];
      }
      T* out = attended + item * size;
      for (i64 c = 0; c < size; c += LANES) put(out + c, get(total + c) / sum, size - c);
    }
  }

 private:
  i64 place(i64 token, i64 head, i64 chunk, i64 query) const {
    return (((token * s.kv_heads + head) * sight.chunks + chunk) * s.group() + query) *
           (s.head_size + 2);
  }

  static i64 slot_of(const Piece& piece, const i64* slots, i64 n) {
    return slots ? slots[n] : piece.first + n;
  }

  // A chunk of keys with its positions side by side: turned[word][position], a word being 4 bytes of a key.
  void turn(const T* keys, i64 stride, const Piece& piece, const i64* slots) {
    constexpr i64 per_word = 4 / sizeof(T), step = LANES * per_word;
    turned.resize((s.head_size + step - 1) / step * LANES * CHUNK);
    for (i64 c = 0; c < s.head_size; c += step)
      for (i64 n = 0; n < CHUNK; n += LANES) {
        Words block[LANES] = {};
        i64 count = std::min<i64>(LANES, piece.width - n), left = std::min(step, s.head_size - c);
        for (i64 i = 0; i < count; i++) {
          const T* key = keys + slot_of(piece, slots, n + i) * stride + c;
          if (left == step) std::memcpy(&block[i], key, sizeof(Words));
          else std::memcpy(&block[i], key, left * sizeof(T));
        }
        transpose(block);
        for (i64 i = 0; i < LANES; i++)
          std::memcpy(&turned[(c / per_word + i) * CHUNK + n], &block[i], sizeof block[i]);
      }
  }

  // Products of four queries with a turned chunk of keys.
  void score(const T* const* asking) {
    constexpr i64 per_word = 4 / sizeof(T);
    using Type = typename Vector<T>::Type;
    Floats sum[4][CHUNK / LANES] = {};
    for (i64 c = 0; c < s.head_size; c += per_word) {
      const std::uint32_t* key = &turned[c / per_word * CHUNK];
      for (int i = 0; i < 4; i++) {
        std::uint32_t word;
        std::memcpy(&word, asking[i] + c, sizeof word);
        Type query = (Type)(Words{} + word);
        for (int j = 0; j < CHUNK / LANES; j++) {
          Type keys;
          std::memcpy(&keys, key + j * LANES, sizeof keys);
          sum[i][j] = Vector<T>::dot(sum[i][j], keys, query);
        }
      }
    }
    for (int i = 0; i < 4; i++)
      for (i64 j = 0; j < CHUNK / LANES; j++) put(&scores[i * CHUNK + j * LANES], sum[i][j]);
  }

  // Scores become weights, 0 from `width` on; out = (largest score, sum of weights).
  void soften(float* score, i64 width, float* out) const {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats never = Floats{} + NEVER;
    Floats largest = never;
    for (int n = 0; n < CHUNK; n += LANES) {
      Floats part = lanes + n < Ints{} + int(width) ? get(score + n) * float(s.scaling) : never;
      put(score + n, part);
      largest = larger(largest, part);
    }
    out[0] = fold(largest, larger);
    Floats sum{};
    for (i64 n = 0; n < CHUNK; n += LANES) {
      Floats weight = exp16(get(score + n) - out[0]);
      put(score + n, weight);
      sum += weight;
    }
    out[1] = sum_of(sum);
  }

  // The weighted values of four queries, so that a value is read once for all; meanwhile what comes next
  // is fetched, line by line.
  template <bool fetch>
  void weigh(const T* values, i64 stride, const Piece& piece, const i64* slots, i64 count,
             float* const* out, const T* next_keys = nullptr, const T* next_values = nullptr) const {
    const float* weights = scores.data();
    const T* first = values + piece.first * stride;
    for (i64 c = 0; c < s.head_size; c += 2 * LANES) {
      i64 left = s.head_size - c;
      Pair sum[4] = {};
      auto add = [&](auto load) {
        for (i64 n = 0; n < piece.width; n++) {
          if (fetch)
            for (i64 i = 0; i < 2 * LANES; i += 64 / i64(sizeof(T))) {
              __builtin_prefetch(next_keys + c * CHUNK + n * 2 * LANES + i);
              __builtin_prefetch(next_values + c * CHUNK + n * 2 * LANES + i);
            }
          Pair value = load((slots ? values + slots[n] * stride : first + n * stride) + c);
#pragma GCC unroll 4
          for (int i = 0; i < 4; i++) {
            sum[i].a += weights[i * CHUNK + n] * value.a;
            sum[i].b += weights[i * CHUNK + n] * value.b;
          }
        }
      };
      if (left >= 2 * LANES) add([](const T* from) { return apart(from); });
      else add([&](const T* from) {
        T padded[2 * LANES] = {};
        std::memcpy(padded, from, left * sizeof(T));
        return apart(padded);
      });
      for (i64 i = 0; i < count; i++) {
        Pair ordered = together(sum[i], T());
        put(out[i] + 2 + c, ordered.a, left);
        if (left > LANES) put(out[i] + 2 + c + LANES, ordered.b, left - LANES);
      }
    }
  }

  const Sizes& s;
  const Sight& sight;
  i64 n_slots;
  std::vector<float> scores;
  std::vector<std::uint32_t> turned;
};

}  // namespace
