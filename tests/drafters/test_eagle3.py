"""EAGLE-3: what its layer reads, what it is taught, and a head from training to a tree.

Shapes: T tokens of a text, D hidden size, K draft vocabulary.
"""

import helpers
import pytest
import torch
from helpers import VOCABULARY, eagle3_for, random_prompts, tiny
from training_cases import run, sample

from kangaroo.drafters.eagle import EagleTree
from kangaroo.drafters.eagle3 import Eagle3Config
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.engine.engine import Engine
from kangaroo.heads import adapter_files
from kangaroo.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig, fused_taps
from kangaroo.training.batches import collate, forward_target, train_step
from kangaroo.training.recipe import AdapterRecipe, trainees
from kangaroo.training.results import read_metrics

FEW_K = torch.arange(0, VOCABULARY, 2)


def test_it_fuses_the_inputs_of_the_layers_that_the_released_code_names():
    """Layers 2, L / 2 and L - 3; and of small models whatever there is."""
    assert fused_taps(32) == (2, 16, 29) and fused_taps(40) == (2, 20, 37)
    assert fused_taps(4) == (2, 2, 1) and fused_taps(1) == (1, 0, 0)


def test_no_token_but_the_first_sees_the_first():
    lm = tiny()
    head, meta = eagle3_for(lm), lm.chunk(0, 9, row=0, n_slots=9)
    e_1TD, deep_1TD = lm.embed(torch.tensor(random_prompts(9))), torch.randn(1, 9, 32)
    states = head(e_1TD, deep_1TD, meta, None)
    for place in (0, 3):
        changed_1TD = e_1TD.clone()
        changed_1TD[:, place] += 1
        differs_T = (head(changed_1TD, deep_1TD, meta, None) != states).any(-1)[0]
        assert differs_T.tolist() == [t == 0 if place == 0 else t >= 3 for t in range(9)]


def test_every_part_learns_also_the_norm_before_the_head():
    lm = tiny()
    recipe = AdapterRecipe("eagle3", Eagle3HeadConfig(), draft_steps=3)
    (trainee,) = trainees(lm, [recipe], FEW_K)
    assert torch.equal(trainee.adapter.head.weight, lm.head.weight[FEW_K])
    tokens = collate([sample(ids, 4) for ids in random_prompts(14, 11)], 100, lm.device)
    outputs = forward_target(lm, tokens, [trainee])
    train_step(lm, outputs, [trainee], 7, weight=0.5)
    # the same by one backward pass through whole logits: cross entropy inside the vocabulary
    head, meta, learnt_BT = trainee.adapter, outputs.meta, tokens.learnt_BT
    got = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    p_MK = outputs.distributions.chances(slice(None))
    states, loss = head.states(outputs.taps, torch.empty(2, 14, 0), meta, 3), 0.0
    valid_BT = learnt_BT
    for step, state_BTD in enumerate(states):
        log_q_MK = head.head(head.head_norm(state_BTD[learnt_BT])).log_softmax(-1)
        loss = loss - 0.8**step * ((p_MK * log_q_MK).sum(-1) * valid_BT[learnt_BT]).sum()
        valid_BT = valid_BT & torch.nn.functional.pad(valid_BT[:, :-1], (1, 0))
    (0.5 * loss).backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(got[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_states_are_normed_before_the_head_whoever_multiplies():
    lm = tiny()
    trained = eagle3_for(lm)
    (head,) = trained.draft_heads(lm, None)
    x_MD = 3 * torch.randn(5, 32)
    expected_MK = torch.nn.functional.linear(trained.head_norm(x_MD), trained.head.weight)
    assert torch.equal(head(x_MD), expected_MK) and head.choose(x_MD) is None

    class Kernels:
        def choose(self, x_RTD: torch.Tensor, ids_O: object) -> tuple[torch.Tensor, object]:
            return x_RTD, ids_O

    head.fast = Kernels()
    assert torch.equal(head.choose(x_MD)[0][:, 0], trained.head_norm(x_MD))


@pytest.mark.parametrize("vocabulary", [pytest.param(None, marks=pytest.mark.slow), 40])
def test_training_saves_a_head_that_decodes(tmp_path, vocabulary):
    lm = tiny("llama", deep_scale=0.5).compile_for_decoding()
    texts = helpers.vanilla_texts(lm, random_prompts(*[6] * 14), 40)
    recipe = AdapterRecipe("eagle3", Eagle3HeadConfig(), draft_steps=3, learning_rate=1e-2)
    data, options = [sample(x, 6) for x in texts], {"vocabulary": vocabulary}
    folder = run(lm, tmp_path, recipe, data, epochs=6, holdout=3, **options)
    assert folder.name == "eagle3"
    rows = read_metrics(tmp_path)
    assert rows[-1]["train/eagle3/loss"] < rows[0]["train/eagle3/loss"] - 0.2
    config = adapter_files.read_config(str(folder))
    assert (config.exit_layer, config.architecture) == (0, Eagle3HeadConfig())
    assert config.vocabulary == vocabulary
    assert isinstance(Eagle3Config(adapter="untrained:0").build(lm).adapter, Eagle3Head)
    chain = Eagle3Config(adapter=str(folder), steps=4, threshold=0, top_k=1).build(lm)
    tree = Eagle3Config(adapter=str(folder), steps=3, threshold=0, top_k=3, nodes=8).build(lm)
    assert isinstance(chain, Kangaroo) and isinstance(tree, EagleTree)
    assert tree.head.size == (vocabulary or VOCABULARY)
    for drafter in (chain, tree):
        engine = Engine(lm, drafter)
        assert helpers.texts_by(engine, [text[:6] for text in texts], 40) == texts


@pytest.mark.parametrize("compiled", [False, True])
def test_a_tree_may_have_more_nodes_than_its_levels(compiled):
    """Two levels of six nodes offer 42 children, and all are verified."""
    lm = tiny().compile_for_decoding() if compiled else tiny()
    prompts = random_prompts(5, 9, 1)
    texts = helpers.vanilla_texts(lm, prompts, 14)
    head = eagle3_for(lm)
    drafter = helpers.tree_of(lm, head, 2, 0, None, 6, 40, 0.0, kind=EagleTree)
    engine = Engine(lm, drafter)
    done = engine.generate(prompts, 14, batch_size=2)
    assert [p + x.tokens for p, x in zip(prompts, done, strict=True)] == texts
    assert {step.drafted for x in done for step in x.steps[1:-1]} == {40}
