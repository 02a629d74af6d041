"""Decoder layers and heads in Triton kernels, for `cuda/backend.py`.

Shapes: R rows, T tokens a row, N tokens of all rows, M tokens, D hidden size, O outputs, P places
of a path, H heads, C head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import CausalBias

from kangaroo.cuda import kernels, kernels_attention, kernels_products
from kangaroo.cuda.launching import PARTS, Attention, cdiv, folds_parts, launch, tile
from kangaroo.engine.backend import LayerWeights, Sizes
from kangaroo.engine.cache import ForwardMeta, KVCache, power_of_two
from kangaroo.models.attention import attention

PROMPT_CHUNK = 1024  # tokens of a prompt in a pass
LONGEST_PATH = 128  # nodes on a path from a draft's root

Past = tuple[Tensor, Tensor, int]  # keys and values from the first row on, slots of a row


def tile_size(size: int) -> int:
    """The smallest power of two that is neither below `size` nor below 16."""
    return max(16, power_of_two(size))


def flat(x_RTD: Tensor) -> Tensor:
    """All tokens as a contiguous `[N, D]`."""
    return x_RTD.reshape(-1, x_RTD.shape[-1]).contiguous()


def add_and_norm(
    x_ND: Tensor,
    parts_PND: Tensor | None,
    weight_D: Tensor | None,
    eps: float,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The sum of x and any parts of a product, and its norm if there is a weight (in `out`)."""
    if parts_PND is None and weight_D is None:
        return x_ND, x_ND
    size = x_ND.shape[1]
    sum_ND = x_ND if parts_PND is None else torch.empty_like(x_ND)
    normed_ND = sum_ND if weight_D is None else torch.empty_like(x_ND) if out is None else out
    launch(
        kernels.norm_kernel,
        (len(x_ND),),
        *(x_ND, parts_PND, weight_D, sum_ND, normed_ND, len(x_ND), normed_ND.stride(0), eps),
        K=size,
        BK=tile_size(size),
        PARTS=0 if parts_PND is None else len(parts_PND),
        NORMS=weight_D is not None,
        num_warps=8 if size > 1024 else 4,
    )
    return sum_ND, normed_ND


def product(
    x_NK: Tensor, weight_OK: Tensor, bias_O: Tensor | None = None, parts: int = 1
) -> Tensor:
    """The product in float32, `[P, N, O]`, to be summed over its parts; or `[1, N, O]`, their
    sum, with the same bits."""
    tokens = len(x_NK)
    outputs = len(weight_OK)
    folds = parts > 1 and folds_parts(weight_OK, outputs, tokens)
    shape = tile(weight_OK, outputs, tokens, parts, folds=folds)
    y_PNO = x_NK.new_empty(1 if folds else parts, tokens, outputs, dtype=torch.float32)
    launch(
        kernels_products.linear_kernel,
        (cdiv(tokens, shape["TOKENS"]), cdiv(outputs, shape["BO"]), len(y_PNO)),
        *(x_NK, weight_OK, bias_O, y_PNO, tokens, outputs),
        PARTS=parts,
        FOLDS=folds,
        BIASED=bias_O is not None,
        **shape,
    )
    return y_PNO


def gate_and_up(x_ND: Tensor, gate_OD: Tensor, up_OD: Tensor) -> Tensor:
    """The gated activations, `[N, O]`."""
    tokens = len(x_ND)
    outputs = len(gate_OD)
    y_NO = x_ND.new_empty(tokens, outputs)
    shape = tile(gate_OD, 2 * outputs, tokens)
    row_bytes = gate_OD.shape[1] * gate_OD.itemsize
    aligned = not any(x % 16 for x in (gate_OD.data_ptr(), up_OD.data_ptr(), row_bytes))
    launch(
        kernels_products.gate_up_kernel,
        (cdiv(tokens, shape["TOKENS"]), cdiv(2 * outputs, shape["BO"])),
        *(x_ND, gate_OD, up_OD, y_NO, tokens, outputs),
        ALIGNED=aligned,
        **shape,
    )
    return y_NO


@dataclass
class Paths:
    """The slots that the tokens of a pass see, for all layers. In a prompt `path_NP` is empty: its
    tokens share the last block even if they see only a part of it."""

    meta: ForwardMeta
    count_N: Tensor  # the number of slots that a token sees; 0 for padding
    lead_N: Tensor  # how many of them are the slots 0, 1, ..., in whole blocks of 64
    path_NP: Tensor  # the other ones, in the order of positions
    slots_N: Tensor  # slots for the tokens' own keys and values
    rope: tuple[Tensor, Tensor]  # cosine and sine, each `[N, head size]`


def paths(meta: ForwardMeta, n_slots: int) -> Paths:
    """The paths of a block from its mask, if it has one. After the first hidden slot, a token may
    see up to `LONGEST_PATH` slots, or as many as the row has tokens."""
    rows, tokens = meta.slots_RT.shape
    slots_N = meta.slots_RT.flatten().contiguous()
    slots_N = slots_N if meta.row_1 is None else slots_N + meta.row_1 * n_slots
    cos, sin = (flat(x.expand(rows, -1, -1)) for x in meta.rope)
    if meta.bias_R1TE is None or isinstance(meta.bias_R1TE, CausalBias):
        count_N = meta.positions_RT.flatten().int() + 1
        path_NP = count_N.new_empty(len(count_N), 0)
        return Paths(meta, count_N, count_N, path_NP, slots_N, (cos, sin))
    bias_RTE = meta.bias_R1TE[:, 0].expand(rows, -1, -1)
    places = cdiv(63 + max(tokens, LONGEST_PATH), 64) * 64
    count_N, lead_N = slots_N.new_empty(2, len(slots_N), dtype=torch.int32)
    path_NP = slots_N.new_empty(len(slots_N), places, dtype=torch.int32)
    launch(
        kernels_attention.path_kernel,
        (len(slots_N),),
        *(bias_RTE, count_N, lead_N, path_NP, tokens, meta.extent, places, *bias_RTE.stride()[:2]),
        BE=1024,
    )
    return Paths(meta, count_N, lead_N, path_NP, slots_N, (cos, sin))


class Stack:
    """A sequence of layers of one dtype that look back `window` tokens (`ForwardMeta.within`)."""

    def __init__(self, layers: Sequence[LayerWeights], sizes: Sizes, window: int = 0):
        self.layers = layers
        self.sizes = sizes
        self.window = window

    def takes(self, x_RTD: Tensor, cache: KVCache | None, meta: ForwardMeta) -> bool:
        """See `backend.Layers`; no gradient flows through whole texts."""
        if cache is None:
            causal = meta.bias_R1TE is None and meta.extent == x_RTD.shape[1]
            return causal and not x_RTD.requires_grad
        is_boolean = meta.bias_R1TE is not None and meta.bias_R1TE.dtype == torch.bool
        return not (is_boolean or torch.is_grad_enabled())

    def prompt_chunk(self, length: int) -> int:
        """The tokens in each pass over a prompt of this length; no bits depend on it."""
        passes = cdiv(length, PROMPT_CHUNK)
        return PROMPT_CHUNK if passes == 1 else cdiv(length, 128 * passes) * 128

    def __call__(
        self,
        x_RTD: Tensor,
        cache: KVCache | None,
        meta: ForwardMeta,
        layers: range,
        final_norm: Tensor | None = None,
        keys_alone: bool = False,
        pairs: Tensor | None = None,
    ) -> Tensor:
        """See `backend.Layers`; there are no `pairs`."""
        if cache is None:
            return self.run_text(x_RTD, meta, layers)
        path = paths(meta, cache.n_slots)
        parts_PND = None
        x_ND = flat(x_RTD)
        eps = self.sizes.eps
        first = meta.rows.start * cache.n_slots
        for index in layers:
            layer = self.layers[index]
            if layer.o is not None:
                x_ND, normed_ND = add_and_norm(x_ND, parts_PND, layer.attention_norm, eps)
                past = cache.keys[index][first:], cache.values[index][first:], cache.n_slots
                q_NO = self._queries_and_keys(normed_ND, past, path, layer, keys_alone)
                if keys_alone:
                    return x_RTD
                attended_NO = self._attend(q_NO, past, path)
                parts_PND = product(attended_NO, layer.o, layer.o_bias, PARTS)
            if layer.gate is not None:
                assert layer.up is not None and layer.down is not None
                x_ND, normed_ND = add_and_norm(x_ND, parts_PND, layer.feed_forward_norm, eps)
                gated_NO = gate_and_up(normed_ND, layer.gate, layer.up)
                parts_PND = product(gated_NO, layer.down, parts=PARTS)
        _, normed_ND = add_and_norm(x_ND, parts_PND, final_norm, eps)
        return normed_ND.view(x_RTD.shape)

    def _queries_and_keys(
        self, x_ND: Tensor, past: Past, path: Paths, layer: LayerWeights, keys_alone: bool
    ) -> Tensor:
        """The queries `[N, H * C]`; writes keys and values to the cache."""
        assert layer.q is not None
        sizes = self.sizes
        tokens = len(x_ND)
        size = sizes.head_size
        all_heads = sizes.heads + 2 * sizes.kv_heads
        has_norms = layer.q_norm is not None
        q_NO = x_ND.new_empty(tokens, sizes.heads * size)
        whole = 2 * tile_size(size // 2)
        most = whole if has_norms else min(whole, 128)
        shape = tile(layer.q, all_heads * size, tokens, most=most, whole=has_norms)
        first = sizes.heads if keys_alone else 0
        launch(
            kernels_products.qkv_kernel,
            (cdiv(tokens, shape["TOKENS"]), cdiv(size, shape["BO"]) * (all_heads - first)),
            *(x_ND, layer.q, layer.k, layer.v, layer.q_bias, layer.k_bias, layer.v_bias),
            *(layer.q_norm, layer.k_norm, *path.rope, path.slots_N, path.count_N, q_NO, *past),
            *(tokens, path.meta.slots_RT.shape[1], sizes.eps),
            H=sizes.heads,
            G=sizes.kv_heads,
            FIRST=first,
            D=size,
            BIASED=layer.q_bias is not None,
            NORMS=has_norms,
            **shape,
        )
        return q_NO

    def _attend(self, q_NO: Tensor, past: Past, path: Paths) -> Tensor:
        """Attention `[N, H * C]` over the cache, with the tokens' own keys and values in it."""
        meta = path.meta
        places = path.path_NP.shape[1]
        rows, tokens = meta.slots_RT.shape
        sizes = self.sizes
        heads = sizes.heads
        size = sizes.head_size
        shape = {"H": heads, "D": size, "DP": tile_size(size)}
        plan = Attention.of(q_NO, sizes, rows, meta.extent, places)
        sums = q_NO.new_empty(len(q_NO), heads, plan.pieces, size, dtype=torch.float32)
        weights = q_NO.new_empty(len(q_NO), heads, plan.pieces, 2, dtype=torch.float32)
        out_NO = torch.empty_like(q_NO)
        launch(
            kernels_attention.attend_kernel,
            (plan.tiles * plan.runs + tokens * places // 64, sizes.kv_heads, rows),
            *(q_NO, *past, meta.row_1, path.count_N, path.lead_N, path.path_NP),
            *(out_NO, sums, weights, tokens, places, plan.pieces, plan.tiles, plan.runs),
            *(self.window, sizes.scaling),
            G=sizes.kv_heads,
            ANY_ROW=meta.row_1 is not None,
            **shape,
            **plan.options,
        )
        if plan.pieces:
            launch(
                kernels_attention.combine_kernel,
                (len(q_NO), heads),
                *(sums, weights, path.count_N, path.lead_N, out_NO, plan.pieces, self.window),
                **shape,
                FOLDED=plan.options["FOLDS"],
                AT_ONCE=min(16, power_of_two(plan.pieces)),
                num_warps=1,
            )
        return out_NO

    @torch.no_grad()
    def run_text(self, x_RTD: Tensor, meta: ForwardMeta, layers: range) -> Tensor:
        """The output of the last layer for whole texts, as training needs it. Products and
        attention are torch's, with six kernels a layer between them instead of modules' thirty."""
        x_ND = flat(x_RTD)
        eps = self.sizes.eps
        added_1ND = None
        for index in layers:
            layer = self.layers[index]
            assert layer.o is not None and layer.gate is not None
            assert layer.up is not None and layer.down is not None
            x_ND, normed_ND = add_and_norm(x_ND, added_1ND, layer.attention_norm, eps)
            q, k, v = self._heads(normed_ND.view(x_RTD.shape), meta, layer)
            attended, _ = attention(torch.nn.Identity(), q, k, v, None, self.sizes.scaling)
            added_1ND = F.linear(attended.reshape(1, len(x_ND), -1), layer.o, layer.o_bias)
            x_ND, normed_ND = add_and_norm(x_ND, added_1ND, layer.feed_forward_norm, eps)
            gate_NO = F.silu(F.linear(normed_ND, layer.gate), inplace=True)
            added_1ND = F.linear(gate_NO.mul_(F.linear(normed_ND, layer.up)), layer.down)[None]
        return add_and_norm(x_ND, added_1ND, None, eps)[0].view(x_RTD.shape)

    def _heads(self, x_RTD: Tensor, meta: ForwardMeta, layer: LayerWeights) -> list[Tensor]:
        """Queries, keys and values of whole texts, each `[R, H, T, C]`."""
        sizes = self.sizes
        half = tile_size(sizes.head_size // 2)
        projected = []
        rows, tokens, _ = x_RTD.shape
        cos_RTC, sin_RTC = (x.contiguous() for x in meta.rope)
        stride = 0 if len(cos_RTC) == 1 else cos_RTC.stride(0)
        for name, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads)):
            part_RTO = F.linear(x_RTD, getattr(layer, name), getattr(layer, f"{name}_bias"))
            norm = getattr(layer, f"{name}_norm", None)
            if name != "v":
                shape = {"H": heads, "HP": tile_size(heads), "D": sizes.head_size, "HALF": half}
                launch(
                    kernels.rotate_kernel,
                    (rows * tokens,),
                    *(part_RTO, norm, cos_RTC, sin_RTC, tokens, stride, sizes.eps),
                    NORMS=norm is not None,
                    **shape,
                )
            projected.append(part_RTO.unflatten(-1, (heads, -1)).transpose(1, 2))
        return projected


class Head:
    """An LM head."""

    def __init__(self, weight_OD: Tensor, sizes: Sizes):
        self.weight_OD = weight_OD
        self.sizes = sizes

    def read(self, weight_OD: Tensor) -> None:
        self.weight_OD = weight_OD

    def takes(self, x_MD: Tensor) -> bool:
        return not torch.is_grad_enabled()

    def __call__(self, x_MD: Tensor, norm: Tensor | None = None) -> Tensor:
        _, x_MD = add_and_norm(x_MD.contiguous(), None, norm, self.sizes.eps)
        return product(x_MD, self.weight_OD)[0]

    def likeliest(self, x_MD: Tensor, norm: Tensor) -> Tensor:
        return self.choose(x_MD[None], norm)[0][0]

    def choose(
        self, x_RTD: Tensor, norm: Tensor | None = None, ids_O: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        _, x_ND = add_and_norm(flat(x_RTD), None, norm, self.sizes.eps)
        tokens = len(x_ND)
        outputs = len(self.weight_OD)
        shape = tile(self.weight_OD, outputs, tokens)
        tiles = cdiv(outputs, shape["BO"])
        best = x_ND.new_empty(tokens, 2, tiles, dtype=torch.float32)
        ids = x_ND.new_empty(tokens, tiles, dtype=torch.int32)
        launch(
            kernels_products.choose_kernel,
            (cdiv(tokens, shape["TOKENS"]), tiles),
            *(x_ND, self.weight_OD, best, ids, tokens, outputs, tiles),
            **shape,
        )
        ids_RT = x_ND.new_empty(x_RTD.shape[:2], dtype=torch.int64)
        chances_RT = x_ND.new_empty(x_RTD.shape[:2], dtype=torch.float32)
        launch(
            kernels_products.choice_kernel,
            (tokens,),
            *(best, ids, ids_O, ids_RT, chances_RT, tiles, outputs),
            LISTED=ids_O is not None,
            BB=tile_size(tiles),
        )
        return ids_RT, chances_RT


def fuse(
    norms: Sequence[Tensor], weight: Tensor, eps: float, f_BND: Tensor, deep_BND: Tensor
) -> Tensor:
    """See `backend.Fusing`."""
    f_MD = flat(f_BND)
    deep_MD = flat(deep_BND.expand_as(f_BND))
    both_ME = f_MD.new_empty(len(f_MD), 2 * f_MD.shape[1])
    for x_MD, norm, out in zip((f_MD, deep_MD), norms, both_ME.chunk(2, 1), strict=True):
        add_and_norm(x_MD, None, norm, eps, out=out)
    fused_MD, _ = add_and_norm(f_MD, product(both_ME, weight, parts=PARTS), None, eps)
    return fused_MD.view(f_BND.shape)
