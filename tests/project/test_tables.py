"""The one table writer."""

import io

from rich.console import Console

from kangaroo.utils import tables

ROWS = [
    {"method": "vanilla", "speedup": "1.00", "95%": "-"},
    {"method": "kangaroo", "speedup": "1.25", "95%": "1.20-1.31"},
]


def printed(table, width):
    text = io.StringIO()
    Console(width=width, file=text).print(table)
    return text.getvalue()


def test_a_page_and_a_terminal_have_the_same_rows():
    assert tables.markdown(ROWS).splitlines() == [
        "| method | speedup | 95% |",
        "| --- | ---: | ---: |",
        "| vanilla | 1.00 | - |",
        "| kangaroo | 1.25 | 1.20-1.31 |",
    ]
    lines = printed(tables.terminal(ROWS, "Title", "Caption"), 80).splitlines()
    words = [line.split() for line in lines]
    assert words[0] == ["Title"] and words[-1] == ["Caption"]
    assert list(ROWS[0]) in words and all(list(row.values()) in words for row in ROWS)


def test_numbers_are_shortened_to_three_digits():
    texts = {0: "0", 66: "66", 999: "999", 1000: "1k", 885_888: "886k", 1_267_359: "1.27M"}
    assert {value: tables.short(value) for value in texts} == texts


def test_what_a_user_named_stays_within_its_cell_as_it_is():
    rows = [{"task": "a|b\nc", "[bold]": "[/x] :smile:"}]
    assert tables.markdown(rows).splitlines()[2] == r"| a\|b c | [/x] :smile: |"
    text = printed(tables.terminal(rows, "on [red]", "by [x]"), 80)
    assert all(part in text for part in ("[bold]", "[/x] :smile:", "on [red]", "by [x]", "a|b"))
