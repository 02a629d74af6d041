"""What lookahead drafts, round by round, against the algorithm in lists."""

import pytest
import torch
from cases import CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, case_of
from helpers import check_drafts, paths_of, random_prompts, tiny

from kangaroo.drafters import lookahead
from kangaroo.drafters.lookahead import Lookahead, LookaheadConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.tree import Draft
from kangaroo.models.target import TargetModel


class Reference:
    """One row, written as the paper tells it: lists, and a pool as a list with the newest first."""

    def __init__(self, prompt: list[int], options: LookaheadConfig):
        self.options, n = options, options.ngram
        reach = options.window + n - 2
        tail = [prompt[i % len(prompt)] for i in range(len(prompt) - reach, len(prompt))]
        self.levels = [tail[j : j + options.window] for j in range(n - 1)]
        self.pool: list[tuple[int, ...]] = []
        for i in range(len(prompt) - n + 1):
            self.insert(tuple(prompt[i : i + n]))

    def insert(self, gram: tuple[int, ...]) -> None:
        if gram in self.pool:
            self.pool.remove(gram)
        self.pool = [gram, *self.pool][: lookahead.POOL]

    def paths(self, pending: int) -> list[tuple[int, ...]]:
        """The tokens from the root to every node, in the order of the nodes."""
        paths = [()]
        for j, level in enumerate(self.levels):
            for column in range(self.options.window):
                across = self.levels[0][: column + 1]
                down = [self.levels[i][column] for i in range(1, j)]
                paths.append((*across, *down, *([level[column]] if j else [])))
        guesses = [gram[1:] for gram in self.pool if gram[0] == pending][: self.options.guesses]
        return paths + [gram[: i + 1] for gram in guesses for i in range(len(gram))]

    def observe(self, choices: list[int]) -> None:
        """Args: choices: what the target writes after every node."""
        window = self.options.window
        first = 1 + (len(self.levels) - 1) * window
        new = choices[first : first + window]
        for column in range(window):
            self.insert((*(level[column] for level in self.levels), new[column]))
        self.levels = [*self.levels[1:], new]


OPTIONS = [
    LookaheadConfig(window=4, ngram=4, guesses=3),
    LookaheadConfig(window=3, ngram=3, guesses=2),  # the pool overflows
    LookaheadConfig(window=1, ngram=5, guesses=1),
    LookaheadConfig(),
]


def again_four_later(lm: TargetModel, sampling: Sampling, seed: int) -> list[int]:
    """A prompt whose first new token stands four places before it: of the n-grams of five that the
    text has then, the newest begins with the pending token."""

    def first_tokens(prompts: list[list[int]]) -> list[int]:
        done = Engine(lm, Vanilla()).generate(prompts, 1, sampling, seeds=[seed] * len(prompts))
        return [generation.tokens[0] for generation in done]

    prompts = random_prompts(*[12] * 64, seed=1)
    for prompt, token in zip(prompts, first_tokens(prompts), strict=True):
        prompt[-4] = token  # most go on as before
    return next(
        p for p, token in zip(prompts, first_tokens(prompts), strict=True) if p[-4] == token
    )


@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_drafts_are_those_of_the_algorithm_in_lists(monkeypatch, options, sampling):
    """In every round of every row, rows admitted later included."""
    monkeypatch.setattr(lookahead, "POOL", 7 if options.window == 3 else 64)
    lm, drafter = case_of("llama", sampling).lm, Lookahead(options)
    observe, guessed = drafter.observe, []
    references: dict[int, tuple[list[int], Reference]] = {}

    def check(batch, draft, row):
        text = batch.texts[row]
        if row not in references or references[row][0] is not text:
            references[row] = text, Reference(text, options)
        expected = references[row][1].paths(text[-1])
        assert paths_of(draft, row) == expected
        guessed.append(len(expected) > 1 + options.window * (options.ngram - 1))

    def observed(batch, draft, verdict, taps):
        observe(batch, draft, verdict, taps)
        for row, (_, reference) in references.items():
            reference.observe(verdict.choice_BN[row].tolist())

    check_drafts(drafter, check)
    monkeypatch.setattr(drafter, "observe", observed)
    engine = Engine(lm, drafter, prefill_chunk=CHUNK)
    prompts, settings = [*PROMPTS, [3] * 12], SAMPLINGS[sampling]
    prompts.append(again_four_later(lm, settings, settings.seed + len(prompts)))
    engine.generate(prompts, NEW_TOKENS, settings, batch_size=2)
    assert len(guessed) > 40 and any(guessed)


def test_a_draft_of_its_own_that_was_not_verified_changes_nothing():
    """Another drafter's was; the window's next levels are then unknown."""
    lm, drafter = tiny(), Lookahead(LookaheadConfig(window=3, ngram=3, guesses=2))
    engine = Engine(lm, drafter)
    batch = engine.open(1, 60, Sampling())
    engine.admit(batch, 0, Request(random_prompts(9)[0], 20))
    first = drafter.propose(batch)
    window, pool = drafter.window_BJW.clone(), drafter.pool_BPN.clone()
    other = Draft.listed(batch.last(1), {0: ([1, 2], [0, 1])})
    drafter.observe(batch, other, None, {})
    assert torch.equal(drafter.window_BJW, window) and torch.equal(drafter.pool_BPN, pool)
    assert torch.equal(drafter.propose(batch).tokens_BN, first.tokens_BN)
