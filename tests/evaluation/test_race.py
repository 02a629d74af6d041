"""The race: what is shown when, in a terminal and into a pipe."""

import io
import re

import pytest
from evaluation_worker import tiny_lm
from helpers import adapter_for
from rich.console import Console

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.requests import Generation, StepRecord
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.race import Runner, frame, race, timed_pieces
from kangaroo.models.loading import byte_tokenizer


@pytest.fixture
def runner():
    """A prompt of a second, then half a second that accepts the one draft token of three."""
    tokenizer = byte_tokenizer()
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    steps = [StepRecord([a], 0, 0, 0.0, 0.0, 0.0), StepRecord([b, c], 1, 3, 0.2, 0.2, 0.1)]
    answer = Generation([a, b, c], steps, "length", prefill_seconds=1.0)
    return Runner("kangaroo", answer, list(timed_pieces(answer, tokenizer)))


@pytest.mark.parametrize(
    "now, text, speed",
    [(0.9, "", ""), (1.0, "a", ""), (1.4, "a", ""), (1.5, "abc", "2.0 tokens/s")],
)
def test_an_answer_grows_at_the_times_of_its_steps(runner, now, text, speed):
    shown = runner.text(now)
    assert shown.plain == text
    assert [shown.plain[s.start : s.end] for s in shown.spans] == ["b"] * ("b" in text)
    (column,) = frame([runner], now, Console(width=80)).columns
    assert column.footer == speed
    runner.pieces = [(now, f"line {i}\n", False) for i in range(9)]
    (column,) = frame([runner], now, Console(width=80), lines=3).columns
    (cell,) = column.cells  # of a long answer the last lines
    assert "line 5" not in cell.plain and "line 7" in cell.plain


def run(**options) -> str:
    lm, console = tiny_lm(), Console(file=io.StringIO(), width=100, **options)
    drafters = {"vanilla": Vanilla(), "kangaroo": Kangaroo(lm, adapter_for(lm), threshold=0)}
    race(lm, byte_tokenizer(), drafters, "Why?", 12, Sampling(temperature=1.0), console)
    return console.file.getvalue()


def test_a_terminal_shows_drafts_in_green_and_a_pipe_each_answer_once():
    text = run(force_terminal=True, height=24)
    assert "\x1b[32m" in text and text.rpartition("vanilla")[2].count("tokens/s") == 2
    text = run()
    assert "\x1b[" not in text and text.count("tokens/s") == 2
    answers = re.fullmatch(r"Why\?\n\nvanilla: .*?\n(.*)\n\nkangaroo: .*?\n(.*)\n", text, re.DOTALL)
    assert answers and answers[1] == answers[2]
