"""What training costs: JSON, and a table in the terminal and in Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kangaroo.benchmark.cost_parts import FROZEN

HEADS = [
    "part", "ms a micro-batch", "tokens/s", "times the frozen forward", "range", "peak memory, GB",
    "times the frozen forward's",
]  # fmt: skip


def write(result: dict[str, Any], output: Path, console: Console) -> None:
    """Save `cost.json` and `cost.md` in `output`, and show the table.

    Args:
        result: what `cost.measure` returned.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "cost.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "cost.md").write_text(markdown(result), encoding="utf-8")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, head in enumerate(HEADS):
        table.add_column(head, justify="right" if i else "left")
    for row in rows(result):
        table.add_row(*row)
    console.print(table)
    console.print(notes(result), f"Saved in {output}.", sep="\n", markup=False, highlight=False)


def rows(result: dict[str, Any]) -> list[list[str]]:
    frozen = result["parts"][FROZEN]["peak_memory"]
    made = []
    for name, part in result["parts"].items():
        memory = part["peak_memory"]
        made.append(
            [
                name,
                f"{1e3 * part['seconds']:.1f}",
                f"{part['tokens_per_second']:.0f}",
                f"{part['ratio']:.2f}",
                "{:.2f} to {:.2f}".format(*part["ratio_range"]),
                "" if memory is None else f"{memory / 1e9:.2f}",
                "" if memory is None else f"{memory / frozen:.2f}",
            ]
        )
    return made


def notes(result: dict[str, Any]) -> str:
    """What the figures are of."""
    settings, disk = result["settings"], result["disk"]
    lines = [
        f"{result['model']}, {result['dtype']}, {result['device']}, {result['threads']} CPU "
        f"threads; {settings['micro_batches']} micro-batches of {result['batch_tokens']:.0f} "
        f"tokens, {result['learnt_tokens']:.0f} of them learnt, from {result['text']}; medians of "
        f"{settings['rounds']} rounds, in which all parts take turns. Adapters at exit "
        f"{settings['exit_layers'][0]} with a draft vocabulary of {settings['vocabulary']} "
        "if nothing else is said; an optimizer step every micro-batch."
    ]
    if result["further_exit"] is not None:
        lines.append(
            f"Each further exit of an attention adapter adds {result['further_exit']:.3f} frozen "
            "forwards."
        )
    dataset = "" if disk["dataset"] is None else f"{disk['dataset']:.1f} for the dataset, "
    lines.append(
        f"Bytes on disk a token: {dataset}{disk['hidden states']} for hidden states (dumped they "
        f"would be {disk['hidden states, were they dumped']} for one exit)."
    )
    return "\n\n".join(lines)


def markdown(result: dict[str, Any]) -> str:
    lines = [HEADS, ["---", *["---:"] * (len(HEADS) - 1)], *rows(result)]
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{table}\n\n{notes(result)}\n"
