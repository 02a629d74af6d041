"""Forks: found, judged by teacher forcing, told apart from bugs."""

import pytest
import torch
from helpers import forward_logits, random_prompts, tiny, vanilla_texts

from kangaroo.engine.sampling import Sampling, combine, pick
from kangaroo.evaluation.lossless import fork, judge, scores
from kangaroo.evaluation.records import Fork

GREEDY = Sampling()


def logits(*values):
    """A vocabulary of ten tokens; those not given are far below."""
    return torch.tensor([*values, *[-5.0] * (10 - len(values))])


def label(logits_V, method, vanilla, dtype, sampling=GREEDY, seed=0):
    return judge(logits_V, method, vanilla, dtype, sampling, seed, position=40)


@pytest.mark.parametrize(
    "values, method, vanilla, dtype, judged",
    [
        ((16.0, 15.875), 1, 0, torch.bfloat16, (0.125, "near-tie")),
        ((16.0, 15.875), 0, 1, torch.bfloat16, (0.125, "near-tie")),
        ((16.0, 15.0), 1, 0, torch.bfloat16, (1.0, "bug")),
        # float32 explains next to nothing
        ((16.0, 15.875), 1, 0, torch.float32, (0.125, "bug")),
        ((16.0, 15.9995), 1, 0, torch.float32, (pytest.approx(5e-4, rel=0.1), "near-tie")),
        # both tokens are equally good, but a third would have been chosen
        ((12.0, 12.0, 16.0), 1, 0, torch.bfloat16, (4.0, "bug")),
        ((16.0, 16.0, 16.0), 2, 1, torch.bfloat16, (0.0, "near-tie")),
    ],
)
def test_tokens_within_rounding_are_a_near_tie_with_its_gap(values, method, vanilla, dtype, judged):
    assert label(logits(*values), method, vanilla, dtype) == judged


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7), Sampling(1.0, top_p=0.8, top_k=5)])
def test_scores_are_what_the_choice_is_made_by(sampling):
    """`judge` repeats the noise of `sampling.choose`; this holds them together."""
    generator = torch.Generator().manual_seed(0)
    for seed in range(20):
        logits_V = 3 * torch.randn(50, generator=generator)
        place, seeds = torch.tensor([[seed + 7]]), torch.tensor([seed])
        chosen = pick(logits_V[None, None], place, combine([sampling]), seeds)
        assert scores(logits_V, sampling, seed, seed + 7).argmax() == chosen


def test_a_token_at_the_edge_of_a_filter_is_no_bug():
    """Tokens 2 and 3 tie for the third place of top-k; rounding decides which of them stays."""
    sampling = Sampling(1.0, top_k=3)
    logits_V = logits(8.0, 8.0, 7.9, 7.88)
    seed = next(  # one under which the token that is filtered out would win
        seed
        for seed in range(1000)
        if scores(torch.zeros(10), Sampling(1.0), seed, 40).argmax() == 3
        and scores(logits_V, sampling, seed, 40).argmax() == 2
    )
    # the filter removed it, so it has no score and no gap
    assert label(logits_V, 3, 2, torch.bfloat16, sampling, seed) == (None, "near-tie")


def test_a_sampled_fork_is_judged_with_the_noise_of_its_place_and_an_early_end_is_a_bug():
    lm, sampling = tiny(), Sampling(1.0, seed=4)
    (prompt,) = random_prompts(9)
    vanilla = vanilla_texts(lm, [prompt], 12, sampling)[0][len(prompt) :]
    other = (vanilla[5] + 1) % 64
    difference = fork(lm, prompt, [*vanilla[:5], other], vanilla, sampling, seed=4)
    scores_V = scores(forward_logits(lm, prompt + vanilla[:5])[-1], sampling, 4, len(prompt) + 5)
    assert scores_V.argmax() == vanilla[5] and (difference.position, difference.label) == (5, "bug")
    assert difference.gap == pytest.approx(float(scores_V.max() - scores_V[other]), abs=1e-4)
    assert fork(lm, prompt, vanilla[:2], vanilla, GREEDY, 0) == Fork(2, None, "bug")
    assert fork(lm, prompt, vanilla, vanilla, GREEDY, 0) is None
