"""The adapter: from the exit layer's hidden state to one that a head can read.

The paper's is `f' = f + Attention(Norm(f))`, drafted logits `Head(Norm(f'))`: one attention layer,
two norms, no feed-forward part, and the target's own LM head (Kangaroo, arXiv 2404.18911, section
3.2). Its ablations add or swap parts; `fused` is ours.

Shapes: B rows, N tokens of a block, D hidden size, K draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kangaroo import native
from kangaroo.cache import Block, BlockCache, PastKeys
from kangaroo.errors import AdapterMismatch, ConfigError
from kangaroo.model import LM, attention_weights, feed_forward_weights
from kangaroo.native import LayerWeights
from kangaroo.sampling import Sampling, candidates


@dataclass
class Architecture:
    """What an adapter is made of; the default is the paper's.

    Args:
        attention: an attention layer of the target's shape.
        feed_forward: the target's feed-forward part after it; alone, without attention, too.
        own_head: an LM head of its own, begun as the target's, instead of the target's.
        fused: also read the target's final state of the token before, and for a token that is only
            drafted the adapter's own state in its place (after EAGLE-3, arXiv 2503.01840).
        medusa_heads: instead of all that, so many heads on the target's final state, with LM heads
            of their own if `own_head` (Medusa, arXiv 2401.10774); see `medusa_heads.py`.
    """

    attention: bool = True
    feed_forward: bool = False
    own_head: bool = False
    fused: bool = False
    medusa_heads: int = 0

    def __post_init__(self) -> None:
        if self.medusa_heads:
            if self.attention or self.feed_forward or self.fused or self.medusa_heads < 0:
                raise ConfigError(
                    f"adapter.medusa_heads={self.medusa_heads} must be positive, with "
                    "adapter.attention, adapter.feed_forward and adapter.fused off."
                )
        elif not (self.attention or self.feed_forward):
            raise ConfigError(
                "an adapter of no part drafts nothing: leave adapter.attention or "
                "adapter.feed_forward on."
            )


class Adapter(nn.Module):
    """Parts of the target's own classes: biases, GQA and RoPE follow the target.

    Args:
        vocabulary_K: the tokens it drafts from, ascending; None is all of them.
    """

    def __init__(
        self, lm: LM, exit_layer: int, architecture: Architecture | None = None,
        vocabulary_K: Tensor | None = None,
    ):  # fmt: skip
        super().__init__()
        if not 0 < exit_layer < lm.n_layers:
            raise AdapterMismatch(
                f"exit layer {exit_layer} does not lie inside the target's {lm.n_layers} layers; "
                f"choose 1 to {lm.n_layers - 1}."
            )
        self.architecture = parts = architecture or Architecture()
        self.exit_layer = exit_layer
        layer, hidden_size = lm.layers[exit_layer], lm.config.hidden_size

        def norm() -> nn.Module:
            return type(layer.input_layernorm)(hidden_size, lm.config.rms_norm_eps)

        if parts.fused:
            self.shallow_norm, self.deep_norm = norm(), norm()
            self.fuse = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        if parts.attention:
            self.input_norm = norm()
            self.attention = type(layer.self_attn)(lm.config, layer_idx=0)
        if parts.feed_forward:
            self.middle_norm = norm()
            self.feed_forward = type(layer.mlp)(lm.config)
        self.norm = norm()
        self.native_layer: native.Stack | None = None
        self.head: nn.Linear | None = None
        if parts.own_head:
            size = lm.config.vocab_size if vocabulary_K is None else len(vocabulary_K)
            self.head = nn.Linear(hidden_size, size, bias=False)

    def start_from(self, lm: LM, vocabulary_K: Tensor | None = None) -> Adapter:
        """Copy the layer above the exit and, damped, the target's final norm.

        At full strength that norm makes the untrained adapter surely wrong: on SmolLM2 the loss
        starts at 18 nats, damped at 8, and 35 k tokens later it is 9.0 against 6.2.
        """
        layer, parts = lm.layers[self.exit_layer], self.architecture
        if parts.attention:
            self.input_norm.load_state_dict(layer.input_layernorm.state_dict())
            self.attention.load_state_dict(layer.self_attn.state_dict())
        if parts.feed_forward:
            self.middle_norm.load_state_dict(layer.post_attention_layernorm.state_dict())
            self.feed_forward.load_state_dict(layer.mlp.state_dict())
        self.norm.load_state_dict(lm.hf.model.norm.state_dict())
        with torch.no_grad():
            self.norm.get_parameter("weight").mul_(0.3)
            if parts.fused:
                self.fuse.weight.zero_()  # begins as if it saw the shallow state alone
            if self.head is not None:
                rows = slice(None) if vocabulary_K is None else vocabulary_K
                self.head.weight.copy_(lm.head.weight[rows])
        return self

    def draft_heads(self, lm: LM, vocabulary_K: Tensor | None) -> list[DraftHead]:
        """The one that it drafts with."""
        return [DraftHead(lm, self.head, vocabulary_K)]

    def compile_like(self, lm: LM) -> Adapter:
        """Draft in native code if the target decodes in it."""
        parts = self.architecture
        if lm.native is not None:
            weights = LayerWeights()
            if parts.attention:
                weights = replace(
                    weights,
                    attention_norm=self.input_norm.get_parameter("weight"),
                    **attention_weights(self.attention),
                )
            if parts.feed_forward:
                weights = replace(
                    weights,
                    feed_forward_norm=self.middle_norm.get_parameter("weight"),
                    **feed_forward_weights(self.feed_forward),
                )
            self.native_layer = native.Stack(lm.native, [weights], lm.sizes())
        return self

    def forward(
        self, f_BND: Tensor, deep_BND: Tensor | None, block: Block, past: PastKeys | None
    ) -> Tensor:
        """The adapted state after its final norm, ready for the head.

        Args:
            f_BND: the target's hidden state after `exit_layer` layers.
            deep_BND: for a fused adapter, the target's normed final state of the token before each,
                or the adapter's own; zeros at the start of a text.
            past: where keys and values go and come from; None sees the block alone.
        """
        x_BND, parts = f_BND, self.architecture
        if parts.fused:
            assert deep_BND is not None
            both = torch.cat([self.shallow_norm(f_BND), self.deep_norm(deep_BND)], -1)
            x_BND = x_BND + self.fuse(both)
        if (
            self.native_layer
            and isinstance(past, BlockCache)
            and self.native_layer.takes(x_BND, block)
        ):
            return self.native_layer(
                x_BND, past.cache, block, range(1), self.norm.get_parameter("weight")
            )
        if parts.attention:
            attended_BND, _ = self.attention(
                hidden_states=self.input_norm(x_BND),
                position_embeddings=block.rope,
                attention_mask=block.bias_R1TE,
                past_key_values=past,
            )
            x_BND = x_BND + attended_BND
        if parts.feed_forward:
            x_BND = x_BND + self.feed_forward(self.middle_norm(x_BND))
        return self.norm(x_BND)


class DraftHead:
    """Logits over the draft vocabulary, by rows of the target's head or by an adapter's own head.

    Drafting from the frequent tokens alone reads that part of the head only (FR-Spec, arXiv
    2502.14856).

    Args:
        own: an adapter's own head, over the same tokens; None is the target's.
        vocabulary_K: token ids, ascending; None is the whole vocabulary.
    """

    def __init__(self, lm: LM, own: nn.Linear | None = None, vocabulary_K: Tensor | None = None):
        self.device, self.vocab_size = lm.device, lm.config.vocab_size
        self.vocabulary_K = None if vocabulary_K is None else vocabulary_K.to(lm.device)
        if own is not None:
            self.weight_KD: Tensor = own.weight
        elif vocabulary_K is None:
            self.weight_KD = lm.head.weight
        else:  # gathered once: a copy of this part alone, in memory alone
            self.weight_KD = lm.head.weight[vocabulary_K.to(lm.head.weight.device)]
        self.native: native.Head | None = None

    @property
    def size(self) -> int:
        """Tokens to draft from."""
        return len(self.weight_KD)

    def compile_like(self, lm: LM) -> DraftHead:
        """Draft in native code if the target decodes in it."""
        if lm.native is not None:
            self.native = native.Head(lm.native, self.weight_KD)
        return self

    def __call__(self, adapted_MD: Tensor) -> Tensor:
        """`[M, K]` logits of adapted states; in float32 from native code."""
        if self.native and self.native.takes(adapted_MD):
            return self.native(adapted_MD)
        weight_KD = self.weight_KD
        logits_MK = F.linear(adapted_MD.to(weight_KD.device, weight_KD.dtype), weight_KD)
        return logits_MK.to(self.device)

    def token_of(self, index: Tensor) -> Tensor:
        """Token ids of places in the draft vocabulary."""
        return index if self.vocabulary_K is None else self.vocabulary_K[index]

    def spread(self, logits_MK: Tensor) -> Tensor:
        """The same logits as `[M, V]`: -inf outside the draft vocabulary."""
        if self.vocabulary_K is None:
            return logits_MK
        logits_MV = logits_MK.new_full((len(logits_MK), self.vocab_size), -torch.inf)
        return logits_MV.index_copy_(1, self.vocabulary_K, logits_MK)

    def candidates(
        self, logits_BNK: Tensor, positions_BN: Tensor, sampling: Sampling, seeds_B: Tensor,
        count: int,
    ) -> Tensor:  # fmt: skip
        """The `count` tokens `[B, N, count]` that the target would likeliest choose from these
        logits; see `kangaroo.sampling.candidates`.
        """
        if sampling.greedy:
            return self.token_of(logits_BNK.topk(count).indices)
        logits_BNV = self.spread(logits_BNK.flatten(0, 1)).unflatten(0, logits_BNK.shape[:2])
        return candidates(logits_BNV, positions_BN, sampling, seeds_B, count)
