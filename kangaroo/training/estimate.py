"""Estimate from shapes alone whether a training fits the devices at hand, and how long it takes.

Sizes are in bytes. Memory held for the whole run is exact, what a step adds is a rough estimate.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.benchmark import Timer

from kangaroo.data import reading, store
from kangaroo.data.conversations import ConversationsConfig
from kangaroo.data.making import MixConfig, SynthesisConfig
from kangaroo.models.loading import ModelConfig
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import check_holdout
from kangaroo.training.recipe import AdapterRecipe, TrainerConfig, default_loss_chunk
from kangaroo.utils.errors import ConfigError

Data = SynthesisConfig | ConversationsConfig | MixConfig

FIXES = {  # by the part that needs the most memory
    "target": "Choose a smaller model, or spread it: trainer.shard_target=true in several "
    "processes, model.device_map=auto on several GPUs",
    "adapters": "Train fewer adapters at a time",
    "a micro-batch": "Pass a smaller trainer.batch_tokens= or trainer.max_length=",
    "logits": "Pass a smaller trainer.loss_chunk=, or trainer.vocabulary=",
}
# Assumed: the share of a large product's speed that training reaches; template tokens around a
# turn; for future data the conversations (ShareGPT's), their mean tokens, the assistant's share.
UTILISATION, TEMPLATE, CONVERSATIONS, LENGTH, LEARNT = 0.5, 32, 68_000, 1024, 0.75


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
        processes, cuda = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), torch.cuda
        if not cuda.is_available() or (model.device == "cpu" and model.device_map is None):
            return Devices("CPU", psutil.virtual_memory().available // processes)
        if model.device_map is not None:
            gpus = [cuda.mem_get_info(gpu) for gpu in range(cuda.device_count())]
            name = f"{len(gpus)} x {cuda.get_device_name(0)}"
            return Devices(name, sum(free for free, _ in gpus) // processes, gpus[0][1], "cuda:0")
        index = None if model.device == "auto" else torch.device(model.device).index
        gpu = cuda.current_device() if index is None else index
        return Devices(cuda.get_device_name(gpu), *cuda.mem_get_info(gpu), f"cuda:{gpu}")

    def speed(self, dtype: torch.dtype) -> float:
        """Measured FLOP/s of a large matrix product."""
        size = 1024 if self.device == "cpu" else 8192
        x, y = torch.randn(2, size, size, device=self.device).to(dtype)
        timer = Timer("x @ y", globals={"x": x, "y": y}, num_threads=torch.get_num_threads())
        return 2 * size**3 / timer.blocked_autorange(min_run_time=0.5).median

    def check(self, what: str, memory: dict[str, int], fix: str = "") -> None:
        """Errors: `ConfigError` if a process has no room for these parts, given in bytes."""
        if (needed := sum(memory.values())) > self.free:
            parts = sorted(memory, key=lambda part: -memory[part])
            most = ", ".join(f"{part} {memory[part] / 1e9:.1f} GB" for part in parts[:3])
            raise ConfigError(
                f"{what} takes {needed / 1e9:.1f} GB in each process ({most}, ...), and "
                f"{self.name} has {self.free / 1e9:.1f} GB free. {fix or FIXES[parts[0]]}."
            )


@dataclass(frozen=True)
class Text:
    """The amount of text: conversations, all tokens, the assistant's tokens, the most tokens of a
    conversation, stored tokens of each distribution (`data.teacher`), and where this is from."""

    conversations: int
    tokens: int
    learnt: int
    longest: int
    likeliest: int = 0
    source: str = "assumed"

    @staticmethod
    def of(data: Data, max_length: int) -> Text:
        """The text of existing or future data, cut at `max_length` tokens a conversation. Errors:
        `DataError` where a part of a mix is missing, or a local source cannot be read."""
        lengths, source = planned_lengths(data, max_length), "assumed"
        is_complete = store.is_complete(Path(data.path))
        if is_complete or isinstance(data, MixConfig):
            folders = data.paths if isinstance(data, MixConfig) and not is_complete else [data.path]
            parts = [store.read_provenance(Path(folder)) for folder in folders]
            names = "conversations", "tokens", "assistant_tokens"
            count, tokens, learnt = (sum(part[name] for part in parts) for name in names)
            stored = min((part.get("teacher") or {}).get("likeliest", 0) for part in parts)
            source = f"as they lie in {', '.join(folders)}"
            return Text(count, tokens, learnt, max(lengths), stored, source)
        if isinstance(data, SynthesisConfig):
            count, length = data.shards * data.shard_size, sum(lengths) / len(lengths)
        else:
            count, length = min(CONVERSATIONS, data.limit or CONVERSATIONS), min(LENGTH, *lengths)
            if reading.is_local(data.source):
                count = len(reading.read(data, data.limit, Counter() if data.skip_bad else None))
                source = f"as many as in {data.source}, of an assumed length"
        tokens = int(count * length)
        return Text(count, tokens, int(LEARNT * tokens), max(lengths), data.teacher, source)


def planned_lengths(data: Data, limit: int, template: int = 0) -> list[int]:
    """The most tokens of conversations, by kind of shard, with `template` more in each turn."""
    if isinstance(data, SynthesisConfig):
        turn = data.max_question_tokens + data.max_answer_tokens + template
        return [min(turn * turns, limit) for turns in data.turns]
    return [limit if isinstance(data, MixConfig) else min(data.max_length, limit)]


def estimate(
    lm: TargetModel,
    recipes: Sequence[AdapterRecipe],
    config: TrainerConfig,
    text: Text,
    processes: int = 1,
) -> tuple[int, dict[str, int], float]:
    """Optimizer steps of a training, memory of each process by part, without what
    `cache_target_states` keeps, and FLOPs of all processes. `lm` needs no weights."""
    hidden, vocab_size, itemsize = lm.config.hidden_size, lm.config.vocab_size, lm.dtype.itemsize
    layers, epochs, vocabulary = _count(lm.layers), config.epochs, config.vocabulary or vocab_size
    with FakeTensorMode():  # tensors without data
        tokens_K = None if config.vocabulary is None else torch.empty(vocabulary)
        exits = [(recipe, layer) for recipe in recipes for layer in recipe.named_exits(lm).values()]
        planned = [(r, r.architecture.build(lm, layer, tokens_K)) for r, layer in exits]
    taps = {tap for _, adapter in planned for tap in adapter.taps}
    deep = {tap for _, adapter in planned if (tap := adapter.deep_tap) is not None}
    is_stored = config.use_stored_logits is not False and text.likeliest > 0
    share = max(0, 1 - config.holdout / text.conversations)
    tokens, learnt = (int(share * count) for count in (text.tokens, text.learnt))
    accumulate = config.accumulate or processes  # micro-batches of a step
    longest = min(text.longest, config.max_length)
    batch = longest * max(1, config.batch_tokens // longest)  # tokens of a micro-batch
    learnt_in_batch = batch * text.learnt // text.tokens
    # a sharded target holds its share of all layers, and the one that runs
    spared = layers - layers // processes - layers // lm.n_layers if config.shard_target else 0
    layer_states = batch * 3 * (hidden + lm.config.intermediate_size)
    states = layer_states + ((len(taps) + len(deep)) * batch + learnt_in_batch) * hidden
    # beside weights and gradients: AdamW's moments, spread with a copy of the weights
    moments = 12 / processes if config.zero_stage else 8
    # of a position the target's logits, then p, log q and gradients
    logits = max(vocab_size * (itemsize + 8), vocabulary * (itemsize + 24))
    if is_stored:  # q, its exponential and gradient
        logits = vocabulary * 3 * itemsize
    memory = {
        "target": target_bytes(lm) + ((config.vocabulary or 0) * hidden - spared) * itemsize,
        "adapters": int(_count(*(x for _, x in planned)) * (8 + moments + 8 * (accumulate > 1))),
        "a micro-batch": states * itemsize,
        "logits": min(config.loss_chunk or learnt_in_batch, learnt_in_batch) * logits,
    }
    # 2 FLOPs for each weight and token; `head_flops` for each row of a head
    head_flops, target_runs = 2.0 * hidden * learnt, 1 if config.cache_target_states else epochs
    target_flops = 2.0 * layers * tokens * (max(taps | deep) / lm.n_layers if is_stored else 1)
    flops = target_runs * target_flops + (0 if is_stored else epochs * head_flops * vocab_size)
    for recipe, adapter in planned:
        steps, heads = recipe.steps, adapter.own_heads()
        passes = recipe.architecture.passes(steps)
        products = {m for m in adapter.modules() if isinstance(m, nn.Linear)}.difference(heads)
        features = sum(m.in_features + m.out_features for m in products)
        # what autograd keeps, then the learnt positions' states and their gradients
        memory["a micro-batch"] += batch * passes * features * (5 if itemsize == 4 else 4)
        memory["a micro-batch"] += 12 * steps * learnt_in_batch * hidden
        flops += 6.0 * (_count(adapter) - _count(*heads)) * tokens * passes * epochs
        flops += (3 if heads else 2) * head_flops * vocabulary * steps * epochs
    micro_batches = -(-tokens // config.batch_tokens) * epochs
    return -(-micro_batches // accumulate), memory, flops


def target_bytes(lm: TargetModel) -> int:
    """Bytes of the target's weights, with its layers as they are quantized."""
    layers, bits = _count(lm.layers), 8 * lm.dtype.itemsize
    return (_count(lm) * bits - layers * (bits - (lm.weight_bits or bits))) // 8


def check_writing(lm: TargetModel, data: Data, devices: Devices) -> None:
    """Errors: `ConfigError` if a process has no room for the target, or for writing the data."""
    target = target_bytes(lm)
    devices.check("loading the target", {"target": target})
    is_written = isinstance(data, ConversationsConfig) and not data.regenerate
    if isinstance(data, MixConfig) or is_written or store.is_complete(Path(data.path)):
        return
    longest = max(planned_lengths(data, lm.context, 2 * TEMPLATE))
    rows = min(data.batch_size, data.shard_size)
    row = longest * lm.new_cache(1, 1).bytes()
    fitting = (devices.free - target) // row
    what = f"writing the data, {rows} texts of up to {longest} tokens at a time,"
    fix = f"Pass data.batch_size={fitting}" if fitting > 0 else "Ask for shorter texts"
    fix = f"{fix}, or data=conversations data.regenerate=false"
    devices.check(what, {"target": target, "keys and values": rows * row}, fix)


def forecast(
    lm: TargetModel,
    recipes: Sequence[AdapterRecipe],
    model: ModelConfig,
    data: Data,
    trainer: TrainerConfig,
    processes: int,
    holds_out: bool = True,
) -> list[str]:
    """Log lines on a run's memory and time. Errors: `ConfigError` if it cannot run like this."""
    training_model = replace(model, device_map=None) if trainer.shard_target else model
    # a sharded target is loaded and writes on the CPU, and then goes to the GPUs part by part
    writing_model = replace(training_model, device="cpu") if trainer.shard_target else model
    check_writing(lm, data, Devices.of(writing_model))
    devices, text = Devices.of(training_model), Text.of(data, trainer.max_length)
    if holds_out and not store.is_complete(Path(data.path)):  # old data may still be replaced
        check_holdout(trainer.holdout, text.conversations)
    chunk = trainer.loss_chunk or default_loss_chunk(devices.total, lm.config.vocab_size)
    trainer = replace(trainer, loss_chunk=chunk)
    steps, memory, flops = estimate(lm, recipes, trainer, text, processes)
    devices.check("training", memory)
    speed = devices.speed(lm.dtype)
    hours = flops / (UTILISATION * speed) / 3600 / processes
    return [
        f"on {processes} x {devices.name}, {devices.free / 1e9:.1f} GB free for each",
        f"expect {steps} steps and about {sum(memory.values()) / 1e9:.1f} GB of memory in each "
        f"process, for {text.conversations} conversations, {text.tokens} tokens ({text.source})",
        f"expect about {hours:.2g} hours of training, {hours / trainer.epochs:.2g} an epoch, at "
        f"{UTILISATION:.0%} (assumed) of {speed / 1e12:.3g} TFLOP/s (measured)",
    ]


def _count(*modules: nn.Module) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())
