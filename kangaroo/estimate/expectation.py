"""What a training run takes in parameters, memory, disk and arithmetic, told from shapes alone.

Sizes are in bytes. What lies in memory for the whole run is exact; what a step adds to it is what
stands at its largest moment, without the allocator's waste. Arithmetic counts matrix products with
weights: attention's own, a few per cent at these lengths, is left out.

Shapes: B rows, T tokens, D hidden size.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kangaroo.engine import topk_logits as teacher
from kangaroo.engine.cache import Block
from kangaroo.models.prompts import Sample
from kangaroo.models.target import LM
from kangaroo.training.checkpoint import CHECKPOINT
from kangaroo.training.config import TrainerConfig
from kangaroo.training.recipe import AdapterRecipe
from kangaroo.utils.errors import ConfigError

# A token in a `datasets` folder beside its text: id as int32, loss mask as int64. In a shard both
# are JSON numbers. A conversation adds roles and offsets. (All but text as measured.)
DATASET_TOKEN, SHARD_TOKEN, CONVERSATION = 12, 8.5, 64
VOCABULARY_TOKEN = 4  # int32, in an adapter's list of frequent tokens


@dataclass(frozen=True)
class Text:
    """How much text there is.

    Args:
        tokens: of all conversations, each cut at the trainer's length.
        assistant_tokens: those that are learnt.
        longest: tokens of the longest conversation.
        characters: of text, a token.
        sharded: the target wrote it, so that it lies in shards as well.
        teacher: likeliest tokens that are kept of every distribution of the assistant's tokens.
    """

    conversations: int
    tokens: int
    assistant_tokens: int
    longest: int
    characters: float = 4.0
    sharded: bool = True
    teacher: int = 0

    @staticmethod
    def of(samples: Sequence[Sample], max_length: int) -> Text:
        """What these samples are, each cut at `max_length` tokens."""
        lengths = [min(len(sample["input_ids"]), max_length) for sample in samples]
        written = sum(sum(sample["loss_mask"][:max_length]) for sample in samples)
        records = [sample["teacher"] for sample in samples if "teacher" in sample]
        count = min((teacher.likeliest_kept(own) for own in records), default=0)
        known = count if len(records) == len(samples) else 0
        return Text(len(samples), sum(lengths), written, max(lengths), teacher=known)

    def learnt_from(self, config: TrainerConfig) -> int:
        """How many likeliest tokens of each distribution training reads; 0 where it runs the
        target's head (`StoredDistributions`)."""
        return 0 if config.use_stored_logits is False else self.teacher


@dataclass(frozen=True)
class Expectation:
    """What one run takes.

    Args:
        target, trained: parameters, frozen and by adapter.
        memory: of each process, by part.
        disk: by part.
        flops: of the whole run, all processes together, by part.
        steps: optimizer steps.
    """

    target: int
    trained: dict[str, int]
    memory: dict[str, int]
    disk: dict[str, int]
    flops: dict[str, float]
    steps: int

    def hours(self, flops_per_second: float) -> float:
        """Of one device at that speed."""
        return sum(self.flops.values()) / flops_per_second / 3600

    def summary(self) -> str:
        """One line for the log."""
        memory, disk = sum(self.memory.values()) / 1e9, sum(self.disk.values()) / 1e9
        most = max(self.memory, key=self.memory.__getitem__)
        return (
            f"expect {self.steps} steps, about {memory:.1f} GB of memory in each process (most of "
            f"it {most}), {disk:.2f} GB of disk (hidden states: none)"
        )


def expect(
    lm: LM, recipes: Sequence[AdapterRecipe], config: TrainerConfig, text: Text, processes: int = 1
) -> Expectation:
    """What `train` takes with the same arguments; `lm` may have no weights."""
    planned = [
        Planned(lm, recipe, name, layer, config.vocabulary)
        for recipe in recipes
        for name, layer in recipe.places(lm).items()
    ]
    parameters = sum(adapter.parameters for adapter in planned)
    share = max(0, 1 - config.holdout / text.conversations)
    if config.tokens is not None:
        share = min(share, config.tokens / text.assistant_tokens)
    tokens, learnt = int(share * text.tokens), int(share * text.assistant_tokens)
    micro_batches = -(-tokens // config.batch_tokens) * config.epochs
    accumulate = config.accumulate or processes
    own = -(-accumulate // processes)  # micro-batches of a step
    return Expectation(
        target=_count(lm),
        trained={adapter.name: adapter.parameters for adapter in planned},
        memory=_held(lm, parameters, config, processes)
        | _of_a_step(lm, planned, config, text)
        | _remembered(lm, planned, config, text, tokens, learnt, own / accumulate),
        disk=_disk(lm, planned, text),
        flops=_flops(lm, planned, config, text, tokens, learnt),
        steps=-(-micro_batches // accumulate),
    )


def check_disk(expected: Expectation, output: Path) -> None:
    """Raise `ConfigError` where `output` has no room for checkpoints and adapters."""
    output.mkdir(parents=True, exist_ok=True)
    last = output / CHECKPOINT
    there = last.stat().st_size if last.exists() else 0
    needed = expected.disk["checkpoint, while it is replaced"] + expected.disk["adapters"] - there
    free = shutil.disk_usage(output).free
    if needed > free:
        raise ConfigError(
            f"checkpoints and adapters take {needed / 1e9:.2f} GB, and {output} has "
            f"{free / 1e9:.2f} GB left. Make room, or pass output= a folder on another disk."
        )


class Planned:
    """An adapter's shape, made without memory.

    Args:
        vocabulary: size of the draft vocabulary; None is the whole one.
    """

    def __init__(
        self, lm: LM, recipe: AdapterRecipe, name: str, exit_layer: int, vocabulary: int | None
    ):
        self.name, self.recipe = name, recipe
        self.exit_layer = exit_layer
        self.without_memory = FakeTensorMode()  # tensors have shapes and types, and no numbers
        with self.without_memory:
            tokens_K = None if vocabulary is None else torch.empty(vocabulary)
            self.adapter = recipe.architecture.build(lm, exit_layer, tokens_K).train()
        self.parameters = _count(self.adapter)
        self.head = sum(map(_count, self.adapter.own_heads()))

    def saved(self, lm: LM, rows: int, width: int) -> int:
        """Bytes that autograd keeps of one micro-batch until the backward pass, half-precision
        copies of the weights included: counted on tensors without memory."""
        own = {p.untyped_storage()._cdata for p in self.adapter.parameters()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(x: Tensor) -> Tensor:
            storage = x.untyped_storage()
            if storage._cdata not in own:
                kept[storage._cdata] = storage
            return x

        half, size = lm.dtype != torch.float32, lm.config.hidden_size
        head_size = lm.rope(torch.zeros(1, 1, dtype=torch.long, device=lm.device))[0].shape[-1]
        with self.without_memory:
            f_BTD = torch.empty(rows, width, size)
            at_1T = torch.arange(width)[None]
            rope = 2 * (torch.empty(1, width, head_size),)
            block = Block(at_1T, at_1T, None, width, slice(0, rows), rope)
            with (
                torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
                torch.autocast("cpu", torch.bfloat16, enabled=half),
            ):
                taps, deep_BTD = {self.exit_layer: f_BTD}, torch.empty_like(f_BTD)
                self.adapter.states(taps, deep_BTD, block, self.recipe.steps)
        return sum(storage.nbytes() for storage in kept.values())


def _taps(planned: Sequence[Planned]) -> set[int]:
    """Of hidden states that adapters read as they are, how many layers lie below them."""
    return {tap for adapter in planned for tap in adapter.adapter.taps}


def _deep_taps(planned: Sequence[Planned]) -> set[int]:
    """Of those that they read normed."""
    return {tap for adapter in planned if (tap := adapter.adapter.deep_tap) is not None}


def _state_bytes(lm: LM, planned: Sequence[Planned], kept: int, tokens: int, learnt: int) -> int:
    """Of what the target gives adapters to learn from, and of its final states where it teaches."""
    deep = _deep_taps(planned)
    states = (len(_taps(planned)) + len(deep)) * tokens
    if not kept or lm.n_layers in deep:
        states += learnt
    return states * lm.config.hidden_size * lm.dtype.itemsize


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _held(lm: LM, parameters: int, config: TrainerConfig, processes: int) -> dict[str, int]:
    """What stands in memory throughout, in each process."""
    layers, size = _count(lm.layers), lm.dtype.itemsize
    whole = _count(lm) - layers
    if config.shard_target:  # its share of all layers, and the one that runs
        layers = layers // processes + layers // lm.n_layers
    optimizer = 8 * parameters
    if config.zero_stage:  # spread, with a copy of the weights
        optimizer = 12 * parameters // processes
    vocabulary = config.vocabulary or 0
    return {
        "target": (layers + whole) * size,
        "weights and gradients": 8 * parameters,
        "exact sum": 8 * parameters if (config.accumulate or processes) > 1 else 0,
        "optimizer": optimizer,
        "draft head": vocabulary * lm.config.hidden_size * size,
    }


def _of_a_step(
    lm: LM, planned: Sequence[Planned], config: TrainerConfig, text: Text
) -> dict[str, int]:
    """What one micro-batch of the longest texts adds."""
    width = min(text.longest, config.max_length)
    rows = max(1, config.batch_tokens // width)
    tokens, size, model = rows * width, lm.dtype.itemsize, lm.config
    learnt = tokens * text.assistant_tokens // text.tokens
    students = sum(adapter.recipe.steps for adapter in planned)
    # residual stream twice and normed, gate, up and their product
    layer = tokens * (3 * model.hidden_size + 3 * model.intermediate_size) * size
    taps = _state_bytes(lm, planned, text.learnt_from(config), tokens, learnt)
    vocabulary = config.vocabulary or model.vocab_size
    chunk = min(config.chunk, learnt)
    # the teacher's over all tokens, then p, log q and their gradients over those drafted from
    logits = max(model.vocab_size * (size + 8), vocabulary * (size + 24))
    if text.learnt_from(config):
        logits = vocabulary * 3 * size  # q, what its exponentials are taken of, and the gradient
    return {
        "frozen forward": layer + taps,
        "activations": sum(adapter.saved(lm, rows, width) for adapter in planned)
        + 12 * students * learnt * model.hidden_size,  # gathered states and their gradients
        "logits": chunk * logits,
    }


def _remembered(
    lm: LM,
    planned: Sequence[Planned],
    config: TrainerConfig,
    text: Text,
    tokens: int,
    learnt: int,
    share: float,
) -> dict[str, int]:
    """
    Args:
        share: of all micro-batches, what the process with most of them has.
    """
    if not config.cache_target_states:
        return {}
    kept = text.learnt_from(config)
    whole = _state_bytes(lm, planned, kept, tokens, learnt)
    whole += 9 * tokens  # ids, and whether they are learnt
    if kept:  # the likeliest; probabilities, places in the draft vocabulary, whether they are there
        whole += learnt * (8 + 4 + 13 * kept)
    return {"remembered states": int(share * whole)}


def _disk(lm: LM, planned: Sequence[Planned], text: Text) -> dict[str, int]:
    parameters = sum(adapter.parameters for adapter in planned)
    written = text.characters * text.tokens + CONVERSATION * text.conversations
    frequent = min(text.assistant_tokens, lm.config.vocab_size) * VOCABULARY_TOKEN  # at most
    records = text.assistant_tokens * teacher.layout(lm.config.vocab_size, text.teacher).itemsize
    disk = {"dataset": int(written + DATASET_TOKEN * text.tokens) + records}
    if text.sharded:
        disk["shards"] = int(written + SHARD_TOKEN * text.tokens) + records
    return disk | {
        "checkpoint, while it is replaced": 2 * 12 * parameters,
        "adapters": lm.dtype.itemsize * parameters + len(planned) * frequent,
        "hidden states": 0,
    }


def _flops(
    lm: LM,
    planned: Sequence[Planned],
    config: TrainerConfig,
    text: Text,
    tokens: int,
    learnt: int,
) -> dict[str, float]:
    """Two a weight and token forward, two more for each gradient that is wanted."""
    size, epochs = lm.config.hidden_size, config.epochs
    looks = 1 if config.cache_target_states else epochs
    vocabulary = config.vocabulary or lm.config.vocab_size
    forward = 2.0 * _count(lm.layers) * tokens
    whole_head = 2.0 * lm.config.vocab_size * size * learnt
    targets = 2.0 * vocabulary * size * learnt
    # over the whole vocabulary the teacher's head and the targets' are one
    adapters, heads = 0.0, targets * (epochs if config.vocabulary else epochs - looks)
    if text.learnt_from(config):  # without its head
        whole_head = heads = 0.0
        forward *= max(_taps(planned) | _deep_taps(planned)) / lm.n_layers
    for adapter in planned:
        steps = adapter.recipe.steps
        passes = adapter.recipe.architecture.passes(steps)
        adapters += 6.0 * (adapter.parameters - adapter.head) * tokens * passes * epochs
        heads += (3 if adapter.head else 2) * targets * steps * epochs
    return {
        "frozen forward": forward * looks,
        "teacher's head": whole_head * looks,
        "adapters": adapters,
        "draft heads": heads,
    }
