"""Plots of a tuning: predicted speedups over what was searched."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.evaluation.plots import FAINT, FURTHER, INK, METHOD, NAMES, VANILLA, blank
from kangaroo.evaluation.tune.player import Score
from kangaroo.evaluation.tune.tune import Tuned, best_by_task

SHADES = ["#d9772b", "#3b6fb6", "#54a24b", "#7a5195", "#b79a20", "#4d9a98", "#b2557c", "#8a8f98"]
THIN: dict[str, Any] = dict(linewidth=1.6, markersize=4, marker="o")

Grid = dict[tuple[float, int], Score]  # by threshold and steps


def draw(found: Tuned, about: str) -> dict[str, Figure]:
    """All plots by name; of chains only where Kangaroo was searched."""
    grids = of_chains(found.scores)
    subtitle = f"predicted by replay, {about}"
    drawn = {"tasks": tasks(found, subtitle)}
    if grids:
        exits = {name: found.sources[name].drafter.exit_layer for name in grids}
        drawn["contour"] = contour(grids, exits, subtitle)
        drawn["threshold"] = over_threshold(grids, subtitle)
        drawn["exit"] = over_exit(grids, exits, subtitle)
    return drawn


def of_chains(scores: Sequence[Score]) -> dict[str, Grid]:
    """Kangaroo's scores by source; of chains of one token, the same for every threshold."""
    grids: dict[str, Grid] = defaultdict(dict)
    for one in scores:
        config, source = one.candidate.config, one.candidate.source
        if isinstance(config, KangarooConfig) and source is not None:
            grids[source][config.threshold, config.steps] = one
    for grid in grids.values():
        for threshold in {threshold for threshold, _ in grid}:
            single = next((one for (_, steps), one in grid.items() if steps == 1), None)
            if single is not None:
                grid[threshold, 1] = single
    return dict(sorted(grids.items()))


def axes_of(grid: Grid) -> tuple[list[float], list[int]]:
    """All thresholds, all steps."""
    return sorted({threshold for threshold, _ in grid}), sorted({steps for _, steps in grid})


def contour(grids: dict[str, Grid], exits: dict[str, int], subtitle: str) -> Figure:
    """Speedup over threshold and steps, a panel for each adapter with its vocabulary."""
    columns = min(3, len(grids))
    rows = -(-len(grids) // columns)
    figure = Figure(figsize=(1.2 + 3.4 * columns, 0.9 + 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    values = [one.speedup for grid in grids.values() for one in grid.values()]
    levels = np.linspace(min(values), max(values) + 1e-6, 13)
    drawn = None
    for axes, (name, grid) in zip(panels, grids.items(), strict=False):
        thresholds, steps = axes_of(grid)
        table = np.array([[grid[t, s].speedup for t in thresholds] for s in steps])
        if min(table.shape) > 1:
            drawn = axes.contourf(thresholds, steps, table, levels=levels, cmap="YlOrBr")
            axes.contour(thresholds, steps, table, levels=levels, colors="white", linewidths=0.5)
        (threshold, count), best = max(grid.items(), key=lambda item: item[1].speedup)
        axes.plot(threshold, count, "D", color=INK, markersize=6)
        axes.set_title(f"{name}\nexit {exits[name]}, best {best.speedup:.2f}x", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.set_yticks(steps)
    for axes in panels[len(grids) :]:
        axes.set_visible(False)
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=panels.tolist(), format="%.2f")
        bar.ax.tick_params(labelsize=8)
    figure.supxlabel("threshold", fontsize=9)
    figure.supylabel("steps", fontsize=9)
    figure.suptitle(f"Speedup of Kangaroo over vanilla decoding\n{subtitle}", fontsize=10)
    return figure


def over_threshold(grids: dict[str, Grid], subtitle: str) -> Figure:
    """CR and speedup over the threshold, each adapter with its best number of steps."""
    figure = Figure(figsize=(8.4, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for color, (name, grid) in zip(cycle(len(grids)), grids.items(), strict=True):
        (_, steps), _ = max(grid.items(), key=lambda item: item[1].speedup)
        thresholds, _ = axes_of(grid)
        own = [grid[threshold, steps] for threshold in thresholds]
        rates, speedups = [one.compression_rate for one in own], [one.speedup for one in own]
        left.plot(thresholds, speedups, color=color, label=f"{name}, steps {steps}", **THIN)
        right.plot(thresholds, rates, color=color, **THIN)
    for axes, title in ((left, "speedup"), (right, "compression rate")):
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_xlabel("threshold", fontsize=9)
        axes.grid(color=FAINT, linewidth=0.8)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    left.axhline(1, color=INK, linewidth=1, linestyle=":")
    figure.suptitle(f"Kangaroo over the threshold\n{subtitle}", fontsize=10)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def over_exit(grids: dict[str, Grid], exits: dict[str, int], subtitle: str) -> Figure:
    """The best chain of each adapter and vocabulary, over the exit layer."""
    figure, axes = blank(subtitle, 3.6, "Kangaroo over the exit layer: speedup, and CR (hollow)")
    beside: Counter[int] = Counter()  # adapters of one exit stand side by side
    for color, (name, grid) in zip(cycle(len(grids)), grids.items(), strict=True):
        best, at = max(grid.values(), key=lambda one: one.speedup), exits[name]
        x = at + 0.06 * beside[at]
        if best.interval is not None:
            axes.plot([x, x], best.interval, color=color, linewidth=1.2)
        axes.plot(x, best.speedup, "o", color=color, label=name)
        axes.plot(x, best.compression_rate, "o", color=color, fillstyle="none")
        beside[at] += 1
    axes.axhline(1, color=INK, linewidth=1, linestyle=":")
    axes.set_xticks(sorted(set(exits.values())))
    axes.set_xlabel("exit layer", fontsize=9)
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def tasks(found: Tuned, subtitle: str) -> Figure:
    """The best setting of each task beside the one that is best for all."""
    best, for_all = best_by_task(found.scores), found.scores[0].by_task()
    title = "Speedup by task: the best setting of each, and one for all"
    figure, axes = blank(subtitle, 0.9 + 0.75 * len(best), title)
    text: dict[str, Any] = {"va": "center", "color": INK}
    for y, (task, own) in enumerate(best.items()):
        one = for_all[task].speedup
        axes.text(0.0, y - 0.36, own.candidate.name, fontsize=7, **text)  # above its bar
        axes.barh(y - 0.1, own.speedup, height=0.28, color=METHOD, label="" if y else "its best")
        axes.text(own.speedup, y - 0.1, f" {own.speedup:.2f}", fontsize=8, **text)
        axes.barh(y + 0.2, one, height=0.28, color=FURTHER, label="" if y else "one for all")
        axes.text(one, y + 0.2, f" {one:.2f}", fontsize=8, **text)
    axes.axvline(1, color=VANILLA, linewidth=1, linestyle=":")
    axes.set_yticks([y + 0.05 for y in range(len(best))], [NAMES.get(task, task) for task in best])
    axes.set_ylim(len(best) - 0.6, -0.65)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color=FAINT, linewidth=0.8)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def cycle(count: int) -> list[str]:
    """So many colours, no two alike."""
    if count <= len(SHADES):
        return SHADES[:count]
    return [to_hex(shade) for shade in colormaps["turbo"](np.linspace(0.05, 0.95, count))]
