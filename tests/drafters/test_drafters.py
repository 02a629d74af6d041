"""What Kangaroo drafts, a chain or a tree, and where it stops, against the definition; lookahead
against the algorithm in lists. That every drafter is lossless: `test_conformance.py`.

Shapes: B rows, N draft nodes.
"""

from dataclasses import replace

import cases
import helpers
import pytest
import torch
from cases import CHUNK, GREEDY_OR_NOT, NEW_TOKENS, PROMPTS, SAMPLINGS, Case, in_turn
from helpers import adapter_for, chain_of, eagle3_for, eagle_for, paths_of, tiny, tree_of

from kangaroo import ConfigError, Sampling
from kangaroo.drafters import lookahead
from kangaroo.drafters.eagle import EagleTree
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree, KangarooTreeConfig, kept_nodes
from kangaroo.drafters.lookahead import Lookahead, LookaheadConfig
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.tree import Draft

HEADS = {"eagle": eagle_for, "eagle3": eagle3_for}  # with EAGLE-2's tree
SIZES = [
    LookaheadConfig(window=4, ngram=4, guesses=3),
    LookaheadConfig(window=3, ngram=3, guesses=2),  # the pool overflows
    LookaheadConfig(window=1, ngram=5, guesses=1),
    LookaheadConfig(),
]


@pytest.mark.parametrize("rows", [1, 3])
def test_drafting_stops_exactly_where_confidence_falls_to_the_threshold(case, monkeypatch, rows):
    """In every row of a batch, whatever the others do."""
    of_rows = [0.9, 0.7, 0.5, 0.9, 0.9, 0.9], [0.9] * 6, [0.4, 0.9, 0.9, 0.9, 0.9, 0.9]
    after_tokens = iter(torch.tensor(of_rows[:rows]).T)
    monkeypatch.setattr(Kangaroo, "reading", lambda *_: next(after_tokens))
    drafter = chain_of(case.lm, case.adapter, steps=6, threshold=0.5)  # 0.5 itself stops
    engine = Engine(case.lm, drafter)
    session = engine.open(rows, 60, SAMPLINGS["sampled"])
    for row in range(rows):
        session.admit(row, Request(PROMPTS[row], 15, seed=row))
    assert [record.drafted for record in session.step()] == [3, 6, 1][:rows]
    assert len(list(after_tokens)) == (3 if rows == 1 else 0)  # ends with the last row


def tree_by_definition(
    case: Case, text: list[int], drafter: KangarooTree, sampling: Sampling, seed: int
) -> set[tuple[int, ...]]:
    """EAGLE-2's expansion, then its reranking of all that was offered; or Kangaroo's, of which half
    of the nodes without children are left."""
    top_k, scores, level = drafter.top_k, {}, {(): 1.0}
    for _ in range(drafter.steps):
        offered = [
            ((*path, token), score * sure)
            for path, score in level.items()
            for token, sure in cases.choices_without_cache(case, text, path, sampling, seed, top_k)
        ]
        level = dict(sorted(offered, key=lambda node: -node[1])[:top_k])
        scores |= dict(offered) if isinstance(drafter, EagleTree) else level
        if max(level.values()) <= drafter.threshold:
            break
    parents = {path[:-1] for path in scores}
    childless = sorted((path for path in scores if path not in parents), key=lambda p: scores[p])
    for path in childless[: 0 if isinstance(drafter, EagleTree) else len(childless) // 2]:
        del scores[path]
    return set(sorted(scores, key=lambda path: (-scores[path], len(path)))[: drafter.nodes])


@pytest.mark.parametrize(
    "head, threshold, nodes, sampling",
    [
        ("adapter", 0, 30, "greedy"),
        ("adapter", 0.2, 30, "sampled"),
        ("adapter", 0, 5, "sampled"),
        ("eagle3", 0, 5, "greedy"),
        pytest.param("eagle", 0, 5, "sampled", marks=pytest.mark.slow),
        pytest.param("eagle", 0, 14, "sampled", marks=pytest.mark.slow),
        pytest.param("eagle3", 0, 14, "sampled", marks=pytest.mark.slow),
    ],
    indirect=["sampling"],
)
def test_the_tree_is_the_one_of_the_definition(case, head, threshold, nodes, sampling):
    """Also after drafts that were cases.accepted on a branch."""
    sizes, beside, is_eagle = set(), [], head in HEADS
    rows = 1 if nodes == 14 else 2
    case = replace(case, adapter=HEADS.get(head, adapter_for)(case.lm))
    kind, least = (EagleTree, 0.0) if is_eagle else (KangarooTree, None)
    drafter = tree_of(case.lm, case.adapter, 3, threshold, None, 3, nodes, least, kind=kind)

    def check(batch, draft, row):
        drafted, text, seed = set(paths_of(draft, row)), batch.texts[row], batch.seeds[row]
        assert drafted - {()} == tree_by_definition(case, text, drafter, sampling, seed)
        sizes.add(len(drafted) - 1)
        beside.append(sum(len(path) == 2 for path in drafted) > drafter.top_k)

    helpers.check_drafts(drafter, check)
    assert len(cases.accepted(drafter, case.lm, sampling, rows)) > 2
    assert max(sizes) <= nodes and (threshold != 0.2 or len(sizes) > 1)
    assert any(beside) == (is_eagle and nodes == 14)  # nodes that no level took


def test_pruning_keeps_parents_and_the_most_confident():
    # 0 - 1 - 3 - 5, 0 - 2, 1 - 4: childless are 2, 4 and 5
    parents_BN = torch.tensor([[0, 0, 0, 1, 1, 3]])
    score_BN = torch.tensor([[1.0, 0.6, 0.3, 0.5, 0.1, 0.4]])
    every_BN = torch.ones_like(parents_BN, dtype=torch.bool)
    root_BN, sure_BN = every_BN & (torch.arange(6) == 0), torch.ones(1, 6)  # ties: parents first

    def nodes(score_BN, valid_BN, *worth: float, halves: bool = False) -> list[int]:
        limits = torch.tensor(worth), halves
        return kept_nodes(score_BN, parents_BN, valid_BN, *limits)[0].nonzero()[:, 0].tolist()

    assert nodes(score_BN, every_BN, *[0.0] * 9, halves=True) == [0, 1, 2, 3, 5]
    assert nodes(score_BN, every_BN, 0.0, 0.0, halves=True) == [0, 1, 3]
    assert nodes(score_BN, every_BN, 0.05, 0.05) == [0, 1, 3]
    assert nodes(score_BN, root_BN, *[0.0] * 9, halves=True) == [0]
    assert nodes(score_BN, every_BN, *[0.3] * 9) == [0, 1, 3, 5]
    assert nodes(score_BN, every_BN, 0.7, 0.3, 0.3, 0.5) == [0, 1, 3, 5]  # together they pay
    assert nodes(sure_BN, every_BN, 0.0) == [0, 1]


def test_trees_that_cannot_be_are_refused_by_name(case):
    with pytest.raises(ConfigError, match=r"top_k=65 is more than the 64 tokens"):
        tree_of(case.lm, case.adapter, 6, 0.4, None, 65)
    with pytest.raises(ConfigError, match=r"top_k=10, drafter.steps=103 make 1030 nodes"):
        KangarooTreeConfig(top_k=10, steps=103)


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
        self.pool = [gram, *self.pool][: lookahead.POOL_SIZE]

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


@pytest.mark.parametrize("options, sampling", in_turn(SIZES, GREEDY_OR_NOT), indirect=["sampling"])
def test_drafts_are_those_of_the_algorithm_in_lists(case, monkeypatch, options, sampling):
    monkeypatch.setattr(lookahead, "POOL_SIZE", 7 if options.window == 3 else 64)
    drafter = Lookahead(options)
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

    helpers.check_drafts(drafter, check)
    monkeypatch.setattr(drafter, "observe", observed)
    engine = Engine(case.lm, drafter, prefill_chunk=CHUNK)
    engine.generate([*PROMPTS, [3] * 12], NEW_TOKENS, sampling, batch_size=2)
    assert len(guessed) > 40 and any(guessed)


def test_a_draft_of_its_own_that_was_not_verified_changes_nothing():
    """Another drafter's was; the window's next levels are then unknown."""
    lm, drafter = tiny(), Lookahead(LookaheadConfig(window=3, ngram=3, guesses=2))
    engine = Engine(lm, drafter)
    session = engine.open(1, 60, Sampling())
    batch = session.batch
    session.admit(0, Request(helpers.random_prompts(9)[0], 20))
    first = drafter.propose(batch)
    window, pool = drafter.window_BJW.clone(), drafter.pool_BPN.clone()
    drafter.observe(batch, Draft.listed(batch.last(1), {0: ([1, 2], [0, 1])}), None, {})
    assert torch.equal(drafter.window_BJW, window) and torch.equal(drafter.pool_BPN, pool)
    assert torch.equal(drafter.propose(batch).tokens_BN, first.tokens_BN)
