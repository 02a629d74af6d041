"""Losses, their gradients in chunks, and what is graded."""

import math
from collections import defaultdict

import pytest
import torch
import torch.nn.functional as F
from helpers import EXIT, adapter_for, random_prompts, recipe_of, tiny, tiny_model
from torch.overrides import TorchFunctionMode
from training_cases import recipe, sample

from kangaroo.heads.draft_head import DraftHead
from kangaroo.models.target import TargetModel
from kangaroo.training.batches import collate
from kangaroo.training.distill import MEASURES, Student, WholeDistributions, distill
from kangaroo.training.losses import Loss, divergence, overlap
from kangaroo.training.micro_batch import forward_target, train_step
from kangaroo.training.recipe import trainees


def test_losses_are_the_formulas_of_their_papers():
    p, log_q = torch.randn(5, 11).softmax(-1), (2 * torch.randn(5, 11)).log_softmax(-1)
    q = log_q.exp()
    alpha = torch.stack([sum(min(a, b) for a, b in zip(*row)) for row in zip(p, q)])  # noqa: B905
    torch.testing.assert_close(overlap(p, log_q), alpha)
    target, student = (torch.distributions.Categorical(x) for x in (p, q))
    kl = torch.distributions.kl_divergence(target, student)
    half_distance = (p - q).abs().sum(-1) / 2
    weight = (-3 * alpha).exp()
    expected = {
        Loss.kl: kl,
        Loss.cross_entropy: kl + target.entropy(),
        Loss.total_variation: half_distance,
        Loss.lk: -alpha.log(),
        Loss.hybrid: weight * kl + (1 - weight) * half_distance,
    }
    assert set(expected) == set(Loss)
    for loss, value in expected.items():
        torch.testing.assert_close(divergence(loss, p, log_q), value)


@pytest.mark.parametrize("loss", Loss)
def test_a_perfect_adapter_has_no_gradient_and_one_that_overlaps_nowhere_a_finite_one(loss):
    p = torch.randn(3, 7).softmax(-1)
    logits = p.log().requires_grad_()
    divergence(loss, p, logits.log_softmax(-1)).sum().backward()
    # min(p, q) has a kink where the two are equal, of at most q (1 - q)
    assert logits.grad.abs().max() < 0.2501
    if loss in (Loss.cross_entropy, Loss.kl):
        assert logits.grad.abs().max() < 1e-6
    apart = torch.tensor([[0.0, 200.0]]).requires_grad_()
    divergence(loss, torch.tensor([[1.0, 0.0]]), apart.log_softmax(-1)).sum().backward()
    assert torch.isfinite(apart.grad).all()


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("own_head", [False, True])
def test_the_chunked_loss_and_its_gradients_equal_the_whole(loss, size, own_head):
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
    p = lm.head(teacher).softmax(-1)[:, rows]
    log_q = (whole @ head.weight_KD.T).log_softmax(-1)
    total = 0.5 * divergence(loss, p, log_q)[valid].sum()
    leaves = [whole, head.weight_KD] if own_head else [whole]
    expected = torch.autograd.grad(total, leaves)
    taught = Student(student, valid, head, loss, weight=0.5)
    distill(WholeDistributions(lm, teacher, vocabulary_K), [taught], chunk_size=4)
    for (_, gradient), wanted in zip(taught.gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)  # another order of sums
    results = dict(zip(MEASURES, taught.sums_F.tolist(), strict=True))
    assert math.isclose(results["loss"], total.item() / 0.5, rel_tol=1e-4)
    assert results["positions"] == valid.sum()
    drafted = torch.arange(64)[rows][log_q.argmax(-1)]
    agrees = (drafted == lm.head(teacher).argmax(-1)) & valid
    assert torch.equal(taught.agrees_M, agrees) and results["agreement"] == agrees.sum()
    both = overlap(p, log_q)[valid].sum().item()
    assert math.isclose(results["expected_acceptance"], both, rel_tol=1e-4)


def like_vicunas(dtype=torch.float32, vocab_size=2000):
    """A target whose head has small weights, as large ones have: all representable in float16."""
    hf = tiny_model(vocab_size=vocab_size)
    with torch.no_grad():
        hf.lm_head.weight.mul_(0.1)
        hf.model.norm.weight.mul_(10)
    for parameter in hf.parameters():
        parameter.data = parameter.data.half().to(dtype)
    return TargetModel(hf)


def cosine(a, b):
    return float(torch.cosine_similarity(a.double().flatten(), b.double().flatten(), 0))


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("size", [None, 500])
@pytest.mark.parametrize("own_head", [False, True])
def test_gradients_through_a_float16_head_are_float32s(loss, size, own_head):
    """Weighted as one of 50,000 positions of a step, from the same rounded logits."""
    torch.manual_seed(0)
    lm = like_vicunas(torch.float16)
    states = 10 * (torch.randn(90, 32) + 2 * torch.randn(32))  # some tokens are likelier
    teacher_MD = (states + 2 * torch.randn_like(states)).half()
    frequent = lm.head(teacher_MD).float().softmax(-1).sum(0).argsort(descending=True)
    vocabulary_K = None if size is None else frequent[:size].sort().values
    teacher = WholeDistributions(lm, teacher_MD, vocabulary_K)
    (made,) = trainees(lm, [recipe_of(own_head=own_head)], vocabulary_K)
    head, weight = made.heads[0], 1 / 50_000
    student = Student(states, torch.arange(90) % 3 > 0, head, loss, weight)
    distill(teacher, [student], 64)

    p = teacher.chances(slice(None))
    logits = head(states).detach().float().requires_grad_()
    losses = divergence(loss, p, logits.log_softmax(-1))[student.valid_M]
    (of_logits,) = torch.autograd.grad(weight * losses.sum(), logits)
    expected = [of_logits @ head.weight_KD.detach().float(), of_logits.T @ states]
    assert len(student.gradients) == 1 + own_head
    for (_, gradient), wanted in zip(student.gradients, expected, strict=False):
        assert gradient.dtype == torch.float32
        assert cosine(gradient, wanted) > 0.9999
        assert gradient.norm() == pytest.approx(float(wanted.norm()), rel=1e-3)


class Heads(TorchFunctionMode):
    """Counts the states that heads of each size read at a time."""

    def __init__(self):
        self.read = defaultdict(list)

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear:
            self.read[len(args[1])].append(args[0].shape[:-1].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [None, 23])
def test_logits_never_stand_whole_in_memory_and_the_teachers_are_computed_once(size):
    lm = TargetModel(tiny_model(vocab_size=71))  # no layer has so many outputs
    vocabulary_K = None if size is None else torch.arange(size)
    made = trainees(lm, [recipe_of(name="a", exit_layers=[1, EXIT])], vocabulary_K)
    tokens = collate([sample(ids, 5) for ids in random_prompts(20, 21, 22)], 100, lm.device)
    with Heads() as heads:
        train_step(lm, forward_target(lm, tokens, made), made, loss_chunk=7, weight=1.0)
    learnt, whole = 15 + 16 + 17, heads.read[lm.config.vocab_size]
    assert max(whole) == 7
    if size is None:
        assert sum(whole) == 3 * learnt  # the target's, and both adapters'
    else:
        assert sum(whole) == learnt
        assert max(heads.read[size]) == 7 and sum(heads.read[size]) == 2 * learnt
