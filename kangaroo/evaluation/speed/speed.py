"""How fast decoding is: vanilla, Kangaroo, other drafters and transformers in turn, in one run.

Everything is greedy, and at batch 1 but for the table of batches. All methods take turns on every
prompt, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from statistics import median
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import statistics
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.metrics import compression_rate
from kangaroo.evaluation.speed import trials
from kangaroo.evaluation.speed.bandwidth import Reads, memory_bandwidth
from kangaroo.evaluation.speed.batches import throughput, verifications
from kangaroo.evaluation.speed.trials import Trial, take_turns, timed_engine, timed_generate
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, Filled, Ranged

log = logging.getLogger(__name__)

CORE = ("hf", "vanilla", "kangaroo")  # always measured, and at every context


@dataclass
class SpeedConfig(Ranged):
    """What is measured.

    Args:
        prompts: this many questions, spread over the bench.
        max_new_tokens: written for each.
        repeats: how often every method writes every text.
        hf_lookup: whether transformers' own prompt lookup is measured too.
        contexts: prompt lengths at which the time a token is measured, in tokens; verifications at
            the first.
        context_tokens: written at each.
        batches: how many rows are decoded at a time; each row writes twice.
        bandwidth_megabytes: what is read to measure the memory; far more than its caches.
    """

    bench: BenchConfig = field(default_factory=BenchConfig)
    prompts: Count = 12
    max_new_tokens: Count = 128
    repeats: Count = 2
    hf_lookup: bool = True
    contexts: Filled[Count] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096])
    context_tokens: Count = 24
    batches: Filled[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    bandwidth_megabytes: Count = 1024


def measure(
    lm: TargetModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter | Kangaroo,
    config: SpeedConfig,
    more: Mapping[str, Drafter] | None = None,
) -> dict[str, Any]:
    """Run the benchmark; `report.write` saves and shows what it returns.

    Args:
        drafter: its rounds are held against the limit, and its batches against vanilla's.
        more: further drafters that answer the same questions, by name.

    Errors: `ConfigError` for another drafter than Kangaroo, and for settings that leave nothing to
    measure.
    """
    if not isinstance(drafter, Kangaroo):
        raise ConfigError(
            "the speed benchmark looks at Kangaroo's steps; pass drafter=kangaroo, and other "
            "drafters beside it: +drafter@more.mine=mine."
        )
    if taken := set(CORE) & set(more or {}):
        raise ConfigError(f"more.{min(taken)}: that name is taken; call it otherwise.")
    drafters: dict[str, Drafter] = {"vanilla": Vanilla(), "kangaroo": drafter, **(more or {})}
    contexts = fitting_contexts(lm, list(drafters.values()), config)
    tokens = config.max_new_tokens
    prompts = trials.question_prompts(tokenizer, config.prompts, config.bench, lm.context - tokens)
    methods = {"hf": timed_generate(lm)}
    if config.hf_lookup:
        methods["hf_lookup"] = timed_generate(lm, prompt_lookup_num_tokens=10)
    methods |= {name: timed_engine(Engine(lm, each)) for name, each in drafters.items()}

    before = memory_bandwidth(lm.device, config.bandwidth_megabytes)
    take_turns(methods, prompts[:1], tokens, 1, "warm-up")
    answers = take_turns(methods, prompts, tokens, config.repeats, "answers")
    core = {name: methods[name] for name in CORE}
    long_prompts = [trials.long_prompt(tokenizer, length) for length in contexts]
    grown = take_turns(core, long_prompts, config.context_tokens, config.repeats, "contexts")
    of_width = verifications(lm, drafter.exit_layer, contexts[0])
    batches = throughput(lm, drafter, prompts, tokens, config.batches)
    after = memory_bandwidth(lm.device, config.bandwidth_megabytes)

    rate = max(before, after)  # which limits are by
    plain, cut = Reads(lm), Reads(lm, drafter.adapter, drafter.head.size)
    # what other methods' drafts read is not known
    reads = {"hf": plain, "vanilla": plain, "kangaroo": cut}
    return {
        "model": lm.config.name_or_path,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "drafter": (
            f"exit layer {drafter.exit_layer}, at most {drafter.steps} draft tokens, threshold "
            f"{'auto' if drafter.auto else drafter.threshold}, "
            f"draft vocabulary {drafter.head.size or 'whole'}"
        ),
        "settings": asdict(config),
        "bandwidth": {"before": before, "after": after},
        "weights": plain.round(length=0, drafted=0),
        "methods": {
            name: summarise([*chain(*texts)], reads.get(name), rate)
            | against_vanilla(answers["vanilla"], texts)
            for name, texts in answers.items()
        },
        "contexts": [
            {"context": length, "kv_bytes": plain.n_layers * plain.kv * length}
            | {name: summarise(grown[name][i], read, rate) for name, read in reads.items()}
            for i, length in enumerate(contexts)
        ],
        "verifications": [
            {"tokens": width, "ms": 1e3 * seconds, "of_one": seconds / of_width[1]}
            | {"limit_ms": 1e3 * cut.verify(contexts[0], width - 1) / rate}
            for width, seconds in of_width.items()
        ],
        "batches": batches,
        "provenance": provenance(),
    }


def fitting_contexts(
    lm: TargetModel, drafters: Sequence[Drafter], config: SpeedConfig
) -> list[int]:
    """Those of `config.contexts` that the model has room for.

    Errors: `ConfigError` for settings that leave nothing to measure.
    """
    widest = max(drafter.max_nodes for drafter in drafters)
    if min(config.max_new_tokens, config.context_tokens) < widest + 2:
        raise ConfigError(
            f"speed.max_new_tokens and speed.context_tokens must be {widest + 2} or more: the "
            f"first token is timed with the prompt, and a round can write {widest + 1}."
        )
    fitting = [n for n in config.contexts if n + config.context_tokens <= lm.context]
    for length in sorted(set(config.contexts) - set(fitting)):
        log.warning("context %d is left out: the model's context is %d", length, lm.context)
    if not fitting:
        raise ConfigError(f"no context of speed.contexts={config.contexts} fits the model.")
    return fitting


def summarise(texts: Sequence[Trial], reads: Reads | None, bandwidth: float) -> dict[str, Any]:
    """The results of one method, over its texts, with the limit by what its rounds read and by the
    bandwidth, in bytes a second; None for what is not known.
    """
    decoded, drafted = sum(t.decoded for t in texts), sum(t.drafted for t in texts)
    seconds, rounds = sum(t.decode_seconds for t in texts), sum(len(t.rounds) for t in texts)
    draft, verify = sum(t.draft_seconds for t in texts), sum(t.verify_seconds for t in texts)
    parts = {"draft": draft, "verify": verify, "host": seconds - draft - verify}
    sizes = [(n, k) for t in texts for n, (_, k) in zip(t.lengths(), t.rounds, strict=True)]
    limit = reads and sum(reads.round(*size) for size in sizes) / bandwidth
    draft_limit = reads and sum(reads.draft(*size) for size in sizes) / bandwidth
    return {
        "tokens_per_second": decoded / seconds,
        "ms_per_token": 1e3 * seconds / decoded,
        "limit_ms_per_token": limit and 1e3 * limit / decoded,
        "share_of_limit": limit and limit / seconds,
        "first_ms": 1e3 * median(t.first_seconds for t in texts),
        "compression_rate": compression_rate(decoded, rounds),
        "drafted_per_round": drafted / rounds,
        **{f"{part}_ms": 1e3 * took / rounds if verify else None for part, took in parts.items()},
        "draft_over_limit": draft / draft_limit if draft_limit and drafted else None,
    }


def against_vanilla(
    vanilla: Sequence[Sequence[Trial]], method: Sequence[Sequence[Trial]]
) -> dict[str, Any]:
    """How many times as fast as vanilla it decodes, by the trials of each prompt: the ratio of
    totals of their mean times a token, with its interval; and how often it wrote vanilla's text.
    """
    pairs = list(zip(vanilla, method, strict=True))
    seconds_P2 = np.array(
        [
            [np.mean([t.decode_seconds / t.decoded for t in trials]) for trials in pair]
            for pair in pairs
        ]
    )
    return {
        "speedup": statistics.speedup(seconds_P2),
        "speedup_ci95": statistics.interval(seconds_P2),
        "equal_texts": sum(a[0].tokens == b[0].tokens for a, b in pairs),
    }
