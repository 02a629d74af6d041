"""Base classes of the trained parts of drafters (docs/add-a-drafter.md adds one).

Shapes: B rows, T tokens of a text, M trained positions, D hidden size, K draft vocabulary.
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
from kangaroo.models.packed import weight_rows
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Ranged


class HeadConfig(Ranged, ABC):
    """The architecture of a trained part: a dataclass of options, saved in its config.json."""

    drafter: ClassVar[str]  # the `drafter=` option that uses the trained part
    shares_weights: ClassVar[bool] = True  # whether all draft steps in training have the same

    @classmethod
    def kind(cls) -> str:
        """The name in config.json: that of the module."""
        return cls.__module__.rpartition(".")[2]

    def as_json(self) -> dict[str, Any]:
        """The fields in config.json."""
        return {"kind": self.kind()} | asdict(self)  # type: ignore[call-overload]

    @abstractmethod
    def build(self, lm: TargetModel, exit_layer: int, vocabulary_K: Tensor | None) -> "Trainable":
        """An untrained part in the shapes of `lm`. It drafts from the tokens `vocabulary_K`,
        ascending; None is all. Errors: `AdapterMismatch` for an exit layer outside the target."""

    def fixed_exit(self, lm: TargetModel) -> int | None:
        """The exit layer if this kind has only one; None if it can be chosen."""
        return None

    @property
    def fixed_steps(self) -> int | None:
        """The number of draft steps that have weights of their own; None if all share the same."""
        return None

    def steps(self, draft_steps: int) -> int:
        """The draft steps to train, if `draft_steps` are asked for. Errors: `ConfigError`."""
        if self.fixed_steps is None:
            return draft_steps
        if draft_steps > 1:
            raise ConfigError(
                f"adapter.draft_steps={draft_steps} is not for a {self.kind()}: leave it out, the "
                "adapter.architecture says how many steps there are."
            )
        return self.fixed_steps

    def graded_steps(self, most: int) -> int:
        """How many of the first `most` draft steps have states of their own, unlike later ones."""
        return self.fixed_steps or most


class Trainable(nn.Module, ABC):
    """The trained part of a drafter, above `exit_layer` layers of a frozen target. In training it
    reads the target's hidden states at `taps` (numbers of layers below them) and, if there is one,
    at `deep_tap` after the final norm."""

    def __init__(
        self, architecture: HeadConfig, exit_layer: int, taps: Sequence[int], deep_tap: int | None
    ):
        super().__init__()
        self.architecture = architecture
        self.exit_layer = exit_layer
        self.taps = tuple(taps)
        self.deep_tap = deep_tap
        self.attention_window = 0  # tokens that attention looks back; 0 is unlimited

    def start_from(self, lm: TargetModel, vocabulary_K: Tensor | None = None) -> Self:
        """Initialize with weights of the target, where these are better than random ones."""
        return self

    @abstractmethod
    def states(self, taps: Taps, deep_BTD: Tensor, meta: ForwardMeta, steps: int) -> list[Tensor]:
        """The states `[B, T, D]` that its heads read in each draft step, over whole texts. In step
        k, drafts began k - 1 tokens earlier, so that all steps predict the same tokens. Without a
        `deep_tap` the `deep` states have width 0."""

    def own_heads(self) -> list[nn.Module]:
        """The LM heads (`new_head`) that it has: one for each draft step, one for all, or none."""
        return []

    def draft_heads(self, lm: TargetModel, vocabulary_K: Tensor | None) -> list[DraftHead]:
        """A head for each draft step; the last one serves all further steps."""
        if heads := self.own_heads():
            return [DraftHead(lm, head, vocabulary_K) for head in heads]
        return [DraftHead(lm) if vocabulary_K is None else TextHead(lm, vocabulary_K)]

    def side_loss(self, states: Sequence[Tensor], valid: Tensor, deep_MD: Tensor) -> Tensor | None:
        """An additional loss on the states `[M, D]` of each draft step, summed over the positions
        that drafts reach (`valid`, `[steps, M]`); None if there is none."""
        return None

    def tally(
        self, heads: Sequence[DraftHead], states: Sequence[Tensor], valid: Tensor, top_M: Tensor
    ) -> Tensor:
        """Counts on held-out texts, to be summed for `facts`; `top_M` are the target's tokens."""
        return torch.zeros(0)

    def facts(self, tally: Tensor) -> dict[str, Any]:
        """What its drafter needs besides the weights, for config.json."""
        return {}

    def home(self, lm: TargetModel) -> torch.device:
        """Its device, which is that of the layer below it."""
        return lm.layer_devices[max(self.exit_layer, 1) - 1]


def new_head(lm: TargetModel, vocabulary_K: Tensor | None, width: int | None = None) -> nn.Linear:
    """An LM head over the draft vocabulary, for states of this width."""
    outputs = lm.config.vocab_size if vocabulary_K is None else len(vocabulary_K)
    return nn.Linear(width or lm.config.hidden_size, outputs, bias=False)


@torch.no_grad()
def copy_head(head: nn.Module, lm: TargetModel, vocabulary_K: Tensor | None) -> None:
    """Copy the target's rows of the draft vocabulary into `head`."""
    head.get_parameter("weight").copy_(weight_rows(lm.head, vocabulary_K))
