"""Decoder layers in native code, for a CPU: calls what `cpp/decode.cpp` is built to.

A step of decoding has few tokens, and its time is that of reading the weights once. PyTorch's
modules take several times as long: matrix products of one row do not stream, and between them the
threads wait. What a token gets depends neither on the tokens beside it nor on the batch, bit by
bit: `decode.cpp` says why. It needs a C++ compiler (g++ or clang++) and is built at first use, for
this very processor; without one, decoding stays eager.

Shapes: R rows, T tokens a row, D hidden size, N outputs, S slots, E occupied slots.
"""

from __future__ import annotations

import ctypes
import logging
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from ctypes import CDLL, Array, Structure, byref
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kangaroo.cpu.compiling import build, compiler, supported
from kangaroo.cpu.last_level import staying_bytes
from kangaroo.engine.cache import ForwardMeta, KVCache

log = logging.getLogger(__name__)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MOST_TOKENS = 256  # in a pass
PROMPT_CHUNK = 128  # of a prompt in a pass: what is computed in between stays in the cache
TURNED_CHUNK = 256  # where rows of weights are turned first, which then serves more tokens
LONGEST_PROMPT = 1024  # with a matrix unit: for longer ones PyTorch's attention is faster
WIDEST_HEAD = 1024  # of `attention.h`
CHOICES, MOST_CHOICES = 3, 16  # of `choice.h`


@dataclass
class LayerWeights:
    """The weights of one layer, in the order of `layers.h`'s `Layer`; None where it has none.

    A layer has attention, or a feed-forward part, or both, each after its norm if it has one.
    """

    attention_norm: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    o: Tensor | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    feed_forward_norm: Tensor | None = None
    gate: Tensor | None = None
    up: Tensor | None = None
    down: Tensor | None = None


# Those that a layer's keys and values are made with.
OF_KEYS = "attention_norm", "k", "v", "k_bias", "v_bias", "k_norm"


@dataclass
class Sizes:
    """What all layers of a stack share.

    Args:
        eps: of every norm.
        scaling: of attention's scores.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    eps: float
    scaling: float

    @property
    def fits_tiles(self) -> bool:
        """Whether a matrix unit can multiply all matrices of a layer."""
        widths = self.hidden, self.feed_forward, self.heads * self.head_size, self.head_size
        return all(width % 32 == 0 for width in widths)

    def native(self) -> Structure:
        """The same for native code, with as many threads as torch has now."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return NativeSizes(threads=torch.get_num_threads(), **values)


def struct(name: str, integers: str = "", doubles: str = "", **others: Any) -> type[Structure]:
    """A structure of native code: `integers` and pointers, then `doubles`, then others."""
    parts: list[tuple[str, Any]] = [(part, ctypes.c_int64) for part in integers.split()]
    parts += [(part, ctypes.c_double) for part in doubles.split()]
    return type(name, (Structure,), {"_fields_": parts + list(others.items())})


# As in the files of `cpp/`: each as there, a pointer as an integer.
NativeSizes = struct(
    "NativeSizes", "hidden heads kv_heads head_size feed_forward threads", "eps scaling"
)
NativeStack = struct("NativeStack", "layers count keys values n_slots")
NativeHead = struct("NativeHead", "norm weight outputs ids passing")
NativeTarget = struct(
    "NativeTarget",
    sizes=NativeSizes,
    stack=NativeStack,
    head=NativeHead,
    embedding=ctypes.c_int64,
    cos=ctypes.c_int64,
    sin=ctypes.c_int64,
)
NativeFusing = struct("NativeFusing", "shallow_norm deep_norm weight")
NativeDrafting = struct(
    "NativeDrafting",
    stack=NativeStack,
    norm=ctypes.c_int64,
    head=NativeHead,
    fusing=NativeFusing,
    deep=ctypes.c_int64,
    deep_tap=ctypes.c_int64,
)
NativePlaces = struct("NativePlaces", "places neighbours table rank")
NativeRows = struct(
    "NativeRows",
    """
    batch capacity hidden most_unread exit base count asking end draw token parent place has_state
    choices chances states unread unread_states made accepted written keep kept kept_chances
    """,
)
# Of each row, an array of it.
DRAW = np.dtype(
    [("temperature", np.float64), ("top_p", np.float64), ("top_k", np.int64), ("seed", np.int64)]
)
NativeOutcomes = struct(
    "NativeOutcomes", "rows logits tokens threads scores index inside log_q largest rest best"
)


def pointer(tensor: Tensor | None) -> int:
    """A tensor's address; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


class Stack:
    """Layers that run in one call.

    Args:
        layers: weights of one dtype, `float32` or `bfloat16`, on the CPU; they are not copied.
    """

    def __init__(self, library: CDLL, layers: Sequence[LayerWeights], sizes: Sizes):
        self.layers, self.sizes = layers, sizes
        self.per_layer = (len(fields(LayerWeights)) + 1) * ctypes.sizeof(ctypes.c_int64)
        self.table, self.keys_table = layer_table(layers), layer_table(layers, OF_KEYS)
        self.dtype = next(w.dtype for w in vars(layers[0]).values() if w is not None)
        self.call = function(library, "run_block", self.dtype, RUN_BLOCK)
        self.longest_prompt = longest_prompt(library, self.dtype, sizes)
        turns = self.dtype == torch.bfloat16 and library.turns_rows()
        self.prompt_chunk = TURNED_CHUNK if turns else PROMPT_CHUNK

    def takes(self, x_RTD: Tensor, meta: ForwardMeta) -> bool:
        """Whether these are few tokens, each with its own row of a mask of numbers: a step of
        decoding, or a later part of a prompt; where prompts are read here, its first part too.
        A text that is learnt has one mask for all rows, or a boolean one.
        """
        few = x_RTD.shape[0] * x_RTD.shape[1] <= MOST_TOKENS and not torch.is_grad_enabled()
        bias = meta.bias_R1TE
        if bias is None:  # from the first position on
            return few and self.longest_prompt > 0 and len(x_RTD) == len(meta.slots_RT) == 1
        masked = isinstance(bias, Tensor) and len(bias) == len(meta.slots_RT) == len(x_RTD)
        return few and masked and bias.dtype == x_RTD.dtype

    def native(self, cache: KVCache, layers: range, keys_alone: bool = False) -> Structure:
        """Some of the layers with their keys and values; it holds as long as the cache.

        Args:
            keys_alone: each writes keys and values, and leaves the states as they are.
        """
        addresses = cache.addresses
        step = ctypes.sizeof(ctypes.c_void_p)
        table = self.keys_table if keys_alone else self.table
        return NativeStack(
            layers=ctypes.addressof(table) + layers.start * self.per_layer,
            count=len(layers),
            keys=ctypes.addressof(addresses.keys) + layers.start * step,
            values=ctypes.addressof(addresses.values) + layers.start * step,
            n_slots=cache.n_slots,
        )

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
            keys_alone: as of `native`; for a single layer, whose input is `x`.
        """
        rows, tokens, _ = x_RTD.shape
        x_RTD = x_RTD.clone(memory_format=torch.contiguous_format)
        bias_R1TE = meta.bias_R1TE
        if bias_R1TE is None:
            bias_R1TE = x_RTD.new_full((tokens, tokens), -torch.inf).triu_(1)
        held = [t.contiguous() for t in (bias_R1TE, *meta.rope, meta.slots_RT)]
        self.call(
            byref(self.sizes.native()),
            byref(self.native(cache, layers, keys_alone)),
            *(rows, tokens, meta.extent, meta.rows.start),
            *map(pointer, (x_RTD, *held, final_norm)),
        )
        return x_RTD


def layer_table(layers: Sequence[LayerWeights], names: Collection[str] | None = None) -> Array[Any]:
    """The layers as `layers.h` reads them, or some of their weights.

    Of the first layers, which a draft reads again for each of its tokens, as many as fit stay in
    the last-level cache.
    """
    entries, size = [], 0
    for layer in layers:
        weights = vars(layer)
        assert all(w is None or w.is_contiguous() for w in weights.values())
        size += sum(w.nbytes for w in weights.values() if w is not None)
        entries += [
            pointer(w) if names is None or name in names else 0 for name, w in weights.items()
        ]
        entries.append(int(size > staying_bytes()))
    return (ctypes.c_int64 * len(entries))(*entries)


class Head:
    """A matrix from hidden states to logits."""

    def __init__(self, library: CDLL, weight_ND: Tensor, sizes: Sizes):
        self.weight_ND, self.sizes = weight_ND, sizes
        self.passing = weight_ND.nbytes > staying_bytes()
        self.call = function(library, "read_out", weight_ND.dtype, READ_OUT)

    def takes(self, x_MD: Tensor) -> bool:
        """Whether these are few tokens, and no gradients are wanted."""
        return x_MD.shape[0] <= MOST_TOKENS and not torch.is_grad_enabled()

    def native(self, norm: Tensor | None = None, ids_N: Tensor | None = None) -> Structure:
        """The head for native code, after a norm if one is given.

        Args:
            ids_N: the tokens that it has outputs for; None is all.
        """
        weight, outputs = pointer(self.weight_ND), len(self.weight_ND)
        return NativeHead(pointer(norm), weight, outputs, pointer(ids_N), self.passing)

    def __call__(self, x_MD: Tensor, norm: Tensor | None = None) -> Tensor:
        """Logits `[M, N]` in float32, of the normed states where a norm is given."""
        x_MD = x_MD.contiguous()
        logits_MN = x_MD.new_empty(len(x_MD), len(self.weight_ND), dtype=torch.float32)
        head, sizes = self.native(norm), self.sizes.native()
        self.call(byref(sizes), byref(head), pointer(x_MD), len(x_MD), pointer(logits_MN))
        return logits_MN


class Fusing:
    """What a fused adapter makes of shallow states and the deep ones before them.

    Args:
        weights: of the norms of both, `[D]`, and of the projection, `[D, 2 D]`.
    """

    def __init__(self, library: CDLL, weights: Sequence[Tensor], sizes: Sizes):
        self.weights, self.sizes = weights, sizes
        self.call = function(library, "fuse", weights[-1].dtype, FUSE)

    def native(self) -> Structure:
        """The same for native code."""
        return NativeFusing(*map(pointer, self.weights))

    def __call__(self, f_BND: Tensor, deep_BND: Tensor) -> Tensor:
        """What goes into the adapter's layer, `[B, N, D]`."""
        x_BND = f_BND.clone(memory_format=torch.contiguous_format)
        deep_BND = deep_BND.expand_as(f_BND).contiguous()
        tokens = x_BND.shape[0] * x_BND.shape[1]
        sizes, fusing = self.sizes.native(), self.native()
        self.call(byref(sizes), byref(fusing), pointer(x_BND), pointer(deep_BND), tokens)
        return x_BND


# what the functions of `decode.cpp` take
POINTER, INTEGER = ctypes.c_void_p, ctypes.c_int64
RUN_BLOCK = [*2 * [POINTER], *4 * [INTEGER], *6 * [POINTER]]
READ_OUT = [*3 * [POINTER], INTEGER, POINTER]
FUSE = [*4 * [POINTER], INTEGER]
DRAFT = [*3 * [POINTER], INTEGER, ctypes.c_float, POINTER]
DRAFT_BLOCK = [*4 * [POINTER], INTEGER, ctypes.c_float, POINTER]
TREE = [INTEGER, INTEGER, ctypes.c_float, POINTER, INTEGER, POINTER, ctypes.c_int]
DRAFT_TREES = [*3 * [POINTER], *TREE]
VERIFY = 3 * [POINTER]
FIND_OUTCOMES, OUTCOMES_BACK = [POINTER], 3 * [POINTER]


def function(library: CDLL, name: str, dtype: torch.dtype, takes: list[Any]) -> Callable[..., None]:
    """A function of the library for numbers of this format."""
    call = library[f"{name}_{DTYPES[dtype]}"]  # an object of its own: `getattr` would share it
    call.argtypes, call.restype = takes, None
    return call


def has_tiles(library: CDLL) -> bool:
    """Whether the processor has a matrix unit, and the system lets this process use it."""
    return bool(library.uses_tiles())


def longest_prompt(library: CDLL, dtype: torch.dtype, sizes: Sizes) -> int:
    """The longest prompt that is read by native code, which is faster than PyTorch up to there."""
    if not torch_multiplies(dtype):
        return sys.maxsize
    if dtype != torch.bfloat16:
        return 0
    if has_tiles(library):
        return LONGEST_PROMPT if sizes.fits_tiles else 0
    return sys.maxsize if library.multiplies_bfloat16() else 0


@cache
def torch_multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch has fast products of many tokens in this format on this processor.

    For bfloat16 it has none on x86 without AVX-512: there they take 5 times as long as here.
    """
    if dtype != torch.bfloat16:
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def library() -> CDLL | None:
    """The native code; None, with a warning that says why, where it can't be built."""
    try:
        name = compiler()
        target, _ = supported(name, ["-march=native"], ["-mcpu=native"])
        return CDLL(str(build(name, target)))
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = next((line for line in lines if "error:" in line), lines[0])
        log.warning("decoding stays eager, which is slower: %s", reason)
        return None


def build_name() -> str:
    """Tells the native code of this version, compiler and processor from any other."""
    code = library()
    return "" if code is None else Path(code._name).stem
