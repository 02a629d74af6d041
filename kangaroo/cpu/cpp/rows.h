// What rounds work on: the target, a drafting layer, the nodes of all rows, and tokens gathered for a pass.
//
// The nodes of a row are its pending token, node 0, and the drafted tokens, each after its parent. The keys of node i
// lie in slot base + place[i], and its state, the output of the layer below the exit, in row place[i] of the states.
// Places ascend along a path, from 0. The text before the pending token is below base.

#pragma once

#include "sampling.h"

namespace {

template <class T> struct Target {
  const void* embedding;  // a row for each token: numbers, or blocks as a GGUF file has them
  i64 embedding_kind, vocabulary;
  const T *cos, *sin;  // a row for each position
  Sizes sizes;
  Stack<T> stack;
  Head<T> head;
  Rough rough;  // null where there is none

  // The row of a table of tokens. Drafts may hold any number; one that is no token is never accepted.
  i64 row_of(i64 token) const { return std::min<std::uint64_t>(token, vocabulary - 1); }

  void embed(i64 token, T* to) const {
    const i64 row = row_of(token);
    if (embedding_kind == PLAIN) std::copy_n((const T*)embedding + row * sizes.hidden, sizes.hidden, to);
    else widen_row(embedding_kind, (const Octet*)embedding, row, sizes.hidden, to);
  }
};

// How a drafting layer reads the deep state of the token before: x + weight [norm(x), norm(before)]. Without a weight
// its queries, keys and values read both norms side by side, and its residual connection carries the deep state.
template <class T> struct Fusing {
  const T *shallow_norm, *deep_norm;  // [D]
  const void* weight;                 // [D, 2 D]
  i64 kind;
  const float* scales;  // as in a head

  // [total, 2 D]
  std::vector<T> pairs(const Sizes& s, const T* x, const T* before, i64 total) const {
    i64 D = s.hidden;
    std::vector<T> both(total * 2 * D);
#pragma omp parallel for num_threads(s.threads) if (total >= MANY)
    for (i64 m = 0; m < total; m++) {
      rms_norm(x + m * D, shallow_norm, D, s.eps, both.data() + m * 2 * D);
      rms_norm(before + m * D, deep_norm, D, s.eps, both.data() + m * 2 * D + D);
    }
    return both;
  }

  void operator()(const Sizes& s, T* x, const T* before, i64 total) const {
    i64 D = s.hidden;
    Sizes wide = s;
    wide.hidden = 2 * D;
    const std::vector<T> both = pairs(s, x, before, total);
    std::vector<float> fused(total * D);
    read_out(wide, Head<T>{nullptr, weight, kind, D, nullptr, 0, scales}, both.data(), total, fused.data());
    for (i64 i = 0; i < total * D; i += LANES) {
      i64 left = total * D - i;
      put(x + i, get(x + i, left) + stored<T>(get(&fused[i], left)), left);
    }
  }
};

// A layer that drafts from the target's states at the exit, and with `fusing` from a deep state of the token before:
// its own if that token is drafted; otherwise a mix of the target's states at the `taps` (numbers of layers below), or
// the only one of these after the target's final norm.
template <class T> struct Drafting {
  const T* norm;
  T* deep;  // states of the text, [batch, n_slots, D]
  const i64* taps;
  i64 n_taps;
  const T* mix;  // [D, n_taps * D], or null
  i64 unseen;    // how many first tokens of a text no later one sees; slots of keys and values are counted from there
  Stack<T> stack;
  Head<T> head;
  Fusing<T> fusing;  // null if it reads no deep states; then there are no taps
  Stack<T> shallow;  // the layers below the exit in bytes, for drafts; without layers these read the target's

  T* deep_at(i64 row, i64 slot, i64 hidden) const { return deep + (row * stack.n_slots + slot) * hidden; }

  // To [total, D], what the layer reads of `total` tokens' states, [total, n_taps * D].
  void keep_deep(const Target<T>& t, const T* states, i64 total, T* to) const {
    const i64 D = t.sizes.hidden;
    for (i64 m = 0; m < total && !mix; m++) rms_norm(states + m * D, t.head.norm, D, t.sizes.eps, to + m * D);
    if (!mix) return;
    Sizes wide = t.sizes;
    wide.hidden = n_taps * D;
    std::vector<float> mixed(total * D);
    read_out(wide, Head<T>{nullptr, mix, PLAIN, D, nullptr}, states, total, mixed.data());
    for (i64 i = 0; i < total * D; i += LANES) put(to + i, get(&mixed[i], total * D - i), total * D - i);
  }
};

// How one pass makes a whole draft: the n-th place reads the pending token's state plus places[n - 1], and a token adds
// table * neighbours[token] to the logits of the place after it.
template <class T> struct Places {
  const T *places, *neighbours, *table;  // [N - 1, D], [V, rank], [outputs, rank]
  i64 rank;
};

template <class T> struct Rows {
  i64 batch, capacity, hidden, most_unread;
  i64 exit;  // how many layers give the states that a drafter reads
  // by row: the pending token's position; the number of nodes; whether a draft is wanted; the node at the chain's end;
  // how tokens are drawn
  i64 *base, *count, *asking, *end;
  const Draw* draw;
  // by node, `capacity` for each row
  i64 *token, *parent, *place, *has_state;
  i64* choices;    // the best ones for the chain's last token, [batch, CHOICES]
  float* chances;  // the probabilities of as many likeliest tokens
  T* states;       // [batch, capacity, D]
  // how many tokens before the pending one the drafting layer has not read, and their states, [batch, most_unread, D]
  i64* unread;
  T* unread_states;
  T* made;  // the drafting layer's output at each node, like `states`, if it reads deep states
  const float** biases;  // what a restricted text adds to the logits after each node, [outputs], or null
  // results of a verification: the number of accepted nodes, the written tokens with the bonus, and the nodes before
  i64 *accepted, *written, *path;
  // and the likeliest tokens after each node, with their probabilities, [batch, capacity, keep]
  i64 keep;  // 0 if these are not wanted
  std::int32_t* kept;
  float* kept_chances;

  bool keeps_states() const { return most_unread > 0; }  // otherwise no drafter reads them
  i64 at(i64 row, i64 node) const { return row * capacity + node; }
  Kept kept_at(i64 row, i64 node) const {
    i64 first = at(row, node) * keep;
    return {keep, kept + first, kept_chances + first};
  }
  T* state(i64 row, i64 node) const { return states + at(row, place[at(row, node)]) * hidden; }
  T* made_at(i64 row, i64 node) const { return made + at(row, place[at(row, node)]) * hidden; }
  i64 depth(i64 row, i64 node) const {
    i64 depth = 0;
    for (; node > 0; node = parent[at(row, node)]) depth++;
    return depth;
  }
  i64 append(i64 row, i64 below, i64 drafted) {
    i64 node = count[row]++, i = at(row, node);
    token[i] = drafted;
    parent[i] = below;
    place[i] = node;
    has_state[i] = 0;
    return node;
  }
  i64 child(i64 row, i64 node, i64 wanted) const {
    for (i64 i = node + 1; i < count[row]; i++)
      if (parent[at(row, i)] == node && token[at(row, i)] == wanted) return i;
    return -1;
  }
};

// Tokens gathered for a pass.
template <class T> struct Gathered {
  std::vector<i64> rows, nodes, slots, angles, paths;
  std::vector<T> x, pairs;  // states; `pairs` as in `Tokens`, if any
  i64 unseen = 0;           // as in `Drafting`
  Sight sight;

  void clear(i64 most, i64 deepest, i64 not_seen = 0) {
    rows.clear(), nodes.clear(), slots.clear(), angles.clear(), paths.clear(), x.clear(), pairs.clear();
    sight.seen.clear();
    unseen = not_seen;
    paths.reserve(most * (deepest + 1));  // others point into it
  }

  void add_node(const Rows<T>& r, i64 row, i64 node) {
    i64 depth = r.depth(row, node), base = r.base[row];
    paths.resize(paths.size() + depth + 1);
    i64* path = paths.data() + paths.size() - depth - 1;
    for (i64 i = depth, up = node; i >= 0; i--, up = r.parent[r.at(row, up)])
      path[i] = base + r.place[r.at(row, up)] - unseen;
    add(row, node, path[depth], base + depth, {row, base - unseen, base + depth + 1 - unseen, path});
  }

  void add_text(i64 row, i64 position) {
    const i64 count = position + 1 - unseen;
    add(row, -1, count - 1, position, {row, count, count, nullptr});
  }

  void run(const Sizes& s, const Stack<T>& stack, const Target<T>& target, const T* norm = nullptr) {
    sight.arrange(stack.window);
    const T* read = pairs.empty() ? nullptr : pairs.data();
    Tokens<T> tokens{i64(rows.size()), slots.data(), angles.data(), target.cos, target.sin, read};
    run_layers(s, stack, tokens, sight, x.data(), norm);
  }

 private:
  void add(i64 row, i64 node, i64 slot, i64 position, Seen seen) {
    static const i64 first = -1;
    sight.seen.push_back(seen.count ? seen : Seen{row, 0, 1, &first});  // a text's first token sees itself
    rows.push_back(row), nodes.push_back(node), slots.push_back(slot), angles.push_back(position);
  }
};

struct RowNode {
  i64 row, node;
};

}  // namespace
