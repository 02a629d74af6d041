"""Candidates replayed on traces: which rounds each has, what these take, and how fast that is.

Shapes: Q questions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kangaroo.cpu.stepper import runs_natively
from kangaroo.drafters import odds
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.drafters.early_exit import EarlyExitConfig
from kangaroo.drafters.expected_gain import Costs
from kangaroo.drafters.hybrid import HybridConfig, verify_curve
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTreeConfig
from kangaroo.drafters.odds import Odds
from kangaroo.drafters.prompt_lookup import PromptLookup, PromptLookupConfig
from kangaroo.drafters.vanilla import VanillaConfig
from kangaroo.engine.costs import measured
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.statistics import interval, speedup
from kangaroo.evaluation.tune import replay
from kangaroo.evaluation.tune.candidates import Candidate, Source, parts
from kangaroo.evaluation.tune.costs import Kind, RoundCosts
from kangaroo.evaluation.tune.replay import Chains, HybridSettings, Replay
from kangaroo.evaluation.tune.trace import TracedQuestion, Turn
from kangaroo.evaluation.tune.trees import trees
from kangaroo.models.target import LM

Replayer = Callable[[Turn], Replay]
# What was measured of each drafter, by kind and source.
CostsOf = Mapping[Kind, RoundCosts]
VANILLA = Candidate(VanillaConfig("vanilla"))


class Player:
    """Replays candidates.

    Args:
        sources: that the traces were made with, by name.
    """

    def __init__(self, lm: LM, sources: Mapping[str, Source]):
        self.lm, self.sources = lm, sources
        self.ends = frozenset(lm.eos_ids())
        self.odds: dict[str, Odds] = {}
        # by turn and settings; the turn is kept, so that no other gets its id
        self.lookups: dict[tuple[int, str], tuple[Turn, Chains]] = {}

    def of(self, candidate: Candidate) -> Replayer:
        """What gives the rounds of each turn.

        Errors: those of `kangaroo.drafters.odds.read`.
        """
        config, ends = candidate.config, self.ends
        if isinstance(config, VanillaConfig):
            return replay.nothing
        if isinstance(config, PromptLookupConfig):
            return lambda turn: self._looked_up(config, turn).replay(turn)
        source = candidate.source
        assert source is not None
        if isinstance(config, CascadeConfig):
            first, chain = config.first, (config.second.threshold, config.second.steps)

            def play(turn: Turn) -> Replay:
                second = replay.chains(turn, turn.drafted[source], *chain)
                return self._looked_up(first, turn).where_none(second).replay(turn)

            return play
        if isinstance(config, HybridConfig):
            settings = self._settings(config, self.sources[source])
            return lambda turn: replay.hybrid(turn, turn.drafted[source], settings, ends)
        assert isinstance(config, KangarooConfig | KangarooTreeConfig)
        threshold, steps = config.threshold, config.steps
        if isinstance(config, KangarooTreeConfig):
            name = self.sources[source].tree_name
            limits = threshold, steps, config.nodes, config.least
            return lambda turn: trees(turn, turn.grown[name], *limits).replay(turn)
        return lambda turn: replay.chain(turn, turn.drafted[source], threshold, steps)

    def knows(self, candidate: Candidate) -> bool:
        """Whether the traces tell its rounds."""
        config = candidate.config
        if isinstance(config, CascadeConfig):
            first, second = (Candidate(part, candidate.source) for part in parts(config))
            of_kinds = first.kind == "prompt_lookup" and second.kind == "kangaroo"
            return of_kinds and not config.extend and self.knows(first) and self.knows(second)
        if isinstance(config, PromptLookupConfig):
            return config.reference is None
        if not isinstance(config, EarlyExitConfig) or candidate.source is None:
            return isinstance(config, VanillaConfig)
        source = self.sources[candidate.source]
        if config.steps > source.drafter.steps:
            return False
        if isinstance(config, KangarooTreeConfig):
            return source.tree is not None and config.top_k == source.tree.top_k
        if isinstance(config, HybridConfig):
            return config.reference is None
        return isinstance(config, KangarooConfig)

    def _looked_up(self, config: PromptLookupConfig, turn: Turn) -> Chains:
        """What prompt lookup finds; kept, since cascades ask again."""
        key = id(turn), repr(config)
        if key not in self.lookups:
            drafter = PromptLookup(config.max_matching_ngram_size, config.num_pred_tokens)
            self.lookups[key] = turn, replay.text_chains(turn, drafter, self.ends)
        return self.lookups[key][1]

    def _settings(self, config: HybridConfig, source: Source) -> HybridSettings:
        """By the numbers that decoding takes too."""
        if config.adapter not in self.odds:
            self.odds[config.adapter] = config.counted() or odds.assumed()
        if config.verify_costs is not None:
            verify, draft_cost = verify_curve(config.verify_costs, config.nodes), config.draft_cost
            states = 0.0
        else:
            verify = measured(self.lm).curve(1, config.nodes)
            draft_cost = source.drafter.draft_cost
            native = runs_natively(self.lm, source.drafter, Sampling())
            states = source.drafter.shallow_cost if native else 0.0
        costs = Costs(verify, draft_cost, config.pace, states)
        limits = config.threshold, config.steps, config.nodes
        return HybridSettings(self.odds[config.adapter], costs, *limits)


@dataclass(frozen=True)
class Score:
    """A candidate as replay foresees it, over some questions.

    Args:
        pairs_Q2: seconds of vanilla and of the candidate.
        counts_Q4: tokens, forwards of the target, accepted tokens, drafted tokens.
        tasks: the task of each question.
    """

    candidate: Candidate
    pairs_Q2: np.ndarray
    counts_Q4: np.ndarray
    tasks: tuple[str, ...]

    @property
    def speedup(self) -> float:
        """Over vanilla decoding."""
        return speedup(self.pairs_Q2)

    @property
    def interval(self) -> list[float] | None:
        """95% interval of the speedup over questions; one question has none."""
        return interval(self.pairs_Q2)

    @property
    def compression_rate(self) -> float:
        """Tokens emitted per forward of the target."""
        tokens, forwards, _, _ = self.counts_Q4.sum(0)
        return float(tokens / forwards)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None where nothing was drafted."""
        _, _, accepted, drafted = self.counts_Q4.sum(0)
        return float(accepted / drafted) if drafted else None

    def of(self, chosen_Q: np.ndarray) -> Score:
        """The same over some of the questions, given as truth values or indices."""
        tasks = tuple(np.array(self.tasks)[chosen_Q].tolist())
        return Score(self.candidate, self.pairs_Q2[chosen_Q], self.counts_Q4[chosen_Q], tasks)

    def by_task(self) -> dict[str, Score]:
        """Of each task, in order of appearance."""
        tasks = np.array(self.tasks)
        return {task: self.of(tasks == task) for task in dict.fromkeys(self.tasks)}


def vanilla_seconds(questions: Sequence[TracedQuestion], costs: CostsOf) -> np.ndarray:
    """Of vanilla decoding, `[Q]`."""
    vanilla = costs[VANILLA.kind, None]
    seconds = [
        sum(vanilla.seconds(len(turn.prompt), replay.nothing(turn)) for turn in question.turns)
        for question in questions
    ]
    return np.array(seconds)


def score(
    candidate: Candidate,
    play: Replayer,
    questions: Sequence[TracedQuestion],
    costs: CostsOf,
    vanilla_Q: np.ndarray,
) -> Score:
    """A candidate on these questions.

    Args:
        vanilla_Q: `vanilla_seconds` of them.
    """
    own = costs[candidate.kind, candidate.source]
    seconds, counts = [], []
    for question in questions:
        rounds = [play(turn) for turn in question.turns]
        pairs = zip(question.turns, rounds, strict=True)
        seconds.append(sum(own.seconds(len(turn.prompt), replayed) for turn, replayed in pairs))
        tokens = sum(sum(replayed.emitted) for replayed in rounds)
        forwards = sum(len(replayed.emitted) for replayed in rounds)
        accepted = sum(sum(replayed.accepted) for replayed in rounds)
        drafted = sum(sum(replayed.drafted) for replayed in rounds)
        counts.append((tokens, forwards, accepted, drafted))
    tasks = tuple(question.task for question in questions)
    return Score(candidate, np.stack([vanilla_Q, seconds], 1), np.array(counts), tasks)
