"""A batch step by step: propose, verify, commit, observe.

Steps by tensors are the definition. A backend (`kangaroo/cpu`) may make the same step faster.

Shapes: B rows, N draft nodes, P nodes of a path, D hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kangaroo.cpu.drafting import native_drafting
from kangaroo.cpu.stepper import CpuStepper, runs_natively
from kangaroo.drafters.base import Drafter
from kangaroo.engine import topk_logits
from kangaroo.engine.batch import Batch, Emitted, RowTensors, emitted
from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import BUCKET, Chunk, ForwardMeta, KVCache
from kangaroo.engine.clock import between, mark, running
from kangaroo.engine.costs import curve, drafting
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.sampling import Rule, Sampling, pick
from kangaroo.engine.tree import Draft, Verdict, accept
from kangaroo.engine.verify import rejection
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError


class BatchDecoder:
    """A target and a drafter, and the batch that they decode.

    Args:
        tokenizer: needed for stop strings alone.
        prefill_chunk: the most tokens of a prompt that enter in a pass; None is as many as are
            quick.
        prefix_cache: a prompt that begins like a row's text is read from where it differs. Off,
            every prompt is read whole, as whoever measures wants it.
        always_drafts: every row of a batch drafts as a text alone does, for whoever measures
            acceptance. Off, a batch drafts what pays there.
    """

    def __init__(
        self,
        lm: TargetModel,
        drafter: Drafter,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefill_chunk: int | None = None,
        prefix_cache: bool = False,
        always_drafts: bool = False,
    ):
        if prefill_chunk is not None and prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be 1 or more tokens, not {prefill_chunk}.")
        self.lm, self.drafter, self.tokenizer = lm, drafter, tokenizer
        self.prefill_chunk, self.prefix_cache = prefill_chunk, prefix_cache
        self.always_drafts = always_drafts
        self.eos_ids = frozenset(lm.eos_ids())
        self.batch: Batch | None = None
        self.stepper: TensorStepper | CpuStepper | None = None  # of the batch
        self.cache: KVCache | None = None  # kept for the next batch if that needs no larger one
        self.keep = 0  # likeliest tokens that are kept of every distribution

    @property
    def spare_slots(self) -> int:
        """Beyond the longest text: a draft's nodes, as many places before it, and the bonus."""
        native = native_drafting(self.drafter)
        return max(2 * self.drafter.max_nodes, native.nodes if native else 0) + 2

    @torch.no_grad()
    def open(self, batch_size: int, longest: int, sampling: Sampling, keep: int = 0) -> Batch:
        """An empty batch for texts of at most `longest` tokens, prompts included. Of the
        distribution behind every token the `keep` likeliest are kept (`Generation.teacher`)."""
        topk_logits.check(keep, "keep")
        self.keep = min(keep, self.lm.config.vocab_size)
        # rounded up, since attention kernels want the rows of a mask aligned
        n_slots = -(-(longest + self.spare_slots) // BUCKET) * BUCKET
        fits = self.cache is not None and self.cache.batch_size == batch_size
        if self.cache is None or not fits or n_slots > self.cache.n_slots:
            # their memory may be needed for the new ones
            self.batch = self.cache = self.stepper = None
            self.cache = self.lm.new_cache(batch_size, n_slots)
        # native rounds draft otherwise than what would be measured
        by_graphs = self.lm.acceleration.graphs and self.lm.device.type == "cuda"
        of_drafts = partial(drafting, self.lm) if by_graphs else None
        budget = Budget(partial(curve, self.lm), self.always_drafts, of_drafts)
        batch = Batch(self.cache, longest, sampling, self.eos_ids, self.lm.device, budget)
        self.drafter.begin(batch)
        drafts_less = batch_size > 1 and self.drafter.max_nodes and not self.always_drafts
        if self.drafter.needs_costs or drafts_less:
            budget.cost(batch_size, 1)  # measured now, since it may take a second
        native = native_drafting(self.drafter)
        if native is not None and runs_natively(self.lm, self.drafter, sampling):
            self.stepper = CpuStepper(self.lm, native, batch, self.keep)
        else:
            self.stepper = TensorStepper(self.lm, self.drafter, batch, self.keep)
        self.batch = batch
        return batch

    @torch.inference_mode()
    def step(self, batch: Batch, drafts: bool = True) -> list[StepRecord]:
        """Propose, verify, commit, observe; one record a row. Without drafts it is a short one.
        Errors: `ConfigError` for another batch than the one opened last."""
        self._check_is_current(batch is self.batch)
        assert self.stepper is not None
        entered = running()
        records = self.stepper.step(drafts)
        seconds = running() - entered
        for record in records:
            record.host_seconds = seconds - record.draft_seconds - record.verify_seconds
        return records

    def _check_is_current(self, current: bool) -> None:
        if not current:
            raise ConfigError(
                "an engine decodes one batch, or one stream, at a time: finish this one before the "
                "next, or make an Engine with a drafter of its own for each."
            )


class TensorStepper:
    """Makes the steps of one batch, of every drafter on every device.

    `supports_prefix_reuse` tells whether a prompt that begins like a text in the cache is read from
    where they differ; `keep` is that of `open`.
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
        """What becomes of a draft, and what is written; the logits `[B, N, V]`, where something of
        them is kept; the states that the drafter wants."""
        lm, batch, sampling = self.lm, self.batch, self.batch.sampling
        keeps = self.keep > 0 or batch.likeliest > 0
        by_match = sampling.rule is Rule.match or sampling.greedy or draft.tree.size == 1
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
                choice_BN = chosen[0]
            else:
                logits_BNV, how = lm.logits(x_BND), sampling.reading(rows.settings_B3)
                drawn_by = logits_BNV, block.positions_RT + 1, how, rows.seeds_B
                choice_BN = pick(*drawn_by) if by_match else rejection(nodes, *drawn_by)
                kept = (logits_BNV,) if keeps else ()
            verdict = accept(nodes, choice_BN)
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
        places = meta.slots_RT.gather(1, verdict.path_BP), batch.base_B[:, None] + depth_P

        def work(from_BP: Tensor, to_BP: Tensor) -> tuple[Tensor, ...]:
            batch.cache.move(from_BP, to_BP)
            return ()

        tokens, rehearsal = places[0].numel(), (places[1], places[1])
        args = (batch.cache,), ("move",), work, *places
        self.lm.acceleration.replay(*args, tokens=tokens, rehearsal=rehearsal)
