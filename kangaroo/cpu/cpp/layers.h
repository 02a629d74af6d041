// Decoder layers for few tokens: all layers of a range run in one parallel region.

#pragma once

#include "attention.h"
#include "barrier.h"
#include "side_by_side.h"

namespace {

struct LayerMatrix {
  const void* data;
  i64 kind;
  explicit operator bool() const { return data; }
};

// Python fills it in; a part that a layer lacks is null. Without queries the layer only writes keys and values.
template <class T> struct Layer {
  const T* attention_norm;
  LayerMatrix q, k, v, o;
  const T *q_bias, *k_bias, *v_bias, *o_bias, *q_norm, *k_norm, *feed_forward_norm;
  LayerMatrix gate, up, down;
  i64 passing;  // as in `Weights`, for all matrices
};

// Layers, their keys and values, [rows * n_slots, K, C], and how many positions they look back (0: all).
template <class T> struct Stack {
  const Layer<T>* layers;
  i64 count;
  T *const *keys, *const *values;
  i64 n_slots, window;
  i64 plain;  // whether all matrices are PLAIN

  Stack range(i64 first, i64 last) const {
    return {layers + first, last - first, keys + first, values + first, n_slots, window, plain};
  }
};

// The tokens of a pass: the slots of their keys, their rows in the tables of cosines and sines (`angles`), and what
// queries, keys and values read instead of normed states, [M, 2 D], or null.
template <class T> struct Tokens {
  i64 total;
  const i64 *slots, *angles;
  const T *cos, *sin;
  const T* pairs = nullptr;
};

template <class T> void rms_norm(const T* x, const T* weight, i64 size, double eps, T* out) {
  constexpr int count = LANES / WIDE;
  Register squares[count]{};
  for (i64 i = 0; i < size; i += LANES)
    for (int j = 0; j < count; j++) {
      const Register part = few(x + i + j * WIDE, size - i - j * WIDE);
      squares[j] += part * part;
    }
  const float scale = 1.0f / std::sqrt(sum_of(squares) / float(size) + float(eps));
  for (i64 i = 0; i < size; i += WIDE)
    put_few(out + i, few(weight + i, size - i) * stored_few<T>(few(x + i, size - i) * scale), size - i);
}

// Memory that all threads share, and that is kept for the next pass.
template <class T> struct Scratch {
  std::vector<T> qkv, queries, attended, activated;  // [M, H + 2K, C], [M, H, C] twice, [M, F]
  std::vector<Words> states, normed, read;           // side by side: [M, D] twice, and what `add` reads, [M, F or H C]
  std::vector<Words> turned;                         // what products read (transposed_gemm.h)
  std::vector<float> partial;
};

// A pass of some tokens through layers; T is the format of states, keys and values.
template <class T> class Pass {
 public:
  Pass(const Sizes& sizes, const Stack<T>& stack, const Tokens<T>& tokens, const Sight& sight, Scratch<T>& scratch,
       Barrier& barrier, Shares& shares, T* x)
      : s(sizes), tokens(tokens), sight(sight), n_slots(stack.n_slots), scratch(scratch), barrier(barrier),
        shares(shares), x(x), attention(sizes, sight, n_slots), plain(stack.plain),
        wide(!tokens.pairs && takes_wide(sizes, stack, tokens.total)), groups(blocks(tokens.total)) {
    if (!wide) normed.resize(tokens.total * s.hidden);
    for (i64 group = groups.first; wide && group < groups.last; group++)
      side_by_side(Matrix<T>{x, tokens.total, s.hidden}, group, &scratch.states[group * s.hidden / 2]);
  }

  // Whether states stay in a matrix unit's layout between products (side_by_side.h). The results are the same.
  static bool takes_wide(const Sizes& s, const Stack<T>& stack, i64 total) {
    const bool fits = s.head_size % 32 == 0 && s.feed_forward % 32 == 0;
    return stack.plain && total >= MANY && takes_tiles<T>(s.hidden) && fits;
  }

  // `next` is the layer after this one, or, at the end, this one.
  void run(const Layer<T>& layer, const Layer<T>& next, T* keys, T* values) {
    if (layer.k) {
      project(layer);
      barrier.wait();
      rotate(layer, keys, values);
      barrier.wait();
    }
    if (layer.q) {
      if (attention.by_blocks()) {
        attention.attend_blocks(scratch.queries.data(), keys, values, scratch.attended.data());
      } else {
        attention.attend(scratch.queries.data(), keys, values, scratch.partial.data());
        barrier.wait();
        attention.merge(scratch.partial.data(), scratch.attended.data());
      }
      barrier.wait();
      i64 width = s.heads * s.head_size;
      Matrix<T> attended{scratch.attended.data(), tokens.total, width};
      if (wide) {
        for (i64 group = groups.first; group < groups.last; group++)
          side_by_side(attended, group, &scratch.read[group * width / 2]);
        barrier.wait();
      }
      add(attended, weights(layer, layer.o, s.hidden, width), layer.o_bias,
          layer.gate ? first_gate(layer) : first_of(next));
      barrier.wait();
    }
    if (layer.gate) {
      activate(layer);
      barrier.wait();
      add({scratch.activated.data(), tokens.total, s.feed_forward},
          weights(layer, layer.down, s.hidden, s.feed_forward), nullptr, first_of(next));
      barrier.wait();
    }
  }

  // The final norm, if there is a weight.
  void finish(const T* weight) {
    auto norm_token = [&](i64 m) {
      if (weight) rms_norm(x + m * s.hidden, weight, s.hidden, s.eps, x + m * s.hidden);
    };
    if (wide) {
      for (i64 group = groups.first; group < groups.last; group++) {
        one_by_one(&scratch.states[group * s.hidden / 2], group, {x, tokens.total, s.hidden}, x);
        for (i64 m = group * LANES; m < std::min((group + 1) * LANES, tokens.total); m++) norm_token(m);
      }
      return;
    }
    Part mine(tokens.total);
    for (i64 m = mine.first; m < mine.last; m++) norm_token(m);
  }

 private:
  static Weights weights(const Layer<T>& layer, const LayerMatrix& of, i64 rows, i64 width) {
    const auto* scales = of.kind == IN_BYTES ? (const float*)((const Byte*)of.data + rows * width) : nullptr;
    return {of.data, of.kind, rows, width, layer.passing, scales};
  }

  // Where this thread begins to read a layer's matrices. Queries, keys and values are divided like one matrix.
  const char* first_of(const Layer<T>& layer) const {
    if (!layer.k) return first_gate(layer);
    const Projections all(s, layer, read_width());
    const Block first = all.block(shares.own_first(all.count, shares.at_a_time(all.count)));
    return first.w->template block<T>(first.n);
  }

  i64 read_width() const { return tokens.pairs ? 2 * s.hidden : s.hidden; }  // what queries, keys and values read

  const char* first_gate(const Layer<T>& layer) const {
    const i64 first = shares.own_first(2 * blocks(s.feed_forward), 2) / 2;
    return weights(layer, layer.gate, s.feed_forward, s.hidden).template block<T>(first * LANES);
  }

  const char* first_row(const Weights& w) const {
    return w.block<T>(shares.own_first(blocks(w.rows), shares.at_a_time(blocks(w.rows))) * LANES);
  }

  // The tokens that this thread norms and prepares for all threads, if these share that work; otherwise all tokens.
  Part prepared_here(const Matrix<T>& in, const Kinds& kinds) const {
    if (!shares_input(in, kinds)) return {0, in.rows};
    if (!kinds.plain) return Part(in.rows);
    const Part groups((in.rows + TURNED_GROUP - 1) / TURNED_GROUP);
    return {groups.first * TURNED_GROUP, std::min(groups.last * TURNED_GROUP, in.rows)};
  }

  bool shares_input(const Matrix<T>& in, const Kinds& kinds) const {
    return plain ? takes_turned(in) : in.rows >= MANY && !kinds.plain && !kinds.bytes;
  }

  // Each thread norms few tokens for itself, which takes less time than a barrier. Without a weight they are copied,
  // since x changes before all threads have read it.
  Input<T> norm(const T* weight, const Kinds& kinds) {
    if (wide) return norm_wide(weight);
    const Matrix<T> in{normed.data(), tokens.total, s.hidden};
    const Part mine = prepared_here(in, kinds);
    for (i64 m = mine.first; m < mine.last; m++) {
      const T* from = x + m * s.hidden;
      if (weight) rms_norm(from, weight, s.hidden, s.eps, normed.data() + m * s.hidden);
      else std::copy_n(from, s.hidden, normed.data() + m * s.hidden);
    }
    return prepared(in, kinds);
  }

  Input<T> prepared(const Matrix<T>& in, const Kinds& kinds) {
    if (!shares_input(in, kinds)) return input(in, kinds, rooms);
    const Part mine = prepared_here(in, kinds);
    Input<T> result{in.rows, in.width};
    if (kinds.plain) {
      turn(in, mine, scratch.turned.data());
      result.turned = (const std::uint32_t*)scratch.turned.data();
    } else {
      round_tokens(in, mine, scratch.turned.data());
      result.portions = (const Portion*)scratch.turned.data();
    }
    barrier.wait();
    return result;
  }

  // Each thread norms some of many tokens.
  Input<T> norm_wide(const T* weight) {
    const i64 words = s.hidden / 2;
    for (i64 group = groups.first; group < groups.last; group++) {
      const Words* from = &scratch.states[group * words];
      if (weight) norm_side_by_side(from, weight, s.hidden, s.eps, &scratch.normed[group * words]);
      else std::copy_n(from, words, &scratch.normed[group * words]);
    }
    barrier.wait();
    return {tokens.total, s.hidden, {}, scratch.normed.data()};
  }

  // The blocks of queries, keys and values, one after another; without queries those of keys and values alone.
  struct Projections {
    struct Projection { Weights w; const T* bias; i64 before, first; } parts[3];
    i64 skipped, count;
    Projections(const Sizes& s, const Layer<T>& layer, i64 width) {
      const i64 of_q = s.heads * s.head_size, of_k = s.kv_heads * s.head_size;
      parts[0] = {weights(layer, layer.q, of_q, width), layer.q_bias, 0, 0};
      parts[1] = {weights(layer, layer.k, of_k, width), layer.k_bias, blocks(of_q), of_q};
      parts[2] = {weights(layer, layer.v, of_k, width), layer.v_bias, blocks(of_q) + blocks(of_k), of_q + of_k};
      skipped = layer.q ? 0 : blocks(of_q);
      count = blocks(of_q) + 2 * blocks(of_k) - skipped;
    }
    const Projection& part_of(i64 i) const {
      return parts[i + skipped < parts[1].before ? 0 : i + skipped < parts[2].before ? 1 : 2];
    }
    i64 first_row(i64 i) const { return (i + skipped - part_of(i).before) * LANES; }
    Block block(i64 i) const { return {&part_of(i).w, first_row(i)}; }
  };

  void project(const Layer<T>& layer) {
    const Kinds kinds{layer.q ? layer.q.kind : layer.k.kind, layer.k.kind, layer.v.kind};
    const Matrix<T> pairs{tokens.pairs, tokens.total, read_width()};
    const Input<T> in = tokens.pairs ? prepared(pairs, kinds) : norm(layer.attention_norm, kinds);
    const i64 of_q = s.heads * s.head_size, all = of_q + 2 * s.kv_heads * s.head_size;
    const Projections projections(s, layer, read_width());
    // stores the i-th block's sums_of(j) for the j-th of `count` tokens from m on
    auto keep = [&](i64 i, i64 m, i64 count, auto sums_of) {
      auto& part = projections.part_of(i);
      i64 n = projections.first_row(i), width = part.w.rows - n;
      Floats shift = part.bias ? get(part.bias + n, width) : Floats{};
      for (i64 j = 0; j < count; j++) put(&scratch.qkv[(m + j) * all + part.first + n], sums_of(j) + shift, width);
    };
    multiply(
        in, projections.count, shares.at_a_time(projections.count), [&](i64 i) { return projections.block(i); },
        layer.q ? first_row(weights(layer, layer.o, s.hidden, of_q)) : first_of(layer),
        [&](i64 i, i64 m, Floats* sums, const Floats*) {
          transpose((Words*)sums);
          keep(i, m, std::min<i64>(LANES, tokens.total - m), [&](i64 j) { return sums[j]; });
        },
        [&](i64 i, const float* sums) { keep(i, 0, tokens.total, [&](i64 j) { return get(sums + j * LANES); }); });
  }

  // Rotates queries and keys (RoPE), and writes keys and values to their slots.
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
    const Input<T> in = norm(layer.feed_forward_norm, {layer.gate.kind, layer.up.kind});
    const Weights gate = weights(layer, layer.gate, s.feed_forward, s.hidden);
    const Weights up = weights(layer, layer.up, s.feed_forward, s.hidden);
    // a block of gates and then its block of `up`, together
    multiply(
        in, 2 * blocks(s.feed_forward), 2, [&](i64 i) { return Block{i % 2 ? &up : &gate, i / 2 * LANES}; },
        first_row(weights(layer, layer.down, s.hidden, s.feed_forward)),
        [&](i64 i, i64 m, const Floats* ups, const Floats* gates) {
          Words* to = &scratch.read[(m * s.feed_forward + i / 2 * LANES * LANES) / (2 * LANES)];
          if (i % 2) activate_side_by_side<T>(gates, ups, to);
        },
        [&](i64 i, const float* ups) {
          const float* gates = ups - tokens.total * LANES;
          i64 n = i / 2 * LANES;
          for (i64 m = 0; i % 2 && m < tokens.total; m++)
            put(&scratch.activated[m * s.feed_forward + n], gated<T>(get(gates + m * LANES), get(ups + m * LANES)),
                s.feed_forward - n);
        });
  }

  // x += in . w + bias; if `wide`, `in` is what lies side by side
  void add(const Matrix<T>& in, const Weights& w, const T* bias, const char* after) {
    multiply(
        wide ? Input<T>{in.rows, in.width, {}, scratch.read.data()} : prepared(in, {w.kind}), blocks(s.hidden),
        shares.at_a_time(blocks(s.hidden)), [&](i64 i) { return Block{&w, i * LANES}; }, after,
        [&](i64 i, i64 m, const Floats* sums, const Floats*) {
          Words* to = &scratch.states[(m * s.hidden + i * LANES * LANES) / (2 * LANES)];
          add_side_by_side(sums, bias ? bias + i * LANES : nullptr, to);
        },
        [&](i64 i, const float* sums) {
          i64 n = i * LANES, width = s.hidden - n;
          Floats shift = bias ? get(bias + n, width) : Floats{};
          for (i64 m = 0; m < tokens.total; m++) {
            T* to = x + m * s.hidden + n;
            put(to, get(to, width) + stored<T>(get(sums + m * LANES) + shift), width);
          }
        });
  }

  // Products with the blocks that this thread takes, which the first function stores if tokens lie side by side.
  template <class BlockOf, class StoreWide, class Store>
  void multiply(const Input<T>& in, i64 count, i64 at_a_time, BlockOf block_of, const char* after, StoreWide store_wide,
                Store store) {
    shares.divide(count, at_a_time, [&](const Item& item) {
      if (wide) products_side_by_side(in, item, block_of, after, room_for_sums, store_wide);
      else products(in, item, block_of, after, room_for_sums, store);
    });
  }

  const Sizes& s;
  const Tokens<T>& tokens;
  const Sight& sight;
  i64 n_slots;
  Scratch<T>& scratch;  // this and the next two are shared by all threads; the rest is each thread's own
  Barrier& barrier;
  Shares& shares;
  T* x;
  Attention<T> attention;
  const bool plain, wide;
  const Part groups;  // of sixteen tokens
  Room room_for_sums;
  std::vector<T> normed;
  Rooms rooms;
  TileUse tiles;
};

// Runs x, [M, D], through some layers, and norms it at the end if a norm is given.
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
  const i64 widest = std::max({tokens.pairs ? 2 * s.hidden : s.hidden, s.heads * s.head_size, s.feed_forward});
  if (TURNS && tokens.total >= TURNED_FROM) grow(scratch.turned, turned_words(tokens.total, (widest + 31) / 32 * 32));
  if (!stack.plain && tokens.total >= MANY) grow(scratch.turned, portion_words(tokens.total, (widest + 31) / 32 * 32));
  if (Pass<T>::takes_wide(s, stack, tokens.total)) {
    i64 groups = blocks(tokens.total);
    grow(scratch.states, groups * s.hidden / 2);
    grow(scratch.normed, groups * s.hidden / 2);
    grow(scratch.read, groups * std::max(s.heads * s.head_size, s.feed_forward) / 2);
  }
  grow(scratch.partial, Attention<T>::partial_size(s, sight));
  Scratch<T>& shared = scratch;
  Barrier barrier;
  Shares shares(s.threads);
  PARALLEL(s.threads) {
    Pass<T> pass(s, stack, tokens, sight, shared, barrier, shares, x);
    for (i64 i = 0; i < stack.count; i++)
      pass.run(stack.layers[i], stack.layers[std::min(i + 1, stack.count - 1)], stack.keys[i],
               stack.values[i]);
    pass.finish(final_norm);
  };
}

}  // namespace
