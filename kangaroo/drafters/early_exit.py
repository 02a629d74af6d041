"""Drafting with a layer on top of the target's shallow layers, and the layer's KV cache.

Shapes: B rows, N draft nodes, P nodes of a path, T tokens, W window, S slots, D hidden size.
"""

from collections.abc import Callable, Collection, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from kangaroo.cpu.huge_pages import zeros
from kangaroo.drafters.base import ChainConfig
from kangaroo.drafters.chain import EarlyStopping
from kangaroo.engine import costs
from kangaroo.engine.backend import Key
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import BUCKET, ForwardMeta, Taps, Tensors
from kangaroo.engine.tree import Draft, Verdict
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.memory import weight_bytes

# What the layer reads next: shallow states, and deep states if it reads such.
Read = tuple[Tensor, Tensor | None]


class EarlyExit(EarlyStopping):
    """Drafts on the target's own cache and hands its shallow states to verification.

    The layer's first pass of a round reads the pending token and a *window* of committed tokens
    before it: one, which the layer has not seen if the last draft was accepted whole; or, if it
    reads deep states, as many as a draft has, since verification has computed theirs. Writing the
    keys of the others again changes nothing, and keeps shapes static. After a tree, or another
    drafter's draft, the layer reads the accepted path."""

    tokens_of_pass = 1  # draft tokens from one pass

    def __init__(
        self, lm: TargetModel, adapter: Layer, options: ChainConfig, head: DraftHead | None = None
    ):
        super().__init__(lm, options.steps, options.threshold)
        self.adapter = adapter.accelerate(lm)
        self.head = (head or adapter.draft_heads(lm, None)[0]).accelerate(lm)
        self.exit_layer = adapter.exit_layer
        self.deep_taps = adapter.deep_taps
        self.shallow = range(adapter.exit_layer)
        self.reads_deep = bool(self.deep_taps)
        self.taps = (self.exit_layer, *self.deep_taps)
        # unless it is measured, the cost of a draft token is the share of weights that it reads
        total = weight_bytes(*lm.layers, lm.head)
        self.shallow_cost = weight_bytes(*lm.layers[: self.exit_layer]) / total
        drafting = {*adapter.parameters(), *self.head.weights}
        self.draft_cost = self.shallow_cost + sum(weight.nbytes for weight in drafting) / total
        self.window = self.steps if self.reads_deep else 1
        self.rereads = self.window - 1  # the window's states; the prompt's last token is new
        self.cache = lm.new_cache(0, 0, [])
        # at each slot of the text what the layer reads of the target's deep states, if it does
        self.deep_BSD = torch.zeros(0, 0, 0, dtype=lm.dtype, device=adapter.home(lm))
        # by row, the exit states of a prompt that the layer has not read, and their first position
        self.prompts: dict[int, tuple[Tensor, int]] = {}

    def begin(self, batch: Batch) -> None:
        self.prompts.clear()
        if batch.budget.vanilla_seconds is not None and (self.needs_costs or batch.size > 1):
            self.draft_cost = self._measured_cost(batch.budget.vanilla_seconds())
        size = batch.size
        if (self.cache.batch_size, self.cache.n_slots) != (size, batch.n_slots):
            self.cache = self.lm.new_cache(0, 0, [])  # frees the old one's memory for the new one
            devices = [self.adapter.home(self.lm)] * self.adapter.depth
            self.cache = self.lm.new_cache(size, batch.n_slots, devices)
            if self.reads_deep:
                shape = (size, batch.n_slots, self.lm.config.hidden_size)
                self.deep_BSD = zeros(shape, self.lm.dtype, self.deep_BSD.device)
        self.shallow_BWD = self.deep_BSD.new_zeros(size, self.window, self.lm.config.hidden_size)

    def _measured_cost(self, vanilla_seconds: float) -> float:
        return self.draft_seconds / self.tokens_of_pass / vanilla_seconds

    @cached_property
    def draft_seconds(self) -> float:
        """The measured time of a chain's token after a text of usual length."""
        lm = self.lm
        head = self.head
        length = costs.context(lm)
        cache = lm.new_cache(1, length + BUCKET)
        draft_cache = lm.new_cache(1, cache.n_slots, [lm.device] * self.adapter.depth)

        def draft(f_11D: Tensor, meta: ForwardMeta) -> Tensor:
            deep_11D = f_11D if self.reads_deep else None
            adapted_1D = self.adapter(f_11D, deep_11D, meta, draft_cache.at(meta))[:, 0]
            chosen = head.choose(adapted_1D)
            token_11 = chosen[0] if chosen else head.token_of(head(adapted_1D).argmax(-1, True))
            return lm.run(lm.embed(token_11), cache, meta, self.shallow)[0]

        with torch.inference_mode():
            return min(costs.timed(lm, [1], length, (cache, draft_cache), draft)[1])

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        self.read_prompts()
        self.cache.copy(source, row, count)
        if self.reads_deep:
            self.deep_BSD[row, :count] = self.deep_BSD[source, :count]

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        """Keep the chunk's states; the layer reads them before the next chunk or draft."""
        f_1TD = taps[self.exit_layer]
        deep = [taps[tap] for tap in self.deep_taps if tap in taps]
        if deep:  # otherwise they are kept already
            self.keep_deep(meta.slots_RT, deep, meta.rows)
        first = int(meta.slots_RT[0, 0])
        row = meta.rows.start
        if row in self.prompts and self.prompts[row][1] < first:  # a chunk of the same prompt
            self.read_prompts([row])
        self.prompts[row] = f_1TD, first
        shallow_1XD = torch.cat([self.shallow_BWD[meta.rows], f_1TD], 1)
        self.shallow_BWD[meta.rows] = shallow_1XD[:, -self.window :]

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        """Update the windows; after a tree or another drafter's draft the layer's cache, too."""
        path: ForwardMeta | None = None
        if draft is not self.proposed or not draft.tree.is_chain:
            self.read_prompts()
            path = self.path_meta(batch, draft)
        self.proposed = None
        assert draft.meta is not None
        self.shallow_BWD = self.replay(
            batch,
            ("observe", draft.tree.is_chain),
            partial(self.keep_accepted, draft.tree.is_chain),
            self.shallow_BWD,
            verdict,
            draft.meta.slots_RT[:, :1],
            [taps[tap] for tap in self.taps],
            path,
            tokens=draft.tokens_BN.numel(),
        )

    def keep_accepted(
        self,
        is_chain: bool,
        window_BWD: Tensor,
        verdict: Verdict,
        root_B1: Tensor,
        states: list[Tensor],
        path: ForwardMeta | None,
    ) -> Tensor:
        """The new window. The deep states of accepted tokens and a `path`'s keys are kept."""
        if not is_chain:
            states = [x.take_along_dim(verdict.path_BP[..., None].to(x.device), 1) for x in states]
        new_BPD, *deep = states
        if deep:
            path_P = torch.arange(deep[0].shape[1], device=root_B1.device)
            self.keep_deep(root_B1 + path_P, deep)
        f_BND = torch.cat([window_BWD, new_BPD], 1)
        if path is not None:
            path = path.to(new_BPD.device)
            self.adapter.write_kv(f_BND, self.deep_before(path), path, self.cache.at(path))
        first_B1 = verdict.count_B.to(f_BND.device)[:, None] + 1  # of the new window
        new_BW = first_B1 + torch.arange(window_BWD.shape[1], device=f_BND.device)
        return f_BND.take_along_dim(new_BW[..., None], 1)

    def begin_round(self, batch: Batch, meta: ForwardMeta) -> tuple[ForwardMeta, Tensors]:
        """The inputs of all steps of a round: its block, and `Batch.draws`."""
        self.catch_up(batch)
        tokens = batch.size * self.window
        return self.replay(batch, ("round",), None, meta, batch.draws, tokens=tokens)

    def replay(
        self, batch: Batch, key: Key, work: Callable[..., Any] | None, *inputs: Any, **options: Any
    ) -> Any:
        """`Backend.replay` of work on the target's and the layer's cache."""
        return self.lm.backend.replay((batch.cache, self.cache), key, work, *inputs, **options)

    def start(
        self, batch: Batch, pending_B1: Tensor, meta: ForwardMeta, window_BWD: Tensor
    ) -> tuple[Tensor, Read]:
        """The pending token's shallow state, and the layer's first input: the window's and this
        state, `[B, W + 1, D]`, and deep states, if it reads such. `meta` begins with the window."""
        f_B1D = self.run_shallow(pending_B1, batch, meta.narrow(self.window, 1))
        deep_BND = self.deep_before(meta.narrow(0, self.window + 1).to(f_B1D.device))
        return f_B1D, (torch.cat([window_BWD, f_B1D], 1), deep_BND)

    def catch_up(self, batch: Batch) -> bool:
        """Read new prompts, and let the head follow the texts; true if its vocabulary changed."""
        self.read_prompts()
        return self.head.follow([batch.texts[row] for row in batch.active])

    def read_prompts(self, rows: Collection[int] | None = None) -> None:
        """Write the layer's keys and values of new prompts, by default in all rows."""
        for row in list(self.prompts) if rows is None else rows:
            f_1TD, first = self.prompts[row]
            for part_1TD in f_1TD.split(self.lm.prompt_chunk(1), 1):
                end = first + part_1TD.shape[1]
                meta = self.lm.chunk(first, end, row, self.cache.n_slots).to(f_1TD.device)
                self.adapter.write_kv(part_1TD, self.deep_before(meta), meta, self.cache.at(meta))
                first = end
            del self.prompts[row]  # not before, since an error may stop this

    def run_shallow(self, tokens_BN: Tensor, batch: Batch, meta: ForwardMeta) -> Tensor:
        """The states of tokens at the exit layer, `[B, N, D]`."""
        return self.lm.run(self.lm.embed(tokens_BN), batch.cache, meta, self.shallow)[0]

    def keep_deep(
        self, slots_RN: Tensor, states: Sequence[Tensor], rows: slice = slice(None)
    ) -> None:
        """Keep what the layer reads of the target's states at `deep_taps`."""
        deep_RSD = self.deep_BSD[rows]
        slots_RN1 = slots_RN.to(self.deep_BSD.device)[..., None]
        new_RND = self.adapter.read_deep(self.lm, states).to(deep_RSD.device)
        deep_RSD.scatter_(1, slots_RN1.expand_as(new_RND), new_RND)

    def deep_before(self, meta: ForwardMeta) -> Tensor | None:
        """What is kept of the token before each of these, zeros at first; None if nothing is."""
        if not self.reads_deep:
            return None
        deep_RSD = self.deep_BSD[meta.rows]
        before_RT = (meta.positions_RT - 1).clamp(min=0).expand(len(deep_RSD), -1)
        return deep_RSD.take_along_dim(before_RT[..., None], 1) * (meta.positions_RT > 0)[..., None]
