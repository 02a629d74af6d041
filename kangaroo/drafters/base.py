"""The interface between the engine and its drafters, and what several drafters share.

Shapes: T tokens of a prefill chunk.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from torch import Tensor

from kangaroo.engine.batch import Batch
from kangaroo.engine.cache import ForwardMeta, Taps
from kangaroo.engine.tree import Draft, Nodes, Verdict
from kangaroo.heads import adapter_files
from kangaroo.heads.adapter import Adapter, AdapterHeadConfig
from kangaroo.heads.base import HeadConfig
from kangaroo.heads.draft_head import ROOM, DraftHead, TextHead
from kangaroo.heads.layer import Layer
from kangaroo.models.target import TargetModel
from kangaroo.utils.errors import AdapterMismatch
from kangaroo.utils.ranges import AUTO, AutoThreshold, CountOrZero, DraftSize, Ranged

State = TypeVar("State")
# The chance that a token of a lookup is right if those before it are; the budget knows the first's.
LOOKUP_CHANCE = 0.8


class Drafter(Protocol):
    """Proposes tokens, and never decides what is written. By default it has no state and no taps.

    Attributes:
        taps: the target's hidden states that it reads, each by the number of layers below it.
        max_nodes: the most nodes of a round without the root. As many slots are reserved for them,
            and for positions before the start of a text (`TargetModel.forward_meta`, `below`).
        rereads: how many cached prefix tokens `prefill` has to see again, if a prompt begins like
            the row's previous text or like one that `copy_prefix` copied.
        needs_costs: whether it asks the budget even if only one text is decoded.
        keeps_probs: whether its drafts have `probs_BNV` where the rule of sampling needs them.
    """

    max_nodes: int
    taps: tuple[int, ...] = ()
    rereads: int = 0
    needs_costs: bool = False
    keeps_probs: bool = False

    def begin(self, batch: Batch) -> None:
        """Prepare the state of each row for a new batch."""
        return

    def copy_prefix(self, source: int, row: int, count: int) -> None:
        """Copy another row's state of the first `count` tokens, with which the prompt that enters
        `row` begins. The target's keys and values are copied already."""
        return

    def prefill(self, batch: Batch, tokens_1T: Tensor, meta: ForwardMeta, taps: Taps) -> None:
        """Take a chunk of a row's prompt that is in the target's cache. Chunks come in order. The
        first generated token is pending, and in none of them."""
        return

    @abstractmethod
    def propose(self, batch: Batch) -> Draft:
        """A draft below each row's pending token."""

    def observe(self, batch: Batch, draft: Draft, verdict: Verdict, taps: Taps) -> None:
        """Take the verdict on the draft, which is committed already."""
        return


@dataclass
class DrafterConfig(Ranged, ABC):
    """The settings of a drafter."""

    name: str = "???"  # in results and on the command line

    @abstractmethod
    def build(self, lm: TargetModel) -> Drafter:
        """The drafter for this target."""

    @property
    def trained(self) -> str | None:
        """Folder or hub id of the trained weights; None for a method without training."""
        return None

    def settings(self) -> dict[str, Any]:
        """All that determines the drafts, so that results of different drafters are not mixed."""
        weights = {"weights": adapter_files.weights_hash(self.trained)} if self.trained else {}
        return asdict(self) | weights

    def made_by(self) -> dict[str, Any]:
        """The drafter's training: `epochs`, and `trained_positions`, the positions in the loss over
        all epochs; empty for a method without training."""
        return adapter_files.made_by(self.trained) if self.trained else {}


@dataclass
class ChainConfig(DrafterConfig):
    """The settings of a drafter of chains that may stop early.

    Args:
        steps: the most draft tokens of a chain (gamma, d or K in papers).
        threshold: stop drafting when the confidence, the top-1 probability, falls to this value
            (Kangaroo's eta); 0 never stops early. `auto` stops when another token would not pay, by
            its cost on this device and by how often such tokens were right in this text.
    """

    steps: DraftSize = 6
    threshold: AutoThreshold = AUTO


@dataclass
class TrainedConfig(DrafterConfig):
    """The settings of a drafter that is trained for its target."""

    adapter: str = "???"  # folder or hub id of the adapter

    @property
    def trained(self) -> str | None:
        return self.adapter


@dataclass
class EarlyExitConfig(ChainConfig, TrainedConfig):
    """The settings of a trained layer that drafts.

    Args:
        adapter: folder or hub id of the adapter. `untrained:N` stands for an untrained one at exit
            layer N, which takes the time of a trained one.
        exit_layer: refuse an adapter of another exit layer; null takes any.
        vocabulary: draft only from this many of the most frequent tokens, so that a draft step
            reads only their part of the head (FR-Spec, arXiv 2502.14856); 0 is all tokens. null
            takes what the adapter was saved with, which may be fewer if `text_vocabulary` is not 0.
        text_vocabulary: draft also from up to this many other tokens of the text itself; 0 is none.
            Adapters with a head of their own ignore it.
        int8: draft with weights rounded to eight bits, where native code decodes in bfloat16 (on a
            CPU); verification reads the model's own.
    """

    exit_layer: CountOrZero | None = None
    vocabulary: CountOrZero | None = None
    text_vocabulary: CountOrZero = ROOM
    int8: bool = True

    layer_type: ClassVar[type[Layer]] = Adapter
    layer_config: ClassVar[type[HeadConfig]] = AdapterHeadConfig  # of an untrained layer

    def load(self, lm: TargetModel) -> tuple[Any, DraftHead]:
        """The layer, of `layer_type`, and its head (the first one, if there are several). Errors:
        as `adapter_files.load`."""
        exit_layer = self._untrained()
        if exit_layer is None:
            config = adapter_files.read_config(self.adapter)
            if self.exit_layer not in (None, config.exit_layer):
                raise AdapterMismatch(
                    f"adapter '{self.adapter}' was trained for exit layer {config.exit_layer}, and "
                    f"drafter.exit_layer={self.exit_layer} was asked for. Leave it unset, or pass "
                    "drafter.adapter= one of that exit layer."
                )
            vocabulary = self.vocabulary
            if vocabulary is None and self.text_vocabulary:
                vocabulary = config.vocabulary_beside_texts
            layer, heads = adapter_files.load(self.adapter, lm, self.layer_type, vocabulary)
            if isinstance(heads[0], TextHead):
                heads[0].make_room(self.text_vocabulary)
        else:
            untrained = self.layer_config().build(lm, exit_layer, None).start_from(lm)
            assert isinstance(untrained, self.layer_type)
            layer = untrained.to(untrained.home(lm), lm.dtype).eval().requires_grad_(False)
            heads = layer.draft_heads(lm, None)
        layer.int8 = self.int8
        return layer, heads[0]

    def _untrained(self) -> int | None:
        """The exit layer of an untrained adapter; None for a trained one."""
        prefix, _, layer = self.adapter.partition(":")
        return int(layer) if prefix == "untrained" and layer.isdecimal() else None

    @property
    def trained(self) -> str | None:
        return self.adapter if self._untrained() is None else None


class RowStates(Generic[State]):
    """A state for the text in each row."""

    def __init__(self, make: Callable[[int, list[int]], State]):
        self._make = make
        self._rows = dict[int, tuple[list[int], State]]()

    def get(self, row: int, text: list[int]) -> State:
        """The row's state, a new one if another text has taken the row."""
        if row not in self._rows or self._rows[row][0] is not text:
            self._rows[row] = text, self._make(row, text)
        return self._rows[row][1]


class TreesFromText(Drafter):
    """Drafts trees on the host from the text alone."""

    @abstractmethod
    def tree_of(self, batch: Batch, row: int) -> Nodes:
        """The nodes below the pending token of an active row."""

    def propose(self, batch: Batch) -> Draft:
        return Draft.listed(batch.last(1), {row: self.tree_of(batch, row) for row in batch.active})


class FromText(TreesFromText):
    """Drafts chains on the host from the text alone."""

    @abstractmethod
    def continuation(self, row: int, text: list[int]) -> list[int]:
        """Tokens that may follow the row's committed text, `batch.texts[row]`; perhaps none."""

    def tree_of(self, batch: Batch, row: int) -> Nodes:
        min_chances = batch.budget.min_chain_chances(len(batch.active), self.max_nodes)
        too_costly = (n for n, chance in enumerate(min_chances) if chance >= LOOKUP_CHANCE**n)
        tokens = self.continuation(row, batch.texts[row])[: next(too_costly, self.max_nodes)]
        return tokens, range(len(tokens))
