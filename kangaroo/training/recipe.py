"""How adapters are trained, the options of a run, and what is trained: the trained part of a
drafter, where it sits, and what it learns from."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter
from kangaroo.heads.base import Trainable
from kangaroo.heads.block import BlockHead
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from kangaroo.training.distill import Loss
from kangaroo.utils import ranges
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, CountOrZero, NotNegative, Positive, Ranged, Threshold

RANDOM = "random"  # a start
LOGIT_BYTES = 26  # of a logit in half precision: it, p, log q and gradients
MOVES_NOTHING = """
    evaluate_every save_every decode_every decode_prompts decode_tokens zero_stage shard_target
""".split()  # options that no weight depends on
ADDED_LATER = "use_stored_logits", "muon"  # runs from before do not have them


@dataclass
class TrainerConfig(Ranged):
    """How adapters are trained.

    Args:
        learning_rate: the peak, reached after `warmup_steps` optimizer steps; then a cosine to 0.
        batch_tokens: padded tokens of a micro-batch (or one sample).
        cache_target_states: only the first epoch runs the target; micro-batches stay the same, in
            another order every epoch.
        use_stored_logits: learn from the distributions that were stored when the data was written
            (`data.teacher`): the target runs no layer that no adapter reads, nor its head. None:
            where the data has them.
        muon: linear layers, but for LM heads, are moved by Muon, and all else by AdamW.
        accumulate: micro-batches an optimizer step, in all processes together; None is one in each
            process, and a run that is resumed keeps the number it began with.
        clip: largest gradient norm of each adapter.
        max_length: samples are cut here, in tokens.
        holdout: this many samples at the end are never trained on.
        loss_chunk: assistant positions whose logits exist at a time; None is `loss_chunk_of`, or
            what a run that is resumed began with.
        evaluate_every, save_every, decode_every: optimizer steps, and once more after the last.
        decode_prompts, decode_tokens: held-out prompts to decode for real (a sharded target decodes
            nothing), and the new tokens of each.
        seed: order of the samples.
        vocabulary: draft from this many of the data's most frequent tokens; None is from all.
        zero_stage: 0 is plain torch, each process with AdamW's whole state; 1 and 2 are DeepSpeed
            ZeRO, which spreads it.
        shard_target: each process holds a part of the target's layers and gathers one at a time.
    """

    epochs: Count = 3
    learning_rate: Positive = 5e-3
    betas: tuple[Threshold, Threshold] = (0.9, 0.95)
    weight_decay: NotNegative = 0.0
    muon: bool = False
    warmup_steps: CountOrZero = 30
    batch_tokens: Count = 512
    cache_target_states: bool = False
    use_stored_logits: bool | None = None
    accumulate: Count | None = None
    clip: Positive = 1.0
    max_length: ranges.TextLength = 2048
    holdout: Count = 128
    loss_chunk: Count | None = None
    evaluate_every: Count = 200
    save_every: Count = 50
    decode_every: Count = 1000
    decode_prompts: CountOrZero = 16
    decode_tokens: Count = 128
    seed: ranges.Seed = 0
    vocabulary: Count | None = None
    zero_stage: Annotated[int, ranges.Range(0, 2)] = 0
    shard_target: bool = False

    def identity(self) -> dict[str, Any]:
        """The options that move a weight: a run goes on with the same ones only."""
        settings = {k: v for k, v in asdict(self).items() if k not in MOVES_NOTHING}
        return {k: v for k, v in settings.items() if v or k not in ADDED_LATER}


def loss_chunk_of(memory: int, vocabulary: int) -> int:
    """Positions whose logits a device with so many bytes (0 is a CPU) computes at a time: on a CPU
    few, which stay in its caches; on a GPU a power of two whose logits and what is made of them
    fill a 32nd of its memory."""
    fitting = memory // (32 * LOGIT_BYTES * vocabulary)
    return max(256, min(4096, 1 << fitting.bit_length() >> 1))


def schedule(config: TrainerConfig, step: int, total: int) -> float:
    """Share of the peak learning rate at a step of `total`: linear warm-up, then a cosine to 0."""
    warmup = min(config.warmup_steps, total - 1)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class AdapterRecipe(Ranged):
    """One adapter for each exit layer, all from the same frozen pass.

    Args:
        name: with the exit layer it names the adapter's folder and results.
        architecture: the `HeadConfig` of a module in `kangaroo/heads`.
        exit_layers: how many of the target's layers lie below each adapter, where that is free.
        draft_steps: trained as it drafts this many tokens in a row, for kinds that read their own
            states.
        step_decay: each further step's loss weighs this much of the one before.
        learning_rate: peak; None takes the trainer's.
        start: folder or hub id of an adapter to go on from, of the same kind or without some of its
            parts, which then add nothing at first; `random`, as in the released code of the paper;
            None starts from the target's own weights.
    """

    name: str = "???"
    architecture: Any = "???"
    exit_layers: ranges.Filled[Count] = field(default_factory=lambda: [3])
    loss: Loss = Loss.cross_entropy
    draft_steps: ranges.DraftSize = 1
    step_decay: NotNegative = 0.8
    learning_rate: Positive | None = None
    start: str | None = None

    @property
    def steps(self) -> int:
        """How many draft tokens in a row it is trained for."""
        return int(self.architecture.steps(self.draft_steps))

    def places(self, lm: TargetModel) -> dict[str, int]:
        """Exit layers by the names of their adapters."""
        if (only := self.architecture.fixed_exit(lm)) is not None:
            return {self.name: only}
        return {f"{self.name}-exit{layer}": layer for layer in self.exit_layers}


@dataclass
class Trainee:
    """An adapter in training, and the `heads` it drafts with from one vocabulary: one for each
    draft step, the last for all further ones."""

    name: str
    adapter: Trainable
    heads: list[DraftHead]
    recipe: AdapterRecipe

    @property
    def vocabulary_K(self) -> Tensor | None:
        """The tokens to draft from, ascending; None is all of them."""
        return self.heads[0].vocabulary_K

    def settings(self) -> dict[str, Any]:
        """What it was asked to be, as plain values."""
        loss, architecture = self.recipe.loss.value, self.recipe.architecture.as_json()
        return asdict(self.recipe) | {"loss": loss, "architecture": architecture}


def trainees(
    lm: TargetModel,
    recipes: Sequence[AdapterRecipe],
    vocabulary_K: Tensor | None,
    shard_on: torch.device | None = None,
    seed: int = 0,
) -> list[Trainee]:
    """Untrained adapters in float32, one a recipe and exit layer; `seed` is of weights that start
    at random. With `shard_on` the target is spread over all processes, each computing there.
    Errors: `ConfigError` where two would have the same name; those of `go_on_from`."""
    adapters: dict[str, tuple[AdapterRecipe, Trainable]] = {}
    for recipe in recipes:
        for name, layer in recipe.places(lm).items():
            if name in adapters:
                raise ConfigError(f"two adapters are called {name}; give one another adapter.name.")
            with torch.random.fork_rng(devices=[]):  # the same in every process
                torch.manual_seed(seed)
                adapter = recipe.architecture.build(lm, layer, vocabulary_K)
            if recipe.start is None:
                adapter.start_from(lm, vocabulary_K)
            elif recipe.start != RANDOM:
                go_on_from(recipe.start, adapter, lm)
            adapters[name] = recipe, adapter.float()
    if shard_on is not None:
        lm.shard(shard_on)  # the layers that adapters start from had to be whole
    trained, shared = [], [DraftHead(lm, None, vocabulary_K)]
    for name, (recipe, adapter) in adapters.items():
        adapter = adapter.to(adapter.home(lm)).train().requires_grad_()
        heads = adapter.draft_heads(lm, vocabulary_K) if adapter.own_heads() else shared
        trained.append(Trainee(name, adapter, heads, recipe))
    return trained


def go_on_from(path: str, adapter: Trainable, lm: TargetModel) -> None:
    """Give `adapter` the weights of a trained one. Errors: `ConfigError` where that is another kind
    of adapter; what `adapter_files.load` raises."""
    trained, _ = adapter_files.load(path, lm, Trainable)  # type: ignore[type-abstract]
    if isinstance(trained, Adapter) and type(adapter) is Adapter:
        trained = trained.grown(lm, adapter.architecture)
    elif type(trained) is Adapter and isinstance(adapter, BlockHead):
        trained = trained.grown(lm, adapter.architecture)
        if trained.exit_layer == adapter.exit_layer:
            trained = adapter.start_from(lm).continue_from(trained)
    kinds = [f"for exit layer {a.exit_layer} with {a.architecture}" for a in (trained, adapter)]
    if kinds[0] != kinds[1]:
        raise ConfigError(f"adapter.start={path} is {kinds[0]}; this one is {kinds[1]}.")
    try:
        adapter.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        raise ConfigError(f"adapter.start={path} is over another vocabulary: {error}") from error
