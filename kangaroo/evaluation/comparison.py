"""Methods side by side: `comparison.json`, `report.md` and a plot, from the summaries in a folder.

Methods of one run took turns on every question. Each job of a sweep was timed against its own
baselines, so speedups of jobs can be compared, and their tokens/s cannot.
"""

import itertools
import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from kangaroo.evaluation import plots
from kangaroo.evaluation.metrics import CTAR, POSITIONS, cells, estimate
from kangaroo.evaluation.records import AGAIN, SUMMARY, Baseline
from kangaroo.evaluation.summary import shared_settings
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.folders import write_json
from kangaroo.utils.provenance import describe_machine, differences
from kangaroo.utils.ranges import AUTO
from kangaroo.utils.tables import Row, short

COMPARISON = "comparison.json"
PLOT = "speedup.png"
TITLE = "{model} on {bench}: methods compared"
# Metrics that have a table by task and by input length, and their headings.
BY_GROUP = {
    "speedup": "Speedup over vanilla",
    "compression_rate": "Compression rate",
    "mean_acceptance_length": "Acceptance length",
    **{f"{CTAR}{w}": f"CTAR({w})" for w in POSITIONS},
}
SECTIONS = {
    f"{heading} by {group_name}": (group, metric)
    for group, group_name in (("by_task", "task"), ("by_length", "input length"))
    for metric, heading in BY_GROUP.items()
} | {
    "Speedup over vanilla by end of the text": ("by_end", "speedup"),
    "Compression rate by end of the text": ("by_end", "compression_rate"),
    "Speedup by Spec-Bench's own formula": ("by_task", "spec_bench_speedup"),
}
PARTS = "overall", "by_task", "drafter_cost", "by_length", "by_end", "provenance"  # of summaries
# Columns that are left out in a terminal of 80 columns.
WIDE = ["95% vs hf", "accepted", *(f"CTAR({w})" for w in POSITIONS), "params", "memory", "training"]
SELDOM = 0.1  # of a method's rounds
TOLERANCE = 1.05  # what noise alone may add to a speedup
BUSY = 1.25  # of `machine_load`; this process makes up to 1 of it
SPEEDUPS = "speedup: of the whole time, prompts included; decoding: from the first token on."
Comparison = dict[str, Any]
Method = dict[str, Any]  # an entry of a comparison's `methods`
Questions = Sequence[dict[str, Any]]  # `by_question` of a summary


def compare(folder: Path) -> Comparison | None:
    """The finished evaluations in `folder`, fastest first, if any. Errors as in `summaries_in`."""
    summaries = summaries_in(folder)
    if not summaries:
        return None
    methods = [_method(name, summary) for name, summary in summaries.items()]
    speeds = ("speedup", "tokens_per_second")
    methods.sort(key=lambda method: [-(method["overall"][name] or 0.0) for name in speeds])
    by_question = {m["name"]: summaries[m["name"]]["by_question"] for m in methods}
    largest = max(summaries.values(), key=lambda summary: summary["questions"])
    return {
        **{key: largest[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "turns": largest["lossless"]["turns"],
        "settings": shared_settings(largest),
        "methods": methods,
        "paired": [compare_pair(*pair) for pair in itertools.combinations(by_question.items(), 2)],
    }


def summaries_in(folder: Path, free: Collection[str | None] = ()) -> dict[str, dict[str, Any]]:
    """Summaries below a folder by their paths within it, without baselines of a sweep's jobs.
    Errors: `ConfigError` if their shared settings differ, but for the `free` ones."""
    summaries: dict[str, dict[str, Any]] = {}
    baselines = [baseline.value for baseline in Baseline]
    for file in sorted(folder.rglob(SUMMARY)):
        path = file.parent
        if path.name in baselines and path.parent != folder and (path.parent / SUMMARY).exists():
            continue
        summary = json.loads(file.read_text(encoding="utf-8"))
        name = path.relative_to(folder).as_posix() if path != folder else summary["drafter"]
        summaries.setdefault(name, summary)
    first = next(iter(summaries), "")
    for name, summary in summaries.items():
        expected = shared_settings(summaries[first], free)
        if difference := differences(expected, shared_settings(summary, free)):
            raise ConfigError(
                f"'{name}' and '{first}' in '{folder}' cannot be compared, since '{first}' was run "
                f"with other settings: {difference}. Move one of them elsewhere."
            )
    return summaries


def _method(name: str, summary: dict[str, Any]) -> Method:
    forks = dict(Counter(fork["label"] for fork in summary["lossless"]["forks"]))
    shared = shared_settings(summary)
    return {
        "name": name,
        **{key: summary.get(key, {}) for key in PARTS},  # earlier versions may lack some
        "lossless": summary["lossless"] | {"forks": forks},
        "settings": {k: v for k, v in summary["settings"].items() if k not in shared},
    }


def compare_pair(row: tuple[str, Questions], column: tuple[str, Questions]) -> dict[str, Any]:
    """How many times as fast `row` is as `column`, on the questions that both answered: the ratio
    of their speedups, since each job of a sweep has its own vanilla. None without vanilla."""
    by_id = {question["question_id"]: question for question in column[1]}
    both = [(q, by_id[q["question_id"]]) for q in row[1] if q["question_id"] in by_id]
    names = ("vanilla_paired_seconds", "paired_seconds")
    seconds = [[question[name] for question in pair for name in names] for pair in both]
    result = {"row": row[0], "column": column[0], "questions": len(both)}
    if not seconds or any(None in four for four in seconds):
        return result | {"speed_ratio": None, "speed_ratio_ci95": None}
    value, ends = estimate(np.array(seconds), np.divide)
    return result | {"speed_ratio": value, "speed_ratio_ci95": ends}


def write(comparison: Comparison, folder: Path) -> None:
    """Write `comparison.json`, `report.md` and the plot."""
    write_json(folder / COMPARISON, comparison)
    (folder / "report.md").write_text(markdown(comparison), encoding="utf-8")
    # a drafter's settings are on a second line
    bars = [(m["name"].replace(",", "\n", 1), m["overall"]) for m in comparison["methods"]]
    subtitle = "{model} on {bench}, {dtype}, {device}".format(**comparison)
    plots.speedup_bars(bars, subtitle).savefig(folder / PLOT, dpi=150)


def publish(folder: Path, page: Path) -> None:
    """Write a finished report as a page of docs: its numbers beside it, its plot in `img`."""
    comparison = json.loads((folder / COMPARISON).read_text(encoding="utf-8"))
    image = Path("img", f"{page.stem}_{PLOT}")
    (page.parent / image).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(folder / PLOT, page.parent / image)
    write_json(page.with_suffix(".json"), comparison)
    page.write_text(markdown(comparison, image.as_posix()), encoding="utf-8")


def markdown(comparison: Comparison, image: str = PLOT) -> str:
    """The report; `image` is the plot's path relative to it."""
    methods = comparison["methods"]
    pairs = pair_table(comparison["paired"])
    parts = [
        f"# {TITLE.format(**comparison)}",
        size(comparison),
        "docs/evaluation.md says what the columns mean. Intervals are at 95%.",
        tables.markdown(rows_of(methods)),
        f"![speedup by method]({image})",
        conclusion(comparison),
        bullet_list(notes(comparison)),
        f"## Speed, row over column\n\n{tables.markdown(pairs)}" if pairs else "",
    ]
    for heading, (group, metric) in SECTIONS.items():
        rows = by_group(methods, group, metric)
        parts += [f"## {heading}", tables.markdown(rows)] if rows else []
    parts += ["## Provenance", bullet_list(provenance_lines(comparison))]
    return "\n\n".join(filter(None, parts)) + "\n"


def show(comparison: Comparison, console: Console) -> None:
    """Print the main table in 80 columns, and the conclusion and the notes, each as one line."""
    rows = rows_of(comparison["methods"])
    for row in rows:
        row["method"] = row["method"].replace(",", " ")  # lines may break between settings
        for heading in WIDE:
            del row[heading]
    caption = f"{size(comparison)} {SPEEDUPS}"
    console.print(tables.terminal(rows, TITLE.format(**comparison), caption))
    for sentence in filter(None, (conclusion(comparison), *notes(comparison))):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def rows_of(methods: Sequence[Method]) -> list[Row]:
    """The main table, with a row for each method."""
    rows = []
    for method in methods:
        row = {"method": method["name"]} | cells(method["overall"])
        cost = method["drafter_cost"]
        row |= {"params": short(cost["parameters"]), "memory": f"{short(cost['bytes'])}B"}
        training = [
            f"{name.replace('_', ' ')}: {value if isinstance(value, str) else short(value)}"
            for name, value in cost["training"].items()
        ]
        same, turns, forks = (method["lossless"][x] for x in ("identical", "turns", "forks"))
        reasons = "".join(f", {label}s: {forks[label]}" for label in sorted(forks))
        # transformers' texts are not judged, and rounding alone makes some of them differ
        is_told = same is not None and (same == turns or reasons)
        row["lossless"] = f"{same}/{turns}{reasons}" if is_told else "-"
        rows.append(row | {"training": ", ".join(training) or "none"})
    return rows


def by_group(methods: Sequence[Method], group: str, metric: str) -> list[Row]:
    """One metric of every method by task, length or end; no rows if no method has a value."""
    names = max((list(method.get(group, {})) for method in methods), key=len)
    rows = []
    has_values = False
    for method in methods:
        row = {"method": method["name"]}
        groups = method.get(group, {}) | {"overall": method["overall"]}
        for name in [*names, "overall"]:
            results = groups.get(name, {})
            value = results.get(metric)
            ends = results.get(f"{metric}_ci95")
            row[name] = tables.estimate(value, ends, 1.0 if "speedup" in metric else None)
            has_values |= value is not None
        rows.append(row)
    return rows if names and has_values else []


def pair_table(pairs: Sequence[dict[str, Any]]) -> list[Row]:
    """How many times as fast the row's method is as the column's, each pair once."""
    empty_cells: Row = dict.fromkeys((pair["column"] for pair in pairs), "")
    rows = {pair["row"]: {"": pair["row"]} | empty_cells for pair in pairs}
    for pair in pairs:
        cell = tables.estimate(pair["speed_ratio"], pair["speed_ratio_ci95"], 1.0)
        rows[pair["row"]][pair["column"]] = cell
    return list(rows.values())


def size(comparison: Comparison) -> str:
    """How much was asked under which settings, and which methods answered only a part."""
    settings = comparison["settings"]
    temperature = settings["sampling.temperature"]
    parts = [
        f"{tables.count(comparison['questions'], 'question')}, "
        f"{tables.count(comparison['turns'], 'turn')}, at most "
        f"{settings['max_new_tokens']} new tokens, "
        f"{f'temperature {temperature}' if temperature else 'greedy'}, batch 1, "
        f"{comparison['dtype']} on {comparison['device']}."
    ]
    for method in comparison["methods"]:
        count = method["overall"]["questions"]
        if count < comparison["questions"]:
            parts.append(f"{method['name']} answered {count} of them and is compared on these.")
    return " ".join(parts)


def conclusion(comparison: Comparison) -> str:
    """The fastest drafter and its equals, in a sentence; empty without drafters or vanilla."""
    baselines = AGAIN, *(baseline.value for baseline in Baseline)
    fastest = next((x for x in comparison["methods"] if x["name"] not in baselines), None)
    if fastest is None or fastest["overall"]["speedup"] is None:
        return ""
    name = fastest["name"]
    intervals = {"vanilla": fastest["overall"]["speedup_ci95"]}
    for pair in comparison["paired"]:
        row = pair["row"]
        column = pair["column"]
        ends = pair["speed_ratio_ci95"]
        if name in (row, column) and AGAIN not in (row, column):
            rival = column if row == name else row
            intervals[rival] = ends if row == name or ends is None else [1 / ends[1], 1 / ends[0]]
    if intervals["vanilla"] is None:
        return f"{name} was the fastest drafter; a single question does not show which is."
    measured = {rival: ends for rival, ends in intervals.items() if ends is not None}
    alike = [rival for rival, (low, high) in measured.items() if low <= 1 <= high]
    faster = [rival for rival, (_, high) in measured.items() if high < 1]
    if "vanilla" in faster:
        return f"No drafter pays on these questions: {name} is the fastest, and vanilla is faster."
    differs = f"does not differ from {', '.join(alike)}" if alike else "differs from all others"
    beaten = f", but {', '.join(faster)} is faster" if faster else ""
    return f"{name} is the fastest drafter and, on these questions, {differs}{beaten}."


def notes(comparison: Comparison) -> Iterator[str]:
    """What a reader has to know before the figures are believed, each in a sentence."""
    methods = comparison["methods"]
    for method in methods:
        name = method["name"]
        if name in (baseline.value for baseline in Baseline):
            continue
        overall = method["overall"]
        settings = method["settings"]
        bound = overall["compression_rate"]
        drafted = overall["speculative_decoding"]["num_spec_steps"]
        share = drafted * bound / overall["tokens"]  # of rounds
        if share < SELDOM and settings.get("drafter.name") != "vanilla":
            is_auto = settings.get("drafter.threshold") == AUTO
            reason = ", since one token costs more than it gains here" if is_auto else ""
            yield f"{name} drafted in {share:.0%} of its rounds{reason}: it is nearly vanilla."
        speedup = overall["speedup"] or 0.0
        if speedup > TOLERANCE * bound:
            yield (
                f"{name} cannot be {speedup:.2f} times as fast with {bound:.2f} tokens a round: no "
                "round is shorter than a vanilla step. Measure again on a quiet machine."
            )
    load = max(method["overall"].get("machine_load", 0.0) for method in methods)
    if load > BUSY:
        yield f"The machine was busy: it had {load:.1f} processes for each processor."


def provenance_lines(comparison: Comparison) -> Iterator[str]:
    """Commands, versions, hardware and settings, each once, then a line for each method."""
    methods = comparison["methods"]
    provenances = [method["provenance"] for method in methods]
    yield from dict.fromkeys(f"`{provenance['command']}`" for provenance in provenances)
    yield from dict.fromkeys(line for x in provenances for line in environment_lines(x))
    yield settings_line(comparison["settings"])
    for method, provenance in zip(methods, provenances, strict=True):
        run = f"git {provenance['git_revision']}, {provenance['time']}"
        yield f"`{method['name']}`: {run}; {settings_line(method['settings'])}"


def environment_lines(provenance: dict[str, Any]) -> Iterator[str]:
    """Versions and hardware, one line each."""
    yield ", ".join(f"{name} {x}" for name, x in provenance["versions"].items() if x)
    yield describe_machine(provenance)


def settings_line(settings: dict[str, Any]) -> str:
    """Settings as they are written on the command line."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def bullet_list(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)
