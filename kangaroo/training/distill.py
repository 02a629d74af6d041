"""Grade adapters against the target in chunks, so that logits never stand whole in memory.

The target's distributions are computed by its head, or were stored when the data was written. A
stored one is over the likeliest tokens and any other one, so the adapter's is compared over as many
outcomes. Of tokens that are not stored it is not known which lie in a draft vocabulary: they count
as inside.

Shapes: M assistant positions of a batch, C of them in a chunk, D hidden size, K draft vocabulary,
V vocabulary, J stored tokens, O outcomes, F results.
"""

import math
from collections.abc import Sequence
from ctypes import byref
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from kangaroo.cpu import native
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel

LEAST = 1e-30  # a probability whose logarithm and reciprocal float32 can still hold
_DECAY = 3.0  # eta of the hybrid: how fast it leaves KL as acceptance grows
MEASURES = ("loss", "agreement", "expected_acceptance", "positions")  # in this order


class Loss(Enum):
    """How far the adapter's distribution q is from the target's p.

    `cross_entropy`: `-sum p log q` (Kangaroo, arXiv 2404.18911, section 3.2).
    `kl`: `sum p log(p / q)`, the same gradient, but 0 where the two agree.
    `total_variation`: `1 - alpha`, with `alpha = sum min(p, q)` the chance that a sampled draft
        token is accepted (Leviathan et al. 2023, corollary 3.6).
    `lk`: `-log alpha`.
    `hybrid`: `w kl + (1 - w) (1 - alpha)`, `w = exp(-3 alpha)`: KL where the adapter is far off and
        total variation, whose gradient vanishes there, where it is near.
    """

    cross_entropy = "cross_entropy"
    kl = "kl"
    total_variation = "total_variation"
    lk = "lk"
    hybrid = "hybrid"


def overlap(p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    """`alpha = sum min(p, q)` of each position."""
    return torch.minimum(p_CK, log_q_CK.exp()).sum(-1)


def divergence(loss: Loss, p_CK: Tensor, log_q_CK: Tensor) -> Tensor:
    """The loss at each position, in nats or as a probability.

    Args:
        p_CK: the target's probabilities of the draft vocabulary's tokens; what is missing to 1 lies
            outside of it. Where one outcome stands for many tokens (`StoredDistributions`), `alpha`
            takes these as if they overlapped fully.
    """
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
    """What the target says at every position, from its normed final states `state_MD`; the outcomes
    are all tokens of the draft vocabulary. `top_M` are the likeliest, where `chances` has been."""

    single_tokens = slice(None)  # which of the outcomes these are

    def __init__(self, lm: TargetModel, state_MD: Tensor, vocabulary_K: Tensor | None):
        self.lm, self.state_MD, self.vocabulary_K = lm, state_MD, vocabulary_K
        self.top_M = torch.empty(len(state_MD), dtype=torch.long, device=lm.device)

    @torch.no_grad()
    def chances(self, part: slice) -> Tensor:
        """Probabilities `[C, O]` of the outcomes; 0 for what cannot be drafted."""
        logits_CV = self.lm.read_out(self.state_MD[None, part])[0].float()
        self.top_M[part] = logits_CV.argmax(-1)
        total_C1 = logits_CV.logsumexp(-1, keepdim=True)
        logits_CK = logits_CV if self.vocabulary_K is None else logits_CV[:, self.vocabulary_K]
        return (logits_CK - total_C1).exp_()

    def compare(self, part: slice, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[C, O]` of the same outcomes by a student's logits, any for what
        cannot be drafted; and the place of its largest logit."""
        log_q_CK = logits_CK.float().log_softmax(-1)
        return log_q_CK, log_q_CK.detach().argmax(-1)


class StoredDistributions:
    """The same where distributions were stored; the outcomes are these tokens, and any other one.
    `state_MD` is of width 0 where no adapter reads it."""

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

    def chances(self, part: slice) -> Tensor:
        return self.p_MO[part]

    def compare(self, part: slice, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        return outcomes(logits_CK, self.index_MJ[part], self.inside_MJ[part])


TargetDistributions = WholeDistributions | StoredDistributions


@dataclass
class Student:
    """One adapter at one draft step: its normed states, where it would have drafted, the weight of
    its loss; and what `distill` says of it."""

    state_MD: Tensor
    valid_M: Tensor
    head: DraftHead
    loss: Loss
    weight: float = 1.0
    sums_F: Tensor = field(init=False)  # of `MEASURES` over its valid positions
    agrees_M: Tensor = field(init=False)  # where adapter and target have the same likeliest token
    # of the weighted sum of losses, by its states and by the head's weights that are trained
    gradients: list[tuple[Tensor, Tensor]] = field(init=False)


def distill(target: TargetDistributions, students: Sequence[Student], chunk_size: int) -> None:
    """Grade every student against the target, in chunks; where gradients are enabled also its
    gradients, which the caller passes on, once for all chunks."""
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
    head, valid_C = student.head, student.valid_M[part]
    # a leaf of its own: the adapter's graph is walked once, after the last chunk
    state_CD = student.state_MD[part].detach().requires_grad_(bool(student.gradients))
    log_q_CO, drafted_C = target.compare(part, head(state_CD))
    loss_C = divergence(student.loss, p_CO, log_q_CO) * valid_C
    if student.gradients:
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


def outcomes(logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities `[C, O]` of some tokens and of all others together, in float32, any for
    those that are not inside; and the argmax `[C]`. On a CPU by native code (`cpp/outcomes.h`),
    without a copy of the logits in float32."""
    on_cpu = logits_CK.device.type == "cpu" and logits_CK.dtype in native.DTYPES
    if on_cpu and native.library() is not None:
        return NativeOutcomes.apply(logits_CK, index_CJ, inside_CJ)
    logits_CK, best_C = logits_CK.float(), logits_CK.argmax(-1)
    total_C1 = logits_CK.logsumexp(-1, keepdim=True)
    rows_C1 = torch.arange(len(logits_CK), device=logits_CK.device)[:, None]
    places = rows_C1.expand_as(index_CJ)[inside_CJ], index_CJ[inside_CJ]
    others_CK = logits_CK.index_put(places, logits_CK.new_tensor(-torch.inf))
    rest_C1 = others_CK.logsumexp(-1, keepdim=True) - total_C1
    log_q_CJ = logits_CK.gather(1, index_CJ) - total_C1
    return torch.cat([log_q_CJ, rest_C1.clamp(min=math.log(LEAST))], -1), best_C


class NativeOutcomes(torch.autograd.Function):
    """`outcomes` by native code, which writes down the gradient of the logits at once.

    With g of the outcomes, s its sum and q the probabilities, a token among the outcomes has
    `g - s q`, any other `(g_rest / q_rest - s) q`.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor
    ) -> tuple[Tensor, Tensor]:
        count, tokens = index_CJ.shape
        log_q_CO, largest_C, rest_C = (torch.empty(n) for n in ((count, tokens + 1), count, count))
        best_C = torch.empty(count, dtype=torch.long)
        fields = logits_CK, index_CJ, inside_CJ, log_q_CO, largest_C, rest_C
        _call("find_outcomes", [*fields, best_C])
        ctx.save_for_backward(*fields)
        ctx.mark_non_differentiable(best_C)
        return log_q_CO, best_C

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        fields = list(ctx.saved_tensors)
        gradient_CK = torch.empty_like(fields[0])
        _call("outcomes_back", fields, gradients[0], gradient_CK)
        return gradient_CK, None, None


def _call(name: str, fields: list[Tensor], *arguments: Tensor) -> None:
    """Call native code with the `fields` of its `NativeOutcomes`, in their order, and arguments."""
    library = native.library()
    assert library is not None
    (rows, logits), dtype = fields[0].shape, fields[0].dtype
    sizes = rows, logits, fields[1].shape[1], torch.get_num_threads()
    held = [tensor.contiguous() for tensor in (*fields, *arguments)]  # as long as the call
    pointers = [native.pointer(tensor) for tensor in held]
    structure = native.NativeOutcomes(*sizes, *pointers[: len(fields)])
    native.function(library, name, dtype)(byref(structure), *pointers[len(fields) :])
