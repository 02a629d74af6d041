"""The interface between models and what runs them: PyTorch, native code, or Triton and CUDA graphs.

Shapes: B rows of a batch, N tokens of a block, R rows of a block, T tokens of a row, M tokens of
all rows, D hidden size, O outputs, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol

import torch
from torch import Tensor
from typing_extensions import TypeVar

from kangaroo.engine.cache import ForwardMeta, KVCache, Tensors
from kangaroo.models.packed import PackedMatrix

Matrix = Tensor | PackedMatrix
W = TypeVar("W", default=Tensor)  # what a backend's matrices are
Chosen = tuple[Tensor, Tensor]  # the likeliest tokens and their probabilities
Key = tuple[Any, ...]  # names recorded work, with everything about it that is not in a tensor
# Joins shallow states and the deep ones before them to a fused adapter's input, all `[B, N, D]`.
Fusing = Callable[[Tensor, Tensor], Tensor]


@dataclass
class LayerWeights(Generic[W]):
    """The weights of one layer, in the order of `Layer` in `cpp/layers.h`; None if it has none."""

    attention_norm: Tensor | None = None
    q: W | None = None
    k: W | None = None
    v: W | None = None
    o: W | None = None
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    feed_forward_norm: Tensor | None = None
    gate: W | None = None
    up: W | None = None
    down: W | None = None


@dataclass
class Sizes:
    """The sizes of every layer of a model, the `eps` of its norms, and the `scaling` of scores."""

    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    feed_forward: int
    eps: float
    scaling: float


class Layers(Protocol):
    """A stretch of layers, of a target or a drafter."""

    def prompt_chunk(self, length: int) -> int | None:
        """How many tokens of a prompt of this length run in a pass; None leaves it to modules."""

    def takes(self, x_RTD: Tensor, cache: KVCache | None, meta: ForwardMeta) -> bool:
        """Whether the layers run such a block: a step of decoding or a chunk of a prompt, or,
        without a cache, whole texts in training. Modules run all others."""

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
        """The output of the last layer, after the norm if one is given. Keys and values are written
        to the block's slots; with `keys_alone` nothing else is computed. A single layer may read
        `pairs` (`heads.layer.Layer.pairs`)."""


class Head(Protocol):
    """A matrix from hidden states to logits, whose rows may be replaced by others."""

    def takes(self, x_MD: Tensor) -> bool:
        """Whether it takes these states: few, and none that are trained on."""

    def read(self, weight_OD: Tensor) -> None:
        """Read this weight from now on."""

    def __call__(self, x_MD: Tensor, norm: Tensor | None = None) -> Tensor:
        """Logits `[M, O]` in float32, after a norm if one is given."""

    def likeliest(self, x_MD: Tensor, norm: Tensor) -> Tensor | None:
        """The outputs `[M]` with the largest logits; None if that takes all logits."""

    def choose(
        self, x_RTD: Tensor, norm: Tensor | None = None, ids_O: Tensor | None = None
    ) -> Chosen | None:
        """The likeliest tokens, the first of equal ones, and their probabilities, both `[R, T]`;
        None if that takes all logits. `ids_O` are the tokens of the outputs; None is all tokens."""
        return None


class Backend:
    """What a target and its drafters run on. This one defines the results: transformers' modules
    and tensors, on any device. The others are in `kangaroo/cpu` and `kangaroo/cuda`.

    Attributes:
        name: part of the identity of what is measured.
        is_compiled: whether it decodes in code made for this machine.
        runs_layers: whether `layers`, `head` and `fusing` return something.
        reads_pairs: whether a layer's attention may read `heads.layer.Layer.pairs`.
        records: whether it records CUDA graphs, for which tensors should have few shapes.
        attends_by_position: whether tokens that see all positions up to their own need no mask.
        skips: whether `skip_unless` saves time.
    """

    name = "eager"
    is_compiled = runs_layers = reads_pairs = records = attends_by_position = skips = False

    def layers(self, weights: Sequence[LayerWeights[Matrix]], window: int = 0) -> Layers | None:
        """Layers of these weights, which look back `window` positions; None for modules."""
        return None

    def head(self, weight_OD: Matrix, rounds: bool = False) -> Head | None:
        """A head of this weight. With `rounds` it may keep a copy in fewer bits for `likeliest`;
        then the weight must not change."""
        return None

    def fusing(self, norms: Sequence[Tensor], weight: Tensor | None) -> Fusing | None:
        """What joins states by two norms `[D]` and, if one is given, a projection `[D, 2 D]`."""
        return None

    def multiplies_bytes(self, dtype: torch.dtype) -> bool:
        """Whether drafts can read weights in eight bits beside states of this format."""
        return False

    def machine(self, device: torch.device) -> list[str | int]:
        """The hardware and software that decide how long a pass takes."""
        is_gpu = device.type == "cuda"
        processor = torch.cuda.get_device_name(device) if is_gpu else torch.get_num_threads()
        return [processor, self.name, "torch " + torch.__version__]

    def records_prompts(self, tokens: int) -> bool:
        """Whether chunks of so many tokens of a prompt are recorded."""
        return False

    def skip_unless(self, needed: Tensor | None) -> None:
        """From now on layers and heads need not compute anything where no element of this is true;
        then they give no numbers, but tokens that exist. None ends that."""

    def width(self, tokens: int, most: int) -> int:
        """The width of a pass over `tokens`; if it is recorded, a power of two or `most`."""
        return tokens

    def replay(
        self,
        caches: Sequence[KVCache],
        key: Key,
        work: Callable[..., Any] | None,
        *inputs: Any,
        tokens: int | None = None,
        keep: bool = False,
        rehearsal: Tensors | None = None,
    ) -> Any:
        """`work(*inputs)`, or the inputs if there is no work; a backend that `records` records it
        once and then replays it (`cuda/graphs.py`).

        Args:
            caches: all caches that the work reads or writes.
            tokens: the number of tokens of the work; by default that of the first input.
            keep: let the results outlive the next call with this key.
            rehearsal: inputs for the recording, if running the work twice would do harm.
        """
        return inputs if work is None else work(*inputs)
