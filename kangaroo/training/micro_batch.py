"""One micro-batch: a frozen forward of the target, then every adapter's losses and gradients.

Shapes: B rows, T tokens, M assistant positions, D hidden size, F results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.cache import ForwardMeta
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import Tokens
from kangaroo.training.distill import (
    StoredDistributions,
    Student,
    TargetDistributions,
    WholeDistributions,
    distill,
)
from kangaroo.training.recipe import Trainee


@dataclass
class TargetOutputs:
    """A text as the frozen target sees it: hidden states `[B, T, D]` by the number of layers below
    them, `deep` ones normed, and what it says at the assistant's positions."""

    tokens: Tokens
    meta: ForwardMeta
    taps: dict[int, Tensor]
    deep: dict[int, Tensor]
    distributions: TargetDistributions


@torch.no_grad()
def forward_target(
    lm: TargetModel, tokens: Tokens, trained: Sequence[Trainee], loss_chunk: int
) -> TargetOutputs:
    """The one frozen forward that all adapters learn from; with stored distributions it leaves out
    the head, and ends where the last adapter reads."""
    rows, width = tokens.input_BT.shape
    meta = replace(lm.chunk(0, width, row=0, n_slots=width), rows=slice(0, rows))
    read = {tap for trainee in trained for tap in trainee.adapter.taps}
    deep = {tap for trainee in trained if (tap := trainee.adapter.deep_tap) is not None}
    stop = lm.n_layers if tokens.stored is None else max(read | deep)
    x_BTD, taps = lm.run(lm.embed(tokens.input_BT), None, meta, range(stop), read | deep)
    runs_whole = stop == lm.n_layers
    final_MD = (x_BTD if runs_whole else x_BTD[..., :0])[tokens.wanted_BT.to(x_BTD.device)]
    final_MD = lm.norm(final_MD) if runs_whole else final_MD
    if tokens.stored is not None:
        stored = StoredDistributions(final_MD, *tokens.stored, trained[0].targets)
        distributions: TargetDistributions = stored
        tokens = replace(tokens, stored=None)  # once is enough where the outputs are cached
    else:
        drafts_all = bool(trained) and trained[0].vocabulary_K is None
        distributions = WholeDistributions(lm, final_MD, None if drafts_all else loss_chunk)
    normed = {tap: lm.norm(taps[tap]) for tap in deep}
    return TargetOutputs(tokens, meta, {tap: taps[tap] for tap in read}, normed, distributions)


def train_step(
    lm: TargetModel,
    outputs: TargetOutputs,
    trained: Sequence[Trainee],
    loss_chunk: int,
    weight: float,
) -> list[list[Student]]:
    """Add `weight` x the gradient of each adapter's summed loss to its parameters; its draft steps,
    graded."""
    students = [
        _students(lm, outputs, trainee, trainee.recipe.steps, weight) for trainee in trained
    ]
    target, together = outputs.distributions, list(chain(*students))
    distill(target, trained[0].targets, together, loss_chunk, backward=True)
    for trainee, graded in zip(trained, students, strict=True):
        # one walk through the adapter, for all its steps and chunks
        pairs = [pair for student in graded for pair in student.gradients]
        roots, gradients = [x for x, _ in pairs], [gradient for _, gradient in pairs]
        side = trainee.adapter.side_loss(*_together(graded), target.state_MD)
        if side is not None:
            roots.append(side)
            gradients.append(torch.full_like(side, weight))
        torch.autograd.backward(roots, gradients)
    return students


@torch.no_grad()
def grade(
    lm: TargetModel, outputs: TargetOutputs, trained: Sequence[Trainee], loss_chunk: int, steps: int
) -> tuple[list[list[Student]], list[Tensor]]:
    """Of each adapter the first `steps` draft steps, as far as they differ, graded; and its tally
    (`Trainable.tally`)."""
    students = [
        _students(lm, outputs, trainee, trainee.recipe.architecture.graded_steps(steps))
        for trainee in trained
    ]
    target = outputs.distributions
    distill(target, trained[0].targets, list(chain(*students)), loss_chunk, backward=False)
    tallies = [
        trainee.adapter.tally(trainee.heads, *_together(graded), target.top_M)
        for trainee, graded in zip(trained, students, strict=True)
    ]
    return students, tallies


def _students(
    lm: TargetModel, outputs: TargetOutputs, trainee: Trainee, steps: int, weight: float = 1.0
) -> list[Student]:
    adapter, wanted_BT = trainee.adapter, outputs.tokens.wanted_BT
    parameter = next(adapter.parameters())
    taps = {tap: outputs.taps[tap].to(parameter) for tap in adapter.taps}
    deep_BTD = parameter.new_empty(*wanted_BT.shape, 0)
    if adapter.deep_tap is not None:
        deep_BTD = outputs.deep[adapter.deep_tap].to(parameter)
    meta, read_BT = outputs.meta.to(parameter.device), wanted_BT.to(parameter.device)
    # matrix products in bfloat16 under a half-precision target; float32 stays exact
    is_half = lm.dtype != torch.float32
    with torch.autocast(lm.device.type, torch.bfloat16, enabled=is_half):
        states = adapter.states(taps, deep_BTD, meta, steps, read_BT)
    students, valid_BT = [], wanted_BT
    for step, state_BTD in enumerate(states):
        student = Student(
            state_MD=state_BTD[wanted_BT.to(state_BTD.device)],
            valid_M=valid_BT[wanted_BT],
            head=trainee.heads[min(step, len(trainee.heads) - 1)],
            loss=trainee.recipe.loss,
            weight=weight * trainee.recipe.step_decay**step,
        )
        students.append(student)
        # one step on, the draft began a token earlier, which the assistant must have written
        valid_BT = valid_BT & F.pad(valid_BT[:, :-1], (1, 0))
    return students


def _together(students: Sequence[Student]) -> tuple[list[Tensor], Tensor]:
    states = [student.state_MD for student in students]
    return states, torch.stack([student.valid_M for student in students])
