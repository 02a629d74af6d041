"""Learn from the distributions that were kept when the data was written.

The target then runs its shallow layers alone: neither the deep ones nor its head.

A kept distribution has the likeliest tokens, and the mass of all others together. So the adapter's
distribution is compared as one over as many outcomes: each of these tokens, and any other one. With
a draft vocabulary, kept tokens outside of it fall out, as they do from a whole distribution; which
of the others lie outside is not known, and they count as inside.

Shapes: M assistant positions, C of them in a chunk, J kept tokens, O = J + 1 outcomes, K draft
vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.prompts import Sample
from kangaroo.trained.draft_head import DraftHead
from kangaroo.training.config import TrainerConfig
from kangaroo.training.recipe import AdapterRecipe

log = logging.getLogger(__name__)

LEAST = 1e-30  # a probability whose logarithm and reciprocal float32 can still hold


def settled(
    lm: LM,
    samples: Sequence[Sample],
    recipes: Sequence[AdapterRecipe],
    config: TrainerConfig,
    about: dict[str, Any],
) -> TrainerConfig:
    """The options with `kept` as true or false; None becomes true if nothing speaks against it.

    Args:
        about: provenance of the data.

    Errors: `ConfigError` where it is true and cannot be.
    """
    against = (
        _against(lm, samples, recipes, about.get("teacher")) if config.kept is not False else ""
    )
    if config.kept and against:
        raise ConfigError(f"trainer.kept=true: {against}")
    kept = config.kept is not False and not against
    if kept:
        log.info("learning from kept distributions: the target runs its shallow layers alone")
    elif against and any("teacher" in sample for sample in samples):
        log.info("kept distributions are not used: %s", against)
    return replace(config, kept=kept)


def _against(
    lm: LM,
    samples: Sequence[Sample],
    recipes: Sequence[AdapterRecipe],
    kept: dict[str, Any] | None,
) -> str:
    """Why kept distributions cannot be learnt from, and what to do; empty if they can."""
    if not all("teacher" in sample for sample in samples):
        return (
            "this dataset has no kept distributions. Let the target write one with data.teacher=32 "
            "(and another data.path=), or leave trainer.kept out."
        )
    if kept and kept["model"] != lm.name:
        return (
            f"the distributions of this dataset are those of '{kept['model']}', and the target is "
            f"'{lm.name}'. Let the target write its own data, or leave trainer.kept out."
        )
    for recipe in recipes:
        if recipe.architecture.reads_deep:
            return (
                f"adapter '{recipe.name}' learns from the target's final states, which are not "
                "kept. Leave trainer.kept out, or train only adapters that read nothing above "
                "their exit layer (adapter=attention, layer, mlp or own_head)."
            )
    return ""


@dataclass
class KeptTeacher:
    """What the target said at every position, as far as it was kept.

    Args:
        state_MD: of width 0: no adapter may read it.
        top_M: its likeliest token.
        p_MO: probabilities of the outcomes; 0 for tokens that cannot be drafted.
        index_MJ: places of the tokens in the draft vocabulary, where they are `inside_MJ`.
    """

    state_MD: Tensor
    top_M: Tensor
    p_MO: Tensor
    index_MJ: Tensor
    inside_MJ: Tensor

    @staticmethod
    def of(tokens_MJ: Tensor, chances_MJ: Tensor, head: DraftHead) -> KeptTeacher:
        """
        Args:
            head: over the draft vocabulary.
        """
        index_MJ, inside_MJ = tokens_MJ, torch.ones_like(tokens_MJ, dtype=torch.bool)
        if head.vocabulary_K is not None:
            index_MJ = torch.searchsorted(head.vocabulary_K, tokens_MJ).clamp(max=head.size - 1)
            inside_MJ = head.vocabulary_K[index_MJ] == tokens_MJ
        rest_M = (1 - chances_MJ.sum(-1)).clamp(min=0)  # chances are rounded
        if chances_MJ.shape[-1] == head.vocab_size:
            rest_M.zero_()
        p_MO = torch.cat([chances_MJ * inside_MJ, rest_M[:, None]], -1)
        state_MD = chances_MJ.new_empty(len(chances_MJ), 0)
        return KeptTeacher(state_MD, tokens_MJ[:, 0], p_MO, index_MJ, inside_MJ)

    def part(self, part: slice, head: DraftHead) -> KeptTarget:
        """Some of its positions."""
        return KeptTarget(self.p_MO[part], self.index_MJ[part], self.inside_MJ[part])


@dataclass
class KeptTarget:
    """The target at the positions of a chunk.

    Attributes:
        tokens: how many of the outcomes are single tokens.
    """

    p_CO: Tensor
    index_CJ: Tensor
    inside_CJ: Tensor

    @property
    def tokens(self) -> int:
        return self.index_CJ.shape[-1]

    def log_q(self, logits_CK: Tensor) -> Tensor:
        """Of the outcomes, by the student's logits: `[C, O]`; any for what cannot be drafted."""
        log_q_CO: Tensor = Outcomes.apply(logits_CK, self.index_CJ, self.inside_CJ)
        return log_q_CO


class Outcomes(torch.autograd.Function):
    """Log-probabilities of some tokens and of all others together, in float32.

    The gradient of the logits is written down at once. With g of the outcomes, s its sum and q the
    probabilities, a token among the outcomes has `g - s q`, any other `(g_rest / q_rest - s) q`.
    """

    @staticmethod
    def forward(ctx: Any, logits_CK: Tensor, index_CJ: Tensor, inside_CJ: Tensor) -> Tensor:
        top_C1 = logits_CK.amax(-1, keepdim=True)
        e_CK = logits_CK - top_C1.float()  # float32, in one pass
        log_e_CJ = e_CK.gather(1, index_CJ) * inside_CJ
        e_CK.exp_()
        rows_C1 = torch.arange(len(e_CK), device=e_CK.device)[:, None] * e_CK.shape[1]
        ours = (rows_C1 + index_CJ)[inside_CJ]
        e_CK.view(-1).index_fill_(0, ours, 0)
        rest_C1 = e_CK.sum(-1, keepdim=True)
        sum_C1 = rest_C1 + (log_e_CJ.exp() * inside_CJ).sum(-1, keepdim=True)
        log_q_CO = torch.cat([log_e_CJ, rest_C1.clamp(min=LEAST).log()], -1) - sum_C1.log()
        ctx.e_CK, ctx.dtype = e_CK, logits_CK.dtype
        ctx.save_for_backward(log_q_CO, ours, inside_CJ, rest_C1, sum_C1)
        return log_q_CO

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        log_q_CO, ours, inside_CJ, rest_C1, sum_C1 = ctx.saved_tensors
        g_CJ, g_C1 = gradients[0][:, :-1] * inside_CJ, gradients[0][:, -1:]
        s_C1 = g_CJ.sum(-1, keepdim=True) + g_C1
        of_ours_CJ = g_CJ - s_C1 * log_q_CO[:, :-1].exp()
        gradient_CK = ctx.e_CK.mul_(g_C1 / rest_C1.clamp(min=LEAST) - s_C1 / sum_C1)
        gradient_CK.view(-1).index_copy_(0, ours, of_ours_CJ[inside_CJ])
        return gradient_CK.to(ctx.dtype), None, None
