// Rounds of speculative decoding on plain arrays: a draft is one call, a verification is one.
//
// The nodes of row b are its pending token, node 0, and the drafted ones, each after its parent. The keys of
// node i lie in slot base + place[i], and its state, the output of the layer below the exit, in row place[i]
// of the states. Places ascend along a path, from 0. The text itself is below base.

#pragma once

#include "choice.h"

namespace {

template <class T> struct Target {
  Sizes sizes;
  Stack<T> stack;
  Head<T> head;
  const T *embedding, *cos, *sin;  // rows for tokens and for positions
};

// How a drafting layer reads the deep state of the token before: x + weight [norm(x), norm(before)].
template <class T> struct Fusing {
  const T *shallow_norm, *deep_norm, *weight;  // [D], [D], [D, 2 D]

  void operator()(const Sizes& s, T* x, const T* before, i64 total) const {
    i64 D = s.hidden;
    Sizes wide = s;
    wide.hidden = 2 * D;
    std::vector<T> both(total * 2 * D);
    std::vector<float> fused(total * D);
#pragma omp parallel for num_threads(s.threads) if (total >= MANY)
    for (i64 m = 0; m < total; m++) {
      rms_norm(x + m * D, shallow_norm, D, s.eps, both.data() + m * 2 * D);
      rms_norm(before + m * D, deep_norm, D, s.eps, both.data() + m * 2 * D + D);
    }
    read_out(wide, Head<T>{nullptr, weight, D, nullptr}, both.data(), total, fused.data());
    for (i64 i = 0; i < total * D; i += LANES) {
      i64 left = total * D - i;
      put(x + i, get(x + i, left) + stored<T>(get(&fused[i], left)), left);
    }
  }
};

// A layer that drafts from the target's states at the exit, and with `fusing` from a deep state of the token before:
// the target's after `deep_tap` layers, through its final norm, or its own where that token is drafted.
template <class T> struct Drafting {
  Stack<T> stack;
  const T* norm;
  Head<T> head;
  Fusing<T> fusing;  // all null where it reads no deep states
  T* deep;           // those of the text, [batch, n_slots, D]
  i64 deep_tap;

  T* deep_at(i64 row, i64 slot, i64 hidden) const { return deep + (row * stack.n_slots + slot) * hidden; }
};

template <class T> struct Rows {
  i64 batch, capacity, hidden, most_unread;
  i64 exit;  // layers below this give the states; 0 where no drafter reads any
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
  // what a verification gives: how many nodes were accepted, and with the bonus what was written
  i64 *accepted, *written;
  // and the likeliest tokens of the distribution behind each that was written, with their probabilities:
  // [batch, capacity, keep]
  i64 keep;  // 0 where they are not wanted
  std::int32_t* kept;
  float* kept_chances;

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
  std::vector<T> x;
  Sight sight;

  void clear(i64 most, i64 deepest) {
    rows.clear(), nodes.clear(), slots.clear(), angles.clear(), paths.clear(), x.clear();
    sight.seen.clear();
    paths.reserve(most * (deepest + 1));  // pointers into it are kept
  }

  void add_node(const Rows<T>& r, i64 row, i64 node) {
    i64 depth = r.depth(row, node), base = r.base[row];
    paths.resize(paths.size() + depth + 1);
    i64* path = paths.data() + paths.size() - depth - 1;
    for (i64 i = depth, up = node; i >= 0; i--, up = r.parent[r.at(row, up)])
      path[i] = base + r.place[r.at(row, up)];
    sight.seen.push_back({row, base, base + depth + 1, path});
    add(row, node, path[depth], base + depth);
  }

  void add_text(i64 row, i64 position) {
    sight.seen.push_back({row, position + 1, position + 1, nullptr});
    add(row, -1, position, position);
  }

  void run(const Sizes& s, const Stack<T>& stack, const Target<T>& target, const T* norm = nullptr) {
    sight.arrange();
    Tokens<T> tokens{i64(rows.size()), slots.data(), angles.data(), target.cos, target.sin};
    run_layers(s, stack, tokens, sight, x.data(), norm);
  }

 private:
  void add(i64 row, i64 node, i64 slot, i64 position) {
    rows.push_back(row), nodes.push_back(node), slots.push_back(slot), angles.push_back(position);
  }
};

struct RowNode {
  i64 row, node;
};

// Which nodes of a tree are verified: the n-th likeliest has to be likelier than worth[n] says; `nodes` at most.
struct Pruning {
  i64 nodes;
  const float* worth;
  bool halves_leaves;  // the less likely half of the nodes without a child goes first, as in the paper
};

template <class T> class Round {
 public:
  Round(const Target<T>& target, const Drafting<T>* drafting, Rows<T>& rows)
      : t(target), d(drafting), r(rows), D(target.sizes.hidden) {}

  // The chains of the rows that ask grow by up to `steps` tokens, until the confidence in one is no more
  // than the threshold, or the chance that the first n are all right no more than least[n]. A token that is
  // a node already, of another source, is not a second one.
  void draft(i64 steps, float threshold, const float* least) {
    std::vector<i64> active;
    std::vector<float> gain(r.batch, 1.0f);
    for (i64 row = 0; row < r.batch; row++)
      if (r.count[row] && r.asking[row] && gain[row] > least[0]) active.push_back(row);
    for (i64 step = 0; step < steps && !active.empty(); step++) {
      find_states();
      std::vector<RowNode> ends;
      for (i64 row : active) ends.push_back({row, r.end[row]});
      std::vector<Choice> choices = grade(ends, CHOICES);
      std::vector<i64> going_on;
      for (i64 i = 0; i < i64(active.size()); i++) {
        i64 row = active[i];
        std::copy_n(choices[i].tokens, CHOICES, r.choices + row * CHOICES);
        std::copy_n(choices[i].chances, CHOICES, r.chances + row * CHOICES);
        i64 known = r.child(row, r.end[row], choices[i].tokens[0]);
        r.end[row] = known < 0 ? r.append(row, r.end[row], choices[i].tokens[0]) : known;
        gain[row] *= choices[i].chances[0];
        bool pays = step + 1 < steps && gain[row] > least[step + 1];
        if (choices[i].chances[0] > threshold && pays) going_on.push_back(row);
      }
      active = going_on;
    }
  }

  // A tree below the pending token of each row that asks. Each level is the likeliest continuations of the one
  // before, `width` of them, until the likeliest is no likelier than the threshold, or than least[levels].
  void draft_trees(i64 steps, i64 width, float threshold, const float* least, const Pruning& pruning) {
    std::vector<RowNode> level;
    std::vector<float> chances(r.batch * r.capacity, 1.0f);  // that a node's whole path is right
    for (i64 row = 0; row < r.batch; row++)
      if (r.count[row] && r.asking[row]) level.push_back({row, 0});
    const std::vector<RowNode> roots = level;
    for (i64 step = 1; step <= steps && !level.empty(); step++) {
      find_states();
      std::vector<Choice> choices = grade(level, width);
      std::vector<RowNode> next;
      for (i64 first = 0, last; first < i64(level.size()); first = last) {
        i64 row = level[first].row;
        for (last = first; last < i64(level.size()) && level[last].row == row;) last++;
        grow(&level[first], &choices[first], last - first, width, &chances[r.at(row, 0)]);
        i64 best = r.count[row] - width;
        if (step == steps || chances[r.at(row, best)] <= std::max(threshold, least[step])) continue;
        for (i64 node = best; node < r.count[row]; node++) next.push_back({row, node});
      }
      level = next;
    }
    for (const RowNode& root : roots) prune(root.row, &chances[r.at(root.row, 0)], pruning);
  }

  // What the target writes after each node; the longest path that it would have written itself.
  void verify() {
    find_states();
    clear();
    for (i64 row = 0; row < r.batch; row++)
      for (i64 node = 0; node < r.count[row]; node++) pass.add_node(r, row, node);
    i64 total = pass.rows.size();
    pass.x.resize(total * D);
    for (i64 m = 0; m < total; m++) {
      i64 row = pass.rows[m], node = pass.nodes[m];
      const T* from = r.exit ? r.state(row, node) : t.embedding + r.token[r.at(row, node)] * D;
      std::copy(from, from + D, pass.x.data() + m * D);
    }
    std::vector<T> deep;
    if (reads_deep()) {
      pass.run(t.sizes, t.stack.range(r.exit, d->deep_tap), t);
      deep = pass.x;
    }
    pass.run(t.sizes, t.stack.range(reads_deep() ? d->deep_tap : r.exit, t.stack.count), t);
    std::vector<Choice> choices = chosen(t.head, pass.x.data(), total, 0, r.keep > 0);
    for (i64 row = 0, m = 0; row < r.batch; m += r.count[row], row++)
      if (r.count[row]) accept(row, choices.data() + m, reads_deep() ? deep.data() + m * D : nullptr);
  }

 private:
  void clear() { pass.clear(r.batch * r.capacity, r.capacity); }

  bool reads_deep() const { return d && d->fusing.weight; }

  // States of the nodes that have none yet, by the layers below the exit.
  void find_states() {
    if (!r.exit) return;
    clear();
    for (i64 row = 0; row < r.batch; row++)
      for (i64 node = 0; node < r.count[row]; node++) {
        if (r.has_state[r.at(row, node)]) continue;
        r.has_state[r.at(row, node)] = 1;
        pass.add_node(r, row, node);
        const T* from = t.embedding + r.token[r.at(row, node)] * D;
        pass.x.insert(pass.x.end(), from, from + D);
      }
    pass.run(t.sizes, t.stack.range(0, r.exit), t);
    for (i64 m = 0; m < i64(pass.rows.size()); m++)
      std::copy_n(pass.x.data() + m * D, D, r.state(pass.rows[m], pass.nodes[m]));
  }

  // What the drafting layer would write after these nodes, those of a row side by side: so many choices.
  std::vector<Choice> grade(const std::vector<RowNode>& nodes, i64 wanted) {
    clear();
    std::vector<i64> last;
    std::vector<T> before;
    for (auto [row, node] : nodes) {
      add_unread(row, r.base[row], before);
      pass.add_node(r, row, node);
      append(pass.x, r.state(row, node), 1);
      if (reads_deep()) append(before, before_node(row, node), 1);
      last.push_back(pass.rows.size() - 1);
    }
    if (reads_deep()) d->fusing(t.sizes, pass.x.data(), before.data(), pass.rows.size());
    pass.run(t.sizes, d->stack, t, d->norm);
    for (i64 i = 0; i < i64(last.size()); i++) {  // these alone, side by side
      std::copy_n(pass.x.data() + last[i] * D, D, pass.x.data() + i * D);
      if (reads_deep()) std::copy_n(pass.x.data() + i * D, D, r.made_at(nodes[i].row, nodes[i].node));
      pass.rows[i] = pass.rows[last[i]];
      pass.angles[i] = pass.angles[last[i]];
    }
    return chosen(d->head, pass.x.data(), last.size(), std::min(wanted, d->head.outputs), false);
  }

  // Adds the likeliest children of some nodes of a row, the likeliest first.
  void grow(const RowNode* parents, const Choice* choices, i64 count, i64 width, float* chances) {
    struct Child { float chance; i64 parent, rank; };
    std::vector<Child> children;
    for (i64 i = 0; i < count; i++)
      for (i64 rank = 0; rank < width; rank++)
        children.push_back({chances[parents[i].node] * choices[i].chances[rank], i, rank});
    std::stable_sort(children.begin(), children.end(),
                     [](const Child& a, const Child& b) { return a.chance > b.chance; });
    children.resize(width);
    for (const Child& child : children) {
      const RowNode& parent = parents[child.parent];
      i64 node = r.append(parent.row, parent.node, choices[child.parent].tokens[child.rank]);
      chances[node] = child.chance;
    }
  }

  // Leaves of a row's tree the likeliest nodes, as many as are worth most: no parent is less likely than its child.
  void prune(i64 row, const float* chances, const Pruning& pruning) {
    std::vector<i64> order = candidates(row, chances, pruning.halves_leaves);
    std::stable_sort(order.begin(), order.end(), [&](i64 a, i64 b) { return chances[a] > chances[b]; });
    i64 best = 0;
    float gain = 0, most = 0;
    for (i64 n = 0; n < std::min<i64>(pruning.nodes, order.size()); n++)
      if ((gain += chances[order[n]] - pruning.worth[n]) > most) most = gain, best = n + 1;
    order.resize(best);
    std::sort(order.begin(), order.end());
    std::vector<i64> number(r.count[row], 0);  // that a node has from now on
    r.count[row] = 1;
    for (i64 node : order) {
      i64 from = r.at(row, node), to = r.at(row, number[node] = r.count[row]++);
      r.token[to] = r.token[from];
      r.parent[to] = number[r.parent[from]];
      r.place[to] = r.place[from];
      r.has_state[to] = r.has_state[from];
    }
  }

  // The nodes beside the root, where it is asked for without the less likely half of those that have no child.
  std::vector<i64> candidates(i64 row, const float* chances, bool halves_leaves) const {
    std::vector<i64> leaves, dropped;
    std::vector<bool> has_child(r.count[row]);
    for (i64 node = 1; node < r.count[row]; node++) has_child[r.parent[r.at(row, node)]] = true;
    for (i64 node = 1; node < r.count[row]; node++)
      if (!has_child[node]) leaves.push_back(node);
    std::stable_sort(leaves.begin(), leaves.end(), [&](i64 a, i64 b) { return chances[a] < chances[b]; });
    if (halves_leaves) dropped.assign(leaves.begin(), leaves.begin() + leaves.size() / 2);
    std::vector<i64> left;
    for (i64 node = 1; node < r.count[row]; node++)
      if (std::find(dropped.begin(), dropped.end(), node) == dropped.end()) left.push_back(node);
    return left;
  }

  // What was not read lies just below `end`.
  void add_unread(i64 row, i64 end, std::vector<T>& before) {
    for (i64 i = 0; i < r.unread[row]; i++) pass.add_text(row, end - r.unread[row] + i);
    append(pass.x, r.unread_states + row * r.most_unread * D, r.unread[row]);
    if (reads_deep()) append(before, d->deep_at(row, end - r.unread[row] - 1, D), r.unread[row]);
    r.unread[row] = 0;
  }

  const T* before_node(i64 row, i64 node) const {
    return node ? r.made_at(row, r.parent[r.at(row, node)]) : d->deep_at(row, r.base[row] - 1, D);
  }

  void append(std::vector<T>& to, const T* states, i64 count) { to.insert(to.end(), states, states + count * D); }

  std::vector<Choice> chosen(const Head<T>& head, const T* x, i64 total, i64 graded, bool keeps) {
    static thread_local std::vector<float> logits;
    if (i64(logits.size()) < total * head.outputs) logits.resize(total * head.outputs);
    float* scores = logits.data();
    read_out(t.sizes, head, x, total, scores);
    std::vector<Choice> choices(total);
    const Gathered<T>& of = pass;  // each thread has a `pass` of its own
#pragma omp parallel for num_threads(std::min(t.sizes.threads, total))
    for (i64 m = 0; m < total; m++)
      choices[m] = choose(head, scores + m * head.outputs, r.draw[of.rows[m]], of.angles[m] + 1, graded,
                          keeps ? r.kept_at(of.rows[m], of.nodes[m]) : Kept{});
    return choices;
  }

  void accept(i64 row, const Choice* choices, const T* deep) {
    i64 *written = r.written + row * r.capacity, depth = 0, node = 0;
    T* unread = r.unread_states + (row * r.most_unread + r.unread[row]) * D;
    while (true) {
      if (r.exit) std::copy_n(r.state(row, node), D, unread + depth * D);
      if (reads_deep())
        rms_norm(deep + node * D, t.head.norm, D, t.sizes.eps, d->deep_at(row, r.base[row] + depth, D));
      written[depth] = choices[node].tokens[0];
      keep(row, node, depth);
      node = r.child(row, node, choices[node].tokens[0]);
      if (node < 0) break;
      move(row, r.base[row] + r.place[r.at(row, node)], r.base[row] + ++depth);
    }
    r.accepted[row] = depth;
    if (r.exit) r.unread[row] += depth + 1;
  }

  // What was kept at a node belongs to the token that was written after it: no later place.
  void keep(i64 row, i64 node, i64 depth) {
    Kept from = r.kept_at(row, node), to = r.kept_at(row, depth);
    if (node == depth) return;
    std::copy_n(from.tokens, r.keep, to.tokens);
    std::copy_n(from.chances, r.keep, to.chances);
  }

  void move(i64 row, i64 from, i64 to) {
    i64 size = t.sizes.kv_heads * t.sizes.head_size, start = row * t.stack.n_slots;
    for (i64 layer = 0; from != to && layer < t.stack.count; layer++)
      for (T* cached : {t.stack.keys[layer], t.stack.values[layer]})
        std::copy_n(cached + (start + from) * size, size, cached + (start + to) * size);
  }

  const Target<T>& t;
  const Drafting<T>* d;
  Rows<T>& r;
  i64 D;
  static thread_local Gathered<T> pass;
};

template <class T> thread_local Gathered<T> Round<T>::pass;

}  // namespace
