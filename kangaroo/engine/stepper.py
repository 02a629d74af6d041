"""A step of a batch on tensors, the reference for faster backends (`kangaroo/cpu`).

Shapes: B rows, N draft nodes, P nodes of a path, V vocabulary.
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter
from kangaroo.engine import topk_logits
from kangaroo.engine.batch import Batch, written
from kangaroo.engine.cache import Chunk, ForwardMeta, Taps
from kangaroo.engine.clock import between, mark
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.sampling import Rule, pick
from kangaroo.engine.tree import Draft, Verdict, accept
from kangaroo.engine.verify import write
from kangaroo.models.target import TargetModel


class Stepper(Protocol):
    """What steps a batch.

    Attributes:
        leaves_other_rows: whether a step leaves the state of a prompt that is being read.
        rereads: cached prefix tokens that a drafter's `prefill` must see again.
    """

    leaves_other_rows: bool
    rereads: int

    def step(self, drafts: bool) -> list[StepRecord]:
        """A step of all active rows, without drafts of one token each. Returns a record of each
        row, without host time."""

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        """Chunks that the drafter has to read of a prefix that a prompt shares with a row."""


class TensorStepper:
    """Steps with any drafter on any device; for `keep` see `Engine.open`."""

    leaves_other_rows = False  # it shifts the windows of rows that are not active, too

    def __init__(self, lm: TargetModel, drafter: Drafter, batch: Batch, keep: int):
        self.lm, self.drafter, self.batch, self.keep = lm, drafter, batch, keep
        self.rereads = drafter.rereads

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        """See `Stepper`: the drafter reads `rereads` tokens again."""
        return []

    def step(self, drafts: bool) -> list[StepRecord]:
        """Propose, verify, commit and observe."""
        drafter, batch, device = self.drafter, self.batch, self.lm.device
        started = mark(device)
        draft = drafter.propose(batch) if drafts else Draft.nothing(batch.last(1))
        proposed = mark(device)
        draft.meta = draft.meta or self._place(draft)
        verdict, written_BX, logits_BNV, taps = self._verify(draft)
        if not draft.tree.is_chain:
            self._keep_path(draft.meta, verdict)
        verified = mark(device)
        batch.commit(written_BX)
        drafter.observe(batch, draft, verdict, taps)
        rows = written_BX.tolist()  # the step's one device-to-host copy, unless logits are kept
        topk: topk_logits.Rows = [None] * batch.size
        if logits_BNV is not None:
            topk = topk_logits.likeliest(logits_BNV, verdict.path_BP, self.keep)
            if batch.likeliest:
                self._add_likeliest(draft, logits_BNV)
        seconds = between(started, proposed), between(proposed, verified), 0.0
        records = [StepRecord([], 0, 0, *seconds, row_topk) for row_topk in topk]
        for row in batch.active:
            count, drafted, *tokens = rows[row]
            tokens = batch.append(row, tokens[:count])
            accepted = min(count - 1, len(tokens))
            batch.budget.observe(row, drafted, accepted)
            records[row] = StepRecord(tokens, accepted, drafted, *seconds, topk[row])
        return records

    def _place(self, draft: Draft) -> ForwardMeta:
        """The block of a draft, which is padded to a recorded shape if it has only tokens."""
        batch, width, tree = self.batch, self.lm.backend.width, draft.tree
        size = width(tree.size, self.drafter.max_nodes + 1)
        depth = size - 1 if tree.is_chain else width(tree.max_depth, size - 1)
        only_tokens = draft.hidden_BND is None and draft.probs_BNV is None
        if only_tokens and (size, depth) != (tree.size, tree.max_depth):
            draft.widen(size, depth)
        place = draft.tree, batch.base_B, batch.used + draft.tree.size, batch.n_slots
        return self.lm.forward_meta(*place, recorded=("verify", batch.cache))

    def _verify(self, draft: Draft) -> tuple[Verdict, Tensor, Tensor | None, Taps]:
        """The verdict, what is written, the logits `[B, N, V]` if kept, and the tapped states."""
        lm, batch, sampling = self.lm, self.batch, self.batch.sampling
        keeps_logits = self.keep > 0 or batch.likeliest > 0
        by_match = sampling.rule is Rule.match or sampling.greedy or draft.tree.size == 1
        taps, layers = sorted(set(self.drafter.taps)), range(draft.entry, lm.n_layers)

        def work(draft: Draft, seeds_B: Tensor, settings_B3: Tensor) -> tuple[Any, ...]:
            assert draft.meta is not None
            x_BND = lm.embed(draft.tokens_BN) if draft.hidden_BND is None else draft.hidden_BND
            x_BND, states = lm.run(x_BND, batch.cache, draft.meta, layers, taps)
            logits_BNV: Tensor | None = None
            if sampling.greedy and not keeps_logits:
                choice_BN = lm.likeliest(x_BND)
            else:
                logits_BNV, positions_BN = lm.logits(x_BND), draft.meta.positions_RT + 1
                inputs = logits_BNV, positions_BN, sampling.reading(settings_B3), seeds_B
                choice_BN = pick(*inputs) if by_match else write(draft, *inputs)
            verdict, logits_BNV = accept(draft, choice_BN), logits_BNV if keeps_logits else None
            return verdict, written(draft, verdict), logits_BNV, [states[tap] for tap in taps]

        shape = draft.entry, draft.tree.is_chain, draft.tree.max_depth, sampling.kind
        key = ("verify", *taps, keeps_logits, *shape)
        inputs = draft, batch.seeds_B, batch.settings_B3
        *results, states = lm.backend.replay((batch.cache,), key, work, *inputs)
        return *results, dict(zip(taps, states, strict=True))

    def _add_likeliest(self, draft: Draft, logits_BNV: Tensor) -> None:
        """Give the likeliest tokens after each node to a drafter that wants them: one sync."""
        batch, likeliest_BNK = self.batch, logits_BNV.topk(self.batch.likeliest).indices
        nodes_BN2 = torch.stack([draft.valid_BN.long(), draft.tokens_BN], -1)
        for row, nodes in enumerate(torch.cat([nodes_BN2, likeliest_BNK], -1).tolist()):
            if not batch.done[row]:
                batch.verified[row] += [(token, after) for valid, token, *after in nodes if valid]

    def _keep_path(self, meta: ForwardMeta, verdict: Verdict) -> None:
        """Move the keys and values of the accepted path to the slots of its positions."""
        batch, path_BP = self.batch, verdict.path_BP
        dst_BP = batch.base_B[:, None] + torch.arange(path_BP.shape[1], device=path_BP.device)
        args = (batch.cache,), ("move",), batch.cache.move, meta.slots_RT.gather(1, path_BP), dst_BP
        self.lm.backend.replay(*args, rehearsal=(dst_BP, dst_BP))
