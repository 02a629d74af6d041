"""What the documentation shows does what it says."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from test_conformance import BATCHES, CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, case_of

from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine import Engine

PAGE = (Path(__file__).parents[1] / "docs/add-a-drafter.md").read_text()
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.S)


@pytest.fixture(scope="module")
def bigram(tmp_path_factory):
    """The shown file, as a module."""
    folder = tmp_path_factory.mktemp("shown")
    (folder / "bigram.py").write_text(CODE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("bigram")


def test_the_shown_drafter_has_at_most_50_lines():
    assert len(CODE.splitlines()) <= 50


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("batch", BATCHES)
def test_the_shown_drafter_writes_what_vanilla_decoding_writes(bigram, sampling, batch):
    case = case_of("llama", sampling)
    drafter = bigram.BigramConfig().build(case.lm)
    for engine in (
        Engine(case.lm, drafter, prefill_chunk=CHUNK),
        Engine(case.lm, Cascade(case.lm, drafter, Kangaroo(case.lm, case.adapter, 4, 0.3), True)),
    ):
        done = engine.generate(PROMPTS, NEW_TOKENS, SAMPLINGS[sampling], BATCHES[batch])
        assert [p + g.tokens for p, g in zip(PROMPTS, done, strict=True)] == case.texts


def test_the_shown_drafter_finds_what_repeats(bigram):
    drafter = bigram.Bigram(steps=3)
    assert drafter.continuation(0, [1, 2, 3, 1]) == [2, 3, 1]
    assert drafter.continuation(0, [1, 2, 1, 3, 1]) == [3, 1, 3]
    assert drafter.continuation(0, [1, 2]) == []
