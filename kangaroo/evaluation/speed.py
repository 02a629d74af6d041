"""The speed benchmark: vanilla, a drafter and transformers against the memory's limit, over the
context, the width of a verification and the batch; with its JSON and its tables.

Decoding is greedy, past any EOS, and at batch 1 except in the table of batches. All methods take
turns on every prompt, and in a batch at every step, so that a machine that slows down slows all of
them. The prefill, the first step of a text, is not part of decoding.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from rich.console import Console

from kangaroo.drafters.base import DrafterConfig
from kangaroo.drafters.early_exit import EarlyExit
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import now
from kangaroo.engine.costs import verifications
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.bench import BenchConfig, long_prompt, question_prompts
from kangaroo.evaluation.methods import generate
from kangaroo.evaluation.metrics import Results
from kangaroo.models.prompts import Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils import memory, tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import write_json
from kangaroo.utils.provenance import describe_machine, provenance
from kangaroo.utils.ranges import Count, Filled, Ranged, TextLength
from kangaroo.utils.tables import number
from kangaroo.utils.terminal import progress_bar

log = logging.getLogger(__name__)

TITLES = {
    "contexts": "Decoding over the context",
    "verifications": "Verification",
    "batches": "Tokens/s over the batch",
}
WIDTHS = [*range(1, 9), 12, 16, 32, 64]  # tokens of a verification
WARM_UP = 2  # reads of memory that are not timed
REPEATS = 15
CACHE_SHARE = 0.8  # largest share of the free memory for a cache; passes need the rest

Method = Callable[[list[int], int], Generation]  # takes a prompt and a number of new tokens
Prompts = Sequence[list[int]]
Texts = list[list[Generation]]  # by prompt, then by repeat


@dataclass
class SpeedConfig(Ranged):
    """What is measured.

    Args:
        contexts: prompt lengths at which ms/token is measured; those too long for the model are
            left out. Verifications are measured at the first.
        context_tokens: new tokens at each of these lengths.
        repeats: how often every method answers at each of these lengths, and batches of a size.
        batches: batch sizes.
        prompts: number of questions for batches, spread over the bench; batches take them in turn.
        max_new_tokens: new tokens of each answer in a batch.
        bandwidth_megabytes: size of the buffer that is read; it must exceed the processor's caches.
    """

    bench: BenchConfig = field(default_factory=BenchConfig)
    prompts: Count = 12
    max_new_tokens: TextLength = 128
    repeats: Count = 2
    contexts: Filled[Count] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096])
    context_tokens: TextLength = 24
    batches: Filled[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    bandwidth_megabytes: Count = 1024


def measure(
    lm: TargetModel, tokenizer: Tokenizer, options: DrafterConfig, config: SpeedConfig
) -> Results:
    """The benchmark's results, for `write`. Errors: `ConfigError` if no context fits, or for
    options of vanilla; those of `options.build`."""
    drafter = options.build(lm)
    if isinstance(drafter, Vanilla):
        raise ConfigError("vanilla is measured beside a drafter; pass drafter=kangaroo or another.")
    contexts = [n for n in config.contexts if n + config.context_tokens <= lm.context]
    if not contexts:
        raise ConfigError(f"no context of speed.contexts={config.contexts} fits the model.")
    tokens = config.max_new_tokens
    new_tokens = config.context_tokens
    prompts = question_prompts(tokenizer, config.prompts, config.bench, lm.context - tokens)
    long_prompts = [long_prompt(tokenizer, length) for length in contexts]
    engines = {"vanilla": Engine(lm, Vanilla()), options.name: Engine(lm, drafter)}
    methods: dict[str, Method] = {"hf": partial(generate, lm)}
    methods |= {name: partial(write_by_engine, engine) for name, engine in engines.items()}
    before = memory_bandwidth(lm.device, config.bandwidth_megabytes)
    take_turns(methods, long_prompts[:1], new_tokens, repeats=1, title="warm-up")
    texts = take_turns(methods, long_prompts, new_tokens, repeats=config.repeats, title="contexts")
    entry = drafter.exit_layer if isinstance(drafter, EarlyExit) else 0
    passes = verifications(lm, WIDTHS, range(entry, lm.n_layers), contexts[0])
    seconds = {width: median(times) for width, times in passes.items()}
    batches = throughput(engines, prompts, tokens, config.batches, config.repeats)
    after = memory_bandwidth(lm.device, config.bandwidth_megabytes)
    bandwidth = max(before, after)
    kv_bytes = lm.new_cache(1, 1).bytes()
    return {
        "model": lm.config.name_or_path,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "drafter": asdict(options),
        "settings": asdict(config),
        "provenance": provenance(),
        "bandwidth": {"before": before, "after": after},
        "weights": bytes_read(lm, 0),
        "contexts": [
            {"context": length, "kv_mb": length * kv_bytes / 1e6, "method": name}
            | summarise(texts[name][i], bytes_read(lm, length + new_tokens / 2) / bandwidth)
            for i, length in enumerate(contexts)
            for name in methods
        ],
        "verifications": [
            {"tokens": width, "ms": 1e3 * time, "of_one": time / seconds[1]}
            for width, time in seconds.items()
        ],
        "batches": batches,
    }


def bytes_read(lm: TargetModel, length: float) -> float:
    """Bytes that vanilla decoding reads from memory for a token after `length` others: all that it
    needs once. The embedding is one row of its table, unless the table is the head, too."""
    weights = memory.weight_bytes(*lm.layers, lm.hf.model.norm, lm.head)
    row = lm.config.hidden_size * lm.dtype.itemsize
    return row + weights + length * lm.new_cache(1, 1).bytes()


def memory_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes per second of reading a buffer of `megabytes` * 2**20 bytes in order."""
    source = torch.ones(megabytes * 2**17, dtype=torch.int64, device=device)
    seconds = []
    for _ in range(WARM_UP + REPEATS):
        start = now(device)
        source.sum()
        seconds.append(now(device) - start)
    return source.nbytes / median(seconds[WARM_UP:])


def throughput(
    engines: Mapping[str, Engine],
    prompts: Prompts,
    new_tokens: int,
    sizes: Sequence[int],
    repeats: int,
) -> list[Results]:
    """Tokens/s of vanilla and the drafter at every batch size whose caches fit: medians, and the
    lowest and highest ratio."""
    results = []
    (vanilla, _), (name, engine) = engines.items()
    lm = engine.lm
    row = 2 * lm.new_cache(1, 1).bytes() * (max(map(len, prompts)) + new_tokens)
    for size in sizes:
        if size * row > CACHE_SHARE * memory.free(lm.device):
            log.warning("batch %d is left out: its caches would take %d bytes", size, size * row)
            continue
        pairs = []
        for repeat in range(repeats):
            batch = [prompts[(repeat * size + i) % len(prompts)] for i in range(size)]
            pairs.append(tokens_per_second(list(engines.values()), batch, new_tokens))
        ratios = [drafted / plain for plain, drafted in pairs]
        rates = {vanilla: median(plain for plain, _ in pairs)}
        rates |= {name: median(drafted for _, drafted in pairs), "speedup": median(ratios)}
        results.append({"batch": size} | rates | {"lowest": min(ratios), "highest": max(ratios)})
    return results


def tokens_per_second(engines: Sequence[Engine], prompts: Prompts, new_tokens: int) -> np.ndarray:
    """Each engine's speed in decoding a batch, past any EOS, until its first text is complete."""
    sessions = []
    for engine in engines:
        session = engine.open(len(prompts), max(map(len, prompts)) + new_tokens, Sampling())
        for row, prompt in enumerate(prompts):
            session.admit(row, Request(prompt, new_tokens, ignore_eos=True))
        sessions.append(session)
    written, seconds = np.zeros((2, len(sessions)))
    order = 1  # each comes first in turn
    while writing := [i for i, session in enumerate(sessions) if not any(session.batch.done)]:
        order = -order
        for i in writing[::order]:
            start = now(engines[i].lm.device)
            written[i] += sum(len(record.tokens) for record in sessions[i].step())
            seconds[i] += now(engines[i].lm.device) - start
    return written / seconds


def summarise(texts: Sequence[Generation], limit: float) -> Results:
    """The results of one method; a vanilla token takes `limit` seconds at least."""
    steps = [step for text in texts for step in text.steps[1:]]
    decoded = sum(len(step.tokens) for step in steps)
    seconds = sum(step.seconds for step in steps)
    return {
        "ms_per_token": 1e3 * seconds / decoded,
        "of_limit": limit * decoded / seconds,
        "first_ms": 1e3 * median(text.prefill_seconds for text in texts),
    }


def write_by_engine(engine: Engine, prompt: list[int], new_tokens: int) -> Generation:
    """Greedy decoding of one prompt, past any EOS."""
    request = Request(prompt, new_tokens, ignore_eos=True)
    ((_, generation),) = engine.completions([request], Sampling(), batch_size=1)
    return generation


def take_turns(
    methods: Mapping[str, Method], prompts: Prompts, new_tokens: int, repeats: int, title: str
) -> dict[str, Texts]:
    """Let the methods answer each prompt in turn; another one begins each time."""
    names = list(methods)
    texts: dict[str, Texts] = {name: [[] for _ in prompts] for name in names}
    turns = [(repeat + i, i) for repeat in range(repeats) for i in range(len(prompts))]
    for turn, index in progress_bar(turns, title, unit="turn"):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            texts[name][index].append(methods[name](prompts[index], new_tokens))
    return texts


def write(result: Results, output: Path, console: Console) -> None:
    """Save the results of `measure` as `speed.json` and `speed.md`, and print them."""
    write_json(output / "speed.json", result)
    text = ""
    for name, title in TITLES.items():
        rows = [{k.replace("_", " "): cell(x) for k, x in row.items()} for row in result[name]]
        text += f"**{title}**\n\n{tables.markdown(rows)}\n\n"
        console.print(tables.terminal(rows, title))
    (output / "speed.md").write_text(f"{text}{notes(result)}\n", encoding="utf-8")
    console.print(notes(result), f"Saved in {output}.", sep="\n", markup=False, highlight=False)


def cell(value: str | float | None) -> str:
    """The text of a value; a dash for None."""
    return str(value) if isinstance(value, str | int) else number(value)


def notes(result: Results) -> str:
    """The text below the tables: bandwidth, model, machine, settings and versions."""
    settings = result["settings"]
    run = result["provenance"]
    versions = run["versions"]
    drafter = ", ".join(f"{key}={value}" for key, value in result["drafter"].items())
    before, after = (result["bandwidth"][when] / 1e9 for when in ("before", "after"))
    return (
        f"Memory: {before:.1f} GB/s before, {after:.1f} GB/s after; limits take the higher. A "
        f"vanilla token reads {result['weights'] / 1e6:.1f} MB of weights. {result['model']}, "
        f"{result['dtype']}, {describe_machine(run)}; {settings['context_tokens']} tokens x "
        f"{settings['repeats']} repeats; {drafter}. git {run['git_revision']}, torch "
        f"{versions['torch']}, transformers {versions['transformers']}, {run['time']}."
    )
