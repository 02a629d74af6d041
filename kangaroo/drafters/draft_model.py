"""Speculative sampling with a draft model: a smaller model of the same vocabulary drafts a chain.

Shapes: B rows, N draft nodes, T tokens of a prefill chunk, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import inf

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from kangaroo.drafters.autoregressive import Autoregressive, WholeHead
from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.engine import prefill
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget
from kangaroo.engine.cache import ForwardMeta, KVCache, Taps
from kangaroo.engine.tree import Draft, Verdict
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import draft_model
from kangaroo.models.loading import Dtype, ModelConfig, load, load_tokenizer
from kangaroo.models.quantizing import Quantization
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.memory import weight_bytes
from kangaroo.utils.ranges import DraftSize

NODES_READ = 63  # nodes of the pass whose cost tells that of reading a prompt
HOPED_RIGHT = 20  # right drafts that are counted before any was tried, since only trying tells


@dataclass
class DraftModelConfig(ChainConfig):
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318), with either a model or an adapter.

    Args:
        model: hub id, folder, or any other `model.path` of a model with the target's tokens.
        adapter: an adapter of the target; with the layers below it, it is such a model.
        quantization: of `model`'s layers; None keeps the checkpoint's format.
    """

    name: str = "draft_model"
    model: str | None = None
    adapter: str | None = None
    quantization: Quantization | None = None
    steps: DraftSize = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            self.adapter = None
        elif self.quantization is not None:
            raise ConfigError(
                f"drafter.quantization={self.quantization.value} is for a drafter.model; an "
                "adapter drafts with the target's own layers."
            )

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: `ConfigError`; what loading a model or adapter raises."""
        if self.adapter is not None:
            adapter, _ = adapter_files.load(self.adapter, lm, Adapter, vocabulary=0)
            hf = draft_model(lm, adapter)
        elif self.model is not None:
            dtype = Dtype(str(lm.dtype).removeprefix("torch."))
            config = ModelConfig("draft", self.model, dtype=dtype, device=str(lm.device))
            hf, _ = load(replace(config, quantization=self.quantization))
            check_tokens(lm.config, hf.config)
        else:
            raise ConfigError("drafter=draft_model needs drafter.model= or drafter.adapter=.")
        draft_lm = TargetModel(hf)
        draft_lm = draft_lm.compile_for_decoding() if lm.backend.is_compiled else draft_lm
        return DraftModel(lm, draft_lm, self.steps, self.threshold)

    @property
    def trained(self) -> str | None:
        return self.adapter


def tokens_to_repay(budget: Budget, steps: int, drafting: float, rows: int) -> float:
    """How many tokens a text must still get for each one that a draft model reads first, if drafts,
    as often right as those of the session so far, are to save that time. At first all are hoped to
    be right. A token takes the share `drafting` of the target's; `rows` texts are decoded."""
    if budget.always:
        return 0.0
    costs = budget.cost(rows, steps)
    right = (budget.first_right + HOPED_RIGHT) / (budget.first_tried + HOPED_RIGHT)
    written = list(accumulate(right**n for n in range(steps + 1)))  # by a round's drafted tokens
    saved = max(1 - (costs[n] + n * drafting) / written[n] for n in range(1, steps + 1))
    reading = drafting * budget.cost(1, NODES_READ)[-1] / (NODES_READ + 1)
    step = budget.cost(1, rows - 1)[-1] / rows  # a row's part of a step, in a lone text's steps
    return budget.min_gain_per_step(rows) * reading / (saved * step) if saved > 0 else inf


def check_tokens(target: PretrainedConfig, draft: PretrainedConfig) -> None:
    """Raise `ConfigError` unless each token id stands for the same token in both models; their
    vocabularies may be padded to different sizes. Without a tokenizer of each, as with random
    weights, only the sizes are compared."""
    expected = _tokens(target)
    drafted = _tokens(draft)
    difference = None
    if expected is not None and drafted is not None:
        if expected != drafted:
            i = min(i for i, _ in expected.items() ^ drafted.items())
            difference = f"its token {i} is {drafted.get(i)!r}, the target's {expected.get(i)!r}"
    elif draft.vocab_size != target.vocab_size:
        difference = f"it has {draft.vocab_size} of them, the target {target.vocab_size}"
    if difference is not None:
        raise ConfigError(
            f"the draft model '{draft.name_or_path}' does not have the tokens of the target "
            f"'{target.name_or_path}': {difference}. Pass drafter.model= a smaller model of the "
            "target's own family, or drafter.adapter=."
        )


def _tokens(config: PretrainedConfig) -> dict[int, str] | None:
    """A model's tokens by their ids, special ones included; None if it has no tokenizer."""
    if not config.name_or_path:  # a model in memory
        return None
    tokenizer = load_tokenizer(config.name_or_path, getattr(config, "_commit_hash", None))
    if tokenizer is None:
        return None
    return {i: token for token, i in tokenizer.get_vocab().items() if i < config.vocab_size}


class DraftModel(Autoregressive):
    """Has a KV cache of its own, and reads a text only when it drafts. The first pass of a round
    reads the last two committed tokens, since the last token of a draft that is accepted whole is
    in no cache. Its vocabulary may be padded to another size than the target's."""

    def __init__(
        self, lm: TargetModel, draft_lm: TargetModel, steps: int = 4, threshold: float | str = 0.0
    ):
        super().__init__(draft_lm, steps, threshold, window=1)
        of_target = weight_bytes(*lm.layers, lm.head)
        self.draft_cost = weight_bytes(*draft_lm.layers, draft_lm.head) / of_target
        self.cache = draft_lm.new_cache(0, 0)
        self.vocab_size = draft_lm.config.vocab_size
        self.head = WholeHead(draft_lm, lm.config.vocab_size)

    def begin(self, batch: Batch) -> None:
        # how many tokens each row's cache has read, with those of the last draft, which native
        # rounds list apart
        self.texts = batch.texts
        self.n_read = [0] * batch.size
        self.drafted: list[list[int]] = [[]] * batch.size
        if (self.cache.batch_size, self.cache.n_slots) != (batch.size, batch.n_slots):
            self.cache = self.lm.new_cache(0, 0)  # frees the old one's memory for the new one
            self.cache = self.lm.new_cache(batch.size, batch.n_slots)

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        self.read_text(source, count)
        self.cache.copy(source, row, count)
        self.n_read[row] = count

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        """Forget the row's previous text from here on; the prompt is read before a draft."""
        row = meta.rows.start
        self.n_read[row] = min(self.n_read[row], int(meta.positions_RT[0, 0]))
        self.drafted[row] = []

    def read_text(self, row: int, end: int) -> None:
        """Write the keys and values that a row's cache lacks for its text before `end`."""
        chunk = self.lm.prompt_chunk(end)
        while (start := self.n_read[row]) < end:
            tokens = self.texts[row][start:end][:chunk]
            tokens_1T = self._clamp(torch.tensor([tokens], device=self.lm.device))
            prefill.read(self.lm, tokens_1T, start, cache=self.cache, row=row, taps=())
            self.n_read[row] = start + len(tokens)
            self.drafted[row] = []

    def catch_up(self, batch: Batch, drafted: int) -> None:
        """Read what the caches lack before the window; passes then read `drafted` draft tokens."""
        for row in batch.active:
            self.read_text(row, len(batch.texts[row]) - 1 - self.window)
            self.n_read[row] = len(batch.texts[row]) + drafted

    def caches(self, batch: Batch) -> tuple[KVCache, ...]:
        return (self.cache,)

    def run(self, batch: Batch, tokens_BN: Tensor, meta: ForwardMeta) -> Tensor:
        x_BND = self.lm.embed(self._clamp(tokens_BN))
        return self.lm.run(x_BND, self.cache, meta, range(self.lm.n_layers))[0]

    def _clamp(self, tokens_BN: Tensor) -> Tensor:
        """The tokens, with others for ids that only the target's padding has."""
        return tokens_BN.clamp(max=self.vocab_size - 1) if self.head.padding > 0 else tokens_BN

    def propose(self, batch: Batch) -> Draft:
        self.forget_draft(batch)
        return super().propose(batch)

    def forget_draft(self, batch: Batch) -> None:
        """The last draft, after the window, may have been rejected."""
        for row in batch.active:
            self.n_read[row] = min(self.n_read[row], len(batch.texts[row]) - 1 - self.window)

    def limits(self, batch: Batch, rows: Sequence[int], share: float = 1.0) -> np.ndarray:
        idle = []
        if self.auto:
            needed = tokens_to_repay(batch.budget, self.steps, share * self.draft_cost, len(rows))
            for row in rows:
                length = len(batch.texts[row])
                unread, left = length - self.n_read[row], batch.limits[row] - length
                if unread > self.steps and left < needed * unread:
                    idle.append(row)
        if len(idle) == len(rows):  # the rest would take longer than this
            return np.ones((batch.size, self.steps), np.float32)
        limits = super().limits(batch, rows, share)
        limits[idle] = 1
        return limits

    def draft(self, batch: Batch, limits: np.ndarray) -> Draft:
        self.catch_up(batch, self.steps - 1)
        return super().draft(batch, limits)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        if draft.tree.size == 1:
            self.forget_draft(batch)
        elif draft is not self.proposed:  # another drafter's, whose tokens this cache lacks
            self.catch_up(batch, draft.tree.max_depth)
            meta = self.path_meta(batch, draft)
            self.run(batch, batch.tokens_BS.gather(1, meta.positions_RT), meta)
        self.proposed = None
