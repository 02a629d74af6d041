"""Block: one pass of the shallow layers, the adapter and the head makes a whole draft.

Shapes: B rows, N places of the draft, W window, D hidden size, K draft vocabulary, V vocabulary, R
rank of the table.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.drafters.base import ChainConfig, Drafter, EarlyExitConfig
from kangaroo.drafters.chain import Chain, DraftToken
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Tensors
from kangaroo.engine.tree import Draft
from kangaroo.heads.block import BlockHead, BlockHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.packed import weight_rows
from kangaroo.models.target import TargetModel


@dataclass
class BlockConfig(EarlyExitConfig):
    """A chain from one pass, of at most as many tokens as the head has places; `adapter` is a head
    that `python train.py adapter=block` trained."""

    name: str = "block"

    layer_type: ClassVar[type[BlockHead]] = BlockHead
    layer_config: ClassVar[type[BlockHeadConfig]] = BlockHeadConfig

    def build(self, lm: TargetModel) -> Drafter:
        layer, head = self.load(lm)
        return Block(lm, layer, self, head)


class Block(EarlyExit, Chain):
    """The shallow layers run on the pending token alone; verification runs them on the draft. The
    adapter's keys of the places are scratch: the next pass writes the keys of the draft's tokens,
    so the window is as long as a draft."""

    adapter: BlockHead

    def __init__(self, lm: TargetModel, adapter: BlockHead, options: ChainConfig, head: DraftHead):
        steps = min(options.steps, adapter.architecture.places)
        super().__init__(lm, adapter, replace(options, steps=steps), head)
        self.window = steps
        self.rereads = steps - 1
        self.draft_cost /= steps
        self.tokens_of_pass = steps
        table_VD = weight_rows(lm.hf.model.embed_tokens)
        parts = table_VD.to(adapter.home(lm)).split(4096)  # bounds memory
        neighbours_VR = torch.cat([adapter.neighbours(part_XD) for part_XD in parts])
        self.neighbours_VR = neighbours_VR.detach().to(lm.device)
        self.table_KR = adapter.table.weight.detach().to(lm.device)

    def tokens(self, batch: Batch, meta: ForwardMeta) -> Iterator[DraftToken]:
        meta, draws = self.begin_round(batch, meta)
        work = partial(self.run_block, batch)
        logits_BNK = self.replay(batch, ("block",), work, batch.last(1), meta, self.shallow_BWD)
        tokens = self.tokens_from(batch, logits_BNK, draws)
        # with CUDA graphs all tokens are chosen before the host reads the first one
        yield from list(tokens) if self.lm.backend.records else tokens

    def run_block(
        self, batch: Batch, pending_B1: Tensor, meta: ForwardMeta, window_BWD: Tensor
    ) -> Tensor:
        """Logits of all places, `[B, N, K]`, without the influence of the tokens before them."""
        _, read = self.start(batch, pending_B1, meta, window_BWD)
        f_BND, deep_BND = self.adapter.add_places(*read, self.steps - 1)
        block = meta.narrow(0, self.window + self.steps).to(f_BND.device)
        states_BND = self.adapter(f_BND, deep_BND, block, self.cache.at(block))[:, self.window :]
        return self.head(states_BND.flatten(0, 1)).unflatten(0, states_BND.shape[:2])

    def tokens_from(self, batch: Batch, logits_BNK: Tensor, draws: Tensors) -> Iterator[DraftToken]:
        """The draft's tokens, each of which depends on the one before it."""
        previous_B1 = batch.last(1)
        for step in range(1, self.steps + 1):
            key = ("place", step, batch.sampling.kind)
            work = partial(self.draft_token, batch, step)
            token = self.replay(batch, key, work, logits_BNK, draws, previous_B1)
            previous_B1 = token.id_B1
            yield token

    def draft_token(
        self, batch: Batch, step: int, logits_BNK: Tensor, draws: Tensors, previous_B1: Tensor
    ) -> DraftToken:
        """The token of one place; from the second on, the token before it moves the logits."""
        logits_BK = logits_BNK[:, step - 1]
        if step > 1:
            near_BR = self.neighbours_VR[previous_B1[:, 0]]
            logits_BK = logits_BK + F.linear(near_BR, self.table_KR).to(logits_BK)
        return self.draw_from(batch, step, logits_BK, draws)

    def finish(self, draft: Draft, meta: ForwardMeta) -> Draft:
        return replace(draft, meta=meta)
