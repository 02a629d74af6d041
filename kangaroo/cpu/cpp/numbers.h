// Numbers sixteen at a time: loads and stores of float32 and bfloat16, sums in a fixed order, exp and log.

#pragma once

#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace {

using i64 = std::int64_t;
using bf16 = std::uint16_t;
using Byte = std::int8_t;  // of weights in eight bits, and
using Short = std::int16_t;  // of a token that is multiplied with them
typedef float Floats __attribute__((vector_size(64)));  // 16 of them
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef bf16 Halves __attribute__((vector_size(32)));
typedef Short Shorts __attribute__((vector_size(32)));

constexpr int LANES = 16;

// What the inner loops count in: as many numbers as a register holds. gcc keeps longer vectors in memory.
#if defined(__AVX512F__)
constexpr int WIDE = 16;
#elif defined(__AVX__)
constexpr int WIDE = 8;
#else
constexpr int WIDE = 4;
#endif
typedef float Register __attribute__((vector_size(4 * WIDE)));
typedef std::int32_t RegisterInts __attribute__((vector_size(4 * WIDE)));
typedef std::uint32_t RegisterWords __attribute__((vector_size(4 * WIDE)));
typedef Short RegisterShorts __attribute__((vector_size(4 * WIDE)));
typedef Byte HalfBytes __attribute__((vector_size(2 * WIDE)));

constexpr float NEVER = -std::numeric_limits<float>::infinity();

float widen(float x) { return x; }
float widen(bf16 x) {
  std::uint32_t bits = std::uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}

Words words_of(Halves halves) {
#ifdef __AVX512F__
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);  // gcc 12 makes six instructions of the other
#else
  return __builtin_convertvector(halves, Words);
#endif
}

// Sixteen numbers, or what is left of them.
Floats get(const float* from) {
  Floats v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
Floats get(const bf16* from) {
  Halves v;
  std::memcpy(&v, from, sizeof v);
  return (Floats)(words_of(v) << 16);
}
template <class T> Floats get(const T* from, i64 count) {
  if (count >= LANES) return get(from);
  T padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return get(padded);
}

// f of sixteen numbers, a register at a time.
template <class F> inline __attribute__((always_inline)) Floats by_registers(Floats v, F f) {
  Register part[LANES / WIDE];
  std::memcpy(part, &v, sizeof v);
  for (int i = 0; i < LANES / WIDE; i++) part[i] = f(part[i]);
  std::memcpy(&v, part, sizeof v);
  return v;
}

Halves narrowed(Floats all) {  // to nearest, ties to even
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)all);
#else
  return __builtin_convertvector((Words)by_registers(all, [](Register v) {
    RegisterWords bits = (RegisterWords)v;
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (Register)(v == v ? bits : RegisterWords{} + 0x7fc0);
  }), Halves);
#endif
}
void put(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
void put(bf16* to, Floats v) {
  Halves half = narrowed(v);
  std::memcpy(to, &half, sizeof half);
}
template <class T> void put(T* to, Floats v, i64 count) {
  if (count >= LANES) return put(to, v);
  T padded[LANES];
  put(padded, v);
  std::memcpy(to, padded, count * sizeof(T));
}

// What numbers become when they are stored in between, as the model's own modules store them.
template <class T> Floats stored(Floats v);
template <> Floats stored<float>(Floats v) { return v; }
template <> Floats stored<bf16>(Floats v) { return (Floats)(words_of(narrowed(v)) << 16); }

// Two numbers of bfloat16 in a word, of sixteen words.
Floats first_of(Words pairs) { return (Floats)(pairs << 16); }
Floats second_of(Words pairs) { return (Floats)(pairs & 0xffff0000u); }
Words pair_of(Floats first, Floats second) {
  return words_of(narrowed(first)) | words_of(narrowed(second)) << 16;
}

#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

template <class Merge> float fold(Floats v, Merge merge) {
  v = merge(v, PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = merge(v, PICK(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = merge(v, PICK(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = merge(v, PICK(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
  return v[0];
}
float sum_of(Floats v) {
  return fold(v, [](Floats a, Floats b) { return a + b; });
}
Floats larger(Floats a, Floats b) { return a > b ? a : b; }

// The numbers of two registers, in whichever order is quick to read, and put in order again.
struct Pair { Register a, b; };
Pair apart(const float* from) {
  Register a, b;
  std::memcpy(&a, from, sizeof a);
  std::memcpy(&b, from + WIDE, sizeof b);
  return {a, b};
}
Pair apart(const bf16* from) {
  RegisterWords words;
  std::memcpy(&words, from, sizeof words);
  return {(Register)(words << 16), (Register)(words & 0xffff0000u)};
}
void together(Pair p, float, float* to) { std::memcpy(to, &p, sizeof p); }
void together(Pair p, bf16, float* to) {
#ifdef __AVX512F__
  Register low = PICK(p.a, p.b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  Register high = PICK(p.a, p.b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  std::memcpy(to, &low, sizeof low);
  std::memcpy(to + WIDE, &high, sizeof high);
#else
  for (int i = 0; i < WIDE; i++) to[2 * i] = p.a[i], to[2 * i + 1] = p.b[i];
#endif
}

// Row i, word j becomes row j, word i.
inline __attribute__((always_inline)) void transpose(Words* r) {
  for (int i = 0; i < 8; i++) {
    Words a = r[i], b = r[i + 8];
    r[i] = PICK(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    r[i + 8] = PICK(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  }
  for (int i : {0, 1, 2, 3, 8, 9, 10, 11}) {
    Words a = r[i], b = r[i + 4];
    r[i] = PICK(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
    r[i + 4] = PICK(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
  }
  for (int i : {0, 1, 4, 5, 8, 9, 12, 13}) {
    Words a = r[i], b = r[i + 2];
    r[i] = PICK(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
    r[i + 2] = PICK(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < LANES; i += 2) {
    Words a = r[i], b = r[i + 1];
    r[i] = PICK(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    r[i + 1] = PICK(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
  }
}

Register exponential(Register x) {  // relative error below 2e-7; 0 below -87, and above 88 as for 88
  Register bounded = x > 88.0f ? Register{} + 88.0f : x;
#ifdef __AVX512F__
  Register whole = (Register)_mm512_roundscale_ps((__m512)(bounded * 1.44269504f), _MM_FROUND_TO_NEAREST_INT);
#else
  bounded = bounded < -87.0f ? Register{} - 87.0f : bounded;
  Register whole = bounded * 1.44269504f + 12582912.0f - 12582912.0f;  // 1.5 * 2^23 leaves no fraction
#endif
  Register r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
  Register p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r +
               4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
  __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, (__m512)(Register{} - 87.0f), _CMP_NLT_UQ);
  return (Register)_mm512_maskz_scalef_ps(counts, (__m512)p, (__m512)whole);
#else
  RegisterInts power = __builtin_convertvector(whole, RegisterInts) << 23;
  return x < -87.0f ? Register{} : (Register)((RegisterInts)p + power);
#endif
}

Register logarithm(Register x) {  // of positive normal numbers, relative error below 2e-7
  RegisterInts bits = (RegisterInts)x;
  RegisterInts exponent = ((bits >> 23) & 0xff) - 126;
  Register m = (Register)((bits & 0x7fffff) | 0x3f000000);  // in [0.5, 1)
  RegisterInts low = m < 0.707106781f;
  exponent += low;  // -1 where true
  m = low ? m + m - 1.0f : m - 1.0f;
  Register z = m * m;
  Register p = (((((((7.0376836292e-2f * m - 1.1514610310e-1f) * m + 1.1676998740e-1f) * m -
                  1.2420140846e-1f) * m + 1.4249322787e-1f) * m - 1.6668057665e-1f) * m +
               2.0000714765e-1f) * m - 2.4999993993e-1f) * m + 3.3333331174e-1f;
  Register e = __builtin_convertvector(exponent, Register);
  return m + (m * z * p - 2.12194440e-4f * e - 0.5f * z) + 0.693359375f * e;
}

Floats exp16(Floats x) { return by_registers(x, exponential); }
Floats log16(Floats x) { return by_registers(x, logarithm); }

}  // namespace
