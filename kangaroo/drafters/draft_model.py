"""Speculative sampling with a draft model: a smaller model of the same vocabulary drafts a chain.

Shapes: B rows, N draft nodes, T tokens of a prefill chunk, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from kangaroo.drafters.autoregressive import Autoregressive, WholeHead
from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.engine import prefill
from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, KVCache, Taps
from kangaroo.engine.tree import Draft, Verdict
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.export import draft_model
from kangaroo.models.loading import Dtype, ModelConfig, load, own_tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.memory import weight_bytes
from kangaroo.utils.ranges import DraftSize


@dataclass
class DraftModelConfig(ChainConfig):
    """Speculative sampling (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv
    2302.01318). Give either a model or an adapter.

    Args:
        model: hub id, folder, or any other `model.path` of a model with the target's tokens.
        adapter: of the target; exported with the layers below it, it is such a model.
    """

    name: str = "draft_model"
    model: str | None = None
    adapter: str | None = None
    steps: DraftSize = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is not None:
            self.adapter = None

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: `ConfigError`; what loading a model or adapter raises."""
        if self.adapter is not None:
            adapter, _ = adapter_files.load(self.adapter, lm, Adapter, vocabulary=0)
            hf = draft_model(lm, adapter)
        elif self.model is not None:
            dtype = Dtype(str(lm.dtype).removeprefix("torch."))
            hf, _ = load(ModelConfig("draft", self.model, dtype=dtype, device=str(lm.device)))
            check_tokens(lm.config, hf.config)
        else:
            raise ConfigError("drafter=draft_model needs drafter.model= or drafter.adapter=.")
        draft_lm = TargetModel(hf)
        draft_lm = draft_lm.compile_for_decoding() if lm.acceleration else draft_lm
        return DraftModel(lm, draft_lm, self.steps, self.threshold)

    @property
    def trained(self) -> str | None:
        return self.adapter


def check_tokens(target: PretrainedConfig, draft: PretrainedConfig) -> None:
    """Raise `ConfigError` unless each token id stands for the same token in both models, whose
    vocabularies may be padded to different sizes. Where one has no tokenizer, random weights for
    instance, the sizes alone are compared."""
    wanted, drafted, difference = _tokens(target), _tokens(draft), None
    if wanted is not None and drafted is not None:
        for i in sorted(wanted.keys() | drafted.keys()):
            if drafted.get(i) != wanted.get(i):
                difference = f"its token {i} is {drafted.get(i)!r}, the target's {wanted.get(i)!r}"
                break
    elif draft.vocab_size != target.vocab_size:
        difference = f"it has {draft.vocab_size} of them, the target {target.vocab_size}"
    if difference is not None:
        raise ConfigError(
            f"the draft model '{draft.name_or_path}' does not have the tokens of the target "
            f"'{target.name_or_path}': {difference}. Pass drafter.model= a smaller model of the "
            "target's own family, or drafter.adapter=."
        )


def _tokens(config: PretrainedConfig) -> dict[int, str] | None:
    """Those that a model can write, by their ids, special ones too; None where nothing tells."""
    path, revision = config.name_or_path, getattr(config, "_commit_hash", None)
    tokenizer = own_tokenizer(path, revision) if path else None  # without one it is in memory
    if tokenizer is None:
        return None
    return {i: token for token, i in tokenizer.get_vocab().items() if i < config.vocab_size}


class DraftModel(Autoregressive):
    """Keeps its own cache. The first pass of a round takes the last two committed tokens: after
    a draft that was accepted whole the older one is in no cache. Tokens of earlier rounds without a
    draft are read before; native rounds read all in that pass. Its vocabulary may be padded to
    another size than the target's.

    Attributes:
        read: how many tokens of each row's text are in the cache.
        is_current: whether the last round has brought all but the last two tokens there.
    """

    def __init__(
        self, lm: TargetModel, draft_lm: TargetModel, steps: int = 4, threshold: float | str = 0.0
    ):
        super().__init__(draft_lm, steps, threshold, window=1)
        whole = weight_bytes(*lm.layers, lm.head)
        self.draft_cost = weight_bytes(*draft_lm.layers, draft_lm.head) / whole  # weights read
        self.cache = draft_lm.new_cache(0, 0)
        self.vocab_size = draft_lm.config.vocab_size
        self.padding = lm.config.vocab_size - self.vocab_size  # below 0 the target's is smaller
        self.head = WholeHead(draft_lm, lm.config.vocab_size)
        self.prompts: list[tuple[Tensor, int, int]] = []  # not read yet: as of `read_chunk`

    def begin(self, batch: Batch) -> None:
        self.prompts.clear()
        self.read, self.is_current = [0] * batch.size, False
        if (self.cache.batch_size, self.cache.n_slots) != (batch.size, batch.n_slots):
            self.cache = self.lm.new_cache(0, 0)  # the new one may need the old one's memory
            self.cache = self.lm.new_cache(batch.size, batch.n_slots)

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        self.read_prompts()
        self.cache.copy(source, row, count)
        self.read[row] = min(self.read[source], count)

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        """Keep the prompt; it is read when the first token is out."""
        first, row = int(meta.positions_RT[0, 0]), meta.rows.start
        self.read[row] = min(self.read[row], first)
        self.prompts.append((tokens_1T, first, row))

    def read_prompts(self) -> None:
        """Write the keys of new prompts."""
        for prompt in self.prompts:
            self.read_chunk(*prompt)
        self.prompts.clear()

    def read_chunk(self, tokens_1T: Tensor, first: int, row: int) -> None:
        """Write the keys of a part of a row's text."""
        prefill.read(self.lm, self._known(tokens_1T), first, self.cache, row)
        if self.read[row] >= first:
            self.read[row] = first + tokens_1T.shape[1]

    def read_text(self, text: list[int], row: int, end: int) -> None:
        """Write the keys of a row's text that are missing below `end`."""
        for first in range(self.read[row], end, chunk := self.lm.prompt_chunk(end)):
            part = text[first : min(first + chunk, end)]
            self.read_chunk(torch.tensor([part], device=self.lm.device), first, row)

    def caches(self, batch: Batch) -> tuple[KVCache, ...]:
        return (self.cache,)

    def run(self, batch: Batch, tokens_BN: Tensor, meta: ForwardMeta) -> Tensor:
        x_BND = self.lm.embed(self._known(tokens_BN))
        return self.lm.run(x_BND, self.cache, meta, range(self.lm.n_layers))[0]

    def _known(self, tokens_BN: Tensor) -> Tensor:
        """What the target only has room for may be in a text, if hardly ever."""
        return tokens_BN.clamp(max=self.vocab_size - 1) if self.padding > 0 else tokens_BN

    def propose(self, batch: Batch) -> Draft:
        self.read_prompts()
        if self.is_current:
            self.read = [max(len(text) - 2, 0) for text in batch.texts]
        draft = super().propose(batch)
        self.is_current, self.proposed = self.proposed is not None, draft
        return draft

    def draft(self, batch: Batch, limits: np.ndarray) -> Draft:
        for row in batch.active:
            self.read_text(batch.texts[row], row, len(batch.texts[row]) - 2)
        return super().draft(batch, limits)

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        if draft is not self.proposed:  # another drafter's: its tokens are in no cache here
            self.read_prompts()
            meta = self.path_meta(batch, draft)
            tokens_BN = batch.tokens_BS.gather(1, meta.positions_RT)
            self.run(batch, tokens_BN, meta)
            self.is_current = True
        self.proposed = None
