"""Kangaroo: the target's shallow layers and a small adapter draft a chain until confidence falls.

Shapes: B rows, N draft nodes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo import adapter as adapters
from kangaroo.adapter import Adapter
from kangaroo.batch import Batch
from kangaroo.cache import Block
from kangaroo.drafters.base import DrafterConfig
from kangaroo.errors import AdapterMismatch, ConfigError
from kangaroo.model import LM
from kangaroo.sampling import Rule, pick, warp
from kangaroo.tree import Draft, Tree
from kangaroo.verify import Verdict


@dataclass
class KangarooConfig(DrafterConfig):
    """Chain decoding with early stopping (arXiv 2404.18911, sections 3.1 and 3.2).

    Args:
        adapter: folder or hub id of the adapter.
        exit_layer: refuse an adapter of another exit layer; null takes the adapter's own.
        steps: at most this many draft tokens a round (the paper's gamma).
        threshold: stop drafting once the top-1 probability falls to this (the paper's eta); 0 never
            stops early.
        vocabulary: draft from this many of the most frequent tokens alone, so that a draft step
            reads that part of the head (FR-Spec, arXiv 2502.14856); 0 is all, null takes what the
            adapter was saved with.
    """

    name: str = "kangaroo"
    adapter: str = "???"
    exit_layer: int | None = None
    steps: int = 6
    threshold: float = 0.6
    vocabulary: int | None = None

    def build(self, lm: LM) -> Kangaroo:
        """Errors: `AdapterMismatch` and whatever `kangaroo.adapter.load` raises."""
        adapter, config = adapters.load(self.adapter, lm)
        if self.exit_layer not in (None, config.exit_layer):
            raise AdapterMismatch(
                f"adapter '{self.adapter}' was trained for exit layer {config.exit_layer} of "
                f"{config.n_layers}, and drafter.exit_layer={self.exit_layer} was asked for. Leave "
                "it unset, or pass drafter.adapter= one of that exit layer."
            )
        size = config.vocabulary if self.vocabulary is None else self.vocabulary
        vocabulary_K = adapters.draft_vocabulary(self.adapter, size) if size else None
        return Kangaroo(lm, adapter, self.steps, self.threshold, vocabulary_K)

    def settings(self) -> dict[str, Any]:
        return super().settings() | {"weights": adapters.weights_hash(self.adapter)}


class Kangaroo:
    """Drafts on the target's own cache and hands its shallow states to verification.

    Args:
        vocabulary_K: the tokens to draft from; None is all of them, by the target's head as it is.
    """

    def __init__(
        self, lm: LM, adapter: Adapter, steps: int = 6, threshold: float = 0.6,
        vocabulary_K: Tensor | None = None,
    ):  # fmt: skip
        if steps < 1:
            raise ConfigError(f"drafter.steps must be 1 or more, not {steps}; see drafter=vanilla.")
        if not 0 <= threshold < 1:
            raise ConfigError(f"drafter.threshold must lie in [0, 1), not {threshold}.")
        self.lm, self.adapter = lm, adapter
        self.steps, self.threshold = steps, threshold
        self.exit_layer = adapter.exit_layer
        self.shallow = range(adapter.exit_layer)
        self.taps: tuple[int, ...] = (adapter.exit_layer,)
        self.max_nodes = steps
        self.vocabulary = None if vocabulary_K is None else len(vocabulary_K)
        self.vocabulary_K = None if vocabulary_K is None else vocabulary_K.to(lm.device)
        # rows of the target's head, gathered once: a copy of this part alone, in memory alone
        self.rows_KD = None if vocabulary_K is None else lm.head.weight[vocabulary_K].to(lm.device)

    def begin(self, batch: Batch) -> None:
        device = self.lm.layer_devices[self.exit_layer - 1]
        self.cache = self.lm.cache_like(batch.size, batch.n_slots, [device])
        hidden_size = self.lm.config.hidden_size
        # the shallow state of the token before the pending one
        self.previous_B1D = torch.zeros(
            batch.size, 1, hidden_size, dtype=self.lm.dtype, device=device
        )

    def prefill(
        self, batch: Batch, tokens_1T: Tensor, block: Block, taps: dict[int, Tensor]
    ) -> None:
        hidden_1TD = taps[self.exit_layer]
        self.adapter(hidden_1TD, self.cache, block.to(hidden_1TD.device))
        self.previous_B1D[block.rows] = hidden_1TD[:, -1:]

    def propose(self, batch: Batch) -> Draft:
        """Draft until every row's confidence has fallen to the threshold, or `steps` tokens."""
        rejection = batch.sampling.rule is Rule.rejection and not batch.sampling.greedy
        # One block for the round: the token before the pending one, the pending one, the drafts.
        # The adapter's first pass takes the first two: after a round that was accepted whole it has
        # not seen the older one, and otherwise writing that again changes nothing.
        tree = Tree.chain(self.steps + 2, batch.length_B.device)
        block = self.lm.block(tree, batch.base_B - 1, batch.used + self.steps, batch.n_slots)
        tokens, probs = [batch.last(1)], []
        valid = [torch.ones_like(tokens[0], dtype=torch.bool)]
        hidden = [self._shallow(tokens[0], batch, block.narrow(1, 1))]
        state_BND = torch.cat([self.previous_B1D, hidden[0]], 1)
        active_B1 = ~batch.done_B[:, None]
        for step in range(self.steps):
            width = state_BND.shape[1]
            at = block.narrow(step + 2 - width, width)
            adapted_B1D = self.adapter(state_BND, self.cache, at.to(state_BND.device))[:, -1:]
            logits_B1V = self._read_out(adapted_B1D)
            positions_B1 = at.positions_RT[:, -1:] + 1
            tokens.append(pick(logits_B1V, positions_B1, batch.sampling, batch.seeds_B))
            valid.append(active_B1)
            if rejection:
                probs.append(warp(logits_B1V, batch.sampling).softmax(-1))
            state_BND = self._shallow(tokens[-1], batch, block.narrow(step + 2, 1))
            hidden.append(state_BND)
            if self.threshold > 0 and step + 1 < self.steps:
                active_B1 = active_B1 & (confidence(logits_B1V) > self.threshold)
                if not active_B1.any():  # the one sync a drafted token that a threshold costs
                    break
        return Draft(
            tokens_BN=torch.cat(tokens, 1),
            tree=Tree.chain(len(tokens), batch.length_B.device),
            valid_BN=torch.cat(valid, 1),
            hidden_BND=torch.cat(hidden, 1),
            entry=self.exit_layer,
            probs_BNV=torch.cat([torch.zeros_like(probs[0]), *probs], 1) if rejection else None,
        )

    def observe(
        self, batch: Batch, draft: Draft, verdict: Verdict, taps: dict[int, Tensor]
    ) -> None:
        hidden_BND = draft.hidden_BND
        assert hidden_BND is not None
        index_B11 = verdict.best_B[:, None, None].to(hidden_BND.device)
        self.previous_B1D = hidden_BND.gather(1, index_B11.expand(-1, -1, hidden_BND.shape[-1]))

    def _read_out(self, adapted_B1D: Tensor) -> Tensor:
        """Draft logits over the whole vocabulary, -inf outside the draft vocabulary."""
        if self.vocabulary_K is None or self.rows_KD is None:
            return self.lm.read_out(adapted_B1D)
        part_BK = F.linear(adapted_B1D[:, 0].to(self.lm.device), self.rows_KD)
        logits_BV = part_BK.new_full((len(part_BK), self.lm.config.vocab_size), -torch.inf)
        return logits_BV.index_copy_(1, self.vocabulary_K, part_BK)[:, None]

    def _shallow(self, tokens_B1: Tensor, batch: Batch, block: Block) -> Tensor:
        return self.lm.run(self.lm.embed(tokens_B1), batch.cache, block, self.shallow)[0]


def confidence(logits_BNV: Tensor) -> Tensor:
    """The top-1 probability `[B, N]`, read before temperature and filters."""
    logits_BNV = logits_BNV.float()
    return (logits_BNV.amax(-1) - logits_BNV.logsumexp(-1)).exp()
