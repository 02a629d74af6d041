"""What the speed benchmark says: JSON, tables in the terminal and in Markdown, and a plot."""

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from kangaroo.evaluation import plots
from kangaroo.evaluation.speed.speed import CORE
from kangaroo.utils import tables
from kangaroo.utils.provenance import machine
from kangaroo.utils.tables import Row, estimate, number, share

# Columns of tables: heading, a result's key, decimals.
METHODS = {
    "tokens/s": ("tokens_per_second", 1),
    "ms/token": ("ms_per_token", 2),
    "limit, ms": ("limit_ms_per_token", 2),
    "first, ms": ("first_ms", 0),
    "vanilla's texts": ("equal_texts", 0),
    "CR": ("compression_rate", 2),
    "draft tokens": ("drafted_per_round", 2),
    "draft, ms": ("draft_ms", 2),
    "verify, ms": ("verify_ms", 2),
    "host, ms": ("host_ms", 2),
}
WIDTHS = {"ms": ("ms", 2), "of one": ("of_one", 2), "limit, ms": ("limit_ms", 2)}
BATCHES = {"vanilla": ("vanilla", 1), "kangaroo": ("kangaroo", 1), "speedup": ("ratio", 2)}


def write(result: dict[str, Any], output: Path, console: Console) -> None:
    """Save what `speed.measure` returned, `speed.json`, `speed.md` and `speed.png`, and show it."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
    sections = {title: tables.markdown(rows) for title, rows in sheets(result).items()}
    text = "".join(f"**{title}**\n\n{table}\n\n" for title, table in sections.items())
    (output / "speed.md").write_text(f"{text}{notes(result)}\n", encoding="utf-8")
    title = f"{result['model']}, {result['dtype']}, {machine(result['provenance'])}"
    figure = plots.speedup_bars(list(result["methods"].items()), title, accent="kangaroo")
    figure.savefig(output / "speed.png", dpi=150)
    for heading, rows in sheets(result).items():
        console.print(tables.terminal(rows, heading))
    console.print(notes(result), f"Saved in {output}.", sep="\n", markup=False, highlight=False)


def sheets(result: dict[str, Any]) -> dict[str, list[Row]]:
    """All tables, by title."""
    contexts = result["contexts"]
    return {
        "Decoding speed, and parts of a round": [
            {
                "method": name,
                "times vanilla": estimate(m["speedup"], m["speedup_ci95"], same=1.0),
            }
            | _cells(m, METHODS)
            for name, m in result["methods"].items()
        ],
        "ms/token over the context": [
            {"context": str(c["context"]), "KV, MB": number(c["kv_bytes"] / 1e6, 1)}
            | {name: number(c[name]["ms_per_token"]) for name in CORE}
            | {"vanilla of limit": share(c["vanilla"]["share_of_limit"])}
            | {"draft over its limit": number(c["kangaroo"]["draft_over_limit"])}
            | {"first token, ms": number(c["vanilla"]["first_ms"], 0)}
            for c in contexts
        ],
        f"Verification at context {contexts[0]['context']}": [
            {"tokens": str(v["tokens"])} | _cells(v, WIDTHS) for v in result["verifications"]
        ],
        "Tokens/s over the batch": [
            {"batch": str(b["batch"])} | _cells(b, BATCHES) for b in result["batches"]
        ],
    }


def _cells(values: dict[str, Any], columns: dict[str, tuple[str, int]]) -> Row:
    return {heading: number(values[key], digits) for heading, (key, digits) in columns.items()}


def notes(result: dict[str, Any]) -> str:
    """What the tables need to be read."""
    settings, about = result["settings"], result["provenance"]
    before, after = (result["bandwidth"][when] / 1e9 for when in ("before", "after"))
    return (
        f"Memory: {before:.1f} GB/s before, {after:.1f} GB/s after; limits take the higher. A "
        f"vanilla token reads {result['weights'] / 1e6:.1f} MB of weights. {result['model']}, "
        f"{result['dtype']}, {machine(about)}; {settings['prompts']} prompts x "
        f"{settings['max_new_tokens']} tokens x {settings['repeats']} repeats; "
        f"{result['drafter']}. git {about['git_revision']}, torch {about['versions']['torch']}, "
        f"transformers {about['versions']['transformers']}, {about['time']}."
    )
