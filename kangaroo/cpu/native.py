"""Decoder layers in native code on a CPU: calls the library built from `cpp/decode.cpp`.

A step of decoding takes the time of reading the weights once. The bits of a token's result do not
depend on what is computed beside it. The library is built at first use, for this processor.

Shapes: R rows, T tokens a row, D hidden size, O outputs.
"""

import ctypes
import logging
import platform
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from ctypes import CDLL, Array, byref, c_int64, c_void_p
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from kangaroo.cpu import structs
from kangaroo.cpu.blocks import IN_BYTES, Weight, kind_of, size_of
from kangaroo.cpu.compiling import build, compiler, supported
from kangaroo.cpu.huge_pages import move_to_huge_pages
from kangaroo.engine import backend
from kangaroo.engine.backend import Layers, LayerWeights, Sizes
from kangaroo.engine.cache import ForwardMeta, KVCache
from kangaroo.models.packed import PackedMatrix

log = logging.getLogger(__name__)

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MOST_TOKENS = 256  # in a pass
PROMPT_CHUNK = 128  # tokens of a prompt in a pass, so that intermediate results stay in the cache
WIDE_CHUNK = 256  # the same where tokens share more work: transposed rows, or a matrix unit
LONGEST_PROMPT = 2048  # tokens, with a matrix unit; PyTorch's attention is faster for longer ones
WIDEST_HEAD = 1024  # as in `attention.h`
CHOICES = 3  # as in `sampling.h`
MOST_CHOICES = 16  # as in `sampling.h`

# The weights that a layer's keys and values need.
KEY_WEIGHTS = "attention_norm", "k", "v", "k_bias", "v_bias", "k_norm"
MATRICES = "q", "k", "v", "o", "gate", "up", "down"


Addresses = tuple[Array[Any], Array[Any]]
_addresses: WeakKeyDictionary[KVCache, dict[int, Addresses]] = WeakKeyDictionary()


def pointer(tensor: Weight | None) -> int:
    """A tensor's address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def addresses(cache: KVCache, first: int = 0) -> Addresses:
    """The addresses of each layer's keys and values from slot `first` on, while the cache lives."""
    known = _addresses.setdefault(cache, {})
    if first not in known:
        pointers = ctypes.c_void_p * len(cache.keys)
        known[first] = (
            pointers(*(keys[first:].data_ptr() for keys in cache.keys)),
            pointers(*(values[first:].data_ptr() for values in cache.values)),
        )
    return known[first]


def sizes_struct(sizes: Sizes) -> structs.Sizes:
    """The sizes for native code, with torch's current number of threads."""
    return structs.Sizes(threads=torch.get_num_threads(), **vars(sizes))


class Stack:
    """`backend.Layers` that run in one call. Their weights have one dtype of `DTYPES` and are not
    copied, or they are `Blocks`, or, in native drafts alone, bytes (`int8.py`). Attention looks
    back `window` positions (`ForwardMeta.within`)."""

    def __init__(
        self, library: CDLL, layers: Sequence[LayerWeights[Weight]], sizes: Sizes, window: int = 0
    ):
        self.sizes = sizes
        self.window = window
        words = len(fields(LayerWeights)) + len(MATRICES) + 1
        self.per_layer = words * ctypes.sizeof(ctypes.c_int64)
        self.read(layers)
        self.keys_table = layer_table(layers, KEY_WEIGHTS)
        self.dtype = next(w.dtype for w in vars(layers[0]).values() if w is not None)
        self.call = function(library, "run_block", self.dtype)
        self.longest_prompt = sys.maxsize
        if self.is_plain:
            self.longest_prompt = longest_prompt(library, self.dtype, sizes)
        wide = self.dtype == torch.bfloat16 and (library.turns_rows() or library.uses_tiles())
        self.chunk = WIDE_CHUNK if wide else PROMPT_CHUNK

    def read(self, layers: Sequence[LayerWeights[Weight]]) -> None:
        self.layers = layers
        self.table = layer_table(layers)
        matrices = [vars(layer)[name] for layer in layers for name in MATRICES]
        self.is_plain = not any(map(kind_of, matrices))

    def prompt_chunk(self, length: int) -> int | None:
        return self.chunk if length <= self.longest_prompt else None

    def takes(self, x_RTD: Tensor, cache: KVCache | None, meta: ForwardMeta) -> bool:
        if cache is None:
            return False
        few = x_RTD.shape[0] * x_RTD.shape[1] <= MOST_TOKENS and not torch.is_grad_enabled()
        bias = meta.bias_R1TE
        rows = len(meta.slots_RT)
        if bias is None:  # from the first position on
            return few and self.longest_prompt > 0 and len(x_RTD) == rows == 1
        return few and len(bias) == rows == len(x_RTD) and bias.dtype == x_RTD.dtype

    def as_struct(
        self, cache: KVCache, layers: range, keys_alone: bool = False, first_slot: int = 0
    ) -> structs.Stack:
        """Some of the layers on their keys and values, valid while the cache exists. With
        `keys_alone` the layers only write these. Slots are counted from `first_slot` on."""
        table = self.keys_table if keys_alone else self.table
        weights = ctypes.addressof(table) + layers.start * self.per_layer
        offset = layers.start * ctypes.sizeof(ctypes.c_void_p)
        keys, values = (ctypes.addressof(array) + offset for array in addresses(cache, first_slot))
        return structs.Stack(
            layers=weights,
            count=len(layers),
            keys=keys,
            values=values,
            n_slots=cache.n_slots,
            window=self.window,
            plain=self.is_plain,
        )

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
        assert cache is not None
        rows, tokens, _ = x_RTD.shape
        x_RTD = x_RTD.clone(memory_format=torch.contiguous_format)
        bias_R1TE = meta.bias_R1TE
        if bias_R1TE is None:
            bias_R1TE = x_RTD.new_full((tokens, tokens), -torch.inf).triu_(1)
        held = [t.contiguous() for t in (bias_R1TE, *meta.rope, meta.slots_RT)]
        pairs = None if pairs is None else pairs.contiguous()
        self.call(
            byref(sizes_struct(self.sizes)),
            byref(self.as_struct(cache, layers, keys_alone)),
            *(rows, tokens, meta.extent, meta.rows.start),
            *map(pointer, (x_RTD, pairs, *held, final_norm)),
        )
        return x_RTD


def layer_table(
    layers: Sequence[LayerWeights[Weight]], names: Collection[str] | None = None
) -> Array[Any]:
    """The layers as `layers.h` reads them, with all weights or those of these names. As many first
    layers as fit stay in the last-level cache, since a draft reads these for each token."""
    entries = []
    size = 0
    for layer in layers:
        weights = vars(layer)
        assert all(w.is_contiguous() for w in weights.values() if isinstance(w, Tensor))
        size += sum(w.nbytes for w in weights.values() if w is not None)
        for name, weight in weights.items():
            entries.append(pointer(weight if names is None or name in names else None))
            entries += [kind_of(weight)] if name in MATRICES else []
        entries.append(int(size > staying_bytes()))
    return (ctypes.c_int64 * len(entries))(*entries)


def stack_of(layers: Layers | None) -> Stack:
    """The layers of a target, or a drafting layer, which run in native code."""
    assert isinstance(layers, Stack)
    return layers


class Head(backend.Head):
    """The probabilities of its choices take all logits."""

    def __init__(self, library: CDLL, weight_OD: Weight, sizes: Sizes):
        self.weight_OD = weight_OD
        self.sizes = sizes
        self.passing = weight_OD.nbytes > staying_bytes()
        self.rough = structs.Rough()
        self.library = library
        self.call = function(library, "read_out", weight_OD.dtype)

    def read(self, weight_OD: Tensor) -> None:
        self.weight_OD = weight_OD

    def takes(self, x_MD: Tensor) -> bool:
        return x_MD.shape[0] <= MOST_TOKENS and not torch.is_grad_enabled()

    def as_struct(self, norm: Tensor | None = None, ids_O: Tensor | None = None) -> structs.Head:
        """The head for native code, after a norm if one is given; `ids` are the rows' tokens."""
        return structs.Head(
            norm=pointer(norm),
            weight=pointer(self.weight_OD),
            kind=kind_of(self.weight_OD),
            outputs=len(self.weight_OD),
            ids=pointer(ids_O),
            passing=self.passing,
        )

    def __call__(self, x_MD: Tensor, norm: Tensor | None = None) -> Tensor:
        x_MD = x_MD.contiguous()
        logits_MO = x_MD.new_empty(len(x_MD), len(self.weight_OD), dtype=torch.float32)
        self.call(
            byref(sizes_struct(self.sizes)),
            byref(self.as_struct(norm)),
            *(pointer(x_MD), len(x_MD), pointer(logits_MO)),
        )
        return logits_MO

    def round(self, matrix: PackedMatrix | None = None) -> None:
        """Let choices read all rows in fewer bits, and in full only those of tokens that may win
        (`Rough` in `cpp/sampling.h`): in bytes, or those of a `matrix` of Q8_0's blocks in five
        bits. After this the weights must not change."""
        outputs, width = self.weight_OD.shape
        kind = IN_BYTES if matrix is None else int(Kind.Q5_1)
        size = outputs * width if matrix is None else size_of(self.library, kind, matrix.shape)
        self.few_bits = torch.empty(size, dtype=torch.int8)
        # of each row the scale of its bytes, and the limit of its error
        self.limits_2O = torch.empty(2, -(-outputs // 16) * 16)
        move_to_huge_pages([self.few_bits, self.limits_2O])
        self.rough = structs.Rough(
            weight=pointer(self.few_bits),
            kind=kind,
            scales=pointer(self.limits_2O[0]),
            errors=pointer(self.limits_2O[1]),
            passing=size > staying_bytes(),
        )
        if matrix is None:
            self._call("round_head")
        else:
            blocks_OB = matrix.blocks_OB
            call = self.library.round_blocks
            call.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_void_p]
            sizes = byref(sizes_struct(self.sizes))
            call(sizes, blocks_OB.data_ptr(), blocks_OB.shape[1], outputs, byref(self.rough))

    def likeliest(self, x_MD: Tensor, norm: Tensor) -> Tensor | None:
        if not self.rough.weight:
            return None
        x_MD = x_MD.contiguous()
        chosen_M = torch.empty(len(x_MD), dtype=torch.long)
        self._call("choose_likeliest", pointer(x_MD), len(x_MD), pointer(chosen_M), norm=norm)
        return chosen_M

    def _call(self, name: str, *arguments: int, norm: Tensor | None = None) -> None:
        call = function(self.library, name, self.weight_OD.dtype)
        sizes = sizes_struct(self.sizes)
        call(byref(sizes), byref(self.as_struct(norm)), byref(self.rough), *arguments)


class Fusing:
    """A `backend.Fusing`: joins shallow states and the deep ones before them for a fused adapter.
    Without a weight it is for native rounds alone, which put both side by side for EAGLE-3's
    layer."""

    def __init__(self, library: CDLL, norms: Sequence[Tensor], weight: Tensor | None, sizes: Sizes):
        self.norms = norms
        self.weight = weight
        self.sizes = sizes
        self.call = function(library, "fuse", norms[0].dtype)

    def as_struct(self) -> structs.Fusing:
        return structs.Fusing(*map(pointer, self.norms), weight=pointer(self.weight))

    def __call__(self, f_BND: Tensor, deep_BND: Tensor) -> Tensor:
        x_BND = f_BND.clone(memory_format=torch.contiguous_format)
        deep_BND = deep_BND.expand_as(f_BND).contiguous()
        self.call(
            byref(sizes_struct(self.sizes)),
            byref(self.as_struct()),
            *(pointer(x_BND), pointer(deep_BND), x_BND.shape[:2].numel()),
        )
        return x_BND


# The arguments of the functions of `decode.cpp`: pointers, integers, floats, and booleans.
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float, "b": ctypes.c_int}
ARGUMENTS = {
    "run_block": "ppiiiippppppp",
    "read_out": "pppip",
    "round_head": "ppp",
    "choose_likeliest": "ppppip",
    "fuse": "ppppi",
    "draft": "pppifp",
    "draft_block": "ppppifp",
    "draft_trees": "pppiifpipbb",
    "verify": "ppp",
    "find_outcomes": "p",
    "outcomes_back": "ppp",
}


def function(library: CDLL, name: str, dtype: torch.dtype) -> Callable[..., None]:
    """A function of the library for numbers of this format."""
    call: Any = library[f"{name}_{DTYPES[dtype]}"]  # a new object, which `getattr` would share
    call.argtypes = [TYPES[letter] for letter in ARGUMENTS[name]]
    call.restype = None
    return call


def longest_prompt(library: CDLL, dtype: torch.dtype, sizes: Sizes) -> int:
    """The longest prompt that native code reads faster than PyTorch."""
    if not torch_multiplies(dtype):
        return sys.maxsize
    if dtype != torch.bfloat16:
        return 0
    if library.uses_tiles():  # a matrix unit that the system lets this process use
        widths = sizes.hidden, sizes.feed_forward, sizes.heads * sizes.head_size, sizes.head_size
        return LONGEST_PROMPT if all(width % 32 == 0 for width in widths) else 0
    return sys.maxsize if library.multiplies_bfloat16() else 0


@cache
def torch_multiplies(dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies fast in this format here. On x86 it claims so of bfloat16 wherever
    there is AVX-512; without instructions for bfloat16 it takes five times as long as float32."""
    if dtype == torch.float32 or not torch.backends.mkldnn.is_available():
        return dtype == torch.float32
    if dtype == torch.bfloat16 and platform.machine() in ("x86_64", "AMD64"):
        return torch.cpu._is_avx512_bf16_supported()
    supported = f"_is_mkldnn_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_supported"
    return getattr(torch.ops.mkldnn, supported)()


@cache
def staying_bytes() -> int:
    """How many bytes of a model's layers, or of a head, stay in the last-level cache between
    passes: half of its size, or all if Linux does not tell it. Others are fetched past it."""
    sizes = [0]
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with suppress(OSError, ValueError):
            sizes.append(1024 * int(file.read_text().strip().removesuffix("K")))
    return max(sizes) // 2 or sys.maxsize


@cache
def library() -> CDLL | None:
    """The native library; None, with a warning, if it cannot be built."""
    try:
        name = compiler()
        target, _ = supported(name, ["-march=native"], ["-mcpu=native"])
        return CDLL(str(build(name, target)))
    except (OSError, subprocess.CalledProcessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        reason = next((line for line in lines if "error:" in line), lines[0])
        log.warning("decoding runs in PyTorch, which is slower, not in native code: %s", reason)
        return None
