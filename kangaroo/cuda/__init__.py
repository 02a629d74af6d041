"""Triton kernels on a CUDA device. `layers` needs the package triton, so it is imported late."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch

from kangaroo.cuda.graphs import Graphs
from kangaroo.cuda.launching import NO_PDL
from kangaroo.engine.backend import LayerWeights, Sizes
from kangaroo.engine.cache import ForwardMeta, KVCache

log = logging.getLogger(__name__)

MIN_CAPABILITY = 8, 0  # cards from here on multiply bfloat16 matrices
WIDEST_HEAD = 256
LARGEST_GROUP = 16  # query heads for each key head, which are columns of a product


def fix_precision() -> None:
    """Multiply float32 without TF32, and sum half precision in float32, which is not torch's own
    default: else bits depend on what other libraries have set in this process."""
    torch.set_float32_matmul_precision("highest")  # under torch's old names and its new ones
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False


def runs_layers(
    dtype: torch.dtype, sizes: Sizes, is_plain: bool, device: torch.device, graphs: Graphs | None
) -> bool:
    """Whether the kernels can run such layers here, and `graphs` record them; a warning says why
    not. A plain model uses SiLU, and has no hooks and no other weights than usual."""
    reason = reason_against(sizes, is_plain, device)
    if reason is None:
        try:
            try_out(dtype, sizes, device, graphs)
            return True
        except Exception as error:  # Triton's, its compilers' or the driver's
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = f"Triton cannot run here: {lines[0]}"
    log.warning("decoding goes on in transformers' modules, which is slower: %s", reason)
    return False


def try_out(dtype: torch.dtype, sizes: Sizes, device: torch.device, graphs: Graphs | None) -> None:
    """Run a layer and a small head, and record the layer. Errors: Triton's, and the driver's."""
    from kangaroo.cuda.layers import Head, Stack

    size = sizes.head_size
    hidden = sizes.hidden
    zeros = partial(torch.zeros, dtype=dtype, device=device)
    q = zeros(sizes.heads * size, hidden)
    key = zeros(sizes.kv_heads * size, hidden)
    norm = zeros(hidden)
    gate = zeros(sizes.feed_forward, hidden)
    down = gate.T.contiguous()
    layer = LayerWeights(
        norm, q, key, key, q.T.contiguous(), feed_forward_norm=norm, gate=gate, up=gate, down=down
    )
    slots_RT = torch.zeros(1, 1, dtype=torch.int64, device=device)
    rope = (zeros(1, 1, size), zeros(1, 1, size))
    meta = ForwardMeta(slots_RT, slots_RT, zeros(1, 1, 1, 1), 1, rows=slice(0, 1), rope=rope)
    cache = KVCache.empty(1, 1, sizes.kv_heads, head_size=size, dtype=dtype, devices=[device])
    with torch.no_grad():
        stack = Stack([layer], sizes)
        run = partial(stack, zeros(1, 1, hidden), cache, meta, range(1), final_norm=norm)
        x_RTD = run()
        if graphs is not None:
            record(graphs, run)
        stack.run_text(x_RTD, replace(meta, bias_R1TE=None), range(1))
        Head(q, sizes).choose(x_RTD)


def record(graphs: Graphs, work: Callable[[], object]) -> None:
    """Record work of kernels once. Where that fails, as old drivers may where one kernel begins
    before another has ended (programmatic edges), all kernels do without that from now on."""
    try:
        graphs.record(work)
    except RuntimeError as error:
        if os.environ.get(NO_PDL):
            raise
        os.environ[NO_PDL] = "1"
        graphs.record(work)
        reason = str(error).strip().splitlines()[0]
        log.warning("a kernel waits for the end of the one before, which is slower: %s", reason)


def reason_against(sizes: Sizes, is_plain: bool, device: torch.device) -> str | None:
    """The reason why the kernels cannot run such a model; None if they can."""
    size = sizes.head_size
    group = sizes.heads // sizes.kv_heads
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if size % 2 or size > WIDEST_HEAD:
        return f"heads have size {size}; the kernels take even ones up to {WIDEST_HEAD}"
    if group > LARGEST_GROUP:
        return f"{group} query heads share a key head; the kernels take up to {LARGEST_GROUP}"
    if not is_plain:
        return "the model has hooks, another activation than SiLU, or more weights than its kind"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
        return "the GPU's compute capability is below {}.{}".format(*MIN_CAPABILITY)
    return None
