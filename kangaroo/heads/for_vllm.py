"""An adapter as the plugin `kangaroo-vllm` reads it (`integrations/vllm`): its weights alone.

`config.json` is the target's, of one layer, with what the plugin needs to know under "kangaroo".
`model.safetensors` holds the adapter's weights by its own names and, where it drafts from some of
the tokens, their ids as "vocabulary".
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from kangaroo.heads import adapter_files, base
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import new_folder

FORMAT = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
VOCABULARY = "vocabulary"  # of the weights: token ids `[K]`, ascending
DROPPED = ("_name_or_path", "quantization_config")  # of the target's config


def write(path: str, lm: TargetModel, folder: Path, threshold: float) -> Adapter:
    """Write the adapter at `path`, made for `lm`, of which it takes the shapes alone.

    Args:
        threshold: stop drafting once confidence falls to this, if vLLM is told nothing else.

    Returns the adapter. Errors: `ConfigError` for an adapter or a target that the plugin cannot
    run, or a folder that is there already; those of `adapter_files.as_saved`.
    """
    if lm.config.model_type != "llama":
        raise ConfigError(
            f"{lm.name} is a {lm.config.model_type} model; the plugin kangaroo-vllm runs Llama "
            "alone. Export to=draft_model instead."
        )
    adapter, vocabulary_K = adapter_files.as_saved(path, lm)
    if not isinstance(adapter, Adapter) or not runs(adapter.architecture):
        raise ConfigError(
            f"adapter '{path}' is {adapter.architecture}, which the plugin kangaroo-vllm cannot "
            "run. Export one of adapter=attention, layer or own_head, or decode with this one here "
            f"(drafter={adapter.architecture.drafter})."
        )
    state = {name: weight.contiguous() for name, weight in adapter.state_dict().items()}
    if vocabulary_K is not None:
        state[VOCABULARY] = vocabulary_K
    with new_folder(folder) as partial:
        save_file(state, partial / WEIGHTS, metadata={"format": "pt"})
        fields = _config(lm, adapter, vocabulary_K, threshold)
        (partial / CONFIG).write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
    return adapter


def runs(parts: base.HeadConfig) -> bool:
    """Whether the plugin can run an adapter that is made of these."""
    if not isinstance(parts, AdapterHeadConfig):
        return False
    return parts.attention and parts.attention_layers == 1 and not parts.fused


def _config(
    lm: TargetModel, adapter: Adapter, vocabulary_K: Tensor | None, threshold: float
) -> dict[str, Any]:
    fields = {name: x for name, x in lm.config.to_dict().items() if name not in DROPPED}
    if isinstance(fields.get("layer_types"), list):
        fields["layer_types"] = fields["layer_types"][:1]
    parts = adapter.architecture
    facts = {
        "format": FORMAT,
        "exit_layer": adapter.exit_layer,
        "target_layers": lm.n_layers,
        "architecture": {"kind": parts.kind()} | asdict(parts),
        "draft_vocabulary": None if vocabulary_K is None else len(vocabulary_K),
        "threshold": threshold,
    }
    return fields | {"architectures": ["KangarooDraft"], "num_hidden_layers": 1, "kangaroo": facts}
