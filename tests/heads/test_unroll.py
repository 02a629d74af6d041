"""What a layer learns at a draft step, or a place, is what it does there when it drafts; and how
far it looks back.

Shapes: T tokens, P places, D hidden size, K draft vocabulary, R rank.
"""

import helpers
import pytest
import torch
from cases import deep_states, last_state, rounds_of
from helpers import EXIT, adapter_for, eagle3_for, eagle_for, states_after, tiny
from torch import Tensor

from kangaroo.drafters.block import Block, BlockConfig
from kangaroo.drafters.kangaroo import Kangaroo, KangarooConfig
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.engine import engine as engine_module
from kangaroo.engine.engine import Engine
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.block import BlockHead, BlockHeadConfig
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import attention_reach
from kangaroo.training.recipe import AdapterRecipe, trainees
from kangaroo.utils.errors import ConfigError

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32, summed in another order
HEADS = {"eagle": eagle_for, "eagle3": eagle3_for}
FUSED = [{}, {"feed_forward": True}, {"attention_layers": 2}]
PARTS = [{}, {"feed_forward": True, "fused": True}, {"attention_layers": 2}]
WINDOW = 64
WINDOWED = {"one layer": {}, "fused": {"fused": True, "attention_layers": 2}}
LONG = helpers.random_prompts(200, 151)
BOTH = [("one layer", kind) for kind in (Kangaroo, KangarooTree)]


@pytest.mark.parametrize("kind", [*FUSED, "eagle", "eagle3", "window"], ids=str)
def test_every_draft_step_of_training_is_that_of_drafting(kind):
    lm = tiny("mistral", sliding_window=6) if kind == "window" else tiny()
    parts = AdapterHeadConfig(fused=True, **(kind if kind in FUSED else {}))
    adapter = HEADS[kind](lm) if kind in ("eagle", "eagle3") else adapter_for(lm, EXIT, parts)
    (ids,) = helpers.random_prompts(12)
    meta = lm.chunk(0, 12, 0, 12)
    taps = {tap: states_after(lm, ids, tap) for tap in adapter.taps}
    with torch.no_grad():
        unrolled = adapter.states(taps, deep_states(lm, adapter, ids), meta, steps=3)
    for step, state_1TD in enumerate(unrolled):
        for position in range(step + 1, 12):
            expected = last_state(lm, adapter, ids[: position + 1], pending=position - step)
            torch.testing.assert_close(state_1TD[0, position], expected, **TOLERANCE)
    # it reads the deep state and its own, else this would hold for anything
    assert not torch.allclose(*(last_state(lm, adapter, ids, pending) for pending in (10, 11)))


@pytest.fixture(scope="module", params=PARTS, ids=str)
def trained(request) -> tuple[TargetModel, BlockHead]:
    lm = tiny()
    return lm, helpers.block_for(lm, **request.param)


@torch.no_grad()
def places(lm: TargetModel, head: BlockHead, text: list[int]) -> Tensor:
    """By the definition, `[P, D]`: the states of all places after a text, in one causal pass."""
    f_1TD, deep_1TD = states_after(lm, text, EXIT), None
    if head.deep_tap is not None:
        deep_1TD = lm.norm(states_after(lm, text, head.deep_tap))[:, :-1]
        deep_1TD = torch.cat([torch.zeros_like(f_1TD[:, :1]), deep_1TD], 1)
    f_1TD, deep_1TD = head.add_places(f_1TD, deep_1TD, 4)
    length = f_1TD.shape[1]
    return head(f_1TD, deep_1TD, lm.chunk(0, length, 0, length), None)[0, len(text) - 1 :]


def test_every_step_of_training_is_a_place_of_the_block(trained):
    lm, head = trained
    (ids,) = helpers.random_prompts(12)
    deep_1TD = lm.norm(states_after(lm, ids, lm.n_layers - 1))
    taps = {tap: states_after(lm, ids, tap) for tap in head.taps}
    with torch.no_grad():
        learnt = head.states(taps, deep_1TD, lm.chunk(0, 12, 0, 12), 5)
        neighbours_TR = head.neighbours(taps[0])[0]
    for step, state_1TX in enumerate(learnt):
        for position in range(step + 1, 12):
            expected_PD = places(lm, head, ids[: position + 1 - step])
            state_D, near_R = state_1TX[0, position].split([lm.config.hidden_size, 8 * (step > 0)])
            torch.testing.assert_close(state_D, expected_PD[step], **TOLERANCE)
            assert not step or torch.equal(near_R, neighbours_TR[position])


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_draft_is_that_of_the_definition(trained, batch_size):
    lm, head = trained
    drafter, further = helpers.chain_of(lm, head, 4, 0.3, kind=Block), head.draft_heads(lm, None)[1]

    def expected(text: list[int], seed: int, count: int) -> list[int]:
        tokens = text[-1:]
        for place, state_D in enumerate(places(lm, head, text)[:count]):
            near_1R = head.neighbours(lm.embed(torch.tensor([tokens[-1]])))
            read_1X = torch.cat([state_D[None], near_1R], -1)
            logits_1K = further(read_1X) if place else drafter.head(state_D[None])
            tokens.append(int(logits_1K.argmax()))
        return tokens[1:]

    lengths = helpers.check_chains(drafter, expected)
    engine = Engine(lm, drafter, prefill_chunk=7, always_drafts=True)
    # one token, in a row used before; 9: two chunks
    engine.generate(helpers.random_prompts(9, 3, 1, 14), 16, batch_size=batch_size)
    assert len(lengths) > 1 and 4 in lengths  # some stopped at once, some went on to the end


def test_it_drafts_from_disk_no_further_than_it_has_places_and_a_chain_too(tmp_path):
    lm = tiny()
    head, prompts = helpers.block_for(lm, torch.arange(0, 64, 2)), helpers.random_prompts(9)
    folder = helpers.saved_adapter(lm, head, tmp_path / "block", range(0, 64, 2), vocabulary=32)
    drafter = BlockConfig(adapter=str(folder), steps=9).build(lm)
    assert drafter.steps == 5 and drafter.head.size == 32
    assert torch.equal(drafter.table_KR, head.table.weight)
    for reader in (drafter, KangarooConfig(adapter=str(folder), steps=9, threshold=0).build(lm)):
        texts = helpers.texts_by(Engine(lm, reader), prompts, 9)
        assert texts == helpers.vanilla_texts(lm, prompts, 9)


def test_it_may_go_on_from_an_adapter_and_is_not_asked_for_more_steps(tmp_path):
    lm = tiny()
    adapter = adapter_for(lm)
    folder = helpers.saved_adapter(lm, adapter, tmp_path / "attention")
    parts = BlockHeadConfig(places=3, feed_forward=True)
    recipe = AdapterRecipe("block", parts, [EXIT], start=str(folder))
    (trainee,) = trainees(lm, [recipe], None)
    head, begun = trainee.adapter.state_dict(), adapter.state_dict()
    assert all(torch.equal(head[name], weight) for name, weight in begun.items())
    assert not head["feed_forward.down_proj.weight"].any() and not head["table.weight"].any()
    assert recipe.steps == 3
    with pytest.raises(ConfigError, match=r"is not for a block: .*adapter\.architecture says"):
        AdapterRecipe("block", parts, [EXIT], draft_steps=2).steps  # noqa: B018


@torch.no_grad()
@pytest.mark.parametrize("length", [128, 129, 200])
def test_a_token_sees_whole_blocks_from_the_one_where_its_window_begins(length):
    lm = tiny()
    adapter, whole = adapter_for(lm), lm.chunk(0, length, 0, length)
    adapter.attention_window = WINDOW
    f_1TD = states_after(lm, LONG[0][:length], adapter.exit_layer)
    first = (length - 1 - WINDOW) // 64 * 64
    assert first == {128: 0, 129: 64, 200: 128}[length]
    visible = lm.chunk(0, length - first, 0, length)
    visible.rope = tuple(x[:, first:] for x in whole.rope)
    whole_1TD = adapter(f_1TD, None, whole, None)
    adapter.attention_window = 0
    expected_1TD = adapter(f_1TD[:, first:], None, visible, None)
    torch.testing.assert_close(whole_1TD[0, -1], expected_1TD[0, -1], **TOLERANCE)


def rounds(lm: TargetModel, kind: str, drafter: type, window: int, batch_size: int):
    parts = AdapterHeadConfig(**WINDOWED.get(kind, {}))
    adapter = eagle_for(lm) if kind == "eagle" else adapter_for(lm, architecture=parts)
    adapter.attention_window = window
    build, sizes = (helpers.tree_of, (3, 9)) if drafter is KangarooTree else (helpers.chain_of, ())
    engine = Engine(lm, build(lm, adapter, 4, 0.2, None, *sizes), prefill_chunk=70)
    return rounds_of(engine.generate(LONG, 40, batch_size=batch_size))


@pytest.mark.parametrize("kind, drafter", [*BOTH, ("fused", Kangaroo), ("eagle", KangarooTree)])
def test_within_a_window_native_rounds_draft_what_tensors_draft(kind, drafter):
    expected = rounds(tiny(), kind, drafter, WINDOW, 2)
    assert rounds(tiny().compile_for_decoding(), kind, drafter, WINDOW, 1) == expected
    short, far = (rounds(tiny().compile_for_decoding(), kind, drafter, n, 2) for n in (1024, 0))
    assert short == far != expected  # no text is longer than 1,024 tokens


@pytest.mark.parametrize("kind", WINDOWED)
def test_in_bfloat16_native_rounds_are_those_of_native_layers(kind, monkeypatch):
    lm = TargetModel(tiny().hf.to(torch.bfloat16)).compile_for_decoding()
    expected = rounds(lm, kind, Kangaroo, WINDOW, 2)
    monkeypatch.setattr(engine_module, "native_drafting", lambda *_: None)
    assert rounds(lm, kind, Kangaroo, WINDOW, 2) == expected


def test_a_trained_adapter_looks_back_as_far_as_its_texts_reach():
    assert attention_reach([2048] * 10) == 2048 and attention_reach([700] * 199 + [5000]) == 704
    assert attention_reach([20]) == 256
