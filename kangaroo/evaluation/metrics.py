"""Figures of an evaluation: pure functions of its records.

A *round* is one verification, which is one forward of the target. The bonus token (the target's
own, after the accepted draft tokens) counts as emitted, never as accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kangaroo.evaluation.records import METHOD, Record, Run

RESAMPLES = 2000


def metrics(records: Sequence[Record]) -> dict[str, Any]:
    """All figures over some questions; None where one does not apply (no such baseline, no draft).

    speedup: seconds of vanilla / seconds of the method, see `paired_seconds`.
    speedup_ci95: its 95% interval, see `interval`.
    hf_speedup, hf_speedup_ci95: the same against transformers' `generate`.
    spec_bench_speedup: by the formula of Spec-Bench's report, see `spec_bench_speedup`.
    compression_rate: emitted tokens / rounds, so 1 for vanilla.
    ctar: at index w - 1 the share of all rounds in which the first w draft tokens were accepted, up
        to the most that ever were. compression_rate = 1 + sum(ctar), but for rounds that an EOS or
        the limit cut, which have no bonus token.
    acceptance_rate: accepted / drafted tokens; all nodes of a tree are drafted.
    tokens_per_second and those of the baselines: all tokens (EOS included) / all seconds (prefill
        included), each method over its own texts.
    prefill_seconds: of the method; all its time outside rounds. draft_, verify_ and host_seconds:
        of its rounds. The four add up to its time.
    """
    method = runs(records, METHOD)
    drafted = sum(sum(run.drafted) for run in method)
    return {
        "questions": len(records),
        "tokens": sum(len(run.tokens) for run in method),
        **speedup(records, "vanilla", "speedup"),
        **speedup(records, "hf", "hf_speedup"),
        "spec_bench_speedup": spec_bench_speedup(records),
        "compression_rate": ratio(
            sum(sum(run.emitted) for run in method), sum(len(run.emitted) for run in method)
        ),
        "ctar": ctar(method),
        "acceptance_rate": ratio(sum(sum(run.accepted) for run in method), drafted),
        "tokens_per_second": tokens_per_second(method),
        "vanilla_tokens_per_second": tokens_per_second(runs(records, "vanilla")),
        "hf_tokens_per_second": tokens_per_second(runs(records, "hf")),
        "prefill_seconds": sum(prefill_seconds(run) for run in method),
        "draft_seconds": sum(sum(run.draft_seconds) for run in method),
        "verify_seconds": sum(sum(run.verify_seconds) for run in method),
        "host_seconds": sum(sum(run.host_seconds) for run in method),
    }


def speedup(records: Sequence[Record], baseline: str, name: str) -> dict[str, Any]:
    """The ratio of total seconds and its interval; None where the baseline did not run."""
    paired = [record for record in records if has(record, baseline)]
    pairs_Q2 = np.array([paired_seconds(record, baseline) for record in paired])
    return {
        name: ratio(*pairs_Q2.sum(0)) if paired else None,
        f"{name}_ci95": interval(pairs_Q2) if paired else None,
    }


def runs(records: Iterable[Record], name: str) -> list[Run]:
    return [turn.runs[name] for record in records for turn in record.turns if name in turn.runs]


def has(record: Record, name: str) -> bool:
    return name in record.turns[0].runs


def ratio(over: float, under: float) -> float | None:
    """None where there is nothing to divide by."""
    return float(over / under) if under else None


def tokens_per_second(some: Sequence[Run]) -> float | None:
    return ratio(sum(len(run.tokens) for run in some), sum(run.seconds for run in some))


def round_seconds(run: Run) -> np.ndarray:
    return np.add(np.add(run.draft_seconds, run.verify_seconds), run.host_seconds)


def prefill_seconds(run: Run) -> float:
    """Time outside rounds: the cache's allocation, the prefill, the way into the engine and out."""
    return run.seconds - float(round_seconds(run).sum())


def seconds_until(run: Run, count: int) -> float:
    """Seconds until the first `count` tokens were there; a round they cut counts in proportion.

    hf tells no rounds: it is charged its mean time a token. Its prefill is spread over the whole
    text with that, so of a text that is cut it is charged too little, if anything.
    """
    if not run.emitted:
        return run.seconds * count / len(run.tokens)
    tokens = np.cumsum([0, *run.emitted])
    seconds = prefill_seconds(run) + np.cumsum([0.0, *round_seconds(run)])
    return float(np.interp(count, tokens, seconds))


def paired_seconds(record: Record, baseline: str = "vanilla") -> tuple[float, float]:
    """Seconds of a baseline and of the method for the same number of tokens.

    In each turn both get as many tokens as the shorter of the two texts has, so that a text which
    ended elsewhere (another EOS after a fork, hf's own noise under sampling) favours nobody.
    """
    theirs = method = 0.0
    for turn in record.turns:
        a, b = turn.runs[baseline], turn.runs[METHOD]
        count = min(len(a.tokens), len(b.tokens))
        theirs += seconds_until(a, count)
        method += seconds_until(b, count)
    return theirs, method


def interval(pairs_Q2: np.ndarray) -> list[float]:
    """95% interval of the ratio of total seconds: percentile bootstrap over questions."""
    rng = np.random.default_rng(0)
    picked_RQ = rng.integers(len(pairs_Q2), size=(RESAMPLES, len(pairs_Q2)))
    baseline_R, method_R = pairs_Q2[picked_RQ].sum(1).T
    return np.percentile(baseline_R / method_R, [2.5, 97.5]).tolist()


def spec_bench_speedup(records: Sequence[Record]) -> float | None:
    """Mean over questions of tokens/s, the method's over vanilla's.

    The method's tokens are those it wrote. Vanilla's are counted by tokenising its text again, less
    one for the BOS: so its EOS is not counted, and with a tokenizer that adds no BOS one more token
    is missing. Both favour the method on short answers.

    Source: Spec-Bench, evaluation/speed.py.
    """
    paired = [record for record in records if has(record, "vanilla")]
    if not paired:
        return None
    method, vanilla = [], []
    for record in paired:
        a, b = runs([record], METHOD), runs([record], "vanilla")
        method.append(sum(len(run.tokens) for run in a) / sum(run.seconds for run in a))
        vanilla.append(sum(run.retokenised - 1 for run in b) / sum(run.seconds for run in b))
    return ratio(float(np.mean(method)), float(np.mean(vanilla)))


def ctar(some: Sequence[Run]) -> list[float]:
    """Share of rounds whose first w draft tokens were all accepted, for w = 1, 2, ...

    A tree's are those of one path: how many nodes it had does not matter.
    """
    accepted = np.array([count for run in some for count in run.accepted])
    longest = int(accepted.max(initial=0))
    return [float((accepted >= w).mean()) for w in range(1, longest + 1)]
