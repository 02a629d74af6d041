"""Decode a few turns with each drafter, taking turns, to learn what its rounds take."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from kangaroo.engine.costs import measure as measure_verification
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.methods import Decoder, by_engine
from kangaroo.evaluation.records import MethodRun
from kangaroo.evaluation.tune.candidates import Candidate, SearchSpace, Source, candidates, chain
from kangaroo.evaluation.tune.costs import Kind, RoundCosts, Sample, fit, prefill_costs
from kangaroo.evaluation.tune.player import VANILLA, Player
from kangaroo.evaluation.tune.trace import TracedQuestion, Turn
from kangaroo.models.target import LM
from kangaroo.utils.errors import ConfigError

GLANCE = 12  # tokens that vanilla decodes between two runs, to see how fast the machine is then


def measure(
    lm: LM,
    tokenizer: PreTrainedTokenizerBase,
    player: Player,
    space: SearchSpace,
    questions: Sequence[TracedQuestion],
    turns: int,
    max_new_tokens: int,
) -> tuple[dict[Kind, RoundCosts], tuple[int, int]]:
    """What the rounds of each drafter take on this machine, now; and of the turns that were
    decoded, how many had the replayed rounds, and how many there were.

    Args:
        turns: so many are decoded, with short prompts and with long ones.
        max_new_tokens: of each.

    Errors: `ConfigError` where a drafter's rounds are not the replayed ones from the first on.
    """
    timed = to_be_timed(space, list(player.sources.values()))
    sampling = Sampling()
    methods = [by_engine(Engine(lm, one.config.build(lm)), tokenizer, sampling) for one in timed]
    chosen = spread([turn for question in questions for turn in question.turns], turns)
    chosen = [turn.cut(max_new_tokens) for turn in chosen]
    for method in methods:  # what only the first run takes
        method(chosen[0].prompt, 2, 0)
    samples: dict[Kind, list[Sample]] = defaultdict(list)
    for number, turn, run in in_turns(methods, chosen):
        candidate = timed[number]
        sample = Sample(len(turn.prompt), run, player.of(candidate)(turn))
        samples[candidate.kind, candidate.source].append(sample)
    with torch.inference_mode():
        known = measure_verification(lm)
    prefill = prefill_costs([sample for own in samples.values() for sample in own])
    costs = {}
    for kind, own in samples.items():
        if not any(sample.rounds > 1 for sample in own):
            raise ConfigError(
                f"{kind[0]} decodes otherwise than its replay from the first round on, so its "
                "rounds cannot be timed. Raise measure_turns or measure_tokens; if that does not "
                "help, leave it out of search.drafters."
            )
        # a cascade's rounds are prompt lookup's and Kangaroo's; the latter's tell more
        more = samples["kangaroo", kind[1]] if kind[0] == "cascade" else []
        costs[kind] = fit([*own, *more], prefill, known)
    exact = [sample.is_exact for own in samples.values() for sample in own]
    return costs, (sum(exact), len(exact))


def in_turns(
    methods: Sequence[Decoder], turns: Sequence[Turn]
) -> list[tuple[int, Turn, MethodRun]]:
    """Every turn as each method decodes it, by the method's number; the first is vanilla decoding.

    A machine shared with others changes its speed by a tenth within a minute: more than two methods
    differ by. So vanilla decoding shows between all runs how fast it is, and times are told as they
    would have been at its usual speed.
    """
    found, glances = [], [glance(methods[0], turns[0])]
    for count, turn in enumerate(tqdm(turns, unit="turn", desc="measuring")):
        for number in list(range(len(methods)))[:: -1 if count % 2 else 1]:
            found.append((number, turn, methods[number](turn.prompt, len(turn.text), 0)))
            glances.append(glance(methods[0], turns[0]))
    usual = float(np.median(glances))
    return [
        (number, turn, at_pace(run, (before + after) / 2 / usual))
        for (number, turn, run), (before, after) in zip(
            found, itertools.pairwise(glances), strict=True
        )
    ]


def glance(vanilla: Decoder, turn: Turn) -> float:
    """Seconds of a step of vanilla decoding, now."""
    return float(np.median(vanilla(turn.prompt, GLANCE, 0).verify_seconds[1:]))


def at_pace(run: MethodRun, pace: float) -> MethodRun:
    """The run on a machine that needs 1 / `pace` of the time for everything."""
    draft, verify, host = (
        [seconds / pace for seconds in part]
        for part in (run.draft_seconds, run.verify_seconds, run.host_seconds)
    )
    return replace(
        run,
        seconds=run.seconds / pace,
        draft_seconds=draft,
        verify_seconds=verify,
        host_seconds=host,
    )


def to_be_timed(space: SearchSpace, sources: Sequence[Source]) -> list[Candidate]:
    """Candidates from whose rounds those of all others can be foreseen: of each drafter and source
    short and long chains, narrow and wide verifications.
    """
    longest = max(space.steps)
    timed = [VANILLA]
    timed += [
        chain(source, 0.0, steps)
        for source in sources
        for steps in sorted({1, (1 + longest) // 2, longest})
    ]
    by_kind: dict[Kind, list[Candidate]] = defaultdict(list)
    for candidate in candidates(space, sources):
        by_kind[candidate.kind, candidate.source].append(candidate)
    for (kind, _), own in by_kind.items():
        if kind == "cascade":
            timed.append(own[-1])
        elif kind != "kangaroo":
            timed += [own[0], own[-1]] if len(own) > 1 else own
    return timed


def spread(turns: Sequence[Turn], count: int) -> list[Turn]:
    """So many turns with more than one token, from short prompts to long ones: the middle of as
    many parts of equal size.

    Errors: `ConfigError` where no text has a round.
    """
    known = sorted((t for t in turns if len(t.text) > 1), key=lambda turn: len(turn.prompt))
    if not known:
        raise ConfigError("every answer is a single token, so there is no round to be timed.")
    count = min(count, len(known))
    return [known[(2 * part + 1) * len(known) // (2 * count)] for part in range(count)]
