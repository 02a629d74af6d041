"""Tables in Markdown and for the terminal, and the number formats of their cells."""

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

# Cells by their headings. All rows of a table have the headings of the first.
Row = dict[str, str]


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; all columns but the first are right-aligned."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    # a line break or a bar would end a cell
    head, *body = ([re.sub(r"\s+", " ", x).replace("|", "\\|") for x in line] for line in cells)
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def terminal(rows: Sequence[Row], title: str, caption: str | None = None) -> Table:
    """The rows as a table for a rich console, whose widest columns wrap where space is short."""
    table = Table(
        title=Text(title),
        title_justify="left",
        caption=caption and Text(caption),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for i, heading in enumerate(rows[0]):
        table.add_column(Text(heading), justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row.values()))
    return table


def number(value: float | None, digits: int = 2) -> str:
    """A number with `digits` decimals; a dash for None."""
    return "-" if value is None else f"{value:.{digits}f}"


def count(number: int, noun: str) -> str:
    """That many of a thing, such as "1 question" and "2 questions"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def share(value: float | None) -> str:
    """A share as a percentage; a dash for None."""
    return "-" if value is None else f"{value:.0%}"


def span(ends: Sequence[float], between: str) -> str:
    """An interval, with two decimals."""
    return between.join(f"{end:.2f}" for end in ends)


def estimate(value: float | None, ends: Sequence[float] | None, same: float | None = None) -> str:
    """A value with its confidence interval, omitted where it has no width. `same` is the value that
    means no difference, such as a ratio of 1."""
    if value is None or ends is None or ends[0] == ends[1]:
        return number(value)
    text = f"{number(value)} ({span(ends, ' to ' if min(ends) < 0 else '-')})"
    holds_same = same is not None and ends[0] <= same <= ends[1]
    return f"{text}, no difference shown" if holds_same else text


def short(value: float) -> str:
    """A number with three digits and a metric prefix, such as 1.27M."""
    prefix = ""
    for larger in "kMG":
        if value < 999.5:
            break
        value /= 1000
        prefix = larger
    return f"{value:.3g}{prefix}"
