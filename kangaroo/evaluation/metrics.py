"""The metrics of an evaluation: what each is, how it follows from the records, where it is shown.

`METRICS`, at the end, is the one place to add one: `summary.json`, W&B, the tables and their
explanations are made from it.

A *round* is one forward of the target: the prefill, which gives the first token, or a verification.
The bonus token (the target's own, after the accepted draft tokens) counts as emitted, never as
accepted, and so does the token of the prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial
from typing import Any

import numpy as np

from kangaroo.evaluation.records import METHOD, Record, Run
from kangaroo.evaluation.speedup import (
    against,
    has,
    interval,
    paired_seconds,
    prefill_seconds,
    speedup,
)
from kangaroo.utils.tables import Row, number, share, span

Results = dict[str, Any]  # all metrics of some questions, by name


class Place(Flag):
    """A table of metrics: by task or by method, as a page or in the terminal's 80 columns."""

    tasks = auto()
    tasks_terminal = auto()
    methods = auto()
    methods_terminal = auto()
    pages = tasks | methods
    by_task = tasks | tasks_terminal
    by_method = methods | methods_terminal
    everywhere = by_task | by_method


@dataclass(frozen=True)
class Metric:
    """A value over some questions.

    Args:
        name: in `summary.json` and W&B.
        of: computes it; None where it does not apply (no such baseline, no draft).
        heading: of its column; empty where it has none.
        places: the tables with that column.
        show: makes a cell of the value.
        meaning: for readers of a report; empty where another metric's says it.
    """

    name: str
    of: Callable[[Sequence[Record]], Any]
    heading: str = ""
    places: Place = Place.pages
    show: Callable[[Any], str] = number
    meaning: str = ""


def metrics(records: Sequence[Record]) -> Results:
    """All metrics over some questions."""
    return {metric.name: metric.of(records) for metric in METRICS}


def scalars(results: Results) -> dict[str, float]:
    """Those that are one number, and apply; of an interval, both ends."""
    ends = {
        f"{name}_{end}": value
        for name, interval in results.items()
        if name.endswith("ci95")
        for end, value in zip(("low", "high"), interval or (), strict=False)
    }
    single = {name: value for name, value in results.items() if isinstance(value, int | float)}
    return single | ends


def cells(results: Results, place: Place) -> Row:
    """The part of a table's row that metrics fill."""
    shown = [metric for metric in METRICS if metric.heading and place in metric.places]
    # a summary of an earlier version lacks what has been added since
    return {metric.heading: metric.show(results.get(metric.name)) for metric in shown}


def definitions(place: Place) -> list[str]:
    """What the metrics of a table and those without a column mean, by heading and name, in
    Markdown."""
    told = [m for m in METRICS if m.meaning and (place in m.places or not m.heading)]
    return [f"**{m.heading or m.name}** (`{m.name}`): {m.meaning}" for m in told]


def runs(records: Iterable[Record], name: str) -> list[Run]:
    """All turns' answers by a method or a baseline, in order."""
    return [turn.runs[name] for record in records for turn in record.turns if name in turn.runs]


def total(records: Sequence[Record], of: Callable[[Run], Sequence[float]]) -> float:
    """The sum over all rounds of the method."""
    return sum(sum(of(run)) for run in runs(records, METHOD))


def rounds(records: Sequence[Record]) -> int:
    """All rounds of some runs."""
    return sum(len(run.emitted) for run in runs(records, METHOD))


def ratio(over: float, under: float) -> float | None:
    """None where there is nothing to divide by."""
    return float(over / under) if under else None


def tokens_per_second(some: Sequence[Run]) -> float | None:
    """All tokens over all seconds."""
    return ratio(sum(len(run.tokens) for run in some), sum(run.seconds for run in some))


def decoding_speedup(records: Sequence[Record]) -> float | None:
    """None where vanilla did not run, or the method tells no rounds."""
    if not all(run.emitted for run in runs(records, METHOD)):
        return None
    pairs = [paired_seconds(r, prefill=False) for r in records if has(r, "vanilla")]
    return ratio(sum(vanilla for vanilla, _ in pairs), sum(method for _, method in pairs))


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


def ends(found: Sequence[float] | None) -> str:
    """An interval; a dash where there is none, or where it is that of a method over itself."""
    return "-" if found is None or found[0] == found[1] else span(found, "-")


def speed_of(name: str) -> Callable[[Sequence[Record]], Any]:
    """Tokens a second of one of the methods, or None if it did not run."""
    return lambda records: tokens_per_second(runs(records, name))


tenths = partial(number, digits=1)

METRICS = [
    Metric("questions", len, "questions", Place.tasks, str),
    Metric("tokens", lambda records: sum(len(run.tokens) for run in runs(records, METHOD))),
    Metric(
        "speedup",
        partial(against, "vanilla", speedup),
        "speedup",
        Place.everywhere,
        meaning="seconds of vanilla decoding (same engine, cache and kernels, a drafter that "
        "proposes nothing) over seconds of the method, prefill included, summed over questions; in "
        "each turn both are timed up to the same number of tokens.",
    ),
    Metric(
        "speedup_ci95",
        partial(against, "vanilla", interval),
        "95%",
        Place.everywhere,
        ends,
        "the interval of the speedup at 95%: a bootstrap over questions.",
    ),
    Metric(
        "decoding_speedup",
        decoding_speedup,
        "decoding",
        Place.pages | Place.methods_terminal,
        meaning="the speedup of decoding alone: the same ratio without the time until the first "
        "token.",
    ),
    Metric(
        "hf_speedup",
        partial(against, "hf", speedup),
        "vs hf",
        Place.by_method,
        meaning="the speedup against `generate` of transformers, which tells no rounds: a text of "
        "its that is longer than the method's counts in proportion.",
    ),
    Metric("hf_speedup_ci95", partial(against, "hf", interval), "95% vs hf", Place.methods, ends),
    Metric(
        "spec_bench_speedup",
        spec_bench_speedup,
        "Spec-Bench",
        Place.by_task,
        meaning="by the formula of Spec-Bench's own report: a ratio of mean tokens/s, in which "
        "vanilla's tokens are its text tokenised again, EOS not counted. It favours the method on "
        "short answers.",
    ),
    Metric(
        "compression_rate",
        lambda records: ratio(total(records, lambda run: run.emitted), rounds(records)),
        "CR",
        Place.everywhere,
        meaning="tokens emitted per forward of the target, bonus token included; vanilla's is 1.",
    ),
    Metric(
        "ctar",
        lambda records: ctar(runs(records, METHOD)),
        meaning="CTAR(w), the consistent token acceptance rate, is the share of rounds whose first "
        "w draft tokens were all accepted, up to the most that ever were. The compression rate is "
        "1 + their sum, but for rounds that an EOS or the limit cut, which have no bonus token.",
    ),
    Metric(
        "acceptance_rate",
        lambda records: ratio(
            total(records, lambda run: run.accepted), total(records, lambda run: run.drafted)
        ),
        "accepted",
        show=share,
        meaning="accepted over drafted tokens; all nodes of a tree are drafted.",
    ),
    Metric(
        "tokens_per_second",
        speed_of(METHOD),
        "tokens/s",
        Place.everywhere,
        tenths,
        "all tokens (EOS included) over all seconds, prefill included, of each method's own texts; "
        "hf is `generate` of transformers.",
    ),
    Metric("vanilla_tokens_per_second", speed_of("vanilla"), "vanilla", Place.by_task, tenths),
    Metric("hf_tokens_per_second", speed_of("hf"), "hf", Place.by_task, tenths),
    # these four add up to the method's time
    Metric("prefill_seconds", lambda records: sum(map(prefill_seconds, runs(records, METHOD)))),
    Metric("draft_seconds", lambda records: total(records, lambda run: run.draft_seconds)),
    Metric("verify_seconds", lambda records: total(records, lambda run: run.verify_seconds)),
    Metric("host_seconds", lambda records: total(records, lambda run: run.host_seconds)),
]
