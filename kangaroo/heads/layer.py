"""A drafting layer: parts of a decoder layer, of the target's own classes.

Shapes: B rows, R rows of a block (1 or B), N tokens of a block, T tokens of a text, D hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.backend import Fusing, Layers, LayerWeights, Matrix
from kangaroo.engine.cache import BlockCache, ForwardMeta, Taps
from kangaroo.heads.base import HeadConfig, Trainable
from kangaroo.models import layer_weights as weights
from kangaroo.models.draft_steps import DraftSteps
from kangaroo.models.target import TargetModel


class Layer(Trainable):
    """Attention layers, a feed-forward part, or both, which a subclass makes, with norms before
    them and at the end. It has no norms after attention, even if the target does (OLMo 2, Gemma),
    but scales residuals like the target (Granite). Window and RoPE are those of its layer `like`.

    With `deep_taps` it also reads the target's states there of the previous token, or within a
    draft its own state of that token. In drafting it looks back `attention_window` tokens at most
    (`ForwardMeta.within`); with `int8` native code reads its weights in eight bits."""

    int8 = False
    mixes_natively = True  # whether native code computes `mix_inputs` and `pairs`
    first_seen = 0  # the first token of a text that others see

    def __init__(
        self, lm: TargetModel, parts: HeadConfig, exit_layer: int, deep_tap: int | None, like: int
    ):
        super().__init__(parts, exit_layer, [exit_layer], deep_tap)
        self.deep_taps: tuple[int, ...] = () if deep_tap is None else (deep_tap,)
        self.like = like
        self.windowed = lm.windowed[like]
        self.residual_multiplier = getattr(lm.config, "residual_multiplier", 1)
        self.input_norm: nn.Module | None = None
        self.attention: nn.Module | None = None
        self.further = nn.ModuleList()  # attention layers, each with the norm before it
        self.middle_norm: nn.Module | None = None
        self.feed_forward: nn.Module | None = None
        self.norm: nn.Module | None = None
        self.fast_layers: Layers | None = None  # a backend's, in place of the modules
        self.fast_fusing: Fusing | None = None

    def new_attention(self, lm: TargetModel, place: int = 0) -> nn.Module:
        """An attention part of the target's own class, for layer `place` of the layer's cache."""
        attention: Any = type(lm.layers[self.like].self_attn)(lm.config, layer_idx=self.like)
        attention.layer_idx = place  # in the cache; the index above decides on SmolLM3's rotation
        return attention

    @property
    def depth(self) -> int:
        """The number of layers with keys and values."""
        return 1 + len(self.further)

    @property
    def attentions(self) -> list[tuple[nn.Module | None, nn.Module]]:
        """The attention layers from the lowest on, each with the norm before it."""
        if self.attention is None:
            return []
        further = [(x.get_submodule("norm"), x.get_submodule("attention")) for x in self.further]
        return [(self.input_norm, self.attention), *further]

    def read_deep(self, lm: TargetModel, states: Sequence[Tensor]) -> Tensor:
        """What it reads, `[B, N, D]`, of the target's states at `deep_taps`."""
        return lm.norm(states[0])

    def placed(self, meta: ForwardMeta) -> ForwardMeta:
        """The block as this layer's attention reads it."""
        return meta

    @abstractmethod
    def mix_inputs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor:
        """The layer's input `[B, N, D]`; see `forward`."""

    def pairs(self, f_BND: Tensor, deep_BND: Tensor | None) -> Tensor | None:
        """What attention reads instead of the normed input, `[B, N, 2 D]`; None for that one."""
        return None

    def forward(
        self,
        f_BND: Tensor,
        deep_BND: Tensor | None,
        meta: ForwardMeta,
        past: BlockCache | DraftSteps | None,
    ) -> Tensor:
        """The states `[B, N, D]` that a head reads, from the exit states `f` and, with `deep_taps`,
        the deep states of the previous tokens (zeros at the start of a text). Keys and values go
        to `past`, in training (`DraftSteps`) step by step; None attends to the block alone."""
        x_BND = self.mix_inputs(f_BND, deep_BND)
        pairs = self.pairs(f_BND, deep_BND)
        meta = self.placed(meta.for_layer(self.windowed))
        fast_layers = self.fast_layers
        if not isinstance(past, DraftSteps):
            if fast_layers and past is not None and fast_layers.takes(x_BND, past.cache, meta):
                norm_D = getattr(self.norm, "weight", None)
                return fast_layers(x_BND, past.cache, meta, range(self.depth), norm_D, pairs=pairs)
            meta = meta.within(self.attention_window)
        for norm, attention in self.attentions:
            normed_BND = x_BND if norm is None else norm(x_BND)
            attended_BND, _ = attention(
                hidden_states=normed_BND if pairs is None else pairs,
                position_embeddings=meta.rope,
                attention_mask=past if isinstance(past, DraftSteps) else meta.bias_R1TE,
                past_key_values=past,
            )
            x_BND = x_BND + self.residual_multiplier * attended_BND
        if self.feed_forward is not None:
            assert self.middle_norm is not None
            x_BND = x_BND + self.residual_multiplier * self.feed_forward(self.middle_norm(x_BND))
        return x_BND if self.norm is None else self.norm(x_BND)

    def write_kv(
        self, f_BND: Tensor, deep_BND: Tensor | None, meta: ForwardMeta, past: BlockCache
    ) -> None:
        """Write keys and values without computing states for a head; see `forward`."""
        if self.attention is None:
            return
        x_BND = self.mix_inputs(f_BND, deep_BND)
        fast_layers = self.fast_layers
        if fast_layers and fast_layers.takes(x_BND, past.cache, meta):
            *below, last = range(self.depth)
            if below:
                x_BND = fast_layers(x_BND, past.cache, meta, range(last))
            pairs = self.pairs(f_BND, deep_BND)
            only = range(last, last + 1)
            fast_layers(x_BND, past.cache, meta, only, keys_alone=True, pairs=pairs)
        else:
            self(f_BND, deep_BND, meta, past)

    def draft_steps(self, meta: ForwardMeta) -> DraftSteps:
        """The keys and values of all draft steps of whole texts; empty before the first step."""
        meta = meta.for_layer(self.windowed)
        causal_from = self.first_seen if meta.bias_R1TE is None else None
        return DraftSteps(self.placed(meta).bias_R1TE, causal_from)

    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """See `Trainable.states`. Drafts read the target's deep states up to their start, then the
        layer's own. As in decoding, the keys before a draft are those of step 1, and those within
        it of each token's own step (training-time test, EAGLE-3, arXiv 2503.01840)."""
        f_BTD = taps[self.exit_layer]
        past = self.draft_steps(meta)
        states: list[Tensor] = []
        for _ in range(steps):
            deep_BTD = shift_right(deep_BTD, meta.positions_RT)
            deep_BTD = self(f_BTD, deep_BTD, meta, past)
            states.append(deep_BTD)
        return states

    def copy_layers(self, lm: TargetModel, first: int) -> None:
        """Copy the weights of the target's layer `first`, and the attention of those above it."""
        layer = lm.layers[first]
        pairs = [(weights.norms_before(layer)[1], self.middle_norm), (layer.mlp, self.feed_forward)]
        for index, (norm, attention) in enumerate(self.attentions, first):
            layer = lm.layers[min(index, lm.n_layers - 1)]
            pairs += [(weights.norms_before(layer)[0], norm), (layer.self_attn, attention)]
        for source, target in pairs:
            if source is not None and target is not None:
                weights.copy_weights(source, target, lm.dtype)

    def accelerate(self, lm: TargetModel) -> Self:
        """Draft by the target's backend."""
        self.fast_layers = None
        if not lm.backend.runs_layers:
            return self
        layers: list[dict[str, Any]] = [
            weights.attention_weights(attention) | {"attention_norm": getattr(norm, "weight", None)}
            for norm, attention in self.attentions
        ] or [{}]
        if self.feed_forward is not None:
            layers[-1] |= weights.feed_forward_weights(self.feed_forward)
            layers[-1]["feed_forward_norm"] = getattr(self.middle_norm, "weight", None)
        stack: list[LayerWeights[Matrix]] = [LayerWeights(**x) for x in layers]
        self.fast_layers = lm.backend.layers(stack, window=self.attention_window)
        return self


def shift_right(x_BTD: Tensor, positions_RT: Tensor) -> Tensor:
    """The states of the previous tokens; zeros at the start of a text."""
    return F.pad(x_BTD[:, :-1], (0, 0, 1, 0)) * (positions_RT > 0)[..., None]
