"""A step of a batch on tensors, which defines what faster backends compute (`kangaroo/cpu`).

Shapes: B rows, N draft nodes, P nodes of a path, X as in `batch.written`, V vocabulary.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter
from kangaroo.engine import topk_logits
from kangaroo.engine.batch import Batch, written
from kangaroo.engine.cache import Chunk, ForwardMeta
from kangaroo.engine.clock import between, mark
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.sampling import Rule, pick
from kangaroo.engine.tree import Draft, Verdict, accept
from kangaroo.engine.verify import write
from kangaroo.models.target import TargetModel


class Stepper(Protocol):
    """What steps a batch.

    Attributes:
        leaves_other_rows: whether a step leaves the drafter's state of inactive rows alone.
        rereads: how many cached prefix tokens the drafter's `prefill` has to see again.
    """

    leaves_other_rows: bool
    rereads: int

    def step(self, drafts: bool) -> list[StepRecord]:
        """A step of all active rows; without `drafts` it writes one token each. Returns a record of
        each row, without host time."""

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        """What the drafter has not read of a prefix that a row's prompt shares with `source`."""
        return []


class Verification(NamedTuple):
    """What the target says of a draft: its verdict, what the rows write (`batch.written`), the
    states at the drafter's taps in ascending order, and the logits if they are kept."""

    verdict: Verdict
    written_BX: Tensor
    tapped: list[Tensor]
    logits_BNV: Tensor | None


class TensorStepper(Stepper):
    """Steps with any drafter on any device."""

    leaves_other_rows = False  # it moves the drafter's windows of inactive rows, too

    def __init__(self, lm: TargetModel, drafter: Drafter, batch: Batch):
        self.lm = lm
        self.drafter = drafter
        self.batch = batch
        self.rereads = drafter.rereads
        self.taps = sorted(set(drafter.taps))

    def step(self, drafts: bool) -> list[StepRecord]:
        batch = self.batch
        started = mark(self.lm.device)
        drafts = drafts and any(batch.drafts[row] for row in batch.active)
        draft = self.drafter.propose(batch) if drafts else Draft.nothing(batch.last(1))
        if drafts and not all(batch.drafts):
            draft.valid_BN[:, 1:] &= torch.tensor(batch.drafts).to(draft.valid_BN)[:, None]
        proposed = mark(self.lm.device)
        draft.meta = draft.meta or self._place(draft)
        verification = self.verify(draft)
        verdict = verification.verdict
        if not draft.tree.is_chain:
            self._keep_path(draft.meta, verdict)
        verified = mark(self.lm.device)
        batch.commit(verification.written_BX)
        tapped = dict(zip(self.taps, verification.tapped, strict=True))
        self.drafter.observe(batch, draft, verdict, tapped)
        # the step's one device-to-host copy, unless logits are kept
        rows = verification.written_BX.tolist()
        topk: topk_logits.Rows = [None] * batch.size
        if verification.logits_BNV is not None:
            topk = topk_logits.likeliest(verification.logits_BNV, verdict.path_BP, batch.keep)
            if batch.likeliest:
                self._add_likeliest(draft, verification.logits_BNV)
        return batch.take_step(rows, topk, between(started, proposed), between(proposed, verified))

    def _place(self, draft: Draft) -> ForwardMeta:
        """The block of a draft. If that has only tokens, it is padded to a recorded shape."""
        width = self.lm.backend.width
        size = width(draft.tree.size, self.drafter.max_nodes + 1)
        depth = size - 1 if draft.tree.is_chain else width(draft.tree.max_depth, size - 1)
        only_tokens = draft.hidden_BND is None and draft.probs_BNV is None
        if only_tokens and (size, depth) != (draft.tree.size, draft.tree.max_depth):
            draft.widen(size, depth)
        return self.lm.forward_meta(
            draft.tree,
            self.batch.base_B,
            used=self.batch.used + draft.tree.size,
            n_slots=self.batch.n_slots,
            recorded=("verify", self.batch.cache),
        )

    def verify(self, draft: Draft) -> Verification:
        """Run the target over a draft, choose a token after each node, and walk by the choices."""
        lm = self.lm
        batch = self.batch
        sampling = batch.sampling
        keeps_logits = max(batch.likeliest, batch.keep) > 0
        biases_BNV = self._biases(draft)
        by_match = sampling.rule is Rule.match or sampling.greedy or draft.tree.size == 1

        def work(
            draft: Draft, seeds_B: Tensor, settings_B3: Tensor, biases_BNV: Tensor | None
        ) -> Verification:
            assert draft.meta is not None
            x_BND = lm.embed(draft.tokens_BN) if draft.hidden_BND is None else draft.hidden_BND
            layers = range(draft.entry, lm.n_layers)
            x_BND, states = lm.run(x_BND, batch.cache, draft.meta, layers, self.taps)
            logits_BNV = None
            if sampling.greedy and not keeps_logits and biases_BNV is None:
                choice_BN = lm.likeliest(x_BND)
            else:
                logits_BNV = lm.logits(x_BND)
                if biases_BNV is not None:
                    logits_BNV = logits_BNV.float() + biases_BNV
                positions_BN = draft.meta.positions_RT + 1
                settings = sampling.reading(settings_B3)
                if by_match:
                    choice_BN = pick(logits_BNV, positions_BN, settings, seeds_B)
                else:
                    choice_BN = write(draft, logits_BNV, positions_BN, settings, seeds_B)
            verdict = accept(draft, choice_BN)
            tapped = [states[tap] for tap in self.taps]
            kept_BNV = logits_BNV if keeps_logits else None
            return Verification(verdict, written(draft, verdict), tapped, kept_BNV)

        topology = (draft.tree.is_chain, draft.tree.max_depth)
        parts = (keeps_logits, biases_BNV is None, draft.entry)
        key = ("verify", *self.taps, parts, topology, sampling.kind)
        return lm.backend.replay(
            (batch.cache,), key, work, draft, batch.seeds_B, batch.settings_B3, biases_BNV
        )

    def _biases(self, draft: Draft) -> Tensor | None:
        """What restricted texts add to the logits after each node, `[B, N, V]`; None without such
        texts. One sync: the host reads the nodes."""
        constrained = self.batch.constrained
        if not constrained:
            return None
        tokens = draft.tokens_BN.tolist()
        parents = draft.tree.parents_BN.expand_as(draft.tokens_BN).tolist()
        biases_BNV = torch.zeros(*draft.tokens_BN.shape, self.lm.config.vocab_size)
        for row, constraint in constrained:
            biases_BNV[row] = torch.from_numpy(constraint.after(tokens[row], parents[row]))
        return biases_BNV.to(self.lm.device)

    def _add_likeliest(self, draft: Draft, logits_BNV: Tensor) -> None:
        """Give a drafter that wants them the likeliest tokens after each node. One sync."""
        batch = self.batch
        likeliest_BNK = logits_BNV.topk(batch.likeliest).indices
        nodes_BN2 = torch.stack([draft.valid_BN.long(), draft.tokens_BN], -1)
        for row, nodes in enumerate(torch.cat([nodes_BN2, likeliest_BNK], -1).tolist()):
            if not batch.done[row]:
                batch.verified[row] += [(token, after) for valid, token, *after in nodes if valid]

    def _keep_path(self, meta: ForwardMeta, verdict: Verdict) -> None:
        cache = self.batch.cache
        path_BP = verdict.path_BP
        dst_BP = self.batch.base_B[:, None] + torch.arange(path_BP.shape[1], device=path_BP.device)
        src_BP = meta.slots_RT.gather(1, path_BP)
        rehearsal = (dst_BP, dst_BP)
        self.lm.backend.replay((cache,), ("move",), cache.move, src_BP, dst_BP, rehearsal=rehearsal)
