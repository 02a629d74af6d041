"""Matched noise samples from the softmax, independently at every (seed, position, stream).

Shapes: B rows, N positions, V vocabulary.
"""

import ctypes
import math
import subprocess
import sys

import pytest
import torch
from engine_cases import SMALL, assert_distributed
from helpers import random_prompts, tiny
from scipy.stats import chi2_contingency, kstest
from torch import Tensor
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kangaroo.cpu.compiling import FLAGS, MAIN, OPENMP, STANDARD, compiler, supported
from kangaroo.cpu.stepper import CpuStepper
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine import sampling as sampler
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Request
from kangaroo.engine.sampling import NoiseStream, Sampling, candidates, combine, pick

DRAWS = 20_000

LOGITS_V = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0, -2.0, 1.2, 0.7])
SIZE = len(LOGITS_V)

SAMPLINGS = [Sampling(temperature) for temperature in (1.0, 0.6, 2.0)]
SAMPLINGS += [Sampling(1.0, top_p=0.7), Sampling(1.3, top_k=4), Sampling(1.3, 0.8, top_k=6)]
# Settings at their ends, and whether they leave but the likeliest token.
LARGEST = sys.float_info.max
EXTREMES = [
    *((Sampling(temperature), True) for temperature in (5e-324, 1e-45, 1e-38, 1e-30, 1e-8)),
    (Sampling(1e-6), False),
    *((Sampling(1e-38, top_p=top_p), True) for top_p in (1e-45, 1 - 1e-16)),
    *((Sampling(1.0, top_p=top_p), True) for top_p in (5e-324, 1e-46, 1e-45, 1e-9)),
    *((Sampling(LARGEST, top_p=top_p), True) for top_p in (5e-324, 1e-45)),
    *((Sampling(1.0, top_p), False) for top_p in (1 - 1e-16, 1 - 1e-7)),
    *((Sampling(hot, top_k=1), True) for hot in (1e-8, 1.0, 1e10, LARGEST)),
    *((Sampling(1.5, top_k=top_k), False) for top_k in (SIZE, SIZE + 1, 256, 257, 2**31 - 1)),
    *((Sampling(hot), False) for hot in (1e10, 1e38, 1e39, LARGEST)),
    (Sampling(LARGEST, 1 - 1e-16, 2**31 - 1), False),
]


def over_positions(sampling: Sampling, seed: int = 0) -> Tensor:
    """Tokens at `DRAWS` consecutive positions of one seed."""
    how, seed_1 = combine([sampling]), torch.tensor([seed])
    return pick(LOGITS_V.expand(1, DRAWS, -1), torch.arange(DRAWS)[None], how, seed_1)[0]


def assert_independent(first: Tensor, second: Tensor) -> None:
    table = torch.bincount(first * SIZE + second, minlength=SIZE * SIZE).view(SIZE, SIZE)
    assert chi2_contingency(table.numpy()).pvalue > SMALL


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_follow_the_warped_softmax_over_positions_and_over_seeds(sampling):
    how = combine([sampling])
    probs_V = sampler.warp(LOGITS_V[None, None], how).softmax(-1)[0, 0]
    assert_distributed(over_positions(sampling), probs_V)
    assert_distributed(over_positions(sampling, seed=2**40 + 5), probs_V)
    for position in (0, 1000):
        positions_B1, seeds_B = torch.full((DRAWS, 1), position), torch.arange(DRAWS)
        logits_B1V = LOGITS_V.expand(DRAWS, 1, -1)
        assert_distributed(pick(logits_B1V, positions_B1, how, seeds_B)[:, 0], probs_V)


def test_uniform_numbers_are_uniform_and_strictly_inside_0_and_1():
    positions_BN = torch.arange(100).expand(10, -1)
    numbers = sampler.uniform(torch.arange(10), positions_BN, NoiseStream.choice, 1000)
    assert numbers.min() > 0 and numbers.max() < 1
    assert kstest(numbers.flatten()[::10].numpy(), "uniform").pvalue > SMALL
    # the smallest decide the race over a large vocabulary: they are as fine as they are small
    small = numbers[numbers < 1e-3] * 1e3
    assert kstest(small.numpy(), "uniform").pvalue > SMALL
    assert len(small.unique()) > 0.99 * len(small)
    # the largest one is below 1, though float32 would round it up; position and index by search
    seed_1, at_11 = torch.tensor([0]), torch.tensor([[329851]])
    numbers_V = sampler.uniform(seed_1, at_11, NoiseStream.choice, 32)[0, 0]
    assert numbers_V[16] == 1 - 2.0**-24
    assert torch.isfinite(torch.log(-torch.log1p(-numbers_V))).all()


def flat_choice(seeds_B: Tensor, positions_BN: Tensor) -> Tensor:
    logits_BNV = torch.zeros(*positions_BN.shape, SIZE)
    return sampler.perturb(logits_BNV, seeds_B, positions_BN, NoiseStream.choice).argmax(-1)


@pytest.mark.parametrize("lag", [1, 2, 7, 256, 2**32])
def test_positions_and_seeds_are_independent_and_not_exchangeable(lag):
    """Row s at position p and row s + 1 at position p - 1 share nothing."""
    positions_1N, seeds_B = torch.arange(DRAWS)[None], torch.arange(DRAWS)
    tokens = flat_choice(torch.tensor([4]), positions_1N)[0]
    assert_independent(tokens, flat_choice(torch.tensor([4]), positions_1N + min(lag, 1000))[0])
    assert_independent(tokens, flat_choice(torch.tensor([5]), positions_1N - 1)[0])
    first, second = (flat_choice(seeds_B + more, positions_1N.T * 0)[:, 0] for more in (0, lag))
    assert_independent(first, second)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [0, 1, 5, 50, 1000])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 1.0])
def test_filters_equal_those_of_transformers(temperature, top_k, top_p):
    generator = torch.Generator().manual_seed(0)
    logits_BNV = torch.randn(4, 3, 50, generator=generator) * 3
    expected = TemperatureLogitsWarper(temperature)(None, logits_BNV)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        flat = TopPLogitsWarper(top_p)(None, expected.flatten(0, 1))  # it takes [rows, V]
        expected = flat.unflatten(0, (4, 3))
    sampling = combine([Sampling(temperature, top_p, top_k)])
    assert torch.equal(sampler.warp(logits_BNV, sampling), expected)
    half = logits_BNV.bfloat16()  # filters work in float32
    assert torch.equal(sampler.warp(half, sampling), sampler.warp(half.float(), sampling))


def cumsum_in_pieces(x: Tensor, dim: int) -> Tensor:
    """As a GPU's scan may: in pieces that differ from call to call, and sums of pieces on top."""
    pieces = x.split(int(torch.randint(2, 9, ())), dim)
    before = torch.zeros_like(x.narrow(dim, 0, 1))
    done = []
    for piece in pieces:
        done.append(torch.cumsum(piece, dim) + before)
        before = before + piece.sum(dim, True)
    return torch.cat(done, dim)


@pytest.mark.parametrize("size", [60, 97, 1000])
def test_the_tokens_that_top_p_keeps_depend_on_a_row_alone_however_sums_are_made(size, monkeypatch):
    """Where all tokens are alike, many sums of chances reach a share exactly."""
    monkeypatch.setattr(Tensor, "cumsum", cumsum_in_pieces)
    for count in range(1, 60, 4):
        how = combine([Sampling(1.0, count / size)])
        (top_p,) = how.columns[1].flatten().tolist()
        kept = [sampler.warp(torch.zeros(rows, 2, size), how).isfinite().sum(-1) for rows in (1, 5)]
        assert all((x == math.ceil(size * top_p)).all() for x in kept), (count, kept)


@pytest.mark.parametrize("sampling, likeliest", EXTREMES, ids=str)
def test_the_likeliest_token_always_stays_and_at_the_extremes_alone(sampling, likeliest):
    tokens = over_positions(sampling)
    if likeliest:
        assert (tokens == LOGITS_V.argmax()).all()
    elif sampling.temperature > 1e9:
        assert_distributed(tokens, torch.ones(SIZE))  # all are alike
    elif sampling.temperature > 0.1:
        assert_distributed(tokens, (LOGITS_V / sampling.temperature).softmax(-1))
    if not sampling.greedy:
        warped_V = sampler.warp(LOGITS_V[None, None], combine([sampling]))[0, 0]
        assert torch.isfinite(warped_V[LOGITS_V.argmax()]) and not warped_V.isnan().any()


def test_native_code_draws_the_same_at_the_extremes_each_row_by_its_own():
    """All in one batch, and each alone; the greedy ones write what greedy decoding writes."""
    (prompt,) = random_prompts(9)
    requests = [Request(prompt, 12, 5, sampling=how, ignore_eos=True) for how, _ in EXTREMES]
    by_tensors, native = Engine(tiny(), Vanilla()), Engine(tiny(), Vanilla())
    native.lm.compile_for_decoding()
    expected = dict(by_tensors.completions(requests, Sampling(), len(requests)))
    texts = dict(native.completions(requests, Sampling(), len(requests)))
    assert isinstance(native.session.stepper, CpuStepper)
    (greedy,) = native.generate([prompt], 12)
    for row, (sampling, likeliest) in enumerate(EXTREMES):
        assert texts[row].tokens == expected[row].tokens, sampling
        if likeliest:
            assert texts[row].tokens == greedy.tokens, sampling


def test_native_code_has_the_same_whole_numbers(tmp_path):
    """Of floats of all sizes, in a loop of vectors, which may not fuse what rounds twice."""
    source, library = tmp_path / "whole.cpp", tmp_path / "whole.so"
    source.write_text(
        '#include "sampling.h"\nextern "C" void whole(const float* x, i64 n, i64* to) {\n'
        "  for (i64 i = 0; i < n; i++) to[i] = whole_exp(x[i]);\n}\n"
    )
    name = compiler()
    machine, _ = supported(name, ["-march=native", *OPENMP], ["-mcpu=native", *STANDARD])
    flags = [*FLAGS, *machine, "-shared", "-fPIC", "-I", MAIN.parent]
    subprocess.run([name, *flags, source, "-o", library], check=True)
    x = torch.cat([-torch.logspace(-30, 2, 100_001), -torch.linspace(0, 40, 100_001)])
    chances = torch.empty(len(x), dtype=torch.int64)
    call = ctypes.CDLL(str(library)).whole
    call(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(len(x)), ctypes.c_void_p(chances.data_ptr()))
    assert torch.equal(chances, sampler.whole_exp(x))


def test_where_the_filters_leave_too_few_candidates_the_likeliest_others_follow():
    logits_BNV = torch.log(torch.tensor([[[0.02, 0.5, 0.03, 0.4, 0.05]]]))
    for sampling in (Sampling(temperature=1, top_p=0.8), Sampling(temperature=1, top_k=2)):
        at_BN, seeds_B = torch.tensor([[7]]), torch.tensor([1])
        tokens = candidates(logits_BNV, at_BN, combine([sampling]), seeds_B, 4).flatten().tolist()
        assert set(tokens[:2]) == {1, 3} and tokens[2:] == [4, 2]
