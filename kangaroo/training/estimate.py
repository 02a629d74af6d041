"""Estimate from shapes whether a training fits the devices at hand, and measure how long it takes.

Memory held for the whole run is exact, what a step adds is a rough estimate, in bytes. Time, in
seconds, is measured there: some layers of the target's shape with random weights, its head and the
adapters do each kind of work once.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import numpy as np
import psutil
import torch
from torch import cuda, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.benchmark import Timer, timer
from transformers import AutoModelForCausalLM

from kangaroo.data import reading, store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.making import MixConfig, SynthesisConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import topk_logits
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.heads.base import Trainable
from kangaroo.models.loading import ModelConfig
from kangaroo.models.prompts import Message, Sample
from kangaroo.models.supported import with_layers
from kangaroo.models.target import TargetModel
from kangaroo.training import batches, recipe, results
from kangaroo.training.backend import TorchBackend
from kangaroo.training.recipe import AdapterRecipe, TrainerConfig
from kangaroo.training.targets import Data, is_made, layers_read, writes_nothing
from kangaroo.utils import memory
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranks import ALONE

FIXES = {  # by the part that needs the most memory
    "target": "Choose a smaller model, or spread it: trainer.shard_target=true in several "
    "processes, model.device_map=auto on several GPUs",
    "adapters": "Train fewer adapters at a time",
    "a micro-batch": "Pass a smaller trainer.batch_tokens= or trainer.max_length=",
    "logits": "Pass a smaller trainer.loss_chunk=, or trainer.vocabulary=",
}
# Assumed of text that is not tokenized or not written yet. Its lengths are spread evenly.
TEMPLATE = 32  # tokens around a question and its answer
CHARACTERS = 4  # of a token
CONVERSATIONS = 68_000  # ShareGPT's
LEARNT = 0.75  # the assistant's share

CACHES = 1 << 27  # bytes of weights, so many that a processor reads them anew for every pass
WRITTEN = 8  # tokens of each text that are written to measure
LONG = 10.0  # seconds
UNITS = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}


@dataclass(frozen=True)
class Devices:
    """The devices of each process, with the memory and torch's name of the first one."""

    name: str
    free: int  # bytes of all of them
    total: int = 0  # bytes of the first one; 0 for a CPU
    device: str = "cpu"

    @staticmethod
    def of(model: ModelConfig) -> Devices:
        """The devices for this process's target. The processes of a machine have a GPU each; they
        share the CPU's memory and the GPUs of a device map."""
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if not cuda.is_available() or (model.device == "cpu" and model.device_map is None):
            return Devices("CPU", psutil.virtual_memory().available // processes)
        if model.device_map is not None:
            gpus = [cuda.mem_get_info(gpu) for gpu in range(cuda.device_count())]
            name = f"{len(gpus)} x {cuda.get_device_name(0)}"
            return Devices(name, sum(free for free, _ in gpus) // processes, gpus[0][1], "cuda:0")
        index = None if model.device == "auto" else torch.device(model.device).index
        gpu = cuda.current_device() if index is None else index
        return Devices(cuda.get_device_name(gpu), *cuda.mem_get_info(gpu), f"cuda:{gpu}")

    def check(self, what: str, memory: dict[str, int], fix: str = "") -> None:
        """Errors: `ConfigError` if a process has no room for these parts, given in bytes."""
        needed = sum(memory.values())
        if needed > self.free:
            parts = sorted(memory, key=lambda part: -memory[part])
            most = ", ".join(f"{part} {memory[part] / 1e9:.1f} GB" for part in parts[:3])
            raise ConfigError(
                f"{what} takes {needed / 1e9:.1f} GB in each process ({most}, ...), and "
                f"{self.name} has {self.free / 1e9:.1f} GB free. {fix or FIXES[parts[0]]}."
            )


@dataclass(frozen=True)
class Text:
    """Conversations: the tokens of each, the share of these that the assistant wrote, stored tokens
    of each distribution (`data.teacher`), how many are to be written, and where this is from."""

    lengths: list[int]
    learnt: float = LEARNT
    likeliest: int = 0
    unwritten: int = 0
    source: str = "of assumed lengths"

    @staticmethod
    def of(data: Data, lm: TargetModel) -> Text:
        """The text of existing or future data. Errors: `DataError` where a part of a mix is
        missing, or a local source cannot be read."""
        if isinstance(data, MixConfig) or is_made(data, lm):
            folders = data.paths if isinstance(data, MixConfig) else [data.path]
            parts = [store.read_provenance(Path(folder)) for folder in folders]
            lengths = [n for folder in folders for n in store.lengths(Path(folder))]
            learnt = sum(part["assistant_tokens"] for part in parts) / sum(lengths)
            stored = min((part.get("teacher") or {}).get("likeliest", 0) for part in parts)
            return Text(lengths, learnt, stored, source=f"as they lie in {', '.join(folders)}")
        longest = longest_text(data, lm)
        is_written = isinstance(data, SynthesisConfig) or data.regenerate
        if isinstance(data, SynthesisConfig):
            count = data.shards * data.shard_size
        else:
            count = data.limit or CONVERSATIONS
        lengths = [longest * (i + 1) // count or 1 for i in range(count)]
        if isinstance(data, ConversationsConfig) and reading.is_local(data.source):
            texts = reading.read(data, data.limit, Counter() if data.skip_bad else None)
            lengths = [min(_length(x, data, lm.config.vocab_size), longest) for x in texts]
        existing = len(list(Path(f"{data.path}.shards").glob("*.jsonl"))) * data.shard_size
        unwritten = max(len(lengths) - existing, 0) if is_written else 0
        return Text(lengths, likeliest=data.teacher, unwritten=unwritten)


def longest_text(data: SynthesisConfig | ConversationsConfig, lm: TargetModel) -> int:
    """The most tokens of a conversation that is to be written."""
    if isinstance(data, ConversationsConfig):
        return min(data.max_length, lm.context)
    turn = TEMPLATE + data.max_question_tokens + data.max_answer_tokens
    return min(max(data.turns) * turn, lm.context)


def _length(turns: Sequence[Message], data: ConversationsConfig, vocab_size: int) -> int:
    """About how many tokens a conversation has, by its characters, with half of the limit for each
    answer that the target will write. In a small vocabulary a token is a byte."""
    kept = [m for m in turns if m["role"] != "assistant" or not data.regenerate]
    tokens = sum(len(m["content"]) for m in kept) // (CHARACTERS if vocab_size > 1024 else 1)
    asked = sum(m["role"] == "user" for m in kept)
    written = data.max_answer_tokens // 2 if data.regenerate else 0
    return tokens + asked * (TEMPLATE + written)


@dataclass
class Plan:
    """A training by its shapes: the micro-batches of an epoch, and of the held-out texts, as lists
    of lengths; its optimizer steps; its adapters, without data. `lm` needs no weights; `kept` of
    its layers are loaded, if not all."""

    lm: TargetModel
    recipes: Sequence[AdapterRecipe]
    config: TrainerConfig
    text: Text
    processes: int = 1
    kept: int | None = None

    def __post_init__(self) -> None:
        config = self.config
        lengths = self.text.lengths
        count = max(len(lengths) - config.holdout, 1)
        self.training = _micro_batches(lengths[:count], config)
        self.held_out = _micro_batches(lengths[count:] or [1], config)
        self.accumulate = config.accumulate or self.processes  # micro-batches of a step
        self.steps = -(-len(self.training) * config.epochs // self.accumulate)
        vocab_size = self.lm.config.vocab_size
        self.vocabulary = min(config.vocabulary or vocab_size, vocab_size)
        self.is_stored = config.use_stored_logits is not False and self.text.likeliest > 0
        with FakeTensorMode():  # tensors without data
            tokens_K = None if config.vocabulary is None else torch.empty(self.vocabulary)
            exits = recipe.named_exits(self.recipes, self.lm).values()
            self.planned = [(r, r.architecture.build(self.lm, n, tokens_K)) for r, n in exits]
        self.adapters = [adapter for _, adapter in self.planned]

    def memory(self) -> dict[str, int]:
        """Bytes in each process by part."""
        lm = self.lm
        config = self.config
        hidden = lm.config.hidden_size
        itemsize = lm.dtype.itemsize
        layers = _count(lm.layers)
        batch = max(len(lengths) * max(lengths) for lengths in self.training)
        learnt = max(int(batch * self.text.learnt), 1)
        held = 0 if config.vocabulary is None else self.vocabulary * hidden
        if config.shard_target:  # its share of all layers, and the one that runs
            held += layers // self.processes + layers // lm.n_layers - layers
        # beside weights and gradients: AdamW's moments, spread with a copy of the weights
        moments = 12 / self.processes if config.zero_stage else 8
        # of a position the target's logits, then p, log q and gradients; if stored, only q's
        logits = max(lm.config.vocab_size * (itemsize + 8), self.vocabulary * (itemsize + 24))
        if self.is_stored:  # q, its exponential and gradient
            logits = self.vocabulary * 3 * itemsize
        states = 3 * (hidden + lm.config.intermediate_size) + len(_taps(self.adapters)) * hidden
        step = (batch * states + learnt * hidden) * itemsize
        for adapter_recipe, adapter in self.planned:
            linears = {m for m in adapter.modules() if isinstance(m, nn.Linear)}
            products = linears.difference(adapter.own_heads())
            features = sum(m.in_features + m.out_features for m in products)
            # what autograd keeps, then the learnt positions' states and their gradients
            passes = adapter_recipe.steps if adapter.architecture.shares_weights else 1
            kept = batch * features * passes
            step += kept * (5 if itemsize == 4 else 4) + 12 * adapter_recipe.steps * learnt * hidden
        return {
            "target": target_bytes(lm, self.kept) + held * itemsize,
            "adapters": int(_count(*self.adapters) * (8 + moments + 8 * (self.accumulate > 1))),
            "a micro-batch": step,
            "logits": min(config.loss_chunk or learnt, learnt) * logits,
        }

    def seconds(self, device: str) -> dict[str, float]:
        """The time of each part of the training in each process, without decoding."""
        config = self.config
        chunk = config.loss_chunk or 1
        lm = _some_layers(self.lm, device)
        # an adapter takes the same time at each exit
        exits = [replace(r, exit_layers=[1], start=recipe.RANDOM) for r, _ in self.planned]
        recipes = [replace(r, name=str(number)) for number, r in enumerate(exits)]
        tokens_K = None if config.vocabulary is None else torch.arange(self.vocabulary)
        trained = recipe.trainees(lm, recipes, tokens_K)
        tokens = self._typical(lm)
        adapters = [x.adapter for x in trained]
        backend = TorchBackend(adapters, replace(config, accumulate=self.accumulate), ALONE)
        outputs = batches.forward_target(lm, tokens, trained)

        def learn() -> None:
            batches.train_step(lm, outputs, trained, loss_chunk=chunk, weight=1e-3)
            backend.collect()
            backend.step([0.0] * len(adapters))

        depth = self.lm.n_layers / lm.n_layers
        if self.is_stored:  # it stops at the last layer that an adapter reads
            depth = max(_taps(self.adapters)) / max(_taps(adapters))
        target = depth * _time(lambda: batches.forward_target(lm, tokens, trained))
        graded = _time(lambda: batches.grade(lm, outputs, trained, chunk, most=results.STEPS))
        epoch, held_out = (len(x) / self.processes for x in (self.training, self.held_out))
        evaluations = -(-self.steps // config.evaluate_every)
        return {
            "the target": epoch * config.epochs * target,
            "the adapters": epoch * config.epochs * _time(learn),
            "held-out text": held_out * evaluations * (target + graded),
        }

    def _typical(self, lm: TargetModel) -> batches.Tokens:
        lengths = sorted(self.training, key=lambda x: len(x) * max(x))[len(self.training) // 2]
        longest = max(max(lengths), 2)
        learnt = max(int(self.text.learnt * longest), 2)
        mask = [1] * learnt + [0] * (longest - learnt)
        sample = Sample(messages=[], input_ids=[1] * longest, loss_mask=mask)
        if self.is_stored:
            stored = np.full((learnt, min(self.text.likeliest, lm.config.vocab_size)), 1e-3)
            sample["teacher"] = topk_logits.records(stored, stored, lm.config.vocab_size)
        return batches.collate([sample] * len(lengths), longest, lm.device, self.is_stored)


def writing_seconds(lm: TargetModel, data: Data, text: Text, device: str, processes: int) -> float:
    """The time in which each process writes its share of the data, from that of `WRITTEN` tokens of
    as many texts at a time by some layers, in the middle of the texts."""
    if isinstance(data, MixConfig) or not text.unwritten:
        return 0.0
    some = _some_layers(lm, device)
    rows = min(data.batch_size, data.shard_size, text.unwritten)
    request = Request([1] * max(int(mean(text.lengths)) // 2, 1), WRITTEN, ignore_eos=True)
    engine = Engine(some.compile_for_decoding(), Vanilla(), prefix_cache=True)
    done = dict(engine.completions([request] * rows, Sampling(), rows))  # one is read, and copied
    step = median(record.seconds for record in done[0].steps[1:])
    tokens = text.unwritten * mean(text.lengths)
    written = tokens * (1 if isinstance(data, SynthesisConfig) else text.learnt)
    # at the end of a shard fewer and fewer rows are left
    written += -(-text.unwritten // data.shard_size) * rows * data.max_answer_tokens / 2
    took = written * step / rows + tokens * done[0].prefill_seconds / len(request.prompt)
    return took * _count(lm.layers, lm.head) / _count(some.layers, some.head) / processes


def _taps(adapters: Sequence[Trainable]) -> set[int]:
    """The layers below the states that adapters read."""
    deep = {adapter.deep_tap for adapter in adapters if adapter.deep_tap is not None}
    return {tap for adapter in adapters for tap in adapter.taps} | deep


def _some_layers(lm: TargetModel, device: str) -> TargetModel:
    """The first layers of a target, random: at least two, and more than caches hold."""
    fitting = CACHES * lm.n_layers // (_count(lm.layers) * lm.dtype.itemsize)
    count = min(lm.n_layers, max(2, fitting + 1))
    config = with_layers(lm.config, range(count))
    with torch.device(device), torch.random.fork_rng(devices=[]):
        return TargetModel(AutoModelForCausalLM.from_config(config, dtype=lm.dtype))


def _micro_batches(lengths: Sequence[int], config: TrainerConfig) -> list[list[int]]:
    clipped = [min(length, config.max_length) for length in lengths]
    planned = batches.plan(clipped, config.batch_tokens, config.seed, epoch=0)
    return [[clipped[i] for i in batch] for batch in planned]


def _time(work: Callable[[], object]) -> float:
    """The median time of a call after the first, or of the first one if that takes `LONG`."""
    start = timer()
    work()
    if (first := timer() - start) > LONG:
        return first
    later = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return later.blocked_autorange(min_run_time=0.1).median


def target_bytes(lm: TargetModel, kept: int | None = None) -> int:
    """Bytes of the target's weights, with its layers as they are quantized, or `kept` of them."""
    if kept is not None:
        return (_count(lm) - _count(*lm.layers[kept:])) * lm.dtype.itemsize
    layers = _count(lm.layers)
    bits = 8 * lm.dtype.itemsize
    return (_count(lm) * bits - layers * (bits - (lm.weight_bits or bits))) // 8


def check_writing(
    lm: TargetModel, data: Data, text: Text, devices: Devices, kept: int | None = None
) -> int:
    """Bytes in each process while it writes the data. Errors: `ConfigError` if there is no room for
    the target, or for the layers of it that are `kept`, or for writing."""
    parts = {"target": target_bytes(lm, kept)}
    devices.check("loading the target", parts)
    if text.unwritten and not isinstance(data, MixConfig):
        longest = longest_text(data, lm)
        rows = min(data.batch_size, data.shard_size)
        row_bytes = longest * lm.new_cache(1, 1).bytes()
        fitting = (devices.free - parts["target"]) // row_bytes
        parts["keys and values"] = rows * row_bytes
        what = f"writing the data, {rows} texts of up to {longest} tokens at a time,"
        fix = f"Pass data.batch_size={fitting}" if fitting > 0 else "Ask for shorter texts"
        devices.check(what, parts, f"{fix}, or data=conversations data.regenerate=false")
    return sum(parts.values())


def duration(seconds: float) -> str:
    """A time in the largest unit of which there are two."""
    unit = next((unit for unit, size in UNITS.items() if seconds >= 2 * size), "seconds")
    value = seconds / UNITS[unit]
    return f"{value:.{0 if value >= 10 else 1}f} {unit}"


def forecast(
    lm: TargetModel,
    recipes: Sequence[AdapterRecipe],
    model: ModelConfig,
    data: Data,
    trainer: TrainerConfig,
    processes: int,
    trains: bool = True,
) -> list[str]:
    """Log lines on a run's memory and time. Errors: `ConfigError` if it cannot run like this."""
    text = Text.of(data, lm)
    devices = writer = Devices.of(model)
    if trainer.shard_target:  # it is loaded and writes on the CPU, then goes to the GPUs by parts
        devices = Devices.of(replace(model, device_map=None))
        writer = Devices.of(replace(model, device_map=None, device="cpu"))
        if writes_nothing(data, lm):  # the first process alone reads it
            writer = replace(writer, free=writer.free * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    kept = layers_read(lm, recipes, trainer, data)
    needed = check_writing(lm, data, text, writer, kept)
    chunk = trainer.loss_chunk or recipe.default_loss_chunk(devices.total, lm.config.vocab_size)
    plan = Plan(
        lm, recipes, replace(trainer, loss_chunk=chunk), text=text, processes=processes, kept=kept
    )
    if trains:
        if not is_made(data, lm):  # else its source may have grown
            batches.check_holdout(trainer.holdout, len(text.lengths))
        devices.check("training", plan.memory())
        needed = max(needed, sum(plan.memory().values()))
    seconds = {"writing the data": writing_seconds(lm, data, text, writer.device, processes)}
    seconds |= plan.seconds(devices.device) if trains else {}
    memory.give_back()
    # a CPU's memory has the program, too
    needed += psutil.Process().memory_info().rss if devices.device == "cpu" else 0
    times = ", ".join(f"{duration(time)} for {part}" for part, time in seconds.items() if time)
    return [
        f"on {processes} x {devices.name}, {devices.free / 1e9:.1f} GB free for each",
        f"expect {f'{plan.steps} steps and ' if trains else ''}about {needed / 1e9:.1f} GB of "
        f"memory in each process, for {len(text.lengths)} conversations, {sum(text.lengths)} "
        f"tokens ({text.source})",
        f"expect about {duration(sum(seconds.values()))}: {times or 'nothing is to be done'}",
    ]


def _count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
