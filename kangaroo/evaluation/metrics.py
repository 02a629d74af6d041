"""The metrics of an evaluation. A new one only needs an entry in `METRICS`, at the end, from which
`summary.json`, W&B and the tables are made. docs/evaluation.md explains each.

A *round* is one forward of the target: the prefill, which gives the first token, or a verification.
The prefill's token and the bonus token, which follows the accepted draft tokens, count as emitted,
never as accepted. Shapes: Q questions, R resamples, K values of a question.
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

Results = dict[str, Any]  # metrics by name
Pair = tuple[float, float]  # numerator and denominator
CTAR = "ctar"
POSITIONS = (1, 2, 3)  # draft positions whose CTAR is in tables
RESAMPLES = 2000


@dataclass(frozen=True)
class Metric:
    """A value over some questions.

    Args:
        name: key in `summary.json` and W&B; a ratio's interval is `name_ci95`.
        ratio: numerator and denominator for a question; both are summed over questions.
        heading: column in a table of methods; empty for none.
        interval_heading: column of its interval; empty for none.
        compute: computes it if it is not the ratio alone; returns None if it does not apply.
        show: writes the value into a cell.
    """

    name: str
    ratio: Callable[[Record], Pair] | None = None
    heading: str = ""
    interval_heading: str = ""
    compute: Callable[[Sequence[Record]], Any] | None = None
    show: Callable[[Any], str] = number


def metrics(records: Sequence[Record]) -> Results:
    """All metrics over some questions, with their intervals."""
    results = {}
    for metric in METRICS:
        value = metric.compute(records) if metric.compute else value_of(metric.name, records)
        if metric.ratio:
            value, results[f"{metric.name}_ci95"] = value or (None, None)
        results[metric.name] = value
    return results


def scalars(results: Results) -> dict[str, float]:
    """The metrics that are numbers, and the ends of intervals as `name_ci95_low` and `_high`."""
    numbers = {name: value for name, value in results.items() if isinstance(value, int | float)}
    for name, value in results.items():
        if name.endswith("ci95") and value is not None:
            numbers[f"{name}_low"], numbers[f"{name}_high"] = value
    return numbers


def cells(results: Results) -> Row:
    """The metrics' cells in a method's row."""
    row = {}
    for metric in METRICS:  # summaries of earlier versions may lack some
        if metric.heading:
            row[metric.heading] = metric.show(results.get(metric.name))
        if metric.interval_heading:
            low, high = results.get(f"{metric.name}_ci95") or (0, 0)
            row[metric.interval_heading] = "-" if low == high else span((low, high), "-")
    return row | {f"CTAR({w})": number(results[f"{CTAR}{w}"]) for w in POSITIONS}


def runs(records: Iterable[Record], name: str = METHOD) -> list[MethodRun]:
    """All answers of a method or a baseline."""
    return [turn.runs[name] for record in records for turn in record.turns if name in turn.runs]


def ctar(accepted: Sequence[int]) -> list[float]:
    """CTAR(1), CTAR(2), ...: the share of rounds whose first w draft tokens (of a path) were all
    accepted, up to the most tokens that were accepted in a round."""
    accepted_R = np.asarray(accepted)
    return [float((accepted_R >= w).mean()) for w in range(1, accepted_R.max(initial=0) + 1)]


class Estimate(NamedTuple):
    """A value and its 95% interval, which is None for one question and for published values."""

    value: float
    ends: list[float] | None = None


def estimate(values_QK: np.ndarray, combine: np.ufunc = np.subtract) -> Estimate:
    """The ratio of sums over questions (K=2), or two ratios combined, such as their difference
    (K=4), with its interval: percentile bootstrap over questions, with a fixed seed. All values of
    a question are drawn together, so what two methods share does not widen the interval."""

    def statistic(sums_K: np.ndarray) -> np.ndarray:
        return combine.reduce(sums_K[..., ::2] / sums_K[..., 1::2], axis=-1)

    value = float(statistic(values_QK.sum(0)))
    if len(values_QK) < 2:
        return Estimate(value)
    ends = np.percentile(statistic(_resamples(len(values_QK)) @ values_QK), [2.5, 97.5])
    return Estimate(value, ends.tolist())


@lru_cache(maxsize=4)
def _resamples(questions: int) -> np.ndarray:
    """How often each question is drawn in each resample: `[R, Q]`."""
    drawn_RQ = np.random.default_rng(0).integers(questions, size=(RESAMPLES, questions))
    return np.array([np.bincount(row, minlength=questions) for row in drawn_RQ], float)


def _round_seconds(run: MethodRun) -> np.ndarray:
    return np.add(np.add(run.draft_seconds, run.verify_seconds), run.host_seconds)


def prefill_seconds(run: MethodRun) -> float:
    """Time outside rounds: allocation of the cache, prefill, and calling the engine."""
    return run.seconds - float(_round_seconds(run).sum())


def seconds_until(run: MethodRun, count: int) -> float:
    """Seconds until `count` tokens were written, interpolated linearly within a round."""
    seconds = prefill_seconds(run) + np.cumsum([0.0, *_round_seconds(run)])
    return float(np.interp(count, np.cumsum([0, *run.emitted]), seconds))


def paired_seconds(record: Record, baseline: str = "vanilla", prefill: bool = True) -> Pair:
    """Seconds of a baseline and of the method, with or without the prefill; 0 without the baseline.
    In each turn both are timed for as many tokens as the shorter of the two texts has, so a text
    that ends elsewhere (another EOS after a fork, hf's own noise) favours neither."""
    totals = [0.0, 0.0]
    for turn in record.turns:
        if baseline in turn.runs:
            pair = turn.runs[baseline], turn.runs[METHOD]
            count = min(len(run.tokens) for run in pair)
            for i, run in enumerate(pair):
                totals[i] += seconds_until(run, count) - (0.0 if prefill else prefill_seconds(run))
    return totals[0], totals[1]


def per_question(pair: Callable[[MethodRun], Pair], name: str = METHOD) -> Callable[[Record], Pair]:
    """A function that sums numerators and denominators over a method's answers to a question."""

    def sums(record: Record) -> Pair:
        pairs = [pair(run) for run in runs([record], name)]
        return sum(over for over, _ in pairs), sum(under for _, under in pairs)

    return sums


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
    """Numerator and denominator of a metric of `RATIOS`, or of CTAR(w) as `ctarW`, for each
    question: `[Q, 2]`. Errors: `ConfigError` for other metrics."""
    pair = RATIOS.get(metric)
    position = metric.removeprefix(CTAR)
    if metric.startswith(CTAR) and position.isdecimal():
        pair = per_question(partial(_reach, int(position)))
    if pair is None:
        raise ConfigError(f"study.metrics: there is no '{metric}'; there are {', '.join(RATIOS)}.")
    return np.array([pair(record) for record in records], float).reshape(-1, 2)


def value_of(metric: str, records: Sequence[Record]) -> Estimate | None:
    """A ratio over the questions whose denominator is not 0; None if there are none."""
    pairs_Q2 = pairs(records, metric)
    pairs_Q2 = pairs_Q2[pairs_Q2[:, 1] > 0]
    return estimate(pairs_Q2) if len(pairs_Q2) else None


def _ctar(position: int, records: Sequence[Record]) -> Estimate | None:
    has_drafts = any(any(run.drafted) for run in runs(records))
    return value_of(f"{CTAR}{position}", records) if has_drafts else None


def spec_bench_speedup(records: Sequence[Record]) -> float | None:
    """Mean over questions of tokens/s, the method's over vanilla's; None without vanilla.

    Vanilla's tokens are counted by tokenizing its text again, less one for the BOS: so its EOS is
    not counted, which favours the method on short answers (Spec-Bench's evaluation/speed.py)."""
    method = per_question(_speed)
    vanilla = per_question(lambda run: (run.retokenised - 1, run.seconds), "vanilla")
    both = [(method(x), vanilla(x)) for x in records if "vanilla" in x.turns[0].runs]
    pairs_Q22 = np.array(both, float).reshape(-1, 2, 2)
    over, under = (pairs_Q22[..., 0] / pairs_Q22[..., 1]).sum(0)
    return float(over / under) if under else None


def acceptance(records: Sequence[Record]) -> dict[str, Any]:
    """Counts and rates of accepted draft tokens, under vLLM's names."""
    drafts = Acceptance()
    for run in runs(records):
        for accepted, drafted in zip(run.accepted, run.drafted, strict=True):
            drafts.add(accepted, drafted)
    rates = [count / drafts.rounds for count in drafts.by_position]
    return drafts.as_json() | {"per_position_acceptance_rate": rates}


def _seconds(part: str, records: Sequence[Record]) -> float:
    return sum(sum(getattr(run, f"{part}_seconds")) for run in runs(records))


METRICS = [
    Metric("questions", compute=len),
    Metric("tokens", compute=lambda records: sum(len(run.tokens) for run in runs(records))),
    Metric("speedup", paired_seconds, "speedup", "95%"),
    Metric("decoding_speedup", partial(paired_seconds, prefill=False), "decoding"),
    Metric("hf_speedup", partial(paired_seconds, baseline="hf"), "vs hf", "95% vs hf"),
    Metric("spec_bench_speedup", compute=spec_bench_speedup),
    Metric("compression_rate", per_question(lambda x: (sum(x.emitted), len(x.emitted))), "CR"),
    Metric("mean_acceptance_length", per_question(_length)),
    Metric("ctar", compute=lambda records: ctar([n for x in runs(records) for n in x.accepted])),
    *(
        Metric(f"{CTAR}{w}", per_question(partial(_reach, w)), compute=partial(_ctar, w))
        for w in POSITIONS
    ),
    Metric("speculative_decoding", compute=acceptance),
    Metric("acceptance_rate", per_question(_accepted), "accepted", show=share),
    Metric("tokens_per_second", per_question(_speed), "tokens/s", show=partial(number, digits=1)),
    Metric("machine_load", compute=lambda records: sum(x.load for x in records) / len(records)),
    Metric("vanilla_tokens_per_second", per_question(_speed, "vanilla")),
    Metric("hf_tokens_per_second", per_question(_speed, "hf")),
    # the seconds of these four parts add up to the method's time
    Metric("prefill_seconds", compute=lambda records: sum(map(prefill_seconds, runs(records)))),
    *(Metric(f"{x}_seconds", compute=partial(_seconds, x)) for x in ("draft", "verify", "host")),
]
RATIOS = {metric.name: metric.ratio for metric in METRICS if metric.ratio}
