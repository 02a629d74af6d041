"""What native code reads and writes, on plain arrays.

Shapes: B rows of the batch, N nodes of a row, C choices for a token, U states that a drafter has
not read, D hidden size, S slots.
"""

from collections.abc import Callable, Sequence
from ctypes import Structure, byref
from functools import partial
from typing import Any

import numpy as np
import torch

from kangaroo.cpu import native
from kangaroo.engine.cache import KVCache
from kangaroo.models.target import TargetModel


class DraftBuffers:
    """The nodes of all rows, and a model with its cache.

    Attributes:
        base: the slot of each row's node 0, `[B]`, which is also its position.
        count: nodes of each row, `[B]`; 0 for one that takes no part.
        token, parent, place, has_state: of each node, `[B, N]`; node 0 is the pending token.
        end: the node that a row's chain ends with, `[B]`.
        choices: the best ones for the last draft token, `[B, C]`, the drafted one first.
        chances: the probabilities of as many likeliest tokens, before temperature and noise.
        written, path: what a verification writes, and after which nodes, `[B, N]`; of each row,
            `accepted` and one.

    Args:
        capacity: nodes that a row may have.
        exit_layer: the layers below it give the states that `drafting` reads; 0 is none.
        keep: so many likeliest tokens of the distribution after each node.
    """

    def __init__(
        self,
        lm: TargetModel,
        cache: KVCache,
        capacity: int,
        exit_layer: int = 0,
        drafting: Structure | None = None,
        keep: int = 0,
    ):
        size, hidden = cache.batch_size, lm.config.hidden_size
        # committed tokens whose states the drafting layer has yet to read; unused memory is free
        unread = cache.n_slots if exit_layer else 0
        self.base, self.count, self.asking = np.zeros((3, size), np.int64)
        self.draw = np.zeros(size, native.DRAW)
        self.end, self.unread, self.accepted = np.zeros((3, size), np.int64)
        of_nodes = np.zeros((6, size, capacity), np.int64)
        self.token, self.parent, self.place, self.has_state = of_nodes[:4]
        self.written, self.path = of_nodes[4:]
        self.choices = np.zeros((size, native.CHOICES), np.int64)
        self.chances = np.zeros((size, native.CHOICES), np.float32)
        self.kept = np.zeros((size, capacity, keep), np.int32)
        self.kept_chances = np.zeros((size, capacity, keep), np.float32)
        self.states_BND = torch.zeros(size, capacity, hidden, dtype=lm.dtype)
        self.unread_BUD = torch.empty(size, unread, hidden, dtype=lm.dtype)
        fused = capacity if drafting and drafting.fusing.weight else 0
        self.adapted_BND = torch.empty(size, fused, hidden, dtype=lm.dtype)
        arrays = {
            name: x.ctypes.data for name, x in vars(self).items() if isinstance(x, np.ndarray)
        }
        rows = native.NativeRows(
            batch=size,
            capacity=capacity,
            hidden=hidden,
            most_unread=unread,
            exit=exit_layer,
            keep=keep,
            states=self.states_BND.data_ptr(),
            unread_states=self.unread_BUD.data_ptr(),
            made=self.adapted_BND.data_ptr(),
            **arrays,
        )
        self.rope = lm.rope_table(cache.n_slots)  # held as long as it is used
        target = native.NativeTarget(
            sizes=lm.sizes().native(),
            stack=lm.fast_layers.native(cache, range(lm.n_layers)),
            head=lm.fast_head.native(lm.hf.model.norm.weight),
            embedding=lm.hf.model.embed_tokens.weight.data_ptr(),
            cos=self.rope[0].data_ptr(),
            sin=self.rope[1].data_ptr(),
        )
        self.drafting = drafting
        self.pointers = byref(target), drafting and byref(drafting), byref(rows)
        assert lm.acceleration.library is not None
        call = partial(native.function, lm.acceleration.library, dtype=lm.dtype)
        self._draft, self._draft_trees = call("draft"), call("draft_trees")
        self._draft_block, self._verify = call("draft_block"), call("verify")

    def verify(self) -> None:
        """The target's choices for all nodes, and the walk: `accepted`, `written`."""
        self._verify(*self.pointers)

    def add(self, row: int, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Nodes below the node 0 of a row that has no others; `parents` as of `Draft.listed`."""
        end = 1 + len(tokens)
        self.token[row, 1:end] = tokens
        self.parent[row, 1:end] = range(end - 1) if parents is None else parents
        self.place[row, 1:end] = range(1, end)
        self.has_state[row, 1:end] = 0
        self.count[row] = end

    def replace_with_tree(self, row: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """A tree in place of a row's nodes; what was a node before stays where it is."""
        count = int(self.count[row])
        parents_before, before = (of[row, 1:count].tolist() for of in (self.parent, self.token))
        keys = zip(parents_before, before, strict=True)
        nodes = {key: node for node, key in enumerate(keys, start=1)}
        places, states = self.place[row, :count].tolist(), self.has_state[row, :count].tolist()
        same, free = [0], count  # the node that each of the tree's was, or -1
        self.add(row, tokens, parents)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            same.append(was := nodes.get((same[parent], token), -1))
            if was < 0:
                self.place[row, node], free = free, free + 1
            else:
                self.place[row, node], self.has_state[row, node] = places[was], states[was]

    def draft(self, rows: Sequence[int], threshold: float, limits: np.ndarray) -> None:
        """The chains of these rows grow within limits as of `Budget.limits`, by as many tokens at
        most; see `rounds.h`."""
        self._call(self._draft, rows, limits.shape[1], threshold, limits.ctypes.data)

    def draft_block(
        self, rows: Sequence[int], places: Structure, threshold: float, limits: np.ndarray
    ) -> None:
        """The same for rows without a chain, by one pass of the layer, with its `NativePlaces`."""
        of_draft = limits.shape[1], threshold, limits.ctypes.data
        self._call(self._draft_block, rows, byref(places), *of_draft)

    def draft_trees(
        self,
        rows: Sequence[int],
        width: int,
        threshold: float,
        limits: np.ndarray,
        worth: Sequence[float],
        halves_leaves: bool,
    ) -> None:
        """Trees below these rows' pending tokens, `width` nodes a level; see `rounds.h`.

        Args:
            limits: of `Budget.limits`: a row's tree of n levels, at most as many, grows if the
                likeliest node of the last one is likelier than its n-th.
            worth, halves_leaves: which nodes are verified, as of `kangaroo_tree.kept`.
        """
        worths = np.array(worth, np.float32)
        growing = limits.shape[1], width, threshold, limits.ctypes.data
        pruning = len(worth), worths.ctypes.data, halves_leaves
        self._call(self._draft_trees, rows, *growing, *pruning)

    def _call(self, drafting: Callable[..., None], rows: Sequence[int], *how: Any) -> None:
        """Draft in these rows."""
        self.asking[:] = 0
        self.asking[list(rows)] = 1
        drafting(*self.pointers, *how)
