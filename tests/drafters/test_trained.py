"""Medusa, EAGLE and EAGLE-3: what their heads read and are taught, and what is drafted.

Shapes: B rows, T tokens, N draft nodes, M positions, D hidden size, V and K (draft) vocabulary.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import helpers
import pytest
import torch
from cases import accepted, case_of, medusa
from helpers import VOCABULARY, eagle3_for, eagle_for, hidden_states, random_prompts, tiny
from training_cases import run, sample

from kangaroo import ConfigError, Eagle3Config
from kangaroo.drafters.eagle import EagleConfig, EagleTree
from kangaroo.drafters.kangaroo import Kangaroo
from kangaroo.drafters.medusa import MedusaConfig, sparse_tree
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import candidates, combine
from kangaroo.heads import adapter_files
from kangaroo.heads.eagle3_head import Eagle3Head, Eagle3HeadConfig
from kangaroo.heads.eagle_head import EagleHead, EagleHeadConfig
from kangaroo.heads.medusa_heads import GUESSES, MedusaHeads, MedusaHeadsConfig
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import collate, forward_target, train_step
from kangaroo.training.recipe import AdapterRecipe, trainees
from kangaroo.training.results import read_metrics

FEW_K = torch.arange(0, VOCABULARY, 2)


def heads_for(lm) -> MedusaHeads:
    heads = MedusaHeads(lm, MedusaHeadsConfig(heads=3)).start_from(lm)
    generator = torch.Generator().manual_seed(5)
    for block in heads.blocks:
        block.weight.data.normal_(std=0.3, generator=generator)
    return heads.requires_grad_(False)


def test_head_k_learns_from_the_state_k_tokens_before():
    """At every position of packed texts; zeros where the text has not begun."""
    lm = tiny("llama")
    heads = heads_for(lm)
    states_BTD = torch.randn(1, 9, 32)
    meta = lm.chunk(0, 9, row=0, n_slots=9)
    meta.positions_RT = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])  # two texts in a row
    for k, learnt_BTD in enumerate(heads.states({}, states_BTD, meta, 3), start=1):
        for t, position in enumerate(meta.positions_RT[0].tolist()):
            before_D = states_BTD[0, t - k] if position >= k else torch.zeros(32)
            torch.testing.assert_close(learnt_BTD[0, t], heads(before_D[None, None], k - 1)[0, 0])


def test_drafts_are_guesses_from_the_last_state_in_the_cache(sampling):
    lm, checked = case_of("llama", "sampled").lm, []
    choices = [(0,), (1,), (0, 0), (0, 2), (1, 0), (0, 0, 1)]
    drafter = medusa(lm, choices)

    @torch.no_grad()
    def check(batch, draft, row):
        text, guesses = batch.texts[row], []
        h_1TD = hidden_states(lm, text[:-1])[-1]
        for index, head in enumerate(drafter.draft_heads):
            logits_1V = head.spread(head(drafter.heads(h_1TD[:, -1:], index)[:, 0]))
            position, seed = torch.tensor([[len(text) + index]]), batch.seeds_B[row : row + 1]
            tokens = candidates(logits_1V[:, None], position, combine([sampling]), seed, 3)
            guesses.append(tokens[0, 0].tolist())
        expected = [guesses[len(path) - 1][path[-1]] for path in choices]
        assert draft.tokens_BN[row, 1:].tolist() == expected
        checked.append(row)

    helpers.check_drafts(drafter, check)
    assert accepted(drafter, lm, sampling) >= {0, 1} and len(checked) > 20


def test_the_sparse_tree_is_the_best_of_its_size():
    """Against all trees, on two heads of three guesses."""
    guesses = [[0.5, 0.2, 0.25], [0.4, 0.3, 0.1]]
    nodes = [(i,) for i in range(3)] + list(itertools.product(range(3), repeat=2))

    def worth(paths):
        return sum(math.prod(guesses[d][r] for d, r in enumerate(path)) for path in paths)

    for size in (1, 3, 5, 8):
        some = itertools.combinations(nodes, size)
        trees = [x for x in some if all(len(path) == 1 or path[:-1] in x for path in x)]
        best = sparse_tree(guesses, size)
        assert tuple(best) in trees and worth(best) == pytest.approx(max(map(worth, trees)))
    assert sparse_tree(guesses, 99) == nodes
    assert sparse_tree([right[:1] for right in guesses], 9) == [(0,), (0, 0)]


def test_settings_that_cannot_work_are_refused_by_name(tmp_path):
    lm = tiny("llama")
    heads, facts = heads_for(lm), {"guesses": []}
    folder = helpers.saved_adapter(lm, heads, tmp_path, range(VOCABULARY), facts=facts)
    with pytest.raises(ConfigError, match="train the heads again"):
        MedusaConfig(adapter=str(folder)).build(lm)
    with pytest.raises(ConfigError, match=r"draft_steps=3 is not for a medusa_heads"):
        _ = AdapterRecipe("medusa", MedusaHeadsConfig(), draft_steps=3).steps


def gradients(lm, regression):
    trained = trainees(lm, [AdapterRecipe("eagle", EagleHeadConfig(regression))], None)
    head = trained[0].adapter
    head.load_state_dict(eagle_for(lm).state_dict())
    tokens = collate([sample(ids, 4) for ids in random_prompts(14, 11)], 100, lm.device)
    outputs = forward_target(lm, tokens, trained)
    train_step(lm, outputs, trained, 7, weight=0.5)
    return head, outputs, {name: p.grad for name, p in head.named_parameters()}


def test_the_loss_on_states_is_added_with_its_weight():
    lm = tiny()
    head, outputs, both = gradients(lm, regression=3.0)
    _, _, tokens_alone = gradients(lm, regression=0.0)
    (state_BTD,) = head.states(outputs.taps, outputs.deep[lm.n_layers], outputs.meta, 1)
    difference_MD = (state_BTD - outputs.deep[lm.n_layers])[outputs.learnt_BT]
    near = difference_MD.abs() < 1
    loss_MD = torch.where(near, 0.5 * difference_MD**2, difference_MD.abs() - 0.5)
    head.zero_grad()
    (0.5 * 3.0 * loss_MD.mean(-1).sum()).backward()
    for name, parameter in head.named_parameters():
        expected = tokens_alone[name] + parameter.grad  # its sums are taken in another order
        torch.testing.assert_close(both[name], expected, rtol=3e-5, atol=1e-5)


def test_no_token_but_the_first_sees_the_first():
    lm = tiny()
    head, meta = eagle3_for(lm), lm.chunk(0, 9, row=0, n_slots=9)
    e_1TD, deep_1TD = lm.embed(torch.tensor(random_prompts(9))), torch.randn(1, 9, 32)
    states = head(e_1TD, deep_1TD, meta, None)
    # in decoding the mask is added to scores, as kernels take it
    decoding = replace(meta, recordable=True)
    assert head.placed(decoding).bias_R1TE.dtype == lm.dtype
    assert torch.equal(head(e_1TD, deep_1TD, decoding, None), states)
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


def test_kernels_choose_from_normed_states():
    trained = eagle3_for(lm := tiny())
    (head,) = trained.draft_heads(lm, None)
    head.fast = SimpleNamespace(choose=lambda x_RTD, ids_O: (x_RTD, ids_O))
    x_MD = 3 * torch.randn(5, 32)
    assert torch.equal(head.choose(x_MD)[0][:, 0], trained.head_norm(x_MD))


@pytest.fixture(scope="module")
def written() -> tuple[TargetModel, list[list[int]]]:
    """A target, and texts of its own to learn from, each after a prompt of six tokens."""
    lm = tiny("llama", deep_scale=0.5).compile_for_decoding()
    return lm, helpers.vanilla_texts(lm, random_prompts(*[6] * 12), 30)


def trained(written, folder, recipe: AdapterRecipe, **options: Any):
    """The folder of heads that have learnt from the texts."""
    lm, texts = written
    return run(lm, folder, recipe, [sample(x, 6) for x in texts], epochs=4, holdout=3, **options)


def test_training_saves_heads_that_decode_as_told(written, tmp_path):
    lm, texts = written
    recipe = AdapterRecipe("medusa", MedusaHeadsConfig(heads=2), learning_rate=1e-2)
    folder = trained(written, tmp_path, recipe, vocabulary=40)
    assert folder.name == "medusa"
    rows = read_metrics(tmp_path)
    losses = [row["train/medusa/loss"] for row in rows]
    assert sum(losses[-9:]) < sum(losses[:9])  # an epoch
    assert {"train/medusa/step2/loss", "held_out/medusa/ctar2"} <= rows[-1].keys()
    assert rows[-1]["held_out/medusa/ctar3"] == 0  # there are but two heads

    heads, draft_heads = adapter_files.load(str(folder), lm, MedusaHeads)
    ranks: list[list[int]] = [[], []]
    for text in texts[-3:]:
        states_1TD, logits = hidden_states(lm, text)[-1], helpers.forward_logits(lm, text)
        for k, head in enumerate(draft_heads):
            # the pending token and those of the draft before this one are the assistant's
            for t in range(5 + k, len(text) - 1):
                guessed = head(heads(states_1TD[:, t - 1 - k][:, None], k)[:, 0]).topk(GUESSES)
                tokens = [*head.token_of(guessed.indices)[0].tolist(), int(logits[t].argmax())]
                ranks[k].append(tokens.index(tokens[-1]))
    about = adapter_files.read_config(str(folder))
    assert about.parameters == 2 * (32 * 32 + 32 * 40)
    guesses = about.facts["guesses"]
    for shares, of_head in zip(guesses, ranks, strict=True):
        expected = [of_head.count(rank) / len(of_head) for rank in range(GUESSES)]
        assert shares == pytest.approx(expected)
    assert sum(guesses[0]) > 0.2
    for options, size in ({"nodes": 4}, 5), ({"nodes": 9, "top_k": 1}, 3):
        tree = MedusaConfig(adapter=str(folder), **options).build(lm).tree
        assert (tree.size, tree.is_chain) == (size, "top_k" in options)


@pytest.mark.parametrize(
    "kind, architecture, config, steps, vocabulary",
    [
        (EagleHead, EagleHeadConfig(regression=1.0), EagleConfig, 1, None),
        (Eagle3Head, Eagle3HeadConfig(), Eagle3Config, 3, 40),
    ],
    ids=["eagle", "eagle3"],
)
def test_a_trained_head_decodes(written, tmp_path, kind, architecture, config, steps, vocabulary):
    lm, texts = written
    name = config().name
    recipe = AdapterRecipe(name, architecture, draft_steps=steps, learning_rate=1e-2)
    folder = trained(written, tmp_path, recipe, vocabulary=vocabulary)
    assert folder.name == name
    rows = read_metrics(tmp_path)
    assert rows[-1][f"train/{name}/loss"] < rows[0][f"train/{name}/loss"] - 0.2
    assert f"held_out/{name}/step6/loss" in rows[-1]
    about = adapter_files.read_config(str(folder))
    assert (about.exit_layer, about.architecture) == (0, architecture)
    assert about.vocabulary == vocabulary
    assert about.attention_window == 0  # it needs the first tokens
    assert isinstance(config(adapter="untrained:0").build(lm).adapter, kind)
    chain = config(adapter=str(folder), steps=4, threshold=0, top_k=1).build(lm)
    tree = config(adapter=str(folder), steps=3, threshold=0, top_k=3, nodes=8).build(lm)
    assert isinstance(chain, Kangaroo) and not isinstance(tree, Kangaroo)
    assert tree.head.size == (vocabulary or VOCABULARY)
    for drafter in (chain, tree):
        assert helpers.texts_by(Engine(lm, drafter), [text[:6] for text in texts], 30) == texts


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
