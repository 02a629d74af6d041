"""EAGLE: what its head is taught, and what is drafted. The conformance test has its texts.

Shapes: B rows, T tokens, M positions, D hidden size.
"""

from __future__ import annotations

import json

import torch
from helpers import eagle_for, random_prompts, tiny, vanilla_texts
from training_cases import run, sample

from kangaroo.drafters.eagle import EagleConfig
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.kangaroo_tree import KangarooTree
from kangaroo.engine.engine import Engine
from kangaroo.heads import adapter_files
from kangaroo.heads.eagle_head import EagleHead, EagleHeadConfig
from kangaroo.training.batches import collate
from kangaroo.training.checkpoint import METRICS
from kangaroo.training.micro_batch import forward_target, train_step
from kangaroo.training.recipe import AdapterRecipe, trainees


def test_the_head_reads_an_embedding_and_the_state_before_it():
    """By the formulas of the paper's released code, part by part."""
    lm, (ids,) = tiny("qwen2"), random_prompts(9)
    head = eagle_for(lm)
    meta = lm.chunk(0, 9, row=0, n_slots=9)
    e_1TD = lm.embed(torch.tensor([ids]))
    deep_1TD = torch.randn(1, 9, 32)
    join, attention = head.join, head.attention
    x_1TD = torch.cat([e_1TD, deep_1TD], -1) @ join.weight.T + join.bias
    attended_1TD, _ = attention(
        hidden_states=x_1TD,
        position_embeddings=meta.rope,
        attention_mask=None,
        past_key_values=None,
    )
    x_1TD = x_1TD + attended_1TD
    expected = x_1TD + head.feed_forward(head.middle_norm(x_1TD))
    torch.testing.assert_close(head(e_1TD, deep_1TD, meta, None), expected)
    with torch.no_grad():
        other = head(e_1TD + 1, deep_1TD, meta, None)
    assert not torch.allclose(other, expected)


def gradients(lm, regression, weight=0.5):
    recipe = AdapterRecipe("eagle", EagleHeadConfig(regression))
    made = trainees(lm, [recipe], None)
    made[0].adapter.load_state_dict(eagle_for(lm).state_dict())
    tokens = collate([sample(ids, 4) for ids in random_prompts(14, 11)], 100, lm.device)
    seen = forward_target(lm, tokens, made, 7)
    train_step(lm, seen, made, 7, weight=weight)
    return made[0].adapter, seen, {n: p.grad for n, p in made[0].adapter.named_parameters()}


def test_the_loss_on_states_is_added_with_its_weight():
    lm = tiny()
    head, seen, both = gradients(lm, regression=3.0)
    _, _, tokens_alone = gradients(lm, regression=0.0)
    wanted_BT = seen.tokens.wanted_BT
    (state_BTD,) = head.states(seen.taps, seen.deep[lm.n_layers], seen.meta, 1)
    difference_MD = state_BTD[wanted_BT] - seen.deep[lm.n_layers][wanted_BT]
    near = difference_MD.abs() < 1
    loss_MD = torch.where(near, 0.5 * difference_MD**2, difference_MD.abs() - 0.5)
    head.zero_grad()
    (0.5 * 3.0 * loss_MD.mean(-1).sum()).backward()
    for name, parameter in head.named_parameters():
        wanted = tokens_alone[name] + parameter.grad  # its sums are taken in another order
        torch.testing.assert_close(both[name], wanted, rtol=3e-5, atol=1e-5)


def test_training_saves_a_head_that_decodes(tmp_path):
    """Its loss falls, and it is then right more often."""
    lm = tiny("llama", deep_scale=0.5)
    texts = vanilla_texts(lm, random_prompts(*[6] * 14), 40)
    recipe = AdapterRecipe("eagle", EagleHeadConfig(regression=1.0), learning_rate=1e-2)
    data = [sample(text, 6) for text in texts]
    folder = run(lm, tmp_path, recipe, data, epochs=6, holdout=3)
    assert folder.name == "eagle"
    rows = [json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines()]
    assert rows[-1]["train/eagle/loss"] < rows[0]["train/eagle/loss"] - 0.2
    assert {"held_out/eagle/step6/loss", "decode/eagle/ctar1"} <= rows[-1].keys()
    config = adapter_files.read_config(str(folder))
    assert (config.exit_layer, config.architecture) == (0, EagleHeadConfig(regression=1.0))
    assert isinstance(EagleConfig(adapter="untrained:0").build(lm).adapter, EagleHead)
    chain = EagleConfig(adapter=str(folder), steps=4, threshold=0).build(lm)
    assert isinstance(chain, Kangaroo)
    tree = EagleConfig(adapter=str(folder), steps=3, threshold=0, top_k=3, nodes=8).build(lm)
    assert isinstance(tree, KangarooTree)
    for drafter in (chain, tree):
        done = Engine(lm, drafter).generate([text[:6] for text in texts], 40)
        assert [text[:6] + g.tokens for text, g in zip(texts, done, strict=True)] == texts
        assert sum(step.accepted for g in done for step in g.steps) > 0
