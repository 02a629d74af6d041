"""How kernels start: the one function that launches them, and the shapes of their tiles.

Shapes: N tokens, O outputs, K inputs.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDTHS = 16, 32, 64  # tokens that a program may have; it reads its weights once for them
PARTS = 4  # of a sum over the inputs, where the outputs alone are few programs
SHARE = 0.6  # of the processors that have to get a program of a product
NO_PDL = "KANGAROO_NO_PDL"  # an environment variable: no kernel starts before the last one's end

# Outputs of a program by inputs at a time, warps and stages: the best on an H100 for 7B (128 for
# the two matrices gate and up, 64 for others) and for SmolLM2-135M (16).
SHAPES = {128: (128, 8, 3), 64: (128, 4, 4), 32: (128, 4, 4), 16: (64, 2, 4)}

# Bytes of fast memory that a program may have, by the card's compute capability.
SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
LEAST_SHARED = 99 << 10


@dataclass(frozen=True)
class Card:
    """What the tiles have to know of a GPU.

    Args:
        processors: how many programs run at the same time, at least.
        shared: bytes of fast memory that a program may have.
        is_hopper: an H100's kind, or later: products read their operands where loads put them, and
            a kernel may come to the processors while the one before it ends.
    """

    processors: int
    shared: int
    is_hopper: bool = True


def tile(
    weight_OK: Tensor,
    outputs: int,
    tokens: int,
    matrices: int = 1,
    parts: int = 1,
    most: int = 64,
    whole: bool = False,
) -> dict[str, int]:
    """What the kernel of a product and its launch take. A program has BO outputs of up to TOKENS
    tokens and reads BK inputs at a time, with STAGES loads on their way. Tokens and stages change
    no result; all else depends on the matrix and the card alone.

    Args:
        outputs: of each of the `matrices` that are read together.
        parts: of the sum over the inputs.
        most: outputs of a program: 128, 64, 32 or 16.
        whole: no fewer than `most`.
    """
    rows, card = most, card_of(weight_OK.device)
    while not whole and rows > 16 and cdiv(outputs, rows) * parts < SHARE * card.processors:
        rows //= 2
    inputs, warps, stages = SHAPES[rows]

    def buffers(width: int) -> int:
        """How many loads the card has room for."""
        return card.shared // (weight_OK.itemsize * inputs * (matrices * rows + width))

    while buffers(WIDTHS[-1]) < 2:
        inputs //= 2
    width = next((width for width in WIDTHS if tokens <= width), WIDTHS[-1])
    in_registers = 0 if card.is_hopper else 1
    stages = min(stages, buffers(width) + in_registers)
    options = {"BO": rows, "BK": inputs, "TOKENS": width, "STAGES": stages}
    return options | {"num_warps": warps, "num_stages": stages}


def cdiv(whole: int, part: int) -> int:
    """How many parts hold the whole."""
    return -(-whole // part)


@cache
def card_of(device: torch.device) -> Card:
    """A device's figures; an H100's where there is none, in Triton's interpreter."""
    if device.type != "cuda":
        return Card(132, SHARED[9, 0])
    gpu = torch.cuda.get_device_properties(device)
    shared = SHARED.get((gpu.major, gpu.minor), LEAST_SHARED)
    return Card(gpu.multi_processor_count, shared, gpu.major >= 9)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Tensor | int | float | None, **options: Any
) -> None:
    """Launch a kernel of this project, on the device of its first tensor. None stands for a tensor
    that it does not read.

    Products are not fused with sums where the code does not say so: a compiler might do it in one
    variant of a kernel and not in another, and results would differ.
    """
    any_tensor = next(x for x in args if isinstance(x, Tensor))
    device = any_tensor.device
    overlaps = device.type != "cpu" and card_of(device).is_hopper and not os.environ.get(NO_PDL)
    if overlaps:
        options["launch_pdl"] = True
    filled = tuple(any_tensor if x is None else x for x in args)
    start(kernel, grid, filled, options | {"PDL": overlaps, "enable_fp_fusion": False})


def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
    """Where Triton is called; a recording may stand in for it."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **options)
