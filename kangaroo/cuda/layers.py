"""Decoder layers and heads on a CUDA device, by Triton's kernels.

A third implementation of what transformers' modules define, beside the CPU's (`native.py`), and
asked in the same way. A token's result is the same, bit by bit, whatever is decoded beside it.

Shapes: R rows, T tokens a row, N tokens of all rows, M tokens, D hidden size, O outputs, P places
of a path, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kangaroo.cpu.native import LayerWeights, Sizes
from kangaroo.cuda import kernels, kernels_attention, kernels_products
from kangaroo.cuda.launching import PARTS, cdiv, launch, tile, width_of
from kangaroo.cuda.paths import Paths, flat, paths
from kangaroo.engine.cache import ForwardMeta, KVCache

MOST_TOKENS = 512  # of a pass; more are a text that is learnt or judged
PROMPT_CHUNK = 128  # tokens of a prompt in a pass, which reads the weights once for each 64
SUMS = 1 << 28  # numbers that attention may keep of a prompt's pass, if it has more than 16 tokens


def power_of_two(least: int) -> int:
    """The smallest power of two, 16 or more, that is no less."""
    return max(16, 1 << (least - 1).bit_length())


def embed(tokens_RT: Tensor, table_VD: Tensor) -> Tensor:
    """Rows of the table, `[R, T, D]`."""
    size, tokens_RT = table_VD.shape[1], tokens_RT.contiguous()
    x_RTD = table_VD.new_empty(*tokens_RT.shape, size)
    grid, width = (tokens_RT.numel(),), power_of_two(size)
    launch(kernels.embed_kernel, grid, tokens_RT, table_VD, x_RTD, K=size, BK=width)
    return x_RTD


def add_and_norm(
    x_ND: Tensor,
    parts_PND: Tensor | None,
    weight_D: Tensor | None,
    eps: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x with the parts of a product, if there are any, and its norm, if there is a weight.

    Args:
        out: where the norm goes, a view of its own stride.
    """
    if parts_PND is None and weight_D is None:
        return x_ND, x_ND
    tokens, size = x_ND.shape
    sum_ND = x_ND if parts_PND is None else torch.empty_like(x_ND)
    normed_ND = sum_ND if weight_D is None else torch.empty_like(x_ND) if out is None else out
    launch(
        kernels.norm_kernel,
        (tokens,),
        *(x_ND, x_ND if parts_PND is None else parts_PND, x_ND if weight_D is None else weight_D),
        *(sum_ND, normed_ND, tokens, normed_ND.stride(0), eps),
        K=size,
        BK=power_of_two(size),
        PARTS=0 if parts_PND is None else len(parts_PND),
        NORMS=weight_D is not None,
        num_warps=8 if size > 1024 else 4,
    )
    return sum_ND, normed_ND


def product(
    x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None, parts: int = 1
) -> Tensor:
    """`[P, N, O]` in float32: to be summed over its parts."""
    tokens, (outputs, inputs) = len(x_NK), weight_OK.shape
    y_PNO = x_NK.new_empty(parts, tokens, outputs, dtype=torch.float32)
    shape = tile(weight_OK, outputs, parts=parts)
    width = width_of(tokens)
    launch(
        kernels_products.linear_kernel,
        (cdiv(outputs, shape.outputs), parts, cdiv(tokens, width)),
        *(x_NK, weight_OK, weight_OK if bias_O is None else bias_O, y_PNO, tokens, outputs),
        K=inputs,
        PARTS=parts,
        BIASED=bias_O is not None,
        **shape.options(width),
    )
    return y_PNO


def gate_and_up(x_ND: Tensor, gate_OD: Tensor, up_OD: Tensor) -> Tensor:
    """What goes down again, `[N, O]`."""
    tokens, (outputs, inputs) = len(x_ND), gate_OD.shape
    y_NO = x_ND.new_empty(tokens, outputs)
    shape, width = tile(gate_OD, outputs, matrices=2, most=128), width_of(tokens)
    launch(
        kernels_products.gate_up_kernel,
        (cdiv(outputs, shape.outputs), cdiv(tokens, width)),
        *(x_ND, gate_OD, up_OD, y_NO, tokens, outputs),
        K=inputs,
        **shape.options(width),
    )
    return y_NO


class Stack:
    """Layers that run one after the other.

    Args:
        layers: weights of one dtype on one device; they are not copied.
    """

    def __init__(self, layers: Sequence[LayerWeights], sizes: Sizes):
        self.layers, self.sizes = layers, sizes

    def takes(self, x_RTD: Tensor, meta: ForwardMeta) -> bool:
        """Whether these are few tokens with a mask that `paths` can read, and no gradients are
        wanted: a step of decoding, or a part of a prompt."""
        few = x_RTD.shape[0] * x_RTD.shape[1] <= MOST_TOKENS and not torch.is_grad_enabled()
        return few and (meta.bias_R1TE is None or meta.bias_R1TE.dtype != torch.bool)

    def prompt_chunk(self, length: int) -> int:
        """How many tokens of a prompt of this length enter in a pass. That changes no token's bits:
        a prompt may go on from any text, however it was read and written."""
        of_token = self.sizes.heads * self.sizes.head_size * cdiv(length, 64)
        return min(PROMPT_CHUNK, max(16, SUMS // of_token // 16 * 16))

    def __call__(
        self,
        x_RTD: Tensor,
        cache: KVCache,
        meta: ForwardMeta,
        layers: range,
        final_norm: Tensor | None = None,
        keys_alone: bool = False,
    ) -> Tensor:
        """The output of the last layer, normed where a norm is given.

        Keys and values are written at the block's slots.

        Args:
            keys_alone: for a single layer, of which only these are wanted.
        """
        x_ND, eps = flat(x_RTD), self.sizes.eps
        seen = paths(meta)
        parts_PND = None
        for index in layers:
            layer = self.layers[index]
            if layer.o is not None:
                x_ND, normed_ND = add_and_norm(x_ND, parts_PND, layer.attention_norm, eps)
                attended_NO = self._attend(normed_ND, cache, meta, seen, index, keys_alone)
                if keys_alone:
                    return x_RTD
                parts_PND = product(attended_NO, layer.o, layer.o_bias, PARTS)
            if layer.gate is not None:
                assert layer.up is not None and layer.down is not None
                x_ND, normed_ND = add_and_norm(x_ND, parts_PND, layer.feed_forward_norm, eps)
                parts_PND = product(
                    gate_and_up(normed_ND, layer.gate, layer.up), layer.down, parts=PARTS
                )
        x_ND, normed_ND = add_and_norm(x_ND, parts_PND, final_norm, eps)
        return normed_ND.view(x_RTD.shape)

    def _attend(
        self,
        x_ND: Tensor,
        cache: KVCache,
        meta: ForwardMeta,
        seen: Paths,
        index: int,
        keys_alone: bool,
    ) -> Tensor:
        """Attention of a layer, `[N, heads * head size]`, once it has its own keys and values."""
        sizes, (rows, tokens) = self.sizes, meta.slots_RT.shape
        heads, size = sizes.heads, sizes.head_size
        q_NO = self._queries_and_keys(x_ND, cache, meta, seen, index, keys_alone)
        if keys_alone:
            return q_NO
        padded, blocks = power_of_two(size), cdiv(meta.extent, 64)
        columns = cdiv(tokens * heads // sizes.kv_heads, 16)
        sums = x_ND.new_empty(len(x_ND), heads, blocks, size, dtype=torch.float32)
        weights = x_ND.new_empty(len(x_ND), heads, blocks, 2, dtype=torch.float32)
        places = seen.path_NP.shape[1]
        launch(
            kernels_attention.attend_kernel,
            (rows, sizes.kv_heads, columns * blocks + tokens * places // 64),
            *(q_NO, cache.keys[index], cache.values[index]),
            *(seen.count_N, seen.lead_N, seen.path_NP, sums, weights),
            *(tokens, cache.n_slots, meta.rows.start, places, blocks, columns),
            sizes.scaling,
            H=heads,
            G=sizes.kv_heads,
            D=size,
            DP=padded,
            num_warps=4,
        )
        grid, shape = (len(x_ND), heads), {"H": heads, "D": size, "DP": padded}
        out_NO = torch.empty_like(q_NO)
        combine = kernels_attention.combine_kernel
        launch(combine, grid, sums, weights, seen.count_N, out_NO, blocks, **shape, num_warps=1)
        return out_NO

    def _queries_and_keys(
        self,
        x_ND: Tensor,
        cache: KVCache,
        meta: ForwardMeta,
        seen: Paths,
        index: int,
        keys_alone: bool,
    ) -> Tensor:
        """Queries `[N, heads * head size]`; keys and values go to the cache."""
        layer, sizes, tokens = self.layers[index], self.sizes, len(x_ND)
        heads, kv_heads, half = sizes.heads, sizes.kv_heads, sizes.head_size // 2
        q, first = layer.q, heads if keys_alone else 0
        assert q is not None
        others = (layer.k, layer.v, layer.q_bias, layer.k_bias, layer.v_bias)
        norms = (layer.q_norm, layer.k_norm)
        q_NO = x_ND.new_empty(tokens, heads * sizes.head_size)
        width, has_norms = width_of(tokens), layer.q_norm is not None
        shape = tile(
            q,
            (heads + 2 * kv_heads) * half,
            matrices=2,
            most=min(power_of_two(half), 128 if has_norms else 64),
            whole=has_norms,
        )
        tiles = cdiv(half, shape.outputs) * (heads + 2 * kv_heads - first)
        launch(
            kernels_products.qkv_kernel,
            (tiles, cdiv(tokens, width)),
            *(x_ND, q, *(q if w is None else w for w in (*others, *norms))),
            *(*seen.rope, seen.slots_N, seen.count_N, q_NO),
            *(cache.keys[index], cache.values[index]),
            *(tokens, meta.slots_RT.shape[1], cache.n_slots, meta.rows.start, sizes.eps),
            H=heads,
            G=kv_heads,
            FIRST=first,
            K=x_ND.shape[1],
            D=sizes.head_size,
            BIASED=layer.q_bias is not None,
            NORMS=has_norms,
            **shape.options(width),
        )
        return q_NO


class Choice(NamedTuple):
    """What a head gives greedy decoding.

    Args:
        ids_M2: the likeliest token and the next one; of equals the lowest ids.
        chances_M2: what the distribution gives them.
    """

    ids_M2: Tensor
    chances_M2: Tensor

    def first(self, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The likeliest token and its chance, of tokens in this shape."""
        return self.ids_M2[:, 0].unflatten(0, shape), self.chances_M2[:, 0].unflatten(0, shape)


class Head:
    """A matrix from hidden states to logits."""

    def __init__(self, weight_OD: Tensor, sizes: Sizes):
        self.weight_OD, self.sizes = weight_OD, sizes

    def takes(self, x_MD: Tensor) -> bool:
        """Whether these are few tokens, and no gradients are wanted."""
        return len(x_MD) <= MOST_TOKENS and not torch.is_grad_enabled()

    def __call__(self, x_MD: Tensor, norm: Tensor | None = None) -> Tensor:
        """Logits `[M, O]` in float32, of the normed states where a norm is given."""
        _, x_MD = add_and_norm(x_MD.contiguous(), None, norm, self.sizes.eps)
        return product(x_MD, self.weight_OD)[0]

    def choose(
        self, x_MD: Tensor, norm: Tensor | None = None, ids_O: Tensor | None = None
    ) -> Choice:
        """The likeliest tokens; no logits are written.

        Args:
            ids_O: of the outputs, ascending; None where they are all tokens.
        """
        _, x_MD = add_and_norm(x_MD.contiguous(), None, norm, self.sizes.eps)
        tokens, (outputs, inputs) = len(x_MD), self.weight_OD.shape
        shape, width = tile(self.weight_OD, outputs), width_of(tokens)
        tiles = cdiv(outputs, shape.outputs)
        best = x_MD.new_empty(tokens, 3, tiles, dtype=torch.float32)
        ids = x_MD.new_empty(tokens, 2, tiles, dtype=torch.int32)
        launch(
            kernels_products.choose_kernel,
            (tiles, cdiv(tokens, width)),
            *(x_MD, self.weight_OD, best, ids, tokens, outputs, tiles),
            K=inputs,
            **shape.options(width),
        )
        ids_M2 = x_MD.new_empty(tokens, 2, dtype=torch.int64)
        chances_M2 = x_MD.new_empty(tokens, 2, dtype=torch.float32)
        listed: dict[str, Any] = {"LISTED": ids_O is not None, "BB": power_of_two(tiles)}
        tables = best, ids, ids if ids_O is None else ids_O
        launch(
            kernels_products.choice_kernel,
            (tokens,),
            *(*tables, ids_M2, chances_M2, tiles, outputs),
            **listed,
        )
        return Choice(ids_M2, chances_M2)


class Fusing:
    """What a fused adapter makes of shallow states and the deep ones before them.

    Args:
        weights: of the norms of both, `[D]`, and of the projection, `[D, 2 D]`.
    """

    def __init__(self, weights: Sequence[Tensor], sizes: Sizes):
        self.weights, self.sizes = weights, sizes

    def __call__(self, f_BND: Tensor, deep_BND: Tensor) -> Tensor:
        """What goes into the adapter's layer, `[B, N, D]`."""
        *norms, weight = self.weights
        size, eps = f_BND.shape[-1], self.sizes.eps
        f_MD, deep_MD = flat(f_BND), flat(deep_BND.expand_as(f_BND))
        both_ME = f_MD.new_empty(len(f_MD), 2 * size)
        for i, (x_MD, norm) in enumerate(zip((f_MD, deep_MD), norms, strict=True)):
            add_and_norm(x_MD, None, norm, eps, out=both_ME[:, i * size : (i + 1) * size])
        fused_MD, _ = add_and_norm(f_MD, product(both_ME, weight, parts=PARTS), None, eps)
        return fused_MD.view(f_BND.shape)


def try_out(dtype: torch.dtype, sizes: Sizes, device: torch.device) -> None:
    """Run a layer and a small head for one token, as decoding will, and a layer for a text, as
    training will: compiling may fail. Errors: Triton's."""
    from kangaroo.cuda import texts  # which itself needs this module

    size, wide = sizes.head_size, sizes.feed_forward
    hidden, of_q, of_k = sizes.hidden, sizes.heads * size, sizes.kv_heads * size
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    q, k, v, o = zeros(of_q, hidden), zeros(of_k, hidden), zeros(of_k, hidden), zeros(hidden, of_q)
    gate, down, norm = zeros(wide, hidden), zeros(hidden, wide), zeros(hidden)
    layer = LayerWeights(norm, q, k, v, o, feed_forward_norm=norm, gate=gate, up=gate, down=down)
    slots_RT = torch.zeros(1, 1, dtype=torch.int64, device=device)
    rope = zeros(1, 1, size), zeros(1, 1, size)
    meta = ForwardMeta(slots_RT, slots_RT, zeros(1, 1, 1, 1), 1, slice(0, 1), rope, recordable=True)
    cache = KVCache(1, 1, sizes.kv_heads, size, dtype, [device])
    with torch.no_grad():
        stack = Stack([layer], sizes)
        x_RTD = stack(zeros(1, 1, hidden), cache, meta, range(1), norm)
        texts.run(stack, x_RTD, replace(meta, bias_R1TE=None), range(1))
        Head(q, sizes).choose(x_RTD[0])
