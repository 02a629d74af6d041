"""Losses, their gradients in chunks, and what is graded."""

import math

import pytest
import torch
from helpers import EXIT, adapter_for, random_prompts, tiny

from kangaroo.adapter import DraftHead
from kangaroo.training.batches import collate
from kangaroo.training.distill import FIGURES, Student, Teacher, distill
from kangaroo.training.losses import Loss, divergence, overlap
from kangaroo.training.micro_batch import look, teach
from kangaroo.training.recipe import AdapterRecipe, trainees


def distributions(*shape):
    return torch.randn(*shape).softmax(-1), (2 * torch.randn(*shape)).log_softmax(-1)


def test_losses_are_the_formulas_of_their_papers():
    p, log_q = distributions(5, 11)
    q = log_q.exp()
    alpha = torch.stack([sum(min(a, b) for a, b in zip(*row)) for row in zip(p, q)])  # noqa: B905
    torch.testing.assert_close(overlap(p, log_q), alpha)
    kl = torch.distributions.kl_divergence(
        torch.distributions.Categorical(p), torch.distributions.Categorical(q)
    )
    torch.testing.assert_close(divergence(Loss.kl, p, log_q), kl)
    entropy = torch.distributions.Categorical(p).entropy()
    torch.testing.assert_close(divergence(Loss.cross_entropy, p, log_q), kl + entropy)
    half_distance = (p - q).abs().sum(-1) / 2
    torch.testing.assert_close(divergence(Loss.total_variation, p, log_q), half_distance)
    torch.testing.assert_close(divergence(Loss.lk, p, log_q), -alpha.log())
    weight = (-3 * alpha).exp()
    hybrid = weight * kl + (1 - weight) * half_distance
    torch.testing.assert_close(divergence(Loss.hybrid, p, log_q), hybrid)


@pytest.mark.parametrize("loss", Loss)
def test_a_perfect_adapter_has_no_gradient_and_one_that_overlaps_nowhere_a_finite_one(loss):
    p, _ = distributions(3, 7)
    logits = p.log().requires_grad_()
    divergence(loss, p, logits.log_softmax(-1)).sum().backward()
    assert logits.grad.abs().max() < 0.2  # min(p, q) has a kink where the two are equal
    if loss in (Loss.cross_entropy, Loss.kl):
        assert logits.grad.abs().max() < 1e-6
    apart = torch.tensor([[0.0, 200.0]]).requires_grad_()
    divergence(loss, torch.tensor([[1.0, 0.0]]), apart.log_softmax(-1)).sum().backward()
    assert torch.isfinite(apart.grad).all()


def test_kl_is_cross_entropy_in_gradient():
    p, logits = torch.randn(4, 9).softmax(-1), torch.randn(4, 9, requires_grad=True)
    grads = [
        torch.autograd.grad(divergence(loss, p, logits.log_softmax(-1)).sum(), logits)[0]
        for loss in (Loss.cross_entropy, Loss.kl)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("loss", Loss)
@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("own_head", [False, True])
def test_the_chunked_loss_and_its_gradients_equal_the_whole(loss, size, own_head):
    lm = tiny()
    vocabulary_K = None if size is None else torch.randperm(64)[:size].sort().values
    adapter = adapter_for(lm)
    if own_head:
        made = trainees(lm, [AdapterRecipe(name="x", own_head=True)], vocabulary_K)
        adapter = made[0].adapter
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
    targets = DraftHead(lm, None, vocabulary_K)
    (graded,) = distill(Teacher.of(lm, teacher, 3), targets, [taught], chunk_size=4, backward=True)
    for (_, gradient), wanted in zip(graded.gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-6)  # another order of sums
    figures = dict(zip(FIGURES, graded.sums_F.tolist(), strict=True))
    assert math.isclose(figures["loss"], total.item() / 0.5, rel_tol=1e-4)
    assert figures["positions"] == valid.sum()
    drafted = torch.arange(64)[rows][log_q.argmax(-1)]
    agrees = (drafted == lm.head(teacher).argmax(-1)) & valid
    assert torch.equal(graded.agrees_M, agrees) and figures["agreement"] == agrees.sum()
    both = overlap(p, log_q)[valid].sum().item()
    assert math.isclose(figures["expected_acceptance"], both, rel_tol=1e-4)


def test_logits_never_stand_whole_in_memory_and_the_teachers_are_computed_once():
    lm, seen = tiny(), []
    lm.head.register_forward_hook(lambda head, inputs, out: seen.append(out.shape[:-1].numel()))
    made = trainees(lm, [AdapterRecipe(name="a", exit_layers=[1, EXIT])], None)
    samples = [
        {"messages": [], "input_ids": ids, "loss_mask": [0] * 5 + [1] * (len(ids) - 5)}
        for ids in random_prompts(20, 21, 22)
    ]
    tokens = collate(samples, 100, lm.device)
    teach(lm, look(lm, tokens, made, 7), made, loss_chunk=7, weight=1.0)
    assert max(seen) == 7 and sum(seen) == 15 + 16 + 17
