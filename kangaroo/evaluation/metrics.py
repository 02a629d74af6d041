"""The metrics of an evaluation: what each is, how it follows from the records, where it is shown.

`METRICS`, at the end, is the one place to add one: `summary.json`, W&B, the tables and their
explanations are made from it.

A *round* is one verification, which is one forward of the target. The bonus token (the target's
own, after the accepted draft tokens) counts as emitted, never as accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Flag, auto
from functools import partial
from typing import Any

import numpy as np

from kangaroo.evaluation.records import METHOD, Record, Run
from kangaroo.tables import Row, number, share, span

RESAMPLES = 2000

Results = dict[str, Any]  # all metrics of some questions, by name


class Place(Flag):
    """A table of metrics: by task or by method, as a page or in the terminal's 80 columns."""

    tasks = auto()
    tasks_terminal = auto()
    methods = auto()
    methods_terminal = auto()
    pages = tasks | methods
    by_task = tasks | tasks_terminal
    everywhere = by_task | methods | methods_terminal


@dataclass(frozen=True)
class Column:
    """A column of tables; `cell` makes its text of all metrics of a row."""

    heading: str
    cell: Callable[[Results], str]
    places: Place = Place.pages


@dataclass(frozen=True)
class Metric:
    """A value over some questions.

    Args:
        name: in `summary.json` and W&B.
        of: computes it; None where it does not apply (no such baseline, no draft).
        meaning: for readers of a report; empty where another metric's says it.
        columns: where it is shown.
    """

    name: str
    of: Callable[[Sequence[Record]], Any]
    meaning: str = ""
    columns: tuple[Column, ...] = ()

    def definition(self) -> str:
        """Its headings, its name and its meaning, in Markdown."""
        headings = ", ".join(column.heading for column in self.columns)
        return f"**{headings}** (`{self.name}`): {self.meaning}"


def metrics(records: Sequence[Record]) -> Results:
    """All metrics over some questions."""
    return {metric.name: metric.of(records) for metric in METRICS}


def scalars(results: Results) -> dict[str, float]:
    """Those that are one number, and apply."""
    return {name: value for name, value in results.items() if isinstance(value, int | float)}


def cells(results: Results, place: Place) -> Row:
    """The part of a table's row that metrics fill."""
    columns = (column for metric in METRICS for column in metric.columns)
    return {column.heading: column.cell(results) for column in columns if place in column.places}


def definitions() -> list[str]:
    return [metric.definition() for metric in METRICS if metric.meaning]


def runs(records: Iterable[Record], name: str) -> list[Run]:
    return [turn.runs[name] for record in records for turn in record.turns if name in turn.runs]


def has(record: Record, name: str) -> bool:
    return name in record.turns[0].runs


def total(records: Sequence[Record], of: Callable[[Run], Sequence[float]]) -> float:
    """The sum over all rounds of the method."""
    return sum(sum(of(run)) for run in runs(records, METHOD))


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


def speedup(records: Sequence[Record], baseline: str) -> float | None:
    """Total seconds of a baseline over those of the method; None where it did not run."""
    pairs_Q2 = all_paired_seconds(records, baseline)
    return ratio_of_totals(pairs_Q2) if len(pairs_Q2) else None


def speedup_interval(records: Sequence[Record], baseline: str) -> list[float] | None:
    pairs_Q2 = all_paired_seconds(records, baseline)
    return interval(pairs_Q2) if len(pairs_Q2) else None


def all_paired_seconds(records: Sequence[Record], baseline: str) -> np.ndarray:
    paired = [record for record in records if has(record, baseline)]
    return np.array([paired_seconds(record, baseline) for record in paired]).reshape(-1, 2)


def ratio_of_totals(pairs_Q2: np.ndarray) -> float:
    """What this project calls a speedup. Of each pair the first is the baseline's seconds."""
    baseline, method = pairs_Q2.sum(0)
    return float(baseline / method)


def interval(pairs_Q2: np.ndarray) -> list[float]:
    """95% interval of `ratio_of_totals`: percentile bootstrap over questions, the same every time.

    By hand: `scipy.stats.bootstrap` refuses a single question, and would be a dependency for these
    four lines.
    """
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


def interval_cell(name: str) -> Callable[[Results], str]:
    """Of a single question there is no interval."""

    def cell(results: Results) -> str:
        ends = results[name]
        return "-" if ends is None or results["questions"] < 2 else span(ends, "-")

    return cell


def ctar_cell(w: int) -> Callable[[Results], str]:
    """ "-" where nothing is drafted."""

    def cell(results: Results) -> str:
        drafts = results["acceptance_rate"] is not None
        return number(reached(results["ctar"], w)) if drafts else "-"

    return cell


def reached(ctar: Sequence[float], w: int) -> float:
    """CTAR(w), which is 0 beyond the most tokens that were ever accepted."""
    return ctar[w - 1] if w <= len(ctar) else 0.0


def column(
    heading: str, name: str, places: Place = Place.pages, show: Callable[[Any], str] = number
) -> Column:
    return Column(heading, lambda results: show(results[name]), places)


tenths = partial(number, digits=1)


METRICS = [
    Metric("questions", len, columns=(column("questions", "questions", Place.tasks, str),)),
    Metric("tokens", lambda records: sum(len(run.tokens) for run in runs(records, METHOD))),
    Metric(
        "speedup",
        partial(speedup, baseline="vanilla"),
        "seconds of vanilla decoding (same engine, cache and kernels, a drafter that proposes "
        "nothing) over seconds of the method, prefill included, summed over questions; in each "
        "turn both are timed up to the same number of tokens.",
        (column("speedup", "speedup", Place.everywhere),),
    ),
    Metric(
        "speedup_ci95",
        partial(speedup_interval, baseline="vanilla"),
        "the interval of the speedup at 95%: a bootstrap over questions.",
        (Column("95%", interval_cell("speedup_ci95"), Place.everywhere),),
    ),
    Metric(
        "hf_speedup",
        partial(speedup, baseline="hf"),
        "the speedup against `generate` of transformers, which tells no rounds: a text of its that "
        "is longer than the method's counts in proportion.",
        (column("vs hf", "hf_speedup", Place.methods | Place.methods_terminal),),
    ),
    Metric(
        "hf_speedup_ci95",
        partial(speedup_interval, baseline="hf"),
        columns=(Column("95% vs hf", interval_cell("hf_speedup_ci95"), Place.methods),),
    ),
    Metric(
        "spec_bench_speedup",
        spec_bench_speedup,
        "by the formula of Spec-Bench's own report: a ratio of mean tokens/s, in which vanilla's "
        "tokens are its text tokenised again, EOS not counted. It favours the method on short "
        "answers.",
        (column("Spec-Bench", "spec_bench_speedup", Place.by_task),),
    ),
    Metric(
        "compression_rate",
        lambda records: ratio(
            total(records, lambda run: run.emitted),
            sum(len(run.emitted) for run in runs(records, METHOD)),
        ),
        "tokens emitted per forward of the target, bonus token included; vanilla's is 1.",
        (column("CR", "compression_rate", Place.everywhere),),
    ),
    Metric(
        "ctar",
        lambda records: ctar(runs(records, METHOD)),
        "entry w is the share of rounds whose first w draft tokens were all accepted, up to the "
        "most that ever were. The compression rate is 1 + their sum, but for rounds that an EOS or "
        "the limit cut, which have no bonus token.",
        tuple(Column(f"CTAR({w})", ctar_cell(w), Place.methods) for w in (1, 2, 3)),
    ),
    Metric(
        "acceptance_rate",
        lambda records: ratio(
            total(records, lambda run: run.accepted), total(records, lambda run: run.drafted)
        ),
        "accepted over drafted tokens; all nodes of a tree are drafted.",
        (column("accepted", "acceptance_rate", show=share),),
    ),
    Metric(
        "tokens_per_second",
        lambda records: tokens_per_second(runs(records, METHOD)),
        "all tokens (EOS included) over all seconds, prefill included, of each method's own texts; "
        "hf is `generate` of transformers.",
        (column("tokens/s", "tokens_per_second", Place.pages | Place.tasks_terminal, tenths),),
    ),
    Metric(
        "vanilla_tokens_per_second",
        lambda records: tokens_per_second(runs(records, "vanilla")),
        columns=(column("vanilla", "vanilla_tokens_per_second", Place.by_task, tenths),),
    ),
    Metric(
        "hf_tokens_per_second",
        lambda records: tokens_per_second(runs(records, "hf")),
        columns=(column("hf", "hf_tokens_per_second", Place.by_task, tenths),),
    ),
    Metric(
        "prefill_seconds",
        lambda records: sum(prefill_seconds(run) for run in runs(records, METHOD)),
    ),
    # with those of the prefill they add up to the method's time
    Metric("draft_seconds", partial(total, of=lambda run: run.draft_seconds)),
    Metric("verify_seconds", partial(total, of=lambda run: run.verify_seconds)),
    Metric("host_seconds", partial(total, of=lambda run: run.host_seconds)),
]
