"""Weights in eight bits, so that half as many bytes are read: for drafts, since verification, which
reads the target's own weights, does not accept what they get wrong; and for the target's head,
where limits to what they get wrong say which of its own rows have to be read.

Shapes: O outputs of a matrix, R room for a draft vocabulary, D hidden size.
"""

from collections.abc import Sequence
from copy import copy
from ctypes import Structure

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.cpu import native
from kangaroo.cpu.huge_pages import move_to_huge_pages
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.heads.draft_head import BLOCK, DraftHead, TextHead
from kangaroo.models.target import TargetModel
from kangaroo.utils.memory import weight_bytes


def rounded(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """Whole numbers of at most 127, int8 `[O, D]`, and what 1 is worth in each row, `[O]`, with
    zeros behind it up to a whole block."""
    scale_O = weight_OD.abs().amax(1).float().clamp(min=1e-30) / 127
    steps_OD = (weight_OD / scale_O[:, None]).round().to(torch.int8)
    return steps_OD, F.pad(scale_O, (0, -len(scale_O) % BLOCK))


def rounded_layers(layers: Sequence[native.LayerWeights]) -> list[native.LayerWeights]:
    """Layers whose matrices are bytes, with their scales behind them."""

    def matrix(weight: Tensor | None) -> Tensor | None:
        if weight is None or weight.ndim == 1:
            return weight
        steps_OD, scale_O = rounded(weight)
        return torch.cat([steps_OD.flatten(), scale_O.view(torch.int8)])

    return [native.LayerWeights(**{k: matrix(x) for k, x in vars(y).items()}) for y in layers]


def with_layers(stack: native.Stack, layers: Sequence[native.LayerWeights]) -> native.Stack:
    """A stack of rounded layers that are like its own."""
    stack = copy(stack)
    stack.layers, stack.table, stack.in_bytes = layers, native.layer_table(layers), True
    return stack


class Int8Head:
    """A drafter's head in bytes; rows of rare tokens are rounded again when the texts change."""

    def __init__(self, head: DraftHead):
        self.head, self.n_fixed, weight_RD = head, head.size, head.weight_KD
        if isinstance(head, TextHead):
            self.n_fixed, weight_RD = len(head.frequent), head.rows_RD
        self.steps_RD, self.scale_R = rounded(weight_RD)

    def as_struct(self) -> Structure:
        """The head for native code, with its draft vocabulary."""
        head, new = self.head, slice(self.n_fixed, self.head.size)
        if new.start < new.stop:
            steps_OD, scale_O = rounded(head.weight_KD[new])
            self.steps_RD[new], self.scale_R[new] = steps_OD, scale_O[: len(steps_OD)]
        struct = head.native.as_struct(ids_O=head.vocabulary_K)
        struct.weight, struct.scales = map(native.pointer, (self.steps_RD, self.scale_R))
        struct.passing = int(self.steps_RD.nbytes > native.staying_bytes())
        return struct


class RoughHead:
    """The target's head in bytes, and how wrong the logits of each row may be, as a share of the
    state's length. Native code reads in full only the rows of tokens that may be the likeliest
    (`read_likeliest` in `cpp/sampling.h`), so greedy decoding writes the same in less time."""

    def __init__(self, weight_OD: Tensor):
        width, parts = weight_OD.shape[1], []
        # states are in whole numbers of 16 bits, each wrong by half a step; sums are in float32
        of_states = 0.51 * width**0.5 / min(2**15 - 1, (2**31 - 1) // (127 * width))
        of_sums = 2.0**-22 * (width / 8 + 16)
        for weight_RD in weight_OD.split(64 * BLOCK):  # which stay in the cache
            steps_RD, scale_R = rounded(weight_RD)
            rounded_RD = steps_RD * scale_R[: len(steps_RD), None]
            error_R = (weight_RD - rounded_RD).norm(dim=1)
            error_R += (rounded_RD.norm(dim=1) + error_R) * (of_states + of_sums)
            no_limit_R = (
                ~error_R.isfinite()
            )  # of a row with infinite weights, or that are no number
            error_R[no_limit_R], scale_R[: len(steps_RD)][no_limit_R] = torch.inf, 0.0
            parts.append((steps_RD, scale_R, error_R))
        self.steps_OD, self.scale_O, error_O = map(torch.cat, zip(*parts, strict=True))
        padding = 0, -len(weight_OD) % BLOCK
        self.error_O = F.pad(error_O[None] * 1.0001, padding, mode="replicate")[0]
        move_to_huge_pages([self.steps_OD, self.scale_O, self.error_O])

    def as_struct(self) -> Structure:
        """The rows in bytes, and their limits, for native code."""
        tensors = self.steps_OD, self.scale_O, self.error_O
        weight, scales, errors = map(native.pointer, tensors)
        passing = int(self.steps_OD.nbytes > native.staying_bytes())
        head = native.NativeHead(0, weight, len(self.steps_OD), 0, passing, scales)
        return native.NativeRough(head, errors)


def rough_head(lm: TargetModel) -> RoughHead | None:
    """The target's head in bytes, made once; None where native code cannot read it, or where it is
    too small a part of the target to save much."""
    head, layers = lm.fast_head, weight_bytes(*lm.layers)
    fast = lm.acceleration.multiplies_bytes(lm.dtype) and 10 * head.weight_OD.nbytes > layers
    if head.rough is None and fast:
        head.rough = RoughHead(head.weight_OD)
    rough: RoughHead | None = head.rough
    return rough


class Int8Weights:
    """All that a drafter reads for each token of a draft, on huge pages: the layers below the exit,
    its own layer and its head."""

    def __init__(self, drafter: EarlyExit):
        lm, adapter = drafter.lm, drafter.adapter
        assert adapter.native_layer is not None
        shallow = rounded_layers(lm.fast_layers.layers[: drafter.exit_layer])
        layer = rounded_layers(adapter.native_layer.layers[: adapter.depth])
        self.fuse = rounded(adapter.get_parameter("fuse.weight")) if drafter.reads_deep else ()
        self.head = Int8Head(drafter.head)
        matrices = [x for y in (*shallow, *layer) for x in vars(y).values() if x is not None]
        matrices = [x for x in matrices if x.dtype == torch.int8]
        move_to_huge_pages([*matrices, *self.fuse, self.head.steps_RD, self.head.scale_R])
        self.shallow = with_layers(lm.fast_layers, shallow)
        self.layer = with_layers(adapter.native_layer, layer)
