"""One step of a batch by tensors: propose, verify, commit, observe.

This is the definition of a step. A backend (`kangaroo/cpu`) may make the same step faster.

Shapes: B rows, N draft nodes, T tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kangaroo import teacher
from kangaroo.batch import Batch
from kangaroo.cache import Block
from kangaroo.clock import Clock
from kangaroo.drafters.base import Drafter
from kangaroo.model import LM
from kangaroo.tree import Draft
from kangaroo.verify import decide

Chunk = tuple[Tensor, Block, dict[int, Tensor]]  # of a prompt, as `Drafter.prefill` takes it


@dataclass
class Step:
    """What a step wrote.

    Args:
        rows: of each row the tokens, how many of them were draft tokens, and how many were drafted.
        kept: along with these tokens (`kangaroo/teacher.py`).
        draft_seconds, verify_seconds: that drafting and verification took.
    """

    rows: list[tuple[list[int], int, int]]
    kept: teacher.Rows
    draft_seconds: float
    verify_seconds: float


class Stepper(Protocol):
    """Makes the steps of one batch.

    Attributes:
        resumes: whether a prompt that begins like a text in the cache is read from where it ends.
    """

    resumes: bool

    def step(self, drafts: bool) -> Step:
        """One step of all rows.

        Args:
            drafts: false asks for a short one, without drafts.
        """

    def unread(self, source: int, row: int, known_T: Tensor) -> list[Chunk]:
        """Of the first tokens of a prompt, which a row takes over from `source`, those that the
        drafter has yet to read, as chunks."""


class TensorStepper:
    """Every drafter, on every device."""

    def __init__(self, lm: LM, drafter: Drafter, batch: Batch, keep: int = 0):
        self.lm, self.drafter, self.batch, self.keep = lm, drafter, batch, keep
        self.resumes = drafter.resumes
        self.clock = Clock(lm.device)

    def unread(self, source: int, row: int, known_T: Tensor) -> list[Chunk]:
        return []

    def step(self, drafts: bool) -> Step:
        lm, drafter, batch, clock = self.lm, self.drafter, self.batch, self.clock
        started = clock.mark()
        draft = drafter.propose(batch) if drafts else Draft.nothing(batch.last(1))
        proposed = clock.mark()
        block = draft.block = draft.block or lm.block(
            draft.tree, batch.base_B, batch.used + draft.tree.size, batch.n_slots
        )
        x_BND = lm.embed(draft.tokens_BN) if draft.hidden_BND is None else draft.hidden_BND
        layers = range(draft.entry, lm.n_layers)
        x_BND, taps = lm.run(x_BND, batch.cache, block, layers, drafter.taps)
        logits_BNV = lm.logits(x_BND)
        verdict = decide(draft, logits_BNV, block.positions_RT + 1, batch.sampling, batch.seeds_B)
        if not draft.tree.is_chain:
            depth_P = torch.arange(draft.tree.max_depth + 1, device=lm.device)
            batch.cache.move(
                block.slots_RT.gather(1, verdict.path_BP), batch.base_B[:, None] + depth_P
            )
        verified = clock.mark()
        emitted = batch.commit(draft, verdict)
        drafter.observe(batch, draft, verdict, taps)
        rows = emitted.to_host()  # the step's one device-to-host copy, but for what is kept
        kept = teacher.likeliest(logits_BNV, verdict.path_BP, self.keep)
        for row, (tokens, accepted, drafted) in enumerate(rows):
            batch.append(row, tokens)
            batch.budget.observe(drafted, accepted)
        draft_seconds, verify_seconds = (
            clock.between(started, proposed),
            clock.between(proposed, verified),
        )
        return Step(rows, kept, draft_seconds, verify_seconds)
