"""Weights in eight bits, for drafts alone: a draft token reads half as many bytes. Verification,
which reads the target's own weights, does not accept what they get wrong.

Shapes: O outputs of a matrix, R room for a draft vocabulary, D hidden size.
"""

from collections.abc import Sequence
from copy import copy
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.cpu import native, structs
from kangaroo.cpu.blocks import IN_BYTES, Weight
from kangaroo.cpu.huge_pages import move_to_huge_pages
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.engine.backend import LayerWeights
from kangaroo.heads.draft_head import BLOCK, DraftHead, TextHead


def rounded(weight_OD: Tensor) -> tuple[Tensor, Tensor]:
    """The weights in whole numbers up to 127, int8 `[O, D]`, and the scale of each row, `[O]`,
    padded with zeros to whole blocks."""
    scale_O = weight_OD.abs().amax(1).float().clamp(min=1e-30) / 127
    steps_OD = (weight_OD / scale_O[:, None]).round().to(torch.int8)
    return steps_OD, F.pad(scale_O, (0, -len(scale_O) % BLOCK))


def rounded_layers(layers: Sequence[LayerWeights[Weight]]) -> list[LayerWeights[Weight]]:
    """The layers with their matrices in bytes, each followed by its scales."""

    def matrix(weight: Tensor | None) -> Tensor | None:
        if weight is None or weight.ndim == 1:
            return weight
        steps_OD, scale_O = rounded(weight)
        return torch.cat([steps_OD.flatten(), scale_O.view(torch.int8)])

    return [LayerWeights(**{k: matrix(x) for k, x in vars(y).items()}) for y in layers]


def with_layers(stack: native.Stack, layers: Sequence[LayerWeights[Weight]]) -> native.Stack:
    """The stack with rounded layers in place of its own."""
    stack = copy(stack)
    stack.read(layers)
    return stack


def head_struct(head: DraftHead) -> structs.Head:
    """A drafter's head for native code, with its draft vocabulary."""
    assert isinstance(head.fast, native.Head)
    return head.fast.as_struct(head.norm_D, ids_O=head.vocabulary_K)


class Int8Head:
    """A drafter's head in bytes; rows of rare tokens are rounded again when the texts change."""

    def __init__(self, head: DraftHead):
        self.head = head
        self.n_fixed = head.size
        weight_RD = head.weight_KD
        if isinstance(head, TextHead):
            self.n_fixed = len(head.frequent)
            weight_RD = head.rows_RD
        self.steps_RD, self.scale_R = rounded(weight_RD)

    def as_struct(self) -> structs.Head:
        head = self.head
        new = slice(self.n_fixed, head.size)
        if new.start < new.stop:
            steps_OD, scale_O = rounded(head.weight_KD[new])
            self.steps_RD[new] = steps_OD
            self.scale_R[new] = scale_O[: len(steps_OD)]
        struct = head_struct(head)
        struct.weight, struct.scales = map(native.pointer, (self.steps_RD, self.scale_R))
        struct.kind = IN_BYTES
        struct.passing = int(self.steps_RD.nbytes > native.staying_bytes())
        return struct


_rounded: WeakKeyDictionary[EarlyExit, "Int8Weights"] = WeakKeyDictionary()


def int8_weights(drafter: EarlyExit) -> "Int8Weights":
    """A drafter's weights, rounded once."""
    if drafter not in _rounded:
        _rounded[drafter] = Int8Weights(drafter)
    return _rounded[drafter]


class Int8Weights:
    """All that a drafter reads for each token of a draft, on huge pages: the layers below the exit,
    its own layer and its head."""

    def __init__(self, drafter: EarlyExit):
        adapter = drafter.adapter
        target_stack = native.stack_of(drafter.lm.fast_layers)
        adapter_stack = native.stack_of(adapter.fast_layers)
        below = target_stack.layers[: drafter.exit_layer] if target_stack.is_plain else ()
        shallow = rounded_layers(below)
        layer = rounded_layers(adapter_stack.layers[: adapter.depth])
        fusing = adapter.fast_fusing
        fuse_weight = fusing.weight if isinstance(fusing, native.Fusing) else None
        self.fuse = () if fuse_weight is None else rounded(fuse_weight)
        self.head = Int8Head(drafter.head)
        matrices = [x for y in (*shallow, *layer) for x in vars(y).values() if x is not None]
        matrices = [x for x in matrices if x.dtype == torch.int8]
        move_to_huge_pages([*matrices, *self.fuse, self.head.steps_RD, self.head.scale_R])
        # drafts read packed layers as they lie
        self.shallow = with_layers(target_stack, shallow) if shallow else None
        self.layer = with_layers(adapter_stack, layer)
