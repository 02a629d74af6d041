"""How far an adapter looks back is the same by tensors and in native rounds.

Shapes: T tokens of a text, D hidden size.
"""

import pytest
import torch
from helpers import adapter_for, eagle_for, random_prompts, tiny

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.engine import engine as engine_module
from kangaroo.engine.engine import Engine
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import reach_of

WINDOW = 64
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32, summed in another order
PARTS = {"one layer": {}, "fused": {"fused": True, "attention_layers": 2}}
LONG = random_prompts(200, 151)


@torch.no_grad()
@pytest.mark.parametrize("length", [128, 129, 200])
def test_a_token_sees_whole_blocks_from_the_one_where_its_window_begins(length):
    lm, ids = tiny(), torch.tensor([LONG[0][:length]])
    adapter = adapter_for(lm)
    adapter.attention_window = WINDOW
    whole = lm.chunk(0, length, 0, length)
    f_1TD = lm.run(lm.embed(ids), None, whole, range(adapter.exit_layer))[0]
    first = (length - 1 - WINDOW) // 64 * 64
    assert first == {128: 0, 129: 64, 200: 128}[length]
    seen = lm.chunk(0, length - first, 0, length)
    seen.rope = tuple(x[:, first:] for x in whole.rope)
    whole_1TD = adapter(f_1TD, None, whole, None)
    adapter.attention_window = 0
    expected_1TD = adapter(f_1TD[:, first:], None, seen, None)
    torch.testing.assert_close(whole_1TD[0, -1], expected_1TD[0, -1], **TOLERANCE)


def rounds(lm: TargetModel, kind: str, drafter: type[Kangaroo], window: int, batch_size: int):
    """What each round of two long texts drafted and wrote."""
    if kind == "eagle":
        adapter = eagle_for(lm)
    else:
        adapter = adapter_for(lm, architecture=AdapterHeadConfig(**PARTS[kind]))
    adapter.attention_window = window
    options = {"top_k": 3, "nodes": 9} if drafter is KangarooTree else {}
    engine = Engine(lm, drafter(lm, adapter, 4, 0.2, None, **options), prefill_chunk=70)
    texts = engine.generate(LONG, 40, batch_size=batch_size)
    return [[(s.tokens, s.accepted, s.drafted) for s in text.steps] for text in texts]


@pytest.mark.parametrize("drafter", [Kangaroo, KangarooTree])
@pytest.mark.parametrize("kind", [*PARTS, "eagle"])
def test_native_rounds_draft_what_tensors_draft(kind, drafter, monkeypatch):
    expected = rounds(tiny(), kind, drafter, WINDOW, 2)
    assert rounds(tiny().compile_for_decoding(), kind, drafter, WINDOW, 1) == expected
    short, far = (rounds(tiny().compile_for_decoding(), kind, drafter, n, 2) for n in (1024, 0))
    assert short == far != expected  # no text is longer than 1,024 tokens


@pytest.mark.parametrize("kind", PARTS)
def test_in_bfloat16_native_rounds_are_those_of_native_layers(kind, monkeypatch):
    lm = TargetModel(tiny().hf.to(torch.bfloat16)).compile_for_decoding()
    expected = rounds(lm, kind, Kangaroo, WINDOW, 2)
    monkeypatch.setattr(engine_module, "native_drafting", lambda *_: None)
    assert rounds(lm, kind, Kangaroo, WINDOW, 2) == expected


def test_a_trained_adapter_looks_back_as_far_as_its_texts_reach():
    assert reach_of([2048] * 10) == 2048 and reach_of([700] * 199 + [5000]) == 704
    assert reach_of([20]) == 256
