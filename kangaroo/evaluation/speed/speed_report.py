"""What the speed benchmark found: JSON, tables in the terminal and in Markdown, and a plot."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from kangaroo.evaluation.paired import shown
from kangaroo.evaluation.plots import FAINT, FURTHER, HF, INK, METHOD, VANILLA
from kangaroo.evaluation.speed.speed_batches import stops_paying
from kangaroo.evaluation.speedup import interval, speedup
from kangaroo.utils import tables
from kangaroo.utils.tables import Row, number, share

NAMES = {"hf": "hf", "vanilla": "vanilla", "kangaroo": "Kangaroo"}
LABELS = NAMES | {"hf": "transformers"}  # of the plot, which has no notes
COLORS = {"hf": HF, "vanilla": VANILLA, "kangaroo": METHOD}


def write(result: dict[str, Any], output: Path) -> None:
    """Save `speed.json`, `speed.md` and `speed.png` in `output`.

    Args:
        result: what `speed.measure` returned.
    """
    output.mkdir(parents=True, exist_ok=True)
    (output / "speed.json").write_text(json.dumps(result, indent=1) + "\n")
    (output / "speed.md").write_text(markdown(result), encoding="utf-8")
    plot(result).savefig(output / "speed.png", dpi=150)


def show(result: dict[str, Any], console: Console) -> None:
    """The tables and notes in the terminal."""
    for title, rows in sheets(result).items():
        console.print(tables.terminal(rows, title))
    console.print(notes(result), markup=False, highlight=False)


def sheets(result: dict[str, Any]) -> dict[str, list[Row]]:
    """All tables, by title."""
    found = {
        "Decoding speed": _speeds(result),
        "Speedup of the column over the row, and its 95% interval": _speedups(result),
        "Speedup over vanilla by task": _tasks(result),
        "A round: one forward of the target": _rounds(result),
        "Phases of a step, ms (and limit)": _phases(result),
        "Verification": _widths(result),
        "ms/token over the context, and its growth": _contexts(result),
        "Throughput over the batch": _batches(result),
    }
    return found | ({"Peak memory, MB": _memory(result)} if "memory" in result else {})


def _speeds(result: dict[str, Any]) -> list[Row]:
    return [
        {
            "method": NAMES.get(name, name),
            "tokens/s": number(m["tokens_per_second"], 1),
            "ms/token": number(m["ms_per_token"]),
            "CR": number(m["compression_rate"]),
            # what the drafts of transformers' own ways read is not known
            "limit, ms": number(m["limit_ms_per_token"] if name in NAMES else None),
            "of limit": share(m["share_of_limit"] if name in NAMES else None),
            "first round, ms": number(m["first_ms"], 0),
            "tokens/s with prefill": number(m["whole_tokens_per_second"], 1),
        }
        for name, m in result["methods"].items()
    ]


def _rounds(result: dict[str, Any]) -> list[Row]:
    return [
        {
            "method": NAMES.get(name, name),
            "CR": number(m["compression_rate"]),
            "draft tokens": number(m["drafted_per_round"]),
            "draft, ms": number(m["draft_ms_per_round"]),
            "verify, ms": number(m["verify_ms_per_round"]),
            "host, ms": number(m["host_ms_per_round"]),
            "ms/draft token": number(m["ms_per_draft_token"]),
            "its limit, ms": number(m["limit_ms_per_draft_token"] if name in NAMES else None),
        }
        for name, m in result["methods"].items()
        if m["draft_ms_per_round"] is not None  # generate's rounds cannot be told apart further
    ]


def _speedups(result: dict[str, Any]) -> list[Row]:
    """A row for each method that another is compared with, a column for each of ours."""
    found, ours = result["speedups"], result["ours"]
    others = [name for name in result["methods"] if name not in ours]
    rows = []
    for slower in [*others, *ours[:-1]]:
        row = {"over": NAMES.get(slower, slower)}
        for faster in ours:
            pair = found.get(f"{faster}/{slower}")
            cell = "-" if pair is None else shown(pair["speedup"], pair["speedup_ci95"], same=1.0)
            row[NAMES.get(faster, faster)] = cell
        rows.append(row)
    return rows


def _tasks(result: dict[str, Any]) -> list[Row]:
    """Each of our drafters over vanilla; the last row is the mean of the tasks."""
    drafters = [name for name in result["ours"] if name != "vanilla"]
    rows: list[Row] = []
    values: dict[str, list[float]] = {name: [] for name in drafters}
    for task in dict.fromkeys(result["tasks"]):
        mine = [i for i, name in enumerate(result["tasks"]) if name == task]
        row = {"task": task, "prompts": str(len(mine))}
        for name in drafters:
            pairs_P2 = np.array(result["speedups"][f"{name}/vanilla"]["seconds_of_prompt"])[mine]
            values[name].append(speedup(pairs_P2))
            row[NAMES.get(name, name)] = shown(speedup(pairs_P2), interval(pairs_P2), same=1.0)
        rows.append(row)
    means = {NAMES.get(name, name): number(statistics.mean(values[name])) for name in drafters}
    return [*rows, {"task": "mean of tasks", "prompts": ""} | means]


def _phases(result: dict[str, Any]) -> list[Row]:
    return [
        {
            "step": step,
            "ms": number(found["ms"]),
            "limit, ms": number(found["limit_ms"]),
            "over limit": number(found["over_limit"]),
        }
        | {
            name: _phase(found, name)
            for name in ("embed", "layers", "adapter", "head", "sampling", "host")
        }
        for step, found in result["phases"]["steps"].items()
    ]


def _phase(found: dict[str, Any], name: str) -> str:
    if name not in found["phases"]:
        return "-"
    took, limit = found["phases"][name], found["limits"][name]
    return f"{took:.2f} ({limit:.2f})" if limit >= 0.005 else f"{took:.2f}"


def _widths(result: dict[str, Any]) -> list[Row]:
    widths = result["phases"]["verification"]
    one = widths[0]["ms"]
    return [
        {"tokens": str(w["tokens"]), "ms": number(w["ms"]), "of one": number(w["ms"] / one)}
        for w in widths
    ]


def _batches(result: dict[str, Any]) -> list[Row]:
    return [
        {
            "batch": str(b["batch"]),
            "vanilla, tokens/s": number(b["vanilla"], 1),
            "Kangaroo, tokens/s": number(b["kangaroo"], 1),
            "speedup": number(b["ratio"]),
        }
        for b in result["batches"]
    ]


def _memory(result: dict[str, Any]) -> list[Row]:
    memory = result["memory"]
    parts = ("target", "adapter", "draft_head", "cache", "computed", "measured")
    row = {part.replace("_", " "): number(memory[part] / 1e6, 1) for part in parts}
    return [row | {"measured / computed": number(memory["measured"] / memory["computed"])}]


def _contexts(result: dict[str, Any]) -> list[Row]:
    least = result["contexts"][0]
    rows = []
    for c in result["contexts"]:
        read = c["vanilla"]["limit_ms_per_token"] - least["vanilla"]["limit_ms_per_token"]
        row = {
            "context": str(c["context"]),
            "KV, MB": number(c["kv_bytes"] / 1e6, 1),
            "read in, ms": f"+{read:.2f}",
        }
        for name, heading in NAMES.items():
            growth = c[name]["ms_per_token"] - least[name]["ms_per_token"]
            row[heading] = f"{c[name]['ms_per_token']:.2f} {growth:+.2f}"
        rows.append(
            row
            | {
                "CR": number(c["kangaroo"]["compression_rate"]),
                "vanilla of limit": share(c["vanilla"]["share_of_limit"]),
                "its first token, ms": number(c["vanilla"]["first_ms"], 0),
            }
        )
    return rows


def notes(result: dict[str, Any]) -> str:
    """What the tables need to be read."""
    memory, settings, about = result["bandwidth"], result["settings"], result["provenance"]
    drafter, reads = result["drafter"], result["reads"]["vanilla"]
    end = stops_paying(result["batches"])
    weights = sum(reads[part] for part in ("shallow", "deep", "norm", "head", "row"))
    texts = ", ".join(f"{NAMES.get(m, m)} {n}" for m, n in result["equal_texts"].items())
    static = ""
    if "static" in result:
        one = result["static"]
        static = (
            f"transformers' generate with its static cache, which torch compiles on a GPU, takes "
            f"{one['ms_per_token']:.2f} ms/token at context {one['context']}.\n"
        )
    skipped = "".join(f"{name} skipped: {why}\n" for name, why in result["skipped"].items())
    return (
        f"hf is transformers' generate, hf_... its own ways to speculate; llama_... is llama.cpp, "
        f"with the same weights, with its n-gram speculation, and with the 4-bit weights that the "
        f"embedded model was made from. CR is the compression rate: tokens a round.\n{skipped}"
        f"{static}"
        f"Texts that are vanilla's up to its first EOS, of {len(result['tasks'])}: {texts}.\n"
        f"{result['model']} in {result['dtype']} on {_device(result)}; greedy, batch 1, "
        f"{settings['prompts']} prompts x {settings['max_new_tokens']} tokens x "
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
    parts = [f"**{title}**\n\n{tables.markdown(rows)}" for title, rows in sheets(result).items()]
    return "\n\n".join([*parts, notes(result).replace("\n", "\n\n")]) + "\n"


def plot(result: dict[str, Any]) -> Figure:
    """Tokens/s with what the memory allows, ms/token over the context, tokens/s over the batch."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    bars, lines, batches = figure.subplots(1, 3, width_ratios=[1.15, 1.1, 1])
    _bars(bars, result["methods"], result["ours"])
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


def _bars(axes: Any, methods: dict[str, Any], ours: Sequence[str]) -> None:
    """One a method, the fastest on top; a mark where the memory's limit is known."""
    names = sorted(methods, key=lambda name: methods[name]["tokens_per_second"])
    for y, name in enumerate(names):
        m = methods[name]
        speed = m["tokens_per_second"]
        color = COLORS.get(name, FURTHER if name in ours else HF)
        axes.barh(y, speed, height=0.62, color=color)
        place: dict[str, Any] = dict(textcoords="offset points", va="center", fontsize=9)
        axes.annotate(f"{speed:.0f}", (speed, y), (4, 0), **place)
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
        took = [c[name]["ms_per_token"] for c in contexts]
        axes.plot(at, took, marker="o", markersize=4.5, color=COLORS[name], label=label)
    limit = [c["vanilla"]["limit_ms_per_token"] for c in contexts]
    axes.plot(at, limit, color=INK, linestyle="--", linewidth=1.2, label="limit of vanilla")
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
