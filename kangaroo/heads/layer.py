"""A drafting layer: parts of a decoder layer of the target's own classes. In training it runs over
whole texts as it runs when drafting, all positions and draft steps at once.

Shapes: B rows, R rows of a block (1 or B), N tokens of a block, T tokens of a text, D hidden size.
"""

from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache
from typing_extensions import Self

from kangaroo.cpu import native
from kangaroo.cpu.native import LayerWeights
from kangaroo.engine.cache import BlockCache, ForwardMeta, Taps
from kangaroo.heads.base import HeadConfig, Trainable
from kangaroo.models import layer_weights as of_target
from kangaroo.models.target import TargetModel


class Layer(Trainable):
    """Attention layers, a feed-forward part, or both, each with the norm before it that it has, and
    the norm at the end; a subclass makes them, and says what goes in. With a `deep_tap` it also
    reads that state of the token before each, or its own in that place.

    Of a family that has norms after its attention (OLMo 2, Gemma) it has none there. Where a layer
    of the target adds only a part of what it computes (Granite), so does this. A window is that of
    the target's layer `like`; when drafting it also looks back no more than `attention_window`
    tokens (`ForwardMeta.within`)."""

    def __init__(
        self, lm: TargetModel, parts: HeadConfig, exit_layer: int, deep_tap: int | None, like: int
    ):
        super().__init__(parts, exit_layer, [exit_layer], deep_tap)
        self.windowed = lm.windowed[like]
        self.added = getattr(lm.config, "residual_multiplier", 1)
        self.input_norm: nn.Module | None = None
        self.attention: nn.Module | None = None
        self.further = nn.ModuleList()  # attention layers, each with the norm before it
        self.middle_norm: nn.Module | None = None
        self.feed_forward: nn.Module | None = None
        self.norm: nn.Module | None = None
        self.native_layer: native.Stack | None = None

    @property
    def depth(self) -> int:
        """Of how many layers there are keys and values."""
        return 1 + len(self.further)

    @property
    def attentions(self) -> list[tuple[nn.Module | None, nn.Module]]:
        """Attention layers with the norms before them, the lowest first."""
        if self.attention is None:
            return []
        further = [(x.get_submodule("norm"), x.get_submodule("attention")) for x in self.further]
        return [(self.input_norm, self.attention), *further]

    @abstractmethod
    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        """What goes into the layer, `[B, N, D]`; see `forward`."""

    def forward(
        self,
        f_BND: Tensor,
        deep_BND: Tensor | None,
        meta: ForwardMeta,
        past: BlockCache | DynamicCache | None,
    ) -> Tensor:
        """What a head reads, `[B, N, D]`, from the target's state after `exit_layer` layers, and
        if it reads one from the deep state of the token before each, zeros at the start. Keys and
        values are kept in `past`, in training one draft step's after another's; None sees the block
        alone."""
        x_BND, native_layer = self.mix_inputs(f_BND, deep_BND), self.native_layer
        meta = meta if isinstance(past, DynamicCache) else meta.for_layer(self.windowed)
        if native_layer and isinstance(past, BlockCache) and native_layer.takes(x_BND, meta):
            return native_layer(x_BND, past.cache, meta, range(self.depth), weight(self.norm))
        meta = meta if isinstance(past, DynamicCache) else meta.within(self.attention_window)
        for norm, attention in self.attentions:
            attended_BND, _ = attention(
                hidden_states=x_BND if norm is None else norm(x_BND),
                position_embeddings=meta.rope,
                attention_mask=meta.bias_R1TE,
                past_key_values=past,
            )
            x_BND = x_BND + self.added * attended_BND
        if self.feed_forward is not None:
            assert self.middle_norm is not None
            x_BND = x_BND + self.added * self.feed_forward(self.middle_norm(x_BND))
        return x_BND if self.norm is None else self.norm(x_BND)

    def write_kv(
        self, f_BND: Tensor, deep_BND: Tensor | None, meta: ForwardMeta, past: BlockCache
    ) -> None:
        """Write keys and values where no head reads; see `forward`."""
        if self.attention is None:
            return
        x_BND = self.mix_inputs(f_BND, deep_BND)
        if self.native_layer and self.native_layer.takes(x_BND, meta):
            *below, last = range(self.depth)
            if below:
                x_BND = self.native_layer(x_BND, past.cache, meta, range(last))
            self.native_layer(x_BND, past.cache, meta, range(last, last + 1), keys_alone=True)
        else:
            self(f_BND, deep_BND, meta, past)

    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """Drafts read the target's deep states up to their beginning, then the layer's. As in
        decoding, keys before the draft are those of step 1, and within it of their own steps
        (training-time test, EAGLE-3, arXiv 2503.01840)."""
        f_BTD, past, meta = taps[self.exit_layer], DynamicCache(), meta.for_layer(self.windowed)
        states: list[Tensor] = []
        for step in range(1, steps + 1):
            deep_BTD = before(deep_BTD, meta.positions_RT)
            deep_BTD = self(f_BTD, deep_BTD, at_step(meta, step, f_BTD), past)
            states.append(deep_BTD)
        return states

    def copy_layers(self, lm: TargetModel, first: int) -> None:
        """Begin with the weights of a layer of the target, and attention of those above it."""
        layer = lm.layers[first]
        _, middle_norm = of_target.norms_before(layer)
        parts = [(self.middle_norm, middle_norm), (self.feed_forward, layer.mlp)]
        for place, (norm, attention) in enumerate(self.attentions, first):
            layer = lm.layers[min(place, lm.n_layers - 1)]
            parts += [(norm, of_target.norms_before(layer)[0]), (attention, layer.self_attn)]
        for part, theirs in parts:
            if part is not None and theirs is not None:
                of_target.copy_weights(part, theirs, lm.dtype)

    def accelerate(self, lm: TargetModel) -> Self:
        """Draft in native code if the target decodes in it."""
        self.native_layer = None
        if not (lm.acceleration.library or lm.acceleration.kernels):
            return self
        layers: list[dict[str, Any]] = [
            of_target.attention_weights(attention) | {"attention_norm": weight(norm)}
            for norm, attention in self.attentions
        ] or [{}]
        if self.feed_forward is not None:
            layers[-1] |= of_target.feed_forward_weights(self.feed_forward)
            layers[-1]["feed_forward_norm"] = weight(self.middle_norm)
        self.native_layer = lm.acceleration.part(
            "Stack", [LayerWeights(**parts) for parts in layers], window=self.attention_window
        )
        return self


def weight(norm: nn.Module | None) -> Tensor | None:
    """Of a norm, if there is one."""
    return None if norm is None else norm.get_parameter("weight")


def at_step(meta: ForwardMeta, step: int, like: Tensor) -> ForwardMeta:
    """The block of a text at a draft step, whose keys come after those of all steps before."""
    if step == 1:
        return meta
    if meta.bias_R1TE is None:
        width, here = meta.positions_RT.shape[1], meta.positions_RT.device
        seen_RTT = torch.ones(1, width, width, dtype=torch.bool, device=here).tril()
    else:
        bias_RTT = meta.bias_R1TE[:, 0]
        seen_RTT = bias_RTT if bias_RTT.dtype == torch.bool else bias_RTT == 0
    # of step 1 what lies before the draft; of each later step the draft's one token of that step
    steps = [seen_RTT.tril(1 - step)]
    steps += [seen_RTT.tril(back).triu(back) for back in range(2 - step, 1)]
    hidden_RTE = ~torch.cat(steps, -1)
    bias_RTE = like.new_zeros(hidden_RTE.shape).masked_fill_(hidden_RTE, -torch.inf)
    return replace(meta, bias_R1TE=bias_RTE[:, None])


def before(x_BTD: Tensor, positions_RT: Tensor) -> Tensor:
    """What stood one token earlier; zeros at the start of a text."""
    shifted_BTD = F.pad(x_BTD[:, :-1], (0, 0, 1, 0))
    return shifted_BTD * (positions_RT > 0)[..., None]
