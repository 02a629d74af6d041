// Attention of a few tokens over cached keys and values, in pieces of CHUNK positions.

#pragma once

#include "products.h"
#include "attn_plan.h"

namespace {

constexpr i64 WIDEST_HEAD = 1024;
constexpr bool BY_ROWS = WIDE < 16;  // scores are products with rows: turning keys needs long registers
constexpr int BESIDE = 4;            // queries that share one reading of a value
constexpr int AT_ONCE = 4;           // sixteens of queries that take each step together on a matrix unit
constexpr int TOGETHER = 12;         // queries whose scores are not turned: those of sixteen cost as much then

struct Sizes {  // what all layers share, as Python fills it in
  i64 hidden, heads, kv_heads, head_size, feed_forward, threads;
  double eps, scaling;
  i64 group() const { return heads / kv_heads; }
};

// Memory that begins at a cache line.
template <class T> class Lines {
 public:
  explicit Lines(i64 count) : words((count * sizeof(T) + sizeof(Words) - 1) / sizeof(Words)) {}
  T& operator[](i64 i) { return ((T*)words.data())[i]; }
  const T& operator[](i64 i) const { return ((const T*)words.data())[i]; }

 private:
  std::vector<Words> words;
};

// One thread's part of the work. Queries are [tokens, H, C]; partial sums [tokens, K, chunks, G, 2 + C]:
// the largest score, the sum of weights, the weighted values.
template <class T> class Attention {
 public:
  Attention(const Sizes& sizes, const Sight& sight, i64 n_slots)
      : s(sizes), sight(sight), n_slots(n_slots), tiled(has_tiles<T>() && sizes.head_size % 32 == 0),
        paired(tiled || (std::is_same_v<Number<T>, bf16> && sizes.head_size % 32 == 0)),
        asked(LANES * sizes.head_size), weighted(AT_ONCE * LANES * sizes.head_size),
        turned(CHUNK * (sizes.head_size + 2 * LANES)), pairs(CHUNK / 2 * sizes.head_size),
        turned_queries(AT_ONCE * (sizes.head_size / 2 + LANES)) {}

  i64 partial_size(i64 tokens) const { return tokens * s.heads * sight.chunks * (s.head_size + 2); }

  void attend(const T* queries, const T* keys, const T* values, float* partial) {
    i64 size = s.head_size, group = s.group(), stride = s.kv_heads * size;
    Part mine(i64(sight.pieces.size()) * s.kv_heads);
    const Piece* held = nullptr;  // the keys and values that are turned and paired
    i64 held_head = -1;
    for (i64 item = mine.first; item < mine.last; item++) {
      const auto [its_piece, head] = sight.piece_and_head(item, s.kv_heads);
      const Piece& piece = *its_piece;
      const i64* slots = sight.slots(piece);
      i64 at = piece.row * n_slots * stride + head * size;
      Fetch fetch;
      if (i64 next = item + s.kv_heads; next < mine.last && sight.pieces[next / s.kv_heads].alike != piece.alike)
        fetch = fetch_of(next, keys, values);
      bool goes_on = held && held->alike == piece.alike && held_head == head;
      i64 known = goes_on ? sight.in_common(*held, piece) : 0;
      bool direct = tiled && !slots && piece.width == CHUNK;
      if (BY_ROWS || (tiled && !direct)) gather(keys + at, stride, piece, slots, known);
      else if (!direct) turn(keys + at, stride, piece, slots, known, fetch);
      if (paired) pair(values + at, stride, piece, slots, known, fetch);
      held = direct ? nullptr : &piece, held_head = head;
      Asking asking[AT_ONCE];
      for (i64 first = 0, all = piece.n_members * group; first < all;) {
        int n = 0;
        for (; n < (tiled ? AT_ONCE : 1) && first < all; n++, first += LANES)
          asking[n] = ask(piece, head, first, queries, partial);
        if (direct) attend_tiled(asking, n, keys + at + piece.first * stride, stride);
        else if (tiled) attend_tiled(asking, n, (const T*)&turned[0], size);
        else attend_untiled(asking[0], piece, slots, values + at, stride);
      }
    }
  }

  // The chunks of each query, in their order, to [tokens, H, C].
  void merge(const float* partial, T* attended) const {
    i64 size = s.head_size, group = s.group();
    Part mine(i64(sight.seen.size()) * s.heads);
    for (i64 item = mine.first; item < mine.last; item++) {
      i64 m = item / s.heads, head = item % s.heads / group, query = item % group;
      i64 first = sight.seen[m].first(sight.window) / CHUNK, chunks = (sight.seen[m].count + CHUNK - 1) / CHUNK;
      float largest = NEVER, sum = 0;
      for (i64 chunk = first; chunk < chunks; chunk++)
        largest = std::max(largest, partial[place(m, head, chunk, query)]);
      float total[WIDEST_HEAD + LANES];
      std::fill(total, total + size + LANES, 0.0f);
      for (i64 chunk = first; chunk < chunks; chunk++) {
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

  // Up to sixteen queries of a piece, one after another for each of its members, from the `first` on.
  struct Asking {
    const T* queries[LANES];
    float* out[LANES];
    i64 widths[LANES], count;
  };

  Asking ask(const Piece& piece, i64 head, i64 first, const T* queries, float* partial) const {
    Asking a;
    a.count = std::min<i64>(LANES, piece.n_members * s.group() - first);
    i64 member = piece.members + first / s.group(), query = first % s.group();
    for (i64 j = 0; j < a.count; j++) {
      auto [token, width] = sight.members[member];
      a.queries[j] = queries + (token * s.heads + head * s.group() + query) * s.head_size;
      a.out[j] = partial + place(token, head, piece.first / CHUNK, query);
      a.widths[j] = width;
      if (++query == s.group()) query = 0, member++;
    }
    return a;
  }

  // Some sixteens of queries on a chunk of keys, each `stride` numbers after the one before, and of paired values. What
  // vectors write is not read by tiles at once: those wait until it has reached the cache.
  void attend_tiled(const Asking* asking, int n, const T* keys, i64 stride) {
    const i64 size = s.head_size, words = size / 2 + LANES;
    for (int i = 0; i < n; i++) turn_queries(asking[i], &turned_queries[i * words]);
    for (int i = 0; i < n; i++) scores_by_keys(keys, stride, &turned_queries[i * words], size, (float*)by_key[i]);
    for (int i = 0; i < n; i++) soften_tiled(asking[i], by_key[i], weights[i]);
    for (int i = 0; i < n; i++) values_by_tiles(weights[i], &pairs[0], size, &weighted[i * LANES * size]);
    for (int i = 0; i < n; i++)
      for (i64 j = 0; j < asking[i].count; j++)
        std::copy_n(&weighted[(i * LANES + j) * size], size, asking[i].out[j] + 2);
  }

  void attend_untiled(const Asking& a, const Piece& piece, const i64* slots, const T* values, i64 stride) {
    if (BY_ROWS) score_by_rows(a.queries, a.count, piece.width);
    else score(a.queries, a.count);
    for (i64 j = 0; j < a.count; j++) soften(scores[j], a.widths[j], weights[0] + j * CHUNK, a.out[j]);
    for (i64 j = 0; j < a.count; j += BESIDE)
      if (paired) weigh_pairs(piece.width, j, a.count, a.out);
      else weigh(values, stride, piece, slots, j, a.count, a.out);
  }

  static i64 slot_of(const Piece& piece, const i64* slots, i64 n) {
    return slots ? slots[n] : piece.first + n;
  }

  // Fetches what is read soon, line by line: a key head's share of a piece's keys and values of all heads, in
  // one part of memory, which memory likes. The fewer at a time, the less is waited for.
  struct Fetch {
    const char *keys = nullptr, *values = nullptr, *last_key = nullptr, *last_value = nullptr;
    void key() {
      if (keys < last_key) __builtin_prefetch(keys, 0, CLOSE), keys += 64;
    }
    void value() {
      if (values < last_value) __builtin_prefetch(values, 0, CLOSE), values += 64;
    }
  };

  Fetch fetch_of(i64 item, const T* keys, const T* values) const {
    const Piece& piece = sight.pieces[item / s.kv_heads];
    i64 size = s.head_size, share = piece.width * size;
    i64 from = (piece.row * n_slots + piece.first) * s.kv_heads * size + item % s.kv_heads * share, to = from + share;
    return {(const char*)(keys + from), (const char*)(values + from), (const char*)(keys + to), (const char*)(values + to)};
  }

  // A chunk of keys one after another, in the room of turned ones, where the first ones are known.
  void gather(const T* keys, i64 stride, const Piece& piece, const i64* slots, i64 known) {
    T* to = (T*)&turned[0];
    for (i64 n = known; n < piece.width; n++)
      std::copy_n(keys + slot_of(piece, slots, n) * stride, s.head_size, to + n * s.head_size);
  }

  // Products of up to sixteen queries with the gathered keys, as with rows of weights.
  void score_by_rows(const T* const* asking, i64 count, i64 width) {
    for (i64 j = 0; j < count; j++) std::copy_n(asking[j], s.head_size, &asked[j * s.head_size]);
    Input<T> in = input(Matrix<T>{&asked[0], count, s.head_size}, room);
    Matrix<T> keys{(const T*)&turned[0], width, s.head_size};
    float out[LANES * LANES];
    for (i64 n = 0; n < width; n += LANES) {
      Block<T> block{&keys, n};
      for (i64 m = 0; m < count; m += GROUP)
        times_group<T, Prefetch::none>(in.x, m, std::min<i64>(GROUP, count - m), block, out + m * LANES);
      for (i64 j = 0; j < count; j++) std::copy_n(out + j * LANES, LANES, &scores[j][n]);
    }
  }

  // A chunk of keys with its positions side by side: turned[word][position], a word being 4 bytes of a key.
  void turn(const T* keys, i64 stride, const Piece& piece, const i64* slots, i64 known, Fetch& fetch) {
    constexpr i64 per_word = 4 / sizeof(T), step = LANES * per_word;
    for (i64 c = 0; c < s.head_size; c += step)
      for (i64 n = known / LANES * LANES; n < CHUNK; n += LANES) {
        Words block[LANES] = {};
        for (i64 i = 0; i < LANES; i++) {
          fetch.key();
          if (!paired) fetch.value();
        }
        i64 count = std::min<i64>(LANES, piece.width - n), left = std::min(step, s.head_size - c);
        // slots ascend
        bool side_by_side = count == LANES && (!slots || slots[n + LANES - 1] - slots[n] == LANES - 1);
        if (side_by_side && left == step) {
          const T* key = keys + slot_of(piece, slots, n) * stride + c;
          for (int i = 0; i < LANES; i++, key += stride) std::memcpy(&block[i], key, sizeof(Words));
        } else {
          for (i64 i = 0; i < count; i++)
            std::memcpy(&block[i], keys + slot_of(piece, slots, n + i) * stride + c, left * sizeof(T));
        }
        transpose(block);
        for (i64 i = 0; i < LANES; i++)
          std::memcpy(&turned[(c / per_word + i) * CHUNK + n], &block[i], sizeof block[i]);
      }
  }

  // A chunk of values with those of two positions side by side: pairs[position / 2][c], a word being both.
  void pair(const T* values, i64 stride, const Piece& piece, const i64* slots, i64 known, Fetch& fetch) {
    i64 size = s.head_size;
    auto value = [&](i64 n, i64 c) {
      Words words{};
      if (n < piece.width)
        std::memcpy(&words, values + slot_of(piece, slots, n) * stride + c, sizeof words);
      return words;
    };
    for (i64 n = known / 2 * 2; n < (tiled ? CHUNK : piece.width); n += 2)
      for (i64 c = 0; c < size; c += 2 * LANES) {
        for (int i = 0; i < 2; i++) {
          fetch.value();
          if (tiled) fetch.key();
        }
        Words a = value(n, c), b = value(n + 1, c);
        Words even = (a & 0xffffu) | (b << 16), odd = (a >> 16) | (b & 0xffff0000u);
        Words low = PICK(even, odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        Words high = PICK(even, odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        std::memcpy(&pairs[n / 2 * size + c], &low, sizeof low);
        std::memcpy(&pairs[n / 2 * size + c + LANES], &high, sizeof high);
      }
  }

  // Side by side, a word being two numbers; the last one again where there are fewer.
  void turn_queries(const Asking& a, Words* to) const {
    for (i64 k = 0; k < s.head_size / 2; k += LANES, to += LANES) {
      for (i64 i = 0; i < LANES; i++) std::memcpy(&to[i], a.queries[std::min(i, a.count - 1)] + 2 * k, sizeof(Words));
      transpose(to);
    }
  }

  void score(const T* const* asking, i64 count) {
    for (i64 j = 0; j < count; j += 4) {
      const T* four[4];
      for (i64 i = 0; i < 4; i++) four[i] = asking[std::min(j + i, count - 1)];
      score_four(four, scores + j);
    }
  }

  void score_four(const T* const* asking, float (*out)[CHUNK]) const {
    constexpr i64 per_word = 4 / sizeof(T);
    using Type = typename Vector<T>::Type;
    Register part[4][CHUNK / WIDE] = {};
    for (i64 c = 0; c < s.head_size; c += per_word) {
      const std::uint32_t* key = &turned[c / per_word * CHUNK];
      for (int i = 0; i < 4; i++) {
        std::uint32_t word;
        std::memcpy(&word, asking[i] + c, sizeof word);
        Type query = (Type)(RegisterWords{} + word);
        for (int j = 0; j < CHUNK / WIDE; j++) {
          Type keys;
          std::memcpy(&keys, key + j * WIDE, sizeof keys);
          part[i][j] = Vector<T>::dot(part[i][j], keys, query);
        }
      }
    }
    std::memcpy(out, part, sizeof part);
  }

  // A query's scores become weights, 0 from its width on; out = (largest score, sum of weights).
  void soften(float* scores, i64 width, T* weights, float* out) const {
    Floats part[CHUNK / LANES], largest = Floats{} + NEVER, sum{};
    for (int i = 0; i < CHUNK / LANES; i++) part[i] = get(scores + i * LANES) * float(s.scaling);
    if (width < CHUNK) {
      Ints place;
      for (int i = 0; i < LANES; i++) place[i] = i;
      for (int i = 0; i < CHUNK / LANES; i++)
        part[i] = place + i * LANES < int(width) ? part[i] : Floats{} + NEVER;
    }
    for (int i = 0; i < CHUNK / LANES; i++) largest = larger(largest, part[i]);
    out[0] = fold(largest, larger);
    for (int i = 0; i < CHUNK / LANES; i++) {
      part[i] = exp16(part[i] - out[0]);
      sum += part[i];
      if (paired) put(weights + i * LANES, part[i]);
      else put(scores + i * LANES, part[i]);
    }
    out[1] = sum_of(sum);
  }

  // The same for up to sixteen queries, whose scores lie side by side for each position; sums are in the same order.
  void soften_tiled(const Asking& a, Floats* scores, T* weights) {
    if (a.count < TOGETHER) {
      for (i64 n = 0; n < CHUNK; n += LANES) transpose((Words*)scores + n);
      for (i64 j = 0; j < a.count; j++) {
        float mine[CHUNK];
        for (i64 n = 0; n < CHUNK; n += LANES) put(mine + n, scores[n + j]);
        soften(mine, a.widths[j], weights + j * CHUNK, a.out[j]);
      }
      return;
    }
    Ints width;
    for (int i = 0; i < LANES; i++) width[i] = int(a.widths[std::min<i64>(i, a.count - 1)]);
    Floats largest = Floats{} + NEVER, sums[LANES];
    for (int n = 0; n < CHUNK; n++) {
      scores[n] = Ints{} + n < width ? scores[n] * float(s.scaling) : Floats{} + NEVER;
      largest = larger(largest, scores[n]);
    }
    for (int i = 0; i < LANES; i++) {
      sums[i] = Floats{};
      for (int n = i; n < CHUNK; n += LANES) {
        scores[n] = exp16(scores[n] - largest);
        sums[i] += scores[n];
      }
    }
    for (int half = LANES / 2; half; half /= 2)
      for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    for (i64 i = 0; i < a.count; i++) a.out[i][0] = largest[i], a.out[i][1] = sums[0][i];
    for (int n = 0; n < CHUNK; n += 2 * LANES) {
      Words part[LANES];
      for (int i = 0; i < LANES; i++) part[i] = pair_of(scores[n + 2 * i], scores[n + 2 * i + 1]);
      transpose(part);
      for (int i = 0; i < LANES; i++) std::memcpy(weights + i * CHUNK + n, &part[i], sizeof part[i]);
    }
  }

  // The values weighted by a few queries, from `query` on, two positions at a time.
  void weigh_pairs(i64 width, i64 query, i64 count, float* const* out) const {
    i64 c = 0;
    for (; c + 4 * LANES <= s.head_size; c += 4 * LANES) weigh_part<4>(width, query, count, c, out);
    for (; c < s.head_size; c += 2 * LANES) weigh_part<2>(width, query, count, c, out);
  }

  // The same for so many registers of the values.
  template <int registers> void weigh_part(i64 width, i64 query, i64 count, i64 c, float* const* out) const {
    const T* of[BESIDE];
    for (i64 i = 0; i < BESIDE; i++) of[i] = weights[0] + std::min(query + i, count - 1) * CHUNK;
    Register sum[BESIDE][registers] = {};
    for (i64 n = 0; n < width; n += 2) {
      const std::uint32_t* from = &pairs[n / 2 * s.head_size + c];
      RegisterWords value[registers];
#pragma GCC unroll 4
      for (int r = 0; r < registers; r++) std::memcpy(&value[r], from + r * LANES, sizeof value[r]);
#pragma GCC unroll 4
      for (int i = 0; i < BESIDE; i++) {
        std::uint32_t word;
        std::memcpy(&word, of[i] + n, sizeof word);
#pragma GCC unroll 4
        for (int r = 0; r < registers; r++)
          sum[i][r] = Vector<bf16>::dot(sum[i][r], value[r], RegisterWords{} + word);
      }
    }
    // a compiler keeps an array in registers only if it sees which register is meant
    float done[BESIDE][registers * LANES];
#pragma GCC unroll 4
    for (int i = 0; i < BESIDE; i++)
#pragma GCC unroll 4
      for (int r = 0; r < registers; r++) std::memcpy(&done[i][r * LANES], &sum[i][r], sizeof sum[i][r]);
    for (i64 i = 0; i < std::min<i64>(BESIDE, count - query); i++)
      std::memcpy(out[query + i] + 2 + c, done[i], sizeof done[i]);
  }

  // The same where values are widened one by one.
  void weigh(const T* values, i64 stride, const Piece& piece, const i64* slots, i64 query, i64 count,
             float* const* out) const {
    const T* first = values + piece.first * stride;
    for (i64 c = 0; c < s.head_size; c += 2 * WIDE) {
      i64 left = s.head_size - c;
      Pair sum[BESIDE] = {};
      auto add = [&](auto load) {
        for (i64 n = 0; n < piece.width; n++) {
          Pair value = load((slots ? values + slots[n] * stride : first + n * stride) + c);
#pragma GCC unroll 4
          for (int i = 0; i < BESIDE; i++) {
            sum[i].a += scores[query + i][n] * value.a;
            sum[i].b += scores[query + i][n] * value.b;
          }
        }
      };
      if (left >= 2 * WIDE) add([](const T* from) { return apart(from); });
      else add([&](const T* from) {
        T padded[2 * WIDE] = {};
        std::memcpy(padded, from, left * sizeof(T));
        return apart(padded);
      });
      float done[BESIDE][2 * WIDE];
#pragma GCC unroll 4
      for (int i = 0; i < BESIDE; i++) together(sum[i], T(), done[i]);
      for (i64 i = 0; i < std::min<i64>(BESIDE, count - query); i++)
        std::memcpy(out[query + i] + 2 + c, done[i], std::min<i64>(left, 2 * WIDE) * sizeof(float));
    }
  }

  const Sizes& s;
  const Sight& sight;
  i64 n_slots;
  bool tiled, paired;  // paired: weights are multiplied with values of two positions at a time
  alignas(64) float scores[LANES][CHUNK] = {};  // of sixteen queries, then their weights
  alignas(64) T weights[AT_ONCE][LANES * CHUNK] = {};
  Lines<T> asked;
  Lines<float> weighted;
  Lines<std::uint32_t> turned, pairs;
  Lines<Words> turned_queries;
  std::vector<Words> room;
  Floats by_key[AT_ONCE][CHUNK];
};

}  // namespace
