"""Vanilla steps on a GPU: each is one graph, and its tokens are read while the next one runs.

Shapes: B rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.drafters.base import Drafter
from kangaroo.engine.batch import Batch
from kangaroo.engine.clock import Mark, between, mark
from kangaroo.engine.requests import StepRecord
from kangaroo.engine.sampling import pick
from kangaroo.engine.stepper import Stepper, TensorStepper
from kangaroo.engine.tree import Tree
from kangaroo.models.target import TargetModel


@dataclass
class Launched:
    """A step that the device was given: its tokens, on their way to the host, and when it runs."""

    tokens_B: Tensor
    start: Mark
    stop: Mark

    def read(self) -> list[int]:
        """The tokens of each row. Waits for this step, and not for what was launched after it."""
        event = self.stop[0]
        if isinstance(event, torch.cuda.Event):
            event.synchronize()
        return self.tokens_B.tolist()


class LateStepper(Stepper):
    """Steps without drafts. The device keeps each row's pending token and length, so that a step
    can be launched before the tokens of the last one are known. What a step writes beyond a text's
    end is scratch; then the row is held at its end. If another text enters a row, all rows are
    uploaded again, and what was launched before is dropped."""

    leaves_other_rows = True
    rereads = 0

    def __init__(self, lm: TargetModel, drafter: Drafter, batch: Batch):
        self.lm = lm
        self.batch = batch
        self.tensors = TensorStepper(lm, drafter, batch, keep=0)
        self.texts: list[list[int]] = []  # those that the device has
        self.lengths: list[int] = []  # of these texts, before the next tokens are read
        self.running = set[int]()  # rows whose texts have not ended on the device
        self.state_B4 = torch.empty(0)  # pending tokens, lengths, limits and seeds
        self.ahead: Launched | None = None

    def step(self, drafts: bool) -> list[StepRecord]:
        """See `Stepper`. After an upload no step is launched ahead, since prompts that are read in
        chunks would change the batch again."""
        batch = self.batch
        if batch.constrained or batch.keep:  # they need logits
            return self._step_now()
        is_known = self._is_known()
        if not is_known:
            self._upload()
        for row in self.running.difference(batch.active):
            self.state_B4[row, 2] = len(batch.texts[row])  # or it would outgrow the extent
            self.running.remove(row)
        launched = self.ahead or self._launch(batch.used)
        active = batch.active
        goes_on = any(len(batch.texts[row]) + 1 < batch.limits[row] for row in active)
        self.ahead = self._launch(batch.used + 1) if is_known and goes_on else None
        tokens = launched.read()
        seconds = between(launched.start, launched.stop)
        records = [StepRecord([], verify_seconds=seconds) for _ in tokens]
        for row in active:
            records[row].tokens = batch.append(row, [tokens[row]])
        self.lengths = batch.lengths
        return records

    def _step_now(self) -> list[StepRecord]:
        """A step on tensors, whose tokens are read at once."""
        batch = self.batch
        self.texts = []  # those of the device are outdated after this
        self.ahead = None
        for row in batch.active:
            batch.tokens_BS[row, len(batch.texts[row]) - 1] = batch.texts[row][-1]
            batch.length_B[row] = len(batch.texts[row])
        return self.tensors.step(drafts=False)

    def _is_known(self) -> bool:
        """Whether the device has the texts that are in the rows now, up to their ends."""
        batch = self.batch
        if not self.texts or self.lengths != batch.lengths:
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
        self.state_B4 = torch.tensor(rows).to(self.lm.device)

    def _launch(self, used: int) -> Launched:
        """Let the device write a token in each row; all committed tokens lie below `used`."""
        lm = self.lm
        batch = self.batch
        start = mark(lm.device)
        extent = lm.extent(batch.n_slots, used)

        def work(state_B4: Tensor, settings_B3: Tensor) -> Tensor:
            token_B, length_B, limit_B, seed_B = state_B4.unbind(1)
            tree = Tree.chain(1, lm.device)
            meta = lm.forward_meta(tree, length_B - 1, extent, batch.n_slots)
            x_B1D = lm.embed(token_B[:, None])
            x_B1D, _ = lm.run(x_B1D, batch.cache, meta, range(lm.n_layers))
            if batch.sampling.greedy:
                choice_B1 = lm.likeliest(x_B1D)
            else:
                sampling = batch.sampling.reading(settings_B3)
                choice_B1 = pick(lm.logits(x_B1D), length_B[:, None], sampling, seed_B)
            length_B = torch.minimum(length_B + 1, limit_B)
            return torch.stack([choice_B1[:, 0], length_B, limit_B, seed_B], 1)

        key = ("step", extent, batch.sampling.kind)
        self.state_B4 = lm.backend.replay(
            (batch.cache,), key, work, self.state_B4, batch.settings_B3, tokens=batch.size
        )
        tokens_B = torch.empty(batch.size, dtype=torch.long, pin_memory=lm.device.type == "cuda")
        tokens_B.copy_(self.state_B4[:, 0], non_blocking=True)
        return Launched(tokens_B, start, mark(lm.device))
