// GGUF's blocks of weights, and tokens in eight bits that are multiplied with them.
//
// At load sixteen rows are put side by side: a lane of a register is a row, and its word four neighbouring numbers. So
// sums never cross lanes, and none depends on the number of tokens. All kinds have one form: a part of a row, 16 or 32
// numbers, is s q + m, where q are whole numbers from 0 on. Within a part sums are whole numbers.

#pragma once

#include "numbers.h"

namespace {

using Octet = std::uint8_t;
using Half = std::uint16_t;  // float16

// How sixteen rows of a kind lie: in stretches of `parts` parts that share a header.
//   scaled: whether each part has a scale of its own, a whole number that multiplies the stretch's d.
//   shifted: whether m is in the file; otherwise it is -offset s.
//   coded: whether its bits are the place of q in `CODES`.
template <int BITS, int COLUMNS, int PARTS_, bool SCALED, bool SHIFTED, int OFFSET, bool CODED = false> struct Form {
  static constexpr int bits = BITS, columns = COLUMNS, parts = PARTS_, offset = OFFSET;
  static constexpr bool scaled = SCALED, shifted = SHIFTED, coded = CODED;
  static constexpr int planes = columns / 4;                   // words of a part
  static constexpr int per_block = parts * columns;            // numbers of a row in a stretch: one of its blocks
  static constexpr i64 of_part = i64(bits) * columns * LANES / 8;
  static constexpr i64 header = (2 + (scaled ? parts : 0)) * LANES * (shifted ? 2 : 1);
  static constexpr i64 bytes = header + parts * of_part;
  // In a header: d of each row; m of each row; scales of each part; minima of each part.
  static constexpr i64 scales_at = 2 * LANES * (shifted ? 2 : 1), minima_at = scales_at + parts * LANES;
};

struct FormQ4_0 : Form<4, 32, 1, false, false, 8> { static constexpr int block = 18; };
struct FormQ4_1 : Form<4, 32, 1, false, true, 0> { static constexpr int block = 20; };
struct FormQ5_0 : Form<5, 32, 1, false, false, 16> { static constexpr int block = 22; };
struct FormQ5_1 : Form<5, 32, 1, false, true, 0> { static constexpr int block = 24, kind = 7; };
struct FormQ8_0 : Form<8, 32, 1, false, false, 128> { static constexpr int block = 34; };
// Two and three bits take four here.
struct FormQ2_K : Form<4, 16, 16, true, true, 0> { static constexpr int block = 84; };
struct FormQ3_K : Form<4, 16, 16, true, false, 4> { static constexpr int block = 110; };
struct FormQ4_K : Form<4, 32, 8, true, true, 0> { static constexpr int block = 144; };
struct FormQ5_K : Form<5, 32, 8, true, true, 0> { static constexpr int block = 176; };
struct FormQ6_K : Form<6, 16, 16, true, false, 32> { static constexpr int block = 210; };
struct FormIQ4_NL : Form<4, 32, 1, false, false, 128, true> { static constexpr int block = 18; };
struct FormIQ4_XS : Form<4, 32, 8, true, false, 128, true> { static constexpr int block = 136; };

// Calls f with the form of a kind, by GGUF's number; does nothing for other kinds.
template <class F> void with_form(i64 kind, F f) {
  switch (kind) {
    case 2: return f(FormQ4_0{});
    case 3: return f(FormQ4_1{});
    case 6: return f(FormQ5_0{});
    case FormQ5_1::kind: return f(FormQ5_1{});
    case 8: return f(FormQ8_0{});
    case 10: return f(FormQ2_K{});
    case 11: return f(FormQ3_K{});
    case 12: return f(FormQ4_K{});
    case 13: return f(FormQ5_K{});
    case 14: return f(FormQ6_K{});
    case 20: return f(FormIQ4_NL{});
    case 23: return f(FormIQ4_XS{});
  }
}

// The bytes of sixteen rows in this layout.
i64 packed_bytes(i64 kind, i64 width) {
  i64 bytes = 0;
  with_form(kind, [&](auto form) { bytes = width / form.per_block * form.bytes; });
  return bytes;
}

// The sixteen numbers of IQ4's codes, the offset added.
constexpr Octet CODES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

// A block of a row in a file, as whole numbers.
struct Unpacked {
  Octet q[256], scales[16], minima[16];
  Half d, m;
};

Half half_at(const Octet* from) {
  Half half;
  std::memcpy(&half, from, sizeof half);
  return half;
}

void nibbles(const Octet* from, int count, Octet* to) {
  for (int i = 0; i < count; i++) to[i] = from[i] & 15, to[i + count] = from[i] >> 4;
}

// 128 numbers of two bits: 32 bytes hold the first 32, then above them the next.
void pairs_of_bits(const Octet* from, Octet* to) {
  for (int i = 0; i < 128; i++) to[i] = from[i % 32] >> i / 32 * 2 & 3;
}

template <class F> void unpack_32(const Octet* from, Unpacked& to) {
  to.d = half_at(from);
  if (F::shifted) to.m = half_at(from + 2);
  const Octet* numbers = from + (F::shifted ? 4 : 2);
  if (F::bits == 8) {
    for (int i = 0; i < 32; i++) to.q[i] = numbers[i] ^ 128;
    return;
  }
  nibbles(numbers + (F::bits == 5 ? 4 : 0), 16, to.q);
  if (F::bits == 5)
    for (int i = 0; i < 32; i++) to.q[i] |= (numbers[i / 8] >> i % 8 & 1) << 4;
}

void unpack_scales(const Octet* from, Unpacked& to) {
  for (int i = 0; i < 4; i++) {
    to.scales[i] = from[i] & 63;
    to.minima[i] = from[i + 4] & 63;
    to.scales[i + 4] = (from[i + 8] & 15) | from[i] >> 6 << 4;
    to.minima[i + 4] = from[i + 8] >> 4 | from[i + 4] >> 6 << 4;
  }
}

template <class F> void unpack_k(const Octet* from, Unpacked& to) {
  to.d = half_at(from);
  to.m = half_at(from + 2) ^ 0x8000;  // the file's is subtracted
  unpack_scales(from + 4, to);
  const Octet *high = from + 16, *low = high + (F::bits == 5 ? 32 : 0);
  for (int group = 0; group < 4; group++) nibbles(low + 32 * group, 32, to.q + 64 * group);
  for (int i = 0; F::bits == 5 && i < 256; i++) to.q[i] |= (high[i % 32] >> i / 32 & 1) << 4;
}

void unpack_6_k(const Octet* from, Unpacked& to) {
  const Octet *low = from, *high = from + 128;
  std::memcpy(to.scales, from + 192, 16);
  to.d = half_at(from + 208);
  for (int half = 0; half < 2; half++, low += 64, high += 32) {
    Octet more[128];
    pairs_of_bits(high, more);
    nibbles(low, 64, to.q + 128 * half);
    for (int i = 0; i < 128; i++) to.q[128 * half + i] |= more[i] << 4;
  }
}

void unpack_2_k(const Octet* from, Unpacked& to) {
  for (int part = 0; part < 16; part++) to.scales[part] = from[part] & 15, to.minima[part] = from[part] >> 4;
  for (int half = 0; half < 2; half++) pairs_of_bits(from + 16 + 32 * half, to.q + 128 * half);
  to.d = half_at(from + 80);
  to.m = half_at(from + 82) ^ 0x8000;  // subtracted in the file
}

void unpack_3_k(const Octet* from, Unpacked& to) {
  const Octet *high = from, *low = from + 32, *scales = from + 96;
  for (int half = 0; half < 2; half++) pairs_of_bits(low + 32 * half, to.q + 128 * half);
  for (int i = 0; i < 256; i++) to.q[i] |= (high[i % 32] >> i / 32 & 1) << 2;
  for (int part = 0; part < 16; part++)
    to.scales[part] = ((scales[part % 8] >> part / 8 * 4 & 15) | (scales[8 + part % 4] >> part / 4 * 2 & 3) << 4) - 32;
  to.d = half_at(from + 108);
}

void unpack_iq4_xs(const Octet* from, Unpacked& to) {
  to.d = half_at(from);
  const Half high = half_at(from + 2);
  for (int i = 0; i < 8; i++) to.scales[i] = ((from[4 + i / 2] >> i % 2 * 4 & 15) | (high >> 2 * i & 3) << 4) - 32;
  for (int i = 0; i < 8; i++) nibbles(from + 8 + 16 * i, 16, to.q + 32 * i);
}

void unpack(FormQ2_K, const Octet* from, Unpacked& to) { unpack_2_k(from, to); }
void unpack(FormQ3_K, const Octet* from, Unpacked& to) { unpack_3_k(from, to); }
void unpack(FormQ4_K, const Octet* from, Unpacked& to) { unpack_k<FormQ4_K>(from, to); }
void unpack(FormQ5_K, const Octet* from, Unpacked& to) { unpack_k<FormQ5_K>(from, to); }
void unpack(FormQ6_K, const Octet* from, Unpacked& to) { unpack_6_k(from, to); }
void unpack(FormIQ4_XS, const Octet* from, Unpacked& to) { unpack_iq4_xs(from, to); }
template <class F> void unpack(F, const Octet* from, Unpacked& to) { unpack_32<F>(from, to); }

float widen_half(Half half) {
  auto as_float = [](std::uint32_t bits) {
    float number;
    std::memcpy(&number, &bits, sizeof number);
    return number;
  };
  const std::uint32_t bits = half & 0x7fff, sign = half & 0x8000;
  if (bits >= 0x7c00) return as_float(bits << 13 | 0x7f800000 | sign << 16);  // infinity or NaN
  return as_float(bits << 13) * (sign ? -0x1p112f : 0x1p112f);
}

// The nearest float16 towards zero; infinity if there is none.
Half narrow_half(float number) {
  std::uint32_t bits;
  const float small = std::abs(number) * 0x1p-112f;
  std::memcpy(&bits, &small, sizeof bits);
  return std::min<std::uint32_t>(bits >> 13, 0x7c00) | (number < 0 ? 0x8000 : 0);
}

// Row i of a file's blocks, as numbers.
template <class T> void widen_row(i64 kind, const Octet* from, i64 i, i64 width, T* to) {
  with_form(kind, [&](auto form) {
    using F = decltype(form);
    Unpacked block;
    const Octet* blocks = from + i * (width / F::per_block) * F::block;
    for (i64 k = 0; k < width; k += F::columns) {
      const int part = k % F::per_block / F::columns;
      if (!part) unpack(form, blocks + k / F::per_block * F::block, block);
      float s = widen_half(block.d), m = F::shifted ? widen_half(block.m) : 0;
      if (F::scaled) s *= F::shifted ? block.scales[part] : Byte(block.scales[part]);
      if (F::scaled && F::shifted) m *= block.minima[part];
      for (int j = 0; j < F::columns; j += LANES) {
        Floats numbers;
        for (int n = 0; n < LANES; n++) {
          const Octet q = block.q[part * F::columns + j + n];
          numbers[n] = s * ((F::coded ? CODES[q] : q) - F::offset) + m;
        }
        put(to + k + j, numbers);
      }
    }
  });
}

// Puts a block of a row beside those of the other fifteen rows.
template <class F> void place(const Unpacked& from, int row, Octet* to) {
  std::memcpy(to + 2 * row, &from.d, 2);
  if (F::shifted) std::memcpy(to + 2 * LANES + 2 * row, &from.m, 2);
  for (int part = 0; F::scaled && part < F::parts; part++) {
    to[F::scales_at + part * LANES + row] = from.scales[part];
    if (F::shifted) to[F::minima_at + part * LANES + row] = from.minima[part];
  }
  for (int part = 0; part < F::parts; part++) {
    Octet* words = to + F::header + part * F::of_part;
    std::uint32_t q[F::planes], high = 0;
    std::memcpy(q, from.q + part * F::columns, sizeof q);
    auto put_word = [&](int i, std::uint32_t word) { std::memcpy(words + (i * LANES + row) * 4, &word, 4); };
    if (F::bits == 8) {
      for (int i = 0; i < F::planes; i++) put_word(i, q[i]);
      continue;
    }
    constexpr std::uint32_t nibble = 0x0f0f0f0f, more = F::bits == 6 ? 0x03030303 : 0x01010101;
    for (int i = 0; i < F::planes; i++) high |= (q[i] >> 4 & more) << i * (F::bits - 4);
    for (int i = 0; i < F::planes; i += 2) put_word(i / 2, (q[i] & nibble) | (q[i + 1] & nibble) << 4);
    if (F::bits > 4) put_word(F::planes / 2, high);
  }
}

// Puts sixteen rows of blocks side by side; if there are fewer, the last one is repeated.
template <class F> void repack(F form, const Octet* from, i64 row_bytes, i64 rows, i64 width, Octet* to) {
  Unpacked block;
  for (i64 i = 0; i < width / F::per_block; i++, to += F::bytes)
    for (int row = 0; row < LANES; row++) {
      unpack(form, from + std::min<i64>(row, rows - 1) * row_bytes + i * F::block, block);
      place<F>(block, row, to);
    }
}

// 32 numbers of a token in eight bits, their scale and sum, and for each half the sum of the whole numbers.
struct alignas(16) Portion {
  std::uint32_t words[8];  // of four numbers
  float scale, sum;
  Short halves[2];
};

// Stores 32 whole numbers as bytes.
inline void put_bytes(const Register* from, std::uint32_t* to) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  auto whole = [&](int i) { return (__m256i)__builtin_convertvector(from[i], RegisterInts); };
  const __m256i low = _mm256_packs_epi32(whole(0), whole(1)), high = _mm256_packs_epi32(whole(2), whole(3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256((__m256i*)to, _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
#else
  typedef Byte Bytes __attribute__((vector_size(WIDE)));
  for (int i = 0; i < 32 / WIDE; i++) {
    const Bytes bytes = __builtin_convertvector(__builtin_convertvector(from[i], RegisterInts), Bytes);
    std::memcpy((Byte*)to + i * WIDE, &bytes, sizeof bytes);
  }
#endif
}

// Rounds the m-th of some tokens, which lie as [width / 32, tokens].
template <class T> void round_token(const T* from, i64 width, i64 m, i64 tokens, Portion* to) {
  constexpr int count = 32 / WIDE;
  for (i64 k = 0; k < width; k += 32) {
    Portion& portion = to[k / 32 * tokens + m];
    Register part[count], most{};
    for (int i = 0; i < count; i++) {
      part[i] = few(from + k + i * WIDE);
      most = larger_few(most, larger_few(part[i], -part[i]));
    }
    const float largest = fold_few(most, larger_few), per_step = largest > 0 ? 127 / largest : 0;
    Register sums[2]{};
    for (int i = 0; i < count; i++) {
      part[i] = part[i] * per_step + 12582912.0f - 12582912.0f;  // no fraction
      sums[2 * i / count] += part[i];
    }
    put_bytes(part, portion.words);
    auto sum_few = [](Register v) { return fold_few(v, [](Register a, Register b) { return a + b; }); };
    const float first = sum_few(sums[0]), second = sum_few(sums[1]), all = first + second;
    const bool numbers = all == all;  // if one is infinite or NaN, products are NaN
    portion.scale = numbers ? largest / 127 : all;
    portion.sum = all * portion.scale;
    portion.halves[0] = numbers ? first : 0, portion.halves[1] = numbers ? second : 0;
  }
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define DOTS_OF_FOUR 1
#elif defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
#define DOTS_OF_TWO 1
#endif

// Two products with numbers above 128 have no room in sixteen bits. There numbers of eight bits have no offset, but a
// sign, which the token's numbers take over.
#ifdef DOTS_OF_TWO
template <class F> constexpr bool WITH_SIGN = F::offset == 128;
#else
template <class F> constexpr bool WITH_SIGN = false;
#endif

RegisterWords words_at(const Octet* from) {
  RegisterWords words;
  std::memcpy(&words, from, sizeof words);
  return words;
}

// Each byte, below 16, replaced by the table's number there.
inline RegisterWords looked_up(const Octet* table, RegisterWords places) {
#if defined(__AVX512BW__)
  const __m512i numbers = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table));
  return (RegisterWords)_mm512_shuffle_epi8(numbers, (__m512i)places);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table));
  return (RegisterWords)_mm256_shuffle_epi8(numbers, (__m256i)places);
#else
  Octet bytes[sizeof places];
  std::memcpy(bytes, &places, sizeof bytes);
  for (Octet& byte : bytes) byte = table[byte];
  return words_at(bytes);
#endif
}

// The whole numbers q of a part of WIDE rows.
template <class F> inline __attribute__((always_inline)) void numbers_of(const Octet* from, RegisterWords* q) {
  constexpr std::uint32_t nibble = 0x0f0f0f0f;
  if (F::bits == 8) {
#pragma GCC unroll 8
    for (int i = 0; i < F::planes; i++) q[i] = words_at(from + i * 4 * LANES);
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < F::planes / 2; i++) {
    const RegisterWords both = words_at(from + i * 4 * LANES);
    q[2 * i] = both & nibble;
    q[2 * i + 1] = both >> 4 & nibble;
  }
#pragma GCC unroll 8
  for (int i = 0; F::coded && i < F::planes; i++) q[i] = looked_up(CODES, q[i]);
  if (F::bits == 4) return;
  constexpr std::uint32_t more = F::bits == 6 ? 0x30303030 : 0x10101010;
  const RegisterWords high = words_at(from + F::planes / 2 * 4 * LANES);
#pragma GCC unroll 8
  for (int i = 0; i < F::planes; i++) {
    const int up = 4 - i * (F::bits - 4);
    q[i] |= (up > 0 ? high << up : high >> -up) & more;
  }
}

// Two numbers of sixteen bits in each word.
inline RegisterWords pairs_of(RegisterInts lower, RegisterInts upper) {
  return ((RegisterWords)lower & 0xffff) | (RegisterWords)upper << 16;
}
inline RegisterWords pairs_of(const Short* pair) {
  std::uint32_t both;
  std::memcpy(&both, pair, sizeof both);
  return RegisterWords{} + both;
}

// Sizes of bytes; bytes that change their sign where `like` is negative; and in each word the sum of two products, of
// neighbouring bytes (the first without a sign) and of sixteen bits.
#if defined(__AVX512BW__)
inline RegisterWords size_of(RegisterWords bytes) { return (RegisterWords)_mm512_abs_epi8((__m512i)bytes); }
inline RegisterWords with_sign(RegisterWords bytes, RegisterWords like) {
  const __m512i zero = _mm512_setzero_si512();
  return (RegisterWords)_mm512_mask_sub_epi8((__m512i)bytes, _mm512_movepi8_mask((__m512i)like), zero, (__m512i)bytes);
}
inline RegisterWords products_of_bytes(RegisterWords a, RegisterWords b) {
  return (RegisterWords)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
}
inline RegisterInts products_of_pairs(RegisterWords a, RegisterWords b) {
  return (RegisterInts)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
#elif defined(DOTS_OF_TWO)
inline RegisterWords size_of(RegisterWords bytes) { return (RegisterWords)_mm256_abs_epi8((__m256i)bytes); }
inline RegisterWords with_sign(RegisterWords bytes, RegisterWords like) {
  return (RegisterWords)_mm256_sign_epi8((__m256i)bytes, (__m256i)like);
}
inline RegisterWords products_of_bytes(RegisterWords a, RegisterWords b) {
  return (RegisterWords)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
}
inline RegisterInts products_of_pairs(RegisterWords a, RegisterWords b) {
  return (RegisterInts)_mm256_madd_epi16((__m256i)a, (__m256i)b);
}
#else
inline RegisterInts products_of_pairs(RegisterWords a, RegisterWords b) {
  auto lower = [](RegisterWords pairs) { return (RegisterInts)(pairs << 16) >> 16; };
  return lower(a) * lower(b) + ((RegisterInts)a >> 16) * ((RegisterInts)b >> 16);
}
#endif

Register halves_at(const Octet* from) {
#if defined(__AVX512F__)
  return (Register)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
  return (Register)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
  typedef Half Few __attribute__((vector_size(2 * WIDE)));
  Few few;
  std::memcpy(&few, from, sizeof few);
  const RegisterWords bits = __builtin_convertvector(few, RegisterWords);
  return (Register)(((RegisterWords)((Register)((bits & 0x7fff) << 13) * 0x1p112f)) | (bits & 0x8000) << 16);
#endif
}

// A byte of each row, signed or not.
template <bool SIGNED> RegisterInts octets_at(const Octet* from) {
#if defined(__AVX512F__)
  const __m128i few = _mm_loadu_si128((const __m128i*)from);
  return (RegisterInts)(SIGNED ? _mm512_cvtepi8_epi32(few) : _mm512_cvtepu8_epi32(few));
#elif defined(__AVX2__)
  const __m128i few = _mm_loadl_epi64((const __m128i*)from);
  return (RegisterInts)(SIGNED ? _mm256_cvtepi8_epi32(few) : _mm256_cvtepu8_epi32(few));
#else
  RegisterInts numbers;
  for (int i = 0; i < WIDE; i++) numbers[i] = SIGNED ? Byte(from[i]) : from[i];
  return numbers;
#endif
}

inline Register as_floats(RegisterInts numbers) { return __builtin_convertvector(numbers, Register); }

// 32 numbers of WIDE rows, as tokens are multiplied with them: a part, or two of 16 numbers. Two parts are summed as whole
// numbers, each times its scale, and the offset with them.
template <class F> struct Parts {
  static constexpr int count = 32 / F::columns;
  static constexpr bool has_m = F::shifted || !WITH_SIGN<F>;  // of a single part
  RegisterWords q[8], signs[8];
  RegisterWords factors[count];
  RegisterWords of_halves;  // minima or offsets of two parts, which multiply a token's sums
  Register s, m;

  // `w`: where the stretch of sixteen rows begins.
  inline __attribute__((always_inline)) Parts(const Octet* w, int first, int lane) {
    s = halves_at(w + 2 * lane), m = Register{};
    if (F::shifted) m = halves_at(w + 2 * (LANES + lane));
    RegisterInts scales[count], minima[count];
#pragma GCC unroll 2
    for (int i = 0; i < count; i++) {
      numbers_of<F>(w + F::header + (first + i) * F::of_part + 4 * lane, q + i * F::planes);
      const i64 at = (first + i) * LANES + lane;
      if (F::scaled) scales[i] = octets_at<!F::shifted>(w + F::scales_at + at);
      if (F::scaled && F::shifted) minima[i] = octets_at<false>(w + F::minima_at + at);
    }
    if constexpr (count == 2) {
      for (int i = 0; i < 2; i++) factors[i] = factor_of(scales[i]);
      of_halves = F::shifted ? pairs_of(minima[0], minima[1]) : pairs_of(scales[0] * -F::offset, scales[1] * -F::offset);
    } else {
      factors[0] = factor_of(RegisterInts{} + 1);
      if (F::scaled) s *= as_floats(scales[0]);
      if (F::scaled && F::shifted) m *= as_floats(minima[0]);
      if (!F::shifted) m = s * float(-F::offset);
    }
#ifdef DOTS_OF_TWO
#pragma GCC unroll 8
    for (int i = 0; WITH_SIGN<F> && i < 8; i++) {
      signs[i] = q[i] ^ 0x80808080;
      q[i] = size_of(signs[i]);
    }
#endif
  }

  // Adds the products with a token.
  inline __attribute__((always_inline)) Register add(Register sum, const Portion& x) const {
    RegisterInts dots = dot_of(x.words, 0);
    if (count == 2) dots += dot_of(x.words, 1);
    if (count == 2 && !F::shifted) dots += products_of_pairs(of_halves, pairs_of(x.halves));
    sum += as_floats(dots) * (s * x.scale);
    if (count == 2 && F::shifted) sum += as_floats(products_of_pairs(of_halves, pairs_of(x.halves))) * (m * x.scale);
    if (count == 1 && has_m) sum += m * x.sum;
    return sum;
  }

 private:
#ifdef DOTS_OF_TWO
  static RegisterWords factor_of(RegisterInts number) { return pairs_of(number, number); }
#else
  static RegisterWords factor_of(RegisterInts number) { return (RegisterWords)number; }
#endif

  // Products of a part with that part of a token, times a factor of each row.
  inline __attribute__((always_inline)) RegisterInts dot_of(const std::uint32_t* words, int part) const {
    const RegisterWords* own = q + part * F::planes;
    const std::uint32_t* x = words + part * F::planes;
#if defined(DOTS_OF_FOUR)
    __m512i sum[2] = {};
#pragma GCC unroll 8
    for (int i = 0; i < F::planes; i++)
      sum[i % 2] = _mm512_dpbusd_epi32(sum[i % 2], (__m512i)own[i], _mm512_set1_epi32(x[i]));
    const RegisterInts all = (RegisterInts)_mm512_add_epi32(sum[0], sum[1]);
    return count == 2 ? all * (RegisterInts)factors[part] : all;
#elif defined(DOTS_OF_TWO)
    // sums that fit into sixteen bits
    constexpr int together = WITH_SIGN<F> ? 1 : F::bits == 6 ? 2 : F::bits == 5 ? 4 : F::planes;
    RegisterInts sum{};
#pragma GCC unroll 8
    for (int i = 0; i < F::planes; i += together) {
      RegisterShorts twos{};
#pragma GCC unroll 8
      for (int j = i; j < i + together; j++) {
        const RegisterWords of_token = RegisterWords{} + x[j];
        twos += (RegisterShorts)products_of_bytes(own[j], WITH_SIGN<F> ? with_sign(of_token, signs[j]) : of_token);
      }
      sum += products_of_pairs((RegisterWords)twos, factors[part]);
    }
    return sum;
#else
    RegisterInts sum{};
    for (int i = 0; i < F::planes; i++)
      for (int j = 0; j < 4; j++)
        sum += (RegisterInts)(own[i] >> 8 * j & 255) * std::int32_t(Byte(x[i] >> 8 * j));
    return count == 2 ? sum * (RegisterInts)factors[part] : sum;
#endif
  }
};

constexpr i64 FETCHED_AHEAD = 4096;  // bytes between the weights in use and those being fetched

// out[m][j] = x[m] . w[j] for sixteen rows, whose weights begin at `w`.
template <class F> void times_packed(F, const Octet* w, i64 width, const Portion* x, i64 tokens, float* out) {
  constexpr int count = Parts<F>::count;
  std::fill_n(out, tokens * LANES, 0.0f);
  for (i64 k = 0; k < width; k += F::per_block, w += F::bytes)
    for (int part = 0; part < F::parts; part += count) {
      const Portion* portions = x + (k + part * F::columns) / 32 * tokens;
      const Octet* numbers = w + F::header + part * F::of_part;
      for (i64 line = 0; line < F::bytes / F::parts * count; line += 64) __builtin_prefetch(numbers + FETCHED_AHEAD + line);
      for (int lane = 0; lane < LANES; lane += WIDE) {
        const Parts<F> rows(w, part, lane);
        float* to = out + lane;
        for (i64 i = 0; i < tokens; i++, to += LANES) put_few(to, rows.add(few(to), portions[i]));
      }
    }
}

}  // namespace
