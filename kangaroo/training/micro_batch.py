"""One micro-batch: a frozen forward of the target, then every adapter's losses and gradients.

Shapes: B rows, T tokens, M assistant positions, D hidden size, F figures.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kangaroo.cache import Block, KVCache
from kangaroo.model import LM
from kangaroo.trained.adapter import Adapter
from kangaroo.trained.medusa_heads import MedusaHeads
from kangaroo.training.batches import Tokens
from kangaroo.training.distill import Graded, Student, Teacher, distill
from kangaroo.training.recipe import Trainee
from kangaroo.training.unroll import Unrolled, bias, look_ahead, sees, unroll

GUESSES = 10  # of each of Medusa's heads, of which its tree takes the best


@dataclass
class Seen:
    """A text as the frozen target sees it.

    Args:
        taps: hidden states `[B, T, D]` by the number of layers below them.
        deep_BTD: normed final states.
        teacher: what the target says at the assistant's positions.
        cache: the text's keys and values, where something is to follow it.
    """

    tokens: Tokens
    block: Block
    taps: dict[int, Tensor]
    deep_BTD: Tensor
    teacher: Teacher
    cache: KVCache | None


@torch.no_grad()
def look(lm: LM, tokens: Tokens, trained: Sequence[Trainee], loss_chunk: int) -> Seen:
    """The one frozen forward that all adapters learn from."""
    rows, width = tokens.input_BT.shape
    block = replace(tokens.block(lm), rows=slice(0, rows))
    followed = any(trainee.recipe.on_policy for trainee in trained)
    cache = lm.new_cache(rows, 2 * width) if followed else None
    exits = {t.adapter.exit_layer for t in trained if isinstance(t.adapter, Adapter)}
    x_BTD, taps = lm.run(lm.embed(tokens.input_BT), cache, block, range(lm.n_layers), exits)
    deep_BTD = lm.norm(x_BTD)
    teacher = Teacher.of(lm, deep_BTD[tokens.wanted_BT.to(deep_BTD.device)], loss_chunk)
    return Seen(tokens, block, taps, deep_BTD, teacher, cache)


def teach(
    lm: LM, seen: Seen, trained: Sequence[Trainee], loss_chunk: int, weight: float
) -> list[list[Graded]]:
    """Add `weight` x the gradient of each adapter's summed loss to its parameters.

    Returns the grades of each adapter's draft steps, then of its own token if it is on policy.
    """
    unrolled = [_states(lm, seen, trainee, trainee.recipe.steps) for trainee in trained]
    grades = _grade(seen, trained, [states for states, _ in unrolled], loss_chunk, weight)
    for trainee, (states, past), own in zip(trained, unrolled, grades, strict=True):
        if trainee.recipe.on_policy:
            state_BTD, deep_BTD = _own_tokens(lm, seen, trainee, states[0], past.first())
            wanted_BT = seen.tokens.wanted_BT
            student = _student(trainee, state_BTD, wanted_BT, wanted_BT, weight, step=1)
            teacher = Teacher.of(lm, deep_BTD[wanted_BT.to(deep_BTD.device)], loss_chunk)
            own += distill(teacher, trainee.targets, [student], loss_chunk, backward=True)
        # one walk through the adapter, for all its steps and chunks
        pairs = [pair for grade in own for pair in grade.gradients]
        torch.autograd.backward([x for x, _ in pairs], [gradient for _, gradient in pairs])
    return grades


@torch.no_grad()
def grade(
    lm: LM, seen: Seen, trained: Sequence[Trainee], loss_chunk: int, steps: int
) -> list[list[Graded]]:
    """The grades of `steps` draft steps of each fused adapter, of Medusa's heads, and of one step
    of any other.
    """
    counts = [trainee.recipe.graded_steps(steps) for trainee in trained]
    states = [_states(lm, seen, t, count)[0] for t, count in zip(trained, counts, strict=True)]
    return _grade(seen, trained, states, loss_chunk, weight=None)


@torch.no_grad()
def guesses(lm: LM, seen: Seen, trainee: Trainee, loss_chunk: int) -> tuple[Tensor, Tensor]:
    """Of each head and each of its likeliest tokens, how often that is the target's choice
    (`[heads, GUESSES]`), and of how many positions of each head (`[heads]`).
    """
    steps, _ = _states(lm, seen, trainee, trainee.recipe.steps)
    wanted_BT = valid_BT = seen.tokens.wanted_BT
    right, counts = [], []
    for step, state_BTD in enumerate(steps):
        head = trainee.heads[min(step, len(trainee.heads) - 1)]
        right_G, valid_M = torch.zeros(GUESSES), valid_BT[wanted_BT]
        states, tops = state_BTD[wanted_BT][valid_M], seen.teacher.top_M[valid_M]
        for state_CD, top_C in zip(states.split(loss_chunk), tops.split(loss_chunk), strict=True):
            guessed_CG = head.token_of(head(state_CD).topk(GUESSES).indices)
            right_G += (guessed_CG == top_C[:, None]).sum(0).cpu()
        right.append(right_G)
        counts.append(valid_M.sum().cpu())
        valid_BT = valid_BT & F.pad(valid_BT[:, :-1], (1, 0))
    return torch.stack(right), torch.stack(counts)


def _grade(
    seen: Seen, trained: Sequence[Trainee], states: Sequence[list[Tensor]], loss_chunk: int,
    weight: float | None,
) -> list[list[Graded]]:  # fmt: skip
    students, wanted_BT = [], seen.tokens.wanted_BT
    for trainee, own in zip(trained, states, strict=True):
        valid_BT = wanted_BT
        for step, state_BTD in enumerate(own):
            students.append(
                _student(
                    trainee, state_BTD, wanted_BT, valid_BT, 1.0 if weight is None else weight, step
                )
            )
            # one step on, the draft began a token earlier, which the assistant must have written
            valid_BT = valid_BT & F.pad(valid_BT[:, :-1], (1, 0))
    head = trained[0].targets
    graded = iter(distill(seen.teacher, head, students, loss_chunk, backward=weight is not None))
    return [[next(graded) for _ in own] for own in states]


def _student(
    trainee: Trainee, state_BTD: Tensor, wanted_BT: Tensor, valid_BT: Tensor, weight: float,
    step: int,
) -> Student:  # fmt: skip
    return Student(
        state_MD=state_BTD[wanted_BT.to(state_BTD.device)],
        valid_M=valid_BT[wanted_BT],
        head=trainee.heads[min(step, len(trainee.heads) - 1)],
        loss=trainee.recipe.loss,
        weight=weight * trainee.recipe.step_decay**step,
    )


def _states(lm: LM, seen: Seen, trainee: Trainee, steps: int) -> tuple[list[Tensor], Unrolled]:
    adapter, past = trainee.adapter, Unrolled()
    weight = next(adapter.parameters())
    deep_BTD, block = seen.deep_BTD.to(weight), seen.block.to(weight.device)
    if isinstance(adapter, MedusaHeads):
        with _precision(lm):
            return look_ahead(adapter, deep_BTD, block, steps), past
    f_BTD = seen.taps[adapter.exit_layer].to(weight)
    with _precision(lm):
        return unroll(adapter, f_BTD, deep_BTD, block, steps, past), past


def _own_tokens(
    lm: LM, seen: Seen, trainee: Trainee, state_BTD: Tensor, past: Unrolled
) -> tuple[Tensor, Tensor]:
    """After every token, the one that the adapter would draft there: its next state, the target's.

    Such a token sees the text up to where it stands, and itself; not the others of its kind.
    """
    adapter, width = trainee.adapter, seen.block.positions_RT.shape[1]
    assert isinstance(adapter, Adapter)
    with torch.no_grad():
        (head,) = trainee.heads
        logits_MV = head.spread(head(state_BTD.detach().flatten(0, 1)))
        token_BT = logits_MV.argmax(-1).unflatten(0, state_BTD.shape[:2])
        positions_RT = seen.block.positions_RT + 1
        itself_TT = torch.eye(width, dtype=torch.bool, device=lm.device)
        text_RTT = sees(seen.block)
        block = replace(
            seen.block,
            slots_RT=seen.block.slots_RT + width,
            positions_RT=positions_RT,
            bias_R1TE=bias(torch.cat([text_RTT, itself_TT.expand_as(text_RTT)], -1), seen.deep_BTD),
            extent=2 * width,
            rope=lm.rope(positions_RT),
        )
        x_BTD, taps = lm.run(
            lm.embed(token_BT), seen.cache, block, range(lm.n_layers), (adapter.exit_layer,)
        )
        deep_BTD = lm.norm(x_BTD)
    with _precision(lm):
        f_BTD = taps[adapter.exit_layer].to(state_BTD)
        return adapter(f_BTD, state_BTD, block.to(f_BTD.device), past), deep_BTD


def _precision(lm: LM) -> AbstractContextManager[object]:
    """Matrix products in bfloat16 under a half-precision target; float32 stays exact."""
    half = lm.dtype != torch.float32
    return torch.autocast(lm.device.type, torch.bfloat16, enabled=half)
