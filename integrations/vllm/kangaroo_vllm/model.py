"""The drafter: the target's own layers below the exit, an adapter, the target's head.

It owns the adapter's weights alone. The target's modules are called in place, so that their weights
and their pages of the KV cache serve both: what the drafter writes there is what the target would
write, and the only cache of its own is that of the adapter's one attention layer.

Shapes: B rows, N tokens, D hidden size, K draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix

from kangaroo_vllm import checks
from kangaroo_vllm.checks import Unsupported
from kangaroo_vllm.halves import Below


@support_torch_compile(dynamic_arg_dims={"input_ids": {0: "b"}, "positions": {0: "b"}})
class KangarooDraft(nn.Module):
    """An exported adapter, by the names that its tensors have on disk."""

    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_stacked={
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        checks.check_runner(vllm_config)
        config: Any = vllm_config.model_config.hf_config
        self.config, self.adapter = config, checks.read(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps=eps)
        self.attention = LlamaAttention(
            config=config,
            hidden_size=size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            bias=config.attention_bias,
            bias_o_proj=config.attention_bias,
            cache_config=vllm_config.cache_config,
            prefix=maybe_prefix(prefix, "layers.0.self_attn"),
        )
        if self.adapter.feed_forward:
            self.middle_norm = RMSNorm(size, eps=eps)
            self.feed_forward = LlamaMLP(
                size,
                config.intermediate_size,
                config.hidden_act,
                bias=config.mlp_bias,
                prefix=maybe_prefix(prefix, "layers.0.mlp"),
            )
        self.norm = RMSNorm(size, eps=eps)
        k = self.adapter.draft_vocabulary
        if k is not None:
            self.vocabulary = nn.Parameter(torch.zeros(k, dtype=torch.int64), requires_grad=False)
        if self.adapter.own_head:
            rows = config.vocab_size if k is None else k
            self.head = nn.Linear(size, rows, bias=False)
        self.head_KD: Tensor | None = None
        self.below: Below | None = None
        self._target: tuple[Any, ...] = ()  # no submodule: its weights are not this model's

    def attach(self, target: nn.Module) -> set[str]:
        """Draft by the head of this model; `below` has to be set, too.

        Returns the names of its attention layers below the exit.
        """
        if not isinstance(target, LlamaForCausalLM):
            raise Unsupported(
                f"vLLM runs this target as {type(target).__name__}, and kangaroo-vllm drafts on "
                "LlamaForCausalLM alone. Use an adapter exported with to=draft_model."
            )
        checks.check_target(self.adapter, self.config, target.config)
        self._target = (target,)
        if self.adapter.own_head:
            self.head_KD = self.head.weight
        elif self.adapter.draft_vocabulary is not None:
            self.head_KD = rows_of(target.lm_head, self.vocabulary)
        shallow = target.model.layers[: self.adapter.exit_layer]
        return {layer.self_attn.attn.layer_name for layer in shallow}

    @property
    def target(self) -> Any:
        return self._target[0]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.target.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: None = None,
    ) -> tuple[Tensor, Tensor]:
        """The state that the head reads, and that at the exit, both `[N, D]`."""
        f_ND = self.below(input_ids, positions)
        x_ND = f_ND + self.attention(positions, self.input_norm(f_ND))
        if self.adapter.feed_forward:
            x_ND = x_ND + self.feed_forward(self.middle_norm(x_ND))
        return self.norm(x_ND), f_ND

    def write_keys(self, f_ND: Tensor, positions: Tensor) -> None:
        """Write the adapter's keys and values of tokens whose states the target has computed."""
        layer = self.attention
        qkv, _ = layer.qkv_proj(self.input_norm(f_ND))
        q, k, v = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
        _, k = layer.rotary_emb(positions, q, k)
        heads = (-1, layer.num_kv_heads, layer.head_dim)
        torch.ops.vllm.unified_kv_cache_update(k.view(heads), v.view(heads), layer.attn.layer_name)

    def draft_logits(self, hidden_BD: Tensor) -> Tensor:
        """Over the draft vocabulary, `[B, K]`."""
        if self.head_KD is None:
            return self.compute_logits(hidden_BD)
        return F.linear(hidden_BD, self.head_KD)

    def tokens(self, index_B: Tensor) -> Tensor:
        """The tokens at these places of the draft vocabulary."""
        whole = self.adapter.draft_vocabulary is None
        return index_B if whole else self.vocabulary[index_B]

    def spread(self, probs_BK: Tensor) -> Tensor:
        """The same probabilities over the whole vocabulary, `[B, V]`."""
        if self.adapter.draft_vocabulary is None:
            return probs_BK
        spread_BV = probs_BK.new_zeros(len(probs_BK), self.config.vocab_size)
        spread_BV[:, self.vocabulary] = probs_BK
        return spread_BV

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        return self.target.compute_logits(hidden_BD)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)


def rows_of(head: Any, ids_K: Tensor) -> Tensor:
    """These rows of a head, `[K, D]`, in every process, whichever of them holds each row."""
    held = head.shard_indices
    first, end = held.org_vocab_start_index, held.org_vocab_end_index
    here_K = (ids_K >= first) & (ids_K < end)
    rows_KD = head.weight[(ids_K - first).clamp(0, end - first - 1)]
    return tensor_model_parallel_all_reduce(rows_KD * here_K[:, None])
