"""A drafting layer: parts of a decoder layer of the target's own classes.

Shapes: B rows, N tokens of a block, T tokens of a text, D hidden size.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from kangaroo.cpu import native
from kangaroo.cpu.native import LayerWeights
from kangaroo.engine.cache import BlockCache, ForwardMeta, PastKeys
from kangaroo.heads.base import HeadConfig, Trainable
from kangaroo.heads.unroll import unroll
from kangaroo.models.layer_weights import attention_weights, feed_forward_weights
from kangaroo.models.target import TargetModel

if TYPE_CHECKING:
    from ctypes import Structure

    from typing_extensions import Self


class Layer(Trainable):
    """Attention, a feed-forward part, or both, each with the norm before it that it has, and the
    norm at the end; a subclass makes them, and says what goes in. There may be further attention
    layers between the first one and the feed-forward part.

    Being of the target's own classes, biases, GQA and RoPE follow the target.

    With a `deep_tap` it also reads that state of the token before each, or its own in that place.
    """

    def __init__(self, architecture: HeadConfig, exit_layer: int, deep_tap: int | None):
        super().__init__(architecture, exit_layer, [exit_layer], deep_tap)
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
        past: PastKeys | None,
        read_BN: Tensor | None = None,
    ) -> Tensor:
        """The state that a head reads, `[B, N, D]`.

        Args:
            f_BND: the target's hidden state after `exit_layer` layers.
            deep_BND: where it reads one, the deep state of the token before each; zeros at the
                start of a text.
            past: where keys and values go and come from; None sees the block alone.
            read_BN: where a head reads it: all others have keys and values, and a state of zeros.
                None: everywhere.
        """
        x_BND, native_layer = self.mix_inputs(f_BND, deep_BND), self.native_layer
        if native_layer and isinstance(past, BlockCache) and native_layer.takes(x_BND, meta):
            return native_layer(x_BND, past.cache, meta, range(self.depth), weight(self.norm))
        attentions = self.attentions
        for place, (norm, attention) in enumerate(attentions, 1):
            attended_BND, _ = attention(
                hidden_states=x_BND if norm is None else norm(x_BND),
                position_embeddings=meta.rope,
                attention_mask=meta.bias_R1TE,
                past_key_values=past,
                read_RT=read_BN if place == len(attentions) else None,
            )
            x_BND = x_BND + attended_BND
        if read_BN is None:
            return self.above_attention(x_BND)
        made_MD = self.above_attention(x_BND[read_BN])
        return made_MD.new_zeros(x_BND.shape).masked_scatter(read_BN[..., None], made_MD)

    def write_kv(
        self, f_BND: Tensor, deep_BND: Tensor | None, meta: ForwardMeta, past: BlockCache
    ) -> None:
        """Write keys and values where no head reads; see `forward`."""
        if self.attention is None:
            return
        x_BND = self.mix_inputs(f_BND, deep_BND)
        if self.native_layer and self.native_layer.takes(x_BND, meta):
            last = self.depth - 1
            if last:
                x_BND = self.native_layer(x_BND, past.cache, meta, range(last))
            layers = range(last, last + 1)
            self.native_layer(x_BND, past.cache, meta, layers, keys_alone=True)
        else:
            self(f_BND, deep_BND, meta, past)

    def above_attention(self, x_XD: Tensor) -> Tensor:
        """The feed-forward part and the last norm, of any tokens X."""
        if self.feed_forward is not None:
            assert self.middle_norm is not None
            x_XD = x_XD + self.feed_forward(self.middle_norm(x_XD))
        return x_XD if self.norm is None else self.norm(x_XD)

    def states(
        self,
        taps: dict[int, Tensor],
        deep_BTD: Tensor,
        meta: ForwardMeta,
        steps: int,
        read_BT: Tensor | None = None,
    ) -> list[Tensor]:
        return unroll(self, taps[self.exit_layer], deep_BTD, meta, steps, read_BT)

    def copy_layer(self, layer: nn.Module) -> None:
        """Begin with the weights of a layer of the target."""
        for part, theirs in (
            (self.input_norm, "input_layernorm"),
            (self.attention, "self_attn"),
            (self.middle_norm, "post_attention_layernorm"),
            (self.feed_forward, "mlp"),
        ):
            if part is not None:
                part.load_state_dict(layer.get_submodule(theirs).state_dict())

    def native_inputs(self) -> dict[str, Structure] | None:
        """What native rounds make the layer's input with, by its name in `NativeDrafting`, where it
        is not the shallow state as it is; None where they cannot."""
        return None

    def accelerate(self, lm: TargetModel) -> Self:
        """Draft in native code if the target decodes in it."""
        layers: list[dict[str, Any]] = [
            attention_weights(attention) | {"attention_norm": weight(norm)}
            for norm, attention in self.attentions
        ]
        layers = layers or [{}]
        if self.feed_forward is not None:
            layers[-1] |= feed_forward_weights(self.feed_forward)
            layers[-1]["feed_forward_norm"] = weight(self.middle_norm)
        self.native_layer = lm.acceleration.part(
            "Stack", [LayerWeights(**parts) for parts in layers]
        )
        return self


def weight(norm: nn.Module | None) -> Tensor | None:
    """Of a norm, if there is one."""
    return None if norm is None else norm.get_parameter("weight")
