"""The adapter: from the exit layer's hidden state to one that a head can read.

The paper's is `f' = f + Attention(Norm(f))`, drafted logits `Head(Norm(f'))`: one attention layer,
two norms, no feed-forward part, and the target's own LM head (Kangaroo, arXiv 2404.18911, section
3.2). Its ablations add or swap parts; `fused` is ours.

Shapes: B rows, N tokens of a block, D hidden size, K draft vocabulary.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.cpu import native
from kangaroo.heads import base
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch, ConfigError
from kangaroo.utils.ranges import Layers


@dataclass
class AdapterHeadConfig(base.HeadConfig):
    """What an adapter is made of; the default is the paper's.

    Args:
        attention, attention_layers: of the target's shape, each above the one before. A further one
            costs a third of a feed-forward part, and brings more (docs/training.md).
        feed_forward: the target's feed-forward part after attention, or alone.
        own_head: an LM head of its own, begun as the target's, instead of the target's.
        fused: also read what goes into the target's last layer at the token before, and for a
            token that is only drafted the adapter's own state in its place (after EAGLE-3, arXiv
            2503.01840). Of a prompt it costs nothing, since that layer's keys need it.
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
                "an adapter of no part drafts nothing: leave adapter.architecture.attention or "
                "feed_forward on."
            )
        if self.attention_layers > 1 and not self.attention:
            raise ConfigError("adapter.architecture.attention_layers > 1 needs attention=true.")

    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "Adapter":
        return Adapter(lm, exit_layer, self, vocabulary_K)

    def steps(self, draft_steps: int) -> int:
        if draft_steps > 1 and not self.fused and self.own_steps is None:
            raise ConfigError(
                f"adapter.draft_steps={draft_steps} needs adapter.architecture.fused=true: the "
                "states that other adapters read are the same at every draft step."
            )
        return super().steps(draft_steps)

    def graded_steps(self, most: int) -> int:
        return super().graded_steps(most) if self.fused or self.own_steps else 1


class Adapter(Layer):
    """What drafts at an exit layer; see `HeadConfig.build`."""

    architecture: AdapterHeadConfig

    def __init__(
        self,
        lm: TargetModel,
        exit_layer: int,
        architecture: AdapterHeadConfig | None = None,
        vocabulary_K: Tensor | None = None,
    ):
        parts = architecture or AdapterHeadConfig()
        if not 0 < exit_layer < lm.n_layers:
            raise AdapterMismatch(
                f"exit layer {exit_layer} does not lie inside the target's {lm.n_layers} layers; "
                f"choose 1 to {lm.n_layers - 1}."
            )
        deep_tap = lm.n_layers - 1 if parts.fused else None
        super().__init__(lm, parts, exit_layer, deep_tap, like=exit_layer)
        layer, size = lm.layers[exit_layer], lm.config.hidden_size
        if parts.fused:
            self.shallow_norm, self.deep_norm = lm.new_norm(), lm.new_norm()
            self.fuse = nn.Linear(2 * size, size, bias=False)
        if parts.attention:
            self.input_norm = lm.new_norm()
            self.attention = type(layer.self_attn)(lm.config, layer_idx=0)
        for place in range(1, parts.attention_layers):
            attention = type(layer.self_attn)(lm.config, layer_idx=place)
            self.further.append(nn.ModuleDict({"norm": lm.new_norm(), "attention": attention}))
        if parts.feed_forward:
            self.middle_norm = lm.new_norm()
            self.feed_forward = type(layer.mlp)(lm.config)
        self.norm = lm.new_norm()
        self.head = base.new_head(lm, vocabulary_K) if parts.own_head else None
        self.native_fusing: native.Fusing | None = None

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Copy the layers above the exit and, damped, the target's final norm: at full strength it
        makes the untrained adapter surely wrong. On SmolLM2 the loss starts at 18 nats, damped at
        8, and 35 k tokens later it is 9.0 against 6.2."""
        self.copy_layers(lm, self.exit_layer)
        assert self.norm is not None
        self.norm.load_state_dict(lm.hf.model.norm.state_dict())
        with torch.no_grad():
            zero = 1 - lm.new_norm().get_parameter("weight")  # Gemma's weights count from one
            weight = self.norm.get_parameter("weight")
            weight.copy_((weight + zero) * 0.3 - zero)
            if self.architecture.fused:
                self.fuse.weight.zero_()  # begins as if it saw the shallow state alone
        if self.head is not None:
            base.copy_head(self.head, lm, vocabulary_K)
        return self

    def grown(self, lm: TargetModel, wanted: AdapterHeadConfig) -> "Adapter":
        """The same adapter with the parts that `wanted` has too, which add nothing until they are
        trained."""
        now = self.architecture
        parts = replace(
            now,
            attention_layers=max(now.attention_layers, wanted.attention_layers),
            feed_forward=now.feed_forward or wanted.feed_forward,
            fused=now.fused or wanted.fused,
        )
        grown = Adapter(lm, self.exit_layer, parts)
        grown.head = self.head
        grown.copy_layers(lm, self.exit_layer)
        last: list[Tensor]
        last = [attention.get_parameter("o_proj.weight") for _, attention in grown.attentions[1:]]
        if parts.feed_forward:
            weights = grown.get_submodule("feed_forward").named_parameters()
            last += [weight for name, weight in weights if "down_proj" in name]
        if parts.fused:
            last.append(grown.fuse.weight)
        for weight in last:
            nn.init.zeros_(weight)
        grown.load_state_dict(self.state_dict(), strict=False)
        return grown

    def own_heads(self) -> list[nn.Module]:
        return [] if self.head is None else [self.head]

    def accelerate(self, lm: TargetModel) -> Self:
        super().accelerate(lm)
        if self.architecture.fused:
            norms = [norm.get_parameter("weight") for norm in (self.shallow_norm, self.deep_norm)]
            self.native_fusing = lm.acceleration.part("Fusing", [*norms, self.fuse.weight])
        return self

    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        if not self.architecture.fused:
            return f_BND
        assert deep_BND is not None
        if self.native_fusing and not torch.is_grad_enabled():
            return self.native_fusing(f_BND, deep_BND)
        both = torch.cat([self.shallow_norm(f_BND), self.deep_norm(deep_BND)], -1)
        return f_BND + self.fuse(both)
