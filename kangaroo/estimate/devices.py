"""The devices that a run finds: how much memory they have left, and how fast they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

import psutil
import torch
from torch.utils.benchmark import Timer

from kangaroo.models.loading import ModelConfig


class Device(Enum):
    """What computes; the value is a part of the name that the driver gives it."""

    v100 = "V100"
    a100 = "A100"
    h100 = "H100"
    h200 = "H200"
    cpu = "CPU"

    @staticmethod
    def named(name: str) -> Device | None:
        """The kind of a device; None where its speed is not known here."""
        return next((device for device in Device if device.value in name), None)


# Bytes of memory of a device's largest kind; a CPU's is another matter (`loss_chunk_of`).
MEMORY = {
    Device.v100: 32 << 30,
    Device.a100: 80 << 30,
    Device.h100: 80 << 30,
    Device.h200: 141 << 30,
    Device.cpu: 0,
}

# Dense half-precision FLOP/s by NVIDIA's data sheets; a CPU's are measured. V100 computes float16
# at that speed, but has no bfloat16, in which adapters train.
PEAK = {Device.v100: 125e12, Device.a100: 312e12, Device.h100: 989e12, Device.h200: 989e12}


@dataclass(frozen=True)
class Devices:
    """What each process of a run computes on.

    Args:
        name: of its device, or of several together.
        free: bytes of memory that it may still take.
        kind: None where its speed is not known here, and can be measured.
        total: bytes of memory of its GPU, or of the first of several; 0 for a CPU.
        place: of that device, as torch names it.
    """

    name: str
    free: int
    kind: Device | None
    total: int = 0
    place: str = "cpu"


def found(model: ModelConfig) -> Devices:
    """What the target of this process goes to, as `models.load` places it.

    The processes that torchrun started on a machine have a GPU each. The CPU's memory they share,
    and so the GPUs over which `model.device_map` spreads the layers.
    """
    sharing = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    spread = model.device_map is not None
    if not torch.cuda.is_available() or (model.device == "cpu" and not spread):
        return Devices("CPU", psutil.virtual_memory().available // sharing, Device.cpu)
    if spread:
        gpus = list(range(torch.cuda.device_count()))
    else:
        asked = None if model.device == "auto" else torch.device(model.device).index
        gpus = [torch.cuda.current_device() if asked is None else asked]
    room = [torch.cuda.mem_get_info(gpu) for gpu in gpus]
    free = sum(free for free, _ in room) // (sharing if spread else 1)
    name = torch.cuda.get_device_name(gpus[0])
    shown = f"{len(gpus)} x {name}" if spread else name
    return Devices(shown, free, Device.named(name), room[0][1], f"cuda:{gpus[0]}")


def matmul_speed(dtype: torch.dtype, place: str = "cpu") -> float:
    """FLOP/s of a GPU, or of this CPU with torch's threads, in a product of two matrices: the
    median of as many as half a second has room for.
    """
    size = 1024 if place == "cpu" else 8192
    x, y = torch.randn(2, size, size, device=place).to(dtype)
    timer = Timer("x @ y", globals={"x": x, "y": y}, num_threads=torch.get_num_threads())
    return 2 * size**3 / timer.blocked_autorange(min_run_time=0.5).median
