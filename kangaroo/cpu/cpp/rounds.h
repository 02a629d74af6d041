// Rounds of speculative decoding on arrays: one call drafts, another verifies.

#pragma once

#include "rows.h"

namespace {

// Which nodes of a tree are verified: as many of the likeliest as maximise the sum of chance minus worth[n]; at most
// `nodes`.
struct Pruning {
  i64 nodes;
  const float* worth;
  bool halves_leaves;  // drop the less likely half of the nodes without a child before, as in the paper
  bool of_offered;     // of all children that were offered, in a level or not, and without their states (EAGLE-2)
};

// A child of a node; `node` is its own number, 0 if it is in no level.
struct Child {
  float chance;
  i64 parent, token, node;
};

template <class T> class Round {
 public:
  Round(const Target<T>& target, const Drafting<T>* drafting, Rows<T>& rows)
      : t(target), d(drafting), r(rows), D(target.sizes.hidden), zeros(D) {}

  // Chains of the rows that ask grow by up to `steps` tokens, until the confidence in one falls to the threshold, or
  // the product of those in the first n to the row's least[n]. A token that is a node already, of another source, is
  // not added again.
  void draft(i64 steps, float threshold, const float* least) {
    std::vector<i64> active;
    std::vector<float> gain(r.batch, 1.0f);
    for (i64 row = 0; row < r.batch; row++)
      if (r.count[row] && r.asking[row] && gain[row] > least[row * steps]) active.push_back(row);
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
        bool pays = step + 1 < steps && gain[row] > least[row * steps + step + 1];
        if (choices[i].chances[0] > threshold && pays) going_on.push_back(row);
      }
      active = going_on;
    }
  }

  // The same for rows without a chain, by one pass of the drafting layer.
  void draft_block(const Places<T>& p, i64 steps, float threshold, const float* least) {
    std::vector<i64> active, firsts;
    std::vector<T> before;
    for (i64 row = 0; row < r.batch; row++)
      if (r.count[row] && r.asking[row] && 1.0f > least[row * steps]) active.push_back(row);
    if (active.empty()) return;
    find_states();
    clear(d->unseen);
    for (i64 row : active) {
      add_unread(row, r.base[row], before);
      firsts.push_back(pass.rows.size());
      for (i64 n = 0; n < steps; n++) {
        pass.add_text(row, r.base[row] + n);
        append(pass.x, r.state(row, 0), 1);
        if (n) add(pass.x.data() + pass.x.size() - D, p.places + (n - 1) * D);
        if (reads_deep()) append(before, before_text(row, r.base[row]), 1);
      }
    }
    fuse(before);
    pass.run(t.sizes, d->stack, t, d->norm);
    i64 width = d->head.outputs, rows = active.size();
    for (i64 i = 0; i < rows; i++)  // leaves the places alone, one after another
      std::copy_n(pass.x.data() + firsts[i] * D, steps * D, pass.x.data() + i * steps * D);
    std::vector<float> logits(rows * steps * width), near(width);
    read_out(t.sizes, d->head, pass.x.data(), rows * steps, logits.data());
    Sizes narrow = t.sizes;
    narrow.hidden = p.rank;
    for (i64 i = 0; i < rows; i++) {
      i64 row = active[i], drafted = 0;
      float chance = 1.0f;
      for (i64 n = 0; n < steps; n++) {
        float* scores = logits.data() + (i * steps + n) * width;
        if (n) {
          const T* neighbour = p.neighbours + t.row_of(drafted) * p.rank;
          read_out(narrow, Head<T>{nullptr, p.table, PLAIN, width, nullptr}, neighbour, 1, near.data());
          for (i64 k = 0; k < width; k++) scores[k] += near[k];
        }
        Choice choice = choose(d->head, scores, r.draw[row], r.base[row] + n + 1, 1, Kept{});
        drafted = choice.tokens[0];
        r.end[row] = r.append(row, r.end[row], drafted);
        chance *= choice.chances[0];
        if (choice.chances[0] <= threshold || n + 1 == steps || chance <= least[row * steps + n + 1]) break;
      }
    }
  }

  // A tree below the pending token of each row that asks. Each level has the `width` likeliest continuations of the one
  // before, until the likeliest falls to the threshold or to the row's least[levels].
  void draft_trees(i64 steps, i64 width, float threshold, const float* least, const Pruning& pruning) {
    std::vector<RowNode> level;
    std::vector<float> chances(r.batch * r.capacity, 1.0f);  // of nodes: that the whole path is right
    std::vector<std::vector<Child>> offered(r.batch);
    for (i64 row = 0; row < r.batch; row++)
      if (r.count[row] && r.asking[row] && least[row * steps] < 1) level.push_back({row, 0});
    const std::vector<RowNode> roots = level;
    for (i64 step = 1; step <= steps && !level.empty(); step++) {
      find_states();
      std::vector<Choice> choices = grade(level, width);
      std::vector<RowNode> next;
      for (i64 first = 0, last; first < i64(level.size()); first = last) {
        i64 row = level[first].row;
        for (last = first; last < i64(level.size()) && level[last].row == row;) last++;
        grow(&level[first], &choices[first], last - first, width, &chances[r.at(row, 0)], offered[row]);
        i64 best = r.count[row] - width;
        if (step == steps || chances[r.at(row, best)] <= std::max(threshold, least[row * steps + step])) continue;
        for (i64 node = best; node < r.count[row]; node++) next.push_back({row, node});
      }
      level = next;
    }
    for (const RowNode& root : roots) {
      if (pruning.of_offered) replace_by_best(root.row, offered[root.row], pruning);
      else prune(root.row, &chances[r.at(root.row, 0)], pruning);
    }
  }

  // Finds what the target writes after each node, and the longest path that it would have written itself.
  void verify() {
    if (drafts_in_bytes()) forget_states();
    find_states(false);
    clear();
    for (i64 row = 0; row < r.batch; row++)
      for (i64 node = 0; node < r.count[row]; node++) pass.add_node(r, row, node);
    i64 total = pass.rows.size();
    pass.x.resize(total * D);
    for (i64 m = 0; m < total; m++) {
      i64 row = pass.rows[m], node = pass.nodes[m];
      T* to = pass.x.data() + m * D;
      if (r.keeps_states()) std::copy_n(r.state(row, node), D, to);
      else t.embed(r.token[r.at(row, node)], to);
    }
    const i64 taps = d ? d->n_taps : 0;
    std::vector<T> deep(total * taps * D);
    i64 done = r.exit;
    for (i64 layer = done; layer <= t.stack.count; layer++)
      for (i64 tap = 0; tap < taps; tap++) {
        if (d->taps[tap] != layer) continue;
        pass.run(t.sizes, t.stack.range(done, layer), t);
        for (i64 m = 0; m < total; m++) std::copy_n(pass.x.data() + m * D, D, deep.data() + (m * taps + tap) * D);
        done = layer;
      }
    pass.run(t.sizes, t.stack.range(done, t.stack.count), t);
    std::vector<Choice> choices = target_choices(total);
    for (i64 row = 0, m = 0; row < r.batch; m += r.count[row], row++)
      if (r.count[row]) accept(row, choices.data() + m, deep.data() + m * taps * D, taps * D);
  }

 private:
  void clear(i64 unseen = 0) { pass.clear(r.batch * r.capacity, r.capacity, unseen); }

  bool reads_deep() const { return d && d->n_taps; }

  // Whether states found while drafting are rounded, and so not the target's.
  bool drafts_in_bytes() const { return d && d->shallow.count; }

  void forget_states() {
    for (i64 row = 0; row < r.batch; row++) std::fill_n(r.has_state + r.at(row, 0), r.count[row], 0);
  }

  // Finds the states of nodes that have none yet, by the layers below the exit.
  void find_states(bool drafting = true) {
    if (!r.keeps_states()) return;
    clear();
    for (i64 row = 0; row < r.batch; row++)
      for (i64 node = 0; node < r.count[row]; node++) {
        if (r.has_state[r.at(row, node)]) continue;
        r.has_state[r.at(row, node)] = 1;
        pass.add_node(r, row, node);
        pass.x.resize(pass.x.size() + D);
        t.embed(r.token[r.at(row, node)], pass.x.data() + pass.x.size() - D);
      }
    pass.run(t.sizes, drafting && drafts_in_bytes() ? d->shallow : t.stack.range(0, r.exit), t);
    for (i64 m = 0; m < i64(pass.rows.size()); m++)
      std::copy_n(pass.x.data() + m * D, D, r.state(pass.rows[m], pass.nodes[m]));
  }

  // As many choices of the drafting layer as are wanted, after each of these nodes; those of a row stand together.
  std::vector<Choice> grade(const std::vector<RowNode>& nodes, i64 wanted) {
    clear(d->unseen);
    std::vector<i64> last;
    std::vector<T> before;
    for (auto [row, node] : nodes) {
      add_unread(row, r.base[row], before);
      pass.add_node(r, row, node);
      append(pass.x, r.state(row, node), 1);
      if (reads_deep()) append(before, before_node(row, node), 1);
      last.push_back(pass.rows.size() - 1);
    }
    fuse(before);
    pass.run(t.sizes, d->stack, t, d->norm);
    for (i64 i = 0; i < i64(last.size()); i++) {  // leaves these nodes alone, one after another
      std::copy_n(pass.x.data() + last[i] * D, D, pass.x.data() + i * D);
      if (reads_deep()) std::copy_n(pass.x.data() + i * D, D, r.made_at(nodes[i].row, nodes[i].node));
      pass.rows[i] = pass.rows[last[i]];
      pass.angles[i] = pass.angles[last[i]];
    }
    find_logits(d->head, pass.x.data(), last.size());
    return choices_of(d->head, last.size(), std::min(wanted, d->head.outputs), false);
  }

  // Joins the states of the pass with the deep states before them, if the drafting layer reads such.
  void fuse(std::vector<T>& before) {
    if (!reads_deep()) return;
    const i64 total = pass.rows.size();
    if (d->fusing.weight) return d->fusing(t.sizes, pass.x.data(), before.data(), total);
    pass.pairs = d->fusing.pairs(t.sizes, pass.x.data(), before.data(), total);
    pass.x.swap(before);
  }

  // Adds the likeliest children of some nodes of a row as nodes, the likeliest first, and all children to `offered`.
  void grow(const RowNode* parents, const Choice* choices, i64 count, i64 width, float* chances,
            std::vector<Child>& offered) {
    const i64 known = offered.size();
    for (i64 i = 0; i < count; i++)
      for (i64 rank = 0; rank < width; rank++) {
        const float chance = chances[parents[i].node] * choices[i].chances[rank];
        offered.push_back({chance, parents[i].node, choices[i].tokens[rank], 0});
      }
    std::vector<Child*> children;
    for (i64 i = known; i < i64(offered.size()); i++) children.push_back(&offered[i]);
    std::stable_sort(children.begin(), children.end(),
                     [](const Child* a, const Child* b) { return a->chance > b->chance; });
    children.resize(width);
    for (Child* child : children) {
      child->node = r.append(parents->row, child->parent, child->token);
      chances[child->node] = child->chance;
    }
  }

  // Prunes a row's tree to its likeliest nodes, as many as are worth most. No parent is less likely than its child.
  void prune(i64 row, const float* chances, const Pruning& pruning) {
    std::vector<i64> order = candidates(row, chances, pruning.halves_leaves);
    keep_worthy(order, pruning, [&](i64 node) { return chances[node]; });
    std::vector<i64> number(r.count[row], 0);  // the new number of each node
    r.count[row] = 1;
    for (i64 node : order) {
      i64 from = r.at(row, node), to = r.at(row, number[node] = r.count[row]++);
      r.token[to] = r.token[from];
      r.parent[to] = number[r.parent[from]];
      r.place[to] = r.place[from];
      r.has_state[to] = r.has_state[from];
    }
  }

  // The same if all children that were offered may be verified; their parents are in a level.
  void replace_by_best(i64 row, const std::vector<Child>& offered, const Pruning& pruning) {
    std::vector<i64> order(offered.size()), number(r.count[row], 0);
    std::iota(order.begin(), order.end(), 0);
    keep_worthy(order, pruning, [&](i64 i) { return offered[i].chance; });
    r.count[row] = 1;
    for (i64 i : order) {
      const i64 node = r.append(row, number[offered[i].parent], offered[i].token);
      if (offered[i].node) number[offered[i].node] = node;
    }
  }

  // Cuts `order` to the likeliest ones, as many as are worth most, in ascending order.
  template <class ChanceOf> void keep_worthy(std::vector<i64>& order, const Pruning& pruning, ChanceOf chance_of) {
    std::stable_sort(order.begin(), order.end(), [&](i64 a, i64 b) { return chance_of(a) > chance_of(b); });
    i64 best = 0;
    float gain = 0, most = 0;
    for (i64 n = 0; n < std::min<i64>(pruning.nodes, order.size()); n++)
      if ((gain += chance_of(order[n]) - pruning.worth[n]) > most) most = gain, best = n + 1;
    order.resize(best);
    std::sort(order.begin(), order.end());
  }

  // The nodes without the root, and, if `halves_leaves`, without the less likely half of those that have no child.
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

  // Adds the tokens before `end` that the drafting layer has not read.
  void add_unread(i64 row, i64 end, std::vector<T>& before) {
    for (i64 position = end - r.unread[row]; position < end; position++) {
      pass.add_text(row, position);
      if (reads_deep()) append(before, before_text(row, position), 1);
    }
    append(pass.x, r.unread_states + row * r.most_unread * D, r.unread[row]);
    r.unread[row] = 0;
  }

  const T* before_node(i64 row, i64 node) const {
    return node ? r.made_at(row, r.parent[r.at(row, node)]) : before_text(row, r.base[row]);
  }

  // The deep state before a position of the text; zeros before the first.
  const T* before_text(i64 row, i64 position) const {
    return position ? d->deep_at(row, position - 1, D) : zeros.data();
  }

  void add(T* to, const T* more) {
    for (i64 i = 0; i < D; i += LANES) put(to + i, get(to + i, D - i) + get(more + i, D - i), D - i);
  }

  void append(std::vector<T>& to, const T* states, i64 count) { to.insert(to.end(), states, states + count * D); }

  // The target's choices after all tokens of the pass.
  std::vector<Choice> target_choices(i64 total) {
    bool by_limits = total > 0 && t.rough.pays(total) && !r.keep;
    std::vector<Noise> noises;
    for (i64 m = 0; m < total; m++) {
      const Draw& draw = r.draw[pass.rows[m]];
      by_limits &= (draw.temperature == 0 || !draw.filtered(t.head.outputs)) && !biases_of(m);
      noises.emplace_back(draw, pass.angles[m] + 1);
    }
    if (by_limits) return choices_on_path({t.sizes, t.head, t.rough, pass.x.data(), noises});
    find_logits(t.head, pass.x.data(), total);
    for (i64 m = 0; m < total; m++)
      if (const float* biases = biases_of(m))
        for (i64 n = 0; n < t.head.outputs; n++) logits[m * t.head.outputs + n] += biases[n];
    return choices_of(t.head, total, 0, r.keep > 0);
  }

  // The choices that decide what is accepted. What follows a wrong token does not matter, and there many are likely.
  std::vector<Choice> choices_on_path(const Candidates<T>& candidates) {
    std::vector<Choice> choices(candidates.tokens);
    std::vector<bool> is_right(candidates.tokens);
    for (i64 m = 0; m < candidates.tokens; m++) {
      const i64 row = pass.rows[m], node = pass.nodes[m], i = r.at(row, node), parent = m - node + r.parent[i];
      is_right[m] = !node || (is_right[parent] && choices[parent].tokens[0] == r.token[i]);
      if (!is_right[m]) continue;
      const std::vector<i64> ids = candidates.read(m, 1, logits);
      const Head<T> few{nullptr, nullptr, PLAIN, i64(ids.size()), ids.data()};
      choices[m] = choose(few, logits.data(), r.draw[row], pass.angles[m] + 1, 0, Kept{});
    }
    return choices;
  }

  const float* biases_of(i64 m) const { return r.biases[r.at(pass.rows[m], pass.nodes[m])]; }

  void find_logits(const Head<T>& head, const T* x, i64 total) {
    if (i64(logits.size()) < total * head.outputs) logits.resize(total * head.outputs);
    read_out(t.sizes, head, x, total, logits.data());
  }

  // Choices by `logits`, for the first `total` tokens of the pass.
  std::vector<Choice> choices_of(const Head<T>& head, i64 total, i64 graded, bool keeps) {
    const float* scores = logits.data();
    std::vector<Choice> choices(total);
    const Gathered<T>& of = pass;  // each thread has a `pass` of its own
    PARALLEL_FOR(std::min(t.sizes.threads, total), m, total) {
      choices[m] = choose(head, scores + m * head.outputs, r.draw[of.rows[m]], of.angles[m] + 1, graded,
                          keeps ? r.kept_at(of.rows[m], of.nodes[m]) : Kept{});
    };
    return choices;
  }

  // Walks by the choices, and keeps what is accepted: keys, states, and of each node's deep states so many `numbers`.
  void accept(i64 row, const Choice* choices, const T* deep, i64 numbers) {
    std::vector<T> on_path;
    i64 *written = r.written + row * r.capacity, depth = 0, node = 0;
    T* unread = r.unread_states + (row * r.most_unread + r.unread[row]) * D;
    while (true) {
      if (r.keeps_states()) std::copy_n(r.state(row, node), D, unread + depth * D);
      on_path.insert(on_path.end(), deep + node * numbers, deep + (node + 1) * numbers);
      written[depth] = choices[node].tokens[0];
      r.path[r.at(row, depth)] = node;
      node = r.child(row, node, choices[node].tokens[0]);
      if (node < 0) break;
      move(row, r.base[row] + r.place[r.at(row, node)], r.base[row] + ++depth);
    }
    if (reads_deep()) d->keep_deep(t, on_path.data(), depth + 1, d->deep_at(row, r.base[row], D));
    r.accepted[row] = depth;
    if (r.keeps_states()) r.unread[row] += depth + 1;
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
  const std::vector<T> zeros;
  static thread_local Gathered<T> pass;
  static thread_local std::vector<float> logits;
};

template <class T> thread_local Gathered<T> Round<T>::pass;
template <class T> thread_local std::vector<float> Round<T>::logits;

}  // namespace
