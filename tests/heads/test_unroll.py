"""What an adapter learns at a draft step is what it does there when it drafts.

Shapes: T tokens, D hidden size.
"""

from dataclasses import replace

import pytest
import torch
from helpers import adapter_for, eagle_for, random_prompts, tiny
from torch import Tensor

from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.heads.adapter import AdapterHeadConfig
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import collate

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}  # float32, summed in another order
FUSED = [{}, {"feed_forward": True}, {"attention_layers": 2}]


@pytest.fixture(scope="module", params=[*FUSED, "eagle", "window"], ids=str)
def fused(request) -> tuple[TargetModel, Layer]:
    """Layers that read deep states."""
    lm = tiny("mistral", sliding_window=6) if request.param == "window" else tiny()
    if request.param == "eagle":
        return lm, eagle_for(lm)
    parts = {} if request.param == "window" else request.param
    return lm, adapter_for(lm, architecture=AdapterHeadConfig(**parts, fused=True))


def states(lm: TargetModel, ids: list[int], layers: int) -> Tensor:
    """The target's states `[1, T, D]` after some layers."""
    meta = lm.chunk(0, len(ids), row=0, n_slots=len(ids))
    return lm.run(lm.embed(torch.tensor([ids])), None, meta, range(layers))[0]


@torch.no_grad()
def last_state(lm: TargetModel, adapter: Layer, ids: list[int], pending: int) -> Tensor:
    """The adapter's state at the last of `ids`, whose tokens after `pending` are only drafted.

    By the definition, in a whole pass a token: the target's deep states are known up to `pending`,
    itself excluded, and after that the adapter's own take their place.
    """
    deep_1TD = lm.norm(states(lm, ids, adapter.deep_tap))[:, :pending]  # causal: the rest is unseen
    for end in range(pending + 1, len(ids) + 1):
        f_1TD = states(lm, ids[:end], adapter.exit_layer)
        before_1TD = torch.cat([torch.zeros(1, 1, deep_1TD.shape[-1]), deep_1TD], 1)
        own_1TD = adapter(f_1TD, before_1TD, lm.chunk(0, end, 0, end), None)
        deep_1TD = torch.cat([deep_1TD, own_1TD[:, -1:]], 1)
    return deep_1TD[0, -1]


def test_every_draft_step_of_training_is_that_of_drafting(fused):
    lm, adapter = fused
    (ids,) = random_prompts(12)
    meta = lm.chunk(0, 12, 0, 12)
    f_1TD = states(lm, ids, adapter.exit_layer)
    deep_1TD = lm.norm(states(lm, ids, adapter.deep_tap))
    with torch.no_grad():
        unrolled = adapter.states({adapter.exit_layer: f_1TD}, deep_1TD, meta, steps=3)
    for step, state_1TD in enumerate(unrolled):
        for position in range(step + 1, 12):
            expected = last_state(lm, adapter, ids[: position + 1], pending=position - step)
            torch.testing.assert_close(state_1TD[0, position], expected, **TOLERANCE)


def test_a_fused_adapter_reads_the_deep_state_and_its_own(fused):
    """Else the equality above would hold for anything."""
    lm, adapter = fused
    (ids,) = random_prompts(12)
    assert not torch.allclose(
        last_state(lm, adapter, ids, pending=10), last_state(lm, adapter, ids, pending=11)
    )


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_fused_drafter_drafts_by_that_definition(fused, monkeypatch, batch_size):
    """Texts are right whatever is drafted, so a stale state would cost acceptance unseen."""
    lm, adapter = fused
    drafter = Kangaroo(lm, adapter, steps=3, threshold=0.2)
    propose, checked = drafter.propose, []

    def check(batch):
        draft = propose(batch)
        for row in range(batch.size):
            if batch.done_B[row]:
                continue
            ids = batch.tokens_BS[row, : batch.lengths[row]].tolist()
            pending = len(ids) - 1
            for token in draft.tokens_BN[row, 1:][draft.valid_BN[row, 1:]].tolist():
                state_D = last_state(lm, adapter, ids, pending)
                assert token == drafter.head(state_D[None])[0].argmax()
                ids.append(token)
            checked.append(len(ids) - 1 - pending)
        return draft

    monkeypatch.setattr(drafter, "propose", check)
    engine = Engine(lm, drafter, prefill_chunk=7)
    # one token, in a row used before; 9: two chunks
    engine.generate(random_prompts(9, 3, 1, 14), 16, batch_size=batch_size)
    assert {1, 3} <= set(checked)  # some stopped at once, and some went on to the end


@pytest.mark.parametrize("feed_forward", [False, True])
def test_states_are_computed_only_where_they_are_read(feed_forward):
    """Same states there, same gradients of the weights, and nothing elsewhere."""
    lm = tiny()
    adapter = adapter_for(lm, architecture=AdapterHeadConfig(feed_forward=feed_forward))
    adapter.requires_grad_()
    samples = [
        {"input_ids": ids, "loss_mask": [0] * 4 + [1] * (n - 4), "messages": []}
        for ids, n in zip(random_prompts(12, 7, 5), (12, 7, 5), strict=True)
    ]
    tokens = collate(samples, 64, lm.device)
    (rows, width), read_BT = tokens.input_BT.shape, tokens.wanted_BT
    meta = replace(lm.chunk(0, width, 0, width), rows=slice(0, rows))
    with torch.no_grad():
        f_BTD = lm.run(lm.embed(tokens.input_BT), None, meta, range(adapter.exit_layer))[0]
    found = []
    for read in (None, read_BT):
        adapter.zero_grad()
        (state_BTD,) = adapter.states({adapter.exit_layer: f_BTD}, f_BTD[..., :0], meta, 1, read)
        state_BTD[read_BT].square().sum().backward()
        found.append((state_BTD.detach(), [p.grad.clone() for p in adapter.parameters()]))
    (whole_BTD, whole), (part_BTD, part) = found
    torch.testing.assert_close(part_BTD[read_BT], whole_BTD[read_BT], **TOLERANCE)
    assert not part_BTD[~read_BT].any()
    for gradient, expected in zip(part, whole, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-4)
