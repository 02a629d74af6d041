"""A target spread over processes, for training at scale."""

import torch

from kangaroo.engine.acceleration import Acceleration
from kangaroo.models.layer_weights import packed_linears
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError


def shard(lm: TargetModel, device: torch.device) -> None:
    """Spread the layers' weights over all processes; a layer is whole only while it runs, and this
    process computes on `device`. All then have to run the same layers in the same order. Embedding,
    final norm and head stay whole: the loss reads the head more than once a batch. Errors:
    `ConfigError` for a quantized target, whose weights are no plain tensors."""
    # imported here: it takes most of a second, and only training at scale needs it
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if packed_linears(lm.layers):
        raise ConfigError(
            "trainer.shard_target=true spreads plain weights, and this target is quantized. Leave "
            "one of them out: what is quantized takes a half or a quarter of the memory."
        )
    _ = lm.fingerprint  # while layers are whole
    lm.decode_by(Acceleration())  # what decodes faster holds on to whole layers
    lm.rope_tables.clear()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for layer in lm.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    for module in (lm.hf.model.embed_tokens, lm.hf.model.rotary_emb, lm.hf.model.norm):
        module.to(device)
    lm.head.to(device)
    lm.device, lm.layer_devices = device, [device] * lm.n_layers
