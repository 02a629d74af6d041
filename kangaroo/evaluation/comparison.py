"""Methods side by side: `comparison.json`, `report.md` and plots from the summaries of a folder.

Methods of one run took turns on every question. Those of the jobs of a sweep were timed against
baselines of their own, so that speedups can be compared even where the machine was slower at one
time than at another; tokens/s cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kangaroo.evaluation import plots, report, statistics
from kangaroo.evaluation.metrics import Place, cells, definitions
from kangaroo.evaluation.plots import groups, tasks
from kangaroo.evaluation.records import AGAIN, BASELINES, SUMMARY, write_json
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import changes, machine
from kangaroo.utils.tables import Row, estimate, number, short

ROW = (
    "**method**: one whose evaluation is complete, the fastest first. Where one failed or is not "
    "finished there is no row. Jobs of a sweep ran one after the other: where the machine was not "
    "equally free, compare speedups, not tokens/s."
)
SPEEDUPS = "speedup: of the whole time, prompts included; decoding: from the first token on."
PAIRED = (
    "**row over column**: how many times as fast the row's method is, with the 95% interval of "
    "that ratio: a bootstrap in which both have the same questions. The intervals of two speedups "
    "may overlap where this one says which is faster. Where it contains 1 (of the compression rate "
    "0), no difference is shown. Each interval holds by itself: of twenty pairs that do not "
    "differ, about one seems to."
)
COST = (
    "**params**: weights that the method has beyond the target's; what it shares is not counted.",
    "**memory**: what the method held beyond the target and its KV cache, at the most, after any "
    "question: weights, copied rows of the head, its own caches, datastores.",
    "**lossless**: turns whose text is vanilla's token for token, of all turns. A **bug** is a "
    "fork that rounding does not explain; transformers' own modules round differently.",
    "**training**: what it took to make the method for this target.",
)
Comparison = dict[str, Any]
Method = dict[str, Any]  # an entry of a comparison's `methods`


# --- from summaries to a comparison


def compare(folder: Path, names: Collection[str] | None = None) -> Comparison | None:
    """All finished evaluations below `folder`, the fastest first; None where there is none.

    Args:
        names: Only those of these names are compared; None compares all.

    Errors: `ConfigError` where they were not asked the same in the same way; names the settings.
    """
    summaries = {k: v for k, v in summaries_in(folder).items() if names is None or k in names}
    if not summaries:
        return None
    first, *others = summaries
    settings = shared(summaries[first])
    for name in others:
        if difference := changes(settings, shared(summaries[name])):
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
        "paired": statistics.compare_all(by_question),
        "paired_by_task": paired_by_task(methods, by_question),
    }


def summaries_in(folder: Path) -> dict[str, dict[str, Any]]:
    """Of all finished evaluations below a folder, by their places there.

    Errors: `ConfigError` where an earlier version of this project wrote one.
    """
    summaries = {}
    for file in sorted(folder.rglob(SUMMARY)):
        summary = json.loads(file.read_text(encoding="utf-8"))
        if "by_question" not in summary:
            raise ConfigError(
                f"'{file}' was written by an earlier version, without what paired comparisons "
                "need. Run its command again: it is written again from its records."
            )
        summaries[file.parent.relative_to(folder).as_posix()] = summary
    return summaries


def shared(summary: dict[str, Any]) -> dict[str, Any]:
    """Settings that methods must have in common: all but the drafter's."""
    return {k: v for k, v in summary["settings"].items() if k.split(".")[0] != "drafter"}


def _method(name: str, summary: dict[str, Any]) -> Method:
    """A method's part of the comparison; its forks are counted."""
    labels = [fork["label"] for fork in summary["lossless"]["forks"]]
    forks = {label: labels.count(label) for label in dict.fromkeys(labels)}
    common = shared(summary)
    return {
        "name": name,
        **{key: summary[key] for key in ("overall", "by_task", "drafter_cost")},
        "lossless": summary["lossless"] | {"forks": forks},
        "settings": {k: v for k, v in summary["settings"].items() if k not in common},
        "provenance": summary["provenance"],
    }


def drafters(methods: Sequence[Method]) -> list[Method]:
    """All methods but the baselines."""
    return [m for m in methods if m["name"] not in (*BASELINES.values(), AGAIN)]


def paired_by_task(
    methods: Sequence[Method], by_question: dict[str, list[statistics.Question]]
) -> list[dict[str, Any]]:
    """The fastest drafter against each of the others, task by task and overall."""
    fastest, *others = [method["name"] for method in drafters(methods)] or [""]
    pairs = []
    for other in others:
        for task in tasks(methods):
            of_task = [
                (name, [q for q in by_question[name] if task in (q["task"], "overall")])
                for name in (fastest, other)
            ]
            pairs.append({"task": task} | statistics.compare_pair(*of_task))
    return pairs


# --- the files


def write(comparison: Comparison, folder: Path) -> None:
    """`comparison.json`, `report.md` and its plot."""
    write_json(folder / "comparison.json", comparison)
    (folder / "report.md").write_text(markdown(comparison), encoding="utf-8")
    plots.speedup_of_methods(comparison).savefig(folder / "speedup.png", dpi=150)


def markdown(comparison: Comparison, introduction: str | None = None, images: str = "") -> str:
    """The whole report.

    Args:
        introduction: before the tables.
        images: what the plot's name begins with, from where the Markdown is read.
    """
    methods = comparison["methods"]
    parts = [
        f"# {title(comparison)}",
        size(comparison),
        *([introduction] if introduction else []),
        tables.markdown(rows_of(methods, Place.methods)),
        f"![speedup by method]({images}speedup.png)",
        *differences(comparison),
        "## Speedup over vanilla by task",
        tables.markdown(by_task(methods, "speedup")),
        "## Compression rate by task",
        tables.markdown(by_task(methods, "compression_rate")),
        "## Speedup by Spec-Bench's own formula",
        tables.markdown(by_task(methods, "spec_bench_speedup")),
        "## Lossless",
        *(lossless_sentence(method, comparison) for method in methods),
        "## Conclusion",
        *sentences(comparison),
        "## How to read this",
        report.listed([ROW, PAIRED, *definitions(Place.methods), *COST]),
        "## Provenance",
        report.listed(provenance_lines(comparison)),
    ]
    return "\n\n".join(parts) + "\n"


def show(comparison: Comparison, console: Console) -> None:
    """The main table, and what it comes to in lines that can be copied whole."""
    console.print(terminal_table(comparison))
    for sentence in sentences(comparison):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def terminal_table(comparison: Comparison) -> Table:
    """The main table, for a rich console of 80 columns."""
    rows = rows_of(comparison["methods"], Place.methods_terminal)
    for row, label in zip(rows, labels([row["method"] for row in rows]), strict=True):
        row["method"] = label
        del row["training"], row["params"], row["memory"]  # 80 columns have no room for them
    return tables.terminal(rows, title(comparison), f"{size(comparison)} {SPEEDUPS}")


def labels(names: Sequence[str]) -> list[str]:
    """Of names such as `kangaroo,steps=4` the drafters with the settings that differ, a space
    apart: where a line is too short, each gets one.
    """
    parts = [re.split(r",(?=[\w.]+=)", name) for name in names]
    rows: dict[str, list[list[str]]] = {}
    for drafter, *settings in parts:
        rows.setdefault(drafter, []).append(settings)
    return [
        " ".join([drafter, *(s for s in settings if any(s not in x for x in rows[drafter]))])
        for drafter, *settings in parts
    ]


# --- tables


def rows_of(methods: Sequence[Method], place: Place) -> list[Row]:
    """A row a method; so do the functions below."""
    return [
        {"method": method["name"]}
        | cells(method["overall"], place)
        | (ctars(method["overall"]) if place is Place.methods else {})
        | {
            "params": short(method["drafter_cost"]["parameters"]),
            "memory": f"{short(method['drafter_cost']['bytes'])}B",
            "lossless": lossless_cell(method["lossless"]),
            "training": ", ".join(
                f"{name.replace('_', ' ')}: {value if isinstance(value, str) else short(value)}"
                for name, value in method["drafter_cost"]["training"].items()
            )
            or "none",
        }
        for method in methods
    ]


def ctars(results: dict[str, Any]) -> Row:
    """Of the first draft tokens; 0 beyond the most that were ever accepted, "-" without drafts."""
    drafts, ctar = results["acceptance_rate"] is not None, [*results["ctar"], 0.0, 0.0, 0.0]
    return {f"CTAR({w + 1})": number(ctar[w] if drafts else None) for w in range(3)}


def by_task(methods: Sequence[Method], metric: str) -> list[Row]:
    """One metric of every method under every task, with its interval where there is one."""
    results = {method["name"]: dict(groups(method)) for method in methods}
    return [
        {"method": name}
        | {
            task: estimate(m.get(metric), m.get(f"{metric}_ci95"), same=1.0)
            for task in tasks(methods)
            for m in [of_method.get(task, {})]
        }
        for name, of_method in results.items()
    ]


def differences(comparison: Comparison) -> list[str]:
    """The paired comparisons, where there are two methods or more."""
    parts = []
    if pairs := comparison["paired"]:
        parts.append("## Speed, row over column")
        parts.append(tables.markdown(pair_table(pairs, "speed_ratio", same=1.0)))
        parts.append("## Compression rate, row less column")
        parts.append(tables.markdown(pair_table(pairs, "cr_difference", same=0.0)))
    if pairs := comparison["paired_by_task"]:
        parts.append(f"## Speed of {pairs[0]['row']} over each of the others, by task")
        over = [pair | {"row": pair["column"], "column": pair["task"]} for pair in pairs]
        parts.append(tables.markdown(pair_table(over, "speed_ratio", same=1.0, corner="over")))
    return parts


def pair_table(
    pairs: Sequence[dict[str, Any]], name: str, same: float, corner: str = ""
) -> list[Row]:
    """Row over column, or row less column; the upper half says it all.

    Args:
        pairs: what `statistics.compare_all` returns.
        name: "speed_ratio" or "cr_difference".
        same: its value where there is no difference.
        corner: the heading of the rows' names.
    """
    rows = dict.fromkeys(pair["row"] for pair in pairs)
    columns = dict.fromkeys(pair["column"] for pair in pairs)
    values = {
        (pair["row"], pair["column"]): estimate(pair[name], pair[f"{name}_ci95"], same)
        for pair in pairs
    }
    return [
        {corner: row} | {column: values.get((row, column), "") for column in columns}
        for row in rows
    ]


# --- in words


def title(comparison: Comparison) -> str:
    """The table's title."""
    return f"{comparison['model']} on {comparison['bench']}: methods compared"


def size(comparison: Comparison) -> str:
    """What was asked, who answered but a part of it, and what the same method differs by from
    itself, where that was measured.
    """
    parts = [report.size(comparison | {"lossless": {"turns": comparison["turns"]}})]
    for method in comparison["methods"]:
        if (count := method["overall"]["questions"]) < comparison["questions"]:
            parts.append(f"{method['name']} answered {count} of them and is compared on these.")
    if again := statistics.noise_floor(comparison["methods"]):
        results = cells(again["overall"], Place.methods)
        parts.append(
            f"Noise floor: vanilla decoded once more is {results['speedup']} times as fast as "
            f"vanilla ({results['95%']})."
        )
    return " ".join(parts)


def lossless_cell(lossless: dict[str, Any]) -> str:
    """Turns that are vanilla's, of all, with the bugs where there are any."""
    if lossless["identical"] is None:
        return "-"
    text, bugs = f"{lossless['identical']}/{lossless['turns']}", lossless["forks"].get("bug")
    return f"{text}, bugs: {bugs}" if bugs else text


def lossless_sentence(method: Method, comparison: Comparison) -> str:
    """How many of a method's texts are vanilla's, and how many forks of each kind there are."""
    lossless = method["lossless"]
    if lossless["identical"] is None:
        about = {"lossless": lossless, "settings": comparison["settings"]}
        return f"{method['name']}: {report.verdict(about)}"
    forks = ", ".join(f"{label}: {n}" for label, n in lossless["forks"].items()) or "none"
    turns = "{identical} of {turns} turns".format(**lossless)
    return f"{method['name']}: {turns} are vanilla's, token for token; forks: {forks}."


def sentences(comparison: Comparison) -> list[str]:
    """What a comparison comes to: the winner, and what of it may be cited; none where only
    baselines were measured.
    """
    methods = drafters(comparison["methods"])
    return [*winner(comparison, methods[0]), citation(comparison, methods[0])] if methods else []


def winner(comparison: Comparison, fastest: Method) -> list[str]:
    """Which drafter is the fastest, and from which other methods it does not differ; nothing where
    vanilla did not run.
    """
    if fastest["overall"]["speedup"] is None:
        return []
    name = fastest["name"]
    limits = {"vanilla": fastest["overall"]["speedup_ci95"]}
    for pair in comparison["paired"]:
        ends = pair["speed_ratio_ci95"]
        if pair["row"] == name and pair["column"] != AGAIN:
            limits[pair["column"]] = ends
        elif pair["column"] == name and pair["row"] != AGAIN:
            limits[pair["row"]] = ends and [1 / end for end in reversed(ends)]
    if None in limits.values():
        return [f"{name} was the fastest drafter; a single question does not show which is."]
    alike = [other for other, (low, high) in limits.items() if low <= 1 <= high]
    faster = [other for other, (_, high) in limits.items() if high < 1]
    differs = f"does not differ from {', '.join(alike)}" if alike else "differs from all others"
    beaten = f", but {', '.join(faster)} is faster" if faster else ""
    return [f"{name} is the fastest drafter and, on these questions, {differs}{beaten}."]


def citation(comparison: Comparison, method: Method) -> str:
    """A result with all that it holds for."""
    overall, about = method["overall"], method["provenance"]
    result = f"writes {overall['tokens_per_second']:.1f} tokens/s"
    if overall["speedup"] is not None:
        times = f"{overall['speedup']:.2f} times as fast as vanilla decoding"
        result = f"is {times}{report.within(overall['speedup_ci95'])}"
    its_part = comparison | {"questions": overall["questions"], "lossless": method["lossless"]}
    revision = about["git_revision"] or f"version {about['versions'].get('kangaroo')}"
    return (
        f"To cite: {method['name']} {result} with {comparison['model']} on {comparison['bench']} "
        f"({report.size(its_part).rstrip('.')}; {machine(about)}; Kangaroo {revision})."
    )


def provenance_lines(comparison: Comparison) -> Iterator[str]:
    """What jobs have in common once; where they differ, all that there is."""
    methods = comparison["methods"]
    about = [method["provenance"] for method in methods]
    yield from dict.fromkeys(f"`{each['command']}`" for each in about)
    yield from dict.fromkeys(line for each in about for line in report.circumstances(each))
    yield report.assigned(comparison["settings"])
    for method, each in zip(methods, about, strict=True):
        settings = report.assigned(method["settings"])
        yield f"`{method['name']}`: git {each['git_revision']}, {each['time']}; {settings}"
