"""Methods side by side: `comparison.json`, `report.md` and plots from the summaries of a folder.

Each method was timed against its own baselines, question by question, so that speedups can be
compared even where the machine was slower at one time than at another; tokens/s cannot.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from kangaroo.errors import ConfigError
from kangaroo.evaluation import comparison_plots as plots
from kangaroo.evaluation import report
from kangaroo.evaluation.records import SUMMARY, write_json
from kangaroo.provenance import changes

WIDTHS = (1, 2, 3)  # of CTAR
DEFINITIONS = {
    "Row": (
        "a method whose evaluation is complete, the fastest first. Where one failed or is not "
        "finished there is none."
    ),
    "Speedup": report.DEFINITIONS["Speedup"],
    "vs hf": (
        "the same against `generate` of transformers, which tells no rounds: a text of its that is "
        "longer than the method's counts in proportion."
    ),
    **{name: report.DEFINITIONS[name] for name in ("CR", "CTAR(w)", "Accepted")},
    "tokens/s": (
        "all tokens over all seconds, prefill included. Jobs ran one after the other: where the "
        "machine was not equally free, compare speedups instead."
    ),
    "Params": "weights that the method has beyond the target's; what it shares is not counted.",
    "Memory": (
        "what the method held beyond the target and its KV cache, at the most, after any question: "
        "weights, copied rows of the head, its own caches, datastores."
    ),
    "Lossless": (
        "turns whose text is vanilla's token for token, of all turns. A **bug** is a fork that "
        "rounding does not explain."
    ),
    "Training": "what it took to make the method for this target.",
}


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
    about = summaries[first]
    return {
        **{key: about[key] for key in ("model", "bench", "dtype", "device", "questions")},
        "turns": about["lossless"]["turns"],
        "settings": asked,
        "methods": sorted((method(*pair) for pair in summaries.items()), key=slowness),
    }


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
    overall = method["overall"]
    return -(overall["speedup"] or 0.0), -overall["tokens_per_second"]


def write(found: dict[str, Any], folder: Path) -> None:
    """`comparison.json`, `report.md` and its plots."""
    write_json(folder / "comparison.json", found)
    (folder / "report.md").write_text(markdown(found), encoding="utf-8")
    for name, plot in plots.PLOTS.items():
        plot(found).savefig(folder / f"{name}.png", dpi=150)


def terminal_table(found: dict[str, Any]) -> Table:
    """The main table, for a rich console of 80 columns."""
    heads, *rows = methods(found)
    left_out = ("accepted", "tokens/s", "training", "95% vs hf", *(f"CTAR({w})" for w in WIDTHS))
    shown = [i for i, head in enumerate(heads) if head not in left_out]
    result = report.terminal(title(found), asked(found), [heads[i] for i in shown])
    for row in rows:
        result.add_row(*(row[i] for i in shown))
    return result


def markdown(found: dict[str, Any]) -> str:
    """The whole report."""
    parts = [
        f"# {title(found)}",
        asked(found),
        report.markdown_table(methods(found)),
        "![speedup](speedup.png)",
        "## Speedup over vanilla by task",
        report.markdown_table(by_task(found, "speedup")),
        "![speedup by task](speedup_by_task.png)",
        "## Compression rate by task",
        report.markdown_table(by_task(found, "compression_rate")),
        "![compression rate by task](cr_by_task.png)",
        "## How to read this",
        report.defined(DEFINITIONS),
        "## Provenance",
        "\n".join(f"- {line}" for line in provenance_lines(found)),
    ]
    return "\n\n".join(parts) + "\n"


def title(found: dict[str, Any]) -> str:
    return "{model} on {bench}: methods compared".format(**found)


def asked(found: dict[str, Any]) -> str:
    return report.asked(found | {"lossless": {"turns": found["turns"]}})


def methods(found: dict[str, Any]) -> list[list[str]]:
    """Heads, then a row a method; so does `by_task`."""
    heads = [
        "method", "speedup", "95%", "vs hf", "95% vs hf", "CR", *(f"CTAR({w})" for w in WIDTHS),
        "accepted", "tokens/s", "params", "memory", "lossless", "training",
    ]  # fmt: skip
    return [heads, *(_row(method) for method in found["methods"])]


def _row(method: dict[str, Any]) -> list[str]:
    m, cost = method["overall"], method["drafter_cost"]
    return [
        method["name"],
        report.number(m["speedup"]),
        report.span(m),
        report.number(m["hf_speedup"]),
        report.span(m, "hf_speedup"),
        report.number(m["compression_rate"]),
        *(report.number(reached(m, w)) for w in WIDTHS),
        report.share(m["acceptance_rate"]),
        report.number(m["tokens_per_second"], 1),
        short(cost["parameters"]),
        f"{short(cost['bytes'])}B",
        lossless(method["lossless"]),
        training(cost["training"]),
    ]


def by_task(found: dict[str, Any], figure: str) -> list[list[str]]:
    tasks = plots.tasks(found)
    rows = [
        [method["name"], *(report.number(plots.figure_of(method, task, figure)) for task in tasks)]
        for method in found["methods"]
    ]
    return [["method", *tasks], *rows]


def reached(m: dict[str, Any], w: int) -> float | None:
    """CTAR(w): 0 beyond the most that were ever accepted, None if nothing is drafted."""
    if m["acceptance_rate"] is None:
        return None
    return m["ctar"][w - 1] if w <= len(m["ctar"]) else 0.0


def short(value: float) -> str:
    """Three digits and a prefix: 1.27M."""
    prefix = ""
    for larger in "kMG":
        if value < 999.5:
            break
        value, prefix = value / 1000, larger
    return f"{value:.3g}{prefix}"


def lossless(found: dict[str, Any]) -> str:
    if found["identical"] is None:
        return "-"
    text, bugs = f"{found['identical']}/{found['turns']}", found["forks"].get("bug")
    return f"{text}, bugs: {bugs}" if bugs else text


def training(told: dict[str, Any]) -> str:
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
    yield report.listed(found["settings"])
    for method, one in zip(found["methods"], about, strict=True):
        settings = report.listed(method["settings"])
        yield f"`{method['name']}`: git {one['git_revision']}, {one['time']}; {settings}"
