"""Methods side by side: `comparison.json`, `report.md` and a plot from the summaries of a folder.

Methods of one run took turns on every question; a sweep's jobs were timed against baselines of
their own, so their speedups can be compared, their tokens/s cannot.
"""

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from kangaroo.evaluation import plots
from kangaroo.evaluation.metrics import CTAR, POSITIONS, cells, ratio
from kangaroo.evaluation.metrics import estimate as estimated
from kangaroo.evaluation.records import AGAIN, SUMMARY, Baseline
from kangaroo.evaluation.summary import shared
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import write_json
from kangaroo.utils.provenance import describe_machine, differences
from kangaroo.utils.tables import Row, estimate, short

TITLE = "{model} on {bench}: methods compared"
# Tables by task and by input length: a metric and its heading.
BY_GROUP = {
    "speedup": "Speedup over vanilla",
    "compression_rate": "Compression rate",
    "mean_acceptance_length": "Acceptance length",
    **{f"{CTAR}{w}": f"CTAR({w})" for w in POSITIONS},
}
SECTIONS = {
    f"{heading} by {named}": (group, metric)
    for group, named in (("by_task", "task"), ("by_length", "input length"))
    for metric, heading in BY_GROUP.items()
} | {"Speedup by Spec-Bench's own formula": ("by_task", "spec_bench_speedup")}
# Columns for which a terminal of 80 has no room.
WIDE = ["95% vs hf", "accepted", *(f"CTAR({w})" for w in POSITIONS), "params", "memory", "training"]
SPEEDUPS = "speedup: of the whole time, prompts included; decoding: from the first token on."
Comparison = dict[str, Any]
Method = dict[str, Any]  # an entry of a comparison's `methods`
Question = dict[str, Any]  # an entry of `by_question` in a summary


def compare(folder: Path) -> Comparison | None:
    """All finished evaluations below `folder`, the fastest first; None where there is none. Errors:
    `ConfigError` where they were not asked the same in the same way."""
    summaries = summaries_in(folder)
    if not summaries:
        return None
    first, *others = summaries
    settings = shared(summaries[first])
    for name in others:
        if difference := differences(settings, shared(summaries[name])):
            raise ConfigError(
                f"'{name}' and '{first}' in '{folder}' cannot be compared, since '{first}' was run "
                f"with other settings: {difference}. Move one of them elsewhere."
            )
    methods = [_method(name, summary) for name, summary in summaries.items()]
    speeds = ("speedup", "tokens_per_second")
    methods.sort(key=lambda method: [-(method["overall"][name] or 0.0) for name in speeds])
    by_question = {m["name"]: summaries[m["name"]]["by_question"] for m in methods}
    about = max(summaries.values(), key=lambda summary: summary["questions"])
    return {
        **{key: about[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "turns": about["lossless"]["turns"],
        "settings": settings,
        "methods": methods,
        "paired": [compare_pair(*pair) for pair in itertools.combinations(by_question.items(), 2)],
    }


def summaries_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Of all finished evaluations below a folder, by their places there; not a job's baselines."""
    summaries: dict[str, dict[str, Any]] = {}
    names = [baseline.value for baseline in Baseline]
    for file in sorted(folder.rglob(SUMMARY)):
        place = file.parent
        of_job = place.parent != folder and (place.parent / SUMMARY).exists()
        if place.name in names and of_job:
            continue
        summary = json.loads(file.read_text(encoding="utf-8"))
        name = place.relative_to(folder).as_posix() if place != folder else summary["drafter"]
        summaries.setdefault(name, summary)
    return summaries


def _method(name: str, summary: dict[str, Any]) -> Method:
    """A method's part of the comparison; its forks are counted."""
    forks = dict(Counter(fork["label"] for fork in summary["lossless"]["forks"]))
    common = shared(summary)
    return {
        "name": name,
        **{key: summary[key] for key in ("overall", "by_task", "drafter_cost")},
        "by_length": summary.get("by_length", {}),  # earlier summaries have none
        "lossless": summary["lossless"] | {"forks": forks},
        "settings": {k: v for k, v in summary["settings"].items() if k not in common},
        "provenance": summary["provenance"],
    }


def compare_pair(
    row: tuple[str, Sequence[Question]], column: tuple[str, Sequence[Question]]
) -> dict[str, Any]:
    """Two methods on the questions that both answered: how many times as fast `row` is as `column`.
    That is the ratio of their speedups, since jobs of a sweep have each a vanilla of its own time;
    None without vanilla."""
    of_column = {question["question_id"]: question for question in column[1]}
    both = [(q, of_column[q["question_id"]]) for q in row[1] if q["question_id"] in of_column]
    names = ("vanilla_paired_seconds", "paired_seconds")
    fours = [[question[name] for question in pair for name in names] for pair in both]
    value, ends = None, None
    if fours and not any(None in four for four in fours):
        value, ends = estimated(np.array(fours), lambda x: ratio(x[..., :2]) / ratio(x[..., 2:]))
    result = {"row": row[0], "column": column[0], "questions": len(both)}
    return result | {"speed_ratio": value, "speed_ratio_ci95": ends}


def write(comparison: Comparison, folder: Path) -> None:
    """`comparison.json`, `report.md` and its plot."""
    write_json(folder / "comparison.json", comparison)
    (folder / "report.md").write_text(markdown(comparison), encoding="utf-8")
    # a drafter's settings have a line of their own
    bars = [(m["name"].replace(",", "\n", 1), m["overall"]) for m in comparison["methods"]]
    subtitle = "{model} on {bench}, {dtype}, {device}".format(**comparison)
    plots.speedup_bars(bars, subtitle, bars[0][0]).savefig(folder / "speedup.png", dpi=150)


def markdown(comparison: Comparison, image: str = "speedup.png") -> str:
    """The whole report; `image` is where the plot lies, from where it is read."""
    methods, pairs = comparison["methods"], pair_table(comparison["paired"])
    parts = [
        f"# {TITLE.format(**comparison)}",
        size(comparison),
        "docs/evaluation.md says what the columns mean. Intervals are at 95%.",
        tables.markdown(rows_of(methods)),
        f"![speedup by method]({image})",
        conclusion(comparison),
        f"## Speed, row over column\n\n{tables.markdown(pairs)}" if pairs else "",
    ]
    for heading, (group, metric) in SECTIONS.items():
        rows = by_group(methods, group, metric)
        parts += [f"## {heading}", tables.markdown(rows)] if rows else []
    parts += ["## Provenance", listed(provenance_lines(comparison))]
    return "\n\n".join(filter(None, parts)) + "\n"


def show(comparison: Comparison, console: Console) -> None:
    """The main table in 80 columns, and what it comes to in a line that can be copied whole."""
    rows = rows_of(comparison["methods"])
    for row in rows:
        row["method"] = row["method"].replace(",", " ")  # each setting may have a line
        for heading in WIDE:
            del row[heading]
    caption = f"{size(comparison)} {SPEEDUPS}"
    console.print(tables.terminal(rows, TITLE.format(**comparison), caption))
    if sentence := conclusion(comparison):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def rows_of(methods: Sequence[Method]) -> list[Row]:
    """A row a method; so do the functions below."""
    return [
        {"method": method["name"]}
        | cells(method["overall"])
        | {
            "params": short(method["drafter_cost"]["parameters"]),
            "memory": f"{short(method['drafter_cost']['bytes'])}B",
            "lossless": _lossless(**method["lossless"]),
            "training": ", ".join(
                f"{name.replace('_', ' ')}: {value if isinstance(value, str) else short(value)}"
                for name, value in method["drafter_cost"]["training"].items()
            )
            or "none",
        }
        for method in methods
    ]


def by_group(methods: Sequence[Method], group: str, metric: str) -> list[Row]:
    """One metric of every method, `by_task` or `by_length`; no rows where there is none."""
    groups: list[dict[str, Any]] = [method.get(group, {}) for method in methods]
    names = max(map(list, groups), key=len)
    parts = [each | {"overall": m["overall"]} for each, m in zip(groups, methods, strict=True)]
    values = [results.get(metric) for part in parts for results in part.values()]
    if not names or set(values) == {None}:
        return []
    same = 1.0 if "speedup" in metric else None
    return [
        {"method": method["name"]}
        | {
            name: estimate(results.get(metric), results.get(f"{metric}_ci95"), same)
            for name in [*names, "overall"]
            for results in [part.get(name, {})]
        }
        for method, part in zip(methods, parts, strict=True)
    ]


def pair_table(pairs: Sequence[dict[str, Any]]) -> list[Row]:
    """Row over column; the upper half says it all."""
    values = {
        (pair["row"], pair["column"]): estimate(pair["speed_ratio"], pair["speed_ratio_ci95"], 1.0)
        for pair in pairs
    }
    columns = dict.fromkeys(column for _, column in values)
    return [
        {"": row} | {column: values.get((row, column), "") for column in columns}
        for row in dict.fromkeys(row for row, _ in values)
    ]


def _lossless(identical: int | None, turns: int, forks: dict[str, int], **_: Any) -> str:
    """Turns that are vanilla's, of all, with the bugs where there are any."""
    bugs = f", bugs: {forks['bug']}" if "bug" in forks else ""
    return "-" if identical is None else f"{identical}/{turns}{bugs}"


def size(comparison: Comparison) -> str:
    """What was asked, and who answered but a part of it."""
    settings = comparison["settings"]
    temperature = settings["sampling.temperature"]
    parts = [
        f"{comparison['questions']} questions, {comparison['turns']} turns, at most "
        f"{settings['max_new_tokens']} new tokens, "
        f"{f'temperature {temperature}' if temperature else 'greedy'}, batch 1, "
        f"{comparison['dtype']} on {comparison['device']}."
    ]
    for method in comparison["methods"]:
        if (count := method["overall"]["questions"]) < comparison["questions"]:
            parts.append(f"{method['name']} answered {count} of them and is compared on these.")
    return " ".join(parts)


def conclusion(comparison: Comparison) -> str:
    """Which drafter is the fastest, and what it does not differ from; empty if there is none, or no
    vanilla."""
    baselines = AGAIN, *(baseline.value for baseline in Baseline)
    drafters = (method for method in comparison["methods"] if method["name"] not in baselines)
    fastest = next(drafters, None)
    if fastest is None or fastest["overall"]["speedup"] is None:
        return ""
    name, limits = fastest["name"], {"vanilla": fastest["overall"]["speedup_ci95"]}
    for pair in comparison["paired"]:
        row, column, ends = pair["row"], pair["column"], pair["speed_ratio_ci95"]
        if name in (row, column) and AGAIN not in (row, column):
            other = column if row == name else row
            limits[other] = ends if row == name or ends is None else [1 / ends[1], 1 / ends[0]]
    if None in limits.values():
        return f"{name} was the fastest drafter; a single question does not show which is."
    alike = [other for other, (low, high) in limits.items() if low <= 1 <= high]
    faster = [other for other, (_, high) in limits.items() if high < 1]
    differs = f"does not differ from {', '.join(alike)}" if alike else "differs from all others"
    beaten = f", but {', '.join(faster)} is faster" if faster else ""
    return f"{name} is the fastest drafter and, on these questions, {differs}{beaten}."


def provenance_lines(comparison: Comparison) -> Iterator[str]:
    """What jobs have in common once; where they differ, all that there is."""
    methods = comparison["methods"]
    about = [method["provenance"] for method in methods]
    yield from dict.fromkeys(f"`{each['command']}`" for each in about)
    yield from dict.fromkeys(line for each in about for line in circumstances(each))
    yield assigned(comparison["settings"])
    for method, each in zip(methods, about, strict=True):
        settings = assigned(method["settings"])
        yield f"`{method['name']}`: git {each['git_revision']}, {each['time']}; {settings}"


def circumstances(about: dict[str, Any]) -> Iterator[str]:
    """Versions and hardware, a line each."""
    yield ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    yield describe_machine(about)


def assigned(settings: dict[str, Any]) -> str:
    """Settings as they are written on the command line."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def listed(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)
