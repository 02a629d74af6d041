"""Score adapters against the target in chunks, so that logits never stand whole in memory.

Shapes: M assistant positions of a batch, C of them in a chunk, D hidden size, K draft vocabulary,
V vocabulary, F results, O outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import LM
from kangaroo.training.losses import Loss, divergence, overlap

MEASURES = ("loss", "agreement", "expected_acceptance", "positions")


def parts(count: int, size: int) -> list[slice]:
    """So many positions, in parts of a size."""
    return [slice(start, start + size) for start in range(0, count, size)]


class Target(Protocol):
    """The target's distributions at the positions of a chunk.

    Attributes:
        p_CO: probabilities of the outcomes: each token of the draft vocabulary, or fewer.
        top_C: the likeliest tokens.
        tokens: so many of the outcomes, the first ones, are single tokens.
    """

    p_CO: Tensor
    top_C: Tensor

    @property
    def tokens(self) -> int: ...

    def compare(self, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[C, O]` of the same outcomes by a student's logits, and the place of
        its largest logit.
        """


class AnyTeacher(Protocol):
    """What the target says at every position; see `Teacher`.

    Attributes:
        top_M: its likeliest tokens, known once every part has been asked for.
    """

    state_MD: Tensor
    top_M: Tensor

    def part(self, part: slice, head: DraftHead) -> Target:
        """Its distributions at some positions, over the draft vocabulary of its head."""


@dataclass
class WholeTarget:
    """Probabilities of every token of the draft vocabulary."""

    p_CO: Tensor
    top_C: Tensor

    @property
    def tokens(self) -> int:
        return self.p_CO.shape[-1]

    def compare(self, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        log_q_CO = logits_CK.float().log_softmax(-1)
        return log_q_CO, log_q_CO.detach().argmax(-1)


@dataclass
class Teacher:
    """What the target says at every position, in so far as it takes its whole head to know.

    Args:
        state_MD: its normed final states.
        top_M: its likeliest token.
        total_M: the logarithm of the sum of all its exponentiated logits.
        known: for so many positions, the first ones, the last two are.
    """

    state_MD: Tensor
    top_M: Tensor
    total_M: Tensor
    known: int = 0

    @staticmethod
    @torch.no_grad()
    def of(lm: LM, state_MD: Tensor, chunk_size: int | None) -> Teacher:
        """
        Args:
            chunk_size: positions whose logits exist at a time. None: the head is not run here,
                since all tokens are drafted from and so each part will run it whole.
        """
        top_M = torch.empty(len(state_MD), dtype=torch.long, device=lm.device)
        teacher = Teacher(state_MD, top_M, torch.empty(len(state_MD), device=lm.device))
        for part in parts(len(state_MD), chunk_size) if chunk_size else ():
            teacher._learn(part, lm.head(state_MD[part]).to(lm.device).float())
        return teacher

    @torch.no_grad()
    def part(self, part: slice, head: DraftHead) -> WholeTarget:
        logits_CK = head(self.state_MD[part]).float()
        if part.start >= self.known:
            assert head.vocabulary_K is None
            self._learn(part, logits_CK)
        return WholeTarget((logits_CK - self.total_M[part, None]).exp_(), self.top_M[part])

    def _learn(self, part: slice, logits_CV: Tensor) -> None:
        self.top_M[part], self.total_M[part] = logits_CV.argmax(-1), logits_CV.logsumexp(-1)
        self.known = part.stop


@dataclass
class Student:
    """The states of one adapter at one draft step.

    Args:
        state_MD: its normed states.
        valid_M: where it would have drafted at this step.
        weight: of its loss.
    """

    state_MD: Tensor
    valid_M: Tensor
    head: DraftHead
    loss: Loss
    weight: float = 1.0


@dataclass
class Graded:
    """What became of a student.

    Args:
        sums_F: sums over its valid positions: loss (unweighted), positions where adapter and target
            have the same likeliest token, `sum min(p, q)` over single tokens, and their number.
        agrees_M: where those likeliest tokens are the same.
        gradients: of the weighted sum of losses, with respect to the student's states and, where it
            is trained, the head's weight; empty if none were asked for.
    """

    sums_F: Tensor
    agrees_M: Tensor
    gradients: list[tuple[Tensor, Tensor]]


def distill(
    teacher: AnyTeacher,
    head: DraftHead,
    students: Sequence[Student],
    chunk_size: int,
    backward: bool,
) -> list[Graded]:
    """Grade every student against the target.

    Args:
        head: the target's, over the students' draft vocabulary.
        chunk_size: positions whose logits exist at a time.
        backward: also compute gradients, which the caller passes on, once for all chunks.
    """
    graded = [_begin(student, backward) for student in students]
    for part in parts(len(teacher.state_MD), chunk_size):
        target = teacher.part(part, head)
        for student, result in zip(students, graded, strict=True):
            _grade(student, result, part, target)
    return graded


def _begin(student: Student, backward: bool) -> Graded:
    wanted = [student.state_MD]
    if student.head.weight_KD.requires_grad:
        wanted.append(student.head.weight_KD)
    return Graded(
        sums_F=torch.zeros(len(MEASURES), device=student.valid_M.device),
        agrees_M=torch.zeros_like(student.valid_M),
        gradients=[(x, torch.zeros_like(x, dtype=torch.float32)) for x in wanted if backward],
    )


def _grade(student: Student, result: Graded, part: slice, target: Target) -> None:
    """One chunk of one student, added to its result."""
    head, valid_C = student.head, student.valid_M[part]
    backward = bool(result.gradients)
    with torch.set_grad_enabled(backward):
        # a leaf of its own: the adapter's graph is walked once, after the last chunk
        state_CD = student.state_MD[part].detach().requires_grad_(backward)
        log_q_CO, drafted_C = target.compare(head(state_CD))
        loss_C = divergence(student.loss, target.p_CO, log_q_CO) * valid_C
    if backward:
        leaves = [state_CD] + [x for x, _ in result.gradients[1:]]
        # The weight comes after the head: in float16, gradients of 1 / 50,000 would round to zero.
        # Unweighted, those of a position's logits add up to 2 at most, whatever the loss.
        new = torch.autograd.grad(loss_C.sum(), leaves)
        result.gradients[0][1][part] = student.weight * new[0].float()
        for (_, total), gradient in zip(result.gradients[1:], new[1:], strict=True):
            total.add_(gradient, alpha=student.weight)
    log_q_CO, single = log_q_CO.detach(), slice(target.tokens)
    if head.vocabulary_K is not None:
        drafted_C = head.vocabulary_K[drafted_C]
    agrees_C = (drafted_C == target.top_C) & valid_C
    result.agrees_M[part] = agrees_C
    result.sums_F += torch.stack(
        [
            loss_C.detach().sum(),
            agrees_C.sum(),
            (overlap(target.p_CO[:, single], log_q_CO[:, single]) * valid_C).sum(),
            valid_C.sum(),
        ]
    )
