"""Servers under load: who is asked when, what is kept and made of it, and what can go wrong."""

import json
import sys
from contextlib import nullcontext
from importlib import import_module
from unittest.mock import patch

import pytest
from commands import ROOT

from kangaroo.utils.errors import ConfigError

sys.path.append(str(ROOT / "integrations/load_test"))
load_test = import_module("load_test")
load_report = import_module("load_report")
SPEED = {"vanilla": {1: 10.0, 4: 30.0, 16: 60.0}, "ours": {1: 15.0, 4: 33.0, 16: 57.0}}


def written(texts: dict[str, str], speed: float = 10.0, tokens: int = 5, **changes) -> str:
    """A file of guidellm's, as far as it is read."""

    def request(text: str) -> str:
        message = {"role": "user", "content": [{"type": "text", "text": text}]}
        return json.dumps({"body": {"messages": [message]}})

    means = {"output_tokens_per_second": speed, "time_to_first_token_ms": 1000 / speed}
    means |= {"inter_token_latency_ms": 500 / speed, "request_latency": 8 / speed}
    means["iter_tokens_per_iteration"] = 1.5
    done = [
        {"request_args": request(text), "output": out, "output_metrics": {"total_tokens": tokens}}
        for text, out in texts.items()
    ]
    requests = {"successful": done, "errored": [], "incomplete": []} | changes
    metrics = {name: {"successful": {"mean": mean}} for name, mean in means.items()}
    return json.dumps({"benchmarks": [{"requests": requests, "metrics": metrics}]})


def summary_of(measured, **settings):
    settings |= {"bench": "demo", "max_new_tokens": 5}
    begun = {"command": "it", "git_revision": "abc", "time": "now"}
    begun["hardware"] = {"cpu": "x", "threads": 2, "cuda": None}
    return load_report.summarise(measured, {"settings": settings, "provenance": begun})


def test_methods_take_turns_and_ratios_are_taken_within_rounds(tmp_path):
    assert [(c.round, c.users, c.method) for c in load_test.cells(2, [1, 8], ["a", "b"])] == [
        *((0, 1, "a"), (0, 1, "b"), (0, 8, "a"), (0, 8, "b")),
        *((1, 1, "b"), (1, 1, "a"), (1, 8, "b"), (1, 8, "a")),
    ]
    measured = {}
    for cell in load_test.cells(3, [1, 4, 16], list(SPEED)):
        texts = {"why": "so", "how": "no" if cell.method == "ours" and cell.users == 16 else "so"}
        speed = SPEED[cell.method][cell.users] / (1 + cell.round)
        (tmp_path / "cell.json").write_text(written(texts, speed))
        measured[cell] = load_test.read(tmp_path / "cell.json", 2, 5)
    summary = summary_of(measured, requests=2, temperature=0.0, stream=True)
    page = load_report.markdown(summary)
    assert "| 4 | ours | 16.5 (1.10x) | 60.6 (0.91x) | 30.3 (0.91x) | 0.5 (0.91x) |" in page
    assert "| 6/6 |" in page and "| 3/6 |" in page
    assert "more tokens/s than vanilla in every round at 1, 4, fewer at 16 of these" in page
    assert "| 0.95-0.95 |" in page and "temperature 0, streamed" in page
    load_report.curves(summary).savefig(tmp_path / "load.png")
    alone = {cell: numbers for cell, numbers in measured.items() if cell.method == "ours"}
    summary = summary_of(alone, requests=2, temperature=0.0, stream=True)
    assert summary["verdicts"] == [] and "x)" not in load_report.markdown(summary)
    load_report.curves(summary).savefig(tmp_path / "load.png")


@pytest.mark.parametrize(
    "words, message",
    [
        (["--users", "0"], "--users: invalid positive value: '0'"),
        (["--rounds", "-1"], "--rounds: invalid positive value: '-1'"),
        (["--users", "64"], "--requests 32 are fewer than the 64 of --users"),
        (["a="], "'a=': pass a DRAFTER"),
        (["vanilla", "vanilla"], "two methods are called vanilla"),
    ],
)
def test_options_that_measure_nothing_are_refused(words, message, capsys):
    with pytest.raises(SystemExit):
        load_test.parsed(words)
    assert message in capsys.readouterr().err


def test_answers_that_are_not_streamed_have_no_first_token(tmp_path):
    measured = {}
    for cell in load_test.cells(1, [1], list(SPEED)):
        file = json.loads(written({"why": "so"}, SPEED[cell.method][1]))
        for name, of_all in file["benchmarks"][0]["metrics"].items():
            if "token_" in name or name.startswith("iter"):  # of one token after the other
                of_all["successful"]["mean"] = 0
        (tmp_path / "cell.json").write_text(json.dumps(file))
        measured[cell] = load_test.read(tmp_path / "cell.json", 1, 5)
    summary = summary_of(measured, requests=1, temperature=1.0, stream=False)
    page = load_report.markdown(summary)
    assert "temperature 1, not streamed" in page
    assert "| 1 | ours | 15.0 (1.50x) | - | - | 0.5 (0.67x) | 1.50-1.50 | - |" in page
    assert len(load_report.curves(summary).axes) == 2


def run(folder, *words, ask):
    """All cells, with `ask` in place of guidellm."""
    cells = []

    def client(server, prompts, requests, users, output, **how):
        output.parent.mkdir(parents=True, exist_ok=True)
        rows = [json.loads(line) for line in prompts.read_text().splitlines()]
        if "warmup" not in output.name:
            cells.append(output.stem)
            requests = ask(output.stem, cells, requests)
        output.write_text(written({row["prompt"]: "text" for row in rows[:requests]}))

    small = "--users 1 2 --requests 2 --max-new-tokens 5 --output".split()
    options, methods = load_test.parsed(["a=drafter=x", "b=drafter=y", *small, str(folder), *words])
    fakes = {"ask": client, "serving": lambda *args: nullcontext(load_test.Server(*args))}
    with patch.multiple(load_test, find_spec=bool, version=str, **fakes):
        try:
            return load_test.measure(options, methods), cells
        except KeyboardInterrupt:
            return None, cells


def test_a_run_that_was_stopped_measures_what_is_missing(tmp_path):
    def stops(name, cells, requests):
        if len(cells) == 4:
            raise KeyboardInterrupt
        return requests

    def all_of_them(name, cells, requests):
        """But once guidellm asks too few, and says that all is well."""
        return requests - (name == "1-2-a" and cells.count(name) < 2)

    _, first = run(tmp_path, "--rounds", "2", ask=stops)
    measured, second = run(tmp_path, "--rounds", "2", ask=all_of_them)
    assert len(measured) == 8 and len(second) == 6 and not set(first[:3]) & set(second)
    assert len(run(tmp_path, ask=all_of_them)[0]) == 12  # goes on with a third round
    with pytest.raises(ConfigError, match="requests=2 there, 3 now"):
        run(tmp_path, "--requests", "3", ask=all_of_them)
