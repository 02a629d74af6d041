"""A trace tells, round by round, what decoding does: without decoding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import adapter_for, random_prompts, tiny, vanilla_texts
from replayed import rounds, rounds_of

from kangaroo.api import load_target, model_config
from kangaroo.drafters.cascade import Cascade, CascadeConfig
from kangaroo.drafters.expected_gain import Costs
from kangaroo.drafters.hybrid import Hybrid
from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.drafters.prompt_lookup import PromptLookup, PromptLookupConfig
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation
from kangaroo.evaluation.bench import BenchConfig, load_questions
from kangaroo.evaluation.tune import replay, trace
from kangaroo.evaluation.tune.candidates import TREES
from kangaroo.evaluation.tune.recording import Recorder
from kangaroo.evaluation.tune.replay import Player, Replay
from kangaroo.evaluation.tune.trace import Drafts, TracedQuestion, Turn
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.prompts import Message, prompt_ids
from kangaroo.utils.errors import ConfigError, CorruptFile

LONGEST, NEW_TOKENS, CHUNK = 5, 16, 4
SETTINGS = [(0.0, LONGEST), (0.3, 3), (0.6, LONGEST), (0.9, 1)]  # threshold, steps
# threshold, steps, nodes, the least confidence
TOP_K, SHAPES = 3, [(0.0, LONGEST, 8), (0.2, 3, 4), (0.5, LONGEST, 20), (0.0, LONGEST, 20, 0.05)]
# the second prompt is shorter than the window of a fused adapter; the third repeats itself
PROMPTS = [*random_prompts(7, 3), [5, 9, 5, 9, 5, 9, 5]]
NODES = 6
COSTS = Costs([1 + 0.02 * node for node in range(NODES + 1)], 0.05, 1.0)
NO_EOS: frozenset[int] = frozenset()


class Case:
    """A target, two adapters, and the traces of all prompts.

    Args:
        eos: the token that ends a text.
    """

    def __init__(self, native: bool, eos: int | None = None):
        self.lm = tiny(eos_token_id=eos)
        if native:
            self.lm.compile_for_decoding()
        half = DraftHead(self.lm, vocabulary_K=torch.arange(1, 60, 2))  # others cannot be drafted
        parts = AdapterHeadConfig(fused=True, attention_layers=2)
        fused = adapter_for(self.lm, architecture=parts)
        self.parts = {"plain": (adapter_for(self.lm), half), "fused": (fused, None)}
        drafters = {name: self.drafter(name, 0.0, LONGEST) for name in self.parts}
        drafters |= {name + TREES: self.tree(name, 0.0, LONGEST, 1) for name in self.parts}
        recorder = Recorder(self.lm, drafters, prefill_chunk=CHUNK)
        self.turns = [recorder.turn(prompt, NEW_TOKENS) for prompt in PROMPTS]

    def drafter(self, name: str, threshold: float, steps: int) -> Kangaroo:
        adapter, head = self.parts[name]
        return Kangaroo(self.lm, adapter, steps, threshold, head)

    def tree(
        self,
        name: str,
        threshold: float,
        steps: int,
        nodes: int,
        min_confidence: float | None = None,
    ) -> KangarooTree:
        adapter, head = self.parts[name]
        return KangarooTree(self.lm, adapter, steps, threshold, head, TOP_K, nodes, min_confidence)

    def hybrid(self, name: str, threshold: float, steps: int) -> Hybrid:
        adapter, head = self.parts[name]
        return Hybrid(self.lm, adapter, steps, threshold, head, costs=COSTS, nodes=NODES)

    def decoded(self, drafter, turn: Turn) -> Generation:
        engine = Engine(self.lm, drafter, prefill_chunk=CHUNK)
        return engine.generate([turn.prompt], NEW_TOKENS)[0]


def chain(turn: Turn, name: str, threshold: float, steps: int) -> Replay:
    return replay.rounds(turn, replay.chains(turn, turn.drafts[name], threshold, steps))


@pytest.fixture(scope="module", params=[False, True], ids=["tensors", "native"])
def case(request) -> Case:
    return Case(native=request.param)


def test_the_text_of_a_trace_is_the_targets_own(case):
    texts = vanilla_texts(case.lm, PROMPTS, NEW_TOKENS)
    assert [turn.prompt + turn.text for turn in case.turns] == texts


@pytest.mark.parametrize("adapter", ["plain", "fused"])
def test_replayed_rounds_of_kangaroo_are_those_of_decoding(case, adapter):
    right = drafted = 0
    for turn in case.turns:
        for threshold, steps in SETTINGS:
            drafter = case.drafter(adapter, threshold, steps)
            replayed = chain(turn, adapter, threshold, steps)
            assert rounds(replayed) == rounds_of(case.decoded(drafter, turn))
            right, drafted = right + sum(replayed.accepted), drafted + sum(replayed.drafted)
    assert 0 < right < drafted  # otherwise right drafts alone were compared, or wrong ones


@pytest.mark.parametrize("adapter", ["plain", "fused"])
def test_replayed_rounds_of_trees_are_those_of_decoding(case, adapter):
    right = chains = 0
    for turn in case.turns:
        grown = turn.drafts[adapter + TREES]
        for settings in SHAPES:
            drafter = case.tree(adapter, *settings)
            replayed = replay.rounds(turn, replay.trees(turn, grown, *settings))
            assert rounds(replayed) == rounds_of(case.decoded(drafter, turn))
            right += sum(replayed.accepted)
        chains += sum(chain(turn, adapter, 0.0, LONGEST).accepted)
    assert 0 < chains < right  # not chains alone were compared


@pytest.mark.parametrize("adapter", ["plain", "fused"])
def test_replayed_rounds_of_the_hybrid_are_those_of_decoding(case, adapter):
    for turn in case.turns:
        for threshold, steps in SETTINGS:
            drafter = case.hybrid(adapter, threshold, steps)
            replayed = replay.hybrid(turn, adapter, drafter, NO_EOS)
            assert rounds(replayed) == rounds_of(case.decoded(drafter, turn))


def test_replayed_rounds_of_prompt_lookup_and_of_a_cascade_are_those_of_decoding(case):
    lookup, player = PromptLookupConfig("prompt_lookup", 2, 4), Player(case.lm, {})
    for turn in case.turns:
        replayed = replay.rounds(turn, player.drafted(lookup, "", turn))
        assert rounds(replayed) == rounds_of(case.decoded(PromptLookup(2, 4), turn))
        for threshold, steps in SETTINGS:
            second = KangarooConfig(adapter="plain", threshold=threshold, steps=steps)
            cascade = CascadeConfig(first=lookup, second=second)
            drafter = Cascade(case.lm, PromptLookup(2, 4), case.drafter("plain", threshold, steps))
            replayed = replay.rounds(turn, player.drafted(cascade, "plain", turn))
            assert rounds(replayed) == rounds_of(case.decoded(drafter, turn))


def test_a_text_that_ends_early_ends_its_rounds():
    (generation,) = Engine(tiny(), Vanilla()).generate([PROMPTS[2]], NEW_TOKENS)
    eos = generation.tokens[NEW_TOKENS // 2]
    case = Case(native=True, eos=eos)
    assert any(len(turn.text) < NEW_TOKENS for turn in case.turns)
    for turn in case.turns:
        decoded = case.decoded(case.drafter("plain", 0.0, LONGEST), turn)
        assert rounds(chain(turn, "plain", 0.0, LONGEST)) == rounds_of(decoded)
        drafter = case.hybrid("plain", 0.0, LONGEST)
        replayed = replay.hybrid(turn, "plain", drafter, {eos})
        assert rounds(replayed) == rounds_of(case.decoded(drafter, turn))


def made_up(text: list[int], tokens: list[list[int]], chances: list[list[float]]) -> Turn:
    choices = np.array(tokens)[..., None], np.array(chances, np.float32)[..., None]
    return Turn([1], text, {"a": Drafts(*choices)})


def test_the_token_that_stops_a_draft_is_verified():
    turn = made_up([5, 6, 7, 8], [[6, 7]] * 3, [[0.6, 0.9]] * 3)
    assert rounds(chain(turn, "a", 0.6, 2)) == ([1, 2, 1], [0, 1, 0], [0, 1, 1])
    assert rounds(chain(turn, "a", 0.5, 2)) == ([1, 3], [0, 2], [0, 2])


def test_drafts_beyond_the_end_of_a_text_count_as_drafted_alone():
    turn = made_up([5, 6], [[6, 7, 8]], [[0.9] * 3])
    assert rounds(chain(turn, "a", 0.0, 3)) == ([1, 1], [0, 1], [0, 3])


def test_longer_chains_than_were_traced_are_refused(case):
    for steps in (0, LONGEST + 1):
        with pytest.raises(ConfigError, match=f"steps={steps} cannot be replayed"):
            chain(case.turns[0], "plain", 0.6, steps)


SAVED = {"model": "tiny", "drafters": {"plain": {"weights": "a"}}, "question": "a"}


def test_a_trace_is_read_as_it_was_written(case, tmp_path: Path):
    assert trace.load(7, SAVED, tmp_path) is None
    trace.save(TracedQuestion(7, "qa", case.turns), SAVED, tmp_path)
    again = trace.load(7, SAVED, tmp_path)
    assert (again.question_id, again.task) == (7, "qa")
    for turn, other in zip(case.turns, again.turns, strict=True):
        assert (other.prompt, other.text) == (turn.prompt, turn.text)
        assert other.drafts.keys() == turn.drafts.keys()
        for name, drafts in turn.drafts.items():
            for part, array in vars(drafts).items():
                np.testing.assert_array_equal(vars(other.drafts[name])[part], array)


def test_a_trace_of_other_weights_or_another_question_is_refused(case, tmp_path: Path):
    trace.save(TracedQuestion(7, "qa", case.turns), SAVED, tmp_path)
    with pytest.raises(ConfigError, match=r"question-7.*drafters=.*'b'.* now"):
        trace.load(7, SAVED | {"drafters": {"plain": {"weights": "b"}}}, tmp_path)
    with pytest.raises(ConfigError, match=r"question-7.*question='a' there, 'b' now"):
        trace.load(7, SAVED | {"question": "b"}, tmp_path)


def test_a_trace_that_was_cut_short_is_told(case, tmp_path: Path):
    trace.save(TracedQuestion(7, "qa", case.turns), SAVED, tmp_path)
    file = trace.file_of(tmp_path, 7)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(CorruptFile, match=r"question-7.*Delete it"):
        trace.load(7, SAVED, tmp_path)


FIVE = [(0.0, 6), (0.3, 8), (0.6, 6), (0.6, 3), (0.8, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["smollm2-135m", "smollm2-135m-fused"])
def test_replay_of_the_shipped_adapters_is_decoding_on_the_demo_bench(adapter):
    lm, tokenizer = load_target(model_config("smollm2-135m"))
    most = max(steps for _, steps in FIVE)
    config = KangarooConfig(adapter=f"adapters/{adapter}", steps=most)
    recorder = Recorder(lm, {"kangaroo": config.build(lm)})
    for question in load_questions(BenchConfig())[::3]:
        prompt = prompt_ids(tokenizer, [Message(role="user", content=question.turns[0])])
        turn = recorder.turn(prompt, 32)
        for threshold, steps in FIVE:
            drafter = replace(config, threshold=threshold, steps=steps).build(lm)
            (decoded,) = Engine(lm, drafter).generate([prompt], 32)
            replayed = chain(turn, "kangaroo", threshold, steps)
            assert (decoded.tokens, rounds_of(decoded)) == (turn.text, rounds(replayed))
