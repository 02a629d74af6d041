"""Weights in eight bits: what native code makes of them, and what is kept of a head's rows."""

from ctypes import byref
from itertools import product

import pytest
import torch
from cases import EVEN_K
from helpers import tiny, tiny_model
from test_native import FAMILIES, SLOTS, filled_cache, pairs, random_tokens

from kangaroo.cpu import int8, native, structs
from kangaroo.cpu.blocks import IN_BYTES
from kangaroo.drafters.vanilla import Vanilla
from kangaroo.engine.engine import Engine
from kangaroo.engine.sampling import Sampling
from kangaroo.engine.tree import Tree
from kangaroo.heads.draft_head import TextHead
from kangaroo.models.target import TargetModel

pytestmark = pytest.mark.skipif(
    not (native.library() and native.library().multiplies_bytes()),
    reason="no native code here, or none that multiplies bytes",
)


def plain(weight_OD: torch.Tensor) -> torch.Tensor:
    """What rounded weights stand for."""
    steps_OD, scale_O = int8.rounded(weight_OD)
    return (steps_OD * scale_O[: len(steps_OD), None]).to(weight_OD.dtype)


@pytest.mark.parametrize("width", [32, 72, 200, 1536])
@pytest.mark.parametrize("tokens", [1, 3, 8, 19])
def test_sums_are_whole_numbers(tokens, width):
    """The products of rounded weights and rounded tokens, with no error but of their scales."""
    generator = torch.Generator().manual_seed(tokens)
    weight_OD = torch.randn(83, width, generator=generator).bfloat16()
    x_MD = torch.randn(tokens, width, generator=generator).bfloat16()
    # an outlier, as models have them; 239 / 8, so that no number lies between two steps, where a
    # product is rounded otherwise if it is fused with a sum
    x_MD[:, 5] = 29.875
    x_MD[-1] = 0.0
    lm = tiny(dtype=torch.bfloat16).compile_for_decoding()
    sizes = lm.sizes()
    sizes.hidden = width
    head = native.Head(lm.backend.library, weight_OD, sizes)
    steps_OD, scale_O = int8.rounded(weight_OD)
    struct, logits_MO = head.as_struct(), torch.empty(tokens, 83)
    struct.weight, struct.scales = map(native.pointer, (steps_OD, scale_O))
    struct.kind = IN_BYTES
    call = native.function(lm.backend.library, "read_out", torch.bfloat16)
    pointers = byref(native.sizes_struct(sizes)), byref(struct), native.pointer(x_MD)
    call(*pointers, tokens, native.pointer(logits_MO))
    most = min(32767, (2**31 - 1) // (127 * width))
    scale_M = x_MD.float().abs().amax(1) / most
    per_step_M = torch.where(scale_M > 0, 1 / scale_M, 0)
    x_steps_MD = (x_MD.double() * per_step_M[:, None].double()).round()
    sums_MO = (x_steps_MD @ steps_OD.double().T).float()
    torch.testing.assert_close(
        logits_MO, sums_MO * (scale_O[:83] * scale_M[:, None]), rtol=1e-6, atol=0
    )
    assert (logits_MO[-1] == 0).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_compute_what_the_modules_do_with_rounded_weights(name):
    hf = tiny_model(name.split("-")[0], dtype=torch.bfloat16, **FAMILIES[name])
    lm = TargetModel(hf).compile_for_decoding()
    stack = int8.with_layers(lm.fast_layers, int8.rounded_layers(lm.fast_layers.layers[:3]))
    starts, tokens_BN = [3, 70, 140], random_tokens(3, 7)
    meta = lm.forward_meta(Tree.chain(7, lm.device), torch.tensor(starts), 147, SLOTS)
    x_BND, cache = lm.embed(tokens_BN), filled_cache(lm, 3)
    ours_BND = stack(x_BND, cache, meta, range(3))
    with torch.no_grad():
        for layer in hf.model.layers:
            for weight in layer.parameters():
                if weight.ndim == 2:
                    weight.copy_(plain(weight))
    eager, eager_cache = TargetModel(hf), filled_cache(lm, 3)
    theirs_BND, _ = eager.run(x_BND, eager_cache, meta, range(3))
    for ours, theirs in [(ours_BND, theirs_BND), *pairs(cache, eager_cache)]:
        assert (ours - theirs).float().norm() < 0.03 * theirs.float().norm()
    assert not torch.equal(ours_BND, lm.run(x_BND, filled_cache(lm, 3), meta, range(3))[0])


def test_rare_tokens_of_a_text_are_rounded_when_it_comes():
    lm = tiny(dtype=torch.bfloat16).compile_for_decoding()
    head = TextHead(lm, EVEN_K[::4], room=20).accelerate(lm)
    rounded = int8.Int8Head(head)
    for text in ([1, 3, 5], [7, 9, 11, 13], []):
        head.follow([text])
        struct, (steps_KD, scale_K) = rounded.as_struct(), int8.rounded(head.weight_KD)
        assert struct.outputs == head.size and struct.ids == head.vocabulary_K.data_ptr()
        assert torch.equal(rounded.steps_RD[: head.size], steps_KD)
        assert torch.equal(rounded.scale_R[: head.size], scale_K[: head.size])


@pytest.mark.parametrize("factor, temperature", [*product([1, 1000], [0, 0.9, 30]), (torch.nan, 0)])
def test_the_token_that_limits_choose_is_that_of_the_whole_head(factor, temperature):
    lm = tiny(dtype=torch.bfloat16, vocab_size=1003)
    weight_OD = lm.head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    weight_OD[::7] *= factor
    weight_OD[503:] = weight_OD[:500]  # of equal ones the first wins
    engine, prompts = Engine(lm.compile_for_decoding(), Vanilla()), random_tokens(5, 9).tolist()
    how, rough = (prompts, 60, Sampling(temperature)), lm.fast_head.rough
    first, second = ([x.tokens for x in engine.generate(*how, size)] for size in (1, 5))
    lm.fast_head.rough = structs.Rough()  # the whole head
    assert rough.weight and first == second == [x.tokens for x in engine.generate(*how, 1)]
