"""The adapter, which turns the exit layer's hidden states into states that an LM head can read.

The paper's is `f' = f + Attention(Norm(f))` with the logits `Head(Norm(f'))`: one attention layer,
two norms, no feed-forward part, and the target's LM head (Kangaroo, arXiv 2404.18911, section 3.2).
The paper's ablations add or swap parts; `fused` is ours.

Shapes: B rows, N tokens of a block, D hidden size, K draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.heads import base
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, ConfigError
from kangaroo.utils.ranges import Layers


@dataclass
class AdapterHeadConfig(base.HeadConfig):
    """An adapter's parts; the defaults are the paper's.

    Args:
        attention: have attention layers of the target's shape.
        attention_layers: how many, one after another. A further layer costs a third of a
            feed-forward part and gains more (docs/training.md).
        feed_forward: a feed-forward part like the target's, after attention or alone.
        own_head: a trained LM head, initialized from the target's, instead of the target's.
        fused: also read the input of the target's last layer at the previous token, or the
            adapter's own state if that token is drafted (after EAGLE-3, arXiv 2503.01840).
    """

    attention: bool = True
    attention_layers: Layers = 1
    feed_forward: bool = False
    own_head: bool = False
    fused: bool = False

    drafter: ClassVar[str] = "kangaroo"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.attention or self.feed_forward):
            raise ConfigError(
                "an adapter without parts drafts nothing: leave adapter.architecture.attention or "
                "feed_forward on."
            )
        if self.attention_layers > 1 and not self.attention:
            raise ConfigError("adapter.architecture.attention_layers > 1 needs attention=true.")

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "Adapter":
        return Adapter(lm, exit_layer, self, vocabulary_K)

    def steps(self, draft_steps: int) -> int:
        if draft_steps > 1 and not self.fused and self.fixed_steps is None:
            raise ConfigError(
                f"adapter.draft_steps={draft_steps} needs adapter.architecture.fused=true: the "
                "states that other adapters read are the same in every draft step."
            )
        return super().steps(draft_steps)

    def with_parts_of(self, other: "AdapterHeadConfig") -> "AdapterHeadConfig":
        """These parts, and those of another adapter."""
        layers = max(self.attention_layers, other.attention_layers)
        feed_forward = self.feed_forward or other.feed_forward
        fused = self.fused or other.fused
        return replace(self, attention_layers=layers, feed_forward=feed_forward, fused=fused)

    def graded_steps(self, most: int) -> int:
        return super().graded_steps(most) if self.fused or self.fixed_steps else 1


class Adapter(Layer):
    """A drafting layer at an exit layer; see `HeadConfig.build`."""

    architecture: AdapterHeadConfig

    def __init__(
        self,
        lm: TargetModel,
        exit_layer: int,
        architecture: AdapterHeadConfig | None = None,
        vocabulary_K: Tensor | None = None,
    ):
        parts = architecture or AdapterHeadConfig()
        if not 0 <= exit_layer < lm.n_layers:
            raise AdapterMismatch(
                f"exit layer {exit_layer} does not lie inside the target's {lm.n_layers} layers; "
                f"choose 0, the embeddings, to {lm.n_layers - 1}."
            )
        deep_tap = lm.n_layers - 1 if parts.fused else None
        super().__init__(lm, parts, exit_layer, deep_tap, like=exit_layer)
        if parts.fused:
            self.shallow_norm = lm.new_norm()
            self.deep_norm = lm.new_norm()
            self.fuse = nn.Linear(2 * lm.config.hidden_size, lm.config.hidden_size, bias=False)
        if parts.attention:
            self.input_norm = lm.new_norm()
            self.attention = self.new_attention(lm)
        for index in range(1, parts.attention_layers):
            parts_of_layer = {"norm": lm.new_norm(), "attention": self.new_attention(lm, index)}
            self.further.append(nn.ModuleDict(parts_of_layer))
        if parts.feed_forward:
            self.middle_norm = lm.new_norm()
            self.feed_forward = type(lm.layers[exit_layer].mlp)(lm.config)
        self.norm = lm.new_norm()
        self.head = base.new_head(lm, vocabulary_K) if parts.own_head else None

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Copy the layers above the exit, and the target's final norm times 0.3. With the whole
        norm the untrained adapter is confidently wrong: on SmolLM2 the loss starts at 18 nats
        instead of 8, and after 35,000 tokens it is 9.0 instead of 6.2."""
        self.copy_layers(lm, self.exit_layer)
        assert self.norm is not None
        self.norm.load_state_dict(lm.hf.model.norm.state_dict())
        with torch.no_grad():
            offset = 1 - lm.new_norm().get_parameter("weight")  # Gemma multiplies by 1 + weight
            weight = self.norm.get_parameter("weight")
            weight.copy_((weight + offset) * 0.3 - offset)
            if self.architecture.fused:
                self.fuse.weight.zero_()  # at first it reads the shallow state alone
        if self.head is not None:
            base.copy_head(self.head, lm, vocabulary_K)
        return self

    def grown(self, lm: TargetModel, architecture: AdapterHeadConfig) -> "Adapter":
        """This adapter with further parts of `architecture`, which output zeros until trained."""
        grown = Adapter(lm, self.exit_layer, self.architecture.with_parts_of(architecture))
        grown.head = self.head
        grown.copy_layers(lm, self.exit_layer)
        for name, weight in grown.named_parameters():
            is_further = name.startswith("further.") and name.endswith("o_proj.weight")
            if is_further or name == "fuse.weight" or "down_proj" in name:
                nn.init.zeros_(weight)
        grown.load_state_dict(self.state_dict(), strict=False)
        return grown

    def own_heads(self) -> list[nn.Module]:
        return [] if self.head is None else [self.head]

    def accelerate(self, lm: TargetModel) -> Self:
        super().accelerate(lm)
        if self.architecture.fused:
            norms = [norm.get_parameter("weight") for norm in (self.shallow_norm, self.deep_norm)]
            self.fast_fusing = lm.backend.fusing(norms, self.fuse.weight)
        return self

    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        if not self.architecture.fused:
            return f_BND
        assert deep_BND is not None
        if self.fast_fusing and not torch.is_grad_enabled():
            return self.fast_fusing(f_BND, deep_BND)
        both = torch.cat([self.shallow_norm(f_BND), self.deep_norm(deep_BND)], -1)
        return f_BND + self.fuse(both)
