// Decoder layers for the few tokens of a decoding step: all layers of a range in one parallel region.

#pragma once

#include "attention.h"
#include "barrier.h"

namespace {

// As Python fills it in; null where a layer lacks the part. Without queries it writes keys and values, and no more.
template <class T> struct Layer {
  const T *attention_norm, *q, *k, *v, *o, *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm;
  const T *feed_forward_norm, *gate, *up, *down;
  i64 passing;  // of all of its matrices
};

// Layers, where each keeps keys and values, [rows * n_slots, K, C], and how far they look back, 0 being everywhere.
template <class T> struct Stack {
  const Layer<T>* layers;
  i64 count;
  T *const *keys, *const *values;
  i64 n_slots, window;

  Stack range(i64 first, i64 last) const {
    return {layers + first, last - first, keys + first, values + first, n_slots, window};
  }
};

// The tokens of a pass: where their keys go, and which rows of the tables of cosines and sines are theirs.
template <class T> struct Tokens {
  i64 total;
  const i64 *slots, *angles;
  const T *cos, *sin;
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

// Memory that all threads share, kept for the next pass.
template <class T> struct Scratch {
  std::vector<T> qkv, queries, attended, activated, normed;  // [M, H + 2K, C], [M, H, C] twice, [M, F], [M, D]
  std::vector<Words> tiles;  // [M, D or F], as `side_by_side` leaves them
  std::vector<float> partial;
};

template <class T> class Pass {
 public:
  Pass(const Sizes& sizes, const Tokens<T>& tokens, const Sight& sight, i64 n_slots, Scratch<T>& scratch,
       Barrier& barrier, T* x)
      : s(sizes), tokens(tokens), sight(sight), n_slots(n_slots), scratch(scratch), barrier(barrier), x(x),
        attention(sizes, sight, n_slots) {
    normed.resize(tokens.total * s.hidden);
  }

  // `next` has the layer after this one, or this one again.
  void run(const Layer<T>& layer, const Layer<T>& next, T* keys, T* values) {
    if (layer.k) {
      project(layer);
      barrier.wait();
      rotate(layer, keys, values);
      barrier.wait();
    }
    if (layer.q) {
      attention.attend(scratch.queries.data(), keys, values, scratch.partial.data());
      barrier.wait();
      attention.merge(scratch.partial.data(), scratch.attended.data());
      barrier.wait();
      i64 width = s.heads * s.head_size;
      add({scratch.attended.data(), tokens.total, width}, {layer.o, s.hidden, width, layer.passing}, layer.o_bias,
          layer.gate ? share_of(layer.gate, s.feed_forward, s.hidden) : first_of(next));
      barrier.wait();
    }
    if (layer.gate) {
      activate(layer);
      barrier.wait();
      add({scratch.activated.data(), tokens.total, s.feed_forward},
          {layer.down, s.hidden, s.feed_forward, layer.passing}, nullptr, first_of(next));
      barrier.wait();
    }
  }

  void finish(const T* weight) {
    Part mine(tokens.total);
    for (i64 m = mine.first; m < mine.last; m++)
      rms_norm(x + m * s.hidden, weight, s.hidden, s.eps, x + m * s.hidden);
  }

 private:
  const T* first_of(const Layer<T>& layer) const {
    if (layer.q) return share_of(layer.q, s.heads * s.head_size, s.hidden);
    return layer.k ? share_of(layer.k, s.kv_heads * s.head_size, s.hidden)
                   : share_of(layer.gate, s.feed_forward, s.hidden);
  }

  // Every thread norms a few tokens for itself: that is less than a barrier costs. Without a weight
  // there is no norm; the copy stands, since x itself changes before all threads have read it.
  Input<T> norm(const T* weight) {
    auto norm_token = [&](i64 m, T* to) {
      const T* from = x + m * s.hidden;
      if (weight) rms_norm(from, weight, s.hidden, s.eps, to + m * s.hidden);
      else std::copy_n(from, s.hidden, to + m * s.hidden);
    };
    if (shares(s.hidden)) {
      T* all = scratch.normed.data();
      return shared({all, tokens.total, s.hidden}, [&](i64 m) { norm_token(m, all); });
    }
    for (i64 m = 0; m < tokens.total; m++) norm_token(m, normed.data());
    return input(Matrix<T>{normed.data(), tokens.total, s.hidden}, room);
  }

  // Whether threads share the work of making an input for the matrix unit.
  bool shares(i64 width) const { return tokens.total >= MANY && takes_tiles<T>(width); }

  // One that they share; `make(m)` comes first for each token.
  template <class Make> Input<T> shared(const Matrix<T>& from, Make make) {
    Part mine(blocks(tokens.total));
    for (i64 group = mine.first; group < mine.last; group++) {
      for (i64 m = group * LANES; m < std::min((group + 1) * LANES, tokens.total); m++) make(m);
      side_by_side(from, group, &scratch.tiles[group * from.width / 2]);
    }
    barrier.wait();
    return {from, scratch.tiles.data()};
  }

  void project(const Layer<T>& layer) {
    Input<T> in = norm(layer.attention_norm);
    i64 of_q = s.heads * s.head_size, of_k = s.kv_heads * s.head_size, all = of_q + 2 * of_k;
    struct { Matrix<T> w; const T* bias; i64 before, first; } parts[] = {
        {{layer.q, of_q, s.hidden, layer.passing}, layer.q_bias, 0, 0},
        {{layer.k, of_k, s.hidden, layer.passing}, layer.k_bias, blocks(of_q), of_q},
        {{layer.v, of_k, s.hidden, layer.passing}, layer.v_bias, blocks(of_q) + blocks(of_k), of_q + of_k}};
    auto part_of = [&](i64 i) -> auto& { return parts[i < parts[1].before ? 0 : i < parts[2].before ? 1 : 2]; };
    i64 skipped = layer.q ? 0 : blocks(of_q);
    Part mine(blocks(of_q) + 2 * blocks(of_k) - skipped);
    products(
        in, mine.first + skipped, mine.last + skipped,
        [&](i64 i) { return Block<T>{&part_of(i).w, (i - part_of(i).before) * LANES}; },
        layer.q ? share_of(layer.o, s.hidden, of_q) : first_of(layer), room_for_sums, [&](i64 i, const float* sums) {
          auto& part = part_of(i);
          i64 n = (i - part.before) * LANES, width = part.w.rows - n;
          Floats shift = part.bias ? get(part.bias + n, width) : Floats{};
          for (i64 m = 0; m < tokens.total; m++)
            put(&scratch.qkv[m * all + part.first + n], get(sums + m * LANES) + shift, width);
        });
  }

  // Rotary positions of queries and keys; keys and values to their slots.
  void rotate(const Layer<T>& layer, T* keys, T* values) {
    i64 skipped = layer.q ? 0 : s.heads, all = s.heads + 2 * s.kv_heads, per_token = all - skipped;
    i64 size = s.head_size, half = size / 2;
    Part mine(tokens.total * per_token);
    T own[WIDEST_HEAD];
    for (i64 item = mine.first; item < mine.last; item++) {
      i64 m = item / per_token, head = skipped + item % per_token;
      const T* from = scratch.qkv.data() + (m * all + head) * size;
      i64 slot = sight.seen[m].row * n_slots + tokens.slots[m];
      if (head >= s.heads + s.kv_heads) {
        T* to = values + (slot * s.kv_heads + head - s.heads - s.kv_heads) * size;
        std::memcpy(to, from, size * sizeof(T));
        continue;
      }
      bool is_query = head < s.heads;
      T* to = is_query ? &scratch.queries[(m * s.heads + head) * size]
                       : keys + (slot * s.kv_heads + head - s.heads) * size;
      if (const T* weight = is_query ? layer.q_norm : layer.k_norm) {
        rms_norm(from, weight, size, s.eps, own);
        from = own;
      }
      const T *c = tokens.cos + tokens.angles[m] * size, *d = tokens.sin + tokens.angles[m] * size;
      for (i64 i = 0; i < half; i += LANES) {
        i64 left = half - i, j = i + half;
        Floats a = get(from + i, left), b = get(from + j, left);
        Floats low = stored<T>(a * get(c + i, left)) - stored<T>(b * get(d + i, left));
        Floats high = stored<T>(b * get(c + j, left)) + stored<T>(a * get(d + j, left));
        put(to + i, low, left);
        put(to + j, high, left);
      }
    }
  }

  void activate(const Layer<T>& layer) {
    Input<T> in = norm(layer.feed_forward_norm);
    Matrix<T> gate{layer.gate, s.feed_forward, s.hidden, layer.passing};
    Matrix<T> up{layer.up, s.feed_forward, s.hidden, layer.passing};
    Part mine(blocks(s.feed_forward));
    products(
        in, 2 * mine.first, 2 * mine.last,
        [&](i64 i) { return Block<T>{i % 2 ? &up : &gate, i / 2 * LANES}; },
        share_of(layer.down, s.hidden, s.feed_forward), room_for_sums, [&](i64 i, const float* sums) {
          if (i % 2 == 0) return;  // with its `up`, which follows
          const float *ups = sums, *gates = sums - tokens.total * LANES;
          i64 n = i / 2 * LANES;
          for (i64 m = 0; m < tokens.total; m++) {
            Floats g = stored<T>(get(gates + m * LANES)), silu = stored<T>(g / (1.0f + exp16(-g)));
            put(&scratch.activated[m * s.feed_forward + n], silu * stored<T>(get(ups + m * LANES)),
                s.feed_forward - n);
          }
        });
  }

  // x += in . w
  void add(const Matrix<T>& x_in, const Matrix<T>& w, const T* bias, const T* after) {
    Input<T> in = shares(x_in.width) ? shared(x_in, [](i64) {}) : input(x_in, room);
    Part mine(blocks(s.hidden));
    products(
        in, mine.first, mine.last, [&](i64 i) { return Block<T>{&w, i * LANES}; }, after, room_for_sums,
        [&](i64 i, const float* sums) {
          i64 n = i * LANES, width = s.hidden - n;
          Floats shift = bias ? get(bias + n, width) : Floats{};
          for (i64 m = 0; m < tokens.total; m++) {
            T* to = x + m * s.hidden + n;
            put(to, get(to, width) + stored<T>(get(sums + m * LANES) + shift), width);
          }
        });
  }

  const Sizes& s;
  const Tokens<T>& tokens;
  const Sight& sight;
  i64 n_slots;
  Scratch<T>& scratch;  // this and the barrier are shared by all threads; what follows is each thread's own
  Barrier& barrier;
  T* x;
  Attention<T> attention;
  Room room_for_sums;
  std::vector<T> normed;
  std::vector<Words> room;
  TileUse tiles;
};

// x [M, D] through some layers, normed at the end where a norm is given.
template <class T>
void run_layers(const Sizes& s, const Stack<T>& stack, const Tokens<T>& tokens, const Sight& sight, T* x,
                const T* final_norm = nullptr) {
  static thread_local Scratch<T> scratch;
  if (!tokens.total || (!stack.count && !final_norm)) return;
  auto grow = [](auto& v, i64 size) { if (i64(v.size()) < size) v.resize(size); };
  i64 of_heads = tokens.total * s.heads * s.head_size;
  grow(scratch.qkv, tokens.total * (s.heads + 2 * s.kv_heads) * s.head_size);
  grow(scratch.queries, of_heads);
  grow(scratch.attended, of_heads);
  grow(scratch.activated, tokens.total * s.feed_forward);
  if (tokens.total >= MANY) {
    grow(scratch.normed, tokens.total * s.hidden);
    grow(scratch.tiles, blocks(tokens.total) * std::max({s.hidden, s.heads * s.head_size, s.feed_forward}) / 2);
  }
  grow(scratch.partial, Attention<T>(s, sight, stack.n_slots).partial_size(tokens.total));
  Scratch<T>& shared = scratch;
  Barrier barrier;
  PARALLEL(s.threads) {
    Pass<T> pass(s, tokens, sight, stack.n_slots, shared, barrier, x);
    for (i64 i = 0; i < stack.count; i++)
      pass.run(stack.layers[i], stack.layers[std::min(i + 1, stack.count - 1)], stack.keys[i],
               stack.values[i]);
    if (final_norm) pass.finish(final_norm);
  };
}

}  // namespace
