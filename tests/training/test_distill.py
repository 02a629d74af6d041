"""Losses and their gradients in chunks, from the whole target and from what was kept when the data
was written.

Shapes: M positions, J kept tokens, K draft vocabulary, V vocabulary.
"""

import math
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from helpers import EXIT, VOCABULARY, adapter_for, forward_logits, random_prompts, tiny, tiny_model
from training_cases import ABOUT, config, recipe, sample, stored_samples, train

from kangaroo.cpu import native
from kangaroo.engine import topk_logits
from kangaroo.heads import eagle3_head, eagle_head, medusa_heads
from kangaroo.heads.adapter_files import read_config
from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from kangaroo.training import batches, distill
from kangaroo.training.backend import TorchBackend
from kangaroo.training.batches import Work, collate, forward_target, learnt_positions, train_step
from kangaroo.training.distill import Loss, Student, divergence, overlap
from kangaroo.training.loop import Trainer
from kangaroo.training.recipe import trainees
from kangaroo.utils.errors import ConfigError
from kangaroo.utils.ranks import ALONE

READING_DEEP = [  # beside adapters of exits, and how many of the four layers then run
    ([], EXIT),
    ([recipe(name="mine", fused=True)], 3),
    ([recipe(name="mine", architecture=eagle_head.EagleHeadConfig())], 4),
    ([recipe(name="mine", architecture=eagle3_head.Eagle3HeadConfig())], EXIT),
    ([recipe(name="mine", architecture=medusa_heads.MedusaHeadsConfig(heads=2))], 4),
]


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
            monkeypatch.setattr(native, "library", lambda: None)
        leaf_CK = logits_CK.clone().requires_grad_()
        log_q_CO, best_C = distill.outcomes(leaf_CK, index_CJ, inside_CJ)
        (gradient_CK,) = torch.autograd.grad((g_CO * log_q_CO).sum(), leaf_CK)
        log_q_CO = log_q_CO.detach()
        results.append((log_q_CO[:, -1], log_q_CO[:, :-1][inside_CJ], best_C, gradient_CK))
        assert gradient_CK.dtype == dtype
    rest_C = 1 - (logits_CK.float().softmax(-1).gather(1, index_CJ) * inside_CJ).sum(-1)
    torch.testing.assert_close(results[1][0].exp(), rest_C, rtol=1e-4, atol=1e-6)
    rough = 1e-2 if dtype == torch.bfloat16 else 1e-4  # sums in another order
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rough, atol=1e-4)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("loss", Loss)
def test_a_student_that_is_sure_has_a_finite_gradient(loss, is_native, monkeypatch):
    if not is_native:
        monkeypatch.setattr(native, "library", lambda: None)
    tokens, chances = torch.tensor([[1, 2], [1, 2]]), torch.tensor([[0.7, 0.2], [1.0, 0.01]])
    teacher = distill.StoredDistributions(torch.empty(2, 0), tokens, chances, DraftHead(tiny()))
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
    gapped = stored_samples(lm, count=4, samples=1)[0]
    gapped["teacher"][3:6] = 0
    assert learnt_positions(gapped, 100).sum() == 15
    assert learnt_positions(gapped, 100, stored=True).sum() == 12
    tokens = collate([gapped], 100, lm.device, stored=True)
    places = tokens.learnt_BT[0].nonzero()[:, 0].tolist()
    assert places == [*range(4, 7), *range(10, 19)]
    tokens_MJ, chances_MJ = tokens.stored
    p_MV = forward_logits(lm, gapped["input_ids"])[places].softmax(-1)
    torch.testing.assert_close(chances_MJ, p_MV.topk(4).values, rtol=1e-3, atol=1e-7)
    assert torch.equal(tokens_MJ[:, 0], p_MV.argmax(-1))
    work = Work([gapped, gapped, gapped], config(use_stored_logits=True, max_length=15))
    assert work.positions == [10 - 3]
    # nor is a first token of the assistant
    begun = {"messages": [], "input_ids": random_prompts(6)[0], "loss_mask": [1, 1, 0, 0, 1, 1]}
    records = stored_samples(lm, count=3, samples=1)[0]["teacher"][:4]
    tokens = collate([begun | {"teacher": records}], 100, lm.device, stored=True)
    assert tokens.learnt_BT[0].tolist() == [True, False, False, True, True, False]
    assert torch.equal(tokens.stored[0], topk_logits.tensors(records[1:])[0])


@pytest.mark.parametrize(
    ("deep", "layers"), READING_DEEP, ids=["none", "fused", "eagle", "eagle3", "medusa"]
)
def test_the_target_runs_no_more_than_adapters_read_and_teaches_the_same(deep, layers):
    lm = tiny()
    samples, ran = stored_samples(lm, samples=5), []
    for index, layer in enumerate(lm.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    lm.head.register_forward_hook(lambda *_: ran.append("head"))
    recipes = [recipe(exit_layers=[1, EXIT]), *deep]
    gradients = []
    for kept in (False, True):
        trained = trainees(lm, recipes, torch.arange(0, VOCABULARY, 2), seed=3)
        tokens = collate(samples, 100, lm.device, kept)
        ran.clear()
        train_step(lm, forward_target(lm, tokens, trained), trained, 7, weight=0.01)
        gradients.append([p.grad for t in trained for p in t.adapter.parameters()])
    assert ran == [*range(layers)]
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


def test_a_run_learns_from_what_was_kept_unless_told_otherwise_or_it_is_missing(tmp_path):
    samples = stored_samples(tiny(), count=16)

    def run(name, samples=samples, about=ABOUT, **changes):
        """Whether it used stored logits."""
        settings = config(epochs=1, **changes)
        (folder,) = train(tiny(), samples, settings, tmp_path / name, about=about)
        return read_config(str(folder)).training["trainer"]["use_stored_logits"]

    assert run("stored")
    with pytest.raises(ConfigError, match="use_stored_logits=True there, False now"):
        run("stored", use_stored_logits=False)
    assert not run("computed", use_stored_logits=False)
    without = [{k: v for k, v in sample.items() if k != "teacher"} for sample in samples]
    with pytest.raises(ConfigError, match=r"trainer\.use_stored_logits=true: .* data\.teacher=32"):
        run("without", without, use_stored_logits=True)
    other = ABOUT | {"teacher": {"model": "another"}}
    with pytest.raises(ConfigError, match="but of 'another'"):
        run("other", about=other, use_stored_logits=True)
    assert not run("other", about=other)


def test_losses_are_the_formulas_of_their_papers():
    p, log_q = torch.randn(5, 11).softmax(-1), (2 * torch.randn(5, 11)).log_softmax(-1)
    q = log_q.exp()
    alpha = torch.stack([sum(min(a, b) for a, b in zip(*row)) for row in zip(p, q)])  # noqa: B905
    torch.testing.assert_close(overlap(p, log_q), alpha)
    target, student = (torch.distributions.Categorical(x) for x in (p, q))
    kl = torch.distributions.kl_divergence(target, student)
    half_distance = (p - q).abs().sum(-1) / 2
    weight = (-3 * alpha).exp()
    expected = {Loss.kl: kl, Loss.cross_entropy: kl + target.entropy(), Loss.lk: -alpha.log()}
    expected[Loss.total_variation] = half_distance
    expected[Loss.hybrid] = weight * kl + (1 - weight) * half_distance
    assert set(expected) == set(Loss)
    for loss, value in expected.items():
        torch.testing.assert_close(divergence(loss, p, log_q), value)


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("own_head", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_the_chunked_loss_and_its_gradients_equal_the_whole(loss, size, own_head, kept):
    lm = tiny()
    vocabulary_K = None if size is None else torch.randperm(64)[:size].sort().values
    adapter = adapter_for(lm)
    if own_head:
        adapter = trainees(lm, [recipe(own_head=True)], vocabulary_K)[0].adapter
    head = DraftHead(lm, adapter.head, vocabulary_K)
    teacher, student = torch.randn(2, 11, lm.config.hidden_size).unbind()
    valid = torch.arange(11) % 3 > 0
    whole = student.clone().requires_grad_()
    rows = slice(None) if vocabulary_K is None else vocabulary_K
    p = lm.head(teacher).softmax(-1)
    log_q = (whole @ head.weight_KD.T).log_softmax(-1)
    total = 0.5 * divergence(loss, p[:, rows], log_q)[valid].sum()
    expected = torch.autograd.grad(total, [whole, head.weight_KD] if own_head else [whole])
    taught = Student(student, valid, head, loss, weight=0.5)
    target = distill.WholeDistributions(lm, teacher, vocabulary_K)
    if kept:
        top = p.topk(VOCABULARY)
        target = distill.StoredDistributions(teacher, top.indices, top.values, head)
    distill.distill(target, [taught], chunk_size=4)
    for (_, gradient), exact in zip(taught.gradients, expected, strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-6)  # another order of sums
    results = dict(zip(distill.MEASURES, taught.sums_F.tolist(), strict=True))
    assert math.isclose(results["loss"], total.item() / 0.5, rel_tol=1e-4)
    assert results["positions"] == valid.sum()
    agrees = (torch.arange(64)[rows][log_q.argmax(-1)] == p.argmax(-1)) & valid
    assert torch.equal(taught.agrees_M, agrees) and results["agreement"] == agrees.sum()
    both = overlap(p[:, rows], log_q)[valid].sum().item()
    assert math.isclose(results["expected_acceptance"], both, rel_tol=1e-4)


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("size", [None, 500])
@pytest.mark.parametrize("own_head", [False, True])
def test_gradients_through_a_float16_head_are_float32s(loss, size, own_head):
    """Weighted as one of 50,000 positions of a step, from the same rounded logits, by a head whose
    weights are as small as a large target's."""
    torch.manual_seed(0)
    hf = tiny_model(vocab_size=2000)
    with torch.no_grad():
        hf.lm_head.weight.mul_(0.1)
        hf.model.norm.weight.mul_(10)
    lm = TargetModel(hf.half())
    states = 10 * (torch.randn(90, 32) + 2 * torch.randn(32))  # some tokens are likelier
    teacher_MD = (states + 2 * torch.randn_like(states)).half()
    frequent = lm.head(teacher_MD).float().softmax(-1).sum(0).argsort(descending=True)
    vocabulary_K = None if size is None else frequent[:size].sort().values
    teacher = distill.WholeDistributions(lm, teacher_MD, vocabulary_K)
    (trained,) = trainees(lm, [recipe(own_head=own_head)], vocabulary_K)
    head, weight = trained.heads[0], 1 / 50_000
    student = Student(states, torch.arange(90) % 3 > 0, head, loss, weight)
    distill.distill(teacher, [student], 64)

    p = teacher.chances(slice(None))
    logits = head(states).detach().float().requires_grad_()
    losses = divergence(loss, p, logits.log_softmax(-1))[student.valid_M]
    (of_logits,) = torch.autograd.grad(weight * losses.sum(), logits)
    expected = [of_logits @ head.weight_KD.detach().float(), of_logits.T @ states]
    assert len(student.gradients) == 1 + own_head
    for (_, gradient), exact in zip(student.gradients, expected, strict=False):
        assert gradient.dtype == torch.float32
        angle = torch.cosine_similarity(gradient.flatten().double(), exact.flatten().double(), 0)
        assert angle > 0.9999
        assert gradient.norm() == pytest.approx(float(exact.norm()), rel=1e-3)


@pytest.mark.parametrize("size", [None, 23])
def test_logits_never_stand_whole_in_memory_and_the_teachers_are_computed_once(size, monkeypatch):
    lm = TargetModel(tiny_model(vocab_size=71))  # no layer has so many outputs
    vocabulary_K = None if size is None else torch.arange(size)
    trained = trainees(lm, [recipe(name="a", exit_layers=[1, EXIT])], vocabulary_K)
    tokens = collate([sample(ids, 5) for ids in random_prompts(20, 21, 22)], 100, lm.device)
    linear, read = (F.linear, defaultdict(list))  # states that a head of each size reads at a time

    def counted(x, weight, bias=None):
        read[len(weight)].append(x.shape[:-1].numel())
        return linear(x, weight, bias)

    monkeypatch.setattr(F, "linear", counted)
    train_step(lm, forward_target(lm, tokens, trained), trained, loss_chunk=7, weight=1.0)
    learnt, whole = 15 + 16 + 17, read[lm.config.vocab_size]
    assert max(whole) == 7
    if size is None:
        assert sum(whole) == 3 * learnt  # the target's, and both adapters'
    else:
        assert sum(whole) == learnt
        assert max(read[size]) == 7 and sum(read[size]) == 2 * learnt


def test_a_later_draft_step_counts_where_the_assistant_wrote_all_of_the_draft_and_counts_less():
    lm = tiny()
    (trainee,) = trainees(lm, [recipe(name="a", fused=True, draft_steps=3)], None)
    (ids,) = random_prompts(8)
    text = sample(ids, 2) | {"loss_mask": [0, 0, 1, 1, 1, 0, 1, 1]}
    outputs = forward_target(lm, collate([text], 100, lm.device), [trainee])
    students = batches.make_students(lm, outputs, trainee, 3, weight=2.0)
    valid = [student.valid_M.int().tolist() for student in students]
    assert valid == [[1, 1, 1, 1, 1], [0, 1, 1, 0, 1], [0, 0, 1, 0, 0]]
    assert [student.weight for student in students] == pytest.approx([2.0, 2 * 0.8, 2 * 0.64])


def test_a_steps_gradient_is_the_sum_of_its_own_micro_batches(monkeypatch):
    (trainee,) = trainees(tiny(), [recipe()], None)
    backend = TorchBackend([trainee.adapter], config(accumulate=2, clip=1e6), ALONE)
    gradients, weights = [], list(trainee.adapter.parameters())
    monkeypatch.setattr(backend, "_update", lambda _: gradients.append(weights[0].grad.clone()))
    for micro_batches in ((0.25, 0.5), (0.25, 0.125)):
        for value in micro_batches:
            for weight in weights:
                weight.grad = torch.full_like(weight, value)
            backend.collect()
        backend.step([0.0])
    assert (gradients[0] == 0.75).all() and (gradients[1] == 0.375).all()
