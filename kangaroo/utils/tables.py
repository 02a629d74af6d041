"""The one table writer: rows of named cells, in Markdown and for the terminal."""

import re
from collections.abc import Sequence

from rich import box
from rich.table import Table
from rich.text import Text

# A cell by its heading. All rows of a table have the headings of the first.
Row = dict[str, str]


def markdown(rows: Sequence[Row]) -> str:
    """The rows as Markdown, numbers to the right of the first column."""
    cells = [list(rows[0]), *(list(row.values()) for row in rows)]
    # a line break or a bar would end a cell
    first, *others = ([re.sub(r"\s+", " ", x).replace("|", "\\|") for x in line] for line in cells)
    lines = [first, ["---", *["---:"] * (len(first) - 1)], *others]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def terminal(rows: Sequence[Row], title: str | None = None, caption: str | None = None) -> Table:
    """The same for a rich console, all as it is: where room is short, the widest columns fold."""
    table = Table(
        title=title and Text(title),
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
    """With so many decimals; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def share(value: float | None) -> str:
    """In per cent; a dash for none."""
    return "-" if value is None else f"{value:.0%}"


def span(ends: Sequence[float], between: str = " to ") -> str:
    """An interval or a range."""
    return between.join(f"{end:.2f}" for end in ends)


def estimate(value: float | None, ends: Sequence[float] | None, same: float | None = None) -> str:
    """A value and its interval, left out where there is none, or where it has no width; `same` is
    the value that says that there is no difference."""
    if value is None or ends is None or ends[0] == ends[1]:
        return number(value)
    text = f"{number(value)} ({span(ends, ' to ' if min(ends) < 0 else '-')})"
    holds_same = same is not None and ends[0] <= same <= ends[1]
    return f"{text}, no difference shown" if holds_same else text


def short(value: float) -> str:
    """Three digits and a prefix: 1.27M."""
    prefix = ""
    for larger in "kMG":
        if value < 999.5:
            break
        value, prefix = value / 1000, larger
    return f"{value:.3g}{prefix}"
