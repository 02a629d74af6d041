"""Learn from the distributions that were kept when the data was written.

The target then runs without its head, and only the layers below the deepest one that is read.

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

from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.prompts import Sample
from kangaroo.models.target import LM
from kangaroo.training.config import TrainerConfig
from kangaroo.training.outcomes import Outcomes
from kangaroo.utils.errors import ConfigError

log = logging.getLogger(__name__)


def settled(
    lm: LM,
    samples: Sequence[Sample],
    config: TrainerConfig,
    about: dict[str, Any],
) -> TrainerConfig:
    """The options with `kept` as true or false; None becomes true if nothing speaks against it.

    Args:
        about: provenance of the data.

    Errors: `ConfigError` where it is true and cannot be.
    """
    if config.kept is False:
        return config
    against = _against(lm, samples, about.get("teacher"))
    if config.kept and against:
        raise ConfigError(f"trainer.kept=true: {against}")
    if not against:
        log.info("learning from kept distributions: the target runs as far as adapters read")
    elif any("teacher" in sample for sample in samples):
        log.info("kept distributions are not used: %s", against)
    return replace(config, kept=not against)


def _against(lm: LM, samples: Sequence[Sample], kept: dict[str, Any] | None) -> str:
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
    return ""


@dataclass
class KeptTeacher:
    """What the target said at every position, as far as it was kept.

    Args:
        state_MD: its normed final states; of width 0 where no adapter reads them.
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
    def of(state_MD: Tensor, tokens_MJ: Tensor, chances_MJ: Tensor, head: DraftHead) -> KeptTeacher:
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
        top_M = tokens_MJ[:, 0].clone()  # a view would hold on to all of them
        return KeptTeacher(state_MD, top_M, p_MO, index_MJ, inside_MJ)

    def part(self, part: slice, head: DraftHead) -> KeptTarget:
        """Some of its positions."""
        likeliest = self.top_M[part], self.index_MJ[part], self.inside_MJ[part]
        return KeptTarget(self.p_MO[part], *likeliest)


@dataclass
class KeptTarget:
    """The target at the positions of a chunk.

    Attributes:
        tokens: how many of the outcomes are single tokens.
    """

    p_CO: Tensor
    top_C: Tensor
    index_CJ: Tensor
    inside_CJ: Tensor

    @property
    def tokens(self) -> int:
        return self.index_CJ.shape[-1]

    def compare(self, logits_CK: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities `[C, O]` of the outcomes by a student's logits, any for what cannot be
        drafted; and the place of the largest logit.
        """
        log_q_CO, best_C = Outcomes.apply(logits_CK, self.index_CJ, self.inside_CJ)
        return log_q_CO, best_C
