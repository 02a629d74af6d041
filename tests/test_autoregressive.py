"""What a draft model and a target with skipped layers draft.

Shapes: B rows, N draft nodes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import VOCABULARY, Sometimes, tiny, vanilla_texts
from test_conformance import CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, Case, case_of, draft_lm

from kangaroo import models
from kangaroo.drafters.base import Drafter
from kangaroo.drafters.cascade import Cascade
from kangaroo.drafters.draft_model import DraftModel, DraftModelConfig
from kangaroo.drafters.layerskip import LayerSkip, LayerSkipConfig
from kangaroo.engine import Engine
from kangaroo.errors import AdapterMismatch, AdapterNotFound, ConfigError, CorruptFile
from kangaroo.evaluation.rivals import assistant
from kangaroo.evaluation.speed_trials import timed_generate
from kangaroo.export import draft_model
from kangaroo.layer_subset import runs
from kangaroo.model import LM
from kangaroo.models import Dtype, ModelConfig
from kangaroo.sampling import Rule, Sampling, pick

SAMPLED = SAMPLINGS["sampled"]
Expected = Callable[[list[int], int, int], list[int]]  # text, seed, count


@pytest.fixture(scope="module")
def case() -> Case:
    return case_of("llama", "sampled")


def drafts_are(
    drafter: Drafter, whole: Drafter, case: Case, sampling: Sampling, expected: Expected
) -> set[int]:
    """Decode with `whole`, of which `drafter` is a part, and compare every draft of this with what
    is expected after the text; how many were accepted."""
    propose = drafter.propose

    def check(batch):
        draft = propose(batch)
        for row in range(batch.size):
            if not batch.done_B[row]:
                drafted = draft.tokens_BN[row, 1:][draft.valid_BN[row, 1:]].tolist()
                seed = int(batch.seeds_B[row])
                assert drafted == expected(batch.texts[row], seed, len(drafted))
        return draft

    drafter.propose = check
    engine = Engine(case.lm, whole, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, sampling, batch_size=2)
    return {step.accepted for generation in done for step in generation.steps}


@pytest.mark.parametrize("own", [True, False], ids=["first layers", "another model"])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_model_drafts_what_it_would_with_the_whole_text_before_it(case, sampling, own):
    """Also after rounds in which another drafter had its way."""
    rope = {"rope_type": "default", "rope_theta": 300.0}  # positions of its own
    model = draft_lm(case) if own else tiny("llama", rope_parameters=rope, num_hidden_layers=2)

    @torch.no_grad()
    def expected(text: list[int], seed: int, count: int) -> list[int]:
        drafted: list[int] = []
        for _ in range(count):
            tokens = [*text, *drafted]
            block = model.chunk(0, len(tokens), row=0, n_slots=len(tokens))
            x_1TD, _ = model.run(
                model.embed(torch.tensor([tokens])), None, block, range(model.n_layers)
            )
            position = torch.tensor([[len(tokens)]])
            token = pick(model.logits(x_1TD[:, -1:]), position, sampling, torch.tensor([seed]))
            drafted.append(int(token))
        return drafted

    drafter = DraftModel(case.lm, model, steps=3)
    accepted = drafts_are(drafter, drafter, case, sampling, expected)
    assert not own or {1, 3} <= accepted  # after rounds accepted whole and others
    drafter = DraftModel(case.lm, model, steps=3)
    cascade = Cascade(case.lm, Sometimes(case.texts), drafter)
    drafts_are(drafter, cascade, case, sampling, expected)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("skip", [[1], [1, 3], [0, 1, 2]])
def test_skipped_layers_read_the_whole_targets_keys_of_the_text(case, sampling, skip):
    lm = case.lm

    @torch.no_grad()
    def expected(text: list[int], seed: int, count: int) -> list[int]:
        drafted: list[int] = []
        known = len(text) - 1
        cache = lm.new_cache(1, len(text) + count)
        if known:  # the text's keys are those of all layers
            block = lm.chunk(0, known, row=0, n_slots=cache.n_slots)
            lm.run(lm.embed(torch.tensor([text[:-1]])), cache, block, range(lm.n_layers))
        for i in range(count):
            block = lm.chunk(known + i, known + i + 1, row=0, n_slots=cache.n_slots)
            x_11D = lm.embed(torch.tensor([[[text[-1], *drafted][i]]]))
            for layer in range(lm.n_layers):
                if layer not in skip:
                    x_11D, _ = lm.run(x_11D, cache, block, range(layer, layer + 1))
            position = torch.tensor([[len(text) + i]])
            drafted.append(int(pick(lm.logits(x_11D), position, sampling, torch.tensor([seed]))))
        return drafted

    drafter = LayerSkip(lm, skip, steps=3, threshold=0)
    accepted = drafts_are(drafter, drafter, case, sampling, expected)
    assert skip == [0, 1, 2] or len(accepted) > 2


@pytest.mark.parametrize("steps", [1, 3])
def test_rounds_are_those_of_transformers_assisted_generation(case, steps):
    """Same drafts, same acceptance: an implementation that is not ours."""
    model = assistant(draft_model(case.lm, case.adapter))
    config = model.generation_config
    config.num_assistant_tokens, config.num_assistant_tokens_schedule = steps, "constant"
    config.assistant_confidence_threshold = 0.0
    for prompt in PROMPTS:
        theirs = timed_generate(case.lm, assistant_model=model)(prompt, NEW_TOKENS)
        drafter = DraftModel(case.lm, draft_lm(case), steps)
        (ours,) = Engine(case.lm, drafter).generate([prompt], NEW_TOKENS)
        assert ours.tokens == theirs.tokens
        rounds = [len(step.tokens) for step in ours.steps]
        assert rounds[1:] == [count for count, _ in theirs.rounds]
        assert max(rounds) == steps + 1


def test_rejection_sampling_has_the_draft_models_probabilities(case):
    drafter = DraftModel(case.lm, draft_lm(case), steps=3)
    sampling = Sampling(temperature=0.8, seed=3, rule=Rule.rejection)
    done = Engine(case.lm, drafter).generate(PROMPTS, NEW_TOKENS, sampling)
    steps = [step for generation in done for step in generation.steps]
    assert 0.3 < sum(s.accepted for s in steps) / sum(s.drafted for s in steps) < 1


def test_a_draft_model_of_another_vocabulary_is_refused_with_both_sizes(case):
    with pytest.raises(ConfigError, match=rf"96 tokens.*{VOCABULARY}.*drafter\.model="):
        DraftModel(case.lm, tiny("llama", vocab_size=96))


def test_any_model_of_the_same_vocabulary_drafts():
    """By way of `model=`, as LLaMA-68M before Vicuna."""
    hf, _ = models.load(ModelConfig("tiny", models.TINY, dtype=Dtype.float32, device="cpu"))
    lm = LM(hf)
    prompts = [[1, 5, 9], [7]]
    drafter = DraftModelConfig(model=models.TINY, steps=3).build(lm)
    done = Engine(lm, drafter).generate(prompts, 12)
    assert [p + g.tokens for p, g in zip(prompts, done, strict=True)] == vanilla_texts(
        lm, prompts, 12
    )
    # the very same model: nothing is refused
    assert {step.accepted for g in done for step in g.steps} == {3}


def test_one_of_model_and_adapter_is_needed(case):
    for fields in ({}, {"model": "a", "adapter": "b"}):
        with pytest.raises(ConfigError, match="give one of them"):
            DraftModelConfig(**fields).build(case.lm)


def test_layers_that_are_left_form_ranges():
    assert runs([1, 4, 5], 8) == [range(0, 1), range(2, 4), range(6, 8)]
    assert runs([0, 3], 4) == [range(1, 3)]
    assert runs([], 3) == [range(0, 3)]


def test_subsets_that_cannot_be_are_refused_by_name(case, tmp_path):
    for skip in ([4], [-1], [0, 1, 2, 3]):
        with pytest.raises(ConfigError, match=r"skip=.*0 to 3"):
            LayerSkip(case.lm, skip)
    with pytest.raises(ConfigError, match="search_layers"):
        LayerSkipConfig().build(case.lm)
    file = tmp_path / "subset.json"
    with pytest.raises(AdapterNotFound, match="search_layers"):
        LayerSkipConfig(subset=str(file)).build(case.lm)
    file.write_text("{")
    with pytest.raises(CorruptFile, match="search one again"):
        LayerSkipConfig(subset=str(file)).build(case.lm)
    file.write_text('{"skip": [1], "target": "another", "target_hash": "0"}')
    with pytest.raises(AdapterMismatch, match="another"):
        LayerSkipConfig(subset=str(file)).build(case.lm)
