"""Kangaroo: the target's shallow layers and a small adapter draft a chain until confidence falls.

Shapes: B rows, N draft nodes, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kangaroo import adapter_files
from kangaroo.adapter import Adapter, DraftHead
from kangaroo.batch import Batch
from kangaroo.cache import Block, KVCache
from kangaroo.drafters.base import DrafterConfig
from kangaroo.errors import AdapterMismatch, ConfigError
from kangaroo.model import LM
from kangaroo.sampling import Rule, Sampling, pick, warp
from kangaroo.tree import Draft, Tree
from kangaroo.verify import Verdict


@dataclass
class KangarooConfig(DrafterConfig):
    """Chain decoding with early stopping (arXiv 2404.18911, sections 3.1 and 3.2).

    Args:
        adapter: folder or hub id of the adapter; `untrained:` and an exit layer is one that drafts
            nonsense in as much time as a trained one.
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
        """Errors: `AdapterMismatch` and whatever `kangaroo.adapter_files.load` raises."""
        exit_layer = self._untrained()
        if exit_layer is not None:
            adapter = Adapter(lm, exit_layer).start_from(lm).to(lm.device, lm.dtype)
            adapter.eval().requires_grad_(False)
            return Kangaroo(lm, adapter, self.steps, self.threshold)
        config = adapter_files.read_config(self.adapter)
        if self.exit_layer not in (None, config.exit_layer):
            raise AdapterMismatch(
                f"adapter '{self.adapter}' was trained for exit layer {config.exit_layer} of "
                f"{config.n_layers}, and drafter.exit_layer={self.exit_layer} was asked for. Leave "
                "it unset, or pass drafter.adapter= one of that exit layer."
            )
        adapter, head = adapter_files.load(self.adapter, lm, self.vocabulary)
        return Kangaroo(lm, adapter, self.steps, self.threshold, head)

    def _untrained(self) -> int | None:
        kind, _, layer = self.adapter.partition(":")
        return int(layer) if kind == "untrained" and layer.isdecimal() else None

    def settings(self) -> dict[str, Any]:
        if self._untrained() is not None:
            return super().settings()
        return super().settings() | {"weights": adapter_files.weights_hash(self.adapter)}

    def made_by(self) -> dict[str, Any]:
        """With `start`, where the training went on from another adapter, whose own comes on top."""
        if self._untrained() is not None:
            return {}
        training = adapter_files.read_config(self.adapter).training
        told = {
            "trained_positions": training.get("progress", {}).get("assistant_tokens"),
            "epochs": training.get("trainer", {}).get("epochs"),
            "start": training.get("adapter", {}).get("start"),
        }
        return {name: value for name, value in told.items() if value is not None}


class Kangaroo:
    """Drafts on the target's own cache and hands its shallow states to verification.

    The adapter's first pass of a round takes, beside the pending token, a *window* of the committed
    tokens before it: as many as may have changed. That is the one before, which it has not seen
    after a round that was accepted whole; and if it is fused, all that the last round may have
    drafted, since their deep states are known now. Writing the others again changes nothing, and
    shapes are static.
    """

    def __init__(
        self, lm: LM, adapter: Adapter, steps: int = 6, threshold: float = 0.6,
        head: DraftHead | None = None,
    ):  # fmt: skip
        if steps < 1:
            raise ConfigError(f"drafter.steps must be 1 or more, not {steps}; see drafter=vanilla.")
        if not 0 <= threshold < 1:
            raise ConfigError(f"drafter.threshold must lie in [0, 1), not {threshold}.")
        self.lm, self.adapter = lm, adapter.compile_like(lm)
        self.head = (head or DraftHead(lm, adapter.head)).compile_like(lm)
        self.steps, self.threshold = steps, threshold
        self.exit_layer = adapter.exit_layer
        self.shallow = range(adapter.exit_layer)
        self.fused = adapter.architecture.fused
        taps = (adapter.exit_layer, lm.n_layers) if self.fused else (adapter.exit_layer,)
        self.taps: tuple[int, ...] = taps
        self.max_nodes = steps
        self.window = steps if self.fused else 1
        self.target_cache: KVCache | None = None

    def begin(self, batch: Batch) -> None:
        device = self.lm.layer_devices[self.exit_layer - 1]
        if self.target_cache is not batch.cache:  # the engine keeps a cache that is large enough
            self.target_cache = batch.cache
            self.cache = self.lm.cache_like(batch.size, batch.n_slots, [device])
        size, hidden_size = batch.size, self.lm.config.hidden_size
        # shallow states of the tokens before the pending one, W the window
        self.shallow_BWD = torch.zeros(
            size, self.window, hidden_size, dtype=self.lm.dtype, device=device
        )
        # and, for a fused adapter, the deep states that it reads with these and the pending token
        self.deep_BUD = torch.zeros(
            size, self.window + 1, hidden_size, dtype=self.lm.dtype, device=device
        )

    def prefill(
        self, batch: Batch, tokens_1T: Tensor, block: Block, taps: dict[int, Tensor]
    ) -> None:
        f_1TD, rows, window = taps[self.exit_layer], block.rows, self.window
        block, before_1TD = block.to(f_1TD.device), None
        if self.fused:
            known = torch.cat([self.deep_BUD[rows], self._deep(taps)], 1)
            before_1TD = known[:, window:-1] * started(block)
            self.deep_BUD[rows] = known[:, -window - 1 :]
        self.adapter(f_1TD, before_1TD, block, self.cache.at(block))
        self.shallow_BWD[rows] = torch.cat([self.shallow_BWD[rows], f_1TD], 1)[:, -window:]

    def propose(self, batch: Batch) -> Draft:
        """Draft until every row's confidence has fallen to the threshold, or `steps` tokens."""
        rejection = batch.sampling.rule is Rule.rejection and not batch.sampling.greedy
        window, steps = self.window, self.steps
        pending_B1, active_B1 = batch.last(1), ~batch.done_B[:, None]
        # one block for the round: the window, the pending token, the drafts
        tree = Tree.chain(window + 1 + steps, batch.length_B.device)
        below = 0 if min(batch.lengths) > window else window
        block = self.lm.block(tree, batch.base_B - window, batch.used + steps, batch.n_slots, below)
        tokens, valid, probs = [pending_B1], [torch.ones_like(active_B1)], []
        hidden = [self._shallow(pending_B1, batch, block.narrow(window, 1))]
        at = block.narrow(0, window + 1).to(hidden[0].device)
        f_BND = torch.cat([self.shallow_BWD, hidden[0]], 1)
        deep_BND = self.deep_BUD * started(at) if self.fused else None
        for step in range(1, steps + 1):
            below_at = block.narrow(window + step, 1)
            token_B1, logits_BK, adapted_B1D, f_B1D = self._draft(
                batch, step, f_BND, deep_BND, at, below_at
            )
            tokens.append(token_B1)
            valid.append(active_B1)
            hidden.append(f_B1D)
            if rejection:
                logits_B1V = self.head.spread(logits_BK)[:, None]
                probs.append(warp(logits_B1V, batch.sampling).softmax(-1))
            f_BND, at = f_B1D, below_at.to(f_B1D.device)
            deep_BND = adapted_B1D if self.fused else None
            if self.threshold > 0 and step < steps:
                active_B1 = active_B1 & (confidence(logits_BK) > self.threshold)
                if not active_B1.any():  # the one sync a drafted token that a threshold costs
                    break
        return Draft(
            tokens_BN=torch.cat(tokens, 1),
            tree=Tree.chain(len(tokens), batch.length_B.device),
            valid_BN=torch.cat(valid, 1),
            hidden_BND=torch.cat(hidden, 1),
            entry=self.exit_layer,
            probs_BNV=torch.cat([torch.zeros_like(probs[0]), *probs], 1) if probs else None,
            block=block.narrow(window, len(tokens)),
        )

    def observe(
        self, batch: Batch, draft: Draft, verdict: Verdict, taps: dict[int, Tensor]
    ) -> None:
        new_BND = taps[self.exit_layer]
        past_B = verdict.best_B.to(new_BND.device) + 1
        self.shallow_BWD = slide(self.shallow_BWD, new_BND, past_B)
        if self.fused:
            self.deep_BUD = slide(self.deep_BUD, self._deep(taps), past_B)

    def _draft(
        self, batch: Batch, step: int, f_BND: Tensor, deep_BND: Tensor | None, at: Block,
        below: Block,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """One draft token: itself, its logits, and the states that the next one starts from.

        Args:
            at: where the adapter's input lies; its last token is the one before.
            below: where the new token passes the shallow layers.
        """

        def work(
            f_BND: Tensor, seeds_B: Tensor, positions_B1: Tensor, *rest: Tensor
        ) -> tuple[Tensor, ...]:
            here, there = at.with_tensors(*rest[:5]), below.with_tensors(*rest[5:10])
            deep_BND = rest[10] if self.fused else None
            adapted_B1D = self.adapter(f_BND, deep_BND, here, self.cache.at(here))[:, -1:]
            logits_BK = self.head(adapted_B1D[:, 0])
            token_B1 = self._pick(logits_BK, batch.sampling, positions_B1, seeds_B)
            return token_B1, logits_BK, adapted_B1D, self._shallow(token_B1, batch, there)

        positions_B1 = batch.length_B[:, None] + step - 1
        tensors = (*at.tensors(), *below.tensors(), *(() if deep_BND is None else (deep_BND,)))
        inputs = (f_BND, batch.seeds_B, positions_B1, *tensors)
        if self.lm.graphs is None or not self.lm.graphs.take(f_BND, at):
            token_B1, logits_BK, adapted_B1D, f_B1D = work(*inputs)
        else:
            key = (id(batch.cache), id(self), f_BND.shape, at.extent, repr(batch.sampling))
            token_B1, logits_BK, adapted_B1D, f_B1D = self.lm.graphs(key, work, *inputs)
        return token_B1, logits_BK, adapted_B1D, f_B1D

    def _pick(
        self, logits_BK: Tensor, sampling: Sampling, positions_B1: Tensor, seeds_B: Tensor
    ) -> Tensor:
        """The token that the target would choose from these logits, `[B, 1]`."""
        if sampling.greedy:
            return self.head.token_of(logits_BK.argmax(-1, keepdim=True))
        return pick(self.head.spread(logits_BK)[:, None], positions_B1, sampling, seeds_B)

    def _shallow(self, tokens_B1: Tensor, batch: Batch, block: Block) -> Tensor:
        return self.lm.run(self.lm.embed(tokens_B1), batch.cache, block, self.shallow)[0]

    def _deep(self, taps: dict[int, Tensor]) -> Tensor:
        return self.lm.norm(taps[self.lm.n_layers]).to(self.deep_BUD.device)


def slide(window_BWD: Tensor, new_BND: Tensor, past_B: Tensor) -> Tensor:
    """A window over a text that has grown by `past` of the new states: again its last ones."""
    known = torch.cat([window_BWD, new_BND], 1)
    index_BW = past_B[:, None] + torch.arange(window_BWD.shape[1], device=past_B.device)
    return known.gather(1, index_BW[..., None].expand(-1, -1, known.shape[-1]))


def started(block: Block) -> Tensor:
    """`[R, N, 1]`: false at the first token of a text, which has none before it."""
    return (block.positions_RT > 0)[..., None]


def confidence(logits_BK: Tensor) -> Tensor:
    """The top-1 probability `[B, 1]`, read before temperature and filters."""
    return logits_BK.float().softmax(-1).amax(-1, keepdim=True)
