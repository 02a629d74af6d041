"""What training costs: JSON, and a table in the terminal and in Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from kangaroo.evaluation.speed.cost_parts import FROZEN
from kangaroo.utils import tables
from kangaroo.utils.provenance import machine
from kangaroo.utils.tables import Row, number, span


def write(result: dict[str, Any], output: Path, console: Console) -> None:
    """Save `cost.json` and `cost.md` in `output`, and show the table.

    Args:
        result: what `cost.measure` returned.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "cost.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "cost.md").write_text(markdown(result), encoding="utf-8")
    console.print(tables.terminal(rows(result)))
    console.print(notes(result), f"Saved in {output}.", sep="\n", markup=False, highlight=False)


def markdown(result: dict[str, Any]) -> str:
    """The table and notes."""
    return f"{tables.markdown(rows(result))}\n\n{notes(result)}\n"


def rows(result: dict[str, Any]) -> list[Row]:
    """A row a part."""
    frozen = result["parts"][FROZEN]["peak_memory"]
    return [
        {
            "part": name,
            "ms a micro-batch": number(1e3 * part["seconds"], 1),
            "tokens/s": number(part["tokens_per_second"], 0),
            "times the frozen forward": number(part["ratio"]),
            "range": span(part["ratio_range"]),
            "peak memory, GB": number(frozen and part["peak_memory"] / 1e9),
            "times the frozen forward's": number(frozen and part["peak_memory"] / frozen),
        }
        for name, part in result["parts"].items()
    ]


def notes(result: dict[str, Any]) -> str:
    """What was measured, and on what."""
    settings, disk = result["settings"], result["disk"]
    lines = [
        f"{result['model']}, {result['dtype']}, {result['device']}, "
        f"{machine(result['provenance'])}; {settings['micro_batches']} micro-batches of "
        f"{result['batch_tokens']:.0f} tokens, {result['learnt_tokens']:.0f} of them learnt, from "
        f"{result['text']}; medians of "
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
