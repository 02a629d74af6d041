"""Rounds in native code, on plain arrays: a draft is one call, a verification is one.

What `Engine.step` does with tensors is done here by `cpp/rounds.h`, on a CPU, for drafters that
fill in nodes (`NativeDrafter`). The tensors are the definition: they are what runs everywhere else,
and the tests hold both to the same text.

Shapes: B rows of the batch, N nodes of a row, C choices for a token, U states that a drafter has
not read, D hidden size, S slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import Structure, byref

import numpy as np
import torch
from torch import Tensor

from kangaroo import native, teacher
from kangaroo.batch import Batch
from kangaroo.cache import KVCache
from kangaroo.clock import running
from kangaroo.costs import measured
from kangaroo.model import LM
from kangaroo.sampling import Rule, Sampling

PACE = 2.0  # tokens that the time of a vanilla step has to gain, in a batch
PRIOR, PRIOR_RIGHT = 20, 9  # as if so many drafts had been seen, and so many begun right


class NativeDrafter(ABC):
    """A drafter that can draft in native rounds.

    Attributes:
        max_nodes: as of every drafter.
    """

    max_nodes: int

    @property
    def native_exit(self) -> int:
        """Verification shares the states of the layers below this one; 0 is none."""
        return 0

    def is_native(self) -> bool:
        """Whether it can, with its settings and its parts."""
        return True

    @property
    def native_nodes(self) -> int:
        """The most places that its nodes take in a round."""
        return self.max_nodes

    @property
    def needs_costs(self) -> bool:
        """Whether it asks for costs even where a text is decoded alone."""
        return False

    def native_drafting(self) -> Structure | None:
        """The layer that drafts, once its cache is there; None for a drafter that has none."""
        return None

    @abstractmethod
    def fill(self, rounds: Rounds, rows: Sequence[int]) -> None:
        """Add nodes below the pending tokens of these rows."""


class Nodes:
    """What native code reads and writes: the nodes of all rows, and a model with its cache.

    Attributes:
        base: the slot of each row's node 0, `[B]`, which is also its position.
        count: nodes of each row, `[B]`; 0 for one that takes no part.
        token, parent, place, has_state: of each node, `[B, N]`; node 0 is the pending token.
        end: the node that a row's chain ends with, `[B]`.
        draw: how each row's tokens are drawn, `[B]`.
        choices: the best ones for the last token that was drafted, `[B, C]`, the drafted one first.
        chances: the probabilities of as many likeliest tokens, before temperature and noise.

    Args:
        capacity: nodes that a row may have.
        exit_layer: the layers below it give the states that `drafting` reads; 0 is none.
        drafting: `native.NativeDrafting`; None where nothing is drafted.
        keep: of the distribution behind every token that is written, keep this many likeliest ones.
    """

    def __init__(
        self,
        lm: LM,
        cache: KVCache,
        capacity: int,
        exit_layer: int = 0,
        drafting: Structure | None = None,
        keep: int = 0,
    ):
        size, hidden = cache.batch_size, lm.config.hidden_size
        # Committed tokens whose states wait until the drafting layer drafts again, as many as there
        # may be: what never drafts never reads them. Memory that is not written to costs nothing.
        unread = cache.n_slots if exit_layer else 0
        self.base, self.count, self.asking = np.zeros((3, size), np.int64)
        self.draw = np.zeros(size, native.DRAW)
        self.end, self.unread, self.accepted = np.zeros((3, size), np.int64)
        of_nodes = np.zeros((5, size, capacity), np.int64)
        self.token, self.parent, self.place, self.has_state, self.written = of_nodes
        self.choices = np.zeros((size, native.CHOICES), np.int64)
        self.chances = np.zeros((size, native.CHOICES), np.float32)
        self.kept = np.zeros((size, capacity, keep), np.int32)
        self.kept_chances = np.zeros((size, capacity, keep), np.float32)
        self.states_BND = torch.zeros(size, capacity, hidden, dtype=lm.dtype)
        self.unread_BUD = torch.empty(size, unread, hidden, dtype=lm.dtype)
        made = capacity if drafting and drafting.fusing.weight else 0
        self.made_BND = torch.empty(size, made, hidden, dtype=lm.dtype)
        arrays = """
            base count asking end draw token parent place has_state choices chances unread accepted
            written kept kept_chances
        """
        rows = native.NativeRows(
            batch=size,
            capacity=capacity,
            hidden=hidden,
            most_unread=unread,
            exit=exit_layer,
            keep=keep,
            states=self.states_BND.data_ptr(),
            unread_states=self.unread_BUD.data_ptr(),
            made=self.made_BND.data_ptr(),
            **{name: getattr(self, name).ctypes.data for name in arrays.split()},
        )
        target, self.held = native_target(lm, cache)
        self.pointers = byref(target), drafting and byref(drafting), byref(rows)
        library = lm.acceleration.library
        assert library is not None
        self._draft = native.function(library, "draft", lm.dtype, native.DRAFT)
        self._draft_trees = native.function(library, "draft_trees", lm.dtype, native.DRAFT_TREES)
        self._verify = native.function(library, "verify", lm.dtype, native.VERIFY)

    def add(self, row: int, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Nodes below the node 0 of a row that has no others.

        Args:
            parents: as `Draft.listed` takes them; None is a chain.
        """
        end = 1 + len(tokens)
        self.token[row, 1:end] = tokens
        self.parent[row, 1:end] = range(end - 1) if parents is None else parents
        self.place[row, 1:end] = range(1, end)
        self.has_state[row, 1:end] = 0
        self.count[row] = end

    def draft(
        self,
        rows: Sequence[int],
        steps: int,
        threshold: float,
        least: Sequence[float] | None = None,
    ) -> None:
        """The chains of these rows grow by up to so many tokens; see `rounds.h`.

        Args:
            least: a row's chain of n tokens grows if the product of their probabilities is more
                than the n-th of these; None is 0 throughout.
        """
        if not rows:
            return
        self._ask(rows)
        limits = np.array(least or [0.0] * steps, np.float32)
        self._draft(*self.pointers, steps, threshold, limits.ctypes.data)

    def draft_trees(
        self,
        rows: Sequence[int],
        width: int,
        threshold: float,
        least: Sequence[float],
        worth: Sequence[float],
        halves_leaves: bool,
    ) -> None:
        """Trees below these rows' pending tokens, `width` nodes a level; see `rounds.h`.

        Args:
            least: a tree of n levels grows if the likeliest node of the last one is likelier than
                the n-th of these; there are as many levels at most.
            worth: of the nodes, the likeliest first, those are verified that make the sum of their
                chances less these numbers largest; as many at most.
            halves_leaves: without the less likely half of the nodes that have no child.
        """
        self._ask(rows)
        limits, worths = np.array(least, np.float32), np.array(worth, np.float32)
        self._draft_trees(
            *self.pointers,
            *(len(least), width, threshold, limits.ctypes.data),
            *(len(worth), worths.ctypes.data, halves_leaves),
        )

    def _ask(self, rows: Sequence[int]) -> None:
        self.asking[:] = 0
        self.asking[list(rows)] = 1


class Rounds(Nodes):
    """The rounds of one batch.

    Args:
        keep: as of `Nodes`.
        always_drafts: as of `Engine`.
    """

    def __init__(
        self,
        lm: LM,
        drafter: NativeDrafter,
        batch: Batch,
        keep: int = 0,
        always_drafts: bool = False,
    ):
        exit_layer, drafting = drafter.native_exit, drafter.native_drafting()
        super().__init__(lm, batch.cache, 1 + drafter.native_nodes, exit_layer, drafting, keep)
        self.lm, self.batch, self.drafter, self.keep = lm, batch, drafter, keep
        self.exit, self.always_drafts = exit_layer, always_drafts
        self.first_tried, self.first_right = 0, 0  # drafts, and how many began with a right token
        self.texts: list[list[int] | None] = [None] * batch.size
        self.curves: dict[tuple[int, int], list[float]] = {}
        if drafter.needs_costs or (batch.size > 1 and drafter.max_nodes and not always_drafts):
            measured(lm)  # now, since it may take a second

    @staticmethod
    def can_run(lm: LM, drafter: object, sampling: Sampling) -> bool:
        """Whether a batch is decoded here. Acceptance by rejection is left to the tensors."""
        return (
            lm.native_layers is not None
            and isinstance(drafter, NativeDrafter)
            and drafter.is_native()
            and (sampling.greedy or sampling.rule is Rule.match)
        )

    def step(
        self, drafts: bool = True
    ) -> tuple[list[tuple[list[int], int, int]], teacher.Rows, float, float]:
        """What each row wrote, how many of these tokens were drafted, and how many nodes there
        were; what is kept along what was written; and the seconds that drafting and verification
        took.
        """
        batch, started = self.batch, running()
        active = [row for row, done in enumerate(batch.done) if not done]
        self._begin(active)
        if drafts:
            self.drafter.fill(self, active)
        drafted = running()
        self._verify(*self.pointers)
        verified = running()
        wrote: list[tuple[list[int], int, int]] = [([], 0, 0)] * batch.size
        for row in active:
            accepted = int(self.accepted[row])
            tokens = batch.cut(row, self.written[row, : accepted + 1].tolist())
            batch.append(row, tokens)
            self.first_tried += self.count[row] > 1
            self.first_right += accepted > 0
            wrote[row] = tokens, min(accepted, len(tokens)), int(self.count[row]) - 1
        kept: teacher.Rows = [None] * batch.size
        if self.keep:
            kept = list(teacher.records(self.kept, self.kept_chances, self.lm.config.vocab_size))
        return wrote, kept, drafted - started, verified - drafted

    def _begin(self, active: list[int]) -> None:
        """The pending token of each row is its only node."""
        self.count[:] = self.end[:] = 0
        for row in active:
            text = self.batch.texts[row]
            if text is not self.texts[row]:  # another prompt has taken the row
                self.texts[row] = text
                self.unread[row], own = 0, self.batch.samplings[row]
                seed = self.batch.seeds[row]
                self.draw[row] = own.temperature, own.top_p, own.top_k, seed
            self.base[row], self.token[row, 0] = len(text) - 1, text[-1]
            self.count[row], self.has_state[row, 0] = 1, 0

    def left_unread(self, row: int, known: int) -> Tensor:
        """States that the drafting layer has not read, `[1, T, D]`: of the last T of the first
        `known` tokens of a row's text."""
        count = 0
        if self.texts[row] is self.batch.texts[row]:  # else it has none but its prompt's
            end = self.base[row] + self.accepted[row] + 1
            count = max(0, known - int(end - self.unread[row]))
        return self.unread_BUD[row, None, :count].clone()

    def plant(self, row: int, tokens: Sequence[int], parents: Sequence[int]) -> None:
        """A tree in place of a row's nodes; what was a node before stays where it is.

        Args:
            parents: as `Draft.listed` takes them.
        """
        count = int(self.count[row])
        parents_before, before = (of[row, 1:count].tolist() for of in (self.parent, self.token))
        keys = zip(parents_before, before, strict=True)
        known = {key: node for node, key in enumerate(keys, start=1)}
        places, states = self.place[row, :count].tolist(), self.has_state[row, :count].tolist()
        same, free = [0], count  # the node that each of the tree's was, or -1
        self.add(row, tokens, parents)
        for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), start=1):
            same.append(was := known.get((same[parent], token), -1))
            if was < 0:
                self.place[row, node], free = free, free + 1
            else:
                self.place[row, node], self.has_state[row, node] = places[was], states[was]

    def cost(self, rows: int, nodes: int) -> list[float]:
        """Of verifying 0 to `nodes` nodes in each of so many rows, in vanilla steps of these."""
        rows = 1 if self.always_drafts else rows
        if (rows, nodes) not in self.curves:  # asked for in every round
            self.curves[rows, nodes] = measured(self.lm).curve(rows, nodes)
        return self.curves[rows, nodes]

    def least_gain(self, rows: int, nodes: int, drafting: float = 0.0) -> list[float]:
        """What the first n nodes of a chain have to be worth, as the chance that all are right, for
        one more to pay, for n from 0 on. One text alone is drafted by the drafter's own rule.

        Args:
            rows: that take part.
            drafting: the time of a token of the chain, in vanilla steps.
        """
        if rows <= 1 or self.always_drafts:
            return [0.0] * nodes
        costs = self.cost(rows, nodes)
        right = (self.first_right + PRIOR_RIGHT) / (self.first_tried + PRIOR)
        return [PACE * (drafting + costs[n + 1] - costs[n]) / right for n in range(nodes)]

    def worth(self, rows: int, nodes: int) -> list[float]:
        """The chance to be right that the n-th node, which is drafted, has to have to pay for its
        verification. One text alone is left to the drafter's own rule.

        Args:
            rows: that take part.
        """
        if rows <= 1 or self.always_drafts:
            return [0.0] * nodes
        costs = self.cost(rows, nodes)
        return [PACE * (costs[n + 1] - costs[n]) for n in range(nodes)]


def native_target(lm: LM, cache: KVCache) -> tuple[Structure, tuple[Tensor, ...]]:
    """A model for native code, and what has to be kept as long as it is used."""
    stack, head = lm.native_layers, lm.native_head
    assert stack is not None and head is not None
    lm.rope_within(cache.n_slots, torch.zeros(1, 1, dtype=torch.long))
    assert lm.rope_table is not None
    cos_SC, sin_SC = lm.rope_table
    target = native.NativeTarget(
        sizes=lm.sizes().native(),
        stack=stack.native(cache, range(lm.n_layers)),
        head=head.native(lm.hf.model.norm.weight),
        embedding=lm.hf.model.embed_tokens.weight.data_ptr(),
        cos=cos_SC.data_ptr(),
        sin=sin_SC.data_ptr(),
    )
    return target, lm.rope_table
