"""A step in native code (`cpp/rounds.h`): one call drafts, another verifies."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from kangaroo.cpu.buffers import DraftBuffers
from kangaroo.cpu.drafting import Drafting
from kangaroo.engine import topk_logits
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import Chunk
from kangaroo.engine.clock import running
from kangaroo.engine.requests import StepRecord
from kangaroo.models.target import TargetModel


class CpuStepper:
    """Steps of a batch that drafts natively."""

    leaves_other_rows = True
    rereads = 0

    def __init__(self, lm: TargetModel, drafting: Drafting, batch: Batch):
        self.lm = lm
        self.drafting = drafting
        self.batch = batch
        self.buffers = DraftBuffers(
            lm,
            batch.cache,
            capacity=1 + drafting.nodes,
            exit_layer=drafting.exit_layer,
            drafting=drafting.layer(batch.cache),
        )
        self.texts: list[list[int] | None] = [None] * batch.size

    def step(self, drafts: bool) -> list[StepRecord]:
        batch = self.batch
        buffers = self.buffers
        active = batch.active
        started = running()
        keep = batch.keep
        buffers.keep(max(keep, batch.likeliest))
        self._begin(active)
        drafting = [row for row in active if batch.drafts[row]]
        if drafts and drafting:
            self.drafting.draft(buffers, batch, drafting)
        drafted = running()
        biases = list(self._biases())  # kept alive while native code reads them
        buffers.verify()
        del biases
        verified = running()
        wrote: list[list[int]] = [[] for _ in batch.texts]
        for row in active:
            new = int(buffers.accepted[row]) + 1
            count = int(buffers.count[row])
            wrote[row] = [new, count - 1, *buffers.written[row, :new].tolist()]
            if batch.likeliest:
                likeliest = buffers.kept[row, :count, : batch.likeliest].tolist()
                nodes = buffers.token[row, :count].tolist()
                batch.verified[row] += zip(nodes, likeliest, strict=True)
        topk: topk_logits.Rows = [None] * batch.size
        if keep:
            path = (np.arange(batch.size)[:, None], buffers.path, slice(keep))
            vocab_size = self.lm.config.vocab_size
            kept = topk_logits.records(buffers.kept[path], buffers.kept_chances[path], vocab_size)
            topk = list(kept)
        return batch.take_step(wrote, topk, drafted - started, verified - drafted)

    def _biases(self) -> Iterator[np.ndarray]:
        """What restricted texts add to the logits after their nodes, set for native code."""
        buffers = self.buffers
        buffers.biases[:] = 0
        for row, constraint in self.batch.constrained:
            nodes = slice(int(buffers.count[row]))
            tokens = buffers.token[row, nodes].tolist()
            biases_NV = constraint.after(tokens, buffers.parent[row, nodes].tolist())
            steps_N = np.arange(len(tokens)) * biases_NV.strides[0]
            buffers.biases[row, nodes] = biases_NV.ctypes.data + steps_N
            yield biases_NV

    def _begin(self, active: list[int]) -> None:
        """Make each active row's pending token its only node."""
        batch = self.batch
        buffers = self.buffers
        buffers.count[:] = buffers.end[:] = 0
        for row in active:
            text = batch.texts[row]
            if text is not self.texts[row]:  # another text has taken the row
                self.texts[row] = text
                sampling = batch.samplings[row]
                filters = (sampling.temperature, sampling.top_p, sampling.top_k)
                buffers.draw[row] = (*filters, batch.seeds[row])
                buffers.unread[row] = 0
            buffers.base[row] = len(text) - 1
            buffers.token[row, 0] = text[-1]
            buffers.count[row] = 1
            buffers.has_state[row, 0] = 0

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        """See `Stepper`: tokens that the drafting layer has not read, with their kept states."""
        buffers = self.buffers
        end = len(prefix_T)
        exit_layer = self.drafting.exit_layer
        no_step_yet = self.texts[source] is not self.batch.texts[source]
        if exit_layer is None or no_step_yet:
            return []
        text_end = buffers.base[source] + buffers.accepted[source] + 1
        first = min(int(text_end - buffers.unread[source]), end)
        if first == end:
            return []
        states_1TD = buffers.unread_BUD[source, None, : end - first].clone()
        meta = self.lm.chunk(first, end, row, self.batch.n_slots)
        return [(prefix_T[None, first:], meta, {exit_layer: states_1TD})]
