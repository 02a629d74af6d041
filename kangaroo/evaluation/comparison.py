"""Methods side by side: `comparison.json`, `report.md` and plots from the summaries of a folder.

Methods of one run took turns on every question. Those of the jobs of a sweep were timed against
baselines of their own, so that speedups can be compared even where the machine was slower at one
time than at another; tokens/s cannot.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from kangaroo.evaluation import comparison_plots as plots
from kangaroo.evaluation import paired, report
from kangaroo.evaluation.conclusion import sentences
from kangaroo.evaluation.metrics import Place, cells, definitions
from kangaroo.evaluation.records import SUMMARY, write_json
from kangaroo.utils import tables
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.provenance import changes
from kangaroo.utils.tables import Row, number, short

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


def compare(folder: Path) -> dict[str, Any] | None:
    """All finished evaluations below `folder`, the fastest first; None where there is none.

    Errors: `ConfigError` where they were not asked the same in the same way; names the settings.
    """
    summaries = {
        file.parent.relative_to(folder).as_posix(): json.loads(file.read_text(encoding="utf-8"))
        for file in sorted(folder.rglob(SUMMARY))
    }
    if not summaries:
        return None
    first, *others = summaries
    asked = shared(summaries[first])
    for name in others:
        if difference := changes(asked, shared(summaries[name])):
            raise ConfigError(
                f"'{name}' and '{first}' in '{folder}' cannot be compared, since '{first}' was run "
                f"with other settings: {difference}. Move one of them elsewhere."
            )
    about = max(summaries.values(), key=lambda summary: summary["questions"])
    measured = [(method(*found), of_questions(*found, folder)) for found in summaries.items()]
    measured.sort(key=lambda found: slowness(found[0]))
    return {
        **{key: about[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "turns": about["lossless"]["turns"],
        "settings": asked,
        "methods": [one for one, _ in measured],
        "paired": paired.pairs(measured),
    }


def of_questions(name: str, summary: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """A summary's `by_question`.

    Errors: `ConfigError` where an earlier version of this project wrote it without.
    """
    if "by_question" not in summary:
        raise ConfigError(
            f"'{folder / name / SUMMARY}' was written by an earlier version, without what paired "
            "comparisons need. Run its command again: it is written again from its records."
        )
    return summary["by_question"]


def shared(summary: dict[str, Any]) -> dict[str, Any]:
    """Settings that methods must have in common: all but the drafter's."""
    return {k: v for k, v in summary["settings"].items() if k.split(".")[0] != "drafter"}


def method(name: str, summary: dict[str, Any]) -> dict[str, Any]:
    """A method's part of the comparison; its forks are counted."""
    found = summary["lossless"]
    labels = [fork["label"] for fork in found["forks"]]
    own = {k: v for k, v in summary["settings"].items() if k.split(".")[0] == "drafter"}
    return {
        "name": name,
        **{key: summary[key] for key in ("overall", "by_task", "drafter_cost")},
        "lossless": found
        | {"forks": {label: labels.count(label) for label in dict.fromkeys(labels)}},
        "settings": own,
        "provenance": summary["provenance"],
    }


def slowness(method: dict[str, Any]) -> tuple[float, float]:
    """What methods are sorted by: the speedup, then tokens/s."""
    overall = method["overall"]
    return -(overall["speedup"] or 0.0), -overall["tokens_per_second"]


def write(found: dict[str, Any], folder: Path) -> None:
    """`comparison.json`, `report.md` and its plots."""
    write_json(folder / "comparison.json", found)
    (folder / "report.md").write_text(markdown(found), encoding="utf-8")
    for name, plot in plots.PLOTS.items():
        plot(found).savefig(folder / f"{name}.png", dpi=150)


def show(found: dict[str, Any], console: Console) -> None:
    """The main table, and what it comes to in lines that can be copied whole."""
    console.print(terminal_table(found))
    for sentence in sentences(found):
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)


def terminal_table(found: dict[str, Any]) -> Table:
    """The main table, for a rich console of 80 columns."""
    rows = methods(found, Place.methods_terminal)
    common, names = labels([row["method"] for row in rows])
    for row, name in zip(rows, names, strict=True):
        row["method"] = name
        del row["training"], row["params"], row["memory"]  # 80 columns have no room for them
    told = title(found, common or "methods")
    return tables.terminal(rows, told, f"{asked(found)} {SPEEDUPS}")


def labels(names: Sequence[str]) -> tuple[str, list[str]]:
    """What all methods have in common, and what differs. Of a drafter's settings, as in
    `kangaroo,steps=4`, those are left out that all its rows share, and its name where there is no
    other. Settings are a space apart: where a line is too short, each gets one.
    """
    parts = [re.split(r",(?=[\w.]+=)", name) for name in names]
    shown = []
    for drafter, *settings in parts:
        rows = [others for name, *others in parts if name == drafter]
        differing = [s for s in settings if any(s not in others for others in rows)]
        shown.append([drafter, *differing])
    if len({drafter for drafter, *_ in shown}) > 1 or any(len(label) == 1 for label in shown):
        return "", [" ".join(label) for label in shown]
    common = [part for part in parts[0] if part not in shown[0][1:]]
    return ",".join(common), [" ".join(differing) for _, *differing in shown]


def markdown(found: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        f"# {title(found)}",
        asked(found),
        tables.markdown(methods(found, Place.methods)),
        "![speedup](speedup.png)",
        *differences(found),
        "## Speedup over vanilla by task",
        tables.markdown(by_task(found, "speedup")),
        "![speedup by task](speedup_by_task.png)",
        "## Compression rate by task",
        tables.markdown(by_task(found, "compression_rate")),
        "![compression rate by task](cr_by_task.png)",
        "## Conclusion",
        *sentences(found),
        "## How to read this",
        report.listed([ROW, PAIRED, *definitions(Place.methods), *COST]),
        "## Provenance",
        report.listed(provenance_lines(found)),
    ]
    return "\n\n".join(parts) + "\n"


def title(found: dict[str, Any], what: str = "methods") -> str:
    """The table's title."""
    return f"{found['model']} on {found['bench']}: {what} compared"


def asked(found: dict[str, Any]) -> str:
    """What the questions were, in words, and who answered but a part of them."""
    parts = (
        f" {one['name']} answered {one['overall']['questions']} of them and is compared on these."
        for one in found["methods"]
        if one["overall"]["questions"] < found["questions"]
    )
    told = report.asked(found | {"lossless": {"turns": found["turns"]}}) + "".join(parts)
    return told + noise(found)


def noise(found: dict[str, Any]) -> str:
    """What the same method differs by from itself, in words; empty where that was not measured."""
    again = paired.noise_floor(found["methods"])
    if again is None:
        return ""
    results = cells(again["overall"], Place.methods)
    return (
        f" Noise floor: vanilla decoded once more is {results['speedup']} times as fast as vanilla "
        f"({results['95%']})."
    )


def differences(found: dict[str, Any]) -> list[str]:
    """The paired comparisons, where there are two methods or more."""
    if not found["paired"]:
        return []
    return [
        "## Speed, row over column",
        tables.markdown(paired.table(found["paired"], "speed_ratio", same=1.0)),
        "## Compression rate, row less column",
        tables.markdown(paired.table(found["paired"], "cr_difference", same=0.0)),
    ]


def methods(found: dict[str, Any], place: Place) -> list[Row]:
    """A row a method; so does `by_task`."""
    return [
        {"method": method["name"]}
        | cells(method["overall"], place)
        | (ctars(method["overall"]) if place is Place.methods else {})
        | {
            "params": short(method["drafter_cost"]["parameters"]),
            "memory": f"{short(method['drafter_cost']['bytes'])}B",
            "lossless": lossless(method["lossless"]),
            "training": training(method["drafter_cost"]["training"]),
        }
        for method in found["methods"]
    ]


def ctars(results: dict[str, Any]) -> Row:
    """Of the first draft tokens; 0 beyond the most that were ever accepted, "-" without drafts."""
    drafts, reached = results["acceptance_rate"] is not None, [*results["ctar"], 0.0, 0.0, 0.0]
    return {f"CTAR({w + 1})": number(reached[w] if drafts else None) for w in range(3)}


def by_task(found: dict[str, Any], metric: str) -> list[Row]:
    """One metric of every method under every task."""
    return [
        {"method": method["name"]}
        | {task: number(plots.value_of(method, task, metric)) for task in plots.tasks(found)}
        for method in found["methods"]
    ]


def lossless(found: dict[str, Any]) -> str:
    """Turns that are vanilla's, of all, with the bugs where there are any."""
    if found["identical"] is None:
        return "-"
    text, bugs = f"{found['identical']}/{found['turns']}", found["forks"].get("bug")
    return f"{text}, bugs: {bugs}" if bugs else text


def training(told: dict[str, Any]) -> str:
    """What it took to make a method (`drafter_cost`), as a cell."""
    parts = (
        f"{name.replace('_', ' ')}: {value if isinstance(value, str) else short(value)}"
        for name, value in told.items()
    )
    return ", ".join(parts) or "none"


def provenance_lines(found: dict[str, Any]) -> Iterator[str]:
    """What jobs have in common once; where they differ, all that there is."""
    about = [method["provenance"] for method in found["methods"]]
    yield from dict.fromkeys(f"`{one['command']}`" for one in about)
    yield from dict.fromkeys(line for one in about for line in report.circumstances(one))
    yield report.assigned(found["settings"])
    for method, one in zip(found["methods"], about, strict=True):
        settings = report.assigned(method["settings"])
        yield f"`{method['name']}`: git {one['git_revision']}, {one['time']}; {settings}"
