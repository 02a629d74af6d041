"""Rounds as decoding and a replay have them: emitted, accepted and drafted tokens of each."""

from __future__ import annotations

from kangaroo.engine.requests import Generation
from kangaroo.evaluation.tune.replay import Replay


def rounds_of(decoded: Generation) -> tuple[list[int], list[int], list[int]]:
    steps = decoded.steps
    emitted = [len(step.tokens) for step in steps]
    return emitted, [step.accepted for step in steps], [step.drafted for step in steps]


def rounds(replayed: Replay) -> tuple[list[int], list[int], list[int]]:
    return replayed.emitted, replayed.accepted, replayed.drafted
