"""Decode again from a trace: the rounds that a drafter would have had, without any model.

Greedy decoding writes the target's own text whatever is drafted. So a round is known from the place
where it begins: what is drafted there, and how far the text says the same.

Shapes: P positions where a round can begin, S draft steps, C nodes of a step, N nodes of a whole
tree, the root first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kangaroo.cpu.stepper import runs_natively
from kangaroo.drafters.base import DrafterConfig, FromText, limit
from kangaroo.drafters.cascade import CascadeConfig
from kangaroo.drafters.hybrid import Hybrid, HybridConfig, Lookup
from kangaroo.drafters.kangaroo import KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTreeConfig, kept
from kangaroo.drafters.prompt_lookup import PromptLookup, PromptLookupConfig
from kangaroo.drafters.suffix import shared
from kangaroo.engine.batch import Batch
from kangaroo.engine.budget import Budget, free
from kangaroo.engine.cache import KVCache
from kangaroo.engine.costs import measured
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.evaluation.tune.candidates import TREES, Candidate, Source
from kangaroo.evaluation.tune.trace import Drafts, Turn
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import ConfigError


@dataclass
class Replay:
    """The rounds of a turn, the prefill's first, as `evaluation.records.MethodRun` has them.

    Args:
        emitted, accepted, drafted: tokens of each round.
        chain: tokens, or levels of a tree, that the adapter drafted in each, verified or not.
    """

    emitted: list[int] = field(default_factory=lambda: [1])
    accepted: list[int] = field(default_factory=lambda: [0])
    drafted: list[int] = field(default_factory=lambda: [0])
    chain: list[int] = field(default_factory=lambda: [0])

    def add(self, right: int, left: int, drafted: int, chain: int) -> None:
        """A round: the text, which has so many tokens left, follows so many drafted ones."""
        self.emitted.append(min(right + 1, left))
        self.accepted.append(right)
        self.drafted.append(drafted)
        self.chain.append(chain)


Replayer = Callable[[Turn], Replay]


class Player:
    """Replays candidates.

    Args:
        sources: that the traces were made with, by name.
    """

    def __init__(self, lm: TargetModel, sources: Mapping[str, Source]):
        self.lm, self.sources = lm, sources
        self.ends = frozenset(lm.eos_ids())
        # by turn and settings; the turn is kept, so that no other gets its id
        self.lookups: dict[tuple[int, str], tuple[Turn, np.ndarray]] = {}

    def of(self, candidate: Candidate) -> Replayer:
        """What gives the rounds of each turn."""
        config, name = candidate.config, candidate.source or ""
        if not isinstance(config, HybridConfig):
            return lambda turn: rounds(turn, self.drafted(config, name, turn))
        drafter = config.of(self.lm, *self.sources[name].trained)
        shared_states = runs_natively(self.lm, drafter, Sampling())
        drafter.take_costs(Budget(lambda: measured(self.lm)), 1, shared_states)
        return lambda turn: hybrid(turn, name, drafter, self.ends) if turn.drafts else Replay()

    def drafted(self, config: DrafterConfig, source: str, turn: Turn) -> np.ndarray:
        """`[P, 3]`: of what is drafted from each position all that rounds depend on: the number of
        tokens, how many of them the text follows, and how many (or a tree's levels) an adapter
        drafted.
        """
        if len(turn.text) == 1:
            return np.zeros((0, 3), int)
        if isinstance(config, CascadeConfig):
            parts = config.first, config.second
            first_P3, second_P3 = (self.drafted(part, source, turn) for part in parts)
            return np.where(first_P3[:, :1] > 0, first_P3, second_P3)
        if isinstance(config, KangarooConfig):
            return chains(turn, turn.drafts[source], limit(config.threshold)[0], config.steps)
        if isinstance(config, KangarooTreeConfig):
            limits = limit(config.threshold)[0], config.steps, config.nodes, config.min_confidence
            return trees(turn, turn.drafts[source + TREES], *limits)
        assert isinstance(config, PromptLookupConfig)
        key = id(turn), repr(config)
        if key not in self.lookups:  # cascades ask again and again
            drafter = PromptLookup(config.max_matching_ngram_size, config.num_pred_tokens)
            self.lookups[key] = turn, text_chains(turn, drafter, self.ends)
        return self.lookups[key][1]


def rounds(turn: Turn, drafted_P3: np.ndarray) -> Replay:
    """A draft begins where the last round ended.

    Args:
        drafted_P3: as of `Player.drafted`.
    """
    replay, size, at = Replay(), len(turn.text), 1
    drafted = drafted_P3.tolist()
    while at < size:
        count, right, by_adapter = drafted[at - 1]
        replay.add(right, size - at, count, by_adapter)
        at += right + 1
    return replay


def chains(turn: Turn, drafts: Drafts, threshold: float, steps: int) -> np.ndarray:
    """What Kangaroo drafts, `[P, 3]`: exactly as `drafter=kangaroo` with these settings.

    Errors: `ConfigError` where the trace has no chain of so many steps.
    """
    check_steps(drafts, steps)
    # compared as decoding does: a probability in float32, and the threshold as well
    unsure_PS = drafts.chances_PSC[:, :steps, 0] <= np.float32(threshold)
    unsure_PS[:, -1:] = True
    counts_P = unsure_PS.argmax(1) + 1
    same_PS = drafts.tokens_PSC[..., 0] == coming(turn, drafts.steps)
    right_P = np.minimum(counts_P, np.logical_and.accumulate(same_PS, axis=1).sum(1))
    return np.stack([counts_P, right_P, counts_P], 1)


def trees(
    turn: Turn,
    drafts: Drafts,
    threshold: float,
    steps: int,
    nodes: int,
    min_confidence: float | None = None,
) -> np.ndarray:
    """What Kangaroo drafts as trees, `[P, 3]`: exactly as `drafter=kangaroo_tree` with these
    settings and the `top_k` of the trace.

    Errors: `ConfigError` where the trace has no tree of so many levels.
    """
    check_steps(drafts, steps)
    assert drafts.parents_PSC is not None
    tokens_PSC, scores_PSC, parents_PSC = (
        part[:, :steps] for part in (drafts.tokens_PSC, drafts.chances_PSC, drafts.parents_PSC)
    )
    unsure_PS = scores_PSC.max(2) <= np.float32(threshold)
    unsure_PS[:, -1:] = True
    levels_P = unsure_PS.argmax(1) + 1
    count, _, width = tokens_PSC.shape
    first_S = 1 + width * (np.arange(steps) - 1)  # node of each level's parents that comes first
    numbers_PSC = parents_PSC + first_S[:, None]
    numbers_PSC[:, 0] = 0  # the root
    valid_PSC = np.repeat((np.arange(steps) < levels_P[:, None])[..., None], width, 2)

    def with_root(part_PSC: np.ndarray, root: float) -> Tensor:
        flat = part_PSC.reshape(count, steps * width)
        return torch.from_numpy(np.concatenate([np.full_like(flat[:, :1], root), flat], 1))

    score_PN, parent_PN = with_root(scores_PSC, 1.0), with_root(numbers_PSC, 0).long()
    keep_PN = kept(score_PN, parent_PN, with_root(valid_PSC, True), nodes, min_confidence)
    keep_PSC = keep_PN[:, 1:].numpy().reshape(count, steps, width)
    right_PSC = keep_PSC & (tokens_PSC == coming(turn, steps)[..., None])
    for step in range(1, steps):  # a node is right if its parent is
        right_PSC[:, step] &= np.take_along_axis(right_PSC[:, step - 1], parents_PSC[:, step], 1)
    return np.stack([keep_PSC.sum((1, 2)), right_PSC.any(2).sum(1), levels_P], 1)


def coming(turn: Turn, steps: int) -> np.ndarray:
    """`[P, S]`: the text after each position; -1 beyond its end."""
    padded = np.full(len(turn.text) + steps - 1, -1)
    padded[: len(turn.text)] = turn.text
    return np.lib.stride_tricks.sliding_window_view(padded[1:], steps)


def check_steps(drafts: Drafts, steps: int) -> None:
    """Raise `ConfigError` where a trace does not reach so far."""
    if not 1 <= steps <= drafts.steps:
        raise ConfigError(
            f"steps={steps} cannot be replayed: the trace has drafts of {drafts.steps}. Choose 1 "
            "to that many, or trace again with more."
        )


def text_chains(turn: Turn, drafter: FromText, ends: Collection[int]) -> np.ndarray:
    """What a drafter that reads the text alone drafts, `[P, 3]`: exactly its own.

    Args:
        ends: the tokens that end a text.
    """
    # a row as decoding has it after the prefill, with no model behind it
    longest, cpu = len(turn.prompt) + len(turn.text), torch.device("cpu")
    cache = KVCache(1, longest + 1, 1, 1, torch.float32, devices=[])
    batch = Batch(cache, longest, Sampling(), frozenset(ends), cpu, Budget(free))
    batch.place(0, torch.tensor(turn.prompt), Request(turn.prompt, len(turn.text)))
    drafter.begin(batch)
    drafted = []
    for at in range(1, len(turn.text)):
        batch.append(0, turn.text[at - 1 : at])
        tokens = drafter.continuation(0, batch.texts[0])
        drafted.append((len(tokens), shared(tokens, turn.text[at:]), 0))
    return np.array(drafted)


def hybrid(turn: Turn, source: str, drafter: Hybrid, ends: Collection[int]) -> Replay:
    """The rounds of `drafter=hybrid`: exactly its own, where it decodes with these costs.

    Args:
        source: the name of its chains in the trace.
        ends: the tokens that end a text.

    Errors: `ConfigError` where the trace has no chain of so many steps.
    """
    drafts, replay, text = turn.drafts[source], Replay(), [*turn.prompt, *turn.text[:1]]
    check_steps(drafts, drafter.steps)
    lookup = Lookup(text, drafter.reference)
    while (at := len(text) - len(turn.prompt)) < len(turn.text):
        sources, grows = lookup.sources(drafter.nodes, ends), True
        while grows and len(sources.chain) < drafter.steps and drafter.pays(sources):
            step = at - 1, len(sources.chain)
            choices = drafts.tokens_PSC[step].tolist(), drafts.chances_PSC[step].tolist()
            (best, confidence), *further = zip(*choices, strict=True)
            sources.chain.append(best)
            sources.confidence.append(confidence)
            sources.further.append(further)
            grows = confidence > np.float32(drafter.threshold)
        nodes, parents = drafter.tree(sources)
        right = walked(nodes, parents, turn.text[at:])
        replay.add(right, len(turn.text) - at, len(nodes), len(sources.chain))
        text += turn.text[at : at + right + 1]
    return replay


def walked(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> int:
    """How far a text follows a tree.

    Args:
        parents: 0 is the root, i the i-th node.
    """
    children = {
        (parent, token): i for i, (parent, token) in enumerate(zip(parents, tokens, strict=True), 1)
    }
    node, depth = 0, 0
    while depth < len(text) and (node, text[depth]) in children:
        node = children[node, text[depth]]
        depth += 1
    return depth
