"""How fast decoding is: vanilla, Kangaroo, other drafters and rivals side by side, in one run.

Everything is greedy, and at batch 1 but for the table of batches. All methods take turns on every
prompt, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from kangaroo.drafters.base import Drafter
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.evaluation import speedup as speedups
from kangaroo.evaluation.bench import BenchConfig
from kangaroo.evaluation.speed.bandwidth import Reads, memory_bandwidth
from kangaroo.evaluation.speed.llama import llama_rivals
from kangaroo.evaluation.speed.rivals import rivals
from kangaroo.evaluation.speed.speed_batches import throughput
from kangaroo.evaluation.speed.speed_phases import phases
from kangaroo.evaluation.speed.speed_trials import (
    Method,
    Trial,
    long_prompt,
    question_prompts,
    take_turns,
    timed_engine,
    timed_generate,
)
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import provenance
from kangaroo.utils.ranges import Count, Filled, Ranged

log = logging.getLogger(__name__)


@dataclass
class SpeedConfig(Ranged):
    """What is measured.

    Args:
        bench: where the questions come from.
        prompts: this many of them, spread over the tasks.
        max_new_tokens: written for each.
        repeats: how often every method writes every text.
        rivals: also measure transformers' own ways to speculate (`rivals.py`), and llama.cpp where
            the extra `benchmark` is installed (`llama.py`).
        leave_out: names of rivals that are not measured, since they take too long, say.
        contexts: prompt lengths at which the time a token is measured, in tokens.
        context_tokens: written at each.
        batches: how many rows are decoded at a time, to see where speculation stops paying; each
            row writes twice.
        phase_context: prompt length at which single phases of a step are timed.
        static: also measure transformers' `generate` with its static cache at `phase_context`. On a
            GPU torch compiles for it, which takes a minute or more.
        memory: also measure the peak memory, in a process that loads the model once more.
        bandwidth_megabytes: the buffer that is read to measure the memory; far more than the
            last-level cache.
    """

    bench: BenchConfig = field(default_factory=BenchConfig)
    prompts: Count = 12
    max_new_tokens: Count = 128
    repeats: Count = 2
    rivals: bool = True
    leave_out: list[str] = field(default_factory=list)
    contexts: Filled[Count] = field(default_factory=lambda: [256, 512, 1024, 2048, 4096])
    context_tokens: Count = 24
    batches: Filled[Count] = field(default_factory=lambda: [1, 2, 4, 8, 16, 32])
    phase_context: Count = 256
    static: bool = False
    memory: bool = True
    bandwidth_megabytes: Count = 1024


def typical(trials: Sequence[Trial], method: str) -> list[Trial]:
    """For each prompt the trial of median speed; all its numbers then belong together."""
    mine = [trial for trial in trials if trial.method == method]
    grouped = [[t for t in mine if t.prompt == p] for p in sorted({t.prompt for t in mine})]
    return [sorted(g, key=lambda t: t.seconds_per_token)[len(g) // 2] for g in grouped]


def summarise(trials: Sequence[Trial], reads: Reads, bandwidth: float) -> dict[str, Any]:
    """The results of one method, over trials of several prompts.

    Args:
        bandwidth: in bytes a second.
    """
    decoded, drafted = sum(t.decoded for t in trials), sum(t.drafted for t in trials)
    rounds = sum(len(t.rounds) for t in trials)
    seconds = sum(t.decode_seconds for t in trials)
    draft, verify = sum(t.draft_seconds for t in trials), sum(t.verify_seconds for t in trials)
    sizes = [(n, k) for t in trials for n, (_, k) in zip(t.lengths(), t.rounds, strict=True)]
    draft_bytes = sum(reads.draft(n, k) for n, k in sizes)
    limit = (draft_bytes + sum(reads.verify(n, k) for n, k in sizes)) / bandwidth
    timed = draft + verify > 0
    return {
        "tokens_per_second": decoded / seconds,
        "ms_per_token": 1e3 * seconds / decoded,
        "limit_ms_per_token": 1e3 * limit / decoded,
        "limit_tokens_per_second": decoded / limit,
        "share_of_limit": limit / seconds,
        "first_ms": 1e3 * statistics.median(t.first_seconds for t in trials),
        "whole_tokens_per_second": sum(len(t.tokens) for t in trials)
        / sum(t.first_seconds + t.decode_seconds for t in trials),
        "compression_rate": decoded / rounds,
        "drafted_per_round": drafted / rounds,
        "ms_per_round": 1e3 * seconds / rounds,
        "draft_ms_per_round": 1e3 * draft / rounds if timed else None,
        "verify_ms_per_round": 1e3 * verify / rounds if timed else None,
        "host_ms_per_round": 1e3 * (seconds - draft - verify) / rounds if timed else None,
        "ms_per_draft_token": 1e3 * draft / drafted if drafted else None,
        "limit_ms_per_draft_token": 1e3 * draft_bytes / bandwidth / drafted if drafted else None,
    }


def speedup(trials: Sequence[Trial], faster: str, slower: str) -> dict[str, Any]:
    """How many times as fast in decoding: the ratio of totals over prompts, with its interval.

    `seconds_of_prompt` has the two times a token of each prompt, the slower method's first: means
    over trials that were done in turn. `range` is that of their ratios.
    """

    def seconds(method: str, prompt: int) -> float:
        mine = [t for t in trials if (t.method, t.prompt) == (method, prompt)]
        return statistics.mean(t.seconds_per_token for t in mine)

    prompts = sorted({t.prompt for t in trials})
    pairs_P2 = np.array([(seconds(slower, p), seconds(faster, p)) for p in prompts])
    ratios_P = pairs_P2[:, 0] / pairs_P2[:, 1]
    return {
        "speedup": speedups.speedup(pairs_P2),
        "speedup_ci95": speedups.interval(pairs_P2),
        "range": [float(ratios_P.min()), float(ratios_P.max())],
        "seconds_of_prompt": pairs_P2.tolist(),
    }


def past_eos(trials: Sequence[Trial], eos_ids: Container[int]) -> float:
    """The share of vanilla's tokens that come after the first EOS of their text."""
    texts = [trial.tokens for trial in trials if trial.method == "vanilla"]
    past = 0
    for text in texts:
        first = next((i for i, token in enumerate(text) if token in eos_ids), len(text) - 1)
        past += len(text) - 1 - first
    return past / sum(map(len, texts))


def fitting_contexts(lm: LM, drafters: Sequence[Drafter], config: SpeedConfig) -> list[int]:
    """Those of `config.contexts` that the model has room for.

    Errors: `ConfigError` for settings that leave nothing to measure.
    """
    widest = max(drafter.max_nodes for drafter in drafters)
    least = widest + 2
    if min(config.max_new_tokens, config.context_tokens) < least:
        raise ConfigError(
            f"speed.max_new_tokens and speed.context_tokens must be {least} or more: the first "
            f"token is timed with the prompt, and a round can write {widest + 1}."
        )
    fitting = [n for n in config.contexts if n + config.context_tokens <= lm.context]
    for length in sorted(set(config.contexts) - set(fitting)):
        log.warning("context %d is left out: the model's context is %d", length, lm.context)
    if config.phase_context + 8 * (widest + 1) > lm.context:
        raise ConfigError(
            f"speed.phase_context={config.phase_context} leaves no room for a few rounds in the "
            f"model's context of {lm.context}."
        )
    if not fitting:
        raise ConfigError(f"no context of speed.contexts={config.contexts} fits the model.")
    return fitting


def measure(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    drafter: Drafter | Kangaroo,
    config: SpeedConfig,
    more: Mapping[str, Drafter] | None = None,
) -> dict[str, Any]:
    """Run the benchmark; `speed_report.write` saves and shows what it returns.

    Fields named `ms` are in milliseconds, bandwidths in bytes a second, `reads` in bytes. The
    bandwidth is measured before and after; limits take the higher one.

    Args:
        drafter: its steps are looked at in detail.
        more: further drafters that answer the same questions, by name.

    Errors: `ConfigError` for another drafter than Kangaroo, and for settings that leave nothing to
    measure.
    """
    if not isinstance(drafter, Kangaroo):
        raise ConfigError(
            "the speed benchmark looks at Kangaroo's steps; pass drafter=kangaroo, and other "
            "drafters beside it: +drafter@more.mine=mine."
        )
    more = more or {}
    if taken := {"hf", "vanilla", "kangaroo"} & set(more):
        raise ConfigError(f"more.{min(taken)}: that name is taken; call it otherwise.")
    ours: dict[str, Drafter] = {"vanilla": Vanilla(), "kangaroo": drafter, **more}
    contexts = fitting_contexts(lm, list(ours.values()), config)
    longest = lm.context - config.max_new_tokens
    prompts, tasks = question_prompts(tokenizer, config.prompts, config.bench, longest)
    before = memory_bandwidth(lm.device, config.bandwidth_megabytes)
    methods = {"hf": timed_generate(lm)}
    methods |= {name: timed_engine(Engine(lm, one)) for name, one in ours.items()}
    answers, skipped = _answers(lm, drafter, methods, prompts, config)
    core = {name: methods[name] for name in ("hf", "vanilla", "kangaroo")}
    long_prompts = [long_prompt(tokenizer, length) for length in contexts]
    grown = take_turns(core, long_prompts, config.context_tokens, config.repeats, "contexts")
    after = memory_bandwidth(lm.device, config.bandwidth_megabytes)
    bandwidth = max(before, after)
    step = phases(lm, drafter, long_prompt(tokenizer, config.phase_context), bandwidth)
    plain, cut = Reads.of(lm), Reads.of(lm, drafter.adapter, drafter.head.size)
    names = list(dict.fromkeys(trial.method for trial in answers))
    reads = {name: cut if name == "kangaroo" else plain for name in names}
    return {
        **_about(lm, drafter, config),
        "bandwidth": {"before": before, "after": after, "limit": bandwidth},
        "reads": {"vanilla": asdict(plain), "kangaroo": asdict(cut)},
        "methods": {m: summarise(typical(answers, m), reads[m], bandwidth) for m in names},
        "ours": list(ours),
        "skipped": skipped,
        "tasks": tasks,
        "speedups": speedups_of(answers, names, list(ours)),
        "equal_texts": equal_texts(answers, lm.eos_ids()),
        "phases": step,
        "batches": throughput(lm, drafter, prompts, config.max_new_tokens, config.batches),
        "contexts": [
            {"context": length, "kv_bytes": plain.n_layers * plain.kv * length}
            | {m: summarise([typical(grown, m)[i]], reads[m], bandwidth) for m in core}
            for i, length in enumerate(contexts)
        ],
        "share_past_eos": past_eos(answers, lm.eos_ids()),
        "trials": [_plain(trial) for trial in (*answers, *grown)],
        "provenance": provenance(),
    }


def _answers(
    lm: LM,
    drafter: Kangaroo,
    methods: dict[str, Method],
    prompts: Sequence[list[int]],
    config: SpeedConfig,
) -> tuple[list[Trial], dict[str, str]]:
    """All texts of all methods and their rivals, and which rivals are not there, with the reason.
    llama.cpp's processes end with it.
    """
    skipped: dict[str, str] = {}
    with ExitStack() as processes:
        if config.rivals:
            context = max(map(len, prompts)) + config.max_new_tokens
            by_llama, skipped = llama_rivals(lm, context, processes)
            others = rivals(lm, drafter) | by_llama
            if unknown := set(config.leave_out) - set(others) - set(skipped):
                raise ConfigError(
                    f"speed.leave_out: there is no rival '{min(unknown)}'; there are "
                    f"{', '.join(others)}."
                )
            kept = {name: others[name] for name in others if name not in config.leave_out}
            methods = methods | kept
        for name, why in skipped.items():
            log.warning("%s is skipped: %s", name, why)
        take_turns(methods, prompts[:1], config.max_new_tokens, 1, "warm-up")
        return take_turns(
            methods, prompts, config.max_new_tokens, config.repeats, "answers"
        ), skipped


def _about(lm: LM, drafter: Kangaroo, config: SpeedConfig) -> dict[str, Any]:
    return {
        "model": lm.config.name_or_path,
        "dtype": str(lm.dtype).removeprefix("torch."),
        "device": lm.device.type,
        "compiled": lm.acceleration.library is not None,
        "drafter": {
            "exit_layer": drafter.exit_layer,
            "steps": drafter.steps,
            "threshold": drafter.threshold,
            "vocabulary": drafter.head.size,
        },
        "settings": asdict(config),
    }


def speedups_of(
    answers: Sequence[Trial], methods: Sequence[str], ours: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Of each of ours over all that is not ours, and over those of ours that are named before it:
    by "faster/slower".
    """
    others = [name for name in methods if name not in ours]
    pairs = [(a, b) for i, a in enumerate(ours) for b in (*others, *ours[:i])]
    return {f"{a}/{b}": speedup(answers, a, b) for a, b in pairs}


def equal_texts(answers: Sequence[Trial], eos_ids: Container[int]) -> dict[str, int]:
    """By method: on how many prompts it wrote what vanilla did, up to vanilla's first EOS. What
    follows is nobody's answer, and llama.cpp never writes an EOS that it is told to ignore.
    """
    texts = {(trial.method, trial.prompt): trial.tokens for trial in answers}
    counts = dict.fromkeys((method for method, _ in texts), 0)
    for (method, prompt), text in texts.items():
        vanilla = texts["vanilla", prompt]
        end = next((i for i, token in enumerate(vanilla) if token in eos_ids), len(vanilla))
        counts[method] += text[:end] == vanilla[:end]
    return counts


def _plain(trial: Trial) -> dict[str, Any]:
    return {k: v for k, v in asdict(trial).items() if k != "tokens"}
