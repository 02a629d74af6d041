"""The certificate of a soak: what was compared, and that nothing differed, as JSON and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kangaroo.evaluation.records import write_json
from kangaroo.evaluation.report import circumstances, listed
from kangaroo.soak.cells import Cell
from kangaroo.utils import tables
from kangaroo.utils.provenance import provenance
from kangaroo.utils.tables import Row, share

NAME = "certificate.json"

BY: dict[str, Callable[[Cell], str]] = {
    "drafter": lambda cell: cell.drafter,
    "sampling": lambda cell: cell.sampling,
    "target": lambda cell: cell.family,
    "rows at a time": lambda cell: str(cell.batch),
}


def certify(cells: Sequence[Cell], begun: dict[str, Any]) -> dict[str, Any]:
    """What the cells say together.

    Args:
        begun: what `records.begun` returns: the settings, and the provenance of the first start.
    """
    return {
        **totals(cells),
        "differences": [
            {"cell": cell.where, **asdict(difference)}
            for cell in cells
            for difference in cell.differences
        ],
        "by": {
            name: {
                value: totals([c for c in cells if of(c) == value]) for value in values(cells, of)
            }
            for name, of in BY.items()
        },
        "cells": len(cells),
        "seconds": sum(cell.seconds for cell in cells),
        "settings": begun["settings"],
        "provenance": begun["provenance"] | {"finished": provenance()["time"]},
    }


def values(cells: Sequence[Cell], of: Callable[[Cell], str]) -> list[str]:
    """In the order in which they occur first."""
    return list(dict.fromkeys(map(of, cells)))


def totals(cells: Sequence[Cell]) -> dict[str, int]:
    """Sums over cells."""
    names = ("texts", "tokens", "drafted", "accepted", "ended_by_eos")
    sums = {name: sum(asdict(cell)[name] for cell in cells) for name in names}
    return sums | {"different_texts": sum(len(cell.differences) for cell in cells)}


def write(found: dict[str, Any], folder: Path) -> None:
    """`certificate.json` and `certificate.md`."""
    write_json(folder / NAME, found)
    (folder / "certificate.md").write_text(markdown(found), encoding="utf-8")


def markdown(found: dict[str, Any]) -> str:
    """The certificate for people."""
    parts = [
        "# Lossless at scale: a certificate of `make soak`",
        f"**{verdict(found)}**",
        "What is decoded, and how, is in [evaluation](evaluation.md#a-million-tokens). *accepted* "
        "is the share of draft tokens: were it 0 or 100% everywhere, little would be tested.",
        *(tables.markdown(rows(name, groups)) for name, groups in found["by"].items()),
        *([_differences(found["differences"])] if found["differences"] else []),
        listed(lines(found)),
    ]
    return "\n\n".join(parts) + "\n"


def verdict(found: dict[str, Any]) -> str:
    """In one sentence."""
    different = found["different_texts"]
    return (
        f"{found['tokens']:,} tokens in {found['texts']:,} texts were compared with vanilla's; "
        f"texts that differ: {different}."
    )


def rows(name: str, groups: dict[str, dict[str, int]]) -> list[Row]:
    """A row a group."""
    return [
        {
            name: value,
            "tokens": f"{group['tokens']:,}",
            "texts": f"{group['texts']:,}",
            "ended by EOS": share(group["ended_by_eos"] / group["texts"]),
            "accepted": share(group["accepted"] / group["drafted"] if group["drafted"] else None),
            "differ": str(group["different_texts"]),
        }
        for value, group in groups.items()
    ]


def _differences(found: Sequence[dict[str, Any]]) -> str:
    headings = ("cell", "seed", "position", "vanilla", "found", "gap", "label")
    return tables.markdown([{name: str(one[name]) for name in headings} for one in found])


def lines(found: dict[str, Any]) -> list[str]:
    """What the result stands beside."""
    about = found["provenance"]
    return [
        f"`{about['command']}`",
        f"git {about['git_revision']}, begun {about['time']}, finished {about['finished']}, "
        f"{found['seconds'] / 60:.0f} minutes of decoding in {found['cells']} cells",
        *circumstances(about),
        ", ".join(f"{name}={value}" for name, value in found["settings"].items()),
    ]
