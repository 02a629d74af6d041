// Matrix products of a few tokens with weights that are streamed from memory, each weight once.
//
// A block is sixteen consecutive rows of weights. Its rows are multiplied in their order, a few at a time, while what
// lies ahead of them is fetched: many rows side by side would confuse the processor's own prefetching. If tokens are
// too long for the first-level cache, a part of each token is multiplied with that part of all rows, then the next
// part. The sums of a row and a token are taken in the same order, whatever the number of tokens.

#pragma once

#include <numeric>
#include <type_traits>
#include <vector>

#include "numbers.h"
#include "packed.h"
#include "shares.h"
#include "tiles.h"
#include "transposed_gemm.h"
#include "vectors.h"

namespace {

// Processors with instructions for bfloat16 and no matrix unit; of these Zen 5 has AVX-VNNI, too.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#ifdef __AVXVNNI__
constexpr bool ZEN_4 = false, ZEN_5 = true;
#else
constexpr bool ZEN_4 = true, ZEN_5 = false;
#endif
#else
constexpr bool ZEN_4 = false, ZEN_5 = false;
#endif
// How many tokens share one reading of a weight, as registers allow; how many are a group if memory takes the time
// anyway; and how many are multiplied at least, unless there is only one: on Zen 4 two or three tokens take up to a
// fifth longer than four, however their weights are fetched, so others are multiplied and dropped.
constexpr int GROUP = WIDE < 16 ? 5 : PARTS == 1 ? 8 : 12, ALONE = WIDE == 16 ? 12 : 6, FEWEST = ZEN_4 ? 4 : 2;
// Bytes between the weight in use and the one being fetched, for one token and for several; and the cache that it is
// fetched into (3 is the first level, 2 the second). With the second level, eight tokens take half as long on Zen 4,
// and a twentieth less on Intel.
constexpr i64 AHEAD_OF_ONE = ZEN_4 ? 2048 : 8192;
constexpr int CLOSE = WIDE < 16 || ZEN_5 ? 3 : 2;
constexpr i64 AHEAD = 8192;
// How weights ahead are fetched: not at all; so that they stay in the last-level cache; or past that cache, if they do
// not fit and would push out what is read again soon. Measured on Zen 5 alone.
enum class Prefetch { none, to_stay, passing };
constexpr bool CAN_PASS = ZEN_5;
// Bytes of all tokens together that are multiplied with a part of each row: they stay in the first-level cache.
constexpr i64 CLOSE_BY = 32768;
constexpr i64 PART = 288;  // numbers: so many of 32 rows and 32 tokens fit into the first-level cache

// Tokens one after another.
template <class T> struct Matrix {
  const T* data;
  i64 rows, width;
  const float* scales = nullptr;  // of the rows, if numbers have sixteen bits
  const T* row(i64 i) const { return data + i * width; }
};

i64 blocks(i64 rows) { return (rows + LANES - 1) / LANES; }

// Kinds of weights: numbers like those of states; bytes, with a scale for each row; or packed, by GGUF's number.
constexpr i64 PLAIN = 0, IN_BYTES = 1;
template <class T> constexpr bool TAKES_BYTES = BYTES && std::is_same_v<T, bf16>;

// Weights, row after row unless they are packed.
struct Weights {
  const void* data;
  i64 kind, rows, width;
  i64 passing = 0;  // they do not stay in the last-level cache
  const float* scales = nullptr;  // of the rows of bytes

  template <class T> const T* row(i64 i) const { return (const T*)data + std::min(i, rows - 1) * width; }

  // Where the block of row n begins; T is the format of states.
  template <class T> const char* block(i64 n) const {
    if (kind == PLAIN) return (const char*)((const T*)data + n * width);
    return (const char*)data + (kind == IN_BYTES ? n * width : n / LANES * packed_bytes(kind, width));
  }
};

// A block of weights, and where this thread reads on after it, if anywhere.
struct Block {
  const Weights* w;
  i64 n;  // its first row
  const char* next = nullptr;

  // Where the numbers from k to `last` of row i lie. Beyond the last row these are the next numbers of the first rows,
  // or the next block.
  template <class T> const char* ahead(i64 i, i64 k, i64 last) const {
    const T *own = (const T*)w->data + n * w->width, *from = own;
    if (i >= LANES) i -= LANES, from = last < w->width ? own : (const T*)next, k = last < w->width ? last : 0;
    return (const char*)(from + i * w->width + k);
  }
};

template <class T> using Number = typename Vector<T>::Number;

// Adds a step of some tokens' products with some rows: the numbers from k on, of which `count` are left.
template <class T, int tokens, int beside>
inline __attribute__((always_inline)) void step(const Number<T>* const* x, const T* const* w, i64 k, i64 count,
                                                typename Vector<T>::Sum (&sum)[tokens][beside]) {
  using V = Vector<T>;
  typename V::Type of_w[beside];
#pragma GCC unroll 8
  for (int b = 0; b < beside; b++) of_w[b] = V::load(w[b] + k, count);
#pragma GCC unroll 2
  for (int part = 0; part < V::parts; part++) {
    decltype(V::part(of_w[0], 0)) part_w[beside];
#pragma GCC unroll 8
    for (int b = 0; b < beside; b++) part_w[b] = V::part(of_w[b], part);
#pragma GCC unroll 12
    for (int i = 0; i < tokens; i++) {
      auto part_x = V::of_token(x[i] + k, count, part);
      hold(part_x);
#pragma GCC unroll 8
      for (int b = 0; b < beside; b++) sum[i][b] = V::dot(sum[i][b], part_w[b], part_x);
    }
  }
}

// How many rows are multiplied side by side: so many that no sum waits for the one before, and all are in registers.
// With instructions for bfloat16, up to four tokens are quicker with one row.
constexpr int rows_beside(int tokens) {
  if (WIDE == 16) return tokens <= (PARTS == 1 ? 4 : 1) ? 1 : 2;
  return tokens <= 2 ? 4 : 2;
}

// The numbers of each of a row's equal parts; a row of at most `most` numbers is one part. Otherwise parts are half as
// long as a whole row may be, since sums are stored after each part and weights pass through the cache meanwhile.
inline i64 part_size(i64 width, i64 most, i64 of_register) {
  const i64 parts = width <= most ? 1 : (2 * width + most - 1) / most;
  return ((width + parts - 1) / parts + of_register - 1) / of_register * of_register;
}

// out[i][j] = x[m + i] . w[n + j], for the first `wanted` tokens.
template <class T, int tokens, Prefetch fetch>
void times(const Matrix<Number<T>>& x, i64 m, const Block& block, float* out, int wanted) {
  using V = Vector<T>;
  constexpr int beside = rows_beside(tokens);
  constexpr i64 most = CLOSE_BY / sizeof(Number<T>) / tokens;
  const i64 width = block.w->width, part = part_size(width, most, V::width);
  // Rows between the one in use and the one being fetched.
  const i64 rows = std::max<i64>(1, (tokens == 1 ? AHEAD_OF_ONE : AHEAD) / i64(part * sizeof(T)) / beside) * beside;
  const Number<T>* from_x[tokens];
  const T* from_w[beside];
  for (int i = 0; i < tokens; i++) from_x[i] = x.row(m + i);
  typename V::Sum sum[tokens][LANES];
  for (i64 first = 0; first < width; first += part) {
    const i64 last = std::min(first + part, width), whole = last / V::width * V::width;
    for (int j = 0; j < LANES; j += beside) {
      typename V::Sum so_far[tokens][beside];
      const char* ahead = block.ahead<T>(j + rows, first, last);
#pragma GCC unroll 8
      for (int b = 0; b < beside; b++) {
        from_w[b] = block.w->row<T>(block.n + j + b);
#pragma GCC unroll 12
        for (int i = 0; i < tokens; i++) so_far[i][b] = first ? sum[i][j + b] : typename V::Sum{};
      }
      for (i64 k = first; k < whole; k += V::width) {
        step<T, tokens, beside>(from_x, from_w, k, V::width, so_far);
        if (fetch != Prefetch::none)
          for (int b = 0; b < beside; b++)
            __builtin_prefetch(ahead + b * width * sizeof(T), 0, fetch == Prefetch::passing ? 0 : CLOSE);
        ahead += V::width * sizeof(T);
      }
      if (whole < last) step<T, tokens, beside>(from_x, from_w, whole, last - whole, so_far);
#pragma GCC unroll 12
      for (int i = 0; i < tokens; i++)
#pragma GCC unroll 8
        for (int b = 0; b < beside; b++) sum[i][j + b] = so_far[i][b];
    }
  }
  for (int i = 0; i < wanted; i++)
    for (int j = 0; j < LANES; j += WIDE) {
      Register some = __builtin_convertvector(sums(sum[i] + j), Register);
      if constexpr (std::is_same_v<T, Byte>) {
        Register of_rows;
        std::memcpy(&of_rows, block.w->scales + block.n + j, sizeof of_rows);
        some *= of_rows * x.scales[m + i];
      }
      std::memcpy(out + i * LANES + j, &some, sizeof some);
    }
}

// The same for `count` tokens, which become a constant.
template <class T, Prefetch fetch, int tokens = 1>
void times_group(const Matrix<Number<T>>& x, i64 m, i64 count, const Block& block, float* out) {
  if constexpr (tokens < (fetch == Prefetch::none ? GROUP : ALONE))
    if (count > tokens) return times_group<T, fetch, tokens + 1>(x, m, count, block, out);
  times<T, tokens == 1 ? 1 : std::max(tokens, FEWEST), fetch>(x, m, block, out, tokens);
}

// Tokens as products read them; what is null is not read. For plain weights: padded numbers for vectors, 16 tokens side
// by side for tiles, or turned. For bytes in sixteen bits, for blocks in eight.
template <class T> struct Input {
  i64 rows, width;
  Matrix<Number<T>> x{};
  const Words* tiles = nullptr;           // [groups, width / 2, 16 tokens], a word being two numbers
  const std::uint32_t* turned = nullptr;  // [16, groups, width / 32, parts, 8 tokens], if many (transposed_gemm.h)
  Matrix<Short> shorts{};
  const Portion* portions = nullptr;  // [width / 32, tokens]
};
using Rooms = std::vector<Words>[3];  // memory for these forms

// Each token padded with zeros to whole pairs of registers.
Matrix<float> widened(const Matrix<bf16>& x, std::vector<Words>& room) {
  constexpr i64 both = 2 * WIDE;
  const i64 width = (x.width + both - 1) / both * both;
  room.resize((x.rows * width + LANES - 1) / LANES);
  float* to = (float*)room.data();
  for (i64 m = 0; m < x.rows; m++)
    for (i64 k = 0; k < width; k += both, to += both) {
      bf16 part[both] = {};
      std::memcpy(part, x.row(m) + k, std::min(both, x.width - k) * sizeof(bf16));
      Pair numbers = apart(part);
      std::memcpy(to, &numbers, sizeof numbers);
    }
  return {(const float*)room.data(), x.rows, width};
}

// Each token at the beginning of a cache line: tokens are read for every few rows of weights, and a register that lies
// in two lines takes two reads.
template <class T> Matrix<T> lined_up(const Matrix<T>& x, std::vector<Words>& room) {
  constexpr i64 line = sizeof(Words) / sizeof(T);
  const i64 lines = (x.width + line - 1) / line;
  room.resize(x.rows * lines);
  T* to = (T*)room.data();
  for (i64 m = 0; m < x.rows; m++) std::copy_n(x.row(m), x.width, to + m * lines * line);
  return {to, x.rows, lines * line};
}

constexpr float NO_FRACTION = 12582912.0f;  // 1.5 * 2^23, which rounds what it is added to

// The steps of a token's largest number in sixteen bits: so many that sums of products with bytes fit into 32 bits.
inline i64 most_steps(i64 width) { return std::min<i64>(0x7fff, 0x7fffffff / (127 * width)); }

// Tokens in sixteen bits, each scaled by its largest number.
template <class T> Matrix<Short> rounded(const Matrix<T>& x, std::vector<Words>& room) {
  constexpr i64 line = sizeof(Words) / sizeof(Short);
  const i64 lines = (x.width + line - 1) / line;
  const float steps = most_steps(x.width);
  room.resize(x.rows * lines + blocks(x.rows));
  Short* to = (Short*)room.data();
  float* scales = (float*)(room.data() + x.rows * lines);
  for (i64 m = 0; m < x.rows; m++, to += lines * line) {
    Floats most{};
    for (i64 k = 0; k < x.width; k += LANES) {
      Floats part = get(x.row(m) + k, x.width - k);
      most = larger(most, larger(part, -part));
    }
    scales[m] = fold(most, larger_few) / steps;
    const float per_step = scales[m] > 0 ? 1 / scales[m] : 0;
    for (i64 k = 0; k < x.width; k += LANES) {
      Ints bits = (Ints)(get(x.row(m) + k, x.width - k) * per_step + NO_FRACTION) - 0x4b400000;
      Shorts part = __builtin_convertvector(bits, Shorts);
      std::memcpy(to + k, &part, sizeof part);
    }
  }
  return {(const Short*)room.data(), x.rows, lines * line, scales};
}

// Whether there are so many tokens that it pays to turn them and the rows.
template <class T> bool takes_turned(const Matrix<T>& x) {
  const i64 enough = x.width < WIDE_ROW ? TURNED_FROM : WIDE_TURNED_FROM;
  return TURNS && std::is_same_v<T, bf16> && x.rows >= enough && x.width % 32 == 0;
}

i64 turned_words(i64 rows, i64 width) { return (rows + TURNED_GROUP - 1) / TURNED_GROUP * OF_GROUP * width / 32; }

// Turns some of the tokens, whole groups; `to` has room for all.
template <class T> void turn(const Matrix<T>& x, Part tokens, Words* to) {
  const i64 groups = (x.rows + TURNED_GROUP - 1) / TURNED_GROUP;
  turn_tokens([&](i64 m) { return x.row(m); }, tokens, groups, x.width, (std::uint32_t*)to);
}

template <class T> bool takes_tiles(i64 width) { return has_tiles<T>() && width % 32 == 0; }

// Sixteen tokens side by side, a word being two numbers; padded with zeros.
template <class T> void side_by_side(const Matrix<T>& x, i64 group, Words* to) {
  const i64 count = std::min<i64>(LANES, x.rows - group * LANES);
  for (i64 k = 0; k < x.width / 2; k += LANES) {
    Words* part = to + k;
    std::fill(part, part + LANES, Words{});
    for (i64 i = 0; i < count; i++) std::memcpy(&part[i], x.row(group * LANES + i) + 2 * k, sizeof(Words));
    transpose(part);
  }
}

// The kinds of matrices that multiply the same tokens.
struct Kinds {
  bool plain = false, bytes = false, packed = false;
  Kinds(std::initializer_list<i64> kinds) {
    for (i64 kind : kinds) (kind == PLAIN ? plain : kind == IN_BYTES ? bytes : packed) = true;
  }
};

// Tokens for plain weights.
template <class T> void numbers_for(const Matrix<T>& x, Input<T>& in, std::vector<Words>& room) {
  if (takes_turned(x)) {
    room.resize(turned_words(x.rows, x.width));
    turn(x, Part(0, x.rows), room.data());
    in.turned = (const std::uint32_t*)room.data();
  } else if constexpr (!std::is_same_v<T, Number<T>>) {
    in.x = widened(x, room);
  } else if (takes_tiles<T>(x.width)) {
    const i64 groups = blocks(x.rows), words = x.width / 2;
    room.resize(groups * words);
    for (i64 group = 0; group < groups; group++) side_by_side(x, group, &room[group * words]);
    in.x = x, in.tiles = room.data();
  } else {
    in.x = lined_up(x, room);
  }
}

inline i64 portion_words(i64 rows, i64 width) { return blocks(rows * width / 32 * sizeof(Portion) / 4); }

template <class T> void round_tokens(const Matrix<T>& x, Part tokens, Words* to) {
  for (i64 m = tokens.first; m < tokens.last; m++) round_token(x.row(m), x.width, m, x.rows, (Portion*)to);
}

template <class T> Input<T> input(const Matrix<T>& x, const Kinds& kinds, Rooms& rooms) {
  Input<T> in{x.rows, x.width};
  if (kinds.plain) numbers_for(x, in, rooms[0]);
  if (TAKES_BYTES<T> && kinds.bytes) in.shorts = rounded(x, rooms[1]);
  if (kinds.packed) {
    rooms[2].resize(portion_words(x.rows, x.width));
    round_tokens(x, Part(0, x.rows), rooms[2].data());
    in.portions = (const Portion*)rooms[2].data();
  }
  return in;
}

// out[m][j] = x[m] . w[n + j] for all rows of x. The first group of tokens fetches ahead; the others find the block in
// the cache.
template <class T> void by_vectors(const Matrix<Number<T>>& x, const Block& block, float* out) {
  const i64 rows = x.rows, groups = rows <= ALONE ? 1 : (rows + GROUP - 1) / GROUP;
  // with short registers a single last token would take two thirds of the time of four
  const i64 size = groups == 1 || WIDE == 16 ? (rows + groups - 1) / groups : GROUP;
  if (CAN_PASS && block.w->passing && groups == 1)
    return times_group<T, CAN_PASS ? Prefetch::passing : Prefetch::to_stay>(x, 0, rows, block, out);
  times_group<T, Prefetch::to_stay>(x, 0, std::min(size, rows), block, out);
  for (i64 m = size; m < rows; m += size)
    times_group<T, Prefetch::none>(x, m, std::min(size, rows - m), block, out + m * LANES);
}

// Whether sixteen rows begin in different sets of a first-level cache with 64 sets. If not, they push each other out.
bool stays_close(i64 width) { return 64 / std::gcd(width / 32, i64(64)) >= LANES; }

// Products of one or two blocks by tiles. For many tokens rows are multiplied in parts, so that a part of a block stays
// in the first-level cache for all tokens, and the next block is fetched evenly meanwhile.
//   sums: [pairs of groups, blocks, groups of the pair, 16 rows, 16 tokens]
template <class T, int count> void sum_tiles(const Input<T>& in, const Block* block, Floats* sums) {
  const i64 width = in.width, rows = in.rows;
  const i64 parts = rows > 2 * LANES && stays_close(width) ? (width + PART - 1) / PART : 1;
  i64 part = ((width + parts - 1) / parts + 31) / 32 * 32, pairs = (rows + 2 * LANES - 1) / (2 * LANES);
  const T* weights[count];
  Ahead ahead[count];
  for (int b = 0; b < count; b++) {
    weights[b] = block[b].w->row<T>(block[b].n);
    ahead[b] = {block[b].next, block[b].next ? width / 2 : 0, (LANES + pairs - 1) / pairs};
  }
  auto tokens = [&](i64 m) { return in.tiles + m / LANES * (width / 2); };
  for (i64 k = 0; k < width; k += part) {
    i64 m = 0, last = std::min(k + part, width);
    for (; m + LANES < rows; m += 2 * LANES)
      times_tiles<count, 2>(tokens(m), k, last, width, weights, ahead, sums + m * count);
    if (m < rows) times_tiles<count, 1>(tokens(m), k, last, width, weights, ahead, sums + m * count);
  }
}

// Where the sums of one of `count` blocks with sixteen tokens, from m on, begin.
i64 sums_at(i64 count, i64 m, i64 rows, i64 block) {
  i64 pair = m / (2 * LANES) * 2 * LANES, groups = pair + LANES < rows ? 2 : 1;
  return pair * count + block * groups * LANES + (m - pair);
}

// The same turned, out[block][m][j].
template <class T, int count>
void by_tiles(const Input<T>& in, const Block* block, Floats* sums, float* out) {
  const i64 rows = in.rows;
  sum_tiles<T, count>(in, block, sums);
  for (i64 m = 0; m < rows; m += LANES)
    for (int b = 0; b < count; b++) {
      Floats* part = sums + sums_at(count, m, rows, b);
      transpose((Words*)part);
      for (i64 i = 0; i < std::min<i64>(LANES, rows - m); i++) put(out + (b * rows + m + i) * LANES, part[i]);
    }
}

struct Room {  // memory for the sums of two blocks and for turned rows, kept for the next blocks
  std::vector<float> out;
  std::vector<Floats> sums;
  std::vector<Words> rows;
  void hold(i64 size, i64 width) {
    const i64 words = width + width / 8;  // two turned blocks, and their numbers at a place
    if (i64(rows.size()) < words) rows.resize(words);
    if (i64(out.size()) >= size) return;
    out.resize(size);
    sums.resize(4 * (size / LANES + 2 * LANES));  // of turned rows four times as many wait
  }
};

// The same for one or two blocks that are turned first, while those after them are fetched. It goes place by place, so
// that the rows' numbers at a place stay in the cache for all tokens.
template <int count, class T> void by_turned(const Input<T>& in, const Block* block, Room& room, float* out) {
  const i64 width = in.width, steps = width / 32, groups = (in.rows + TURNED_GROUP - 1) / TURNED_GROUP;
  Words* rows = room.rows.data();
  auto* numbers = (Numbers*)(rows + count * LANES * steps);
  auto* waiting = (Waiting<count>*)room.sums.data();
  Ahead ahead[count];
  for (int b = 0; b < count; b++) {
    turn_rows([&](i64 i) { return block[b].w->row<bf16>(block[b].n + i); }, width, rows + b * LANES * steps);
    ahead[b] = {block[b].next, block[b].next ? LANES * steps : 0, steps / groups + 1};
  }
  for (int n = 0; n < LANES; n++) {
    const i64 place = PLACES[n];
    for (int b = 0; b < count; b++)
      for (i64 step = 0; step < steps; step++)
        for (int part = 0; part < PARTS; part++)
          numbers[(b * steps + step) * PARTS + part] = part_of(rows[(b * LANES + place) * steps + step], part);
    for (i64 group = 0; group < groups; group++) {
      const i64 m = group * TURNED_GROUP;
      float* to[count];
      for (int b = 0; b < count; b++) to[b] = out + (b * in.rows + m) * LANES, ahead[b].fetch();
      times_turned<count>(n, in.turned + (place * groups + group) * steps * OF_GROUP, in.rows - m, numbers, steps,
                          waiting[group], to);
    }
  }
}

// Where block i begins, or where this thread reads on after the last block; null beyond.
template <class T, class BlockOf> const char* start_of(i64 i, i64 last, BlockOf block_of, const char* after) {
  if (i >= last) return i == last ? after : nullptr;
  const Block block = block_of(i);
  return block.w->block<T>(block.n);
}

// Products of all tokens with a block that is not plain.
template <class T> void by_kind(const Input<T>& in, const Block& block, float* out) {
  if constexpr (TAKES_BYTES<T>)
    if (block.w->kind == IN_BYTES) return by_vectors<Byte>(in.shorts, block, out);
  with_form(block.w->kind, [&](auto form) {
    const Octet* weights = (const Octet*)block.w->block<T>(block.n);
    times_packed(form, weights, block.w->width, in.portions, in.rows, out);
  });
}

// Products of all tokens with one or two blocks. `block_of(i)` is the i-th, without `next`; after its share this thread
// reads on at `after`.
//   store(i, sums): sums of block i, [M, 16]; of two blocks those of the first lie before those of the second.
template <class T, class BlockOf, class Store>
void products(const Input<T>& in, const Item& item, BlockOf block_of, const char* after, Room& room, Store store) {
  const i64 size = in.rows * LANES, i = item.first, count = item.last - i;
  room.hold(2 * size, in.turned ? in.width : 0);
  float* out = room.out.data();
  Block block[2] = {block_of(i), block_of(i + count - 1)};
  auto plain = [&](i64 b) { return block[b].w->kind == PLAIN; };
  auto tiled = [&](i64 b) { return in.tiles && plain(b) && block[b].w->rows % LANES == 0; };
  auto turned = [&](i64 b) { return TURNS && std::is_same_v<T, bf16> && in.turned && plain(b); };
  auto read_on = [&](i64 ahead) {
    for (i64 b = 0; b < count; b++) block[b].next = start_of<T>(i + ahead + b, item.end, block_of, after);
  };
  // two blocks together save arithmetic, one by one they save memory
  if (count == 2 && turned(0) && turned(1)) {
    read_on(2);
    by_turned<2>(in, block, room, out);
  } else if (count == 2 && tiled(0) && tiled(1) && in.rows > LANES) {
    read_on(2);
    by_tiles<T, 2>(in, block, room.sums.data(), out);
  } else {
    read_on(1);
    for (i64 b = 0; b < count; b++) {
      float* to = out + b * size;
      if (turned(b)) {
        by_turned<1>(in, block + b, room, to);
      } else if (tiled(b)) {
        by_tiles<T, 1>(in, block + b, room.sums.data(), to);
      } else if (plain(b)) {
        by_vectors<T>(in.x, block[b], to);
      } else {
        by_kind<T>(in, block[b], to);
      }
    }
  }
  for (i64 b = 0; b < count; b++) store(i + b, out + b * size);
}

}  // namespace
