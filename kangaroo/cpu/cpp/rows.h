// What rounds work on: the target, a drafting layer, the nodes of all rows, and those gathered for one pass.
//
// The nodes of row b are its pending token, node 0, and the drafted ones, each after its parent. The keys of
// node i lie in slot base + place[i], and its state, the output of the layer below the exit, in row place[i]
// of the states. Places ascend along a path, from 0. The text itself is below base.

#pragma once

#include "sampling.h"

namespace {

template <class T> struct Target {
  const void* embedding;  // rows for tokens: numbers, or blocks as a file has them
  i64 embedding_kind, vocabulary;
  const T *cos, *sin;  // rows for positions
  Sizes sizes;
  Stack<T> stack;
  Head<T> head;
  Rough rough;  // null where there is none

  // A row of a table over the tokens: a draft may hold any number, and what is no token is never accepted.
  i64 row_of(i64 token) const { return std::min<std::uint64_t>(token, vocabulary - 1); }

  void embed(i64 token, T* to) const {
    const i64 row = row_of(token);
    if (embedding_kind == PLAIN) std::copy_n((const T*)embedding + row * sizes.hidden, sizes.hidden, to);
    else widen_row(embedding_kind, (const Octet*)embedding, row, sizes.hidden, to);
  }
};

// How a drafting layer reads the deep state of the token before: x + weight [norm(x), norm(before)]. Without a weight
// both norms are what its queries, keys and values read, and its state goes on from the deep one.
template <class T> struct Fusing {
  const T *shallow_norm, *deep_norm;  // [D]
  const void* weight;                 // [D, 2 D]
  i64 kind;
  const float* scales;  // as of a head

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
// its own where that token is drafted, else a mix of the target's after so many layers as the `taps` say, or the only
// one of these through the target's final norm.
template <class T> struct Drafting {
  const T* norm;
  T* deep;  // states of the text, [batch, n_slots, D]
  const i64* taps;
  i64 n_taps;
  const T* mix;  // [D, n_taps * D], or null
  i64 unseen;    // how many of a text's first tokens no later one sees: slots of keys and values are counted from there
  Stack<T> stack;
  Head<T> head;
  Fusing<T> fusing;  // all null where it reads no deep states, and there are no taps
  Stack<T> shallow;  // of bytes, the layers below the exit as drafts read them; without layers they read the target's

  T* deep_at(i64 row, i64 slot, i64 hidden) const { return deep + (row * stack.n_slots + slot) * hidden; }

  // What the layer reads of `total` tokens' states, [total, n_taps * D], to [total, D].
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

// What makes a whole draft of one pass: the n-th place reads the pending token's state plus places[n - 1], and a
// token moves the logits of the place after it by table * neighbours[token].
template <class T> struct Places {
  const T *places, *neighbours, *table;  // [N - 1, D], [V, rank], [outputs, rank]
  i64 rank;
};

template <class T> struct Rows {
  i64 batch, capacity, hidden, most_unread;
  i64 exit;  // layers below this give the states that a drafter reads
  // of each row: the pending token's position; how many nodes there are; whether a draft is wanted; the node
  // where the chain ends; how its tokens are drawn
  i64 *base, *count, *asking, *end;
  const Draw* draw;
  // of each node, `capacity` a row
  i64 *token, *parent, *place, *has_state;
  i64* choices;    // for the chain's last token, [batch, CHOICES], and
  float* chances;  // the probabilities of as many likeliest tokens
  T* states;       // [batch, capacity, D]
  // states of the last tokens before the pending one, which the drafting layer has not read:
  // [batch, most_unread, D]
  i64* unread;
  T* unread_states;
  T* made;  // what the drafting layer made at each node, as `states`, where it reads deep states
  const float** biases;  // of restricted texts after each node, [outputs], or null
  // what a verification gives: how many nodes were accepted, with the bonus what was written, and after which
  // nodes
  i64 *accepted, *written, *path;
  // and the likeliest tokens of the distribution after each node, with their probabilities:
  // [batch, capacity, keep]
  i64 keep;  // 0 where they are not wanted
  std::int32_t* kept;
  float* kept_chances;

  bool keeps_states() const { return most_unread > 0; }  // else no drafter reads them
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

// Tokens gathered for one pass.
template <class T> struct Gathered {
  std::vector<i64> rows, nodes, slots, angles, paths;
  std::vector<T> x, pairs;  // as in `Tokens`, if any
  i64 unseen = 0;           // as in `Drafting`
  Sight sight;

  void clear(i64 most, i64 deepest, i64 not_seen = 0) {
    rows.clear(), nodes.clear(), slots.clear(), angles.clear(), paths.clear(), x.clear(), pairs.clear();
    sight.seen.clear();
    unseen = not_seen;
    paths.reserve(most * (deepest + 1));  // pointers into it are kept
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
