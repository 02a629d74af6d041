"""A step in native code (`cpp/rounds.h`): one call drafts, one verifies."""

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
    """Steps of a batch that drafts natively; for `keep` see `Engine.open`."""

    leaves_other_rows, rereads = True, 0

    def __init__(self, lm: TargetModel, drafting: Drafting, batch: Batch, keep: int):
        self.lm, self.drafting, self.batch, self.keep = lm, drafting, batch, keep
        parts = 1 + drafting.nodes, drafting.exit_layer, drafting.layer(batch.cache)
        self.buffers = DraftBuffers(lm, batch.cache, *parts, max(keep, batch.likeliest))
        self.texts: list[list[int] | None] = [None] * batch.size

    def step(self, drafts: bool) -> list[StepRecord]:
        batch, buffers, started = self.batch, self.buffers, running()
        active = batch.active
        self._begin(active)
        if drafts:
            self.drafting.draft(buffers, batch, active)
        drafted = running()
        buffers.verify()
        seconds = drafted - started, running() - drafted
        records = [StepRecord([], 0, 0, *seconds) for _ in range(batch.size)]
        for row in active:
            accepted, count = int(buffers.accepted[row]), int(buffers.count[row])
            tokens = batch.append(row, buffers.written[row, : accepted + 1].tolist())
            batch.budget.observe(row, count - 1, accepted)
            records[row] = StepRecord(tokens, min(accepted, len(tokens)), count - 1, *seconds)
            if batch.likeliest:
                likeliest = buffers.kept[row, :count, : batch.likeliest].tolist()
                nodes = buffers.token[row, :count].tolist()
                batch.verified[row] += zip(nodes, likeliest, strict=True)
        if self.keep:
            path = np.arange(batch.size)[:, None], buffers.path, slice(self.keep)
            kept = buffers.kept[path], buffers.kept_chances[path], self.lm.config.vocab_size
            for record, topk in zip(records, topk_logits.records(*kept), strict=True):
                record.topk = topk
        return records

    def _begin(self, active: list[int]) -> None:
        """Make each active row's pending token its only node."""
        batch, buffers = self.batch, self.buffers
        buffers.count[:] = buffers.end[:] = 0
        for row in active:
            text = batch.texts[row]
            if text is not self.texts[row]:  # another prompt has taken the row
                self.texts[row] = text
                sampling, seed = batch.samplings[row], batch.seeds[row]
                buffers.unread[row] = 0
                buffers.draw[row] = sampling.temperature, sampling.top_p, sampling.top_k, seed
            buffers.base[row], buffers.token[row, 0] = len(text) - 1, text[-1]
            buffers.count[row], buffers.has_state[row, 0] = 1, 0

    def unread(self, source: int, row: int, prefix_T: Tensor) -> list[Chunk]:
        """Chunks of a shared prefix that the drafting layer has not read, with the kept states."""
        buffers, end, exit_layer = self.buffers, len(prefix_T), self.drafting.exit_layer
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
