"""EAGLE-3's head: one decoder layer on embeddings and on a mix of three of the target's states.

`fuse` joins the target's states at three depths to one. Queries, keys and values read a token's
normed embedding, and beside it the normed state of the token before it: the fused one, or within a
draft the layer's own. The residual connection carries that state alone. The logits are
`Head(Norm(state))`, with a norm and an LM head of its own (EAGLE-3, arXiv 2503.01840, section 3,
and its released code, whose layer is Llama's for every target).

Shapes: B rows, N tokens of a block, T tokens of a text, M tokens, D hidden size, K draft
vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
from typing_extensions import Self

from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.heads import base
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.eagle_head import as_released
from kangaroo.heads.layer import Layer
from kangaroo.models.attention import ATTENTION
from kangaroo.models.target import TargetModel
from kangaroo.utils.ranges import Count, Positive


@dataclass
class Eagle3HeadConfig(base.HeadConfig):
    """In what an imported head may differ from the target; null is as in the target."""

    feed_forward_size: Count | None = None  # of the layer's feed-forward part
    rope_base: Positive | None = None  # of the layer's RoPE
    norm_eps: Positive | None = None  # of its norms

    drafter: ClassVar[str] = "eagle3"

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "Eagle3Head":
        return Eagle3Head(lm, self, vocabulary_K)

    def fixed_exit(self, lm: TargetModel) -> int:
        return 0  # it reads embeddings


def fused_taps(n_layers: int) -> tuple[int, int, int]:
    """The numbers of layers below the three fused states; some coincide in small models."""
    return min(2, n_layers), n_layers // 2, max(n_layers - 3, 0)


class Eagle3Head(Layer):
    """A layer that starts at random, with a head like the target's; see `HeadConfig.build`."""

    architecture: Eagle3HeadConfig

    def __init__(
        self,
        lm: TargetModel,
        architecture: Eagle3HeadConfig | None = None,
        vocabulary_K: Tensor | None = None,
    ):
        parts = architecture or Eagle3HeadConfig()
        super().__init__(lm, parts, 0, None, like=lm.n_layers - 1)
        self.deep_taps = fused_taps(lm.n_layers)
        self.taps = 0, *self.deep_taps
        self.windowed = False
        self.residual_multiplier = 1
        self.first_seen = 1
        own_sizes = parts.feed_forward_size not in (None, lm.config.intermediate_size)
        self.mixes_natively = not own_sizes and parts.rope_base is None and parts.norm_eps is None
        size, eps = lm.config.hidden_size, parts.norm_eps or lm.config.rms_norm_eps
        llama = LlamaConfig(
            hidden_size=size,
            intermediate_size=parts.feed_forward_size or lm.config.intermediate_size,
            num_attention_heads=lm.config.num_attention_heads,
            num_key_value_heads=lm.config.num_key_value_heads,
            head_dim=lm.sizes().head_size,
        )
        llama._attn_implementation = ATTENTION
        self.fuse = nn.Linear(3 * size, size, bias=False)
        self.embedding_norm, self.state_norm = LlamaRMSNorm(size, eps), LlamaRMSNorm(size, eps)
        self.attention = LlamaAttention(llama, layer_idx=0)
        for name in ("q_proj", "k_proj", "v_proj"):
            outputs = getattr(self.attention, name).out_features
            setattr(self.attention, name, nn.Linear(2 * size, outputs, bias=False))
        self.middle_norm = LlamaRMSNorm(size, eps)
        self.feed_forward = LlamaMLP(llama)
        self.head_norm = LlamaRMSNorm(size, eps)
        self.head = base.new_head(lm, vocabulary_K)

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Copy the target's head and final norm. (With `adapter.start=random` these, too, are
        random, as in the released code.)"""
        base.copy_head(self.head, lm, vocabulary_K)
        offset = 1 - lm.new_norm().get_parameter("weight")  # Gemma multiplies by 1 + weight
        with torch.no_grad():
            self.head_norm.weight.copy_(lm.hf.model.norm.weight + offset)
        return self

    def own_heads(self) -> list[nn.Module]:
        return [self.head]

    def draft_heads(self, lm: TargetModel, vocabulary_K: Tensor | None) -> list[DraftHead]:
        # its norm is the head's, since the next step of the layer reads states without it
        return [DraftHead(lm, self.head, vocabulary_K, self.head_norm)]

    def accelerate(self, lm: TargetModel) -> Self:
        """Draft by a backend that has such layers, if sizes, RoPE and epsilon are the target's."""
        if lm.backend.reads_pairs and self.mixes_natively:
            super().accelerate(lm)
            norms = [self.embedding_norm.weight, self.state_norm.weight]
            self.fast_fusing = lm.backend.fusing(norms, None)
        return self

    def read_deep(self, lm: TargetModel, states: Sequence[Tensor]) -> Tensor:
        return self.fuse(torch.cat([state.to(self.fuse.weight.device) for state in states], -1))

    def placed(self, meta: ForwardMeta) -> ForwardMeta:
        return as_released(meta, sees_first=False, rope_base=self.architecture.rope_base)

    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        assert deep_BND is not None
        return deep_BND

    def pairs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        return torch.cat([self.embedding_norm(f_BND), self.state_norm(deep_BND)], -1)

    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """See `Trainable.states`; the states at `deep_taps` are fused here, to train `fuse`."""
        fused_BTD = self.fuse(torch.cat([taps[tap] for tap in self.deep_taps], -1))
        return super().states(taps, fused_BTD, meta, steps)
