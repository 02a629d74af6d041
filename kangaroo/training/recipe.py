"""Options of a training run, recipes of adapters, and the adapters that are built from them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.base import HeadConfig, Trainable
from kangaroo.heads.block import BlockHead, BlockHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from kangaroo.training.distill import Loss
from kangaroo.utils import ranges
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranges import Count, CountOrZero, NotNegative, Positive, Ranged, Threshold

RANDOM = "random"  # a value of `AdapterRecipe.start`
LOGIT_BYTES = 26  # for each logit in half precision: itself, p, log q and gradients


@dataclass
class TrainerConfig(Ranged):
    """How adapters are trained.

    Args:
        learning_rate: the peak, reached after `warmup_steps` optimizer steps; then a cosine to 0.
        batch_tokens: padded tokens of a micro-batch (or one sample).
        use_stored_logits: learn from distributions that the data has (`data.teacher`), without the
            target's head and the layers that no adapter reads; None does so where it can.
        muon: train linear layers except LM heads with Muon, and everything else with AdamW.
        accumulate: micro-batches of an optimizer step, over all processes; None is one for each
            process, or the number that a resumed run began with.
        clip: largest gradient norm of each adapter.
        max_length: tokens after which samples are cut.
        holdout: samples at the end of the data that are never trained on.
        loss_chunk: learnt positions whose logits are in memory at a time; None follows the device's
            memory, or the number that a resumed run began with.
        evaluate_every, save_every: in optimizer steps; also after the last step.
        seed: seed of the samples' order and of random weights.
        vocabulary: draft from this many of the data's most frequent tokens; None is from all.
        zero_stage: DeepSpeed ZeRO's, which spreads AdamW's state over the processes; 0 is plain
            torch, with all of it in each.
        shard_target: each process holds a part of the target's layers and gathers one at a time.
    """

    epochs: Count = 3  # passes over the data
    learning_rate: Positive = 5e-3
    betas: tuple[Threshold, Threshold] = (0.9, 0.95)  # of AdamW
    weight_decay: NotNegative = 0.0  # of AdamW and Muon
    muon: bool = False
    warmup_steps: CountOrZero = 30  # optimizer steps
    batch_tokens: Count = 512
    use_stored_logits: bool | None = None
    accumulate: Count | None = None
    clip: Positive = 1.0
    max_length: ranges.TextLength = 2048
    holdout: Count = 128
    loss_chunk: Count | None = None
    evaluate_every: Count = 200
    save_every: Count = 50
    seed: ranges.Seed = 0
    vocabulary: Count | None = None
    zero_stage: Annotated[int, ranges.Range(0, 2)] = 0
    shard_target: bool = False


def default_loss_chunk(memory: int, vocabulary: int) -> int:
    """Positions whose logits are computed at a time: on a CPU (`memory` 0) few, which stay in its
    caches; on a GPU with `memory` bytes a power of two that fills up to a 32nd of them."""
    fitting = memory // (32 * LOGIT_BYTES * vocabulary)
    return max(256, min(4096, 1 << fitting.bit_length() >> 1))


def schedule(config: TrainerConfig, step: int, total: int) -> float:
    """The share of the peak learning rate at a step of `total`."""
    warmup = min(config.warmup_steps, total - 1)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / (total - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


@dataclass
class AdapterRecipe(Ranged):
    """One adapter for each exit layer, all trained on the same frozen pass.

    Args:
        name: with the exit layer, the name of the adapter's folder and results.
        architecture: the `HeadConfig` of a module in `kangaroo/heads`.
        exit_layers: numbers of target layers below each adapter, if its kind leaves a choice; 0 is
            on the embeddings; None follows the paper's rule.
        draft_steps: draft tokens in a row to train for, if its kind reads its own states.
        step_decay: weight of each further step's loss, as a share of the one before.
        learning_rate: peak; None takes the trainer's.
        start: folder or hub id of a trained adapter to continue from. It is of the same kind, or
            lacks some parts, which then add nothing at first. `random` starts as the paper's
            released code does; None starts from the target's own weights.
    """

    name: str = "???"
    architecture: Any = "???"
    exit_layers: ranges.Filled[CountOrZero] | None = field(default_factory=lambda: [3])
    loss: Loss = Loss.cross_entropy  # how its distributions are compared with the target's
    draft_steps: ranges.DraftSize = 1
    step_decay: NotNegative = 0.8
    learning_rate: Positive | None = None
    start: str | None = None

    @property
    def steps(self) -> int:
        """How many draft tokens in a row it is trained for."""
        return int(self.architecture.steps(self.draft_steps))

    def named_exits(self, lm: TargetModel) -> dict[str, int]:
        """Exit layers by the names of their adapters."""
        if (fixed := self.architecture.fixed_exit(lm)) is not None:
            return {self.name: fixed}
        return {f"{self.name}-exit{layer}": layer for layer in self.exit_layers or [paper_exit(lm)]}

    def settings(self) -> dict[str, Any]:
        return asdict(self) | {"loss": self.loss.value, "architecture": self.architecture.as_json()}


def paper_exit(lm: TargetModel) -> int:
    """The exit layer by the paper's rule, 1/16 to 1/10 of the layers: 2 of 32, 3 of 40."""
    return max(round(lm.n_layers / 13), 1)


def named_exits(
    recipes: Sequence[AdapterRecipe], lm: TargetModel
) -> dict[str, tuple[AdapterRecipe, int]]:
    """The recipe and exit layer of each adapter by name. Errors: `ConfigError` for equal names."""
    exits: dict[str, tuple[AdapterRecipe, int]] = {}
    for recipe in recipes:
        for name, layer in recipe.named_exits(lm).items():
            if name in exits:
                raise ConfigError(f"two adapters are called {name}; give one another adapter.name.")
            exits[name] = recipe, layer
    return exits


@dataclass
class Trainee:
    """An adapter in training, with a head for each draft step, the last for all further ones."""

    name: str
    adapter: Trainable
    heads: list[DraftHead]
    recipe: AdapterRecipe


def trainees(
    lm: TargetModel,
    recipes: Sequence[AdapterRecipe],
    vocabulary_K: Tensor | None,
    spread: Callable[[], None] | None = None,
    seed: int = 0,
) -> list[Trainee]:
    """Adapters in float32, before training, one for each recipe and exit layer; `seed` is that of
    random weights. `spread` is called once they have started from the target's weights; for a
    target without weights they stay random. Errors: those of `named_exits` and `load_start`."""
    adapters: dict[str, tuple[AdapterRecipe, Trainable]] = {}
    for name, (recipe, layer) in named_exits(recipes, lm).items():
        with torch.random.fork_rng(devices=[]):  # the same weights in every process
            torch.manual_seed(seed)
            adapter = recipe.architecture.build(lm, layer, vocabulary_K)
        if lm.device.type == "meta":
            pass
        elif recipe.start is None:
            adapter.start_from(lm, vocabulary_K)
        elif recipe.start != RANDOM:
            load_start(recipe.start, adapter, lm, vocabulary_K)
        adapters[name] = recipe, adapter.float()
    if spread is not None:
        spread()
    built = []
    shared_head = [DraftHead(lm, None, vocabulary_K)]
    for name, (recipe, adapter) in adapters.items():
        adapter = adapter.to(adapter.home(lm)).train().requires_grad_()
        heads = adapter.draft_heads(lm, vocabulary_K) if adapter.own_heads() else shared_head
        built.append(Trainee(name, adapter, heads, recipe))
    return built


def check_start(path: str, exit_layer: int, parts: HeadConfig) -> None:
    """Whether an adapter with these parts can continue from that in `path`. Errors: `ConfigError`;
    those of `adapter_files.read_config`."""
    saved = adapter_files.read_config(path)
    start = saved.architecture
    if type(start) is AdapterHeadConfig and isinstance(parts, AdapterHeadConfig):
        # what a block has besides begins anew
        start = parts if isinstance(parts, BlockHeadConfig) else start.with_parts_of(parts)
    kinds = [f"for exit layer {saved.exit_layer} with {start}"]
    kinds.append(f"for exit layer {exit_layer} with {parts}")
    if kinds[0] != kinds[1]:
        raise ConfigError(f"adapter.start={path} is {kinds[0]}; this one is {kinds[1]}.")


def load_start(path: str, adapter: Trainable, lm: TargetModel, vocabulary_K: Tensor | None) -> None:
    """Load a trained adapter's weights. Errors: `ConfigError`; those of `adapter_files.load`."""
    check_start(path, adapter.exit_layer, adapter.architecture)
    trained, _ = adapter_files.load(path, lm, Trainable)  # type: ignore[type-abstract]
    is_partial = type(trained) is Adapter and isinstance(adapter, BlockHead)
    try:
        if is_partial:
            adapter.start_from(lm, vocabulary_K)
        if type(trained) is Adapter and isinstance(adapter, Adapter):
            trained = trained.grown(lm, adapter.architecture)
        adapter.load_state_dict(trained.state_dict(), strict=not is_partial)
    except RuntimeError as error:
        raise ConfigError(f"adapter.start={path} is over another vocabulary: {error}") from error
