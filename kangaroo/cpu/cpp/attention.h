// Attention of a few tokens to cached keys and values, in pieces of CHUNK positions.

#pragma once

#include "products.h"
#include "attn_plan.h"

namespace {

constexpr i64 WIDEST_HEAD = 1024;
constexpr bool BY_ROWS = WIDE < 16;  // scores are products with rows: transposing keys needs long registers
constexpr int BESIDE = 4;            // queries that share one reading of a key or value; more if it is widened for them
constexpr int MOST_BESIDE = WIDE == 16 && !std::is_same_v<Number<bf16>, bf16> ? 8 : BESIDE;
constexpr int AT_ONCE = 4;           // groups of sixteen queries that take each step together on a matrix unit
constexpr int TOGETHER = 12;         // from so many queries on, scores are softened side by side, without transposing
constexpr i64 TOKEN_BLOCK = 32;      // tokens of a prompt whose partial sums stay in a core's cache
constexpr i64 TURNING = 4;           // how many queries take as long as transposing and pairing a chunk

struct Sizes {  // of all layers; Python fills it in
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

// A thread's part of the work. Queries are [tokens, H, C]; partial sums are [tokens, K, chunks, G, 2 + C]: the largest
// score, the sum of weights, and the weighted values (as in FlashAttention).
//
// In a step of decoding a thread takes some pieces, and all sums are merged when all threads are done. In a prompt it
// takes some blocks of tokens with all pieces that these see, and merges at once, while the sums are in its cache. The
// results are the same.
template <class T> class Attention {
 public:
  Attention(const Sizes& sizes, const Sight& sight, i64 n_slots)
      : s(sizes), sight(sight), n_slots(n_slots), tiled(has_tiles<T>() && sizes.head_size % 32 == 0),
        paired(tiled || (std::is_same_v<Number<T>, bf16> && sizes.head_size % 32 == 0)), block(block_size(sizes, sight)),
        mine(block ? Part::by_cost(blocks_of_tokens() * s.kv_heads, [&](i64 item) { return cost_of_block(item); })
                   : Part::by_cost(sight.pieces.size() * s.kv_heads, [&](i64 item) { return cost_of_piece(item); })),
        asked(LANES * sizes.head_size), weighted(AT_ONCE * LANES * sizes.head_size),
        turned(CHUNK * (sizes.head_size + 2 * LANES)), pairs(CHUNK / 2 * sizes.head_size),
        turned_queries(AT_ONCE * (sizes.head_size / 2 + LANES)),
        of_block(block * s.group() * sight.chunks * (s.head_size + 2)) {}

  // The tokens of a block; 0 in a step of decoding, and with a matrix unit, with which blocks were not measured.
  static i64 block_size(const Sizes& s, const Sight& sight) {
    const i64 total = sight.seen.size();
    if (total < MANY || sight.seen.front().row != sight.seen.back().row || has_tiles<T>()) return 0;
    return std::clamp(total * s.kv_heads / (4 * s.threads), TOKEN_BLOCK / 4, TOKEN_BLOCK);
  }

  // The size of the partial sums that all threads share.
  static i64 partial_size(const Sizes& s, const Sight& sight) {
    return block_size(s, sight) ? 0 : i64(sight.seen.size()) * s.heads * sight.chunks * (s.head_size + 2);
  }

  bool by_blocks() const { return block; }

  // Partial sums of this thread's pieces; `merge` follows when all threads are done.
  void attend(const T* queries, const T* keys, const T* values, float* partial) {
    held = nullptr;
    for (i64 item = mine.first; item < mine.last; item++) {
      const auto [piece, head] = sight.piece_and_head(item, s.kv_heads);
      Fetch fetch;
      if (i64 next = item + s.kv_heads; next < mine.last && sight.pieces[next / s.kv_heads].alike != piece->alike)
        fetch = fetch_of(next, keys, values);
      attend_piece(*piece, head, piece->members, piece->members + piece->n_members, queries, keys, values,
                   {partial, 0, 0, s.kv_heads}, fetch);
    }
  }

  // Merges partial sums, to [tokens, H, C].
  void merge(float* partial, T* attended) const {
    Part items(i64(sight.seen.size()) * s.heads);
    for (i64 item = items.first; item < items.last; item++)
      merge_query(item / s.heads, item % s.heads, {partial, 0, 0, s.kv_heads}, attended);
  }

  // The whole attention of this thread's blocks, to [tokens, H, C].
  void attend_blocks(const T* queries, const T* keys, const T* values, T* attended) {
    for (i64 item = mine.first; item < mine.last; item++) {
      const i64 head = item / blocks_of_tokens(), first = item % blocks_of_tokens() * block;
      const i64 last = std::min<i64>(first + block, sight.seen.size());
      const Partial partial{&of_block[0], first, head, 1};
      held = nullptr;
      for (const Piece& piece : sight.pieces) {
        const Member* members = sight.members.data() + piece.members;
        auto member_of = [&](i64 token) {
          const auto* end = members + piece.n_members;
          return piece.members + (std::partition_point(members, end, [&](Member m) { return m.token < token; }) - members);
        };
        const i64 begin = member_of(first), end = member_of(last);
        Fetch fetch;
        if (begin < end) attend_piece(piece, head, begin, end, queries, keys, values, partial, fetch);
      }
      for (i64 m = first; m < last; m++)
        for (i64 query = 0; query < s.group(); query++)
          merge_query(m, head * s.group() + query, partial, attended);
    }
  }

 private:
  using Asked = std::conditional_t<BY_ROWS, T, Number<T>>;  // the format of queries in products

  // Partial sums from a token and a key head on; `heads` key heads of each token are stored.
  struct Partial {
    float* to;
    i64 token, head, heads;
  };

  float* place(const Partial& partial, i64 token, i64 head, i64 chunk, i64 query) const {
    i64 row = (token - partial.token) * partial.heads + head - partial.head;
    return partial.to + ((row * sight.chunks + chunk) * s.group() + query) * (s.head_size + 2);
  }

  // Fetches what is read soon, line by line: a key head's share of a piece's keys and values of all heads, one stretch
  // of memory each. The fewer lines at a time, the less is waited for.
  struct Fetch {
    const char *keys = nullptr, *values = nullptr, *last_key = nullptr, *last_value = nullptr;
    void key() {
      if (keys < last_key) __builtin_prefetch(keys, 0, CLOSE), keys += 64;
    }
    void value() {
      if (values < last_value) __builtin_prefetch(values, 0, CLOSE), values += 64;
    }
  };

  i64 blocks_of_tokens() const { return (i64(sight.seen.size()) + block - 1) / block; }

  // The time that an item takes, in that of a query.
  i64 cost_of_piece(i64 item) const {
    return TURNING + sight.piece_and_head(item, s.kv_heads).first->n_members * s.group();
  }

  i64 cost_of_block(i64 item) const {
    const i64 first = item % blocks_of_tokens() * block;
    i64 positions = 0;
    for (i64 m = first; m < std::min<i64>(first + block, sight.seen.size()); m++)
      positions += sight.seen[m].count - sight.seen[m].first(sight.window);
    return positions * s.group() / CHUNK + 1;
  }

  // Attention of some members of a piece, with a key head.
  void attend_piece(const Piece& piece, i64 head, i64 first_member, i64 last_member, const T* queries, const T* keys,
                    const T* values, const Partial& partial, Fetch& fetch) {
    const i64 size = s.head_size, group = s.group(), stride = s.kv_heads * size;
    const i64* slots = sight.slots(piece);
    const i64 at = piece.row * n_slots * stride + head * size;
    const bool goes_on = held && held->alike == piece.alike && held_head == head;
    const i64 known = goes_on ? sight.in_common(*held, piece) : 0;
    const bool direct = tiled && !slots && piece.width == CHUNK;
    if (BY_ROWS || (tiled && !direct)) gather(keys + at, stride, piece, slots, known);
    else if (!direct) turn(keys + at, stride, piece, slots, known, fetch);
    if (paired) pair(values + at, stride, piece, slots, known, fetch);
    held = direct ? nullptr : &piece, held_head = head;
    Asking asking[AT_ONCE];
    for (i64 first = first_member * group; first < last_member * group;) {
      int n = 0;
      for (; n < (tiled ? AT_ONCE : 1) && first < last_member * group; n++, first += LANES)
        asking[n] = ask(piece, head, first, last_member * group, queries, partial);
      if (direct) attend_tiled(asking, n, keys + at + piece.first * stride, stride);
      else if (tiled) attend_tiled(asking, n, (const T*)&turned[0], size);
      else attend_untiled(asking[0], piece, slots, values + at, stride);
    }
  }

  // Merges the chunks of a query in their order.
  void merge_query(i64 m, i64 of_all, const Partial& partial, T* attended) const {
    const i64 size = s.head_size, head = of_all / s.group(), query = of_all % s.group();
    const i64 first = sight.seen[m].first(sight.window) / CHUNK, chunks = (sight.seen[m].count + CHUNK - 1) / CHUNK;
    const i64 step = s.group() * (size + 2);
    float* sums = place(partial, m, head, 0, query);
    float largest = NEVER, sum = 0;
    for (i64 chunk = first; chunk < chunks; chunk++) largest = std::max(largest, sums[chunk * step]);
    for (i64 chunk = first; chunk < chunks; chunk++) {
      float& scale = sums[chunk * step];
      scale = std::exp(scale - largest);
      sum += scale * sums[chunk * step + 1];
    }
    T* out = attended + (m * s.heads + of_all) * size;
    for (i64 c = 0; c < size; c += LANES) {
      Floats total{};
      for (i64 chunk = first; chunk < chunks; chunk++)
        total += sums[chunk * step] * get(sums + chunk * step + 2 + c, size - c);
      put(out + c, total / sum, size - c);
    }
  }

  // Up to sixteen queries of a piece, member by member.
  struct Asking {
    const T* queries[LANES];
    float* out[LANES];
    i64 widths[LANES], count;
  };

  // The queries from `first` to `last`, which are counted over all members.
  Asking ask(const Piece& piece, i64 head, i64 first, i64 last, const T* queries, const Partial& partial) const {
    Asking a;
    a.count = std::min<i64>(LANES, last - first);
    i64 member = first / s.group(), query = first % s.group();
    for (i64 j = 0; j < a.count; j++) {
      auto [token, width] = sight.members[member];
      a.queries[j] = queries + (token * s.heads + head * s.group() + query) * s.head_size;
      a.out[j] = place(partial, token, head, piece.first / CHUNK, query);
      a.widths[j] = width;
      if (++query == s.group()) query = 0, member++;
    }
    return a;
  }

  // Attention of groups of sixteen queries to a chunk of keys, which are `stride` numbers apart, and of paired values.
  // Each step is for all groups, since tiles wait until what vectors write has reached the cache.
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
    if constexpr (BY_ROWS) score_by_rows(a.queries, a.count, piece.width);
    else score(a.queries, a.count);
    for (i64 j = 0; j < a.count; j++) soften(scores[j], a.widths[j], weights[0] + j * CHUNK, a.out[j]);
    each_few(a.count, [&](i64 j, auto few) {
      if (paired) weigh_pairs(piece.width, j, a.count, a.out);
      else weigh<few>(values, stride, piece, slots, j, a.count, a.out);
    });
  }

  // Calls work(first, how many) for a few queries after the other; the last ones may be fewer.
  template <class Work> static void each_few(i64 count, Work work) {
    i64 j = 0;
    for (; count - j > BESIDE; j += MOST_BESIDE) work(j, std::integral_constant<int, MOST_BESIDE>());
    if (j < count) work(j, std::integral_constant<int, BESIDE>());
  }

  static i64 slot_of(const Piece& piece, const i64* slots, i64 n) {
    return slots ? slots[n] : piece.first + n;
  }

  Fetch fetch_of(i64 item, const T* keys, const T* values) const {
    const Piece& piece = sight.pieces[item / s.kv_heads];
    i64 size = s.head_size, share = piece.width * size;
    i64 from = (piece.row * n_slots + piece.first) * s.kv_heads * size + item % s.kv_heads * share, to = from + share;
    return {(const char*)(keys + from), (const char*)(values + from), (const char*)(keys + to), (const char*)(values + to)};
  }

  // A chunk of keys one after another, in the memory of turned ones; the first `known` ones are there already.
  void gather(const T* keys, i64 stride, const Piece& piece, const i64* slots, i64 known) {
    T* to = (T*)&turned[0];
    for (i64 n = known; n < piece.width; n++)
      std::copy_n(keys + slot_of(piece, slots, n) * stride, s.head_size, to + n * s.head_size);
  }

  // Scores of up to sixteen queries by products with the gathered keys, as with rows of weights.
  void score_by_rows(const T* const* asking, i64 count, i64 width) {
    for (i64 j = 0; j < count; j++) std::copy_n(asking[j], s.head_size, &asked[j * s.head_size]);
    Input<T> in{count, s.head_size};
    numbers_for(Matrix<T>{&asked[0], count, s.head_size}, in, room);
    const Weights keys{&turned[0], PLAIN, width, s.head_size};
    float out[LANES * LANES];
    for (i64 n = 0; n < width; n += LANES) {
      const Block block{&keys, n};
      for (i64 m = 0; m < count; m += GROUP)
        times_group<T, Prefetch::none>(in.x, m, std::min<i64>(GROUP, count - m), block, out + m * LANES);
      for (i64 j = 0; j < count; j++) std::copy_n(out + j * LANES, LANES, &scores[j][n]);
    }
  }

  // Turns a chunk of keys: turned[word][position], a word being 4 bytes of a key.
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

  // Puts the values of two positions side by side: pairs[position / 2][c], a word being both.
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

  // Sixteen queries side by side, a word being two numbers; if there are fewer, the last one is repeated.
  void turn_queries(const Asking& a, Words* to) const {
    for (i64 k = 0; k < s.head_size / 2; k += LANES, to += LANES) {
      for (i64 i = 0; i < LANES; i++) std::memcpy(&to[i], a.queries[std::min(i, a.count - 1)] + 2 * k, sizeof(Words));
      transpose(to);
    }
  }

  void score(const T* const* asking, i64 count) {
    const i64 size = s.head_size;
    for (i64 j = 0; j < count; j++)
      for (i64 c = 0; c < size; c += LANES) put(&asked[j * size + c], get(asking[j] + c, size - c), size - c);
    each_few(count, [&](i64 j, auto few) { score_few<few>(j, count); });
  }

  template <int few> void score_few(i64 query, i64 count) {
    constexpr i64 per_word = 4 / sizeof(T);
    constexpr int registers = CHUNK / WIDE * BESIDE / few;  // of positions
    using V = Vector<T>;
    const Asked* of[few];
    for (int i = 0; i < few; i++) of[i] = &asked[std::min<i64>(query + i, count - 1) * s.head_size];
    for (i64 n = 0; n < CHUNK; n += registers * WIDE) {
      Register sum[few][registers] = {};
      for (i64 c = 0; c < s.head_size; c += per_word) {
        typename V::Type keys[registers];
#pragma GCC unroll 4
        for (int j = 0; j < registers; j++)
          std::memcpy(&keys[j], &turned[c / per_word * CHUNK + n + j * WIDE], sizeof keys[j]);
#pragma GCC unroll 2
        for (int part = 0; part < V::parts; part++)
#pragma GCC unroll 8
          for (int i = 0; i < few; i++) {
            std::uint32_t word;
            std::memcpy(&word, of[i] + c + part, sizeof word);
            const auto number = (decltype(V::part(keys[0], part)))(RegisterWords{} + word);
#pragma GCC unroll 4
            for (int j = 0; j < registers; j++) sum[i][j] = V::dot(sum[i][j], V::part(keys[j], part), number);
          }
      }
#pragma GCC unroll 8
      for (int i = 0; i < few; i++)
#pragma GCC unroll 4
        for (int j = 0; j < registers; j++) std::memcpy(&scores[query + i][n + j * WIDE], &sum[i][j], sizeof sum[i][j]);
    }
  }

  // Makes weights (softmax's numerators) of a query's scores, 0 from its width on; out = (largest score, their sum).
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
    out[0] = fold(largest, larger_few);
    for (int i = 0; i < CHUNK / LANES; i++) {
      part[i] = exp16(part[i] - out[0]);
      sum += part[i];
      if (paired) put(weights + i * LANES, part[i]);
      else put(scores + i * LANES, part[i]);
    }
    out[1] = sum_of(sum);
  }

  // The same for up to sixteen queries, whose scores lie side by side for each position. The order of sums is the same.
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

  // Values weighted for a few queries, from `query` on, two positions at a time.
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
    // the compiler keeps an array in registers only if all indices are constants
    float done[BESIDE][registers * LANES];
#pragma GCC unroll 4
    for (int i = 0; i < BESIDE; i++)
#pragma GCC unroll 4
      for (int r = 0; r < registers; r++) std::memcpy(&done[i][r * LANES], &sum[i][r], sizeof sum[i][r]);
    for (i64 i = 0; i < std::min<i64>(BESIDE, count - query); i++)
      std::memcpy(out[query + i] + 2 + c, done[i], sizeof done[i]);
  }

  // The same with values that are widened one by one.
  template <int few>
  void weigh(const T* values, i64 stride, const Piece& piece, const i64* slots, i64 query, i64 count,
             float* const* out) const {
    const T* first = values + piece.first * stride;
    for (i64 c = 0; c < s.head_size; c += 2 * WIDE) {
      i64 left = s.head_size - c;
      Pair sum[few] = {};
      auto add = [&](auto load) {
        for (i64 n = 0; n < piece.width; n++) {
          Pair value = load((slots ? values + slots[n] * stride : first + n * stride) + c);
#pragma GCC unroll 8
          for (int i = 0; i < few; i++) {
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
      float done[few][2 * WIDE];
#pragma GCC unroll 8
      for (int i = 0; i < few; i++) together(sum[i], T(), done[i]);
      for (i64 i = 0; i < std::min<i64>(few, count - query); i++)
        for (i64 k = 0; k < std::min<i64>(left, 2 * WIDE); k += LANES)
          put(out[query + i] + 2 + c + k, get(done[i] + k), left - k);
    }
  }

  const Sizes& s;
  const Sight& sight;
  i64 n_slots;
  const bool tiled, paired;  // paired: values of two positions are weighted at a time
  const i64 block;
  const Part mine;  // of all pairs of a piece or block and a head
  const Piece* held = nullptr;  // whose keys and values are turned and paired
  i64 held_head = -1;
  alignas(64) float scores[LANES][CHUNK] = {};  // scores of sixteen queries, then their weights
  alignas(64) T weights[AT_ONCE][LANES * CHUNK] = {};
  Lines<Asked> asked;
  Lines<float> weighted;
  Lines<std::uint32_t> turned, pairs;
  Lines<Words> turned_queries;
  Lines<float> of_block;  // partial sums
  std::vector<Words> room;
  Floats by_key[AT_ONCE][CHUNK];
};

}  // namespace
