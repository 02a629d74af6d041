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

from kangaroo.engine.backend import Sizes
from kangaroo.engine.cache import power_of_two

PARTS = 4  # of a sum over the inputs, if the outputs alone make few programs
SHARE = 0.6  # of the processors that must have a program
WIDEST = 256  # tokens of a program
FOLDED = 128  # tokens of a program that sums the parts of a product; of all with mma.sync
MOST_SUMS = 1 << 26  # numbers of attention that may go through memory
LONG = 64  # blocks of attention; of longer texts a program has RUN
RUN = 4
STAGES = 4  # loads in flight, of which one is being multiplied
Arg = Tensor | int | float | None  # of a kernel
_needed: Tensor | None = None
NO_PDL = "KANGAROO_NO_PDL"  # an environment variable: kernels wait for the end of the one before


@dataclass(frozen=True)
class Card:
    """The properties of a GPU that tiles depend on.

    Attributes:
        shared: bytes of shared memory that a program may have.
        rows: rows of an instruction that multiplies 16-bit numbers, in a program of four warps:
            `mma.sync` has 16, Hopper's `wgmma` 64, and the `tcgen05` of sm_100 has 128.
        overlaps: a kernel may start while the one before it ends (PDL).
    """

    processors: int
    shared: int
    rows: int = 64
    overlaps: bool = True

    def is_filled(self, programs: int) -> bool:
        """Whether so many programs occupy enough of the processors."""
        return programs >= SHARE * self.processors


NO_CARD = Card(132, 227 << 10, rows=16)  # in Triton's interpreter


def tile(
    weight_OK: Tensor,
    outputs: int,
    tokens: int,
    parts: int = 1,
    most: int = 128,
    whole: bool = False,
    folds: bool = False,
) -> dict[str, int]:
    """Options of a product's kernel and launch. A program has BO outputs of TOKENS tokens and reads
    BK of K inputs at a time, with STAGES loads in flight. Results depend on the matrix and the
    card, but not on TOKENS and STAGES.

    Args:
        outputs: outputs of all matrices that are read together.
        parts: programs that share the inputs, or with `folds` parts that one program sums.
        most: most outputs of a program: 128, 64, 32 or 16.
        whole: a program must have `most` outputs.
    """
    card = card_of(weight_OK.device)
    is_narrow = weight_OK.itemsize < 4
    columns = most if whole or is_narrow else min(most, 64)
    while not whole and columns > 16 and not card.is_filled(cdiv(outputs, columns) * parts):
        columns //= 2
    rows = card.rows if is_narrow else 16
    widest = FOLDED if folds or rows == 16 else WIDEST * 128 // max(128, columns)
    widest = widest if is_narrow else 64
    programs = cdiv(outputs, columns) * parts
    while rows < min(widest, tokens) and card.is_filled(programs * cdiv(tokens, 2 * rows)):
        rows *= 2
    inputs = 64 if is_narrow else 32
    loads = card.shared // (weight_OK.itemsize * inputs * (columns + rows))
    # mma.sync has the numbers of a step in registers
    stages = max(1, min(STAGES, loads + (card.rows == 16)))
    options = {"K": weight_OK.shape[1], "BO": columns, "BK": inputs, "TOKENS": rows}
    return options | {"STAGES": stages, "num_stages": stages, "num_warps": 8 if rows > 64 else 4}


def folds_parts(weight_OK: Tensor, outputs: int, tokens: int) -> bool:
    """Whether tokens and outputs make programs enough, so that one can have all parts of a sum."""
    programs = cdiv(outputs, 128) * cdiv(tokens, FOLDED)
    return card_of(weight_OK.device).is_filled(programs)


@dataclass
class Attention:
    """How attention is divided: ROWS query heads in a program, which goes through all blocks
    (FOLDS), or through RUN of them, each a piece that goes through memory."""

    tiles: int
    runs: int
    pieces: int
    options: dict[str, int]

    @staticmethod
    def of(q_NO: Tensor, sizes: Sizes, rows: int, extent: int, places: int) -> "Attention":
        """For `rows` of so many tokens, which see slots below `extent`, and paths of `places`."""
        card = card_of(q_NO.device)
        is_narrow = q_NO.itemsize < 4
        blocks = cdiv(extent, 64)
        queries = len(q_NO) // rows * sizes.heads // sizes.kv_heads
        height = card.rows if is_narrow else 16
        programs = rows * sizes.kv_heads * cdiv(queries, height)
        folds = card.is_filled(programs // 2)  # they are uneven, and go through all blocks
        folds = folds or q_NO.numel() * blocks > MOST_SUMS
        if folds and is_narrow and queries > height:
            height = max(height, 64 if card.rows == 16 or sizes.head_size > 128 else 128)
        run = RUN if blocks >= LONG else 1
        stages = 1
        if folds or run > 1:
            size = power_of_two(sizes.head_size) * q_NO.itemsize
            blocks_held = (card.shared - height * size) // (2 * 64 * size)
            # of a run the compiler holds one more beside wgmma
            stages = max(1, min(3, blocks_held - (card.rows == 64 and not folds)))
        warps = 8 if height > 64 or sizes.head_size > 128 else 4
        options = {"ROWS": height, "RUN": run, "FOLDS": folds, "PATHS": places > 0}
        options |= {"STAGES": stages, "num_stages": stages, "num_warps": warps}
        tiles = cdiv(queries, height)
        if not folds:
            return Attention(tiles, cdiv(blocks, run), blocks, options)
        return Attention(tiles, 1, 1 + places // 64 if places else 0, options)


def cdiv(whole: int, part: int) -> int:
    """The number of parts that hold the whole."""
    return -(-whole // part)


@cache
def card_of(device: torch.device) -> Card:
    """The device's `Card`."""
    if device.type != "cuda":
        return NO_CARD
    gpu = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Card(gpu.multi_processor_count, gpu.shared_memory_per_block, 16, False)
    rows = {9: 64, 10: 128}.get(gpu.major, 16)
    shared = gpu.shared_memory_per_block_optin  # type: ignore[attr-defined]  # NVIDIA's alone
    return Card(gpu.multi_processor_count, shared, rows, gpu.major >= 9)


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, /, *args: Arg, **options: Any) -> None:
    """Launch a kernel on the device of `x`, its first argument; None stands for a tensor that it
    does not read. No multiply-adds are fused, as a compiler might do in some variants only."""
    overlaps = x.device.type != "cpu" and card_of(x.device).overlaps and not os.environ.get(NO_PDL)
    if overlaps:
        options["launch_pdl"] = True
    first = (x, _needed) if "needed_ptr" in kernel.arg_names else (x,)
    filled = (*first, *(x if arg is None else arg for arg in args))
    start(kernel, grid, filled, options | {"PDL": overlaps, "enable_fp_fusion": False})


def skip_unless(needed: Tensor | None) -> None:
    """Let kernels that take it do nothing if this number, on the device, is 0; None ends that."""
    global _needed
    _needed = needed


def start(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: Any) -> None:
    """Call Triton; tests replace this function."""
    with torch.cuda.device(args[0].device) if args[0].is_cuda else nullcontext():
        kernel[grid](*args, **options)
