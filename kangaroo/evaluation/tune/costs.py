"""What replayed rounds take, by the numbers that decoding itself decides by; scores of candidates.

The unit is a vanilla step. Verification takes what `kangaroo.engine.costs` measured, a drafted
token the share of the target's weights that is read for it (`EarlyExit.draft_cost`).

Shapes: N rounds, or widths of one; Q questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kangaroo.evaluation.metrics import compression_rate
from kangaroo.evaluation.statistics import speedup
from kangaroo.evaluation.tune.candidates import Candidate, Source
from kangaroo.evaluation.tune.replay import Player, Replay
from kangaroo.evaluation.tune.trace import TracedQuestion


def steps(replay: Replay, verify_N: np.ndarray, source: Source | None) -> float:
    """What the rounds of a turn take, the prefill aside.

    Args:
        verify_N: of verifying 0, 1, ... drafted tokens (`VerifyCosts.curve`).
        source: what drafted; None reads the text alone.
    """
    round_N = verify_N[replay.drafted[1:]]
    if source is not None:
        drafter, chain_N = source.drafter, np.array(replay.chain[1:])
        # where an adapter drafted, verification begins at its exit: the drafted tokens have passed
        # the layers below, and the pending one as well
        saved_N = np.where(chain_N > 0, drafter.shallow_cost * (round_N - 1), 0.0)
        round_N = round_N + drafter.draft_cost * chain_N - saved_N
    return float(round_N.sum())


@dataclass(frozen=True)
class Score:
    """A candidate as replay foresees it, over some questions.

    Args:
        pairs_Q2: steps of vanilla decoding, and what the candidate takes in these.
        counts_Q2: tokens, and forwards of the target.
    """

    candidate: Candidate
    pairs_Q2: np.ndarray
    counts_Q2: np.ndarray

    @property
    def speedup(self) -> float:
        """Of decoding, prompts not included."""
        return speedup(self.pairs_Q2)

    @property
    def compression_rate(self) -> float:
        """Tokens emitted per forward of the target."""
        return compression_rate(*self.counts_Q2.sum(0))


def score(
    candidate: Candidate,
    player: Player,
    questions: Sequence[TracedQuestion],
    verify_N: np.ndarray,
) -> Score:
    """A candidate on these questions; see `steps`."""
    play, source = player.of(candidate), player.sources.get(candidate.source or "")
    pairs, counts = [], []
    for question in questions:
        replays = [play(turn) for turn in question.turns]
        tokens = sum(len(turn.text) for turn in question.turns)
        took = sum(steps(replay, verify_N, source) for replay in replays)
        pairs.append((tokens - len(replays), took))
        counts.append((tokens, sum(len(replay.emitted) for replay in replays)))
    return Score(candidate, np.array(pairs, float), np.array(counts))
