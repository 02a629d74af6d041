"""How fast decoding is: vanilla, Kangaroo, other drafters and transformers in turn, in one run, and
what is said of it: JSON, tables in the terminal and in Markdown, and a plot.

Everything is greedy, past any EOS, and at batch 1 but for the table of batches. All methods take
turns on every prompt, so that a machine that slows down slows all of them. The first step of a
text, its prefill, is timed apart; what comes after it is decoding.
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tqdm import tqdm

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.clock import now
from kangaroo.engine.costs import verifications
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation import plots
from kangaroo.evaluation.bench import BenchConfig, long_prompt, question_prompts
from kangaroo.evaluation.methods import generate
from kangaroo.evaluation.metrics import estimate
from kangaroo.heads.draft_head import DraftHead
from kangaroo.heads.layer import Layer
from kangaroo.models.prompts import Tokenizer
from kangaroo.models.target import TargetModel
from kangaroo.utils import memory, tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import describe_machine, provenance
from kangaroo.utils.ranges import Count, Filled, Ranged, TextLength
from kangaroo.utils.tables import Row, number, share

log = logging.getLogger(__name__)

CORE = ("hf", "vanilla", "kangaroo")  # always measured, and at every context
WIDTHS = [*range(1, 9), 12, 16, 32, 64]  # tokens of a verification
WARM_UP, REPEATS = 2, 15
CACHES = 0.8  # of the memory that is free; the rest is for what a pass computes
# Columns of tables: heading, a result's key, decimals.
METHODS = {
    "tokens/s": ("tokens_per_second", 1),
    "ms/token": ("ms_per_token", 2),
    "limit, ms": ("limit_ms_per_token", 2),
    "first, ms": ("first_ms", 0),
    "vanilla's texts": ("equal_texts", 0),
    "CR": ("compression_rate", 2),
    "draft tokens": ("drafted_per_round", 2),
    "draft, ms": ("draft_ms", 2),
    "verify, ms": ("verify_ms", 2),
    "host, ms": ("host_ms", 2),
}
PASSES = {"ms": ("ms", 2), "of one": ("of_one", 2), "limit, ms": ("limit_ms", 2)}
BATCHES = {"vanilla": ("vanilla", 1), "kangaroo": ("kangaroo", 1), "speedup": ("ratio", 2)}

Method = Callable[[list[int], int], Generation]  # takes a prompt and a number of new tokens
Texts = list[list[Generation]]  # of each prompt, each time it was given


@dataclass
class SpeedConfig(Ranged):
    """What is measured.

    Args:
        prompts: this many questions, spread over the bench.
        max_new_tokens: written for each.
        repeats: how often every method writes every text.
        hf_lookup: whether transformers' own prompt lookup is measured too.
        contexts: prompt lengths, in tokens, at which the time a token is measured, those that the
            model has room for; verifications at the first.
        context_tokens: written at each.
        batches: how many rows are decoded at a time.
        bandwidth_megabytes: what is read to measure the memory; far more than its caches.
    """

    bench: BenchConfig = field(default_factory=BenchConfig)
    prompts: Count = 12
    max_new_tokens: TextLength = 128
    repeats: Count = 2
    hf_lookup: bool = True
    contexts: Filled[Count] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096])
    context_tokens: TextLength = 24
    batches: Filled[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    bandwidth_megabytes: Count = 1024


def measure(
    lm: TargetModel,
    tokenizer: Tokenizer,
    drafter: Drafter | Kangaroo,
    config: SpeedConfig,
    more: Mapping[str, Drafter] | None = None,
) -> dict[str, Any]:
    """Run the benchmark; `report.write` saves and shows what it returns.

    Args:
        drafter: its rounds are held against the limit, and its batches against vanilla's.
        more: further drafters that answer the same questions, by name.

    Errors: `ConfigError` for no Kangaroo, and for nothing to measure.
    """
    more = more or {}
    if not isinstance(drafter, Kangaroo) or set(CORE) & set(more):
        raise ConfigError(
            "the speed benchmark looks at Kangaroo's steps; pass drafter=kangaroo, and other "
            f"drafters beside it by other names than {', '.join(CORE)}: +drafter@more.mine=mine."
        )
    contexts = [n for n in config.contexts if n + config.context_tokens <= lm.context]
    if not contexts:
        raise ConfigError(f"no context of speed.contexts={config.contexts} fits the model.")
    tokens = config.max_new_tokens
    prompts = question_prompts(tokenizer, config.prompts, config.bench, lm.context - tokens)
    long_prompts = [long_prompt(tokenizer, length) for length in contexts]
    drafters: dict[str, Drafter] = {"vanilla": Vanilla(), "kangaroo": drafter, **more}
    methods: dict[str, Method] = {"hf": partial(generate, lm)}
    if config.hf_lookup:
        methods["hf_lookup"] = partial(generate, lm, prompt_lookup_num_tokens=10)
    methods |= {k: partial(write_by_engine, Engine(lm, each)) for k, each in drafters.items()}

    before = memory_bandwidth(lm.device, config.bandwidth_megabytes)
    take_turns(methods, prompts[:1], tokens, 1, "warm-up")
    answers = take_turns(methods, prompts, tokens, config.repeats, "answers")
    core = {name: methods[name] for name in CORE}
    grown = take_turns(core, long_prompts, config.context_tokens, config.repeats, "contexts")
    passes = verifications(lm, WIDTHS, range(drafter.exit_layer, lm.n_layers), contexts[0])
    of_width = {width: median(seconds) for width, seconds in passes.items()}
    batches = throughput(lm, drafter, prompts, tokens, config.batches)
    after = memory_bandwidth(lm.device, config.bandwidth_megabytes)

    rate = max(before, after)  # which limits are by
    plain, cut = Reads(lm), Reads(lm, drafter.adapter, drafter.head)
    reads = {"hf": plain, "vanilla": plain, "kangaroo": cut}  # others' drafts: not known
    return _about(lm, drafter, config) | {
        "bandwidth": {"before": before, "after": after},
        "weights": plain.round(length=0, drafted=0),
        "methods": {
            name: summarise(prompts, texts, reads.get(name), rate)
            | against_vanilla(answers["vanilla"], texts)
            for name, texts in answers.items()
        },
        "contexts": [
            {"context": length, "kv_bytes": plain.n_layers * plain.kv * length}
            | {name: summarise([prompt], [grown[name][i]], reads[name], rate) for name in CORE}
            for i, (length, prompt) in enumerate(zip(contexts, long_prompts, strict=True))
        ],
        "verifications": [
            {"tokens": width, "ms": 1e3 * seconds, "of_one": seconds / of_width[1]}
            | {"limit_ms": 1e3 * cut.verify(contexts[0], width - 1) / rate}
            for width, seconds in of_width.items()
        ],
        "batches": batches,
    }


def _about(lm: TargetModel, drafter: Kangaroo, config: SpeedConfig) -> dict[str, Any]:
    threshold = "auto" if drafter.auto else drafter.threshold
    return {
        "model": lm.config.name_or_path,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "drafter": f"exit layer {drafter.exit_layer}, at most {drafter.steps} draft tokens, "
        f"threshold {threshold}, draft vocabulary {drafter.head.size or 'whole'}",
        "settings": asdict(config),
        "provenance": provenance(),
    }


class Reads:
    """Bytes that rounds of decoding read, everything once a forward: vanilla, or with an adapter
    and the head that it drafts with. Of the embedding table that is one row a token, unless the
    head is tied to it."""

    def __init__(
        self, lm: TargetModel, adapter: Layer | None = None, draft_head: DraftHead | None = None
    ):
        self.exit_layer = 0 if adapter is None else adapter.exit_layer
        self.n_layers, self.kv = lm.n_layers, lm.new_cache(1, 1, [lm.device]).bytes()
        self.shallow = memory.weight_bytes(*lm.layers[: self.exit_layer])
        self.deep = memory.weight_bytes(*lm.layers[self.exit_layer :])
        table, head = lm.hf.model.embed_tokens.weight, memory.weight_bytes(lm.head)
        self.head = memory.weight_bytes(lm.hf.model.norm) + head
        self.draft_head = sum(x.nbytes for x in draft_head.weights) if draft_head else head
        self.row = table.shape[1] * table.element_size()
        parts = [] if adapter is None else adapter.named_children()
        # a head of its own counts as the draft head, which it is
        self.adapter = memory.weight_bytes(*(module for name, module in parts if name != "head"))
        self.adapter_depth = 0 if adapter is None else adapter.depth

    def draft(self, length: int, drafted: int) -> int:
        """Of drafting after `length` tokens: the pending token passes the shallow layers too."""
        below, keys_below = self.row + self.shallow, self.exit_layer * self.kv
        beside, keys_beside = self.adapter + self.draft_head, self.adapter_depth * self.kv
        shallow = sum(below + keys_below * (length + i) for i in range(drafted + 1))
        return shallow + sum(beside + keys_beside * (length + i) for i in range(drafted))

    def verify(self, length: int, drafted: int) -> int:
        """Of the one forward through the layers above the exit that ends a round."""
        above = self.n_layers - self.exit_layer
        return self.deep + self.head + above * self.kv * (length + drafted)

    def round(self, length: int, drafted: int) -> int:
        """Of a draft of so many tokens and its verification."""
        return self.draft(length, drafted) + self.verify(length, drafted)


def memory_bandwidth(device: torch.device, megabytes: int) -> float:
    """Bytes a second in reading a buffer of so many 2**20 bytes in order, as weights are."""
    source, seconds = torch.ones(megabytes * 2**17, dtype=torch.int64, device=device), []
    for _ in range(WARM_UP + REPEATS):
        start = now(device)
        source.sum()
        seconds.append(now(device) - start)
    return source.nbytes / median(seconds[WARM_UP:])


def throughput(
    lm: TargetModel,
    drafter: Kangaroo,
    prompts: Sequence[list[int]],
    new_tokens: int,
    sizes: Sequence[int],
) -> list[dict[str, Any]]:
    """Tokens a second by vanilla and Kangaroo at every batch size whose cache fits."""
    results = []
    token = lm.n_layers * lm.new_cache(1, 1, [lm.device]).bytes()
    row = token * (max(map(len, prompts)) + new_tokens)
    for size in sizes:
        if size * row > CACHES * memory.free(lm.device):
            log.warning("batch %d is left out: its cache would take %d bytes", size, size * row)
            continue
        texts = [prompts[i % len(prompts)] for i in range(size)]
        vanilla, kangaroo = (
            tokens_per_second(Engine(lm, each), texts, new_tokens) for each in (Vanilla(), drafter)
        )
        rates = {"vanilla": vanilla, "kangaroo": kangaroo, "ratio": kangaroo / vanilla}
        results.append({"batch": size} | rates)
    return results


def tokens_per_second(engine: Engine, texts: Sequence[list[int]], new_tokens: int) -> float:
    """Of decoding texts together, past any EOS, until the first is complete."""
    device, longest = engine.lm.device, max(map(len, texts)) + new_tokens
    batch = engine.open(len(texts), longest, Sampling())
    for row, text in enumerate(texts):
        engine.admit(batch, row, Request(text, new_tokens, ignore_eos=True))
    written, start = 0, now(device)
    while not any(batch.done):
        written += sum(len(record.tokens) for record in engine.step(batch))
    return written / (now(device) - start)


def summarise(
    prompts: Sequence[list[int]], texts: Texts, reads: Reads | None, bandwidth: float
) -> dict[str, Any]:
    """The results of one method, by a bandwidth in bytes a second; None for what is not known."""
    rounds = []  # each with the number of tokens before it
    for prompt, of_prompt in zip(prompts, texts, strict=True):
        for text in of_prompt:
            lengths = accumulate((len(step.tokens) for step in text.steps), initial=len(prompt))
            rounds += list(zip(lengths, text.steps, strict=False))[1:]
    steps = [step for _, step in rounds]
    decoded, seconds = sum(len(step.tokens) for step in steps), sum(step.seconds for step in steps)
    drafted, names = sum(step.drafted for step in steps), ("draft", "verify", "host")
    parts = {x: sum(getattr(step, f"{x}_seconds") for step in steps) for x in names}
    draft, are_told = parts["draft"], parts["verify"] > 0  # transformers does not tell them
    limit = reads and sum(reads.round(n, step.drafted) for n, step in rounds) / bandwidth
    draft_limit = reads and sum(reads.draft(n, step.drafted) for n, step in rounds) / bandwidth
    return {
        "tokens_per_second": decoded / seconds,
        "ms_per_token": 1e3 * seconds / decoded,
        "limit_ms_per_token": limit and 1e3 * limit / decoded,
        "share_of_limit": limit and limit / seconds,
        "first_ms": 1e3 * median(text.prefill_seconds for each in texts for text in each),
        "compression_rate": decoded / len(steps),
        "drafted_per_round": drafted / len(steps),
        **{f"{x}_ms": 1e3 * t / len(steps) if are_told else None for x, t in parts.items()},
        "draft_over_limit": draft / draft_limit if draft and drafted and draft_limit else None,
    }


def write_by_engine(engine: Engine, prompt: list[int], new_tokens: int) -> Generation:
    """Greedy decoding on our engine."""
    request = Request(prompt, new_tokens, ignore_eos=True)
    ((_, generation),) = engine.completions([request], Sampling(), batch_size=1)
    return generation


def seconds_a_token(text: Generation) -> float:
    """Of decoding."""
    steps = text.steps[1:]
    return sum(step.seconds for step in steps) / sum(len(step.tokens) for step in steps)


def take_turns(
    methods: Mapping[str, Method],
    prompts: Sequence[list[int]],
    new_tokens: int,
    repeats: int,
    title: str,
) -> dict[str, Texts]:
    """What each method writes for each prompt, all in turn; who goes first changes each time."""
    names = list(methods)
    texts: dict[str, Texts] = {name: [[] for _ in prompts] for name in names}
    turns = [(repeat + i, i) for repeat in range(repeats) for i in range(len(prompts))]
    for turn, index in tqdm(turns, title, unit="turn"):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            texts[name][index].append(methods[name](prompts[index], new_tokens))
    return texts


def against_vanilla(vanilla: Texts, method: Texts) -> dict[str, Any]:
    """How many times as fast as vanilla it decodes, by each prompt's mean time a token."""
    pairs = list(zip(vanilla, method, strict=True))
    seconds_P2 = [[np.mean(list(map(seconds_a_token, x))) for x in pair] for pair in pairs]
    speedup, ends = estimate(np.array(seconds_P2))
    equal = sum(a[0].tokens == b[0].tokens for a, b in pairs)
    return {"speedup": speedup, "speedup_ci95": ends, "equal_texts": equal}


def write(result: dict[str, Any], output: Path, console: Console) -> None:
    """Save what `speed.measure` returned, `speed.json`, `speed.md` and `speed.png`, and show it."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
    sections = {title: tables.markdown(rows) for title, rows in sheets(result).items()}
    text = "".join(f"**{title}**\n\n{table}\n\n" for title, table in sections.items())
    (output / "speed.md").write_text(f"{text}{notes(result)}\n", encoding="utf-8")
    title = f"{result['model']}, {result['dtype']}, {describe_machine(result['provenance'])}"
    figure = plots.speedup_bars(list(result["methods"].items()), title, accent="kangaroo")
    figure.savefig(output / "speed.png", dpi=150)
    for heading, rows in sheets(result).items():
        console.print(tables.terminal(rows, heading))
    console.print(notes(result), f"Saved in {output}.", sep="\n", markup=False, highlight=False)


def sheets(result: dict[str, Any]) -> dict[str, list[Row]]:
    """All tables, by title."""
    contexts = result["contexts"]
    return {
        "Decoding speed, and parts of a round": [
            {
                "method": name,
                "times vanilla": tables.estimate(m["speedup"], m["speedup_ci95"], same=1.0),
            }
            | _cells(m, METHODS)
            for name, m in result["methods"].items()
        ],
        "ms/token over the context": [
            {"context": str(c["context"]), "KV, MB": number(c["kv_bytes"] / 1e6, 1)}
            | {name: number(c[name]["ms_per_token"]) for name in CORE}
            | {"vanilla of limit": share(c["vanilla"]["share_of_limit"])}
            | {"draft over its limit": number(c["kangaroo"]["draft_over_limit"])}
            | {"first token, ms": number(c["vanilla"]["first_ms"], 0)}
            for c in contexts
        ],
        f"Verification at context {contexts[0]['context']}": [
            {"tokens": str(v["tokens"])} | _cells(v, PASSES) for v in result["verifications"]
        ],
        "Tokens/s over the batch": [
            {"batch": str(b["batch"])} | _cells(b, BATCHES) for b in result["batches"]
        ],
    }


def _cells(values: dict[str, Any], columns: dict[str, tuple[str, int]]) -> Row:
    return {heading: number(values[key], digits) for heading, (key, digits) in columns.items()}


def notes(result: dict[str, Any]) -> str:
    """What the tables need to be read."""
    settings, about = result["settings"], result["provenance"]
    before, after = (result["bandwidth"][when] / 1e9 for when in ("before", "after"))
    return (
        f"Memory: {before:.1f} GB/s before, {after:.1f} GB/s after; limits take the higher. A "
        f"vanilla token reads {result['weights'] / 1e6:.1f} MB of weights. {result['model']}, "
        f"{result['dtype']}, {describe_machine(about)}; {settings['prompts']} prompts x "
        f"{settings['max_new_tokens']} tokens x {settings['repeats']} repeats; "
        f"{result['drafter']}. git {about['git_revision']}, torch {about['versions']['torch']}, "
        f"transformers {about['versions']['transformers']}, {about['time']}."
    )
