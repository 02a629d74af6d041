"""EAGLE: what its head is taught, and what is drafted. The conformance test has its texts.

Shapes: B rows, T tokens, M positions, D hidden size.
"""

from __future__ import annotations

import json

import pytest
import torch
from cases import CHUNK, NEW_TOKENS, PROMPTS, SAMPLINGS, case_of
from helpers import eagle_for, random_prompts, tiny, vanilla_texts
from training_cases import run, sample

from kangaroo.drafters.eagle import EagleConfig, EagleTree
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling, candidates
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
    assert isinstance(tree, EagleTree)
    for drafter in (chain, tree):
        done = Engine(lm, drafter).generate([text[:6] for text in texts], 40)
        assert [text[:6] + g.tokens for text, g in zip(texts, done, strict=True)] == texts
        assert sum(step.accepted for g in done for step in g.steps) > 0


@torch.no_grad()
def children(lm, head, text, path, sampling, seed, count):
    """(token, confidence) of a node's candidates, by whole forwards without a cache."""
    tokens_1T = torch.tensor([[*text, *path]])
    length = tokens_1T.shape[1]
    meta = lm.chunk(0, length, row=0, n_slots=length)
    e_1TD = lm.embed(tokens_1T)
    deep_1TD = lm.norm(lm.run(e_1TD, None, meta, range(lm.n_layers))[0])
    for end in range(len(text), length + 1):  # from the pending token on it reads its own states
        before_1TD = torch.cat([torch.zeros_like(e_1TD[:, :1]), deep_1TD[:, :-1]], 1)
        deep_1TD[:, end - 1] = head(e_1TD, before_1TD, meta, None)[:, end - 1]
    logits_11V = lm.read_out(deep_1TD[:, -1:])
    tokens = candidates(logits_11V, torch.tensor([[length]]), sampling, torch.tensor([seed]), count)
    sure = logits_11V.softmax(-1).sort(descending=True).values
    return list(zip(tokens[0, 0].tolist(), sure[0, 0, :count].tolist(), strict=True))


def tree_by_definition(lm, head, text, drafter, sampling, seed):
    """The verified nodes of EAGLE-2 as paths of tokens: expansion, then reranking."""
    scores, level = {}, {(): 1.0}
    for _ in range(drafter.steps):
        offered = {
            (*path, token): score * sure
            for path, score in level.items()
            for token, sure in children(lm, head, text, path, sampling, seed, drafter.top_k)
        }
        scores |= offered
        level = dict(sorted(offered.items(), key=lambda node: -node[1])[: drafter.top_k])
    return set(sorted(scores, key=lambda path: -scores[path])[: drafter.nodes])


@pytest.mark.parametrize("nodes, rows", [(5, 2), (14, 1)])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLINGS["sampled"]], ids=["greedy", "sampled"])
def test_the_dynamic_tree_is_the_one_of_eagle_2(monkeypatch, sampling, nodes, rows):
    lm = case_of("llama", "sampled").lm
    head = eagle_for(lm)
    drafter = EagleTree(lm, head, 3, 0, None, 3, nodes, 0.0)
    propose, beside = drafter.propose, []

    def check(batch):
        draft = propose(batch)
        for row in (row for row in range(batch.size) if not batch.done[row]):
            parents, tokens = draft.tree.parents_BN[row].tolist(), draft.tokens_BN[row].tolist()
            paths = [()]
            for node in range(1, len(tokens)):
                paths.append((*paths[parents[node]], tokens[node]))
            valid = draft.valid_BN[row].tolist()
            drafted = {path for path, is_valid in zip(paths, valid, strict=True) if is_valid}
            seed, text = batch.seeds[row], batch.texts[row]
            assert drafted - {()} == tree_by_definition(lm, head, text, drafter, sampling, seed)
            beside.append(sum(len(path) == 2 for path in drafted) > drafter.top_k)
        return draft

    monkeypatch.setattr(drafter, "propose", check)
    engine = Engine(lm, drafter, prefill_chunk=CHUNK)
    done = engine.generate(PROMPTS, NEW_TOKENS, sampling, batch_size=rows)
    accepted = {step.accepted for generation in done for step in generation.steps}
    assert len(accepted) > 2
    assert any(beside) == (nodes == 14)  # nodes that no level took
