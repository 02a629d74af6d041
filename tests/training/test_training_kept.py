"""Training from the distributions that were kept when the data was written.

Shapes: M positions, J kept tokens, K draft vocabulary, V vocabulary.
"""

import math

import pytest
import torch
import training_cases
from helpers import EXIT, VOCABULARY, adapter_for, forward_logits, random_prompts, tiny
from training_cases import ABOUT, config, recipe, stored_samples, train

from kangaroo.cpu import native
from kangaroo.engine import topk_logits
from kangaroo.heads import eagle_head, medusa_heads
from kangaroo.heads.adapter_files import read_config
from kangaroo.heads.draft_head import DraftHead
from kangaroo.training.batches import Work, collate, wanted_of
from kangaroo.training.distill import (
    MEASURES,
    StoredDistributions,
    Student,
    WholeDistributions,
    distill,
    outcomes,
)
from kangaroo.training.loop import Trainer
from kangaroo.training.losses import Loss, divergence
from kangaroo.training.micro_batch import forward_target, train_step
from kangaroo.training.recipe import trainees
from kangaroo.utils.errors import ConfigError

nothing_is_drawn = pytest.fixture(autouse=True)(training_cases.nothing_is_drawn)


def distilled(lm, told, loss, size, own_head=False):
    """Gradients and results of a student, under a teacher made of states `[M, D]` by `told`."""
    torch.manual_seed(0)
    vocabulary_K = None if size is None else torch.randperm(VOCABULARY)[:size].sort().values
    adapter = adapter_for(lm)
    if own_head:
        adapter = trainees(lm, [recipe(own_head=True)], vocabulary_K)[0].adapter
    states_MD, student_MD = (3 * torch.randn(2, 11, lm.config.hidden_size)).unbind()
    head, targets = DraftHead(lm, adapter.head, vocabulary_K), DraftHead(lm, None, vocabulary_K)
    student = Student(student_MD, torch.arange(11) % 3 > 0, head, loss, weight=0.5)
    distill(told(states_MD, targets), [student], chunk_size=4)
    results = dict(zip(MEASURES, student.sums_F.tolist(), strict=True))
    return [gradient for _, gradient in student.gradients], results


def whole(lm):
    return lambda states_MD, targets: WholeDistributions(lm, states_MD, targets.vocabulary_K)


def truncated(lm, count):
    def told(states_MD, targets):
        top = lm.head(states_MD).detach().softmax(-1).topk(count)
        return StoredDistributions(states_MD, top.indices, top.values, targets)

    return told


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("own_head", [False, True])
def test_all_tokens_kept_are_the_whole_distribution(loss, size, own_head):
    lm = tiny()
    exact, results = distilled(lm, whole(lm), loss, size, own_head)
    gradients, kept_results = distilled(lm, truncated(lm, VOCABULARY), loss, size, own_head)
    assert len(exact) == len(gradients) == 1 + own_head
    for gradient, expected in zip(gradients, exact, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)  # sums in other orders
    for name in MEASURES:
        assert math.isclose(kept_results[name], results[name], rel_tol=1e-4, abs_tol=1e-5), name


def by_tensors(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1000, 70])
def test_the_rest_is_one_outcome_and_native_code_finds_the_same(dtype, size, monkeypatch):
    torch.manual_seed(0)
    logits_CK = (4 * torch.randn(9, size)).to(dtype)
    index_CJ = torch.stack([torch.randperm(size)[:32] for _ in range(9)])
    inside_CJ = torch.rand(9, 32) < 0.8
    inside_CJ[0] = False
    logits_CK[1, index_CJ[1, 0]] = 40  # sure of a token among the outcomes, and here of another one
    logits_CK[2, next(k for k in range(size) if k not in index_CJ[2])] = 40
    g_CO = torch.randn(9, 33) * torch.cat([inside_CJ, torch.ones(9, 1)], 1)
    results = []
    for is_native in (True, False):
        if not is_native:
            by_tensors(monkeypatch)
        leaf_CK = logits_CK.clone().requires_grad_()
        log_q_CO, best_C = outcomes(leaf_CK, index_CJ, inside_CJ)
        (gradient_CK,) = torch.autograd.grad((g_CO * log_q_CO).sum(), leaf_CK)
        results.append((log_q_CO.detach()[:, -1], log_q_CO.detach()[:, :-1][inside_CJ], best_C))
        results[-1] += (gradient_CK,)
        assert gradient_CK.dtype == dtype
    q_CK = logits_CK.float().softmax(-1)
    rest_C = 1 - (q_CK.gather(1, index_CJ) * inside_CJ).sum(-1)
    torch.testing.assert_close(results[1][0].exp(), rest_C, rtol=1e-4, atol=1e-6)
    rough = 1e-2 if dtype == torch.bfloat16 else 1e-4  # sums in another order
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rough, atol=1e-4)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("loss", Loss)
def test_a_student_that_is_sure_has_a_finite_gradient(loss, is_native, monkeypatch):
    if not is_native:
        by_tensors(monkeypatch)
    lm = tiny()
    tokens, chances = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[0.7, 0.2], [1.0, 0.01]])
    teacher = StoredDistributions(torch.empty(2, 0), tokens, chances, DraftHead(lm))
    for sure in (1, 2, 9):
        logits = torch.full((2, VOCABULARY), -300.0).index_fill_(1, torch.tensor([sure]), 300.0)
        logits.requires_grad_()
        log_q, _ = teacher.compare(slice(0, 2), logits)
        loss_M = divergence(loss, teacher.p_MO, log_q)
        loss_M.sum().backward()
        assert torch.isfinite(loss_M).all() and torch.isfinite(logits.grad).all()
        assert logits.grad.abs().sum() <= 2 * 2 + 1e-5


def test_what_is_not_known_is_not_learnt():
    lm = tiny()
    one = stored_samples(lm, count=4, samples=1)[0]
    one["teacher"][3:6] = 0
    assert wanted_of(one, 100).sum() == 15 and wanted_of(one, 100, stored=True).sum() == 12
    tokens = collate([one], 100, lm.device, stored=True)
    places = tokens.wanted_BT[0].nonzero()[:, 0].tolist()
    assert places == [*range(4, 7), *range(10, 19)]
    tokens_MJ, chances_MJ = tokens.stored
    p_MV = forward_logits(lm, one["input_ids"])[places].softmax(-1)
    torch.testing.assert_close(chances_MJ, p_MV.topk(4).values, rtol=1e-3, atol=1e-7)
    assert torch.equal(tokens_MJ[:, 0], p_MV.argmax(-1))
    work = Work([one, one, one], config(use_stored_logits=True, max_length=15))
    assert work.positions == [10 - 3]
    # nor is a first token of the assistant
    begun = {"messages": [], "input_ids": random_prompts(6)[0], "loss_mask": [1, 1, 0, 0, 1, 1]}
    records = stored_samples(lm, count=3, samples=1)[0]["teacher"][:4]
    tokens = collate([begun | {"teacher": records}], 100, lm.device, stored=True)
    assert tokens.wanted_BT[0].tolist() == [True, False, False, True, True, False]
    assert torch.equal(tokens.stored[0], topk_logits.tensors(records[1:])[0])


READING_DEEP = [
    recipe(name="mine", fused=True),
    recipe(name="mine", architecture=eagle_head.EagleHeadConfig()),
    recipe(name="mine", architecture=medusa_heads.MedusaHeadsConfig(heads=2)),
]


@pytest.mark.parametrize(
    ("deep", "left"),  # `left` layers do not run, or all above the exits
    [([], None), *(([deep], left) for deep, left in zip(READING_DEEP, (1, 0, 0), strict=True))],
    ids=["none", "fused", "eagle", "medusa"],
)
def test_the_target_runs_no_more_than_adapters_read_and_teaches_the_same(deep, left):
    lm = tiny()
    samples, ran = stored_samples(lm, samples=5), []
    for index, layer in enumerate(lm.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    lm.head.register_forward_hook(lambda *_: ran.append("head"))
    recipes = [recipe(exit_layers=[1, EXIT]), *deep]
    gradients = []
    for kept in (False, True):
        made = trainees(lm, recipes, torch.arange(0, VOCABULARY, 2), seed=3)
        tokens = collate(samples, 100, lm.device, kept)
        ran.clear()
        train_step(lm, forward_target(lm, tokens, made), made, 7, weight=0.01)
        gradients.append([p.grad for t in made for p in t.adapter.parameters()])
    assert ran == [*range(EXIT if left is None else lm.n_layers - left)]
    for exact, kept in zip(*gradients, strict=True):
        # what was kept is rounded to 11 bits
        torch.testing.assert_close(kept, exact, rtol=1e-2, atol=2e-3 * float(exact.abs().max()))


@pytest.mark.parametrize("count", [6, VOCABULARY])
def test_held_out_results_from_kept_distributions_are_those_of_the_whole_target(count, tmp_path):
    lm = tiny()
    samples, results = stored_samples(lm, count, samples=7), []
    for kept in (False, True):
        options = config(use_stored_logits=kept, holdout=6)
        trainer = Trainer(lm, samples, [recipe()], options, tmp_path / str(kept), ABOUT)
        results.append(trainer.evaluate()[0])
    exact, kept = ({k.split("/")[-1]: v for k, v in values.items()} for values in results)
    for name in ("agreement", "ctar1", "ctar3", "compression_rate"):
        assert kept[name] == exact[name]
    if count == 6:
        assert kept["expected_acceptance"] < exact["expected_acceptance"]
    else:
        assert kept["expected_acceptance"] == pytest.approx(exact["expected_acceptance"], 2e-3)
        assert kept["loss"] == pytest.approx(exact["loss"], rel=2e-3)


def uses_stored(folder):
    return read_config(str(folder)).training["trainer"]["use_stored_logits"]


def test_a_run_learns_from_what_was_kept_unless_told_otherwise(tmp_path):
    samples = stored_samples(tiny(), count=16)

    def run(name, **changes):
        return train(tiny(), samples, config(**changes), tmp_path / name)[0]

    assert uses_stored(run("stored"))
    with pytest.raises(ConfigError, match="use_stored_logits=True there, None now"):
        run("stored", use_stored_logits=False)
    assert not uses_stored(run("computed", use_stored_logits=False))


def test_data_without_kept_distributions_or_with_others_is_refused(tmp_path):
    lm = tiny()
    samples = stored_samples(lm, count=4, samples=4)
    without = [{k: v for k, v in one.items() if k != "teacher"} for one in samples]
    with pytest.raises(ConfigError, match=r"trainer\.use_stored_logits=true: .* data\.teacher=32"):
        train(lm, without, config(use_stored_logits=True), tmp_path)
    other = ABOUT | {"teacher": {"model": "another"}}
    with pytest.raises(ConfigError, match="but of 'another'"):
        train(lm, samples, config(use_stored_logits=True), tmp_path, about=other)
    (folder,) = train(lm, samples, config(epochs=1), tmp_path, about=other)
    assert not uses_stored(folder)
