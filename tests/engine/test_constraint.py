"""Restricted texts: with every drafter they are what the restricted target writes alone.

Shapes: V vocabulary.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch
from cases import DRAFTERS, METHODS, NEW_TOKENS, PROMPTS, SAMPLINGS, case_of, lm_of
from helpers import VOCABULARY, forward_logits, tiny

from kangaroo import ConfigError, Sampling
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.constraint import Constraint
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request

BIASES = {3: 4.0, 17: -torch.inf, 40: 1.5}
END = 5
HOW = [None, (BIASES, False), ({}, True), (BIASES, True)]
VARIANTS = [pytest.param(x, marks=pytest.mark.slow) for x in DRAFTERS if x not in METHODS]


class Matcher:
    """A grammar in llguidance's interface: what may follow depends on the last two tokens. After
    six tokens it allows `END` alone; once that is read it has stopped, and reads no more. So it is
    after an error, which `fatal` tokens are, and which no rollback mends."""

    def __init__(self, fatal: Sequence[int] = ()) -> None:
        self.tokens = [0, 1]
        self.fatal = fatal

    def deep_copy(self) -> "Matcher":
        return deepcopy(self)

    def is_error(self) -> bool:
        return any(token in self.fatal for token in self.tokens)

    def get_error(self) -> str:
        return "too deep"

    def is_stopped(self) -> bool:
        return len(self.tokens) > 8 or self.is_error()

    def allowed_V(self) -> np.ndarray:
        tokens_V = np.arange(VOCABULARY)
        if len(self.tokens) >= 8 or self.is_error():
            return tokens_V == END
        last, before = self.tokens[-1], self.tokens[-2]
        return (tokens_V * 7 + 3 * last + before) % 3 == 0

    def try_consume_tokens(self, tokens: list[int]) -> int:
        for count, token in enumerate(tokens):
            if self.is_stopped() or not self.allowed_V()[token]:
                return count
            self.tokens.append(token)
        return len(tokens)

    def rollback(self, count: int) -> None:
        assert not self.is_error()
        del self.tokens[len(self.tokens) - count :]

    def compute_bitmask(self) -> bytes:
        return np.packbits(self.allowed_V(), bitorder="little").tobytes()


def constraint(biases: dict[int, float], follows: bool) -> Constraint:
    return Constraint(VOCABULARY, biases, Matcher() if follows else None)


def requests(sampling: Sampling, drafts: bool = True) -> list[Request]:
    return [
        Request(
            prompt,
            NEW_TOKENS,
            sampling.seed + i,
            constraint=HOW[i % 4] and partial(constraint, *HOW[i % 4]),
            drafts=drafts or i % 2 == 0,
        )
        for i, prompt in enumerate([*PROMPTS, *PROMPTS][:4])
    ]


def texts(lm, drafter, sampling: Sampling, rows: int, **options) -> list[list[int]]:
    done = dict(Engine(lm, drafter).completions(requests(sampling, **options), sampling, rows))
    return [done[i].tokens for i in range(len(done))]


@cache
def vanilla_texts(family: str, sampling: str) -> list[list[int]]:
    """Each written alone."""
    return texts(lm_of(family), Vanilla(), SAMPLINGS[sampling], 1)


def test_the_restricted_target_writes_its_likeliest_allowed_token():
    lm = tiny()
    written = texts(lm, Vanilla(), Sampling(), 1)
    for request, text in zip(requests(Sampling()), written, strict=True):
        restriction = request.constraint() if request.constraint else Constraint(VOCABULARY)
        for n, token in enumerate(text):
            logits_V = forward_logits(lm, [*request.prompt, *text[:n]])[-1]
            biased_V = logits_V + torch.from_numpy(restriction.after([0], [0])[0])
            assert token == int(biased_V.argmax())
            restriction.advance([token])
    assert 17 not in text


@pytest.mark.parametrize("drafter", [*METHODS, *VARIANTS])
def test_restricted_texts_are_the_same_with_every_drafter(drafter):
    """By graphs a chain alone: they take the longest."""
    turn = list(DRAFTERS).index(drafter)
    family = "llama-graphs" if drafter == "kangaroo" else ("llama", "llama-compiled")[turn % 2]
    sampling = ("greedy", "top-k")[turn // 2 % 2]
    case = case_of(family, sampling)
    written = texts(case.lm, DRAFTERS[drafter](case), SAMPLINGS[sampling], 3)
    assert written == vanilla_texts(family, sampling)


@pytest.mark.parametrize("family", ["llama", "llama-compiled"])
def test_a_request_may_ask_for_no_drafts(family):
    case, sampling = case_of(family, "greedy"), Sampling()
    engine = Engine(case.lm, DRAFTERS["kangaroo"](case), always_drafts=True)
    done = dict(engine.completions(requests(sampling, drafts=False), sampling, 4))
    drafted = [sum(step.drafted for step in done[i].steps) for i in range(4)]
    assert drafted[1] == drafted[3] == 0 and drafted[0] > 0 and drafted[2] > 0
    assert [done[i].tokens for i in range(4)] == vanilla_texts(family, "greedy")


def test_a_draft_token_that_the_grammar_cannot_read_changes_no_other_node():
    plain, fragile = (Constraint(VOCABULARY, {}, Matcher(fatal)) for fatal in ((), (3,)))
    for each in (plain, fragile):
        each.advance([6])
    nodes = [6, 2, 3, 9, 8], [0, 0, 1, 1, 0]
    assert plain.matcher.allowed_V()[[2, 8]].all()
    expected_NV, biases_NV = plain.after(*nodes), fragile.after(*nodes)
    others = [0, 1, 3, 4]
    assert np.array_equal(biases_NV[others], expected_NV[others])
    assert np.array_equal(fragile.after([6], [0]), plain.after([6], [0]))
    with pytest.raises(RuntimeError, match="too deep"):
        fragile.advance([2, 3])


def test_a_bias_of_no_token_is_an_error():
    with pytest.raises(ConfigError, match="logit_bias: 64 is no token; they are 0 to 63"):
        Constraint(VOCABULARY, {64: 1.0})
    with pytest.raises(ConfigError, match="logit_bias: '5' is no token"):
        Constraint(VOCABULARY, {"5": 1.0})
    for bias in (torch.nan, torch.inf, "1"):
        with pytest.raises(ConfigError, match=f"logit_bias: {bias!r} of token 5 is no finite"):
            Constraint(VOCABULARY, {5: bias})


@pytest.mark.parametrize(
    "family, drafter",
    [
        ("llama", "kangaroo-tree"),
        ("llama-compiled", "vanilla"),
        ("llama-compiled", "kangaroo"),
        ("llama-compiled", "hybrid-tree"),
        ("llama-graphs", "vanilla"),
        ("llama-graphs", "kangaroo"),
    ],
)
def test_a_request_keeps_the_likeliest_tokens_of_its_own_text(family, drafter):
    case = case_of(family, "greedy")
    wanted = [replace(x, keep=3 * (i % 2)) for i, x in enumerate(requests(Sampling()))]
    engine = Engine(case.lm, Vanilla() if drafter == "vanilla" else DRAFTERS[drafter](case))
    done = dict(engine.completions(wanted, Sampling(), 2))
    assert [done[i].tokens for i in range(4)] == vanilla_texts(family, "greedy")
    for i in 1, 3:
        request, generation = wanted[i], done[i]
        restriction = request.constraint()
        assert len(generation.teacher) == len(generation.tokens)
        for n, token in enumerate(generation.tokens):
            text = [*request.prompt, *generation.tokens[:n]]
            biases_V = torch.from_numpy(restriction.after([0], [0])[0])
            expected = (forward_logits(case.lm, text)[-1] + biases_V).softmax(-1).topk(3)
            record = generation.teacher[n]
            allowed = int((expected.values > 0).sum())  # the others may be any
            assert record["tokens"][:allowed].tolist() == expected.indices[:allowed].tolist()
            assert record["chances"] == pytest.approx(expected.values.numpy(), rel=1e-4)
            restriction.advance([token])
