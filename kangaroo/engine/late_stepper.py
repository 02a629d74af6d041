"""Steps on a GPU that need no host: each is one graph, and what it wrote is read while the next one
runs. They are those of vanilla decoding, and of chains: of those that never stop early, and where
the backend can skip what follows their end, of a text alone.

Shapes: B rows, N draft tokens, X as of `batch.written`, W window, D hidden size.
"""

from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.block import Block
from kangaroo.drafters.hybrid import Hybrid
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.batch import Batch
from kangaroo.engine.clock import Mark, between, mark
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.sampling import pick
from kangaroo.engine.stepper import Stepper, TensorStepper
from kangaroo.engine.tree import Tree
from kangaroo.models.target import TargetModel


class State(NamedTuple):
    """What a step leaves to the next one on the device: each row's pending token, length, limit and
    seed, and the drafter's window; what it wrote, if it drafted, and the window before it."""

    rows_B4: Tensor
    window_BWD: Tensor | None = None
    written_BX: Tensor | None = None
    window_before_BWD: Tensor | None = None


@dataclass
class Launched:
    """A step that the device was given: what it writes, on the way to the host, and its bounds."""

    written_BX: Tensor
    start: Mark
    stop: Mark

    def read(self) -> list[list[int]]:
        """Wait for the step alone, and not for what was launched after it."""
        event = self.stop[0]
        if isinstance(event, torch.cuda.Event):
            event.synchronize()
        return self.written_BX.tolist()


def needs_no_host(lm: TargetModel, drafter: Drafter, rows: int) -> bool:
    """Whether the host need not read a round's drafts, so that `LateStepper` runs them."""
    match drafter:
        case Hybrid():  # it reads every token
            return False
        case Kangaroo() | Block():
            never_stops = not drafter.auto and drafter.threshold == 0
            skips = lm.backend.skips and drafter.adapter.fast_layers is not None
            return never_stops or (rows == 1 and skips)
    return isinstance(drafter, Vanilla)


class LateStepper(Stepper):
    """Steps whose drafts, if any, end without the host. The device has each row's pending token and
    length for itself, so that a step can be launched before what the last one wrote is known. What
    that writes beyond a text's end is scratch, and then the row is held at its end. Where another
    text has entered a row, or a batch's budget or a request asks for other drafts, the device gets
    all anew, and what was launched for the rows before is dropped."""

    def __init__(self, lm: TargetModel, drafter: Drafter, batch: Batch):
        self.lm = lm
        self.batch = batch
        self.tensors = TensorStepper(lm, drafter, batch)
        self.chain = drafter if isinstance(drafter, Kangaroo | Block) else None
        self.leaves_other_rows = self.chain is None
        self.rereads = drafter.rereads
        self.most = 1 + drafter.max_nodes  # tokens that a step writes in a row
        self.texts: list[list[int]] = []  # those that the device has
        self.lengths: list[int] = []  # theirs when the next tokens are read
        self.running = set[int]()  # rows whose texts had not ended
        self.state = State(torch.empty(0))
        self.limits = np.zeros(0)  # those that the device has, in `limits_BN`
        self.limits_BN: Tensor | None = None
        self.ahead: Launched | None = None

    def step(self, drafts: bool) -> list[StepRecord]:
        """See `Stepper`. The step after a change is read at once, since prompts that are read in
        chunks would change the batch again; so is one that may write a text's last token."""
        batch = self.batch
        active = batch.active
        limits = self._limits(drafts)
        # texts that tensors know, or that need logits
        if batch.constrained or batch.keep or limits is None:
            return self._step_now(drafts)
        is_known = self._is_known()
        pays = self.chain is None or limits[:, 0].max() < 1
        if not pays and not (is_known and self.ahead):
            return self._step_now(drafts)
        if not is_known:
            self._upload()
        for row in self.running.difference(active):
            # else it outgrows what attention reads
            self.state.rows_B4[row, 2] = len(batch.texts[row])
            self.running.remove(row)
        launched = self.ahead or self._launch(0, limits)
        goes_on = any(len(batch.texts[row]) + self.most < batch.limits[row] for row in active)
        self.ahead = self._launch(self.most, limits) if is_known and goes_on and pays else None
        if self.chain is not None:  # the drafter's window is that of the texts
            window_BWD = self.state.window_before_BWD if self.ahead else self.state.window_BWD
            assert window_BWD is not None
            self.chain.shallow_BWD = window_BWD
        rows = launched.read()
        seconds = between(launched.start, launched.stop)  # of all: a graph is not divided
        wrote = rows if self.chain else [[1, 0, *row] for row in rows]
        records = batch.take_step(wrote, [None] * batch.size, drafting=0.0, verifying=seconds)
        self.lengths = batch.lengths
        return records

    def _limits(self, drafts: bool) -> np.ndarray | None:
        """The limits of each row's chain (`EarlyStopping.limits`), which do not know the step in
        flight. None if a row may not draft, or a batch's budget stops one: a step on tensors
        verifies no more than was drafted."""
        batch = self.batch
        active = batch.active
        if self.chain is None:
            return np.zeros(0)
        limits = np.zeros((batch.size, self.chain.steps), np.float32)
        limits[active] = self.chain.limits(batch, active)[active]
        may_draft = drafts and all(batch.drafts[row] for row in active)
        return limits if may_draft and (batch.size == 1 or not limits.any()) else None

    def _step_now(self, drafts: bool) -> list[StepRecord]:
        batch = self.batch
        for row in batch.active if self.texts else ():  # else tensors took the last step, too
            batch.tokens_BS[row, len(batch.texts[row]) - 1] = batch.texts[row][-1]
            batch.length_B[row] = len(batch.texts[row])
        self.texts = []  # the device's are old after this
        self.ahead = None
        return self.tensors.step(drafts)

    def _is_known(self) -> bool:
        """Whether the device has the texts that are in the rows now, as far as they are written.
        A draft vocabulary follows those that are being written."""
        batch = self.batch
        if not self.texts or self.lengths != batch.lengths:
            return False
        if self.chain is not None and self.running != set(batch.active):
            return False
        return all(x is y for x, y in zip(batch.texts, self.texts, strict=True))

    def _upload(self) -> None:
        batch = self.batch
        self.ahead = None
        self.texts = list(batch.texts)
        self.running = set(batch.active)
        rows = []
        for row, text in enumerate(batch.texts):
            limit = len(text) if batch.done[row] else batch.limits[row]
            rows.append([text[-1], len(text), limit, batch.seeds[row]])
        window_BWD = None
        if self.chain is not None:
            self.chain.catch_up(batch)
            window_BWD = self.chain.shallow_BWD
        self.state = State(torch.tensor(rows).to(self.lm.device), window_BWD)

    def _launch(self, ahead: int, limits: np.ndarray) -> Launched:
        """Let the device write in each row, which may have `ahead` tokens more than its text."""
        lm = self.lm
        pinned = lm.device.type == "cuda"  # else a copy waits for the step before
        if not np.array_equal(limits, self.limits):
            self.limits = limits
            limits_BN = torch.tensor(limits, pin_memory=pinned)
            self.limits_BN = limits_BN.to(lm.device, non_blocking=True)
        chain = self.chain
        batch = copy(self.batch)
        batch.ahead = ahead
        start = mark(lm.device)
        used = batch.used + self.most - 1
        below = 0
        may_stop = False
        if chain is None:
            work = partial(self._write_token, batch, lm.extent(batch.n_slots, used))
            caches = [batch.cache]
        else:
            may_stop = chain.threshold > 0 or bool(limits.any())
            work = partial(self._write_chain, batch, chain, may_stop)
            caches = [batch.cache, chain.cache]
            if min(batch.lengths) <= chain.window:  # as in `chain_meta`
                below = chain.window
        extent = lm.extent(batch.n_slots, used + below)
        self.state = lm.backend.replay(
            caches,
            ("step", self.most, extent, below, may_stop, batch.sampling.kind),
            work,
            self.state.rows_B4,
            batch.settings_B3,
            self.state.window_BWD,
            self.limits_BN,
            tokens=batch.size * self.most,
        )
        new_BX = self.state.rows_B4[:, :1] if chain is None else self.state.written_BX
        assert new_BX is not None
        written_BX = torch.empty(new_BX.shape, dtype=torch.long, pin_memory=pinned)
        written_BX.copy_(new_BX, non_blocking=True)
        return Launched(written_BX, start, mark(lm.device))

    def _write_token(
        self, batch: Batch, extent: int, rows_B4: Tensor, settings_B3: Tensor, *chain: None
    ) -> State:
        """A vanilla step, with less to launch than that of tensors."""
        lm = self.lm
        token_B, length_B, limit_B, seed_B = rows_B4.unbind(1)
        meta = lm.forward_meta(Tree.chain(1, lm.device), length_B - 1, extent, batch.n_slots)
        x_B1D = lm.embed(token_B[:, None])
        x_B1D, _ = lm.run(x_B1D, batch.cache, meta, range(lm.n_layers))
        if batch.sampling.greedy:
            choice_B1 = lm.likeliest(x_B1D)
        else:
            sampling = batch.sampling.reading(settings_B3)
            choice_B1 = pick(lm.logits(x_B1D), length_B[:, None], sampling, seed_B)
        length_B = torch.minimum(length_B + 1, limit_B)
        return State(torch.stack([choice_B1[:, 0], length_B, limit_B, seed_B], 1))

    def _write_chain(
        self,
        batch: Batch,
        chain: Kangaroo | Block,
        may_stop: bool,
        rows_B4: Tensor,
        settings_B3: Tensor,
        window_BWD: Tensor,
        limits_BN: Tensor,
    ) -> State:
        """A round as `TensorStepper` has it, on the device's rows; `batch` is a copy."""
        token_B, length_B, limit_B, seed_B = rows_B4.unbind(1)
        batch.tokens_BS = token_B[:, None].expand(-1, batch.n_slots)  # a chain reads only this one
        batch.length_B = length_B
        batch.seeds_B = seed_B
        batch.settings_B3 = settings_B3
        batch.sampling = batch.sampling.reading(settings_B3)
        chain.shallow_BWD = window_BWD
        tensors = TensorStepper(self.lm, chain, batch)
        limits = limits_BN if may_stop else np.zeros((batch.size, chain.steps), np.float32)
        try:
            draft = chain.grow(batch, limits, may_stop)
        finally:
            self.lm.backend.skip_unless(None)
        chain.proposed = draft
        if may_stop and draft.hidden_BND is not None:
            is_drafted_BN1 = draft.valid_BN[..., None].to(draft.hidden_BND.device)
            draft.hidden_BND = draft.hidden_BND.where(is_drafted_BN1, 0.0)  # may be no numbers
        verification = tensors.verify(draft)
        taps = dict(zip(tensors.taps, verification.tapped, strict=True))
        chain.observe(batch, draft, verification.verdict, taps)
        written_BX = verification.written_BX
        count_B1 = written_BX[:, :1]
        token_B = written_BX.gather(1, 1 + count_B1)[:, 0]
        length_B = torch.minimum(length_B + count_B1[:, 0], limit_B)
        rows_B4 = torch.stack([token_B, length_B, limit_B, seed_B], 1)
        return State(rows_B4, chain.shallow_BWD, written_BX, window_BWD)
