"""The metrics of an evaluation. `METRICS`, at the end, is the one place to add one: `summary.json`,
W&B and the tables are made from it, and docs/evaluation.md says what each means.

A *round* is one forward of the target: the prefill, which gives the first token, or a verification.
The bonus token (the target's own, after the accepted draft tokens) counts as emitted, never as
accepted, and so does the token of the prefill.

Questions differ more than methods do: one that is hard to draft is hard for every drafter. So two
intervals may overlap while the difference is plain, and methods are compared on the same questions.

Shapes: Q questions, R resamples, K values of a question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from kangaroo.engine.requests import Acceptance
from kangaroo.evaluation.records import METHOD, MethodRun, Record
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.tables import Row, number, share, span

Results = dict[str, Any]  # all metrics of some questions, by name
CTAR = "ctar"
POSITIONS = (1, 2, 3)  # of a draft, at which tables show CTAR
RESAMPLES = 2000


@dataclass(frozen=True)
class Metric:
    """A value over some questions.

    Args:
        name: in `summary.json` and W&B.
        of: computes it; None where it does not apply (no such baseline, no draft).
        heading: of its column in a table of methods; empty where it has none.
        in_terminal: whether it has that column in the terminal's 80 columns too.
    """

    name: str
    of: Callable[[Sequence[Record]], Any]
    heading: str = ""
    in_terminal: bool = False
    show: Callable[[Any], str] = number


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


def cells(results: Results, in_terminal: bool = False) -> Row:
    """The part of a table's row that metrics fill."""
    columns = [m for m in METRICS if m.heading and (m.in_terminal or not in_terminal)]
    # a summary of an earlier version lacks what has been added since
    row = {metric.heading: metric.show(results.get(metric.name)) for metric in columns}
    if not in_terminal:
        drafts, shares = results["acceptance_rate"] is not None, [*results["ctar"], 0.0, 0.0, 0.0]
        row |= {f"CTAR({w})": number(shares[w - 1] if drafts else None) for w in POSITIONS}
    return row


def runs(records: Iterable[Record], name: str = METHOD) -> list[MethodRun]:
    """All turns' answers by a method or a baseline."""
    return [turn.runs[name] for record in records for turn in record.turns if name in turn.runs]


def has(record: Record, name: str) -> bool:
    """Whether that method answered the question."""
    return name in record.turns[0].runs


def ctar(accepted: Sequence[int], longest: int | None = None) -> list[float]:
    """CTAR(1), CTAR(2), ...: the share of rounds whose first w draft tokens, in a tree those of one
    path, were all accepted; up to `longest`, or the most that ever were.
    """
    accepted_R = np.asarray(accepted)
    last = int(accepted_R.max(initial=0)) if longest is None else longest
    return [float((accepted_R >= w).mean()) for w in range(1, last + 1)]


def compression_rate(emitted: float, rounds: float) -> float:
    """Tokens that the target's forwards gave, over their number; vanilla's is 1."""
    return float(emitted / rounds)


def rate_of_ctar(shares: Sequence[float]) -> float:
    """The compression rate by CTAR(1), CTAR(2), ...: `1 + sum CTAR`, where no round is cut.

    Source: the paper, section 4.1.
    """
    return 1 + sum(shares)


# What a ratio divides, counted in one answer.
COUNTS: dict[str, Callable[[MethodRun], tuple[float, float]]] = {
    "compression_rate": lambda run: (sum(run.emitted), len(run.emitted)),
    "mean_acceptance_length": lambda run: (
        sum(run.accepted) + sum(map(bool, run.drafted)),
        sum(map(bool, run.drafted)),
    ),
    "acceptance_rate": lambda run: (sum(run.accepted), sum(run.drafted)),
    "tokens_per_second": lambda run: (len(run.tokens), run.seconds),
}


def totals(records: Sequence[Record], metric: str, name: str = METHOD) -> tuple[float, float]:
    """What a metric of `COUNTS`, or CTAR(w) as `ctarW`, divides over some questions.

    Errors: `ConfigError` for a metric that is not known.
    """
    count, position = COUNTS.get(metric), metric.removeprefix(CTAR)
    if metric.startswith(CTAR) and position.isdecimal():
        count = lambda run: (sum(n >= int(position) for n in run.accepted), len(run.accepted))  # noqa: E731
    if count is None:
        names = ", ".join(["speedup", *COUNTS, "ctar1", "ctar2"])
        raise ConfigError(f"study.metrics: there is no '{metric}'; there are {names}, ...")
    counts = [count(run) for run in runs(records, name)]
    return sum(over for over, _ in counts), sum(under for _, under in counts)


def pairs(records: Sequence[Record], metric: str) -> np.ndarray:
    """What the speedup, or a metric of `totals`, divides: `[Q, 2]`.

    Errors: `ConfigError` for a metric that is not known, and for a speedup without vanilla.
    """
    if metric != "speedup":
        return np.array([totals([record], metric) for record in records], float)
    if not all(has(record, "vanilla") for record in records):
        raise ConfigError("a study of speedups needs vanilla decoding: add it to baselines=.")
    return np.array([paired_seconds(record) for record in records], float)


def ratio(totals_K: np.ndarray) -> np.ndarray:
    """The first of the last axis over the second."""
    return totals_K[..., 0] / totals_K[..., 1]


def difference(totals_4: np.ndarray) -> np.ndarray:
    """A ratio less another one."""
    return ratio(totals_4[..., :2]) - ratio(totals_4[..., 2:])


def ratio_of_ratios(totals_4: np.ndarray) -> np.ndarray:
    """A ratio over another one."""
    return ratio(totals_4[..., :2]) / ratio(totals_4[..., 2:])


def speedup(pairs_Q2: np.ndarray) -> float:
    """The ratio of totals. Of each pair the first is the baseline's seconds."""
    return float(ratio(pairs_Q2.sum(0)))


def interval(
    values_QK: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray] = ratio
) -> list[float] | None:
    """95% interval of a statistic of totals `[..., K]`: percentile bootstrap over questions, the
    same every time. All values of a question are drawn together, so what methods have in common on
    it is in no interval of their difference. A single question has none.
    """
    if len(values_QK) < 2:
        return None
    rng = np.random.default_rng(0)
    picked_RQ = rng.integers(len(values_QK), size=(RESAMPLES, len(values_QK)))
    return np.percentile(statistic(values_QK[picked_RQ].sum(1)), [2.5, 97.5]).tolist()


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


def paired_seconds(
    record: Record, baseline: str = "vanilla", prefill: bool = True
) -> tuple[float, float]:
    """Seconds of a baseline and of the method, with the prefill or without; in each turn for as
    many tokens as the shorter of the two texts has: a text that ended elsewhere (another EOS after
    a fork, hf's own noise under sampling) favours nobody.
    """
    theirs = method = 0.0
    for turn in record.turns:
        a, b = turn.runs[baseline], turn.runs[METHOD]
        count = min(len(a.tokens), len(b.tokens))
        theirs += seconds_until(a, count) - (0.0 if prefill else prefill_seconds(a))
        method += seconds_until(b, count) - (0.0 if prefill else prefill_seconds(b))
    return theirs, method


def against(
    baseline: str,
    statistic: Callable[[np.ndarray], Any],
    records: Sequence[Record],
    prefill: bool = True,
) -> Any:
    """`speedup` or `interval` over the questions that a baseline answered; None without any."""
    seconds = [paired_seconds(r, baseline, prefill) for r in records if has(r, baseline)]
    return statistic(np.array(seconds)) if seconds else None


def spec_bench_speedup(records: Sequence[Record]) -> float | None:
    """Mean over questions of tokens/s, the method's over vanilla's; None without vanilla.

    Vanilla's tokens are counted by tokenising its text again, less one for the BOS: so its EOS is
    not counted, which favours the method on short answers. Source: Spec-Bench, evaluation/speed.py.
    """
    method, vanilla = [], []
    for record in records:
        if has(record, "vanilla"):
            a, b = runs([record]), runs([record], "vanilla")
            method.append(sum(len(run.tokens) for run in a) / sum(run.seconds for run in a))
            vanilla.append(sum(run.retokenised - 1 for run in b) / sum(run.seconds for run in b))
    return float(np.mean(method) / np.mean(vanilla)) if method and np.mean(vanilla) else None


def ends(limits: Sequence[float] | None) -> str:
    """An interval; a dash where there is none, or where it is that of a method over itself."""
    return "-" if limits is None or limits[0] == limits[1] else span(limits, "-")


def rate(metric: str, name: str, records: Sequence[Record]) -> float | None:
    """A ratio of `totals` over all answers by one of the methods; None if it did not run."""
    over, under = totals(records, metric, name)
    return float(over / under) if under else None


def rate_interval(metric: str, records: Sequence[Record]) -> list[float] | None:
    """The interval of `rate`, over the questions that have something to divide by."""
    counts = [count for record in records if (count := totals([record], metric))[1]]
    return interval(np.array(counts))


def drafting(of: Callable[[Sequence[Record]], Any], records: Sequence[Record]) -> Any:
    """A metric of a method that drafts; None for one that never did."""
    return of(records) if any(any(run.drafted) for run in runs(records)) else None


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
    """A part of the method's time: "prefill", or "draft", "verify" or "host" of the rounds."""
    if part == "prefill":
        return sum(map(prefill_seconds, runs(records)))
    return sum(sum(getattr(run, f"{part}_seconds")) for run in runs(records))


speed_of = partial(rate, "tokens_per_second")
tenths = partial(number, digits=1)

METRICS = [
    Metric("questions", len),
    Metric("tokens", lambda records: sum(len(run.tokens) for run in runs(records))),
    Metric("speedup", partial(against, "vanilla", speedup), "speedup", True),
    Metric("speedup_ci95", partial(against, "vanilla", interval), "95%", True, ends),
    Metric(
        "decoding_speedup", partial(against, "vanilla", speedup, prefill=False), "decoding", True
    ),
    Metric("hf_speedup", partial(against, "hf", speedup), "vs hf", True),
    Metric("hf_speedup_ci95", partial(against, "hf", interval), "95% vs hf", show=ends),
    Metric("spec_bench_speedup", spec_bench_speedup),
    Metric("compression_rate", partial(rate, "compression_rate", METHOD), "CR", True),
    Metric("compression_rate_ci95", partial(rate_interval, "compression_rate")),
    Metric("mean_acceptance_length", partial(rate, "mean_acceptance_length", METHOD)),
    Metric("mean_acceptance_length_ci95", partial(rate_interval, "mean_acceptance_length")),
    Metric("ctar", lambda records: ctar([n for run in runs(records) for n in run.accepted])),
    *(
        Metric(f"{CTAR}{w}{suffix}", partial(drafting, of))
        for w in POSITIONS
        for suffix, of in (
            ("", partial(rate, f"{CTAR}{w}", METHOD)),
            ("_ci95", partial(rate_interval, f"{CTAR}{w}")),
        )
    ),
    Metric("speculative_decoding", acceptance),
    Metric("acceptance_rate", partial(rate, "acceptance_rate", METHOD), "accepted", show=share),
    Metric("tokens_per_second", partial(speed_of, METHOD), "tokens/s", True, tenths),
    Metric("vanilla_tokens_per_second", partial(speed_of, "vanilla")),
    Metric("hf_tokens_per_second", partial(speed_of, "hf")),
    Metric("prefill_seconds", partial(seconds_of, "prefill")),  # these four add up to its time
    Metric("draft_seconds", partial(seconds_of, "draft")),
    Metric("verify_seconds", partial(seconds_of, "verify")),
    Metric("host_seconds", partial(seconds_of, "host")),
]
