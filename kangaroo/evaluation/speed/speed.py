"""How fast decoding is: vanilla, Kangaroo, other drafters and transformers in turn, in one run.

Everything is greedy, and at batch 1 but for the table of batches. All methods take turns on every
prompt, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import median
from typing import Any

from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.methods import generate
from kangaroo.evaluation.metrics import compression_rate
from kangaroo.evaluation.speed import trials
from kangaroo.evaluation.speed.passes import Reads, memory_bandwidth, throughput, verifications
from kangaroo.evaluation.speed.trials import Method, Texts, take_turns, write_by_engine
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, Filled, Ranged, TextLength

CORE = ("hf", "vanilla", "kangaroo")  # always measured, and at every context


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
    if not isinstance(drafter, Kangaroo) or set(CORE) & set(more or {}):
        raise ConfigError(
            "the speed benchmark looks at Kangaroo's steps; pass drafter=kangaroo, and other "
            f"drafters beside it by other names than {', '.join(CORE)}: +drafter@more.mine=mine."
        )
    drafters: dict[str, Drafter] = {"vanilla": Vanilla(), "kangaroo": drafter, **(more or {})}
    contexts = [n for n in config.contexts if n + config.context_tokens <= lm.context]
    if not contexts:
        raise ConfigError(f"no context of speed.contexts={config.contexts} fits the model.")
    tokens = config.max_new_tokens
    prompts = trials.question_prompts(tokenizer, config.prompts, config.bench, lm.context - tokens)
    methods: dict[str, Method] = {"hf": partial(generate, lm)}
    if config.hf_lookup:
        methods["hf_lookup"] = partial(generate, lm, prompt_lookup_num_tokens=10)
    for name, each in drafters.items():
        methods[name] = partial(write_by_engine, Engine(lm, each))

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
    plain, cut = Reads(lm), Reads(lm, drafter.adapter, drafter.head)
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
            name: summarise(prompts, texts, reads.get(name), rate)
            | trials.against_vanilla(answers["vanilla"], texts)
            for name, texts in answers.items()
        },
        "contexts": [
            {"context": length, "kv_bytes": plain.n_layers * plain.kv * length}
            | {
                name: summarise([long_prompts[i]], [grown[name][i]], read, rate)
                for name, read in reads.items()
            }
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


def summarise(
    prompts: Sequence[list[int]], texts: Texts, reads: Reads | None, bandwidth: float
) -> dict[str, Any]:
    """The results of one method, with the limit by what its rounds read and by the bandwidth, in
    bytes a second; None for what is not known.
    """
    sizes, steps = [], []
    for prompt, of_prompt in zip(prompts, texts, strict=True):
        for text in of_prompt:
            length = len(prompt) + len(text.steps[0].tokens)
            for step in text.steps[1:]:
                sizes.append((length, step.drafted))
                steps.append(step)
                length += len(step.tokens)
    decoded, rounds = sum(len(step.tokens) for step in steps), len(steps)
    drafted, seconds = sum(step.drafted for step in steps), sum(step.seconds for step in steps)
    parts: dict[str, float | None] = {
        part: sum(getattr(step, f"{part}_seconds") for step in steps)
        for part in ("draft", "verify", "host")
    }
    draft = parts["draft"]
    limit = reads and sum(reads.round(*size) for size in sizes) / bandwidth
    draft_limit = reads and sum(reads.draft(*size) for size in sizes) / bandwidth
    if not parts["verify"]:  # transformers does not tell its parts
        parts = dict.fromkeys(parts)
    return {
        "tokens_per_second": decoded / seconds,
        "ms_per_token": 1e3 * seconds / decoded,
        "limit_ms_per_token": limit and 1e3 * limit / decoded,
        "share_of_limit": limit and limit / seconds,
        "first_ms": 1e3 * median(text.prefill_seconds for each in texts for text in each),
        "compression_rate": compression_rate(decoded, rounds),
        "drafted_per_round": drafted / rounds,
        **{f"{part}_ms": took and 1e3 * took / rounds for part, took in parts.items()},
        "draft_over_limit": draft / draft_limit if draft and drafted and draft_limit else None,
    }
