"""Records and results of an evaluation, written by hand."""

import io
import json

from rich.console import Console

from kangaroo.evaluation import comparison, summary
from kangaroo.evaluation.records import METHOD, MethodRun, Record, Turn, Writer


def run(emitted, accepted, drafted, seconds, prefill=1.0, tokens=None, retokenised=None):
    """A text; all of a round's `seconds` but a fifth is drafting and verifying, half each."""
    count = sum(emitted)
    return MethodRun(
        tokens=list(range(count)) if tokens is None else tokens,
        text="text",
        finish="length",
        retokenised=count + 1 if retokenised is None else retokenised,
        seconds=prefill + sum(seconds),
        emitted=emitted,
        accepted=accepted,
        drafted=drafted,
        draft_seconds=[0.4 * s for s in seconds],
        verify_seconds=[0.4 * s for s in seconds],
        host_seconds=[0.2 * s for s in seconds],
    )


def vanilla_run(count, seconds=1.0, **others):
    return run([1] * count, [0] * count, [0] * count, [seconds] * count, **others)


def hf_run(count, seconds):
    """An answer of an earlier record of transformers, which tells no rounds."""
    return MethodRun(list(range(count)), "text", "length", count, seconds, *([] for _ in range(6)))


def record(question_id, *pairs, category="qa", fork=None, prompts=(3, 3)):
    """A question; each pair is (method's run, vanilla's run or None), `prompts` the length of each
    one's prompt.
    """
    turns = [
        Turn(length, 8, {METHOD: a} if b is None else {METHOD: a, "vanilla": b}, fork)
        for length, (a, b) in zip(prompts, pairs, strict=False)
    ]
    return Record(question_id, category, turns, finished=0.0)


SETTINGS = {"model": "m", "drafter": "d", "bench": "b", "dtype": "float32", "device": "cpu"}
SETTINGS |= {"max_new_tokens": 8, "sampling.temperature": 0.0, "sampling.rule": "match"}
SETTINGS["baselines"] = ["vanilla"]
COST = {"parameters": 10, "training": {"trained_positions": 1200, "epochs": 2}}
PROVENANCE = {"command": "evaluate.py", "git_revision": "abc", "time": "now"}
PROVENANCE |= {"versions": {"torch": "2"}, "hardware": {"cpu": "x", "threads": 1, "cuda": None}}


def summarised(records, cost=COST, **settings):
    """The summary of a run."""
    about = {"settings": SETTINGS | settings, "drafter_cost": cost, "provenance": PROVENANCE}
    return summary.summarise(records, about)


def finish(folder, records, cost=COST, **settings):
    """A finished run, called as its folder where nothing else is said."""
    folder.mkdir(parents=True)
    writer = Writer(folder)
    for each in records:
        writer.append(each)
    writer.close()
    result = summarised(records, cost, **{"drafter": folder.name} | settings)
    (folder / "summary.json").write_text(json.dumps(result))


def shown(compared):
    """A comparison as a terminal of 80 columns shows it."""
    text = io.StringIO()
    comparison.show(compared, Console(width=80, file=text))
    assert max(map(len, text.getvalue().partition(":")[0].splitlines())) <= 80
    return " ".join(text.getvalue().split())
