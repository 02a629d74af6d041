"""One step of a batch by tensors: propose, verify, commit, observe.

This is the definition of a step. A backend (`kangaroo/cpu`) may make the same step faster.

Shapes: B rows, N draft nodes, P nodes of a path, T tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter
from kangaroo.engine import topk_logits
from kangaroo.engine.batch import Batch, Emitted, RowTensors, emitted
from kangaroo.engine.cache import ForwardMeta
from kangaroo.engine.clock import between, mark
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.tree import Draft
from kangaroo.engine.verify import Verdict, accept, decide
from kangaroo.models.target import TargetModel

Chunk = tuple[Tensor, ForwardMeta, dict[int, Tensor]]  # of a prompt, as `Drafter.prefill` takes it


class TensorStepper:
    """Makes the steps of one batch, of every drafter on every device.

    `supports_prefix_reuse` tells whether a prompt that begins like a text in the cache is read from
    where they differ.
    """

    def __init__(self, lm: TargetModel, drafter: Drafter, batch: Batch, keep: int = 0):
        self.lm, self.drafter, self.batch, self.keep = lm, drafter, batch, keep
        self.supports_prefix_reuse = drafter.supports_prefix_reuse

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        """Of the first tokens of a prompt, which a row takes over from `source`, those that the
        drafter has yet to read, as chunks."""
        return []

    def step(self, drafts: bool) -> list[StepRecord]:
        """A record of each row, without the host's time."""
        drafter, batch, device = self.drafter, self.batch, self.lm.device
        started = mark(device)
        draft = drafter.propose(batch) if drafts else Draft.nothing(batch.last(1))
        proposed = mark(device)
        draft.meta = draft.meta or self._block(draft)
        verdict, written, logits_BNV, taps = self._verify(draft, draft.meta)
        if not draft.tree.is_chain:
            self._keep_path(draft.meta, verdict)
        verified = mark(device)
        batch.commit(written)
        drafter.observe(batch, draft, verdict, taps)
        rows = written.to_host()  # the step's one device-to-host copy, but for what is kept
        kept: topk_logits.Rows = [None] * batch.size
        if logits_BNV is not None:
            kept = topk_logits.likeliest(logits_BNV, verdict.path_BP, self.keep)
            self._add_likeliest(draft, logits_BNV)
        for row, (tokens, accepted, drafted) in enumerate(rows):
            batch.append(row, tokens)
            batch.budget.observe(row, drafted, accepted)
        seconds = between(started, proposed), between(proposed, verified), 0.0
        pairs = zip(rows, kept, strict=True)
        return [StepRecord(*row, *seconds, likeliest) for row, likeliest in pairs]

    def _block(self, draft: Draft) -> ForwardMeta:
        """Where a draft will lie that lies nowhere yet; of tokens alone it becomes one of the few
        shapes that are recorded."""
        batch, width, tree = self.batch, self.lm.acceleration.width, draft.tree
        size = width(tree.size, self.drafter.max_nodes + 1)
        depth = size - 1 if tree.is_chain else width(tree.max_depth, size - 1)
        alone = draft.hidden_BND is None and draft.probs_BNV is None
        if alone and (size, depth) != (tree.size, tree.max_depth):
            draft.widen(size, depth)
        place = draft.tree, batch.base_B, batch.used + draft.tree.size, batch.n_slots
        return self.lm.forward_meta(*place, recorded=("verify", batch.cache))

    def _verify(
        self, draft: Draft, meta: ForwardMeta
    ) -> tuple[Verdict, Emitted, Tensor | None, dict[int, Tensor]]:
        """What the target says of a draft, and what is written therefore; the logits `[B, N, V]`,
        where something of them is kept; the states that the drafter wants."""
        lm, batch, sampling = self.lm, self.batch, self.batch.sampling
        keeps = self.keep > 0 or batch.likeliest > 0
        taps, layers = sorted(set(self.drafter.taps)), range(draft.entry, lm.n_layers)
        drafted, placed = draft.tensors(), meta.tensors()

        def work(*inputs: Tensor) -> tuple[Tensor, ...]:
            given = iter(inputs)
            nodes = draft.with_tensors(*islice(given, len(drafted)))
            block, rows = meta.with_tensors(*islice(given, len(placed))), RowTensors(*given)
            x_BND = lm.embed(nodes.tokens_BN) if nodes.hidden_BND is None else nodes.hidden_BND
            x_BND, states = lm.run(x_BND, batch.cache, block, layers, taps)
            chosen = lm.choose(x_BND) if sampling.greedy and not keeps else None
            kept: tuple[Tensor, ...] = ()
            if chosen is not None:
                verdict = accept(nodes, chosen[0])
            else:
                logits_BNV = lm.logits(x_BND)
                how = sampling.reading(rows.settings_B3)
                verdict = decide(nodes, logits_BNV, block.positions_RT + 1, how, rows.seeds_B)
                kept = (logits_BNV,) if keeps else ()
            return *verdict, *emitted(nodes, verdict, rows), *kept, *(states[tap] for tap in taps)

        shape = draft.entry, draft.tree.is_chain, draft.tree.max_depth, sampling.kind
        inputs, count = (*drafted, *placed, *batch.rows), draft.tokens_BN.numel()
        key, replay = ("verify", *taps, keeps, *shape), lm.acceleration.replay
        results = iter(replay((batch.cache,), key, work, *inputs, tokens=count))
        verdict = Verdict(*islice(results, len(Verdict._fields)))
        written = Emitted(*islice(results, len(Emitted._fields)))
        logits_BNV = next(results) if keeps else None
        return verdict, written, logits_BNV, dict(zip(taps, results, strict=True))

    def _add_likeliest(self, draft: Draft, logits_BNV: Tensor) -> None:
        """Tell a drafter that wants them of the likeliest tokens after each node: one sync."""
        batch = self.batch
        if not batch.likeliest:
            return
        likeliest_BNK = logits_BNV.topk(batch.likeliest).indices
        nodes_BN2 = torch.stack([draft.valid_BN.long(), draft.tokens_BN], -1)
        for row, nodes in enumerate(torch.cat([nodes_BN2, likeliest_BNK], -1).tolist()):
            if not batch.done[row]:
                batch.verified[row] += [(token, after) for valid, token, *after in nodes if valid]

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
