// Which positions each token attends to, in their order.
//
// Sums over positions are taken in chunks of CHUNK, a token's own path through a draft tree included, wherever its keys
// lie. So a token gets the same bits in a chain, in a tree, and when its path has become text.

#pragma once

#include <utility>
#include <vector>

#include "numbers.h"

namespace {

constexpr i64 CHUNK = 64;  // positions whose attention is one piece of work

// What a token of a row sees: positions below `shared` lie in slots of the same number, the others, up to `count`, in
// the slots listed at `path`.
struct Seen {
  i64 row, shared, count;
  const i64* path;
  i64 slot(i64 position) const { return position < shared ? position : path[position - shared]; }
  // The first position that a layer sees which looks back `window` positions (0: all), rounded down to a whole chunk.
  i64 first(i64 window) const { return window ? std::max<i64>(count - 1 - window, 0) / CHUNK * CHUNK : 0; }
};

struct Member {  // a token, and how many positions of a piece it sees
  i64 token, width;
};

struct Piece {  // attention of some tokens of a row to the positions from `first` to `first + width`
  i64 row, first, width;
  i64 group;  // which list has the slots, from `start` on; -1 if slots are positions
  i64 start, members, n_members;
  i64 alike, n_alike;  // the first piece at these positions, of all paths through a tree; how many there are
};

struct Sight {
  std::vector<Seen> seen;
  std::vector<Piece> pieces;
  std::vector<Member> members;
  std::vector<std::vector<i64>> lists;
  i64 n_lists = 0, chunks = 0, window = 0;

  // Makes the pieces of `seen`, where tokens of a row stand together, for layers that look back so many positions.
  void arrange(i64 looks_back) {
    window = looks_back;
    pieces.clear();
    members.clear();
    n_lists = chunks = 0;
    i64 total = seen.size();
    for (i64 first = 0, last; first < total; first = last) {
      for (last = first + 1; last < total && seen[last].row == seen[first].row;) last++;
      arrange_row(first, last);
    }
  }

  // The item-th pair of a piece and a head. For each head, pieces at the same positions follow each other, since they
  // have keys in common.
  std::pair<const Piece*, i64> piece_and_head(i64 item, i64 heads) const {
    const Piece& some = pieces[item / heads];
    i64 i = item - some.alike * heads;
    return {&pieces[some.alike + i % some.n_alike], i / some.n_alike};
  }

  // How many first slots two pieces at the same positions have in common.
  i64 in_common(const Piece& a, const Piece& b) const {
    const i64 *of_a = slots(a), *of_b = slots(b), both = std::min(a.width, b.width);
    i64 n = 0;
    while (n < both && (of_a ? of_a[n] : a.first + n) == (of_b ? of_b[n] : b.first + n)) n++;
    return n;
  }

  const i64* slots(const Piece& piece) const {
    return piece.group < 0 ? nullptr : lists[piece.group].data() + piece.start;
  }

 private:
  std::vector<i64> list_of;  // by token of a row, the list of its slots

  void arrange_row(i64 first, i64 last) {
    i64 common = seen[first].shared;
    for (i64 m = first; m < last; m++) {
      common = std::min(common, seen[m].shared);
      chunks = std::max(chunks, (seen[m].count + CHUNK - 1) / CHUNK);
    }
    common = common / CHUNK * CHUNK;
    for (i64 at = 0; at < common; at += CHUNK) {
      Piece piece{seen[first].row, at, CHUNK, -1, 0, i64(members.size()), 0, i64(pieces.size()), 1};
      for (i64 m = first; m < last; m++)
        if (seen[m].first(window) <= at) members.push_back({m, CHUNK});
      add(piece);
    }
    i64 own = n_lists, longest = 0;
    list_of.resize(last - first);
    for (i64 m = first; m < last; m++) list_of[m - first] = join(seen[m], common, own);
    for (i64 list = own; list < n_lists; list++) longest = std::max<i64>(longest, lists[list].size());
    for (i64 at = 0; at < longest; at += CHUNK) {
      i64 alike = pieces.size();
      for (i64 list = own; list < n_lists; list++)
        if (at < i64(lists[list].size())) add_piece(first, last, common, list, at);
      for (i64 i = alike; i < i64(pieces.size()); i++) pieces[i].alike = alike, pieces[i].n_alike = pieces.size() - alike;
    }
  }

  // Adds the piece from `at` on of a list of slots, for the tokens of a row that have this list.
  void add_piece(i64 first, i64 last, i64 common, i64 list, i64 at) {
    i64 length = lists[list].size(), in_place = 0;
    while (in_place < length && lists[list][in_place] == common + in_place) in_place++;
    i64 width = std::min(CHUNK, length - at), group = at + width <= in_place ? -1 : list;
    Piece piece{seen[first].row, common + at, width, group, at, i64(members.size()), 0, 0, 0};
    for (i64 m = first; m < last; m++) {
      i64 sees = std::min(CHUNK, seen[m].count - common - at);
      bool near = seen[m].first(window) <= common + at;
      if (list_of[m - first] == list && sees > 0 && near) members.push_back({m, sees});
    }
    add(piece);
  }

  void add(Piece piece) {
    piece.n_members = members.size() - piece.members;
    if (piece.n_members) pieces.push_back(piece);
  }

  // The list that begins with a token's slots from `common` on, or a new one.
  i64 join(const Seen& token, i64 common, i64 own) {
    i64 count = token.count - common;
    for (i64 list = own; list < n_lists; list++) {
      auto& slots = lists[list];
      i64 both = std::min<i64>(count, slots.size()), i = 0;
      while (i < both && slots[i] == token.slot(common + i)) i++;
      if (i < both) continue;
      for (; i < count; i++) slots.push_back(token.slot(common + i));
      return list;
    }
    if (n_lists == i64(lists.size())) lists.emplace_back();
    auto& slots = lists[n_lists];
    slots.clear();
    for (i64 i = 0; i < count; i++) slots.push_back(token.slot(common + i));
    return n_lists++;
  }
};

// Reads what tokens see from a mask. The slots that a token sees are in the order of its positions, since a node of a
// tree lies after its parent.
template <class T> struct Masks {
  std::vector<i64> paths;

  void read(const T* bias, i64 rows, i64 tokens, i64 extent, i64 first_row, Sight& sight) {
    sight.seen.clear();
    paths.clear();
    paths.reserve(rows * tokens * extent);  // others point into it
    for (i64 m = 0; m < rows * tokens; m++) {
      const T* mask = bias + m * extent;
      auto sees = [&](i64 slot) { return widen(mask[slot]) > NEVER; };
      i64 shared = 0;
      while (shared < extent && sees(shared)) shared++;
      const i64* path = paths.data() + paths.size();
      i64 count = shared;
      for (i64 slot = shared; slot < extent; slot++)
        if (sees(slot)) {
          paths.push_back(slot);
          count++;
        }
      sight.seen.push_back({first_row + m / tokens, shared, count, path});
    }
  }
};

}  // namespace
