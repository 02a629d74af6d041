"""One micro-batch: a frozen forward of the target, then every adapter's losses and gradients.

Shapes: B rows, T tokens, M assistant positions, D hidden size, F results.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.cache import Block
from kangaroo.models.target import LM
from kangaroo.training.batches import Tokens
from kangaroo.training.distill import AnyTeacher, Graded, Student, Teacher, distill
from kangaroo.training.kept import KeptTeacher
from kangaroo.training.recipe import Trainee


@dataclass
class Seen:
    """A text as the frozen target sees it.

    Args:
        taps: hidden states `[B, T, D]` by the number of layers below them.
        deep: states after the target's final norm, likewise, where an adapter reads them.
        teacher: what the target says at the assistant's positions.
    """

    tokens: Tokens
    block: Block
    taps: dict[int, Tensor]
    deep: dict[int, Tensor]
    teacher: AnyTeacher


@torch.no_grad()
def look(lm: LM, tokens: Tokens, trained: Sequence[Trainee], loss_chunk: int) -> Seen:
    """The one frozen forward that all adapters learn from.

    With kept distributions it leaves out the head, and ends where the last adapter reads.
    """
    block = replace(tokens.block(lm), rows=slice(0, len(tokens.input_BT)))
    wanted = {tap for trainee in trained for tap in trainee.adapter.taps}
    deep = {tap for trainee in trained if (tap := trainee.adapter.deep_tap) is not None}
    stop = lm.n_layers if tokens.kept is None else max(wanted | deep)
    x_BTD, taps = lm.run(lm.embed(tokens.input_BT), None, block, range(stop), wanted | deep)
    whole = stop == lm.n_layers
    final_MD = (x_BTD if whole else x_BTD[..., :0])[tokens.wanted_BT.to(x_BTD.device)]
    final_MD = lm.norm(final_MD) if whole else final_MD
    normed = {tap: lm.norm(taps[tap]) for tap in deep}
    taps = {tap: taps[tap] for tap in wanted}
    if tokens.kept is not None:
        kept = KeptTeacher.of(final_MD, *tokens.kept, trained[0].targets)
        # once is enough where it is remembered
        return Seen(replace(tokens, kept=None), block, taps, normed, kept)
    is_whole = bool(trained) and trained[0].vocabulary_K is None
    teacher = Teacher.of(lm, final_MD, None if is_whole else loss_chunk)
    return Seen(tokens, block, taps, normed, teacher)


def teach(
    lm: LM, seen: Seen, trained: Sequence[Trainee], loss_chunk: int, weight: float
) -> list[list[Graded]]:
    """Add `weight` x the gradient of each adapter's summed loss to its parameters.

    Returns the grades of each adapter's draft steps.
    """
    states = [_states(lm, seen, trainee, trainee.recipe.steps) for trainee in trained]
    students = [
        _students(seen, trainee, own, weight) for trainee, own in zip(trained, states, strict=True)
    ]
    grades = _graded(seen, trained, students, loss_chunk, backward=True)
    for trainee, own, asked in zip(trained, grades, students, strict=True):
        # one walk through the adapter, for all its steps and chunks
        pairs = [pair for grade in own for pair in grade.gradients]
        roots, gradients = [x for x, _ in pairs], [gradient for _, gradient in pairs]
        side = trainee.adapter.side_loss(*_together(asked), seen.teacher.state_MD)
        if side is not None:
            roots.append(side)
            gradients.append(torch.full_like(side, weight))
        torch.autograd.backward(roots, gradients)
    return grades


@torch.no_grad()
def grade(
    lm: LM, seen: Seen, trained: Sequence[Trainee], loss_chunk: int, steps: int
) -> tuple[list[list[Graded]], list[Tensor]]:
    """Of each adapter the grades of the first `steps` draft steps, as far as they differ, and its
    tally for what its drafter has to know."""
    students = []
    for trainee in trained:
        count = trainee.recipe.architecture.graded_steps(steps)
        students.append(_students(seen, trainee, _states(lm, seen, trainee, count)))
    graded = _graded(seen, trained, students, loss_chunk, backward=False)
    tallies = [
        trainee.adapter.tally(trainee.heads, *_together(own), seen.teacher.top_M)
        for trainee, own in zip(trained, students, strict=True)
    ]
    return graded, tallies


def _graded(
    seen: Seen,
    trained: Sequence[Trainee],
    students: Sequence[Sequence[Student]],
    loss_chunk: int,
    backward: bool,
) -> list[list[Graded]]:
    together = [student for own in students for student in own]
    graded = iter(distill(seen.teacher, trained[0].targets, together, loss_chunk, backward))
    return [[next(graded) for _ in own] for own in students]


def _students(
    seen: Seen, trainee: Trainee, states: Sequence[Tensor], weight: float = 1.0
) -> list[Student]:
    """An adapter at each of its draft steps."""
    wanted_BT = valid_BT = seen.tokens.wanted_BT
    students = []
    for step, state_BTD in enumerate(states):
        students.append(
            Student(
                state_MD=state_BTD[wanted_BT.to(state_BTD.device)],
                valid_M=valid_BT[wanted_BT],
                head=trainee.heads[min(step, len(trainee.heads) - 1)],
                loss=trainee.recipe.loss,
                weight=weight * trainee.recipe.step_decay**step,
            )
        )
        # one step on, the draft began a token earlier, which the assistant must have written
        valid_BT = valid_BT & F.pad(valid_BT[:, :-1], (1, 0))
    return students


def _together(students: Sequence[Student]) -> tuple[list[Tensor], Tensor]:
    """The states of all draft steps, and `[steps, M]` where they are valid."""
    states = [student.state_MD for student in students]
    return states, torch.stack([student.valid_M for student in students])


def _states(lm: LM, seen: Seen, trainee: Trainee, steps: int) -> list[Tensor]:
    weight = next(trainee.adapter.parameters())
    taps = {tap: seen.taps[tap].to(weight) for tap in trainee.adapter.taps}
    deep_tap = trainee.adapter.deep_tap
    deep_BTD = weight.new_empty(*seen.tokens.input_BT.shape, 0)
    if deep_tap is not None:
        deep_BTD = seen.deep[deep_tap].to(weight)
    block, read_BT = seen.block.to(weight.device), seen.tokens.wanted_BT.to(weight.device)
    with _precision(lm):
        return trainee.adapter.states(taps, deep_BTD, block, steps, read_BT)


def _precision(lm: LM) -> AbstractContextManager[object]:
    """Matrix products in bfloat16 under a half-precision target; float32 stays exact."""
    half = lm.dtype != torch.float32
    return torch.autocast(lm.device.type, torch.bfloat16, enabled=half)
