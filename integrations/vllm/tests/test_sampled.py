"""Sampled text has the distribution of vLLM's own."""

import pytest
import torch
from conftest import counted, prompts, written
from torch import Tensor

TEXTS, TOKENS = 3000, 4


def sampled(llm, seed: int) -> Tensor:
    """Token ids `[TEXTS, TOKENS]` after the same prompt."""
    ids = [prompts(1)[0]] * TEXTS
    options = {"temperature": 0.7, "top_k": 40, "max_tokens": TOKENS, "seed": None}
    torch.manual_seed(seed)
    return torch.tensor(written(llm, ids, **options))


def p_value(ours: Tensor, theirs: Tensor) -> float:
    """Of the chi-square test that two samples are of one distribution; rare outcomes are pooled."""
    outcomes = torch.cat([ours, theirs]).unique()
    counts = torch.stack([(outcomes[:, None] == x).sum(1) for x in (ours, theirs)]).double()
    rare = counts.sum(0) < 20
    pooled = torch.cat([counts[:, ~rare], counts[:, rare].sum(1, keepdim=True)], 1)
    pooled = pooled[:, pooled.sum(0) > 0]
    assert pooled.shape[1] > 4  # else the test could not fail
    statistic = ((pooled[0] - pooled[1]) ** 2 / pooled.sum(0)).sum()  # samples of one size
    return torch.special.gammaincc(
        torch.tensor((pooled.shape[1] - 1) / 2, dtype=torch.float64), statistic / 2
    ).item()


@pytest.fixture(scope="module")
def alone(serve):
    with serve(threshold=None, max_num_seqs=256) as llm:
        return sampled(llm, 1)


def test_two_samples_of_vllm_alone_pass_and_another_temperature_fails(serve, alone):
    with serve(threshold=None, max_num_seqs=256) as llm:
        assert all(p_value(*x) > 1e-3 for x in zip(sampled(llm, 2).T, alone.T, strict=True))
        options = {"temperature": 0.85, "top_k": 40, "max_tokens": TOKENS}
        other = torch.tensor(written(llm, [prompts(1)[0]] * TEXTS, **options))
    assert p_value(other[:, 1], alone[:, 1]) < 1e-6


@pytest.mark.parametrize("drafter, threshold", [("layer", 0.0), ("half", 0.3)])
def test_sampled_tokens_have_vllms_distribution(drafter, threshold, serve, alone):
    with serve(drafter, threshold=threshold, max_num_seqs=256) as llm:
        ours = sampled(llm, 3)
        assert counted(llm)["accepted_tokens"] > 0.05 * counted(llm)["draft_tokens"]
    for position in range(TOKENS):
        assert p_value(ours[:, position], alone[:, position]) > 1e-3, position
    pairs = [x[:, 1] * 1000 + x[:, 2] for x in (ours, alone)]
    assert p_value(*pairs) > 1e-3


def test_greedy_and_sampled_requests_share_a_batch(serve):
    from vllm import SamplingParams

    ids = [{"prompt_token_ids": x} for x in prompts()]
    mixed = [SamplingParams(temperature=t, max_tokens=24, detokenize=False) for t in (0.0, 0.8) * 3]
    with serve(threshold=None) as llm:
        expected = written(llm, prompts(), max_tokens=24)[::2]
    with serve("half") as llm:
        done = llm.generate(ids, mixed, use_tqdm=False)
    assert [list(x.outputs[0].token_ids) for x in done[::2]] == expected
