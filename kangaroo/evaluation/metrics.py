"""The metrics of an evaluation. `METRICS`, at the end, is the one place to add one: `summary.json`,
W&B and the tables are made from it, and docs/evaluation.md says what each means.

A *round* is one forward of the target: the prefill, which gives the first token, or a verification.
The bonus token (the target's own, after the accepted draft tokens) and that of the prefill count as
emitted, never as accepted.

Shapes: Q questions, R resamples, K values of a question.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from kangaroo.engine.requests import Acceptance
from kangaroo.evaluation.records import METHOD, MethodRun, Record
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.tables import Row, number, share, span

Results = dict[str, Any]  # all metrics of some questions, by name
Pair = tuple[float, float]  # what a ratio divides
CTAR = "ctar"
POSITIONS = (1, 2, 3)  # of a draft, at which tables show CTAR
RESAMPLES = 2000


@dataclass(frozen=True)
class Metric:
    """A value over some questions.

    Args:
        name: in `summary.json` and W&B; its interval, where it has one, is `name_ci95`.
        ratio: what it divides in a question; over several it is the ratio of the sums.
        heading, ends: of its column in a table of methods and of its interval's; empty for none.
        of: computes it where that is not the ratio alone; None where it does not apply.
    """

    name: str
    ratio: Callable[[Record], Pair] | None = None
    heading: str = ""
    ends: str = ""
    of: Callable[[Sequence[Record]], Any] | None = None
    show: Callable[[Any], str] = number


def metrics(records: Sequence[Record]) -> Results:
    """All metrics over some questions, with their intervals."""
    results = {}
    for metric in METRICS:
        value = metric.of(records) if metric.of else value_of(metric.name, records)
        if metric.ratio:
            value, results[f"{metric.name}_ci95"] = value or (None, None)
        results[metric.name] = value
    return results


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


def cells(results: Results) -> Row:
    """The part of a table's row that metrics fill."""
    row = {}
    for metric in METRICS:  # a summary of an earlier version lacks what has been added since
        if metric.heading:
            row[metric.heading] = metric.show(results.get(metric.name))
        if metric.ends:
            low, high = results.get(f"{metric.name}_ci95") or (0, 0)
            # that of a method over itself has no width
            row[metric.ends] = "-" if low == high else span((low, high), "-")
    drafts, shares = results["acceptance_rate"] is not None, [*results["ctar"], 0.0, 0.0, 0.0]
    return row | {f"CTAR({w})": number(shares[w - 1] if drafts else None) for w in POSITIONS}


def runs(records: Iterable[Record], name: str = METHOD) -> list[MethodRun]:
    """All turns' answers by a method or a baseline."""
    return [turn.runs[name] for record in records for turn in record.turns if name in turn.runs]


def has(record: Record, name: str) -> bool:
    """Whether that method answered the question."""
    return name in record.turns[0].runs


def ctar(accepted: Sequence[int], longest: int | None = None) -> list[float]:
    """CTAR(1), CTAR(2), ...: the share of rounds whose first w draft tokens (of a path) were all
    accepted; up to `longest`, or the most that ever were."""
    accepted_R = np.asarray(accepted)
    last = int(accepted_R.max(initial=0)) if longest is None else longest
    return [float((accepted_R >= w).mean()) for w in range(1, last + 1)]


class Estimate(NamedTuple):
    """A value and its 95% interval, None for a single question and for published values."""

    value: float
    ends: list[float] | None = None


def ratio(totals_K: np.ndarray) -> np.ndarray:
    """The first of the last axis over the second."""
    return totals_K[..., 0] / totals_K[..., 1]


def difference(totals_4: np.ndarray) -> np.ndarray:
    """A ratio less another one."""
    return ratio(totals_4[..., :2]) - ratio(totals_4[..., 2:])


def estimate(
    values_QK: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = ratio
) -> Estimate:
    """A statistic of totals `[..., K]` over questions, with its interval: percentile bootstrap over
    questions, the same every time. All values of a question are drawn together, so what methods
    have in common on it is in no interval of their difference."""
    value = float(statistic(values_QK.sum(0)))
    if len(values_QK) < 2:
        return Estimate(value)
    ends = np.percentile(statistic(_resamples(len(values_QK)) @ values_QK), [2.5, 97.5])
    return Estimate(value, ends.tolist())


@lru_cache(maxsize=4)
def _resamples(questions: int) -> np.ndarray:
    """How often each of so many questions is drawn in each resample: `[R, Q]`."""
    picked_RQ = np.random.default_rng(0).integers(questions, size=(RESAMPLES, questions))
    return np.array([np.bincount(row, minlength=questions) for row in picked_RQ], float)


def _round_seconds(run: MethodRun) -> np.ndarray:
    return np.add(np.add(run.draft_seconds, run.verify_seconds), run.host_seconds)


def prefill_seconds(run: MethodRun) -> float:
    """Time outside rounds: the cache's allocation, the prefill, the way into the engine and out."""
    return run.seconds - float(_round_seconds(run).sum())


def seconds_until(run: MethodRun, count: int) -> float:
    """Seconds until the first `count` tokens were there; a round they cut counts in proportion."""
    if not run.emitted:  # earlier records of transformers tell no rounds
        return run.seconds * count / len(run.tokens)
    tokens = np.cumsum([0, *run.emitted])
    seconds = prefill_seconds(run) + np.cumsum([0.0, *_round_seconds(run)])
    return float(np.interp(count, tokens, seconds))


def paired_seconds(record: Record, baseline: str = "vanilla", prefill: bool = True) -> Pair:
    """Seconds of a baseline and of the method, with the prefill or without; in each turn for as
    many tokens as the shorter of the two texts has: a text that ended elsewhere (another EOS after
    a fork, hf's own noise under sampling) favours nobody. None at all where it did not run."""
    theirs = method = 0.0
    for turn in record.turns:
        if baseline in turn.runs:
            a, b = turn.runs[baseline], turn.runs[METHOD]
            count = min(len(a.tokens), len(b.tokens))
            theirs += seconds_until(a, count) - (0.0 if prefill else prefill_seconds(a))
            method += seconds_until(b, count) - (0.0 if prefill else prefill_seconds(b))
    return theirs, method


def counted(count: Callable[[MethodRun], Pair], name: str = METHOD) -> Callable[[Record], Pair]:
    """What a ratio divides in a question, from what it divides in each of a method's answers."""

    def of_question(record: Record) -> Pair:
        counts = [count(run) for run in runs([record], name)]
        return sum(over for over, _ in counts), sum(under for _, under in counts)

    return of_question


def _reach(position: int, run: MethodRun) -> Pair:
    return sum(n >= position for n in run.accepted), len(run.accepted)


def _length(run: MethodRun) -> Pair:
    rounds = sum(map(bool, run.drafted))
    return sum(run.accepted) + rounds, rounds


def _accepted(run: MethodRun) -> Pair:
    return sum(run.accepted), sum(run.drafted)


def _speed(run: MethodRun) -> Pair:
    return len(run.tokens), run.seconds


def pairs(records: Sequence[Record], metric: str) -> np.ndarray:
    """What a metric of `RATIOS`, or CTAR(w) as `ctarW`, divides in each question: `[Q, 2]`. Errors:
    `ConfigError` for another metric.
    """
    of_question, position = RATIOS.get(metric), metric.removeprefix(CTAR)
    if metric.startswith(CTAR) and position.isdecimal():
        of_question = counted(partial(_reach, int(position)))
    if of_question is None:
        raise ConfigError(f"study.metrics: there is no '{metric}'; there are {', '.join(RATIOS)}.")
    return np.array([of_question(record) for record in records], float).reshape(-1, 2)


def value_of(metric: str, records: Sequence[Record]) -> Estimate | None:
    """A ratio over the questions that have something to divide by; None where none has."""
    pairs_Q2 = pairs(records, metric)
    divided_Q2 = pairs_Q2[pairs_Q2[:, 1] > 0]
    return estimate(divided_Q2) if len(divided_Q2) else None


def _ctar(position: int, records: Sequence[Record]) -> Estimate | None:
    drafts = any(any(run.drafted) for run in runs(records))
    return value_of(f"{CTAR}{position}", records) if drafts else None


def spec_bench_speedup(records: Sequence[Record]) -> float | None:
    """Mean over questions of tokens/s, the method's over vanilla's; None without vanilla.

    Vanilla's tokens are counted by tokenising its text again, less one for the BOS: so its EOS is
    not counted, which favours the method on short answers. Source: Spec-Bench, evaluation/speed.py.
    """
    again = counted(lambda run: (run.retokenised - 1, run.seconds), "vanilla")
    both = [(counted(_speed)(each), again(each)) for each in records if has(each, "vanilla")]
    method, vanilla = ratio(np.array(both, float).reshape(-1, 2, 2)).sum(0)
    return float(method / vanilla) if vanilla else None


def acceptance(records: Sequence[Record]) -> dict[str, Any]:
    """What became of drafts, by vLLM's names."""
    drafts = Acceptance()
    for run in runs(records):
        for accepted, drafted in zip(run.accepted, run.drafted, strict=True):
            drafts.add(accepted, drafted)
    rounds = max(drafts.rounds, 1)
    rates = [count / rounds for count in drafts.by_position]
    return drafts.as_json() | {"per_position_acceptance_rate": rates}


def seconds_of(part: str, records: Sequence[Record]) -> float:
    """A part of the method's rounds."""
    return sum(sum(getattr(run, f"{part}_seconds")) for run in runs(records))


METRICS = [
    Metric("questions", of=len),
    Metric("tokens", of=lambda records: sum(len(run.tokens) for run in runs(records))),
    Metric("speedup", paired_seconds, "speedup", "95%"),
    Metric("decoding_speedup", partial(paired_seconds, prefill=False), "decoding"),
    Metric("hf_speedup", partial(paired_seconds, baseline="hf"), "vs hf", "95% vs hf"),
    Metric("spec_bench_speedup", of=spec_bench_speedup),
    Metric("compression_rate", counted(lambda run: (sum(run.emitted), len(run.emitted))), "CR"),
    Metric("mean_acceptance_length", counted(_length)),
    Metric("ctar", of=lambda records: ctar([n for run in runs(records) for n in run.accepted])),
    *(Metric(f"{CTAR}{w}", counted(partial(_reach, w)), of=partial(_ctar, w)) for w in POSITIONS),
    Metric("speculative_decoding", of=acceptance),
    Metric("acceptance_rate", counted(_accepted), "accepted", show=share),
    Metric("tokens_per_second", counted(_speed), "tokens/s", show=partial(number, digits=1)),
    Metric("vanilla_tokens_per_second", counted(_speed, "vanilla")),
    Metric("hf_tokens_per_second", counted(_speed, "hf")),
    # these four add up to its time
    Metric("prefill_seconds", of=lambda records: sum(map(prefill_seconds, runs(records)))),
    *(Metric(f"{x}_seconds", of=partial(seconds_of, x)) for x in ("draft", "verify", "host")),
]
RATIOS = {metric.name: metric.ratio for metric in METRICS if metric.ratio}
