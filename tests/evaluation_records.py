"""Records of an evaluation, written by hand."""

from kangaroo.evaluation.records import METHOD, Record, Run, Turn


def run(emitted, accepted, drafted, seconds, prefill=1.0, tokens=None, retokenised=None):
    """A text; all of a round's `seconds` but a fifth is drafting and verifying, half each."""
    count = sum(emitted)
    return Run(
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


def record(question_id, *pairs, category="qa", fork=None):
    """A question; each pair is (method's run, vanilla's run or None)."""
    turns = [
        Turn(3, 8, {METHOD: a} if b is None else {METHOD: a, "vanilla": b}, fork) for a, b in pairs
    ]
    return Record(question_id, category, turns, finished=0.0)


SETTINGS = {
    "model": "m",
    "drafter": "d",
    "bench": "b",
    "dtype": "float32",
    "device": "cpu",
    "max_new_tokens": 8,
    "sampling.temperature": 0.0,
    "sampling.rule": "match",
    "baselines": ["vanilla"],
}
ABOUT = {
    "settings": SETTINGS,
    "drafter_cost": {"parameters": 10, "training": {"trained_positions": 1200, "epochs": 2}},
    "provenance": {
        "command": "evaluate.py",
        "git_revision": "abc",
        "time": "now",
        "versions": {"torch": "2"},
        "hardware": {"cpu": "x", "threads": 1, "cuda": None},
    },
}
