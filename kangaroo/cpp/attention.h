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
      : s(sizes), sight(sight), n_slots(n_slots), tiled(has_tiles<T>() && sizes.head_size % 32 == 0) {}

  i64 partial_size(i64 tokens) const { return tokens * s.heads * sight.chunks * (s.head_size + 2); }

  void attend(const T* queries, const T* keys, const T* values, float* partial) {
    i64 size = s.head_size, group = s.group(), stride = s.kv_heads * size;
    Part mine(i64(sight.pieces.size()) * s.kv_heads);
    for (i64 item = mine.first; item < mine.last; item++) {
      const Piece& piece = sight.pieces[item / s.kv_heads];
      const i64 head = item % s.kv_heads, *slots = sight.slots(piece);
      i64 at = piece.row * n_slots * stride + head * size;
      if (!tiled) turn(keys + at, stride, piece, slots);
      for (i64 i = 0; i < piece.n_members * group; i += LANES) {
        const T* asking[LANES];
        float* out[LANES];
        Ints widths;
        i64 count = std::min<i64>(LANES, piece.n_members * group - i);
        for (i64 j = 0; j < LANES; j++) {
          i64 query = i + std::min(j, count - 1);
          const Member& member = sight.members[piece.members + query / group];
          asking[j] = queries + (member.token * s.heads + head * group + query % group) * size;
          out[j] = partial + place(member.token, head, piece.first / CHUNK, query % group);
          widths[j] = int(member.width);
        }
        if (tiled) score_tiles(asking, keys + at, stride, piece, slots);
        else score(asking, count);
        soften(widths, piece.width, count, out);
        // of the next chunk as much as is this key head's share, in one piece, which memory likes
        i64 next = at - head * size + (piece.first + CHUNK) * stride + CHUNK * head * size;
        for (i64 j = 0; j < count; j += 4) {
          if (i + j == 0 && !slots)
            weigh<true>(values + at, stride, piece, slots, j, count, out, keys + next, values + next);
          else
            weigh<false>(values + at, stride, piece, slots, j, count, out);
        }
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
      float total[WIDEST_HEAD + LANES];
      std::fill(total, total + size + LANES, 0.0f);
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

  // Products of sixteen queries with a chunk of keys, by tiles.
  void score_tiles(const T* const* asking, const T* keys, i64 stride, const Piece& piece, const i64* slots) {
    i64 size = s.head_size, words = size / 2;
    turned_queries.resize(words);
    for (i64 k = 0; k < words; k += LANES) {
      for (i64 i = 0; i < LANES; i++) std::memcpy(&turned_queries[k + i], asking[i] + 2 * k, sizeof(Words));
      transpose(&turned_queries[k]);
    }
    gathered.resize(LANES * size);
    for (i64 n = 0; n < piece.width; n += LANES) {
      const T* from = keys + (piece.first + n) * stride;
      i64 step = stride, count = std::min<i64>(LANES, piece.width - n);
      if (slots || count < LANES) {
        for (i64 i = 0; i < count; i++)
          std::copy_n(keys + slot_of(piece, slots, n + i) * stride, size, &gathered[i * size]);
        from = gathered.data(), step = size;
      }
      times_tiles(turned_queries.data(), size, from, step, nullptr, scores + n);
    }
  }

  // Products of up to sixteen queries with a turned chunk of keys.
  void score(const T* const* asking, i64 count) {
    Floats by_query[LANES][CHUNK / LANES];
    for (i64 i = 0; i < count; i += 4) score_four(asking + i, by_query + i);
    for (int j = 0; j < CHUNK / LANES; j++) {
      for (int i = 0; i < LANES; i++) scores[j * LANES + i] = by_query[std::min<i64>(i, count - 1)][j];
      transpose((Words*)scores + j * LANES);
    }
  }

  void score_four(const T* const* asking, Floats (*sum)[CHUNK / LANES]) const {
    constexpr i64 per_word = 4 / sizeof(T);
    using Type = typename Vector<T>::Type;
    Floats part[4][CHUNK / LANES] = {};
    for (i64 c = 0; c < s.head_size; c += per_word) {
      const std::uint32_t* key = &turned[c / per_word * CHUNK];
      for (int i = 0; i < 4; i++) {
        std::uint32_t word;
        std::memcpy(&word, asking[i] + c, sizeof word);
        Type query = (Type)(Words{} + word);
        for (int j = 0; j < CHUNK / LANES; j++) {
          Type keys;
          std::memcpy(&keys, key + j * LANES, sizeof keys);
          part[i][j] = Vector<T>::dot(part[i][j], keys, query);
        }
      }
    }
    std::memcpy(sum, part, sizeof part);
  }

  // Scores become weights, 0 from a query's width on; out = (largest score, sum of weights).
  void soften(Ints widths, i64 width, i64 count, float* const* out) {
    const Floats never = Floats{} + NEVER;
    Floats largest = never, sum{};
    for (int n = 0; n < width; n++) {
      scores[n] = n < widths ? scores[n] * float(s.scaling) : never;
      largest = larger(largest, scores[n]);
    }
    for (int n = 0; n < width; n++) {
      scores[n] = exp16(scores[n] - largest);
      sum += scores[n];
    }
    for (i64 j = 0; j < count; j++) {
      out[j][0] = largest[j];
      out[j][1] = sum[j];
    }
  }

  // The weighted values of four queries, so that a value is read once for all; meanwhile what comes next
  // is fetched, line by line.
  template <bool fetch>
  void weigh(const T* values, i64 stride, const Piece& piece, const i64* slots, i64 query, i64 count,
             float* const* out, const T* next_keys = nullptr, const T* next_values = nullptr) const {
    const float* weights = (const float*)scores + query;
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
            sum[i].a += weights[n * LANES + i] * value.a;
            sum[i].b += weights[n * LANES + i] * value.b;
          }
        }
      };
      if (left >= 2 * LANES) add([](const T* from) { return apart(from); });
      else add([&](const T* from) {
        T padded[2 * LANES] = {};
        std::memcpy(padded, from, left * sizeof(T));
        return apart(padded);
      });
      for (i64 i = 0; i < std::min<i64>(4, count - query); i++) {
        Pair ordered = together(sum[i], T());
        float* to = out[query + i] + 2 + c;
        put(to, ordered.a, left);
        if (left > LANES) put(to + LANES, ordered.b, left - LANES);
      }
    }
  }

  const Sizes& s;
  const Sight& sight;
  i64 n_slots;
  bool tiled;
  Floats scores[CHUNK];  // of sixteen queries at each position
  std::vector<std::uint32_t> turned;
  std::vector<Words> turned_queries;
  std::vector<T> gathered;
};

}  // namespace
