"""What the speed benchmark found: JSON, tables in the terminal and in Markdown, and a plot."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from kangaroo.benchmark.speed_batches import stops_paying
from kangaroo.evaluation.plots import FAINT, HF, INK, METHOD, VANILLA

NAMES = {"hf": "hf", "vanilla": "vanilla", "kangaroo": "Kangaroo"}
RIVAL = "hf_"  # how names of transformers' own ways to speculate begin
LABELS = NAMES | {"hf": "transformers"}  # of the plot, which has no notes
COLORS = {"hf": HF, "vanilla": VANILLA, "kangaroo": METHOD}


@dataclass
class Sheet:
    """A table: its title, the heads of its columns, its rows."""

    title: str
    heads: list[str]
    rows: list[list[str]]


def write(result: dict[str, Any], output: Path, console: Console) -> None:
    """Save `speed.json`, `speed.md` and `speed.png` in `output`, and show the tables.

    Args:
        result: what `speed.measure` returned.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "speed.md").write_text(markdown(result), encoding="utf-8")
    plot(result).savefig(output / "speed.png", dpi=150)
    for sheet in sheets(result):
        table = Table(
            title=sheet.title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
            pad_edge=False,
        )  # fmt: skip
        for i, head in enumerate(sheet.heads):
            table.add_column(head, justify="right" if i else "left")
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
    console.print(notes(result), f"Saved in {output}.", sep="\n", markup=False, highlight=False)


def sheets(result: dict[str, Any]) -> list[Sheet]:
    found = [
        _speeds(result), _speedups(result), _tasks(result), _rounds(result), _phases(result),
        _widths(result), _contexts(result), _batches(result),
    ]  # fmt: skip
    return [*found, _memory(result)] if "memory" in result else found


def _speeds(result: dict[str, Any]) -> Sheet:
    rows = [
        [
            NAMES.get(name, name),
            f"{m['tokens_per_second']:.1f}",
            f"{m['ms_per_token']:.2f}",
            f"{m['compression_rate']:.2f}",
            # what a rival's drafts read is not known
            "-" if name.startswith(RIVAL) else f"{m['limit_ms_per_token']:.2f}",
            "-" if name.startswith(RIVAL) else f"{m['share_of_limit']:.0%}",
            f"{m['first_ms']:.0f}",
            f"{m['whole_tokens_per_second']:.1f}",
        ]
        for name, m in result["methods"].items()
    ]
    heads = [
        "method", "tokens/s", "ms/token", "CR", "limit, ms", "of limit", "first round, ms",
        "tokens/s with prefill",
    ]  # fmt: skip
    return Sheet("Decoding speed", heads, rows)


def _rounds(result: dict[str, Any]) -> Sheet:
    rows = [
        [
            NAMES[name],
            f"{m['compression_rate']:.2f}",
            f"{m['drafted_per_round']:.2f}",
            _number(m["draft_ms_per_round"]),
            _number(m["verify_ms_per_round"]),
            _number(m["host_ms_per_round"]),
            _number(m["ms_per_draft_token"]),
            _number(m["limit_ms_per_draft_token"]),
        ]
        for name, m in result["methods"].items()
        if m["draft_ms_per_round"] is not None  # generate's rounds cannot be told apart further
    ]
    heads = [
        "method", "CR", "draft tokens", "draft, ms", "verify, ms", "host, ms", "ms/draft token",
        "its limit, ms",
    ]  # fmt: skip
    return Sheet("A round: one forward of the target", heads, rows)


def _speedups(result: dict[str, Any]) -> Sheet:
    rows = []
    for pair, s in result["speedups"].items():
        faster, slower = pair.split("/")
        rows.append(
            [
                f"{NAMES[faster]} / {NAMES.get(slower, slower)}",
                f"{s['median']:.2f}",
                "{:.2f} to {:.2f}".format(*s["interval"]),
                "{:.2f} to {:.2f}".format(*s["range"]),
                f"{result['equal_texts'][pair]} of {len(s['of_prompt'])}",
            ]
        )
    heads = ["tokens/s of", "median", "95%", "range", "same text"]
    return Sheet("Speedup, prompt by prompt", heads, rows)


def _tasks(result: dict[str, Any]) -> Sheet:
    """The median of each task, and over the tasks their mean."""
    tasks = list(dict.fromkeys(result["tasks"]))
    rows, means = [], []
    pairs = list(result["speedups"])
    for task in tasks:
        mine = [i for i, name in enumerate(result["tasks"]) if name == task]
        ratios = [
            statistics.median(result["speedups"][pair]["of_prompt"][i] for i in mine)
            for pair in pairs
        ]
        means.append(ratios)
        rows.append([task, str(len(mine)), *(f"{ratio:.2f}" for ratio in ratios)])
    mean = [f"{statistics.mean(column):.2f}" for column in zip(*means, strict=True)]
    heads = ["task", "prompts", *(pair.replace("kangaroo", "K.") for pair in pairs)]
    return Sheet("Speedup by task", heads, [*rows, ["mean of tasks", "", *mean]])


def _phases(result: dict[str, Any]) -> Sheet:
    names = ["embed", "layers", "adapter", "head", "sampling", "host"]
    rows = []
    for step, found in result["phases"]["steps"].items():
        cells = [_phase(found, name) for name in names]
        row = [step, f"{found['ms']:.2f}", f"{found['limit_ms']:.2f}", f"{found['over_limit']:.2f}"]
        rows.append([*row, *cells])
    heads = ["step", "ms", "limit, ms", "over limit", *names]
    return Sheet("Phases of a step, ms (and limit)", heads, rows)


def _phase(found: dict[str, Any], name: str) -> str:
    if name not in found["phases"]:
        return "-"
    took, limit = found["phases"][name], found["limits"][name]
    return f"{took:.2f} ({limit:.2f})" if limit >= 0.005 else f"{took:.2f}"


def _widths(result: dict[str, Any]) -> Sheet:
    widths = result["phases"]["verification"]
    one = widths[0]["ms"]
    rows = [[str(w["tokens"]), f"{w['ms']:.2f}", f"{w['ms'] / one:.2f}"] for w in widths]
    return Sheet("Verification", ["tokens", "ms", "of one"], rows)


def _batches(result: dict[str, Any]) -> Sheet:
    rows = [
        [str(b["batch"]), f"{b['vanilla']:.1f}", f"{b['kangaroo']:.1f}", f"{b['ratio']:.2f}"]
        for b in result["batches"]
    ]
    heads = ["batch", "vanilla, tokens/s", "Kangaroo, tokens/s", "speedup"]
    return Sheet("Throughput over the batch", heads, rows)


def _memory(result: dict[str, Any]) -> Sheet:
    memory = result["memory"]
    parts = ("target", "adapter", "draft_head", "cache", "computed", "measured")
    row = [f"{memory[part] / 1e6:.1f}" for part in parts]
    over = f"{memory['measured'] / memory['computed']:.2f}"
    heads = [*(part.replace("_", " ") for part in parts), "measured / computed"]
    return Sheet("Peak memory, MB", heads, [[*row, over]])


def _contexts(result: dict[str, Any]) -> Sheet:
    least = result["contexts"][0]
    rows = []
    for c in result["contexts"]:
        read = c["vanilla"]["limit_ms_per_token"] - least["vanilla"]["limit_ms_per_token"]
        row = [str(c["context"]), f"{c['kv_bytes'] / 1e6:.1f}", f"+{read:.2f}"]
        for name in NAMES:
            growth = c[name]["ms_per_token"] - least[name]["ms_per_token"]
            row.append(f"{c[name]['ms_per_token']:.2f} {growth:+.2f}")
        rows.append([*row, f"{c['kangaroo']['compression_rate']:.2f}"])
    heads = ["context", "KV, MB", "read in, ms", *NAMES.values(), "CR"]
    return Sheet("ms/token over the context, and its growth", heads, rows)


def notes(result: dict[str, Any]) -> str:
    """What the tables need to be read."""
    memory, settings, about = result["bandwidth"], result["settings"], result["provenance"]
    drafter, reads = result["drafter"], result["reads"]["vanilla"]
    end = stops_paying(result["batches"])
    weights = sum(reads[part] for part in ("shallow", "deep", "norm", "head", "row"))
    return (
        f"hf is transformers' generate, hf_... its own ways to speculate; CR is the compression "
        f"rate: tokens a round.\n"
        f"{result['model']} in {result['dtype']} on {_device(result)}; greedy, batch 1, "
        f"{settings['prompts']} prompts x {settings['new_tokens']} tokens x "
        f"{settings['repeats']} repeats; exit layer {drafter['exit_layer']}, at most "
        f"{drafter['steps']} draft tokens, threshold {drafter['threshold']}, "
        f"draft vocabulary {drafter['vocabulary'] or 'whole'}.\n"
        f"Memory: {memory['before'] / 1e9:.1f} GB/s before, {memory['after'] / 1e9:.1f} GB/s "
        f"after; limits take the higher. A vanilla token reads {weights / 1e6:.1f} MB of weights.\n"
        f"A draft token takes {result['phases']['cost']:.3f} of a vanilla token's time. "
        f"Speculation stops paying at batch {end or 'beyond those measured'}.\n"
        f"EOS is ignored so that all texts are equally long: {result['share_past_eos']:.0%} of "
        f"vanilla's tokens come after one.\n"
        f"git {about['git_revision']}, torch {about['versions']['torch']}, transformers "
        f"{about['versions']['transformers']}, {about['time']}."
    )


def markdown(result: dict[str, Any]) -> str:
    """The tables and notes."""
    parts = []
    for sheet in sheets(result):
        rule = ["---"] + ["---:"] * (len(sheet.heads) - 1)
        lines = ["| " + " | ".join(row) + " |" for row in (sheet.heads, rule, *sheet.rows)]
        parts.append("\n".join([f"**{sheet.title}**", "", *lines]))
    return "\n\n".join([*parts, notes(result).replace("\n", "\n\n")]) + "\n"


def plot(result: dict[str, Any]) -> Figure:
    """Tokens/s with what the memory allows, ms/token over the context, tokens/s over the batch."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    bars, lines, batches = figure.subplots(1, 3, width_ratios=[1.15, 1.1, 1])
    _bars(bars, result["methods"])
    _lines(lines, result["contexts"])
    _throughput(batches, result["batches"])
    for axes in (bars, lines, batches):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x" if axes is bars else "y", color=FAINT, linewidth=0.8)
        axes.set_axisbelow(True)
    figure.suptitle(
        f"{result['model']}, {result['dtype']}, {_device(result)}, "
        f"{result['bandwidth']['limit'] / 1e9:.1f} GB/s",
        fontsize=10,
    )
    return figure


def _bars(axes: Any, methods: dict[str, Any]) -> None:
    """One a method, the fastest on top; a mark where the memory's limit is known."""
    names = sorted(methods, key=lambda name: methods[name]["tokens_per_second"])
    for y, name in enumerate(names):
        m = methods[name]
        speed = m["tokens_per_second"]
        axes.barh(y, speed, height=0.62, color=COLORS.get(name, HF))
        axes.annotate(
            f"{speed:.0f}", (speed, y), xytext=(4, 0), textcoords="offset points", va="center",
            fontsize=9,
        )  # fmt: skip
        if name in NAMES:
            limit = m["limit_tokens_per_second"]
            axes.plot([limit, limit], [y - 0.4, y + 0.4], color=INK, linewidth=1.6)
    axes.set_yticks(range(len(names)), [LABELS.get(name, name) for name in names], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Tokens/s, batch 1 (mark: the memory's limit)", fontsize=10, loc="left")


def _throughput(axes: Any, batches: list[dict[str, Any]]) -> None:
    sizes = [str(b["batch"]) for b in batches]
    for name in ("vanilla", "kangaroo"):
        axes.plot(sizes, [b[name] for b in batches], marker="o", markersize=4.5, color=COLORS[name])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("rows decoded at a time", fontsize=9)
    axes.set_title("Tokens/s over the batch", fontsize=10, loc="left")


def _lines(axes: Any, contexts: list[dict[str, Any]]) -> None:
    at = [c["context"] for c in contexts]
    for name, label in LABELS.items():
        axes.plot(
            at, [c[name]["ms_per_token"] for c in contexts], marker="o", markersize=4.5,
            color=COLORS[name], label=label,
        )  # fmt: skip
    axes.plot(
        at, [c["vanilla"]["limit_ms_per_token"] for c in contexts], color=INK, linestyle="--",
        linewidth=1.2, label="limit of vanilla",
    )  # fmt: skip
    axes.set_xticks(at, [str(n) for n in at], fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("context, tokens", fontsize=9)
    axes.set_title("Time a token over the context, ms", fontsize=10, loc="left")
    axes.legend(frameon=False, fontsize=9)


def _device(result: dict[str, Any]) -> str:
    hardware = result["provenance"]["hardware"]
    if result["device"] == "cuda":
        return str(hardware["cuda"])
    return f"CPU ({hardware['cpu']}), threads: {hardware['threads']}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
