"""Grade adapters against the target in chunks, so that logits never stand whole in memory.

The target's distributions are computed by its head, or were stored when the data was written. A
stored one has the likeliest tokens and the mass of all others together. So the adapter's is
compared as one over as many outcomes: each of these tokens, and any other one. With a draft
vocabulary, stored tokens outside of it fall out, as they do from a whole distribution; which of the
others lie outside is not known, and they count as inside.

Shapes: M assistant positions of a batch, C of them in a chunk, D hidden size, K draft vocabulary,
V vocabulary, J stored tokens, O outcomes, F results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from kangaroo.training.losses import Loss, divergence, overlap
from kangaroo.training.outcomes import outcomes

MEASURES = ("loss", "agreement", "expected_acceptance", "positions")


def parts(count: int, size: int) -> list[slice]:
    """So many positions, in parts of a size."""
    return [slice(start, start + size) for start in range(0, count, size)]


class WholeDistributions:
    """What the target says at every position; the outcomes are all tokens of the draft vocabulary.

    Args:
        state_MD: the target's normed final states.
        chunk_size: positions whose logits exist at a time. None: the head is not run here, since
            all tokens are drafted from and so each part will run it whole.

    Attributes:
        top_M, total_M: the target's likeliest tokens, and the logarithms of the sums of all
            exponentiated logits; there once `chances` has been asked for every part.
        single_tokens: which of the outcomes are single tokens.
    """

    single_tokens = slice(None)

    @torch.no_grad()
    def __init__(self, lm: TargetModel, state_MD: Tensor, chunk_size: int | None):
        self.state_MD = state_MD
        self.top_M = torch.empty(len(state_MD), dtype=torch.long, device=lm.device)
        self.total_M = torch.empty(len(state_MD), device=lm.device)
        self.computed = 0  # positions, from the first on
        for part in parts(len(state_MD), chunk_size) if chunk_size else ():
            self._sum_up(part, lm.read_out(state_MD[None, part])[0].float())

    @torch.no_grad()
    def chances(self, part: slice, head: DraftHead) -> Tensor:
        """Probabilities `[C, O]` of the outcomes at some positions; 0 for what the target's head
        over the draft vocabulary cannot draft."""
        logits_CK = head(self.state_MD[part]).float()
        if part.start >= self.computed:
            assert head.vocabulary_K is None
            self._sum_up(part, logits_CK)
        return (logits_CK - self.total_M[part, None]).exp_()

    def _sum_up(self, part: slice, logits_CV: Tensor) -> None:
        self.top_M[part], self.total_M[part] = logits_CV.argmax(-1), logits_CV.logsumexp(-1)
        self.computed = part.stop

    def compare(self, part: slice, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[C, O]` of the same outcomes by a student's logits, any for what
        cannot be drafted; and the place of its largest logit."""
        log_q_CK = logits_CK.float().log_softmax(-1)
        return log_q_CK, log_q_CK.detach().argmax(-1)


class StoredDistributions:
    """The same where distributions were stored; the outcomes are these tokens, and any other one.

    Args:
        state_MD: the target's normed final states; of width 0 where no adapter reads them.
        tokens_MJ, chances_MJ: the target's likeliest tokens, and their probabilities.
        head: the target's, over the draft vocabulary.
    """

    single_tokens = slice(-1)

    def __init__(self, state_MD: Tensor, tokens_MJ: Tensor, chances_MJ: Tensor, head: DraftHead):
        # places in the draft vocabulary, for tokens that are inside of it
        self.index_MJ, self.inside_MJ = tokens_MJ, torch.ones_like(tokens_MJ, dtype=torch.bool)
        if head.vocabulary_K is not None:
            places_MJ = torch.searchsorted(head.vocabulary_K, tokens_MJ)
            self.index_MJ = places_MJ.clamp(max=head.size - 1)
            self.inside_MJ = head.vocabulary_K[self.index_MJ] == tokens_MJ
        rest_M = (1 - chances_MJ.sum(-1)).clamp(min=0)  # chances are rounded
        if chances_MJ.shape[-1] == head.vocab_size:
            rest_M.zero_()
        self.p_MO = torch.cat([chances_MJ * self.inside_MJ, rest_M[:, None]], -1)
        self.state_MD = state_MD
        self.top_M = tokens_MJ[:, 0].clone()  # a view would hold on to all of them

    def chances(self, part: slice, head: DraftHead) -> Tensor:
        """As of `WholeDistributions`."""
        return self.p_MO[part]

    def compare(self, part: slice, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        """As of `WholeDistributions`."""
        return outcomes(logits_CK, self.index_MJ[part], self.inside_MJ[part])


TargetDistributions = WholeDistributions | StoredDistributions


@dataclass
class Student:
    """One adapter at one draft step, and what `distill` says of it.

    Args:
        state_MD: its normed states.
        valid_M: where it would have drafted at this step.
        weight: of its loss.

    Attributes:
        sums_F: sums over its valid positions: loss (unweighted), positions where adapter and target
            have the same likeliest token, `sum min(p, q)` over single tokens, and their number.
        agrees_M: where those likeliest tokens are the same.
        gradients: of the weighted sum of losses, with respect to the student's states and, where it
            is trained, the head's weight; empty if none were asked for.
    """

    state_MD: Tensor
    valid_M: Tensor
    head: DraftHead
    loss: Loss
    weight: float = 1.0
    sums_F: Tensor = field(init=False)
    agrees_M: Tensor = field(init=False)
    gradients: list[tuple[Tensor, Tensor]] = field(init=False)


def distill(
    target: TargetDistributions,
    head: DraftHead,
    students: Sequence[Student],
    chunk_size: int,
    backward: bool,
) -> None:
    """Grade every student against the target, in chunks.

    Args:
        head: the target's, over the students' draft vocabulary.
        backward: also compute gradients, which the caller passes on, once for all chunks.
    """
    for student in students:
        student.sums_F = torch.zeros(len(MEASURES), device=student.valid_M.device)
        student.agrees_M = torch.zeros_like(student.valid_M)
        leaves = [student.state_MD, *student.head.trained]
        zeros = [(x, torch.zeros_like(x, dtype=torch.float32)) for x in leaves if backward]
        student.gradients = zeros
    for part in parts(len(target.state_MD), chunk_size):
        p_CO = target.chances(part, head)
        for student in students:
            _grade(student, part, target, p_CO)


def _grade(student: Student, part: slice, target: TargetDistributions, p_CO: Tensor) -> None:
    """One chunk of one student, added to its results."""
    head, valid_C, backward = student.head, student.valid_M[part], bool(student.gradients)
    with torch.set_grad_enabled(backward):
        # a leaf of its own: the adapter's graph is walked once, after the last chunk
        state_CD = student.state_MD[part].detach().requires_grad_(backward)
        log_q_CO, drafted_C = target.compare(part, head(state_CD))
        loss_C = divergence(student.loss, p_CO, log_q_CO) * valid_C
    if backward:
        (_, of_states_MD), *of_weights = student.gradients
        # The weight comes after the head: in float16, gradients of 1 / 50,000 would round to zero.
        # Unweighted, those of a position's logits add up to 2 at most, whatever the loss.
        new = torch.autograd.grad(loss_C.sum(), [state_CD, *(x for x, _ in of_weights)])
        of_states_MD[part] = student.weight * new[0].float()
        for (_, total), gradient in zip(of_weights, new[1:], strict=True):
            total.add_(gradient, alpha=student.weight)
    p_CJ, log_q_CJ = (x[:, target.single_tokens] for x in (p_CO, log_q_CO.detach()))
    agrees_C = (head.token_of(drafted_C) == target.top_M[part]) & valid_C
    student.agrees_M[part] = agrees_C
    overlap_C = overlap(p_CJ, log_q_CJ) * valid_C
    results = loss_C.detach().sum(), agrees_C.sum(), overlap_C.sum(), valid_C.sum()
    student.sums_F += torch.stack(results)
