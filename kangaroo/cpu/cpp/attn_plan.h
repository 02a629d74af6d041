// What each token attends over, in the order of positions.
//
// Sums over positions are taken in chunks of CHUNK, a token's own path through a tree of drafts included,
// wherever its keys lie. So a token gets the same bits in a chain, in a tree, and once its path is text.

#pragma once

#include <utility>
#include <vector>

#include "numbers.h"

namespace {

constexpr i64 CHUNK = 64;  // positions whose attention is one piece of work

// The positions below `shared` lie in the slots of the same numbers, the others, up to `count`, in those
// listed from `path` on.
struct Seen {
  i64 row, shared, count;
  const i64* path;
  i64 slot(i64 position) const { return position < shared ? position : path[position - shared]; }
  // The first position that is seen by a layer which looks back so far, 0 being everywhere: whole chunks are.
  i64 first(i64 window) const { return window ? std::max<i64>(count - 1 - window, 0) / CHUNK * CHUNK : 0; }
};

struct Member {  // a token, and how many positions of a piece it sees
  i64 token, width;
};

struct Piece {  // some tokens of a row on positions `first` to `first + width`
  i64 row, first, width;
  i64 group;  // the list of slots from `start` on; -1 where slots are positions
  i64 start, members, n_members;
  i64 alike, n_alike;  // the first of those on the same positions, of all paths through a tree; how many they are
};

struct Sight {
  std::vector<Seen> seen;
  std::vector<Piece> pieces;
  std::vector<Member> members;
  std::vector<std::vector<i64>> lists;
  i64 n_lists = 0, chunks = 0, window = 0;

  // After `seen` is filled in, for layers that look back so far; tokens of a row stand together.
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

  // Of the pieces by heads: those on the same positions side by side for each head, since they have keys in common.
  std::pair<const Piece*, i64> piece_and_head(i64 item, i64 heads) const {
    const Piece& some = pieces[item / heads];
    i64 i = item - some.alike * heads;
    return {&pieces[some.alike + i % some.n_alike], i / some.n_alike};
  }

  // How many of the first slots of two pieces on the same positions are the same.
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
  std::vector<i64> list_of;  // of each token of a row

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

  // The part from `at` on of a list of slots, for the tokens of a row whose list it is.
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

  // The list that a token's slots from `common` on are the beginning of, or a new one.
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

// From a mask: the slots that a token sees, in their order, are its positions, since a node of a tree lies
// after its parent.
template <class T> struct Masks {
  std::vector<i64> paths;

  void read(const T* bias, i64 rows, i64 tokens, i64 extent, i64 first_row, Sight& sight) {
    sight.seen.clear();
    paths.clear();
    paths.reserve(rows * tokens * extent);  // pointers into it are kept
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
