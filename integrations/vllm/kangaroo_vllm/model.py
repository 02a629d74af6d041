"""The adapter in vLLM: its weights, and the rows of the target's head for the draft vocabulary.

Shapes: B rows, N tokens, D hidden size, K draft vocabulary, V vocabulary, R room for the largest
draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.utils import cached_file
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import tensor_model_parallel_all_reduce
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.model_executor.models.llama import LlamaAttention, LlamaForCausalLM, LlamaMLP
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper
from vllm.utils.torch_utils import set_default_torch_dtype

from kangaroo_vllm import checks
from kangaroo_vllm.checks import Unsupported


def copies_inputs(vllm_config: VllmConfig) -> VllmConfig:
    """vLLM's config for compiled code whose CUDA graphs copy their inputs, which for our code lie
    elsewhere each time. All else is shared."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.cudagraph_copy_inputs = True
    return config


def load_adapter(
    vllm_config: VllmConfig, options: checks.Options, target: nn.Module
) -> KangarooAdapter:
    """The adapter that these options name, for this target. Errors: `Unsupported`."""
    config = AutoConfig.from_pretrained(options.folder)
    facts = checks.read(config)
    room = options.room(facts)
    if not isinstance(target, LlamaForCausalLM):
        raise Unsupported(
            f"vLLM runs this target as {type(target).__name__}, and kangaroo-vllm drafts on "
            "LlamaForCausalLM alone. Use an adapter exported with to=draft_model."
        )
    checks.check_target(facts, config, target.config)
    dtype, device = vllm_config.model_config.dtype, vllm_config.device_config.device
    with (
        set_current_vllm_config(copies_inputs(vllm_config)),
        set_default_torch_dtype(dtype),
        torch.device(device),
        set_model_tag("kangaroo_adapter"),
    ):
        adapter = KangarooAdapter(config=config, facts=facts, vllm_config=vllm_config)
    adapter.load_weights(load_file(cached_file(options.folder, "model.safetensors")).items())
    process_weights_after_loading(adapter, vllm_config.model_config, torch.device(device))
    adapter.attach(target, room)
    return adapter


@support_torch_compile(dynamic_arg_dims={"f_ND": {0: "b"}, "positions": {0: "b"}})
class KangarooAdapter(nn.Module):
    """An exported adapter. Its modules have the names of its tensors on disk."""

    def __init__(self, *, config: Any, facts: checks.AdapterFacts, vllm_config: VllmConfig):
        super().__init__()
        self.config, self.facts = config, facts
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
            prefix="kangaroo.layers.0.self_attn",
        )
        if facts.feed_forward:
            self.middle_norm = RMSNorm(size, eps=eps)
            self.feed_forward = LlamaMLP(
                size,
                config.intermediate_size,
                config.hidden_act,
                bias=config.mlp_bias,
                prefix="kangaroo.layers.0.mlp",
            )
        self.norm = RMSNorm(size, eps=eps)
        k = facts.draft_vocabulary
        if k is not None:
            self.vocabulary = nn.Parameter(torch.zeros(k, dtype=torch.int64), requires_grad=False)
        if facts.own_head:
            rows = config.vocab_size if k is None else k
            self.head = nn.Linear(size, rows, bias=False)
        self.head_KD: Tensor | None = None
        self.ids_K: Tensor | None = None
        self.room = 0
        self._target: tuple[Any, ...] = ()  # in a tuple, so that it is no submodule

    def attach(self, target: Any, room: int) -> None:
        """Use this target's head, unless the adapter has its own, and draft from up to `room`
        tokens of the texts besides the frequent ones."""
        self._target = (target,)
        if self.facts.draft_vocabulary is not None:
            self.ids_K = self.vocabulary.detach()  # not a second parameter
        if self.facts.own_head:
            self.head_KD = self.head.weight
        elif self.facts.draft_vocabulary is not None:
            self.head_KD = rows_of(target.lm_head, self.vocabulary)
        if room:
            self.rare_V = np.ones(self.config.vocab_size, dtype=bool)
            self.rare_V[self.vocabulary.cpu().numpy()] = False
            self.room = min(room, int(self.rare_V.sum()))
            self.ids_R = torch.cat([self.ids_K, self.ids_K.new_empty(self.room)])
            free_RD = self.head_KD.new_empty(self.room, self.head_KD.shape[1])
            self.rows_RD = torch.cat([self.head_KD, free_RD])
            self.follow([])

    def follow(self, texts: list[NDArray[Any]]) -> None:
        """Add the first rare tokens of these texts to the draft vocabulary, as many as there is
        room for: a token that is rare elsewhere often recurs in its own text."""
        rare = [token for ids in texts for token in ids[self.rare_V[ids]].tolist()]
        added = list(dict.fromkeys(rare))[: self.room]
        first = self.facts.draft_vocabulary
        end = first + len(added)
        if added:
            self.ids_R[first:end] = torch.tensor(added)
            self.rows_RD[first:end] = rows_of(self._target[0].lm_head, self.ids_R[first:end])
        self.ids_K, self.head_KD = self.ids_R[:end], self.rows_RD[:end]

    def forward(self, f_ND: Tensor, positions: Tensor) -> Tensor:
        """The states `[N, D]` that the head reads, from those at the exit."""
        x_ND = f_ND + self.attention(positions, self.input_norm(f_ND))
        if self.facts.feed_forward:
            x_ND = x_ND + self.feed_forward(self.middle_norm(x_ND))
        return self.norm(x_ND)

    def write_keys(self, f_ND: Tensor, positions: Tensor) -> None:
        """Write the adapter's keys and values for the target's states of these tokens."""
        layer = self.attention
        qkv, _ = layer.qkv_proj(self.input_norm(f_ND))
        q, k, v = qkv.split([layer.q_size, layer.kv_size, layer.kv_size], dim=-1)
        _, k = layer.rotary_emb(positions, q, k)
        heads = (-1, layer.num_kv_heads, layer.head_dim)
        torch.ops.vllm.unified_kv_cache_update(k.view(heads), v.view(heads), layer.attn.layer_name)

    def draft_logits(self, hidden_BD: Tensor) -> Tensor:
        """Logits over the draft vocabulary, `[B, K]`."""
        if self.head_KD is None:
            return self._target[0].compute_logits(hidden_BD)
        return F.linear(hidden_BD, self.head_KD)

    def tokens(self, index_B: Tensor) -> Tensor:
        """The tokens at these indices of the draft vocabulary."""
        return index_B if self.ids_K is None else self.ids_K[index_B]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load the parameters, stacking projections that are separate on disk."""
        stacked = {
            ".q_proj": (".qkv_proj", "q"),
            ".k_proj": (".qkv_proj", "k"),
            ".v_proj": (".qkv_proj", "v"),
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
        mapper = WeightsMapper(orig_to_new_stacked=stacked)
        return AutoWeightsLoader(self).load_weights(weights, mapper=mapper)


def rows_of(head: Any, ids_K: Tensor) -> Tensor:
    """Rows of a head, `[K, D]`, from all processes. Errors: `Unsupported` for a quantized head."""
    weight = getattr(head, "weight", None)
    if weight is None or not weight.is_floating_point() or weight.element_size() < 2:
        raise Unsupported(
            "the target's head is quantized, and this adapter drafts by some of its rows. Use an "
            "adapter of adapter=own_head, or one over the whole vocabulary."
        )
    shard = head.shard_indices
    first, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    is_local_K = (ids_K >= first) & (ids_K < end)
    rows_KD = weight[(ids_K - first).clamp(0, end - first - 1)]
    return tensor_model_parallel_all_reduce(rows_KD * is_local_K[:, None])
