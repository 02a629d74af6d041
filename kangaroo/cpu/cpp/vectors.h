// How registers hold and multiply weights and tokens.

#pragma once

#include "numbers.h"

namespace {

// What a register holds of a row of weights, and what that is multiplied by.
//   Number: the format of a token. Without an instruction for products of bfloat16, a token is widened once for all
//   rows of weights, the even ones of each 2 * WIDE numbers first.
//   parts: how many parts of a register of weights are multiplied one after the other.
//   Sum: the format of sums of products.
template <class T> struct Vector;

template <class T, class V> struct Loads {
  static inline __attribute__((always_inline)) V load(const T* from, i64 count) {
    V v{};
    std::memcpy(&v, from, count * sizeof(T));
    return v;
  }
};

template <> struct Vector<float> : Loads<float, Register> {
  using Type = Register;
  using Number = float;
  using Sum = Register;
  static constexpr int width = WIDE, parts = 1;
  static Register part(Register w, int) { return w; }
  static Register of_token(const float* from, i64 count, int) { return load(from, count); }
  static Register dot(Register sum, Register a, Register b) { return sum + a * b; }
};

template <> struct Vector<bf16> : Loads<bf16, RegisterWords> {
  using Type = RegisterWords;  // each word a pair of numbers
  using Sum = Register;
  static constexpr int width = 2 * WIDE;
#ifdef __AVX512BF16__
  using Number = bf16;
  static constexpr int parts = 1;
  static RegisterWords part(RegisterWords w, int) { return w; }
  static RegisterWords of_token(const bf16* from, i64 count, int) { return load(from, count); }
  static Register dot(Register sum, RegisterWords a, RegisterWords b) {
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
  }
#else
  using Number = float;
  static constexpr int parts = 2;  // the even ones and the odd ones
  static Register part(RegisterWords w, int i) { return (Register)(i ? w & 0xffff0000u : w << 16); }
  static Register of_token(const float* from, i64, int i) { return Vector<float>::load(from + i * WIDE, WIDE); }
  static Register dot(Register sum, Register a, Register b) { return sum + a * b; }
  static Register dot(Register sum, RegisterWords a, RegisterWords b) {
    return dot(dot(sum, part(a, 0), part(b, 0)), part(a, 1), part(b, 1));
  }
#endif
};

// Weights in eight bits, and tokens in sixteen: sums of products are whole numbers, the same in any order and on any
// machine.
#ifdef __AVX2__
constexpr bool BYTES = true;
#else
constexpr bool BYTES = false;  // it would take longer than it saves
#endif
template <> struct Vector<Byte> {
  using Type = RegisterShorts;
  using Number = Short;
  using Sum = RegisterInts;
  static constexpr int width = 2 * WIDE, parts = 1;
  static inline __attribute__((always_inline)) Type load(const Byte* from, i64 count) {
    return __builtin_convertvector(Loads<Byte, HalfBytes>::load(from, count), Type);
  }
  static Type part(Type w, int) { return w; }
  static inline __attribute__((always_inline)) Type of_token(const Short* from, i64 count, int) {
    return Loads<Short, Type>::load(from, count);
  }
  static Sum dot(Sum sum, Type a, Type b) {
#if defined(__AVX512VNNI__)
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
    return sum + (Sum)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return sum + (Sum)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    for (int i = 0; i < WIDE; i++) sum[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sum;
#endif
  }
};

// Keeps the compiler from reading a number from memory again for each row of weights: there are at most two reads a
// cycle, as many as products.
template <class V> inline __attribute__((always_inline)) void hold(V& v) {
#ifdef __AVX__
  asm("" : "+v"(v));
#endif
}

// The sums of as many registers as a register holds numbers, in the registers' order. The order of addition is the same
// for each of them.
#if defined(__AVX512F__)
template <class R> R sums(const R* v) {
  static constexpr int order[16] = {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15};
  R a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) {
    R x = v[order[i]], y = v[order[i + 8]];
    a[i] = PICK(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           PICK(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; i++) {
    R x = a[i], y = a[i + 4];
    b[i] = PICK(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           PICK(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 2; i++) {
    R x = b[i], y = b[i + 2];
    c[i] = PICK(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PICK(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  return PICK(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         PICK(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}
#elif defined(__AVX__)
template <class R> R sums(const R* v) {
  R a[4], b[2];
  for (int i = 0; i < 4; i++) {
    R x = v[2 * i], y = v[2 * i + 1];
    a[i] = PICK(x, y, 0, 8, 1, 9, 4, 12, 5, 13) + PICK(x, y, 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 2; i++) {
    R x = a[2 * i], y = a[2 * i + 1];
    b[i] = PICK(x, y, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(x, y, 2, 3, 10, 11, 6, 7, 14, 15);
  }
  return PICK(b[0], b[1], 0, 1, 2, 3, 8, 9, 10, 11) + PICK(b[0], b[1], 4, 5, 6, 7, 12, 13, 14, 15);
}
#else
template <class R> R sums(const R* v) {
  R a = PICK(v[0], v[1], 0, 4, 1, 5) + PICK(v[0], v[1], 2, 6, 3, 7);
  R b = PICK(v[2], v[3], 0, 4, 1, 5) + PICK(v[2], v[3], 2, 6, 3, 7);
  return PICK(a, b, 0, 1, 4, 5) + PICK(a, b, 2, 3, 6, 7);
}
#endif

}  // namespace
