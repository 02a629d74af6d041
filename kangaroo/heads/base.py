"""What all trained parts of drafters have in common (docs/add-a-drafter.md adds one).

Shapes: B rows, T tokens of a text, M positions that are learnt, D hidden size, K draft vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Self

from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.heads.draft_head import DraftHead, TextHead
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Ranged


class HeadConfig(Ranged, ABC):
    """What a trained part is made of: a dataclass of options, kept in its config.json."""

    drafter: ClassVar[str]  # the `drafter=` that drafts with it

    @classmethod
    def kind(cls) -> str:
        """What config.json calls it: the name of its module."""
        return cls.__module__.rpartition(".")[2]

    def as_json(self) -> dict[str, Any]:
        """What config.json holds of it."""
        return {"kind": self.kind()} | asdict(self)  # type: ignore[call-overload]

    @abstractmethod
    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "Trainable":
        """An untrained one that drafts from these tokens, ascending, or None for all; of `lm` it
        takes the shapes alone. Errors: `AdapterMismatch` for an exit layer that there is not."""

    def fixed_exit(self, lm: TargetModel) -> int | None:
        """The only exit layer that it can have, where there is no choice."""
        return None

    @property
    def own_steps(self) -> int | None:
        """How many draft tokens in a row it has weights for; None where the same serve them all."""
        return None

    def steps(self, draft_steps: int) -> int:
        """How many draft tokens in a row it is trained for, where so many are asked for. Errors:
        `ConfigError`."""
        if self.own_steps is None:
            return draft_steps
        if draft_steps > 1:
            raise ConfigError(
                f"adapter.draft_steps={draft_steps} is not for a {self.kind()}: leave it out, its "
                "adapter.architecture says how many."
            )
        return self.own_steps

    def graded_steps(self, most: int) -> int:
        """How many of `most` draft tokens have grades of their own: from there on all are alike."""
        return self.own_steps or most

    def passes(self, steps: int) -> int:
        """How often a token passes each of its weights in a training of so many draft steps."""
        return steps


class Trainable(nn.Module, ABC):
    """The trained part of a drafter, on a frozen target, of whose layers `exit_layer` lie below it.
    It learns from the target's hidden states at `taps`, by the layers below them, and from that at
    `deep_tap` after the target's final norm, if there is one."""

    def __init__(
        self, architecture: HeadConfig, exit_layer: int, taps: Sequence[int], deep_tap: int | None
    ):
        super().__init__()
        self.architecture, self.exit_layer = architecture, exit_layer
        self.taps, self.deep_tap = tuple(taps), deep_tap
        self.attention_window = 0  # how far it looks back where it has attention; 0 is without end

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Begin with weights of the target, where that is better than at random."""
        return self

    @abstractmethod
    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """What its heads read the next token from at every position of whole texts, `[B, T, D]` at
        each of the draft steps 1 to `steps`. That of step k is the one it has there when its draft
        began k - 1 tokens earlier, so that every step is judged by the same tokens. `deep` states
        are of width 0 where there is no `deep_tap`."""

    def own_heads(self) -> list[nn.Module]:
        """Its LM heads (`new_head`), one for each draft step or one for all; none if it reads the
        target's."""
        return []

    def draft_heads(self, lm: TargetModel, vocabulary_K: Tensor | None) -> list[DraftHead]:
        """What it drafts with: one for each draft step, the last one for all further steps."""
        if heads := self.own_heads():
            return [DraftHead(lm, head, vocabulary_K) for head in heads]
        return [DraftHead(lm) if vocabulary_K is None else TextHead(lm, vocabulary_K)]

    def side_loss(self, states: Sequence[Tensor], valid: Tensor, deep_MD: Tensor) -> Tensor | None:
        """A loss besides the one on tokens, summed over positions, if there is one, of the states
        `[M, D]` at each draft step, where `valid`, `[steps, M]`, a draft has that step."""
        return None

    def tally(
        self, heads: Sequence[DraftHead], states: Sequence[Tensor], valid: Tensor, top_M: Tensor
    ) -> Tensor:
        """What is counted on held-out texts for `facts`, and adds up; `top_M` is the target's."""
        return torch.zeros(0)

    def facts(self, tally: Tensor) -> dict[str, Any]:
        """What its drafter has to know besides the weights, kept in config.json."""
        return {}

    def home(self, lm: TargetModel) -> torch.device:
        """Where it lies: with the layer below it."""
        return lm.layer_devices[max(self.exit_layer, 1) - 1]


def new_head(lm: TargetModel, vocabulary_K: Tensor | None) -> nn.Linear:
    """An LM head over the draft vocabulary."""
    outputs = lm.config.vocab_size if vocabulary_K is None else len(vocabulary_K)
    return nn.Linear(lm.config.hidden_size, outputs, bias=False)


@torch.no_grad()
def copy_head(head: nn.Module, lm: TargetModel, vocabulary_K: Tensor | None) -> None:
    """Begin with the target's rows."""
    head.get_parameter("weight").copy_(
        lm.head.weight[slice(None) if vocabulary_K is None else vocabulary_K]
    )
