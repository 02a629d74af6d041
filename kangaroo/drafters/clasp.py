"""CLaSp: the skipped layers are those without which the last token's final state changes least.

Shapes: B rows, J counts of skipped layers, D hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kangaroo.drafters import layer_search
from kangaroo.drafters.autoregressive import Choice, LayerChoice
from kangaroo.drafters.base import ChainConfig, Drafter
from kangaroo.drafters.layer_search import Subset
from kangaroo.engine.batch import Batch
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, Share


@dataclass
class ClaspConfig(ChainConfig):
    """CLaSp (arXiv 2505.24196): after a verification a dynamic programme over the layers says which
    ones drafts skip. Its states without a skipped layer are the whole model's: it computes them
    once more, in the same pass as others, so that verification and prompts hand nothing on.

    Args:
        skip_share: of the layers, that drafts leave out.
        interval: tokens of a text from one choice to the next.
    """

    name: str = "clasp"
    skip_share: Share = 0.5
    interval: Count = 1

    def build(self, lm: TargetModel) -> Drafter:
        """Errors: `ConfigError`."""
        return Clasp(lm, self)


class Clasp(LayerChoice):
    """For i layers of which j are skipped, the programme keeps one state of the last verified
    token: of its state for i - 1 and j, sent through layer i, and that for i - 1 and j - 1, the
    one whose direction is nearer to the whole model's after i layers. The states of a layer are
    tokens of one pass: each sees the text before it, and itself."""

    def __init__(self, lm: TargetModel, options: ClaspConfig):
        self.interval, self.count = options.interval, round(options.skip_share * lm.n_layers)
        if not 0 < self.count < lm.n_layers:
            raise ConfigError(
                f"drafter.skip_share={options.skip_share} is {self.count} of the target's "
                f"{lm.n_layers} layers; drafts must skip some, and not all."
            )
        first = tuple(range(1, 1 + self.count))  # until the first choice, before the first draft
        super().__init__(lm, lm, first, options, self.count + 1)

    def improve(self, batch: Batch, choices: dict[int, Choice]) -> None:
        lengths = {row: len(batch.texts[row]) for row in choices}
        due = [row for row, x in choices.items() if lengths[row] >= x.length + self.interval]
        keeps = self.programme(batch).tolist() if due else []  # a sync
        for row in due:
            choices[row].skip, choices[row].length = skipped(keeps[row], self.count), lengths[row]

    def programme(self, batch: Batch) -> Tensor:
        """Whether the state for a layer and a count went through the layer, `[B, layers, J]`."""
        lm, size = self.lm, self.count + 1
        at_BJ = (batch.length_B[:, None] - 2).clamp(min=0).expand(-1, size)
        place = at_BJ, batch.base_B, batch.used + size, batch.n_slots
        meta = layer_search.first_drafts(lm, *place)
        x_BJD, keeps = lm.embed(batch.last(2)[:, :1]).expand(-1, size, -1), []
        for layer in range(lm.n_layers):
            through_BJD, _ = lm.run(x_BJD, batch.cache, meta, range(layer, layer + 1))
            past_BJD = x_BJD.to(through_BJD.device).roll(1, 1)
            near_BJ, far_BJ = (
                torch.cosine_similarity(x_BJD.float(), through_BJD[:, :1].float(), -1)
                for x_BJD in (through_BJD, past_BJD)
            )
            keep_BJ = near_BJ >= far_BJ
            keep_BJ[:, layer + 1 :] = False  # these are skipped as all before were
            keep_BJ[:, 0] = True  # without a skipped layer there is no choice
            x_BJD = torch.where(keep_BJ[..., None], through_BJD, past_BJD)
            keeps.append(keep_BJ.to(lm.device))
        return torch.stack(keeps, 1)


def skipped(keeps: Sequence[Sequence[bool]], count: int) -> Subset:
    """The way back from the state after all layers of which so many are skipped, by whether a layer
    was kept, of each and each number of skipped ones up to it."""
    layers = []
    for layer in reversed(range(len(keeps))):
        if not keeps[layer][count]:
            layers.append(layer)
            count -= 1
    return tuple(reversed(layers))
