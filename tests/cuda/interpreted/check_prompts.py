"""Prompts by kernels have the bits of decoding, so that one may go on from any text."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from cases import DRAFTERS, Case
from check_models import FAMILIES, model, random_tokens
from helpers import adapter_for, random_prompts
from torch import Tensor

from kangaroo.cuda import layers as kernels
from kangaroo.engine.acceleration import Acceleration
from kangaroo.engine.engine import Engine
from kangaroo.engine.requests import Generation, Request
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.tree import Tree
from kangaroo.models.target import TargetModel

slow = pytest.mark.slow
FIRST, MORE = random_prompts(9, 56, seed=3)
NEW_TOKENS = 3


def by_kernels(name: str, dtype: torch.dtype, **options: object) -> TargetModel:
    lm = model(name, dtype, **options)
    return lm.decode_by(Acceleration(sizes=lm.sizes(), kernels=kernels))


def second_turn(
    lm: TargetModel, name: str, prefix_cache: bool, chunk: int | None
) -> tuple[Generation, list[Tensor]]:
    """Of a conversation, and the keys and values of its prompt, those of the drafter too."""
    drafter = DRAFTERS[name](Case(lm, adapter_for(lm, exit_layer=1), []))
    engine = Engine(lm, drafter, prefill_chunk=chunk, prefix_cache=prefix_cache)
    batch, prompt = engine.open(1, 160, Sampling()), FIRST
    for _ in range(2):
        request = Request(prompt, NEW_TOKENS)
        said = engine.admit(batch, 0, request)
        while not said.finish:
            (record,) = engine.step(batch)
            engine.record(batch, 0, record, request, said)
        before, prompt = prompt, [*prompt, *said.tokens, *MORE]
    caches = [batch.cache, *(drafter.cache for _ in range(hasattr(drafter, "cache")))]
    return said, [x[: len(before)].clone() for c in caches for x in (*c.keys, *c.values)]


def check(lm: TargetModel, name: str = "vanilla") -> None:
    """Chunks of one reading end elsewhere than those of the other."""
    whole, keys = second_turn(lm, name, False, None)
    resumed, same_keys = second_turn(lm, name, True, 40)
    assert (whole.reused, resumed.reused) == (0, len(FIRST) + NEW_TOKENS - 2)
    assert all(map(torch.equal, keys, same_keys))
    assert resumed.tokens == whole.tokens


SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
READ_AS = [("llama", torch.bfloat16, SMALL, 66)] + [
    pytest.param("qwen2", torch.float16, {}, length, marks=slow) for length in (63, 64, 129, 150)
]


@pytest.mark.parametrize("name, dtype, options, length", READ_AS)
def test_a_prompt_has_the_same_bits_in_chunks_of_any_size_and_decoded(name, dtype, options, length):
    lm, tokens_1T = by_kernels(name, dtype, **options), random_tokens(1, length)
    readings = []
    for borders in ([0, length], [0, 17, length - 6, length - 1, length]):
        cache = lm.new_cache(1, 192)
        for start, stop in pairwise(borders):
            part_1T = tokens_1T[:, start:stop]
            if stop - start == 5:  # as a draft is verified
                start_1, tree = torch.tensor([start], device=lm.device), Tree.chain(5, lm.device)
                meta = lm.forward_meta(tree, start_1, stop, cache.n_slots)
                lm.run(lm.embed(part_1T), cache, meta, range(lm.n_layers))
            else:
                x_11D, _, _ = lm.read(part_1T, start, cache, 0, ())
        readings.append([lm.logits(x_11D), *cache.keys, *cache.values])
    assert all(map(torch.equal, *readings))


@slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_that_goes_on_from_a_text_is_as_one_read_whole(name, dtype):
    check(by_kernels(name, dtype))


@slow
@pytest.mark.parametrize("drafter", ["kangaroo", "kangaroo-layer", "draft-model"])
def test_so_it_is_to_a_drafter(drafter):
    check(by_kernels("qwen3", torch.float16), drafter)
