"""Exports adapters for other software, in three formats.

A *draft model* is an ordinary transformers model: the target's layers below the exit and a layer
for each of the adapter's attention layers. vLLM calls it a draft model, SGLang a standalone one,
and transformers an assistant. In memory it shares the target's weights; on disk it is complete.

The vLLM *plugin* `kangaroo-vllm` (`integrations/vllm`) reads the adapter's weights, by their names
here, and "vocabulary", the token ids of a smaller draft vocabulary. `config.json` is the target's
with one layer, and the plugin's settings under "kangaroo".

A head of EAGLE-3 becomes a folder of the library *speculators*, which vLLM itself serves.

Shapes: K draft vocabulary.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, PreTrainedModel

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.base import HeadConfig
from kangaroo.heads.eagle3_head import Eagle3Head
from kangaroo.heads.published import EAGLE3
from kangaroo.models import loading as models
from kangaroo.models.layer_weights import packed_linears
from kangaroo.models.supported import usual_attention, with_layers
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import new_folder, write_json

PLUGIN_FORMAT = 1
SPECULATORS = "0.9.0"  # the version of the library whose format is written
DRAFTED = 5  # tokens that vLLM drafts by default


def check(parts: HeadConfig, vocabulary: int | None) -> None:
    """Raise `ConfigError` for an adapter that cannot become a draft model, since it reads more than
    the exit layer's states, drafts in one pass, or has a head over part of the `vocabulary`."""
    if not isinstance(parts, AdapterHeadConfig):
        reason = f"it is a trained {parts.kind()}, which reads the target's final states"
    elif parts.drafter != "kangaroo":
        reason = f"it is a trained {parts.kind()}, which drafts in one pass"
    elif parts.fused:
        reason = "it is fused: it reads deep states of the target"
    elif parts.own_head and vocabulary:
        reason = f"its own head knows {vocabulary} tokens, and a model's head needs them all"
    else:
        return
    raise ConfigError(
        f"this adapter cannot become a draft model: {reason}. Export one of "
        "adapter=attention, layer, mlp, or own_head with trainer.vocabulary=null; or decode with "
        f"it here (drafter={parts.drafter})."
    )


def save(path: str, model: models.ModelConfig, folder: Path) -> None:
    """Write the adapter at `path` as a draft model in a transformers checkpoint, with tokenizer.
    Errors: those of `check` and `adapter_files.load`; `ConfigError` for an existing folder."""
    config = adapter_files.read_config(path)
    check(config.architecture, config.vocabulary)
    # on the CPU the checkpoint's files are memory-mapped, and most of their bytes are never read
    hf, tokenizer = models.load(
        replace(model, device="cpu", device_map=None, weights=models.Weights.widened)
    )
    lm = TargetModel(hf)
    adapter, _ = adapter_files.load(path, lm, Adapter, vocabulary=0)
    with new_folder(folder) as partial:
        draft_model(lm, adapter).save_pretrained(partial)
        tokenizer.save_pretrained(partial)


def draft_model(lm: TargetModel, adapter: Adapter) -> PreTrainedModel:
    """The model whose logits are the adapter's. Errors: `ConfigError` if there is no such model."""
    weights = adapter.state_dict()
    head = weights.get("head.weight")
    vocabulary = None if head is None or len(head) == lm.config.vocab_size else len(head)
    check(adapter.architecture, vocabulary)
    reason = "its weights are quantized" if packed_linears(lm.layers) else None
    if hasattr(lm.layers[0], "post_feedforward_layernorm"):
        reason = f"{lm.config.model_type} layers have norms after their parts, an adapter has none"
    if reason is not None:
        raise ConfigError(
            f"an adapter of {lm.name} cannot become a draft model: {reason}. Decode with it here "
            "(drafter=kangaroo)."
        )
    first = adapter.exit_layer
    last = adapter.exit_layer + adapter.depth - 1
    shallow = ("model.embed_tokens.", "lm_head.", *(f"model.layers.{i}." for i in range(first)))
    state = {name: w for name, w in lm.hf.state_dict().items() if name.startswith(shallow)}
    state |= {  # parts that the adapter does not have add zeros
        f"model.layers.{layer}.{name}": torch.zeros_like(weight)
        for layer in range(first, last + 1)
        for name, weight in lm.layers[first].state_dict().items()
    }
    parts = {f"{last}.post_attention_layernorm": adapter.middle_norm}
    parts[f"{last}.mlp"] = adapter.feed_forward
    for layer, (norm, attention) in enumerate(adapter.attentions, first):
        parts |= {f"{layer}.input_layernorm": norm, f"{layer}.self_attn": attention}
    for name, part in parts.items():
        if part is not None:
            state |= part.state_dict(prefix=f"model.layers.{name}.")
    state["model.norm.weight"] = weights["norm.weight"]
    if head is not None:
        state["lm_head.weight"] = head
    # all of the adapter's layers are of the kind of the one at the exit
    config = with_layers(lm.config, [*range(first), *[first] * adapter.depth])
    if head is not None:
        config.tie_word_embeddings = False
    model: Any = AutoModelForCausalLM.from_config(
        config, attn_implementation=usual_attention(lm.hf), dtype=lm.dtype
    )
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    # without sampling options: a draft does not need any, and transformers rejects some
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    token_ids = {name: getattr(lm.hf.generation_config, name) for name in names}
    model.generation_config = GenerationConfig(**token_ids)
    # buffers outside the state dict, such as RoPE's frequencies, are on the CPU until here
    return model.eval().requires_grad_(False).to(lm.device)


def write_for_vllm(path: str, lm: TargetModel, folder: Path, threshold: float) -> None:
    """Write the adapter at `path` for the plugin, with the `threshold` at which it stops drafts by
    default. It was made for `lm`, which may be a `meta_model`. Errors: `ConfigError` for what the
    plugin cannot run or an existing folder; those of `adapter_files.load_as_saved`."""
    if lm.config.model_type != "llama":
        raise ConfigError(
            f"{lm.name} is a {lm.config.model_type} model; the plugin kangaroo-vllm runs Llama "
            "alone. Export to=draft_model instead."
        )
    adapter, vocabulary_K = adapter_files.load_as_saved(path, lm)
    parts: Any = adapter.architecture
    has_one_layer = isinstance(parts, AdapterHeadConfig) and parts.attention_layers == 1
    if not has_one_layer or not parts.attention or parts.fused or not adapter.exit_layer:
        raise ConfigError(
            f"adapter '{path}' is {parts} at exit layer {adapter.exit_layer}, which the plugin "
            "kangaroo-vllm cannot run. Export one of adapter=attention, layer or own_head, above "
            "one layer or more, or decode with this one here "
            f"(drafter={parts.drafter})."
        )
    weights = {name: weight.contiguous() for name, weight in adapter.state_dict().items()}
    fields = lm.config.to_dict() | {"architectures": ["KangarooDraft"], "num_hidden_layers": 1}
    fields.pop("_name_or_path", None)
    fields["kangaroo"] = {
        "format": PLUGIN_FORMAT,
        "exit_layer": adapter.exit_layer,
        "target_layers": lm.n_layers,
        "architecture": parts.as_json(),
        "draft_vocabulary": None if vocabulary_K is None else len(vocabulary_K),
        "threshold": threshold,
    }
    if vocabulary_K is not None:
        weights["vocabulary"] = vocabulary_K
    with new_folder(folder) as partial:
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / "config.json", fields)


def write_speculators(path: str, lm: TargetModel, folder: Path) -> None:
    """Write the EAGLE-3 head at `path` as a folder of the library speculators. It was made for
    `lm`, which may be a `meta_model`. Embeddings are left out, since readers take the target's.
    Errors: `ConfigError` for another adapter or an existing folder; those of `load_as_saved`."""
    head, vocabulary_K = adapter_files.load_as_saved(path, lm)
    if not isinstance(head, Eagle3Head):
        kind = head.architecture.kind()
        raise ConfigError(
            f"adapter '{path}' is a trained {kind}, and speculators has no such format. Export one "
            "of adapter=eagle3; adapters of adapter=attention are for to=draft_model and to=vllm."
        )
    ours = head.state_dict()
    weights = {
        f"{theirs.replace('midlayer', 'layers.0')}.weight": ours[f"{name}.weight"].contiguous()
        for theirs, name in EAGLE3.items()
    }
    size = lm.config.vocab_size
    if vocabulary_K is not None:
        weights["d2t"] = vocabulary_K - torch.arange(len(vocabulary_K))
        weights["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, vocabulary_K, True)
    parts = head.architecture
    rope = lm.config.rope_parameters
    layer = LlamaConfig(
        vocab_size=size,
        hidden_size=lm.config.hidden_size,
        intermediate_size=parts.feed_forward_size or lm.config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=lm.config.num_attention_heads,
        num_key_value_heads=lm.config.num_key_value_heads,
        head_dim=lm.sizes().head_size,
        max_position_embeddings=lm.config.max_position_embeddings,
        rms_norm_eps=parts.norm_eps or lm.config.rms_norm_eps,
        rope_parameters=dict(rope) if parts.rope_base is None else {"rope_theta": parts.rope_base},
        bos_token_id=lm.config.bos_token_id,
        eos_token_id=lm.config.eos_token_id,
    )
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DRAFTED}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": lm.name, "architectures": [type(lm.hf).__name__]},
        },
        "transformer_layer_config": layer.to_diff_dict(),
        "draft_vocab_size": len(weights["lm_head.weight"]),
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": list(head.deep_taps),
        "dtype": str(weights["fc.weight"].dtype).removeprefix("torch."),
    }
    with new_folder(folder) as partial:
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        write_json(partial / "config.json", fields)
