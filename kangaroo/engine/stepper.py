"""One step of a batch by tensors: propose, verify, commit, observe.

This is the definition of a step. A backend (`kangaroo/cpu`) may make the same step faster.

Shapes: B rows, N draft nodes, T tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter
from kangaroo.engine import topk_logits
from kangaroo.engine.batch import Batch, Emitted, RowTensors, emitted
from kangaroo.engine.cache import ForwardMeta
from kangaroo.engine.clock import Clock
from kangaroo.engine.tree import Draft
from kangaroo.engine.verify import Verdict, accept, decide
from kangaroo.models.target import TargetModel

Chunk = tuple[Tensor, ForwardMeta, dict[int, Tensor]]  # of a prompt, as `Drafter.prefill` takes it


@dataclass
class Step:
    """What a step wrote.

    Args:
        rows: of each row the tokens, how many of them were draft tokens, and how many were drafted.
        kept: along with these tokens (`topk_logits.py`).
        draft_seconds, verify_seconds: that drafting and verification took.
    """

    rows: list[tuple[list[int], int, int]]
    kept: topk_logits.Rows
    draft_seconds: float
    verify_seconds: float


class Stepper(Protocol):
    """Makes the steps of one batch.

    Attributes:
        supports_prefix_reuse: whether a prompt that begins like a text in the cache is read from
        where it ends.
    """

    supports_prefix_reuse: bool

    def step(self, drafts: bool) -> Step:
        """One step of all rows.

        Args:
            drafts: false asks for a short one, without drafts.
        """

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        """Of the first tokens of a prompt, which a row takes over from `source`, those that the
        drafter has yet to read, as chunks."""


class TensorStepper:
    """Every drafter, on every device."""

    def __init__(self, lm: TargetModel, drafter: Drafter, batch: Batch, keep: int = 0):
        self.lm, self.drafter, self.batch, self.keep = lm, drafter, batch, keep
        self.supports_prefix_reuse = drafter.supports_prefix_reuse
        self.clock = Clock(lm.device)

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        return []

    def step(self, drafts: bool) -> Step:
        drafter, batch, clock = self.drafter, self.batch, self.clock
        started = clock.mark()
        draft = drafter.propose(batch) if drafts else Draft.nothing(batch.last(1))
        proposed = clock.mark()
        draft.meta = draft.meta or self._block(draft)
        verdict, written, logits_BNV, taps = self._verify(draft, draft.meta)
        if not draft.tree.is_chain:
            self._keep_path(draft.meta, verdict)
        verified = clock.mark()
        batch.commit(written)
        drafter.observe(batch, draft, verdict, taps)
        rows = written.to_host()  # the step's one device-to-host copy, but for what is kept
        kept: topk_logits.Rows = [None] * batch.size
        if logits_BNV is not None:
            kept = topk_logits.likeliest(logits_BNV, verdict.path_BP, self.keep)
        for row, (tokens, accepted, drafted) in enumerate(rows):
            batch.append(row, tokens)
            batch.budget.observe(row, drafted, accepted)
        between = clock.between
        return Step(rows, kept, between(started, proposed), between(proposed, verified))

    def _block(self, draft: Draft) -> ForwardMeta:
        """Where a draft will lie that lies nowhere yet; of tokens alone it becomes one of the few
        shapes that are recorded."""
        batch, width, tree = self.batch, self.lm.acceleration.width, draft.tree
        size = width(tree.size, self.drafter.max_nodes + 1)
        depth = size - 1 if tree.is_chain else width(tree.max_depth, size - 1)
        alone = draft.hidden_BND is None and draft.probs_BNV is None
        if alone and (size, depth) != (tree.size, tree.max_depth):
            draft.widen(size, depth)
        used, recorded = batch.used + draft.tree.size, ("verify", batch.cache)
        return self.lm.forward_meta(
            draft.tree, batch.base_B, used, batch.n_slots, recorded=recorded
        )

    def _verify(
        self, draft: Draft, meta: ForwardMeta
    ) -> tuple[Verdict, Emitted, Tensor | None, dict[int, Tensor]]:
        """What the target says of a draft, and what is written therefore; the logits `[B, N, V]`,
        where something of them is kept; the states that the drafter wants.
        """
        lm, batch, keeps = self.lm, self.batch, self.keep > 0
        taps = sorted(set(self.drafter.taps))
        layers, sampling = range(draft.entry, lm.n_layers), batch.sampling

        def work(draft: Draft, meta: ForwardMeta, rows: RowTensors) -> tuple[Tensor, ...]:
            x_BND = lm.embed(draft.tokens_BN) if draft.hidden_BND is None else draft.hidden_BND
            x_BND, states = lm.run(x_BND, batch.cache, meta, layers, taps)
            chosen = lm.choose(x_BND) if sampling.greedy and not keeps else None
            kept: tuple[Tensor, ...] = ()
            if chosen is not None:
                verdict = accept(draft, chosen[0])
            else:
                logits_BNV = lm.logits(x_BND)
                how = sampling.reading(rows.settings_B3)
                verdict = decide(draft, logits_BNV, meta.positions_RT + 1, how, rows.seeds_B)
                kept = (logits_BNV,) if keeps else ()
            return *verdict, *emitted(draft, verdict, rows), *kept, *(states[tap] for tap in taps)

        results = self._replayed(work, draft, meta, ("verify", *taps, keeps))
        ends = len(Verdict._fields), len(Verdict._fields) + len(Emitted._fields)
        verdict, written = Verdict(*results[: ends[0]]), Emitted(*results[ends[0] : ends[1]])
        logits_BNV, states = results[ends[1]] if keeps else None, results[ends[1] + keeps :]
        return verdict, written, logits_BNV, dict(zip(taps, states, strict=True))

    def _replayed(
        self,
        work: Callable[[Draft, ForwardMeta, RowTensors], tuple[Tensor, ...]],
        draft: Draft,
        meta: ForwardMeta,
        key: tuple[Hashable, ...],
    ) -> tuple[Tensor, ...]:
        """`work(draft, block, rows)`, recorded where steps are: by tensors alone."""
        batch, parts, rows = self.batch, draft.tensors(), self.batch.rows
        layout = meta.tensors()

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            new, tensors = draft.with_tensors(*tensors[: len(parts)]), tensors[len(parts) :]
            here, tensors = meta.with_tensors(*tensors[: len(layout)]), tensors[len(layout) :]
            return work(new, here, RowTensors(*tensors))

        key = (*key, draft.entry, draft.tree.is_chain, draft.tree.max_depth, batch.sampling.kind)
        tokens = draft.tokens_BN.numel()
        inputs = *parts, *layout, *rows
        return self.lm.acceleration.replay((batch.cache,), key, flat, *inputs, tokens=tokens)

    def _keep_path(self, meta: ForwardMeta, verdict: Verdict) -> None:
        """Move the keys and values of an accepted path to where its tokens now stand."""
        batch = self.batch
        depth_P = torch.arange(verdict.path_BP.shape[1], device=verdict.path_BP.device)
        from_BP = meta.slots_RT.gather(1, verdict.path_BP)
        to_BP = batch.base_B[:, None] + depth_P

        def work(from_BP: Tensor, to_BP: Tensor) -> tuple[Tensor, ...]:
            batch.cache.move(from_BP, to_BP)
            return ()

        self.lm.acceleration.replay(
            *((batch.cache,), ("move",), work, from_BP, to_BP),
            tokens=from_BP.numel(),
            rehearsal=(to_BP, to_BP),
        )
