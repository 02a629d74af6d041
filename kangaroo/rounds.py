"""Rounds in native code, on plain arrays: a draft is one call, a verification is one.

What `Engine.step` does with tensors is done here by `cpp/rounds.h`, on a CPU, for drafters that
fill in nodes (`NativeDrafter`). The tensors are the definition: they are what runs everywhere else,
and the tests hold both to the same text.

Shapes: B rows of the batch, N nodes of a row, U states that a drafter has not read, D hidden size.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from ctypes import byref

import numpy as np
import torch

from kangaroo import native
from kangaroo.batch import Batch
from kangaroo.clock import running
from kangaroo.model import LM
from kangaroo.sampling import Rule, Sampling

UNREAD = 64  # states of committed tokens that wait for the drafting layer


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

    def native_drafting(self, target: LM) -> ctypes.Structure | None:
        """The layer that drafts, once its cache is there; None for a drafter that has none."""
        return None

    @abstractmethod
    def fill(self, rounds: Rounds, rows: Sequence[int]) -> None:
        """Add nodes below the pending tokens of these rows."""


class Rounds:
    """The rounds of one batch.

    Attributes:
        count: nodes of each row, `[B]`; 0 for one that takes no part.
        token, parent, place: of each node, `[B, N]`; node 0 is the pending token.
        top: the probability that the drafting layer gave it, `[B, N]`.
    """

    def __init__(self, lm: LM, drafter: NativeDrafter, batch: Batch):
        assert lm.native_layers is not None and lm.native_head is not None
        assert lm.acceleration.library is not None
        self.batch, self.drafter = batch, drafter
        size, capacity, hidden = batch.size, 1 + drafter.max_nodes, lm.config.hidden_size
        unread = UNREAD + 2 * capacity
        self.base, self.seed, self.count, self.known, self.asking, self.unread, self.accepted = (
            np.zeros((7, size), np.int64)
        )
        self.token, self.parent, self.place, self.written = np.zeros(
            (4, size, capacity), np.int64
        )
        self.top = np.zeros((size, capacity), np.float32)
        self.states_BND = torch.zeros(size, capacity, hidden, dtype=lm.dtype)
        self.unread_BUD = torch.zeros(size, unread, hidden, dtype=lm.dtype)
        self.texts: list[list[int] | None] = [None] * size
        names = "base seed count known asking token parent place top unread accepted written"
        self.rows = native.NativeRows(
            batch=size,
            capacity=capacity,
            hidden=hidden,
            most_unread=unread,
            exit=drafter.native_exit,
            temperature=batch.sampling.temperature,
            states=self.states_BND.data_ptr(),
            unread_states=self.unread_BUD.data_ptr(),
            **{name: getattr(self, name).ctypes.data for name in names.split()},
        )
        stack, head = lm.native_layers, lm.native_head
        lm.rope_within(batch.n_slots, torch.zeros(1, 1, dtype=torch.long))
        assert lm.rope_table is not None
        self.rope_table = lm.rope_table  # kept, since native code has its address
        embedding, cos_SC, sin_SC = lm.hf.model.embed_tokens.weight, *self.rope_table
        self.target = native.NativeTarget(
            sizes=lm.sizes().native(),
            stack=stack.native(batch.cache, range(lm.n_layers)),
            head=head.native(lm.hf.model.norm.weight),
            embedding=embedding.data_ptr(),
            cos=cos_SC.data_ptr(),
            sin=sin_SC.data_ptr(),
        )
        self.drafting = drafter.native_drafting(lm)
        library = lm.acceleration.library
        self._draft = native.function(library, "draft", lm.dtype, native.DRAFT)
        self._verify = native.function(library, "verify", lm.dtype, native.VERIFY)
        drafting = None if self.drafting is None else byref(self.drafting)
        self.pointers = byref(self.target), drafting, byref(self.rows)

    @staticmethod
    def can_run(lm: LM, drafter: object, sampling: Sampling) -> bool:
        """Whether a batch is decoded here. Filters of sampled tokens, and acceptance by rejection,
        are left to the tensors.
        """
        plain = sampling.top_k == 0 and sampling.top_p == 1 and sampling.rule is Rule.match
        return (
            lm.native_layers is not None
            and isinstance(drafter, NativeDrafter)
            and drafter.is_native()
            and (sampling.greedy or plain)
        )

    def step(self) -> tuple[list[tuple[list[int], int, int]], float, float]:
        """What each row wrote, how many of these tokens were drafted, and how many nodes there
        were; and the seconds that drafting and verification took.
        """
        batch, started = self.batch, running()
        active = [row for row, done in enumerate(batch.done) if not done]
        self._begin(active)
        self.drafter.fill(self, active)
        drafted = running()
        self._verify(*self.pointers)
        verified = running()
        wrote: list[tuple[list[int], int, int]] = [([], 0, 0)] * batch.size
        for row in active:
            accepted = int(self.accepted[row])
            tokens = batch.cut(row, self.written[row, : accepted + 1].tolist())
            batch.append(row, tokens)
            wrote[row] = tokens, min(accepted, len(tokens)), int(self.count[row]) - 1
        return wrote, drafted - started, verified - drafted

    def _begin(self, active: list[int]) -> None:
        """The pending token of each row is its only node."""
        self.count[:] = self.known[:] = self.asking[:] = 0
        for row in active:
            text = self.batch.texts[row]
            if text is not self.texts[row]:  # another prompt has taken the row
                self.texts[row] = text
                self.unread[row], self.seed[row] = 0, self.batch.seeds[row]
            self.base[row], self.token[row, 0] = len(text) - 1, text[-1]
            self.count[row] = 1

    def add(self, row: int, tokens: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Nodes below the pending token of a row that has no others.

        Args:
            parents: as `Draft.listed` takes them; None is a chain.
        """
        end = 1 + len(tokens)
        self.token[row, 1:end] = tokens
        self.parent[row, 1:end] = range(end - 1) if parents is None else parents
        self.place[row, 1:end] = range(1, end)
        self.count[row] = end

    def draft(
        self, rows: Sequence[int], steps: int, threshold: float, runner_up: bool = False
    ) -> None:
        """Chains by the drafting layer below the pending tokens of these rows; see `rounds.h`."""
        for row in rows:
            self.asking[row] = 1
        self._draft(*self.pointers, steps, threshold, runner_up)
