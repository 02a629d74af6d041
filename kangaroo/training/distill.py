"""Grade adapters against the target in chunks, so that logits are never in memory all at once.

The target's distributions are computed by its head, or were stored when the data was written. A
stored one has the likeliest tokens and one outcome for all others, and adapters are compared over
these outcomes. Tokens that are not stored count as inside the draft vocabulary.

Shapes: M learnt positions of a batch, C of them in a chunk, D hidden size, K draft vocabulary, V
vocabulary, J stored tokens, O outcomes, F results.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from kangaroo.cpu import outcomes as native_outcomes
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel

TINY = 1e-30  # a probability whose logarithm and reciprocal are finite in float32
_DECAY = 3.0  # eta of the hybrid loss: how fast it moves from KL to total variation
MEASURES = ("loss", "agreement", "expected_acceptance", "positions")  # in this order


class Loss(Enum):
    """The distance of the adapter's distribution q from the target's p.

    `cross_entropy`: `-sum p log q` (Kangaroo, arXiv 2404.18911, section 3.2).
    `kl`: `sum p log(p / q)`, with the same gradient, but 0 where p and q agree.
    `total_variation`: `1 - alpha`, with `alpha = sum min(p, q)` the chance that a sampled draft
        token is accepted (Leviathan et al. 2023, corollary 3.6).
    `lk`: `-log alpha`.
    `hybrid`: `w kl + (1 - w) (1 - alpha)`, `w = exp(-3 alpha)`: KL where q is far from p, since the
        gradient of total variation vanishes there, and total variation where it is close."""

    cross_entropy = "cross_entropy"
    kl = "kl"
    total_variation = "total_variation"
    lk = "lk"
    hybrid = "hybrid"


def overlap(p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    """`alpha = sum min(p, q)` of each position."""
    return torch.minimum(p_CK, log_q_CK.exp()).sum(-1)


def divergence(loss: Loss, p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    """The loss at each position, in nats or as a probability. What `p_CK` lacks to 1 is outside of
    the draft vocabulary. The outcome for all others (`StoredDistributions`) counts as one token."""
    if loss is Loss.cross_entropy:
        return -(p_CK * log_q_CK).sum(-1)
    if loss is Loss.kl:
        return torch.xlogy(p_CK, p_CK).sum(-1) - (p_CK * log_q_CK).sum(-1)
    alpha_C = overlap(p_CK, log_q_CK)
    if loss is Loss.total_variation:
        return 1 - alpha_C
    if loss is Loss.lk:
        return -alpha_C.clamp(min=1e-6).log()  # finite where nothing overlaps in float32
    weight_C = (-_DECAY * alpha_C.detach()).exp()
    return weight_C * divergence(Loss.kl, p_CK, log_q_CK) + (1 - weight_C) * (1 - alpha_C)


class WholeDistributions:
    """The target's distributions, from its normed final states `state_MD`. The outcomes are the
    tokens of the draft vocabulary. `chances` fills in the likeliest tokens of all, `top_M`."""

    single_tokens = slice(None)  # the outcomes that are one token

    def __init__(self, lm: TargetModel, state_MD: Tensor, vocabulary_K: Tensor | None):
        self.lm = lm
        self.state_MD = state_MD
        self.vocabulary_K = vocabulary_K
        self.top_M = torch.empty(len(state_MD), dtype=torch.long, device=lm.device)

    @torch.no_grad()
    def chances(self, part: slice) -> Tensor:
        """Probabilities `[C, O]` of the outcomes; 0 for tokens that cannot be drafted."""
        logits_CV = self.lm.read_out(self.state_MD[None, part])[0].float()
        self.top_M[part] = logits_CV.argmax(-1)
        logits_CK = logits_CV if self.vocabulary_K is None else logits_CV[:, self.vocabulary_K]
        return (logits_CK - logits_CV.logsumexp(-1, keepdim=True)).exp_()

    def compare(self, part: slice, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        """A student's log-probabilities `[C, O]` of the outcomes, undefined for tokens that cannot
        be drafted, and the index of its largest logit."""
        log_q_CK = logits_CK.float().log_softmax(-1)
        return log_q_CK, log_q_CK.detach().argmax(-1)


class StoredDistributions:
    """The same from stored distributions. The outcomes are the stored tokens, and all others as one
    outcome. `state_MD` has width 0 if no adapter reads it."""

    single_tokens = slice(-1)

    def __init__(self, state_MD: Tensor, tokens_MJ: Tensor, chances_MJ: Tensor, head: DraftHead):
        # the tokens' indices in the draft vocabulary, valid where they are inside of it
        self.index_MJ = tokens_MJ
        self.inside_MJ = torch.ones_like(tokens_MJ, dtype=torch.bool)
        if head.vocabulary_K is not None:
            places_MJ = torch.searchsorted(head.vocabulary_K, tokens_MJ)
            self.index_MJ = places_MJ.clamp(max=head.size - 1)
            self.inside_MJ = head.vocabulary_K[self.index_MJ] == tokens_MJ
        rest_M = (1 - chances_MJ.sum(-1)).clamp(min=0)  # chances are rounded
        if chances_MJ.shape[-1] == head.vocab_size:
            rest_M.zero_()
        self.p_MO = torch.cat([chances_MJ * self.inside_MJ, rest_M[:, None]], -1)
        self.state_MD = state_MD
        self.top_M = tokens_MJ[:, 0].clone()  # a view would keep all of them in memory

    def chances(self, part: slice) -> Tensor:
        return self.p_MO[part]

    def compare(self, part: slice, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        return outcomes(logits_CK, self.index_MJ[part], self.inside_MJ[part])


TargetDistributions = WholeDistributions | StoredDistributions


@dataclass
class Student:
    """One adapter at one draft step: its normed states, whether a draft has that step (`valid`),
    and the weight of its loss. `distill` computes the other fields."""

    state_MD: Tensor
    valid_M: Tensor
    head: DraftHead
    loss: Loss
    weight: float = 1.0
    sums_F: Tensor = field(init=False)  # `MEASURES` summed over the valid positions
    agrees_M: Tensor = field(init=False)  # whether adapter and target have the same likeliest token
    # states and trained weights of the head, each with its gradient of the weighted, summed loss
    gradients: list[tuple[Tensor, Tensor]] = field(init=False)


def distill(target: TargetDistributions, students: Sequence[Student], chunk_size: int) -> None:
    """Grade all students against the target; with gradients enabled, set their `gradients`."""
    for student in students:
        student.sums_F = torch.zeros(len(MEASURES), device=student.valid_M.device)
        student.agrees_M = torch.zeros_like(student.valid_M)
        trained = [weight for weight in student.head.weights if weight.requires_grad]
        leaves = [student.state_MD, *trained] if torch.is_grad_enabled() else []
        student.gradients = [(x, torch.zeros_like(x, dtype=torch.float32)) for x in leaves]
    for start in range(0, len(target.state_MD), chunk_size):
        part = slice(start, start + chunk_size)
        p_CO = target.chances(part)
        for student in students:
            _grade(student, part, target, p_CO)


def _grade(student: Student, part: slice, target: TargetDistributions, p_CO: Tensor) -> None:
    valid_C = student.valid_M[part]
    # a separate leaf: the backward pass through the adapter runs once, after the last chunk
    state_CD = student.state_MD[part].detach().requires_grad_(bool(student.gradients))
    log_q_CO, drafted_C = target.compare(part, student.head(state_CD))
    loss_C = divergence(student.loss, p_CO, log_q_CO) * valid_C
    if student.gradients:
        (_, states_gradient_MD), *weights = student.gradients
        # The loss is weighted after the head: in float16, gradients of 1 / 50,000 would round to
        # zero. Unweighted, the gradients of a position's logits sum to 2 at most for every loss.
        new = torch.autograd.grad(loss_C.sum(), [state_CD, *(weight for weight, _ in weights)])
        states_gradient_MD[part] = student.weight * new[0].float()
        for (_, total), gradient in zip(weights, new[1:], strict=True):
            total.add_(gradient, alpha=student.weight)
    p_CJ, log_q_CJ = (x[:, target.single_tokens] for x in (p_CO, log_q_CO.detach()))
    agrees_C = (student.head.token_of(drafted_C) == target.top_M[part]) & valid_C
    student.agrees_M[part] = agrees_C
    results = (loss_C.detach(), agrees_C, overlap(p_CJ, log_q_CJ) * valid_C, valid_C)
    student.sums_F += torch.stack([result_C.sum() for result_C in results])


def outcomes(logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[C, O]` in float32 of some tokens, undefined where not inside, and of all
    others together; and the argmax `[C]`. A CPU's native code copies no logits to float32."""
    if native_outcomes.takes(logits_CK):
        return native_outcomes.Outcomes.apply(logits_CK, index_CJ, inside_CJ)
    best_C = logits_CK.argmax(-1)
    logits_CK = logits_CK.float()
    total_C1 = logits_CK.logsumexp(-1, keepdim=True)
    rows_C1 = torch.arange(len(logits_CK), device=logits_CK.device)[:, None]
    places = rows_C1.expand_as(index_CJ)[inside_CJ], index_CJ[inside_CJ]
    others_CK = logits_CK.index_put(places, logits_CK.new_tensor(-torch.inf))
    rest_C1 = others_CK.logsumexp(-1, keepdim=True) - total_C1
    log_q_CJ = logits_CK.gather(1, index_CJ) - total_C1
    return torch.cat([log_q_CJ, rest_C1.clamp(min=math.log(TINY))], -1), best_C
