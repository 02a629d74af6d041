"""Decoder layers in native code, for a CPU: builds `decode.cpp` and calls it.

A step of decoding has few tokens, and its time is that of reading the weights once. PyTorch's
modules take several times as long: matrix products of one row do not stream, and between them the
threads wait. What a token gets depends neither on the tokens beside it nor on the batch, bit by
bit: `decode.cpp` says why. It needs a C++ compiler (g++ or clang++) and is built at first use, for
this very processor; without one, decoding stays eager.

Shapes: R rows, T tokens a row, D hidden size, N outputs, S slots, E occupied slots.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from kangaroo.cache import Block, KVCache
from kangaroo.folders import cache_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("decode.cpp")
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"]
SHARED = ["-fopenmp", "-shared", "-fPIC"]
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
MOST_TOKENS = 256  # more are a prompt's: arithmetic then takes the time, at which PyTorch is better
WIDEST_HEAD = 1024  # of `decode.cpp`


@dataclass
class LayerWeights:
    """The weights of one layer, in the order of `decode.cpp`'s `Layer`; None where it has none.

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


class Shape(ctypes.Structure):
    """`decode.cpp`'s `Shape`."""

    _fields_ = [
        *(
            (name, ctypes.c_int64)
            for name in """
                rows tokens hidden heads kv_heads head_size feed_forward extent n_slots first_row
                threads
            """.split()
        ),
        ("eps", ctypes.c_double),
        ("scaling", ctypes.c_double),
    ]


# what the two functions of `decode.cpp` take
RUN_LAYERS = [ctypes.POINTER(Shape), ctypes.c_void_p, ctypes.c_int64, *8 * [ctypes.c_void_p]]
READ_OUT = [*3 * [ctypes.c_int64], ctypes.c_double, ctypes.c_int64, *4 * [ctypes.c_void_p]]


def pointer(tensor: Tensor | None) -> int | None:
    """A tensor's address; None for none."""
    return None if tensor is None else tensor.data_ptr()


class Stack:
    """Layers that run in one call.

    Args:
        layers: weights of one dtype, `float32` or `bfloat16`, on the CPU; they are not copied.
    """

    def __init__(self, library: ctypes.CDLL, layers: Sequence[LayerWeights], sizes: Sizes):
        self.layers, self.sizes = layers, sizes
        weights = [getattr(w, part.name) for w in layers for part in fields(w)]
        assert all(w is None or w.is_contiguous() for w in weights)
        self.per_layer = len(weights) // len(layers) * ctypes.sizeof(ctypes.c_void_p)
        self.table = (ctypes.c_void_p * len(weights))(*map(pointer, weights))
        self.dtype = next(w.dtype for w in weights if w is not None)
        self.call = getattr(library, f"run_layers_{DTYPES[self.dtype]}")
        self.call.argtypes = RUN_LAYERS

    def takes(self, x_RTD: Tensor, block: Block) -> bool:
        """Whether these are few tokens, each with its own row of a mask of numbers: a step of
        decoding, or the end of a prompt. A text that is learnt has one mask for all rows, or a
        boolean one.
        """
        bias = block.bias_R1TE
        return (
            bias is not None
            and len(bias) == len(block.slots_RT) == len(x_RTD)
            and bias.dtype == x_RTD.dtype
            and x_RTD.shape[0] * x_RTD.shape[1] <= MOST_TOKENS
            and not torch.is_grad_enabled()
        )

    def __call__(
        self,
        x_RTD: Tensor,
        cache: KVCache,
        block: Block,
        layers: range,
        final_norm: Tensor | None = None,
    ) -> Tensor:
        """The output of the last layer, normed where a norm is given.

        Keys and values are written at the block's slots.
        """
        assert block.bias_R1TE is not None
        (rows, tokens, _), sizes = x_RTD.shape, self.sizes
        of_layer = sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_size, sizes.feed_forward
        of_cache = block.extent, cache.n_slots, block.rows.start
        threads = torch.get_num_threads()
        shape = Shape(rows, tokens, *of_layer, *of_cache, threads, sizes.eps, sizes.scaling)
        x_RTD = x_RTD.clone(memory_format=torch.contiguous_format)
        held = [t.contiguous() for t in (block.bias_R1TE, *block.rope, block.slots_RT)]
        keys, values = zip(*cache.addresses[layers.start : layers.stop], strict=True)
        addresses = ctypes.c_void_p * len(layers)
        self.call(
            ctypes.byref(shape),
            ctypes.byref(self.table, layers.start * self.per_layer),
            len(layers),
            addresses(*keys),
            addresses(*values),
            *map(pointer, (x_RTD, *held, final_norm)),
        )
        return x_RTD


class Head:
    """A matrix from hidden states to logits."""

    def __init__(self, library: ctypes.CDLL, weight_ND: Tensor):
        self.weight_ND = weight_ND
        self.call = getattr(library, f"read_out_{DTYPES[weight_ND.dtype]}")
        self.call.argtypes = READ_OUT

    def takes(self, x_MD: Tensor) -> bool:
        """Whether these are few tokens, and no gradients are wanted."""
        return x_MD.shape[0] <= MOST_TOKENS and not torch.is_grad_enabled()

    def __call__(self, x_MD: Tensor, norm: Tensor | None = None, eps: float = 0.0) -> Tensor:
        """Logits `[M, N]` in float32, of the normed states where a norm is given."""
        x_MD = x_MD.contiguous()
        outputs, hidden = self.weight_ND.shape
        logits_MN = x_MD.new_empty(len(x_MD), outputs, dtype=torch.float32)
        pointers = map(pointer, (x_MD, norm, self.weight_ND, logits_MN))
        self.call(len(x_MD), hidden, outputs, eps, torch.get_num_threads(), *pointers)
        return logits_MN


@cache
def library() -> ctypes.CDLL | None:
    """The native code; None, with a warning that says why, where it can't be built."""
    try:
        return ctypes.CDLL(str(build(compiler(), ["-march=native"])))
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        log.warning("decoding stays eager, which is slower: %s", said.strip().splitlines()[0])
        return None


def compiler() -> str:
    """Errors: `OSError` where there is none."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        raise OSError("there is no C++ compiler; install g++, or name one in CXX")
    return found


def build(compiler: str, target: list[str]) -> Path:
    """Compile `decode.cpp`, once for each compiler, processor and version of the source."""
    predefined = subprocess.run(
        [compiler, *target, "-dM", "-E", "-x", "c++", os.devnull],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    flags = " ".join(FLAGS + target)
    key = hashlib.sha256((SOURCE.read_text() + flags + predefined).encode()).hexdigest()[:16]
    file = cache_folder() / "native" / f"decode-{key}.so"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")  # renamed when whole: others may build too
        command = [compiler, *FLAGS, *target, *SHARED, str(SOURCE), "-o", str(partial)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(partial, file)
    return file
