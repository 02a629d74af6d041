"""CLaSp: drafts skip the layers whose absence changes the last token's final state least.

Shapes: B rows, J counts of skipped layers, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.drafters.autoregressive import Choice, LayerChoice
from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.drafters.layer_search import Subset, first_drafts
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, Share


@dataclass
class ClaspConfig(ChainConfig):
    """CLaSp (arXiv 2505.24196): after a verification, dynamic programming over the layers chooses
    those that drafts skip. It computes the whole model's states itself, in the same pass as those
    with skipped layers, and needs nothing from verification or prefill.

    Args:
        skip_share: the share of the layers that drafts skip.
        interval: tokens of a text from one choice to the next.
    """

    name: str = "clasp"
    skip_share: Share = 0.5
    interval: Count = 1

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: `ConfigError`."""
        return Clasp(lm, self)


class Clasp(LayerChoice):
    """For the first i layers, of which j are skipped, the programme keeps one state of the last
    verified token: either the state for i - 1 and j after layer i, or the one for i - 1 and j - 1,
    whichever points more in the direction of the whole model's state after i layers. All states of
    a layer are tokens of one pass, each of which sees the text before it and itself."""

    def __init__(self, lm: TargetModel, options: ClaspConfig):
        self.interval = options.interval
        self.count = round(options.skip_share * lm.n_layers)
        if not 0 < self.count < lm.n_layers:
            raise ConfigError(
                f"drafter.skip_share={options.skip_share} is {self.count} of the target's "
                f"{lm.n_layers} layers; drafts must skip some, and not all."
            )
        # `improve` replaces these before the first draft
        super().__init__(lm, lm, tuple(range(1, 1 + self.count)), options)
        self.max_nodes = max(self.steps, self.count + 1)

    def improve(self, batch: Batch, choices: dict[int, Choice]) -> None:
        lengths = {row: len(batch.texts[row]) for row in choices}
        due = [row for row, x in choices.items() if lengths[row] >= x.length + self.interval]
        keeps = self.programme(batch).tolist() if due else []  # a sync
        for row in due:
            choices[row].skip = skipped(keeps[row], self.count)
            choices[row].length = lengths[row]

    def programme(self, batch: Batch) -> Tensor:
        """Whether the state for a layer and a count went through the layer, `[B, layers, J]`."""
        lm = self.lm
        size = self.count + 1  # states of a layer
        positions_BJ = (batch.length_B[:, None] - 2).clamp(min=0).expand(-1, size)
        meta = first_drafts(lm, positions_BJ, batch.base_B, batch.used + size, batch.n_slots)
        x_BJD = lm.embed(batch.last(2)[:, :1]).expand(-1, size, -1)
        keeps = []
        for layer in range(lm.n_layers):
            through_BJD, _ = lm.run(x_BJD, batch.cache, meta, range(layer, layer + 1))
            skip_BJD = x_BJD.to(through_BJD.device).roll(1, 1)
            whole_B1D = through_BJD[:, :1].float()
            kept_BJ = torch.cosine_similarity(through_BJD.float(), whole_B1D, -1)
            keep_BJ = kept_BJ >= torch.cosine_similarity(skip_BJD.float(), whole_B1D, -1)
            keep_BJ[:, layer + 1 :] = False  # here all layers so far are skipped
            keep_BJ[:, 0] = True  # here none is
            x_BJD = torch.where(keep_BJ[..., None], through_BJD, skip_BJD)
            keeps.append(keep_BJ.to(lm.device))
        return torch.stack(keeps, 1)


def skipped(keeps: Sequence[Sequence[bool]], count: int) -> Subset:
    """The `count` layers that the final state skips; `keeps[layer][j]` says whether the state with
    j skipped layers up to this one went through it."""
    layers = []
    for layer in reversed(range(len(keeps))):
        if not keeps[layer][count]:
            layers.append(layer)
            count -= 1
    return tuple(reversed(layers))
