"""Launches of kernels, and the shapes of their tiles.

Shapes: N tokens, O outputs, K inputs.
"""

import os
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

WIDTHS = 16, 32, 64  # possible tokens of a program, which reads its weights once
PARTS = 4  # of a sum over the inputs, if the outputs alone make few programs
SHARE = 0.6  # of the processors that must have a program of a product
NO_PDL = "KANGAROO_NO_PDL"  # an environment variable: kernels wait for the end of the one before

# Inputs at a time, warps and stages, by the outputs of a program: the best on an H100 for 7B (128
# for the two matrices gate and up, 64 for others) and for SmolLM2-135M (16).
SHAPES = {128: (128, 8, 3), 64: (128, 4, 4), 32: (128, 4, 4), 16: (64, 2, 4)}

# Bytes of shared memory that a program may have, by compute capability.
SHARED = {(8, 0): 163 << 10, (8, 7): 163 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
MIN_SHARED = 99 << 10


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that tiles depend on."""

    processors: int
    shared: int  # bytes of shared memory that a program may have
    # or later: products read operands from shared memory, and a kernel may start while the one
    # before it ends (PDL)
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
    """Options of a product's kernel and launch. A program has BO outputs of up to TOKENS tokens and
    reads BK of K inputs at a time, with STAGES loads in flight. Results depend on the matrix and
    the card, but not on TOKENS and STAGES.

    Args:
        outputs: outputs of each of the `matrices` that are read together.
        parts: parts of the sum over the inputs.
        most: most outputs of a program: 128, 64, 32 or 16.
        whole: a program must have `most` outputs.
    """
    rows = most
    card = card_of(weight_OK.device)
    while not whole and rows > 16 and cdiv(outputs, rows) * parts < SHARE * card.processors:
        rows //= 2
    inputs, warps, stages = SHAPES[rows]

    def buffers(width: int) -> int:
        """The loads that the card has room for."""
        return card.shared // (weight_OK.itemsize * inputs * (matrices * rows + width))

    while buffers(WIDTHS[-1]) < 2:
        inputs //= 2
    width = next((width for width in WIDTHS if tokens <= width), WIDTHS[-1])
    in_registers = 0 if card.is_hopper else 1
    stages = min(stages, buffers(width) + in_registers)
    options = {"K": weight_OK.shape[1], "BO": rows, "BK": inputs, "TOKENS": width}
    return options | {"STAGES": stages, "num_warps": warps, "num_stages": stages}


def cdiv(whole: int, part: int) -> int:
    """The number of parts that hold the whole."""
    return -(-whole // part)


@cache
def card_of(device: torch.device) -> Card:
    """The device's `Card`; an H100's for a CPU, in Triton's interpreter."""
    if device.type != "cuda":
        return Card(132, SHARED[9, 0])
    gpu = torch.cuda.get_device_properties(device)
    shared = SHARED.get((gpu.major, gpu.minor), MIN_SHARED)
    return Card(gpu.multi_processor_count, shared, gpu.major >= 9)


def launch(
    kernel: Any, grid: tuple[int, ...], *args: Tensor | int | float | None, **options: Any
) -> None:
    """Launch a kernel on the device of its first tensor; None stands for a tensor that it does not
    read. No multiply-adds are fused, as a compiler might do in some variants of a kernel only."""
    any_tensor = next(x for x in args if isinstance(x, Tensor))
    device = any_tensor.device
    overlaps = device.type != "cpu" and card_of(device).is_hopper and not os.environ.get(NO_PDL)
    if overlaps:
        options["launch_pdl"] = True
    filled = tuple(any_tensor if x is None else x for x in args)
    start(kernel, grid, filled, options | {"PDL": overlaps, "enable_fp_fusion": False})


def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
    """Call Triton; tests replace this function."""
    device = next(x.device for x in args if isinstance(x, Tensor))
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        kernel[grid](*args, **options)
