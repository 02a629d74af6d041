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
#include <type_traits>

namespace {

using i64 = std::int64_t;
using bf16 = std::uint16_t;
using Byte = std::int8_t;    // of weights in eight bits
using Short = std::int16_t;  // of tokens that are multiplied with these
typedef float Floats __attribute__((vector_size(64)));  // 16 numbers
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef bf16 Halves __attribute__((vector_size(32)));
typedef Short Shorts __attribute__((vector_size(32)));

constexpr int LANES = 16;

// How many numbers a register holds: inner loops use registers, since gcc keeps longer vectors in memory.
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
  return (Words)_mm512_cvtepu16_epi32((__m256i)halves);  // gcc 12 makes six instructions of the line below
#else
  return __builtin_convertvector(halves, Words);
#endif
}

// Sixteen numbers, or what is left of them padded with zeros.
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

// WIDE numbers.
inline Register few(const float* from) {
  Register v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline Register few(const bf16* from) {
#if defined(__AVX512F__)
  return get(from);
#elif defined(__AVX2__)
  return (Register)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
#else
  RegisterWords words{};
  for (int i = 0; i < WIDE; i++) words[i] = from[i];
  return (Register)(words << 16);
#endif
}

template <class T> inline Register few(const T* from, i64 count) {
  if (count >= WIDE) return few(from);
  T padded[WIDE] = {};
  std::memcpy(padded, from, std::max<i64>(count, 0) * sizeof(T));
  return few(padded);
}

// f of sixteen numbers, register by register: gcc keeps longer vectors in memory between two operations.
template <class F, class... More> inline __attribute__((always_inline)) Floats by_registers(F f, Floats v, More... more) {
  auto part = [](const Floats& all, int i) { return few((const float*)&all + i * WIDE); };
  Floats out;
#pragma GCC unroll 4
  for (int i = 0; i < LANES / WIDE; i++) {
    const Register result = f(part(v, i), part(more, i)...);
    std::memcpy((float*)&out + i * WIDE, &result, sizeof result);
  }
  return out;
}

// The bits of numbers rounded to bfloat16: to nearest, ties to even.
inline RegisterWords narrow_bits(Register v) {
  RegisterWords bits = (RegisterWords)v;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? bits : RegisterWords{} + 0x7fc0;
}

Halves narrowed(Floats all) {
#ifdef __AVX512BF16__
  return (Halves)_mm512_cvtneps_pbh((__m512)all);
#else
  return __builtin_convertvector((Words)by_registers([](Register v) { return (Register)narrow_bits(v); }, all), Halves);
#endif
}
void put(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
inline void put_few(float* to, Register v) { std::memcpy(to, &v, sizeof v); }
inline void put_few(bf16* to, Register v) {
#if defined(__AVX512F__)
  const Halves half = narrowed(v);
  std::memcpy(to, &half, sizeof half);
#elif defined(__AVX2__)
  const __m256i bits = (__m256i)narrow_bits(v), pairs = _mm256_packus_epi32(bits, bits);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x88)));
#else
  const RegisterWords bits = narrow_bits(v);
  for (int i = 0; i < WIDE; i++) to[i] = bits[i];
#endif
}
void put(bf16* to, Floats v) {
  for (int i = 0; i < LANES; i += WIDE) put_few(to + i, few((const float*)&v + i));
}
template <class T> inline void put_few(T* to, Register v, i64 count) {
  if (count >= WIDE) return put_few(to, v);
  T padded[WIDE];
  put_few(padded, v);
  std::memcpy(to, padded, std::max<i64>(count, 0) * sizeof(T));
}
template <class T> void put(T* to, Floats v, i64 count) {
  if (count >= LANES) return put(to, v);
  T padded[LANES];
  put(padded, v);
  std::memcpy(to, padded, count * sizeof(T));
}

// What numbers become when they are stored in T, as the model's own modules store them between operations.
template <class T> inline __attribute__((always_inline)) Register stored_few(Register v) {
  if constexpr (std::is_same_v<T, float>) return v;
#ifdef __AVX512BF16__
  return (Floats)(words_of(narrowed(v)) << 16);
#else
  return (Register)(narrow_bits(v) << 16);
#endif
}
template <class T> Floats stored(Floats v) { return by_registers(stored_few<T>, v); }

// Of sixteen words, which hold two numbers of bfloat16 each.
Floats first_of(Words pairs) { return (Floats)(pairs << 16); }
Floats second_of(Words pairs) { return (Floats)(pairs & 0xffff0000u); }
Words pair_of(Floats first, Floats second) {
  return words_of(narrowed(first)) | words_of(narrowed(second)) << 16;
}

#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

template <class Merge> inline __attribute__((always_inline)) float fold_few(Register v, Merge merge) {
#if defined(__AVX512F__)
  v = merge(v, PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = merge(v, PICK(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
  v = merge(v, PICK(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
  v = merge(v, PICK(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
#elif defined(__AVX__)
  v = merge(v, PICK(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
  v = merge(v, PICK(v, v, 2, 3, 0, 1, 6, 7, 4, 5));
  v = merge(v, PICK(v, v, 1, 0, 3, 2, 5, 4, 7, 6));
#else
  v = merge(v, PICK(v, v, 2, 3, 0, 1));
  v = merge(v, PICK(v, v, 1, 0, 3, 2));
#endif
  return v[0];
}

// Merges number i with number i + 8, then the results with those four places on, and so on.
template <class Merge> inline __attribute__((always_inline)) float fold(Register* sixteen, Merge merge) {
  for (int half = LANES / WIDE / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) sixteen[i] = merge(sixteen[i], sixteen[i + half]);
  return fold_few(sixteen[0], merge);
}
template <class Merge> inline __attribute__((always_inline)) float fold(Floats v, Merge merge) {
  Register sixteen[LANES / WIDE];
  std::memcpy(sixteen, &v, sizeof v);
  return fold(sixteen, merge);
}
template <class V> float sum_of(V v) {
  return fold(v, [](Register a, Register b) { return a + b; });
}
inline Register larger_few(Register a, Register b) { return a > b ? a : b; }
Floats larger(Floats a, Floats b) { return by_registers(larger_few, a, b); }

// The numbers of two registers: read in the order that is quickest, and put in order again.
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

// Word j of row i becomes word i of row j.
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

Floats exp16(Floats x) { return by_registers(exponential, x); }
Floats log16(Floats x) { return by_registers(logarithm, x); }

}  // namespace
