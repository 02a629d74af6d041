"""`report.md` and the table for the terminal, made from a summary."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from kangaroo.evaluation import plots
from kangaroo.evaluation.metrics import Place, cells, definitions
from kangaroo.evaluation.plots import groups
from kangaroo.utils import tables
from kangaroo.utils.provenance import machine
from kangaroo.utils.tables import Row, number

FORK = (
    "**fork**: the first token of a turn that is not vanilla's. The gap says how far below the "
    "best score the lower of the two tokens lies under teacher forcing; a near-tie is within what "
    "rounding does."
)


def write(summary: dict[str, Any], folder: Path) -> None:
    """`report.md` and its plot."""
    (folder / "report.md").write_text(markdown(summary), encoding="utf-8")
    plots.speedup(summary).savefig(folder / "speedup.png", dpi=150)


def terminal_table(summary: dict[str, Any]) -> Table:
    """The main table, for a rich console of 80 columns."""
    rows = by_task(summary, Place.tasks_terminal)
    rows = [row | {"task": plots.NAMES.get(row["task"], row["task"])} for row in rows]
    return tables.terminal(rows, title(summary), verdict(summary), bold=("overall",))


def markdown(summary: dict[str, Any]) -> str:
    """The whole report."""
    forks = [
        {name: number(value, 4) if name == "gap" else str(value) for name, value in fork.items()}
        for fork in summary["lossless"]["forks"]
    ]
    parts = [
        f"# {title(summary)}",
        headline(summary),
        tables.markdown(by_task(summary, Place.tasks)),
        "![speedup by task](speedup.png)",
        "## Losslessness",
        verdict(summary),
        *([tables.markdown(forks)] if forks else []),
        "## How to read this",
        listed([*definitions(Place.tasks), FORK]),
        "## Provenance",
        listed(provenance_lines(summary)),
    ]
    return "\n\n".join(parts) + "\n"


def title(summary: dict[str, Any]) -> str:
    """The report's title."""
    return "{model} with {drafter} on {bench}".format(**summary)


def headline(summary: dict[str, Any]) -> str:
    """The first sentence: the speedup, or tokens/s where vanilla did not run."""
    overall = summary["overall"]
    if overall["speedup"] is None:
        return f"{number(overall['tokens_per_second'], 1)} tokens/s. {size(summary)}"
    return (
        f"**{overall['speedup']:.2f}x** the speed of vanilla decoding"
        f"{within(overall['speedup_ci95'])}, {overall['compression_rate']:.2f} tokens per forward "
        f"of the target. {size(summary)}"
    )


def within(limits: Sequence[float] | None) -> str:
    """An interval in words; nothing for one question, which has none."""
    return "" if limits is None else f" (95% interval {tables.span(limits)})"


def size(summary: dict[str, Any]) -> str:
    """What was asked, and how it was answered."""
    settings = summary["settings"]
    greedy = settings["sampling.temperature"] == 0
    how = "greedy" if greedy else f"temperature {settings['sampling.temperature']}"
    return (
        f"{summary['questions']} questions, {summary['lossless']['turns']} turns, at most "
        f"{settings['max_new_tokens']} new tokens, {how}, batch 1, {summary['dtype']} on "
        f"{summary['device']}."
    )


def verdict(summary: dict[str, Any]) -> str:
    """What the comparison with vanilla's texts found, in a sentence or two."""
    lossless, settings = summary["lossless"], summary["settings"]
    if lossless["identical"] is None:
        why = (
            f"the {settings['sampling.rule']} rule keeps the distribution, not the text"
            if "vanilla" in settings["baselines"]
            else "vanilla did not run"
        )
        return f"Texts were not compared: {why}."
    labels = [fork["label"] for fork in lossless["forks"]]
    text = f"{lossless['identical']} of {lossless['turns']} turns are vanilla's token for token"
    if labels:
        ties = labels.count("near-tie")
        text += f"; forks explained by rounding: {ties}, not explained: {len(labels) - ties}"
    if lossless["hf_identical"] is not None:
        hf = f"{lossless['hf_identical']} of the {lossless['hf_turns']} that it answered"
        text += f". transformers wrote vanilla's text in {hf}"
    return text + "."


def by_task(summary: dict[str, Any], place: Place) -> list[Row]:
    """A row a task and one overall; so do the functions below."""
    return [{"task": task} | cells(results, place) for task, results in groups(summary)]


def provenance_lines(summary: dict[str, Any]) -> Iterator[str]:
    """What the result stands beside, a line each."""
    about = summary["provenance"]
    yield f"`{about['command']}`"
    yield f"git {about['git_revision']}, {about['time']}"
    yield from circumstances(about)
    yield assigned(summary["settings"])


def circumstances(about: dict[str, Any]) -> Iterator[str]:
    """Versions and hardware."""
    yield ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    yield machine(about)


def assigned(settings: dict[str, Any]) -> str:
    """Settings as they are written on the command line."""
    return ", ".join(f"{name}={value}" for name, value in settings.items())


def listed(lines: Iterable[str]) -> str:
    """A Markdown list."""
    return "\n".join(f"- {line}" for line in lines)
