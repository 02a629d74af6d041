"""What is trained: an adapter's parts, where it sits, and what it learns from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from kangaroo.errors import ConfigError
from kangaroo.model import LM
from kangaroo.trained import adapter_files
from kangaroo.trained.adapter import Adapter, Architecture, DraftHead
from kangaroo.trained.medusa_heads import MedusaHeads, build
from kangaroo.training.losses import Loss

RANDOM = "random"  # a start


@dataclass
class AdapterRecipe(Architecture):
    """One adapter for each exit layer, all from the same frozen pass.

    Args:
        name: with the exit layer it names the adapter's folder and figures.
        exit_layers: how many of the target's layers lie below each adapter.
        draft_steps: a fused adapter is trained on its own states too, as it reads them when it
            drafts this many tokens in a row; for others every step is alike.
        step_decay: each further step's loss weighs this much of the one before.
        on_policy: train one more step on a token that the adapter itself would draft, at the price
            of a second pass of the target for each adapter (after DistillSpec, arXiv 2310.08461).
        learning_rate: peak; None takes the trainer's.
        start: folder or hub id of an adapter of the same kind to go on from; `random` is torch's
            initialisation, as in the released code of the paper; None starts from the target's own
            layer above the exit.
    """

    name: str = "???"
    exit_layers: list[int] = field(default_factory=lambda: [3])
    loss: Loss = Loss.cross_entropy
    draft_steps: int = 1
    step_decay: float = 0.8
    on_policy: bool = False
    learning_rate: float | None = None
    start: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_steps < 1:
            raise ConfigError(f"adapter.draft_steps must be 1 or more, not {self.draft_steps}.")
        if self.medusa_heads and self.on_policy:
            raise ConfigError("adapter.on_policy=true is not for Medusa's heads; leave it off.")
        if self.draft_steps > 1 and not self.fused:
            raise ConfigError(
                f"adapter.draft_steps={self.draft_steps} needs adapter.fused=true: the states that "
                "other adapters read are the same at every draft step."
            )
        if not self.exit_layers:
            raise ConfigError("adapter.exit_layers is empty; name at least one layer, such as [3].")

    def architecture(self) -> Architecture:
        return Architecture(**{f.name: getattr(self, f.name) for f in fields(Architecture)})

    @property
    def steps(self) -> int:
        """How many draft tokens in a row it is trained for."""
        return self.medusa_heads or self.draft_steps

    def graded_steps(self, most: int) -> int:
        """How many of the first `most` draft tokens have grades of their own."""
        return most if self.fused else self.medusa_heads or 1

    def places(self, lm: LM) -> dict[str, int]:
        """Exit layers by the names of their adapters; Medusa's heads have but one, the last."""
        if self.medusa_heads:
            return {self.name: lm.n_layers}
        return {f"{self.name}-exit{layer}": layer for layer in self.exit_layers}


@dataclass
class Trainee:
    """An adapter in training.

    Args:
        name: of its folder and its figures, such as "attention-exit3".
        heads: what it drafts with: Medusa's one by one, the last for all further draft steps.
        targets: the target's head over the same draft vocabulary.
    """

    name: str
    adapter: Adapter | MedusaHeads
    heads: list[DraftHead]
    targets: DraftHead
    recipe: AdapterRecipe

    @property
    def vocabulary_K(self) -> Tensor | None:
        return self.targets.vocabulary_K

    def settings(self) -> dict[str, Any]:
        """What it was asked to be, as plain values."""
        return asdict(self.recipe) | {"loss": self.recipe.loss.value}


def trainees(
    lm: LM, recipes: Sequence[AdapterRecipe], vocabulary_K: Tensor | None,
    shard_on: torch.device | None = None, seed: int = 0,
) -> list[Trainee]:  # fmt: skip
    """Untrained adapters in float32, one a recipe and exit layer.

    Args:
        vocabulary_K: the tokens to draft from, ascending; None is all of them.
        shard_on: spread the target over all processes, each computing here.
        seed: of weights that start at random.

    Errors: `ConfigError` where two would have the same name.
    """
    made: dict[str, tuple[AdapterRecipe, Adapter | MedusaHeads]] = {}
    for recipe in recipes:
        for name, layer in recipe.places(lm).items():
            if name in made:
                raise ConfigError(f"two adapters are called {name}; give one another adapter.name.")
            with torch.random.fork_rng(devices=[]):  # the same in every process
                torch.manual_seed(seed)
                adapter = build(lm, layer, recipe.architecture(), vocabulary_K)
            if recipe.start is None:
                adapter.start_from(lm, vocabulary_K)
            elif recipe.start != RANDOM:
                go_on_from(recipe.start, adapter, lm)
            made[name] = recipe, adapter.float()
    if shard_on is not None:
        lm.shard(shard_on)  # the layers that adapters start from had to be whole
    targets = DraftHead(lm, None, vocabulary_K)
    trained = []
    for name, (recipe, adapter) in made.items():
        adapter = adapter.to(lm.layer_devices[adapter.exit_layer - 1]).train().requires_grad_()
        heads = adapter.draft_heads(lm, vocabulary_K) if recipe.own_head else [targets]
        trained.append(Trainee(name, adapter, heads, targets, recipe))
    return trained


def go_on_from(path: str, adapter: Adapter | MedusaHeads, lm: LM) -> None:
    """Give `adapter` the weights of a trained one.

    Errors: `ConfigError` where that is another kind of adapter; what `adapter_files.load` raises.
    """
    trained, _ = adapter_files.load_any(path, lm)
    kinds = [(a.exit_layer, a.architecture) for a in (trained, adapter)]
    if kinds[0] != kinds[1]:
        raise ConfigError(
            f"adapter.start={path} is for exit layer {kinds[0][0]} with {kinds[0][1]}; this one is "
            f"for exit layer {kinds[1][0]} with {kinds[1][1]}."
        )
    shapes = [{name: x.shape for name, x in a.state_dict().items()} for a in (trained, adapter)]
    if shapes[0] != shapes[1]:
        raise ConfigError(f"adapter.start={path} has a head of its own over another vocabulary.")
    adapter.load_state_dict(trained.state_dict())
