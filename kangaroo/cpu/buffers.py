"""The arrays that native code reads and writes.

Shapes: B rows of the batch, N nodes of a row, C choices for a token, U states that a drafter has
not read, D hidden size, S slots.
"""

from collections.abc import Sequence
from ctypes import byref
from functools import partial

import numpy as np
import torch

from kangaroo.cpu import native, structs
from kangaroo.cpu.backend import CpuBackend
from kangaroo.cpu.blocks import PLAIN, size_of
from kangaroo.drafters.block import Block
from kangaroo.drafters.eagle import EagleTree
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.engine.cache import KVCache
from kangaroo.models.layer_weights import matrix_of
from kangaroo.models.packed import PackedMatrix
from kangaroo.models.target import TargetModel


class DraftBuffers:
    """The nodes of all rows, and a model on its cache.

    Attributes:
        base: the slot and position of each row's node 0, `[B]`.
        count: nodes of each row, `[B]`; 0 for a row that takes no part.
        token, parent, place, has_state: of each node, `[B, N]`; node 0 is the pending token.
        end: the node at the end of a row's chain, `[B]`.
        biases: addresses of what is added to the logits after each node, `[B, N]`, 0 for nothing.
        choices: the best choices for the last draft token, `[B, C]`, the drafted one first.
        chances: the probabilities of the C likeliest tokens, before temperature and noise.
        written, path: the `accepted` + 1 tokens that a step writes, and the node before each one.

    Args:
        capacity: the most nodes of a row.
        exit_layer: how many layers give the states that `drafting` reads; None if it reads none.
    """

    def __init__(
        self,
        lm: TargetModel,
        cache: KVCache,
        capacity: int,
        exit_layer: int | None,
        drafting: structs.Drafting | None,
    ):
        size = cache.batch_size
        hidden = lm.config.hidden_size
        # for states of committed tokens that the drafting layer has not read; unused, it costs
        # nothing
        most_unread = 0 if exit_layer is None else cache.n_slots
        self.base, self.count, self.asking = np.zeros((3, size), np.int64)
        self.draw = np.zeros(size, structs.DRAW)
        self.end, self.unread, self.accepted = np.zeros((3, size), np.int64)
        by_node = np.zeros((6, size, capacity), np.int64)
        self.token, self.parent, self.place, self.has_state, self.written, self.path = by_node
        self.biases = np.zeros((size, capacity), np.uint64)
        self.choices = np.zeros((size, native.CHOICES), np.int64)
        self.chances = np.zeros((size, native.CHOICES), np.float32)
        self.states_BND = torch.zeros(size, capacity, hidden, dtype=lm.dtype)
        self.unread_BUD = torch.empty(size, most_unread, hidden, dtype=lm.dtype)
        fused = capacity if drafting and drafting.n_taps else 0
        self.adapted_BND = torch.empty(size, fused, hidden, dtype=lm.dtype)
        rows = structs.Rows(
            batch=size,
            capacity=capacity,
            hidden=hidden,
            most_unread=most_unread,
            exit=exit_layer or 0,
            states=self.states_BND.data_ptr(),
            unread_states=self.unread_BUD.data_ptr(),
            made=self.adapted_BND.data_ptr(),
            **{name: x.ctypes.data for name, x in vars(self).items() if isinstance(x, np.ndarray)},
        )
        self.rows = rows
        self.keep(0)
        self.drafting = drafting
        self.pointers = byref(self._target(lm, cache)), drafting and byref(drafting), byref(rows)
        assert isinstance(lm.backend, CpuBackend)
        call = partial(native.function, lm.backend.library, dtype=lm.dtype)
        self._draft = call("draft")
        self._draft_trees = call("draft_trees")
        self._draft_block = call("draft_block")
        self._verify = call("verify")

    def _target(self, lm: TargetModel, cache: KVCache) -> structs.Target:
        self.rope = lm.rope_table(cache.n_slots)  # kept while native code uses it
        head = lm.fast_head
        table = matrix_of(lm.hf.model.embed_tokens)
        assert isinstance(lm.backend, CpuBackend) and isinstance(head, native.Head)
        if isinstance(table, PackedMatrix) and not size_of(
            lm.backend.library, int(table.kind), table.shape
        ):
            table = table.widened()
        self.table = table.blocks_OB if isinstance(table, PackedMatrix) else table  # kept, too
        return structs.Target(
            sizes=native.sizes_struct(lm.sizes()),
            stack=native.stack_of(lm.fast_layers).as_struct(cache, range(lm.n_layers)),
            head=head.as_struct(lm.hf.model.norm.weight),
            rough=head.rough,
            embedding=self.table.data_ptr(),
            embedding_kind=int(table.kind) if isinstance(table, PackedMatrix) else PLAIN,
            cos=self.rope[0].data_ptr(),
            sin=self.rope[1].data_ptr(),
            vocabulary=lm.config.vocab_size,
        )

    def keep(self, count: int) -> None:
        """Let verification keep the `count` likeliest tokens after each node, and their chances."""
        if count == self.rows.keep and self.rows.kept:
            return
        self.kept = np.zeros((*self.token.shape, count), np.int32)
        self.kept_chances = np.zeros(self.kept.shape, np.float32)
        self.rows.keep = count
        self.rows.kept = self.kept.ctypes.data
        self.rows.kept_chances = self.kept_chances.ctypes.data

    def verify(self) -> None:
        """Let the target choose after all nodes, and set `accepted`, `written` and `path`."""
        self._verify(*self.pointers)

    def add(self, row: int, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Add nodes to a row that has only node 0: a chain, or a tree of `parents` (`Nodes`)."""
        end = 1 + len(tokens)
        self.token[row, 1:end] = tokens
        self.parent[row, 1:end] = range(end - 1) if parents is None else parents
        self.place[row, 1:end] = range(1, end)
        self.has_state[row, 1:end] = 0
        self.count[row] = end

    def replace_with_tree(self, row: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """Replace a row's nodes by a tree; nodes that it had already keep their states."""
        nodes = slice(1, int(self.count[row]))
        keys = zip(self.parent[row, nodes].tolist(), self.token[row, nodes].tolist(), strict=True)
        old_nodes = {key: node for node, key in enumerate(keys, start=1)}
        places = self.place[row].tolist()
        states = self.has_state[row].tolist()
        same = [0]  # the old number of each new node, or -1
        free = nodes.stop  # the next free place
        self.add(row, tokens, parents)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            same.append(old := old_nodes.get((same[parent], token), -1))
            if old < 0:
                self.place[row, node] = free
                free += 1
            else:
                self.place[row, node] = places[old]
                self.has_state[row, node] = states[old]

    def draft(self, rows: Sequence[int], threshold: float, limits: np.ndarray) -> None:
        """Grow the chains of these rows within `Budget.limits`, `[B, steps]`; see `rounds.h`."""
        self._ask(rows)
        self._draft(*self.pointers, limits.shape[1], threshold, limits.ctypes.data)

    def draft_block(self, rows: Sequence[int], drafter: Block, limits: np.ndarray) -> None:
        """Draft chains by one pass of a block, in rows that have none."""
        places = structs.Places(
            places=native.pointer(drafter.adapter.places),
            neighbours=native.pointer(drafter.neighbours_VR),
            table=native.pointer(drafter.table_KR),
            rank=drafter.adapter.architecture.rank,
        )
        self._ask(rows)
        self._draft_block(
            *self.pointers, byref(places), limits.shape[1], drafter.threshold, limits.ctypes.data
        )

    def draft_trees(
        self, rows: Sequence[int], drafter: KangarooTree, limits: np.ndarray, worth: Sequence[float]
    ) -> None:
        """Grow trees in rows that have only node 0. After n levels a row's tree goes on growing if
        the likeliest node of the last level exceeds its n-th limit (`Budget.limits`); `worth` are
        the costs in `kangaroo_tree.kept_nodes`, which prunes it."""
        worths = np.array(worth, np.float32)  # kept alive during the call
        self._ask(rows)
        self._draft_trees(
            *self.pointers,
            limits.shape[1],
            drafter.top_k,
            drafter.threshold,
            limits.ctypes.data,
            len(worth),
            worths.ctypes.data,
            drafter.min_confidence is None,  # whether half of the leaves are pruned
            isinstance(drafter, EagleTree),
        )

    def _ask(self, rows: Sequence[int]) -> None:
        """Let the next call draft in these rows alone."""
        self.asking[:] = 0
        self.asking[list(rows)] = 1
