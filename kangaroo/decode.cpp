// Decoder layers for the few tokens of a decoding step, on a CPU: all layers of a range in one call, by
// all threads, on the model's own weights as they lie in memory.
//
// At a few tokens the time is that of reading the weights, so the code is made to stream them: each
// weight is read once whatever the number of tokens, ahead of its use, and nothing happens in between
// but a barrier. What a token gets does not depend on how many others are computed beside it, nor on
// how many slots attention covers: sums are always taken in the same order. A draft's verification
// therefore gives, bit by bit, what decoding token by token would have given, in bfloat16 too.
//
// Names: R rows of the batch, T tokens a row, M = R * T tokens, D hidden size, H query heads, K key/value
// heads, G = H / K, C head size, F feed-forward size, E slots that attention covers, N outputs.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

using i64 = std::int64_t;
using bf16 = std::uint16_t;
typedef float Floats __attribute__((vector_size(64)));  // 16 of them
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef bf16 Halves __attribute__((vector_size(32)));

constexpr int LANES = 16;
constexpr int GROUP = 8;       // tokens that share one reading of a weight from the first-level cache
constexpr int CHUNK = 64;      // slots whose attention is one piece of work
constexpr int AHEAD = 8192;    // bytes between the weight in use and the one being fetched
constexpr int WIDEST_HEAD = 1024;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// ---------------------------------------------------------------- numbers

float widen(float x) { return x; }
float widen(bf16 x) {
  std::uint32_t bits = std::uint32_t(x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
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
  return (Floats)(__builtin_convertvector(v, Words) << 16);
}
template <class T> Floats get(const T* from, i64 count) {
  if (count >= LANES) return get(from);
  T padded[LANES] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return get(padded);
}

Words narrowed(Floats v) {  // to nearest, ties to even, in the low halves
  Words bits = (Words)v;
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return v == v ? bits : Words{} + 0x7fc0;
}
void put(float* to, Floats v) { std::memcpy(to, &v, sizeof v); }
void put(bf16* to, Floats v) {
  Halves half = __builtin_convertvector(narrowed(v), Halves);
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
template <> Floats stored<bf16>(Floats v) { return (Floats)(narrowed(v) << 16); }

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

// 32 numbers, in whichever order is quick to read, and put in order again.
struct Pair { Floats a, b; };
Pair apart(const float* from) { return {get(from), get(from + LANES)}; }
Pair apart(const bf16* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return {(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}
Pair together(Pair p, float) { return p; }
Pair together(Pair p, bf16) {
  return {PICK(p.a, p.b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23),
          PICK(p.a, p.b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)};
}

// Row i, word j becomes row j, word i.
void transpose(Words* r) {
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

Floats exp16(Floats x) {  // relative error below 2e-7; 0 below -87
  Floats clamped = x < -87.0f ? Floats{} - 87.0f : x;
  clamped = clamped > 88.0f ? Floats{} + 88.0f : clamped;
  Floats shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the integer in the low bits
  Floats whole = shifted - 12582912.0f;
  Floats r = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
  Floats p = ((((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r +
               4.1665795894e-2f) * r + 1.6666665459e-1f) * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  Ints power = __builtin_convertvector(whole, Ints) << 23;
  Floats result = (Floats)((Ints)p + power);
  return x < -87.0f ? Floats{} : result;
}

// ---------------------------------------------------------------- dot products

template <class T> struct Vector;

template <class T, class V> struct Loads {
  static V load(const T* from, i64 count = sizeof(V) / sizeof(T)) {
    V v{};
    std::memcpy(&v, from, count * sizeof(T));
    return v;
  }
};

template <> struct Vector<float> : Loads<float, Floats> {
  using Type = Floats;
  static constexpr int width = 16;
  static Floats dot(Floats sum, Floats a, Floats b) { return sum + a * b; }
};

template <> struct Vector<bf16> : Loads<bf16, Words> {
  using Type = Words;  // 16 pairs
  static constexpr int width = 32;
  static Floats dot(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    Words high = Words{} + 0xffff0000u;
    sum += (Floats)(a << 16) * (Floats)(b << 16);
    return sum + (Floats)(a & high) * (Floats)(b & high);
#endif
  }
};

// The sums of 16 vectors, in their order. Each is added up in the same order wherever it stands.
Floats sums(const Floats* v) {
  static constexpr int order[16] = {0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15};
  Floats a[8], b[4], c[2];
  for (int i = 0; i < 8; i++) {
    Floats x = v[order[i]], y = v[order[i + 8]];
    a[i] = PICK(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           PICK(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; i++) {
    Floats x = a[i], y = a[i + 4];
    b[i] = PICK(x, y, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
           PICK(x, y, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 2; i++) {
    Floats x = b[i], y = b[i + 2];
    c[i] = PICK(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           PICK(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  return PICK(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         PICK(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

template <class T> struct Matrix {
  const T* data;
  i64 rows, stride, width;
  const T* row(i64 i) const { return data + std::min(i, rows - 1) * stride; }  // the last one again
};

// How many rows of weights are multiplied at a time with so many tokens: sums stay in registers.
constexpr int beside(int tokens) { return tokens == 1 ? 16 : tokens == 2 ? 8 : tokens <= 4 ? 4 : 2; }

// out[i][j] = x[m + i] . w[n + j], of which the first `wanted` tokens are.
template <class T, int tokens, bool fetch>
void tile(const Matrix<T>& x, i64 m, const Matrix<T>& w, i64 n, int wanted, float* out) {
  constexpr int outputs = beside(tokens), width = Vector<T>::width;
  const T *from_x[tokens], *from_w[outputs];
  for (int i = 0; i < tokens; i++) from_x[i] = x.row(m + i);
  for (int j = 0; j < outputs; j++) from_w[j] = w.row(n + j);
  Floats sum[LANES] = {};
  auto step = [&](i64 k, auto load) {
    typename Vector<T>::Type part_w[outputs];
    for (int j = 0; j < outputs; j++) part_w[j] = load(from_w[j] + k);
    for (int i = 0; i < tokens; i++) {
      typename Vector<T>::Type part_x = load(from_x[i] + k);
      for (int j = 0; j < outputs; j++)
        sum[i * outputs + j] = Vector<T>::dot(sum[i * outputs + j], part_w[j], part_x);
    }
  };
  i64 k = 0;
  for (; k + width <= x.width; k += width) {
    step(k, [](const T* from) { return Vector<T>::load(from); });
    if (fetch)
      for (int j = 0; j < outputs; j++) __builtin_prefetch((const char*)(from_w[j] + k) + AHEAD);
  }
  if (k < x.width) step(k, [&](const T* from) { return Vector<T>::load(from, x.width - k); });
  float total[LANES];
  put(total, sums(sum));
  for (int i = 0; i < wanted; i++)
    std::memcpy(out + i * LANES, total + i * outputs, outputs * sizeof(float));
}

template <class T, int tokens, bool fetch>
void tiles(const Matrix<T>& x, i64 m, const Matrix<T>& w, i64 n, float* out, int wanted = tokens) {
  for (int j = 0; j < LANES; j += beside(tokens))
    tile<T, tokens, fetch>(x, m, w, n + j, wanted, out + j);
}

// out[m][j] = x[m] . w[n + j] for all rows of x and 16 rows of w, which are fetched ahead for the first
// group of tokens; the others find them in the cache.
template <class T, bool fetch>
void group(const Matrix<T>& x, i64 m, const Matrix<T>& w, i64 n, float* out) {
  switch (std::min<i64>(GROUP, x.rows - m)) {
    case 1: return tiles<T, 1, fetch>(x, m, w, n, out);
    case 2: return tiles<T, 2, fetch>(x, m, w, n, out);
    case 3: return tiles<T, 4, fetch>(x, m, w, n, out, 3);  // three by themselves take longer
    case 4: return tiles<T, 4, fetch>(x, m, w, n, out);
    case 5: return tiles<T, 5, fetch>(x, m, w, n, out);
    case 6: return tiles<T, 6, fetch>(x, m, w, n, out);
    case 7: return tiles<T, 7, fetch>(x, m, w, n, out);
    default: return tiles<T, 8, fetch>(x, m, w, n, out);
  }
}

template <class T> void products(const Matrix<T>& x, const Matrix<T>& w, i64 n, float* out) {
  group<T, true>(x, 0, w, n, out);
  for (i64 m = GROUP; m < x.rows; m += GROUP) group<T, false>(x, m, w, n, out + m * LANES);
}

// ---------------------------------------------------------------- a layer

// As Python fills it in; null where a layer lacks the part.
template <class T> struct Layer {
  const T *attention_norm, *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm;
  const T *feed_forward_norm, *gate, *up, *down;
};

struct Shape {
  i64 rows, tokens, hidden, heads, kv_heads, head_size, feed_forward, extent, n_slots, first_row, threads;
  double eps, scaling;
  i64 total() const { return rows * tokens; }
  i64 group() const { return heads / kv_heads; }
  i64 chunks() const { return (extent + CHUNK - 1) / CHUNK; }
};

i64 blocks(i64 rows) { return (rows + LANES - 1) / LANES; }

struct Part {  // what one thread does of `count` pieces of work
  i64 first, last;
  Part(i64 count) {
    i64 thread = omp_get_thread_num(), threads = omp_get_num_threads();
    first = count * thread / threads;
    last = count * (thread + 1) / threads;
  }
};

template <class T> void rms_norm(const T* x, const T* weight, i64 size, double eps, T* out) {
  Floats squares{};
  for (i64 i = 0; i < size; i += LANES) {
    Floats part = get(x + i, size - i);
    squares += part * part;
  }
  float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + float(eps));
  for (i64 i = 0; i < size; i += LANES)
    put(out + i, get(weight + i, size - i) * stored<T>(get(x + i, size - i) * scale), size - i);
}

// Memory of one call, kept by the calling thread for the next one.
template <class T> struct Scratch {
  std::vector<T> qkv, queries, attended, activated;  // [M, H + 2K, C], [R, K, T, G, C], [M, H, C], [M, F]
  std::vector<float> partial;                        // [R, K, chunks, T * G, C + 2]
};

template <class T> class Pass {
 public:
  Pass(const Shape& shape, Scratch<T>& scratch, T* x, const T* bias, const T* cos, const T* sin,
       const i64* slots)
      : s(shape), scratch(scratch), x(x), bias(bias), cos(cos), sin(sin), slots(slots) {
    i64 most = std::max<i64>(s.total(), s.tokens * s.group());
    block.resize(2 * most * LANES);
    normed.resize(s.total() * s.hidden);
  }

  void run(const Layer<T>& layer, T* keys, T* values) {
    if (layer.q) {
      project(layer);
#pragma omp barrier
      rotate(layer, keys, values);
#pragma omp barrier
      attend(keys, values);
#pragma omp barrier
      merge();
      expect(layer.o, s.hidden, s.heads * s.head_size);
#pragma omp barrier
      add(Matrix<T>{scratch.attended.data(), s.total(), s.heads * s.head_size, s.heads * s.head_size},
          layer.o, layer.o_bias);
      if (layer.gate) expect(layer.gate, s.feed_forward, s.hidden);
#pragma omp barrier
    }
    if (layer.gate) {
      activate(layer);
      expect(layer.down, s.hidden, s.feed_forward);
#pragma omp barrier
      add(Matrix<T>{scratch.activated.data(), s.total(), s.feed_forward, s.feed_forward}, layer.down,
          nullptr);
#pragma omp barrier
    }
  }

  void finish(const T* weight) {
    Part mine(s.total());
    for (i64 m = mine.first; m < mine.last; m++)
      rms_norm(x + m * s.hidden, weight, s.hidden, s.eps, x + m * s.hidden);
  }

 private:
  // The start of this thread's part of a matrix that comes next, while it waits for the others.
  void expect(const T* weight, i64 rows, i64 width) const {
    const char* from = (const char*)(weight + Part(blocks(rows)).first * LANES * width);
    for (int i = 0; i < AHEAD; i += 64) __builtin_prefetch(from + i);
  }

  // Every thread norms all tokens for itself: that is less than a barrier costs. Without a weight
  // there is no norm; the copy stands, since x itself changes before all threads have read it.
  Matrix<T> norm(const T* weight) {
    if (!weight) std::copy(x, x + s.total() * s.hidden, normed.data());
    for (i64 m = 0; weight && m < s.total(); m++)
      rms_norm(x + m * s.hidden, weight, s.hidden, s.eps, normed.data() + m * s.hidden);
    return {normed.data(), s.total(), s.hidden, s.hidden};
  }

  void project(const Layer<T>& layer) {
    Matrix<T> in = norm(layer.attention_norm);
    i64 of_q = s.heads * s.head_size, of_k = s.kv_heads * s.head_size, all = of_q + 2 * of_k;
    struct { const T *weight, *bias; i64 first, count; } parts[] = {
        {layer.q, layer.q_bias, 0, of_q}, {layer.k, layer.k_bias, of_q, of_k},
        {layer.v, layer.v_bias, of_q + of_k, of_k}};
    Part mine(blocks(of_q) + 2 * blocks(of_k));
    i64 before = 0;
    for (auto& part : parts) {
      Matrix<T> w{part.weight, part.count, s.hidden, s.hidden};
      for (i64 i = 0; i < blocks(part.count); i++) {
        if (before + i < mine.first || before + i >= mine.last) continue;
        i64 n = i * LANES, width = part.count - n;
        products(in, w, n, block.data());
        Floats shift = part.bias ? get(part.bias + n, width) : Floats{};
        for (i64 m = 0; m < s.total(); m++)
          put(&scratch.qkv[m * all + part.first + n], get(&block[m * LANES]) + shift, width);
      }
      before += blocks(part.count);
    }
  }

  // Rotary positions, keys and values to their slots, queries in the order of their key heads.
  void rotate(const Layer<T>& layer, T* keys, T* values) {
    i64 per_token = s.heads + 2 * s.kv_heads, size = s.head_size, half = size / 2;
    Part mine(s.total() * per_token);
    T own[WIDEST_HEAD];
    for (i64 item = mine.first; item < mine.last; item++) {
      i64 m = item / per_token, head = item % per_token, row = m / s.tokens, t = m % s.tokens;
      const T* from = scratch.qkv.data() + item * size;
      T* slot = nullptr;
      i64 kv_head = (head - s.heads) % s.kv_heads;
      i64 offset = (((s.first_row + row) * s.n_slots + slots[m]) * s.kv_heads + kv_head) * size;
      if (head >= s.heads + s.kv_heads) {
        std::memcpy(values + offset, from, size * sizeof(T));
        continue;
      }
      bool is_query = head < s.heads;
      if (is_query) {
        i64 group = s.group();
        slot = scratch.queries.data() +
               (((row * s.kv_heads + head / group) * s.tokens + t) * group + head % group) * size;
      } else {
        slot = keys + offset;
      }
      if (const T* weight = is_query ? layer.q_norm : layer.k_norm) {
        rms_norm(from, weight, size, s.eps, own);
        from = own;
      }
      const T *c = cos + m * size, *d = sin + m * size;
      for (i64 i = 0; i < half; i += LANES) {
        i64 left = half - i, j = i + half;
        Floats a = get(from + i, left), b = get(from + j, left);
        Floats low = stored<T>(a * get(c + i, left)) - stored<T>(b * get(d + i, left));
        Floats high = stored<T>(b * get(c + j, left)) + stored<T>(a * get(d + j, left));
        put(slot + i, low, left);
        put(slot + j, high, left);
      }
    }
  }

  // Softmax and weighted values of one chunk of slots, for all queries of one key head.
  void attend(const T* keys, const T* values) {
    i64 size = s.head_size, queries = s.tokens * s.group(), stride = s.kv_heads * size;
    Part mine(s.rows * s.chunks() * s.kv_heads);
    for (i64 item = mine.first; item < mine.last; item++) {
      i64 head = item % s.kv_heads, chunk = item / s.kv_heads % s.chunks();
      i64 row = item / s.kv_heads / s.chunks(), first = chunk * CHUNK;
      i64 width = std::min<i64>(CHUNK, s.extent - first);
      float* out = scratch.partial.data() + item * queries * (size + 2);
      const T* masks = bias + row * s.tokens * s.extent + first;
      if (!seen(masks, width)) {
        for (i64 q = 0; q < queries; q++) out[q * (size + 2)] = NEVER;
        continue;
      }
      i64 at = ((s.first_row + row) * s.n_slots + first) * stride + head * size;
      turn(keys + at, stride, width);
      scores.resize(queries * CHUNK);
      const T* asking = &scratch.queries[(row * s.kv_heads + head) * queries * size];
      for (i64 i = 0; i < queries; i += 4) score(asking, i, queries);
      for (i64 i = 0; i < queries; i++)
        soften(&scores[i * CHUNK], masks + i / s.group() * s.extent, width, out + i * (size + 2));
      // Of the next chunk as much as is this key head's share, in one piece, which memory likes.
      i64 next = at - head * size + CHUNK * (stride + head * size);
      weigh<true>(values + at, stride, width, 0, queries, out, keys + next, values + next);
      for (i64 i = 4; i < queries; i += 4) weigh<false>(values + at, stride, width, i, queries, out);
    }
  }

  bool seen(const T* masks, i64 width) const {
    for (i64 t = 0; t < s.tokens; t++)
      for (i64 n = 0; n < width; n++)
        if (widen(masks[t * s.extent + n]) > NEVER) return true;
    return false;
  }

  // A chunk of keys with its slots side by side: turned[word][slot], a word being 4 bytes of a key.
  void turn(const T* keys, i64 stride, i64 width) {
    constexpr i64 per_word = 4 / sizeof(T), step = LANES * per_word;
    turned.resize((s.head_size + step - 1) / step * LANES * CHUNK);
    for (i64 c = 0; c < s.head_size; c += step)
      for (i64 n = 0; n < CHUNK; n += LANES) {
        Words block[LANES] = {};
        i64 slots = std::min<i64>(LANES, width - n), left = s.head_size - c;
        if (left >= step)
          for (i64 i = 0; i < slots; i++) std::memcpy(&block[i], keys + (n + i) * stride + c, sizeof(Words));
        else
          for (i64 i = 0; i < slots; i++) std::memcpy(&block[i], keys + (n + i) * stride + c, left * sizeof(T));
        transpose(block);
        for (i64 i = 0; i < LANES; i++)
          std::memcpy(&turned[(c / per_word + i) * CHUNK + n], &block[i], sizeof block[i]);
      }
  }

  // Products of four queries with a turned chunk of keys.
  void score(const T* asking, i64 first, i64 queries) {
    constexpr i64 per_word = 4 / sizeof(T);
    using Type = typename Vector<T>::Type;
    Floats sum[4][CHUNK / LANES] = {};
    const T* from[4];
    for (i64 i = 0; i < 4; i++) from[i] = asking + std::min(first + i, queries - 1) * s.head_size;
    for (i64 c = 0; c < s.head_size; c += per_word) {
      const std::uint32_t* key = &turned[c / per_word * CHUNK];
      for (int i = 0; i < 4; i++) {
        std::uint32_t word;
        std::memcpy(&word, from[i] + c, sizeof word);
        Type query = (Type)(Words{} + word);
        for (int j = 0; j < CHUNK / LANES; j++) {
          Type keys;
          std::memcpy(&keys, key + j * LANES, sizeof keys);
          sum[i][j] = Vector<T>::dot(sum[i][j], keys, query);
        }
      }
    }
    for (i64 i = 0; i < std::min<i64>(4, queries - first); i++)
      for (int j = 0; j < CHUNK / LANES; j++) put(&scores[(first + i) * CHUNK + j * LANES], sum[i][j]);
  }

  // Scores become weights; out = (largest score, sum of weights).
  void soften(float* score, const T* mask, i64 width, float* out) const {
    Floats largest = Floats{} + NEVER;
    for (i64 n = 0; n < width; n += LANES) {
      Floats part = get(score + n) * float(s.scaling) + get(mask + n, width - n);
      if (width - n < LANES)  // slots beyond the extent
        for (i64 i = width - n; i < LANES; i++) part[i] = NEVER;
      put(score + n, part);
      largest = larger(largest, part);
    }
    out[0] = fold(largest, larger);
    float base = out[0] == NEVER ? 0 : out[0];  // a query that sees nothing here has weights of 0
    Floats sum{};
    for (i64 n = 0; n < width; n += LANES) {
      Floats weight = exp16(get(score + n) - base);
      put(score + n, weight);
      sum += weight;
    }
    out[1] = sum_of(sum);
  }

  // The weighted values of four queries, so that a value is read once for all; meanwhile what comes next
  // is fetched, line by line.
  template <bool fetch>
  void weigh(const T* values, i64 stride, i64 width, i64 first, i64 queries, float* out,
             const T* next_keys = nullptr, const T* next_values = nullptr) const {
    const float* score[4];
    for (i64 i = 0; i < 4; i++) score[i] = &scores[std::min(first + i, queries - 1) * CHUNK];
    for (i64 c = 0; c < s.head_size; c += 2 * LANES) {
      i64 left = s.head_size - c;
      Pair sum[4] = {};
      auto add = [&](auto load) {
        for (i64 n = 0; n < width; n++) {
          if (fetch)
            for (i64 i = 0; i < 2 * LANES; i += 64 / i64(sizeof(T))) {
              __builtin_prefetch(next_keys + c * CHUNK + n * 2 * LANES + i);
              __builtin_prefetch(next_values + c * CHUNK + n * 2 * LANES + i);
            }
          Pair value = load(values + n * stride + c);
          for (int i = 0; i < 4; i++) {
            sum[i].a += score[i][n] * value.a;
            sum[i].b += score[i][n] * value.b;
          }
        }
      };
      if (left >= 2 * LANES) add([](const T* from) { return apart(from); });
      else add([&](const T* from) {
        T padded[2 * LANES] = {};
        std::memcpy(padded, from, left * sizeof(T));
        return apart(padded);
      });
      for (i64 i = 0; i < std::min<i64>(4, queries - first); i++) {
        float* to = out + (first + i) * (s.head_size + 2) + 2 + c;
        Pair ordered = together(sum[i], T());
        put(to, ordered.a, left);
        if (left > LANES) put(to + LANES, ordered.b, left - LANES);
      }
    }
  }

  // The chunks of each query, in the order of their slots.
  void merge() {
    i64 size = s.head_size, queries = s.tokens * s.group();
    Part mine(s.rows * s.kv_heads * queries);
    for (i64 item = mine.first; item < mine.last; item++) {
      i64 query = item % queries, head = item / queries % s.kv_heads, row = item / queries / s.kv_heads;
      auto chunk_at = [&](i64 chunk) {
        return scratch.partial.data() +
               (((row * s.chunks() + chunk) * s.kv_heads + head) * queries + query) * (size + 2);
      };
      float largest = NEVER, sum = 0;
      for (i64 chunk = 0; chunk < s.chunks(); chunk++) largest = std::max(largest, chunk_at(chunk)[0]);
      float total[WIDEST_HEAD + LANES] = {};
      for (i64 chunk = 0; chunk < s.chunks(); chunk++) {
        const float* from = chunk_at(chunk);
        if (from[0] == NEVER) continue;
        float scale = std::exp(from[0] - largest);
        sum += scale * from[1];
        for (i64 c = 0; c < size; c++) total[c] += scale * from[2 + c];
      }
      i64 t = query / s.group(), in_group = query % s.group();
      T* out = scratch.attended.data() +
               ((row * s.tokens + t) * s.heads + head * s.group() + in_group) * size;
      for (i64 c = 0; c < size; c += LANES) put(out + c, get(total + c) / sum, size - c);
    }
  }

  void activate(const Layer<T>& layer) {
    Matrix<T> in = norm(layer.feed_forward_norm);
    Matrix<T> gate{layer.gate, s.feed_forward, s.hidden, s.hidden}, up = gate;
    up.data = layer.up;
    float *gates = block.data(), *ups = gates + s.total() * LANES;
    Part mine(blocks(s.feed_forward));
    for (i64 i = mine.first; i < mine.last; i++) {
      i64 n = i * LANES;
      products(in, gate, n, gates);
      products(in, up, n, ups);
      for (i64 m = 0; m < s.total(); m++) {
        Floats g = stored<T>(get(gates + m * LANES)), silu = stored<T>(g / (1.0f + exp16(-g)));
        put(&scratch.activated[m * s.feed_forward + n], silu * stored<T>(get(ups + m * LANES)),
            s.feed_forward - n);
      }
    }
  }

  // x += in . weight
  void add(const Matrix<T>& in, const T* weight, const T* bias) {
    Matrix<T> w{weight, s.hidden, in.width, in.width};
    Part mine(blocks(s.hidden));
    for (i64 i = mine.first; i < mine.last; i++) {
      i64 n = i * LANES, width = s.hidden - n;
      products(in, w, n, block.data());
      Floats shift = bias ? get(bias + n, width) : Floats{};
      for (i64 m = 0; m < s.total(); m++) {
        T* to = x + m * s.hidden + n;
        put(to, get(to, width) + stored<T>(get(&block[m * LANES]) + shift), width);
      }
    }
  }

  const Shape& s;
  Scratch<T>& scratch;  // shared by all threads; what follows is each thread's own
  T* x;
  const T *bias, *cos, *sin;
  const i64* slots;
  std::vector<float> block, scores;
  std::vector<std::uint32_t> turned;
  std::vector<T> normed;
};

template <class T>
void run_layers(const Shape& s, const Layer<T>* layers, i64 count, T* const* keys, T* const* values, T* x,
                const T* bias, const T* cos, const T* sin, const i64* slots, const T* final_norm) {
  static thread_local Scratch<T> scratch;
  auto grow = [](auto& v, i64 size) { if (i64(v.size()) < size) v.resize(size); };
  grow(scratch.qkv, s.total() * (s.heads + 2 * s.kv_heads) * s.head_size);
  grow(scratch.queries, s.total() * s.heads * s.head_size);
  grow(scratch.attended, s.total() * s.heads * s.head_size);
  grow(scratch.activated, s.total() * s.feed_forward);
  grow(scratch.partial, s.total() * s.heads * s.chunks() * (s.head_size + 2));
  Scratch<T>& shared = scratch;
#pragma omp parallel num_threads(s.threads)
  {
    Pass<T> pass(s, shared, x, bias, cos, sin, slots);
    for (i64 i = 0; i < count; i++) pass.run(layers[i], keys[i], values[i]);
    if (final_norm) pass.finish(final_norm);
  }
}

// logits[m][n] = norm(x[m]) . weight[n]; without a norm where it is null.
template <class T>
void read_out(i64 tokens, i64 hidden, i64 outputs, double eps, i64 threads, const T* x, const T* norm,
              const T* weight, float* logits) {
#pragma omp parallel num_threads(threads)
  {
    std::vector<T> normed(tokens * hidden);
    std::vector<float> block(tokens * LANES);
    if (norm)
      for (i64 m = 0; m < tokens; m++)
        rms_norm(x + m * hidden, norm, hidden, eps, normed.data() + m * hidden);
    Matrix<T> in{norm ? normed.data() : x, tokens, hidden, hidden}, w{weight, outputs, hidden, hidden};
    Part mine(blocks(outputs));
    for (i64 i = mine.first; i < mine.last; i++) {
      i64 n = i * LANES;
      products(in, w, n, block.data());
      for (i64 m = 0; m < tokens; m++) put(logits + m * outputs + n, get(&block[m * LANES]), outputs - n);
    }
  }
}

}  // namespace

#define EXPORT(suffix, T)                                                                              \
  extern "C" void run_layers_##suffix(const Shape* s, const Layer<T>* layers, i64 count, T* const* keys, \
                                      T* const* values, T* x, const T* bias, const T* cos, const T* sin, \
                                      const i64* slots, const T* final_norm) {                          \
    run_layers<T>(*s, layers, count, keys, values, x, bias, cos, sin, slots, final_norm);               \
  }                                                                                                    \
  extern "C" void read_out_##suffix(i64 tokens, i64 hidden, i64 outputs, double eps, i64 threads,       \
                                    const T* x, const T* norm, const T* weight, float* logits) {        \
    read_out<T>(tokens, hidden, outputs, eps, threads, x, norm, weight, logits);                        \
  }

EXPORT(float32, float)
EXPORT(bfloat16, bf16)
