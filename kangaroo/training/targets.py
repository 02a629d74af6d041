"""The target as a training holds it: whole, its first layers, or a part in each process."""

import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from kangaroo.data import store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.making import MixConfig, SynthesisConfig
from kangaroo.engine.backend import Backend
from kangaroo.heads.layer import Layer
from kangaroo.models.gguf_file import is_gguf
from kangaroo.models.layer_weights import packed_linears
from kangaroo.models.loading import ModelConfig, Weights, load_target, load_tokenizer, meta_model
from kangaroo.models.random_models import RANDOM
from kangaroo.models.target import TargetModel
from kangaroo.training.recipe import AdapterRecipe, TrainerConfig, named_exits
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranks import Ranks

Data = SynthesisConfig | ConversationsConfig | MixConfig

log = logging.getLogger(__name__)


def target_with_data(
    model: ModelConfig,
    data: Data,
    recipes: Sequence[AdapterRecipe],
    config: TrainerConfig,
    ranks: Ranks,
    trains: bool = True,
) -> TargetModel:
    """The target, after it has written its data, or with no more weights than the training needs if
    it has none to write: see `layers_read` and `shard`. Matrices of GGUF files are packed until
    then, which writes text in half the time; what `trains` needs them widened."""
    shape = meta_model(model)
    count = layers_read(shape, recipes, config, data)
    if count is not None:
        log.info("adapters read %d of %d layers: the others are not loaded", count, shape.n_layers)
    if config.shard_target:  # it moves to the GPUs in parts, just before training
        model = replace(model, device="cpu", device_map=None)
    if config.shard_target and writes_nothing(data, shape) and not ranks.is_first:
        lm = shape
        tokenizer: Any = load_tokenizer(model.path, model.revision)
    else:
        lm, tokenizer = load_target(model, count)
    data.make(lm, tokenizer, ranks)
    ranks.wait()
    about = store.read_provenance(Path(data.path))
    log.info(
        f"{about['conversations']} conversations, {about['tokens']} tokens, "
        f"{about['assistant_tokens']} of the assistant, from {data.path}"
    )
    if trains and is_gguf(lm.name) and model.weights is None and packed_linears(lm.layers):
        del lm
        gc.collect()
        lm, _ = load_target(replace(model, weights=Weights.widened))
    return lm


def writes_nothing(data: Data, lm: TargetModel) -> bool:
    """Whether the dataset needs no target to be made; `lm` needs no weights."""
    return isinstance(data, MixConfig) or store.has_settings(Path(data.path), data.settings(lm))


def is_made(data: Data, lm: TargetModel) -> bool:
    """Whether the folder has a finished dataset of these settings, though perhaps of what its
    source held earlier. A mix follows from its parts, and is made again."""
    folder = Path(data.path)
    if isinstance(data, MixConfig) or not store.is_complete(folder):
        return False
    return data.settings(lm).items() <= store.read_provenance(folder)["settings"].items()


def layers_read(
    lm: TargetModel, recipes: Sequence[AdapterRecipe], config: TrainerConfig, data: Data
) -> int | None:
    """How many of the target's first layers a training reads; None for all. If a finished dataset
    keeps distributions, those are read that adapters read or start from. `lm` needs no weights."""
    folder = Path(data.path)
    is_checkpoint = not (lm.name.startswith(RANDOM) or is_gguf(lm.name))
    has_data = store.is_complete(folder) and writes_nothing(data, lm)
    if config.use_stored_logits is False or config.shard_target or not (is_checkpoint and has_data):
        return None
    teacher = store.read_provenance(folder).get("teacher") or {}
    if teacher.get("model") != lm.name:
        return None
    most = 1
    for recipe, exit_layer in named_exits(recipes, lm).values():
        with torch.device("meta"):
            adapter = recipe.architecture.build(lm, exit_layer, None)
        depth = adapter.depth if isinstance(adapter, Layer) else 0
        most = max(most, *adapter.taps, adapter.deep_tap or 0, exit_layer + depth)
    return most if most <= lm.n_layers // 2 else None


def shard(lm: TargetModel, device: torch.device, ranks: Ranks) -> None:
    """Spread the layers' weights over all processes; this one computes on `device`. The first has
    them, in host memory, and gives the others their parts layer by layer; the others' targets may
    have none (`meta_model`). All have to run the same layers in the same order. Everything but the
    layers is whole in each process, since the loss reads the head more than once a batch. Errors:
    `ConfigError` for a quantized target."""
    # these imports take most of a second, and only training at scale needs them
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if packed_linears(lm.layers):
        raise ConfigError(
            "trainer.shard_target=true spreads plain weights, and this target is quantized. Leave "
            "one of them out: what is quantized takes a half or a quarter of the memory."
        )
    _ = lm.fingerprint  # computed while layers are whole
    lm.decode_by(Backend())  # another one would keep whole layers in memory
    lm.rope_tables.clear()
    mesh = init_device_mesh(device.type, (ranks.world,))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    for layer in lm.layers:
        weights = layer.state_dict() if ranks.is_first else {}
        fully_shard(layer.to("meta"), mesh=mesh, reshard_after_forward=True)
        layer.to_empty(device=device)
        set_model_state_dict(layer, weights, options=options)
    model = lm.hf.model
    for module in (model.embed_tokens, model.rotary_emb, model.norm, lm.head):
        if ranks.is_first:
            module.to(device)
        else:
            module.to_empty(device=device)
        for tensor in chain(module.parameters(), module.buffers()):
            ranks.overwrite(tensor.data)
    lm.hf.tie_weights()
    lm.device = lm.head_device = device
    lm.layer_devices = [device] * lm.n_layers
