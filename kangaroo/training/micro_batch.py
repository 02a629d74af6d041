"""One micro-batch: a frozen forward of the target, then every adapter's losses and gradients.

Shapes: B rows, T tokens, M assistant positions, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.engine.cache import ForwardMeta
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import Tokens
from kangaroo.training.distill import StoredDistributions, Student, WholeDistributions, distill
from kangaroo.training.recipe import Trainee


@dataclass
class TargetOutputs:
    """A text as the frozen target sees it: hidden states `[B, T, D]` by the number of layers below
    them, `deep` ones normed, and what it says at the assistant's positions."""

    tokens: Tokens
    meta: ForwardMeta
    taps: dict[int, Tensor]
    deep: dict[int, Tensor]
    distributions: WholeDistributions | StoredDistributions


@torch.no_grad()
def forward_target(lm: TargetModel, tokens: Tokens, trained: Sequence[Trainee]) -> TargetOutputs:
    """The one frozen forward that all adapters learn from; with stored distributions it leaves out
    the head, and ends where the last adapter reads."""
    rows, width = tokens.input_BT.shape
    meta = replace(lm.chunk(0, width, row=0, n_slots=width), rows=slice(0, rows))
    taps = {tap for trainee in trained for tap in trainee.adapter.taps}
    deep = {tap for trainee in trained if (tap := trainee.adapter.deep_tap) is not None}
    stop = lm.n_layers if tokens.stored is None else max(taps | deep)
    x_BTD, states = lm.run(lm.embed(tokens.input_BT), None, meta, range(stop), taps | deep)
    wanted_BT = tokens.wanted_BT.to(x_BTD.device)
    final_MD = lm.norm(x_BTD[wanted_BT]) if stop == lm.n_layers else x_BTD[..., :0][wanted_BT]
    head = trained[0].heads[0]
    normed = {tap: lm.norm(states[tap]) for tap in deep}
    shallow = {tap: states[tap] for tap in taps}
    if tokens.stored is None:
        whole = WholeDistributions(lm, final_MD, head.vocabulary_K)
        return TargetOutputs(tokens, meta, shallow, normed, whole)
    stored = StoredDistributions(final_MD, *tokens.stored, head)
    # what is stored lies there once, which is enough where the outputs are cached
    return TargetOutputs(replace(tokens, stored=None), meta, shallow, normed, stored)


def train_step(
    lm: TargetModel,
    outputs: TargetOutputs,
    trained: Sequence[Trainee],
    loss_chunk: int,
    weight: float,
) -> list[list[Student]]:
    """Add `weight` x the gradient of each adapter's summed loss to its parameters; its draft steps,
    graded."""
    students = [students_of(lm, outputs, x, x.recipe.steps, weight) for x in trained]
    distill(outputs.distributions, list(chain(*students)), loss_chunk)
    for trainee, steps in zip(trained, students, strict=True):
        # one walk through the adapter, for all its steps and chunks
        pairs = [pair for student in steps for pair in student.gradients]
        side = trainee.adapter.side_loss(*together(steps), outputs.distributions.state_MD)
        if side is not None:
            pairs.append((side, torch.full_like(side, weight)))
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
    return students


@torch.no_grad()
def grade(
    lm: TargetModel, outputs: TargetOutputs, trained: Sequence[Trainee], loss_chunk: int, steps: int
) -> list[list[Student]]:
    """Of each adapter the first `steps` draft steps, as far as they differ, graded."""
    counts = [trainee.recipe.architecture.graded_steps(steps) for trainee in trained]
    students = [students_of(lm, outputs, *x) for x in zip(trained, counts, strict=True)]
    distill(outputs.distributions, list(chain(*students)), loss_chunk)
    return students


def students_of(
    lm: TargetModel, outputs: TargetOutputs, trainee: Trainee, steps: int, weight: float = 1.0
) -> list[Student]:
    """The states of an adapter at its first draft steps, to be graded."""
    adapter, wanted_BT = trainee.adapter, outputs.tokens.wanted_BT
    parameter = next(adapter.parameters())
    taps = {tap: outputs.taps[tap].to(parameter) for tap in adapter.taps}
    deep_BTD = parameter.new_empty(*wanted_BT.shape, 0)
    if adapter.deep_tap is not None:
        deep_BTD = outputs.deep[adapter.deep_tap].to(parameter)
    meta = outputs.meta.to(parameter.device)
    # matrix products in bfloat16 under a half-precision target; float32 stays exact
    is_half = lm.dtype != torch.float32
    with torch.autocast(lm.device.type, torch.bfloat16, enabled=is_half):
        states = adapter.states(taps, deep_BTD, meta, steps)
    students, valid_BT = [], wanted_BT
    for step, state_BTD in enumerate(states):
        head = trainee.heads[min(step, len(trainee.heads) - 1)]
        discounted = weight * trainee.recipe.step_decay**step
        state_MD, valid_M = state_BTD[wanted_BT.to(state_BTD.device)], valid_BT[wanted_BT]
        students.append(Student(state_MD, valid_M, head, trainee.recipe.loss, discounted))
        # one step on, the draft began a token earlier, which the assistant must have written
        valid_BT = valid_BT & F.pad(valid_BT[:, :-1], (1, 0))
    return students


def together(students: Sequence[Student]) -> tuple[list[Tensor], Tensor]:
    """The states of all draft steps, and where a draft has that step, `[steps, M]`."""
    states = [student.state_MD for student in students]
    return states, torch.stack([student.valid_M for student in students])
