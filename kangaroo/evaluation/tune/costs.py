"""What a drafter's rounds take on this machine, measured by decoding; seconds of replayed rounds.

Rounds of real decoding are laid beside the same rounds replayed, which know how many tokens the
adapter drafted and how many were verified. From both follows what each part takes.

Shapes: N rounds, F parts of the time, K knots.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kangaroo.engine.costs import VerifyCosts
from kangaroo.evaluation.metrics import prefill_seconds
from kangaroo.evaluation.records import MethodRun, write_json
from kangaroo.evaluation.tune.replay import Replay

Kind = tuple[str, str | None]  # a drafter, and what it drafts with

KNOTS = [1, 2, 3, 5, 9, 17, 33]  # widths between which verification is a straight line
TYPICAL = 256  # tokens before a round, where one number is shown
REWEIGHTED = 30  # times, until the fit is that of least absolute deviations
TRUST = 0.02  # of what is known of verification beforehand, beside what was measured


@dataclass(frozen=True)
class Sample:
    """A turn that was decoded, and the same replayed.

    Args:
        prompt_tokens: of its prompt.
        replay: with the rounds of the run.
    """

    prompt_tokens: int
    run: MethodRun
    replay: Replay

    @property
    def rounds(self) -> int:
        """How many rounds both have in common from the first on; all, where replay is exact."""
        run, replay = self.run, self.replay
        ours = zip(replay.emitted, replay.accepted, replay.drafted, strict=True)
        theirs = zip(run.emitted, run.accepted, run.drafted, strict=True)
        pairs = enumerate(zip(ours, theirs, strict=False))
        shorter = min(len(run.emitted), len(replay.emitted))
        return next((i for i, (a, b) in pairs if a != b), shorter)

    @property
    def is_exact(self) -> bool:
        """Whether decoding had the replayed rounds."""
        return self.rounds == len(self.run.emitted) == len(self.replay.emitted)


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of a drafter's parts.

    Args:
        prefill: of a turn, and of each token of its prompt.
        draft: of a round; of a round's first drafted token beside that, and of each later one; of
            each token of the prompt, which the adapter reads in the first round.
        verify: of verifying as many tokens as `KNOTS` says, the pending one included.
        context: of each token before the round, in a verification.
        host: of a round.
    """

    prefill: list[float]
    draft: list[float]
    verify: list[float]
    context: float
    host: float

    def rounds(self, prompt_tokens: int, replay: Replay) -> float:
        """Seconds of all rounds of a turn."""
        draft_NF = draft_parts(prompt_tokens, replay)
        verify_NF = verify_parts(prompt_tokens, replay)
        drafting = draft_NF @ self.draft
        verifying = verify_NF @ [*self.verify, self.context]
        return float(drafting.sum() + verifying.sum() + self.host * len(draft_NF))

    def seconds(self, prompt_tokens: int, replay: Replay) -> float:
        """Seconds of a turn, the prefill included."""
        start, token = self.prefill
        return start + token * prompt_tokens + self.rounds(prompt_tokens, replay)


def draft_parts(prompt_tokens: int, replay: Replay) -> np.ndarray:
    """`[N, F]`: how often each part of `RoundCosts.draft` occurs in each round."""
    chain_N = np.array(replay.chain[1:])
    reads_N = np.zeros(len(chain_N))
    reads_N[:1] = prompt_tokens
    parts = np.ones(len(chain_N)), chain_N > 0, np.maximum(chain_N - 1, 0), reads_N
    return np.stack(parts, 1).astype(float)


def verify_parts(prompt_tokens: int, replay: Replay) -> np.ndarray:
    """`[N, K + 1]`: the share of each knot in a round's width, and its context."""
    width_N = np.minimum(1 + np.array(replay.drafted[1:]), KNOTS[-1])
    hats_NK = np.stack([np.interp(width_N, KNOTS, hat) for hat in np.eye(len(KNOTS))], 1)
    context_N = prompt_tokens + np.array(replay.begins[1:])
    return np.concatenate([hats_NK.reshape(-1, len(KNOTS)), context_N[:, None]], 1)


def fit(samples: Sequence[Sample], prefill: list[float], known: VerifyCosts) -> RoundCosts:
    """The costs that explain these samples best; at least one must have a round in common.

    Args:
        prefill: `prefill_costs` of all drafters.
        known: of verification, on the same machine: its shape fills in widths that no sample has.
    """
    draft, verify, draft_seconds, verify_seconds, host = [], [], [], [], []
    for sample in samples:
        part = slice(0, sample.rounds - 1)
        draft.append(draft_parts(sample.prompt_tokens, sample.replay)[part])
        verify.append(verify_parts(sample.prompt_tokens, sample.replay)[part])
        of_run = slice(1, sample.rounds)
        draft_seconds += sample.run.draft_seconds[of_run]
        verify_seconds += sample.run.verify_seconds[of_run]
        host += sample.run.host_seconds[of_run]
    verify_NF, verify_N = np.concatenate(verify), np.array(verify_seconds)
    # a wider verification never takes less: the knots are sums of steps that are not negative
    sums_FF = np.eye(len(KNOTS) + 1)
    sums_FF[:-1, :-1] = np.tril(np.ones((len(KNOTS), len(KNOTS))))
    rows_NF, seconds_N = with_known(verify_NF, verify_N, known)
    *knots, context = (sums_FF @ least_deviations(rows_NF @ sums_FF, seconds_N)).tolist()
    return RoundCosts(
        prefill=prefill,
        draft=least_deviations(np.concatenate(draft), np.array(draft_seconds)).tolist(),
        verify=knots,
        context=context,
        host=float(np.median(host)),
    )


def prefill_costs(samples: Sequence[Sample]) -> list[float]:
    """Of a turn, and of each token of its prompt: the same work for every drafter."""
    parts_N2 = np.array([[1.0, sample.prompt_tokens] for sample in samples])
    seconds_N = np.array([prefill_seconds(sample.run) for sample in samples])
    return least_deviations(parts_N2, seconds_N).tolist()


def with_known(
    verify_NF: np.ndarray, seconds_N: np.ndarray, known: VerifyCosts
) -> tuple[np.ndarray, np.ndarray]:
    """Rounds, and beside them what is known of each width, on the scale of these rounds."""
    shape_K = np.array([known.at(width) for width in KNOTS])
    scale = float(np.median(seconds_N / (verify_NF[:, :-1] @ shape_K)))
    weight = max(1.0, TRUST * len(seconds_N))
    prior_KF = np.eye(len(KNOTS), verify_NF.shape[1]) * weight
    # at the context of an ordinary round, so that the context's part is not counted twice
    prior_KF[:, -1] = np.median(verify_NF[:, -1]) * weight
    rows = (
        np.concatenate([verify_NF, prior_KF]),
        np.concatenate([seconds_N, scale * shape_K * weight]),
    )
    return rows


def least_deviations(parts_NF: np.ndarray, seconds_N: np.ndarray) -> np.ndarray:
    """`[F]`: what each part takes, none less than nothing, by the sum of absolute deviations: a
    round during which the machine did something else counts as one that was a little late.

    Parts that never occur take nothing.
    """
    found_F = np.zeros(parts_NF.shape[1])
    free_F = np.asarray(parts_NF.any(0))
    while free_F.any():
        weight_N = np.ones(len(seconds_N))
        for _ in range(REWEIGHTED):
            root_N1 = np.sqrt(weight_N)[:, None]
            some_F = np.linalg.lstsq(
                parts_NF[:, free_F] * root_N1, seconds_N * root_N1[:, 0], rcond=None
            )[0]
            rest_N = np.abs(seconds_N - parts_NF[:, free_F] @ some_F)
            weight_N = 1 / np.maximum(rest_N, 1e-3 * np.median(seconds_N) + 1e-12)
        if (some_F >= 0).all():
            found_F[free_F] = some_F
            break
        free_F[np.flatnonzero(free_F)[some_F.argmin()]] = False
    return found_F


def save(file: Path, key: str, costs: Mapping[Kind, RoundCosts], exact: tuple[int, int]) -> None:
    """Keep what was measured, whole or not at all.

    Args:
        key: of all that it was measured with.
        exact: of the turns that were decoded, how many had the replayed rounds.
    """
    told = [
        {"drafter": kind, "source": source} | asdict(own) for (kind, source), own in costs.items()
    ]
    write_json(file, {"key": key, "exact": exact, "costs": told})


def load(file: Path, key: str) -> tuple[dict[Kind, RoundCosts], tuple[int, int]] | None:
    """What was measured with the same; None where nothing was."""
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
        found = {
            (one.pop("drafter"), one.pop("source")): RoundCosts(**one) for one in known["costs"]
        }
    except (OSError, ValueError, KeyError, TypeError):  # not there, or not ours: measured again
        return None
    return (found, (known["exact"][0], known["exact"][1])) if known["key"] == key else None
